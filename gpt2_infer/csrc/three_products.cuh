// What products of numbers hi + lo share: how W is packed, the scales, and the kernels that pack W
// and x, or fold a LayerNorm into W.
//
// Packed, W is (n / 64, k / 32) operands of wgmma: 64 rows of 128 bytes, swizzled. A row is a column
// of W: 32 k of hi, then of lo. Of 16 k, lane c of four has 4 c to 4 c + 3, as in packed x: the
// first two lie in the first half of their bytes, the others in the second.

#pragma once

#include "product.cuh"

namespace attention {
namespace {

constexpr int kColumnsW = 64;                 // in an operand
constexpr int kBytesRowW = 2 * 2 * kPackedK;  // hi and lo of a column
constexpr int kBytesOperand = kColumnsW * kBytesRowW;

constexpr int kShift = 22;  // sums are 2^-22 times as large, so that few can overflow
constexpr float kSmaller = 0x1p-22f;

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

// Finds the scales of 64 columns of W per block.
constexpr int kColumnThreads = 512;
__global__ void __launch_bounds__(kColumnThreads) scale_columns(ProductParams p) {
  __shared__ float s_largest[kColumnThreads / kColumnsW][kColumnsW];
  const int in_block = threadIdx.x % kColumnsW, part = threadIdx.x / kColumnsW;
  const int column = blockIdx.x * kColumnsW + in_block;
  float largest = 0.0f;
#pragma unroll 8
  for (int k = part; k < p.k; k += kColumnThreads / kColumnsW)
    largest = fmaxf(largest, fabsf(p.x[static_cast<int64_t>(k) * p.n + column]));
  s_largest[part][in_block] = largest;
  __syncthreads();
  if (part > 0) return;
  for (const auto& other : s_largest) largest = fmaxf(largest, other[in_block]);
  p.exponents[column] = exponent_of(largest);
}

// Packs an operand of W per block.
constexpr int kOperandThreads = kColumnsW * kPackedK / 16;
__global__ void __launch_bounds__(kOperandThreads) pack_operand(ProductParams p) {
  const int row = threadIdx.x % kColumnsW, step = threadIdx.x / kColumnsW;
  const int column = blockIdx.x * kColumnsW + row, first = blockIdx.y * kPackedK + step * 16;
  const float scale = power_of_two(kTop - p.exponents[column]);
  const auto load = [&](int k) {
    return scale * p.x[static_cast<int64_t>(first + k) * p.n + column];
  };
  const int64_t operand = static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
  uint4* const to = p.packed_y + (operand * kBytesOperand + row * kBytesRowW) / sizeof(uint4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      split(load(4 * i + 2 * half), load(4 * i + 2 * half + 1), hi[i], lo[i]);
    const int chunk = 2 * step + half;
    to[chunk ^ row % 8] = {hi[0], hi[1], hi[2], hi[3]};
    to[(4 + chunk) ^ row % 8] = {lo[0], lo[1], lo[2], lo[3]};
  }
}

// Multiplies a LayerNorm's bias and weight by 64 columns of W per block, and adds the product's bias to
// the first: the bias of a product of the LayerNorm's result, and what follows it.
__global__ void __launch_bounds__(kColumnThreads) fold_norm(ProductParams p) {
  __shared__ double s_sums[2][kColumnThreads / kColumnsW][kColumnsW];
  const int in_block = threadIdx.x % kColumnsW, part = threadIdx.x / kColumnsW;
  const int column = blockIdx.x * kColumnsW + in_block;
  double sums[2] = {};
#pragma unroll 8
  for (int k = part; k < p.k; k += kColumnThreads / kColumnsW) {
    const double w = p.x[static_cast<int64_t>(k) * p.n + column];
    sums[0] += w * p.ln_bias[k], sums[1] += w * p.ln_weight[k];
  }
  for (int i = 0; i < 2; ++i) s_sums[i][part][in_block] = sums[i];
  __syncthreads();
  if (part > 1) return;
  double sum = part == 0 ? p.bias[column] : 0.0;
  for (const auto& other : s_sums[part]) sum += other[in_block];
  p.y[part * p.n + column] = static_cast<float>(sum);
}

// Prepares the weights: packs them, or folds a LayerNorm into them.
inline cudaError_t prepare(const ProductParams& p, cudaStream_t stream) {
  const unsigned across = p.n / kColumnsW, down = p.k / kPackedK;
  if (p.mode == kFoldNorm)
    return launch_kernel(fold_norm, dim3(across), dim3(kColumnThreads), 0, stream, p);
  const cudaError_t error =
      launch_kernel(scale_columns, dim3(across), dim3(kColumnThreads), 0, stream, p);
  if (error != cudaSuccess) return error;
  return launch_kernel(pack_operand, dim3(across, down), dim3(kOperandThreads), 0, stream, p);
}

constexpr int kPackThreads = 128;

// Packs x, a chunk per warp. Rows from p.m on become 0.
__global__ void __launch_bounds__(kPackThreads) pack(ProductParams p) {
  ptx::allow_next();
  const int lane = threadIdx.x % 32, across = p.k / kPackedK;
  const int chunk = (blockIdx.x * kPackThreads + threadIdx.x) / 32, strip = chunk / across;
  const int row = strip * kPackedRows + lane / 4;
  ptx::wait_for_previous();
  if (strip * kPackedRows >= p.m) return;
  auto* const to = p.packed_x + static_cast<int64_t>(chunk) * kChunk;
  uint2 hi[2][2], lo[2][2];  // by row, and 16 k
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float4 v[2] = {};
    const float* const from =
        p.x + static_cast<int64_t>(row + 8 * i) * p.k + chunk % across * kPackedK + lane % 4 * 4;
    if (row + 8 * i < p.m) v[0] = load4(from), v[1] = load4(from + 16);
    float largest = fmaxf(largest_of(v[0]), largest_of(v[1]));
    largest = fmaxf(largest, __shfl_xor_sync(kWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kWarp, largest, 2));
    const int exponent = exponent_of(largest);
    const float scale = power_of_two(kTop - exponent);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const float4 x = v[group];
      split(x.x * scale, x.y * scale, hi[i][group].x, lo[i][group].x);
      split(x.z * scale, x.w * scale, hi[i][group].y, lo[i][group].y);
    }
    if (lane % 4 == 0)
      reinterpret_cast<float*>(to + kScales)[lane / 4 + 8 * i] = power_of_two(exponent - kTop);
  }
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const auto both = [&](const uint2(&x)[2][2]) {
      return uint4{x[0][group].x, x[1][group].x, x[0][group].y, x[1][group].y};
    };
    to[group * 64 + lane] = both(hi), to[group * 64 + 32 + lane] = both(lo);
  }
}

// Packs x if it is given as floats.
inline cudaError_t launch_pack(const ProductParams& p, cudaStream_t stream) {
  if (p.packed_x == nullptr) return cudaErrorInvalidValue;
  if (p.x == nullptr) return cudaSuccess;
  const int chunks = ceil_div(p.m, kPackedRows) * (p.k / kPackedK);
  const dim3 blocks(ceil_div(chunks, kPackThreads / 32));
  return launch_early(pack, blocks, 1, dim3(kPackThreads), 0, stream, p);
}

}  // namespace
}  // namespace attention
