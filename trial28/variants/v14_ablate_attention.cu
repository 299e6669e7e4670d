// v14 - Hopper's wgmma, with a warp that copies
//
// Change: warpgroups multiply with wgmma, which reads K and V from shared memory by itself. K and V
//         are split into tiles that lie in memory as wgmma wants them, so that one bulk copy
//         fetches a tile. A warp of its own copies, up to kStages tiles ahead. Keys are not divided
//         among blocks.
// Why:    mma.sync reaches two thirds of the tensor cores' rate, and its warps spend instructions
//         on copies and on loading operands.
// Cost:   runs on compute capability 9.0 only. A multiprocessor has one block, and nothing to do
//         while the block begins and ends.
// Tile:   kBlockM x kBlockN = 128 x 64, block 384
// Layout: strided
// Takes:  float32, head_dim 64
// Needs:  sm_90a
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: 1.25 times as fast as v25 for long sequences.

#include <cuda_bf16.h>
#define ABLATE_ATTENTION 1
#include <cuda_fp16.h>

#include "ptx.cuh"
#include "wgmma.cuh"

#ifndef OVERLAP
#define OVERLAP 0
#endif
#ifndef TURNS
#define TURNS 0
#endif
#ifndef ABLATE_DIAGONAL
#define ABLATE_DIAGONAL 0
#endif
#ifndef ABLATE_SOFTMAX
#define ABLATE_SOFTMAX 0
#endif
#ifndef ABLATE_PRODUCTS
#define ABLATE_PRODUCTS 0
#endif
#ifndef ABLATE_ATTENTION
#define ABLATE_ATTENTION 0
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef QLO_SHARED
#define QLO_SHARED (CONSUMERS == 3)
#endif
#ifndef EARLY
#define EARLY 1
#endif
#ifndef FUSED_SCALE
#define FUSED_SCALE 0
#endif

namespace attention::ATTENTION_VERSION {

constexpr int kHeadDim = 64;
constexpr int kBlockN = 64;
constexpr int kScores = kBlockN / 2;  // elements of S per thread
constexpr int kSteps = 64 / 16;       // products with 16 columns of A each
constexpr int kSplitThreads = 128;
constexpr int kTop = 14;     // exponent to which the largest number of a row or column is scaled
constexpr int kLeast = -97;  // the smallest exponent that is scaled for
constexpr int kMost = 127;
constexpr float kScaleP = 0x1p15f;

// A tile of keys: K's hi, K's lo, V's hi and V's lo, then the scales of K's rows and V's columns.
// The rows of these operands have 128 bytes, and the 16-byte chunk c of row r lies where chunk
// c ^ (r % 8) would.
constexpr int kRowBytes = 2 * kHeadDim;
constexpr int kOperandBytes = kBlockN * kRowBytes;
constexpr int kTileBytes = 4 * kOperandBytes + sizeof(float) * (kBlockN + kHeadDim);
constexpr int kStageBytes = (kTileBytes + 1023) / 1024 * 1024;

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

// Splits x and y into sums of three bfloat16 numbers, which have float32's exponents. The first is
// not rounded, because that could overflow.
inline __device__ void split(float x, float y, unsigned (&pieces)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    pieces[i] = i == 0 ? __float_as_uint(x) >> 16 | (__float_as_uint(y) & 0xffff0000)
                       : *reinterpret_cast<const unsigned*>(&pair);
    x -= __uint_as_float(pieces[i] << 16);
    y -= __uint_as_float(pieces[i] & 0xffff0000);
  }
}

// Returns the place of column d of row r in an operand.
inline __device__ int place_of(int r, int d) {
  return r * kRowBytes + (d / 8 ^ r % 8) * 16 + d % 8 * 2;
}

// Splits x, four columns of row r, and stores hi in an operand and lo in the next one.
inline __device__ void store_split(unsigned char* operand, int r, int d, float4 x, float4 scale) {
  uint2 hi, lo;
  split(x.x * scale.x, x.y * scale.y, hi.x, lo.x);
  split(x.z * scale.z, x.w * scale.w, hi.y, lo.y);
  unsigned char* to = operand + place_of(r, d);
  *reinterpret_cast<uint2*>(to) = hi;
  *reinterpret_cast<uint2*>(to + kOperandBytes) = lo;
}

inline __device__ float4 largest_of(float4 x, float4 y) {
  return make_float4(fmaxf(fabsf(x.x), fabsf(y.x)), fmaxf(fabsf(x.y), fabsf(y.y)),
                     fmaxf(fabsf(x.z), fabsf(y.z)), fmaxf(fabsf(x.w), fabsf(y.w)));
}

// A thread that splits has the same four columns of every kRowsApart-th row of a tile.
constexpr int kRowsApart = 4 * kSplitThreads / kHeadDim;
constexpr int kRowsPerThread = kBlockN / kRowsApart;

// Scales and splits rows of K.
inline __device__ void split_k(unsigned char* operand, float* scales,
                               const float4 (&rows)[kRowsPerThread]) {
  const int d = 4 * threadIdx.x % kHeadDim;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const float4 x = rows[i];
    const int r = i * kRowsApart + 4 * threadIdx.x / kHeadDim;
    float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
    for (int offset = kHeadDim / 8; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
    }
    const int exponent = exponent_of(largest);
    const float scale = power_of_two(kTop - exponent);
    store_split(operand, r, d, x, make_float4(scale, scale, scale, scale));
    if (d == 0) scales[r] = power_of_two(exponent - kTop);
  }
}

// Scales and splits rows of V. The scales undo those of columns and of P.
inline __device__ void split_v(unsigned char* operand, float* scales,
                               const float4 (&rows)[kRowsPerThread]) {
  __shared__ float4 s_largest[kSplitThreads / 32][kHeadDim / 4];
  const int d = 4 * threadIdx.x % kHeadDim;
  float4 largest = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (const float4 x : rows) largest = largest_of(largest, x);
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
  const int4 exponent = make_int4(exponent_of(largest.x), exponent_of(largest.y),
                                  exponent_of(largest.z), exponent_of(largest.w));
  const float4 scale =
      make_float4(power_of_two(kTop - exponent.x), power_of_two(kTop - exponent.y),
                  power_of_two(kTop - exponent.z), power_of_two(kTop - exponent.w));
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    store_split(operand, i * kRowsApart + 4 * threadIdx.x / kHeadDim, d, rows[i], scale);
  }
  if (4 * threadIdx.x / kHeadDim != 0) return;
  const auto undo = [](int exponent) { return power_of_two(exponent - kTop) / kScaleP; };
  store4(scales, d,
         make_float4(undo(exponent.x), undo(exponent.y), undo(exponent.z), undo(exponent.w)));
}

// A block has a tile of kBlockN keys of a head: of K if blockIdx.y is 0, of V if it is 1. Rows past
// the end are zero.
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const float* __restrict__ k, const float* __restrict__ v, unsigned char* tiles,
                 Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  ptx::allow_next();
  const bool is_v = blockIdx.y == 1;
  const Strides strides = is_v ? v_strides : k_strides;
  const int tiles_per_head = (seqlen + kBlockN - 1) / kBlockN;
  const int n_start = blockIdx.x % tiles_per_head * kBlockN;
  const int head = blockIdx.x / tiles_per_head;
  const float* g_rows = (is_v ? v : k) + head / num_heads * strides.batch +
                        head % num_heads * strides.head + n_start * strides.seqlen;
  float4 rows[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int r = i * kRowsApart + 4 * threadIdx.x / kHeadDim;
    rows[i] = n_start + r < seqlen
                  ? load4(g_rows + r * strides.seqlen, 4 * threadIdx.x % kHeadDim)
                  : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  unsigned char* tile = tiles + int64_t{blockIdx.x} * kTileBytes;
  float* scales = reinterpret_cast<float*>(tile + 4 * kOperandBytes);
  if (is_v) {
    split_v(tile + 2 * kOperandBytes, scales + kBlockN, rows);
  } else {
    split_k(tile, scales, rows);
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

// In a warpgroup, lane l of warp w holds of S and O rows 16 w + l / 4 (r = 0) and 8 further on
// (r = 1), at columns 8 j + 2 (l % 4) and the next: elements 4 j + 2 r and 4 j + 2 r + 1.

// Q, hi and lo, as wgmma's operand A
struct Queries {
#if QLO_SHARED < 2
  unsigned hi[kSteps][4];
#endif
#if !QLO_SHARED
  unsigned lo[kSteps][4];
#endif
  float scale[2];  // scales scores to units of log(2)
};

// Loads, scales and splits rows m and m + 8 of Q. Rows past the end are zero.
inline __device__ void load_q(Queries& rQ, unsigned char* s_lo, const float* gQ, int64_t g_stride, int m, int seqlen,
                              float softmax_scale) {
  const int n = 2 * (threadIdx.x % 4);
  for (int r = 0; r < 2; ++r) {
    const int row = m + 8 * r;
    float2 x[kHeadDim / 8];
    float largest = 0.0f;
    for (int s = 0; s < kHeadDim / 8; ++s) {
      x[s] = row < seqlen ? load2(gQ + row * g_stride, 8 * s + n) : make_float2(0.0f, 0.0f);
      largest = fmaxf(largest, fmaxf(fabsf(x[s].x), fabsf(x[s].y)));
    }
    const int exponent = exponent_of(reduce_max(largest));
    float scale = power_of_two(kTop - exponent);
    rQ.scale[r] = softmax_scale * 1.4426950408889634f * power_of_two(exponent - kTop);
    if (FUSED_SCALE) {
      if (softmax_scale < 0.0f) scale = -scale;
      rQ.scale[r] = fmaxf(fabsf(rQ.scale[r]), 0x1p-126f);
    }
    for (int s = 0; s < kHeadDim / 8; ++s) {
      const int i = s % 2 * 2 + r;
#if QLO_SHARED
      unsigned lo;
#if QLO_SHARED < 2
      split(x[s].x * scale, x[s].y * scale, rQ.hi[s / 2][i], lo);
#else
      unsigned hi;
      split(x[s].x * scale, x[s].y * scale, hi, lo);
#endif
      const int local = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      *reinterpret_cast<unsigned*>(s_lo + place_of(local, 8 * s + n)) = lo;
#if QLO_SHARED == 2
      *reinterpret_cast<unsigned*>(s_lo + kOperandBytes + place_of(local, 8 * s + n)) = hi;
#endif
#else
      split(x[s].x * scale, x[s].y * scale, rQ.hi[s / 2][i], rQ.lo[s / 2][i]);
#endif
    }
  }
}

// sums = A B, small products first. B has its hi at `b` and its lo in the next operand; a step is
// kStepBytes further on.
template <bool kTransposed, int kStepBytes>
inline __device__ void multiply(float (&sums)[32], unsigned (&hi)[kSteps][4],
                                unsigned (&lo)[kSteps][4], const unsigned char* b) {
  const uint64_t b_hi = ptx::matrix_descriptor(b);
  const uint64_t b_lo = ptx::matrix_descriptor(b + kOperandBytes);
  ptx::multiply_fence(sums, hi, lo);
  if (ABLATE_PRODUCTS) {
    ptx::multiply<false, kTransposed>(sums, lo[0], b_hi, false);
    ptx::multiply_commit();
    return;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    ptx::multiply<false, kTransposed>(sums, lo[s], ptx::advance(b_hi, s * kStepBytes), s > 0);
    ptx::multiply<false, kTransposed>(sums, hi[s], ptx::advance(b_lo, s * kStepBytes));
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    ptx::multiply<false, kTransposed>(sums, hi[s], ptx::advance(b_hi, s * kStepBytes));
  }
  ptx::multiply_commit();
}

// S = Q K^T, from the hi and lo of K at `s_k`
inline __device__ void multiply_qk(float (&rS)[kScores], Queries& rQ, const unsigned char* s_lo, const unsigned char* s_k) {
#if QLO_SHARED
  const uint64_t a_lo = ptx::matrix_descriptor(s_lo);
  const uint64_t b_hi = ptx::matrix_descriptor(s_k);
  const uint64_t b_lo = ptx::matrix_descriptor(s_k + kOperandBytes);
#if QLO_SHARED < 2
  ptx::multiply_fence(rS, rQ.hi);
#define A_HI rQ.hi[s]
#else
  ptx::multiply_fence(rS);
  const uint64_t a_hi = ptx::matrix_descriptor(s_lo + kOperandBytes);
#define A_HI ptx::advance(a_hi, s * 32)
#endif
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    ptx::multiply<false>(rS, ptx::advance(a_lo, s * 32), ptx::advance(b_hi, s * 32), s > 0);
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    ptx::multiply<false>(rS, A_HI, ptx::advance(b_lo, s * 32));
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    ptx::multiply<false>(rS, A_HI, ptx::advance(b_hi, s * 32));
  }
  ptx::multiply_commit();
  return;
#else
  multiply<false, 32>(rS, rQ.hi, rQ.lo, s_k);
#endif
}

// P, hi and lo, as wgmma's operand A
struct Weights {
  unsigned hi[kSteps][4], lo[kSteps][4];
};

// An accumulator's elements are in the order of operand A.
inline __device__ void split_p(Weights& rP, const float (&rS)[kScores]) {
  if (ABLATE_SOFTMAX) {
    for (int i = 0; i < 16; ++i) rP.hi[i / 4][i % 4] = __float_as_uint(rS[2 * i]), rP.lo[i / 4][i % 4] = __float_as_uint(rS[2 * i + 1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    split(rS[2 * i] * kScaleP, rS[2 * i + 1] * kScaleP, rP.hi[i / 4][i % 4], rP.lo[i / 4][i % 4]);
  }
}

// PV = P V, from the hi and lo of V at `s_v`. A row of V is a row of B, where one of K is a column.
inline __device__ void multiply_pv(float (&rPV)[kHeadDim / 2], Weights& rP,
                                   const unsigned char* s_v) {
  multiply<true, 16 * kRowBytes>(rPV, rP.hi, rP.lo, s_v);
}

struct Statistics {
  float row_max[2] = {-INFINITY, -INFINITY};  // in units of log(2)
  float row_sum[2] = {};                      // of this lane's P
};

// Hides keys that a query does not see. The lane's first column is n, its first row m.
inline __device__ void mask(float (&rS)[kScores], int n, int m, int seqlen, bool is_causal) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int visible = is_causal ? min(m + i % 4 / 2 * 8 + 1, seqlen) : seqlen;
    if (n + i / 4 * 8 + i % 2 >= visible) rS[i] = -INFINITY;
  }
}

// Undoes the scales of K, and of Q unless that is part of the exponential.
inline __device__ void scale_scores(float (&rS)[kScores], const Queries& rQ, const float* k_scales) {
  const float* lane_scales = k_scales + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < kBlockN / 8; ++j) {
    const float2 k_scale = load2(lane_scales, 8 * j);
    for (int i = 0; i < 4; ++i) {
      float& score = rS[4 * j + i];
      score *= i % 2 ? k_scale.y : k_scale.x;
      if (!FUSED_SCALE) score *= rQ.scale[i / 2];
    }
  }
}

// Replaces S by P = 2^(S - row_max). Returns what O must be multiplied by.
inline __device__ float2 softmax(float (&rS)[kScores], Statistics& rows, const Queries& rQ) {
  float row_scale[2];
#if FUSED_SCALE
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float scale = rQ.scale[r];
    float new_max = fmaxf(rS[2 * r], rS[2 * r + 1]);
#pragma unroll
    for (int i = 4 + 2 * r; i < kScores; i += 4) new_max = fmaxf(new_max, fmaxf(rS[i], rS[i + 1]));
    new_max = fmaxf(rows.row_max[r], scale * reduce_max(new_max));
    row_scale[r] = exp2f(rows.row_max[r] - new_max);
    rows.row_max[r] = new_max;
    rows.row_sum[r] *= row_scale[r];
    if (fabsf(new_max) > 0x1p20f) {  // round the products: the largest P is then 1
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 4) rS[i] *= scale, rS[i + 1] *= scale;
      scale = 1.0f;
    }
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) {
      rS[i] = exp2f(fmaf(scale, rS[i], -new_max));
      rS[i + 1] = exp2f(fmaf(scale, rS[i + 1], -new_max));
      rows.row_sum[r] += rS[i] + rS[i + 1];
    }
  }
  return make_float2(row_scale[0], row_scale[1]);
#endif
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

// O = row_scale O + PV. Tensor cores truncate sums, so that O itself must not be their accumulator.
inline __device__ void add_pv(float (&rO)[kHeadDim / 2], const float (&rPV)[kHeadDim / 2],
                              float2 row_scale, const float* v_scales) {
  const float* lane_scales = v_scales + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int d = 0; d < kHeadDim / 8; ++d) {
    const float2 v_scale = load2(lane_scales, 8 * d);
    for (int i = 0; i < 4; ++i) {
      float& x = rO[4 * d + i];
      x = fmaf(x, i < 2 ? row_scale.x : row_scale.y,
               rPV[4 * d + i] * (i % 2 ? v_scale.y : v_scale.x));
    }
  }
}

// Splits and stores 64 rows of V, by kThreads threads of which this is the thread-th. Rows past the
// end are zero.
template <int kThreads>
inline __device__ void store_diagonal(unsigned char* s_v, const float* g_rows, int64_t g_stride,
                                      int valid_rows, int thread) {
#pragma unroll 1
  for (int i = thread; i < 64 * kHeadDim / 4; i += kThreads) {
    const int r = i / (kHeadDim / 4), d = i % (kHeadDim / 4) * 4;
    const float4 x = r < valid_rows ? load4(g_rows + r * g_stride, d)
                                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    unsigned left[3], right[3];
    split(x.x, x.y, left);
    split(x.z, x.w, right);
    for (int piece = 0; piece < 3; ++piece) {
      *reinterpret_cast<uint2*>(s_v + piece * kOperandBytes + place_of(r, d)) =
          make_uint2(left[piece], right[piece]);
    }
  }
}

// PV = P V, from three bfloat16 numbers for each of both, small products first. P = 0 times any
// finite V is 0, however large it is.
inline __device__ void multiply_diagonal(float (&rPV)[kHeadDim / 2], const float (&rS)[kScores],
                                         const unsigned char* s_v) {
  constexpr int kProducts[6][2] = {{0, 2}, {2, 0}, {1, 1}, {0, 1}, {1, 0}, {0, 0}};
  unsigned rP[3][kSteps][4];
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    unsigned pieces[3];
    split(rS[2 * i], rS[2 * i + 1], pieces);
    for (int piece = 0; piece < 3; ++piece) rP[piece][i / 4][i % 4] = pieces[piece];
  }
  const uint64_t b = ptx::matrix_descriptor(s_v);
  ptx::multiply_fence(rPV, rP);
#pragma unroll
  for (int i = 0; i < 6; ++i) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::multiply<true, true>(
          rPV, rP[kProducts[i][0]][step],
          ptx::advance(b, kProducts[i][1] * kOperandBytes + step * 16 * kRowBytes), i + step > 0);
    }
  }
  ptx::multiply_commit();
}

// A block has a warpgroup that copies and kConsumers that compute, with 64 queries each.
template <int kConsumers>
constexpr int kThreads = 128 * (1 + kConsumers);
template <int kConsumers>
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
template <int kConsumers>
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
template <int kConsumers>
constexpr int kStages = kConsumers == 3 ? 3 : 5 - QLO_SHARED;  // tiles in shared memory
template <int kConsumers>
constexpr int kSmemBytes =
    kStages<kConsumers>* kStageBytes + kConsumers * (3 + QLO_SHARED) * kOperandBytes;

inline __device__ void arrive(ptx::Barrier* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

template <int kConsumers>
inline __device__ void wait_for_turn(int warpgroup) {
  if (TURNS) ptx::named_barrier_sync(1 + warpgroup, 256);
}
template <int kConsumers>
inline __device__ void pass_turn(int warpgroup) {
  if (TURNS) ptx::named_barrier_arrive(1 + (warpgroup + 1) % kConsumers, 256);
}

template <int kConsumers>
__global__ void __launch_bounds__(kThreads<kConsumers>, 1)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v,
                     const unsigned char* __restrict__ tiles, float* __restrict__ o,
                     Strides q_strides, Strides v_strides, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal) {
  constexpr int kBlockM = 64 * kConsumers;
  constexpr int kStages = ATTENTION_VERSION::kStages<kConsumers>;
  ATTENTION_ALIGNED_SHARED(unsigned char, s_tiles, 1024);
  unsigned char* s_diagonal = s_tiles + kStages * kStageBytes;
  __shared__ ptx::Barrier full[kStages], empty[kStages], diagonal_full;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&full[stage], 1);
      ptx::barrier_init(&empty[stage], 4 * kConsumers);  // every warp arrives
    }
    ptx::barrier_init(&diagonal_full, 3);  // three warps write it
    ptx::barrier_init_fence();
  }
  __syncthreads();

  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_start = (gridDim.y - 1 - blockIdx.y) * kBlockM;
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int block_tiles = (n_end + kBlockN - 1) / kBlockN;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;

  if (threadIdx.x >= 128 * kConsumers) {
    ptx::lower_registers<kProducerRegisters<kConsumers>>();
    const int thread = threadIdx.x - 128 * kConsumers;
    if (thread >= 32) {
      if (!is_causal) return;
      const float* gV = v + batch * v_strides.batch + head * v_strides.head;
      for (int first = 0; first < kBlockM; first += 64) {
        const int n_start = m_start + first;
        store_diagonal<96>(s_diagonal + first / 64 * 3 * kOperandBytes,
                           gV + n_start * v_strides.seqlen, v_strides.seqlen, seqlen - n_start,
                           thread - 32);
      }
      ptx::proxy_fence();
      __syncwarp();
      arrive(&diagonal_full);
      return;
    }
    if (thread != 0) return;
    ptx::wait_for_previous();
    const unsigned char* g_tiles =
        tiles + int64_t{blockIdx.x} * ((seqlen + kBlockN - 1) / kBlockN) * kTileBytes;
    for (int tile = 0; tile < block_tiles; ++tile) {
      const int stage = tile % kStages;
      ptx::barrier_wait(&empty[stage], tile / kStages % 2 ^ 1);  // at first, it is complete
      ptx::barrier_expect(&full[stage], kTileBytes);
      ptx::copy_bulk(s_tiles + stage * kStageBytes, g_tiles + int64_t{tile} * kTileBytes,
                     kTileBytes, &full[stage]);
    }
    return;
  }
  ptx::raise_registers<kConsumerRegisters<kConsumers>>();

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const int m_first = m_start + 64 * warpgroup;
  const int m = m_first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int n = threadIdx.x % 4 * 2;
  // The tile that the diagonal crosses is the warpgroup's last one.
  const int diagonal = is_causal ? m_first / kBlockN : block_tiles;
  const int warpgroup_tiles = min(diagonal + 1, block_tiles);
  const int shared_tiles = is_causal ? m_start / kBlockN + 1 : block_tiles;
  const bool ends_on_diagonal = diagonal < block_tiles;

  Queries rQ;
  unsigned char* s_lo = s_diagonal + kConsumers * 3 * kOperandBytes + QLO_SHARED * warpgroup * kOperandBytes;
  load_q(rQ, s_lo, q + batch * q_strides.batch + head * q_strides.head, q_strides.seqlen, m, seqlen,
         softmax_scale);
#if QLO_SHARED
  ptx::proxy_fence();
  ptx::named_barrier_sync(4 + warpgroup, 128);
#endif
  Statistics rows;
  float rS[kScores], rPV[kHeadDim / 2], rO[kHeadDim / 2] = {};
  Weights rP;

  const auto stage_of = [&](int tile) { return s_tiles + tile % kStages * kStageBytes; };
  const auto scales_of = [&](int tile) {
    return reinterpret_cast<const float*>(stage_of(tile) + 4 * kOperandBytes);
  };
  const auto start_qk = [&](int tile) {
    ptx::barrier_wait(&full[tile % kStages], tile / kStages % 2);
    if (tile < shared_tiles) wait_for_turn<kConsumers>(warpgroup);
    multiply_qk(rS, rQ, s_lo, stage_of(tile));
  };
  const auto start_pv = [&](int tile) {
    multiply_pv(rPV, rP, stage_of(tile) + 2 * kOperandBytes);
  };
  const auto use_s = [&](int tile) {
    if (ABLATE_SOFTMAX) return make_float2(1.0f, 1.0f);
    scale_scores(rS, rQ, scales_of(tile));
    const int n_start = tile * kBlockN;
    if (tile == diagonal || n_start + kBlockN > seqlen) {
      mask(rS, n_start + n, m, seqlen, is_causal);
    }
    return softmax(rS, rows, rQ);
  };
  const auto use_pv = [&](int tile, float2 row_scale) {
    add_pv(rO, rPV, row_scale, scales_of(tile) + kBlockN);
    arrive(&empty[tile % kStages]);
  };

#if OVERLAP
  const auto end_turn = [&](int tile) {
    const bool is_last = warpgroup == kConsumers - 1 && tile + 1 == shared_tiles;
    if (tile < shared_tiles && !is_last) pass_turn<kConsumers>(warpgroup);
  };
  if (warpgroup == kConsumers - 1) pass_turn<kConsumers>(warpgroup);
  start_qk(0);
  end_turn(0);
  ptx::multiply_wait<0>(rS);
  float2 row_scale = use_s(0);
  for (int tile = 1; tile < warpgroup_tiles; ++tile) {
    split_p(rP, rS);
    start_qk(tile);
    start_pv(tile - 1);
    end_turn(tile);
    ptx::multiply_wait<1>(rS);
    const float2 next_scale = use_s(tile);
    ptx::multiply_wait<0>(rPV);
    use_pv(tile - 1, row_scale);
    row_scale = next_scale;
  }
  if (!ends_on_diagonal) {
    split_p(rP, rS);
    start_pv(warpgroup_tiles - 1);
    ptx::multiply_wait<0>(rPV);
    use_pv(warpgroup_tiles - 1, row_scale);
  }
#else
  float2 row_scale = make_float2(1.0f, 1.0f);
  for (int tile = 0; tile < warpgroup_tiles; ++tile) {
    start_qk(tile);
    ptx::multiply_wait<0>(rS);
    row_scale = use_s(tile);
    if (tile == diagonal) break;
    split_p(rP, rS);
    start_pv(tile);
    ptx::multiply_wait<0>(rPV);
    use_pv(tile, row_scale);
  }
#endif
  if (ends_on_diagonal && !ABLATE_DIAGONAL) {
    // A column's scale would make rows depend on keys that they do not see.
    ptx::barrier_wait(&diagonal_full, 0);
    multiply_diagonal(rPV, rS, s_diagonal + warpgroup * 3 * kOperandBytes);
    ptx::multiply_wait<0>(rPV);
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
      rO[i] = fmaf(rO[i], i % 4 < 2 ? row_scale.x : row_scale.y, rPV[i]);
    }
  }

  float* gO = o + (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  for (int r = 0; r < 2; ++r) {
    const float scale = 1.0f / reduce_sum(rows.row_sum[r]);
    const int row = m + 8 * r;
    if (row >= seqlen) continue;
    for (int d = 0; d < kHeadDim / 8; ++d) {
      store2(gO + row * int64_t{num_heads} * kHeadDim, 8 * d + n, rO[4 * d + 2 * r] * scale,
             rO[4 * d + 2 * r + 1] * scale);
    }
  }
}

int64_t scratch_floats(const Params& params) {
  const int64_t tiles =
      int64_t{params.batch} * params.num_heads * ceil_div(params.seqlen, kBlockN);
  return tiles * kTileBytes / sizeof(float);
}

template <int kConsumers>
cudaError_t launch_attention(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, 64 * kConsumers));
  const auto launch = EARLY ? 1 : 0;
  const auto q = static_cast<const float*>(params.q);
  const auto v = static_cast<const float*>(params.v);
  const auto o = static_cast<float*>(params.o);
  const auto tiles = reinterpret_cast<const unsigned char*>(params.scratch);
  if (!launch)
    return launch_kernel(attention_kernel<kConsumers>, grid, dim3(kThreads<kConsumers>),
                         kSmemBytes<kConsumers>, stream, q, v, tiles, o, params.q_strides,
                         params.v_strides, params.seqlen, params.num_heads, params.softmax_scale,
                         params.is_causal);
  return launch_early(attention_kernel<kConsumers>, grid, 1, dim3(kThreads<kConsumers>),
                      kSmemBytes<kConsumers>, stream, q, v, tiles, o, params.q_strides,
                      params.v_strides, params.seqlen, params.num_heads, params.softmax_scale,
                      params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim != kHeadDim) return cudaErrorInvalidValue;
  const int heads = params.batch * params.num_heads;
  const cudaError_t error = launch_kernel(split_kernel, dim3(heads * ceil_div(params.seqlen, kBlockN), 2),
                        dim3(kSplitThreads), 0, stream, static_cast<const float*>(params.k),
                        static_cast<const float*>(params.v),
                        reinterpret_cast<unsigned char*>(params.scratch), params.k_strides,
                        params.v_strides, params.seqlen, params.num_heads);
  if (error != cudaSuccess || ABLATE_ATTENTION) return error;
  return launch_attention<CONSUMERS>(params, stream);
}

}  // namespace attention::ATTENTION_VERSION
