// Copies of tiles between tensors and shared memory by Hopper's tensor memory accelerator (TMA).
//
// A kernel takes a tensor map as `const __grid_constant__ TensorMap map`; the launch fills it with
// make_tensor_map().

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"

namespace attention {

using TensorMap = CUtensorMap;

// How the 16-byte chunks of a tile in shared memory are permuted, by the width of the box in bytes.
enum class Swizzle {
  kNone = CU_TENSOR_MAP_SWIZZLE_NONE,
  k32 = CU_TENSOR_MAP_SWIZZLE_32B,
  k64 = CU_TENSOR_MAP_SWIZZLE_64B,
  k128 = CU_TENSOR_MAP_SWIZZLE_128B,
};

template <typename T>
constexpr CUtensorMapDataType kTensorMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
template <>
constexpr CUtensorMapDataType kTensorMapType<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
constexpr CUtensorMapDataType kTensorMapType<__nv_bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Describes a tensor of four dimensions, the contiguous one first, and the box of it that one copy
// takes. strides: of the other three dimensions, in elements, which make multiples of 16 bytes; so
// is the address. box: at most 256 each, and the first as wide as the swizzle, if there is one.
template <typename T>
cudaError_t make_tensor_map(TensorMap* map, const T* tensor, const int64_t (&sizes)[4],
                            const int64_t (&strides)[3], const int (&box)[4],
                            Swizzle swizzle = Swizzle::k128) {
  constexpr int kWidths[] = {0, 32, 64, 128};  // in bytes, by swizzle
  const int width = kWidths[static_cast<int>(swizzle)];
  if (width != 0 && box[0] * static_cast<int>(sizeof(T)) != width) return cudaErrorInvalidValue;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  cuuint64_t counts[4], bytes[3];
  cuuint32_t boxes[4];
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) counts[i] = sizes[i], boxes[i] = box[i];
  for (int i = 0; i < 3; ++i) bytes[i] = strides[i] * sizeof(T);
  const CUresult result =
      encode(map, kTensorMapType<T>, 4, const_cast<T*>(tensor), counts, bytes, boxes, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(swizzle),
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace attention

#ifdef ATTENTION_EMULATOR
#include "emulator/tma.h"
#else

namespace attention::ptx {

inline __device__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box at coordinates (c0, c1, c2, c3), elements of the tensor's dimensions, to shared
// memory. `to` is a multiple of 128 bytes, of 1024 with the 128-byte swizzle. What is out of the
// tensor's bounds becomes 0. The bytes of the whole box count towards the barrier's phase.
inline __device__ void load_tile(void* to, const TensorMap& map, int c0, int c1, int c2, int c3,
                                 Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier))
      : "memory");
}

// The same for the blocks of the cluster in `blocks`, bit i for block i: each gets the box at the
// address in its shared memory that corresponds to `to`, and the bytes count at its barrier that
// corresponds to `barrier`. The tensor is read once.
inline __device__ void load_tile_to_blocks(unsigned blocks, void* to, const TensorMap& map, int c0,
                                           int c1, int c2, int c3, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier)),
      "h"(static_cast<unsigned short>(blocks))
      : "memory");
}

// Copies a box from shared memory, without what is out of bounds; no coordinate may be negative.
// Threads that wrote the tile call proxy_fence() first.
inline __device__ void store_tile(const TensorMap& map, int c0, int c1, int c2, int c3,
                                  const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(from))
      : "memory");
}

// Ends a group of the thread's stores.
inline __device__ void store_tiles_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the tiles of all of the thread's groups but the last kGroups have been read, and their
// shared memory may be written again. The block must not end before.
template <int kGroups>
__device__ void store_tiles_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

}  // namespace attention::ptx

#endif  // ATTENTION_EMULATOR
