// v41 - ordinary tiles at head_dim 128
//
// From:   v34
// Change: v38's softmax and v40's ordinary tiles, and a row's largest score is found by comparing
//         integers, three with one instruction.
// Why:    a score was multiplied three times: by its key's scale, by its query's, and P by 2^15. Maxima
//         take four cycles beside products, more than any other plain instruction.
// Cost:   where all scores of a row in a tile are negative, their largest is found by a second search.
// Tile:   kBlockM x kBlockN = 128 x 64, block 384
// Layout: strided
// Takes:  float32, head_dim 128
// Needs:  sm_90a
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: by a trial, 0.93 times the time of v34 with 96 heads of 1,024 rows, 0.88 with 48 of 4,096.

#include "fp32/three_products.cuh"

namespace attention::ATTENTION_VERSION {

// A block has a warpgroup that copies and kConsumers that compute, with 64 queries each. The
// registers are at most the multiprocessor's 65,536.
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kBlockM = 64 * kConsumers;
constexpr int kHeadDim = 128;
constexpr int kStages = 2;  // tiles of K and of V in shared memory
constexpr int kGroup = 16;  // heads
constexpr int kSplitThreads = 128;

// A part of a tile is K's hi and lo and the scales of its rows, or V's hi and lo and the scales of its
// columns.
constexpr int kKBytes = 2 * kOperandBytes<kHeadDim> + sizeof(float) * kBlockN;
constexpr int kVBytes = 2 * kOperandBytes<kHeadDim> + sizeof(float) * kHeadDim;
constexpr int kTileBytes = kKBytes + kVBytes;
constexpr int kStageBytes = (kVBytes + 1023) / 1024 * 1024;

// A stage also holds V in float32 on a warpgroup's diagonal, in padded rows.
constexpr int kFloatRow = kHeadDim + 4;
static_assert(kBlockN * kFloatRow * sizeof(float) <= kStageBytes);

// Shared memory: Q's hi and lo of each warpgroup, then kStages parts with K, then as many with V.
constexpr int kSmemBytes = kConsumers * 2 * kOperandBytes<kHeadDim> + 2 * kStages * kStageBytes;

// A block has a tile of kBlockN keys of a head, of K or V. The tiles that are read first come last: they
// are still in L2 then. Rows past the end are zero.
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const float* __restrict__ k, const float* __restrict__ v, unsigned char* tiles,
                 Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  ptx::allow_next();
  const bool is_v = blockIdx.x % 2 == 1;
  const int index = gridDim.x / 2 - 1 - blockIdx.x / 2;  // of the tile
  const Strides strides = is_v ? v_strides : k_strides;
  const int tiles_per_head = (seqlen + kBlockN - 1) / kBlockN;
  const int n_start = index % tiles_per_head * kBlockN;
  const int head = index / tiles_per_head;
  const float* g_rows = (is_v ? v : k) + head / num_heads * strides.batch +
                        head % num_heads * strides.head + n_start * strides.seqlen;
  TileRows<kHeadDim, kSplitThreads> rows;
  load_rows(rows, g_rows, strides.seqlen, n_start, seqlen);
  unsigned char* tile = tiles + int64_t{index} * kTileBytes;
  unsigned char* operand = is_v ? tile + kKBytes : tile;
  float* scales = reinterpret_cast<float*>(operand + 2 * kOperandBytes<kHeadDim>);
  if (is_v) {
    split_v<kHeadDim, kSplitThreads, true>(operand, scales, rows);
  } else {
    split_ordinary_k(operand, scales, rows);
  }
}

// Loads, scales and splits rows m and m + 8 of Q, which are rows r and r + 8 of an operand. Rows past
// the end are zero. The scales, powers of two, bring the rows' scores to units of log(2).
inline __device__ void load_q(unsigned char* sQ, float* scales, const float* gQ, int64_t g_stride,
                              int m, int r, int seqlen, Scale q_scale) {
  const int n = 2 * (threadIdx.x % 4);
  float2 rows[2][kHeadDim / 8];
#pragma unroll
  for (int i = 0; i < 2; ++i) attention::load_q(rows[i], gQ, g_stride, m + 8 * i, seqlen);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    auto& x = rows[i];
    float largest = 0.0f;
    for (float2& pair : x) {
      pair = make_float2(pair.x * q_scale.mantissa, pair.y * q_scale.mantissa);
      largest = largest_of(largest, pair);
    }
    const int exponent = exponent_of(reduce_max(largest));
    const float scale = power_of_two(kTop - exponent);
    if (n == 0) {
      scales[r + 8 * i] = scale_of_row(exponent - kTop, q_scale);
    }
    for (int j = 0; j < kHeadDim / 8; ++j) {
      unsigned hi, lo;
      split(x[j].x * scale, x[j].y * scale, hi, lo);
      store_split<kHeadDim>(sQ, r + 8 * i, 8 * j + n, hi, lo);
    }
  }
}

// S = Q K^T, small products first. An operand's lo follows its hi.
inline __device__ void multiply_qk(float (&rS)[kScores], const unsigned char* sQ,
                                   const unsigned char* sK) {
  const uint64_t hiQ = ptx::matrix_descriptor(sQ);
  const uint64_t loQ = ptx::matrix_descriptor(sQ + kOperandBytes<kHeadDim>);
  const uint64_t hiK = ptx::matrix_descriptor(sK);
  const uint64_t loK = ptx::matrix_descriptor(sK + kOperandBytes<kHeadDim>);
  const auto at = [](int d) { return d / kColumns * kColumnsBytes + d % kColumns * 2; };
  ptx::multiply_fence(rS);
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kStep) {
    ptx::multiply<false>(rS, ptx::advance(loQ, at(d)), ptx::advance(hiK, at(d)), d > 0);
    ptx::multiply<false>(rS, ptx::advance(hiQ, at(d)), ptx::advance(loK, at(d)));
  }
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kStep) {
    ptx::multiply<false>(rS, ptx::advance(hiQ, at(d)), ptx::advance(hiK, at(d)));
  }
  ptx::multiply_commit();
}

// O = row_scale O + P V in TF32, which has float32's exponents, with V not scaled. P = 0 times any
// finite V is 0, however large it is. The lane's warp sees the first `keys` keys.
inline __device__ void add_product_tf32(float (&rO)[kHeadDim / 2], const float (&rP)[kScores],
                                        float2 row_scale, const float* s_v, int keys) {
  constexpr int kColumnsAtOnce = 32, kKeysAtOnce = 16;
  const int lane_id = threadIdx.x % 32;
  const float* lane_v = s_v + 2 * (lane_id % 4) * kFloatRow + lane_id / 4;
  unsigned hiP[kBlockN / 8][4], loP[kBlockN / 8][4];
#pragma unroll
  for (int j = 0; j < kBlockN / 8; ++j) {
    for (int i = 0; i < 4; ++i) {
      split_tf32(rP[4 * j + i % 2 * 2 + i / 2], hiP[j][i], loP[j][i]);
    }
  }
#pragma unroll
  for (int first = 0; first < kHeadDim; first += kColumnsAtOnce) {
    float small[kColumnsAtOnce / 8][4] = {}, large[kColumnsAtOnce / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kBlockN; n += kKeysAtOnce) {
      if (n >= keys) break;
#pragma unroll
      for (int j = n / 8; j < (n + kKeysAtOnce) / 8; ++j) {
#pragma unroll
        for (int d = 0; d < kColumnsAtOnce / 8; ++d) {
          unsigned hiV[2], loV[2];
          for (int i = 0; i < 2; ++i) {  // halved: rounding up could overflow
            split_tf32(0.5f * lane_v[(8 * j + i) * kFloatRow + first + 8 * d], hiV[i], loV[i]);
          }
          ptx::mma_tf32(small[d], loP[j], hiV);
          ptx::mma_tf32(small[d], hiP[j], loV);
          ptx::mma_tf32(large[d], hiP[j], hiV);
        }
      }
    }
#pragma unroll
    for (int d = 0; d < kColumnsAtOnce / 8; ++d) {
      for (int i = 0; i < 4; ++i) {
        float& x = rO[first / 2 + 4 * d + i];
        x = fmaf(x, i < 2 ? row_scale.x : row_scale.y, 2.0f * (small[d][i] + large[d][i]));
      }
    }
  }
}

// A warpgroup copies kBlockN rows of V from row n on, where its first warp has waited for `empty`; rows
// past the end become copies of the last one. A warp starts one copy after the other, so all four share
// them.
inline __device__ void copy_rows(unsigned char* to, const float* gV, int64_t g_stride, int n,
                                 int seqlen, ptx::Barrier* empty, int parity, ptx::Barrier* full) {
  constexpr int kBytes = kHeadDim * sizeof(float);
  const int warp = threadIdx.x % 128 / 32;
  if (warp == 0) ptx::barrier_wait(empty, parity);
  if (threadIdx.x % 128 == 0) ptx::barrier_expect(full, kBlockN * kBytes);
  ptx::named_barrier_sync(5, 128);
  for (int r = warp + threadIdx.x % 32 * 4; r < kBlockN; r += 128) {
    ptx::copy_bulk(to + r * kFloatRow * sizeof(float), gV + min(n + r, seqlen - 1) * g_stride,
                   kBytes, full);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v,
                     const unsigned char* __restrict__ tiles, float* __restrict__ o,
                     Strides q_strides, Strides v_strides, int seqlen, int heads, int num_heads,
                     float softmax_scale, bool is_causal) {
  ATTENTION_ALIGNED_SHARED(unsigned char, s_q, 1024);
  unsigned char* s_k = s_q + kConsumers * 2 * kOperandBytes<kHeadDim>;
  unsigned char* s_v = s_k + kStages * kStageBytes;
  __shared__ ptx::Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&k_full[stage], 1);
      ptx::barrier_init(&v_full[stage], 1);
      ptx::barrier_init(&k_empty[stage], 4 * kConsumers);  // every warp arrives
      ptx::barrier_init(&v_empty[stage], 4 * kConsumers);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  // Blocks start in index order: of a group, the last queries have the most keys and go first.
  const int m_start = (gridDim.y - 1 - blockIdx.y) * kBlockM;
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int block_tiles = (n_end + kBlockN - 1) / kBlockN;
  const int index = blockIdx.z * kGroup + blockIdx.x;  // of the head
  if (index >= heads) return;
  const int batch = index / num_heads;
  const int head = index % num_heads;

  // The last warpgroup copies: one thread tiles, then all of them V on the diagonals.
  if (threadIdx.x >= 128 * kConsumers) {
    ptx::lower_registers<kProducerRegisters>();
    // The diagonal tile of the last warpgroup needs no split V.
    const int v_tiles = is_causal ? m_start / kBlockN + kConsumers - 1 : block_tiles;
    if (threadIdx.x == 128 * kConsumers) {
      ptx::wait_for_previous();
      const unsigned char* g_tiles =
          tiles + int64_t{index} * ((seqlen + kBlockN - 1) / kBlockN) * kTileBytes;
      for (int tile = 0; tile < block_tiles; ++tile) {
        const int stage = tile % kStages, parity = tile / kStages % 2 ^ 1;
        // At first, the phase before is complete.
        ptx::barrier_wait(&k_empty[stage], parity);
        ptx::barrier_expect(&k_full[stage], kKBytes);
        ptx::copy_bulk(s_k + stage * kStageBytes, g_tiles + int64_t{tile} * kTileBytes, kKBytes,
                       &k_full[stage]);
        if (tile >= v_tiles) continue;
        ptx::barrier_wait(&v_empty[stage], parity);
        ptx::barrier_expect(&v_full[stage], kVBytes);
        ptx::copy_bulk(s_v + stage * kStageBytes, g_tiles + int64_t{tile} * kTileBytes + kKBytes,
                       kVBytes, &v_full[stage]);
      }
    }
    __syncwarp();
    if (!is_causal) return;
    // The first warpgroup's diagonal follows the last tile of V, the other's the last of K.
    const float* gV = v + batch * v_strides.batch + head * v_strides.head;
    const int stage = v_tiles % kStages, parity = v_tiles / kStages % 2 ^ 1;
    copy_rows(s_v + stage * kStageBytes, gV, v_strides.seqlen, m_start, seqlen, &v_empty[stage],
              parity, &v_full[stage]);
    if (block_tiles > v_tiles) {
      const int stage = block_tiles % kStages, parity = block_tiles / kStages % 2 ^ 1;
      copy_rows(s_k + stage * kStageBytes, gV, v_strides.seqlen, m_start + kBlockN, seqlen,
                &k_empty[stage], parity, &k_full[stage]);
    }
    return;
  }
  ptx::raise_registers<kConsumerRegisters>();

  // The shuffle tells the compiler that all lanes have the same number.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const bool is_last = warpgroup == kConsumers - 1;
  const int m_first = m_start + 64 * warpgroup;
  const int r = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // of the block
  const int m = m_start + r;
  const int n = threadIdx.x % 4 * 2;
  // The diagonal crosses the warpgroup's last tile, if that has keys.
  const bool has_diagonal = is_causal && m_first < seqlen;
  const int end = has_diagonal ? m_first / kBlockN + 1 : block_tiles;
  // Both warpgroups have the tiles before this one; for the others there are no turns.
  const int shared = has_diagonal ? end - warpgroup : block_tiles;

  unsigned char* sQ = s_q + warpgroup * 2 * kOperandBytes<kHeadDim>;
  __shared__ float s_q_scales[kBlockM];
  Scale q_scale(softmax_scale);
  q_scale.exponent += kOrdinary - kTop;  // of K
  load_q(sQ, s_q_scales + 64 * warpgroup, q + batch * q_strides.batch + head * q_strides.head,
         q_strides.seqlen, m, r % 64, seqlen, q_scale);
  ptx::proxy_fence();
  ptx::named_barrier_sync(3 + warpgroup, 128);
  Split rP;
  Offsets rows;
  float2 row_scale = make_float2(1.0f, 1.0f);
  bool in_units = true;
  float rS[kScores], rPV[kHeadDim / 2], rO[kHeadDim / 2] = {};
  const auto start_qk = [&](int tile) {
    const int stage = tile % kStages;
    ptx::barrier_wait(&k_full[stage], tile / kStages % 2);
    if (tile < shared) wait_for_turn(warpgroup);
    multiply_qk(rS, sQ, s_k + stage * kStageBytes);
  };
  const auto start_pv = [&](int tile) {
    const int stage = tile % kStages;
    ptx::barrier_wait(&v_full[stage], tile / kStages % 2);
    multiply_pv(rPV, rP, s_v + stage * kStageBytes);
  };
  const auto end_turn = [&](int tile) {
    if (tile + is_last < shared) pass_turn<kConsumers>(warpgroup);
  };
  const auto scales_of = [&](const unsigned char* stages, int tile) {
    return reinterpret_cast<const float*>(stages + tile % kStages * kStageBytes +
                                          2 * kOperandBytes<kHeadDim>);
  };
  const auto use_s = [&](int tile) {
    const float* k_scales = scales_of(s_k, tile);
    if (k_scales[0] != 0.0f) scale_columns(rS, k_scales);
    arrive(&k_empty[tile % kStages]);
    const int n_start = tile * kBlockN;
    if (n_start + kBlockN > (is_causal ? min(m_first, seqlen) : seqlen)) {
      mask(rS, n_start + n, m, seqlen, is_causal);
    }
    return softmax<true>(rS, rows, {s_q_scales[r], s_q_scales[r + 8]});
  };
  const auto use_pv = [&](int tile) {
    const float* v_scales = scales_of(s_v, tile);
    add_in_units(rO, rPV, row_scale, v_scales, v_scales[0] == 0.0f, in_units);
    arrive(&v_empty[tile % kStages]);
  };

  if (is_last) pass_turn<kConsumers>(warpgroup);
  start_qk(0);
  end_turn(0);
  ptx::multiply_wait<0>(rS);
  row_scale = use_s(0);
  for (int tile = 1; tile < end; ++tile) {
    split_p(rP, rS, 1.0f);
    start_qk(tile);
    start_pv(tile - 1);
    end_turn(tile);
    ptx::multiply_wait<1>(rS);
    const float2 next_scale = use_s(tile);
    ptx::multiply_wait<0>(rPV);
    use_pv(tile - 1);
    row_scale = next_scale;
  }
  if (!has_diagonal) {
    split_p(rP, rS, 1.0f);
    start_pv(end - 1);
    ptx::multiply_wait<0>(rPV);
    use_pv(end - 1);
    leave_units(rO, in_units);
  } else {
    // A column's scale would make rows depend on keys that they do not see. V is where the next tile
    // of V would be, or for the last warpgroup the next of K.
    leave_units(rO, in_units);
    for (float& p : rS) p /= kScaleP;
    const int stage = end % kStages;
    ptx::barrier_wait(is_last ? &k_full[stage] : &v_full[stage], end / kStages % 2);
    add_product_tf32(rO, rS, row_scale,
                     reinterpret_cast<const float*>((is_last ? s_k : s_v) + stage * kStageBytes),
                     threadIdx.x % 128 / 32 * 16 + 16);
  }

  float* gO = o + (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  for (int i = 0; i < 2; ++i) {
    const float scale = kScaleP / reduce_sum(rows.row_sum[i]);
    const int row = m + 8 * i;
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
      split_kernel, dim3(heads * ceil_div(params.seqlen, kBlockN) * 2), dim3(kSplitThreads), 0,
      stream, static_cast<const float*>(params.k), static_cast<const float*>(params.v),
      reinterpret_cast<unsigned char*>(params.scratch), params.k_strides, params.v_strides,
      params.seqlen, params.num_heads);
  if (error != cudaSuccess) return error;
  const dim3 grid(heads < kGroup ? heads : kGroup, ceil_div(params.seqlen, kBlockM),
                  ceil_div(heads, kGroup));
  return launch_early(attention_kernel, grid, 1, dim3(kThreads), kSmemBytes, stream,
                      static_cast<const float*>(params.q), static_cast<const float*>(params.v),
                      reinterpret_cast<const unsigned char*>(params.scratch),
                      static_cast<float*>(params.o), params.q_strides, params.v_strides,
                      params.seqlen, heads, params.num_heads, params.softmax_scale,
                      params.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
