// What the matrix products share: their parameters, how a product is cut into parts, and how a tile
// is finished.

#pragma once

#include <cstdint>

#include "ptx.cuh"

// nvcc's header or, on the CPU, emulator/cuda_pipeline.h.
#include <cuda_pipeline.h>

namespace attention {

enum Mode { kBias, kGelu, kResidual };

// Must match ProductParams in product.py. Matrices are row-major; all but x are 16-byte aligned.
struct StructParams {
  const float* x;          // (m, k)
  const void* weight;      // float (k, n), or packed; not written by the previous kernel
  const float* bias;       // (n)
  float* y;                // (m, n): kBias, kGelu; with a LayerNorm, its output
  float* residual;         // (m, n): kResidual adds to it
  const float* ln_weight;  // (n); null: no LayerNorm
  const float* ln_bias;    // (n)
  float* workspace;        // (blocks + tiles, kBlockM, kBlockN), unless every tile is whole
  const int* exponents;    // (n); of packed weights
  int m, n, k;
  int mode;
  float epsilon;
  int tile;    // index in launch()'s list
  int blocks;  // from 1 to tiles * slabs
};
using ProductParams = StructParams;

namespace {

constexpr unsigned kWarp = 0xffffffff;

// Slabs form one sequence: those of tile 0, of tile 1, ... Tiles with the same columns are
// adjacent, so blocks that run at the same time read the same weights.
struct Slabs {
  int all, per_tile, blocks, tiles_m;

  __device__ Slabs(const ProductParams& p, int block_m, int block_n, int block_k)
      : per_tile(p.k / block_k), blocks(p.blocks), tiles_m((p.m + block_m - 1) / block_m) {
    all = tiles_m * (p.n / block_n) * per_tile;
  }
  __device__ int first_of(int block) const {
    return static_cast<int>(static_cast<int64_t>(all) * block / blocks);
  }
  __device__ int block_of(int slab) const {
    return static_cast<int>((static_cast<int64_t>(slab + 1) * blocks - 1) / all);
  }
};

__device__ inline float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ inline void store4(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
__device__ inline float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

__device__ inline float gelu(float x) {
  constexpr float kRoot = 0.7978845608028654f;  // sqrt(2 / pi)
  // x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u))
  const float u = kRoot * (x + 0.044715f * x * x * x);
  return x / (1.0f + expf(-2.0f * u));
}

// Finishes four complete sums: adds the bias, then applies GELU or adds the residual.
__device__ inline float4 finish_chunk(const ProductParams& p, int row, int column, float4 sum) {
  const int64_t at = static_cast<int64_t>(row) * p.n + column;
  float4 v = sum + load4(p.bias + column);
  if (p.mode == kResidual) {
    v = v + load4(p.residual + at);
    store4(p.residual + at, v);
    return v;
  }
  if (p.mode == kGelu) v = {gelu(v.x), gelu(v.y), gelu(v.z), gelu(v.w)};
  store4(p.y + at, v);
  return v;
}

__device__ inline float block_sum(float value, float* warps) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value += __shfl_xor_sync(kWarp, value, width);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < blockDim.x / 32; ++i) sum += warps[i];
  return sum;
}

// Adds up and finishes the tiles that were cut. A block works on row blockIdx.x, each thread on
// four columns; with a LayerNorm, one block has the whole row.
__global__ void finish(ProductParams p, int block_m, int block_n, int block_k) {
  __shared__ float warps[2][32];
  ptx::allow_next();
  const int row = blockIdx.x, column = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
  const bool is_here = column < p.n;
  const Slabs slabs(p, block_m, block_n, block_k);
  const int tile = row / block_m + column / block_n * slabs.tiles_m;
  int block = 0, last = 0;
  if (is_here) {
    const int slab = tile * slabs.per_tile;
    block = slabs.block_of(slab), last = slabs.block_of(slab + slabs.per_tile - 1);
  }
  const float* const at =
      p.workspace + static_cast<int64_t>(row % block_m) * block_n + column % block_n;
  const int64_t part = static_cast<int64_t>(block_m) * block_n;
  ptx::wait_for_previous();
  float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
  if (block < last) {
    v = load4(at + (block + tile) * part);
#pragma unroll 4
    for (++block; block <= last; ++block) v = v + load4(at + (block + tile) * part);
    v = finish_chunk(p, row, column, v);
  } else if (is_here && p.mode == kResidual) {
    v = load4(p.residual + static_cast<int64_t>(row) * p.n + column);
  }
  if (p.ln_weight == nullptr) return;

  const float mean = block_sum(v.x + v.y + v.z + v.w, warps[0]) / p.n;
  v = v + float4{-mean, -mean, -mean, -mean};
  const float square = is_here ? v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w : 0.0f;
  const float scale = rsqrtf(block_sum(square, warps[1]) / p.n + p.epsilon);
  if (!is_here) return;
  const float4 weight = load4(p.ln_weight + column), bias = load4(p.ln_bias + column);
  store4(p.y + static_cast<int64_t>(row) * p.n + column,
         {v.x * scale * weight.x + bias.x, v.y * scale * weight.y + bias.y,
          v.z * scale * weight.z + bias.z, v.w * scale * weight.w + bias.w});
}

// Launches product() for tiles of type T, and then finish() if there is anything left to do.
template <typename T>
cudaError_t launch_tile(void (*product)(ProductParams), const ProductParams& p,
                        cudaStream_t stream) {
  if (p.m < 1 || p.n % T::kBlockN != 0 || p.k % T::kBlockK != 0) return cudaErrorInvalidValue;
  const int64_t tiles = static_cast<int64_t>(ceil_div(p.m, T::kBlockM)) * (p.n / T::kBlockN);
  if (p.blocks < 1 || p.blocks > tiles * (p.k / T::kBlockK)) return cudaErrorInvalidValue;
  if (p.ln_weight != nullptr && p.n > 4 * 1024) return cudaErrorInvalidValue;
  const cudaError_t error =
      launch_early(product, dim3(p.blocks), 1, dim3(T::kThreads), T::kSmemBytes, stream, p);
  const bool is_whole = tiles % p.blocks == 0;  // every block has whole tiles
  if (error != cudaSuccess || (is_whole && p.ln_weight == nullptr)) return error;
  const int row = ceil_div(p.n / 4, 32) * 32;
  const int threads = p.ln_weight != nullptr || row < 256 ? row : 256;
  return launch_early(finish, dim3(p.m, ceil_div(row, threads)), 1, dim3(threads), 0, stream, p,
                      T::kBlockM, T::kBlockN, T::kBlockK);
}

}  // namespace
}  // namespace attention
