// Barriers in shared memory and named barriers, and registers, for which warps wait, too: see cluster.h
// and ptx.h.

namespace attention::ptx {

constexpr unsigned kMostBytes = (1u << 20) - 1;  // of a phase
constexpr const char* kLacksFence = "was initialized without a barrier_init_fence() after it";

[[noreturn]] inline void barrier_failure(const Barrier* barrier, const Site& site,
                                         const std::string& what) {
  const Block& block = *this_fiber().block;
  fail(site, format("the barrier at {} {}", describe(block.shared, barrier), what));
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

void barrier_init(Barrier* barrier, unsigned arrivals, const char* file, int line) {
  if (arrivals == 0 || arrivals > 0xffff)
    barrier_failure(barrier, {"barrier_init", file, line},
                    format("cannot wait for {} arrivals", arrivals));
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

inline void show_barriers() {
  for (KnownBarrier& known : this_fiber().block->in_flight.barriers) known.is_fenced = true;
}

void barrier_init_fence() {
  show_barriers();
  emulator::fence(Scope::kCluster);
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

inline void check_use(const Barrier* barrier, const Site& site) {
  if (!find_initialized(barrier, site).is_fenced) barrier_failure(barrier, site, kLacksFence);
}

inline void count_arrival(Barrier* barrier, unsigned bytes, const Site& site) {
  if (barrier->left == 0)
    barrier_failure(barrier, site,
                    format("has all of its {} arrivals, and waits only for {} bytes",
                           barrier->expected, int{barrier->bytes}));
  if (bytes > kMostBytes) barrier_failure(barrier, site, "cannot wait for so many bytes");
  barrier->bytes += static_cast<int>(bytes);
  --barrier->left;
  complete_if_due(barrier);
  this_fiber().block->in_flight.progress();
}

unsigned phase_of(const Barrier* barrier) { return barrier->phase; }

void barrier_add(Barrier* barrier, unsigned bytes, const char* file, int line) {
  find_initialized(barrier, {"barrier_add", file, line});
  barrier->bytes += static_cast<int>(bytes);
}

inline void arrive(Barrier* barrier, unsigned bytes, const Site& site) {
  const Fiber& self = this_fiber();
  const KnownBarrier& known = find_initialized(barrier, site);
  if (self.block->races != nullptr) self.block->races->release(barrier);
  const unsigned phase = barrier->phase;
  count_arrival(barrier, bytes, site);
  if (barrier->phase == phase || known.waiter < 0) return;
  if (Fiber* const waiter = self.block->turn_to(known.waiter)) switch_to(waiter);
}
void barrier_arrive(Barrier* barrier, const char* file, int line) {
  arrive(barrier, 0, {"barrier_arrive", file, line});
}
void barrier_expect(Barrier* barrier, unsigned bytes, const char* file, int line) {
  arrive(barrier, bytes, {"barrier_expect", file, line});
}

// Counts an arrival from another block, or checks the barrier of its copy.
inline void take_message(const Message& message) {
  Races* const races = this_fiber().block->races;
  auto* const barrier = static_cast<Barrier*>(const_cast<void*>(message.barrier));
  const KnownBarrier* const known = find(barrier);
  if (known == nullptr) barrier_failure(barrier, message.site, "has not been initialized");
  if (races != nullptr) {
    const auto number = static_cast<uint32_t>(this_fiber().block->number);
    if (!message.knowledge.has(number, known->thread, known->clock))
      barrier_failure(barrier, message.site,
                      "was initialized by its block, and nothing orders that before");
    races->release(barrier, message.knowledge);
  }
  if (message.bytes == 0) {
    count_arrival(barrier, 0, message.site);
  } else if (!known->is_fenced) {
    barrier_failure(barrier, message.site, kLacksFence);
  }
}

// Copies arrive when a thread waits for the phase, and not before.
inline void land_copies(Block& block, Barrier* barrier) {
  erase_if(block.in_flight.copies, [&](const BulkCopy& copy) {
    if (copy.barrier != barrier) return false;
    fill_tile(copy);
    show(copy.to, copy.bytes);
    barrier->bytes -= static_cast<int>(copy.bytes);
    block.in_flight.progress();
    return true;
  });
}

inline bool has_passed(Barrier* barrier, unsigned parity, const Site& site) {
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

// Lets others run after a failed wait, for a barrier or for registers.
inline void wait_for_others(const Barrier* barrier, const Site& site) {
  if (!never_ends(/*at_barrier=*/true)) return switch_to(this_fiber().block->yield());
  const Block& block = *this_fiber().block;
  const std::string others = waiting_threads(block);
  if (barrier == nullptr)
    fail(cudaErrorLaunchTimeout,
         format("{} never ends: no warp gives up registers{}", site, others));
  std::string what =
      format("never passes: its phase of parity {} has {} of {} arrivals", unsigned{barrier->phase},
             barrier->expected - barrier->left, barrier->expected);
  if (barrier->bytes > 0)
    what += format(" and waits for {} bytes that no copy brings", int{barrier->bytes});
  if (barrier->bytes < 0)
    what += format(" and copies brought {} bytes more than it expects", -barrier->bytes);
  barrier_failure(barrier, site, what + others);
}

bool barrier_test(Barrier* barrier, unsigned parity, const char* file, int line) {
  const Site site{"barrier_test", file, line};
  if (has_passed(barrier, parity, site)) return true;
  wait_for_others(barrier, site);
  return has_passed(barrier, parity, site);
}

void barrier_wait(Barrier* barrier, unsigned parity, const char* file, int line) {
  const Site site{"barrier_wait", file, line};
  while (!has_passed(barrier, parity, site)) wait_for_others(barrier, site);
}

void named_barrier_sync(int barrier, int threads, const char* file, int line) {
  Block& block = *this_fiber().block;
  switch_to(
      block.arrive_at_named_barrier(barrier, threads, true, {"named_barrier_sync", file, line}));
  if (block.races != nullptr) block.races->acquire(&block.in_flight.named[barrier]);
}

void named_barrier_arrive(int barrier, int threads, const char* file, int line) {
  this_fiber().block->arrive_at_named_barrier(barrier, threads, false,
                                              {"named_barrier_arrive", file, line});
}

// ---- Registers that warps give to others (setmaxnreg) --------------------------------------------

constexpr unsigned kRegistersOfMultiprocessor = 65536, kMostRegisters = 248;

// Called after the warp has met: returns whether it has got its registers. A block begins with as
// many as fit if it is alone on its multiprocessor.
inline bool has_registers(unsigned registers, bool raises, const Site& site) {
  const Fiber& self = this_fiber();
  Block& block = *self.block;
  InFlight& in_flight = block.in_flight;
  if (in_flight.registers.empty()) {
    const unsigned threads = block.warp_count * kWarpSize;
    in_flight.registers.assign(
        block.warp_count, std::min(kMostRegisters, kRegistersOfMultiprocessor / threads / 8 * 8));
    in_flight.free_registers = 0;
  }
  unsigned& mine = in_flight.registers[self.thread / kWarpSize];
  if (mine == registers) return true;
  if (raises != (registers > mine))
    fail(site, format("the warp has {} registers per thread", mine));
  if (raises && (registers - mine) * kWarpSize > in_flight.free_registers) return false;
  in_flight.free_registers += (mine - registers) * kWarpSize;  // modulo 2^32
  mine = registers;
  in_flight.progress();
  return true;
}

void change_registers(unsigned registers, bool raises, const Site& site) {
  meet({nullptr, registers, raises, {}}, site);
  while (!has_registers(registers, raises, site)) wait_for_others(nullptr, site);
}

}  // namespace attention::ptx
