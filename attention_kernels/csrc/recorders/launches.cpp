// Prints a version's launches for each head_dim in the arguments, without running them. The
// resource table takes block sizes and dynamic shared memory from here. Built by g++ with the
// emulator's headers, in front of the version file (-include), and linked with its runtime.cpp.
//
// Prints a line per launch: head_dim, threads per block, dynamic shared memory in bytes, the
// kernel's mangled and demangled names, grid and block by axis, and the bytes of its parameters as
// nvcc lays them out. An argument --case=batch,seqlen,heads,causal sets the shape for the arguments
// that follow.

#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "emulator/types.h"
#include "recorders/channel.h"

namespace attention {

inline int recorded_head_dim;

template <typename Parameter>
void append(std::vector<unsigned char>& bytes, const Parameter& parameter) {
  bytes.resize((bytes.size() + alignof(Parameter) - 1) / alignof(Parameter) * alignof(Parameter));
  const auto* const first = reinterpret_cast<const unsigned char*>(&parameter);
  bytes.insert(bytes.end(), first, first + sizeof(Parameter));
}

template <typename... Parameters>
cudaError_t record_launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t smem_bytes,
                          Parameters... parameters) {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(kernel), &info);
  const char* const name = info.dli_sname != nullptr ? info.dli_sname : "?";
  char* const words = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  std::fprintf(channel, "%d\t%u\t%zu\t%s\t%s\t%u,%u,%u\t%u,%u,%u\t", recorded_head_dim,
               block.x * block.y * block.z, smem_bytes, name, words != nullptr ? words : name,
               grid.x, grid.y, grid.z, block.x, block.y, block.z);
  std::vector<unsigned char> bytes;
  (append(bytes, parameters), ...);
  for (const unsigned char byte : bytes) std::fprintf(channel, "%02x", byte);
  std::fprintf(channel, "\n");
  std::free(words);
  return cudaSuccess;
}

}  // namespace attention

#define ATTENTION_RECORDS_LAUNCHES
#include "common.cuh"

int main(int count, char** arguments) {
  int batch = 1, seqlen = 1024, num_heads = 1, is_causal = 1;
  for (int i = 1; i < count; ++i) {
    if (std::sscanf(arguments[i], "--case=%d,%d,%d,%d", &batch, &seqlen, &num_heads, &is_causal) >
        0)
      continue;
    attention::VersionParams params{};
    // These addresses tell the tensors apart. Host code may set and copy what is there.
    const auto tensor = [](uintptr_t number) {
      void* const memory = reinterpret_cast<void*>(number << 40);
      mmap(memory, size_t{1} << 40, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
      return memory;
    };
    params.q = tensor(1);
    params.o = tensor(4);
    params.scratch = static_cast<float*>(tensor(5));
    params.batch = batch;
    params.num_heads = num_heads;
    params.head_dim = attention::recorded_head_dim = std::atoi(arguments[i]);
    params.softmax_scale = 1 / std::sqrt(double(params.head_dim));
    const int64_t head = params.head_dim, row = num_heads * head;
#ifdef ATTENTION_DECODE
    params.k_cache = tensor(2);
    params.v_cache = tensor(3);
    params.seqlens = static_cast<int*>(tensor(6));
    params.max_seqlen = seqlen;
    params.q_strides = params.o_strides = {row, row, head};
    params.k_strides = params.v_strides = {seqlen * row, head, seqlen * head};  // as a model's
#else
    params.k = tensor(2);
    params.v = tensor(3);
    params.seqlen = seqlen;
    params.is_causal = is_causal != 0;
    params.q_strides = params.k_strides = params.v_strides =
        params.o_strides = {seqlen * row, row, head};
#endif
    try {
      attention::ATTENTION_VERSION::launch(params, nullptr);
    } catch (const std::exception& refusal) {
      std::fprintf(stderr, "%s\n", refusal.what());
      return 1;
    }
  }
}
