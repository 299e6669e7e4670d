// The last LayerNorm and the product with the embedding: head() computes the logits, and each of its
// blocks the most likely of its tokens.

#pragma once

#include <cuda_pipeline.h>  // on the CPU, the emulator's

#include "norm.cuh"
#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kLogitWarps = 8, kLogitThreads = 32 * kLogitWarps;
constexpr int kStride = kHeadBlocks * kLogitWarps;   // distance between a warp's groups of rows
constexpr int kRoomRows = kIsPortable ? kBatch : 8;  // rows of x that the stages leave room for

// A ring buffer that streams a warp's groups of kRows rows of the embedding, to compute their
// logits. A stage has kStageK columns, of which a lane has kChunks times 16 bytes. Each thread
// copies what it multiplies, so no barrier is needed, and runs kStages - 1 stages ahead.
template <int kRows_, int kStageK, int kChunks, int kMostStages, int kPadding_>
struct Ring {
  static constexpr int kRows = kRows_, kGroups = ceil_div(kVocab, kRows);
  static constexpr int kPadding = kPadding_;  // of x
  static constexpr size_t kStageBytes = sizeof(uint4) * kChunks * kLogitThreads;
  static constexpr int kStages =
      min_of(kMostStages,
             (kSmemBytes - 4096 - sizeof(Factor) * (kEmbd + kPadding) * kRoomRows) / kStageBytes);
  static constexpr size_t kBytes = kStages * kStageBytes;

  const StepParams& p;
  uint4* const s_rows;  // (kStages, kChunks, kLogitThreads)
  int lane = threadIdx.x % 32;
  int first = threadIdx.x / 32 * kHeadBlocks + blockIdx.x;
  int asked = first, asked_k = 0, asked_stage = 0;

  static __device__ int next(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }
  __device__ uint4* slot(int stage, int chunk) const {
    return s_rows + (stage * kChunks + chunk) * kLogitThreads + threadIdx.x;
  }
  // Returns row r of the group to copy.
  __device__ const Element* row(int r) const {
    return p.head + int64_t{min(asked * kRows + r, kVocab - 1)} * kEmbd;
  }
  __device__ void copy(int chunk, const Element* from) {
    ptx::copy_async(slot(asked_stage, chunk), from, ptx::evict_first());
  }
  // copies() copies the lane's chunks of the next stage.
  template <typename Copies>
  __device__ void ask(Copies copies) {
    if (asked < kGroups) copies();
    __pipeline_commit();
    asked_stage = next(asked_stage);
    asked_k += kStageK;
    if (asked_k == kEmbd) asked_k = 0, asked += kStride;
  }
};

constexpr int kPasses = ceil_div(kEmbd, 4 * 32);  // passes over a row, 4 floats per lane
constexpr int kStageRows =
    (kSmemBytes - 4096 - 4 * kEmbd * kRoomRows) / (16 * kPasses * kLogitThreads);

// In float32: each stage has whole rows.
constexpr int kPlainRows = kStageRows >= 8 ? 4 : kStageRows >= 4 ? 2 : 1;
struct PlainLogits : Ring<kPlainRows, kEmbd, kPlainRows * kPasses, 4, 0> {
  __device__ bool has(int pass) const { return kEmbd % 128 == 0 || (pass * 32 + lane) * 4 < kEmbd; }

  __device__ void ask() {
    Ring::ask([&] {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
          if (has(pass)) copy(r * kPasses + pass, row(r) + (pass * 32 + lane) * 4);
      }
    });
  }

  __device__ void compute(const float* x, Best (&warp_best)[kBatch]) {
    constexpr int kSums = kRows * kBatch, kSame = 32 / kSums;
    const int my_row = lane / kSame / kBatch, my_batch = lane / kSame % kBatch;
    Best best{-INFINITY, kVocab};
    int stage = 0;
    for (int group = first; group < kGroups; group += kStride) {
      ask();
      __pipeline_wait_prior(kStages - 1);
      float acc[kSums] = {};
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        if (!has(pass)) continue;
        float w[kRows][4];
#pragma unroll
        for (int r = 0; r < kRows; ++r) unpack<float>(*slot(stage, r * kPasses + pass), w[r]);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const float4 v = *reinterpret_cast<const float4*>(x + b * kEmbd + (pass * 32 + lane) * 4);
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            acc[r * kBatch + b] += w[r][0] * v.x + w[r][1] * v.y + w[r][2] * v.z + w[r][3] * v.w;
        }
      }
      stage = next(stage);
      float logit[1];
      fold<1, 16>(acc, logit);
      const int row = group * kRows + my_row;
      if (lane % kSame == 0 && row < kVocab) {
        p.logits[int64_t{my_batch} * kVocab + row] = logit[0];
        best.see(logit[0], row);
      }
    }
#pragma unroll
    for (int width = 16; width >= kSame * kBatch; width /= 2) best.see_lane(width);
    if (lane % kSame == 0 && lane < kSame * kBatch) warp_best[my_batch] = best;
  }
};

// On tensor cores: each stage has 64 columns of 16 rows. See TensorProduct.
constexpr int kStageK = 64;
struct TensorLogits : Ring<16, kStageK, 4, 8, 32> {
  static_assert(kEmbd % kStageK == 0);

  __device__ void ask() {
    Ring::ask([&] {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Element* const from = row(half * 8 + lane / 4) + asked_k + lane % 4 * 8;
#pragma unroll
        for (int k = 0; k < kStageK; k += 32) copy(k / 16 + half, from + k);
      }
    });
  }

  __device__ void compute(const Element* x, Best (&warp_best)[kBatch]) {
    const int my_batch = lane % 4 * 2;  // and the next row
    Best best[2] = {{-INFINITY, kVocab}, {-INFINITY, kVocab}};
    int stage = 0;
    for (int group = first; group < kGroups; group += kStride) {
      float acc[4] = {};
      for (int first_k = 0; first_k < kEmbd; first_k += kStageK) {
        ask();
        __pipeline_wait_prior(kStages - 1);
#pragma unroll
        for (int k = 0; k < kStageK; k += 32) {
          const uint4 a = *slot(stage, k / 16), b = *slot(stage, k / 16 + 1);
          const int at = factor_at<kEmbd, kPadding>(first_k + k + lane % 4 * 8, lane / 4);
          uint4 v = make_uint4(0, 0, 0, 0);
          if (lane / 4 < kBatch) v = *reinterpret_cast<const uint4*>(x + at);
          ptx::mma<kIsBfloat16>(acc, {a.x, b.x, a.y, b.y}, {v.x, v.y});
          ptx::mma<kIsBfloat16>(acc, {a.z, b.z, a.w, b.w}, {v.z, v.w});
        }
        stage = next(stage);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = group * kRows + i / 2 * 8 + lane / 4;
        if (my_batch + i % 2 >= kBatch || row >= kVocab) continue;
        p.logits[int64_t{my_batch + i % 2} * kVocab + row] = acc[i];
        best[i % 2].see(acc[i], row);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int width = 16; width >= 4; width /= 2) best[i].see_lane(width);
      if (lane < 4 && my_batch + i < kBatch) warp_best[my_batch + i] = best[i];
    }
  }
};

using Logits = std::conditional_t<kUsesTensorCores, TensorLogits, PlainLogits>;
static_assert(Logits::kStages >= 2, "a block has no room for two stages");
constexpr size_t kHeadBytes = Logits::kBytes + sizeof(Factor) * (kEmbd + Logits::kPadding) * kBatch;

__global__ void __launch_bounds__(kLogitThreads) head(const StepParams p) {
  ATTENTION_DYNAMIC_SHARED(uint4, s_rows);
  auto* const s_x = reinterpret_cast<Factor*>(s_rows + Logits::kBytes / 16);
  __shared__ Norm<kLogitWarps>::Shared s_norm;
  __shared__ Best s_best[kLogitWarps][kBatch];
  Logits logits{p, s_rows};
#pragma unroll
  for (int i = 0; i < Logits::kStages - 1; ++i) logits.ask();
  const Norm<kLogitWarps> norm(p.ln_f, p.ln_f + kEmbd);

  ptx::wait_for_previous();
  ptx::allow_next();
  const auto load = [&](int r, int k) { return __ldcg(&p.scratch->x[r][k]); };
  norm.apply(load, p.epsilon, s_norm, [&](int k, const float (&rows)[kBatch]) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r)
      s_x[r * (kEmbd + Logits::kPadding) + k] = from_float<Factor>(rows[r]);
  });
  logits.compute(s_x, s_best[threadIdx.x / 32]);
  __syncthreads();
  const int t = threadIdx.x;
  if (t >= kBatch) return;
  Best best = s_best[0][t];
  for (int w = 1; w < kLogitWarps; ++w) best.see(s_best[w][t].value, s_best[w][t].row);
  p.scratch->best[blockIdx.x][t] = best;
}

}  // namespace attention::ATTENTION_VERSION
