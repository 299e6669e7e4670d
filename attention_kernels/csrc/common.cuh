// Code that all versions share: the launch, and the names that differ between nvcc and the CPU
// emulator. Anything that could make one version faster than another belongs in the version
// file.

#pragma once

#include "attention.h"

#ifdef ATTENTION_EMULATOR
#include "emulator/cuda_emulator.h"
#else
#include <cuda_runtime.h>
#endif

namespace attention {

template <typename Integer>
constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// Raises the kernel's limit, without which a block cannot use more than 48 KB of shared memory,
// static included. Fails if the device has less than smem_bytes.
inline cudaError_t allow_shared(const void* kernel, size_t smem_bytes) {
  if (smem_bytes <= 32 * 1024) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (error != cudaSuccess)
    (void)cudaGetLastError();  // clear it, so that it does not surface in a later, unrelated call
  return error;
}

// Counts the blocks of a kernel that a multiprocessor of the current device runs at once.
template <typename... Parameters>
cudaError_t resident_blocks(void (*kernel)(Parameters...), int threads, size_t smem_bytes,
                            int* blocks) {
  const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), smem_bytes);
  if (error != cudaSuccess) return error;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, smem_bytes);
}

#ifndef ATTENTION_EMULATOR

// Dynamic shared memory, 128-byte aligned:  ATTENTION_DYNAMIC_SHARED(float, smem);
#define ATTENTION_DYNAMIC_SHARED(type, name) ATTENTION_ALIGNED_SHARED(type, name, 128)

// The same for tiles with a swizzle, which are aligned to 1024 bytes.
#define ATTENTION_ALIGNED_SHARED(type, name, bytes) \
  extern __shared__ __align__(bytes)                \
  unsigned char name##_bytes[];                     \
  type* const name = reinterpret_cast<type*>(name##_bytes)

// Launches `kernel` with any amount of dynamic shared memory and returns the launch's error.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t smem_bytes,
                          cudaStream_t stream, Arguments... arguments) {
  const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid, block, smem_bytes, stream>>>(static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

// Returns whether a kernel's code for the current device knows clusters and ptx::wait_for_previous().
// What counts is its PTX, which may be older than the device, and is of one age in all of a file.
inline bool is_for_hopper(const void* kernel, int device) {
  thread_local int known = -1, ptx = 0;
  cudaFuncAttributes attributes;
  if (device != known) {
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
      (void)cudaGetLastError();  // without such code the launch fails, too
      return false;
    }
    known = device, ptx = attributes.ptxVersion;
  }
  return ptx >= 90;
}

// The same for a kernel that may start before the previous one in the stream has ended and
// therefore calls ptx::wait_for_previous(). It starts like any other with ATTENTION_NO_EARLY_LAUNCHES,
// and where is_for_hopper() is false. Each group of `cluster` consecutive blocks forms a cluster.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 grid, int cluster, dim3 block,
                         size_t smem_bytes, cudaStream_t stream, Arguments... arguments) {
  cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), smem_bytes);
  int device = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool is_new = is_for_hopper(reinterpret_cast<const void*>(kernel), device);
  if (cluster > 1 && !is_new) return cudaErrorNotSupported;
  cudaLaunchAttribute attributes[2] = {};
#ifndef ATTENTION_NO_EARLY_LAUNCHES
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
#endif
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !is_new ? 0 : cluster == 1 ? 1 : 2;
  error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

// Launches a kernel whose blocks, in clusters, all run at the same time and may wait for each other.
// Fails if there is no room for all of them: a device has fewer clusters than its multiprocessors
// allow, and a process or a stream may have a part of the device.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_at_once(void (*kernel)(Parameters...), dim3 grid, int cluster, dim3 block,
                           size_t smem_bytes, cudaStream_t stream, Arguments... arguments) {
  cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), smem_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  int clusters = 0;
  error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error == cudaSuccess && clusters * cluster < static_cast<int>(grid.x * grid.y * grid.z))
    error = cudaErrorCooperativeLaunchTooLarge;
  config.numAttrs = 2;
  if (error == cudaSuccess)
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

// Counterpart of the emulator's complete(), which defers launches.
template <typename Launches>
cudaError_t complete(Launches launches) {
  return launches();
}

#endif  // ATTENTION_EMULATOR

// The version file defines these two functions.
namespace ATTENTION_VERSION {
int64_t scratch_floats(const VersionParams& params);
cudaError_t launch(const VersionParams& params, cudaStream_t stream);
}  // namespace ATTENTION_VERSION

#define ATTENTION_TEXT_(token) #token
#define ATTENTION_TEXT(token) ATTENTION_TEXT_(token)

const Version version = {
    ATTENTION_TEXT(ATTENTION_VERSION),
    ATTENTION_TEXT(ATTENTION_DTYPE),
#ifdef ATTENTION_CONTIGUOUS
    true,
#else
    false,
#endif
#ifdef ATTENTION_DECODE
    true,
#else
    false,
#endif
#ifdef ATTENTION_STRUCT
    true,
#else
    false,
#endif
    [](const void* params) {
      return ATTENTION_VERSION::scratch_floats(*static_cast<const VersionParams*>(params));
    },
    [](const void* params, void* stream) -> int {
      return complete([&] {
        return ATTENTION_VERSION::launch(*static_cast<const VersionParams*>(params),
                                         static_cast<cudaStream_t>(stream));
      });
    },
};

}  // namespace attention
