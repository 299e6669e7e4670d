// v04 - three products with Hopper's wgmma
//
// From:   v02
// Change: a warpgroup multiplies 64 rows of x, in registers, by 64 columns of W in shared memory. A
//         thread of another warp copies slabs ahead, in bulk. While the sums of 32 k are added to
//         the tile's, tensor cores compute those of the next 32. Where there are few tiles, two
//         warpgroups of a block take every second slab each, and a cluster of blocks divides the
//         slabs: each block finishes some of the rows, with the others' sums from their shared
//         memory. A LayerNorm is left to the product that reads it: here the sums' moments are
//         stored, per 64 columns; there W x is scaled and shifted.
// Why:    in v02 the load-store unit is the bottleneck: it passes on every slab that is copied, and
//         each warp loads its own fragments of W. A second kernel that adds up parts and applies the
//         LayerNorm takes 4 us, as long as the product of the heads at 256 rows.
// Cost:   rows are computed 64 at a time. Two blocks fit on a multiprocessor, or three whose
//         warpgroups have one product in flight. Before its LayerNorm, a row whose mean is large
//         loses digits when that is subtracted.
// Tile:   64 x 64, one warpgroup or two per block, and a warp that copies; 64 k per slab
// Layout: contiguous
// Role:   struct
// Needs:  sm_90a
// Precision: 3xfp16
// Flags:  (none)
// Expect: by trials of GPT-2 small's products, 0.9 times v02's time with up to 32 rows, 0.8 with 64, two
//         thirds with 128 and more. Then latency is the bottleneck, and with many rows shared memory.
//
// The sums of 32 k and their scales are those of v02.

#include "three_products.cuh"
#include "wgmma.cuh"

namespace attention {
namespace {

constexpr int kBlockK = 64;                  // k per slab
constexpr int kChunks = kBlockK / kPackedK;  // per slab
constexpr int kStep = 16;                    // k of one wgmma
constexpr int kSteps = kPackedK / kStep;     // per chunk
constexpr int kSums = kColumnsW / 2;         // per thread
constexpr int kRows = 64, kStrips = kRows / kPackedRows;
constexpr int kBytesStrip = kChunks * kChunk * static_cast<int>(sizeof(uint4));  // of a slab
constexpr int kBytesW = kChunks * kBytesOperand, kBytesX = kStrips * kBytesStrip;
constexpr int kWarpgroup = 128;             // threads
constexpr int kStrideSums = kColumnsW + 8;  // of a row: a warp's stores have no bank conflicts

template <int kGroups_, int kSets_, int kStages_, int kResident_>
struct Tile {
  static constexpr int kGroups = kGroups_;      // warpgroups, each with every kGroups-th slab
  static constexpr int kSets = kSets_;          // products of 32 k in flight, per warpgroup
  static constexpr int kStages = kStages_;      // slabs in shared memory
  static constexpr int kResident = kResident_;  // blocks per multiprocessor
  static constexpr int kConsumers = kGroups * kWarpgroup, kThreads = kConsumers + 32;
  static constexpr int kBlockM = kRows, kBlockN = kColumnsW, kBlockK = attention::kBlockK;
  static constexpr int kStageBytes = (kBytesW + kBytesX + 1023) / 1024 * 1024;  // W, then x
  static constexpr int kSmemBytes = kStages * kStageBytes;
  static_assert(kStages % kGroups == 0, "a stage serves one warpgroup");
  // In the end stages are free for sums, one for each warpgroup's.
  static_assert(kStageBytes >= kRows * kStrideSums * sizeof(float));
};

// A block's part of tile blockIdx.y. The blocks of a tile are a cluster. Adjacent tiles have the same
// columns, so that blocks which run at the same time read the same weights.
struct Part {
  int rank = blockIdx.x, parts = gridDim.x;
  int m0, n0;        // the tile's first row and column
  int first, count;  // slabs
  int row, end;      // of the tile, which this block finishes, in multiples of 16

  __device__ explicit Part(const ProductParams& p) {
    const int tiles_m = (p.m + kRows - 1) / kRows, tile_n = blockIdx.y / tiles_m;
    m0 = (blockIdx.y - tile_n * tiles_m) * kRows, n0 = tile_n * kColumnsW;
    const int slabs = p.k / kBlockK, each = slabs / parts, more = slabs - each * parts;
    first = each * rank + min(rank, more), count = each + (rank < more);
    row = kStrips * rank / parts * kPackedRows, end = kStrips * (rank + 1) / parts * kPackedRows;
  }
};

// A warp's rows of x and 32 k, as wgmma's operand A, and the scales of the lane's two rows.
struct Rows {
  unsigned hi[kSteps][4], lo[kSteps][4];
  float scale[2];

  __device__ void load(const uint4* chunk) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4 high = chunk[step * 64 + lane], low = chunk[step * 64 + 32 + lane];
      hi[step][0] = high.x, hi[step][1] = high.y, hi[step][2] = high.z, hi[step][3] = high.w;
      lo[step][0] = low.x, lo[step][1] = low.y, lo[step][2] = low.z, lo[step][3] = low.w;
    }
    const auto* const scales = reinterpret_cast<const float*>(chunk + kScales);
    scale[0] = scales[lane / 4] * kSmaller, scale[1] = scales[lane / 4 + 8] * kSmaller;
  }
};

// Starts acc = x W of 32 k, the large products last: less is cut off.
__device__ inline void start(float (&acc)[kSums], Rows& x, const unsigned char* w) {
  const uint64_t hi = ptx::matrix_descriptor(w);
  const uint64_t lo = ptx::advance(hi, kBytesRowW / 2);
  ptx::multiply_fence(acc, x.hi, x.lo);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    ptx::multiply<false>(acc, x.lo[step], ptx::advance(hi, 2 * kStep * step), step > 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    ptx::multiply<false>(acc, x.hi[step], ptx::advance(lo, 2 * kStep * step));
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    ptx::multiply<false>(acc, x.hi[step], ptx::advance(hi, 2 * kStep * step));
  ptx::multiply_commit();
}

// Copies a block's slabs, in order. Addresses advance: computing each one would take longer than a
// slab's products.
template <typename T>
__device__ void copy_slabs(const ProductParams& p, const Part& part, unsigned char* stages,
                           ptx::Barrier* full, ptx::Barrier* empty) {
  const int64_t slabs = p.k / kBlockK;
  const auto* w = static_cast<const unsigned char*>(p.weight) +
                  (part.n0 / kColumnsW * slabs + part.first) * kBytesW;
  const unsigned char* x[kStrips];
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    const int strip = min(part.m0 / kPackedRows + i, (p.m - 1) / kPackedRows);
    x[i] = reinterpret_cast<const unsigned char*>(p.packed_x) +
           (strip * slabs + part.first) * kBytesStrip;
  }
  const auto copy_w = [&](int stage) {
    ptx::barrier_expect(&full[stage], kBytesW + kBytesX);
    ptx::copy_bulk(stages + stage * T::kStageBytes, w, kBytesW, &full[stage]);
    w += kBytesW;
  };
  const auto copy_x = [&](int stage) {
    unsigned char* const to = stages + stage * T::kStageBytes + kBytesW;
#pragma unroll
    for (int i = 0; i < kStrips; ++i, x[i - 1] += kBytesStrip)
      ptx::copy_bulk(to + i * kBytesStrip, x[i], kBytesStrip, &full[stage]);
  };
  // Early copies compete with what the previous kernel loads: some are enough.
  constexpr int kEarly = 3;
  const int ahead = min(T::kStages, part.count), early = min(kEarly, ahead);
  for (int stage = 0; stage < early; ++stage) copy_w(stage);
  ptx::wait_for_previous();  // it does not write the weights, but perhaps the rest
  for (int stage = 0; stage < ahead; ++stage) {
    if (stage >= early) copy_w(stage);
    copy_x(stage);
  }
  for (int left = part.count - ahead, stage = 0, phase = 0; left > 0; --left) {
    ptx::barrier_wait(&empty[stage], phase);
    copy_w(stage), copy_x(stage);
    if (++stage == T::kStages) stage = 0, phase ^= 1;
  }
  if (p.x_moments == nullptr) return;
  // They take the place of one more slab.
  const int stage = part.count % T::kStages, round = part.count / T::kStages;
  if (round > 0) ptx::barrier_wait(&empty[stage], (round - 1) % 2);
  const int per_row = p.k / kColumnsW, rows = min(kRows, p.m - part.m0);
  const int bytes = (rows * per_row + 1) / 2 * 2 * static_cast<int>(sizeof(float2));
  ptx::barrier_expect(&full[stage], bytes);
  ptx::copy_bulk(stages + stage * T::kStageBytes,
                 p.x_moments + static_cast<int64_t>(part.m0) * per_row, bytes, &full[stage]);
}

// What a block reads once per tile: of its columns, and of its rows of x.
struct OfTile {
  alignas(16) float bias[kColumnsW], weight_sums[kColumnsW], ln_weight[kColumnsW];
  alignas(16) int exponents[kColumnsW];
  float mean[kRows], scale[kRows];  // of a LayerNorm that x awaits; else 0 and 1

  template <int kThreads>
  __device__ void load_columns(const ProductParams& p, const Part& part) {
    static_assert(kThreads >= kColumnsW);
    const int column = threadIdx.x, at = part.n0 + column;
    if (column >= kColumnsW) return;
    bias[column] = p.bias[at], exponents[column] = p.exponents[at];
    weight_sums[column] = p.x_moments != nullptr ? p.bias[p.n + at] : 0.0f;
    ln_weight[column] = p.ln_weight != nullptr ? p.ln_weight[at] : 0.0f;
  }
  // Joins the moments of a row's columns. Several neighbouring lanes have a row.
  template <int kThreads>
  __device__ void join(const ProductParams& p, const Part& part, const void* moments) {
    constexpr int kLanes = kThreads / kRows;
    const int row = threadIdx.x / kLanes, first = threadIdx.x % kLanes, count = p.k / kColumnsW;
    const float2* const of_row =
        static_cast<const float2*>(moments) + min(row, p.m - part.m0 - 1) * count;
    const float pivot = of_row[0].x;
    float sum = 0.0f, squares = 0.0f;  // deviations from the pivot
#pragma unroll 4
    for (int i = first; i < count; i += kLanes) {
      const float2 v = of_row[i];
      const float off = v.x - pivot;
      sum += off, squares += fmaf(kColumnsW * off, off, v.y);
    }
#pragma unroll
    for (int lane = 1; lane < kLanes; lane *= 2) {
      sum += __shfl_xor_sync(kWarp, sum, lane);
      squares += __shfl_xor_sync(kWarp, squares, lane);
    }
    if (first > 0) return;
    const float off = sum / count;
    mean[row] = pivot + off;
    scale[row] = rsqrtf(squares / p.k - off * off + p.epsilon);
  }
};

// Reduces a number of each row by the kLanes lanes that have the row's columns.
template <int kLanes, int kCount, typename Operation>
__device__ void reduce(float (&x)[kCount], Operation operation) {
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2)
#pragma unroll
    for (float& one : x) one = operation(one, __shfl_xor_sync(kWarp, one, lane));
}

// A thread's share of the rows that a block finishes: up to kCount, and four columns. Each step is
// taken for all rows together, so that their latencies overlap. Whole warps call all functions.
template <typename T, int kCount>
struct Ending {
  static constexpr int kAcross = kColumnsW / 4;                  // threads that have a row
  static constexpr int kMost = kRows * kAcross / T::kConsumers;  // kCount of a whole tile
  const ProductParams& p;
  const Part& part;
  const OfTile& tile;
  const int column = threadIdx.x % kAcross * 4, slot = threadIdx.x / kAcross;
  const int end = min(part.end, p.m - part.m0);
  // Pairs of rows, r and r + 8, are neighbours in packed y.
  const int first = part.row + (kCount == 1 ? slot : slot / 8 * 16 + slot % 8);
  float4 v[kCount] = {}, old[kCount] = {};

  __device__ int row_of(int i) const { return first + i / 2 * 16 * T::kGroups + i % 2 * 8; }
  __device__ bool is_here(int i) const { return row_of(i) < end; }
  __device__ int64_t offset(int i) const {
    return static_cast<int64_t>(part.m0 + row_of(i)) * p.n + part.n0 + column;
  }

  __device__ void load_residual() {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_here(i)) old[i] = load4(p.residual + offset(i));
  }
  // Adds up the sums of all warpgroups of the cluster.
  __device__ void add_up(const unsigned char* stages) {
    constexpr int kAtOnce = 8 / kCount;
#pragma unroll 1
    for (int j = 0; j < part.parts * T::kGroups; j += kAtOnce) {
      float4 sums[kAtOnce][kCount];
#pragma unroll
      for (int jj = 0; jj < kAtOnce; ++jj) {
        const int rank = (j + jj) / T::kGroups, group = (j + jj) % T::kGroups;
        const unsigned char* const there =
            kCount == kMost ? stages : ptx::in_block(stages, min(rank, part.parts - 1));
        const auto* const from = reinterpret_cast<const float*>(there + group * T::kStageBytes);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const bool is_one = rank < part.parts && is_here(i);
          sums[jj][i] = is_one ? load4(from + row_of(i) * kStrideSums + column) : float4{};
        }
      }
#pragma unroll
      for (int jj = 0; jj < kAtOnce; ++jj)
#pragma unroll
        for (int i = 0; i < kCount; ++i) v[i] = v[i] + sums[jj][i];
    }
  }
  // Undoes the scales of W, and applies the LayerNorm that x awaits, the bias and GELU.
  __device__ void complete() {
    const Unscale unscale(*reinterpret_cast<const int4*>(tile.exponents + column));
    const float4 columns = load4(tile.weight_sums + column), bias = load4(tile.bias + column);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = is_here(i) ? row_of(i) : 0;
      v[i] = four(tile.scale[row]) * (unscale(v[i]) + four(-tile.mean[row]) * columns) + bias;
    }
    if (p.mode != kGelu) return;
#pragma unroll
    for (float4& one : v) one = gelu(one);
  }
  __device__ void add_to_residual() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v[i] = v[i] + old[i];
      if (is_here(i)) store4(p.residual + offset(i), v[i]);
    }
  }
  // Leaves a LayerNorm to the product that reads y: stores the moments, and multiplies by the weight.
  __device__ void leave_norm() {
    const auto add = [](float a, float b) { return a + b; };
    const float4 weight = load4(tile.ln_weight + column);
    float mean[kCount], squares[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) mean[i] = sum_of(v[i]) / kColumnsW;
    reduce<kAcross>(mean, add);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float4 off = v[i] + four(-mean[i]);
      squares[i] = sum_of(off * off);
    }
    reduce<kAcross>(squares, add);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (is_here(i) && column == 0) p.y_moments[offset(i) / kColumnsW] = {mean[i], squares[i]};
      v[i] = v[i] * weight;
    }
  }
  __device__ void store() const {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_here(i)) store4(p.y + offset(i), v[i]);
  }
  __device__ void pack() const {
    const int at = part.n0 + column;
    float largest[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest[i] = largest_of(v[i]);
    reduce<kPackedK / 4>(largest, fmaxf);
    if constexpr (kCount == 1) {
      if (is_here(0)) store_packed(p.packed_y, p.n, part.m0 + first, at, v[0], largest[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const int row = part.m0 + row_of(i);
        if (is_here(i))
          store_packed(p.packed_y, p.n, row, at, v[i], v[i + 1], largest[i], largest[i + 1]);
      }
    }
  }
};

// Finishes this block's rows of the tile. The sums of all warpgroups are in the first stages.
template <typename T, int kCount>
__device__ void end_rows(const ProductParams& p, const Part& part, const OfTile& tile,
                         const unsigned char* stages) {
  Ending<T, kCount> rows{p, part, tile};
  if (p.mode == kResidual) rows.load_residual();
  part.parts > 1 ? ptx::cluster_wait() : ptx::named_barrier_sync(1, T::kConsumers);
  rows.add_up(stages);
  if (part.parts > 1) ptx::cluster_arrive();
  rows.complete();
  if (p.mode == kResidual) {
    rows.add_to_residual();
    if (p.y_moments == nullptr) return;
    rows.leave_norm();
  }
  p.packed_y != nullptr ? rows.pack() : rows.store();
}

template <typename T>
__global__ __launch_bounds__(T::kThreads, T::kResident) void product(ProductParams p) {
  ptx::allow_next();
  ATTENTION_ALIGNED_SHARED(unsigned char, stages, 1024);
  __shared__ ptx::Barrier full[T::kStages], empty[T::kStages];
  __shared__ OfTile tile;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      ptx::barrier_init(&full[stage], 1);
      ptx::barrier_init(&empty[stage], kWarpgroup / 32);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const Part part(p);
  // The shuffle tells the compiler that all lanes have the same number.
  const int warp = __shfl_sync(kWarp, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp == T::kConsumers / 32) {
    if (lane == 0) copy_slabs<T>(p, part, stages, full, empty);
    __syncwarp();
    if (part.parts > 1) {  // all threads of a cluster arrive at its barrier
      ptx::cluster_arrive(), ptx::cluster_wait();
      ptx::cluster_arrive(), ptx::cluster_wait();
    }
    return;
  }

  tile.load_columns<T::kConsumers>(p, part);
  const int group = warp / 4;
  // This warpgroup's slabs: of every kGroups, counted from the block's first one.
  const int count = (part.count - group + T::kGroups - 1) / T::kGroups;
  float sums[kSums] = {};
  int stage = group, phase = 0;
  // ptxas would serialize products that are in flight at a branch.
#pragma unroll 1
  for (int left = __shfl_sync(kWarp, count, 0); left > 0; --left) {
    const unsigned char* const w = stages + stage * T::kStageBytes;
    const auto* const strip = reinterpret_cast<const uint4*>(w + kBytesW + warp % 4 * kBytesStrip);
    ptx::barrier_wait(&full[stage], phase);
    float acc[T::kSets][kSums];
    Rows x[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) x[i].load(strip + i * kChunk);
#pragma unroll
    for (int i = 0; i < T::kSets; ++i) start(acc[i], x[i], w + i * kBytesOperand);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float (&done)[kSums] = acc[i % T::kSets];
      const bool is_last = i + 1 == kChunks;
      is_last || T::kSets == 1 ? ptx::multiply_wait<0>(done) : ptx::multiply_wait<1>(done);
      if (is_last) {
        // The fence ends loads of x before the next copy, which passes through another proxy.
        ptx::proxy_fence();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(&empty[stage]);
      }
#pragma unroll
      for (int e = 0; e < kSums; ++e) sums[e] = fmaf(done[e], x[i].scale[e / 2 % 2], sums[e]);
      if (const int next = i + T::kSets; next < kChunks)
        start(done, x[next], w + next * kBytesOperand);
    }
    if ((stage += T::kGroups) >= T::kStages) stage -= T::kStages, phase ^= 1;
  }

  ptx::wait_for_previous();  // for the residual and y
  if (p.x_moments != nullptr) {
    const int place = part.count % T::kStages;
    ptx::barrier_wait(&full[place], part.count / T::kStages % 2);
    tile.join<T::kConsumers>(p, part, stages + place * T::kStageBytes);
  } else if (threadIdx.x < kRows) {
    tile.mean[threadIdx.x] = 0.0f, tile.scale[threadIdx.x] = 1.0f;
  }
  // Sums take the place of slabs, when all warps have read those.
  ptx::named_barrier_sync(1, T::kConsumers);
  auto* const to = reinterpret_cast<float*>(stages + group * T::kStageBytes) +
                   (16 * (warp % 4) + lane / 4) * kStrideSums + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
    *reinterpret_cast<float2*>(to + 8 * i) = {sums[4 * i], sums[4 * i + 1]};
    *reinterpret_cast<float2*>(to + 8 * kStrideSums + 8 * i) = {sums[4 * i + 2], sums[4 * i + 3]};
  }
  if (part.parts > 1) ptx::cluster_arrive();
  constexpr int kMost = Ending<T, 1>::kMost;
  if (part.parts == 1) {
    end_rows<T, kMost>(p, part, tile, stages);
  } else if (part.parts < 4) {  // at most half of the rows
    end_rows<T, kMost / 2>(p, part, tile, stages);
  } else {
    end_rows<T, kMost / 4>(p, part, tile, stages);
  }
  if (part.parts > 1) ptx::cluster_wait();  // others read this block's sums
}

constexpr int kMostParts = 8;  // the largest cluster that every Hopper GPU takes

template <typename T>
cudaError_t launch_product(const ProductParams& p, cudaStream_t stream) {
  cudaError_t error = launch_pack(p, stream);
  if (error != cudaSuccess) return error;
  if (p.m < 1 || p.n % kColumnsW != 0 || p.k % kBlockK != 0) return cudaErrorInvalidValue;
  const bool applies_norm = p.ln_weight != nullptr && p.packed_y == nullptr;
  if (applies_norm && p.n > kMostOfNorm) return cudaErrorInvalidValue;
  // Moments must fit where a slab does.
  if (p.x_moments != nullptr && kRows * p.k / kColumnsW * sizeof(float2) > T::kStageBytes)
    return cudaErrorInvalidValue;
  const int tiles = ceil_div(p.m, kRows) * (p.n / kColumnsW), parts = p.blocks / tiles;
  if (parts * tiles != p.blocks || parts < 1 || parts > min(kMostParts, p.k / kBlockK))
    return cudaErrorInvalidValue;
  error = launch_early(product<T>, dim3(parts, tiles), parts, dim3(T::kThreads), T::kSmemBytes,
                       stream, p);
  if (error != cudaSuccess || !applies_norm) return error;
  ProductParams whole = p;  // tiles, of which only the LayerNorm is left
  whole.blocks = tiles;
  return launch_finish<T>(whole, stream);
}

}  // namespace

namespace ATTENTION_VERSION {

int64_t scratch_floats(const ProductParams&) { return 0; }

cudaError_t launch(const ProductParams& params, cudaStream_t stream) {
  if (params.mode >= kPackWeights) return prepare(params, stream);
  switch (params.tile) {  // must match KERNELS in product.py
    case 0:
      return launch_product<Tile<1, 2, 3, 2>>(params, stream);
    case 1:
      return launch_product<Tile<1, 1, 2, 3>>(params, stream);
    case 2:
      return launch_product<Tile<2, 2, 6, 1>>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
