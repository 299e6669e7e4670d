// Element, the type of q, k, v and o in a file that takes several dtypes, and its conversions.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common.cuh"

namespace attention {

namespace dtypes {
using float16 = __half;
using bfloat16 = __nv_bfloat16;
using float32 = float;
using float64 = double;
}  // namespace dtypes

using Element = dtypes::ATTENTION_DTYPE;

// Converts 16 bytes of T to floats.
template <typename T>
__device__ void unpack(const uint4& chunk, float (&x)[16 / sizeof(T)]);

template <>
__device__ inline void unpack<float>(const uint4& chunk, float (&x)[4]) {
  x[0] = __uint_as_float(chunk.x), x[1] = __uint_as_float(chunk.y);
  x[2] = __uint_as_float(chunk.z), x[3] = __uint_as_float(chunk.w);
}

template <>
__device__ inline void unpack<__nv_bfloat16>(const uint4& chunk, float (&x)[8]) {
  const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

template <>
__device__ inline void unpack<__half>(const uint4& chunk, float (&x)[8]) {
  const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xffff)));
    x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
  }
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T from_float(float x);

template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16(x);
}

}  // namespace attention
