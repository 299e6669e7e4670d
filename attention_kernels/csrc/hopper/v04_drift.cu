// v04 - no barrier of the block
//
// Change: an mbarrier per stage counts the warps that have read its tile. Only the thread that
//         starts the next copy into that stage waits for it.
// Why:    in v03 all warps meet in every tile, so both warpgroups multiply at the same time, and
//         then both compute exponentials.
// Cost:   one more mbarrier per stage. The warp that copies still waits for the slowest one.
// Tile:   kBlockM x kBlockN = 128 x 128, block 256
// Layout: strided
// Takes:  float16 bfloat16, head_dim 64 128
// Needs:  sm_90a
// Flags:  --use_fast_math
// Expect: a few percent faster than v03: warpgroups may drift apart, but at most by one tile, and
//         nothing makes them.

// V must be finite, as for most tensor-core kernels: where a query does not see a key of its tile,
// P is 0, but the product still adds 0 * V to the sum.

#include <type_traits>

#include "element.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kWarpgroups = 2;
constexpr int kThreads = 128 * kWarpgroups;
constexpr int kBlockM = 64 * kWarpgroups;
constexpr int kBlockN = 128;
constexpr int kStages = 2;            // tiles in shared memory: one in use, the others in flight
constexpr int kScores = kBlockN / 2;  // elements of S per thread
constexpr int kColumns = 64;          // a tile is in blocks of this many columns: rows of 128 bytes
constexpr int kRowBytes = kColumns * sizeof(Element);
constexpr int kSwizzleBytes = 8 * kRowBytes;  // the swizzle repeats after 8 rows
constexpr int kStep = 16;                     // columns of A, rows of B, in one wgmma
constexpr int kSteps = kBlockN / kStep;       // of P V
constexpr bool kIsBfloat16 = std::is_same_v<Element, __nv_bfloat16>;

template <int kHeadDim, int kRows>
constexpr int kTileBytes = kRows * kHeadDim * sizeof(Element);

// Rounds x and y to a pair of Elements.
inline __device__ unsigned pack(float x, float y) {
  if constexpr (kIsBfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const unsigned*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
}

// Starts to copy rows to shared memory: kHeadDim / kColumns blocks of kRows x kColumns, in which
// the 16-byte chunks of row r are permuted by r % 8. Rows past the end are zero.
template <int kHeadDim, int kRows>
inline __device__ void copy_tile(unsigned char* s_tile, const TensorMap& map, int row, int batch,
                                 int head, ptx::Barrier* barrier) {
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kColumns) {
    ptx::load_tile(s_tile + d / kColumns * kRows * kRowBytes, map, d, head, row, batch, barrier);
  }
}

// Tells that this warp has read a tile.
inline __device__ void arrive(ptx::Barrier* barrier) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

// Changes the sign of a warpgroup's rows of Q.
template <int kHeadDim>
inline __device__ void negate(unsigned char* sQ_warpgroup) {
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < kTileBytes<kHeadDim, 64> / 4; i += 128) {
    constexpr int kBlockWords = 64 * kRowBytes / 4;
    unsigned* words =
        reinterpret_cast<unsigned*>(sQ_warpgroup) + i / kBlockWords * (kBlockM * kRowBytes / 4);
    words[i % kBlockWords] ^= 0x80008000;
  }
  ptx::proxy_fence();
}

// In a warpgroup, lane l of warp w holds of S and O rows 16 w + l / 4 (r = 0) and 8 further on
// (r = 1), at columns 8 j + 2 (l % 4) and the next: elements 4 j + 2 r and 4 j + 2 r + 1.

// S = Q K^T, both with kHeadDim columns
template <int kHeadDim>
inline __device__ void multiply_qk(float (&rS)[kScores], const unsigned char* sQ,
                                   const unsigned char* sK) {
  const uint64_t a = ptx::matrix_descriptor(sQ);
  const uint64_t b = ptx::matrix_descriptor(sK);
  ptx::multiply_fence(rS);
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kStep) {
    const int block = d / kColumns, at = d % kColumns * sizeof(Element);
    ptx::multiply<kIsBfloat16>(rS, ptx::advance(a, block * kBlockM * kRowBytes + at),
                               ptx::advance(b, block * kBlockN * kRowBytes + at), d > 0);
  }
  ptx::multiply_commit();
}

// O += P V, where V is transposed: wgmma's B has columns in its rows, as K has.
template <int kHeadDim>
inline __device__ void multiply_pv(float (&rO)[kHeadDim / 2], unsigned (&rP)[kSteps][4],
                                   const unsigned char* sV) {
  const uint64_t b = ptx::matrix_descriptor(sV, kBlockN * kRowBytes);
  ptx::multiply_fence(rO, rP);
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    ptx::multiply<kIsBfloat16, true>(rO, rP[j], ptx::advance(b, j * kStep * kRowBytes));
  }
  ptx::multiply_commit();
}

// Hides keys that a query does not see. n is the first column of this lane, m its first row.
inline __device__ void mask(float (&rS)[kScores], int n, int m, int seqlen, bool is_causal) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int visible = is_causal ? min(m + i % 4 / 2 * 8 + 1, seqlen) : seqlen;
    if (n + i / 4 * 8 + i % 2 >= visible) rS[i] = -INFINITY;
  }
}

struct Statistics {
  float row_max[2] = {-INFINITY, -INFINITY};  // score_scale times the largest score
  float row_sum[2] = {};                      // of this lane's P
};

// Replaces S by P = exp2(score_scale * S - row_max). Returns what O must be multiplied by. The
// first tile has a key for every query, so row_max is finite from then on.
inline __device__ float2 softmax(float (&rS)[kScores], Statistics& rows, float score_scale) {
  float row_scale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float new_max = fmaxf(rS[2 * r], rS[2 * r + 1]);
#pragma unroll
    for (int i = 4 + 2 * r; i < kScores; i += 4) new_max = fmaxf(new_max, fmaxf(rS[i], rS[i + 1]));
    new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffff, new_max, 1));
    new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffff, new_max, 2));
    new_max = fmaxf(score_scale * new_max, rows.row_max[r]);
    row_scale[r] = exp2f(rows.row_max[r] - new_max);
    rows.row_max[r] = new_max;
    rows.row_sum[r] *= row_scale[r];
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) {
      rS[i] = exp2f(fmaf(score_scale, rS[i], -new_max));
      rS[i + 1] = exp2f(fmaf(score_scale, rS[i + 1], -new_max));
      rows.row_sum[r] += rS[i] + rS[i + 1];
    }
  }
  return make_float2(row_scale[0], row_scale[1]);
}

// An accumulator's elements are in the order of wgmma's A operand.
inline __device__ void round_p(unsigned (&rP)[kSteps][4], const float (&rS)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) rP[i / 4][i % 4] = pack(rS[2 * i], rS[2 * i + 1]);
}

template <int kHeadDim>
inline __device__ void rescale(float (&rO)[kHeadDim / 2], float2 row_scale) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) rO[i] *= i % 4 < 2 ? row_scale.x : row_scale.y;
}

// Divides O by row_sum and stores it. m is the lane's first row.
template <int kHeadDim>
inline __device__ void store(Element* gO, int64_t g_stride, const float (&rO)[kHeadDim / 2],
                             const Statistics& rows, int m, int seqlen) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_sum = rows.row_sum[r];
    row_sum += __shfl_xor_sync(0xffffffff, row_sum, 1);
    row_sum += __shfl_xor_sync(0xffffffff, row_sum, 2);
    if (m + 8 * r >= seqlen) continue;
    unsigned* g_row = reinterpret_cast<unsigned*>(gO + (m + 8 * r) * g_stride) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      g_row[4 * j] = pack(rO[4 * j + 2 * r] / row_sum, rO[4 * j + 2 * r + 1] / row_sum);
    }
  }
}

template <int kHeadDim>
constexpr int kSmemBytes =
    kTileBytes<kHeadDim, kBlockM> + 2 * kStages * kTileBytes<kHeadDim, kBlockN>;

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeadDim > 64 ? 1 : 2)
    attention_kernel(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                     const __grid_constant__ TensorMap v, Element* __restrict__ o,
                     Strides o_strides, int seqlen, int num_heads, float softmax_scale,
                     bool is_causal) {
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_start = (gridDim.y - 1 - blockIdx.y) * kBlockM;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  Element* gO = o + batch * o_strides.batch + head * o_strides.head;

  ATTENTION_ALIGNED_SHARED(unsigned char, sQ, kSwizzleBytes);
  unsigned char* sK = sQ + kTileBytes<kHeadDim, kBlockM>;
  unsigned char* sV = sK + kStages * kTileBytes<kHeadDim, kBlockN>;
  __shared__ ptx::Barrier k_full[kStages], v_full[kStages];  // Q arrives with the first tile of K
  __shared__ ptx::Barrier empty[kStages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&k_full[stage], 1);
      ptx::barrier_init(&v_full[stage], 1);
      ptx::barrier_init(&empty[stage], 4 * kWarpgroups);  // every warp arrives
    }
    ptx::barrier_init_fence();
  }

  const int warpgroup = threadIdx.x / 128;
  const int m_first = m_start + 64 * warpgroup;
  const int m = m_first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int n = threadIdx.x % 4 * 2;
  unsigned char* sQ_warpgroup = sQ + 64 * warpgroup * kRowBytes;

  // Q takes the scale's sign; the scale is then positive, and row_max is of the largest score.
  const float score_scale = fmaxf(fabsf(softmax_scale) * 1.4426950408889634f, 1e-37f);
  float rO[kHeadDim / 2] = {};
  Statistics rows;

  // No query of this block sees any key from n_end on. All see those before n_seen.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int n_seen = is_causal ? m_first + 1 : seqlen;
  constexpr int kBytes = kTileBytes<kHeadDim, kBlockN>;
  const auto copy_keys = [&](int tile) {
    const int n_start = tile * kBlockN;
    if (n_start >= n_end) return;
    const int stage = tile % kStages;
    // At first, the phase before is complete.
    ptx::barrier_wait(&empty[stage], tile / kStages % 2 ^ 1);
    ptx::barrier_expect(&k_full[stage], kBytes + (tile == 0 ? kTileBytes<kHeadDim, kBlockM> : 0));
    if (tile == 0) copy_tile<kHeadDim, kBlockM>(sQ, q, m_start, batch, head, &k_full[stage]);
    copy_tile<kHeadDim, kBlockN>(sK + stage * kBytes, k, n_start, batch, head, &k_full[stage]);
    ptx::barrier_expect(&v_full[stage], kBytes);
    copy_tile<kHeadDim, kBlockN>(sV + stage * kBytes, v, n_start, batch, head, &v_full[stage]);
  };
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int tile = 0; tile < kStages - 1; ++tile) copy_keys(tile);
  }
  for (int tile = 0; tile * kBlockN < n_end; ++tile) {
    const int n_start = tile * kBlockN;
    const int stage = tile % kStages;
    const int parity = tile / kStages % 2;
    if (threadIdx.x == 0) copy_keys(tile + kStages - 1);

    ptx::barrier_wait(&k_full[stage], parity);
    if (tile == 0 && softmax_scale < 0.0f) {
      negate<kHeadDim>(sQ_warpgroup);
      __syncthreads();
    }
    float rS[kScores];
    multiply_qk<kHeadDim>(rS, sQ_warpgroup, sK + stage * kBytes);
    ptx::multiply_wait<0>(rS);
    if (n_start + kBlockN > n_seen) mask(rS, n_start + n, m, seqlen, is_causal);
    rescale<kHeadDim>(rO, softmax(rS, rows, score_scale));
    unsigned rP[kSteps][4];
    round_p(rP, rS);
    ptx::barrier_wait(&v_full[stage], parity);
    multiply_pv<kHeadDim>(rO, rP, sV + stage * kBytes);
    ptx::multiply_wait<0>(rO);
    arrive(&empty[stage]);
  }
  store<kHeadDim>(gO, o_strides.seqlen, rO, rows, m, seqlen);
}

int64_t scratch_floats(const Params&) { return 0; }

// Describes q, k or v, of which a copy takes `rows` rows and kColumns columns. The stride of a
// dimension of size 1 does not matter and may be anything, so it gets a valid one.
cudaError_t make_map(TensorMap* map, const void* x, const Strides& strides, int rows,
                     const Params& params) {
  const int64_t sizes[4] = {params.head_dim, params.num_heads, params.seqlen, params.batch};
  const int64_t given[3] = {strides.head, strides.seqlen, strides.batch};
  int64_t valid[3];
  for (int i = 0; i < 3; ++i) valid[i] = sizes[i + 1] > 1 ? given[i] : params.head_dim;
  return make_tensor_map(map, static_cast<const Element*>(x), sizes, valid, {kColumns, 1, rows, 1});
}

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  TensorMap q, k, v;
  cudaError_t error = make_map(&q, params.q, params.q_strides, kBlockM, params);
  if (error == cudaSuccess) error = make_map(&k, params.k, params.k_strides, kBlockN, params);
  if (error == cudaSuccess) error = make_map(&v, params.v, params.v_strides, kBlockN, params);
  if (error != cudaSuccess) return error;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  return launch_kernel(attention_kernel<kHeadDim>, grid, dim3(kThreads), kSmemBytes<kHeadDim>,
                       stream, q, k, v, static_cast<Element*>(params.o), params.o_strides,
                       params.seqlen, params.num_heads, params.softmax_scale, params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  switch (params.head_dim) {
    case 64:
      return launch_head_dim<64>(params, stream);
    case 128:
      return launch_head_dim<128>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace attention::ATTENTION_VERSION
