// What the chain does if STEP_PORTABLE, for sm_80 and later and for weights that do not fit in shared
// memory: each thread copies the weights that it multiplies, through a ring if necessary, kProj joins
// attention's splits, and kernels start when the previous one has ended. The sums have the same order.

#pragma once

#include <cuda_pipeline.h>  // on the CPU, the emulator's

#include "attention.cuh"
#include "norm.cuh"
#include "products.cuh"
#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

// A block's weights in shared memory, without bulk copies: each thread copies what it multiplies, so no
// barrier is needed. If the weights do not fit, it is a ring of kStages of P::kSteps steps.
template <Kind kKind>
struct ThreadWeights {
  using P = Product<kKind>;
  static constexpr size_t kStageBytes = sizeof(uint4) * P::kPieces * P::kThreads;
  static constexpr size_t kRoom =
      kSmemBytes - kXBytes<kKind> - P::kWarps * sizeof(typename P::Sums) -
      (kHasNorm<kKind> ? sizeof(typename Norm<P::kWarps>::Shared) : 0) - 128;
  static constexpr bool kIsRing = P::kSteps * kStageBytes > kRoom;
  // __pipeline_wait_prior() knows at most 8 groups.
  static constexpr int kStages = kIsRing ? min_of(9, kRoom / kStageBytes) : P::kSteps;
  static constexpr size_t kBytes = kStages * kStageBytes;
  static_assert(kStages >= 2 || !kIsRing, "a block has no room for two stages");
  static_assert(P::kSteps * kStageBytes >= P::kBytes);
  struct Shared {};

  uint4* const s_weights;  // (kStages, P::kPieces, P::kThreads)
  const uint4* const packed;

  __device__ ThreadWeights(uint4* to, const Element* matrix, Shared&)
      : s_weights(to),
        packed(reinterpret_cast<const uint4*>(matrix + int64_t{blockIdx.x} * P::K * P::kColumns)) {
#pragma unroll
    for (int step = 0; step < kStages; ++step) {
      copy(step);
      if (kIsRing || step == kStages - 1) __pipeline_commit();
    }
  }
  __device__ uint4* slot(int step, int i) const {
    return s_weights + (step % kStages * P::kPieces + i) * P::kThreads + threadIdx.x;
  }
  __device__ void copy(int step) {
    if (step >= P::kSteps || !P::has(step)) return;
#pragma unroll
    for (int i = 0; i < P::kPieces; ++i)
      __pipeline_memcpy_async(slot(step, i), P::piece(packed, step, i), 16);
  }
  __device__ void await(int step) {
    if (step == 0 || kIsRing) __pipeline_wait_prior(kIsRing ? kStages - 1 : 0);
  }
  __device__ uint4 at(int step, int i) const { return *slot(step, i); }
  // Copies a later step to where this one was.
  __device__ void replace(int step) {
    if (!kIsRing) return;
    copy(step + kStages);
    __pipeline_commit();
  }
};

// Joins the splits of O in order, as Join does: four columns from n on of a row.
__device__ inline float4 join_splits(const Splits& splits, int row, int n, int newest) {
  constexpr int kAtOnce = 8;  // loads in flight
  const int count = newest / kSplit + 1;
  const float* const maxima = splits.row_max[row][n / kHeadDim];
  const float* const row_sums = splits.row_sum[row][n / kHeadDim];
  float row_max = -FLT_MAX, row_sum = 0.0f;
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = 0; first < count; first += kAtOnce) {
#pragma unroll
    for (int i = first; i < first + kAtOnce; ++i)
      if (i < count) row_max = fmaxf(row_max, maxima[i]);
  }
  for (int first = 0; first < count; first += kAtOnce) {
    float scales[kAtOnce], sums[kAtOnce];
    float4 parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= count) continue;
      scales[i] = ptx::fast_exp(maxima[first + i] - row_max);
      sums[i] = row_sums[first + i];
      parts[i] = *reinterpret_cast<const float4*>(&splits.o[row][first + i][n]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= count) continue;
      row_sum += scales[i] * sums[i];
      o.x += scales[i] * parts[i].x, o.y += scales[i] * parts[i].y;
      o.z += scales[i] * parts[i].z, o.w += scales[i] * parts[i].w;
    }
  }
  return make_float4(o.x / row_sum, o.y / row_sum, o.z / row_sum, o.w / row_sum);
}

}  // namespace attention::ATTENTION_VERSION
