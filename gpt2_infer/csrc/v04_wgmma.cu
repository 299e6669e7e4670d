// v04 - three products with Hopper's wgmma
//
// From:   v02
// Change: a warpgroup multiplies 64 rows of x, in registers, by W in shared memory, which is packed
//         in rows of 128 bytes as wgmma reads them. A warp copies slabs ahead, 8 KB per instruction.
//         Two products are in flight: while the sums of one are added to the tile's, tensor cores
//         compute the other.
// Why:    v02 reads 64 x 64 tiles, so L2 delivers 33 KB for as many products as tensor cores compute
//         in 400 cycles. And mma.sync reaches two thirds of their rate.
// Cost:   a block has a multiprocessor to itself, and nothing to multiply while it begins and ends.
//         Rows are computed 64 at a time.
// Tile:   64 x 128, 64 x 256, 128 x 128 or 128 x 64, two warpgroups; 32 k per slab
// Layout: contiguous
// Role:   struct
// Needs:  sm_90a
// Precision: 3xfp16
// Flags:  (none)
// Expect: half of v02's time with hundreds of rows. Not measured yet.

#include "three_products.cuh"
#include "wgmma.cuh"

namespace attention {
namespace {

constexpr int kColumns = 64;                         // of W, in one wgmma
constexpr int kStep = 16;                            // k of one wgmma
constexpr int kSteps = kPackedK / kStep;             // in a slab
constexpr int kSums = kColumns / 2;                  // per thread
constexpr int kRowBytes = 2 * 2 * kPackedK;          // 32 k of a column of W: hi, then lo
constexpr int kOperandBytes = kColumns * kRowBytes;  // kColumns of them, swizzled
constexpr int kStripBytes = sizeof(uint4) * kChunk;  // 16 rows of x
constexpr int kStride =
    kColumns + 8;  // of sums in shared memory: the lanes of a store use all banks

constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// kRowGroups x kColumnGroups warpgroups, each with 64 rows and kHalves times 64 columns of a tile.
template <int kRowGroups_, int kColumnGroups_, int kHalves_, int kStages_>
struct Tile {
  static constexpr int kColumnGroups = kColumnGroups_, kHalves = kHalves_;
  static constexpr int kStages = kStages_;  // slabs in shared memory
  static constexpr bool kPacks = true;
  static constexpr int kConsumers = 128 * kRowGroups_ * kColumnGroups;  // threads
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kBlockM = 64 * kRowGroups_;
  static constexpr int kBlockN = kColumns * kHalves * kColumnGroups;
  static constexpr int kBlockK = kPackedK;
  static constexpr int kOperands = kBlockN / kColumns, kStrips = kBlockM / kPackedRows;
  // A stage: W, then x.
  static constexpr int kBytesW = kOperands * kOperandBytes, kBytesX = kStrips * kStripBytes;
  static constexpr int kStageBytes = (kBytesW + kBytesX + 1023) / 1024 * 1024;
  static constexpr int kWarpSums = kPackedRows * kStride;  // floats of shared memory per warp
  static constexpr int kSmemBytes =
      kStages * kStageBytes + kConsumers / 32 * kWarpSums * static_cast<int>(sizeof(float));
  static_assert(kOperands + kStrips <= 32, "each lane copies one of them");
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

// Starts acc = x W of a slab, the large products last: less is cut off.
__device__ inline void start(float (&acc)[kSums], Rows& x, const unsigned char* w) {
  const uint64_t hi = ptx::matrix_descriptor(w);
  const uint64_t lo = ptx::advance(hi, kRowBytes / 2);
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

// Copies the slabs of all of a block's tiles, in order, for a warp.
// Packed, W is (n / 64, k / 32, 64 columns, hi and lo, 2 steps, 2 halves, 4, 2 k), swizzled: of the
// k of a step, those of a lane are 4 (lane % 4) to 4 (lane % 4) + 3, and each half has two of them.
template <typename T>
__device__ void copy(const ProductParams& p, const Slabs& slabs, unsigned char* stages,
                     ptx::Barrier* full, ptx::Barrier* empty) {
  const int lane = threadIdx.x % 32, first = slabs.first_of(blockIdx.x);
  const int end = slabs.first_of(blockIdx.x + 1), per_row = p.k / kPackedK;
  int stage = 0, phase = 1;
  // One lane's part of each slab: 64 columns of W, or 16 rows of x.
  const auto copy_part = [&](int slab, bool of_w) {
    const Share share = slabs.share(p, slab, end);
    unsigned char* const to = stages + stage * T::kStageBytes;
    if (of_w) {
      const int64_t operand = static_cast<int64_t>(share.n0 / kColumns + lane) * per_row;
      if (lane < T::kOperands)
        ptx::copy_bulk(
            to + lane * kOperandBytes,
            static_cast<const unsigned char*>(p.weight) + (operand + share.first) * kOperandBytes,
            kOperandBytes, &full[stage]);
    } else if (lane < T::kStrips) {
      const int strip = min(share.m0 / kPackedRows + lane, (p.m - 1) / kPackedRows);
      ptx::copy_bulk(to + T::kBytesW + lane * kStripBytes,
                     p.packed_x + (static_cast<int64_t>(strip) * per_row + share.first) * kChunk,
                     kStripBytes, &full[stage]);
    }
  };
  const auto advance = [&] {
    if (++stage == T::kStages) stage = 0, phase ^= 1;
  };
  const auto begin = [&] {
    if (lane == 0) ptx::barrier_expect(&full[stage], T::kBytesW + T::kBytesX);
    __syncwarp();
  };
  // The previous kernel does not write the weights, but perhaps the rest.
  const int ahead = min(end, first + T::kStages);
  for (int slab = first; slab < ahead; ++slab, advance()) begin(), copy_part(slab, true);
  ptx::wait_for_previous();
  stage = 0, phase = 1;
  for (int slab = first; slab < end; ++slab, advance()) {
    if (slab >= ahead) {
      ptx::barrier_wait(&empty[stage], phase);
      begin(), copy_part(slab, true);
    }
    copy_part(slab, false);
  }
}

template <typename T>
__global__ __launch_bounds__(T::kThreads, 1) void product(ProductParams p) {
  ptx::allow_next();
  ATTENTION_ALIGNED_SHARED(unsigned char, stages, 1024);
  __shared__ ptx::Barrier full[T::kStages], empty[T::kStages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      ptx::barrier_init(&full[stage], 1);
      ptx::barrier_init(&empty[stage], T::kConsumers / 32);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const Slabs slabs(p, T::kBlockM, T::kBlockN, T::kBlockK);
  // The shuffle tells the compiler that all lanes have the same number.
  const int warp = __shfl_sync(kWarp, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp >= T::kConsumers / 32) {  // one warp of the last warpgroup copies
    ptx::lower_registers<kProducerRegisters>();
    if (warp == T::kConsumers / 32) copy<T>(p, slabs, stages, full, empty);
    return;
  }
  ptx::raise_registers<kConsumerRegisters>();

  constexpr int kAtOnce = 2 / T::kHalves;  // slabs
  const int group = warp / 4, strip = group / T::kColumnGroups * 4 + warp % 4;
  const int operand = group % T::kColumnGroups * T::kHalves;
  auto* const s_sums =
      reinterpret_cast<float*>(stages + T::kStages * T::kStageBytes) + warp * T::kWarpSums;
  ptx::wait_for_previous();  // for the residual and y
  int stage = 0, phase = 0;
  const int end = slabs.first_of(blockIdx.x + 1);
  for (int slab = slabs.first_of(blockIdx.x); slab < end;) {
    const Share share = slabs.share(p, slab, end);
    slab += share.count;

    float sums[T::kHalves][kSums] = {}, acc[2][kSums];
    Rows x[kAtOnce];
    const unsigned char* w[kAtOnce];
    ptx::Barrier* used[kAtOnce];
    // Waits for the next slab and loads its x.
    const auto begin = [&](int i) {
      w[i] = stages + stage * T::kStageBytes + operand * kOperandBytes, used[i] = &empty[stage];
      ptx::barrier_wait(&full[stage], phase);
      x[i].load(reinterpret_cast<const uint4*>(stages + stage * T::kStageBytes + T::kBytesW +
                                               strip * kStripBytes));
      if (++stage == T::kStages) stage = 0, phase ^= 1;
    };
    const auto add = [&](int half, int i, const Rows& rows) {
#pragma unroll
      for (int e = 0; e < kSums; ++e)
        sums[half][e] = fmaf(acc[i][e], rows.scale[e / 2 % 2], sums[half][e]);
    };
    // The fence ends loads of x before the next copy, which passes through another proxy.
    const auto end_of = [&](int i) {
      ptx::proxy_fence();
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(used[i]);
    };
    // Two products at a time: of two slabs or, with two halves, of one. ptxas would serialize them if
    // any were in flight at a branch.
    int left = __shfl_sync(kWarp, share.count, 0);
#pragma unroll 1
    for (; left >= kAtOnce; left -= kAtOnce) {
      begin(0);
      start(acc[0], x[0], w[0]);
      if (kAtOnce == 2) begin(1);
      start(acc[1], x[kAtOnce - 1], kAtOnce == 2 ? w[1] : w[0] + kOperandBytes);
      ptx::multiply_wait<1>(acc[0]);
      add(0, 0, x[0]);
      if (kAtOnce == 2) end_of(0);
      ptx::multiply_wait<0>(acc[1]);
      add(T::kHalves - 1, 1, x[kAtOnce - 1]);
      end_of(kAtOnce - 1);
    }
    if (left > 0) {
      begin(0);
      start(acc[0], x[0], w[0]);
      ptx::multiply_wait<0>(acc[0]);
      add(0, 0, x[0]);
      end_of(0);
    }

    // A lane has two columns of two rows. Through shared memory it gets four columns of one.
#pragma unroll
    for (int half = 0; half < T::kHalves; ++half) {
      const int in_warp = lane % 16 * 4, column = (operand + half) * kColumns + in_warp;
      const Unscale unscale(*reinterpret_cast<const int4*>(p.exponents + share.n0 + column));
      const float4 bias = load4(p.bias + share.n0 + column);
      float* const to = s_sums + lane / 4 * kStride + lane % 4 * 2;
#pragma unroll
      for (int e = 0; e < kSums; e += 4) {
        *reinterpret_cast<float2*>(to + 2 * e) = {sums[half][e], sums[half][e + 1]};
        *reinterpret_cast<float2*>(to + 8 * kStride + 2 * e) = {sums[half][e + 2],
                                                                sums[half][e + 3]};
      }
      __syncwarp();
      constexpr int kBatch = 4;
#pragma unroll 1
      for (int row = lane / 16; row < kPackedRows; row += 2 * kBatch) {
        float4 v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          v[i] = unscale(load4(s_sums + (row + 2 * i) * kStride + in_warp));
        end_rows<T>(p, share, strip * kPackedRows + row, 2, column, bias, v);
      }
      __syncwarp();
    }
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
  switch (params.tile) {  // must match KERNELS in product.py
    case 0:
      return launch_product<Tile<1, 2, 1, 7>>(params, stream);
    case 1:
      return launch_product<Tile<1, 2, 2, 4>>(params, stream);
    case 2:
      return launch_product<Tile<2, 1, 2, 5>>(params, stream);
    case 3:
      return launch_product<Tile<2, 1, 1, 7>>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
