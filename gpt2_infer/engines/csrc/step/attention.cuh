// Attention: that of the slot, and how the results of warps and of splits are joined.

#pragma once

#include <cfloat>

#include "params.cuh"
#include "ptx.cuh"
#ifndef ATTENTION_SLOT  // no other slot.cuh's file was included first: see StepShape in fused.py
#include "slot/v03_early_loads.cuh"
#endif

namespace attention::ATTENTION_VERSION {

using slot::kSplit;

using Attention = slot::Attention<kHeadDim>;
using Partial = slot::Partial<kHeadDim>;
constexpr int kPartials = Attention::kPartials;
struct AttentionShared : Attention::Shared {
  Partial partials[kPartials];
};
static_assert(sizeof(AttentionShared) <= STEP_SLOT_BYTES,
              "the field Shared of attention says less");
constexpr int kAttendThreads = slot::kThreads;

// Joins partials in order: kColumns columns of O per thread, from `column` on.
template <int kColumns>
struct Join {
  float row_max = -FLT_MAX, row_sum = 0.0f, o[kColumns] = {};

  __device__ Join(const Partial* partials, int count, int column) {
#pragma unroll 8
    for (int i = 0; i < count; ++i) row_max = fmaxf(row_max, partials[i].row_max);
#pragma unroll 8
    for (int i = 0; i < count; ++i) add(partials[i], column);
  }
  // The same with at most kMost partials.
  template <int kMost>
  __device__ Join(const Partial (&partials)[kMost], int count, int column) {
    join<kMost>(partials, count, column);
  }
  // All are loaded at once: up to kAtOnce, of which more than half exist. So few cost little.
  template <int kMost, int kAtOnce = 1>
  __device__ void join(const Partial* partials, int count, int column) {
    if constexpr (kAtOnce < kMost) {
      if (count > kAtOnce) {
        constexpr int kMore = 2 * kAtOnce < kMost ? 2 * kAtOnce : kMost;
        return join<kMost, kMore>(partials, count, column);
      }
    }
    const auto exists = [=](int i) { return i <= kAtOnce / 2 || i < count; };
    float maxima[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      maxima[i] = exists(i) ? partials[i].row_max : -FLT_MAX;
      row_max = fmaxf(row_max, maxima[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (exists(i)) add(partials[i], column);
  }
  __device__ void add(const Partial& partial, int column) {
    const float scale = ptx::fast_exp(partial.row_max - row_max);
    row_sum += scale * partial.row_sum;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) o[c] += scale * partial.o[column + c];
  }
};

__device__ inline float scale_of(const StepParams& p, int layer) {
  return p.scales_by_layer ? p.softmax_scale / (layer + 1) : p.softmax_scale;
}

}  // namespace attention::ATTENTION_VERSION
