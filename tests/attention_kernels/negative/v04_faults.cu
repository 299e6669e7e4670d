// v04 - a kernel with many faults
//
// Change: seqlen chooses the fault, which is in the line that ends with its number.
// Why:    a negative control: the emulator must stop each fault and name block, thread and line.
// Cost:   none.
// Tile:   none, block 64
// Layout: contiguous
// Flags:  (none)
// Expect: an error, a different result or a printed line for every fault; 1 has none.

#include <cassert>
#include <cstdlib>

#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

__device__ void store(float* to, int i) { to[i] = 1.0f; }

__global__ void faults(float* o, int fault) {
  ATTENTION_DYNAMIC_SHARED(float, smem);
  __shared__ float s_fixed[64];
  __shared__ float s_next[64];
  smem[threadIdx.x] = 1.0f;
  s_fixed[threadIdx.x] = s_next[threadIdx.x] = 0.0f;
  if (fault == 20 && threadIdx.x >= 32) return;
  __syncthreads();
  while (fault == 2) s_next[0] += 1.0f;                                     // 2
  while (fault == 3) __syncthreads();                                       // 3
  if (fault == 4) smem[100000] = 1.0f;                                      // 4
  if (fault == 5) smem[-100000] = 1.0f;                                     // 5
  if (fault == 6) *reinterpret_cast<float*>(fault * sizeof(float)) = 1.0f;  // 6
  if (fault == 7 && threadIdx.x == 0) __syncthreads();                      // 7
  if (fault == 8 && threadIdx.x == 9) s_fixed[threadIdx.x + 55] = 1.0f;     // 8
  if (fault == 9 && threadIdx.x == 9) *(s_fixed + 8 * threadIdx.x) = 1.0f;  // 9
  if (fault == 10) reinterpret_cast<float2*>(smem + 1)[0].x = 1.0f;         // 10
  if (fault == 11) smem[0] = reinterpret_cast<float4*>(o + 2)[0].y;         // 11
  if (fault == 12 && threadIdx.x == 40) smem[64] = 1.0f;                    // 12
  if (fault == 13) assert(threadIdx.x < 32);                                // 13
  if (fault == 14) __trap();                                                // 14
  if (fault == 15) std::exit(3);                                            // 15
  if (fault == 16) abort();                                                 // 16
  if (fault == 17) store(s_fixed, 64 + threadIdx.x);
  if (fault == 21) ptx::store_to_block(smem, 2, 1.0f);  // 21
  if (fault == 22) ptx::store_to_block(o, 0, 1.0f);     // 22
  if (fault == 23 && blockIdx.x == 1) __trap();         // 23
  if (fault > 20) ptx::wait_for_previous(), ptx::cluster_arrive(), ptx::cluster_wait();
  if (fault == 24 && threadIdx.x == 33) printf("%d of %s", 7, "8");  // 24
  // Subnormal numbers, as operands and as results.
  if (fault == 25)
    smem[threadIdx.x] = threadIdx.x % 2 ? blockDim.x * 1e-40f : 1e-30f / (blockDim.x * 1e8f);
  if (fault == 26) ptx::cluster_arrive(), ptx::cluster_arrive();  // 26
  if (fault == 27) ptx::cluster_wait();                           // 27
  // A race: blocks start in any order.
  if (fault == 18 && blockIdx.x % 2 == 1) smem[threadIdx.x] = o[32 * (blockIdx.x - 1)];
  __syncthreads();
  if (threadIdx.x < 32) o[blockIdx.x * 32 + threadIdx.x] = smem[threadIdx.x];
}

int64_t scratch_floats(const Params&) {
  int multiprocessors = 0;
  (void)cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  return 64 / multiprocessors;
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.seqlen == 19) std::exit(3);
  const auto o = static_cast<float*>(params.o);
  if (params.seqlen > 20) {
    const int blocks = 2 * ceil_div(params.batch * params.seqlen, 2);
    return launch_early(faults, blocks, 2, 64, 64 * sizeof(float), stream, o, params.seqlen);
  }
  return launch_kernel(faults, params.batch * params.seqlen, 64, 64 * sizeof(float), stream, o,
                       params.seqlen);
}

}  // namespace attention::ATTENTION_VERSION
