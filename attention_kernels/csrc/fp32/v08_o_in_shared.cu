// v08 - O in shared memory
//
// Change: O is updated in shared memory and written to global memory once, at the end, as float4.
// Why:    every tile waited for a round trip of O through global memory.
// Cost:   kBlockM x kHeadDim more floats of shared memory: 69 KB for head_dim 128, more than sm_75
//         has.
// Tile:   kBlockM x kBlockN = 32 x 32, block (32, 32)
// Layout: contiguous
// Flags:  --use_fast_math
// Expect: global memory is read only for Q, K and V, and each element of O is written once. One or
//         two percent where the L2 cache held O; the case study's GPU gained more.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kThreadsX = 32;
constexpr int kThreadsY = 32;
constexpr int kThreads = kThreadsX * kThreadsY;

// Accesses row[d] to row[d + 3]. The row is aligned to 16 bytes, and d is a multiple of 4.
inline __device__ float4 load4(const float* row, unsigned d) {
  return reinterpret_cast<const float4*>(row)[d / 4];
}

inline __device__ void store4(float* row, unsigned d, float4 x) {
  reinterpret_cast<float4*>(row)[d / 4] = x;
}

// Copies kRows rows to shared memory. Rows from valid_rows on are past the end and become zero.
template <int kRows, int kHeadDim>
inline __device__ void load_tile(float* s_tile, int s_stride, const float* g_tile, int g_stride,
                                 int valid_rows) {
  static_assert(kHeadDim % 4 == 0, "a row is a whole number of float4");
  const unsigned thread = threadIdx.y * kThreadsX + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kRows * kHeadDim; i += 4 * kThreads) {
    const int r = (i + 4 * thread) / kHeadDim;
    const int d = (i + 4 * thread) % kHeadDim;
    if (r < kRows) {
      const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      store4(s_tile + r * s_stride, d, r < valid_rows ? load4(g_tile + r * g_stride, d) : zero);
    }
  }
}

inline __device__ float dot4(float4 a, float4 b, float sum) {
  sum += a.x * b.x;
  sum += a.y * b.y;
  sum += a.z * b.z;
  sum += a.w * b.w;
  return sum;
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
  constexpr int kStrideK = kHeadDim + 4;  // row stride of sK, in floats
  float* sQ = smem;
  float* sK = sQ + kBlockM * kHeadDim;
  float* sV = sK + kBlockN * kStrideK;
  float* sS = sV + kBlockN * kHeadDim;
  float* sO = sS + kBlockM * kBlockN;

  load_tile<kBlockM, kHeadDim>(sQ, kHeadDim, gQ, row_stride, valid_rows);
  for (int d = 0; d < kHeadDim; d += kThreadsX) {
    sO[m * kHeadDim + d + threadIdx.x] = 0.0f;
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
    for (int d = 0; d < kHeadDim; d += 4) {
      s = dot4(load4(sQ + m * kHeadDim, d), load4(sK + col * kStrideK, d), s);
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
    for (int d = 0; d < kHeadDim; d += kThreadsX) {
      float acc = 0.0f;
      for (int n = 0; n < visible; ++n) {
        acc += sS[m * kBlockN + n] * sV[n * kHeadDim + d + threadIdx.x];
      }
      float& out = sO[m * kHeadDim + d + threadIdx.x];
      out = row_scale * out + acc;
    }
    __syncthreads();
  }

  row_sum = reduce_sum(row_sum);
  if (m < valid_rows) {
    for (int d = 4 * threadIdx.x; d < kHeadDim; d += 4 * kThreadsX) {
      const float4 out = load4(sO + m * kHeadDim, d);
      store4(gO + m * row_stride, d,
             make_float4(out.x / row_sum, out.y / row_sum, out.z / row_sum, out.w / row_sum));
    }
  }
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  constexpr int kBlockM = 32;
  constexpr int kBlockN = 32;
  constexpr int kStrideK = kHeadDim + 4;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  const dim3 block(kThreadsX, kThreadsY);
  const size_t smem_bytes =
      sizeof(float) * (kBlockM * kHeadDim + kBlockN * kStrideK + kBlockN * kHeadDim +
                       kBlockM * kBlockN + kBlockM * kHeadDim);
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
