// v32 - split once per block
//
// From:   v20
// Change: K and V are split when they are stored to shared memory. A row there is its hi, then its
//         lo.
// Why:    each of a block's four warps split all of K and V.
// Cost:   twice the shared memory, and twice the loads from it: hi and lo, instead of a number to
//         split. At head_dim 128 registers are short: O is computed 16 columns at a time, not 32.
// Tile:   kBlockM x kBlockN = 64 x 64, at head_dim 128 64 x 32, block 128
// Layout: strided
// Needs:  sm_80
// Precision: 3xtf32
// Flags:  --use_fast_math
// Expect: an eighth fewer instructions, but shared memory becomes the bottleneck: with 12 heads 4 %
//         less time than v20 at 1,024 rows, but 6 % more at 4,096, and 10 % more with a batch of 4.

#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kPad = 4;  // padding, in floats

inline __device__ float4 load4(const float* row, unsigned d) {
  return reinterpret_cast<const float4*>(row)[d / 4];
}
inline __device__ void store4(unsigned* row, unsigned d, uint4 x) {
  reinterpret_cast<uint4*>(row)[d / 4] = x;
}
inline __device__ void store2(float* row, unsigned d, float x, float y) {
  reinterpret_cast<float2*>(row)[d / 2] = make_float2(x, y);
}

// x = hi + lo except for the last 2 bits: TF32 ignores the low 13 bits of lo.
inline __device__ void split(float x, unsigned& hi, unsigned& lo) {
  hi = (__float_as_uint(x) + 0x1000) & ~0x1fffu;
  lo = __float_as_uint(x - __uint_as_float(hi));
}

// Splits kRows rows, times `scale`, and stores them; a row is kHeadDim hi, then kHeadDim lo. Rows
// from valid_rows on are past the end and become zero.
template <int kHeadDim, int kRows, int kPad>
inline __device__ void split_tile(unsigned* s_tile, const float* g_tile, int64_t g_stride,
                                  int valid_rows, float scale) {
#pragma unroll(kHeadDim > 64 ? 4 : 8)
  for (int i = 0; i < kRows * kHeadDim / (4 * kThreads); ++i) {
    const int r = 4 * (i * kThreads + threadIdx.x) / kHeadDim;
    const int d = 4 * (i * kThreads + threadIdx.x) % kHeadDim;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 x = r < valid_rows ? load4(g_tile + r * g_stride, d) : zero;
    uint4 hi, lo;
    split(scale * x.x, hi.x, lo.x);
    split(scale * x.y, hi.y, lo.y);
    split(scale * x.z, hi.z, lo.z);
    split(scale * x.w, hi.w, lo.w);
    unsigned* row = s_tile + r * (2 * kHeadDim + kPad);
    store4(row, d, hi);
    store4(row + kHeadDim, d, lo);
  }
}

// Reduces x over the four lanes that share a row; every lane gets the result.
inline __device__ float reduce_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}
inline __device__ float reduce_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

template <int kBlockM, int kBlockN, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ k,
                     const float* __restrict__ v, float* __restrict__ o, Strides q_strides,
                     Strides k_strides, Strides v_strides, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal) {
  static_assert(kBlockM == 16 * kWarps, "a warp has the 16 rows of a fragment");
  constexpr int kStride = 2 * kHeadDim + kPad;
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_block = gridDim.y - 1 - blockIdx.y;
  const int m_start = m_block * kBlockM;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int64_t row_stride = int64_t{num_heads} * kHeadDim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  const float* gQ = q + batch * q_strides.batch + head * q_strides.head;
  const float* gK = k + batch * k_strides.batch + head * k_strides.head;
  const float* gV = v + batch * v_strides.batch + head * v_strides.head;
  float* gO = o + offset;

  // A lane has rows m (r = 0) and m + 8 (r = 1), and columns n and n + 1 of every 8.
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const int m_warp = m_start + 16 * warp_id;
  const int m = m_warp + lane_id / 4;
  const int n = 2 * (lane_id % 4);
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {};  // this lane's partial sum
  float rO[kHeadDim / 8][4] = {};

  ATTENTION_DYNAMIC_SHARED(unsigned, smem);
  unsigned* sK = smem;
  unsigned* sV = sK + kBlockN * kStride;

  float rQ[kHeadDim / 8][4];
  for (int i = 0; i < 4; ++i) {
    const int row = m + i % 2 * 8;
    for (int s = 0; s < kHeadDim / 8; ++s) {
      const int d = 8 * s + i / 2 * 4 + lane_id % 4;
      rQ[s][i] = row < seqlen ? gQ[row * q_strides.seqlen + d] : 0.0f;
    }
  }

  // No query of this block sees any key from n_end on, and none of this warp from n_warp_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int n_warp_end = is_causal ? min(m_warp + 16, seqlen) : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    __syncthreads();
    split_tile<kHeadDim, kBlockN, kPad>(sK, gK + n_start * k_strides.seqlen, k_strides.seqlen,
                                        n_end - n_start, 1.0f);
    // V is halved because split() may round up to the next power of two, which could overflow.
    split_tile<kHeadDim, kBlockN, kPad>(sV, gV + n_start * v_strides.seqlen, v_strides.seqlen,
                                        n_end - n_start, 0.5f);
    __syncthreads();

    // S = Q K^T
    float rS[kBlockN / 8][4] = {};
#pragma unroll
    for (int s = 0; s < kHeadDim / 8; ++s) {
      unsigned hiQ[4], loQ[4];
      for (int i = 0; i < 4; ++i) split(rQ[s][i], hiQ[i], loQ[i]);
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
        const unsigned* row = sK + (8 * j + lane_id / 4) * kStride + 8 * s + lane_id % 4;
        unsigned hiK[2], loK[2];
        for (int i = 0; i < 2; ++i) {
          hiK[i] = row[4 * i];
          loK[i] = row[4 * i + kHeadDim];
        }
        ptx::mma_tf32(rS[j], loQ, hiK);
        ptx::mma_tf32(rS[j], hiQ, loK);
        ptx::mma_tf32(rS[j], hiQ, hiK);
      }
    }

    // P = exp(S - row_max), and the running row statistics
    for (int r = 0; r < 2; ++r) {
      const int visible = (is_causal ? min(m + 8 * r + 1, seqlen) : seqlen) - n_start;
      float tile_max = -INFINITY;
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
        for (int c = 0; c < 2; ++c) {
          float& score = rS[j][2 * r + c];
          score = 8 * j + n + c < visible ? softmax_scale * score : -INFINITY;
          tile_max = fmaxf(tile_max, score);
        }
      }
      const float new_max = fmaxf(row_max[r], reduce_max(tile_max));
      const float row_scale = expf(row_max[r] - new_max);
      row_max[r] = new_max;
      row_sum[r] *= row_scale;
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
        for (int c = 0; c < 2; ++c) {
          rS[j][2 * r + c] = expf(rS[j][2 * r + c] - new_max);
          row_sum[r] += rS[j][2 * r + c];
        }
      }
      for (int d = 0; d < kHeadDim / 8; ++d) {
        for (int c = 0; c < 2; ++c) rO[d][2 * r + c] *= row_scale;
      }
    }

    // O += P V, without keys that no row of the warp sees. V must be finite: 0 * NaN is not 0.
    constexpr int kColumns = kHeadDim > 64 ? 16 : kHeadDim;  // at a time: registers are short
#pragma unroll
    for (int first = 0; first < kHeadDim; first += kColumns) {
      float rPV[kColumns / 8][4] = {};
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
        if (n_start + 8 * j >= n_warp_end) break;
        unsigned hiP[4], loP[4];
        for (int i = 0; i < 4; ++i) split(rS[j][i % 2 * 2 + i / 2], hiP[i], loP[i]);
#pragma unroll
        for (int d = 0; d < kColumns / 8; ++d) {
          const unsigned* column = sV + (8 * j + n) * kStride + first + 8 * d + lane_id / 4;
          unsigned hiV[2], loV[2];
          for (int i = 0; i < 2; ++i) {
            hiV[i] = column[i * kStride];
            loV[i] = column[i * kStride + kHeadDim];
          }
          ptx::mma_tf32(rPV[d], loP, hiV);
          ptx::mma_tf32(rPV[d], hiP, loV);
          ptx::mma_tf32(rPV[d], hiP, hiV);
        }
      }
      for (int d = 0; d < kColumns / 8; ++d) {
        for (int i = 0; i < 4; ++i) rO[first / 8 + d][i] += rPV[d][i];
      }
    }
  }

  for (int r = 0; r < 2; ++r) {
    const float half_sum = 0.5f * reduce_sum(row_sum[r]);
    if (m + 8 * r < seqlen) {
      for (int d = 0; d < kHeadDim / 8; ++d) {
        store2(gO + (m + 8 * r) * row_stride, 8 * d + n, rO[d][2 * r] / half_sum,
               rO[d][2 * r + 1] / half_sum);
      }
    }
  }
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  constexpr int kBlockM = 64;
  constexpr int kBlockN = kHeadDim > 64 ? 32 : 64;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  const size_t smem_bytes = sizeof(unsigned) * 2 * kBlockN * (2 * kHeadDim + kPad);
  return launch_kernel(attention_kernel<kBlockM, kBlockN, kHeadDim>, grid, dim3(kThreads),
                       smem_bytes, stream, static_cast<const float*>(params.q),
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
