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

// Loads and stores a whole chunk at once, so that accesses are counted as in hardware.
template <size_t kBytes>
ATTENTION_EMULATOR_INLINE void begin_copy(PendingCopy& copy, const void* from, size_t zeros,
                                          uint32_t poison) {
  Chunk<kBytes> chunk{};
  if (zeros == 0) {
    chunk = *static_cast<const Chunk<kBytes>*>(from);
  } else {
    std::memcpy(&chunk, from, zeros < kBytes ? kBytes - zeros : 0);
  }
  std::memcpy(copy.data, &chunk, kBytes);
  for (uint32_t& word : chunk.words) word = poison;
  *static_cast<Chunk<kBytes>*>(copy.to) = chunk;
}

// Checks a copy and adds it to the calling thread's pending ones.
__attribute__((noinline)) inline PendingCopy& pending_copy(void* to, const void* from, size_t size,
                                                           size_t zeros, const Site& site) {
  Fiber& self = this_fiber();
  SharedMemory& shared = self.block->shared;
  const char* wrong = nullptr;
  if ((size != 4 && size != 8 && size != 16) || zeros > size) {
    wrong = ": 4, 8 or 16 bytes can be copied";
  } else if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % size != 0) {
    wrong = ": an address is not a multiple of the size";
  } else if (shared.fixed != nullptr && !shared.has(to)) {
    wrong = ": the destination is not in shared memory";
  }
  if (wrong != nullptr) fail(cudaErrorMisalignedAddress, site.text() + wrong);
  if (self.pending == nullptr) self.pending = new std::vector<PendingCopy>;
  self.pending->push_back({to, size, {}});
  return self.pending->back();
}

}  // namespace attention::emulator

ATTENTION_EMULATOR_INLINE void __pipeline_memcpy_async(void* to, const void* from, size_t size,
                                                       size_t zeros = 0, ATTENTION_EMULATOR_SITE) {
  namespace emulator = attention::emulator;
  auto& copy =
      emulator::pending_copy(to, from, size, zeros, {"__pipeline_memcpy_async", file, line});
  const uint32_t poison = emulator::this_fiber().block->launch->poison;
  if (size == 16) emulator::begin_copy<16>(copy, from, zeros, poison);
  if (size == 8) emulator::begin_copy<8>(copy, from, zeros, poison);
  if (size == 4) emulator::begin_copy<4>(copy, from, zeros, poison);
}

inline void __pipeline_commit() {
  attention::emulator::Fiber& self = attention::emulator::this_fiber();
  if (self.pending == nullptr) self.pending = new std::vector<attention::emulator::PendingCopy>;
  self.pending->push_back({nullptr, 0, {}});
}

// Waits for all groups except the last `prior`.
__attribute__((noinline)) inline void __pipeline_wait_prior(size_t prior) {
  const attention::emulator::Fiber& self = attention::emulator::this_fiber();
  auto* const pending = self.pending;
  if (pending == nullptr) return;
  const auto is_end = [](const auto& copy) { return copy.size == 0; };
  size_t groups = 0;
  for (const auto& copy : *pending) groups += is_end(copy);
  auto copy = pending->begin();
  for (size_t left = groups; left > prior; ++copy) {
    if (is_end(*copy)) {
      --left;
    } else {
      if (self.block->races != nullptr)
        self.block->races->access(copy->to, copy->size, attention::emulator::AccessKind::kWrite,
                                  __builtin_return_address(0));
      std::memcpy(copy->to, copy->data, copy->size);
    }
  }
  pending->erase(pending->begin(), copy);
}

#pragma GCC visibility pop
