// A file's `#include <cublas_v2.h>` finds this, so that its other kernels run: the functions that
// attention code calls refuse to work.

#pragma once

#include "cuda_emulator.h"

using cublasHandle_t = struct cublasContext*;
using cublasLtHandle_t = struct cublasLtContext*;
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };
enum cublasMath_t { CUBLAS_DEFAULT_MATH, CUBLAS_TENSOR_OP_MATH, CUBLAS_TF32_TENSOR_OP_MATH = 3 };
enum cudaDataType_t { CUDA_R_32F, CUDA_R_16F = 2, CUDA_R_16BF = 14 };

#define ATTENTION_EMULATOR_REFUSED(name)                                              \
  template <typename... Arguments>                                                    \
  cublasStatus_t name(Arguments...) {                                                 \
    std::fputs("the CPU emulator has no cuBLAS: " #name "() does nothing\n", stderr); \
    attention::emulator::keep_error(cudaErrorNotSupported);                           \
    return CUBLAS_STATUS_NOT_SUPPORTED;                                               \
  }
ATTENTION_EMULATOR_REFUSED(cublasCreate)
ATTENTION_EMULATOR_REFUSED(cublasDestroy)
ATTENTION_EMULATOR_REFUSED(cublasSetStream)
ATTENTION_EMULATOR_REFUSED(cublasSetMathMode)
ATTENTION_EMULATOR_REFUSED(cublasLtCreate)
ATTENTION_EMULATOR_REFUSED(cublasLtDestroy)
ATTENTION_EMULATOR_REFUSED(cublasSgemm)
ATTENTION_EMULATOR_REFUSED(cublasHgemm)
ATTENTION_EMULATOR_REFUSED(cublasGemmEx)
ATTENTION_EMULATOR_REFUSED(cublasHgemmStridedBatched)
ATTENTION_EMULATOR_REFUSED(cublasSgemmStridedBatched)
ATTENTION_EMULATOR_REFUSED(cublasGemmStridedBatchedEx)
#undef ATTENTION_EMULATOR_REFUSED
