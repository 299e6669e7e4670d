// The twins of ptx.cuh's functions.
//
// What is copied arrives when a thread asks the copy's barrier for it, and not before: until then
// the destination holds poison. A relaxed load lets the other threads of the block run, so a loop
// that waits for a word ends, if the word is ever written.

#pragma once

#include "cuda_emulator.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx {

using Word = unsigned long long;

// 64 bits, as in shared memory.
struct Barrier {
  unsigned short expected, left;  // arrivals of a phase
  int bytes : 31;                 // of copies that the phase still waits for
  unsigned phase : 1;
};
static_assert(sizeof(Barrier) == 8);

ATTENTION_EMULATOR_INLINE void yield() {
  emulator::Fiber& self = emulator::this_fiber();
  emulator::Fiber* const to = self.block->yield();
  if (to != &self) switch_context(self, *to);
}

inline void store_relaxed(Word* to, Word value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
ATTENTION_EMULATOR_INLINE ulonglong2 load_relaxed(const Word* from) {
  yield();
  return {__atomic_load_n(from, __ATOMIC_RELAXED), __atomic_load_n(from + 1, __ATOMIC_RELAXED)};
}

template <int kThreads>
ATTENTION_EMULATOR_INLINE void sync_threads(ATTENTION_EMULATOR_SITE) {
  emulator::Fiber& self = emulator::this_fiber();
  emulator::Fiber* const to =
      self.block->arrive_at_barrier(false, "sync_threads", file, line, kThreads);
  if (to != &self) switch_context(self, *to);
}

inline void complete_if_due(Barrier* barrier) {
  if (barrier->left != 0 || barrier->bytes != 0) return;
  barrier->left = barrier->expected;
  barrier->phase ^= 1;
}

inline void barrier_init(Barrier* barrier, unsigned arrivals) {
  *barrier = {static_cast<unsigned short>(arrivals), static_cast<unsigned short>(arrivals), 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_expect(Barrier* barrier, unsigned bytes) {
  barrier->bytes += static_cast<int>(bytes);
  --barrier->left;
  complete_if_due(barrier);
}
inline void barrier_arrive(Barrier* barrier) { barrier_expect(barrier, 0); }

ATTENTION_EMULATOR_INLINE bool barrier_test(Barrier* barrier, unsigned parity) {
  auto& copies = emulator::this_fiber().block->copies;
  for (auto copy = copies.begin(); copy != copies.end();) {
    if (copy->barrier != barrier) {
      ++copy;
      continue;
    }
    std::memcpy(copy->to, copy->from, copy->bytes);
    barrier->bytes -= static_cast<int>(copy->bytes);
    copy = copies.erase(copy);
  }
  if (barrier->phase == parity) complete_if_due(barrier);
  if (barrier->phase != parity) return true;
  yield();
  return barrier->phase != parity;
}

inline void copy_bulk(void* to, const void* from, unsigned bytes, Barrier* barrier,
                      ATTENTION_EMULATOR_SITE) {
  emulator::Block& block = *emulator::this_fiber().block;
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 != 0) {
    emulator::fail(cudaErrorMisalignedAddress,
                   emulator::Site{"copy_bulk", file, line}.text() +
                       ": addresses and size are multiples of 16 bytes");
  }
  block.shared.fill(static_cast<unsigned char*>(to), bytes, block.launch->poison);
  block.copies.push_back({to, from, bytes, barrier});
}

// Here a kernel starts when the one ahead of it has ended.
inline void allow_next() {}
inline void wait_for_previous() {}

}  // namespace attention::ptx

#pragma GCC visibility pop
