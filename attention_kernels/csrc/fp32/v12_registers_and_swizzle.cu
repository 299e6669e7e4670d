// v12 - O in registers, K and P swizzled, register tile 4 x 4
//
// Change: a thread keeps its elements of O in registers. K and P are swizzled, not padded: column d
//         of row n of K is at d ^ swizzle(n). A thread computes 4 x 4 elements of S and adds four
//         keys to O at a time. A block has 32 rows and 128 threads.
// Why:    a value read from shared memory is used four times instead of twice, and O is not read
//         from there at all. Blocks have half as many rows as v11's, so the longest block, which
//         sets the time when there are few, has half the work. Every thread copies an equal share
//         of a tile: v11's bounds check would make nvcc wait for each load before the next.
// Cost:   registers: a multiprocessor has room for 16 warps. The four warps of a block wait
//         together while a tile is loaded, and K and V are loaded once per 32 rows instead of 64.
//         head_dim 128 takes 88 KB of shared memory, more than sm_75 has.
// Tile:   kBlockM x kBlockN = 32 x 64, block (16, 8)
// Layout: strided
// Flags:  --use_fast_math
// Expect: 48 KB of shared memory at head_dim 64; half of v11's shared-memory loads. The case study
//         swizzles by starting each thread's dot product at a different d; XOR keeps four
//         neighbours together for vector loads.

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

// Column d of row n of K is stored at d ^ swizzle(n): the four columns from d on of 8 neighbouring
// rows are in different banks.
inline __device__ unsigned swizzle(unsigned n) { return n % 8 * 4; }

// The same for P: a warp accesses the rows of two threads at once, kThreadM neighbours each.
inline __device__ unsigned swizzle_p(unsigned m) { return m / kThreadM % 2 * 16; }

// Copies kRows rows to shared memory. Rows from valid_rows on are past the end and become zero.
template <int kRows, int kHeadDim>
inline __device__ void load_tile(float* s_tile, const float* g_tile, int64_t g_stride,
                                 int valid_rows, bool swizzled) {
  constexpr int kRowsAtOnce = 4 * kThreads / kHeadDim;
  static_assert(kRows % kRowsAtOnce == 0, "every thread copies as much");
  const unsigned thread = threadIdx.y * kThreadsX + threadIdx.x;
  const int r = 4 * thread / kHeadDim;
  const int d = 4 * thread % kHeadDim;
  const float* from = g_tile + r * g_stride;
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    store4(s_tile + (r + i) * kHeadDim, swizzled ? d ^ swizzle(r + i) : d,
           r + i < valid_rows ? load4(from, d) : zero);
    from += kRowsAtOnce * g_stride;
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
  static_assert(kHeadDim % kThreadsX == 0, "a thread has whole columns of O");
  static_assert(kBlockN % kBlockM == 0 && kThreadM == 4, "P has 4 x 4 elements on the diagonal");
  constexpr int kColumns = kHeadDim / kThreadsX;  // columns of O per thread
  const int m = kThreadM * threadIdx.y;           // this thread's first row
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

  load_tile<kBlockM, kHeadDim>(sQ, gQ, q_strides.seqlen, valid_rows, false);

  // No query of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    load_tile<kBlockN, kHeadDim>(sK, gK + n_start * k_strides.seqlen, k_strides.seqlen,
                                 n_end - n_start, true);
    load_tile<kBlockN, kHeadDim>(sV, gV + n_start * v_strides.seqlen, v_strides.seqlen,
                                 n_end - n_start, false);
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
        const int n = j * kThreadsX + threadIdx.x;
        const float4 rK = load4(sK + n * kHeadDim, d ^ swizzle(threadIdx.x));
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
        const int n = j * kThreadsX + threadIdx.x;
        rS[i][j] = n < visible[i] ? softmax_scale * rS[i][j] : -INFINITY;
        tile_max = fmaxf(tile_max, rS[i][j]);
      }
      const float new_max = fmaxf(row_max[i], reduce_max(tile_max));
      const float row_scale = expf(row_max[i] - new_max);
      row_max[i] = new_max;
      row_sum[i] = row_scale * row_sum[i];  // this thread's partial sum
      for (int j = 0; j < kThreadN; ++j) {
        const int n = j * kThreadsX + threadIdx.x;
        const float p = expf(rS[i][j] - new_max);
        row_sum[i] += p;
        sS[(m + i) * kBlockN + (n ^ swizzle_p(m))] = p;
      }
      for (int c = 0; c < kColumns; ++c) {
        rO[i][c] *= row_scale;
      }
    }
    __syncwarp();

    // O += P V; the thread's last row sees the most keys.
    for (int n = 0; n < visible[kThreadM - 1]; n += 4) {
      // On the mask's diagonal, row i sees the keys up to i. For the others P is 0, but V may be
      // anything: 0 * NaN is not 0.
      const bool diagonal = is_causal && n_start + n == m_start + m;
      for (int j = 0; j < 4; ++j) {
        float rV[kColumns];
        for (int c = 0; c < kColumns; ++c) {
          rV[c] = sV[(n + j) * kHeadDim + c * kThreadsX + threadIdx.x];
        }
        for (int i = 0; i < kThreadM; ++i) {
          const float p = sS[(m + i) * kBlockN + ((n + j) ^ swizzle_p(m))];
          for (int c = 0; c < kColumns; ++c) {
            if (j <= i || !diagonal) rO[i][c] += p * rV[c];
          }
        }
      }
    }
    __syncthreads();
  }

  for (int i = 0; i < kThreadM; ++i) {
    row_sum[i] = reduce_sum(row_sum[i]);
    if (m + i < valid_rows) {
      for (int c = 0; c < kColumns; ++c) {
        gO[(m + i) * row_stride + c * kThreadsX + threadIdx.x] = rO[i][c] / row_sum[i];
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
