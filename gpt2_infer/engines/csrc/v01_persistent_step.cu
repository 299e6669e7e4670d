// v01 - one decode step, all layers, in one persistent kernel
//
// Change: the first of its kind. One block per multiprocessor stays for the whole step. Weights come
//         through a ring in shared memory, filled by bulk copies that one thread issues; each
//         block's share of all layers is packed as one stream, in the order of use. Activations go
//         from block to block as 64-bit words, a float and a tag that no earlier use of the word
//         had: who needs one polls it until it has the tag. There is no grid barrier.
// Why:    a step of batch 1 reads every weight once and computes almost nothing. What takes time is
//         the stream of weights, and the way of activations from each multiprocessor to all others,
//         five times per layer. The stream does not wait for activations. A relaxed 64-bit access
//         is atomic, so a word needs no fence: NCCL calls this protocol LL.
// Cost:   a second copy of the weights. Every block polls every activation: traffic in the L2 cache
//         grows with the blocks and the batch.
// Tile:   up to STEP_TILE 16-byte chunks of weights per thread in registers, 128 keys per block
// Layout: strided
// Role:   struct
// Takes:  float32 float16 bfloat16
// Flags:  (none)
// Expect: the stream alone runs at the memory's bandwidth; latency, about 2 us for each of the five
//         exchanges of a layer, is the limit.
//
// Products are accumulated in float32, over lanes by a fixed tree, over warps in order: no result
// depends on timing or on the other rows of the batch. The file is built for one model shape, batch
// size and grid; fused.py sets the macros.

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "element.cuh"
#include "ptx.cuh"

namespace attention {

namespace {

using namespace ptx;

using Weight = Element;
constexpr int kEmbd = STEP_EMBD;
constexpr int kInner = STEP_INNER;
constexpr int kHeads = STEP_HEADS;
constexpr int kVocab = STEP_VOCAB;
constexpr int kBatch = STEP_BATCH;           // 1, 2, 4 or 8
constexpr int kBlocks = STEP_BLOCKS;         // all of them run at once
constexpr int kWarps = STEP_WARPS;           // that compute; one more fills the ring
constexpr int kMaxTile = STEP_TILE;          // weights that a thread has in registers at once
constexpr int kMaxSplits = STEP_MAX_SPLITS;  // of the keys of the longest row
constexpr int kSmemBytes = STEP_SMEM;        // that a block may have

constexpr int kThreads = 32 * kWarps;
constexpr int kHeadDim = kEmbd / kHeads;
constexpr int kPerChunk = 16 / sizeof(Weight);        // weights in 16 bytes
constexpr int kPacked = sizeof(Weight) == 2 ? 2 : 1;  // values of `hidden` in a word
constexpr int kSplit = 128;                           // keys of one row and head for one block
constexpr int kPartial = kHeadDim + 2;                // O before its division, row_max, row_sum
constexpr int kAhead = 6;   // chunks that are asked for and not there; more only makes
                            // the activations wait
constexpr int kTurns = 64;  // tiles, and so chunks, that can be in the ring
constexpr unsigned kWarp = 0xffffffff;
constexpr int kSpinLimit = 1 << 21;  // polls of one word, about a second

static_assert(kEmbd % 64 == 0 && kWarps * 64 >= kEmbd, "each thread has two values of x");
static_assert(kBatch == 1 || kBatch == 2 || kBatch == 4 || kBatch == 8);

__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int power_of_two(int n) {
  return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2);
}

// y (N) = W (N x K) x. Rows are spread over blocks, in pairs, and in a block over groups of warps;
// a lane of a group has one or more 16-byte chunks of each row. fused.py packs W accordingly.
template <int K, int N, int kMost = kMaxTile>
struct Stage {
  static constexpr int kChunks = K / kPerChunk;
  static constexpr int kPasses = ceil_div(kChunks, kThreads);  // chunks of a row for one lane
  static constexpr int kGroupWarps = ceil_div(ceil_div(kChunks, kPasses), 32);
  static constexpr int kLanes = 32 * kGroupWarps;
  static constexpr int kGroups = kWarps / kGroupWarps;
  static constexpr int kUnit = N % 2 == 0 ? 2 : 1;
  static constexpr int kBlockRows = ceil_div(N / kUnit, kBlocks) * kUnit;
  static constexpr int kRows = ceil_div(kBlockRows, kGroups);  // per thread
  static constexpr int kSteps = kRows * kPasses;               // chunks per thread
  static constexpr int kTileRows = ceil_div(kRows, ceil_div(kSteps, min_of(kMost, 32 / kBatch)));
  static constexpr int kTiles = ceil_div(kRows, kTileRows);
  static constexpr int kTileChunks = kTileRows * kPasses;
  static_assert(K % kPerChunk == 0);

  static __device__ int first_row(int block) {
    return static_cast<int>(static_cast<int64_t>(N / kUnit) * block / kBlocks) * kUnit;
  }
  static __device__ int tile_chunks(int tile) {
    return min(kTileRows, kRows - tile * kTileRows) * kPasses;
  }
};
using Qkv = Stage<kEmbd, 3 * kEmbd>;
using Proj = Stage<kEmbd, kEmbd>;
using Fc = Stage<kEmbd, kInner>;
using Fc2 = Stage<kInner, kEmbd>;
using Head = Stage<kEmbd, kVocab, min_of(kMaxTile, 8)>;
constexpr int kLayerTiles = Qkv::kTiles + Proj::kTiles + Fc::kTiles + Fc2::kTiles;
constexpr int kLayerSteps = Qkv::kSteps + Proj::kSteps + Fc::kSteps + Fc2::kSteps;
constexpr int kMaxRows =
    max_of(max_of(Qkv::kRows, Proj::kRows), max_of(max_of(Fc::kRows, Fc2::kRows), Head::kTileRows));

// What the blocks of a layer tell each other.
struct Words {
  Word qkv[kBatch][3 * kEmbd];
  Word partial[kBatch][kHeads][kMaxSplits][kPartial];
  Word x1[kBatch][kEmbd];  // the residual stream after attention
  Word hidden[kBatch][kInner / kPacked];
  Word x2[kBatch][kEmbd];  // and after the MLP
};

struct Exchange {
  Words layers[2];  // layers take turns
  Word best[kBatch][kBlocks][2];
};

// The float32 vectors of a layer, one after the other.
struct LayerVectors {
  float ln_1_weight[kEmbd], ln_1_bias[kEmbd], qkv_bias[3 * kEmbd], proj_bias[kEmbd];
  float ln_2_weight[kEmbd], ln_2_bias[kEmbd], fc_bias[kInner], fc2_bias[kEmbd];
};

}  // namespace

// As fused.py's Params.
struct StructParams {
  const uint4* weights;         // (kBlocks, steps, kThreads): the streams
  const LayerVectors* vectors;  // (layers)
  const float* ln_f;            // weight, bias
  const Weight* wte;
  const Weight* wpe;
  Weight* kv;          // (layers, 2, batch, heads, max_seqlen, head_dim)
  int* seqlens;        // (batch): keys in the cache; the step adds one
  int64_t* newest;     // (batch): the tokens to read; if is_greedy, then those chosen
  int64_t* tokens;     // (batch, capacity): if is_greedy, what is chosen is added at `lengths`
  int64_t* lengths;    // (batch)
  float* logits;       // (batch, vocab)
  Exchange* exchange;  // zeros before the first step
  unsigned* state;  // [0] the next tag, 1 before the first step; [1] not 0 if a poll took too long
  int64_t capacity;
  int layers;
  int max_seqlen;
  int is_greedy;
  float softmax_scale;
  int scales_by_layer;  // softmax_scale is divided by the layer's number, from 1
  float epsilon;
};
using StepParams = StructParams;

namespace {

struct alignas(16) Shared {  // memory after the ring
  Barrier arrived[kTurns];
  Barrier emptied[kTurns];
  int seqlens[kBatch];
  alignas(16) float x[kBatch][kEmbd];   // the residual stream
  alignas(16) float in[kBatch][kEmbd];  // the input of a product
  float sums[2][kMaxRows * kWarps * kBatch];
  float stats[2][kBatch][kWarps];
  float part[kWarps][kPartial];
};

// ---- Weights ------------------------------------------------------------------------------------

// Chunks of a thread in the ring: what the shared memory of a block has room for.
constexpr int kDepth = min_of(kTurns, (kSmemBytes - sizeof(Shared)) / (sizeof(uint4) * kThreads));
static_assert(kDepth >=
                  max_of(max_of(Qkv::kTileChunks, Proj::kTileChunks),
                         max_of(max_of(Fc::kTileChunks, Fc2::kTileChunks), Head::kTileChunks)),
              "the ring has no room for a tile");
constexpr size_t kRingBytes = sizeof(uint4) * kThreads * kDepth;

// Gives up, for all blocks, if the copy never comes.
__device__ inline void await(Barrier* barrier, int parity, unsigned* failed) {
  int spins = 0;
  while (!barrier_test(barrier, parity)) {
    if (++spins == kSpinLimit) *static_cast<volatile unsigned*>(failed) = 1;
    if (spins >= kSpinLimit) return;
  }
}

// What a warp reads of the ring.
struct Stream {
  const uint4* ring;  // (kDepth, kThreads)
  Barrier* arrived;   // (kDepth): a chunk is here
  Barrier* emptied;   // (kTurns): every warp has taken a tile
  unsigned* failed;
  int at, parity, tile;

  template <int P, int kCount>
  __device__ void take(uint4 (&w)[P][kCount]) {
#pragma unroll
    for (int pass = 0; pass < P; ++pass) {
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        await(arrived + at, parity, failed);
        w[pass][r] = ring[at * kThreads + threadIdx.x];
        if (++at == kDepth) at = 0, parity ^= 1;
      }
    }
  }

  // To be called once the warp has used what it took: a load that is only on its way could be
  // overtaken by the next copy.
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(emptied + tile);
    tile = (tile + 1) % kTurns;
  }
};

// Chunks of tile i of the step.
__device__ inline int chunks_of(int i, int layers) {
  if (i >= layers * kLayerTiles) return Head::tile_chunks(i - layers * kLayerTiles);
  int tile = i % kLayerTiles;
  if (tile < Qkv::kTiles) return Qkv::tile_chunks(tile);
  tile -= Qkv::kTiles;
  if (tile < Proj::kTiles) return Proj::tile_chunks(tile);
  tile -= Proj::kTiles;
  if (tile < Fc::kTiles) return Fc::tile_chunks(tile);
  return Fc2::tile_chunks(tile - Fc::kTiles);
}

// One thread fills the ring for the whole step. It asks for no more than a few chunks at once: what
// is asked for beyond the memory's latency only makes the activations wait.
__device__ inline void produce(uint4* ring, Barrier* arrived, Barrier* emptied, const uint4* next,
                               unsigned* failed, int layers) {
  const int chunks = layers * kLayerSteps + Head::kSteps;
  int room = kDepth, tile = 0, slot = 0;
  for (int i = 0; i < chunks; ++i) {
    while (room == 0) {
      await(emptied + tile % kTurns, tile / kTurns % 2, failed);
      room += chunks_of(tile++, layers);
    }
    if (i >= kAhead) await(arrived + (i - kAhead) % kDepth, (i - kAhead) / kDepth % 2, failed);
    barrier_expect(arrived + slot, sizeof(uint4) * kThreads);
    copy_bulk(ring + slot * kThreads, next, sizeof(uint4) * kThreads, arrived + slot);
    next += kThreads;
    slot = slot + 1 == kDepth ? 0 : slot + 1;
    --room;
  }
}

// ---- Activations --------------------------------------------------------------------------------

struct Mail {
  unsigned tag;
  unsigned* failed;
  bool given_up;

  __device__ void send(Word* word, float value) const {
    store_relaxed(word, static_cast<Word>(tag) << 32 | __float_as_uint(value));
  }

  // Words 2 * i of `from`, i < N, and their neighbours, into values. All loads are in flight at once.
  template <int N>
  __device__ void receive(const Word* const (&from)[N], float (&values)[2 * N]) {
    for (int spins = 0;; ++spins) {
      ulonglong2 pairs[N];
#pragma unroll
      for (int i = 0; i < N; ++i) pairs[i] = load_relaxed(from[i]);
      const Word* waits = nullptr;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!has(pairs[i])) waits = from[i];
        values[2 * i] = __uint_as_float(static_cast<unsigned>(pairs[i].x));
        values[2 * i + 1] = __uint_as_float(static_cast<unsigned>(pairs[i].y));
      }
      if (waits == nullptr || given_up) break;
      if (N > 1) {
        while (!has(load_relaxed(waits)) && !given_up) {
          if (++spins % 1024 == 0) look_up(spins);
        }
      } else if (spins % 1024 == 1023) {
        look_up(spins);
      }
    }
    __syncwarp();
  }

  __device__ bool has(const ulonglong2& pair) const {
    return static_cast<unsigned>(pair.x >> 32) == tag && static_cast<unsigned>(pair.y >> 32) == tag;
  }

  __device__ void look_up(int spins) {
    volatile unsigned* const flag = failed;
    if (spins >= kSpinLimit) *flag = 1;
    given_up = *flag != 0;
  }
};

// ---- Sums ---------------------------------------------------------------------------------------

// Sums V values over the warp, V a power of two; lane i returns value i / (32 / V).
template <int kWidth, int V>
__device__ float fold(const float (&a)[V]) {
  if constexpr (kWidth == 0) {
    return a[0];
  } else if constexpr (V == 1) {
    const float sum[1] = {a[0] + __shfl_xor_sync(kWarp, a[0], kWidth)};
    return fold<kWidth / 2>(sum);
  } else {
    const bool upper = threadIdx.x & kWidth;
    float half[V / 2];
#pragma unroll
    for (int j = 0; j < V / 2; ++j) {
      const float sent = upper ? a[j] : a[j + V / 2];
      half[j] = (upper ? a[j + V / 2] : a[j]) + __shfl_xor_sync(kWarp, sent, kWidth);
    }
    return fold<kWidth / 2>(half);
  }
}

// Multiplies the rows of one tile. What each warp of a group has summed goes to
// sums[row of the block][batch][warp].
template <typename S, int kFirst, int kCount, int P>
__device__ void multiply_tile(Stream& stream, const float (&x)[P][kBatch][kPerChunk],
                              const uint4 (&w)[P][kCount], float* sums) {
  constexpr int V = power_of_two(kCount * kBatch);
  float acc[V];
#pragma unroll
  for (int i = 0; i < V; ++i) acc[i] = 0.0f;
#pragma unroll
  for (int pass = 0; pass < P; ++pass) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      float weights[kPerChunk];
      unpack<Weight>(w[pass][r], weights);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int e = 0; e < kPerChunk; ++e) acc[r * kBatch + b] += weights[e] * x[pass][b][e];
      }
    }
  }
  const float sum = fold<16>(acc);
  stream.release();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / S::kGroupWarps, place = warp % S::kGroupWarps;
  const int index = lane / (32 / V);
  if (lane % (32 / V) == 0 && index < kCount * kBatch && group < S::kGroups) {
    const int row = (kFirst + index / kBatch) * S::kGroups + group;
    sums[(row * kBatch + index % kBatch) * S::kGroupWarps + place] = sum;
  }
}

// The tiles from kTile on.
template <typename S, int kTile, int P>
__device__ void multiply_tiles(Stream& stream, const float (&x)[P][kBatch][kPerChunk],
                               float* sums) {
  if constexpr (kTile * S::kTileRows < S::kRows) {
    constexpr int kCount = min_of(S::kTileRows, S::kRows - kTile * S::kTileRows);
    uint4 w[P][kCount];
    stream.take(w);
    multiply_tile<S, kTile * S::kTileRows>(stream, x, w, sums);
    multiply_tiles<S, kTile + 1>(stream, x, sums);
  }
}

// load_x(x) gives the thread its part of x, once its first weights are at hand. The sums of two
// products that follow each other are not in the same place: one is read while the next is written.
template <typename S, typename LoadX>
__device__ void multiply(Stream& stream, float* sums, LoadX&& load_x) {
  uint4 w[S::kPasses][S::kTileRows];
  stream.take(w);
  float x[S::kPasses][kBatch][kPerChunk];
  load_x(x);
  multiply_tile<S, 0>(stream, x, w, sums);
  multiply_tiles<S, 1>(stream, x, sums);
  sync_threads<kThreads>();
}

// The sum over the warps of a group, in order.
template <typename S>
__device__ float sum_warps(const float* sums, int item) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < S::kGroupWarps; ++i) total += sums[item * S::kGroupWarps + i];
  return total;
}

// Which row and which member of the batch a thread finishes; row is -1 if none.
template <typename S>
struct Item {
  int row, batch, local;
  __device__ Item() {
    static_assert(S::kBlockRows * kBatch <= kThreads);
    const int first = S::first_row(blockIdx.x), count = S::first_row(blockIdx.x + 1) - first;
    local = threadIdx.x;
    batch = local % kBatch;
    row = local / kBatch < count ? first + local / kBatch : -1;
  }
};

template <typename S>
__device__ int chunk_at(int pass) {
  const int lane = threadIdx.x % S::kLanes;
  return pass * S::kLanes + lane;
}

// Reads the thread's part of (kBatch, K); 0 beyond the end of K.
template <typename S, int K, int P>
__device__ void read_x(const float (&in)[kBatch][K], float (&x)[P][kBatch][kPerChunk]) {
#pragma unroll
  for (int pass = 0; pass < P; ++pass) {
    const int chunk = chunk_at<S>(pass);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int e = 0; e < kPerChunk; e += 4) {
        float4 four = make_float4(0, 0, 0, 0);
        if (chunk < S::kChunks)
          four = *reinterpret_cast<const float4*>(&in[b][chunk * kPerChunk + e]);
        x[pass][b][e] = four.x, x[pass][b][e + 1] = four.y;
        x[pass][b][e + 2] = four.z, x[pass][b][e + 3] = four.w;
      }
    }
  }
}

// LayerNorm, into shared.in. Each thread with a pair has two values of x for each row of the batch.
__device__ inline void normalize(Shared& shared, const float (&mine)[kBatch][2], bool has_mine,
                                 const float2& weight, const float2& bias, float epsilon) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kLnWarps = kEmbd / 64;
  // Mean and sum of squared deviations of 2, 4, ... 64 values, then of all: no cancellation.
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    float mean = 0.5f * (mine[b][0] + mine[b][1]);
    const float delta = mine[b][0] - mine[b][1];
    float squares = 0.5f * delta * delta;
    float count = 2.0f;
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
      const float other_mean = __shfl_xor_sync(kWarp, mean, width);
      const float other_squares = __shfl_xor_sync(kWarp, squares, width);
      const float d = mean - other_mean;
      squares += other_squares + d * d * (0.5f * count);
      mean = 0.5f * (mean + other_mean);
      count *= 2.0f;
    }
    if (lane == 0 && has_mine) {
      shared.stats[0][b][warp] = mean;
      shared.stats[1][b][warp] = squares;
    }
  }
  sync_threads<kThreads>();
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    float mean = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kLnWarps; ++i) mean += shared.stats[0][b][i];
    mean *= 1.0f / kLnWarps;
#pragma unroll
    for (int i = 0; i < kLnWarps; ++i) {
      const float d = shared.stats[0][b][i] - mean;
      squares += shared.stats[1][b][i] + 64.0f * d * d;
    }
    const float scale = rsqrtf(squares * (1.0f / kEmbd) + epsilon);
    if (has_mine) {
      const float2 y = make_float2((mine[b][0] - mean) * scale * weight.x + bias.x,
                                   (mine[b][1] - mean) * scale * weight.y + bias.y);
      *reinterpret_cast<float2*>(&shared.in[b][2 * threadIdx.x]) = y;
    }
  }
  sync_threads<kThreads>();
}

__device__ inline float gelu(float x) {
  constexpr float kRoot = 0.7978845608028654f;  // sqrt(2 / pi)
  // x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u))
  const float u = kRoot * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

// ---- Attention ----------------------------------------------------------------------------------

constexpr int kKeyLanes = kHeadDim / kPerChunk;  // lanes with a part of one key
constexpr int kKeysAtOnce = 32 / kKeyLanes;      // keys of a warp
constexpr int kKeySteps = ceil_div(kSplit, kKeysAtOnce* kWarps);

// What a warp reads of the cache for one row, head and split; the new token's is not there yet.
struct Keys {
  uint4 k[kKeySteps], v[kKeySteps];

  __device__ static Weight* begin(const StepParams& params, int layer, int b, int head, int which) {
    return params.kv + (((static_cast<int64_t>(layer) * 2 + which) * kBatch + b) * kHeads + head) *
                           params.max_seqlen * kHeadDim;
  }

  __device__ void load(const StepParams& params, int layer, int b, int head, int split, int last) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = split * kSplit + warp * kKeysAtOnce + lane / kKeyLanes;
    const int part = lane % kKeyLanes * kPerChunk;
    const Weight* const k_cache = begin(params, layer, b, head, 0) + part;
    const Weight* const v_cache = begin(params, layer, b, head, 1) + part;
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) {
      const int key = first + i * kWarps * kKeysAtOnce;
      k[i] = v[i] = make_uint4(0, 0, 0, 0);
      if (key < min(last, (split + 1) * kSplit)) {
        k[i] = *reinterpret_cast<const uint4*>(k_cache + key * kHeadDim);
        v[i] = *reinterpret_cast<const uint4*>(v_cache + key * kHeadDim);
      }
    }
  }
};

__device__ inline void attend(const StepParams& params, int layer, int b, int head, int split,
                              Keys& keys, Words& words, Mail& mail, Shared& shared, float scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = lane % kKeyLanes * kPerChunk;  // the lane's elements of a head
  const int last = shared.seqlens[b];             // the new token's position
  uint4(&k)[kKeySteps] = keys.k;
  uint4(&v)[kKeySteps] = keys.v;
  const int at_last = last - split * kSplit;  // of this split, if it is in it
  float q[3 * kPerChunk];
  const Word* const from = &words.qkv[b][head * kHeadDim + part];
  if (at_last < kSplit) {
    const Word* pairs[3 * kPerChunk / 2];
#pragma unroll
    for (int i = 0; i < 3 * kPerChunk / 2; ++i)
      pairs[i] = from + i / (kPerChunk / 2) * kEmbd + i % (kPerChunk / 2) * 2;
    mail.receive(pairs, q);
    uint4 chunks[2];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      Weight rounded[kPerChunk];
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e)
        rounded[e] = from_float<Weight>(q[(which + 1) * kPerChunk + e]);
      memcpy(&chunks[which], rounded, sizeof(uint4));
    }
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) {
      if ((i * kWarps + warp) * kKeysAtOnce + lane / kKeyLanes == at_last) {
        k[i] = chunks[0], v[i] = chunks[1];
#pragma unroll
        for (int which = 0; which < 2; ++which)
          *reinterpret_cast<uint4*>(Keys::begin(params, layer, b, head, which) + last * kHeadDim +
                                    part) = chunks[which];
      }
    }
  } else {
    const Word* pairs[kPerChunk / 2];
    float values[kPerChunk];
#pragma unroll
    for (int i = 0; i < kPerChunk / 2; ++i) pairs[i] = from + 2 * i;
    mail.receive(pairs, values);
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) q[e] = values[e];
  }

  // S, its maximum, P and O of the warp's keys
  float s[kKeySteps];
  float row_max = -FLT_MAX;
#pragma unroll
  for (int i = 0; i < kKeySteps; ++i) {
    float key[kPerChunk];
    unpack<Weight>(k[i], key);
    s[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) s[i] += q[e] * key[e];
  }
#pragma unroll
  for (int width = kKeyLanes / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) s[i] += __shfl_xor_sync(kWarp, s[i], width);
  }
#pragma unroll
  for (int i = 0; i < kKeySteps; ++i) {
    const int at = (i * kWarps + warp) * kKeysAtOnce + lane / kKeyLanes;
    s[i] = at < kSplit && at <= at_last ? s[i] * scale : -INFINITY;
    row_max = fmaxf(row_max, s[i]);
  }
#pragma unroll
  for (int width = kKeyLanes; width < 32; width *= 2)
    row_max = fmaxf(row_max, __shfl_xor_sync(kWarp, row_max, width));
  float row_sum = 0.0f;
  float o[kPerChunk] = {};
#pragma unroll
  for (int i = 0; i < kKeySteps; ++i) {
    const float p = __expf(s[i] - row_max);
    float value[kPerChunk];
    unpack<Weight>(v[i], value);
    row_sum += p;
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) o[e] += p * value[e];
  }
#pragma unroll
  for (int width = kKeyLanes; width < 32; width *= 2) {
    row_sum += __shfl_xor_sync(kWarp, row_sum, width);
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) o[e] += __shfl_xor_sync(kWarp, o[e], width);
  }
  if (lane < kKeyLanes) {
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) shared.part[warp][part + e] = o[e];
  }
  if (lane == 0) {
    shared.part[warp][kHeadDim] = row_max;
    shared.part[warp][kHeadDim + 1] = row_sum;
  }
  sync_threads<kThreads>();
  // The block's
  for (int column = threadIdx.x; column < kPartial; column += kThreads) {
    float block_max = -FLT_MAX;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) block_max = fmaxf(block_max, shared.part[w][kHeadDim]);
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = __expf(shared.part[w][kHeadDim] - block_max);
      total += factor * shared.part[w][column];
    }
    if (column == kHeadDim) total = block_max;
    mail.send(&words.partial[b][head][split][column], total);
  }
  sync_threads<kThreads>();
}

// The two values of O that thread t has, t < kEmbd / 2: the splits of their head, joined.
__device__ inline void join_splits(int splits, const Word (*partial)[kPartial], int column,
                                   Mail& mail, float (&o)[2]) {
  float row_max = -FLT_MAX, row_sum = 0.0f;
  o[0] = o[1] = 0.0f;
  constexpr int kAtOnce = 4;
  for (int first = 0; first < splits; first += kAtOnce) {
    const Word* pairs[2 * kAtOnce];
    float values[4 * kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Word* const words = partial[min(first + i, splits - 1)];
      pairs[2 * i] = words + column;
      pairs[2 * i + 1] = words + kHeadDim;
    }
    mail.receive(pairs, values);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < splits) {
        const float split_max = values[4 * i + 2];
        const float new_max = fmaxf(row_max, split_max);
        const float before = __expf(row_max - new_max), now = __expf(split_max - new_max);
        row_sum = row_sum * before + values[4 * i + 3] * now;
        o[0] = o[0] * before + values[4 * i] * now;
        o[1] = o[1] * before + values[4 * i + 1] * now;
        row_max = new_max;
      }
    }
  }
  const float inverse = 1.0f / row_sum;
  o[0] *= inverse;
  o[1] *= inverse;
}

// ---- The step -----------------------------------------------------------------------------------

struct Best {
  float value;
  int row;
  // NaN is larger than all; of equals the first.
  __device__ void see(float v, int r) {
    const bool larger = v > value || (v != v && value == value);
    if (larger || (v == value && r < row)) value = v, row = r;
  }
};

__global__ void __launch_bounds__(kThreads + 32, 1) fused_step(const StepParams params) {
  ATTENTION_DYNAMIC_SHARED(uint4, ring);
  Shared& shared = *reinterpret_cast<Shared*>(ring + kDepth * kThreads);
  const int t = threadIdx.x, block = blockIdx.x;
  const int steps = params.layers * kLayerSteps + Head::kSteps;
  if (t == 0) {
    for (int i = 0; i < kDepth; ++i) barrier_init(shared.arrived + i, 1);
    for (int i = 0; i < kTurns; ++i) barrier_init(shared.emptied + i, kWarps);
    barrier_init_fence();
  }
  __syncthreads();
  if (t >= kThreads) {
    if (t == kThreads)
      produce(ring, shared.arrived, shared.emptied,
              params.weights + static_cast<int64_t>(block) * steps * kThreads, params.state + 1,
              params.layers);
    return;
  }
  Stream stream{ring, shared.arrived, shared.emptied, params.state + 1, 0, 0, 0};
  const unsigned first_tag = params.state[0];
  Mail mail{first_tag, params.state + 1, false};

  const bool has_pair = 2 * t < kEmbd;
  const int pair = has_pair ? 2 * t : 0;
  float mine[kBatch][2] = {};
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const int64_t token = params.newest[b] < 0 ? 0 : params.newest[b];
    const int64_t position = params.seqlens[b];
    if (t == 0) shared.seqlens[b] = params.seqlens[b];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mine[b][i] = to_float(params.wte[token * kEmbd + pair + i]) +
                   to_float(params.wpe[position * kEmbd + pair + i]);
      if (has_pair) shared.x[b][pair + i] = mine[b][i];
    }
  }

  sync_threads<kThreads>();  // shared.seqlens
  const auto load_pair = [&](const float* vector) {
    return *reinterpret_cast<const float2*>(vector + pair);
  };
  const auto receive_x = [&](const Word(*from)[kEmbd]) {
    const Word* pairs[kBatch];
    float values[2 * kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) pairs[b] = &from[b][pair];
    if (!has_pair) return;
    mail.receive(pairs, values);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      mine[b][0] = shared.x[b][pair] = values[2 * b];
      mine[b][1] = shared.x[b][pair + 1] = values[2 * b + 1];
    }
  };

  for (int layer = 0; layer < params.layers; ++layer) {
    const LayerVectors& vectors = params.vectors[layer];
    Words& words = params.exchange->layers[layer % 2];
    const Words& before = params.exchange->layers[(layer + 1) % 2];

    constexpr int kUnits = kBatch * kHeads * kMaxSplits;  // of attention
    Keys keys;
    if (block < kUnits) {
      const int b = block / kHeads / kMaxSplits;
      keys.load(params, layer, b, block % kHeads, block / kHeads % kMaxSplits, shared.seqlens[b]);
    }

    {  // qkv = W LN(x) + b
      const Item<Qkv> item;
      const float2 weight = load_pair(vectors.ln_1_weight), bias = load_pair(vectors.ln_1_bias);
      const float row_bias = vectors.qkv_bias[max(item.row, 0)];
      multiply<Qkv>(stream, shared.sums[0], [&](auto& x) {
        if (layer > 0) {
          receive_x(before.x2);
        }
        mail.tag = first_tag + layer;
        normalize(shared, mine, has_pair, weight, bias, params.epsilon);
        read_x<Qkv>(shared.in, x);
      });
      if (item.row >= 0)
        mail.send(&words.qkv[item.batch][item.row],
                  sum_warps<Qkv>(shared.sums[0], item.local) + row_bias);
    }

    // O of some rows, heads and splits
    const float scale =
        params.scales_by_layer ? params.softmax_scale / (layer + 1) : params.softmax_scale;
    for (int unit = block; unit < kUnits; unit += kBlocks) {
      const int head = unit % kHeads, split = unit / kHeads % kMaxSplits;
      const int b = unit / kHeads / kMaxSplits, last = shared.seqlens[b];
      if (split * kSplit > last) continue;
      if (unit != block) keys.load(params, layer, b, head, split, last);
      attend(params, layer, b, head, split, keys, words, mail, shared, scale);
    }
    {  // x1 = x + W O + b
      const Item<Proj> item;
      const float row_bias = vectors.proj_bias[max(item.row, 0)];
      multiply<Proj>(stream, shared.sums[1], [&](auto& x) {
        if (has_pair) {
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            float o[2];
            join_splits(shared.seqlens[b] / kSplit + 1, words.partial[b][pair / kHeadDim],
                        pair % kHeadDim, mail, o);
            shared.in[b][pair] = o[0];
            shared.in[b][pair + 1] = o[1];
          }
        }
        sync_threads<kThreads>();
        read_x<Proj>(shared.in, x);
      });
      if (item.row >= 0)
        mail.send(&words.x1[item.batch][item.row],
                  shared.x[item.batch][item.row] +
                      (sum_warps<Proj>(shared.sums[1], item.local) + row_bias));
    }
    {  // hidden = GELU(W LN(x1) + b)
      const Item<Fc> item;
      const float2 weight = load_pair(vectors.ln_2_weight), bias = load_pair(vectors.ln_2_bias);
      const float row_bias = vectors.fc_bias[max(item.row, 0)];
      multiply<Fc>(stream, shared.sums[0], [&](auto& x) {
        receive_x(words.x1);
        normalize(shared, mine, has_pair, weight, bias, params.epsilon);
        read_x<Fc>(shared.in, x);
      });
      const float h =
          item.row < 0 ? 0.0f : gelu(sum_warps<Fc>(shared.sums[0], item.local) + row_bias);
      if constexpr (kPacked == 1) {
        if (item.row >= 0) mail.send(&words.hidden[item.batch][item.row], h);
      } else {
        const float next = __shfl_down_sync(kWarp, h, kBatch);  // the next row's
        const Weight both[2] = {from_float<Weight>(h), from_float<Weight>(next)};
        unsigned bits;
        memcpy(&bits, both, sizeof bits);
        if (item.row >= 0 && item.row % 2 == 0)
          mail.send(&words.hidden[item.batch][item.row / 2], __uint_as_float(bits));
      }
    }
    {  // x2 = x1 + W hidden + b
      const Item<Fc2> item;
      const float row_bias = vectors.fc2_bias[max(item.row, 0)];
      multiply<Fc2>(stream, shared.sums[1], [&](auto& x) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          constexpr int kWords = kPerChunk / kPacked;  // 4
          const Word* pairs[Fc2::kPasses * kWords / 2];
          float values[Fc2::kPasses * kWords];
#pragma unroll
          for (int pass = 0; pass < Fc2::kPasses; ++pass) {
            const int chunk = min(chunk_at<Fc2>(pass), Fc2::kChunks - 1);
#pragma unroll
            for (int i = 0; i < kWords / 2; ++i)
              pairs[pass * kWords / 2 + i] = &words.hidden[b][chunk * kWords + 2 * i];
          }
          mail.receive(pairs, values);
#pragma unroll
          for (int pass = 0; pass < Fc2::kPasses; ++pass) {
            const float* const four = values + pass * kWords;
            unpack<Weight>(make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                      __float_as_uint(four[2]), __float_as_uint(four[3])),
                           x[pass][b]);
#pragma unroll
            for (int e = 0; e < kPerChunk; ++e)
              if (chunk_at<Fc2>(pass) >= Fc2::kChunks) x[pass][b][e] = 0.0f;
          }
        }
      });
      if (item.row >= 0)
        mail.send(&words.x2[item.batch][item.row],
                  shared.x[item.batch][item.row] +
                      (sum_warps<Fc2>(shared.sums[1], item.local) + row_bias));
    }
  }

  // The logits, and the largest of each row of the batch
  static_assert(kThreads % kBatch == 0);
  Best best{-INFINITY, kVocab};
  {
    const float2 weight = load_pair(params.ln_f), bias = load_pair(params.ln_f + kEmbd);
    float x[Head::kPasses][kBatch][kPerChunk];
    receive_x(params.exchange->layers[(params.layers - 1) % 2].x2);
    normalize(shared, mine, has_pair, weight, bias, params.epsilon);
    read_x<Head>(shared.in, x);
    const int first = Head::first_row(block), count = Head::first_row(block + 1) - first;
    int turn = 0;
    const auto finish = [&](int begin, int rows) {
      sync_threads<kThreads>();
      for (int item = t; item < rows * Head::kGroups * kBatch; item += kThreads) {
        const int row = begin * Head::kGroups + item / kBatch;
        if (row < count) {
          const float logit = sum_warps<Head>(shared.sums[turn], item);
          params.logits[static_cast<int64_t>(t % kBatch) * kVocab + first + row] = logit;
          best.see(logit, first + row);
        }
      }
      turn ^= 1;  // the next sums are written while others still read these
    };
    constexpr int kRest = Head::kRows - (Head::kTiles - 1) * Head::kTileRows;
    for (int tile = 0; tile < Head::kTiles - 1; ++tile) {
      uint4 w[Head::kPasses][Head::kTileRows];
      stream.take(w);
      multiply_tile<Head, 0>(stream, x, w, shared.sums[turn]);
      finish(tile * Head::kTileRows, Head::kTileRows);
    }
    uint4 w[Head::kPasses][kRest];
    stream.take(w);
    multiply_tile<Head, 0>(stream, x, w, shared.sums[turn]);
    finish((Head::kTiles - 1) * Head::kTileRows, kRest);
  }
  // Over the lanes with the same row of the batch, then over warps and blocks
#pragma unroll
  for (int width = 16; width >= kBatch; width /= 2) {
    const float value = __shfl_xor_sync(kWarp, best.value, width);
    const int row = __shfl_xor_sync(kWarp, best.row, width);
    best.see(value, row);
  }
  float* const values = shared.sums[0];
  int* const rows = reinterpret_cast<int*>(shared.sums[1]);
  sync_threads<kThreads>();
  if (t % 32 < kBatch) {
    values[t / 32 * kBatch + t % 32] = best.value;
    rows[t / 32 * kBatch + t % 32] = best.row;
  }
  sync_threads<kThreads>();
  Word(*const mailbox)[kBlocks][2] = params.exchange->best;
  if (t < kBatch) {
    for (int w = 1; w < kWarps; ++w) best.see(values[w * kBatch + t], rows[w * kBatch + t]);
    mail.send(&mailbox[t][block][0], best.value);
    mail.send(&mailbox[t][block][1], __int_as_float(best.row));
  }
  if (block != 0) return;
  sync_threads<kThreads>();
  for (int b = t / 32; b < kBatch; b += kWarps) {
    Best all{-INFINITY, kVocab};
    for (int i = 0; i < kBlocks; i += 32) {
      const Word* pairs[1] = {mailbox[b][min(i + t % 32, kBlocks - 1)]};
      float value[2];
      mail.receive(pairs, value);
      all.see(value[0], __float_as_int(value[1]));
    }
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      const float value = __shfl_xor_sync(kWarp, all.value, width);
      const int row = __shfl_xor_sync(kWarp, all.row, width);
      all.see(value, row);
    }
    if (t % 32 == 0) {
      params.seqlens[b] += 1;
      if (params.is_greedy) {
        const int64_t token = all.value - all.value == 0.0f ? all.row : -1;
        const int64_t at = params.lengths[b];
        params.newest[b] = token;
        params.tokens[b * params.capacity + at] = token;
        params.lengths[b] = at + 1;
      }
    }
  }
  if (t == 0) params.state[0] = first_tag + params.layers;
}

}  // namespace

namespace ATTENTION_VERSION {

// Of the exchange, which outlives a launch: the caller keeps it.
int64_t scratch_floats(const StepParams&) { return sizeof(Exchange) / sizeof(float); }

cudaError_t launch(const StepParams& params, cudaStream_t stream) {
  return launch_cooperative(fused_step, dim3(kBlocks), dim3(kThreads + 32),
                            kRingBytes + sizeof(Shared), stream, params);
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
