// v14 - prefetch the next tile
//
// Change: the tile for the next product (V after K, K after V) is loaded from global memory into
//         registers while the current one is in use, and stored to shared memory afterwards.
// Why:    all warps of a block waited whenever a tile was loaded.
// Cost:   registers for a thread's share of a tile: three blocks fit on a multiprocessor at
//         head_dim 64 instead of four. With enough blocks for four, they already hid most of the
//         wait: with 12 heads and 4,096 or more queries this version is no faster than v13.
//         head_dim 128 takes 88 KB of shared memory, as in v12.
// Tile:   kBlockM x kBlockN = 32 x 64, block (16, 8)
// Layout: strided
// Flags:  --use_fast_math
// Expect: the same accesses. Up to an eighth less time where there are few blocks, most of all at
//         head_dim 128, where shared memory has room for only two blocks. Shared memory is now the
//         bottleneck: its wavefronts take longer than the arithmetic.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kThreadM = 4;
constexpr int kThreadN = 4;
constexpr int kThreadsX = 16;
constexpr int kThreadsY = 8;
constexpr int kThreads = kThreadsX * kThreadsY;

// Accesses row[d] to row[d + 3]. The row is aligned to 16 bytes, and d is a multiple of 4.
inline __device__ float4 load4(const float* row, unsigned d) {
  return reinterpret_cast<const float4*>(row)[d / 4];
}

inline __device__ void store4(float* row, unsigned d, float4 x) {
  reinterpret_cast<float4*>(row)[d / 4] = x;
}

// The same with an array of kWidth = 2 or 4 floats.
template <int kWidth>
inline __device__ void load_columns(float (&x)[kWidth], const float* row, unsigned d) {
  if constexpr (kWidth == 4) {
    const float4 x4 = load4(row, d);
    x[0] = x4.x;
    x[1] = x4.y;
    x[2] = x4.z;
    x[3] = x4.w;
  } else {
    const float2 x2 = reinterpret_cast<const float2*>(row)[d / 2];
    x[0] = x2.x;
    x[1] = x2.y;
  }
}

template <int kWidth>
inline __device__ void store_columns(float* row, unsigned d, const float (&x)[kWidth]) {
  if constexpr (kWidth == 4) {
    store4(row, d, make_float4(x[0], x[1], x[2], x[3]));
  } else {
    reinterpret_cast<float2*>(row)[d / 2] = make_float2(x[0], x[1]);
  }
}

// Column d of row n of K is stored at d ^ swizzle(n). The kThreadN adjacent rows of a thread share
// a swizzle; 8 neighbouring threads' differ, so their float4s cover all 32 banks.
inline __device__ unsigned swizzle(unsigned n) { return n / kThreadN % 8 * 4; }

// Copies kCount rows per thread to registers. Rows from valid_rows on are past the end and become
// zero.
template <int kHeadDim, int kCount>
inline __device__ void fetch_tile(float4 (&r_tile)[kCount], const float* g_tile, int64_t g_stride,
                                  int valid_rows) {
  constexpr int kRowsAtOnce = 4 * kThreads / kHeadDim;
  const unsigned thread = threadIdx.y * kThreadsX + threadIdx.x;
  const int r = 4 * thread / kHeadDim;
  const int d = 4 * thread % kHeadDim;
  const float* from = g_tile + r * g_stride;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    r_tile[i] = r + i * kRowsAtOnce < valid_rows ? load4(from, d) : zero;
    from += kRowsAtOnce * g_stride;
  }
}

// Copies the rows from registers to shared memory.
template <int kHeadDim, int kCount>
inline __device__ void store_tile(float* s_tile, const float4 (&r_tile)[kCount], bool swizzled) {
  constexpr int kRowsAtOnce = 4 * kThreads / kHeadDim;
  const unsigned thread = threadIdx.y * kThreadsX + threadIdx.x;
  const int r = 4 * thread / kHeadDim;
  const int d = 4 * thread % kHeadDim;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = r + i * kRowsAtOnce;
    store4(s_tile + row * kHeadDim, swizzled ? d ^ swizzle(row) : d, r_tile[i]);
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
                     const float* __restrict__ v, float* __restrict__ o, Strides q_strides,
                     Strides k_strides, Strides v_strides, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal) {
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_block = gridDim.y - 1 - blockIdx.y;
  const int m_start = m_block * kBlockM;
  const int valid_rows = seqlen - m_start;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int row_stride = num_heads * kHeadDim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  const float* gQ =
      q + batch * q_strides.batch + head * q_strides.head + m_start * q_strides.seqlen;
  const float* gK = k + batch * k_strides.batch + head * k_strides.head;
  const float* gV = v + batch * v_strides.batch + head * v_strides.head;
  float* gO = o + offset + int64_t{m_start} * row_stride;

  static_assert(kBlockM == kThreadM * kThreadsY, "a thread has kThreadM rows");
  static_assert(kBlockN == kThreadN * kThreadsX, "a thread has kThreadN columns of S");
  static_assert(32 % kThreadsX == 0, "a row is within one warp");
  static_assert(kBlockN % kBlockM == 0 && kThreadM == 4, "P has 4 x 4 elements on the diagonal");
  constexpr int kCountM = kBlockM * kHeadDim / (4 * kThreads);
  constexpr int kCountN = kBlockN * kHeadDim / (4 * kThreads);
  static_assert(kCountM * 4 * kThreads == kBlockM * kHeadDim, "every thread loads as much");
  constexpr int kColumns = kHeadDim / kThreadsX;       // columns of O per thread
  constexpr int kWidth = kColumns < 4 ? kColumns : 4;  // of them are adjacent
  const int m = kThreadM * threadIdx.y;                // this thread's first row
  float row_max[kThreadM];
  float row_sum[kThreadM];
  float rO[kThreadM][kColumns] = {};
  for (int i = 0; i < kThreadM; ++i) {
    row_max[i] = -INFINITY;
    row_sum[i] = 0.0f;
  }

  ATTENTION_DYNAMIC_SHARED(float, smem);
  float* sQ = smem;
  float* sK = sQ + kBlockM * kHeadDim;
  float* sV = sK + kBlockN * kHeadDim;
  float* sS = sV + kBlockN * kHeadDim;

  // No query of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  float4 rKV[kCountN];  // the next tile of K or V, to be stored to shared memory
  fetch_tile<kHeadDim>(rKV, gK, k_strides.seqlen, n_end);
  {
    float4 rQ[kCountM];
    fetch_tile<kHeadDim>(rQ, gQ, q_strides.seqlen, valid_rows);
    store_tile<kHeadDim>(sQ, rQ, false);
  }
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    store_tile<kHeadDim>(sK, rKV, true);
    fetch_tile<kHeadDim>(rKV, gV + n_start * v_strides.seqlen, v_strides.seqlen, n_end - n_start);
    __syncthreads();

    // S = softmax_scale * Q K^T
    float rS[kThreadM][kThreadN] = {};
#pragma unroll 4
    for (int d = 0; d < kHeadDim; d += 4) {
      float4 rQ[kThreadM];
      for (int i = 0; i < kThreadM; ++i) {
        rQ[i] = load4(sQ + (m + i) * kHeadDim, d);
      }
      for (int j = 0; j < kThreadN; ++j) {
        const int n = kThreadN * threadIdx.x + j;
        const float4 rK = load4(sK + n * kHeadDim, d ^ swizzle(kThreadN * threadIdx.x));
        for (int i = 0; i < kThreadM; ++i) {
          rS[i][j] = dot4(rQ[i], rK, rS[i][j]);
        }
      }
    }

    // P = exp(S - row_max), and the running row statistics
    int visible[kThreadM];
    for (int i = 0; i < kThreadM; ++i) {
      visible[i] = visible_keys<kBlockN>(m_start + m + i, n_start, seqlen, is_causal);
      float tile_max = -INFINITY;
      for (int j = 0; j < kThreadN; ++j) {
        const int n = kThreadN * threadIdx.x + j;
        rS[i][j] = n < visible[i] ? softmax_scale * rS[i][j] : -INFINITY;
        tile_max = fmaxf(tile_max, rS[i][j]);
      }
      const float new_max = fmaxf(row_max[i], reduce_max(tile_max));
      const float row_scale = expf(row_max[i] - new_max);
      row_max[i] = new_max;
      row_sum[i] = row_scale * row_sum[i];  // this thread's partial sum
      for (int j = 0; j < kThreadN; ++j) {
        rS[i][j] = expf(rS[i][j] - new_max);
        row_sum[i] += rS[i][j];
      }
      store_columns(sS + (m + i) * kBlockN, kThreadN * threadIdx.x, rS[i]);
      for (int c = 0; c < kColumns; ++c) {
        rO[i][c] *= row_scale;
      }
    }
    store_tile<kHeadDim>(sV, rKV, false);
    const int n_next = n_start + kBlockN;
    fetch_tile<kHeadDim>(rKV, gK + n_next * k_strides.seqlen, k_strides.seqlen, n_end - n_next);
    __syncthreads();

    // O += P V; the thread's last row sees the most keys.
#pragma unroll 4
    for (int n = 0; n < visible[kThreadM - 1]; n += 4) {
      // On the mask's diagonal, row i sees the keys up to i. For the others P is 0, but V may be
      // anything: 0 * NaN is not 0.
      const bool diagonal = is_causal && n_start + n == m_start + m;
      float rP[kThreadM][4];
      for (int i = 0; i < kThreadM; ++i) {
        load_columns(rP[i], sS + (m + i) * kBlockN, n);
      }
      for (int j = 0; j < 4; ++j) {
        for (int c = 0; c < kColumns; c += kWidth) {
          float rV[kWidth];
          load_columns(rV, sV + (n + j) * kHeadDim, c * kThreadsX + kWidth * threadIdx.x);
          for (int i = 0; i < kThreadM; ++i) {
            for (int w = 0; w < kWidth; ++w) {
              if (j <= i || !diagonal) rO[i][c + w] += rP[i][j] * rV[w];
            }
          }
        }
      }
    }
  }

  for (int i = 0; i < kThreadM; ++i) {
    row_sum[i] = reduce_sum(row_sum[i]);
    if (m + i < valid_rows) {
      for (int c = 0; c < kColumns; c += kWidth) {
        float out[kWidth];
        for (int w = 0; w < kWidth; ++w) {
          out[w] = rO[i][c + w] / row_sum[i];
        }
        store_columns(gO + (m + i) * row_stride, c * kThreadsX + kWidth * threadIdx.x, out);
      }
    }
  }
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  constexpr int kBlockM = 32;
  constexpr int kBlockN = 64;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  const dim3 block(kThreadsX, kThreadsY);
  const size_t smem_bytes = sizeof(float) * (kBlockM * kHeadDim + kBlockN * kHeadDim +
                                             kBlockN * kHeadDim + kBlockM * kBlockN);
  return launch_kernel(attention_kernel<kBlockM, kBlockN, kHeadDim>, grid, block, smem_bytes,
                       stream, static_cast<const float*>(params.q),
                       static_cast<const float*>(params.k), static_cast<const float*>(params.v),
                       static_cast<float*>(params.o), params.q_strides, params.k_strides,
                       params.v_strides, params.seqlen, params.num_heads, params.softmax_scale,
                       params.is_causal);
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
