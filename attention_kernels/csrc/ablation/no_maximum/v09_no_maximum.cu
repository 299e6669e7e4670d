// v09 - no maximum: exp(S) directly
//
// Change: P = exp(S). The row maxima and the factors that correct for them are gone.
// Why:    the document asks "Do we really need m[i]?", and finds that its largest test overflows no
//         exponential. Without m[i] a tile saves a pass over S for its maxima and four exponentials
//         per row. This is step 8 without the maximum, the answer to a question, not a later step.
// Cost:   the range of float. A score above ln(FLT_MAX) = 88.72 has an infinite exponential. The
//         sum over n keys of equal score is infinite from 88.72 - ln(n) on, which is 81.79 for
//         1,024 keys, and values above 1 lower the limit by their logarithm, too. The result is
//         NaN, infinite or, where only the sum with the last tile overflows, zero, which nobody
//         notices. At the other end, a row whose largest score is below ln(FLT_MIN) = -87.34 loses
//         digits, exceeds its error budget at about -90 and is 0 / 0 below -103.97. Step 8 gets all
//         of these rows right: softmax depends only on differences of scores. So yes, we need it:
//         the first weights of the bundled model had scores above 3,000.
// Tile:   kBlockM x kBlockN = 32 x 32, block (32, 32)
// Layout: contiguous
// Takes:  float32, head_dim 32 64
// Flags:  (none)
// Expect: right for normal inputs up to a scale of about 4, where a score reaches 86; wrong for the
//         conformance suite's inputs of scale 8, so it has its own folder and is no backend.
//         test_ablation.py finds the smallest inputs that break it.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kBlockM = 32;
constexpr int kBlockN = 32;
constexpr int kThreads = kBlockM * kBlockN;

// The row stride of a tile of Q, K, V or O, in floats.
template <int kHeadDim>
constexpr int kStride = kHeadDim + 1;

// The stages. Warp threadIdx.y has one row of the tiles of Q, S, P and O; lane threadIdx.x has one
// column of S and P, and every kBlockN-th of O. For each row, row_sum covers the keys of earlier
// tiles (l in the paper), tile_sum those of this tile, new_sum both. They are in memory; lane 0
// computes them.

// S = softmax_scale * Q K^T, and -infinity for keys that the row does not see. The causal mask is
// top-left aligned.
template <int kHeadDim>
inline __device__ void qk_dot(const float* q, const float* k, float* s, int m_start, int n_start,
                              int seqlen, float softmax_scale, bool is_causal) {
  const int m = threadIdx.y;
  const int n = threadIdx.x;
  float acc = 0.0f;
#pragma unroll
  for (int d = 0; d < kHeadDim; ++d) {
    acc += q[m * kStride<kHeadDim> + d] * k[n * kStride<kHeadDim> + d];
  }
  const int n_end = is_causal ? min(m_start + m + 1, seqlen) : seqlen;
  s[m * kBlockN + n] = n_start + n < n_end ? softmax_scale * acc : -INFINITY;
}

// P = exp(S)
inline __device__ void exponentials(const float* s, float* p) {
  const int m = threadIdx.y;
  const int n = threadIdx.x;
  p[m * kBlockN + n] = expf(s[m * kBlockN + n]);
}

inline __device__ void row_sums(const float* p, float* tile_sum) {
  const int m = threadIdx.y;
  if (threadIdx.x == 0) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kBlockN; ++n) {
      sum += p[m * kBlockN + n];
    }
    tile_sum[m] = sum;
  }
}

inline __device__ void new_statistics(const float* tile_sum, const float* row_sum, float* new_sum) {
  const int m = threadIdx.y;
  if (threadIdx.x == 0) new_sum[m] = row_sum[m] + tile_sum[m];
}

// O = (row_sum O + P V) / new_sum
template <int kHeadDim>
inline __device__ void update_o(const float* p, const float* v, const float* row_sum,
                                const float* new_sum, float* o) {
  const int m = threadIdx.y;
#pragma unroll
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    float acc = 0.0f;
#pragma unroll
    for (int n = 0; n < kBlockN; ++n) {
      acc += p[m * kBlockN + n] * v[n * kStride<kHeadDim> + d];
    }
    float& out = o[m * kStride<kHeadDim> + d];
    out = (row_sum[m] * out + acc) / new_sum[m];
  }
}

// Initializes O and the statistics, before the first tile of keys.
template <int kHeadDim>
inline __device__ void init(float* o, float* row_sum) {
  const int m = threadIdx.y;
#pragma unroll
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    o[m * kStride<kHeadDim> + d] = 0.0f;
  }
  if (threadIdx.x == 0) row_sum[m] = 0.0f;
}

// Copies one statistic of each row to another.
inline __device__ void copy_rows(const float* from, float* to) {
  if (threadIdx.x == 0) to[threadIdx.y] = from[threadIdx.y];
}

// Copies between global and shared memory. Rows from valid_rows on are past the end: zero.

template <int kHeadDim>
inline __device__ void load_tile(const float* g_tile, int row_stride, int valid_rows,
                                 float* s_tile) {
  const int m = threadIdx.y;
#pragma unroll
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    s_tile[m * kStride<kHeadDim> + d] = m < valid_rows ? g_tile[m * row_stride + d] : 0.0f;
  }
}

template <int kHeadDim>
inline __device__ void store_tile(const float* s_tile, int row_stride, int valid_rows,
                                  float* g_tile) {
  const int m = threadIdx.y;
#pragma unroll
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    if (m < valid_rows) g_tile[m * row_stride + d] = s_tile[m * kStride<kHeadDim> + d];
  }
}

// A block has tile of rows blockIdx.y of batch entry blockIdx.x. The document has them the other
// way round, but grid.y is limited to 65,535.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const float* q, const float* k, const float* v, float* o, int num_heads,
                     int seqlen, float softmax_scale, bool is_causal) {
  const int m_start = blockIdx.y * kBlockM;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int row_stride = num_heads * kHeadDim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  q += offset;
  k += offset;
  v += offset;
  o += offset;
  __shared__ float sQ[kBlockM * kStride<kHeadDim>];
  __shared__ float sK[kBlockN * kStride<kHeadDim>];
  __shared__ float sV[kBlockN * kStride<kHeadDim>];
  __shared__ float sO[kBlockM * kStride<kHeadDim>];
  __shared__ float sS[kBlockM * kBlockN];
  __shared__ float sP[kBlockM * kBlockN];
  __shared__ float sTileSum[kBlockM];
  __shared__ float sRowSum[kBlockM];
  __shared__ float sNewSum[kBlockM];
  load_tile<kHeadDim>(q + int64_t{m_start} * row_stride, row_stride, seqlen - m_start, sQ);
  init<kHeadDim>(sO, sRowSum);

  // No row of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    load_tile<kHeadDim>(k + int64_t{n_start} * row_stride, row_stride, seqlen - n_start, sK);
    load_tile<kHeadDim>(v + int64_t{n_start} * row_stride, row_stride, seqlen - n_start, sV);
    __syncthreads();
    qk_dot<kHeadDim>(sQ, sK, sS, m_start, n_start, seqlen, softmax_scale, is_causal);
    exponentials(sS, sP);
    __syncwarp();
    row_sums(sP, sTileSum);
    new_statistics(sTileSum, sRowSum, sNewSum);
    __syncwarp();
    update_o<kHeadDim>(sP, sV, sRowSum, sNewSum, sO);
    __syncthreads();
    copy_rows(sNewSum, sRowSum);
  }
  store_tile<kHeadDim>(sO, row_stride, seqlen - m_start, o + int64_t{m_start} * row_stride);
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  return launch_kernel(attention_kernel<kHeadDim>, grid, dim3(kBlockN, kBlockM), 0, stream,
                       static_cast<const float*>(params.q), static_cast<const float*>(params.k),
                       static_cast<const float*>(params.v), static_cast<float*>(params.o),
                       params.num_heads, params.seqlen, params.softmax_scale, params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim == 32) return launch<32>(params, stream);
  if (params.head_dim == 64) return launch<64>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace attention::ATTENTION_VERSION
