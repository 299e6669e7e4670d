// What products of numbers hi + lo share: the scales, and the kernel that packs x.

#pragma once

#include "product.cuh"

namespace attention {
namespace {

constexpr int kShift = 22;  // sums are 2^-22 times as large, so that few can overflow
constexpr float kSmaller = 0x1p-22f;

__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// Multiplies sums of four columns by the scales of W, in two steps: the power itself may be too
// large for a float.
struct Unscale {
  float4 first, second;

  __device__ explicit Unscale(int4 exponents) {
    set(exponents.x, first.x, second.x), set(exponents.y, first.y, second.y);
    set(exponents.z, first.z, second.z), set(exponents.w, first.w, second.w);
  }
  static __device__ void set(int exponent, float& first, float& second) {
    const int all = exponent - kTop + kShift;
    first = power_of_two(all >> 1), second = power_of_two(all - (all >> 1));
  }
  __device__ float4 operator()(float4 v) const {
    return {v.x * first.x * second.x, v.y * first.y * second.y, v.z * first.z * second.z,
            v.w * first.w * second.w};
  }
};

// Packs x, a row per blockIdx.x.
__global__ void pack(ProductParams p) {
  ptx::allow_next();
  const int row = blockIdx.x, column = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
  const bool is_here = column < p.k;
  ptx::wait_for_previous();
  float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
  if (is_here) v = load4(p.x + static_cast<int64_t>(row) * p.k + column);
  pack4(p.packed_x, p.k, row, column, v, is_here);
}

// Packs x if it is given as floats.
inline cudaError_t launch_pack(const ProductParams& p, cudaStream_t stream) {
  if (p.packed_x == nullptr) return cudaErrorInvalidValue;
  if (p.x == nullptr) return cudaSuccess;
  constexpr int kThreads = 256;
  const int blocks = ceil_div(p.k / 4, kThreads);
  return launch_early(pack, dim3(p.m, blocks), 1, dim3(kThreads), 0, stream, p);
}

}  // namespace
}  // namespace attention
