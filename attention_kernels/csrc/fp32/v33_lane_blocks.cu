// v33 - lanes in blocks of 2 x 4
//
// From:   v31
// Change: a warp's lanes are numbered so that each quarter of them covers 2 x 4 of the warp's 4 x 8
//         register tiles instead of 1 x 8. Q and P are swizzled, because a quarter now reads two of
//         their rows at once.
// Why:    a 16-byte load per lane takes two wavefronts instead of four when a warp reads few
//         different addresses and neighbouring lanes read the same one.
// Cost:   none.
// Tile:   kBlockM x kBlockN = 64 x 64, block (32, 2)
// Layout: strided
// Flags:  --use_fast_math
// Expect: half of v31's wavefronts: shared memory no longer limits. 3 % less time than v31 with 12
//         heads and 1,024 rows, 4 % with 4,096, 5 % with a batch of 4.

#include <cuda_pipeline.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kThreadM = 8;
constexpr int kLanesM = 4;
constexpr int kLanesN = 8;
constexpr int kWarps = 2;
constexpr int kThreads = kLanesM * kLanesN * kWarps;
constexpr int kSlice = 4 * kLanesN;  // keys whose P is in shared memory at a time

// Accesses row[d] to row[d + 3]. The row is aligned to 16 bytes, and d is a multiple of 4.
inline __device__ float4 load4(const float* row, unsigned d) {
  return reinterpret_cast<const float4*>(row)[d / 4];
}

inline __device__ void store4(float* row, unsigned d, float4 x) {
  reinterpret_cast<float4*>(row)[d / 4] = x;
}

// The same with an array of floats.
inline __device__ void load_columns(float* x, const float* row, unsigned d) {
  const float4 x4 = load4(row, d);
  x[0] = x4.x;
  x[1] = x4.y;
  x[2] = x4.z;
  x[3] = x4.w;
}

inline __device__ void store_columns(float* row, unsigned d, const float* x) {
  store4(row, d, make_float4(x[0], x[1], x[2], x[3]));
}

// Column d of row n of Q and K is stored at d ^ swizzle(n). The 4 adjacent rows of a thread share
// a swizzle; 8 neighbouring threads' differ, so their float4s cover all 32 banks.
inline __device__ unsigned swizzle(unsigned n) { return n / 4 % 8 * 4; }

// The same for P, whose rows span all 32 banks.
inline __device__ unsigned swizzle_p(unsigned m) { return m / kThreadM % 2 * 16; }

// Starts copying kRows rows to shared memory. Rows from valid_rows on are past the end and become
// zero.
template <int kRows, int kHeadDim>
inline __device__ void copy_tile(float* s_tile, const float* g_tile, int64_t g_stride,
                                 int valid_rows, bool swizzled) {
  constexpr int kRowsAtOnce = 4 * kThreads / kHeadDim;
  static_assert(kRows % kRowsAtOnce == 0, "every thread copies as much");
  const unsigned thread = threadIdx.y * 32 + threadIdx.x;
  const int r = 4 * thread / kHeadDim;
  const int d = 4 * thread % kHeadDim;
  const float* from = g_tile + r * g_stride + d;
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    const bool is_valid = r + i < valid_rows;  // if not, zero-fill; the address must be aligned
    __pipeline_memcpy_async(s_tile + (r + i) * kHeadDim + (swizzled ? d ^ swizzle(r + i) : d),
                            is_valid ? from : g_tile, sizeof(float4),
                            is_valid ? 0 : sizeof(float4));
    from += kRowsAtOnce * g_stride;
  }
}

// Counts the keys of the tile at n_start that `row` sees. The causal mask is top-left aligned.
template <int kBlockN>
inline __device__ int visible_keys(int row, int n_start, int seqlen, bool is_causal) {
  return min(kBlockN, (is_causal ? min(row + 1, seqlen) : seqlen) - n_start);
}

// Reduces x over the kLanesN lanes that share a row; every lane gets the result.
inline __device__ float reduce_max(float x) {
  for (int offset : {1, 4, 8}) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
  }
  return x;
}

inline __device__ float reduce_sum(float x) {
  for (int offset : {1, 4, 8}) {
    x += __shfl_xor_sync(0xffffffff, x, offset);
  }
  return x;
}

// O += P V for a slice of keys. On the mask's diagonal, row m of the warp sees the keys up to m.
// For the others P is 0, but V may be anything: 0 * NaN is not 0.
template <int kHeadDim, bool kIsDiagonal>
inline __device__ void add_product(float (&rO)[kThreadM][kHeadDim / kLanesN], const float* s_p,
                                   const float* s_v, int thread_m, int thread_n) {
  constexpr int kColumns = kHeadDim / kLanesN;
#pragma unroll(kIsDiagonal || kHeadDim == 128 ? 1 : 2)
  for (int n = 0; n < kSlice; n += 4) {
    float rP[kThreadM][4];
    for (int i = 0; i < kThreadM; ++i) {
      const int m = kThreadM * thread_m + i;
      load_columns(rP[i], s_p + m * kSlice, n ^ swizzle_p(kThreadM * thread_m));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float rV[kColumns];
      for (int c = 0; c < kColumns; c += 4) {
        load_columns(rV + c, s_v + (n + j) * kHeadDim, c * kLanesN + 4 * thread_n);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kThreadM; ++i) {
          const bool visible = !kIsDiagonal || n + j <= kThreadM * thread_m + i;
          if (visible) rO[i][c] += rP[i][j] * rV[c];
        }
      }
    }
  }
}

template <int kBlockM, int kBlockN, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeadDim == 128 ? 3 : 4)
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

  static_assert(kBlockM == kThreadM * kLanesM * kWarps, "a thread has kThreadM rows");
  static_assert(kBlockN % kSlice == 0 && kSlice == kThreadM * kLanesM, "P has 32 x 32 elements");
  constexpr int kThreadN = kBlockN / kLanesN;   // columns of S per thread, in groups of four
  constexpr int kColumns = kHeadDim / kLanesN;  // columns of O, likewise
  // Lanes that differ only in bits 0, 2 and 3 share rows; those that differ only in bits 1 and 4
  // share columns. So a quarter of a warp covers 2 x 4 of the 4 x 8 lanes, half a warp 2 x 8.
  const int lane_id = threadIdx.x;
  const int thread_m = (lane_id >> 1 & 1) | (lane_id >> 4) << 1;
  const int thread_n = (lane_id & 1) | (lane_id >> 2 & 3) << 1;
  const int warp_m = threadIdx.y * kThreadM * kLanesM;  // this warp's first row
  const int m = warp_m + kThreadM * thread_m;           // this thread's first row
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
  float* sP = sV + kBlockN * kHeadDim;

  // No query of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  copy_tile<kBlockM, kHeadDim>(sQ, gQ, q_strides.seqlen, valid_rows, true);
  copy_tile<kBlockN, kHeadDim>(sK, gK, k_strides.seqlen, n_end, true);
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    copy_tile<kBlockN, kHeadDim>(sV, gV + n_start * v_strides.seqlen, v_strides.seqlen,
                                 n_end - n_start, false);

    // S = softmax_scale * Q K^T
    float rS[kThreadM][kThreadN] = {};
#pragma unroll 1
    for (int d = 0; d < kHeadDim; d += 4) {
      float rQ[kThreadM][4];
      for (int i = 0; i < kThreadM; ++i) {
        load_columns(rQ[i], sQ + (m + i) * kHeadDim, d ^ swizzle(m + i / 4 * 4));
      }
      float rK[kThreadN][4];
      for (int j = 0; j < kThreadN; ++j) {
        const int n = j / 4 * kSlice + 4 * thread_n + j % 4;
        load_columns(rK[j], sK + n * kHeadDim, d ^ swizzle(4 * thread_n));
      }
      for (int e = 0; e < 4; ++e) {
        for (int j = 0; j < kThreadN; ++j) {
          for (int i = 0; i < kThreadM; ++i) {
            rS[i][j] += rQ[i][e] * rK[j][e];
          }
        }
      }
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    const int n_next = n_start + kBlockN;
    if (n_next < n_end) {
      copy_tile<kBlockN, kHeadDim>(sK, gK + n_next * k_strides.seqlen, k_strides.seqlen,
                                   n_end - n_next, true);
    }

    // P = exp(S - row_max), and the running row statistics
    for (int i = 0; i < kThreadM; ++i) {
      for (int j = 0; j < kThreadN; ++j) rS[i][j] *= softmax_scale;
    }
    if (visible_keys<kBlockN>(m_start + warp_m, n_start, seqlen, is_causal) < kBlockN) {
      for (int i = 0; i < kThreadM; ++i) {
        const int visible = visible_keys<kBlockN>(m_start + m + i, n_start, seqlen, is_causal);
        for (int j = 0; j < kThreadN; ++j) {
          const int n = j / 4 * kSlice + 4 * thread_n + j % 4;
          if (n >= visible) rS[i][j] = -INFINITY;
        }
      }
    }
    for (int i = 0; i < kThreadM; ++i) {
      float tile_max = -INFINITY;
      for (int j = 0; j < kThreadN; ++j) {
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
      for (int c = 0; c < kColumns; ++c) {
        rO[i][c] *= row_scale;
      }
    }

    // O += P V, one slice of keys at a time. The warp sees no key of a slice past its diagonal.
#pragma unroll
    for (int slice = 0; slice < kBlockN; slice += kSlice) {
      const int past_diagonal = is_causal ? n_start + slice - m_start - warp_m : -1;
      if (past_diagonal > 0) break;
      __syncwarp();
      for (int i = 0; i < kThreadM; ++i) {
        store_columns(sP + (m + i) * kSlice, 4 * thread_n ^ swizzle_p(m), rS[i] + slice / kLanesN);
      }
      __syncwarp();
      const float* s_v = sV + slice * kHeadDim;
      if (past_diagonal < 0) {
        add_product<kHeadDim, false>(rO, sP + warp_m * kSlice, s_v, thread_m, thread_n);
      } else {
        add_product<kHeadDim, true>(rO, sP + warp_m * kSlice, s_v, thread_m, thread_n);
      }
    }
  }

  for (int i = 0; i < kThreadM; ++i) {
    row_sum[i] = reduce_sum(row_sum[i]);
    if (m + i < valid_rows) {
      for (int c = 0; c < kColumns; c += 4) {
        float out[4];
        for (int w = 0; w < 4; ++w) {
          out[w] = rO[i][c + w] / row_sum[i];
        }
        store_columns(gO + (m + i) * row_stride, c * kLanesN + 4 * thread_n, out);
      }
    }
  }
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  constexpr int kBlockM = 64;
  constexpr int kBlockN = kHeadDim == 128 ? 32 : 64;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  const dim3 block(32, kWarps);
  const size_t smem_bytes = sizeof(float) * (kBlockM * kHeadDim + kBlockN * kHeadDim +
                                             kBlockN * kHeadDim + kBlockM * kSlice);
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
