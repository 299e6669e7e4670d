// v36 - split P once on the diagonal
//
// Change: the product on the diagonal goes through the keys once, with the sums of all columns in
//         registers, instead of four times with those of 16 columns.
// Why:    each time, P was split into TF32 numbers again, a third of the instructions of the product.
//         The last tile of a row has nothing to overlap with.
// Cost:   64 registers for the sums; Q's and those of P V are free by then.
// Tile:   kBlockM x kBlockN = 128 x 64 or 64 x 64, block 384
// Layout: strided
// Takes:  float32, head_dim 64
// Needs:  sm_90a
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: by a trial, half a microsecond less: 0.96 times the time of v35 with one batch entry of
//         512 rows and 12 heads.

#include "fp32/three_products.cuh"

namespace attention::ATTENTION_VERSION {

// A block has a warpgroup that copies and kConsumers that compute, with 64 queries each. The
// registers are at most the multiprocessor's 65,536.
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
template <bool kDividesKeys>
constexpr int kBlockM = kDividesKeys ? 64 : 64 * kConsumers;
constexpr int kHeadDim = 64;
constexpr int kStages = 4;  // tiles in shared memory
constexpr int kSplitThreads = 256;

// A tile of keys has two parts: K's hi and lo and the scales of its rows, then V's hi and lo and the
// scales of its columns.
constexpr int kPartBytes = 2 * kOperandBytes<kHeadDim> + sizeof(float) * 64;
constexpr int kTileBytes = 2 * kPartBytes;
constexpr int kPartStride = (kPartBytes + 1023) / 1024 * 1024;
constexpr int kStageBytes = 2 * kPartStride;

// Shared memory: kStages tiles, then V in float32 on the block's diagonal, in padded rows; where
// warpgroups divide the keys, that has 64 rows, and one part of O follows.
constexpr int kFloatRow = kHeadDim + 4;
constexpr int kDiagonalBytes = 64 * kConsumers * kFloatRow * sizeof(float);
constexpr int kSmemBytes = kStages * kStageBytes + kDiagonalBytes;

__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const float* __restrict__ k, const float* __restrict__ v, unsigned char* tiles,
                 Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  ptx::wait_for_previous();
  // Not before: attention reads Q and V without waiting. It starts when every block here has come this
  // far, and each has waited for what wrote them.
  ptx::allow_next();
  split_tile<kHeadDim, kSplitThreads, kPartBytes, kTileBytes>(tiles, k, v, k_strides, v_strides,
                                                              seqlen, num_heads);
}

template <bool kDividesKeys>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v,
                     const unsigned char* __restrict__ tiles, float* __restrict__ o,
                     Strides q_strides, Strides v_strides, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal) {
  constexpr int kBlockM = ATTENTION_VERSION::kBlockM<kDividesKeys>;
  ATTENTION_ALIGNED_SHARED(unsigned char, s_tiles, 1024);
  float* s_diagonal = reinterpret_cast<float*>(s_tiles + kStages * kStageBytes);
  __shared__ ptx::Barrier k_full[kStages], v_full[kStages], empty[kStages], diagonal_full;
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_start = (gridDim.y - 1 - blockIdx.y) * kBlockM;
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int block_tiles = (n_end + kBlockN - 1) / kBlockN;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;

  // The shuffle tells the compiler that all lanes have the same number.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const int m_first = kDividesKeys ? m_start : m_start + 64 * warpgroup;
  const int r = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  float2 q_rows[2][kHeadDim / 8];
  if (warpgroup < kConsumers) {
    const float* gQ = q + batch * q_strides.batch + head * q_strides.head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_q(q_rows[i], gQ, q_strides.seqlen, m_first + r + 8 * i, seqlen);
    }
  }

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&k_full[stage], 1);
      ptx::barrier_init(&v_full[stage], 1);
      // Every warp that reads the tile arrives.
      ptx::barrier_init(&empty[stage], kDividesKeys ? 4 : 4 * kConsumers);
    }
    ptx::barrier_init(&diagonal_full, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();

  // The last warpgroup copies: one thread tiles, the second warp V on the diagonal.
  if (threadIdx.x >= 128 * kConsumers) {
    ptx::lower_registers<kProducerRegisters>();
    const int thread = threadIdx.x - 128 * kConsumers;
    if (thread >= 32) {
      if (thread >= 64 || !is_causal) return;
      const float* gV = v + batch * v_strides.batch + head * v_strides.head;
      constexpr int kBytes = kHeadDim * sizeof(float);
      if (thread == 32) ptx::barrier_expect(&diagonal_full, kBlockM * kBytes);
      __syncwarp();
      // Rows past the end become copies of the last one.
      for (int r = thread - 32; r < kBlockM; r += 32) {
        ptx::copy_bulk(s_diagonal + r * kFloatRow,
                       gV + min(m_start + r, seqlen - 1) * v_strides.seqlen, kBytes,
                       &diagonal_full);
      }
      return;
    }
    if (thread != 0) return;
    ptx::wait_for_previous();
    const unsigned char* g_tiles =
        tiles + int64_t{blockIdx.x} * ((seqlen + kBlockN - 1) / kBlockN) * kTileBytes;
    // The diagonal tile of the block's last rows needs no split V.
    const int v_tiles = is_causal ? m_start / kBlockN + kBlockM / 64 - 1 : block_tiles;
    for (int tile = 0; tile < block_tiles; ++tile) {
      const int stage = tile % kStages;
      unsigned char* s_tile = s_tiles + stage * kStageBytes;
      const unsigned char* g_tile = g_tiles + int64_t{tile} * kTileBytes;
      // At first, the phase before is complete.
      ptx::barrier_wait(&empty[stage], tile / kStages % 2 ^ 1);
      ptx::barrier_expect(&k_full[stage], kPartBytes);
      ptx::copy_bulk(s_tile, g_tile, kPartBytes, &k_full[stage]);
      if (tile >= v_tiles) continue;
      ptx::barrier_expect(&v_full[stage], kPartBytes);
      ptx::copy_bulk(s_tile + kPartStride, g_tile + kPartBytes, kPartBytes, &v_full[stage]);
    }
    return;
  }
  ptx::raise_registers<kConsumerRegisters>();

  // The diagonal crosses the last tile of these rows.
  const int diagonal = is_causal ? m_first / kBlockN : block_tiles;
  const int end = min(diagonal + 1, block_tiles);
  constexpr int kApart = kDividesKeys ? kConsumers : 1;  // tiles of a warpgroup
  const int first = kDividesKeys ? warpgroup : 0;

  // A warpgroup's diagonal tile and those after it are not given back: no others take their place.
  static_assert(kStages >= kConsumers, "a block's last kConsumers tiles stay in shared memory");
  static_assert(kStages % kConsumers == 0, "a warpgroup waits for every tile of its stages");
  const bool has_diagonal = diagonal < block_tiles && diagonal % kApart == first;
  // Both warpgroups have these tiles; for others there are no turns.
  const int shared = kDividesKeys ? 0 : is_causal ? m_start / kBlockN + 1 : block_tiles;

  const int n = threadIdx.x % 4 * 2;
  Split rQ, rP;
  float q_scales[2];
  for (int i = 0; i < 2; ++i) {
    float largest = 0.0f;
    for (const float2 x : q_rows[i]) largest = largest_of(largest, x);
    q_scales[i] = split_q(rQ, i, q_rows[i], largest, softmax_scale);
  }
  Statistics rows;
  float2 row_scale = make_float2(1.0f, 1.0f);
  float rS[kScores], rPV[kHeadDim / 2], rO[kHeadDim / 2] = {};
  const auto start_qk = [&](int tile) {
    ptx::barrier_wait(&k_full[tile % kStages], tile / kStages % 2);
    if (tile < shared) wait_for_turn(warpgroup);
    multiply_qk(rS, rQ, s_tiles + tile % kStages * kStageBytes);
  };
  const auto start_pv = [&](int tile) {
    ptx::barrier_wait(&v_full[tile % kStages], tile / kStages % 2);
    multiply_pv(rPV, rP, s_tiles + tile % kStages * kStageBytes + kPartStride);
  };
  const auto end_turn = [&](int tile) {
    const bool is_last = warpgroup == kConsumers - 1 && tile + 1 == shared;
    if (tile < shared && !is_last) pass_turn<kConsumers>(warpgroup);
  };
  const auto scales_of = [&](int tile) {
    return reinterpret_cast<const float*>(s_tiles + tile % kStages * kStageBytes +
                                          2 * kOperandBytes<kHeadDim>);
  };
  const auto use_s = [&](int tile) {
    scale_scores(rS, q_scales, scales_of(tile));
    const int n_start = tile * kBlockN;
    if (tile == diagonal || n_start + kBlockN > seqlen) {
      mask(rS, n_start + n, m_first + r, seqlen, is_causal);
    }
    return softmax(rS, rows);
  };
  const auto use_pv = [&](int tile) {
    add_pv(rO, rPV, row_scale, scales_of(tile) + kPartStride / sizeof(float));
    arrive(&empty[tile % kStages]);
  };

  if (!kDividesKeys && warpgroup == kConsumers - 1) pass_turn<kConsumers>(warpgroup);
  if (first < end) {
    start_qk(first);
    end_turn(first);
    ptx::multiply_wait<0>(rS);
    row_scale = use_s(first);
  }
  int tile = first + kApart;
  for (; tile < end; tile += kApart) {
    split_p(rP, rS);
    start_qk(tile);
    start_pv(tile - kApart);
    end_turn(tile);
    ptx::multiply_wait<1>(rS);
    const float2 next_scale = use_s(tile);
    ptx::multiply_wait<0>(rPV);
    use_pv(tile - kApart);
    row_scale = next_scale;
  }
  if (first < end && !has_diagonal) {
    split_p(rP, rS);
    start_pv(tile - kApart);
    ptx::multiply_wait<0>(rPV);
    use_pv(tile - kApart);
  }
  if (has_diagonal) {
    // A column's scale would make rows depend on keys that they do not see.
    ptx::barrier_wait(&diagonal_full, 0);
    add_product_tf32<kFloatRow, kHeadDim>(rO, rS, row_scale,
                                          s_diagonal + (m_first - m_start) * kFloatRow,
                                          threadIdx.x % 128 / 32 * 16 + 16);
  }

  float row_sum[2] = {reduce_sum(rows.row_sum[0]), reduce_sum(rows.row_sum[1])};
  if (kDividesKeys) {
    float* s_o = s_diagonal + 64 * kFloatRow;
    if (!join_parts<kFloatRow>(rO, row_sum, rows.row_max, s_o, warpgroup)) return;
  }

  float* gO = o + (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  for (int i = 0; i < 2; ++i) {
    const float scale = 1.0f / row_sum[i];
    const int row = m_first + r + 8 * i;
    if (row < seqlen) store_row(gO + row * int64_t{num_heads} * kHeadDim, rO, i, n, scale);
  }
}

int64_t scratch_floats(const Params& params) {
  const int64_t heads = int64_t{params.batch} * params.num_heads;
  return heads * ceil_div(params.seqlen, kBlockN) * kTileBytes / sizeof(float);
}

template <bool kDividesKeys>
cudaError_t launch_attention(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM<kDividesKeys>));
  return launch_early(attention_kernel<kDividesKeys>, grid, 1, dim3(kThreads), kSmemBytes, stream,
                      static_cast<const float*>(params.q), static_cast<const float*>(params.v),
                      reinterpret_cast<const unsigned char*>(params.scratch),
                      static_cast<float*>(params.o), params.q_strides, params.v_strides,
                      params.seqlen, params.num_heads, params.softmax_scale, params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim != kHeadDim) return cudaErrorInvalidValue;
  int device = 0, multiprocessors = 0;
  cudaError_t found = cudaGetDevice(&device);
  if (found == cudaSuccess)
    found = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (found != cudaSuccess) return found;
  const int heads = params.batch * params.num_heads;
  const cudaError_t error = launch_early(
      split_kernel, dim3(heads * ceil_div(params.seqlen, kBlockN), 2), 1, dim3(kSplitThreads), 0,
      stream, static_cast<const float*>(params.k), static_cast<const float*>(params.v),
      reinterpret_cast<unsigned char*>(params.scratch), params.k_strides, params.v_strides,
      params.seqlen, params.num_heads);
  if (error != cudaSuccess) return error;
  const int64_t blocks = int64_t{heads} * ceil_div(params.seqlen, kBlockM<false>);
  return blocks < multiprocessors ? launch_attention<true>(params, stream)
                                  : launch_attention<false>(params, stream);
}

}  // namespace attention::ATTENTION_VERSION
