// Runs operations.cu in the CPU emulator, compiled by g++, and prints what each thread stores: the
// results that test_execute.py expects of its machine code.

#include <cstdio>
#include <cstdlib>

#include "common.cuh"
#include "emulator/inline_ptx.h"  // __byte_perm() and others
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
