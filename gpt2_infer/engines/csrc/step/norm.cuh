// LayerNorm. Each block that multiplies normalized rows computes them all: a kernel that did it for the
// others would be one more to wait for.

#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

// Sums values in pairs, which takes less time than one after the other.
template <int kCount>
__device__ double sum_of(const double* values) {
  if constexpr (kCount == 1)
    return values[0];
  else
    return sum_of<kCount / 2>(values) + sum_of<kCount - kCount / 2>(values + kCount / 2);
}

// LayerNorm of x (batch, kEmbd) in one block; a thread has elements threadIdx.x + i * kThreads.
template <int kWarps>
struct Norm {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kEach = ceil_div(kEmbd, kThreads);
  static constexpr int kMoments = 2 * kBatch;  // each row's sum, then each row's sum of squares

  struct Shared {
    alignas(16) double moments[kWarps][kMoments];
  };

  float weight[kEach], bias[kEach];

  // Signed, so that the compiler may add i * kThreads to an address
  static __device__ int k_of(int i) { return static_cast<int>(threadIdx.x) + i * kThreads; }
  static __device__ bool has(int i) {
    return kEmbd % kThreads == 0 || i < kEach - 1 || k_of(i) < kEmbd;
  }

  __device__ Norm(const float* all_weights, const float* all_biases) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (has(i)) weight[i] = all_weights[k_of(i)], bias[i] = all_biases[k_of(i)];
  }

  // load(row, k) returns x[row][k]; store(k, rows) receives the normalized x[...][k].
  template <typename Load, typename Store>
  __device__ void apply(Load load, float epsilon, Shared& shared, Store store) const {
    float v[kEach][kBatch];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r) v[i][r] = has(i) ? load(r, k_of(i)) : 0.0f;
    }
    // In float64 the variance can be E[x^2] - E[x]^2, so the threads wait only once.
    double moments[kMoments] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        moments[r] += v[i][r];
        moments[kBatch + r] += double{v[i][r]} * v[i][r];
      }
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr int kSame = 32 / kMoments;  // lanes with the same moment
    double moment[1];
    fold<1, 16>(moments, moment);
    if (lane % kSame == 0) shared.moments[warp][lane / kSame] = moment[0];
    __syncthreads();
    // Every lane adds up a row's moments of all warps.
    const auto moment_of = [&](int m) {
      double of_warp[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) of_warp[w] = shared.moments[w][m];
      return sum_of<kWarps>(of_warp) * (1.0 / kEmbd);
    };
    const double mean = moment_of(lane % kBatch), square = moment_of(lane % kBatch + kBatch);
    // Rounded in one way only, whatever the compiler makes of it.
    const auto variance = static_cast<float>(fma(-mean, mean, square));
    const float row_mean = mean, row_scale = ptx::fast_rsqrt(variance + epsilon);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const float shift = kBatch == 1 ? row_mean : __shfl_sync(kWarp, row_mean, r);
      const float scale = kBatch == 1 ? row_scale : __shfl_sync(kWarp, row_scale, r);
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (has(i)) v[i][r] = (v[i][r] - shift) * scale * weight[i] + bias[i];
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (has(i)) store(k_of(i), v[i]);
    __syncthreads();
  }
};

}  // namespace attention::ATTENTION_VERSION
