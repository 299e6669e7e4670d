// v28 - Hopper's wgmma, with a warp that copies
//
// From:   v25
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
#ifndef EARLY
#define EARLY 1
#endif
#ifndef FUSED_SCALE
#define FUSED_SCALE 0
#endif

namespace attention::ATTENTION_VERSION {

constexpr int kHeadDim = 64;
constexpr int kBlockN = 64;
constexpr int kProducerRegisters = 40;
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

// The same with one TF32 number per word; TF32 ignores the low 13 bits of lo.
inline __device__ void split_tf32(float x, unsigned& hi, unsigned& lo) {
  hi = (__float_as_uint(x) + 0x1000) & ~0x1fffu;
  lo = __float_as_uint(x - __uint_as_float(hi));
}

// Splits x, four columns of row r, and stores hi in an operand and lo in the next one.
inline __device__ void store_split(unsigned char* operand, int r, int d, float4 x, float4 scale) {
  uint2 hi, lo;
  split(x.x * scale.x, x.y * scale.y, hi.x, lo.x);
  split(x.z * scale.z, x.w * scale.w, hi.y, lo.y);
  unsigned char* to = operand + r * kRowBytes + (d / 8 ^ r % 8) * 16 + d % 8 * 2;
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
                 int* next_work, Strides k_strides, Strides v_strides, int seqlen, int num_heads) {
  ptx::allow_next();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *next_work = 0;
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
  unsigned hi[kSteps][4], lo[kSteps][4];
  float scale[2];  // scales scores to units of log(2)
};

// Loads, scales and splits rows m and m + 8 of Q. Rows past the end are zero.
inline __device__ void load_q(Queries& rQ, const float* gQ, int64_t g_stride, int m, int seqlen,
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
      split(x[s].x * scale, x[s].y * scale, rQ.hi[s / 2][i], rQ.lo[s / 2][i]);
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
inline __device__ void multiply_qk(float (&rS)[kScores], Queries& rQ, const unsigned char* s_k) {
  multiply<false, 32>(rS, rQ.hi, rQ.lo, s_k);
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

constexpr int kFloatRow = kHeadDim + 4;  // V in float32 in shared memory, padded

// O = row_scale O + P V in TF32, which has float32's exponents, with V not scaled. P = 0 times any
// finite V is 0, however large it is. The lane's warp sees the first `keys` keys.
inline __device__ void add_product_tf32(float (&rO)[kHeadDim / 2], const float (&rP)[kScores],
                                        float2 row_scale, const float* s_v, int keys) {
  const int lane_id = threadIdx.x % 32;
  const float* lane_v = s_v + 2 * (lane_id % 4) * kFloatRow + lane_id / 4;
#pragma unroll
  for (int first = 0; first < kHeadDim; first += 16) {
    float small[2][4] = {}, large[2][4] = {};
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      if (8 * j >= keys) break;
      unsigned hiP[4], loP[4];
      for (int i = 0; i < 4; ++i) {
        split_tf32(rP[4 * j + i % 2 * 2 + i / 2], hiP[i], loP[i]);
      }
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        unsigned hiV[2], loV[2];
        for (int i = 0; i < 2; ++i) {  // halved: rounding up could overflow
          split_tf32(0.5f * lane_v[(8 * j + i) * kFloatRow + first + 8 * d], hiV[i], loV[i]);
        }
        ptx::mma_tf32(small[d], loP, hiV);
        ptx::mma_tf32(small[d], hiP, loV);
        ptx::mma_tf32(large[d], hiP, hiV);
      }
    }
    for (int d = 0; d < 2; ++d) {
      for (int i = 0; i < 4; ++i) {
        float& x = rO[first / 2 + 4 * d + i];
        x = fmaf(x, i < 2 ? row_scale.x : row_scale.y, 2.0f * (small[d][i] + large[d][i]));
      }
    }
  }
}

// A block has a warpgroup that copies and kConsumers that compute, with 64 queries each. Two blocks
// with one consumer fit on a multiprocessor.
template <int kConsumers>
constexpr int kThreads = 128 * (1 + kConsumers);
template <int kConsumers>
constexpr int kConsumerRegisters = kConsumers == 1 ? 216 : 232;
template <int kConsumers>
constexpr int kStages = kConsumers == 1 ? 2 : 4;  // tiles in shared memory
template <int kConsumers>
constexpr int kFloatBytes = 64 * kConsumers * kFloatRow * sizeof(float);  // rows of Q or V
template <int kConsumers>
constexpr int kSmemBytes = kStages<kConsumers>* kStageBytes + 2 * kFloatBytes<kConsumers>;

inline __device__ void arrive(ptx::Barrier* barrier) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

// Queries of a head
struct Work {
  int head;  // of all batch entries
  int m_start;
};

// Returns the work with an index. The last queries have the most keys, so they go first.
template <int kConsumers>
inline __device__ Work work_of(int index, int heads, int seqlen) {
  const int m_blocks = (seqlen + 64 * kConsumers - 1) / (64 * kConsumers);
  return {index % heads, (m_blocks - 1 - index / heads) * 64 * kConsumers};
}

// Starts to copy rows of float32, by a warp. Rows past the end become copies of the last one.
template <int kRows>
inline __device__ void copy_rows(float* s_rows, const float* g_rows, int64_t g_stride, int last,
                                 ptx::Barrier* barrier) {
  constexpr int kBytes = kHeadDim * sizeof(float);
  if (threadIdx.x % 32 == 0) ptx::barrier_expect(barrier, kRows * kBytes);
  __syncwarp();
  for (int r = threadIdx.x % 32; r < kRows; r += 32) {
    ptx::copy_bulk(s_rows + r * kFloatRow, g_rows + min(r, last) * g_stride, kBytes, barrier);
  }
}

template <int kConsumers>
__global__ void __launch_bounds__(kThreads<kConsumers>, 3 - kConsumers)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v,
                     const unsigned char* __restrict__ tiles, int* next_work,
                     float* __restrict__ o, Strides q_strides, Strides v_strides, int heads,
                     int seqlen, int num_heads, float softmax_scale, bool is_causal) {
  constexpr int kBlockM = 64 * kConsumers;
  constexpr int kStages = ATTENTION_VERSION::kStages<kConsumers>;
  ATTENTION_ALIGNED_SHARED(unsigned char, s_tiles, 1024);
  float* s_diagonal = reinterpret_cast<float*>(s_tiles + kStages * kStageBytes);
  float* sQ = s_diagonal + kBlockM * kFloatRow;
  __shared__ ptx::Barrier full[kStages], empty[kStages];
  __shared__ ptx::Barrier diagonal_full, diagonal_empty, q_full, q_empty;
  __shared__ int s_work;  // arrives with Q
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&full[stage], 1);
      ptx::barrier_init(&empty[stage], 4 * kConsumers);  // every warp arrives
    }
    ptx::barrier_init(&q_full, 1);
    ptx::barrier_init(&diagonal_full, 1);
    ptx::barrier_init(&q_empty, 4 * kConsumers);
    ptx::barrier_init(&diagonal_empty, 4 * kConsumers);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const int works = heads * ((seqlen + kBlockM - 1) / kBlockM);
  const int tiles_per_head = (seqlen + kBlockN - 1) / kBlockN;
  const auto tiles_of = [&](Work work) {
    const int n_end = is_causal ? min(work.m_start + kBlockM, seqlen) : seqlen;
    return (n_end + kBlockN - 1) / kBlockN;
  };

  if (threadIdx.x >= 128 * kConsumers) {
#ifdef ATTENTION_EMULATOR
    if (kConsumers == 2)
#endif
    ptx::lower_registers<kProducerRegisters>();
    if (threadIdx.x >= 128 * kConsumers + 32) return;
    const int lane_id = threadIdx.x % 32;
    int index = blockIdx.x;
    int count = 0;  // of tiles before the work
    for (int i = 0;; ++i) {
      ptx::barrier_wait(&q_empty, i % 2 ^ 1);  // at first, it is complete
      if (lane_id == 0) s_work = index;
      if (index >= works) {
        arrive(&q_full);
        return;
      }
      const Work work = work_of<kConsumers>(index, heads, seqlen);
      const int batch = work.head / num_heads, head = work.head % num_heads;
      copy_rows<kBlockM>(sQ,
                         q + batch * q_strides.batch + head * q_strides.head +
                             work.m_start * q_strides.seqlen,
                         q_strides.seqlen, seqlen - 1 - work.m_start, &q_full);
      if (i == 0) ptx::wait_for_previous();
      const int block_tiles = tiles_of(work);
      if (lane_id == 0) {
        const unsigned char* g_tiles = tiles + int64_t{work.head} * tiles_per_head * kTileBytes;
        for (int tile = 0; tile < block_tiles; ++tile) {
          const int stage = (count + tile) % kStages;
          ptx::barrier_wait(&empty[stage], (count + tile) / kStages % 2 ^ 1);
          ptx::barrier_expect(&full[stage], kTileBytes);
          ptx::copy_bulk(s_tiles + stage * kStageBytes, g_tiles + int64_t{tile} * kTileBytes,
                         kTileBytes, &full[stage]);
        }
        index = gridDim.x + atomicAdd(next_work, 1);
      }
      __syncwarp();
      index = __shfl_sync(0xffffffff, index, 0);
      count += block_tiles;
      if (is_causal) {
        ptx::barrier_wait(&diagonal_empty, i % 2 ^ 1);
        copy_rows<kBlockM>(s_diagonal,
                           v + batch * v_strides.batch + head * v_strides.head +
                               work.m_start * v_strides.seqlen,
                           v_strides.seqlen, seqlen - 1 - work.m_start, &diagonal_full);
      }
    }
  }
#ifdef ATTENTION_EMULATOR
    if (kConsumers == 2)
#endif
  ptx::raise_registers<kConsumerRegisters<kConsumers>>();

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const int n = threadIdx.x % 4 * 2;
  float rS[kScores], rPV[kHeadDim / 2], rO[kHeadDim / 2];
  Queries rQ;
  Weights rP;
  int count = 0;  // of tiles before the work
  for (int i = 0;; ++i) {
    ptx::barrier_wait(&q_full, i % 2);
    const int index = __shfl_sync(0xffffffff, s_work, 0);
    if (index >= works) return;
    const Work work = work_of<kConsumers>(index, heads, seqlen);
    const int batch = work.head / num_heads, head = work.head % num_heads;
    const int m_first = work.m_start + 64 * warpgroup;
    const int m_warpgroup = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int m = m_first + m_warpgroup;
    const int block_tiles = tiles_of(work);
    // The tile that the diagonal crosses is the warpgroup's last one.
    const int diagonal = is_causal ? m_first / kBlockN : block_tiles;
    const int warpgroup_tiles = min(diagonal + 1, block_tiles);
    const bool ends_on_diagonal = diagonal < block_tiles;
    load_q(rQ, sQ, kFloatRow, 64 * warpgroup + m_warpgroup, kBlockM, softmax_scale);
    arrive(&q_empty);
    Statistics rows;

    const auto stage_of = [&](int tile) {
      return s_tiles + (count + tile) % kStages * kStageBytes;
    };
    const auto scales_of = [&](int tile) {
      return reinterpret_cast<const float*>(stage_of(tile) + 4 * kOperandBytes);
    };
    const auto start_qk = [&](int tile) {
      ptx::barrier_wait(&full[(count + tile) % kStages], (count + tile) / kStages % 2);
      multiply_qk(rS, rQ, stage_of(tile));
    };
    const auto start_pv = [&](int tile) {
      multiply_pv(rPV, rP, stage_of(tile) + 2 * kOperandBytes);
    };
    const auto use_s = [&](int tile) {
      scale_scores(rS, rQ, scales_of(tile));
      const int n_start = tile * kBlockN;
      if (tile == diagonal || n_start + kBlockN > seqlen) {
        mask(rS, n_start + n, m, seqlen, is_causal);
      }
      return softmax(rS, rows, rQ);
    };
    const auto leave = [&](int tile) { arrive(&empty[(count + tile) % kStages]); };
    const auto use_pv = [&](int tile, float2 row_scale) {
      add_pv(rO, rPV, row_scale, scales_of(tile) + kBlockN);
      leave(tile);
    };

    start_qk(0);
#pragma unroll
    for (float& x : rO) x = 0.0f;
    ptx::multiply_wait<0>(rS);
    float2 row_scale = use_s(0);
    for (int tile = 1; tile < warpgroup_tiles; ++tile) {
      split_p(rP, rS);
      start_qk(tile);
      start_pv(tile - 1);
      ptx::multiply_wait<1>(rS);
      const float2 next_scale = use_s(tile);
      ptx::multiply_wait<0>(rPV);
      use_pv(tile - 1, row_scale);
      row_scale = next_scale;
    }
    if (ends_on_diagonal) {
      // A column's scale would make rows depend on keys that they do not see.
      leave(warpgroup_tiles - 1);
      for (int tile = warpgroup_tiles; tile < block_tiles; ++tile) {
        ptx::barrier_wait(&full[(count + tile) % kStages], (count + tile) / kStages % 2);
        leave(tile);
      }
      ptx::barrier_wait(&diagonal_full, i % 2);
      add_product_tf32(rO, rS, row_scale, s_diagonal + 64 * warpgroup * kFloatRow,
                       threadIdx.x % 128 / 32 * 16 + 16);
    } else {
      split_p(rP, rS);
      start_pv(warpgroup_tiles - 1);
      ptx::multiply_wait<0>(rPV);
      use_pv(warpgroup_tiles - 1, row_scale);
    }
    if (is_causal) {
      if (!ends_on_diagonal) ptx::barrier_wait(&diagonal_full, i % 2);
      arrive(&diagonal_empty);
    }
    count += block_tiles;

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
}

int64_t scratch_floats(const Params& params) {
  const int64_t tiles =
      int64_t{params.batch} * params.num_heads * ceil_div(params.seqlen, kBlockN);
  return tiles * kTileBytes / sizeof(float) + 1;
}

int* work_counter(const Params& params) {
  return reinterpret_cast<int*>(params.scratch + scratch_floats(params) - 1);
}

template <int kConsumers>
cudaError_t launch_attention(const Params& params, int multiprocessors, cudaStream_t stream) {
  const int heads = params.batch * params.num_heads;
  const int64_t works = int64_t{heads} * ceil_div(params.seqlen, 64 * kConsumers);
  const int64_t at_once = multiprocessors * (3 - kConsumers);
  return launch_early(attention_kernel<kConsumers>, dim3(works < at_once ? works : at_once), 1,
                      dim3(kThreads<kConsumers>), kSmemBytes<kConsumers>, stream,
                      static_cast<const float*>(params.q), static_cast<const float*>(params.v),
                      reinterpret_cast<const unsigned char*>(params.scratch), work_counter(params),
                      static_cast<float*>(params.o), params.q_strides, params.v_strides, heads,
                      params.seqlen, params.num_heads, params.softmax_scale, params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim != kHeadDim) return cudaErrorInvalidValue;
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int heads = params.batch * params.num_heads;
  error = launch_kernel(split_kernel, dim3(heads * ceil_div(params.seqlen, kBlockN), 2),
                        dim3(kSplitThreads), 0, stream, static_cast<const float*>(params.k),
                        static_cast<const float*>(params.v),
                        reinterpret_cast<unsigned char*>(params.scratch), work_counter(params),
                        params.k_strides,
                        params.v_strides, params.seqlen, params.num_heads);
  if (error != cudaSuccess || ABLATE_ATTENTION) return error;
#ifdef CONSUMERS
  return launch_attention<CONSUMERS>(params, multiprocessors, stream);
#else
  const bool is_small = int64_t{heads} * ceil_div(params.seqlen, 128) < multiprocessors;
  return is_small ? launch_attention<1>(params, multiprocessors, stream)
                  : launch_attention<2>(params, multiprocessors, stream);
#endif
}

}  // namespace attention::ATTENTION_VERSION
