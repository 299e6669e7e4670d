// A product of the batch's rows and a block's columns of a weight matrix, in float32 or on tensor
// cores. chain.cuh, portable.cuh and layers_at_once.cuh each have weights in shared memory, as a struct:
//
//   await(step)    waits for what the thread multiplies in a step
//   at(step, i)    returns 16 bytes of it: those at piece(packed, step, i)
//   replace(step)  may overwrite it

#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

// Loads one value per row of the batch. Results of this step's kernels are read from L2, because a
// block reads them only once; after wait_for_previous() any load would see them.
template <bool kFromL2>
__device__ void load_rows(const float* from, float (&rows)[kBatch]) {
  const auto load = [](auto* address) { return kFromL2 ? __ldcg(address) : *address; };
  if constexpr (kBatch == 1) {
    rows[0] = load(from);
  } else if constexpr (kBatch == 2) {
    const float2 two = load(reinterpret_cast<const float2*>(from));
    rows[0] = two.x, rows[1] = two.y;
  } else {
#pragma unroll
    for (int r = 0; r < kBatch; r += 4) {
      const float4 four = load(reinterpret_cast<const float4*>(from + r));
      rows[r] = four.x, rows[r + 1] = four.y, rows[r + 2] = four.z, rows[r + 3] = four.w;
    }
  }
}

// kColumns columns of W (K, N), which one block multiplies; contiguous in memory.
template <int K_, int N_, int kColumns_, int kWarps_>
struct Columns {
  static constexpr int K = K_, N = N_, kColumns = kColumns_, kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBytes = sizeof(Element) * K * kColumns;
  static_assert(N % kColumns == 0 && kColumns % 8 == 0);

  using Sums = float[kColumns * kBatch];  // a warp's: (column, row of the batch)
};

// The product in float32. Packed, W is (N / kColumns, K, kColumns). A lane has four floats of a
// row, consecutive lanes the next four and then the next rows; each warp has its own rows,
// consecutive ones if a block has 8 columns. If kWarps is 1, each warp of the block has a product
// of its own.
template <int K, int N, int kColumns, int kWarps>
struct PlainProduct : Columns<K, N, kColumns, kWarps> {
  static constexpr int kPadding = 0;
  static constexpr int kRowLanes = kColumns / 4;
  static constexpr int kWarpK = 32 / kRowLanes;   // rows per warp
  static constexpr int kStepK = kWarps * kWarpK;  // and per block, at a time
  static constexpr int kSteps = ceil_div(K, kStepK);
  static constexpr int kSums = 4 * kBatch;  // per lane
  static constexpr int kFolded = max_of(1, kSums / kWarpK);
  static constexpr bool kIsConsecutive = kColumns == 8 && K % kStepK == 0;

  static __device__ int first_of(int step) {  // row of the warp
    const int warp = kWarps == 1 ? 0 : threadIdx.x / 32;
    return step * (kIsConsecutive ? kWarpK : kStepK) +
           warp * (kIsConsecutive ? kSteps : 1) * kWarpK;
  }
  static __device__ int k_of(int step) { return first_of(step) + threadIdx.x % 32 / kRowLanes; }
  static __device__ bool has(int step) {
    return K % kStepK == 0 || step < kSteps - 1 || k_of(step) < K;
  }

  // What a thread reads of the packed weights in a step: kPieces of 16 bytes.
  static constexpr int kPieces = 1;
  static __device__ const uint4* piece(const uint4* packed, int step, int) {
    return packed + (first_of(step) * kRowLanes + threadIdx.x % 32);
  }

  // Calls put(i, sum) with the warp's sums, i as in Sums.
  template <bool kFromL2, typename Weights, typename Put>
  static __device__ void multiply(Weights& weights, const float* x, Put put) {
    constexpr int kAtOnce = kFromL2 ? 24 / kBatch : 1;  // rows of x in flight
    float acc[kSums] = {};
#pragma unroll
    for (int first = 0; first < kSteps; first += kAtOnce) {
      float rows[kAtOnce][kBatch];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < kSteps && has(first + i))
          load_rows<kFromL2>(x + k_of(first + i) * kBatch, rows[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        weights.await(first + i);
        if (first + i >= kSteps || !has(first + i)) continue;
        float w[4];
        unpack<float>(weights.at(first + i, 0), w);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int r = 0; r < kBatch; ++r) acc[e * kBatch + r] += w[e] * rows[i][r];
        }
        weights.replace(first + i);
      }
    }
    const int lane = threadIdx.x % 32;
    float folded[kFolded];
    fold<kRowLanes, 16>(acc, folded);
    constexpr int kSame = max_of(1, kWarpK / kSums);  // lanes with the same sum
    if (lane / kRowLanes % kSame == 0) {
#pragma unroll
      for (int i = 0; i < kFolded; ++i)
        put(lane % kRowLanes * kSums + lane / kRowLanes / kSame * kFolded + i, folded[i]);
    }
  }
};

// A tensor core multiplies 16 rows of A by 8 columns of B. A is W transposed; the columns of B are
// the rows of x. The order of k does not matter if A and B agree, so lane l reads 8 adjacent
// elements of x at once, from 8 (l % 4) on, and as many of W per product.
//
// If W has only 8 columns, the other 8 rows of A are the same columns, 32 rows further down in W.
// They need a different B; up to 4 rows of a batch leave room for both in one.
//
// Packed, W is (N / kColumns, K / kStepK, kTiles, 2 products, 32 lanes, 2 pairs of k, 2 rows, 2).
template <int K, int N, int kColumns, int kWarps>
struct TensorProduct : Columns<K, N, kColumns, kWarps> {
  static constexpr bool kIsPaired = kColumns == 8;
  static constexpr bool kSharesB = kIsPaired && kBatch <= 4;
  static constexpr int kPadding = 32;  // of x in shared memory: two rows cover all banks
  static constexpr int kTiles = ceil_div(kColumns, 16);
  static constexpr int kStepK = kIsPaired ? 64 : 32;
  static constexpr int kGroups = K / kStepK, kSteps = ceil_div(kGroups, kWarps);
  static constexpr int kFactors = kIsPaired && !kSharesB ? 2 : 1;
  static_assert(K % kStepK == 0);

  // A warp's rows are consecutive. If kWarps is 1, each warp of the block has a product of its own.
  static __device__ int group_of(int step) {
    const int warp = kWarps == 1 ? 0 : threadIdx.x / 32;
    return warp * kSteps + step;
  }
  static __device__ bool has(int step) {
    return step < kSteps && (kGroups % kWarps == 0 || group_of(step) < kGroups);
  }
  // What a thread reads of the packed weights in a step: kPieces of 16 bytes.
  static constexpr int kPieces = 2 * kTiles;
  static __device__ const uint4* piece(const uint4* packed, int step, int i) {
    const int lane = threadIdx.x % 32;
    return packed + (group_of(step) * kTiles + i / 2) * 64 + lane + i % 2 * 32;
  }

  template <bool kFromL2, typename Weights, typename Put>
  static __device__ void multiply(Weights& weights, const Element* x, Put put) {
    const int lane = threadIdx.x % 32;
    // Lanes of other columns of B read the last row: their sums are not used.
    const int row = min(kSharesB ? lane / 4 % 4 : lane / 4, kBatch - 1);
    const int first_k = lane % 4 * 8 + (kSharesB ? lane / 16 * 32 : 0);
    constexpr int kAtOnce = kFromL2 ? 8 / kFactors : 1;  // groups of x in flight
    float acc[kTiles][kFactors][4] = {};
#pragma unroll
    for (int first = 0; first < kSteps; first += kAtOnce) {
      uint4 factors[kAtOnce][kFactors];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int f = 0; f < kFactors; ++f) {
          factors[i][f] = make_uint4(0, 0, 0, 0);
          if (!has(first + i)) continue;
          const int k = group_of(first + i) * kStepK + f * 32 + first_k;
          const auto* const from =
              reinterpret_cast<const uint4*>(x + factor_at<K, kFromL2 ? 0 : kPadding>(k, row));
          factors[i][f] = kFromL2 ? __ldcg(from) : *from;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        weights.await(first + i);
        if (!has(first + i)) continue;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint4 a = weights.at(first + i, 2 * tile);
          const uint4 next_a = weights.at(first + i, 2 * tile + 1);
#pragma unroll
          for (int f = 0; f < kFactors; ++f) {
            const uint4 b = factors[i][f];
            ptx::mma<kIsBfloat16>(acc[tile][f], {a.x, a.y, a.z, a.w}, {b.x, b.y});
            ptx::mma<kIsBfloat16>(acc[tile][f], {next_a.x, next_a.y, next_a.z, next_a.w},
                                  {b.z, b.w});
          }
        }
        weights.replace(first + i);
      }
    }
    // The lane has two columns of W, or one whose other half another lane has if B is shared.
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float y[2] = {acc[tile][0][i], acc[tile][kFactors - 1][2 + i]};
        if constexpr (kIsPaired) y[0] += kSharesB ? __shfl_xor_sync(kWarp, y[1], 2) : y[1];
        const int y_row = lane % 4 * 2 + i;
        if (y_row >= kBatch) continue;
#pragma unroll
        for (int half = 0; half < (kIsPaired ? 1 : 2); ++half)
          put((tile * 16 + half * 8 + lane / 4) * kBatch + y_row, y[half]);
      }
    }
  }
};

template <int K, int N, int kColumns, int kWarps>
using AnyProduct = std::conditional_t<kUsesTensorCores, TensorProduct<K, N, kColumns, kWarps>,
                                      PlainProduct<K, N, kColumns, kWarps>>;

__device__ inline float gelu(float x) {
  constexpr float kRoot = 0.7978845608028654f;  // sqrt(2 / pi)
  // x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u))
  const float u = kRoot * (x + 0.044715f * x * x * x);
  return x / (1.0f + expf(-2.0f * u));
}

enum Kind { kQkv, kProj, kFc, kFc2 };

// A layer's four products.
template <Kind kKind>
struct Product;
template <>
struct Product<kQkv> : AnyProduct<kEmbd, 3 * kEmbd, STEP_QKV_COLUMNS, STEP_QKV_WARPS> {
  static constexpr auto kMatrix = &LayerWeights::qkv;
  static constexpr auto kBias = &LayerVectors::qkv_bias;
};
template <>
struct Product<kProj> : AnyProduct<kEmbd, kEmbd, STEP_PROJ_COLUMNS, STEP_PROJ_WARPS> {
  static constexpr auto kMatrix = &LayerWeights::proj;
  static constexpr auto kBias = &LayerVectors::proj_bias;
};
template <>
struct Product<kFc> : AnyProduct<kEmbd, kInner, STEP_FC_COLUMNS, STEP_FC_WARPS> {
  static constexpr auto kMatrix = &LayerWeights::fc;
  static constexpr auto kBias = &LayerVectors::fc_bias;
};
template <>
struct Product<kFc2> : AnyProduct<kInner, kEmbd, STEP_FC2_COLUMNS, STEP_FC2_WARPS> {
  static constexpr auto kMatrix = &LayerWeights::fc2;
  static constexpr auto kBias = &LayerVectors::fc2_bias;
};
template <Kind kKind>
constexpr bool kHasNorm = kKind == kQkv || kKind == kFc;  // its input is a LayerNorm of x

// The shared memory of the product's input, if the block computes it first.
template <Kind kKind>
constexpr bool kComputesX = kHasNorm<kKind> || (kIsPortable && kKind == kProj);
template <Kind kKind>
constexpr size_t kXBytes =
    kComputesX<kKind> ? sizeof(Factor) * (kEmbd + Product<kKind>::kPadding) * kBatch : 0;

}  // namespace attention::ATTENTION_VERSION
