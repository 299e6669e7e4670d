// The sums of one value or more over a warp or a block, in a fixed order.

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

// How many of V values each lane has after fold().
__host__ __device__ constexpr int folded(int last, int width, int V) {
  return width < last ? V : V * last < 2 * width ? 1 : V * last / width / 2;
}

// Sums V values (a power of two) over the lanes that differ in the bits from kWidth down to kLast.
// Each lane returns its share of the sums, or one sum if there are more lanes than values: sum i is
// in the lanes whose highest of those bits are those of i.
template <int kLast, int kWidth, typename T, int V>
__device__ void fold(const T (&a)[V], T (&sums)[folded(kLast, kWidth, V)]) {
  if constexpr (kWidth < kLast) {
#pragma unroll
    for (int i = 0; i < V; ++i) sums[i] = a[i];
  } else if constexpr (V == 1) {
    const T sum[1] = {a[0] + __shfl_xor_sync(kWarp, a[0], kWidth)};
    fold<kLast, kWidth / 2>(sum, sums);
  } else {
    const bool upper = threadIdx.x & kWidth;
    T half[V / 2];
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      const T sent = upper ? a[i] : a[i + V / 2];
      half[i] = (upper ? a[i + V / 2] : a[i]) + __shfl_xor_sync(kWarp, sent, kWidth);
    }
    fold<kLast, kWidth / 2>(half, sums);
  }
}

// Returns the sum to every thread. The block is whole warps; `warps` has a float of shared memory
// for each and serves one call.
__device__ inline float block_sum(float value, float* warps) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < blockDim.x / 32; ++i) sum += warps[i];
  return sum;
}

}  // namespace
}  // namespace attention
