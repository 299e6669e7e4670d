// Runs operations.cu in the CPU emulator, compiled by g++, and prints what each thread stores: the
// results that test_execute.py expects of its machine code.

#include <cstdio>
#include <cstdlib>

#include "common.cuh"

// The intrinsics that kernels of this repository do not use.
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned long long>(a) * b >> 32;
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned long long pair(unsigned low, unsigned high) {
  return static_cast<unsigned long long>(high) << 32 | low;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return pair(low, high) << (by & 31) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return pair(low, high) >> (by & 31);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (pair(a, b) >> (select >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

#include "operations.cu"

// common.cuh asks for what each version has.
namespace attention::ATTENTION_VERSION {
int64_t scratch_floats(const Params&) { return 0; }
cudaError_t launch(const Params&, cudaStream_t) { return cudaSuccess; }
}  // namespace attention::ATTENTION_VERSION

int main(int, char** words) {
  static unsigned long long out[64 * 66];
  const unsigned long long key = std::strtoull(words[1], nullptr, 10);
  attention::launch_kernel(kernel, dim3(1), dim3(64), 0, nullptr, out, key,
                           static_cast<unsigned>(std::atoi(words[2])));
  for (const auto word : out) std::printf("%llu\n", word);
}
