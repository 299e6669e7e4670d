// v29 - two products in flight, in turns
//
// Change: a warpgroup starts Q K^T of a tile and P V of the tile before together. The two warpgroups
//         start their products in turns, so that one multiplies while the other computes.
// Why:    in v28 a warpgroup either multiplies or computes. Without turns, the products of both
//         warpgroups share the tensor cores and end at the same time; then both compute, and no
//         tensor core has work.
// Cost:   P and S live at the same time: 32 more registers. ptxas moves the wait for P V before the
//         softmax, see hopper/v09_softmax_during_pv.cu.
// Tile:   kBlockM x kBlockN = 128 x 64, block 384
// Layout: strided
// Takes:  float32, head_dim 64
// Needs:  sm_90a
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: 1.15 times as fast as v28 for long sequences.

#include "fp32/three_products.cuh"

namespace attention::ATTENTION_VERSION {

// A block has a warpgroup that copies and kConsumers that compute, with 64 queries each. The
// registers are at most the multiprocessor's 65,536.
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kBlockM = 64 * kConsumers;
constexpr int kHeadDim = 64;
constexpr int kStages = 5;  // tiles in shared memory
constexpr int kSplitThreads = 128;

// A tile of keys is K's hi, K's lo, V's hi and V's lo, then the scales of K's rows and V's columns.
constexpr int kTileBytes = 4 * kOperandBytes<kHeadDim> + sizeof(float) * (kBlockN + kHeadDim);
constexpr int kStageBytes = (kTileBytes + 1023) / 1024 * 1024;

// Shared memory: kStages tiles, then V in float32 on the block's diagonal, in padded rows.
constexpr int kFloatRow = kHeadDim + 4;
constexpr int kDiagonalBytes = kBlockM * kFloatRow * sizeof(float);
constexpr int kSmemBytes = kStages * kStageBytes + kDiagonalBytes;

// A block has a tile of kBlockN keys of a head: of K if blockIdx.y is 0, of V if it is 1. Rows past
// the end are zero.
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const float* __restrict__ k, const float* __restrict__ v, unsigned char* tiles,
                 Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  ptx::allow_next();
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

__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v,
                     const unsigned char* __restrict__ tiles, float* __restrict__ o,
                     Strides q_strides, Strides v_strides, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal) {
  ATTENTION_ALIGNED_SHARED(unsigned char, s_tiles, 1024);
  float* s_diagonal = reinterpret_cast<float*>(s_tiles + kStages * kStageBytes);
  __shared__ ptx::Barrier full[kStages], empty[kStages], diagonal_full;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&full[stage], 1);
      ptx::barrier_init(&empty[stage], 4 * kConsumers);  // every warp arrives
    }
    ptx::barrier_init(&diagonal_full, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();

  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_start = (gridDim.y - 1 - blockIdx.y) * kBlockM;
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int block_tiles = (n_end + kBlockN - 1) / kBlockN;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;

  // The last warpgroup: one warp copies.
  if (threadIdx.x >= 128 * kConsumers) {
    ptx::lower_registers<kProducerRegisters>();
    const int thread = threadIdx.x - 128 * kConsumers;
    if (thread >= 32) return;
    if (is_causal) {  // rows past the end become copies of the last one
      const float* gV = v + batch * v_strides.batch + head * v_strides.head;
      constexpr int kBytes = kHeadDim * sizeof(float);
      if (thread == 0) ptx::barrier_expect(&diagonal_full, kBlockM * kBytes);
      __syncwarp();
      for (int r = thread; r < kBlockM; r += 32) {
        ptx::copy_bulk(s_diagonal + r * kFloatRow,
                       gV + min(m_start + r, seqlen - 1) * v_strides.seqlen, kBytes,
                       &diagonal_full);
      }
    }
    if (thread != 0) return;
    ptx::wait_for_previous();
    const unsigned char* g_tiles =
        tiles + int64_t{blockIdx.x} * ((seqlen + kBlockN - 1) / kBlockN) * kTileBytes;
    for (int tile = 0; tile < block_tiles; ++tile) {
      const int stage = tile % kStages;
      // At first, the phase before is complete.
      ptx::barrier_wait(&empty[stage], tile / kStages % 2 ^ 1);
      ptx::barrier_expect(&full[stage], kTileBytes);
      ptx::copy_bulk(s_tiles + stage * kStageBytes, g_tiles + int64_t{tile} * kTileBytes,
                     kTileBytes, &full[stage]);
    }
    return;
  }
  ptx::raise_registers<kConsumerRegisters>();

  // The shuffle tells the compiler that all lanes have the same number.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const int m_first = m_start + 64 * warpgroup;
  const int r = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int n = threadIdx.x % 4 * 2;
  // The diagonal crosses the warpgroup's last tile.
  const int diagonal = is_causal ? m_first / kBlockN : block_tiles;
  const int end = min(diagonal + 1, block_tiles);

  // A warpgroup's diagonal tile and those after it are not given back: no others take their place.
  static_assert(kStages >= kConsumers, "a block's last kConsumers tiles stay in shared memory");
  const bool has_diagonal = diagonal < block_tiles;
  // Both warpgroups have these tiles; for the rest there are no turns.
  const int shared = is_causal ? m_start / kBlockN + 1 : block_tiles;

  Split rQ, rP;
  float q_scales[2];
  load_q(rQ, q_scales, q + batch * q_strides.batch + head * q_strides.head, q_strides.seqlen,
         m_first + r, seqlen, softmax_scale);
  Statistics rows;
  float2 row_scale = make_float2(1.0f, 1.0f);
  float rS[kScores], rPV[kHeadDim / 2], rO[kHeadDim / 2] = {};
  const auto start_qk = [&](int tile) {
    ptx::barrier_wait(&full[tile % kStages], tile / kStages % 2);
    if (tile < shared) wait_for_turn(warpgroup);
    multiply_qk(rS, rQ, s_tiles + tile % kStages * kStageBytes);
  };
  const auto start_pv = [&](int tile) {
    multiply_pv(rPV, rP, s_tiles + tile % kStages * kStageBytes + 2 * kOperandBytes<kHeadDim>);
  };
  const auto end_turn = [&](int tile) {
    const bool is_last = warpgroup == kConsumers - 1 && tile + 1 == shared;
    if (tile < shared && !is_last) pass_turn<kConsumers>(warpgroup);
  };
  const auto scales_of = [&](int tile) {
    return reinterpret_cast<const float*>(s_tiles + tile % kStages * kStageBytes +
                                          4 * kOperandBytes<kHeadDim>);
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
    add_pv(rO, rPV, row_scale, scales_of(tile) + kBlockN);
    arrive(&empty[tile % kStages]);
  };

  if (warpgroup == kConsumers - 1) pass_turn<kConsumers>(warpgroup);
  start_qk(0);
  end_turn(0);
  ptx::multiply_wait<0>(rS);
  row_scale = use_s(0);
  for (int tile = 1; tile < end; ++tile) {
    split_p(rP, rS);
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
    split_p(rP, rS);
    start_pv(end - 1);
    ptx::multiply_wait<0>(rPV);
    use_pv(end - 1);
  }
  if (has_diagonal) {
    // A column's scale would make rows depend on keys that they do not see.
    ptx::barrier_wait(&diagonal_full, 0);
    add_product_tf32<kFloatRow>(rO, rS, row_scale, s_diagonal + 64 * warpgroup * kFloatRow,
                                threadIdx.x % 128 / 32 * 16 + 16);
  }

  float* gO = o + (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  for (int i = 0; i < 2; ++i) {
    const float scale = 1.0f / reduce_sum(rows.row_sum[i]);
    const int row = m_first + r + 8 * i;
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
  return launch_early(attention_kernel, dim3(heads, ceil_div(params.seqlen, kBlockM)), 1,
                      dim3(kThreads), kSmemBytes, stream, static_cast<const float*>(params.q),
                      static_cast<const float*>(params.v),
                      reinterpret_cast<const unsigned char*>(params.scratch),
                      static_cast<float*>(params.o), params.q_strides, params.v_strides,
                      params.seqlen, params.num_heads, params.softmax_scale, params.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
