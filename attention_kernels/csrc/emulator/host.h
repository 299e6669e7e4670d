// What host code around somebody else's kernel calls: launches, memory, properties of the device,
// streams and events. Work is done when a call returns, except that a version's own launches wait
// until launch() has returned or something here needs their results.

#pragma once

#include <cstdlib>

#include "cuda_emulator.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// Runs a launch at once, so that host code may free what the kernel uses; keeps its error.
inline cudaError_t run_now(cudaError_t launch) {
  return keep_error(launch == cudaSuccess ? run_queued() : launch);
}

// A launch by <<<grid, block, bytes, stream>>>, which ladder/ptx.py makes of
//   kernel<<<...>>>(arguments)   by   kernel ->* LaunchSettings(...)(arguments)
struct LaunchSettings {
  dim3 grid, block;
  size_t smem_bytes;

  LaunchSettings(dim3 grid_, dim3 block_, size_t bytes = 0, cudaStream_t = nullptr)
      : grid(grid_), block(block_), smem_bytes(bytes) {}
  template <typename... Arguments>
  auto operator()(Arguments... arguments) const {
    return std::pair{*this, std::tuple<Arguments...>(arguments...)};
  }
};
template <typename... Arguments>
using BoundLaunch = std::pair<LaunchSettings, std::tuple<Arguments...>>;

template <typename... Parameters, typename... Arguments>
void operator->*(void (*kernel)(Parameters...), const BoundLaunch<Arguments...>& bound) {
  if (kept_error(kPeek) != cudaSuccess) return;  // later launches would drop its message
  const LaunchSettings& of = bound.first;
  const auto launch = [&](const Arguments&... arguments) {
    return launch_kernel(kernel, of.grid, of.block, of.smem_bytes, nullptr, arguments...);
  };
  run_now(std::apply(launch, bound.second));
}

// Of a template whose arguments are deduced: a lambda that calls it.
template <typename Lambda, typename... Arguments>
void operator->*(Lambda kernel, const BoundLaunch<Arguments...>& bound) {
  static_cast<void (*)(Arguments...)>(kernel)->*bound;
}

// The arguments of a launch by their addresses.
template <size_t... kPlaces, typename... Parameters>
cudaError_t launch_at(std::index_sequence<kPlaces...>, bool is_at_once,
                      void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                      size_t smem_bytes) {
  return run_now(launch_any(false, is_at_once, kernel, grid, is_at_once, block, smem_bytes,
                            *static_cast<Parameters*>(arguments[kPlaces])...));
}

}  // namespace attention::emulator

// ---- Launches -----------------------------------------------------------------------------------

template <typename... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                             size_t smem_bytes = 0, cudaStream_t = nullptr) {
  return attention::emulator::launch_at(std::index_sequence_for<Parameters...>(), false, kernel,
                                        grid, block, arguments, smem_bytes);
}
template <typename... Parameters>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                                        void** arguments, size_t smem_bytes = 0,
                                        cudaStream_t = nullptr) {
  return attention::emulator::launch_at(std::index_sequence_for<Parameters...>(), true, kernel,
                                        grid, block, arguments, smem_bytes);
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore,
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
  cudaLaunchAttributePriority = 8,
};
struct cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int cooperative, programmaticStreamSerializationAllowed, priority;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
// gridDim and blockDim are macros here; ladder/ptx.py has a kernel's own names of members end in _.
struct cudaLaunchConfig_t {
  dim3 grid_, block_;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
// An early launch waits for the next call.
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  unsigned cluster = 0;
  bool is_early = false, is_at_once = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const auto& [id, value] = config->attrs[i];
    if (id == cudaLaunchAttributeClusterDimension) {
      if (value.clusterDim.y > 1 || value.clusterDim.z > 1) return cudaErrorNotSupported;
      cluster = value.clusterDim.x;
    }
    is_at_once |= id == cudaLaunchAttributeCooperative && value.cooperative != 0;
    is_early |= id == cudaLaunchAttributeProgrammaticStreamSerialization &&
                value.programmaticStreamSerializationAllowed != 0;
  }
  const cudaError_t error =
      attention::launch_any(is_early, is_at_once, kernel, config->grid_, cluster, config->block_,
                            config->dynamicSmemBytes, arguments...);
  return is_early ? attention::emulator::keep_error(error) : attention::emulator::run_now(error);
}

// ---- Memory -------------------------------------------------------------------------------------

enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};

// Uninitialized memory holds NaNs. Streams and flags do not matter.
template <typename T, typename... Ignored>
cudaError_t cudaMalloc(T** memory, size_t bytes, Ignored...) {
  void* const found = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  *memory = static_cast<T*>(found);
  if (found == nullptr) return cudaErrorMemoryAllocation;
  std::memset(found, 0xff, bytes);
  return cudaSuccess;
}
enum { cudaHostAllocDefault, cudaHostAllocPortable, cudaHostAllocMapped };
inline cudaError_t cudaFree(void* memory, cudaStream_t = nullptr) {
  const cudaError_t error = attention::emulator::run_queued();
  std::free(memory);
  return error;
}
inline cudaError_t cudaMemset(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
  const cudaError_t error = attention::emulator::run_queued();
  std::memset(to, value, bytes);
  return error;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                              cudaStream_t = nullptr) {
  const cudaError_t error = attention::emulator::run_queued();
  std::memmove(to, from, bytes);
  return error;
}
// Their streams and flags do not matter, either.
#define cudaMallocAsync cudaMalloc
#define cudaMallocManaged cudaMalloc
#define cudaMallocHost cudaMalloc
#define cudaHostAlloc cudaMalloc
#define cudaFreeAsync cudaFree
#define cudaFreeHost cudaFree
#define cudaMemsetAsync cudaMemset
#define cudaMemcpyAsync cudaMemcpy
template <typename T>
cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t bytes, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
  return cudaMemcpy(reinterpret_cast<unsigned char*>(&symbol) + offset, from, bytes, kind);
}
template <typename T>
cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes, size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
  return cudaMemcpy(to, reinterpret_cast<const unsigned char*>(&symbol) + offset, bytes, kind);
}
inline cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                size_t width, size_t height, cudaMemcpyKind kind) {
  for (size_t row = 0; row < height; ++row)
    cudaMemcpy(static_cast<unsigned char*>(to) + row * to_pitch,
               static_cast<const unsigned char*>(from) + row * from_pitch, width, kind);
  return attention::emulator::run_queued();
}
template <typename... Where>
cudaError_t cudaMemPrefetchAsync(const void*, size_t, Where...) {
  return cudaSuccess;
}

// ---- The device ---------------------------------------------------------------------------------

struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
  int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor;
  int regsPerBlock, regsPerMultiprocessor, l2CacheSize, maxThreadsDim[3], maxGridSize[3];
  int maxBlocksPerMultiProcessor, concurrentKernels, clockRate, memoryClockRate, memoryBusWidth;
  size_t totalConstMem;
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  const attention::emulator::Device device = attention::emulator::Device::emulated();
  const size_t shared = device.shared_limit;
  *found = {"emulated", size_t{1} << 34, 48 * 1024, shared, shared + 1024};
  found->major = device.arch / 10, found->minor = device.arch % 10;
  found->multiProcessorCount = device.multiprocessors, found->warpSize = 32;
  found->maxThreadsPerBlock = found->maxThreadsPerMultiProcessor = 1024;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536, found->l2CacheSize = 1 << 25;
  found->maxBlocksPerMultiProcessor = 32, found->concurrentKernels = 1;
  found->clockRate = found->memoryClockRate = found->memoryBusWidth = 1;  // nobody times this
  found->totalConstMem = 65536;
  for (int i = 0; i < 3; ++i) {
    found->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    found->maxGridSize[i] = i < 1 ? 0x7fffffff : 65535;
  }
  return cudaSuccess;
}

struct cudaFuncAttributes {
  size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};
template <typename Function>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, Function*) {
  const attention::emulator::Device device = attention::emulator::Device::emulated();
  *found = {0, 0, 0, 1024, 64, device.arch, device.arch, static_cast<int>(device.shared_limit)};
  return cudaSuccess;
}
enum cudaFuncCache { cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1 };
template <typename Function>
cudaError_t cudaFuncSetCacheConfig(Function*, cudaFuncCache) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
constexpr int cudaSharedmemCarveoutMaxShared = 100;
template <typename Function>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int* blocks, int* threads, Function*, size_t = 0,
                                               int limit = 0) {
  *blocks = attention::emulator::Device::emulated().multiprocessors;
  *threads = limit > 0 && limit < 1024 ? limit : 1024;
  return cudaSuccess;
}

inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{1} << 34;
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 12000;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
enum cudaLimit { cudaLimitStackSize, cudaLimitPrintfFifoSize, cudaLimitMallocHeapSize };
inline cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }

inline cudaError_t cudaDeviceSynchronize() { return attention::emulator::run_queued(); }
inline cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }
inline cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

// ---- Streams and events -------------------------------------------------------------------------

using cudaEvent_t = struct CUevent_st*;
constexpr cudaStream_t cudaStreamLegacy = nullptr, cudaStreamPerThread = nullptr;
enum { cudaStreamDefault, cudaStreamNonBlocking, cudaEventDefault = 0, cudaEventDisableTiming = 2 };
inline cudaError_t cudaStreamCreate(cudaStream_t* stream, unsigned = 0, int = 0) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaDeviceSynchronize(); }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaDeviceSynchronize(); }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) {
  return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned = 0) {
  *event = nullptr;
  return cudaSuccess;
}
#define cudaStreamCreateWithFlags cudaStreamCreate
#define cudaStreamCreateWithPriority cudaStreamCreate
#define cudaEventCreateWithFlags cudaEventCreate
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaDeviceSynchronize(); }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaDeviceSynchronize(); }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;  // nobody times the emulator
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

#pragma GCC visibility pop
