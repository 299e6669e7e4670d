// v02 - one warpgroup per product, or a thread that copies a tile
//
// Change: a warpgroup multiplies matrices that TMA loads, or a thread loads or stores a tile.
// Why:    a probe: the emulator's versions must give the same bits as Hopper's.
// Cost:   none.
// Tile:   none, block 128
// Layout: contiguous
// Role:   struct
// Needs:  sm_90a
// Flags:  (none)
// Expect: the same bits on the CPU and on a GPU.

#include "tma.cuh"
#include "wgmma.cuh"

namespace attention {

struct StructParams {
  // Products: A is 64 x 64, B `columns` x 64 or, transposed, 64 x at least 64; 16 bits.
  // Tiles: a is the bytes to store, b unused.
  const __half* a;
  const __half* b;
  float* sums;   // per product, 64 per thread and fewer columns; or the bytes of the loaded tile
  void* tensor;  // that tiles are copied from or to
  int products;
  int columns;
  int is_bfloat16, is_transposed, has_a_in_registers;
  int tile;  // 0: products, 1: load, 2: store
  int is_float, swizzle;
  int box[4], at[4];
  int64_t sizes[4], strides[3];
};

namespace ATTENTION_VERSION {

constexpr int kTileBytes = 64 * 128;

template <bool kIsBfloat16, bool kTransposed, int kSums>
__global__ void __launch_bounds__(128)
    products(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
             StructParams p) {
  ATTENTION_ALIGNED_SHARED(unsigned char, sA, 1024);
  __shared__ ptx::Barrier loaded;
  unsigned char* sB = sA + kTileBytes;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&loaded, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  constexpr int kColumns = 2 * kSums;
  constexpr int kBytesB = kTransposed ? (kColumns + 63) / 64 * kTileBytes : kColumns * 128;
  if (threadIdx.x == 0) {
    ptx::barrier_expect(&loaded, kTileBytes + kBytesB);
    ptx::load_tile(sA, map_a, 0, blockIdx.x * 64, 0, 0, &loaded);
    if (kTransposed) {
      for (int i = 0; i < kBytesB / kTileBytes; ++i)
        ptx::load_tile(sB + i * kTileBytes, map_b, i * 64, blockIdx.x * 64, 0, 0, &loaded);
    } else {
      ptx::load_tile(sB, map_b, 0, blockIdx.x * kColumns, 0, 0, &loaded);
    }
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned rA[4][4];
  for (int step = 0; step < 4; ++step) {
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + lane / 4 + i % 2 * 8, k = 16 * step + lane % 4 * 2 + i / 2 * 8;
      rA[step][i] = *reinterpret_cast<const unsigned*>(p.a + (blockIdx.x * 64 + row) * 64 + k);
    }
  }
  float rS[kSums];
  float* g_sums = p.sums + (blockIdx.x * 128 + threadIdx.x) * kSums;
  for (int i = 0; i < kSums; ++i) rS[i] = g_sums[i];
  ptx::barrier_wait(&loaded, 0);
  const uint64_t a = ptx::matrix_descriptor(sA);
  const uint64_t b = ptx::matrix_descriptor(sB, kTileBytes);
  constexpr int kStepBytes = kTransposed ? 16 * 128 : 32;
  ptx::multiply_fence(rS, rA);
  if (p.has_a_in_registers) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::multiply<kIsBfloat16, kTransposed>(rS, rA[step], ptx::advance(b, step * kStepBytes));
  } else {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::multiply<kIsBfloat16, kTransposed>(rS, ptx::advance(a, step * 32),
                                              ptx::advance(b, step * kStepBytes));
  }
  ptx::multiply_commit();
  ptx::multiply_wait<0>(rS);
  for (int i = 0; i < kSums; ++i) g_sums[i] = rS[i];
}

__global__ void copies(const __grid_constant__ TensorMap map, StructParams p, int bytes) {
  ATTENTION_ALIGNED_SHARED(unsigned, smem, 1024);
  __shared__ ptx::Barrier loaded;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&loaded, 1);
    ptx::barrier_init_fence();
  }
  const unsigned* from = reinterpret_cast<const unsigned*>(p.a);
  unsigned* to = reinterpret_cast<unsigned*>(p.sums);
  for (int i = threadIdx.x; i < bytes / 4; i += 128) smem[i] = p.tile == 2 ? from[i] : ~0u;
  ptx::proxy_fence();
  __syncthreads();
  if (p.tile == 1) {
    if (threadIdx.x == 0) {
      ptx::barrier_expect(&loaded, bytes);
      ptx::load_tile(smem, map, p.at[0], p.at[1], p.at[2], p.at[3], &loaded);
    }
    ptx::barrier_wait(&loaded, 0);
    for (int i = threadIdx.x; i < bytes / 4; i += 128) to[i] = smem[i];
  } else if (threadIdx.x == 0) {
    ptx::store_tile(map, p.at[0], p.at[1], p.at[2], p.at[3], smem);
    ptx::store_tiles_commit();
    ptx::store_tiles_wait<0>();
  }
}

int64_t scratch_floats(const StructParams&) { return 0; }

template <bool kIsBfloat16, bool kTransposed, int kSums>
cudaError_t launch_products(const StructParams& p, cudaStream_t stream) {
  const int columns = 2 * kSums;
  TensorMap a, b;
  cudaError_t error =
      make_tensor_map(&a, p.a, {64, 64 * p.products, 1, 1}, {64, 64, 64}, {64, 64, 1, 1});
  if (error == cudaSuccess && kTransposed) {
    const int width = columns < 64 ? 64 : columns;
    error = make_tensor_map(&b, p.b, {width, 64 * p.products, 1, 1}, {width, width, width},
                            {64, 64, 1, 1});
  } else if (error == cudaSuccess) {
    error = make_tensor_map(&b, p.b, {64, columns * p.products, 1, 1}, {64, 64, 64},
                            {64, columns, 1, 1});
  }
  if (error != cudaSuccess) return error;
  return launch_kernel(products<kIsBfloat16, kTransposed, kSums>, p.products, 128, 3 * kTileBytes,
                       stream, a, b, p);
}

template <bool kIsBfloat16, bool kTransposed>
cudaError_t launch_columns(const StructParams& p, cudaStream_t stream) {
  switch (p.columns) {
    case 32:
      return launch_products<kIsBfloat16, kTransposed, 16>(p, stream);
    case 64:
      return launch_products<kIsBfloat16, kTransposed, 32>(p, stream);
    default:
      return launch_products<kIsBfloat16, kTransposed, 64>(p, stream);
  }
}

template <typename T>
cudaError_t launch_copies(const StructParams& p, cudaStream_t stream) {
  TensorMap map;
  constexpr Swizzle swizzles[] = {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128};
  const cudaError_t error = make_tensor_map(&map, static_cast<const T*>(p.tensor), p.sizes,
                                            p.strides, p.box, swizzles[p.swizzle]);
  if (error != cudaSuccess) return error;
  const int bytes = p.box[0] * p.box[1] * p.box[2] * p.box[3] * sizeof(T);
  return launch_kernel(copies, 1, 128, bytes, stream, map, p, bytes);
}

cudaError_t launch(const StructParams& p, cudaStream_t stream) {
  if (p.tile != 0)
    return p.is_float ? launch_copies<float>(p, stream) : launch_copies<__half>(p, stream);
  if (p.is_bfloat16) {
    return p.is_transposed ? launch_columns<true, true>(p, stream)
                           : launch_columns<true, false>(p, stream);
  }
  return p.is_transposed ? launch_columns<false, true>(p, stream)
                         : launch_columns<false, false>(p, stream);
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
