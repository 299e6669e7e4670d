// v05 - fetch the next tile early
//
// Change: a block reads the next tiles of K and V into registers before it multiplies the present
//         ones, and writes them to shared memory afterwards.
// Why:    `gpt2-infer predict` on v04: 26 % of the stalls wait for these reads. Without them the call
//         would take 39.5 us instead of 51.9 at N=1,024.
// Cost:   32 registers per thread.
// Tile:   kBlockM x kBlockN = 64 x 64, block 128
// Layout: contiguous
// Takes:  float16, head_dim 64
// Flags:  (none)
// Expect: 41.7 us at N=1,024, predicted.

// A common maximum lets rows influence each other and, with a causal mask, the future the past.
// Here not one bit changes: P is scaled by a power of two and stays normal in half precision, so
// another reference only shifts exponents. V must be finite; see v01.

#include <mma.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

namespace wmma = nvcuda::wmma;

constexpr int kHeadDim = 64;
constexpr int kWarpSize = 32;
constexpr int kWarps = 4;
constexpr int kBlockM = 16 * kWarps;
constexpr int kBlockN = 64;
constexpr int kThreads = kWarpSize * kWarps;
constexpr int kTile = 16;                              // a fragment is kTile x kTile
constexpr int kLaneN = kBlockM * kBlockN / kThreads;   // columns of S per lane, half a row
constexpr int kLaneD = kBlockM * kHeadDim / kThreads;  // columns of O per lane, half a row
constexpr int kStride = kHeadDim + 8;                  // row stride in halves: 16 bytes of padding
constexpr int kStrideP = kBlockN + 8;
constexpr int kStrideS = kBlockN + 4;  // row stride in floats
constexpr int kStrideO = kHeadDim + 4;

// From here on, scores are in units of log(2), and P = exp2(score - reference).
//
// How far a row's own maximum may be below the common one. Without the guard, a row hundreds below
// would have only zeros in P, and 0 / 0 as its result.
constexpr bool kGuarded = true;
constexpr int kMaxSpread = 6;
// P is at most 2^15, the largest power of two in half, and has all of half's bits down to 2^-14. So
// a P 2^22 times below its row's largest counts as 0: rounding puts the reference up to 1 above the
// common maximum, which is up to kMaxSpread above the row's.
constexpr int kMaxExponent = 15;
constexpr int kCutoff = kMaxExponent + 14 - 1 - kMaxSpread;

template <typename Use, typename... Layout>
using Fragment = wmma::fragment<Use, kTile, kTile, kTile, Layout...>;
using FragmentQ = Fragment<wmma::matrix_a, half, wmma::row_major>;
using FragmentK = Fragment<wmma::matrix_b, half, wmma::col_major>;  // K's rows are K^T's columns
using FragmentP = Fragment<wmma::matrix_a, half, wmma::row_major>;
using FragmentV = Fragment<wmma::matrix_b, half, wmma::row_major>;
using FragmentO = Fragment<wmma::accumulator, float>;

constexpr int kVector = 8;                                       // halves in 16 bytes
constexpr int kLoads = kBlockN * kHeadDim / kVector / kThreads;  // per thread and tile
static_assert(kBlockM == kBlockN, "Q's tile is as large as one of K or V");

// Reads a tile's share of this thread. Rows from valid_rows on are past the end and become zero.
inline __device__ void fetch_tile(uint4 (&fetched)[kLoads], const half* g_tile, int g_stride,
                                  int valid_rows) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = kVector * (i * kThreads + threadIdx.x);
    fetched[i] = make_uint4(0, 0, 0, 0);
    if (at / kHeadDim < valid_rows) {
      fetched[i] =
          *reinterpret_cast<const uint4*>(g_tile + at / kHeadDim * g_stride + at % kHeadDim);
    }
  }
}

inline __device__ void store_tile(half* s_tile, const uint4 (&fetched)[kLoads]) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = kVector * (i * kThreads + threadIdx.x);
    *reinterpret_cast<uint4*>(s_tile + at / kHeadDim * kStride + at % kHeadDim) = fetched[i];
  }
}

// Counts the keys of the tile at n_start that `row` sees. The causal mask is top-left aligned.
inline __device__ int visible_keys(int row, int n_start, int seqlen, bool is_causal) {
  return min(kBlockN, (is_causal ? min(row + 1, seqlen) : seqlen) - n_start);
}

// Returns 2^n for a whole n, or 0 below the normal range.
inline __device__ float power_of_two(float n) {
  return __int_as_float((__float2int_rz(fmaxf(n, -127.0f)) + 127) << 23);
}

inline __device__ float warp_max(float x) {
  for (int lane_mask = kWarpSize / 2; lane_mask > 0; lane_mask /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lane_mask));
  }
  return x;
}

__global__ void __launch_bounds__(kThreads)
    attention_kernel(const half* __restrict__ q, const half* __restrict__ k,
                     const half* __restrict__ v, half* __restrict__ o, float* __restrict__ scratch,
                     int seqlen, int num_heads, float softmax_scale, bool is_causal) {
  const int lane_id = threadIdx.x % kWarpSize;
  const int warp_id = threadIdx.x / kWarpSize;
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_block = gridDim.y - 1 - blockIdx.y;
  const int m_start = m_block * kBlockM;
  const int m_warp = m_start + warp_id * kTile;
  const int row = m_warp + lane_id / 2;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int row_stride = num_heads * kHeadDim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  const half* gQ = q + offset + int64_t{m_start} * row_stride;
  half* gO = o + offset + int64_t{m_start} * row_stride;
  // O in float, the type in which its fragments are stored.
  float* gO_float = scratch + (int64_t{blockIdx.x} * gridDim.y + m_block) * (kBlockM * kHeadDim);

  __shared__ __align__(32) half sQ[kBlockM * kStride];
  __shared__ __align__(32) half sK[kBlockN * kStride];
  __shared__ __align__(32) half sV[kBlockN * kStride];
  __shared__ __align__(32) float s_scores[kBlockM * kStrideS];
  __shared__ float s_row_sum[kBlockM];

  uint4 next_k[kLoads];
  uint4 next_v[kLoads];
  fetch_tile(next_k, gQ, row_stride, seqlen - m_start);
  store_tile(sQ, next_k);
  __syncthreads();
  FragmentQ rQ[kHeadDim / kTile];
  for (int d = 0; d < kHeadDim / kTile; ++d) {
    wmma::load_matrix_sync(rQ[d], sQ + warp_id * kTile * kStride + d * kTile, kStride);
  }
  static_assert(kStrideP <= kStride && kStrideO <= kStrideS, "they come in each other's place");
  half* sP = sQ + warp_id * kTile * kStride;
  float* sS = s_scores + warp_id * kTile * kStrideS;
  float* sO = sS;
  FragmentO rO[kHeadDim / kTile];
  for (int d = 0; d < kHeadDim / kTile; ++d) {
    wmma::fill_fragment(rO[d], 0.0f);
  }
  const float score_scale = softmax_scale * 1.4426950408889634f;  // log2(e)
  float row_max = -INFINITY;
  float reference = -INFINITY;
  float row_sum = 0.0f;
  bool per_row = false;

  // No query of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  fetch_tile(next_k, k + offset, row_stride, n_end);
  fetch_tile(next_v, v + offset, row_stride, n_end);
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    store_tile(sK, next_k);
    store_tile(sV, next_v);
    __syncthreads();
    // The next tile is on its way while this one is multiplied.
    const int n_next = n_start + kBlockN;
    const int64_t next = offset + int64_t{n_next} * row_stride;
    fetch_tile(next_k, k + next, row_stride, n_end - n_next);
    fetch_tile(next_v, v + next, row_stride, n_end - n_next);

    // S = Q K^T
    for (int n = 0; n < kBlockN; n += kTile) {
      FragmentO rS;
      wmma::fill_fragment(rS, 0.0f);
      for (int d = 0; d < kHeadDim / kTile; ++d) {
        FragmentK rK;
        wmma::load_matrix_sync(rK, sK + n * kStride + d * kTile, kStride);
        wmma::mma_sync(rS, rQ[d], rK, rS);
      }
      wmma::store_matrix_sync(sS + n, rS, kStrideS, wmma::mem_row_major);
    }
    __syncwarp();

    // P, and the running row statistics
    const int n_lane = lane_id % 2 * kLaneN;
    const int visible = visible_keys(row, n_start, seqlen, is_causal);
    float rS[kLaneN];
    float tile_max = -INFINITY;
    for (int i = 0; i < kLaneN; ++i) {
      const float s = sS[lane_id / 2 * kStrideS + n_lane + i];
      rS[i] = n_lane + i < visible ? score_scale * s : -INFINITY;
      tile_max = fmaxf(tile_max, rS[i]);
    }
    row_max = fmaxf(row_max, fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 1)));
    const float common_max = warp_max(row_max);
    if (kGuarded && !per_row) {
      per_row = __any_sync(0xffffffff, row_max < common_max - kMaxSpread);
    }
    const float new_reference = ceilf(per_row ? row_max : common_max) - kMaxExponent;
    const float row_scale = power_of_two(reference - new_reference);
    reference = new_reference;
    // P is rounded relative to the row's own maximum; scaling it to the reference is exact.
    const float own_reference = ceilf(row_max);
    const float own_scale = power_of_two(own_reference - reference);
    float tile_sum = 0.0f;
    for (int i = 0; i < kLaneN; ++i) {
      const float p = rS[i] < row_max - kCutoff ? 0.0f : own_scale * exp2f(rS[i] - own_reference);
      sP[lane_id / 2 * kStrideP + n_lane + i] = __float2half(p);
      tile_sum += p;
    }
    row_sum = row_scale * row_sum + tile_sum + __shfl_xor_sync(0xffffffff, tile_sum, 1);
    if (per_row) {
      __syncwarp();  // all lanes have read S, which O overwrites
      for (int d = 0; d < kHeadDim / kTile; ++d) {
        wmma::store_matrix_sync(sO + d * kTile, rO[d], kStrideO, wmma::mem_row_major);
      }
      __syncwarp();
      for (int i = 0; i < kLaneD; ++i) {
        sO[lane_id / 2 * kStrideO + lane_id % 2 * kLaneD + i] *= row_scale;
      }
      __syncwarp();
      for (int d = 0; d < kHeadDim / kTile; ++d) {
        wmma::load_matrix_sync(rO[d], sO + d * kTile, kStrideO, wmma::mem_row_major);
      }
    } else {
      for (int d = 0; d < kHeadDim / kTile; ++d) {
        for (int i = 0; i < rO[d].num_elements; ++i) rO[d].x[i] *= row_scale;
      }
    }
    __syncwarp();

    // O += P V
    for (int n = 0; n < kBlockN; n += kTile) {
      FragmentP rP;
      wmma::load_matrix_sync(rP, sP + n, kStrideP);
      for (int d = 0; d < kHeadDim / kTile; ++d) {
        FragmentV rV;
        wmma::load_matrix_sync(rV, sV + n * kStride + d * kTile, kStride);
        wmma::mma_sync(rO[d], rP, rV, rO[d]);
      }
    }
    __syncthreads();
  }

  for (int d = 0; d < kHeadDim / kTile; ++d) {
    wmma::store_matrix_sync(gO_float + warp_id * kTile * kHeadDim + d * kTile, rO[d], kHeadDim,
                            wmma::mem_row_major);
  }
  if (lane_id % 2 == 0) s_row_sum[warp_id * kTile + lane_id / 2] = row_sum;
  __syncthreads();
  for (int i = threadIdx.x; i < kBlockM * kHeadDim; i += kThreads) {
    gO_float[i] /= s_row_sum[i / kHeadDim];
    if (m_start + i / kHeadDim < seqlen) {
      gO[i / kHeadDim * row_stride + i % kHeadDim] = __float2half(gO_float[i]);
    }
  }
}

int64_t scratch_floats(const Params& params) {
  return int64_t{params.batch} * params.num_heads * ceil_div(params.seqlen, kBlockM) *
         (kBlockM * kHeadDim);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim != kHeadDim) return cudaErrorInvalidValue;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  return launch_kernel(attention_kernel, grid, kThreads, 0, stream,
                       static_cast<const half*>(params.q), static_cast<const half*>(params.k),
                       static_cast<const half*>(params.v), static_cast<half*>(params.o),
                       params.scratch, params.seqlen, params.num_heads, params.softmax_scale,
                       params.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
