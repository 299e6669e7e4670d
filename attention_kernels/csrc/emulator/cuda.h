// A kernel's `#include <cuda.h>` finds this: tensor maps, as the driver encodes them.

#pragma once

#include "tma.h"

using CUresult = cudaError_t;
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
constexpr CUresult CUDA_SUCCESS = cudaSuccess, CUDA_ERROR_INVALID_VALUE = cudaErrorInvalidValue;

inline CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
inline CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = cudaGetErrorName(error);
  return CUDA_SUCCESS;
}
inline CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(error);
  return CUDA_SUCCESS;
}

// Types that have an element of these bytes.
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_DATA_TYPE_UINT16,
  CU_TENSOR_MAP_DATA_TYPE_UINT32,
  CU_TENSOR_MAP_DATA_TYPE_INT32,
  CU_TENSOR_MAP_DATA_TYPE_UINT64,
  CU_TENSOR_MAP_DATA_TYPE_INT64,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE,
  CU_TENSOR_MAP_SWIZZLE_32B,
  CU_TENSOR_MAP_SWIZZLE_64B,
  CU_TENSOR_MAP_SWIZZLE_128B,
};
enum CUtensorMapL2promotion {
  CU_TENSOR_MAP_L2_PROMOTION_NONE,
  CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// Takes steps of 1 only.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                       void* tensor, const cuuint64_t* sizes,
                                       const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  constexpr int kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  if (rank < 1 || rank > 5) return cudaErrorNotSupported;
  *map = {static_cast<const unsigned char*>(tensor),
          {1, 1, 1, 1, 1},
          {kBytes[type]},
          {1, 1, 1, 1, 1},
          kBytes[type],
          static_cast<int>(swizzle)};
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (steps[i] != 1) return cudaErrorNotSupported;
    map->sizes[i] = static_cast<int64_t>(sizes[i]), map->box[i] = static_cast<int>(box[i]);
    if (i > 0) map->strides[i] = static_cast<int64_t>(strides[i - 1]);
  }
  return attention::ptx::is_valid(*map) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
using PFN_cuTensorMapEncodeTiled = decltype(&cuTensorMapEncodeTiled);
using PFN_cuTensorMapEncodeTiled_v12000 = PFN_cuTensorMapEncodeTiled;

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess,
  cudaDriverEntryPointSymbolNotFound
};
constexpr unsigned cudaEnableDefault = 0;
inline cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned /*flags*/,
                                           cudaDriverEntryPointQueryResult* found = nullptr) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (found != nullptr)
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned flags,
                                                    cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPoint(name, function, flags, found);
}
