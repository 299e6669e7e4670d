// Rows of activations: four floats at a time, LayerNorm, and how rows are packed for tensor cores.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "block_sum.cuh"
#include "ptx.cuh"

namespace attention {
namespace {

__device__ inline float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ inline void store4(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
__device__ inline float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ inline float4 operator*(float4 a, float4 b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ inline float4 four(float x) { return {x, x, x, x}; }
__device__ inline float sum_of(float4 v) { return v.x + v.y + v.z + v.w; }

// Returns a thread's four columns of the LayerNorm of a block's row. v is 0 in threads that have no
// columns.
__device__ inline float4 layer_norm(float4 v, bool is_here, int columns, float epsilon,
                                    float4 weight, float4 bias, float (&warps)[2][32]) {
  const float mean = block_sum(sum_of(v), warps[0]) / columns;
  v = v + four(-mean);
  const float square = is_here ? sum_of(v * v) : 0.0f;
  const float scale = rsqrtf(block_sum(square, warps[1]) / columns + epsilon);
  return v * four(scale) * weight + bias;
}

// Packed, x is (m / 16, k / 32) chunks. Each has 2 groups of 16 k, their hi and lo, a uint4 for
// each of 32 lanes, and then a scale per row. A lane has four k of rows lane / 4 and lane / 4 + 8.
constexpr int kPackedRows = 16, kPackedK = 32;
constexpr int kScales = 2 * 2 * 32;                // the first uint4 of a chunk's scales
constexpr int kChunk = kScales + kPackedRows / 4;  // uint4s in a chunk
constexpr int kTop = 14;      // exponent to which a row's or a column's largest number is scaled
constexpr int kLeast = -112;  // the smallest exponent that is scaled for
constexpr int kMost = 127;

// Splits x and y into hi + lo; a word holds a pair of halves.
__device__ inline void split(float x, float y, unsigned& hi, unsigned& lo) {
  const half2 high = __floats2half2_rn(x, y);
  const float2 back = __half22float2(high);
  const half2 low = __floats2half2_rn(x - back.x, y - back.y);
  hi = *reinterpret_cast<const unsigned*>(&high);
  lo = *reinterpret_cast<const unsigned*>(&low);
}

__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// Returns the exponent of the largest of some numbers, for which they are scaled before they are
// split: they are multiplied by 2^(kTop - exponent), and their sums by the inverse.
__device__ inline int exponent_of(float largest) {
  return min(max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, kLeast), kMost);
}

// Stores four numbers of a row of k, packed; largest: of all in the same 32 columns.
__device__ inline void store_packed(uint4* packed, int k, int row, int column, float4 v,
                                    float largest) {
  const int exponent = exponent_of(largest);
  const float scale = power_of_two(kTop - exponent);
  uint2 hi, lo;
  split(v.x * scale, v.y * scale, hi.x, lo.x);
  split(v.z * scale, v.w * scale, hi.y, lo.y);
  uint4* const chunk =
      packed +
      (static_cast<int64_t>(row / kPackedRows) * (k / kPackedK) + column / kPackedK) * kChunk;
  const int lane = row % 8 * 4 + column % 16 / 4;
  auto* const to = reinterpret_cast<unsigned*>(chunk + column % kPackedK / 16 * 2 * 32 + lane) +
                   row % kPackedRows / 8;
  to[0] = hi.x, to[2] = hi.y;
  to[4 * 32] = lo.x, to[4 * 32 + 2] = lo.y;
  if (column % kPackedK == 0)
    reinterpret_cast<float*>(chunk + kScales)[row % kPackedRows] = power_of_two(exponent - kTop);
}

// The same for two rows, the second of which is eight further down in the chunk.
__device__ inline void store_packed(uint4* packed, int k, int row, int column, float4 v, float4 w,
                                    float largest_v, float largest_w) {
  const int exponents[2] = {exponent_of(largest_v), exponent_of(largest_w)};
  const float a = power_of_two(kTop - exponents[0]), b = power_of_two(kTop - exponents[1]);
  uint4 hi, lo;
  split(v.x * a, v.y * a, hi.x, lo.x), split(w.x * b, w.y * b, hi.y, lo.y);
  split(v.z * a, v.w * a, hi.z, lo.z), split(w.z * b, w.w * b, hi.w, lo.w);
  uint4* const chunk =
      packed +
      (static_cast<int64_t>(row / kPackedRows) * (k / kPackedK) + column / kPackedK) * kChunk;
  uint4* const to = chunk + column % kPackedK / 16 * 2 * 32 + row % 8 * 4 + column % 16 / 4;
  to[0] = hi, to[32] = lo;
  if (column % kPackedK == 0) {
    auto* const scales = reinterpret_cast<float*>(chunk + kScales) + row % kPackedRows;
    scales[0] = power_of_two(exponents[0] - kTop), scales[8] = power_of_two(exponents[1] - kTop);
  }
}

__device__ inline float largest_of(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Packs four numbers of a row of k. Eight lanes with consecutive columns share a scale, so whole
// warps must call it.
__device__ inline void pack4(uint4* packed, int k, int row, int column, float4 v, bool is_here) {
  float largest = largest_of(v);
#pragma unroll
  for (int width = kPackedK / 8; width > 0; width /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kWarp, largest, width));
  if (is_here) store_packed(packed, k, row, column, v, largest);
}

}  // namespace
}  // namespace attention
