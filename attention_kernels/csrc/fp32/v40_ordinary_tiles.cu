// v40 - ordinary tiles without scales
//
// From:   v39
// Change: a tile of K or V whose rows or columns have their largest numbers from 2^-7 to 2^9, as those of
//         a model have, is split with one scale for all tiles. What undoes it is a part of Q's scale, and
//         O's unit. Other tiles keep their scales, and the first of V among them changes O's unit.
// Why:    a score was multiplied by its key's scale, and an element of P V by its column's, with loads
//         of both. A tile's softmax takes longer than its products, and plain instructions take twice
//         as long beside products.
// Cost:   K's rows have to wait for each other before they are split. Blocks of 64 rows, which have few
//         tiles to make up for that, keep the scales. In an ordinary tile, what lo cannot resolve is up
//         to 2^-24 of a row's largest number; a scale of its own left less.
// Tile:   kBlockM x kBlockN = 192 x 64, block 512; 128 x 64 or 64 x 64, block 384
// Layout: strided
// Takes:  float32, head_dim 32 64
// Needs:  sm_90a
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: with head_dim 64, by a trial, 0.92 to 0.95 times the time of v39 with 4,096 rows and more, 0.97
//         with 32; the same up to 1,024 rows.

#include "fp32/three_products.cuh"

namespace attention::ATTENTION_VERSION {

// A block has a warpgroup that copies and kConsumers that compute, with 64 queries each. The
// registers are at most the multiprocessor's 65,536.
template <int kBlockM>
constexpr int kConsumers = kBlockM == 192 ? 3 : 2;
template <int kBlockM>
constexpr int kThreads = 128 * (kConsumers<kBlockM> + 1);
template <int kBlockM>
constexpr int kProducerRegisters = kBlockM == 192 ? 32 : 24;
template <int kBlockM>
constexpr int kConsumerRegisters = kBlockM == 192 ? 160 : 240;
constexpr int kStages = 4;  // tiles in shared memory
template <int kBlockM>
constexpr bool kFindsOrdinary = kBlockM > 64;  // tiles
constexpr int kSplitThreads = 256;

// A tile of keys has two parts: K's hi and lo and the scales of its rows, then V's hi and lo and the
// scales of its columns.
template <int kHeadDim>
constexpr int kKBytes = 2 * kOperandBytes<kHeadDim> + sizeof(float) * kBlockN;
template <int kHeadDim>
constexpr int kVBytes = 2 * kOperandBytes<kHeadDim> + sizeof(float) * kHeadDim;
template <int kHeadDim>
constexpr int kTileBytes = kKBytes<kHeadDim> + kVBytes<kHeadDim>;
template <int kHeadDim>
constexpr int kPartStride = (kKBytes<kHeadDim> + 1023) / 1024 * 1024;
template <int kHeadDim>
constexpr int kStageBytes = 2 * kPartStride<kHeadDim>;

// Shared memory: kStages tiles, then V in float32 on the block's diagonal, in padded rows; where
// warpgroups divide the keys, that has 64 rows, and one part of O follows.
template <int kHeadDim>
constexpr int kFloatRow = kHeadDim + 4;
template <int kHeadDim, int kBlockM>
constexpr int kSmemBytes = kStages * kStageBytes<kHeadDim> +
                           64 * kConsumers<kBlockM> * kFloatRow<kHeadDim> * sizeof(float);

template <int kHeadDim, int kBlockM>
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const float* __restrict__ k, const float* __restrict__ v, unsigned char* tiles,
                 Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  ptx::wait_for_previous();
  // Not before: attention reads Q and V without waiting. It starts when every block here has come this
  // far, and each has waited for what wrote them.
  ptx::allow_next();
  split_tile<kHeadDim, kSplitThreads, kKBytes<kHeadDim>, kTileBytes<kHeadDim>,
             kFindsOrdinary<kBlockM>>(tiles, k, v, k_strides, v_strides, seqlen, num_heads);
}

template <int kHeadDim, int kBlockM>
__global__ void __launch_bounds__(kThreads<kBlockM>, 1)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v,
                     const unsigned char* __restrict__ tiles, float* __restrict__ o,
                     Strides q_strides, Strides v_strides, int seqlen, int heads, int num_heads,
                     float softmax_scale, bool is_causal) {
  constexpr int kConsumers = ATTENTION_VERSION::kConsumers<kBlockM>;
  constexpr bool kDividesKeys = kBlockM == 64;
  constexpr bool kFindsOrdinary = ATTENTION_VERSION::kFindsOrdinary<kBlockM>;
  constexpr bool kSharesRegisters = kHeadDim == 64 && kBlockM == 192;  // of S and P
  constexpr int kKBytes = ATTENTION_VERSION::kKBytes<kHeadDim>;
  constexpr int kVBytes = ATTENTION_VERSION::kVBytes<kHeadDim>;
  constexpr int kTileBytes = ATTENTION_VERSION::kTileBytes<kHeadDim>;
  constexpr int kPartStride = ATTENTION_VERSION::kPartStride<kHeadDim>;
  constexpr int kStageBytes = ATTENTION_VERSION::kStageBytes<kHeadDim>;
  constexpr int kFloatRow = ATTENTION_VERSION::kFloatRow<kHeadDim>;
  ATTENTION_ALIGNED_SHARED(unsigned char, s_tiles, 1024);
  float* s_diagonal = reinterpret_cast<float*>(s_tiles + kStages * kStageBytes);
  __shared__ ptx::Barrier k_full[kStages], v_full[kStages], empty[kStages], diagonal_full;
  // Blocks start in index order: of a group of heads, the last queries have the most keys, so they go
  // first. The rows that the last block lacks are before the first one, where they have no keys.
  const int index = blockIdx.z * gridDim.x + blockIdx.x;  // of the head
  if (index >= heads) return;
  const int tiles_per_head = (seqlen + kBlockN - 1) / kBlockN;
  const int m_start = tiles_per_head * kBlockN - (blockIdx.y + 1) * kBlockM;
  const int block_tiles = is_causal ? m_start / kBlockN + kBlockM / kBlockN : tiles_per_head;
  const int batch = index / num_heads;
  const int head = index % num_heads;

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
    ptx::lower_registers<kProducerRegisters<kBlockM>>();
    const int thread = threadIdx.x - 128 * kConsumers;
    if (thread >= 32) {
      if (thread >= 64 || !is_causal) return;
      const float* gV = v + batch * v_strides.batch + head * v_strides.head;
      constexpr int kBytes = kHeadDim * sizeof(float);
      if (thread == 32) ptx::barrier_expect(&diagonal_full, kBlockM * kBytes);
      __syncwarp();
      // Rows before the first become copies of it, those past the end of the last.
      for (int r = thread - 32; r < kBlockM; r += 32) {
        ptx::copy_bulk(s_diagonal + r * kFloatRow,
                       gV + min(max(m_start + r, 0), seqlen - 1) * v_strides.seqlen, kBytes,
                       &diagonal_full);
      }
      return;
    }
    if (thread != 0) return;
    ptx::wait_for_previous();
    const unsigned char* g_tiles = tiles + int64_t{index} * tiles_per_head * kTileBytes;
    // The diagonal tile of the block's last rows needs no split V.
    const int v_tiles = is_causal ? block_tiles - 1 : block_tiles;
    for (int tile = 0; tile < block_tiles; ++tile) {
      const int stage = tile % kStages;
      unsigned char* s_tile = s_tiles + stage * kStageBytes;
      const unsigned char* g_tile = g_tiles + int64_t{tile} * kTileBytes;
      // At first, the phase before is complete.
      ptx::barrier_wait(&empty[stage], tile / kStages % 2 ^ 1);
      ptx::barrier_expect(&k_full[stage], kKBytes);
      ptx::copy_bulk(s_tile, g_tile, kKBytes, &k_full[stage]);
      if (tile >= v_tiles) continue;
      ptx::barrier_expect(&v_full[stage], kVBytes);
      ptx::copy_bulk(s_tile + kPartStride, g_tile + kKBytes, kVBytes, &v_full[stage]);
    }
    return;
  }
  ptx::raise_registers<kConsumerRegisters<kBlockM>>();

  // The diagonal crosses the last tile of these rows.
  const int diagonal = is_causal ? m_first / kBlockN : block_tiles;
  const int end = min(diagonal + 1, block_tiles);
  constexpr int kApart = kDividesKeys ? kConsumers : 1;  // tiles of a warpgroup
  const int first = kDividesKeys ? warpgroup : 0;

  // A warpgroup's diagonal tile and those after it are not given back: no others take their place.
  static_assert(kStages >= kConsumers, "a block's last kConsumers tiles stay in shared memory");
  static_assert(kStages % kApart == 0, "a warpgroup waits for every tile of its stages");
  const bool has_diagonal = first < end && diagonal < block_tiles && diagonal % kApart == first;
  // All warpgroups have these tiles; for others there are no turns.
  const int shared = kDividesKeys ? 0 : is_causal ? m_start / kBlockN + 1 : block_tiles;

  const int n = threadIdx.x % 4 * 2;
  SplitOf<kHeadDim / kStep> rQ;
  Split rP;
  float q_scales[2];
  Scale q_scale(softmax_scale);
  if (kFindsOrdinary) q_scale.exponent += kOrdinary - kTop;  // of K
  for (int i = 0; i < 2; ++i) q_scales[i] = split_q(rQ, i, q_rows[i], q_scale);
  Offsets rows;
  float2 row_scale = make_float2(1.0f, 1.0f);
  bool k_is_ordinary, v_is_ordinary, in_units = kFindsOrdinary;
  float rS[kScores], rPV[kHeadDim / 2], rO[kHeadDim / 2] = {};
  // Tiles are awaited before the turn: others could use it.
  const auto start_turn = [&](int tile) {
    if (tile < shared) wait_for_turn(warpgroup);
  };
  const auto scales_of = [&](int tile) {
    return reinterpret_cast<const float*>(s_tiles + tile % kStages * kStageBytes +
                                          2 * kOperandBytes<kHeadDim>);
  };
  const auto await_k = [&](int tile) {
    ptx::barrier_wait(&k_full[tile % kStages], tile / kStages % 2);
    k_is_ordinary = kFindsOrdinary && scales_of(tile)[0] == 0.0f;
  };
  const auto await_v = [&](int tile) {
    ptx::barrier_wait(&v_full[tile % kStages], tile / kStages % 2);
    v_is_ordinary = kFindsOrdinary && scales_of(tile)[kPartStride / sizeof(float)] == 0.0f;
  };
  const auto start_qk = [&](int tile) {
    multiply_qk(rS, rQ, s_tiles + tile % kStages * kStageBytes);
  };
  const auto start_pv = [&](int tile) {
    multiply_pv(rPV, rP, s_tiles + tile % kStages * kStageBytes + kPartStride);
  };
  const auto end_turn = [&](int tile) {
    const bool is_last = warpgroup == kConsumers - 1 && tile + 1 == shared;
    if (tile < shared && !is_last) pass_turn<kConsumers>(warpgroup);
  };
  const auto use_s = [&](int tile) {
    if (!k_is_ordinary) scale_columns(rS, scales_of(tile));
    const int n_start = tile * kBlockN;
    if (tile == diagonal || n_start + kBlockN > seqlen) {
      mask(rS, n_start + n, m_first + r, seqlen, is_causal);
    }
    return softmax(rS, rows, q_scales);
  };
  const auto use_pv = [&](int tile) {
    const float* v_scales = scales_of(tile) + kPartStride / sizeof(float);
    add_in_units(rO, rPV, row_scale, v_scales, v_is_ordinary, in_units);
    arrive(&empty[tile % kStages]);
  };

  if (shared > 0 && warpgroup == kConsumers - 1) pass_turn<kConsumers>(warpgroup);
  if (first < end) {
    await_k(first);
    start_turn(first);
    start_qk(first);
    end_turn(first);
    ptx::multiply_wait<0>(rS);
    row_scale = use_s(first);
  }
  int tile = first + kApart;
  for (; tile < end; tile += kApart) {
    split_p(rP, rS, 1.0f);
    await_k(tile);
    if constexpr (kSharesRegisters) {
      await_v(tile - kApart);
      start_turn(tile);
      start_pv(tile - kApart);
      ptx::multiply_wait<0>(rPV);
      start_qk(tile);
      end_turn(tile);
      use_pv(tile - kApart);
      ptx::multiply_wait<0>(rS);
      row_scale = use_s(tile);
    } else {
      start_turn(tile);
      start_qk(tile);
      await_v(tile - kApart);
      start_pv(tile - kApart);
      end_turn(tile);
      ptx::multiply_wait<1>(rS);
      const float2 next_scale = use_s(tile);
      ptx::multiply_wait<0>(rPV);
      use_pv(tile - kApart);
      row_scale = next_scale;
    }
  }
  if (first < end && !has_diagonal) {
    split_p(rP, rS, 1.0f);
    await_v(tile - kApart);
    start_pv(tile - kApart);
    ptx::multiply_wait<0>(rPV);
    use_pv(tile - kApart);
  }
  leave_units(rO, in_units);
  if (has_diagonal) {
    // A column's scale would make rows depend on keys that they do not see.
    for (float& p : rS) p /= kScaleP;
    ptx::barrier_wait(&diagonal_full, 0);
    add_product_tf32<kFloatRow, kHeadDim>(rO, rS, row_scale,
                                          s_diagonal + (m_first - m_start) * kFloatRow,
                                          threadIdx.x % 128 / 32 * 16 + 16);
  }

  float row_sum[2] = {reduce_sum(rows.row_sum[0]), reduce_sum(rows.row_sum[1])};
  if (kDividesKeys) {
    const float row_max[2] = {-rows.offset[0], -rows.offset[1]};
    float* s_o = s_diagonal + 64 * kFloatRow;
    if (!join_parts<kFloatRow>(rO, row_sum, row_max, s_o, warpgroup)) return;
  }

  float* gO = o + (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  for (int i = 0; i < 2; ++i) {
    const float scale = kScaleP / row_sum[i];
    const int row = m_first + r + 8 * i;
    if (row >= 0 && row < seqlen)
      store_row(gO + row * int64_t{num_heads} * kHeadDim, rO, i, n, scale);
  }
}

int64_t scratch_floats(const Params& params) {
  const int64_t heads = int64_t{params.batch} * params.num_heads;
  const int bytes = params.head_dim == 32 ? kTileBytes<32> : kTileBytes<64>;
  return heads * ceil_div(params.seqlen, kBlockN) * bytes / sizeof(float);
}

template <int kHeadDim, int kBlockM>
cudaError_t launch_attention(const Params& params, cudaStream_t stream, int multiprocessors) {
  const int heads = params.batch * params.num_heads;
  const cudaError_t error = launch_early(
      split_kernel<kHeadDim, kBlockM>, dim3(heads * ceil_div(params.seqlen, kBlockN), 2), 1,
      dim3(kSplitThreads), 0, stream, static_cast<const float*>(params.k),
      static_cast<const float*>(params.v), reinterpret_cast<unsigned char*>(params.scratch),
      params.k_strides, params.v_strides, params.seqlen, params.num_heads);
  if (error != cudaSuccess) return error;
  const int blocks = ceil_div(params.seqlen, kBlockM);  // of a head
  // A group has two blocks or more per multiprocessor, so that short ones follow the long ones. With
  // 192 rows per block, its tiles are about 26 MB, and stay in L2 until its last block has read them.
  const int groups = max(1, heads * blocks / (2 * multiprocessors));
  const dim3 grid(ceil_div(heads, groups), blocks, groups);
  return launch_early(
      attention_kernel<kHeadDim, kBlockM>, grid, 1, dim3(kThreads<kBlockM>),
      kSmemBytes<kHeadDim, kBlockM>, stream, static_cast<const float*>(params.q),
      static_cast<const float*>(params.v), reinterpret_cast<const unsigned char*>(params.scratch),
      static_cast<float*>(params.o), params.q_strides, params.v_strides, params.seqlen, heads,
      params.num_heads, params.softmax_scale, params.is_causal);
}

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t found = cudaGetDevice(&device);
  if (found == cudaSuccess)
    found = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (found != cudaSuccess) return found;
  const int heads = params.batch * params.num_heads;
  const auto blocks = [&](int rows) { return int64_t{heads} * ceil_div(params.seqlen, rows); };
  if (blocks(128) < multiprocessors)
    return launch_attention<kHeadDim, 64>(params, stream, multiprocessors);
  // Causal blocks differ in length: with few waves of them, or few tiles of keys each, larger ones are
  // not faster.
  const int waves = params.seqlen > 1024 ? 2 : 4;
  const bool is_long = params.seqlen >= (kHeadDim == 64 ? 1025 : 512);
  return is_long && blocks(192) >= waves * multiprocessors
             ? launch_attention<kHeadDim, 192>(params, stream, multiprocessors)
             : launch_attention<kHeadDim, 128>(params, stream, multiprocessors);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  switch (params.head_dim) {
    case 32:
      return launch_head_dim<32>(params, stream);
    case 64:
      return launch_head_dim<64>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace attention::ATTENTION_VERSION
