// Float32 products as three products in float16: each number is split into a sum hi + lo of two, and
// lo hi, hi lo and hi hi are added. Tensor cores truncate their sums, so a sum never stays there for
// longer than a tile. Float16 has few exponents, so each row of Q and K, and each column of a tile of
// V, is first scaled by a power of two, and so is P.
//
// Versions 21 to 27 share the first part, 28 to 30 and 34 to 41 all. Most of it is what makes their
// results right, and none of them is faster than another for it: they differ in when they copy,
// multiply and wait, which is in their files. A version that does something of this in another way
// defines a function of its own. What makes a version faster is here only if later ones share it: the
// turns of 29, the parts of 30, the product of all columns at once of 36 and the softmax of 38.

#pragma once

#include <cuda_fp16.h>

#include "wgmma.cuh"

namespace attention {

constexpr int kTop = 14;     // exponent to which the largest number of a row or column is scaled
constexpr int kLeast = -97;  // the smallest exponent that is scaled for
constexpr int kMost = 127;
constexpr float kScaleP = 0x1p15f;

inline __device__ float4 load4(const float* row, unsigned d) {
  return reinterpret_cast<const float4*>(row)[d / 4];
}
inline __device__ float2 load2(const float* row, unsigned d) {
  return reinterpret_cast<const float2*>(row)[d / 2];
}
inline __device__ void store4(float* row, unsigned d, float4 x) {
  reinterpret_cast<float4*>(row)[d / 4] = x;
}
inline __device__ void store2(float* row, unsigned d, float x, float y) {
  reinterpret_cast<float2*>(row)[d / 2] = make_float2(x, y);
}

inline __device__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// Returns the exponent of a row's or a column's largest number.
inline __device__ int exponent_of(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return largest == 0.0f ? 0 : min(max(exponent, kLeast), kMost);
}

// Splits x and y into sums hi + lo; a word holds a pair of halves.
inline __device__ void split(float x, float y, unsigned& hi, unsigned& lo) {
  const half2 hi2 = __floats2half2_rn(x, y);
  const float2 back = __half22float2(hi2);
  const half2 lo2 = __floats2half2_rn(x - back.x, y - back.y);
  hi = *reinterpret_cast<const unsigned*>(&hi2);
  lo = *reinterpret_cast<const unsigned*>(&lo2);
}

// Splits four numbers, each times its scale.
inline __device__ void split(float4 x, float4 scale, uint2& hi, uint2& lo) {
  split(x.x * scale.x, x.y * scale.y, hi.x, lo.x);
  split(x.z * scale.z, x.w * scale.w, hi.y, lo.y);
}

// Splits x into TF32 numbers, one per word; TF32 ignores the low 13 bits of lo.
inline __device__ void split_tf32(float x, unsigned& hi, unsigned& lo) {
  hi = (__float_as_uint(x) + 0x1000) & ~0x1fffu;
  lo = __float_as_uint(x - __uint_as_float(hi));
}

inline __device__ float largest_of(float largest, float2 x) {
  return fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
}
inline __device__ float4 largest_of(float4 x, float4 y) {
  return make_float4(fmaxf(fabsf(x.x), fabsf(y.x)), fmaxf(fabsf(x.y), fabsf(y.y)),
                     fmaxf(fabsf(x.z), fabsf(y.z)), fmaxf(fabsf(x.w), fabsf(y.w)));
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

// Returns the elements of fragments of mma.sync one after the other.
template <int kCount>
inline __device__ float (&flat(float (&fragments)[kCount][4]))[4 * kCount] {
  return reinterpret_cast<float (&)[4 * kCount]>(fragments);
}

// O = row_scale O + P V in TF32, which has float32's exponents, with V not scaled, in rows of kStride
// floats. P = 0 times any finite V is 0, however large it is. The lane's warp sees the first `keys`
// keys. P is split again for every kColumnsAtOnce columns.
template <int kStride, int kColumnsAtOnce = 16, int kCount, int kScores>
inline __device__ void add_product_tf32(float (&rO)[kCount], const float (&rP)[kScores],
                                        float2 row_scale, const float* s_v, int keys) {
  const int lane_id = threadIdx.x % 32;
  const float* lane_v = s_v + 2 * (lane_id % 4) * kStride + lane_id / 4;
#pragma unroll
  for (int first = 0; first < 2 * kCount; first += kColumnsAtOnce) {
    float small[kColumnsAtOnce / 8][4] = {}, large[kColumnsAtOnce / 8][4] = {};
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      if (8 * j >= keys) break;
      unsigned hiP[4], loP[4];
      for (int i = 0; i < 4; ++i) {
        split_tf32(rP[4 * j + i % 2 * 2 + i / 2], hiP[i], loP[i]);
      }
#pragma unroll
      for (int d = 0; d < kColumnsAtOnce / 8; ++d) {
        unsigned hiV[2], loV[2];
        for (int i = 0; i < 2; ++i) {  // halved: rounding up could overflow
          split_tf32(0.5f * lane_v[(8 * j + i) * kStride + first + 8 * d], hiV[i], loV[i]);
        }
        ptx::mma_tf32(small[d], loP, hiV);
        ptx::mma_tf32(small[d], hiP, loV);
        ptx::mma_tf32(large[d], hiP, hiV);
      }
    }
    for (int d = 0; d < kColumnsAtOnce / 8; ++d) {
      for (int i = 0; i < 4; ++i) {
        float& x = rO[first / 2 + 4 * d + i];
        x = fmaf(x, i < 2 ? row_scale.x : row_scale.y, 2.0f * (small[d][i] + large[d][i]));
      }
    }
  }
}

// ---- K and V, split into tiles of kBlockN keys --------------------------------------------------

// A tile's hi and lo are operands. Their 2 * kHeadDim columns, first those of hi, are in blocks of
// kColumns columns, one after the other. A block is 64 rows of 128 bytes, in which the 16-byte chunk c
// of row r lies where chunk c ^ (r % 8) would: so wgmma reads it.
constexpr int kBlockN = 64;
constexpr int kColumns = 64;
constexpr int kRowBytes = sizeof(half) * kColumns;
constexpr int kColumnsBytes = kBlockN * kRowBytes;

template <int kHeadDim>
constexpr int kOperandBytes = kHeadDim * kColumnsBytes / kColumns;

// Returns the place of column d of row r of hi; a column of lo is kHeadDim further on.
inline __device__ constexpr int place_of(int r, int d) {
  const int block = d / kColumns * kColumnsBytes;
  return block + (r * kRowBytes + (d % kColumns / 8 ^ r % 8) * 16 + d % 8 * 2);
}

// The sum over the columns of Q and K may have any order that both share. Of every kStep columns of
// operand A, lane t of the four that share a row holds 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. There it has
// columns 4 t to 4 t + 3 of Q, so that they are one load, and K is stored in the same order. Returns
// where column d of K is.
constexpr int kStep = 16;  // columns of A, rows of B, in one product
inline __device__ constexpr int k_column(int d) {
  return d / kStep * kStep + d % 4 / 2 * 8 + d % kStep / 4 * 2 + d % 2;
}

// Stores hi and lo of row r, from column d on as many as T holds.
template <int kHeadDim, typename T>
inline __device__ void store_split(unsigned char* operand, int r, int d, T hi, T lo) {
  unsigned char* to = operand + place_of(r, d);
  *reinterpret_cast<T*>(to) = hi;
  to = kHeadDim < kColumns ? operand + place_of(r, d + kHeadDim) : to + kOperandBytes<kHeadDim>;
  *reinterpret_cast<T*>(to) = lo;
}

// Four columns of every kApart-th row of a tile: what one of kThreads threads splits
template <int kHeadDim, int kThreads>
struct TileRows {
  static constexpr int kApart = 4 * kThreads / kHeadDim;
  static constexpr int kCount = kBlockN / kApart;
  float4 x[kCount];
};

// Loads the rows of a tile that begins with key n. g_rows is its first row; rows past the end are zero.
template <int kHeadDim, int kThreads>
inline __device__ void load_rows(TileRows<kHeadDim, kThreads>& rows, const float* g_rows,
                                 int64_t g_stride, int n, int seqlen) {
#pragma unroll
  for (int i = 0; i < rows.kCount; ++i) {
    const int r = i * rows.kApart + 4 * threadIdx.x / kHeadDim;
    rows.x[i] = n + r < seqlen ? load4(g_rows + r * g_stride, 4 * threadIdx.x % kHeadDim)
                               : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// A tile of K or V is ordinary if the largest number of each row, or column, has an exponent from
// kOrdinary - 15 to kOrdinary. Then one scale, 2^(kTop - kOrdinary), serves all: what lo cannot resolve
// is 2^-24 times the largest or less. Versions 40 and 41 do not use its scales, and the first is 0 to
// tell.
constexpr int kOrdinary = 8;
inline __device__ bool is_ordinary(int exponent) {
  return exponent >= kOrdinary - 15 && exponent <= kOrdinary;
}

// Returns the exponent of a row of which each lane of a group has four numbers.
template <int kHeadDim>
inline __device__ int exponent_of_row(float4 x) {
  float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
  for (int offset = kHeadDim / 8; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
  }
  return exponent_of(largest);
}

// Splits four columns of row r of K, from d on.
template <int kHeadDim>
inline __device__ void split_k(unsigned char* operand, int r, int d, float4 x, float scale) {
  uint2 hi, lo;
  split(x, make_float4(scale, scale, scale, scale), hi, lo);
  store_split<kHeadDim>(operand, r, k_column(d), hi.x, lo.x);
  store_split<kHeadDim>(operand, r, k_column(d + 2), hi.y, lo.y);
}

// Scales and splits rows of K. The scales undo those of rows.
template <int kHeadDim, int kThreads>
inline __device__ void split_k(unsigned char* operand, float* scales,
                               const TileRows<kHeadDim, kThreads>& rows) {
  const int d = 4 * threadIdx.x % kHeadDim;
#pragma unroll
  for (int i = 0; i < rows.kCount; ++i) {
    const int r = i * rows.kApart + 4 * threadIdx.x / kHeadDim;
    const int exponent = exponent_of_row<kHeadDim>(rows.x[i]);
    split_k<kHeadDim>(operand, r, d, rows.x[i], power_of_two(kTop - exponent));
    if (d == 0) scales[r] = power_of_two(exponent - kTop);
  }
}

// The same, but what undoes an ordinary tile's scale is left to Q's.
template <int kHeadDim, int kThreads>
inline __device__ void split_ordinary_k(unsigned char* operand, float* scales,
                                        const TileRows<kHeadDim, kThreads>& rows) {
  const int d = 4 * threadIdx.x % kHeadDim;
  int exponents[rows.kCount];
  bool all = true;
#pragma unroll
  for (int i = 0; i < rows.kCount; ++i) {
    exponents[i] = exponent_of_row<kHeadDim>(rows.x[i]);
    all = all && is_ordinary(exponents[i]);
  }
  all = __syncthreads_and(all);
#pragma unroll
  for (int i = 0; i < rows.kCount; ++i) {
    const int r = i * rows.kApart + 4 * threadIdx.x / kHeadDim;
    const int exponent = all ? kOrdinary : exponents[i];
    split_k<kHeadDim>(operand, r, d, rows.x[i], power_of_two(kTop - exponent));
    if (d == 0) scales[r] = all ? 0.0f : power_of_two(exponent - kOrdinary);
  }
}

// Scales and splits rows of V. The scales undo those of columns and of P.
template <int kHeadDim, int kThreads, bool kFindsOrdinary = false>
inline __device__ void split_v(unsigned char* operand, float* scales,
                               const TileRows<kHeadDim, kThreads>& rows) {
  __shared__ float4 s_largest[kThreads / 32][kHeadDim / 4];
  const int d = 4 * threadIdx.x % kHeadDim;
  float4 largest = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (const float4 x : rows.x) largest = largest_of(largest, x);
#pragma unroll
  for (int offset = kHeadDim / 4; offset < 32; offset *= 2) {
    largest = largest_of(largest, make_float4(__shfl_xor_sync(0xffffffff, largest.x, offset),
                                              __shfl_xor_sync(0xffffffff, largest.y, offset),
                                              __shfl_xor_sync(0xffffffff, largest.z, offset),
                                              __shfl_xor_sync(0xffffffff, largest.w, offset)));
  }
  if (threadIdx.x % 32 < kHeadDim / 4) s_largest[threadIdx.x / 32][d / 4] = largest;
  __syncthreads();
  for (const auto& warp : s_largest) largest = largest_of(largest, warp[d / 4]);
  int4 exponent = make_int4(exponent_of(largest.x), exponent_of(largest.y), exponent_of(largest.z),
                            exponent_of(largest.w));
  bool all = false;
  if constexpr (kFindsOrdinary) {  // a warp has all columns
    all = __all_sync(0xffffffff, is_ordinary(exponent.x) && is_ordinary(exponent.y) &&
                                     is_ordinary(exponent.z) && is_ordinary(exponent.w));
    if (all) exponent = make_int4(kOrdinary, kOrdinary, kOrdinary, kOrdinary);
  }
  const float4 scale =
      make_float4(power_of_two(kTop - exponent.x), power_of_two(kTop - exponent.y),
                  power_of_two(kTop - exponent.z), power_of_two(kTop - exponent.w));
#pragma unroll
  for (int i = 0; i < rows.kCount; ++i) {
    const int r = i * rows.kApart + 4 * threadIdx.x / kHeadDim;
    uint2 hi, lo;
    split(rows.x[i], scale, hi, lo);
    store_split<kHeadDim>(operand, r, d, hi, lo);
  }
  if (4 * threadIdx.x / kHeadDim != 0) return;
  const auto undo = [all](int exponent) {
    return all ? 0.0f : power_of_two(exponent - kTop) / kScaleP;
  };
  store4(scales, d,
         make_float4(undo(exponent.x), undo(exponent.y), undo(exponent.z), undo(exponent.w)));
}

// Splits a block's tile of a head: of K if blockIdx.y is 0, of V if it is 1. The first kKBytes of a tile
// are hi, lo and the scales of K, the rest those of V. Rows past the end are zero.
template <int kHeadDim, int kThreads, int kKBytes, int kTileBytes, bool kFindsOrdinary = false>
inline __device__ void split_tile(unsigned char* tiles, const float* k, const float* v,
                                  Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  const bool is_v = blockIdx.y == 1;
  const Strides strides = is_v ? v_strides : k_strides;
  const int tiles_per_head = (seqlen + kBlockN - 1) / kBlockN;
  const int n_start = blockIdx.x % tiles_per_head * kBlockN;
  const int head = blockIdx.x / tiles_per_head;
  const float* g_rows = (is_v ? v : k) + head / num_heads * strides.batch +
                        head % num_heads * strides.head + n_start * strides.seqlen;
  TileRows<kHeadDim, kThreads> rows;
  load_rows(rows, g_rows, strides.seqlen, n_start, seqlen);
  unsigned char* operand = tiles + int64_t{blockIdx.x} * kTileBytes + (is_v ? kKBytes : 0);
  float* scales = reinterpret_cast<float*>(operand + 2 * kOperandBytes<kHeadDim>);
  if (is_v) {
    split_v<kHeadDim, kThreads, kFindsOrdinary>(operand, scales, rows);
  } else if constexpr (kFindsOrdinary) {
    split_ordinary_k(operand, scales, rows);
  } else {
    split_k(operand, scales, rows);
  }
}

// ---- Rows of queries ----------------------------------------------------------------------------

// Lane l of warp w of a warpgroup holds of S and O rows 16 w + l / 4 (r = 0) and 8 further on (r = 1),
// at columns 8 j + 2 (l % 4) and the next: elements 4 j + 2 r and 4 j + 2 r + 1.

// Q or P, hi and lo, as operand A of kCount products; Split is that of 64 columns.
constexpr int kSteps = 64 / kStep;
template <int kCount>
struct SplitOf {
  unsigned hi[kCount][4], lo[kCount][4];
};
using Split = SplitOf<kSteps>;

// Scales and splits a lane's pairs of row i of Q, 0 or 1, whose largest number among them is given.
// Returns the exponent of what undoes the scale.
template <int kCount>
inline __device__ int split_row(SplitOf<kCount>& rQ, int i, const float2 (&pairs)[2 * kCount],
                                float largest) {
  const int exponent = exponent_of(reduce_max(largest));
  const float scale = power_of_two(kTop - exponent);
  for (int j = 0; j < 2 * kCount; ++j) {
    const int at = j % 2 * 2 + i;
    split(pairs[j].x * scale, pairs[j].y * scale, rQ.hi[j / 2][at], rQ.lo[j / 2][at]);
  }
  return exponent - kTop;
}

// The same, but returns what scales the row's scores to units of log(2).
template <int kCount>
inline __device__ float split_q(SplitOf<kCount>& rQ, int i, const float2 (&pairs)[2 * kCount],
                                float largest, float softmax_scale) {
  return softmax_scale * 1.4426950408889634f * power_of_two(split_row(rQ, i, pairs, largest));
}

// Loads a lane's pairs of row m of Q, in the order of k_column(); a row before the first or past the end
// is zero.
template <int kCount>
inline __device__ void load_q(float2 (&pairs)[kCount], const float* gQ, int64_t g_stride, int m,
                              int seqlen) {
#pragma unroll
  for (int j = 0; j < kCount; j += 2) {
    const float4 x = m >= 0 && m < seqlen ? load4(gQ + m * g_stride, 8 * j + 4 * (threadIdx.x % 4))
                                          : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    pairs[j] = make_float2(x.x, x.y);
    pairs[j + 1] = make_float2(x.z, x.w);
  }
}

// Loads, scales and splits rows m and m + 8 of Q.
template <int kCount>
inline __device__ void load_q(SplitOf<kCount>& rQ, float (&scales)[2], const float* gQ,
                              int64_t g_stride, int m, int seqlen, float softmax_scale) {
  for (int i = 0; i < 2; ++i) {
    float2 pairs[2 * kCount];
    load_q(pairs, gQ, g_stride, m + 8 * i, seqlen);
    float largest = 0.0f;
    for (const float2 x : pairs) largest = largest_of(largest, x);
    scales[i] = split_q(rQ, i, pairs, largest, softmax_scale);
  }
}

constexpr int kScores = kBlockN / 2;  // elements of S per lane

// sums = A B by a warpgroup, small products first. The hi and lo of B are at `b`; a step is kStepBytes
// further on.
template <int kHeadDim, bool kTransposed, int kStepBytes, int kCount, int kSteps>
inline __device__ void multiply(float (&sums)[kCount], SplitOf<kSteps>& a, const unsigned char* b) {
  constexpr int kNextColumns = kCount > kColumns / 2 ? kColumnsBytes : 0;
  const uint64_t hi = ptx::matrix_descriptor(b, kNextColumns);
  const uint64_t lo = ptx::matrix_descriptor(b + place_of(0, kHeadDim), kNextColumns);
  ptx::multiply_fence(sums, a.hi, a.lo);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = step * kStepBytes;
    ptx::multiply<false, kTransposed>(sums, a.lo[step], ptx::advance(hi, at), step > 0);
    ptx::multiply<false, kTransposed>(sums, a.hi[step], ptx::advance(lo, at));
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::multiply<false, kTransposed>(sums, a.hi[step], ptx::advance(hi, step * kStepBytes));
  }
  ptx::multiply_commit();
}

// S = Q K^T, with a head_dim of kStep * kCount: 32 or 64
template <int kCount>
inline __device__ void multiply_qk(float (&rS)[kScores], SplitOf<kCount>& rQ,
                                   const unsigned char* sK) {
  multiply<kStep * kCount, false, kStep * sizeof(half)>(rS, rQ, sK);
}

// PV = P V. V's rows are rows of B, where K's are columns.
template <int kCount>
inline __device__ void multiply_pv(float (&rPV)[kCount], Split& rP, const unsigned char* sV) {
  multiply<2 * kCount, true, kStep * kRowBytes>(rPV, rP, sV);
}

// Undoes the scales of Q and K.
inline __device__ void scale_scores(float (&rS)[kScores], const float (&q_scales)[2],
                                    const float* k_scales) {
  const float* lane_scales = k_scales + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < kBlockN / 8; ++j) {
    const float2 k_scale = load2(lane_scales, 8 * j);
    for (int i = 0; i < 4; ++i) {
      float& score = rS[4 * j + i];
      score = q_scales[i / 2] * (score * (i % 2 ? k_scale.y : k_scale.x));
    }
  }
}

// Hides keys that a query does not see. The lane's first column is n, its first row m.
inline __device__ void mask(float (&rS)[kScores], int n, int m, int seqlen, bool is_causal) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int visible = is_causal ? min(m + i % 4 / 2 * 8 + 1, seqlen) : seqlen;
    if (n + i / 4 * 8 + i % 2 >= visible) rS[i] = -INFINITY;
  }
}

struct Statistics {
  float row_max[2] = {-INFINITY, -INFINITY};  // in units of log(2)
  float row_sum[2] = {};                      // of this lane's P
};

// Replaces S by P = 2^(S - row_max). Returns what O must be multiplied by.
inline __device__ float2 softmax(float (&rS)[kScores], Statistics& rows) {
  float row_scale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float new_max = rows.row_max[r];
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) new_max = fmaxf(new_max, fmaxf(rS[i], rS[i + 1]));
    new_max = reduce_max(new_max);
    row_scale[r] = exp2f(rows.row_max[r] - new_max);
    rows.row_max[r] = new_max;
    rows.row_sum[r] *= row_scale[r];
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) {
      rS[i] = exp2f(rS[i] - new_max);
      rS[i + 1] = exp2f(rS[i + 1] - new_max);
      rows.row_sum[r] += rS[i] + rS[i + 1];
    }
  }
  return make_float2(row_scale[0], row_scale[1]);
}

// Splits P, after a multiplication by `scale`. An accumulator's elements are in the order of operand A.
inline __device__ void split_p(Split& rP, const float (&rS)[kScores], float scale = kScaleP) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    split(rS[2 * i] * scale, rS[2 * i + 1] * scale, rP.hi[i / 4][i % 4], rP.lo[i / 4][i % 4]);
  }
}

// ---- A softmax with two multiplications fewer per score (from version 38 on) --------------------

// A scale of scores in units of log(2): a mantissa from 1/2 to 1, its negative or 0, and an exponent
struct Scale {
  float mantissa;
  int exponent;

  explicit __device__ Scale(float softmax_scale) {
    const unsigned bits = __float_as_uint(softmax_scale * 1.4426950408889634f);
    mantissa = softmax_scale == 0.0f ? 0.0f : __uint_as_float((bits & 0x807fffff) | 0x3f000000);
    exponent = static_cast<int>(bits >> 23 & 0xff) - 126;
  }
};

// Returns what scales the scores of a row of Q, which is undone by 2^exponent. Not below 2^-126:
// power_of_two() would return 0, and 0 times a hidden score is NaN. That changes a score by 2^-24 or more
// only if |S| is above 2^102.
inline __device__ float scale_of_row(int exponent, Scale scale) {
  return power_of_two(min(max(exponent + scale.exponent, -126), kMost));
}

// Multiplies a row of Q by the mantissa and splits it. Returns what scales the row's scores to units of
// log(2), a power of two.
template <int kCount>
inline __device__ float split_q(SplitOf<kCount>& rQ, int i, float2 (&pairs)[2 * kCount],
                                Scale scale) {
  float largest = 0.0f;
  for (float2& x : pairs) {
    x = make_float2(x.x * scale.mantissa, x.y * scale.mantissa);
    largest = largest_of(largest, x);
  }
  return scale_of_row(split_row(rQ, i, pairs, largest), scale);
}

// Undoes the scales of K.
inline __device__ void scale_columns(float (&rS)[kScores], const float* k_scales) {
  const float* lane_scales = k_scales + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < kBlockN / 8; ++j) {
    const float2 k_scale = load2(lane_scales, 8 * j);
    for (int i = 0; i < 4; ++i) rS[4 * j + i] *= i % 2 ? k_scale.y : k_scale.x;
  }
}

struct Offsets {
  float offset[2] = {INFINITY, INFINITY};  // P = 2^(q_scale S + offset)
  float row_sum[2] = {};                   // of this lane's P
};

// Replaces S by P = 2^(q_scale S + offset), at most kScaleP. Returns what O must be multiplied by.
// q_scale is a power of two, so -q_scale S is a float, and 15 - q_scale S, rounded down, is not below
// it: the exponent of a row's largest P is from 0 to 15, however large its score. That is enough,
// because float16 resolves 2^-24. A row's P share the offset, so its rounding cancels out.
template <bool kComparesIntegers = false>
inline __device__ float2 softmax(float (&rS)[kScores], Offsets& rows, const float (&q_scales)[2]) {
  constexpr float kTopP = 15.0f;  // log2(kScaleP)
  float row_scale[2], largest[2];
  if constexpr (kComparesIntegers) largest_of_rows(largest, rS);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (!kComparesIntegers) {
      largest[r] = fmaxf(rS[2 * r], rS[2 * r + 1]);
#pragma unroll
      for (int i = 2 * r + 4; i < kScores; i += 4) {
        largest[r] = fmaxf(largest[r], fmaxf(rS[i], rS[i + 1]));
      }
      largest[r] = reduce_max(largest[r]);
    }
    const float offset = fminf(rows.offset[r], __fmaf_rd(-q_scales[r], largest[r], kTopP));
    row_scale[r] = exp2f(offset - rows.offset[r]);
    rows.offset[r] = offset;
    rows.row_sum[r] *= row_scale[r];
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) {
      rS[i] = exp2f(fmaf(q_scales[r], rS[i], offset));
      rS[i + 1] = exp2f(fmaf(q_scales[r], rS[i + 1], offset));
      rows.row_sum[r] += rS[i] + rS[i + 1];
    }
  }
  return make_float2(row_scale[0], row_scale[1]);
}

// ---- Barriers of warpgroups ---------------------------------------------------------------------

// Tells that this warp is done with what the barrier guards. The fence ends its loads of scales first:
// the next copy passes through another proxy and could overtake them.
inline __device__ void arrive(ptx::Barrier* barrier) {
  ptx::proxy_fence();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

// Consumers start their products in turn: one waits until another has passed the turn to it.
inline __device__ void wait_for_turn(int warpgroup) { ptx::named_barrier_sync(1 + warpgroup, 256); }
template <int kConsumers>
inline __device__ void pass_turn(int warpgroup) {
  ptx::named_barrier_arrive(1 + (warpgroup + 1) % kConsumers, 256);
}

// ---- O -----------------------------------------------------------------------------------------

constexpr float kUnit = 0x1p-21f;  // undoes the scales of P and of V in an ordinary tile
static_assert(kTop - kOrdinary == 6 && kScaleP == 0x1p15f);

// O = row_scale O + PV. Tensor cores truncate sums, so that O itself must not be their accumulator.
template <int kCount>
inline __device__ void add_pv(float (&rO)[kCount], const float (&rPV)[kCount], float2 row_scale,
                              const float* v_scales, bool is_ordinary = false) {
  const float* lane_scales = v_scales + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int d = 0; d < kCount / 4; ++d) {
    float2 v_scale = load2(lane_scales, 8 * d);
    if (is_ordinary) v_scale = make_float2(kUnit, kUnit);
    for (int i = 0; i < 4; ++i) {
      float& x = rO[4 * d + i];
      x = fmaf(x, i < 2 ? row_scale.x : row_scale.y,
               rPV[4 * d + i] * (i % 2 ? v_scale.y : v_scale.x));
    }
  }
}

// As long as all tiles of V were ordinary, O is in units of kUnit, and P V is added as it is.
template <int kCount>
inline __device__ void leave_units(float (&rO)[kCount], bool& in_units) {
  if (!in_units) return;
  in_units = false;
#pragma unroll
  for (float& x : rO) x *= kUnit;
}
template <int kCount>
inline __device__ void add_in_units(float (&rO)[kCount], const float (&rPV)[kCount],
                                    float2 row_scale, const float* v_scales, bool is_ordinary,
                                    bool& in_units) {
  if (is_ordinary && in_units) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      rO[i] = fmaf(rO[i], i % 4 < 2 ? row_scale.x : row_scale.y, rPV[i]);
    }
  } else {
    leave_units(rO, in_units);
    add_pv(rO, rPV, row_scale, v_scales, is_ordinary);
  }
}

// Stores row i of O, 0 or 1, times a scale. The lane's first column is n.
template <int kCount>
inline __device__ void store_row(float* row, const float (&rO)[kCount], int i, int n, float scale) {
  for (int j = 0; j < kCount / 4; ++j) {
    store2(row, 8 * j + n, rO[4 * j + 2 * i] * scale, rO[4 * j + 2 * i + 1] * scale);
  }
}

// Joins the parts of the same 64 rows that two warpgroups have computed, each from half of the keys: O
// before the division and the rows' sums, relative to 2^row_max. The second warpgroup leaves its part in
// shared memory, O in rows of kStride floats. The first adds it to its own and returns true: only that
// one goes on. Warpgroups that divide the keys take no turns, so barrier 3 is free.
template <int kStride, int kCount>
inline __device__ bool join_parts(float (&rO)[kCount], float (&row_sum)[2],
                                  const float (&row_max)[2], float* s_o, int warpgroup) {
  __shared__ float2 s_statistics[64];
  const int n = threadIdx.x % 4 * 2;
  const int r = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  if (warpgroup == 1) {
    for (int i = 0; i < 2; ++i) {
      store_row(s_o + (r + 8 * i) * kStride, rO, i, n, 1.0f);
      if (n == 0) s_statistics[r + 8 * i] = make_float2(row_max[i], row_sum[i]);
    }
    ptx::named_barrier_arrive(3, 256);
    return false;
  }
  ptx::named_barrier_sync(3, 256);
  for (int i = 0; i < 2; ++i) {
    const float2 other = s_statistics[r + 8 * i];
    const float new_max = fmaxf(row_max[i], other.x);
    const float own_scale = exp2f(row_max[i] - new_max);
    const float scale = exp2f(other.x - new_max);
    row_sum[i] = row_sum[i] * own_scale + other.y * scale;
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 x = load2(s_o + (r + 8 * i) * kStride, 8 * j + n);
      rO[4 * j + 2 * i] = rO[4 * j + 2 * i] * own_scale + x.x * scale;
      rO[4 * j + 2 * i + 1] = rO[4 * j + 2 * i + 1] * own_scale + x.y * scale;
    }
  }
  return true;
}

}  // namespace attention
