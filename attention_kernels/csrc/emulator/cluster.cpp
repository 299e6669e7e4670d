// Clusters: see cluster.h.

namespace attention::emulator {

inline uint64_t count_events(const Cluster& cluster) { return cluster.events + cluster.arrived; }

inline void fail_with(const Cluster& cluster) {
  if (cluster.failed.load()) fail(emulatorErrorCluster, "another block of the cluster has failed");
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
  const std::lock_guard<std::mutex> lock(cluster->mutex);
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

void cluster_arrive(bool releases, const char* file, int line) {
  Block& block = *this_fiber().block;
  OfThread& self = block.own();
  if (self.cluster_arrivals++ != self.cluster_waits)
    fail({"cluster_arrive", file, line}, "the thread has not waited since it arrived");
  Cluster& cluster = *block.cluster;
  if (Races* const races = block.races) {
    const Knowledge mine = releases ? races->knowledge() : races->fenced(Scope::kCluster);
    races->advance();
    const std::lock_guard<std::mutex> lock(cluster.mutex);
    auto& barrier = cluster.barriers[self.cluster_arrivals % 2];
    if (std::exchange(barrier.arrival, self.cluster_arrivals) != self.cluster_arrivals)
      barrier.knowledge = {};
    barrier.knowledge.merge(mine);
  }
  ++cluster.arrived;
  block.in_flight.progress();
}

void cluster_wait(const char* file, int line) {
  const Site site{"cluster_wait", file, line};
  Block& block = *this_fiber().block;
  OfThread& self = block.own();
  Cluster& cluster = *block.cluster;
  if (self.cluster_waits == self.cluster_arrivals) fail(site, "the thread has not arrived");
  const uint64_t due = uint64_t{++self.cluster_waits} * block.launch->cluster * block.threads;
  for (;;) {
    const uint64_t arrived = cluster.arrived.load();
    if (arrived >= due) break;
    if (never_ends(/*at_barrier=*/false))
      fail(site, format("never passes: {} threads of the cluster do not arrive", due - arrived),
           cudaErrorLaunchTimeout);
    switch_to(block.yield());
  }
  block.in_flight.progress();
  if (block.races == nullptr) return;
  const std::lock_guard<std::mutex> lock(cluster.mutex);
  block.races->learn(cluster.barriers[self.cluster_waits % 2].knowledge);
}

// ---- The shared memory of another block ---------------------------------------------------------

unsigned char* block_memory(unsigned char* here, unsigned block, const Site& site) {
  const Block& self = *this_fiber().block;
  const Block* const other =
      block < self.launch->cluster ? self.cluster->blocks[block].load() : nullptr;
  if (other == nullptr) not_running(site);
  check_shared(here, "the address", site);
  return self.shared.in_other(here, other->shared);
}

void store_to_block(float* here, unsigned block, float value, const char* file, int line) {
  auto* const byte =
      block_memory(reinterpret_cast<unsigned char*>(here), block, {"store_to_block", file, line});
  if (Races* const races = this_fiber().block->races)
    races->access(byte, sizeof value, AccessKind::kWrite, __builtin_return_address(0));
  *reinterpret_cast<float*>(byte) = value;
}

void send(unsigned block, const BulkCopy& copy) {
  Block& self = *this_fiber().block;
  Cluster& cluster = *self.cluster;
  Message message{copy, {}};
  if (self.races != nullptr) {
    message.knowledge = self.races->knowledge();
    self.races->advance();
  }
  std::unique_lock<std::mutex> lock(cluster.mutex);
  const Block* const other = cluster.blocks[block];
  if (other == nullptr) {
    lock.unlock();
    not_running(copy.site);
  }
  const auto move = [&](const void* here) {
    auto* const byte = static_cast<unsigned char*>(const_cast<void*>(here));
    return self.shared.in_other(byte, other->shared);
  };
  if (copy.bytes > 0) message.to = move(copy.to);
  message.barrier = move(copy.barrier);
  cluster.messages[block].push_back(message);
  ++cluster.events;
  self.in_flight.progress();
}

void send_bytes(void* here, unsigned block, const unsigned* words, unsigned bytes, Barrier* barrier,
                const char* file, int line) {
  const Site site{"send_words", file, line};
  const void* const code = __builtin_return_address(0);
  Block& self = *this_fiber().block;
  if (block >= self.launch->blocks_of_cluster()) not_running(site);
  if (reinterpret_cast<uintptr_t>(here) % bytes != 0)
    fail(site, "the address is not aligned", cudaErrorMisalignedAddress);
  check_shared(here, "the address", site);
  const unsigned* kept;
  {
    const std::lock_guard<std::mutex> lock(self.cluster->mutex);
    std::array<unsigned, 4>& last = self.cluster->words.emplace_back();
    std::copy_n(words, bytes / sizeof(unsigned), last.begin());
    kept = last.data();
  }
  const BulkCopy copy{here, bytes, barrier, site, code, line_of(kept, bytes)};
  if (block != rank_of(self)) return send(block, copy);
  begin_copy(copy);
  self.in_flight.progress();
}

void barrier_arrive_at_block(Barrier* here, unsigned block, const char* file, int line) {
  const Site site{"barrier_arrive_at_block", file, line};
  const Block& self = *this_fiber().block;
  if (block >= self.launch->blocks_of_cluster()) not_running(site);
  check_shared(here, "the address", site);
  block == rank_of(self) ? arrive(here, 0, site) : send(block, {nullptr, 0, here, site, nullptr});
}

void receive_messages() {
  Block& block = *this_fiber().block;
  if (block.launch->cluster < 2) return;
  const unsigned rank = rank_of(block);
  std::vector<Message> messages;
  {
    const std::lock_guard<std::mutex> lock(block.cluster->mutex);
    messages.swap(block.cluster->messages[rank]);
  }
  for (const Message& message : messages) {
    take_message(message);
    block.in_flight.progress();
    if (message.bytes == 0) continue;
    if (block.races != nullptr)
      block.races->copy_from_block(message.to, message.bytes, message.code, message.knowledge,
                                   message.barrier);
    add_copy(message);
  }
}

}  // namespace attention::ptx
