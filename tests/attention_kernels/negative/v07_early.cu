// v07 - three consecutive kernels that start early
//
// Change: seqlen chooses the fault; 1 is correct.
// Why:    a negative control: on a GPU they may overlap, and each passes if they do not.
// Cost:   none.
// Tile:   none, block 32
// Layout: contiguous
// Flags:  (none)
// Expect: an error or a different result for every fault.

#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

__global__ void first(float* o) { o[threadIdx.x] = 1.0f; }

// 2: no thread waits, a fault. 3: only block 1 does not wait, which is correct.
__global__ void second(float* o, int fault) {
  if (fault == 2 || (fault == 3 && blockIdx.x == 1)) return;
  ptx::wait_for_previous();
}

// 4: it reads the first kernel's output before it waits.
__global__ void third(float* o, int fault) {
  if (fault != 4) ptx::wait_for_previous();
  const float x = o[threadIdx.x];
  ptx::wait_for_previous();
  o[threadIdx.x] = x + 1.0f;
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& params, cudaStream_t stream) {
  const auto o = static_cast<float*>(params.o);
  cudaError_t error = launch_kernel(first, 1, 32, 0, stream, o);
  if (error == cudaSuccess) error = launch_early(second, 2, 1, 32, 0, stream, o, params.seqlen);
  if (error == cudaSuccess) error = launch_early(third, 1, 1, 32, 0, stream, o, params.seqlen);
  return error;
}

}  // namespace attention::ATTENTION_VERSION
