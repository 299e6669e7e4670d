// v05 - softmax statistics by warp shuffles
//
// Change: a warp owns one row: its lanes reduce the row's maximum and sum by shuffles and keep both
//         in registers from tile to tile.
// Why:    one lane walked over the row in shared memory while 31 waited, and the statistics made a
//         round trip through global memory in every tile. A row never leaves its warp, so two of
//         the four barriers per tile go as well. The gain comes from all three.
// Cost:   none.
// Tile:   kBlockM x kBlockN = 32 x 32, block (32, 32)
// Layout: contiguous
// Flags:  --use_fast_math
// Expect: each lane computes one exponential of P; no scratch memory. The case study reduces to one
//         lane, which broadcasts; here a butterfly gives every lane the result.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kBlockM = 32;
constexpr int kBlockN = 32;
constexpr int kThreadsX = 32;
constexpr int kThreadsY = 32;
constexpr int kThreads = kThreadsX * kThreadsY;

// Copies `rows` rows to shared memory. Rows from valid_rows on are past the end and become zero.
inline __device__ void load_tile(float* s_tile, int s_stride, const float* g_tile, int g_stride,
                                 int rows, int valid_rows, int head_dim) {
  for (int r = threadIdx.y; r < rows; r += kThreadsY) {
    for (int d = threadIdx.x; d < head_dim; d += kThreadsX) {
      s_tile[r * s_stride + d] = r < valid_rows ? g_tile[r * g_stride + d] : 0.0f;
    }
  }
}

// Counts the keys of the tile at n_start that `row` sees. The causal mask is top-left aligned.
inline __device__ int visible_keys(int row, int n_start, int seqlen, bool is_causal) {
  return min(kBlockN, (is_causal ? min(row + 1, seqlen) : seqlen) - n_start);
}

// Reduces x over the kThreadsX lanes that share a row; every lane gets the result.
inline __device__ float reduce_max(float x) {
  for (int offset = kThreadsX / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
  }
  return x;
}

inline __device__ float reduce_sum(float x) {
  for (int offset = kThreadsX / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffff, x, offset);
  }
  return x;
}

__global__ void __launch_bounds__(kThreads)
    attention_kernel(const float* q, const float* k, const float* v, float* o, int seqlen,
                     int num_heads, int head_dim, float softmax_scale, bool is_causal) {
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_block = gridDim.y - 1 - blockIdx.y;
  const int m_start = m_block * kBlockM;
  const int valid_rows = seqlen - m_start;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int row_stride = num_heads * head_dim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * head_dim;
  const float* gQ = q + offset + int64_t{m_start} * row_stride;
  const float* gK = k + offset;
  const float* gV = v + offset;
  float* gO = o + offset + int64_t{m_start} * row_stride;

  static_assert(kBlockM == kThreadsY && kBlockN == kThreadsX, "a thread has one element of S");
  static_assert(kThreadsX == 32, "a warp is one row");
  const int m = threadIdx.y;
  float row_max = -INFINITY;
  float row_sum = 0.0f;

  ATTENTION_DYNAMIC_SHARED(float, smem);
  const int k_stride = head_dim + 1;  // row stride of sK, in floats
  float* sQ = smem;
  float* sK = sQ + kBlockM * head_dim;
  float* sV = sK + kBlockN * k_stride;
  float* sS = sV + kBlockN * head_dim;

  load_tile(sQ, head_dim, gQ, row_stride, kBlockM, valid_rows, head_dim);
  if (m < valid_rows) {
    for (int d = threadIdx.x; d < head_dim; d += kThreadsX) {
      gO[m * row_stride + d] = 0.0f;
    }
  }

  // No query of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    load_tile(sK, k_stride, gK + int64_t{n_start} * row_stride, row_stride, kBlockN,
              seqlen - n_start, head_dim);
    load_tile(sV, head_dim, gV + int64_t{n_start} * row_stride, row_stride, kBlockN,
              seqlen - n_start, head_dim);
    __syncthreads();

    // S = softmax_scale * Q K^T
    const int visible = visible_keys(m_start + m, n_start, seqlen, is_causal);
    const int col = threadIdx.x;  // this thread's key
    float s = 0.0f;
    for (int d = 0; d < head_dim; ++d) {
      s += sQ[m * head_dim + d] * sK[col * k_stride + d];
    }
    s = col < visible ? softmax_scale * s : -INFINITY;

    // P = exp(S - row_max), and the running row statistics
    const float new_max = fmaxf(row_max, reduce_max(s));
    const float row_scale = row_sum * expf(row_max - new_max);
    row_max = new_max;
    const float p = expf(s - new_max);
    row_sum = row_scale + reduce_sum(p);
    sS[m * kBlockN + col] = p;
    __syncwarp();

    // O = (row_scale * O + P V) / row_sum
    if (m < valid_rows) {
      for (int d = threadIdx.x; d < head_dim; d += kThreadsX) {
        float acc = 0.0f;
        for (int n = 0; n < visible; ++n) {
          acc += sS[m * kBlockN + n] * sV[n * head_dim + d];
        }
        float& out = gO[m * row_stride + d];
        out = (row_scale * out + acc) / row_sum;
      }
    }
    __syncthreads();
  }
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  const dim3 block(kThreadsX, kThreadsY);
  const int k_stride = params.head_dim + 1;
  const size_t smem_bytes = sizeof(float) * (kBlockM * params.head_dim + kBlockN * k_stride +
                                             kBlockN * params.head_dim + kBlockM * kBlockN);
  return launch_kernel(attention_kernel, grid, block, smem_bytes, stream,
                       static_cast<const float*>(params.q), static_cast<const float*>(params.k),
                       static_cast<const float*>(params.v), static_cast<float*>(params.o),
                       params.seqlen, params.num_heads, params.head_dim, params.softmax_scale,
                       params.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
