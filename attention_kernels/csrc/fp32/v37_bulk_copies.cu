// v37 - tiles of K and V that one copy fetches
//
// From:   v24
// Change: K and V are split into tiles of 64 keys that lie in memory as they will in shared memory:
//         hi and lo apart, the chunks of a row permuted instead of the row padded, the scales at the
//         end. So one thread fetches a tile with one bulk copy. V in float32 on the diagonal takes the
//         place of the tile after the last.
// Why:    in v24 every thread computes addresses and starts a copy for each 16 bytes of a tile, and
//         tiles of 64 keys need half as many barriers.
// Cost:   runs from compute capability 9.0 on. The sums of a tile take twice the registers: there are
//         two blocks per multiprocessor instead of three.
// Tile:   kBlockM x kBlockN = 64 x 64, block 128
// Layout: strided
// Takes:  float32, head_dim 64
// Needs:  sm_90
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: by the simulator, 0.85 to 0.9 times v24's time on an H200 with one batch entry of 12 heads
//         and 512 to 4,096 rows; it took 0.81 to 0.93. Shared memory still bounds it, because
//         mma.sync's operands pass through registers.

#include "fp32/three_products.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockM = 16 * kWarps;
constexpr int kHeadDim = 64;
constexpr int kStages = 2;  // tiles in shared memory: one in use, the other in flight
constexpr int kSplitThreads = 128;

// A tile of keys is K's hi, K's lo, V's hi and V's lo, then the scales of K's rows and V's columns.
constexpr int kTileBytes = 4 * kOperandBytes<kHeadDim> + sizeof(float) * (kBlockN + kHeadDim);
constexpr int kStageBytes = (kTileBytes + 1023) / 1024 * 1024;

// A stage also holds V in float32 on the block's diagonal, in padded rows.
constexpr int kFloatRow = kHeadDim + 4;
static_assert(kBlockM == kBlockN && kBlockN * kFloatRow * sizeof(float) <= kStageBytes);

// A block has a tile of kBlockN keys of a head: of K if blockIdx.y is 0, of V if it is 1. Rows past
// the end are zero.
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const float* __restrict__ k, const float* __restrict__ v, unsigned char* tiles,
                 Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  const bool is_v = blockIdx.y == 1;
  const Strides strides = is_v ? v_strides : k_strides;
  const int tiles_per_head = (seqlen + kBlockN - 1) / kBlockN;
  const int n_start = blockIdx.x % tiles_per_head * kBlockN;
  const int head = blockIdx.x / tiles_per_head;
  const float* g_rows = (is_v ? v : k) + head / num_heads * strides.batch +
                        head % num_heads * strides.head + n_start * strides.seqlen;
  TileRows<kHeadDim, kSplitThreads> rows;
  load_rows(rows, g_rows, strides.seqlen, n_start, seqlen);
  unsigned char* tile = tiles + int64_t{blockIdx.x} * kTileBytes;
  float* scales = reinterpret_cast<float*>(tile + 4 * kOperandBytes<kHeadDim>);
  if (is_v) {
    split_v(tile + 2 * kOperandBytes<kHeadDim>, scales + kBlockN, rows);
  } else {
    split_k(tile, scales, rows);
  }
}

// S = Q K^T, small products first. Of 8 keys, ldmatrix loads 32 columns.
inline __device__ void compute_s(float (&rS)[kScores], const Split& rQ, const unsigned char* sK) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kBlockN / 8; ++j) {
    float sums[4] = {};
    unsigned hiK[kHeadDim / 32][4], loK[kHeadDim / 32][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = step % 2 * 2;
      if (at == 0) {
        const auto matrices = sK + place_of(8 * j + lane_id % 8, kStep * step + lane_id / 8 * 8);
        ptx::load_matrices(hiK[step / 2], matrices);
        ptx::load_matrices(loK[step / 2], matrices + kOperandBytes<kHeadDim>);
      }
      ptx::mma<false>(sums, rQ.lo[step], {hiK[step / 2][at], hiK[step / 2][at + 1]});
      ptx::mma<false>(sums, rQ.hi[step], {loK[step / 2][at], loK[step / 2][at + 1]});
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = step % 2 * 2;
      ptx::mma<false>(sums, rQ.hi[step], {hiK[step / 2][at], hiK[step / 2][at + 1]});
    }
    for (int i = 0; i < 4; ++i) rS[4 * j + i] = sums[i];
  }
}

// O = row_scale O + P V, small products first. Of 16 keys, ldmatrix loads 16 columns.
inline __device__ void add_product(float (&rO)[kHeadDim / 2], const Split& rP,
                                   const unsigned char* sV, float2 row_scale,
                                   const float* v_scales) {
  const int lane_id = threadIdx.x % 32;
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    float sums[2][4] = {};
    unsigned hiV[kSteps][4], loV[4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto matrices = sV + place_of(kStep * step + lane_id % 16, d + lane_id / 16 * 8);
      ptx::load_matrices_transposed(hiV[step], matrices);
      ptx::load_matrices_transposed(loV, matrices + kOperandBytes<kHeadDim>);
      for (int c = 0; c < 2; ++c) {
        ptx::mma<false>(sums[c], rP.lo[step], {hiV[step][2 * c], hiV[step][2 * c + 1]});
        ptx::mma<false>(sums[c], rP.hi[step], {loV[2 * c], loV[2 * c + 1]});
      }
    }
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ptx::mma<false>(sums[c], rP.hi[step], {hiV[step][2 * c], hiV[step][2 * c + 1]});
      }
      auto& columns = reinterpret_cast<float (&)[4]>(rO[d / 2 + 4 * c]);
      add_pv(columns, sums[c], row_scale, v_scales + d + 8 * c);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v,
                     const unsigned char* __restrict__ tiles, float* __restrict__ o,
                     Strides q_strides, Strides v_strides, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal) {
  ATTENTION_ALIGNED_SHARED(unsigned char, s_tiles, 1024);
  __shared__ ptx::Barrier full[kStages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) ptx::barrier_init(&full[stage], 1);
    ptx::barrier_init_fence();
  }

  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_start = (gridDim.y - 1 - blockIdx.y) * kBlockM;
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int block_tiles = (n_end + kBlockN - 1) / kBlockN;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;

  // One thread copies tiles, and the first warp V on the diagonal, after the last tile.
  const auto copy = [&](int tile) {
    const int stage = tile % kStages;
    unsigned char* to = s_tiles + stage * kStageBytes;
    if (tile < block_tiles && threadIdx.x == 0) {
      const int tiles_per_head = (seqlen + kBlockN - 1) / kBlockN;
      ptx::barrier_expect(&full[stage], kTileBytes);
      ptx::copy_bulk(to, tiles + (int64_t{blockIdx.x} * tiles_per_head + tile) * kTileBytes,
                     kTileBytes, &full[stage]);
    } else if (tile == block_tiles && is_causal && threadIdx.x < 32) {
      const float* gV = v + batch * v_strides.batch + head * v_strides.head;
      constexpr int kBytes = kHeadDim * sizeof(float);
      if (threadIdx.x == 0) ptx::barrier_expect(&full[stage], kBlockN * kBytes);
      __syncwarp();
      for (int r = threadIdx.x; r < kBlockN; r += 32) {  // rows past the end become copies
        ptx::copy_bulk(to + r * kFloatRow * sizeof(float),
                       gV + min(m_start + r, seqlen - 1) * v_strides.seqlen, kBytes, &full[stage]);
      }
    }
  };

  const int r = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int n = threadIdx.x % 4 * 2;
  Split rQ, rP;
  float q_scales[2];
  load_q(rQ, q_scales, q + batch * q_strides.batch + head * q_strides.head, q_strides.seqlen,
         m_start + r, seqlen, softmax_scale);
  Statistics rows;
  float2 row_scale = make_float2(1.0f, 1.0f);
  float rS[kScores], rO[kHeadDim / 2] = {};

  copy(0);
  for (int tile = 0; tile < block_tiles; ++tile) {
    // Then all warps have read the tile before. The fence ends their loads: the next copy passes
    // through another proxy and could overtake them. At first, the barriers are initialized.
    ptx::proxy_fence();
    __syncthreads();
    copy(tile + 1);
    const unsigned char* s_tile = s_tiles + tile % kStages * kStageBytes;
    const float* scales = reinterpret_cast<const float*>(s_tile + 4 * kOperandBytes<kHeadDim>);
    ptx::barrier_wait(&full[tile % kStages], tile / kStages % 2);
    compute_s(rS, rQ, s_tile);
    scale_scores(rS, q_scales, scales);
    if (tile + 1 == block_tiles) mask(rS, tile * kBlockN + n, m_start + r, seqlen, is_causal);
    row_scale = softmax(rS, rows);
    if (is_causal && tile + 1 == block_tiles) break;
    split_p(rP, rS);
    add_product(rO, rP, s_tile + 2 * kOperandBytes<kHeadDim>, row_scale, scales + kBlockN);
  }
  if (is_causal) {
    // A column's scale would make rows depend on keys that they do not see.
    ptx::barrier_wait(&full[block_tiles % kStages], block_tiles / kStages % 2);
    const unsigned char* s_v = s_tiles + block_tiles % kStages * kStageBytes;
    add_product_tf32<kFloatRow>(rO, rS, row_scale, reinterpret_cast<const float*>(s_v),
                                threadIdx.x / 32 * 16 + 16);
  }

  float* gO = o + (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  for (int i = 0; i < 2; ++i) {
    const float scale = 1.0f / reduce_sum(rows.row_sum[i]);
    const int row = m_start + r + 8 * i;
    if (row < seqlen) store_row(gO + row * int64_t{num_heads} * kHeadDim, rO, i, n, scale);
  }
}

int64_t scratch_floats(const Params& params) {
  const int64_t heads = int64_t{params.batch} * params.num_heads;
  return heads * ceil_div(params.seqlen, kBlockN) * kTileBytes / sizeof(float);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim != kHeadDim) return cudaErrorInvalidValue;
  const int heads = params.batch * params.num_heads;
  const cudaError_t error = launch_kernel(
      split_kernel, dim3(heads * ceil_div(params.seqlen, kBlockN), 2), dim3(kSplitThreads), 0,
      stream, static_cast<const float*>(params.k), static_cast<const float*>(params.v),
      reinterpret_cast<unsigned char*>(params.scratch), params.k_strides, params.v_strides,
      params.seqlen, params.num_heads);
  if (error != cudaSuccess) return error;
  return launch_kernel(attention_kernel, dim3(heads, ceil_div(params.seqlen, kBlockM)),
                       dim3(kThreads), kStages * kStageBytes, stream,
                       static_cast<const float*>(params.q), static_cast<const float*>(params.v),
                       reinterpret_cast<const unsigned char*>(params.scratch),
                       static_cast<float*>(params.o), params.q_strides, params.v_strides,
                       params.seqlen, params.num_heads, params.softmax_scale, params.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
