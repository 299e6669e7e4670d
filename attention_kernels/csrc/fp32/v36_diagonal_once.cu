// v36 - split P once on the diagonal
//
// Change: the product on the diagonal goes through the keys once, with the sums of all columns in
//         registers, instead of four times with those of 16 columns.
// Why:    each time, P was split into TF32 numbers again, a third of the instructions of the product.
//         The last tile of a row has nothing to overlap with.
// Cost:   64 registers for the sums; Q's and those of P V are free by then.
// Tile:   kBlockM x kBlockN = 128 x 64 or 64 x 64, block 384
// Layout: strided
// Takes:  float32, head_dim 64
// Needs:  sm_90a
// Precision: 3xfp16
// Flags:  --use_fast_math
// Expect: by a trial, half a microsecond less: 0.96 times the time of v35 with one batch entry of
//         512 rows and 12 heads.

#include <cuda_fp16.h>

#include "ptx.cuh"
#include "wgmma.cuh"

namespace attention::ATTENTION_VERSION {

// A block has a warpgroup that copies and kConsumers that compute, with 64 queries each. The
// registers are at most the multiprocessor's 65,536.
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
template <bool kDividesKeys>
constexpr int kBlockM = kDividesKeys ? 64 : 64 * kConsumers;
constexpr int kBlockN = 64;
constexpr int kHeadDim = 64;
constexpr int kStages = 4;            // tiles in shared memory
constexpr int kScores = kBlockN / 2;  // elements of S per thread
constexpr int kStep = 16;             // columns of A, rows of B, in one wgmma
constexpr int kSteps = 64 / kStep;
constexpr int kSplitThreads = 256;
constexpr int kTop = 14;     // exponent to which the largest number of a row or column is scaled
constexpr int kLeast = -97;  // the smallest exponent that is scaled for
constexpr int kMost = 127;
constexpr float kScaleP = 0x1p15f;

// An operand of wgmma is 64 rows of 128 bytes, in which the 16-byte chunk c of row r lies where
// chunk c ^ (r % 8) would. A tile of keys has two parts: K's hi and lo and the scales of its rows, then
// V's hi and lo and the scales of its columns.
constexpr int kRowBytes = 2 * kHeadDim;
constexpr int kOperandBytes = kBlockN * kRowBytes;
constexpr int kPartBytes = 2 * kOperandBytes + sizeof(float) * 64;
constexpr int kTileBytes = 2 * kPartBytes;
constexpr int kPartStride = (kPartBytes + 1023) / 1024 * 1024;
constexpr int kStageBytes = 2 * kPartStride;

// Shared memory: kStages tiles, then V in float32 on the block's diagonal, in padded rows; where
// warpgroups divide the keys, that has 64 rows, and one part of O follows.
constexpr int kFloatRow = kHeadDim + 4;
constexpr int kDiagonalBytes = 64 * kConsumers * kFloatRow * sizeof(float);
constexpr int kSmemBytes = kStages * kStageBytes + kDiagonalBytes;

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
  ptx::wait_for_previous();
  // Not before: attention reads Q and V without waiting. It starts when every block here has come this
  // far, and each has waited for what wrote them.
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
    rows[i] = n_start + r < seqlen ? load4(g_rows + r * strides.seqlen, 4 * threadIdx.x % kHeadDim)
                                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  unsigned char* operand = tiles + int64_t{blockIdx.x} * kTileBytes + (is_v ? kPartBytes : 0);
  float* scales = reinterpret_cast<float*>(operand + 2 * kOperandBytes);
  if (is_v) {
    split_v(operand, scales, rows);
  } else {
    split_k(operand, scales, rows);
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

// Q or P, hi and lo, as wgmma's operand A
struct Split {
  unsigned hi[kSteps][4], lo[kSteps][4];
};

// Rows m and m + 8 of Q, of which a lane has every fourth pair of columns
struct QueryRows {
  float2 pairs[2][kHeadDim / 8];
};

// Loads two rows of Q; those past the end are zero.
inline __device__ void load_q(QueryRows& rows, const float* gQ, int64_t g_stride, int m,
                              int seqlen) {
  const int n = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      rows.pairs[i][j] = m + 8 * i < seqlen ? load2(gQ + (m + 8 * i) * g_stride, 8 * j + n)
                                            : make_float2(0.0f, 0.0f);
    }
  }
}

// Scales and splits rows of Q. Returns what scales their scores to units of log(2).
inline __device__ float2 split_q(Split& rQ, const QueryRows& rows, float softmax_scale) {
  float undo[2];
  for (int i = 0; i < 2; ++i) {
    float largest = 0.0f;
    for (const float2 x : rows.pairs[i]) largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
    const int exponent = exponent_of(reduce_max(largest));
    const float scale = power_of_two(kTop - exponent);
    undo[i] = softmax_scale * 1.4426950408889634f * power_of_two(exponent - kTop);
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const float2 x = rows.pairs[i][j];
      const int at = j % 2 * 2 + i;
      split(x.x * scale, x.y * scale, rQ.hi[j / 2][at], rQ.lo[j / 2][at]);
    }
  }
  return make_float2(undo[0], undo[1]);
}

// sums = A B, small products first. The hi of B is at `b`, its lo in the next operand; a step is
// kStepBytes further on.
template <bool kTransposed, int kStepBytes>
inline __device__ void multiply(float (&sums)[32], Split& a, const unsigned char* b) {
  const uint64_t hi = ptx::matrix_descriptor(b);
  const uint64_t lo = ptx::matrix_descriptor(b + kOperandBytes);
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

// S = Q K^T
inline __device__ void multiply_qk(float (&rS)[kScores], Split& rQ, const unsigned char* sK) {
  multiply<false, kStep * sizeof(half)>(rS, rQ, sK);
}

// PV = P V. V's rows are rows of B, where K's are columns.
inline __device__ void multiply_pv(float (&rPV)[kHeadDim / 2], Split& rP, const unsigned char* sV) {
  multiply<true, kStep * kRowBytes>(rPV, rP, sV);
}

// An accumulator's elements are in the order of operand A.
inline __device__ void split_p(Split& rP, const float (&rS)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    split(rS[2 * i] * kScaleP, rS[2 * i + 1] * kScaleP, rP.hi[i / 4][i % 4], rP.lo[i / 4][i % 4]);
  }
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

// Undoes the scales of Q and K.
inline __device__ void scale_scores(float (&rS)[kScores], float2 q_scale, const float* k_scales) {
  const float* lane_scales = k_scales + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < kBlockN / 8; ++j) {
    const float2 k_scale = load2(lane_scales, 8 * j);
    for (int i = 0; i < 4; ++i) {
      float& score = rS[4 * j + i];
      score = (i < 2 ? q_scale.x : q_scale.y) * (score * (i % 2 ? k_scale.y : k_scale.x));
    }
  }
}

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

// O = row_scale O + P V in TF32, which has float32's exponents, with V not scaled. P = 0 times any
// finite V is 0, however large it is. The lane's warp sees the first `keys` keys.
inline __device__ void add_product_tf32(float (&rO)[kHeadDim / 2], const float (&rP)[kScores],
                                        float2 row_scale, const float* s_v, int keys) {
  const int lane_id = threadIdx.x % 32;
  const float* lane_v = s_v + 2 * (lane_id % 4) * kFloatRow + lane_id / 4;
  float small[kHeadDim / 8][4] = {}, large[kHeadDim / 8][4] = {};
#pragma unroll
  for (int j = 0; j < kBlockN / 8; ++j) {
    if (8 * j >= keys) break;
    unsigned hiP[4], loP[4];
    for (int i = 0; i < 4; ++i) {
      split_tf32(rP[4 * j + i % 2 * 2 + i / 2], hiP[i], loP[i]);
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d) {
      unsigned hiV[2], loV[2];
      for (int i = 0; i < 2; ++i) {  // halved: rounding up could overflow
        split_tf32(0.5f * lane_v[(8 * j + i) * kFloatRow + 8 * d], hiV[i], loV[i]);
      }
      ptx::mma_tf32(small[d], loP, hiV);
      ptx::mma_tf32(small[d], hiP, loV);
      ptx::mma_tf32(large[d], hiP, hiV);
    }
  }
  for (int d = 0; d < kHeadDim / 8; ++d) {
    for (int i = 0; i < 4; ++i) {
      float& x = rO[4 * d + i];
      x = fmaf(x, i < 2 ? row_scale.x : row_scale.y, 2.0f * (small[d][i] + large[d][i]));
    }
  }
}

// Tells that this warp is done with what the barrier guards. The fence ends its loads of scales first:
// the next copy passes through another proxy and could overtake them.
inline __device__ void arrive(ptx::Barrier* barrier) {
  ptx::proxy_fence();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

// Consumers start their products in turn: one waits until another has passed the turn to it.
inline __device__ void wait_for_turn(int warpgroup) { ptx::named_barrier_sync(1 + warpgroup, 256); }
inline __device__ void pass_turn(int warpgroup) {
  ptx::named_barrier_arrive(1 + (warpgroup + 1) % kConsumers, 256);
}

template <bool kDividesKeys>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ v,
                     const unsigned char* __restrict__ tiles, float* __restrict__ o,
                     Strides q_strides, Strides v_strides, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal) {
  constexpr int kBlockM = ATTENTION_VERSION::kBlockM<kDividesKeys>;
  ATTENTION_ALIGNED_SHARED(unsigned char, s_tiles, 1024);
  float* s_diagonal = reinterpret_cast<float*>(s_tiles + kStages * kStageBytes);
  __shared__ ptx::Barrier k_full[kStages], v_full[kStages], empty[kStages], diagonal_full;
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_start = (gridDim.y - 1 - blockIdx.y) * kBlockM;
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const int block_tiles = (n_end + kBlockN - 1) / kBlockN;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;

  // The shuffle tells the compiler that all lanes have the same number.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const int m_first = kDividesKeys ? m_start : m_start + 64 * warpgroup;
  const int r = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  QueryRows q_rows;
  if (warpgroup < kConsumers) {
    load_q(q_rows, q + batch * q_strides.batch + head * q_strides.head, q_strides.seqlen,
           m_first + r, seqlen);
  }

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&k_full[stage], 1);
      ptx::barrier_init(&v_full[stage], 1);
      // Every warp that reads the tile arrives.
      ptx::barrier_init(&empty[stage], kDividesKeys ? 4 : 4 * kConsumers);
    }
    ptx::barrier_init(&diagonal_full, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();

  // The last warpgroup copies: one thread tiles, the second warp V on the diagonal.
  if (threadIdx.x >= 128 * kConsumers) {
    ptx::lower_registers<kProducerRegisters>();
    const int thread = threadIdx.x - 128 * kConsumers;
    if (thread >= 32) {
      if (thread >= 64 || !is_causal) return;
      const float* gV = v + batch * v_strides.batch + head * v_strides.head;
      constexpr int kBytes = kHeadDim * sizeof(float);
      if (thread == 32) ptx::barrier_expect(&diagonal_full, kBlockM * kBytes);
      __syncwarp();
      // Rows past the end become copies of the last one.
      for (int r = thread - 32; r < kBlockM; r += 32) {
        ptx::copy_bulk(s_diagonal + r * kFloatRow,
                       gV + min(m_start + r, seqlen - 1) * v_strides.seqlen, kBytes,
                       &diagonal_full);
      }
      return;
    }
    if (thread != 0) return;
    ptx::wait_for_previous();
    const unsigned char* g_tiles =
        tiles + int64_t{blockIdx.x} * ((seqlen + kBlockN - 1) / kBlockN) * kTileBytes;
    // The diagonal tile of the block's last rows needs no split V.
    const int v_tiles = is_causal ? m_start / kBlockN + kBlockM / 64 - 1 : block_tiles;
    for (int tile = 0; tile < block_tiles; ++tile) {
      const int stage = tile % kStages;
      unsigned char* s_tile = s_tiles + stage * kStageBytes;
      const unsigned char* g_tile = g_tiles + int64_t{tile} * kTileBytes;
      // At first, the phase before is complete.
      ptx::barrier_wait(&empty[stage], tile / kStages % 2 ^ 1);
      ptx::barrier_expect(&k_full[stage], kPartBytes);
      ptx::copy_bulk(s_tile, g_tile, kPartBytes, &k_full[stage]);
      if (tile >= v_tiles) continue;
      ptx::barrier_expect(&v_full[stage], kPartBytes);
      ptx::copy_bulk(s_tile + kPartStride, g_tile + kPartBytes, kPartBytes, &v_full[stage]);
    }
    return;
  }
  ptx::raise_registers<kConsumerRegisters>();

  const int n = threadIdx.x % 4 * 2;
  // The diagonal crosses the last tile of these rows.
  const int diagonal = is_causal ? m_first / kBlockN : block_tiles;
  const int end = min(diagonal + 1, block_tiles);
  constexpr int kApart = kDividesKeys ? kConsumers : 1;  // tiles of a warpgroup
  const int first = kDividesKeys ? warpgroup : 0;

  // A warpgroup's diagonal tile and those after it are not given back: no others take their place.
  static_assert(kStages >= kConsumers, "a block's last kConsumers tiles stay in shared memory");
  static_assert(kStages % kConsumers == 0, "a warpgroup waits for every tile of its stages");
  const bool has_diagonal = diagonal < block_tiles && diagonal % kApart == first;
  // Both warpgroups have these tiles; for others there are no turns.
  const int shared = kDividesKeys ? 0 : is_causal ? m_start / kBlockN + 1 : block_tiles;

  Split rQ, rP;
  const float2 q_scale = split_q(rQ, q_rows, softmax_scale);
  Statistics rows;
  float2 row_scale = make_float2(1.0f, 1.0f);
  float rS[kScores], rPV[kHeadDim / 2], rO[kHeadDim / 2] = {};
  const auto start_qk = [&](int tile) {
    ptx::barrier_wait(&k_full[tile % kStages], tile / kStages % 2);
    if (tile < shared) wait_for_turn(warpgroup);
    multiply_qk(rS, rQ, s_tiles + tile % kStages * kStageBytes);
  };
  const auto start_pv = [&](int tile) {
    ptx::barrier_wait(&v_full[tile % kStages], tile / kStages % 2);
    multiply_pv(rPV, rP, s_tiles + tile % kStages * kStageBytes + kPartStride);
  };
  const auto end_turn = [&](int tile) {
    const bool is_last = warpgroup == kConsumers - 1 && tile + 1 == shared;
    if (tile < shared && !is_last) pass_turn(warpgroup);
  };
  const auto scales_of = [&](int tile) {
    return reinterpret_cast<const float*>(s_tiles + tile % kStages * kStageBytes +
                                          2 * kOperandBytes);
  };
  const auto use_s = [&](int tile) {
    scale_scores(rS, q_scale, scales_of(tile));
    const int n_start = tile * kBlockN;
    if (tile == diagonal || n_start + kBlockN > seqlen) {
      mask(rS, n_start + n, m_first + r, seqlen, is_causal);
    }
    return softmax(rS, rows);
  };
  const auto use_pv = [&](int tile) {
    add_pv(rO, rPV, row_scale, scales_of(tile) + kPartStride / sizeof(float));
    arrive(&empty[tile % kStages]);
  };

  if (!kDividesKeys && warpgroup == kConsumers - 1) pass_turn(warpgroup);
  if (first < end) {
    start_qk(first);
    end_turn(first);
    ptx::multiply_wait<0>(rS);
    row_scale = use_s(first);
  }
  int tile = first + kApart;
  for (; tile < end; tile += kApart) {
    split_p(rP, rS);
    start_qk(tile);
    start_pv(tile - kApart);
    end_turn(tile);
    ptx::multiply_wait<1>(rS);
    const float2 next_scale = use_s(tile);
    ptx::multiply_wait<0>(rPV);
    use_pv(tile - kApart);
    row_scale = next_scale;
  }
  if (first < end && !has_diagonal) {
    split_p(rP, rS);
    start_pv(tile - kApart);
    ptx::multiply_wait<0>(rPV);
    use_pv(tile - kApart);
  }
  if (has_diagonal) {
    // A column's scale would make rows depend on keys that they do not see.
    ptx::barrier_wait(&diagonal_full, 0);
    add_product_tf32(rO, rS, row_scale, s_diagonal + (m_first - m_start) * kFloatRow,
                     threadIdx.x % 128 / 32 * 16 + 16);
  }

  float row_sum[2] = {reduce_sum(rows.row_sum[0]), reduce_sum(rows.row_sum[1])};
  if (kDividesKeys) {
    __shared__ float2 s_statistics[64];
    float* s_o = s_diagonal + 64 * kFloatRow;
    if (warpgroup == 1) {
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < kHeadDim / 8; ++j) {
          store2(s_o + (r + 8 * i) * kFloatRow, 8 * j + n, rO[4 * j + 2 * i],
                 rO[4 * j + 2 * i + 1]);
        }
        if (n == 0) s_statistics[r + 8 * i] = make_float2(rows.row_max[i], row_sum[i]);
      }
      ptx::named_barrier_arrive(3, 256);
      return;
    }
    ptx::named_barrier_sync(3, 256);
    for (int i = 0; i < 2; ++i) {
      const float2 other = s_statistics[r + 8 * i];
      const float new_max = fmaxf(rows.row_max[i], other.x);
      const float own_scale = exp2f(rows.row_max[i] - new_max);
      const float scale = exp2f(other.x - new_max);
      row_sum[i] = row_sum[i] * own_scale + other.y * scale;
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float2 x = load2(s_o + (r + 8 * i) * kFloatRow, 8 * j + n);
        rO[4 * j + 2 * i] = rO[4 * j + 2 * i] * own_scale + x.x * scale;
        rO[4 * j + 2 * i + 1] = rO[4 * j + 2 * i + 1] * own_scale + x.y * scale;
      }
    }
  }

  float* gO = o + (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  for (int i = 0; i < 2; ++i) {
    const float scale = 1.0f / row_sum[i];
    const int row = m_first + r + 8 * i;
    if (row >= seqlen) continue;
    for (int j = 0; j < kHeadDim / 8; ++j) {
      store2(gO + row * int64_t{num_heads} * kHeadDim, 8 * j + n, rO[4 * j + 2 * i] * scale,
             rO[4 * j + 2 * i + 1] * scale);
    }
  }
}

int64_t scratch_floats(const Params& params) {
  const int64_t heads = int64_t{params.batch} * params.num_heads;
  return heads * ceil_div(params.seqlen, kBlockN) * kTileBytes / sizeof(float);
}

template <bool kDividesKeys>
cudaError_t launch_attention(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM<kDividesKeys>));
  return launch_early(attention_kernel<kDividesKeys>, grid, 1, dim3(kThreads), kSmemBytes, stream,
                      static_cast<const float*>(params.q), static_cast<const float*>(params.v),
                      reinterpret_cast<const unsigned char*>(params.scratch),
                      static_cast<float*>(params.o), params.q_strides, params.v_strides,
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
  error = launch_early(split_kernel, dim3(heads * ceil_div(params.seqlen, kBlockN), 2), 1,
                       dim3(kSplitThreads), 0, stream, static_cast<const float*>(params.k),
                       static_cast<const float*>(params.v),
                       reinterpret_cast<unsigned char*>(params.scratch), params.k_strides,
                       params.v_strides, params.seqlen, params.num_heads);
  if (error != cudaSuccess) return error;
  const int64_t blocks = int64_t{heads} * ceil_div(params.seqlen, kBlockM<false>);
  return blocks < multiprocessors ? launch_attention<true>(params, stream)
                                  : launch_attention<false>(params, stream);
}

}  // namespace attention::ATTENTION_VERSION
