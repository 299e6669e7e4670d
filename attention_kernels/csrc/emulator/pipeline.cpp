// Asynchronous copies of threads: see cuda_pipeline.h.

#include <algorithm>

#include "cuda_pipeline.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

inline std::vector<PendingCopy>& copies_of(Fiber& fiber) {
  if (fiber.pending == nullptr) fiber.pending = new std::vector<PendingCopy>;
  return *fiber.pending;
}

PendingCopy& pending_copy(void* to, const void* from, size_t size, size_t zeros, const Site& site) {
  Fiber& self = this_fiber();
  SharedMemory& shared = self.block->shared;
  const char* wrong = nullptr;
  if ((size != 4 && size != 8 && size != 16) || zeros > size) {
    wrong = "4, 8 or 16 bytes can be copied";
  } else if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % size != 0) {
    wrong = "an address is not a multiple of the size";
  } else if (shared.fixed != nullptr && !shared.has(to)) {
    wrong = "the destination is not in shared memory";
  }
  if (wrong != nullptr) fail(site, wrong, cudaErrorMisalignedAddress);
  copies_of(self).push_back({to, size, {}});
  return self.pending->back();
}

void set(PendingCopy& copy, const void* data, size_t bytes) { std::memcpy(copy.data, data, bytes); }

}  // namespace attention::emulator

void __pipeline_commit() {
  attention::emulator::copies_of(attention::emulator::this_fiber()).push_back({nullptr, 0, {}});
}

void __pipeline_wait_prior(size_t prior) {
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
