// v08 - all batch entries in one launch
//
// Change: the grid has a dimension for the batch entries: one launch instead of one per entry.
// Why:    ceil(seqlen / kBlockM) blocks do not fill a GPU that has more multiprocessors, and
//         launches on one stream wait for each other.
// Cost:   none.
// Tile:   kBlockM x kBlockN = 32 x 32, block (32, 32)
// Layout: contiguous
// Takes:  float32, head_dim 32 64
// Flags:  (none)
// Expect: a large gain where one entry's blocks leave multiprocessors idle, up to a factor of the
//         number of entries; a small one elsewhere, such as the document's tenth.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kBlockM = 32;
constexpr int kBlockN = 32;
constexpr int kThreads = kBlockM * kBlockN;

// The row stride of a tile of Q, K, V or O, in floats.
template <int kHeadDim>
constexpr int kStride = kHeadDim + 1;

// The stages. Warp threadIdx.y has one row of the tiles of Q, S, P and O; lane threadIdx.x has one
// column of S and P, and every kBlockN-th of O. For each row, row_max and row_sum cover the keys of
// earlier tiles (m and l in the paper), tile_max and tile_sum those of this tile, new_max and
// new_sum both. They are in memory; lane 0 computes them.

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

inline __device__ void row_maxima(const float* s, float* tile_max) {
  const int m = threadIdx.y;
  if (threadIdx.x == 0) {
    float maximum = s[m * kBlockN];
#pragma unroll
    for (int n = 1; n < kBlockN; ++n) {
      maximum = fmaxf(maximum, s[m * kBlockN + n]);
    }
    tile_max[m] = maximum;
  }
}

// P = exp(S - tile_max)
inline __device__ void exponentials(const float* s, const float* tile_max, float* p) {
  const int m = threadIdx.y;
  const int n = threadIdx.x;
  p[m * kBlockN + n] = expf(s[m * kBlockN + n] - tile_max[m]);
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

inline __device__ void new_statistics(const float* tile_max, const float* tile_sum,
                                      const float* row_max, const float* row_sum, float* new_max,
                                      float* new_sum) {
  const int m = threadIdx.y;
  if (threadIdx.x == 0) {
    const float maximum = fmaxf(row_max[m], tile_max[m]);
    new_max[m] = maximum;
    new_sum[m] =
        expf(row_max[m] - maximum) * row_sum[m] + expf(tile_max[m] - maximum) * tile_sum[m];
  }
}

// O = (exp(row_max - new_max) row_sum O + exp(tile_max - new_max) P V) / new_sum
template <int kHeadDim>
inline __device__ void update_o(const float* p, const float* v, const float* tile_max,
                                const float* row_max, const float* row_sum, const float* new_max,
                                const float* new_sum, float* o) {
  const int m = threadIdx.y;
  const float o_scale = expf(row_max[m] - new_max[m]) * row_sum[m];
  const float pv_scale = expf(tile_max[m] - new_max[m]);
#pragma unroll
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    float acc = 0.0f;
#pragma unroll
    for (int n = 0; n < kBlockN; ++n) {
      acc += p[m * kBlockN + n] * v[n * kStride<kHeadDim> + d];
    }
    float& out = o[m * kStride<kHeadDim> + d];
    out = (o_scale * out + pv_scale * acc) / new_sum[m];
  }
}

// Initializes O and the statistics, before the first tile of keys.
template <int kHeadDim>
inline __device__ void init(float* o, float* row_max, float* row_sum) {
  const int m = threadIdx.y;
#pragma unroll
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    o[m * kStride<kHeadDim> + d] = 0.0f;
  }
  if (threadIdx.x == 0) {
    row_max[m] = -INFINITY;
    row_sum[m] = 0.0f;
  }
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
  __shared__ float sTileMax[kBlockM];
  __shared__ float sTileSum[kBlockM];
  __shared__ float sRowMax[kBlockM];
  __shared__ float sRowSum[kBlockM];
  __shared__ float sNewMax[kBlockM];
  __shared__ float sNewSum[kBlockM];
  load_tile<kHeadDim>(q + int64_t{m_start} * row_stride, row_stride, seqlen - m_start, sQ);
  init<kHeadDim>(sO, sRowMax, sRowSum);

  // No row of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    load_tile<kHeadDim>(k + int64_t{n_start} * row_stride, row_stride, seqlen - n_start, sK);
    load_tile<kHeadDim>(v + int64_t{n_start} * row_stride, row_stride, seqlen - n_start, sV);
    __syncthreads();
    qk_dot<kHeadDim>(sQ, sK, sS, m_start, n_start, seqlen, softmax_scale, is_causal);
    __syncwarp();
    row_maxima(sS, sTileMax);
    __syncwarp();
    exponentials(sS, sTileMax, sP);
    __syncwarp();
    row_sums(sP, sTileSum);
    new_statistics(sTileMax, sTileSum, sRowMax, sRowSum, sNewMax, sNewSum);
    __syncwarp();
    update_o<kHeadDim>(sP, sV, sTileMax, sRowMax, sRowSum, sNewMax, sNewSum, sO);
    __syncthreads();
    copy_rows(sNewMax, sRowMax);
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
