// Asynchronous copies to shared memory on the CPU, as <cuda_pipeline.h> declares their primitives.
//
// What is copied arrives when the copying thread waits for it, and not before: until then the
// destination holds poison. Reported, with the caller's line: a size that is not 4, 8 or 16 bytes,
// an address that is not a multiple of it, and a destination that is not in shared memory.

#pragma once

#include "cuda_emulator.h"

#pragma GCC visibility push(hidden)

inline void __pipeline_memcpy_async(void* to, const void* from, size_t size, size_t zeros = 0,
                                    ATTENTION_EMULATOR_SITE) {
  namespace emulator = attention::emulator;
  emulator::Fiber& self = emulator::this_fiber();
  emulator::SharedMemory& shared = self.block->shared;
  const char* wrong = nullptr;
  if ((size != 4 && size != 8 && size != 16) || zeros > size) {
    wrong = "4, 8 or 16 bytes can be copied";
  } else if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % size != 0) {
    wrong = "an address is not a multiple of the size";
  } else if (shared.fixed != nullptr && !shared.has(to)) {
    wrong = "the destination is not in shared memory";
  }
  if (wrong != nullptr) {
    emulator::fail(cudaErrorMisalignedAddress,
                   emulator::Site{"__pipeline_memcpy_async", file, line}.text() + ": " + wrong);
  }
  if (self.pending == nullptr) self.pending = new std::vector<emulator::PendingCopy>;
  self.pending->push_back({to, size, {}});
  std::memcpy(self.pending->back().data, from, size - zeros);
  shared.fill(static_cast<unsigned char*>(to), size, self.block->launch->poison);
}

inline void __pipeline_commit() {
  attention::emulator::Fiber& self = attention::emulator::this_fiber();
  if (self.pending == nullptr) self.pending = new std::vector<attention::emulator::PendingCopy>;
  self.pending->push_back({nullptr, 0, {}});
}

// Waits for all groups but the `prior` last ones.
inline void __pipeline_wait_prior(size_t prior) {
  auto* const pending = attention::emulator::this_fiber().pending;
  if (pending == nullptr) return;
  const auto is_end = [](const auto& copy) { return copy.size == 0; };
  size_t groups = 0;
  for (const auto& copy : *pending) groups += is_end(copy);
  auto copy = pending->begin();
  for (size_t left = groups; left > prior; ++copy) {
    if (is_end(*copy)) {
      --left;
    } else {
      std::memcpy(copy->to, copy->data, copy->size);
    }
  }
  pending->erase(pending->begin(), copy);
}

#pragma GCC visibility pop
