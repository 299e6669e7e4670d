// v06 - a kernel with many races
//
// Change: seqlen chooses the race between the two accesses in the lines that end with its number.
// Why:    a negative control: the emulator must name both.
// Cost:   none.
// Tile:   none, block 64
// Layout: contiguous
// Flags:  (none)
// Expect: an error for every race; 1 has none.

#include <cuda_fp16.h>
#include <cuda_pipeline.h>

#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

struct Pair {
  float x, y;
};

__device__ Pair pair_of(float x) { return {x, x}; }
__device__ float sum_of(Pair pair) { return pair.x + pair.y; }

__global__ void races(float* o, int race) {
  ATTENTION_DYNAMIC_SHARED(float, smem);
  __shared__ __half s_halfs[64];
  __shared__ int s_count, s_flag;
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int neighbour = thread ^ 1;
  float x = 1.0f;

  // No race: ordered by barriers, within half a warp, by atomics, by waiting for a copy,
  // by a flag that one lane of a warp waits for.
  smem[thread] = 1.0f;
  s_halfs[thread] = __float2half(1.0f);
  if (thread == 0) s_count = s_flag = 0;
  __syncthreads();
  atomicAdd(&s_count, 1);
  x *= smem[neighbour] * smem[0];
  __syncwarp(lane < 16 ? 0x0000ffff : 0xffff0000);
  smem[thread + 64] = smem[thread] + __half2float(s_halfs[thread]);
  __syncthreads();
  if (thread < 64) __pipeline_memcpy_async(smem + thread, o + thread % 32, 4);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncwarp();
  x += smem[neighbour];
  __syncthreads();
  if (thread >= 32) smem[thread] = 1.0f;
  __syncwarp();
  if (thread == 32) {
    __threadfence_block();
    atomicExch(&s_flag, 1);
  }
  if (thread == 0) {
    while (atomicAdd(&s_flag, 0) == 0) {
    }
    __threadfence_block();
  }
  __syncwarp();
  if (thread < 32) x += smem[thread + 32];
  __syncthreads();

  if (race == 2) x += smem[neighbour];  // 2
  x = __shfl_sync(0xffffffff, x, lane);
  if (race == 2) smem[thread] = 1.0f;  // 2

  if (race == 3) smem[thread] = 1.0f;  // 3
  __ballot_sync(0xffffffff, lane);
  if (race == 3) x += smem[neighbour];  // 3

  if (race == 4) smem[thread] = 1.0f;     // 4
  if (race == 4) smem[neighbour] = 1.0f;  // 4

  if (race == 5) s_halfs[thread] = __float2half(1.0f);  // 5
  __syncwarp();
  if (race == 5) x += __half2float(s_halfs[thread ^ 32]);  // 5

  if (race == 6) smem[thread] = 1.0f;  // 6
  __syncwarp(lane < 16 ? 0x0000ffff : 0xffff0000);
  if (race == 6) x += smem[thread ^ 16];  // 6

  if (race == 7 && thread == 0) atomicAdd(&s_count, 1);  // 7
  if (race == 7 && thread == 1) s_count = 1;             // 7

  if (race == 8) __pipeline_memcpy_async(smem + thread, o + lane, 4);
  __pipeline_commit();
  __syncwarp();
  if (race == 8) x += smem[neighbour];  // 8
  __pipeline_wait_prior(0);             // 8

  if (race == 9) smem[0] = 1.0f;  // 9

  Pair* const pairs = reinterpret_cast<Pair*>(smem);
  if (race == 10) pairs[thread] = pair_of(x);     // 10
  if (race == 10) x += sum_of(pairs[neighbour]);  // 10
  __syncthreads();
  if (thread < 32) o[thread] = x;
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& params, cudaStream_t stream) {
  return launch_kernel(races, 1, 64, 128 * sizeof(float), stream, static_cast<float*>(params.o),
                       params.seqlen);
}

}  // namespace attention::ATTENTION_VERSION
