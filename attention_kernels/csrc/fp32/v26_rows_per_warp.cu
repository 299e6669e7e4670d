// v26 - 32 rows per warp, Q in shared memory
//
// Change: a warp has two fragments of rows, t = 0 and 1, if that leaves enough blocks. Each lane
//         stores its parts of Q in shared memory and reloads them for every tile. One ldmatrix
//         loads hi and lo of a key's 16 columns, or of 16 keys' 8 columns.
// Why:    each load of K and V serves twice as many products. With Q in registers, 32 rows per warp
//         would leave room for only two blocks, and latency would cost what the loads save.
// Cost:   16 bytes of Q for every six products; the large and small products of S alternate, which
//         costs a little precision. head_dim 128 has no room for 32 rows, and takes 98 KB of shared
//         memory: sm_86, 89 and 120 run one block per multiprocessor.
// Tile:   kBlockM x kBlockN = 128 x 32 or 64 x 32, block 128
// Layout: strided
// Needs:  sm_80
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: three blocks with 32 rows per warp at head_dim 32 and 64, and busier tensor cores where
//         there are many blocks. That pays with a batch of 4 and 4,096 rows; at head_dim 32 with a
//         batch of 32 and 1,024 rows it makes no difference. With one batch entry, 16 rows per warp
//         pay for reloading Q and gain nothing.

#include <cuda_pipeline.h>

#include <algorithm>
#include <type_traits>

#include "fp32/three_products.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kMostResident = 3;  // blocks per multiprocessor that share the keys
constexpr int kKeys = 32;         // Split is padded to a multiple of this: whole tiles
constexpr int kStages = 2;        // tiles in shared memory: one in use, the others in flight
constexpr int kPad = 8;           // padding, in halves

// Splits x, four columns of a row, and stores it; a row is kHeadDim hi, then kHeadDim lo.
template <int kHeadDim>
inline __device__ void store_split(half* row, unsigned d, float4 x, float4 scale) {
  uint2 hi, lo;
  split(x.x * scale.x, x.y * scale.y, hi.x, lo.x);
  split(x.z * scale.z, x.w * scale.w, hi.y, lo.y);
  *reinterpret_cast<uint2*>(row + d) = hi;
  *reinterpret_cast<uint2*>(row + kHeadDim + d) = lo;
}

// A thread has the same four columns of every kRowsApart-th row of a tile.
template <int kHeadDim>
constexpr int kRowsApart = 4 * kThreads / kHeadDim;

// Calls visit(i, r, x) for the thread's rows, i = 0, 1, ... Rows from valid_rows on are past the
// end and zero.
template <int kHeadDim, int kRows, typename Visit>
inline __device__ void for_each_row(const float* g_tile, int64_t g_stride, int valid_rows,
                                    Visit visit) {
#pragma unroll
  for (int i = 0; i < kRows / kRowsApart<kHeadDim>; ++i) {
    const int r = i * kRowsApart<kHeadDim> + 4 * threadIdx.x / kHeadDim;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    visit(i, r, r < valid_rows ? load4(g_tile + r * g_stride, 4 * threadIdx.x % kHeadDim) : zero);
  }
}

// Scales and splits rows of K. keep() gets the factor that undoes each row's scale.
template <int kHeadDim, int kRows, int kStride, typename Keep>
inline __device__ void split_k(half* to, const float* g_tile, int64_t g_stride, int valid_rows,
                               Keep keep) {
  for_each_row<kHeadDim, kRows>(g_tile, g_stride, valid_rows, [&](int, int r, float4 x) {
    const int d = 4 * threadIdx.x % kHeadDim;
    float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
    for (int offset = kHeadDim / 8; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
    }
    const int exponent = exponent_of(largest);
    const float scale = power_of_two(kTop - exponent);
    store_split<kHeadDim>(to + r * kStride, d, x, make_float4(scale, scale, scale, scale));
    if (d == 0) keep(r, power_of_two(exponent - kTop));
  });
}

// Scales and splits rows of V. keep() gets the factors that undo the scales of columns and of P.
template <int kHeadDim, int kRows, int kStride, typename Keep>
inline __device__ void split_v(half* to, const float* g_tile, int64_t g_stride, int valid_rows,
                               Keep keep) {
  __shared__ float4 s_largest[kWarps][kHeadDim / 4];
  const int d = 4 * threadIdx.x % kHeadDim;
  float4 rows[kRows / kRowsApart<kHeadDim>];
  float4 largest = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for_each_row<kHeadDim, kRows>(g_tile, g_stride, valid_rows, [&](int i, int, float4 x) {
    rows[i] = x;
    largest = largest_of(largest, x);
  });
#pragma unroll
  for (int offset = kHeadDim / 4; offset < 32; offset *= 2) {
    largest = largest_of(largest, make_float4(__shfl_xor_sync(0xffffffff, largest.x, offset),
                                              __shfl_xor_sync(0xffffffff, largest.y, offset),
                                              __shfl_xor_sync(0xffffffff, largest.z, offset),
                                              __shfl_xor_sync(0xffffffff, largest.w, offset)));
  }
  if (threadIdx.x % 32 < kHeadDim / 4) s_largest[threadIdx.x / 32][d / 4] = largest;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) largest = largest_of(largest, s_largest[warp][d / 4]);
  const int4 exponent = make_int4(exponent_of(largest.x), exponent_of(largest.y),
                                  exponent_of(largest.z), exponent_of(largest.w));
  const float4 scale =
      make_float4(power_of_two(kTop - exponent.x), power_of_two(kTop - exponent.y),
                  power_of_two(kTop - exponent.z), power_of_two(kTop - exponent.w));
#pragma unroll
  for (int i = 0; i < kRows / kRowsApart<kHeadDim>; ++i) {
    const int r = i * kRowsApart<kHeadDim> + 4 * threadIdx.x / kHeadDim;
    store_split<kHeadDim>(to + r * kStride, d, rows[i], scale);
  }
  if (4 * threadIdx.x / kHeadDim != 0) return;
  const auto undo = [](int exponent) { return power_of_two(exponent - kTop) / kScaleP; };
  keep(d, make_float4(undo(exponent.x), undo(exponent.y), undo(exponent.z), undo(exponent.w)));
}

// What split_kernel() computes from K and V for each head: `padded` rows of K, then of V, each
// kHeadDim hi and kHeadDim lo; a scale per key of K, and kHeadDim scales per tile of V.
struct Split {
  half* halves;
  float* k_scales;
  float* v_scales;
  int padded;  // keys per head, a multiple of kKeys
};

// Parts of the output: for each part of the keys and each row of each head, O before the division,
// the maximum and the sum.
struct Parts {
  float* o;
  float2* statistics;
  int keys;  // keys per part, a multiple of kBlockM
};

// A block has a tile of kBlockN keys: of K if blockIdx.y is 0, of V if it is 1.
template <int kBlockN, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* __restrict__ k, const float* __restrict__ v, Split to,
                 Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  const bool is_v = blockIdx.y == 1;
  const float* x_rows = is_v ? v : k;
  const Strides strides = is_v ? v_strides : k_strides;
  const int64_t first_key = int64_t{blockIdx.x} * kBlockN;
  const int n_start = first_key % to.padded;
  const int64_t batch_head = first_key / to.padded;
  const int batch = batch_head / num_heads;
  const int head = batch_head % num_heads;
  const float* g_tile =
      x_rows + batch * strides.batch + head * strides.head + n_start * strides.seqlen;
  half* rows = to.halves + ((2 * batch_head + is_v) * to.padded + n_start) * 2 * kHeadDim;
  if (is_v) {
    float* scales = to.v_scales + int64_t{blockIdx.x} * kHeadDim;
    split_v<kHeadDim, kBlockN, 2 * kHeadDim>(
        rows, g_tile, strides.seqlen, seqlen - n_start,
        [&](int d, float4 scale) { store4(scales, d, scale); });
  } else {
    split_k<kHeadDim, kBlockN, 2 * kHeadDim>(
        rows, g_tile, strides.seqlen, seqlen - n_start,
        [&](int r, float scale) { to.k_scales[first_key + r] = scale; });
  }
}

// Starts copying kCount chunks of 16 bytes to shared memory: rows of kRow chunks, kStride bytes
// apart in shared memory.
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

// The same for kRows rows of floats. Rows past `last` become copies of it.
template <int kRows, int kHeadDim, int kStride>
inline __device__ void copy_rows(void* to, const float* from, int64_t g_stride, int last) {
#pragma unroll
  for (int start = 0; start < kRows * kHeadDim / 4; start += kThreads) {
    const int r = (start + threadIdx.x) / (kHeadDim / 4);
    const int d = 4 * threadIdx.x % kHeadDim;
    __pipeline_memcpy_async(static_cast<char*>(to) + r * kStride + d * 4,
                            from + min(r, last) * g_stride + d, 16);
  }
}

inline __device__ void multiply(float (&sums)[4], uint4 a, unsigned b0, unsigned b1) {
  ptx::mma<false>(sums, {a.x, a.y, a.z, a.w}, {b0, b1});
}

template <int kBlockN, int kHeadDim>
constexpr int kStageBytes =
    sizeof(half) * 2 * kBlockN * (2 * kHeadDim + kPad) + sizeof(float) * kBlockN;

template <int kFragments, int kBlockN, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kFragments == 2 || kHeadDim > 64 ? 3 : 4)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v, Split kv,
                     Parts parts, float* __restrict__ o, Strides q_strides, Strides v_strides,
                     int seqlen, int num_heads, float softmax_scale, bool is_causal) {
  constexpr int kRows = 16 * kFragments;  // rows per warp
  constexpr int kBlockM = kRows * kWarps;
  constexpr int kSteps = kHeadDim / 16;
  static_assert(kBlockN % kRowsApart<kHeadDim> == 0 && kBlockN >= kHeadDim / 4);
  constexpr int kStride = 2 * kHeadDim + kPad;
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_block = gridDim.y - 1 - blockIdx.y;
  const int m_start = m_block * kBlockM;
  // No query of this block sees any key from n_rows on. The block's part of the keys ends at n_end.
  const int n_rows = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int n_begin = blockIdx.z * parts.keys;
  const int n_end = min(n_begin + parts.keys, n_rows);
  if (n_begin >= n_end) return;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int64_t row_stride = int64_t{num_heads} * kHeadDim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  const float* gQ = q + batch * q_strides.batch + head * q_strides.head;
  const half* gK = kv.halves + 2 * int64_t{blockIdx.x} * kv.padded * 2 * kHeadDim;
  const half* gV = gK + int64_t{kv.padded} * 2 * kHeadDim;
  const float* gRows = v + batch * v_strides.batch + head * v_strides.head;
  const int64_t first_key = int64_t{blockIdx.x} * kv.padded;
  float* gO = o + offset;

  // A lane has rows m + 16 t + 8 r of each fragment t, for r = 0 and 1, and columns n and n + 1 of
  // every 8.
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const int m_warp = m_start + kRows * warp_id;
  const int m = m_warp + lane_id / 4;
  const int n = 2 * (lane_id % 4);
  float row_max[kFragments][2];
  float row_sum[kFragments][2] = {};  // this lane's partial sum
  float rO[kFragments][kHeadDim / 8][4] = {};

  // Every query of this block sees all keys before n_seen.
  const int n_seen = is_causal ? m_start : seqlen;
  ATTENTION_DYNAMIC_SHARED(half, smem);
  constexpr int kStageHalfs = kStageBytes<kBlockN, kHeadDim> / sizeof(half);
  const auto copy_keys = [&](int n_start) {
    half* sK = smem + n_start / kBlockN % kStages * kStageHalfs;
    half* sV = sK + kBlockN * kStride;
    float* s_k_scale = reinterpret_cast<float*>(sV + kBlockN * kStride);
    constexpr int kRow = 2 * kHeadDim / 8, kBytes = sizeof(half) * kStride;
    copy<kBlockN * kRow, kRow, kBytes>(sK, gK + int64_t{n_start} * 2 * kHeadDim);
    copy<kBlockN / 4, 1, 16>(s_k_scale, kv.k_scales + first_key + n_start);
    if (n_start + kBlockN <= n_seen) {
      copy<kBlockN * kRow, kRow, kBytes>(sV, gV + int64_t{n_start} * 2 * kHeadDim);
      // The scales of V's columns, four after each of V's first rows
      copy<kHeadDim / 4, 1, kBytes>(sV + 2 * kHeadDim,
                                    kv.v_scales + (first_key + n_start) / kBlockN * kHeadDim);
    } else {
      copy_rows<kBlockN, kHeadDim, kBytes>(sV, gRows + n_start * v_strides.seqlen, v_strides.seqlen,
                                           seqlen - 1 - n_start);
    }
  };

  // This lane's parts of Q: hi and lo for each t and every 16 columns, 32 lanes apart.
  uint4* sQ = reinterpret_cast<uint4*>(smem + kStages * kStageHalfs) +
              warp_id * kFragments * kSteps * 64 + lane_id;
  float q_scale[kFragments][2];  // scales scores to units of log(2)
#pragma unroll
  for (int t = 0; t < kFragments; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_max[t][r] = -INFINITY;
      const int row = m + 16 * t + 8 * r;
      float2 x[kHeadDim / 8];
      float largest = 0.0f;
      for (int s = 0; s < kHeadDim / 8; ++s) {
        x[s] =
            row < seqlen ? load2(gQ + row * q_strides.seqlen, 8 * s + n) : make_float2(0.0f, 0.0f);
        largest = fmaxf(largest, fmaxf(fabsf(x[s].x), fabsf(x[s].y)));
      }
      const int exponent = exponent_of(reduce_max(largest));
      const float scale = power_of_two(kTop - exponent);
      q_scale[t][r] = softmax_scale * 1.4426950408889634f * power_of_two(exponent - kTop);
      for (int s = 0; s < kHeadDim / 8; ++s) {
        unsigned* to = reinterpret_cast<unsigned*>(sQ + (t * kSteps + s / 2) * 64);
        const int i = s % 2 * 2 + r;
        split(x[s].x * scale, x[s].y * scale, to[i], to[4 * 32 + i]);
      }
    }
  }

  // No query of this warp sees any key from n_warp_end on.
  const int n_warp_end = is_causal ? min(m_warp + kRows, seqlen) : seqlen;
  const auto compute = [&](int n_start, auto is_masked) {
    constexpr bool kIsMasked = decltype(is_masked)::value;
    const half* sK = smem + n_start / kBlockN % kStages * kStageHalfs;
    const half* sV = sK + kBlockN * kStride;
    const float* s_k_scale = reinterpret_cast<const float*>(sV + kBlockN * kStride);
    // This lane's columns are 8 d + n.
    const float* lane_v_scale =
        reinterpret_cast<const float*>(sV + 2 * kHeadDim) + n / 4 * (kStride / 2) + n % 4;
    // This lane's first row for ldmatrix, which loads two matrices of hi and two of lo: 8 keys x 16
    // columns of K, 16 keys x 8 columns of V.
    const half* matrices_k =
        sK + lane_id % 8 * kStride + lane_id / 8 % 2 * 8 + lane_id / 16 * kHeadDim;
    const half* matrices_v = sV + lane_id % 16 * kStride + lane_id / 16 * kHeadDim;

    // S = Q K^T
    float rS[kFragments][kBlockN / 8][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint4 hiQ[kFragments], loQ[kFragments];
#pragma unroll
      for (int t = 0; t < kFragments; ++t) {
        hiQ[t] = sQ[(t * kSteps + s) * 64];
        loQ[t] = sQ[(t * kSteps + s) * 64 + 32];
      }
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
        unsigned rK[4];
        ptx::load_matrices(rK, matrices_k + 8 * j * kStride + 16 * s);
#pragma unroll
        for (int t = 0; t < kFragments; ++t) {
          multiply(rS[t][j], loQ[t], rK[0], rK[1]);
          multiply(rS[t][j], hiQ[t], rK[2], rK[3]);
          multiply(rS[t][j], hiQ[t], rK[0], rK[1]);
        }
      }
    }

    // Scores, in units of log(2)
    float new_max[kFragments][2];
#pragma unroll
    for (int t = 0; t < kFragments; ++t) {
      for (int r = 0; r < 2; ++r) new_max[t][r] = row_max[t][r];
    }
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      const float2 k_scale = load2(s_k_scale, 8 * j + n);
#pragma unroll
      for (int t = 0; t < kFragments; ++t) {
        for (int i = 0; i < 4; ++i) {
          const int r = i / 2, c = i % 2;
          const int row = m + 16 * t + 8 * r;
          const int visible = (is_causal ? min(row + 1, seqlen) : seqlen) - n_start;
          float& score = rS[t][j][i];
          score = q_scale[t][r] * (score * (c ? k_scale.y : k_scale.x));
          if (kIsMasked && 8 * j + n + c >= visible) score = -INFINITY;
          new_max[t][r] = fmaxf(new_max[t][r], score);
        }
      }
    }
    float row_scale[kFragments][2];
#pragma unroll
    for (int t = 0; t < kFragments; ++t) {
      for (int r = 0; r < 2; ++r) {
        new_max[t][r] = reduce_max(new_max[t][r]);
        row_scale[t][r] = exp2f(row_max[t][r] - new_max[t][r]);
        row_max[t][r] = new_max[t][r];
        row_sum[t][r] *= row_scale[t][r];
      }
    }

    // P = 2^(S - row_max), and the running row statistics
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
      for (int t = 0; t < kFragments; ++t) {
        for (int i = 0; i < 4; ++i) {
          rS[t][j][i] = exp2f(rS[t][j][i] - row_max[t][i / 2]);
          row_sum[t][i / 2] += rS[t][j][i];
        }
      }
    }

    // O += P V. A column's scale would make rows depend on keys that they do not see.
    if (kIsMasked) {
#pragma unroll
      for (int t = 0; t < kFragments; ++t) {
        const int m_end = m_warp + 16 * (t + 1);
        add_product_tf32<kHeadDim + kPad / 2>(flat(rO[t]), flat(rS[t]),
                                              make_float2(row_scale[t][0], row_scale[t][1]),
                                              reinterpret_cast<const float*>(sV),
                                              (is_causal ? min(m_end, seqlen) : seqlen) - n_start);
      }
      return;
    }
    unsigned hiP[kFragments][kBlockN / 16][4], loP[kFragments][kBlockN / 16][4];
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
      for (int t = 0; t < kFragments; ++t) {
        for (int r = 0; r < 2; ++r) {
          const int i = j % 2 * 2 + r;
          split(rS[t][j][2 * r] * kScaleP, rS[t][j][2 * r + 1] * kScaleP, hiP[t][j / 2][i],
                loP[t][j / 2][i]);
        }
      }
    }
    // Small products first
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d) {
      float rPV[kFragments][4] = {};
      unsigned rV[kBlockN / 16][4];
#pragma unroll
      for (int j = 0; j < kBlockN / 16; ++j) {
        ptx::load_matrices_transposed(rV[j], matrices_v + 16 * j * kStride + 8 * d);
#pragma unroll
        for (int t = 0; t < kFragments; ++t) {
          ptx::mma<false>(rPV[t], loP[t][j], {rV[j][0], rV[j][1]});
          ptx::mma<false>(rPV[t], hiP[t][j], {rV[j][2], rV[j][3]});
        }
      }
#pragma unroll
      for (int j = 0; j < kBlockN / 16; ++j) {
#pragma unroll
        for (int t = 0; t < kFragments; ++t) {
          ptx::mma<false>(rPV[t], hiP[t][j], {rV[j][0], rV[j][1]});
        }
      }
      const float2 v_scale = load2(lane_v_scale, d * kStride);
#pragma unroll
      for (int t = 0; t < kFragments; ++t) {
        for (int i = 0; i < 4; ++i) {
          float& x = rO[t][d][i];
          x = fmaf(x, row_scale[t][i / 2], rPV[t][i] * (i % 2 ? v_scale.y : v_scale.x));
        }
      }
    }
  };

  copy_keys(n_begin);
  __pipeline_commit();
  for (int n_start = n_begin; n_start < n_end; n_start += kBlockN) {
    __pipeline_wait_prior(0);
    __syncthreads();
    if (n_start + kBlockN < n_end) copy_keys(n_start + kBlockN);
    __pipeline_commit();
    if (n_start + kBlockN <= n_seen) {
      compute(n_start, std::false_type());
    } else if (n_start < n_warp_end) {
      compute(n_start, std::true_type());
    }
  }

  const bool is_whole = n_rows <= parts.keys;
#pragma unroll
  for (int t = 0; t < kFragments; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = reduce_sum(row_sum[t][r]);
      const float scale = 1.0f / (is_whole ? sum : 1.0f);
      const int row = m + 16 * t + 8 * r;
      const int64_t of_part = (int64_t{blockIdx.z} * gridDim.x + blockIdx.x) * seqlen + row;
      float* to = is_whole ? gO + row * row_stride : parts.o + of_part * kHeadDim;
      if (row < seqlen) {
        for (int d = 0; d < kHeadDim / 8; ++d) {
          store2(to, 8 * d + n, rO[t][d][2 * r] * scale, rO[t][d][2 * r + 1] * scale);
        }
        if (!is_whole && n == 0) parts.statistics[of_part] = make_float2(row_max[t][r], sum);
      }
    }
  }
}

// Joins the parts of rows that have several. A thread has four columns of a row.
template <int kBlockM, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    join_kernel(Parts parts, float* __restrict__ o, int seqlen, int heads, int num_heads,
                bool is_causal) {
  const int64_t head_row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / (kHeadDim / 4);
  const int d = threadIdx.x % (kHeadDim / 4) * 4;
  const int head = head_row / seqlen;
  const int row = head_row % seqlen;
  const int n_rows = is_causal ? min((row / kBlockM + 1) * kBlockM, seqlen) : seqlen;
  if (head >= heads || n_rows <= parts.keys) return;
  float row_max = -INFINITY, row_sum = 0.0f;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int part = 0; part * parts.keys < n_rows; ++part) {
    const int64_t of_part = int64_t{part} * heads * seqlen + head_row;
    const float2 statistics = parts.statistics[of_part];
    const float4 x = load4(parts.o + of_part * kHeadDim, d);
    const float new_max = fmaxf(row_max, statistics.x);
    const float before = exp2f(row_max - new_max);
    const float scale = exp2f(statistics.x - new_max);
    row_max = new_max;
    row_sum = row_sum * before + statistics.y * scale;
    sum.x = sum.x * before + x.x * scale;
    sum.y = sum.y * before + x.y * scale;
    sum.z = sum.z * before + x.z * scale;
    sum.w = sum.w * before + x.w * scale;
  }
  const int64_t at = (int64_t{head / num_heads} * seqlen + row) * num_heads + head % num_heads;
  const float scale = 1.0f / row_sum;
  store2(o + at * kHeadDim, d, sum.x * scale, sum.y * scale);
  store2(o + at * kHeadDim, d + 2, sum.z * scale, sum.w * scale);
}

struct Plan {
  int fragments;
  int padded;  // keys per head
  int keys;    // per part
  int parts;
};

template <int kFragments, int kHeadDim>
constexpr size_t kSmemBytes =
    kStages * kStageBytes<kKeys, kHeadDim> + 4 * 16 * kFragments * kWarps * kHeadDim;

template <int kFragments, int kHeadDim>
cudaError_t count_resident(int* blocks) {
  return resident_blocks(attention_kernel<kFragments, kKeys, kHeadDim>, kThreads,
                         kSmemBytes<kFragments, kHeadDim>, blocks);
}

cudaError_t make_plan(const Params& params, Plan* plan) {
  int device = 0, multiprocessors = 0;
  int resident[2] = {};  // with one fragment and with two
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = params.head_dim == 32   ? count_resident<1, 32>(&resident[0])
            : params.head_dim == 64 ? count_resident<1, 64>(&resident[0])
                                    : count_resident<1, 128>(&resident[0]);
  if (error == cudaSuccess && params.head_dim <= 64)
    error = params.head_dim == 32 ? count_resident<2, 32>(&resident[1])
                                  : count_resident<2, 64>(&resident[1]);
  if (error != cudaSuccess) return error;
  constexpr int64_t kUnit = 128;
  const auto blocks_at_once = [&](int fragments) {
    return int64_t{multiprocessors} * std::min(resident[fragments - 1], kMostResident);
  };
  const int64_t heads = int64_t{params.batch} * params.num_heads;
  const bool is_large =
      params.head_dim <= 64 && heads * ceil_div(params.seqlen, 32 * kWarps) >= blocks_at_once(2);
  plan->fragments = is_large ? 2 : 1;
  const int64_t at_once = blocks_at_once(plan->fragments);
  const int rows = 16 * kWarps * plan->fragments;  // rows per block
  const int64_t blocks = ceil_div(params.seqlen, rows);
  const int64_t keys = params.is_causal ? (blocks + 1) * rows / 2 : params.seqlen;  // per block
  const int64_t share = ceil_div(heads * blocks * keys, at_once);
  const int64_t units = std::min(ceil_div(share, kUnit), ceil_div<int64_t>(params.seqlen, kUnit));
  plan->padded = ceil_div(params.seqlen, kKeys) * kKeys;
  plan->keys = units * kUnit;
  plan->parts = ceil_div(params.seqlen, plan->keys);
  return cudaSuccess;
}

int64_t scratch_floats(const Params& params) {
  Plan plan;
  if (make_plan(params, &plan) != cudaSuccess) return 0;  // launch() returns the error
  const int64_t heads = int64_t{params.batch} * params.num_heads;
  const int64_t part_rows = plan.parts > 1 ? heads * params.seqlen * plan.parts : 0;
  const int64_t keys = heads * plan.padded;
  return keys * (2 * params.head_dim + 1) + keys / kKeys * params.head_dim +
         part_rows * (params.head_dim + 2);
}

template <int kFragments, int kHeadDim>
cudaError_t launch_rows(const Params& params, const Plan& plan, cudaStream_t stream) {
  constexpr int kBlockM = 16 * kFragments * kWarps;
  constexpr int kBlockN = kKeys;
  const int heads = params.batch * params.num_heads;
  const int64_t keys = int64_t{heads} * plan.padded;
  const int64_t rows = int64_t{heads} * params.seqlen;
  float* scales = params.scratch + keys * 2 * kHeadDim;
  const Split kv = {reinterpret_cast<half*>(params.scratch), scales, scales + keys, plan.padded};
  float* part_o = scales + keys + keys / kBlockN * kHeadDim;
  const Parts parts = {part_o, reinterpret_cast<float2*>(part_o + rows * plan.parts * kHeadDim),
                       plan.keys};
  const auto v = static_cast<const float*>(params.v);
  const auto o = static_cast<float*>(params.o);
  cudaError_t error =
      launch_kernel(split_kernel<kBlockN, kHeadDim>, dim3(keys / kBlockN, 2), dim3(kThreads), 0,
                    stream, static_cast<const float*>(params.k), v, kv, params.k_strides,
                    params.v_strides, params.seqlen, params.num_heads);
  if (error != cudaSuccess) return error;
  const dim3 grid(heads, ceil_div(params.seqlen, kBlockM), plan.parts);
  error =
      launch_kernel(attention_kernel<kFragments, kBlockN, kHeadDim>, grid, dim3(kThreads),
                    kSmemBytes<kFragments, kHeadDim>, stream, static_cast<const float*>(params.q),
                    v, kv, parts, o, params.q_strides, params.v_strides, params.seqlen,
                    params.num_heads, params.softmax_scale, params.is_causal);
  if (error != cudaSuccess || plan.parts == 1) return error;
  return launch_kernel(join_kernel<kBlockM, kHeadDim>,
                       dim3(ceil_div<int64_t>(rows * (kHeadDim / 4), kThreads)), dim3(kThreads), 0,
                       stream, parts, o, params.seqlen, heads, params.num_heads, params.is_causal);
}

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  Plan plan;
  const cudaError_t error = make_plan(params, &plan);
  if (error != cudaSuccess) return error;
  if constexpr (kHeadDim <= 64) {
    if (plan.fragments == 2) return launch_rows<2, kHeadDim>(params, plan, stream);
  }
  return launch_rows<1, kHeadDim>(params, plan, stream);
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
