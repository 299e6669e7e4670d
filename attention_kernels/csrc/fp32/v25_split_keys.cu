// v25 - split the keys when there are few blocks
//
// Change: a block has only a part of its rows' keys: at most the total work divided by the number
//         of blocks that the GPU runs at once. Where rows have several parts, each part stores O
//         before the division, the maximum and the sum, and a last kernel joins them.
// Why:    one batch entry with 12 heads and 512 rows is only 96 blocks, and the mask gives the last
//         rows eight times as many keys as the first.
// Cost:   where rows have parts: another launch, and scratch memory for their O.
// Tile:   kBlockM x kBlockN = 64 x 32, block 128
// Layout: strided
// Needs:  sm_80
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: no change where there are many blocks. At 512 rows the three launches take most of the
//         time.

#include <cuda_pipeline.h>

#include <algorithm>
#include <type_traits>

#include "fp32/three_products.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16 * kWarps;  // rows per block
constexpr int kKeys = 32;           // Split is padded to a multiple of this: whole tiles
constexpr int kStages = 2;          // tiles in shared memory: one in use, the others in flight
constexpr int kPad = 8;             // padding, in halves

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

// Blocks per multiprocessor, as far as registers allow.
constexpr int most_blocks(int head_dim) { return head_dim > 64 ? 2 : 3; }

template <int kBlockN, int kHeadDim>
constexpr int kStageBytes =
    sizeof(half) * 2 * kBlockN * (2 * kHeadDim + kPad) + sizeof(float) * kBlockN;

template <int kBlockM, int kBlockN, int kHeadDim>
__global__ void __launch_bounds__(kThreads, most_blocks(kHeadDim))
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v, Split kv,
                     Parts parts, float* __restrict__ o, Strides q_strides, Strides v_strides,
                     int seqlen, int num_heads, float softmax_scale, bool is_causal) {
  static_assert(kBlockM == 16 * kWarps, "a warp has the 16 rows of a fragment");
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

  // A lane has rows m (r = 0) and m + 8 (r = 1), and columns n and n + 1 of every 8.
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const int m_warp = m_start + 16 * warp_id;
  const int m = m_warp + lane_id / 4;
  const int n = 2 * (lane_id % 4);
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {};  // this lane's partial sum
  float rO[kHeadDim / 8][4] = {};

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

  unsigned hiQ[kHeadDim / 16][4], loQ[kHeadDim / 16][4];
  float q_scale[2];  // scales scores to units of log(2)
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

  // No query of this warp sees any key from n_warp_end on.
  const int n_warp_end = is_causal ? min(m_warp + 16, seqlen) : seqlen;
  const auto compute = [&](int n_start, auto is_masked) {
    constexpr bool kIsMasked = decltype(is_masked)::value;
    const half* sK = smem + n_start / kBlockN % kStages * kStageHalfs;
    const half* sV = sK + kBlockN * kStride;
    const float* s_k_scale = reinterpret_cast<const float*>(sV + kBlockN * kStride);
    // This lane's columns are 8 d + n.
    const float* lane_v_scale =
        reinterpret_cast<const float*>(sV + 2 * kHeadDim) + n / 4 * (kStride / 2) + n % 4;
    // This lane's first row for ldmatrix, which loads 8 keys x 32 columns of K, 16 x 16 of V.
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

    // Scores, in units of log(2)
    float new_max[2] = {row_max[0], row_max[1]};
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      const float2 k_scale = load2(s_k_scale, 8 * j + n);
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2, c = i % 2;
        const int visible = (is_causal ? min(m + 8 * r + 1, seqlen) : seqlen) - n_start;
        float& score = rS[j][i];
        score = q_scale[r] * (score * (c ? k_scale.y : k_scale.x));
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

    // P = 2^(S - row_max), and the running row statistics
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      for (int i = 0; i < 4; ++i) {
        rS[j][i] = exp2f(rS[j][i] - row_max[i / 2]);
        row_sum[i / 2] += rS[j][i];
      }
    }

    // O += P V. A column's scale would make rows depend on keys that they do not see.
    if (kIsMasked) {
      add_product_tf32<kHeadDim + kPad / 2>(
          flat(rO), flat(rS), make_float2(row_scale[0], row_scale[1]),
          reinterpret_cast<const float*>(sV), n_warp_end - n_start);
      return;
    }
    unsigned hiP[kBlockN / 16][4], loP[kBlockN / 16][4];
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      for (int r = 0; r < 2; ++r) {
        const int i = j % 2 * 2 + r;
        split(rS[j][2 * r] * kScaleP, rS[j][2 * r + 1] * kScaleP, hiP[j / 2][i], loP[j / 2][i]);
      }
    }
    // Small products first
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      float rPV[2][4] = {};
      unsigned hiV[kBlockN / 16][4], loV[4];
#pragma unroll
      for (int j = 0; j < kBlockN / 16; ++j) {
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
        for (int c = 0; c < 2; ++c) {
          ptx::mma<false>(rPV[c], hiP[j], {hiV[j][2 * c], hiV[j][2 * c + 1]});
        }
      }
      for (int c = 0; c < 2; ++c) {
        const float2 v_scale = load2(lane_v_scale, (d / 8 + c) * kStride);
        for (int i = 0; i < 4; ++i) {
          float& x = rO[d / 8 + c][i];
          x = fmaf(x, row_scale[i / 2], rPV[c][i] * (i % 2 ? v_scale.y : v_scale.x));
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
  for (int r = 0; r < 2; ++r) {
    const float sum = reduce_sum(row_sum[r]);
    const float scale = 1.0f / (is_whole ? sum : 1.0f);
    const int row = m + 8 * r;
    const int64_t of_part = (int64_t{blockIdx.z} * gridDim.x + blockIdx.x) * seqlen + row;
    float* to = is_whole ? gO + row * row_stride : parts.o + of_part * kHeadDim;
    if (row < seqlen) {
      for (int d = 0; d < kHeadDim / 8; ++d) {
        store2(to, 8 * d + n, rO[d][2 * r] * scale, rO[d][2 * r + 1] * scale);
      }
      if (!is_whole && n == 0) parts.statistics[of_part] = make_float2(row_max[r], sum);
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
  int padded;  // keys per head
  int keys;    // per part
  int parts;
};

template <int kHeadDim>
cudaError_t count_resident(int* blocks) {
  return resident_blocks(attention_kernel<kRows, kKeys, kHeadDim>, kThreads,
                         kStages * kStageBytes<kKeys, kHeadDim>, blocks);
}

cudaError_t make_plan(const Params& params, Plan* plan) {
  int device = 0, multiprocessors = 0, resident = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = params.head_dim == 32   ? count_resident<32>(&resident)
            : params.head_dim == 64 ? count_resident<64>(&resident)
                                    : count_resident<128>(&resident);
  if (error != cudaSuccess) return error;
  constexpr int64_t kUnit = 128;
  const int64_t blocks = ceil_div(params.seqlen, kRows);
  const int64_t keys = params.is_causal ? (blocks + 1) * kRows / 2 : params.seqlen;  // per block
  const int64_t at_once =
      int64_t{multiprocessors} * std::min(resident, most_blocks(params.head_dim));
  const int64_t share = ceil_div(params.batch * params.num_heads * blocks * keys, at_once);
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

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  constexpr int kBlockM = kRows;
  constexpr int kBlockN = kKeys;
  Plan plan;
  cudaError_t error = make_plan(params, &plan);
  if (error != cudaSuccess) return error;
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
  error = launch_kernel(split_kernel<kBlockN, kHeadDim>, dim3(keys / kBlockN, 2), dim3(kThreads), 0,
                        stream, static_cast<const float*>(params.k), v, kv, params.k_strides,
                        params.v_strides, params.seqlen, params.num_heads);
  if (error != cudaSuccess) return error;
  const dim3 grid(heads, ceil_div(params.seqlen, kBlockM), plan.parts);
  error = launch_kernel(attention_kernel<kBlockM, kBlockN, kHeadDim>, grid, dim3(kThreads),
                        kStages * kStageBytes<kBlockN, kHeadDim>, stream,
                        static_cast<const float*>(params.q), v, kv, parts, o, params.q_strides,
                        params.v_strides, params.seqlen, params.num_heads, params.softmax_scale,
                        params.is_causal);
  if (error != cudaSuccess || plan.parts == 1) return error;
  return launch_kernel(join_kernel<kBlockM, kHeadDim>,
                       dim3(ceil_div<int64_t>(rows * (kHeadDim / 4), kThreads)), dim3(kThreads), 0,
                       stream, parts, o, params.seqlen, heads, params.num_heads, params.is_causal);
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
