// v01 - a float32 matrix product with its prologue and epilogue
//
// Change: the first version. The k-slabs of all tiles of the product form one sequence, which is
//         cut into equal parts, one per block. A block that has all slabs of a tile finishes it:
//         bias, then GELU or the residual. Parts of a tile go to the workspace; a second kernel
//         adds them up, finishes the tile, and applies the LayerNorm that comes next.
// Why:    with a few hundred rows there are fewer tiles than a GPU has multiprocessors, or a few
//         more. Equal parts keep all of them busy, whatever the shape. A separate kernel for the
//         bias, GELU, residual or LayerNorm would take longer to start than to run.
// Cost:   a tile that is cut is written and read once more per part. A row's rounding depends on
//         where its tile is cut, so on the number of rows.
// Tile:   8 x 8 per thread, 32 x 64 per warp; a block's 4 or 8 warps are side by side or share K
// Layout: contiguous
// Role:   struct
// Flags:  (none)
// Expect: arithmetic is the bottleneck from 256 rows on: on sm_90, 85 to 89 % of the inner loop's
//         instructions are FFMA. Below, it is latency: of loading the weights, and of the launches.
//
// Sums are in float32 in a fixed order: over k within a warp, over the warps of a block, over the
// parts of a tile. No result depends on timing.

#include "product.cuh"

namespace attention {
namespace {

constexpr int kThreadM = 8, kThreadN = 8;
constexpr int kWarpM = 4 * kThreadM, kWarpN = 8 * kThreadN;
constexpr int kChunks = kThreadM * kThreadN / 4;  // 16-byte chunks of a thread's sums

// kWarpsN warps cover a tile; kWarpsK such groups share the k of each slab.
template <int kWarpsN_, int kWarpsK_, int kBlockK_, int kStages_, int kResident_>
struct Tile {
  static constexpr int kWarpsN = kWarpsN_, kWarpsK = kWarpsK_;
  static constexpr int kBlockK = kBlockK_;      // k per slab
  static constexpr int kStages = kStages_;      // slabs in shared memory
  static constexpr int kResident = kResident_;  // blocks per multiprocessor
  static constexpr bool kPacks = false;         // y is never packed
  static constexpr int kBlockM = kWarpM;
  static constexpr int kBlockN = kWarpsN * kWarpN;
  static constexpr int kWarps = kWarpsN * kWarpsK;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpK = kBlockK / kWarpsK;
  // X is transposed as it is copied to shared memory: a warp copies 8 k of 4 rows at once, and 4
  // floats of padding per k spread them over 32 banks.
  static constexpr int kStrideX = kBlockM + 4;
  static constexpr int kStageFloats = kBlockK * (kStrideX + kBlockN);
  static constexpr int kSumFloats = kWarpsK * kBlockM * kBlockN;
  static constexpr int kSmemBytes =
      sizeof(float) * (kStages * kStageFloats > kSumFloats ? kStages * kStageFloats : kSumFloats);
  static_assert(kWarpK % 2 == 0, "fragments take turns in two sets of registers");
  static_assert(kBlockM % (4 * kWarps) == 0, "all threads copy as many rows of X");
  static_assert(kThreads % (kBlockN / 4) == 0, "a thread copies one chunk of columns of W");
};

// Copies slabs of one tile to shared memory.
template <typename T>
struct Copier {
  static constexpr int kRowsX = 4 * T::kWarps;  // rows that the block copies at once, 8 k of each
  static constexpr int kRowsW = T::kThreads / (T::kBlockN / 4);

  const char *x, *w;       // this thread's first bytes of the next slab
  int64_t step_x, step_w;  // bytes between its rows
  int64_t next_x;          // bytes from one past its last row to the next slab
  int rows_x;              // rows of X from its first on; sums of others are not stored
  int to_x, to_w;          // offset in a stage, in floats

  __device__ Copier(const ProductParams& p, int m0, int n0, int k0) {
    const int k = threadIdx.x % 8, row = threadIdx.x / 8;
    x = reinterpret_cast<const char*>(p.x + static_cast<int64_t>(m0 + row) * p.k + k0 + k);
    step_x = static_cast<int64_t>(sizeof(float)) * kRowsX * p.k;
    next_x = static_cast<int64_t>(sizeof(float)) * (T::kBlockK - T::kBlockM * p.k);
    rows_x = p.m - m0 - row;
    to_x = k * T::kStrideX + row;
    const int column = threadIdx.x % (T::kBlockN / 4) * 4;
    const int row_w = threadIdx.x / (T::kBlockN / 4);
    w = reinterpret_cast<const char*>(static_cast<const float*>(p.weight) +
                                      static_cast<int64_t>(k0 + row_w) * p.n + n0 + column);
    step_w = static_cast<int64_t>(sizeof(float)) * kRowsW * p.n;
    to_w = T::kBlockK * T::kStrideX + row_w * T::kBlockN + column;
  }

  __device__ void copy_x(float* stage) {
#pragma unroll
    for (int row = 0; row < T::kBlockM; row += kRowsX, x += step_x) {
      if (row >= rows_x) continue;
#pragma unroll
      for (int k = 0; k < T::kBlockK; k += 8)
        __pipeline_memcpy_async(stage + to_x + k * T::kStrideX + row, x + sizeof(float) * k, 4);
    }
    x += next_x;
  }

  __device__ void copy_w(float* stage) {
#pragma unroll
    for (int row = 0; row < T::kBlockK; row += kRowsW, w += step_w)
      __pipeline_memcpy_async(stage + to_w + row * T::kBlockN, w, 16);
  }
};

template <typename T>
__global__ __launch_bounds__(T::kThreads, T::kResident) void product(ProductParams p) {
  ptx::allow_next();
  ATTENTION_DYNAMIC_SHARED(float, smem);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_k = warp / T::kWarpsN, warp_n = warp % T::kWarpsN * kWarpN;
  // Lanes that differ in bit 0 read the same rows, those that differ in bit 1 the same columns: a
  // quarter of a warp that reads 16 bytes per lane then touches few words of either.
  const int thread_m = (lane >> 1 & 1) | (lane >> 4) << 1;
  const int thread_n = (lane & 1) | (lane >> 2 & 3) << 1;
  const float* const s_x = smem + warp_k * T::kWarpK * T::kStrideX + 4 * thread_m;
  const float* const s_w =
      smem + T::kBlockK * T::kStrideX + warp_k * T::kWarpK * T::kBlockN + warp_n + 4 * thread_n;

  const Slabs slabs(p, T::kBlockM, T::kBlockN, T::kBlockK);
  const int end = slabs.first_of(blockIdx.x + 1);
  for (int slab = slabs.first_of(blockIdx.x); slab < end;) {
    const Share share = slabs.share(p, slab, end);
    const int count = share.count;
    slab += count;

    Copier<T> copier(p, share.m0, share.n0, share.first * T::kBlockK);
    if (threadIdx.x < T::kBlockN / 32) ptx::prefetch(p.bias + share.n0 + threadIdx.x * 32);
#pragma unroll
    for (int s = 0; s < T::kStages - 1; ++s)
      if (s < count) copier.copy_w(smem + s * T::kStageFloats);
    ptx::wait_for_previous();  // it does not write the weights, but perhaps the rest
#pragma unroll
    for (int s = 0; s < T::kStages - 1; ++s) {
      if (s < count) copier.copy_x(smem + s * T::kStageFloats);
      __pipeline_commit();
    }

    float sums[kThreadM][kThreadN] = {};
    float a[2][kThreadM], b[2][kThreadN];  // one is multiplied while the other is loaded
    const auto load_fragments = [&](int to, int stage, int k) {
      const float* const from_x = s_x + stage + k * T::kStrideX;
      const float* const from_w = s_w + stage + k * T::kBlockN;
#pragma unroll
      for (int i = 0; i < kThreadM; i += 4) {
        const float4 v = load4(from_x + 4 * i);
        a[to][i] = v.x, a[to][i + 1] = v.y, a[to][i + 2] = v.z, a[to][i + 3] = v.w;
      }
#pragma unroll
      for (int j = 0; j < kThreadN; j += 4) {
        const float4 v = load4(from_w + 8 * j);
        b[to][j] = v.x, b[to][j + 1] = v.y, b[to][j + 2] = v.z, b[to][j + 3] = v.w;
      }
    };

    __pipeline_wait_prior(T::kStages - 2);
    __syncthreads();
    load_fragments(0, 0, 0);
    const auto next = [](int stage) {
      return stage == (T::kStages - 1) * T::kStageFloats ? 0 : stage + T::kStageFloats;
    };
    int stage = 0, free = (T::kStages - 1) * T::kStageFloats;
    for (int s = 0; s < count; ++s) {
#pragma unroll
      for (int k = 0; k < T::kWarpK; ++k) {
        if (k + 1 < T::kWarpK) {
          load_fragments((k + 1) % 2, stage, k + 1);
        } else {
          // Every thread now sees the next slab and is done with this one. After the last slab,
          // these loads are never used.
          stage = next(stage);
          __pipeline_wait_prior(T::kStages - 2);
          __syncthreads();
          load_fragments(0, stage, 0);
        }
        if (k == 0) {
          if (s + T::kStages - 1 < count) {
            copier.copy_x(smem + free);
            copier.copy_w(smem + free);
          }
          __pipeline_commit();
          free = next(free);
        }
#pragma unroll
        for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
          for (int n = 0; n < kThreadN; ++n) {
            // With the registers of two blocks per multiprocessor, a serpentine was slower.
            const int j = T::kResident > 2 && i % 2 ? kThreadN - 1 - n : n;
            sums[i][j] += a[k % 2][i] * b[k % 2][j];
          }
        }
      }
    }

    // The groups of warps add up their sums in shared memory, where i need not be a constant; each
    // group adds up part of the chunks. Chunk i is half i % 2 of row i / 2.
    __syncthreads();  // the unused loads above read this memory
    constexpr int kGroup = T::kBlockM * T::kBlockN;
    float* const s_sums = smem + warp % T::kWarpsN * kWarpM * kWarpN + 4 * lane;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const float* const v = sums[i / 2] + i % 2 * 4;
      store4(s_sums + warp_k * kGroup + i * 128, {v[0], v[1], v[2], v[3]});
    }
    __syncthreads();
    constexpr int kShare = kChunks / T::kWarpsK;
#pragma unroll 1
    for (int i = warp_k * kShare; i < (warp_k + 1) * kShare; ++i) {
      float4 sum[1] = {load4(s_sums + i * 128)};
#pragma unroll
      for (int group = 1; group < T::kWarpsK; ++group)
        sum[0] = sum[0] + load4(s_sums + group * kGroup + i * 128);
      const int row = i / 8 * 16 + 4 * thread_m + i / 2 % 4;
      const int column = warp_n + i % 2 * 32 + 4 * thread_n;
      end_rows<T>(p, share, row, 1, column, load4(p.bias + share.n0 + column), sum);
    }
    __syncthreads();
  }
}

template <typename T>
cudaError_t launch_product(const ProductParams& p, cudaStream_t stream) {
  return launch_tile<T>(product<T>, p, stream);
}

}  // namespace

namespace ATTENTION_VERSION {

int64_t scratch_floats(const ProductParams&) { return 0; }

cudaError_t launch(const ProductParams& params, cudaStream_t stream) {
  if (params.packed_x != nullptr || params.packed_y != nullptr) return cudaErrorInvalidValue;
  switch (params.tile) {  // must match KERNELS in product.py
    case 0:
      return launch_product<Tile<1, 8, 64, 3, 2>>(params, stream);
    case 1:
      return launch_product<Tile<1, 4, 64, 2, 3>>(params, stream);
    case 2:
      return launch_product<Tile<2, 2, 32, 3, 3>>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
