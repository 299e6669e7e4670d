// v04 - compile with --use_fast_math
//
// Change: only the flag: expf becomes the intrinsic __expf, and division becomes approximate.
// Why:    expf takes about ten instructions; __expf is one multiplication and one MUFU.EX2.
// Cost:   the relative error of __expf grows with |x|; where it matters, exp(x) is nearly zero.
// Tile:   kBlockM x kBlockN = 32 x 32, block (32, 32)
// Layout: contiguous
// Error:  2x: every tile multiplies O by the old row_sum and divides it by the new one, and each
//         step rounds O.
// Flags:  --use_fast_math
// Expect: fewer instructions in the lane of each row that computes the exponentials.

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

__global__ void __launch_bounds__(kThreads)
    attention_kernel(const float* q, const float* k, const float* v, float* o, int seqlen,
                     int num_heads, int head_dim, float softmax_scale, bool is_causal,
                     float* scratch) {
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

  // Three interleaved statistics per row; row_scale is the factor by which O is rescaled.
  float* row_max = scratch + 3 * (int64_t{blockIdx.x} * seqlen + m_start);
  float* row_sum = row_max + 1;
  float* row_scale = row_max + 2;

  ATTENTION_DYNAMIC_SHARED(float, smem);
  const int k_stride = head_dim + 1;  // row stride of sK, in floats
  float* sQ = smem;
  float* sK = sQ + kBlockM * head_dim;
  float* sV = sK + kBlockN * k_stride;
  float* sS = sV + kBlockN * head_dim;

  load_tile(sQ, head_dim, gQ, row_stride, kBlockM, valid_rows, head_dim);
  for (int m = threadIdx.y; m < min(kBlockM, valid_rows); m += kThreadsY) {
    if (threadIdx.x == 0) {
      row_max[3 * m] = -INFINITY;
      row_sum[3 * m] = 0.0f;
    }
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
    for (int m = threadIdx.y; m < min(kBlockM, valid_rows); m += kThreadsY) {
      const int visible = visible_keys(m_start + m, n_start, seqlen, is_causal);
      for (int n = threadIdx.x; n < visible; n += kThreadsX) {
        float s = 0.0f;
        for (int d = 0; d < head_dim; ++d) {
          s += sQ[m * head_dim + d] * sK[n * k_stride + d];
        }
        sS[m * kBlockN + n] = softmax_scale * s;
      }
    }
    __syncthreads();

    // P = exp(S - row_max), in place of S, and the running row statistics
    for (int m = threadIdx.y; m < min(kBlockM, valid_rows); m += kThreadsY) {
      const int visible = visible_keys(m_start + m, n_start, seqlen, is_causal);
      if (threadIdx.x == 0) {
        float new_max = row_max[3 * m];
        for (int n = 0; n < visible; ++n) {
          new_max = fmaxf(new_max, sS[m * kBlockN + n]);
        }
        row_scale[3 * m] = row_sum[3 * m] * expf(row_max[3 * m] - new_max);
        row_max[3 * m] = new_max;
        float sum = row_scale[3 * m];
        for (int n = 0; n < visible; ++n) {
          const float p = expf(sS[m * kBlockN + n] - new_max);
          sS[m * kBlockN + n] = p;
          sum += p;
        }
        row_sum[3 * m] = sum;
      }
    }
    __syncthreads();

    // O = (row_scale * O + P V) / row_sum
    for (int m = threadIdx.y; m < min(kBlockM, valid_rows); m += kThreadsY) {
      const int visible = visible_keys(m_start + m, n_start, seqlen, is_causal);
      for (int d = threadIdx.x; d < head_dim; d += kThreadsX) {
        float acc = 0.0f;
        for (int n = 0; n < visible; ++n) {
          acc += sS[m * kBlockN + n] * sV[n * head_dim + d];
        }
        float& out = gO[m * row_stride + d];
        out = (row_scale[3 * m] * out + acc) / row_sum[3 * m];
      }
    }
    __syncthreads();
  }
}

int64_t scratch_floats(const Params& params) {
  return int64_t{3} * params.batch * params.num_heads * params.seqlen;
}

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
                       params.is_causal, params.scratch);
}

}  // namespace attention::ATTENTION_VERSION
