// v06 - templates, one division at the end, __restrict__
//
// Change: head_dim and the tile are template parameters. O is divided by row_sum only once, after
//         the last tile, so the lanes also add up their partial sums of row_sum only there. The
//         pointers are __restrict__.
// Why:    loops of known length unroll: all loads of a tile are in flight at once, addresses become
//         immediates, and the compiler reads Q and P four floats at a time. __restrict__ lets it
//         read global memory through the read-only path (LDG.CONSTANT).
// Cost:   one kernel is compiled per head_dim. The final division reads O from global memory and
//         writes it once more.
// Tile:   kBlockM x kBlockN = 32 x 32, block (32, 32)
// Layout: contiguous
// Flags:  --use_fast_math
// Expect: fewer instructions per multiply-add. The case study also makes d_model a template
//         parameter; here num_heads is an argument, so one kernel serves every model.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kThreadsX = 32;
constexpr int kThreadsY = 32;
constexpr int kThreads = kThreadsX * kThreadsY;

// Copies kRows rows to shared memory. Rows from valid_rows on are past the end and become zero.
template <int kRows, int kHeadDim>
inline __device__ void load_tile(float* s_tile, int s_stride, const float* g_tile, int g_stride,
                                 int valid_rows) {
  static_assert(kRows % kThreadsY == 0 && kHeadDim % kThreadsX == 0, "every thread loads as much");
#pragma unroll
  for (int i = 0; i < kRows; i += kThreadsY) {
#pragma unroll
    for (int j = 0; j < kHeadDim; j += kThreadsX) {
      const int r = i + threadIdx.y;
      const int d = j + threadIdx.x;
      s_tile[r * s_stride + d] = r < valid_rows ? g_tile[r * g_stride + d] : 0.0f;
    }
  }
}

// Counts the keys of the tile at n_start that `row` sees. The causal mask is top-left aligned.
template <int kBlockN>
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

template <int kBlockM, int kBlockN, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ k,
                     const float* __restrict__ v, float* __restrict__ o, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal) {
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_block = gridDim.y - 1 - blockIdx.y;
  const int m_start = m_block * kBlockM;
  const int valid_rows = seqlen - m_start;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int row_stride = num_heads * kHeadDim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  const float* gQ = q + offset + int64_t{m_start} * row_stride;
  const float* gK = k + offset;
  const float* gV = v + offset;
  float* gO = o + offset + int64_t{m_start} * row_stride;

  static_assert(kBlockM == kThreadsY && kBlockN == kThreadsX, "a thread has one element of S");
  static_assert(kThreadsX == 32, "a warp is one row");
  static_assert(kHeadDim % kThreadsX == 0, "every thread of a row has as many columns of O");
  const int m = threadIdx.y;
  float row_max = -INFINITY;
  float row_sum = 0.0f;

  ATTENTION_DYNAMIC_SHARED(float, smem);
  constexpr int kStrideK = kHeadDim + 1;  // row stride of sK, in floats
  float* sQ = smem;
  float* sK = sQ + kBlockM * kHeadDim;
  float* sV = sK + kBlockN * kStrideK;
  float* sS = sV + kBlockN * kHeadDim;

  load_tile<kBlockM, kHeadDim>(sQ, kHeadDim, gQ, row_stride, valid_rows);
  if (m < valid_rows) {
    for (int d = 0; d < kHeadDim; d += kThreadsX) {
      gO[m * row_stride + d + threadIdx.x] = 0.0f;
    }
  }

  // No query of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    load_tile<kBlockN, kHeadDim>(sK, kStrideK, gK + int64_t{n_start} * row_stride, row_stride,
                                 seqlen - n_start);
    load_tile<kBlockN, kHeadDim>(sV, kHeadDim, gV + int64_t{n_start} * row_stride, row_stride,
                                 seqlen - n_start);
    __syncthreads();

    // S = softmax_scale * Q K^T
    const int visible = visible_keys<kBlockN>(m_start + m, n_start, seqlen, is_causal);
    const int col = threadIdx.x;  // this thread's key
    float s = 0.0f;
    for (int d = 0; d < kHeadDim; ++d) {
      s += sQ[m * kHeadDim + d] * sK[col * kStrideK + d];
    }
    s = col < visible ? softmax_scale * s : -INFINITY;

    // P = exp(S - row_max), and the running row statistics
    const float new_max = fmaxf(row_max, reduce_max(s));
    const float row_scale = expf(row_max - new_max);
    row_max = new_max;
    const float p = expf(s - new_max);
    row_sum = row_scale * row_sum + p;  // this lane's partial sum
    sS[m * kBlockN + col] = p;
    __syncwarp();

    // O = row_scale * O + P V
    if (m < valid_rows) {
      for (int d = 0; d < kHeadDim; d += kThreadsX) {
        float acc = 0.0f;
        for (int n = 0; n < visible; ++n) {
          acc += sS[m * kBlockN + n] * sV[n * kHeadDim + d + threadIdx.x];
        }
        float& out = gO[m * row_stride + d + threadIdx.x];
        out = row_scale * out + acc;
      }
    }
    __syncthreads();
  }

  row_sum = reduce_sum(row_sum);
  if (m < valid_rows) {
    for (int d = 0; d < kHeadDim; d += kThreadsX) {
      gO[m * row_stride + d + threadIdx.x] /= row_sum;
    }
  }
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  constexpr int kBlockM = 32;
  constexpr int kBlockN = 32;
  constexpr int kStrideK = kHeadDim + 1;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  const dim3 block(kThreadsX, kThreadsY);
  const size_t smem_bytes = sizeof(float) * (kBlockM * kHeadDim + kBlockN * kStrideK +
                                             kBlockN * kHeadDim + kBlockM * kBlockN);
  return launch_kernel(attention_kernel<kBlockM, kBlockN, kHeadDim>, grid, block, smem_bytes,
                       stream, static_cast<const float*>(params.q),
                       static_cast<const float*>(params.k), static_cast<const float*>(params.v),
                       static_cast<float*>(params.o), params.seqlen, params.num_heads,
                       params.softmax_scale, params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  switch (params.head_dim) {
    case 32:
      return launch_head_dim<32>(params, stream);
    case 64:
      return launch_head_dim<64>(params, stream);
    case 128:
      return launch_head_dim<128>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace attention::ATTENTION_VERSION
