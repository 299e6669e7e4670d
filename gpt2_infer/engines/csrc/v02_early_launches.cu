// v02 - one decode step as a chain of kernels, each launched before its input is ready
//
// Change: instead of one persistent kernel, five kernels per layer: q, k and v; attention; the
//         heads' projection; the hidden units; their projection. Each starts before the previous
//         ones end (programmatic dependent launch) and loads what no kernel of the step writes: a
//         block its weights, in one bulk copy; attention the keys and values of earlier steps. Then
//         it waits. LayerNorm, bias, GELU and residual are part of the products.
//         If STEP_ONE_KERNEL, one kernel runs all layers instead: see layers_at_once.cuh.
// Why:    the end of a kernel is a cheaper way to exchange data than words that all blocks poll: it
//         takes the same time whatever the batch. It needs no tags, and no grid whose blocks must
//         all run at once.
// Cost:   a second, packed copy of the layers' weights. Every block of a product that follows a
//         LayerNorm recomputes it. A block's weights must fit in its shared memory.
// Tile:   STEP_*_COLUMNS columns per block, all of K; a lane has 16 bytes of a row; 128 keys per split
// Layout: strided
// Role:   struct
// Takes:  float32 float16 bfloat16
// Flags:  (none)
// Expect: latency is the bottleneck at batch 1, memory bandwidth for gpt2-xl, and the products'
//         instructions for larger batches in float32. The one kernel has no launches between
//         layers, and requests weights as soon as it has room for them.
//
// Weights leave the L2 cache first, since a step reads them once; so keys, values, vectors and what
// blocks exchange stay there.
//
// Sums are in float32, in an order that depends neither on timing nor on the other rows of the
// batch. 16-bit weights are multiplied on tensor cores, so activations are rounded to 16 bits, too.
// The file is built for one model shape and batch size; fused.py sets the macros.
//
// STEP_GUESSES builds a step that also reads guesses of the next tokens, as rows of the batch that share
// the first one's cache: each row's key and value are the next one's, and of the chosen tokens those
// up to the first wrong guess count. The guesses are what followed the last tokens before.
//
// STEP_PORTABLE builds the step for sm_80 and later, and for weights that do not fit in shared
// memory: kernels start when the previous one has ended, each thread copies the weights that it
// multiplies, through a ring if necessary, and kProj joins attention's splits. The sums have the
// same order.

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "../../csrc/block_sum.cuh"
#include "element.cuh"
#include "ptx.cuh"
#ifndef ATTENTION_SLOT  // no other slot.cuh's file was included first: see StepShape in fused.py
#include "slot/v03_early_loads.cuh"
#endif

// nvcc's header or, on the CPU, emulator/cuda_pipeline.h.
#include <cuda_pipeline.h>

namespace attention {

namespace ATTENTION_VERSION {

constexpr int kEmbd = STEP_EMBD;
constexpr int kInner = STEP_INNER;
constexpr int kHeads = STEP_HEADS;
constexpr int kVocab = STEP_VOCAB;
constexpr int kBatch = STEP_BATCH;              // 1, 2, 4 or 8
constexpr int kHeadBlocks = STEP_BLOCKS;        // blocks of the product with the embedding
constexpr int kMaxSplits = STEP_MAX_SPLITS;     // splits of the longest row's keys
constexpr int kSmemBytes = STEP_SMEM;           // available to a block
constexpr bool kIsPortable = STEP_PORTABLE;     // no early launches, bulk copies or clusters
constexpr bool kIsOneKernel = STEP_ONE_KERNEL;  // all layers, by one cluster per head
constexpr bool kGuesses = STEP_GUESSES;         // rows after the first are guesses

constexpr int kHeadDim = kEmbd / kHeads;
constexpr int kCaches = kGuesses ? 1 : kBatch;
static_assert(kBatch == 1 || kBatch == 2 || kBatch == 4 || kBatch == 8);

__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

// A layer's float32 vectors, contiguous.
struct LayerVectors {
  float ln_1_weight[kEmbd], ln_1_bias[kEmbd], qkv_bias[3 * kEmbd], proj_bias[kEmbd];
  float ln_2_weight[kEmbd], ln_2_bias[kEmbd], fc_bias[kInner], fc2_bias[kEmbd];
};

// A layer's weights, packed as described at PlainProduct and TensorProduct.
struct LayerWeights {
  Element qkv[kEmbd * 3 * kEmbd], proj[kEmbd * kEmbd], fc[kEmbd * kInner], fc2[kInner * kEmbd];
};

// Whether a layer's weights fit in the shared memory of all multiprocessors.
constexpr bool kHoldsLayer = sizeof(LayerWeights) <= size_t{kHeadBlocks} * kSmemBytes;

struct Best {
  float value;
  int row;
  // NaN counts as the largest; among equals the first row wins.
  __device__ void see(float v, int r) {
    const bool larger = v > value || (v != v && value == value);
    if (larger || (v == value && r < row)) value = v, row = r;
  }
  // Adds what another lane has seen.
  __device__ void see_lane(int width) {
    const float v = __shfl_xor_sync(kWarp, value, width);
    see(v, __shfl_xor_sync(kWarp, row, width));
  }
};

constexpr bool kUsesTensorCores = sizeof(Element) == 2;
constexpr bool kIsBfloat16 = std::is_same_v<Element, __nv_bfloat16>;

// A product's input: (batch, K) for tensor cores, otherwise (K, batch).
using Factor = std::conditional_t<kUsesTensorCores, Element, float>;
template <int K, int kPadding = 0>
__device__ constexpr int factor_at(int k, int row) {
  return kUsesTensorCores ? row * (K + kPadding) + k : k * kBatch + row;
}

// The results of attention's splits, if kIsPortable: O before the division, row_max, row_sum.
struct Splits {
  alignas(16) float o[kBatch][kMaxSplits][kEmbd];
  float row_max[kBatch][kHeads][kMaxSplits];
  float row_sum[kBatch][kHeads][kMaxSplits];
};

// A value, below the number of its exchange: who reads both at once needs no other signal.
using Word = unsigned long long;

// What the kernels of a step pass on to each other.
struct Scratch {
  float x[kBatch][kEmbd];  // the residual stream
  float q[kBatch][kEmbd];
  alignas(16) Factor o[kEmbd * kBatch];
  alignas(16) Factor hidden[kInner * kBatch];
  Best best[kHeadBlocks][kBatch];
  Splits splits;
  Word words[kIsOneKernel ? 2 * kHeads : 1][kEmbd];  // the heads' parts, and the hidden units'
  unsigned epoch;                                    // steps so far
};

}  // namespace ATTENTION_VERSION
using namespace ATTENTION_VERSION;

// Must match StepParams in fused.py.
struct StructParams {
  const LayerWeights* weights;  // (layers)
  const LayerVectors* vectors;  // (layers)
  const float* ln_f;            // weight, bias
  const Element* wte;
  const Element* wpe;
  const Element* head;  // (vocab, n_embd)
  Element* kv;          // (layers, 2, caches, heads, max_seqlen, head_dim)
  int* seqlens;         // (caches): keys in the cache; the step adds one
  int64_t* newest;      // (batch): the input tokens; if is_greedy, overwritten by the chosen ones
  int64_t* tokens;      // (caches, capacity): if is_greedy, the chosen token goes to `lengths`
  int64_t* lengths;     // (caches)
  float* logits;        // (batch, vocab)
  Scratch* scratch;
  int64_t capacity;
  int layers;
  int max_seqlen;
  int is_greedy;
  float softmax_scale;
  int scales_by_layer;  // divides softmax_scale by the layer's number, counted from 1
  float epsilon;
};
using StepParams = StructParams;

namespace ATTENTION_VERSION {

// ---- Sums ---------------------------------------------------------------------------------------

// Sums values in pairs, which takes less time than one after the other.
template <int kCount>
__device__ double sum_of(const double* values) {
  if constexpr (kCount == 1)
    return values[0];
  else
    return sum_of<kCount / 2>(values) + sum_of<kCount - kCount / 2>(values + kCount / 2);
}

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

// ---- LayerNorm ----------------------------------------------------------------------------------

// LayerNorm of x (batch, kEmbd) in one block; a thread has elements threadIdx.x + i * kThreads.
template <int kWarps>
struct Norm {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kEach = ceil_div(kEmbd, kThreads);
  static constexpr int kMoments = 2 * kBatch;  // each row's sum, then each row's sum of squares

  struct Shared {
    double moments[kWarps][kMoments];
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
    // Every warp adds up the moments of all warps, one moment per lane.
    double of_warp[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of_warp[w] = shared.moments[w][lane % kMoments];
    moment[0] = sum_of<kWarps>(of_warp) * (1.0 / kEmbd);
    const double mean = __shfl_sync(kWarp, moment[0], lane % kBatch);
    const double square = __shfl_sync(kWarp, moment[0], lane % kBatch + kBatch);
    const auto variance = static_cast<float>(square - mean * mean);
    const float row_mean = mean, row_scale = rsqrtf(variance + epsilon);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const float shift = __shfl_sync(kWarp, row_mean, r);
      const float scale = __shfl_sync(kWarp, row_scale, r);
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

// ---- Products -----------------------------------------------------------------------------------

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
  using Base = Columns<K, N, kColumns, kWarps>;
  static constexpr int kPadding = 0;
  static constexpr int kRowLanes = kColumns / 4;
  static constexpr int kWarpK = 32 / kRowLanes;   // rows per warp
  static constexpr int kStepK = kWarps * kWarpK;  // and per block, at a time
  static constexpr int kSteps = ceil_div(K, kStepK);
  static constexpr int kSums = 4 * kBatch;  // per lane
  static constexpr int kFolded = max_of(1, kSums / kWarpK);
  static constexpr int kMostSums = kFolded;  // that put() gets in a lane
  static constexpr bool kIsConsecutive = kColumns == 8 && K % kStepK == 0;

  static __device__ int first_of(int step) {  // row of the warp
    const int warp = kWarps == 1 ? 0 : threadIdx.x / 32;
    return kIsConsecutive ? (warp * kSteps + step) * kWarpK : (step * kWarps + warp) * kWarpK;
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
  static constexpr int kMostSums =  // that put() gets in a lane, at most
      kTiles * (kIsPaired ? 1 : 2) * (kBatch == 1 ? 1 : 2);
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
    const int row = kSharesB ? lane / 4 % 4 : lane / 4;
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
          if (row >= kBatch || !has(first + i)) continue;
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

template <Kind kKind>
struct Product;
template <>
struct Product<kQkv> : AnyProduct<kEmbd, 3 * kEmbd, STEP_QKV_COLUMNS, STEP_QKV_WARPS> {
  static constexpr bool kHasNorm = true;
};
template <>
struct Product<kProj> : AnyProduct<kEmbd, kEmbd, STEP_PROJ_COLUMNS, STEP_PROJ_WARPS> {
  static constexpr bool kHasNorm = false;
};
template <>
struct Product<kFc> : AnyProduct<kEmbd, kInner, STEP_FC_COLUMNS, STEP_FC_WARPS> {
  static constexpr bool kHasNorm = true;
};
template <>
struct Product<kFc2> : AnyProduct<kInner, kEmbd, STEP_FC2_COLUMNS, STEP_FC2_WARPS> {
  static constexpr bool kHasNorm = false;
};
// The shared memory of the product's input, if the block computes it first.
template <Kind kKind>
constexpr bool kComputesX = Product<kKind>::kHasNorm || (kIsPortable && kKind == kProj);
template <Kind kKind>
constexpr size_t kXBytes =
    kComputesX<kKind> ? sizeof(Factor) * (kEmbd + Product<kKind>::kPadding) * kBatch : 0;

// A block's weights in shared memory, with one bulk copy.
template <Kind kKind>
struct BulkWeights {
  using P = Product<kKind>;
  static constexpr size_t kBytes = P::kBytes;
  using Shared = ptx::Barrier;

  const uint4* s_weights;
  Shared& arrived;

  // The caller synchronizes the threads before the first await().
  __device__ BulkWeights(uint4* to, const Element* packed, Shared& barrier)
      : s_weights(to), arrived(barrier) {
    if (threadIdx.x == 0) {
      ptx::barrier_init(&arrived, 1);
      ptx::barrier_init_fence();
      ptx::barrier_expect(&arrived, kBytes);
      ptx::copy_bulk(to, packed + int64_t{blockIdx.x} * P::K * P::kColumns, kBytes, &arrived,
                     ptx::evict_first());
    }
  }
  __device__ void await(int step) {
    if (step > 0) return;
    while (!ptx::barrier_test(&arrived, 0)) {
    }
  }
  __device__ uint4 at(int step, int i) const { return *P::piece(s_weights, step, i); }
  __device__ void replace(int) {}
};

// The same for cards without bulk copies: each thread copies what it multiplies, so no barrier is
// needed. If the weights do not fit, it is a ring of kStages of P::kSteps steps.
template <Kind kKind>
struct ThreadWeights {
  using P = Product<kKind>;
  static constexpr size_t kStageBytes = sizeof(uint4) * P::kPieces * P::kThreads;
  static constexpr size_t kRoom =
      kSmemBytes - kXBytes<kKind> - P::kWarps * sizeof(typename P::Sums) -
      (P::kHasNorm ? sizeof(typename Norm<P::kWarps>::Shared) : 0) - 128;
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

template <Kind kKind>
using Weights = std::conditional_t<kIsPortable, ThreadWeights<kKind>, BulkWeights<kKind>>;
template <Kind kKind>
constexpr size_t kProductBytes = Weights<kKind>::kBytes + kXBytes<kKind>;

using slot::kSplit;

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
      scales[i] = __expf(maxima[first + i] - row_max);
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

__device__ inline Element* cache_of(const StepParams& p, int layer, int matrix, int row, int head) {
  const int cache = kGuesses ? 0 : row;
  const int64_t head_of_all = ((int64_t{layer} * 2 + matrix) * kCaches + cache) * kHeads + head;
  return p.kv + head_of_all * p.max_seqlen * kHeadDim;
}

// The position of a row's newest token.
__device__ inline int position_of(const StepParams& p, int row) {
  return kGuesses ? p.seqlens[0] + row : p.seqlens[row];
}

template <Kind kKind>
__global__ void __launch_bounds__(Product<kKind>::kThreads) product(const StepParams p, int layer) {
  using P = Product<kKind>;
  using LayerNorm = Norm<P::kWarps>;
  ATTENTION_DYNAMIC_SHARED(uint4, s_weights);
  auto* const s_x = reinterpret_cast<Factor*>(s_weights + Weights<kKind>::kBytes / 16);
  __shared__ typename P::Sums sums[P::kWarps];
  __shared__ typename LayerNorm::Shared s_norm;
  __shared__ typename Weights<kKind>::Shared arrived;
  const LayerWeights& layer_weights = p.weights[layer];
  const LayerVectors& vectors = p.vectors[layer];
  const Element* const packed = kKind == kQkv    ? layer_weights.qkv
                                : kKind == kProj ? layer_weights.proj
                                : kKind == kFc   ? layer_weights.fc
                                                 : layer_weights.fc2;
  const float* const bias = kKind == kQkv    ? vectors.qkv_bias
                            : kKind == kProj ? vectors.proj_bias
                            : kKind == kFc   ? vectors.fc_bias
                                             : vectors.fc2_bias;
  const int t = threadIdx.x;
  Weights<kKind> weights(s_weights, packed, arrived);
  const LayerNorm norm(kKind == kQkv ? vectors.ln_1_weight : vectors.ln_2_weight,
                       kKind == kQkv ? vectors.ln_1_bias : vectors.ln_2_bias);
  // This thread's output, if it has one
  const int n = blockIdx.x * P::kColumns + t % P::kColumns, row = t / P::kColumns;
  static_assert(P::kThreads >= P::kColumns * kBatch);
  const bool has_output = t < P::kColumns * kBatch;
  const float my_bias = has_output ? bias[n] : 0.0f;
  const int position = kKind == kQkv && has_output ? position_of(p, row) : 0;
  __syncthreads();  // the barrier is initialized

  // With more rows, blocks that start early slow down those still running.
  if (kBatch == 1) ptx::allow_next();
  ptx::wait_for_previous();
  if (kBatch > 1) ptx::allow_next();
  Scratch& scratch = *p.scratch;
  const float residual = !P::kHasNorm && has_output ? __ldcg(&scratch.x[row][n]) : 0.0f;
  const auto put = [&](int i, float sum) { sums[t / 32][i] = sum; };
  if constexpr (P::kHasNorm) {
    const auto load = [&](int r, int k) { return __ldcg(&scratch.x[r][k]); };
    norm.apply(load, p.epsilon, s_norm, [&](int k, const float (&rows)[kBatch]) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r)
        s_x[factor_at<kEmbd, P::kPadding>(k, r)] = from_float<Factor>(rows[r]);
    });
    P::template multiply<false>(weights, s_x, put);
  } else if constexpr (kComputesX<kKind>) {
    for (int i = t; i < kBatch * kEmbd / 4; i += P::kThreads) {
      const int x_row = i / (kEmbd / 4), k = i % (kEmbd / 4) * 4;
      const float4 o = join_splits(scratch.splits, x_row, k, position_of(p, x_row));
      const float columns[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s_x[factor_at<kEmbd, P::kPadding>(k + c, x_row)] = from_float<Factor>(columns[c]);
    }
    __syncthreads();
    P::template multiply<false>(weights, s_x, put);
  } else {
    const Factor* const x = kKind == kProj ? scratch.o : scratch.hidden;
    P::template multiply<true>(weights, x, put);
  }
  __syncthreads();
  if (!has_output) return;
  float y = 0.0f;
#pragma unroll
  for (int w = 0; w < P::kWarps; ++w) y += sums[w][t % P::kColumns * kBatch + row];
  y += my_bias;
  if constexpr (kKind == kQkv) {
    const int matrix = n / kEmbd, head = n % kEmbd / kHeadDim, column = n % kHeadDim;
    if (matrix == 0) {
      scratch.q[row][n] = y;
    } else {
      cache_of(p, layer, matrix - 1, row, head)[int64_t{position} * kHeadDim + column] =
          from_float<Element>(y);
    }
  } else if constexpr (kKind == kFc) {
    scratch.hidden[factor_at<kInner>(n, row)] = from_float<Factor>(gelu(y));
  } else {
    scratch.x[row][n] = residual + y;
  }
}

// ---- Attention ----------------------------------------------------------------------------------

using Attention = slot::Attention<kHeadDim>;
using Partial = slot::Partial<kHeadDim>;
constexpr int kPartials = Attention::kPartials;
struct AttentionShared : Attention::Shared {
  Partial partials[kPartials];
};
static_assert(sizeof(AttentionShared) <= STEP_SLOT_BYTES,
              "the field Shared of attention says less");
constexpr int kAttendThreads = slot::kThreads;
// Limit on attention's blocks, which add_attention() exceeds for long caches: 1.6 per multiprocessor,
// found by trial on an H200. kHeadBlocks is one per multiprocessor.
constexpr int kMostAttending = kHeadBlocks * 8 / 5;
// The most blocks that share the splits of a row and head, a power of two.
constexpr int most_blocks(int blocks = 8) {
  return blocks == 1 || blocks * kHeads * kBatch <= kMostAttending ? blocks
                                                                   : most_blocks(blocks / 2);
}

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
  // The same with at most kMost partials, all of which are loaded at once.
  template <int kMost>
  __device__ Join(const Partial (&partials)[kMost], int count, int column) {
    float maxima[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      maxima[i] = i < count ? partials[i].row_max : -FLT_MAX;
      row_max = fmaxf(row_max, maxima[i]);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (i < count) add(partials[i], column);
  }
  __device__ void add(const Partial& partial, int column) {
    const float scale = __expf(partial.row_max - row_max);
    row_sum += scale * partial.row_sum;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) o[c] += scale * partial.o[column + c];
  }
};

__device__ inline float scale_of(const StepParams& p, int layer) {
  return p.scales_by_layer ? p.softmax_scale / (layer + 1) : p.softmax_scale;
}

// Grid: blocks, heads, rows. A cluster of kBlocks blocks attends to all splits of a row and head. If
// kIsPortable, each block attends to a split of its own.
template <int kBlocks>
__global__ void __launch_bounds__(kAttendThreads) attend(const StepParams p, int layer) {
  constexpr bool kIsCluster = kBlocks > 1;
  constexpr int kAtOnce = kIsPortable ? kMaxSplits : kBlocks;
  constexpr int kNext = kAtOnce < kMaxSplits ? kAtOnce : 0;
  __shared__ AttentionShared shared;
  __shared__ Partial splits[kMaxSplits];  // the cluster's, in its first block
  // Later all wait for this: the first block runs.
  if (kIsCluster) ptx::cluster_arrive();

  const int t = threadIdx.x;
  const int head = blockIdx.y, row = blockIdx.z;
  const int newest = position_of(p, row);
  const Element* const keys = cache_of(p, layer, 0, row, head);
  const Element* const values = cache_of(p, layer, 1, row, head);
  Attention attention{slot::Cache{keys, values, kHeadDim, kHeadDim, newest}};
  int split = blockIdx.x;
  if (!kGuesses) attention.load(split);

  // If a layer fits in shared memory, blocks of later products would start now and get in the way.
  constexpr bool kIsEarly = kBatch == 1 && !kHoldsLayer;
  if (kIsEarly) ptx::allow_next();
  ptx::wait_for_previous();
  if (!kIsEarly) ptx::allow_next();
  if (kGuesses) attention.load(split);  // the rows before have just written theirs
  const int64_t at = int64_t{newest} * kHeadDim;
  const auto query = attention.receive(
      slot::Token<false>{p.scratch->q[row] + head * kHeadDim, keys + at, values + at});
  bool is_first = true;
  for (; split * kSplit <= newest; split += kAtOnce) {
    const auto result = attention.attend_to(query, scale_of(p, layer), split, kNext, shared);
    if (!is_first) __syncthreads();  // the previous split's partials have been read
    result.store(shared.partials);
    __syncthreads();
    if (kIsCluster && is_first) ptx::cluster_wait();
    is_first = false;
    if (t >= kHeadDim) continue;
    const Join<1> join(shared.partials, kPartials, t);
    if (kIsPortable) {
      Splits& out = p.scratch->splits;
      out.o[row][split][head * kHeadDim + t] = join.o[0];
      if (t == 0) {
        out.row_max[row][head][split] = join.row_max;
        out.row_sum[row][head][split] = join.row_sum;
      }
      continue;
    }
    const auto put = [](float& here, float value) {
      if (kIsCluster)
        ptx::store_to_block(&here, 0, value);
      else
        here = value;
    };
    put(splits[split].o[t], join.o[0]);
    if (t == 0) put(splits[split].row_max, join.row_max), put(splits[split].row_sum, join.row_sum);
  }
  if (kIsPortable) return;
  if (kIsCluster) {
    if (is_first) ptx::cluster_wait();
    ptx::cluster_arrive();
    if (blockIdx.x != 0) return;
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  if (t >= kHeadDim) return;
  const Join<1> join(splits, newest / kSplit + 1, t);
  p.scratch->o[factor_at<kEmbd>(head * kHeadDim + t, row)] =
      from_float<Factor>(join.o[0] / join.row_sum);
}

#if STEP_ONE_KERNEL
// Its own file, because of its length.
#include "layers_at_once.cuh"
#endif

// ---- The first and the last ---------------------------------------------------------------------

constexpr int kThreads = 256, kWarps = 8;

// Returns where the last kGram tokens, or as many as have occurred before, last did so: the index of
// the last of them, or that of the newest token. All threads of a block take part.
__device__ inline int find_earlier(const int64_t* tokens, int length) {
  constexpr int kGram = 3, kBits = 24;  // of an index
  __shared__ int s_best[kWarps];
  int best = length - 1;
  for (int i = threadIdx.x; i < length - 1; i += kThreads) {
    int same = 0;
    while (same < kGram && same <= i && tokens[i - same] == tokens[length - 1 - same]) ++same;
    if (same > 0) best = max(best, same << kBits | i);
  }
#pragma unroll
  for (int width = 16; width > 0; width /= 2) best = max(best, __shfl_xor_sync(kWarp, best, width));
  if (threadIdx.x % 32 == 0) s_best[threadIdx.x / 32] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) best = max(best, s_best[w]);
  return best & ((1 << kBits) - 1);
}

__global__ void __launch_bounds__(kThreads) embed(const StepParams p) {
  ptx::allow_next();
  int earlier = 0, length = 0;
  if constexpr (kGuesses) {
    length = p.lengths[0];
    earlier = find_earlier(p.tokens, length);
  }
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= kBatch * kEmbd) return;
  const int row = i / kEmbd, column = i % kEmbd;
  int64_t token = p.newest[kGuesses ? 0 : row];
  if (kGuesses && row > 0) {  // what is repeated may be shorter than the guesses
    const int repeated = max(length - 1 - earlier, 1);
    token = p.tokens[min(earlier + 1 + (row - 1) % repeated, length - 1)];
    if (column == 0) p.newest[row] = token;
  }
  if (token < 0) token = 0;
  p.scratch->x[row][column] = to_float(p.wte[token * kEmbd + column]) +
                              to_float(p.wpe[int64_t{position_of(p, row)} * kEmbd + column]);
}

constexpr int kStride = kHeadBlocks * kWarps;        // distance between a warp's groups of rows
constexpr int kRoomRows = kIsPortable ? kBatch : 8;  // rows of x that the stages leave room for

// A ring buffer that streams a warp's groups of kRows rows of the embedding, to compute their
// logits. A stage has kStageK columns, of which a lane has kChunks times 16 bytes. Each thread
// copies what it multiplies, so no barrier is needed, and runs kStages - 1 stages ahead.
template <int kRows_, int kStageK, int kChunks, int kMostStages, int kPadding_>
struct Ring {
  static constexpr int kRows = kRows_, kGroups = ceil_div(kVocab, kRows);
  static constexpr int kPadding = kPadding_;  // of x
  static constexpr size_t kStageBytes = sizeof(uint4) * kChunks * kThreads;
  static constexpr int kStages =
      min_of(kMostStages,
             (kSmemBytes - 4096 - sizeof(Factor) * (kEmbd + kPadding) * kRoomRows) / kStageBytes);
  static constexpr size_t kBytes = kStages * kStageBytes;

  const StepParams& p;
  uint4* const s_rows;  // (kStages, kChunks, kThreads)
  int lane = threadIdx.x % 32;
  int first = threadIdx.x / 32 * kHeadBlocks + blockIdx.x;
  int asked = first, asked_k = 0, asked_stage = 0;

  static __device__ int next(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }
  __device__ uint4* slot(int stage, int chunk) const {
    return s_rows + (stage * kChunks + chunk) * kThreads + threadIdx.x;
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
constexpr int kStageRows = (kSmemBytes - 4096 - 4 * kEmbd * kRoomRows) / (16 * kPasses * kThreads);

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

__global__ void __launch_bounds__(kThreads) head(const StepParams p) {
  ATTENTION_DYNAMIC_SHARED(uint4, s_rows);
  auto* const s_x = reinterpret_cast<Factor*>(s_rows + Logits::kBytes / 16);
  __shared__ Norm<kWarps>::Shared s_norm;
  __shared__ Best s_best[kWarps][kBatch];
  Logits logits{p, s_rows};
#pragma unroll
  for (int i = 0; i < Logits::kStages - 1; ++i) logits.ask();
  const Norm<kWarps> norm(p.ln_f, p.ln_f + kEmbd);

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
  for (int w = 1; w < kWarps; ++w) best.see(s_best[w][t].value, s_best[w][t].row);
  p.scratch->best[blockIdx.x][t] = best;
}

// Chooses the next tokens; one warp per row of the batch.
__global__ void __launch_bounds__(32 * kBatch) choose(const StepParams p) {
  ptx::wait_for_previous();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  Best best{-INFINITY, kVocab};
  for (int i = lane; i < kHeadBlocks; i += 32) {
    const Best& other = p.scratch->best[i][row];
    best.see(__ldcg(&other.value), __ldcg(&other.row));
  }
#pragma unroll
  for (int width = 16; width > 0; width /= 2) best.see_lane(width);
  const int64_t token = best.value - best.value == 0.0f ? best.row : -1;
  if constexpr (kGuesses) {
    __shared__ int64_t s_chosen[kBatch];
    if (lane == 0) s_chosen[row] = token;
    __syncthreads();
    if (row > 0) return;
    const bool is_right = lane < kBatch - 1 && p.newest[lane + 1] == s_chosen[lane];
    const int count = __ffs(~__ballot_sync(kWarp, is_right));  // right guesses, and the next token
    if (lane != 0) return;
    const int64_t at = p.lengths[0];
    for (int i = 0; i < count; ++i) p.tokens[at + i] = s_chosen[i];
    p.newest[0] = s_chosen[count - 1];
    p.seqlens[0] += count;
    p.lengths[0] = at + count;
    return;
  }
  if (lane != 0) return;
  if (kIsOneKernel) p.scratch->epoch += 1;
  p.seqlens[row] += 1;
  if (!p.is_greedy) return;
  const int64_t at = p.lengths[row];
  p.newest[row] = token;
  p.tokens[row * p.capacity + at] = token;
  p.lengths[row] = at + 1;
}

// Launches kernels, early if possible, until one fails.
struct Chain {
  cudaStream_t stream;
  cudaError_t error;

  template <typename Kernel, typename... Arguments>
  void add(Kernel* kernel, dim3 grid, int cluster, int threads, size_t smem,
           Arguments... arguments) {
    if (error != cudaSuccess) return;
    error = kIsPortable ? launch_kernel(kernel, grid, threads, smem, stream, arguments...)
                        : launch_early(kernel, grid, cluster, threads, smem, stream, arguments...);
  }
  template <Kind kKind>
  void add_product(const StepParams& p, int layer) {
    using P = Product<kKind>;
    add(product<kKind>, P::N / P::kColumns, 1, P::kThreads, kProductBytes<kKind>, p, layer);
  }
  // One block for each split of a full cache, rounded up to a power of two, up to most_blocks(). Where
  // that is one, a block takes up to two splits, and two blocks share more.
  template <int kBlocks = 1>
  void add_attention(const StepParams& p, int layer) {
    const int splits = ceil_div(p.max_seqlen, kSplit);
    if constexpr (!kIsPortable && kBlocks < min_of(max_of(most_blocks(), 2), kMaxSplits)) {
      const int most_splits = kBlocks < most_blocks() ? kBlocks : 2;
      if (splits > most_splits) return add_attention<2 * kBlocks>(p, layer);
    }
    const dim3 grid(kIsPortable ? splits : kBlocks, kHeads, kBatch);
    add(attend<kBlocks>, grid, kBlocks, kAttendThreads, 0, p, layer);
  }
};

}  // namespace ATTENTION_VERSION

namespace ATTENTION_VERSION {

// The caller keeps the scratch alive between launches.
int64_t scratch_floats(const StepParams&) { return sizeof(Scratch) / sizeof(float); }

cudaError_t launch(const StepParams& p, cudaStream_t stream) {
  // Not launched early, because it reads what the previous step writes. So that step has ended
  // before this one begins, and every kernel may read seqlens before it waits.
#if STEP_ONE_KERNEL
  Chain chain{stream, launch_layers(p, stream)};
#else
  Chain chain{stream,
              launch_kernel(embed, ceil_div(kBatch * kEmbd, kThreads), kThreads, 0, stream, p)};
  for (int layer = 0; layer < p.layers; ++layer) {
    chain.add_product<kQkv>(p, layer);
    chain.add_attention(p, layer);
    chain.add_product<kProj>(p, layer);
    chain.add_product<kFc>(p, layer);
    chain.add_product<kFc2>(p, layer);
  }
#endif
  chain.add(head, kHeadBlocks, 1, kThreads, kHeadBytes, p);
  chain.add(choose, 1, 1, 32 * kBatch, 0, p);
  return chain.error;
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
