// v01 - wgmma on tiles that threads load
//
// Change: the first version. A block is two warpgroups of 64 queries; it walks over the keys in
//         tiles of 128. A warpgroup multiplies with wgmma: Q and K from shared memory, then P from
//         registers and V from shared memory; S and O are in registers. Threads copy the tiles
//         into shared memory, in the swizzle of 128 bytes that wgmma reads.
// Why:    mma.sync reaches little more than half of a Hopper tensor core's rate, and each warp
//         loads its own fragments of K and V. One wgmma multiplies 64 rows by 128 columns and
//         reads K or V from shared memory itself.
// Cost:   the instructions exist on compute capability 9.0 only. wgmma reads shared memory through
//         the asynchronous proxy, so each tile needs a proxy fence, between two barriers.
// Tile:   kBlockM x kBlockN = 128 x 128, block 256
// Layout: strided
// Takes:  float16 bfloat16, head_dim 64 128
// Needs:  sm_90a
// Flags:  --use_fast_math
// Expect: about 200 TFLOP/s on an H200 for long sequences with head_dim 64, a fifth of the tensor
//         cores' rate: load, product, softmax and product follow each other, and only another
//         block fills the gaps, at head_dim 128 none.

// V must be finite, as for most tensor-core kernels: where a query does not see a key of its tile,
// P is 0, but the product still adds 0 * V to the sum.

#include <type_traits>

#include "element.cuh"
#include "wgmma.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kWarpgroups = 2;
constexpr int kThreads = 128 * kWarpgroups;
constexpr int kBlockM = 64 * kWarpgroups;
constexpr int kBlockN = 128;
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

// Copies rows to shared memory: kHeadDim / kColumns blocks of kRows x kColumns, in which the
// 16-byte chunks of row r are permuted by r % 8. Rows from valid_rows on are zero. `flip` flips
// bits.
template <int kHeadDim, int kRows>
inline __device__ void load_tile(unsigned char* s_tile, const Element* g_tile, int64_t g_stride,
                                 int valid_rows, unsigned flip) {
  constexpr int kChunks = kHeadDim * sizeof(Element) / 16;  // in a row
  static_assert(kRows * kChunks % kThreads == 0, "every thread has as many chunks");
#pragma unroll 2  // more chunks at a time need too many registers
  for (int start = 0; start < kRows * kChunks; start += kThreads) {
    const int r = (start + threadIdx.x) / kChunks;
    const int chunk = threadIdx.x % kChunks;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (r < valid_rows) x = reinterpret_cast<const uint4*>(g_tile + r * g_stride)[chunk];
    unsigned char* s_row = s_tile + chunk / 8 * kRows * kRowBytes + r * kRowBytes;
    reinterpret_cast<uint4*>(s_row)[chunk % 8 ^ r % 8] =
        make_uint4(x.x ^ flip, x.y ^ flip, x.z ^ flip, x.w ^ flip);
  }
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
constexpr int kSmemBytes = kTileBytes<kHeadDim, kBlockM> + 2 * kTileBytes<kHeadDim, kBlockN>;

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeadDim > 64 ? 1 : 2)
    attention_kernel(const Element* __restrict__ q, const Element* __restrict__ k,
                     const Element* __restrict__ v, Element* __restrict__ o, Strides q_strides,
                     Strides k_strides, Strides v_strides, Strides o_strides, int seqlen,
                     int num_heads, float softmax_scale, bool is_causal) {
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_start = (gridDim.y - 1 - blockIdx.y) * kBlockM;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const Element* gQ =
      q + batch * q_strides.batch + head * q_strides.head + m_start * q_strides.seqlen;
  const Element* gK = k + batch * k_strides.batch + head * k_strides.head;
  const Element* gV = v + batch * v_strides.batch + head * v_strides.head;
  Element* gO = o + batch * o_strides.batch + head * o_strides.head;

  ATTENTION_ALIGNED_SHARED(unsigned char, sQ, kSwizzleBytes);
  unsigned char* sK = sQ + kTileBytes<kHeadDim, kBlockM>;
  unsigned char* sV = sK + kTileBytes<kHeadDim, kBlockN>;

  const int warpgroup = threadIdx.x / 128;
  const int m_first = m_start + 64 * warpgroup;
  const int m = m_first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int n = threadIdx.x % 4 * 2;
  const unsigned char* sQ_warpgroup = sQ + 64 * warpgroup * kRowBytes;

  // Q takes the scale's sign; the scale is then positive, and row_max is of the largest score.
  const float score_scale = fmaxf(fabsf(softmax_scale) * 1.4426950408889634f, 1e-37f);
  load_tile<kHeadDim, kBlockM>(sQ, gQ, q_strides.seqlen, seqlen - m_start,
                               softmax_scale < 0.0f ? 0x80008000 : 0);
  float rO[kHeadDim / 2] = {};
  Statistics rows;

  // No query of this block sees any key from n_end on. All see those before n_seen.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int n_seen = is_causal ? m_first + 1 : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    __syncthreads();
    load_tile<kHeadDim, kBlockN>(sK, gK + n_start * k_strides.seqlen, k_strides.seqlen,
                                 seqlen - n_start, 0);
    load_tile<kHeadDim, kBlockN>(sV, gV + n_start * v_strides.seqlen, v_strides.seqlen,
                                 seqlen - n_start, 0);
    ptx::proxy_fence();
    __syncthreads();

    float rS[kScores];
    multiply_qk<kHeadDim>(rS, sQ_warpgroup, sK);
    ptx::multiply_wait<0>(rS);
    if (n_start + kBlockN > n_seen) mask(rS, n_start + n, m, seqlen, is_causal);
    rescale<kHeadDim>(rO, softmax(rS, rows, score_scale));
    unsigned rP[kSteps][4];
    round_p(rP, rS);
    multiply_pv<kHeadDim>(rO, rP, sV);
    ptx::multiply_wait<0>(rO);
  }
  store<kHeadDim>(gO, o_strides.seqlen, rO, rows, m, seqlen);
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  return launch_kernel(attention_kernel<kHeadDim>, grid, dim3(kThreads), kSmemBytes<kHeadDim>,
                       stream, static_cast<const Element*>(params.q),
                       static_cast<const Element*>(params.k), static_cast<const Element*>(params.v),
                       static_cast<Element*>(params.o), params.q_strides, params.k_strides,
                       params.v_strides, params.o_strides, params.seqlen, params.num_heads,
                       params.softmax_scale, params.is_causal);
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
