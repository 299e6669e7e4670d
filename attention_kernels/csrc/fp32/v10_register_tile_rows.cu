// v10 - register tile, 2 x 2
//
// Change: a thread computes kThreadM = 2 adjacent rows of its 2 columns of S and of O. The tile has
//         twice as many queries.
// Why:    a value of K or of V is now also read from shared memory once and used twice: 4 loads for
//         4 multiply-adds instead of 3 for 2.
// Cost:   half as many blocks, each with twice the work: seqlen 512 with 12 heads makes 96 blocks,
//         fewer than a large GPU has multiprocessors. The longest block then sets the time, and v09
//         can be faster; with more queries it is not. head_dim 128 takes 106 KB of shared memory,
//         more than sm_75, 86, 89 and 120 have.
// Tile:   kBlockM x kBlockN = 64 x 32, block (16, 32)
// Layout: contiguous
// Flags:  --use_fast_math
// Expect: two thirds of the shared-memory loads.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kThreadM = 2;
constexpr int kThreadN = 2;
constexpr int kThreadsX = 16;
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
__global__ void __launch_bounds__(kThreads, 2)
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

  static_assert(kBlockM == kThreadM * kThreadsY, "a thread has kThreadM rows");
  static_assert(kBlockN == kThreadN * kThreadsX, "a thread has kThreadN columns of S");
  static_assert(32 % kThreadsX == 0, "a row is within one warp");
  static_assert(kHeadDim % (kThreadN * kThreadsX) == 0, "a thread has whole tiles of O");
  const int m = kThreadM * threadIdx.y;  // this thread's first row
  float row_max[kThreadM];
  float row_sum[kThreadM];
  for (int i = 0; i < kThreadM; ++i) {
    row_max[i] = -INFINITY;
    row_sum[i] = 0.0f;
  }

  ATTENTION_DYNAMIC_SHARED(float, smem);
  constexpr int kStrideK = kHeadDim + 4;  // row stride of sK, in floats
  constexpr int kStrideS = kBlockN + 4;
  float* sQ = smem;
  float* sK = sQ + kBlockM * kHeadDim;
  float* sV = sK + kBlockN * kStrideK;
  float* sS = sV + kBlockN * kHeadDim;
  float* sO = sS + kBlockM * kStrideS;

  load_tile<kBlockM, kHeadDim>(sQ, kHeadDim, gQ, row_stride, valid_rows);
  for (int i = 0; i < kThreadM; ++i) {
    for (int d = 0; d < kHeadDim; d += kThreadsX) {
      sO[(m + i) * kHeadDim + d + threadIdx.x] = 0.0f;
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
    float rS[kThreadM][kThreadN] = {};
    for (int d = 0; d < kHeadDim; d += 4) {
      float4 rQ[kThreadM];
      for (int i = 0; i < kThreadM; ++i) {
        rQ[i] = load4(sQ + (m + i) * kHeadDim, d);
      }
      for (int j = 0; j < kThreadN; ++j) {
        const int n = j * kThreadsX + threadIdx.x;
        const float4 rK = load4(sK + n * kStrideK, d);
        for (int i = 0; i < kThreadM; ++i) {
          rS[i][j] = dot4(rQ[i], rK, rS[i][j]);
        }
      }
    }

    // P = exp(S - row_max), and the running row statistics
    int visible[kThreadM];
    float row_scale[kThreadM];
    for (int i = 0; i < kThreadM; ++i) {
      visible[i] = visible_keys<kBlockN>(m_start + m + i, n_start, seqlen, is_causal);
      float tile_max = -INFINITY;
      for (int j = 0; j < kThreadN; ++j) {
        const int n = j * kThreadsX + threadIdx.x;
        rS[i][j] = n < visible[i] ? softmax_scale * rS[i][j] : -INFINITY;
        tile_max = fmaxf(tile_max, rS[i][j]);
      }
      const float new_max = fmaxf(row_max[i], reduce_max(tile_max));
      row_scale[i] = expf(row_max[i] - new_max);
      row_max[i] = new_max;
      row_sum[i] = row_scale[i] * row_sum[i];  // this thread's partial sum
      for (int j = 0; j < kThreadN; ++j) {
        const int n = j * kThreadsX + threadIdx.x;
        const float p = expf(rS[i][j] - new_max);
        row_sum[i] += p;
        sS[(m + i) * kStrideS + n] = p;
      }
    }
    __syncwarp();

    // O = row_scale * O + P V; the thread's last row sees the most keys. For keys that a row does
    // not see, P is 0, but V may be anything: 0 * NaN is not 0.
    for (int d = 0; d < kHeadDim; d += kThreadN * kThreadsX) {
      float rO[kThreadM][kThreadN] = {};
      for (int n = 0; n < visible[kThreadM - 1]; ++n) {
        float rV[kThreadN];
        for (int j = 0; j < kThreadN; ++j) {
          rV[j] = sV[n * kHeadDim + d + j * kThreadsX + threadIdx.x];
        }
        for (int i = 0; i < kThreadM; ++i) {
          const float p = sS[(m + i) * kStrideS + n];
          for (int j = 0; j < kThreadN; ++j) {
            if (n < visible[i]) rO[i][j] += p * rV[j];
          }
        }
      }
      for (int i = 0; i < kThreadM; ++i) {
        for (int j = 0; j < kThreadN; ++j) {
          float& out = sO[(m + i) * kHeadDim + d + j * kThreadsX + threadIdx.x];
          out = row_scale[i] * out + rO[i][j];
        }
      }
    }
    __syncthreads();
  }

  for (int i = 0; i < kThreadM; ++i) {
    row_sum[i] = reduce_sum(row_sum[i]);
    if (m + i < valid_rows) {
      for (int d = 4 * threadIdx.x; d < kHeadDim; d += 4 * kThreadsX) {
        const float4 out = load4(sO + (m + i) * kHeadDim, d);
        store4(gO + (m + i) * row_stride, d,
               make_float4(out.x / row_sum[i], out.y / row_sum[i], out.z / row_sum[i],
                           out.w / row_sum[i]));
      }
    }
  }
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  constexpr int kBlockM = 64;
  constexpr int kBlockN = 32;
  constexpr int kStrideK = kHeadDim + 4;
  constexpr int kStrideS = kBlockN + 4;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  const dim3 block(kThreadsX, kThreadsY);
  const size_t smem_bytes =
      sizeof(float) * (kBlockM * kHeadDim + kBlockN * kStrideK + kBlockN * kHeadDim +
                       kBlockM * kStrideS + kBlockM * kHeadDim);
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
