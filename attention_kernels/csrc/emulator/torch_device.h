// What PyTorch's headers for CUDA declare, for host code around somebody else's kernel: the CPU is
// the only device, and its stream does not matter.

#pragma once

#include <torch/extension.h>

#include "host.h"

namespace c10::cuda {

struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }
  operator cudaStream_t() const { return nullptr; }
  void synchronize() const { (void)cudaDeviceSynchronize(); }
};
inline CUDAStream getCurrentCUDAStream(DeviceIndex = -1) { return {}; }
inline CUDAStream getDefaultCUDAStream(DeviceIndex = -1) { return {}; }
inline CUDAStream getStreamFromPool(bool = false, DeviceIndex = -1) { return {}; }
inline DeviceIndex current_device() { return 0; }
inline DeviceIndex device_count() { return 1; }

struct CUDAGuard {
  template <typename... Devices>
  explicit CUDAGuard(const Devices&...) {}
};
using OptionalCUDAGuard = CUDAGuard;
using CUDAStreamGuard = CUDAGuard;

}  // namespace c10::cuda

namespace at::cuda {

using namespace c10::cuda;

inline cudaDeviceProp* getDeviceProperties(DeviceIndex) {
  static cudaDeviceProp found;
  (void)cudaGetDeviceProperties(&found, 0);
  return &found;
}
inline cudaDeviceProp* getCurrentDeviceProperties() { return getDeviceProperties(0); }

}  // namespace at::cuda

namespace at {
// PyTorch has it for CUDA's compiler only.
template <typename T>
struct RestrictPtrTraits {
  using PtrType = T* __restrict__;
};
}  // namespace at

#define C10_CUDA_CHECK(call)                                        \
  do {                                                              \
    const cudaError_t error_ = (call);                              \
    TORCH_CHECK(error_ == cudaSuccess, cudaGetErrorString(error_)); \
  } while (0)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
#define AT_CUDA_CHECK(call) C10_CUDA_CHECK(call)
