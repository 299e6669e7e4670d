// Prints what a version launches for each head_dim in the arguments, and runs nothing: the resource
// table's source of block sizes and dynamic shared memory. Built by g++ with the emulator's headers
// and linked with its runtime.cpp. ATTENTION_SOURCE is the version file, in quotes.
//
// A line per launch: head_dim, threads per block, dynamic shared memory in bytes, the kernel's
// mangled name, its name in words.

#define launch_kernel emulated_launch_kernel
#include "common.cuh"
#undef launch_kernel

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace attention {

inline int recorded_head_dim;

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3, dim3 block, size_t smem_bytes,
                          cudaStream_t, Arguments...) {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(kernel), &info);
  const char* const name = info.dli_sname != nullptr ? info.dli_sname : "?";
  char* const words = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  std::printf("%d\t%u\t%zu\t%s\t%s\n", recorded_head_dim, block.x * block.y * block.z, smem_bytes,
              name, words != nullptr ? words : name);
  std::free(words);
  return cudaSuccess;
}

}  // namespace attention

#include ATTENTION_SOURCE

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    attention::VersionParams params{};
    params.batch = params.num_heads = 1;
#ifdef ATTENTION_DECODE
    params.max_seqlen = 1024;
#else
    params.seqlen = 1024;
    params.is_causal = true;
#endif
    params.head_dim = attention::recorded_head_dim = std::atoi(arguments[i]);
    const int64_t row = params.head_dim;
    params.q_strides = params.k_strides = params.v_strides =
        params.o_strides = {1024 * row, row, row};
    attention::ATTENTION_VERSION::launch(params, nullptr);
  }
}
