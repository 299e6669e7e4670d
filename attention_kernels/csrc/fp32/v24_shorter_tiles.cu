// v24 - shorter tiles, three blocks per multiprocessor
//
// Change: tiles of 32 keys at every head_dim. S and P take half the registers, and three blocks fit a
//         multiprocessor; at head_dim 128, two.
// Why:    the warps of a block are in step: they wait for a tile, multiply, and compute the softmax
//         together. Only another block's warps have products when these have none.
// Cost:   twice as many barriers, and O is rescaled twice as often. A few bytes are spilled at
//         head_dim 64.
// Tile:   kBlockM x kBlockN = 64 x 32, block 128
// Layout: strided
// Needs:  sm_80
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: 168 registers; more instructions than v23, and busier tensor cores. With one batch entry it is
//         slower than v23 at 2,048 rows.

#include <cuda_fp16.h>
#include <cuda_pipeline.h>

#include <type_traits>

#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = 32;     // that Split is padded to: whole tiles
constexpr int kStages = 2;    // tiles in shared memory: one in use, the others on their way
constexpr int kPad = 8;       // halves
constexpr int kTop = 14;      // exponent of a row's largest number, scaled
constexpr int kLeast = -104;  // exponents that are used
constexpr int kMost = 126;
constexpr float kScaleP = 0x1p15f;

inline __device__ float4 load4(const float* row, unsigned d) {
  return reinterpret_cast<const float4*>(row)[d / 4];
}
inline __device__ float2 load2(const float* row, unsigned d) {
  return reinterpret_cast<const float2*>(row)[d / 2];
}
inline __device__ void store2(float* row, unsigned d, float x, float y) {
  reinterpret_cast<float2*>(row)[d / 2] = make_float2(x, y);
}

inline __device__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// The exponent of a row's largest number.
inline __device__ int exponent_of(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return largest == 0.0f ? 0 : min(max(exponent, kLeast), kMost);
}

// x and y as sums hi + lo, each pair in a word.
inline __device__ void split(float x, float y, unsigned& hi, unsigned& lo) {
  const half2 hi2 = __floats2half2_rn(x, y);
  const float2 back = __half22float2(hi2);
  const half2 lo2 = __floats2half2_rn(x - back.x, y - back.y);
  hi = *reinterpret_cast<const unsigned*>(&hi2);
  lo = *reinterpret_cast<const unsigned*>(&lo2);
}

// What split_kernel() makes of K and V, for each head: rows of kHeadDim hi and as many lo, `padded` of
// K and as many of V, and three numbers for each key.
struct Split {
  half* halves;
  float* k_scales;
  float* v_exponents;
  float* v_units;  // 2^-exponent
  int padded;      // keys of a head, a multiple of kKeys
};

// Rows from seqlen on become zero. Blocks of y = 0 split K, of y = 1 V.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* __restrict__ k, const float* __restrict__ v, Split to,
                 Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  const bool is_v = blockIdx.y == 1;
  const float* x_rows = is_v ? v : k;
  const Strides strides = is_v ? v_strides : k_strides;
  const int64_t key = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / (kHeadDim / 4);
  const int r = key % to.padded;
  const int64_t batch_head = key / to.padded;
  const int batch = batch_head / num_heads;
  const int head = batch_head % num_heads;
  const int d = threadIdx.x % (kHeadDim / 4) * 4;
  const float* g_row = x_rows + batch * strides.batch + head * strides.head + r * strides.seqlen;
  const float4 x = r < seqlen ? load4(g_row, d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
  for (int offset = kHeadDim / 8; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
  }
  const int exponent = exponent_of(largest);
  const float scale = power_of_two(kTop - exponent);
  uint2 hi, lo;
  split(x.x * scale, x.y * scale, hi.x, lo.x);
  split(x.z * scale, x.w * scale, hi.y, lo.y);
  half* row = to.halves + ((2 * batch_head + is_v) * to.padded + r) * 2 * kHeadDim + d;
  *reinterpret_cast<uint2*>(row) = hi;
  *reinterpret_cast<uint2*>(row + kHeadDim) = lo;
  if (d != 0) return;
  if (is_v) {
    to.v_exponents[key] = exponent;
    to.v_units[key] = power_of_two(-exponent);
  } else {
    to.k_scales[key] = power_of_two(exponent - kTop);
  }
}

// Begins to copy `count` times 16 bytes to shared memory, rows of kRow times 16 bytes that are
// kStride bytes apart there.
template <int kCount, int kRow, int kStride>
inline __device__ void copy(void* to, const void* from) {
#pragma unroll
  for (int start = 0; start < kCount; start += kThreads) {
    const int i = start + threadIdx.x;
    if (kCount % kThreads != 0 && i >= kCount) break;
    __pipeline_memcpy_async(static_cast<char*>(to) + i / kRow * kStride + i % kRow * 16,
                            static_cast<const char*>(from) + i * 16, 16);
  }
}

// The sum, or the maximum, of x over the four lanes that share a row; every lane gets it.
inline __device__ float reduce_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}
inline __device__ float reduce_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

template <int kBlockN, int kHeadDim>
constexpr int kStageBytes =
    sizeof(half) * 2 * kBlockN * (2 * kHeadDim + kPad) + sizeof(float) * 3 * kBlockN;

template <int kBlockM, int kBlockN, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeadDim > 64 ? 2 : 3)
    attention_kernel(const float* __restrict__ q, Split kv, float* __restrict__ o,
                     Strides q_strides, int seqlen, int num_heads, float softmax_scale,
                     bool is_causal) {
  static_assert(kBlockM == 16 * kWarps, "a warp has the 16 rows of a fragment");
  constexpr int kStride = 2 * kHeadDim + kPad;
  // Blocks start in the order of their index: those with the most keys, the last queries', first.
  const int m_block = gridDim.y - 1 - blockIdx.y;
  const int m_start = m_block * kBlockM;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int64_t row_stride = int64_t{num_heads} * kHeadDim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  const float* gQ = q + batch * q_strides.batch + head * q_strides.head;
  const half* gK = kv.halves + 2 * int64_t{blockIdx.x} * kv.padded * 2 * kHeadDim;
  const half* gV = gK + int64_t{kv.padded} * 2 * kHeadDim;
  const int64_t first_key = int64_t{blockIdx.x} * kv.padded;
  float* gO = o + offset;

  // A lane has the rows m and m + 8, r = 0 and 1, and in every 8 columns those at n and n + 1.
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const int m_warp = m_start + 16 * warp_id;
  const int m = m_warp + lane_id / 4;
  const int n = 2 * (lane_id % 4);
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {};  // this lane's share of it
  float rO[kHeadDim / 8][4] = {};

  ATTENTION_DYNAMIC_SHARED(half, smem);
  constexpr int kStageHalfs = kStageBytes<kBlockN, kHeadDim> / sizeof(half);
  const auto copy_keys = [&](int n_start) {
    half* sK = smem + n_start / kBlockN % kStages * kStageHalfs;
    half* sV = sK + kBlockN * kStride;
    float* s_k_scale = reinterpret_cast<float*>(sV + kBlockN * kStride);
    constexpr int kRow = 2 * kHeadDim / 8, kBytes = sizeof(half) * kStride;
    copy<kBlockN * kRow, kRow, kBytes>(sK, gK + int64_t{n_start} * 2 * kHeadDim);
    copy<kBlockN * kRow, kRow, kBytes>(sV, gV + int64_t{n_start} * 2 * kHeadDim);
    copy<kBlockN / 4, 1, 16>(s_k_scale, kv.k_scales + first_key + n_start);
    copy<kBlockN / 4, 1, 16>(s_k_scale + kBlockN, kv.v_exponents + first_key + n_start);
    copy<kBlockN / 4, 1, 16>(s_k_scale + 2 * kBlockN, kv.v_units + first_key + n_start);
  };

  unsigned hiQ[kHeadDim / 16][4], loQ[kHeadDim / 16][4];
  float q_scale[2];  // to scores in units of log2
  for (int r = 0; r < 2; ++r) {
    const int row = m + 8 * r;
    float2 x[kHeadDim / 8];
    float largest = 0.0f;
    for (int s = 0; s < kHeadDim / 8; ++s) {
      x[s] = row < seqlen ? load2(gQ + row * q_strides.seqlen, 8 * s + n) : make_float2(0.0f, 0.0f);
      largest = fmaxf(largest, fmaxf(fabsf(x[s].x), fabsf(x[s].y)));
    }
    const int exponent = exponent_of(reduce_max(largest));
    const float scale = power_of_two(kTop - exponent);
    q_scale[r] = softmax_scale * 1.4426950408889634f * power_of_two(exponent - kTop);
    for (int s = 0; s < kHeadDim / 8; ++s) {
      const int i = s % 2 * 2 + r;
      split(x[s].x * scale, x[s].y * scale, hiQ[s / 2][i], loQ[s / 2][i]);
    }
  }

  // No query of this block sees a key from n_end on, and none of this warp one from n_warp_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int n_warp_end = is_causal ? min(m_warp + 16, seqlen) : seqlen;
  const auto compute = [&](int n_start, auto is_masked) {
    constexpr bool kIsMasked = decltype(is_masked)::value;
    const half* sK = smem + n_start / kBlockN % kStages * kStageHalfs;
    const half* sV = sK + kBlockN * kStride;
    const float* s_k_scale = reinterpret_cast<const float*>(sV + kBlockN * kStride);
    const float* s_v_exponent = s_k_scale + kBlockN;
    const float* s_v_unit = s_v_exponent + kBlockN;
    // Where a lane's rows of matrices begin: of K, 8 keys and 32 columns; of V, 16 and 16.
    const half* matrices_k = sK + lane_id % 8 * kStride + lane_id / 8 * 8;
    const half* matrices_v = sV + lane_id % 16 * kStride + lane_id / 16 * 8;

    // S = Q K^T, small products first
    float rS[kBlockN / 8][4] = {};
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      unsigned hiK[kHeadDim / 32][4], loK[kHeadDim / 32][4];
#pragma unroll
      for (int s = 0; s < kHeadDim / 16; ++s) {
        const int at = s % 2 * 2;
        if (at == 0) {
          const half* matrices = matrices_k + 8 * j * kStride + 16 * s;
          ptx::load_matrices(hiK[s / 2], matrices);
          ptx::load_matrices(loK[s / 2], matrices + kHeadDim);
        }
        ptx::mma<false>(rS[j], loQ[s], {hiK[s / 2][at], hiK[s / 2][at + 1]});
        ptx::mma<false>(rS[j], hiQ[s], {loK[s / 2][at], loK[s / 2][at + 1]});
      }
#pragma unroll
      for (int s = 0; s < kHeadDim / 16; ++s) {
        const int at = s % 2 * 2;
        ptx::mma<false>(rS[j], hiQ[s], {hiK[s / 2][at], hiK[s / 2][at + 1]});
      }
    }

    // Scores, in units of log2, plus the exponent of V's row
    float new_max[2] = {row_max[0], row_max[1]};
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      const float2 k_scale = load2(s_k_scale, 8 * j + n);
      const float2 v_exponent = load2(s_v_exponent, 8 * j + n);
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2, c = i % 2;
        const int visible = (is_causal ? min(m + 8 * r + 1, seqlen) : seqlen) - n_start;
        float& score = rS[j][i];
        score =
            q_scale[r] * (score * (c ? k_scale.y : k_scale.x)) + (c ? v_exponent.y : v_exponent.x);
        if (kIsMasked && 8 * j + n + c >= visible) score = -INFINITY;
        new_max[r] = fmaxf(new_max[r], score);
      }
    }
    float row_scale[2];
    for (int r = 0; r < 2; ++r) {
      new_max[r] = reduce_max(new_max[r]);
      row_scale[r] = exp2f(row_max[r] - new_max[r]);
      row_max[r] = new_max[r];
      row_sum[r] *= row_scale[r];
    }

    // P = 2^(S - row_max), split, and the statistics of the keys seen so far
    unsigned hiP[kBlockN / 16][4], loP[kBlockN / 16][4];
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      const float2 v_unit = load2(s_v_unit, 8 * j + n);
      for (int r = 0; r < 2; ++r) {
        const float x = exp2f(rS[j][2 * r] - row_max[r]);
        const float y = exp2f(rS[j][2 * r + 1] - row_max[r]);
        row_sum[r] += x * v_unit.x;
        row_sum[r] += y * v_unit.y;
        const int i = j % 2 * 2 + r;
        split(x * kScaleP, y * kScaleP, hiP[j / 2][i], loP[j / 2][i]);
      }
    }

    // O += P V, small products first. P is 0 for keys that no row of the warp sees, but V may be
    // anything: 0 * NaN is not 0.
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      float rPV[2][4] = {};
      unsigned hiV[kBlockN / 16][4], loV[4];
#pragma unroll
      for (int j = 0; j < kBlockN / 16; ++j) {
        if (kIsMasked && n_start + 16 * j >= n_warp_end) break;
        const half* matrices = matrices_v + 16 * j * kStride + d;
        ptx::load_matrices_transposed(hiV[j], matrices);
        ptx::load_matrices_transposed(loV, matrices + kHeadDim);
        for (int c = 0; c < 2; ++c) {
          ptx::mma<false>(rPV[c], loP[j], {hiV[j][2 * c], hiV[j][2 * c + 1]});
          ptx::mma<false>(rPV[c], hiP[j], {loV[2 * c], loV[2 * c + 1]});
        }
      }
#pragma unroll
      for (int j = 0; j < kBlockN / 16; ++j) {
        if (kIsMasked && n_start + 16 * j >= n_warp_end) break;
        for (int c = 0; c < 2; ++c) {
          ptx::mma<false>(rPV[c], hiP[j], {hiV[j][2 * c], hiV[j][2 * c + 1]});
        }
      }
      for (int i = 0; i < 8; ++i) {
        float& x = rO[d / 8 + i / 4][i % 4];
        x = x * row_scale[i % 4 / 2] + rPV[i / 4][i % 4];
      }
    }
  };

  // Every row of this warp sees the keys up to here.
  const int n_all = is_causal ? min(m_warp + 1, seqlen) : seqlen;
  copy_keys(0);
  __pipeline_commit();
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    __pipeline_wait_prior(0);
    __syncthreads();
    if (n_start + kBlockN < n_end) copy_keys(n_start + kBlockN);
    __pipeline_commit();
    if (n_start + kBlockN <= n_all) {
      compute(n_start, std::false_type());
    } else if (n_start < n_warp_end) {
      compute(n_start, std::true_type());
    }
  }

  for (int r = 0; r < 2; ++r) {
    const float scale = power_of_two(-kTop) / kScaleP / reduce_sum(row_sum[r]);
    if (m + 8 * r < seqlen) {
      for (int d = 0; d < kHeadDim / 8; ++d) {
        store2(gO + (m + 8 * r) * row_stride, 8 * d + n, rO[d][2 * r] * scale,
               rO[d][2 * r + 1] * scale);
      }
    }
  }
}

int padded_keys(const Params& params) { return ceil_div(params.seqlen, kKeys) * kKeys; }

int64_t scratch_floats(const Params& params) {
  const int64_t keys = int64_t{params.batch} * params.num_heads * padded_keys(params);
  return keys * (2 * params.head_dim + 3);
}

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  constexpr int kBlockM = 64;
  constexpr int kBlockN = 32;
  const int heads = params.batch * params.num_heads;
  const int padded = padded_keys(params);
  const int64_t keys = int64_t{heads} * padded;
  float* scales = params.scratch + keys * 2 * kHeadDim;
  const Split kv = {reinterpret_cast<half*>(params.scratch), scales, scales + keys,
                    scales + 2 * keys, padded};
  const cudaError_t error = launch_kernel(
      split_kernel<kHeadDim>, dim3(keys * (kHeadDim / 4) / kThreads, 2), dim3(kThreads), 0, stream,
      static_cast<const float*>(params.k), static_cast<const float*>(params.v), kv,
      params.k_strides, params.v_strides, params.seqlen, params.num_heads);
  if (error != cudaSuccess) return error;
  const dim3 grid(heads, ceil_div(params.seqlen, kBlockM));
  return launch_kernel(attention_kernel<kBlockM, kBlockN, kHeadDim>, grid, dim3(kThreads),
                       kStages * kStageBytes<kBlockN, kHeadDim>, stream,
                       static_cast<const float*>(params.q), kv, static_cast<float*>(params.o),
                       params.q_strides, params.seqlen, params.num_heads, params.softmax_scale,
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
