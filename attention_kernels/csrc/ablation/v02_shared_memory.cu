// v02 - the tiles of the algorithm in shared memory
//
// Change: each kernel first copies the tiles and statistics that it reads into shared memory, works
//         there, and copies its results back. A barrier follows every copy.
// Why:    all 32 warps of a block read a row of K or V, and all lanes of a warp an element of P:
//         now from shared memory, and from global memory only once per block.
// Cost:   only Q K^T and P V reuse what they load; the kernels between them copy a tile to use it
//         once. What one kernel passes to the next still goes through global memory. The arrays are
//         static and so limited to 48 KB per block: head_dim 128 would take 75 KB in v06.
// Tile:   kBlockM x kBlockN = 32 x 32, block (32, 32)
// Layout: contiguous
// Takes:  float32, head_dim 32 64
// Flags:  (none)
// Expect: most of the global loads go; bank conflicts on K, whose rows are a multiple of 32 floats
//         apart: 32-way, or 8-way where nvcc merges four loads into one of 16 bytes.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kBlockM = 32;
constexpr int kBlockN = 32;
constexpr int kThreads = kBlockM * kBlockN;

// The row stride of a tile of Q, K, V or O, in floats.
template <int kHeadDim>
constexpr int kStride = kHeadDim;

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
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    float acc = 0.0f;
    for (int n = 0; n < kBlockN; ++n) {
      acc += p[m * kBlockN + n] * v[n * kStride<kHeadDim> + d];
    }
    float& out = o[m * kStride<kHeadDim> + d];
    out = (o_scale * out + pv_scale * acc) / new_sum[m];
  }
}

// Copies one statistic of each row to another.
inline __device__ void copy_rows(const float* from, float* to) {
  if (threadIdx.x == 0) to[threadIdx.y] = from[threadIdx.y];
}

// Copies between global and shared memory.

template <int kHeadDim>
inline __device__ void load_tile(const float* g_tile, float* s_tile) {
  const int m = threadIdx.y;
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    s_tile[m * kStride<kHeadDim> + d] = g_tile[m * kHeadDim + d];
  }
}

template <int kHeadDim>
inline __device__ void store_tile(const float* s_tile, float* g_tile) {
  const int m = threadIdx.y;
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    g_tile[m * kHeadDim + d] = s_tile[m * kStride<kHeadDim> + d];
  }
}

// Copies a tile of S or P in either direction.
inline __device__ void copy_scores(const float* from, float* to) {
  const int element = threadIdx.y * kBlockN + threadIdx.x;
  to[element] = from[element];
}

// One kernel per stage. A block has a tile of rows; the first block's starts at m_first.

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    qk_dot_kernel(const float* q, const float* k, float* s, int m_first, int n_start, int seqlen,
                  float softmax_scale, bool is_causal) {
  const int m_start = m_first + blockIdx.x * kBlockM;
  __shared__ float sQ[kBlockM * kStride<kHeadDim>];
  __shared__ float sK[kBlockN * kStride<kHeadDim>];
  __shared__ float sS[kBlockM * kBlockN];
  load_tile<kHeadDim>(q + m_start * kHeadDim, sQ);
  __syncthreads();
  load_tile<kHeadDim>(k + n_start * kHeadDim, sK);
  __syncthreads();
  qk_dot<kHeadDim>(sQ, sK, sS, m_start, n_start, seqlen, softmax_scale, is_causal);
  __syncthreads();
  copy_scores(sS, s + m_start * kBlockN);
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    row_max_kernel(const float* s, float* tile_max, int m_first) {
  const int m_start = m_first + blockIdx.x * kBlockM;
  __shared__ float sS[kBlockM * kBlockN];
  __shared__ float sTileMax[kBlockM];
  copy_scores(s + m_start * kBlockN, sS);
  __syncthreads();
  row_maxima(sS, sTileMax);
  __syncthreads();
  copy_rows(sTileMax, tile_max + m_start);
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    exp_kernel(const float* s, const float* tile_max, float* p, int m_first) {
  const int m_start = m_first + blockIdx.x * kBlockM;
  __shared__ float sS[kBlockM * kBlockN];
  __shared__ float sP[kBlockM * kBlockN];
  __shared__ float sTileMax[kBlockM];
  copy_scores(s + m_start * kBlockN, sS);
  __syncthreads();
  copy_rows(tile_max + m_start, sTileMax);
  __syncthreads();
  exponentials(sS, sTileMax, sP);
  __syncthreads();
  copy_scores(sP, p + m_start * kBlockN);
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    row_sum_kernel(const float* p, float* tile_sum, int m_first) {
  const int m_start = m_first + blockIdx.x * kBlockM;
  __shared__ float sP[kBlockM * kBlockN];
  __shared__ float sTileSum[kBlockM];
  copy_scores(p + m_start * kBlockN, sP);
  __syncthreads();
  row_sums(sP, sTileSum);
  __syncthreads();
  copy_rows(sTileSum, tile_sum + m_start);
  __syncthreads();
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const float* p, const float* v, const float* tile_max, const float* tile_sum,
                  float* row_max, float* row_sum, float* o, int m_first, int n_start) {
  const int m_start = m_first + blockIdx.x * kBlockM;
  __shared__ float sP[kBlockM * kBlockN];
  __shared__ float sV[kBlockN * kStride<kHeadDim>];
  __shared__ float sO[kBlockM * kStride<kHeadDim>];
  __shared__ float sTileMax[kBlockM];
  __shared__ float sTileSum[kBlockM];
  __shared__ float sRowMax[kBlockM];
  __shared__ float sRowSum[kBlockM];
  __shared__ float sNewMax[kBlockM];
  __shared__ float sNewSum[kBlockM];
  copy_scores(p + m_start * kBlockN, sP);
  __syncthreads();
  load_tile<kHeadDim>(v + n_start * kHeadDim, sV);
  __syncthreads();
  load_tile<kHeadDim>(o + m_start * kHeadDim, sO);
  __syncthreads();
  copy_rows(tile_max + m_start, sTileMax);
  __syncthreads();
  copy_rows(tile_sum + m_start, sTileSum);
  __syncthreads();
  copy_rows(row_max + m_start, sRowMax);
  __syncthreads();
  copy_rows(row_sum + m_start, sRowSum);
  __syncthreads();
  new_statistics(sTileMax, sTileSum, sRowMax, sRowSum, sNewMax, sNewSum);
  __syncthreads();
  update_o<kHeadDim>(sP, sV, sTileMax, sRowMax, sRowSum, sNewMax, sNewSum, sO);
  __syncthreads();
  store_tile<kHeadDim>(sO, o + m_start * kHeadDim);
  __syncthreads();
  copy_rows(sNewMax, row_max + m_start);
  __syncthreads();
  copy_rows(sNewSum, row_sum + m_start);
  __syncthreads();
}

// Initializes O and the statistics, before the first tile of keys.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) init_kernel(float* o, float* row_max, float* row_sum) {
  const int row = blockIdx.x * kBlockM + threadIdx.y;
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    o[row * kHeadDim + d] = 0.0f;
  }
  if (threadIdx.x == 0) {
    row_max[row] = -INFINITY;
    row_sum[row] = 0.0f;
  }
}

// Copies a tensor to an entry's buffer. Rows from seqlen on fill the last tile and become zero.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    copy_in_kernel(const float* tensor, int row_stride, int seqlen, float* buffer) {
  const int row = blockIdx.x * kBlockM + threadIdx.y;
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    buffer[row * kHeadDim + d] = row < seqlen ? tensor[int64_t{row} * row_stride + d] : 0.0f;
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    copy_out_kernel(const float* buffer, int row_stride, int seqlen, float* tensor) {
  const int row = blockIdx.x * kBlockM + threadIdx.y;
  for (int first = 0; first < kHeadDim; first += kBlockN) {
    const int d = first + threadIdx.x;
    if (row < seqlen) tensor[int64_t{row} * row_stride + d] = buffer[row * kHeadDim + d];
  }
}

// Buffers for one entry: q, k, v and o; s and p; four statistics. Entries reuse them in turn.
int64_t scratch_floats(const Params& params) {
  const int rows = ceil_div(params.seqlen, kBlockM) * kBlockM;
  return int64_t{rows} * (4 * params.head_dim + 2 * kBlockN + 4);
}

template <int kHeadDim>
cudaError_t launch(const Params& params, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  const auto run = [&](auto kernel, int blocks, auto... arguments) {
    if (error != cudaSuccess) return;
    error = launch_kernel(kernel, blocks, dim3(kBlockN, kBlockM), 0, stream, arguments...);
  };
  const int seqlen = params.seqlen;
  const int tiles = ceil_div(seqlen, kBlockM);
  const int rows = tiles * kBlockM;
  float* const q = params.scratch;
  float* const k = q + rows * kHeadDim;
  float* const v = k + rows * kHeadDim;
  float* const o = v + rows * kHeadDim;
  float* const s = o + rows * kHeadDim;
  float* const p = s + rows * kBlockN;
  float* const tile_max = p + rows * kBlockN;
  float* const tile_sum = tile_max + rows;
  float* const row_max = tile_sum + rows;
  float* const row_sum = row_max + rows;

  const int row_stride = params.num_heads * kHeadDim;
  for (int entry = 0; entry < params.batch * params.num_heads; ++entry) {
    const int batch = entry / params.num_heads;
    const int head = entry % params.num_heads;
    const int64_t offset = (int64_t{batch} * seqlen * params.num_heads + head) * kHeadDim;
    const float* const gQ = static_cast<const float*>(params.q) + offset;
    const float* const gK = static_cast<const float*>(params.k) + offset;
    const float* const gV = static_cast<const float*>(params.v) + offset;
    float* const gO = static_cast<float*>(params.o) + offset;
    run(copy_in_kernel<kHeadDim>, tiles, gQ, row_stride, seqlen, q);
    run(copy_in_kernel<kHeadDim>, tiles, gK, row_stride, seqlen, k);
    run(copy_in_kernel<kHeadDim>, tiles, gV, row_stride, seqlen, v);
    run(init_kernel<kHeadDim>, tiles, o, row_max, row_sum);
    for (int n_start = 0; n_start < seqlen; n_start += kBlockN) {
      static_assert(kBlockM == kBlockN, "the first row that sees a tile of keys begins a tile");
      const int m_first = params.is_causal ? n_start : 0;
      const int blocks = tiles - m_first / kBlockM;
      run(qk_dot_kernel<kHeadDim>, blocks, q, k, s, m_first, n_start, seqlen, params.softmax_scale,
          params.is_causal);
      run(row_max_kernel, blocks, s, tile_max, m_first);
      run(exp_kernel, blocks, s, tile_max, p, m_first);
      run(row_sum_kernel, blocks, p, tile_sum, m_first);
      run(update_kernel<kHeadDim>, blocks, p, v, tile_max, tile_sum, row_max, row_sum, o, m_first,
          n_start);
    }
    run(copy_out_kernel<kHeadDim>, tiles, o, row_stride, seqlen, gO);
  }
  return error;
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim == 32) return launch<32>(params, stream);
  if (params.head_dim == 64) return launch<64>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace attention::ATTENTION_VERSION
