// v04 - three products with Hopper's wgmma
//
// From:   v02
// Change: a warpgroup multiplies 64 rows of x, in registers, by 64 columns of W in shared memory. A
//         thread of another warp copies slabs ahead, in bulk. While the sums of 32 k are added to
//         the tile's, tensor cores compute those of the next 32. A tile is finished in registers.
//         Where there are few tiles, two warpgroups of a block take every second slab each.
// Why:    in v02 the load-store unit is the bottleneck: it passes on every slab that is copied, and
//         each warp loads its own fragments of W.
// Cost:   rows are computed 64 at a time. Two blocks fit on a multiprocessor, or three whose
//         warpgroups have one product in flight.
// Tile:   64 x 64, one warpgroup or two per block, and a warp that copies; 64 k per slab
// Layout: contiguous
// Role:   struct
// Needs:  sm_90a
// Precision: 3xfp16
// Flags:  (none)
// Expect: by trials of GPT-2 small's products, as fast as v02 with up to 32 rows, 0.75 times its
//         time with 128 and 256, two thirds with 512. Then latency is the bottleneck, and with many
//         rows shared memory.
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
constexpr int kWarpgroup = 128;  // threads

template <int kGroups_, int kSets_, int kStages_, int kResident_>
struct Tile {
  static constexpr int kGroups = kGroups_;      // warpgroups, each with every kGroups-th slab
  static constexpr int kSets = kSets_;          // products of 32 k in flight, per warpgroup
  static constexpr int kStages = kStages_;      // slabs in shared memory
  static constexpr int kResident = kResident_;  // blocks per multiprocessor
  static constexpr int kConsumers = kGroups * kWarpgroup, kThreads = kConsumers + 32;
  static constexpr int kBlockM = kRows, kBlockN = kColumnsW, kBlockK = attention::kBlockK;
  static constexpr int kStageBytes = (kBytesW + kBytesX + 1023) / 1024 * 1024;  // W, then x
  // Two warpgroups exchange half of their sums.
  static constexpr int kBytesExchange = kGroups == 1 ? 0 : kRows * kColumnsW * sizeof(float);
  static constexpr int kSmemBytes = kStages * kStageBytes + kBytesExchange;
  static_assert(kStages % kGroups == 0, "a stage serves one warpgroup");
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

// Copies the slabs of a block's tiles, in order. Addresses advance: computing each one, with its
// divisions, would take longer than a slab's products.
template <typename T>
struct Copier {
  const ProductParams& p;
  const Slabs& slabs;
  unsigned char* const stages;
  ptx::Barrier *const full, *const empty;
  const int end;           // the first slab of the next block
  int slab = 0, left = 0;  // the next one, and those left of its tile
  const unsigned char *w, *x[kStrips];

  // Finds the next slab, if it is the first of a tile.
  __device__ void find() {
    if (left > 0) return;
    const Share share = slabs.share(p, slab, end);
    left = share.count;
    const int64_t of_w = static_cast<int64_t>(share.n0 / kColumnsW) * slabs.per_tile;
    w = static_cast<const unsigned char*>(p.weight) + (of_w + share.first) * kBytesW;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const int strip = min(share.m0 / kPackedRows + i, (p.m - 1) / kPackedRows);
      const int64_t of_x = static_cast<int64_t>(strip) * slabs.per_tile + share.first;
      x[i] = reinterpret_cast<const unsigned char*>(p.packed_x) + of_x * kBytesStrip;
    }
  }
  __device__ void copy_w(int stage) const {
    ptx::barrier_expect(&full[stage], kBytesW + kBytesX);
    ptx::copy_bulk(stages + stage * T::kStageBytes, w, kBytesW, &full[stage]);
  }
  __device__ void copy_x(int stage) const {
    unsigned char* const to = stages + stage * T::kStageBytes + kBytesW;
#pragma unroll
    for (int i = 0; i < kStrips; ++i)
      ptx::copy_bulk(to + i * kBytesStrip, x[i], kBytesStrip, &full[stage]);
  }
  __device__ void advance() {
    ++slab, --left;
    w += kBytesW;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) x[i] += kBytesStrip;
  }
  __device__ void run(int first) {
    // Early copies compete with what the previous kernel loads: some are enough.
    constexpr int kEarly = 3;
    const int ahead = min(first + T::kStages, end), early = min(first + kEarly, ahead);
    for (slab = first; slab < early; advance()) find(), copy_w(slab - first);
    ptx::wait_for_previous();  // it does not write the weights, but perhaps the rest
    left = 0;
    for (slab = first; slab < ahead; advance()) {
      find();
      if (slab >= early) copy_w(slab - first);
      copy_x(slab - first);
    }
    for (int stage = 0, phase = 0; slab < end; advance()) {
      ptx::barrier_wait(&empty[stage], phase);
      find(), copy_w(stage), copy_x(stage);
      if (++stage == T::kStages) stage = 0, phase ^= 1;
    }
  }
};

// Packs 16 columns of a row, every second four of 32; lane ^ 2 has the others. Whole warps call it.
__device__ inline void pack_row(const ProductParams& p, int row, int column, const float4 (&v)[4]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = fmaxf(largest, largest_of(v[i]));
  largest = fmaxf(largest, __shfl_xor_sync(kWarp, largest, 2));
  if (row >= p.m) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) store_packed(p.packed_y, p.n, row, column + 8 * i, v[i], largest);
}

// Finishes 16 columns of a row, or stores them as a part of the tile. v[i] is at column + 8 i; row
// and column are the tile's.
template <typename T>
__device__ void end_row(const ProductParams& p, const Share& share, int row, int column,
                        const float* bias, float4 (&v)[4]) {
  const bool is_here = share.m0 + row < p.m;
  float* to = share.part + row * T::kBlockN + column;
  if (share.is_whole) {
    const int64_t at = static_cast<int64_t>(share.m0 + row) * p.n + share.n0 + column;
    to = (p.mode == kResidual ? p.residual : p.y) + at;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = v[i] + load4(bias + column + 8 * i);
      if (p.mode == kGelu) v[i] = gelu(v[i]);
      if (p.mode == kResidual && is_here) v[i] = v[i] + load4(to + 8 * i);
    }
    if (p.mode != kResidual && p.packed_y != nullptr)
      return pack_row(p, share.m0 + row, share.n0 + column, v);
  }
  if (!is_here) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) store4(to + 8 * i, v[i]);
}

template <typename T>
__global__ __launch_bounds__(T::kThreads, T::kResident) void product(ProductParams p) {
  ptx::allow_next();
  ATTENTION_ALIGNED_SHARED(unsigned char, stages, 1024);
  __shared__ ptx::Barrier full[T::kStages], empty[T::kStages];
  __shared__ alignas(16) float s_bias[T::kBlockN];
  __shared__ alignas(16) int s_exponents[T::kBlockN];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      ptx::barrier_init(&full[stage], 1);
      ptx::barrier_init(&empty[stage], kWarpgroup / 32);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const Slabs slabs(p, T::kBlockM, T::kBlockN, kBlockK);
  const int begin = slabs.first_of(blockIdx.x), end = slabs.first_of(blockIdx.x + 1);
  // The shuffle tells the compiler that all lanes have the same number.
  const int warp = __shfl_sync(kWarp, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp == T::kConsumers / 32) {
    if (lane == 0) Copier<T>{p, slabs, stages, full, empty, end}.run(begin);
    return;
  }

  const int group = warp / 4;
  int stage = group, phase = 0;
  for (int slab = begin; slab < end;) {
    const Share share = slabs.share(p, slab, end);
    // This warpgroup's slabs: of every kGroups, counted from the block's first one.
    const int before = slab - begin - group + T::kGroups - 1;
    const int count = (before + share.count) / T::kGroups - before / T::kGroups;
    slab += share.count;
    if (threadIdx.x < T::kBlockN) {
      s_bias[threadIdx.x] = p.bias[share.n0 + threadIdx.x];
      s_exponents[threadIdx.x] = p.exponents[share.n0 + threadIdx.x];
    }

    float sums[kSums] = {};
    // ptxas would serialize products that are in flight at a branch.
#pragma unroll 1
    for (int left = __shfl_sync(kWarp, count, 0); left > 0; --left) {
      const unsigned char* const w = stages + stage * T::kStageBytes;
      const auto* const strip =
          reinterpret_cast<const uint4*>(w + kBytesW + warp % 4 * kBytesStrip);
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
    if constexpr (T::kGroups == 2) {
      // Each warpgroup finishes half of the columns, and gets the other's sums of them.
      auto* const sent =
          reinterpret_cast<float*>(stages + T::kStages * T::kStageBytes) + threadIdx.x % kWarpgroup;
      constexpr int kHalf = kSums / 2;
#pragma unroll
      for (int e = 0; e < kHalf; ++e)
        sent[((1 - group) * kHalf + e) * kWarpgroup] = group == 0 ? sums[kHalf + e] : sums[e];
      ptx::named_barrier_sync(1, T::kConsumers);
#pragma unroll
      for (int e = 0; e < kHalf; ++e) {
        const float other = sent[(group * kHalf + e) * kWarpgroup];
        group == 0 ? sums[e] += other : sums[kHalf + e] += other;
      }
    } else {
      ptx::named_barrier_sync(1, T::kConsumers);
    }
    // A lane has two columns of two rows. It exchanges one pair with its neighbour, and has four
    // columns of one row.
    const bool is_odd = lane % 2 == 1;
    const int row = 16 * (warp % 4) + lane / 4 + 8 * is_odd;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (T::kGroups == 2 && half != group) continue;
      const int column = half * 32 + lane % 4 / 2 * 4;
      float4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const sum = &sums[16 * half + 4 * i];
        const float x = __shfl_xor_sync(kWarp, is_odd ? sum[0] : sum[2], 1);
        const float y = __shfl_xor_sync(kWarp, is_odd ? sum[1] : sum[3], 1);
        const Unscale unscale(*reinterpret_cast<const int4*>(s_exponents + column + 8 * i));
        v[i] = unscale(is_odd ? float4{x, y, sum[2], sum[3]} : float4{sum[0], sum[1], x, y});
      }
      end_row<T>(p, share, row, column, s_bias, v);
    }
    ptx::named_barrier_sync(1, T::kConsumers);  // before the next tile's bias
  }
}

template <typename T>
cudaError_t launch_product(const ProductParams& p, cudaStream_t stream) {
  const cudaError_t error = launch_pack(p, stream);
  return error == cudaSuccess ? launch_tile<T>(product<T>, p, stream) : error;
}

}  // namespace

namespace ATTENTION_VERSION {

int64_t scratch_floats(const ProductParams&) { return 0; }

cudaError_t launch(const ProductParams& params, cudaStream_t stream) {
  if (params.mode == kPackWeights) return pack_weights(params, stream);
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
