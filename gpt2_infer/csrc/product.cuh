// What the matrix products share: their parameters, how a product is cut into parts, and how a tile
// is finished.

#pragma once

#include <cstdint>

#include "rows.cuh"

// nvcc's header or, on the CPU, emulator/cuda_pipeline.h.
#include <cuda_pipeline.h>

namespace attention {

enum Mode { kBias, kGelu, kResidual, kPackWeights, kFoldNorm };

// Must match ProductParams in product.py. Matrices are row-major and 16-byte aligned, but v01's x
// need not be aligned. Packed x may still await its LayerNorm: it has only been multiplied by that
// norm's weight. Then x_moments has the mean of each 64 columns before that, and the sum of their
// squared deviations; and the bias is followed by the sums of W's columns, times that weight.
struct StructParams {
  const float* x;           // (m, k); null: packed_x is given
  const void* weight;       // float (k, n), or packed; not written by the previous kernel
  const float* bias;        // (n), or with x_moments (2, n)
  float* y;                 // (m, n): kBias, kGelu; with a LayerNorm, its output
  float* residual;          // (m, n): kResidual adds to it
  const float* ln_weight;   // (n); null: no LayerNorm
  const float* ln_bias;     // (n); null: 0
  float* workspace;         // (blocks + tiles, kBlockM, kBlockN), unless every tile is whole
  int* exponents;           // (n); of packed weights
  uint4* packed_x;          // x, packed for tensor cores; of x, if that is given
  uint4* packed_y;          // not null: y is packed, too
  const float2* x_moments;  // (m, k / 64); null: x is complete
  float2* y_moments;        // (m, n / 64); not null: packed y awaits the LayerNorm
  int m, n, k;
  float epsilon;
  int blocks;  // from 1 to tiles * slabs
  short mode;  // the last two take W as x: they set packed_y and exponents, or y, (2, n)
  short tile;  // index in launch()'s list
};
static_assert(sizeof(StructParams) <= 128, "a larger struct costs v01 registers");
using ProductParams = StructParams;

namespace {

// A block's share of a tile: `count` of its slabs, from `first` on.
struct Share {
  int tile, first, count;
  int m0, n0;     // the tile's first row and column
  bool is_whole;  // all slabs: the block finishes the tile
  float* part;    // where it stores its sums otherwise, in the workspace
};

// Slabs form one sequence: those of tile 0, of tile 1, ... Tiles with the same columns are
// adjacent, so blocks that run at the same time read the same weights. Blocks share the sequence
// evenly: if they are a multiple of the tiles, each has slabs of one tile.
struct Slabs {
  int per_tile, tiles_m, block_m, block_n, tiles, blocks;

  __device__ Slabs(const ProductParams& p, int block_m, int block_n, int block_k)
      : per_tile(p.k / block_k),
        tiles_m((p.m + block_m - 1) / block_m),
        block_m(block_m),
        block_n(block_n),
        tiles(tiles_m * (p.n / block_n)),
        blocks(p.blocks) {}
  // Rounds tiles * per_tile * block / blocks down, without a division of 64 bits, which blocks would
  // wait for. Where tiles are cut there are few blocks: their square has 32 bits.
  __device__ int first_of(int block) const {
    const int all = tiles * per_tile, each = all / blocks;
    const auto rest = static_cast<unsigned>(all - each * blocks);
    return each * block + static_cast<int>(rest * block / blocks);
  }
  // Returns the first block and the last one that have slabs of a tile.
  __device__ int2 blocks_of(int tile) const {
    if (const int parts = blocks / tiles; parts * tiles == blocks)
      return {tile * parts, (tile + 1) * parts - 1};
    const auto block_of = [&](int slab) {
      const int64_t all = static_cast<int64_t>(tiles) * per_tile;
      return static_cast<int>((static_cast<int64_t>(slab + 1) * blocks - 1) / all);
    };
    return {block_of(tile * per_tile), block_of((tile + 1) * per_tile - 1)};
  }
  // Returns what is left of slab's tile before `end`.
  __device__ Share share(const ProductParams& p, int slab, int end) const {
    const int tile = slab / per_tile, first = slab % per_tile;
    const int count = min(end - slab, per_tile - first);
    // From part to part either the block or the tile advances by one: their sum numbers the parts.
    float* const part = p.workspace + static_cast<int64_t>(blockIdx.x + tile) * block_m * block_n;
    return {
        tile, first, count, tile % tiles_m * block_m, tile / tiles_m * block_n, count == per_tile,
        part};
  }
};

__device__ inline float gelu(float x) {
  constexpr float kRoot = 0.7978845608028654f;  // sqrt(2 / pi)
  // x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u))
  const float u = kRoot * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

__device__ inline float4 gelu(float4 v) { return {gelu(v.x), gelu(v.y), gelu(v.z), gelu(v.w)}; }

// Stores four numbers of y; for is_here, see pack4(). kPacks: whether y may be packed.
template <bool kPacks>
__device__ void store_y(const ProductParams& p, int row, int column, float4 v, bool is_here) {
  if (kPacks && p.packed_y != nullptr) {
    pack4(p.packed_y, p.n, row, column, v, is_here);
  } else if (is_here) {
    store4(p.y + static_cast<int64_t>(row) * p.n + column, v);
  }
}

// Finishes four complete sums of each of kRows rows, `step` apart: adds the bias, then applies GELU
// or adds the residual. Stores the residual, or y unless a LayerNorm comes first. Rows from p.m on
// are not there; for them, too, whole warps must call it.
template <bool kPacks, int kRows>
__device__ void finish_rows(const ProductParams& p, int row, int step, int column, float4 bias,
                            float4 (&v)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) v[i] = v[i] + bias;
  if (p.mode == kResidual) {
    float* const from = p.residual + static_cast<int64_t>(row) * p.n + column;
    const int64_t stride = static_cast<int64_t>(step) * p.n;
    float4 old[kRows];  // all are loaded before the first is stored
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (row + i * step < p.m) old[i] = load4(from + i * stride);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      v[i] = v[i] + old[i];
      if (row + i * step < p.m) store4(from + i * stride, v[i]);
    }
    return;
  }
  if (p.mode == kGelu) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i] = gelu(v[i]);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    store_y<kPacks>(p, row + i * step, column, v[i], row + i * step < p.m);
}

// Finishes rows of a tile, or stores them as a part of it; row and column are the tile's.
template <typename T, int kRows>
__device__ void end_rows(const ProductParams& p, const Share& share, int row, int step, int column,
                         float4 bias, float4 (&v)[kRows]) {
  if (share.is_whole) {
    finish_rows<T::kPacks>(p, share.m0 + row, step, share.n0 + column, bias, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (share.m0 + row + i * step < p.m)
      store4(share.part + (row + i * step) * T::kBlockN + column, v[i]);
}

// Adds up and finishes the tiles that were cut. A block works on row blockIdx.x, each thread on
// four columns; with a LayerNorm, one block has the whole row.
template <int kBlockM, int kBlockN, int kBlockK>
__global__ void __launch_bounds__(1024) finish(ProductParams p) {
  constexpr int kAtOnce = 4;  // parts that are loaded before the first is added
  __shared__ float warps[2][32];
  ptx::allow_next();
  const int row = blockIdx.x, column = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
  const bool is_here = column < p.n;
  const Slabs slabs(p, kBlockM, kBlockN, kBlockK);
  const int tile = row / kBlockM + column / kBlockN * slabs.tiles_m;
  const int2 blocks = is_here ? slabs.blocks_of(tile) : int2{};
  constexpr int64_t kStride = kBlockM * kBlockN;
  const float* part =
      p.workspace + (blocks.x + tile) * kStride + row % kBlockM * kBlockN + column % kBlockN;
  // No earlier kernel writes the parameters, so they can be loaded while it ends.
  float4 bias = {}, ln_weight = {}, ln_bias = {};
  if (is_here) bias = load4(p.bias + column);
  if (is_here && p.ln_weight != nullptr) {
    ln_weight = load4(p.ln_weight + column);
    if (p.ln_bias != nullptr) ln_bias = load4(p.ln_bias + column);
  }
  ptx::wait_for_previous();
  const bool is_cut = blocks.x < blocks.y, is_residual = p.mode == kResidual;
  float* const residual = p.residual + static_cast<int64_t>(row) * p.n + column;
  float4 v = {}, old = {};
  if (is_here && is_residual) old = load4(residual);
  if (is_cut) {
    for (int left = blocks.y + 1 - blocks.x; left > 0; left -= kAtOnce) {
      float4 parts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, part += kStride)
        if (i < left) parts[i] = load4(part);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (i < left) v = v + parts[i];
    }
    v = v + bias;
    if (p.mode == kGelu) v = gelu(v);
    if (is_residual) store4(residual, v = v + old);
  } else {
    v = old;  // already finished
  }
  if (p.ln_weight == nullptr) {
    if (!is_residual) store_y<true>(p, row, column, v, is_cut);
    return;
  }

  v = layer_norm(v, is_here, p.n, p.epsilon, ln_weight, ln_bias, warps);
  store_y<true>(p, row, column, v, is_here);
}

constexpr int kMostOfNorm = 4 * 1024;  // columns: a block has a row

template <typename T>
cudaError_t launch_finish(const ProductParams& p, cudaStream_t stream) {
  const int row = ceil_div(p.n / 4, 32) * 32;
  const int threads = p.ln_weight != nullptr || row < 256 ? row : 256;
  return launch_early(finish<T::kBlockM, T::kBlockN, T::kBlockK>, dim3(p.m, ceil_div(row, threads)),
                      1, dim3(threads), 0, stream, p);
}

// Launches product() for tiles of type T, and then finish() if there is anything left to do.
template <typename T>
cudaError_t launch_tile(void (*product)(ProductParams), const ProductParams& p,
                        cudaStream_t stream) {
  if (p.m < 1 || p.n % T::kBlockN != 0 || p.k % T::kBlockK != 0) return cudaErrorInvalidValue;
  const int64_t tiles = static_cast<int64_t>(ceil_div(p.m, T::kBlockM)) * (p.n / T::kBlockN);
  if (p.blocks < 1 || p.blocks > tiles * (p.k / T::kBlockK)) return cudaErrorInvalidValue;
  if (p.ln_weight != nullptr && p.n > kMostOfNorm) return cudaErrorInvalidValue;
  const cudaError_t error =
      launch_early(product, dim3(p.blocks), 1, dim3(T::kThreads), T::kSmemBytes, stream, p);
  const bool is_whole = tiles % p.blocks == 0;  // every block has whole tiles
  if (error != cudaSuccess || (is_whole && p.ln_weight == nullptr)) return error;
  return launch_finish<T>(p, stream);
}

}  // namespace
}  // namespace attention
