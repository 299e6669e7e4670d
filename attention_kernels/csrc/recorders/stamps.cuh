// Stamps: when each warp of a launch's first blocks arrives at a barrier, and when it leaves, for
// `gpt2-infer timeline`, whose build includes this file before the version file (-include). There,
// __syncthreads() and the waits of ptx.cuh are stamped, and so is STAMP("name"), for which a version
// file defines an empty macro unless there is one.
//
// No warp counts its stamps, which would take a register or shared memory: the clock tells where a
// stamp is stored. One stamp takes longer than a tick, so that a warp's next goes elsewhere. Stamps
// kSlots ticks apart share a slot, and the later one remains.

#pragma once

#include <cstring>

#include "common.cuh"

namespace attention_stamps {

constexpr unsigned kBlocks = 4, kWarps = 32, kSlots = 1 << 16, kTick = 16;

struct alignas(kTick) Stamp {
  unsigned arrived;  // a clock; a tick's cycles are a slot's bytes
  unsigned place;    // 0 in an empty slot
  unsigned left;     // a clock
  unsigned grid;     // greater in a later launch
};
__device__ Stamp stamps[kBlocks * kWarps * kSlots];

// Returns twice the line, and 1 more in a header.
__host__ __device__ constexpr unsigned place(unsigned line, const char* file) {
  while (file[1] != '\0') ++file;
  return 2 * line + (*file != 'u');
}

__device__ __forceinline__ unsigned thread() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

__device__ __forceinline__ bool is_stamped() {
#ifdef ATTENTION_EMULATOR  // on a GPU, all lanes of a warp store the same
  if (thread() % 32 != 0) return false;
#endif
  return (blockIdx.x / kBlocks | blockIdx.y | blockIdx.z) == 0;
}

__device__ __forceinline__ unsigned now() {
#ifdef ATTENTION_EMULATOR
  static unsigned clock = 0;
  return __atomic_add_fetch(&clock, kTick, __ATOMIC_RELAXED);
#else
  unsigned clock;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
  return clock;
#endif
}

// A stamp of what happens between its beginning and the end of the statement. The first clock is stored
// at once: ptxas may delay a reading of the clock that nothing before the wait depends on.
template <unsigned kPlace>
struct Stamped {
  unsigned arrived;
  __device__ __forceinline__ Stamped() {
    if (!is_stamped()) return;
    arrived = now();
    store(0, arrived, kPlace);
  }
  __device__ __forceinline__ ~Stamped() {
    if (!is_stamped()) return;
    unsigned grid;
#ifdef ATTENTION_EMULATOR
    grid = attention::emulator::this_fiber().block->launch->in_stream->number;
#else
    asm volatile("{.reg .u32 upper; mov.b64 {%0, upper}, %%gridid;}" : "=r"(grid));
#endif
    store(8, now(), grid);
  }
  // Stores a clock, and what belongs to it, in the slot.
  __device__ __forceinline__ void store(unsigned at, unsigned first, unsigned second) const {
    const unsigned block = (blockIdx.x * kWarps + thread() / 32) * (kSlots * kTick);
    char* const to =
        reinterpret_cast<char*>(stamps) + block + (arrived & (kSlots - 1) * kTick) + at;
#ifdef ATTENTION_EMULATOR
    reinterpret_cast<unsigned*>(to)[0] = first;
    reinterpret_cast<unsigned*>(to)[1] = second;
#else
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(first), "r"(second) : "memory");
#endif
  }
};

}  // namespace attention_stamps

namespace attention::ptx {
using attention_stamps::Stamped;
}

// Moves all stamps to `to`, which has as many bytes; returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int attention_take_stamps(void* to,
                                                                            size_t bytes) {
  using attention_stamps::stamps;
  if (bytes != sizeof(stamps)) return cudaErrorInvalidValue;
#ifdef ATTENTION_EMULATOR
  std::memcpy(to, stamps, bytes);
  std::memset(static_cast<void*>(stamps), 0, bytes);
  return cudaSuccess;
#else
  void* from = nullptr;
  cudaError_t error = cudaGetSymbolAddress(&from, stamps);
  if (error == cudaSuccess) error = cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost);
  if (error == cudaSuccess) error = cudaMemset(from, 0, bytes);
  return error;
#endif
}

#define ATTENTION_STAMPED Stamped<attention_stamps::place(__LINE__, __FILE__)>()
#define __syncthreads() attention_stamps::ATTENTION_STAMPED, __syncthreads()
#define STAMP(name) attention_stamps::ATTENTION_STAMPED
