// The emulator's barriers of ptx.cuh: those in shared memory, and those with a number.
//
// Errors, reported with the caller's line: a barrier that was not initialized, a copy that may not
// see that it was, an arrival too many, a wait that can never end, and a named barrier whose threads
// disagree on their number.

#pragma once

#include "cuda_emulator.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {
struct Message;  // cluster.h
}

namespace attention::ptx {

using namespace emulator;

// 64 bits, like an mbarrier in shared memory.
struct Barrier {
  unsigned short expected, left;  // arrivals of a phase
  int bytes : 31;                 // in flight that the phase waits for
  unsigned phase : 1;
};
static_assert(sizeof(Barrier) == 8);

// Defined in barrier.cpp, without what the kernel's recorders would see.
void init(Barrier* barrier, unsigned arrivals, const Site& site);
void show_barriers();
unsigned phase_of(const Barrier* barrier);
// Makes the phase also wait for `bytes` bytes of copies.
void barrier_add(Barrier* barrier, unsigned bytes, const Site& site);
// Returns a thread that waits for the phase that this completes, or -1.
int arrive(Barrier* barrier, unsigned bytes, const Site& site);
bool has_passed(Barrier* barrier, unsigned parity, const Site& site);
void note_idle(const Barrier* barrier, const Site& site);
void check_use(const Barrier* barrier, const Site& site);

// Reads what other blocks of the cluster have sent. Defined in cluster.cpp.
void receive_messages();
// Counts an arrival from another block, or checks the barrier of its copy.
void take_message(const Message& message);

// Defined in tma.cpp. begin_copy() begins a copy of the calling thread; add_copy() one that may also
// be another block's, if nothing in flight uses its destination; fill_tile() copies a box.
void load_bytes(void* to, const void* from, unsigned bytes, Barrier* barrier, const void* code,
                const Site& site);
void begin_copy(const BulkCopy& copy, const void* code);
void add_copy(const BulkCopy& copy, const void* code);
void fill_tile(const BulkCopy& copy);

ATTENTION_EMULATOR_INLINE void yield() {
  Fiber& self = this_fiber();
  Fiber* const to = self.block->yield();
  if (to != &self) switch_context(self, *to);
}

inline void barrier_init(Barrier* barrier, unsigned arrivals, ATTENTION_EMULATOR_SITE) {
  init(barrier, arrivals, {"barrier_init", file, line});
}
inline void barrier_init_fence() {
  show_barriers();
  emulator::fence(Scope::kCluster);
}

// An arrival that completes a phase lets a waiting thread continue before it returns. So a slot that
// is given back too early is overwritten before products read it.
inline void arrive_and_yield(Barrier* barrier, unsigned bytes, const Site& site) {
  const int waiter = arrive(barrier, bytes, site);
  Fiber& self = this_fiber();
  if (waiter < 0 || unsigned(waiter) == self.thread) return;
  if (Fiber* const to = self.block->turn_to(waiter)) switch_context(self, *to);
}
inline void barrier_expect(Barrier* barrier, unsigned bytes, ATTENTION_EMULATOR_SITE) {
  arrive_and_yield(barrier, bytes, {"barrier_expect", file, line});
}
inline void barrier_arrive(Barrier* barrier, ATTENTION_EMULATOR_SITE) {
  arrive_and_yield(barrier, 0, {"barrier_arrive", file, line});
}

ATTENTION_EMULATOR_INLINE bool barrier_test(Barrier* barrier, unsigned parity,
                                            ATTENTION_EMULATOR_SITE) {
  const Site site{"barrier_test", file, line};
  if (has_passed(barrier, parity, site)) return true;
  note_idle(barrier, site);
  yield();
  return has_passed(barrier, parity, site);
}
inline void barrier_wait(Barrier* barrier, unsigned parity, ATTENTION_EMULATOR_SITE) {
  const Site site{"barrier_wait", file, line};
  while (!has_passed(barrier, parity, site)) {
    note_idle(barrier, site);
    yield();
  }
}

inline void named_barrier_sync(int barrier, int threads, ATTENTION_EMULATOR_SITE) {
  Fiber& self = this_fiber();
  Fiber* const to = self.block->arrive_at_named_barrier(barrier, threads, true,
                                                        {"named_barrier_sync", file, line});
  if (to != &self) switch_context(self, *to);
  if (self.block->races != nullptr)
    self.block->races->acquire(&self.block->in_flight.named[barrier]);
}
inline void named_barrier_arrive(int barrier, int threads, ATTENTION_EMULATOR_SITE) {
  this_fiber().block->arrive_at_named_barrier(barrier, threads, false,
                                              {"named_barrier_arrive", file, line});
}

}  // namespace attention::ptx

#pragma GCC visibility pop
