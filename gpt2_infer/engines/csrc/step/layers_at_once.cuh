// All layers of a step in one kernel, for a single row.
//
// A head has a cluster of 8 blocks. The cluster computes the head's q, k and v, attends, and
// multiplies O by the head's rows of the projection. Then it computes its share of the hidden units
// and multiplies them by their rows of the second matrix. Both products leave one part of each sum
// in global memory. Block i of every cluster adds up the parts of columns of its own, the i-th eighth
// of x, and sends the sums to its cluster.
//
// So a layer has seven exchanges. In their order, with the phases of struct Block that send and wait,
// and the bytes that each block that waits receives, for GPT-2 small in float32 and in 16 bits:
//
//   exchange      sent by                        awaited by                     bytes       by
//   kHeadsQkv     compute_qkv(): blocks with     compute_qkv(): all of the      768, 512    barrier
//                 columns of q, k and v          cluster
//   kHeadsSplits  attend(): blocks with keys     attend(): all of the cluster   264 each    barrier
//   words         project_heads(): all, parts    project_heads(): blocks of     4,608       word
//                 of their columns of x          that rank in all clusters
//   kSumX         project_heads(): all, their    compute_hidden(): all of the   3,072       barrier
//                 columns of x                   cluster
//   kHiddenUnits  compute_hidden(): all          project_hidden(): all of the   1,024, 512  barrier
//                                                cluster
//   words         project_hidden(): all, parts   sum_hidden(), in the end       4,608       word
//                 of their columns of x          leave_x(): as above
//   kNextX        sum_hidden(): all, their       sum_hidden(): the cluster's    3,072       barrier
//                 columns of x                   with columns of q, k and v
//
// Within a cluster, blocks store into each other's shared memory, and a barrier there counts the bytes
// of an exchange. Between clusters, a word in global memory is 0 until it has a value: who waits reads it
// until then.
//
// The blocks of a cluster meet at a barrier of all of them only once. It orders all memory accesses, so
// it waits for requested weights, too.
//
// Weights arrive in tiles, in turn: a block's columns of q, k and v; of the hidden units; and of the
// hidden units' projection. A tile lies in one of kRegions regions of shared memory. When it has
// been used, there is room for the tile kRegions further on. The heads' projection has its own region.
// Loads, and words on their way, wait for copies that were requested before them. So a tile is not
// requested as soon as there is room for it, but where the block next has much to compute.
// A copy may overtake a load, so every thread that has read a tile calls proxy_fence() before the
// barrier after which its region is requested again; after the heads' projection, in the next product.
//
// Why a buffer may be overwritten: a block sends its hidden units to all blocks of its cluster, so
// who has received all of a layer's knows that the others have read what they needed before. Parts
// of another layer follow those in between, which need all clusters.

#pragma once

#include "attention.cuh"
#include "norm.cuh"
#include "products.cuh"
#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kAttendWarps = slot::kWarps;
constexpr int kRanks = 8;  // blocks of a cluster
constexpr int kRankColumns = kEmbd / kRanks;
constexpr int kClusterHidden = kInner / kHeads, kRankHidden = kClusterHidden / kRanks;
static_assert(kBatch == 1 && !kIsPortable && kMaxSplits <= kRanks);
static_assert(kEmbd % (8 * kRanks) == 0 && kInner % (kHeads * kRanks) == 0);
constexpr int kColumnWarps = ceil_div(kRankColumns, 32);
static_assert(kColumnWarps < kAttendWarps);

using QkvProduct = Product<kQkv>;
using FcProduct = Product<kFc>;
static_assert(QkvProduct::kWarps == kAttendWarps && FcProduct::kWarps == kAttendWarps);
static_assert(kHeadDim % QkvProduct::kColumns == 0 && kRankHidden % FcProduct::kColumns == 0);
// One part of the sums, of 8 columns, computed by a warp.
using HeadPart = AnyProduct<kHeadDim, kEmbd, 8, 1>;
using HiddenPart = AnyProduct<kClusterHidden, kEmbd, 8, 1>;
// kProj and kFc2 sum the same parts, one per warp.
static_assert(Product<kProj>::kWarps == kHeads && Product<kFc2>::kWarps == kHeads);

// A head's q, k and v have kQkvUnits units of columns; block i has unit i, i + kRanks and so on.
constexpr int kUnitsPerHead = kHeadDim / QkvProduct::kColumns;
constexpr int kQkvUnits = 3 * kUnitsPerHead, kMostUnits = ceil_div(kQkvUnits, kRanks);
constexpr int kFcUnits = kRankHidden / FcProduct::kColumns;
constexpr int kXPerThread = ceil_div(kEmbd, kAttendThreads);
constexpr int kParts = kRankColumns / 8;  // units of 8 columns of a block
constexpr int kPartsPerWarp = ceil_div(kParts, kAttendWarps);
constexpr int kStalePerThread = ceil_div(2 * kRankColumns, kAttendThreads);

constexpr int kRegionBytes =
    max_of(max_of(kMostUnits * QkvProduct::kBytes, kFcUnits* FcProduct::kBytes),
           kParts* HiddenPart::kBytes);
constexpr int kProjBytes = kParts * HeadPart::kBytes;

// What the blocks of a cluster send each other, and each block to itself. A barrier in each block
// waits for the bytes, once per layer.
enum Exchange { kSumX, kNextX, kHeadsQkv, kHeadsSplits, kHiddenUnits, kExchanges };

struct LayersShared {
  // What the LayerNorms read and write, and attention's results, are not needed at the same time.
  union {
    alignas(16) Factor normed[kEmbd + QkvProduct::kPadding];
    // After a layer. Blocks without columns of q, k and v are not sent it: nobody waits for them
    // before sending splits, which it could then overwrite.
    float x_next[kEmbd];
    struct : AttentionShared {
      Partial splits[kRanks];
    } attention;
  };
  alignas(16) float x_sum[kEmbd];  // after attention
  alignas(16) float q[kHeadDim];
  alignas(16) Element newest[2][kHeadDim];  // of k and v
  alignas(16) Factor o[kHeadDim];
  alignas(16) Factor hidden[kClusterHidden];
  float sums[kAttendWarps][max_of(kMostUnits * QkvProduct::kColumns, kRankHidden)];
  Norm<kAttendWarps>::Shared norm;
  ptx::Barrier exchanges[kExchanges], arrived[6], proj_arrived;
};

constexpr int kRegions = min_of(
    6, (kSmemBytes - 256 - static_cast<int>(sizeof(LayersShared)) - kProjBytes) / kRegionBytes);
static_assert(kRegions >= 2);
// A layer has more tiles than that, as GPT-2's in float32.
constexpr bool kHasFewRegions = kRegions < 3;
constexpr size_t kTileBytes = kRegions * kRegionBytes + kProjBytes;

// A product's weights that have arrived, or zeros.
template <typename P>
struct ArrivedWeights {
  const uint4* s_weights;
  bool exist = true;
  __device__ void await(int) {}
  __device__ uint4 at(int step, int i) const {
    return exist ? *P::piece(s_weights, step, i) : make_uint4(0, 0, 0, 0);
  }
  __device__ void replace(int) {}
};

struct Tiles {
  const StepParams& p;
  LayersShared& shared;
  uint4* const s_tiles;
  const int rank, head;
  static constexpr Kind kKinds[] = {kQkv, kFc, kFc2};

  __device__ uint4* region(int tile) const {
    return s_tiles + tile % kRegions * (kRegionBytes / 16);
  }
  __device__ uint4* proj() const { return s_tiles + kRegions * (kRegionBytes / 16); }

  __device__ void await(int tile) {
    ptx::barrier_wait(&shared.arrived[tile % kRegions], tile / kRegions % 2);
  }
  __device__ void await_proj(int layer) { ptx::barrier_wait(&shared.proj_arrived, layer % 2); }

  // The warps from kFrom on request a tile of a layer, 0 to 2, or of a later one. Its region must not be
  // in use.
  template <int kTile, int kFrom = 0>
  __device__ __forceinline__ void request(int layer) const {
    const int tile = 3 * layer + kTile;
    if (layer + kTile / 3 < p.layers)
      request<kKinds[kTile % 3], kFrom>(layer + kTile / 3, region(tile),
                                        &shared.arrived[tile % kRegions]);
  }
  __device__ __forceinline__ void request_proj(int layer) const {
    if (layer < p.layers) request<kProj, 0>(layer, proj(), &shared.proj_arrived);
  }
  // The copies are divided among the warps, because a warp's lanes make theirs one after the other: from
  // the last warp on, or from the middle for a matrix that is requested together with another one. Some
  // may arrive before the barrier expects them.
  template <Kind kKind, int kFrom>
  __device__ __forceinline__ void request(int layer, uint4* to, ptx::Barrier* arrived) const {
    constexpr int kWarps = kAttendWarps - kFrom, kFirst = kKind == kProj ? kWarps / 2 : 0;
    const int i = threadIdx.x % 32 * kWarps +
                  (2 * kAttendWarps - 1 - kFirst - static_cast<int>(threadIdx.x) / 32) % kWarps;
    const Source source = source_of<kKind>(layer, i);
    const int count = source.count, bytes = source.bytes;
    if (i == 0) {
      if (count > 0)
        ptx::barrier_expect(arrived, count * bytes);
      else
        ptx::barrier_arrive(arrived);
    }
    if (i < count)
      ptx::copy_bulk(to + i * (bytes / 16), source.from, bytes, arrived, ptx::evict_first());
  }
  // The i-th of the `count` pieces that a block has of a matrix.
  struct Source {
    const Element* from;
    int count, bytes;
  };
  template <Kind kKind>
  __device__ __forceinline__ Source source_of(int layer, int i) const {
    const LayerWeights& weights = p.weights[layer];
    if constexpr (kKind == kQkv) {
      const int unit = rank + i * kRanks;
      const int packed =
          (unit / kUnitsPerHead * kHeads + head) * kUnitsPerHead + unit % kUnitsPerHead;
      return {weights.qkv + int64_t{packed} * (kEmbd * QkvProduct::kColumns),
              rank < kQkvUnits ? (kQkvUnits - 1 - rank) / kRanks + 1 : 0, QkvProduct::kBytes};
    } else if constexpr (kKind == kFc) {
      constexpr int kBytes = kFcUnits * FcProduct::kBytes;
      return {
          weights.fc + int64_t{head * kRanks + rank} * (kBytes / static_cast<int>(sizeof(Element))),
          1, kBytes};
    } else {
      // The cluster's rows of the block's columns; packed in units of 8 columns.
      const int first = rank * kParts + i;
      if constexpr (kKind == kProj)
        return {weights.proj + (first * kEmbd + head * HeadPart::K) * 8, kParts, HeadPart::kBytes};
      else
        return {weights.fc2 + (int64_t{first} * kInner + head * HiddenPart::K) * 8, kParts,
                HiddenPart::kBytes};
    }
  }
};
static_assert(kParts <= kAttendThreads && kMostUnits <= kAttendThreads);

constexpr int kLine = 128;  // bytes that a prefetch requests
constexpr int kLineOfRow = min_of(kLine / static_cast<int>(sizeof(Element)), kHeadDim);
constexpr int kVectorLines = ceil_div(static_cast<int>(sizeof(LayerVectors)), kLine);
constexpr int kVectorLinesOfBlock = ceil_div(kVectorLines, kRanks* kHeads);
static_assert(kAttendThreads >= 2 * kSplit);

// Sends an element to block `to` of the cluster, if it exists. Consecutive lanes have consecutive
// elements.
template <typename T>
__device__ void send_element(T* here, int to, T element, ptx::Barrier* exchange) {
  if constexpr (sizeof(T) == 4) {
    if (to < kRanks) ptx::send_words<1>(here, to, {__float_as_uint(element)}, exchange);
  } else {
    // Two at once
    const unsigned mine = *reinterpret_cast<const unsigned short*>(&element);
    const unsigned next = __shfl_down_sync(kWarp, mine, 1);
    if (to < kRanks && threadIdx.x % 2 == 0)
      ptx::send_words<1>(here, to, {mine | next << 16}, exchange);
  }
}

// Multiplies x by the block's columns of the cluster's rows, in units of 8 columns. A warp's units are
// multiplied together, because the products of each are a chain.
template <typename P>
__device__ void leave_parts(const uint4* tile, const Factor* x, Word* words) {
  const int warp = threadIdx.x / 32;
  int column = -1;  // of each unit, if this lane has its sum
  float sums[kPartsPerWarp];
  const auto exists = [=](int i) {
    return (i + 1) * kAttendWarps <= kParts || warp + i * kAttendWarps < kParts;
  };
#pragma unroll
  for (int i = 0; i < kPartsPerWarp; ++i) {
    ArrivedWeights<P> weights{tile + (warp + i * kAttendWarps) * (P::kBytes / 16), exists(i)};
    P::template multiply<false>(weights, x, [&](int at, float sum) { column = at, sums[i] = sum; });
  }
#pragma unroll
  for (int i = 0; i < kPartsPerWarp; ++i)
    if (column >= 0 && exists(i))
      ptx::store_word(words + (warp * 8 + column) + i * kAttendWarps * 8,
                      ~__float_as_uint(sums[i]));
}

// Waits for the parts of a column and adds them up: the sum is NaN if one has not arrived.
__device__ inline float sum_parts(const Word* words) {
  for (;;) {
    Word parts[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) parts[i] = ptx::load_word(words + i * kEmbd);
    float y = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) y += __uint_as_float(~parts[i]);
    if (y == y) return y;
    Word least = parts[0];
#pragma unroll
    for (int i = 1; i < kHeads; ++i) least = min(least, parts[i]);
    if (least != 0) return y;
    ptx::poll_again();
  }
}

__device__ inline float embedding(const StepParams& p, int64_t token, int position, int i) {
  return to_float(p.wte[token * kEmbd + i]) + to_float(p.wpe[int64_t{position} * kEmbd + i]);
}

// What a thread needs of a layer besides weights, keys and values.
struct Inputs {
  const Norm<kAttendWarps> norm_1, norm_2;
  float qkv_bias[kMostUnits], fc_bias[kFcUnits], proj_bias, fc2_bias;

  __device__ __forceinline__ Inputs(const LayerVectors& vectors, int rank, int head, int column)
      : norm_1(vectors.ln_1_weight, vectors.ln_1_bias),
        norm_2(vectors.ln_2_weight, vectors.ln_2_bias) {
    constexpr int kColumns = QkvProduct::kColumns, kFcColumns = FcProduct::kColumns;
    const int t = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kMostUnits; ++i) {
      const int unit = min(rank + i * kRanks, kQkvUnits - 1);
      qkv_bias[i] = vectors.qkv_bias[unit / kUnitsPerHead * kEmbd + head * kHeadDim +
                                     unit % kUnitsPerHead * kColumns + t % kColumns];
    }
#pragma unroll
    for (int i = 0; i < kFcUnits; ++i)
      fc_bias[i] =
          vectors.fc_bias[(head * kRanks + rank) * kRankHidden + i * kFcColumns + t % kFcColumns];
    proj_bias = vectors.proj_bias[column];
    fc2_bias = vectors.fc2_bias[column];
  }
};

// A block, with a function for each phase. All are inlined and lambdas capture copies, so that the
// members stay in registers.
struct Block {
  const StepParams& p;
  LayersShared& shared;
  uint4* const s_tiles;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int rank = blockIdx.x % kRanks, head = blockIdx.x / kRanks;
  Tiles tiles{p, shared, s_tiles, rank, head};
  int newest;
  // This thread's column of x, in the blocks of this rank
  const bool has_column = t < kRankColumns;
  int column;
  float x;
  float fc2_bias = 0.0f;  // of the previous layer
  static constexpr int kHidden =
      kHeads * kEmbd;  // from the words of the heads to the hidden units'
  const Word* parts;   // of the column, from all clusters
  Word* my_parts;      // from this one, of all columns of the rank
  Word* stale;         // those that it writes in the next step

  __device__ __forceinline__ void expect(Exchange exchange) {
    constexpr int kBytes[kExchanges] = {
        4 * kEmbd, 4 * kEmbd, 4 * kHeadDim + 2 * kHeadDim * static_cast<int>(sizeof(Element)), 0,
        kClusterHidden * static_cast<int>(sizeof(Factor))};
    const int bytes = exchange == kHeadsSplits
                          ? (newest / kSplit + 1) * static_cast<int>(sizeof(Partial))
                          : kBytes[exchange];
    if (t == 0) ptx::barrier_expect(&shared.exchanges[exchange], bytes);
  }
  __device__ __forceinline__ void await(Exchange exchange, int layer) {
    ptx::barrier_wait(&shared.exchanges[exchange], layer % 2);
    expect(exchange);  // the next layer's
  }
  __device__ __forceinline__ void send_x(float* here, Exchange exchange) const {
#pragma unroll
    for (int to = 0; to < (exchange == kNextX ? min_of(kRanks, kQkvUnits) : kRanks); ++to)
      ptx::send_words<1>(here + column, to, {__float_as_uint(x)}, &shared.exchanges[exchange]);
  }

  // Requests the keys and values that the block reads in a layer, and its share of the layer's
  // vectors, into L2.
  __device__ __forceinline__ void prefetch(int layer) const {
    const int key = rank * kSplit + t / 2;
    if (t < 2 * kSplit && key < newest) {
      const Element* const row = cache_of(p, layer, t % 2, 0, head) + int64_t{key} * kHeadDim;
#pragma unroll
      for (int i = 0; i < kHeadDim; i += kLineOfRow) ptx::prefetch(row + i);
    }
    const int line = blockIdx.x * kVectorLinesOfBlock + t;
    if (t < kVectorLinesOfBlock && line < kVectorLines)
      ptx::prefetch(reinterpret_cast<const char*>(&p.vectors[layer]) + line * kLine);
  }

  __device__ __forceinline__ void normalize(const Norm<kAttendWarps>& norm, const float* of) {
    Factor* const normed = shared.normed;
    norm.apply([=](int, int k) { return of[k]; }, p.epsilon, shared.norm,
               [=](int k, const float (&row)[1]) { normed[k] = from_float<Factor>(row[0]); });
  }
  // Multiplies the normalized x by the tile's i-th unit of columns; each warp leaves its own sums.
  template <typename P>
  __device__ __forceinline__ void multiply(const uint4* tile, int i) {
    float* const sums = shared.sums[warp];
    ArrivedWeights<P> weights{tile + i * (P::kBytes / 16)};
    P::template multiply<false>(weights, shared.normed,
                                [=](int at, float sum) { sums[i * P::kColumns + at] = sum; });
  }
  // Adds up a column's sums of all warps.
  __device__ __forceinline__ float sum_warps(int at) const {
    float y = 0.0f;
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) y += shared.sums[w][at];
    return y;
  }

  template <int kTile>
  __device__ __forceinline__ void request_first() const {
    if constexpr (kTile < kRegions) {
      tiles.request<kTile>(0);
      request_first<kTile + 1>();
    }
  }
  // Requests tiles first, so that they arrive while x is read and the cluster's blocks begin.
  __device__ __forceinline__ void begin() {
    if (t == 0) {
      for (int i = 0; i < kRegions; ++i) ptx::barrier_init(&shared.arrived[i], 1);
      ptx::barrier_init(&shared.proj_arrived, 1);
      for (int i = 0; i < kExchanges; ++i) ptx::barrier_init(&shared.exchanges[i], 1);
      ptx::barrier_init_fence();
    }
    __syncwarp();  // without it, racecheck warns that another lane may have initialized them
    newest = p.seqlens[0];
    for (int i = 0; i < kExchanges; ++i) expect(static_cast<Exchange>(i));
    __syncthreads();
    tiles.request<0>(0);
    tiles.request_proj(0);
    request_first<1>();
    const int64_t token = p.newest[0] < 0 ? 0 : p.newest[0];
#pragma unroll
    for (int i = 0; i < kXPerThread; ++i) {
      const int at = t + i * kAttendThreads;
      if (at < kEmbd) shared.x_next[at] = embedding(p, token, newest, at);
    }
    column = rank * kRankColumns + (has_column ? t : 0);
    x = embedding(p, token, newest, column);
    const int parity = p.scratch->epoch % 2, first = 2 * kHeads * kLayers;
    auto& words = p.scratch->words;
    parts = words[parity * first] + column;
    my_parts = ptx::kept(words[parity * first + head] + rank * kRankColumns);
    stale = words[(1 - parity) * first + head] + rank * kRankColumns;
    ptx::cluster_arrive();
    ptx::cluster_wait();  // the cluster's blocks have begun, and expect what they are sent
  }

  // Ends the previous layer, after the loads for this one, which arrive meanwhile.
  __device__ __forceinline__ void sum_hidden(const Inputs& inputs, int layer, int tile) {
    if (!kHasFewRegions && layer > 0) tiles.request_proj(layer);
    if (layer + 1 < p.layers) prefetch(layer + 1);
#pragma unroll
    for (int i = 0; i < kStalePerThread; ++i) {
      const int at = t + i * kAttendThreads;
      if (at < 2 * kRankColumns)
        ptx::store_word(stale + (at / kRankColumns * kHidden + at % kRankColumns), Word{0});
    }
    stale += 2 * kHidden;
    if (layer > 0) {
      if (has_column) {
        x += sum_parts(parts + kHidden) + fc2_bias;
        send_x(shared.x_next, kNextX);
      }
      tiles.await(tile);
      if (kHasFewRegions && warp >= kColumnWarps) {
        // These warps have waited for no parts of x.
        ptx::named_barrier_sync(1, kAttendThreads);
        tiles.request<kRegions - 1, kColumnWarps>(layer);
      }
      if (rank < kQkvUnits) await(kNextX, layer - 1);
      if constexpr (kHasFewRegions)
        tiles.request_proj(layer);
      else
        tiles.request<kRegions - 2>(layer);
    } else {
      tiles.await(tile);
    }
    if (layer > 0) parts += 2 * kHidden, my_parts += 2 * kHidden;
    fc2_bias = inputs.fc2_bias;
  }

  // Each block normalizes all of x: to send it normalized would be one more exchange.
  __device__ __forceinline__ void compute_qkv(const Inputs& inputs, int layer, int tile) {
    constexpr int kColumns = QkvProduct::kColumns;
    if (rank < kQkvUnits) normalize(inputs.norm_1, shared.x_next);
#pragma unroll
    for (int i = 0; i < kMostUnits; ++i) {
      if (rank + i * kRanks >= kQkvUnits) break;
      multiply<QkvProduct>(tiles.region(tile), i);
    }
    ptx::proxy_fence();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMostUnits; ++i) {
      const unsigned unit = rank + i * kRanks;
      if (unit >= kQkvUnits) break;
      const float y = sum_warps(i * kColumns + t % kColumns) + inputs.qkv_bias[i];
      const int to = t / kColumns;  // the block that this thread sends its column to
      const int matrix = unit / kUnitsPerHead, at = unit % kUnitsPerHead * kColumns + t % kColumns;
      if (matrix == 0) {
        send_element(&shared.q[at], to, y, &shared.exchanges[kHeadsQkv]);
      } else {
        const auto element = from_float<Element>(y);
        send_element(&shared.newest[matrix - 1][at], to, element, &shared.exchanges[kHeadsQkv]);
        if (to == 0)
          cache_of(p, layer, matrix - 1, 0, head)[int64_t{newest} * kHeadDim + at] = element;
      }
    }
    if constexpr (kHasFewRegions)
      tiles.request<kRegions>(layer);
    else if (layer > 0)
      tiles.request<kRegions - 1>(layer);
    await(kHeadsQkv, layer);
  }

  // Every block joins all splits, because each multiplies all of the head's O.
  __device__ __forceinline__ void attend(Attention& attention, int layer) {
    auto& splits = shared.attention.splits;
    if (rank * kSplit <= newest) {
      const auto query =
          attention.receive(slot::Token<true>{shared.q, shared.newest[0], shared.newest[1]});
      const auto result = attention.attend_to(query, scale_of(p, layer), rank, 0, shared.attention);
      result.store(shared.attention.partials);
      __syncthreads();
      // Each warp sends the result to a block; a lane two columns of O at a time.
#pragma unroll
      for (int i = 0; i < kHeadDim / 64; ++i) {
        const int at = i * 64 + 2 * lane;
        const Join<2> join(shared.attention.partials, kPartials, at);
        ptx::send_words<2>(&splits[rank].o[at], warp,
                           {__float_as_uint(join.o[0]), __float_as_uint(join.o[1])},
                           &shared.exchanges[kHeadsSplits]);
        if (at == 0)
          ptx::send_words<2>(&splits[rank].row_max, warp,
                             {__float_as_uint(join.row_max), __float_as_uint(join.row_sum)},
                             &shared.exchanges[kHeadsSplits]);
      }
    }
    tiles.await_proj(layer);
    await(kHeadsSplits, layer);
    if (t < kHeadDim) {
      const Join<1> join(splits, newest / kSplit + 1, t);
      shared.o[t] = from_float<Factor>(join.o[0] / join.row_sum);
    }
    __syncthreads();
  }

  // The blocks of a rank, one in each cluster, add up the same parts: to send each other the sums
  // would be one more exchange between clusters.
  __device__ __forceinline__ void project_heads(const Inputs& inputs) {
    leave_parts<HeadPart>(tiles.proj(), shared.o, my_parts);
    if (has_column) {
      x += sum_parts(parts) + inputs.proj_bias;
      send_x(shared.x_sum, kSumX);
    }
  }

  // A cluster sends its hidden units to no other: it multiplies them itself.
  __device__ __forceinline__ void compute_hidden(const Inputs& inputs, int layer, int tile) {
    constexpr int kColumns = FcProduct::kColumns;
    tiles.await(tile + 1);
    await(kSumX, layer);
    if constexpr (!kHasFewRegions) tiles.request<kRegions>(layer);
    normalize(inputs.norm_2, shared.x_sum);
#pragma unroll
    for (int i = 0; i < kFcUnits; ++i) multiply<FcProduct>(tiles.region(tile + 1), i);
    ptx::proxy_fence();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kFcUnits; ++i) {
      const int at = i * kColumns + t % kColumns;
      const float y = sum_warps(at) + inputs.fc_bias[i];
      send_element(&shared.hidden[rank * kRankHidden + at], t / kColumns,
                   from_float<Factor>(gelu(y)), &shared.exchanges[kHiddenUnits]);
    }
    if constexpr (kHasFewRegions) tiles.request<kRegions + 1>(layer);
  }

  // Leaves the parts that sum_hidden() adds up in the next layer.
  __device__ __forceinline__ void project_hidden(int layer, int tile) {
    tiles.await(tile + 2);
    await(kHiddenUnits, layer);
    leave_parts<HiddenPart>(tiles.region(tile + 2), shared.hidden, my_parts + kHidden);
    if constexpr (kHasFewRegions) {
      ptx::proxy_fence();
      if (warp < kColumnWarps && layer + 1 < p.layers) ptx::named_barrier_arrive(1, kAttendThreads);
    }
  }

  // All clusters have the same x.
  __device__ __forceinline__ void leave_x() const {
    if (has_column && head == 0)
      p.scratch->x[0][column] = x + (sum_parts(parts + kHidden) + fc2_bias);
  }
};

// Grid: kRanks times the heads.
__global__ void __launch_bounds__(kAttendThreads, 1) layers_at_once(const StepParams p) {
  ATTENTION_DYNAMIC_SHARED(uint4, s_tiles);
  __shared__ LayersShared shared;
  ptx::allow_next();
  Block block{p, (&shared)[ptx::kept(0)], s_tiles};
  block.begin();
  for (int layer = 0; layer < p.layers; ++layer) {
    const int head = block.head;
    // All is loaded together, while the block waits for the parts of x: a warp that waits for one of
    // its loads waits for later ones as well.
    const Inputs inputs(p.vectors[layer], block.rank, head, block.column);
    Attention attention{slot::Cache{cache_of(p, layer, 0, 0, head), cache_of(p, layer, 1, 0, head),
                                    kHeadDim, kHeadDim, block.newest}};
    attention.load(block.rank);
    const int tile = 3 * layer;
    block.sum_hidden(inputs, layer, tile);
    block.compute_qkv(inputs, layer, tile);
    block.attend(attention, layer);
    block.project_heads(inputs);
    block.compute_hidden(inputs, layer, tile);
    block.project_hidden(layer, tile);
  }
  block.leave_x();
}

inline cudaError_t launch_layers(const StepParams& p, cudaStream_t stream) {
  return launch_at_once(layers_at_once, kRanks * kHeads, kRanks, kAttendThreads, kTileBytes, stream,
                        p);
}

}  // namespace attention::ATTENTION_VERSION
