// Clusters: see cluster.h.

#include "cluster.h"

#include <sched.h>

#include <algorithm>
#include <string>
#include <utility>

#include "report.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// No thread may fail while it holds one: its frames would be discarded.
class Locked {
 public:
  explicit Locked(Cluster& cluster) : mutex(&cluster.mutex) { pthread_mutex_lock(mutex); }
  ~Locked() { pthread_mutex_unlock(mutex); }
  Locked(const Locked&) = delete;

 private:
  pthread_mutex_t* const mutex;
};

unsigned rank_of(const Block& block) {
  return block.launch->cluster == 0 ? 0 : block.number % block.launch->cluster;
}

inline void count_event(Cluster& cluster) {
  __atomic_fetch_add(&cluster.events, 1, __ATOMIC_RELEASE);
}

inline uint64_t count_events(const Cluster& cluster) {
  return __atomic_load_n(&cluster.events, __ATOMIC_ACQUIRE) +
         __atomic_load_n(&cluster.arrived, __ATOMIC_ACQUIRE);
}

inline void fail_with(const Cluster& cluster) {
  if (__atomic_load_n(&cluster.failed, __ATOMIC_ACQUIRE))
    fail(emulatorErrorCluster, "another block of the cluster has failed");
}

void Cluster::begin(Block& block) {
  const Locked locked(*this);
  __atomic_store_n(&blocks[rank_of(block)], &block, __ATOMIC_RELEASE);
  count_event(*this);
}

const Site* Cluster::end(const Block& block) {
  const Locked locked(*this);
  const unsigned rank = rank_of(block);
  __atomic_store_n(&blocks[rank], nullptr, __ATOMIC_RELEASE);
  ended[rank] = true;
  if (block.error != cudaSuccess) __atomic_store_n(&failed, true, __ATOMIC_RELEASE);
  count_event(*this);
  for (const Message& message : messages[rank])
    if (message.copy.bytes > 0) return &message.copy.site;
  return nullptr;
}

bool Cluster::send(unsigned block, const Message& message) {
  const Locked locked(*this);
  const Block* const other = blocks[block];
  if (other == nullptr) return false;
  const SharedMemory& mine = this_fiber().block->shared;
  Message there = message;
  const auto move = [&](const void* here) {
    auto* const byte = static_cast<unsigned char*>(const_cast<void*>(here));
    return mine.in_other(byte, other->shared);
  };
  if (message.copy.bytes > 0) there.copy.to = move(message.copy.to);
  there.copy.barrier = move(message.copy.barrier);
  messages[block].push_back(there);
  count_event(*this);
  return true;
}

bool never_ends(bool at_barrier) {
  Block& block = *this_fiber().block;
  InFlight& in_flight = block.in_flight;
  Cluster* const cluster = block.launch->cluster > 1 ? block.cluster : nullptr;
  if (cluster != nullptr) {
    fail_with(*cluster);
    const uint64_t events = count_events(*cluster);
    if (std::exchange(in_flight.events, events) != events) in_flight.progress();
  }
  if (in_flight.idle == 0) in_flight.waits_for_barrier = false;
  in_flight.waits_for_barrier |= at_barrier;
  if (++in_flight.idle < 16 * block.threads + 1000) return false;
  if (cluster == nullptr) return true;
  sched_yield();  // let other blocks run
  const Locked locked(*cluster);
  const unsigned rank = rank_of(block);
  if (count_events(*cluster) != in_flight.events) return false;
  cluster->stuck[rank] = {in_flight.events + 1, in_flight.waits_for_barrier};
  // The first block that waits for a barrier in shared memory reports it, if there is one.
  int reporter = -1;
  for (unsigned i = 0; i < block.launch->cluster; ++i) {
    if (cluster->ended[i]) continue;
    if (cluster->stuck[i].events != in_flight.events + 1) return false;
    if (reporter < 0 || (cluster->stuck[i].at_barrier && !cluster->stuck[reporter].at_barrier))
      reporter = static_cast<int>(i);
  }
  return reporter == static_cast<int>(rank) && at_barrier == in_flight.waits_for_barrier;
}

}  // namespace attention::emulator

namespace attention::ptx {

[[noreturn]] inline void not_running(const Site& site) {
  if (const Cluster* const cluster = this_fiber().block->cluster) fail_with(*cluster);
  fail(site, "that block of the cluster has not begun, or has ended", cudaErrorIllegalAddress);
}

// ---- The cluster's barrier ----------------------------------------------------------------------

void arrive_at_cluster(bool releases, const Site& site) {
  Fiber& self = this_fiber();
  if (self.cluster_arrivals++ != self.cluster_waits)
    fail(site, "the thread has not waited since it arrived");
  Cluster& cluster = *self.block->cluster;
  if (Races* const races = self.block->races) {
    const Knowledge mine = releases ? races->knowledge() : races->fenced(Scope::kCluster);
    races->advance();
    const Locked locked(cluster);
    auto& barrier = cluster.barriers[self.cluster_arrivals % 2];
    if (std::exchange(barrier.arrival, self.cluster_arrivals) != self.cluster_arrivals)
      barrier.knowledge = {};
    barrier.knowledge.merge(mine);
  }
  __atomic_fetch_add(&cluster.arrived, 1, __ATOMIC_RELEASE);
  self.block->in_flight.progress();
}

uint64_t begin_cluster_wait(const Site& site) {
  Fiber& self = this_fiber();
  if (self.cluster_waits == self.cluster_arrivals) fail(site, "the thread has not arrived");
  return uint64_t{++self.cluster_waits} * self.block->launch->cluster * self.block->threads;
}

bool has_cluster_arrived(uint64_t due, const Site& site) {
  Block& block = *this_fiber().block;
  Cluster& cluster = *block.cluster;
  const uint64_t arrived = __atomic_load_n(&cluster.arrived, __ATOMIC_ACQUIRE);
  if (arrived < due) {
    if (never_ends(/*at_barrier=*/false))
      fail(site,
           "never passes: " + std::to_string(due - arrived) +
               " threads of the cluster do not arrive",
           cudaErrorLaunchTimeout);
    return false;
  }
  block.in_flight.progress();
  if (block.races != nullptr) {
    const Locked locked(cluster);
    block.races->learn(cluster.barriers[this_fiber().cluster_waits % 2].knowledge);
  }
  return true;
}

// ---- The shared memory of another block ---------------------------------------------------------

// Returns the byte of another block's shared memory that corresponds to `here`.
unsigned char* block_memory(unsigned char* here, unsigned block, const Site& site) {
  const Block& self = *this_fiber().block;
  const Block* const other = block < self.launch->cluster
                                 ? __atomic_load_n(&self.cluster->blocks[block], __ATOMIC_ACQUIRE)
                                 : nullptr;
  if (other == nullptr) not_running(site);
  check_shared(here, "the address", site);
  return self.shared.in_other(here, other->shared);
}

void store_float_to_block(float* here, unsigned block, float value, const void* code,
                          const Site& site) {
  auto* const byte = block_memory(reinterpret_cast<unsigned char*>(here), block, site);
  if (Races* const races = this_fiber().block->races)
    races->access(byte, sizeof value, AccessKind::kWrite, code);
  *reinterpret_cast<float*>(byte) = value;
}

void send(unsigned block, const BulkCopy& copy, const void* code) {
  Block& self = *this_fiber().block;
  Message message{copy, code, {}};
  if (self.races != nullptr) {
    message.knowledge = self.races->knowledge();
    self.races->advance();
  }
  if (!self.cluster->send(block, message)) not_running(copy.site);
  self.in_flight.progress();
}

void send_bytes(void* here, unsigned block, const unsigned* words, unsigned bytes, Barrier* barrier,
                const void* code, const Site& site) {
  Block& self = *this_fiber().block;
  if (block >= std::max(self.launch->cluster, 1u)) not_running(site);
  if (reinterpret_cast<uintptr_t>(here) % bytes != 0)
    fail(site, "the address is not aligned", cudaErrorMisalignedAddress);
  check_shared(here, "the address", site);
  const unsigned* kept;
  {
    const Locked locked(*self.cluster);
    std::array<unsigned, 4>& last = self.cluster->words.emplace_back();
    std::copy_n(words, bytes / sizeof(unsigned), last.begin());
    kept = last.data();
  }
  const BulkCopy copy{here, kept, bytes, barrier, site};
  if (block != rank_of(self)) {
    send(block, copy, code);
    return;
  }
  begin_copy(copy, code);
  self.in_flight.progress();
}

void arrive_at_block(Barrier* here, unsigned block, const Site& site) {
  const Block& self = *this_fiber().block;
  if (block >= std::max(self.launch->cluster, 1u)) not_running(site);
  check_shared(here, "the address", site);
  if (block == rank_of(self)) {
    arrive(here, 0, site);
  } else {
    send(block, {nullptr, nullptr, 0, here, site}, nullptr);
  }
}

void receive_messages() {
  Block& block = *this_fiber().block;
  if (block.launch->cluster < 2) return;
  const unsigned rank = rank_of(block);
  std::vector<Message> messages;
  {
    const Locked locked(*block.cluster);
    messages.swap(block.cluster->messages[rank]);
  }
  for (const Message& message : messages) {
    const BulkCopy& copy = message.copy;
    take_message(message);
    block.in_flight.progress();
    if (copy.bytes == 0) continue;
    if (block.races != nullptr)
      block.races->copy_from_block(copy.to, copy.bytes, message.code, message.knowledge,
                                   copy.barrier);
    add_copy(copy, message.code);
  }
}

}  // namespace attention::ptx

#pragma GCC visibility pop
