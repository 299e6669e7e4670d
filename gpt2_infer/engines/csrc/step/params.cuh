// The shape that a step is built for, its parameters, and what its kernels pass on to each other.

#pragma once

#include <cstdint>
#include <type_traits>

#include "../../../csrc/block_sum.cuh"
#include "element.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kEmbd = STEP_EMBD;
constexpr int kInner = STEP_INNER;
constexpr int kHeads = STEP_HEADS;
constexpr int kLayers = STEP_LAYERS;
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

// A layer's weights, packed as described at PlainProduct and TensorProduct in products.cuh.
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

// The inverted bits of a value: 0, which would be NaN with bits that no sum has, until it is there. Who
// reads it needs no other signal. A step sets those to 0 that the next one writes.
using Word = unsigned;

// What the kernels of a step pass on to each other.
struct Scratch {
  float x[kBatch][kEmbd];  // the residual stream
  float q[kBatch][kEmbd];
  alignas(16) Factor o[kEmbd * kBatch];
  alignas(16) Factor hidden[kInner * kBatch];
  Best best[kHeadBlocks][kBatch];
  Splits splits;
  // Of even steps and of odd ones: each layer's parts of the heads, and of the hidden units
  Word words[kIsOneKernel ? 2 * kLayers * 2 * kHeads : 1][kEmbd];
  unsigned epoch;  // steps so far
};

}  // namespace attention::ATTENTION_VERSION

namespace attention {

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

}  // namespace attention

namespace attention::ATTENTION_VERSION {

__device__ inline Element* cache_of(const StepParams& p, int layer, int matrix, int row, int head) {
  const int cache = kGuesses ? 0 : row;
  const int64_t head_of_all = ((int64_t{layer} * 2 + matrix) * kCaches + cache) * kHeads + head;
  return p.kv + head_of_all * p.max_seqlen * kHeadDim;
}

// The position of a row's newest token.
__device__ inline int position_of(const StepParams& p, int row) {
  return kGuesses ? p.seqlens[0] + row : p.seqlens[row];
}

}  // namespace attention::ATTENTION_VERSION
