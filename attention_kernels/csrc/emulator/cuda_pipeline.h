// Asynchronous copies to shared memory on the CPU: the primitives that <cuda_pipeline.h> declares.
//
// A copy arrives when the copying thread waits for it, and not before: until then the destination
// holds poison. Errors, reported with the caller's line: a size other than 4, 8 or 16 bytes, an
// address that is not a multiple of the size, and a destination outside shared memory.

#pragma once

#include "cuda_emulator.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// May alias the kernel's own type.
template <size_t kBytes>
struct [[gnu::may_alias]] alignas(kBytes) Chunk {
  uint32_t words[kBytes / 4];
};

// Defined in pipeline.cpp, so that a check for races does not see how copies are kept. The first
// checks a copy and adds it to the calling thread's pending ones.
PendingCopy& pending_copy(void* to, const void* from, size_t size, size_t zeros, const Site& site);
void set(PendingCopy& copy, const void* data, size_t bytes);

// Loads and stores a whole chunk at once, so that accesses are counted as in hardware.
template <size_t kBytes>
ATTENTION_EMULATOR_INLINE void begin_copy(PendingCopy& copy, void* to, const void* from,
                                          size_t zeros, uint32_t poison) {
  Chunk<kBytes> chunk{};
  if (zeros == 0) {
    chunk = *static_cast<const Chunk<kBytes>*>(from);
  } else {
    std::memcpy(&chunk, from, zeros < kBytes ? kBytes - zeros : 0);
  }
  set(copy, &chunk, kBytes);
  for (uint32_t& word : chunk.words) word = poison;
  *static_cast<Chunk<kBytes>*>(to) = chunk;
}

}  // namespace attention::emulator

ATTENTION_EMULATOR_INLINE void __pipeline_memcpy_async(void* to, const void* from, size_t size,
                                                       size_t zeros = 0, ATTENTION_EMULATOR_SITE) {
  namespace emulator = attention::emulator;
  auto& copy =
      emulator::pending_copy(to, from, size, zeros, {"__pipeline_memcpy_async", file, line});
  const uint32_t poison = emulator::this_fiber().block->launch->poison;
  if (size == 16) emulator::begin_copy<16>(copy, to, from, zeros, poison);
  if (size == 8) emulator::begin_copy<8>(copy, to, from, zeros, poison);
  if (size == 4) emulator::begin_copy<4>(copy, to, from, zeros, poison);
}

namespace attention::emulator {

// Of `count` threads one copies every count-th part of 16, 8 or 4 bytes, whatever all addresses
// allow.
ATTENTION_EMULATOR_INLINE void copy_parts(void* to, const void* from, size_t bytes, size_t rank,
                                          size_t count, const char* file, int line) {
  const size_t all = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
  const size_t step = all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : 4;
  for (size_t i = rank * step; i < bytes; i += count * step)
    __pipeline_memcpy_async(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, step, 0,
                            file, line);
}

}  // namespace attention::emulator

void __pipeline_commit();
// Waits for all groups except the last `prior`.
void __pipeline_wait_prior(size_t prior);

#pragma GCC visibility pop
