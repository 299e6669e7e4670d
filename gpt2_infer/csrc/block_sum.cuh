// The sum of a value over a warp or a block, in a fixed order.

#pragma once

#include "common.cuh"

namespace attention {
namespace {

constexpr unsigned kWarp = 0xffffffff;

// Returns the sum to every lane.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value += __shfl_xor_sync(kWarp, value, width);
  return value;
}

// Returns the sum to every thread. The block is whole warps; `warps` has a float of shared memory
// for each and serves one call.
__device__ inline float block_sum(float value, float* warps) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < blockDim.x / 32; ++i) sum += warps[i];
  return sum;
}

}  // namespace
}  // namespace attention
