// Barriers in shared memory and named barriers: see barrier.h.

#include <string>

#include "cluster.h"
#include "ptx.h"
#include "report.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx {

constexpr unsigned kMostBytes = (1u << 20) - 1;  // of a phase

inline std::string place_of(const Block& block, const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t offset = at - reinterpret_cast<uintptr_t>(block.shared.dynamic);
  if (offset < block.shared.dynamic_bytes) return describe(block.shared, at);
  return "byte " + std::to_string(at - reinterpret_cast<uintptr_t>(block.shared.fixed)) +
         " of static shared memory";
}

[[noreturn]] inline void barrier_failure(const Barrier* barrier, const Site& site,
                                         const std::string& what) {
  const Block& block = *this_fiber().block;
  fail(site, "the barrier at " + place_of(block, barrier) + " " + what);
}

inline KnownBarrier* find(const Barrier* barrier) {
  for (KnownBarrier& known : this_fiber().block->in_flight.barriers)
    if (known.barrier == barrier) return &known;
  return nullptr;
}

inline void complete_if_due(Barrier* barrier) {
  if (barrier->left != 0 || barrier->bytes != 0) return;
  barrier->left = barrier->expected;
  barrier->phase ^= 1;
}

void init(Barrier* barrier, unsigned arrivals, const Site& site) {
  if (arrivals == 0 || arrivals > 0xffff)
    barrier_failure(barrier, site, "cannot wait for " + std::to_string(arrivals) + " arrivals");
  *barrier = {static_cast<unsigned short>(arrivals), static_cast<unsigned short>(arrivals), 0, 0};
  const Fiber& self = this_fiber();
  KnownBarrier known{barrier};
  known.thread = self.thread;
  if (self.block->races != nullptr) {
    known.clock = self.block->races->clock();
    self.block->races->advance();
  }
  if (KnownBarrier* const before = find(barrier)) {
    *before = known;
  } else {
    self.block->in_flight.barriers.push_back(known);
  }
}

void show_barriers() {
  for (KnownBarrier& known : this_fiber().block->in_flight.barriers) known.is_fenced = true;
}

inline KnownBarrier& find_initialized(const Barrier* barrier, const Site& site) {
  const Block& block = *this_fiber().block;
  KnownBarrier* const known = find(barrier);
  if (known == nullptr) barrier_failure(barrier, site, "has not been initialized");
  if (block.races != nullptr && !block.races->follows(known->thread, known->clock))
    barrier_failure(barrier, site,
                    "was initialized by another thread, and nothing orders that before");
  return *known;
}

void check_use(const Barrier* barrier, const Site& site) {
  if (!find_initialized(barrier, site).is_fenced)
    barrier_failure(barrier, site, "was initialized without a barrier_init_fence() after it");
}

inline void count_arrival(Barrier* barrier, unsigned bytes, const Site& site) {
  if (barrier->left == 0)
    barrier_failure(barrier, site,
                    "has all of its " + std::to_string(barrier->expected) +
                        " arrivals, and waits only for " + std::to_string(barrier->bytes) +
                        " bytes");
  if (bytes > kMostBytes) barrier_failure(barrier, site, "cannot wait for so many bytes");
  barrier->bytes += static_cast<int>(bytes);
  --barrier->left;
  complete_if_due(barrier);
  this_fiber().block->in_flight.progress();
}

unsigned phase_of(const Barrier* barrier) { return barrier->phase; }

void barrier_add(Barrier* barrier, unsigned bytes, const Site& site) {
  find_initialized(barrier, site);
  barrier->bytes += static_cast<int>(bytes);
}

int arrive(Barrier* barrier, unsigned bytes, const Site& site) {
  const Block& block = *this_fiber().block;
  const KnownBarrier& known = find_initialized(barrier, site);
  if (block.races != nullptr) block.races->release(barrier);
  const unsigned phase = barrier->phase;
  count_arrival(barrier, bytes, site);
  return barrier->phase != phase ? known.waiter : -1;
}

void take_message(const Message& message) {
  Races* const races = this_fiber().block->races;
  const BulkCopy& copy = message.copy;
  auto* const barrier = static_cast<Barrier*>(const_cast<void*>(copy.barrier));
  const KnownBarrier* const known = find(barrier);
  if (known == nullptr) barrier_failure(barrier, copy.site, "has not been initialized");
  if (races != nullptr) {
    const auto number = static_cast<uint32_t>(this_fiber().block->number);
    if (!message.knowledge.has(number, known->thread, known->clock))
      barrier_failure(barrier, copy.site,
                      "was initialized by its block, and nothing orders that before");
    races->release_from_block(barrier, message.knowledge);
  }
  if (copy.bytes == 0) {
    count_arrival(barrier, 0, copy.site);
  } else if (!known->is_fenced) {
    barrier_failure(barrier, copy.site, "was initialized without a barrier_init_fence() after it");
  }
}

// Copies arrive when a thread waits for the phase, and not before.
inline void land_copies(Block& block, Barrier* barrier) {
  auto& copies = block.in_flight.copies;
  for (auto copy = copies.begin(); copy != copies.end();) {
    if (copy->barrier != barrier) {
      ++copy;
      continue;
    }
    if (copy->from == nullptr) {
      fill_tile(*copy);
    } else {
      std::memcpy(copy->to, copy->from, copy->bytes);
    }
    block.in_flight.view.update(block.shared, block.launch->poison, copy->to, copy->bytes);
    barrier->bytes -= static_cast<int>(copy->bytes);
    copy = copies.erase(copy);
    block.in_flight.progress();
  }
}

bool has_passed(Barrier* barrier, unsigned parity, const Site& site) {
  Block& block = *this_fiber().block;
  KnownBarrier& known = find_initialized(barrier, site);
  receive_messages();
  if (barrier->phase == (parity & 1)) {
    land_copies(block, barrier);
    complete_if_due(barrier);
    if (barrier->phase == (parity & 1)) {
      known.waiter = static_cast<int>(this_fiber().thread);
      return false;
    }
  }
  known.waiter = -1;
  if (block.races != nullptr) block.races->acquire(barrier);
  return true;
}

// Called after each failed wait.
void note_idle(const Barrier* barrier, const Site& site) {
  if (!never_ends(/*at_barrier=*/true)) return;
  const Block& block = *this_fiber().block;
  const std::string others = waiting_threads(block);
  if (barrier == nullptr) {
    fail(cudaErrorLaunchTimeout,
         (to_string(site) + (" never ends: no warp gives up registers" + others)).c_str());
  }
  std::string what = "never passes: its phase of parity " + std::to_string(barrier->phase) +
                     " has " + std::to_string(barrier->expected - barrier->left) + " of " +
                     std::to_string(barrier->expected) + " arrivals";
  if (barrier->bytes > 0)
    what += " and waits for " + std::to_string(barrier->bytes) + " bytes that no copy brings";
  if (barrier->bytes < 0)
    what +=
        " and copies brought " + std::to_string(-barrier->bytes) + " bytes more than it expects";
  barrier_failure(barrier, site, what + others);
}

}  // namespace attention::ptx

#pragma GCC visibility pop
