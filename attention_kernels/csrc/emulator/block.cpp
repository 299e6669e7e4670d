// Runs a block: see block.h.

namespace attention::emulator {

// ---- Shared memory ------------------------------------------------------------------------------

bool SharedMemory::has(const void* address) const {
  return offset(address, dynamic) < dynamic_bytes ||
         offset(address, statics) < Library::instance().storage_bytes;
}

unsigned SharedMemory::first_address(bool is_fixed) const {
  const auto within = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 1024; };
  if (is_fixed) return 1024 + within(statics);
  const size_t before =
      statics == nullptr ? 0 : within(statics) + Library::instance().storage_bytes;
  return 1024 + (before + 1023) / 1024 * 1024 + within(dynamic);
}

unsigned SharedMemory::address_of(const void* memory_of_block) const {
  const bool is_fixed = offset(memory_of_block, statics) < Library::instance().storage_bytes;
  return first_address(is_fixed) +
         static_cast<unsigned>(offset(memory_of_block, is_fixed ? statics : dynamic));
}

unsigned char* SharedMemory::at_address(unsigned address) const {
  const size_t in_dynamic = size_t{address} - first_address(false);
  if (in_dynamic < kSharedBytes) return dynamic + in_dynamic;
  const size_t offset = size_t{address} - first_address(true);
  return statics != nullptr && offset < Library::instance().storage_bytes ? statics + offset
                                                                          : nullptr;
}

// ---- Words --------------------------------------------------------------------------------------

inline void set_error(Block& block, cudaError_t code, const std::string& what) {
  block.error = code;
  std::snprintf(block.message, sizeof block.message, "%s", what.c_str());
}

std::string place(const char* file, int line) {
  const char* const slash = std::strrchr(file, '/');
  return format("{}:{}", slash ? slash + 1 : file, line);
}

std::string describe(const SharedMemory& shared, const void* address) {
  const size_t in_fixed = offset(address, shared.fixed);
  if (in_fixed < Library::instance().tls_bytes)
    return format("byte {} of static shared memory", in_fixed);
  const auto in_dynamic = static_cast<ptrdiff_t>(offset(address, shared.dynamic));
  return format("byte {} of {} bytes of dynamic shared memory", in_dynamic, shared.dynamic_bytes);
}

std::string waiting_threads(const Block& block) {
  std::string all;
  const auto add = [&](unsigned waiting, unsigned of, const Site& site) {
    all += format("; {} of {} threads have arrived in {}", waiting, of, site);
  };
  if (block.arrived != 0) add(block.arrived, block.threads - block.finished, block.barrier);
  for (const NamedBarrier& named : block.in_flight.named)
    if (named.arrived != 0) add(named.arrived, named.threads, named.site);
  return all;
}

// Something has happened that blocks of a launch may wait for. Defined in grid.cpp.
void note_event(const Launch& launch);

// ---- Scheduling -------------------------------------------------------------------------------

void Block::begin_interval() {
  if (races != nullptr) races->begin_interval();
  const uint64_t at = number << 20 ^ interval;
  uint64_t order = 0;  // ascending; ~0 is descending, and other bits are other permutations
  if (launch->order == Launch::kShuffle) {
    order = at + launch->seed * 0x632be59bd9b4e019u + 1;
    order *= 0x9e3779b97f4a7c15u;  // splitmix64
    order = (order ^ order >> 30) * 0xbf58476d1ce4e5b9u;
    order = (order ^ order >> 27) * 0x94d049bb133111ebu;
  } else if (__builtin_parityll(at) != (launch->order == Launch::kReverse)) {
    order = ~order;
  }
  lane_step = static_cast<unsigned>(order) | 1;
  lane_offset = static_cast<unsigned>(order >> 32);
  warp_step = static_cast<unsigned>(order >> 8) | 1;
  warp_offset = static_cast<unsigned>(order >> 40);
  for (unsigned i = 0; i < warp_count; ++i) warps[i].ready = warps[i].exists & ~warps[i].done;
  warp_rank = ~0u;
  next_warp();
}

bool Block::next_warp() {
  unsigned index;
  do {
    if (++warp_rank == warp_slots) return false;
    index = (warp_rank * warp_step + warp_offset) % warp_slots;
  } while (index >= warp_count);
  warp = &warps[index];
  lane_rank = ~0u;
  return true;
}

// Returns the next fiber that can run, or null. A warp without one is passed for good until the
// next barrier, because no other warp can wake it. Only fibers that yielded can be in warps already
// passed.
Fiber* Block::next_ready() {
  while (warp->ready == 0) {
    if (next_warp()) continue;
    const auto can_run = [](const Warp& w) { return w.ready != 0; };
    if (std::none_of(warps, warps + warp_count, can_run)) return nullptr;
    warp_rank = ~0u;
    next_warp();
  }
  do {
    lane = (++lane_rank * lane_step + lane_offset) % kWarpSize;
  } while ((warp->ready >> lane & 1) == 0);
  return warp->fibers[lane];
}

Fiber* Block::next_or_abandon() {
  Fiber* const to = next_ready();
  if (to == nullptr) {
    record_stuck();
    abandon();
  }
  return to;
}

void note_poll(const void* word, uint64_t value, const Site& site, const void* code) {
  Block& block = *this_fiber().block;
  Poll* const mine = block.own().polls;
  Poll* const found =
      std::find_if(mine, mine + kPolls, [&](const auto& poll) { return poll.word == word; });
  if (word == nullptr) {
    end_if_hopeless(site, code);
    std::this_thread::yield();
  } else if (found != mine + kPolls && found->value == value) {
    end_if_hopeless(site, code);
  } else {
    const bool is_full = mine[kPolls - 1].word != nullptr;
    if (found != mine + kPolls || is_full) note_event(*block.launch);
    Poll* const last = std::min(found, mine + kPolls - 1);
    std::copy_backward(mine, last, last + 1);
    *mine = {word, value};
    if (found != mine + kPolls || !is_full) return;
    // Let others run: a thread that has read so many words may be repeating all of them.
  }
  block.in_flight.idle = 0;
  switch_to(block.yield());
}

void fence(Scope scope) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (Races* const races = this_fiber().block->races) races->fence(scope);
}

void set_scope(Scope scope) {
  if (Races* const races = this_fiber().block->races) races->set_scope(scope);
}

void allow_next() {
  if (Races* const races = this_fiber().block->races) races->allow_next();
}

Fiber* Block::yield() {
  const unsigned self = this_fiber().thread;
  for (unsigned i = 1; i <= threads; ++i) {
    const unsigned thread = (self + i) % threads;
    if ((warps[thread / kWarpSize].ready >> thread % kWarpSize & 1) == 0) continue;
    if (thread <= self) {  // all have had their turn
      ++in_flight.rotations;
      let_other_blocks_run(*this, /*waits=*/true);
    }
    if (i == threads) std::this_thread::yield();
    return turn_to(thread);
  }
  __builtin_unreachable();
}

Fiber* Block::turn_to(unsigned thread) {
  if ((warps[thread / kWarpSize].ready >> thread % kWarpSize & 1) == 0) return nullptr;
  warp = &warps[thread / kWarpSize];
  lane = thread % kWarpSize;
  return warp->fibers[lane];
}

Fiber* Block::arrive_at_barrier(bool predicate, const char* name, const char* file, int line) {
  if (arrived == 0) {
    barrier = {name, file, line};
    barrier_thread = this_fiber().thread;
    votes = 0;
  } else if (line != barrier.line ||
             (file != barrier.file && std::strcmp(file, barrier.file) != 0)) {
    fail_by_divergence({name, file, line}, barrier, fiber(barrier_thread));
  }
  votes += predicate;
  ++arrived;
  warp->ready &= ~(1u << lane);
  pass_barrier();
  return next_or_abandon();
}

// Releases the threads that wait at a barrier, once all others have arrived or returned.
void Block::pass_barrier() {
  if (arrived == 0 || arrived + finished < threads) return;
  arrived = 0;
  barrier_votes = votes;
  ++interval;
  in_flight.progress();
  begin_interval();
}

Fiber* Block::arrive_at_named_barrier(int number, int for_threads, bool waits, const Site& site) {
  if (number < 1 || number >= static_cast<int>(kNamedBarriers))
    fail(site, format("there is no named barrier {}: 1 to 15", number));
  NamedBarrier& named = in_flight.named[number];
  if (named.arrived == 0) {
    named.threads = for_threads;
    named.thread = this_fiber().thread;
    named.site = site;
  }
  const unsigned mine = this_fiber().thread / kWarpSize;
  const uint32_t bit = 1u << this_fiber().thread % kWarpSize;
  if (for_threads <= 0 || for_threads % kWarpSize != 0 ||
      for_threads > static_cast<int>(warp_count * kWarpSize))
    fail(site, format("a barrier for {} threads of {}: it takes whole warps of the block",
                      for_threads, threads));
  if (named.threads != static_cast<unsigned>(for_threads))
    fail(site, format("named barrier {} for {} threads, and for {} in {}", number, for_threads,
                      named.threads, named.site));
  if ((named.lanes[mine] & bit) != 0)
    fail(site,
         format("the thread arrives again at named barrier {}, where {} of {} threads have arrived",
                number, named.arrived, named.threads));
  if (races != nullptr) races->release(&named);
  named.lanes[mine] |= bit;
  if (waits) {
    named.waiting[mine] |= bit;
    warp->ready &= ~bit;
  }
  if (++named.arrived == named.threads) {
    for (unsigned i = 0; i < warp_count; ++i) warps[i].ready |= named.waiting[i];
    named = {};
    in_flight.progress();
  }
  return waits ? next_or_abandon() : &this_fiber();
}

Fiber* Block::arrive_in_warp(WarpOp op, uint32_t mask, uint64_t value, unsigned source,
                             const Site* site) {
  if ((mask >> lane & 1) == 0) fail(*site, "the mask does not name the caller");
  const int other =
      warp->arrive(lane, {op, mask & warp->exists, source, value, site}, launch->poison);
  if (other >= 0) fail_by_divergence(*site, *warp->wait[other].site, *warp->fibers[other]);
  if (races != nullptr && op == WarpOp::kSync && (warp->waiting & mask) == 0)
    races->synchronize(this_fiber().thread / kWarpSize * kWarpSize, mask & warp->exists);
  return next_or_abandon();
}

// Not inlined in finish(), which never returns: AddressSanitizer would still guard its variables
// when the next block reuses the stack.
__attribute__((noinline)) bool Block::check_ends() {
  const std::string left = left_by(in_flight, this_fiber().thread, finished == threads);
  if (!left.empty()) record(cudaErrorLaunchFailure, left.c_str());
  return left.empty();
}

// The calling fiber has returned from the kernel.
void Block::finish() {
  warp->ready &= ~(1u << lane);
  warp->done |= 1u << lane;
  ++finished;
  if (!check_ends()) abandon();
  pass_barrier();
  Fiber* const to = next_ready();
  if (to == nullptr && finished < threads) record_stuck();
  switch_context(this_fiber(), to == nullptr ? main : *to, /*from_ends=*/true);
  __builtin_unreachable();
}

// ---- Failing ----------------------------------------------------------------------------------

void Block::record(cudaError_t code, const char* what, const Fiber& culprit) {
  set_error(*this, code, format("{}; block {}, thread {}", what, index, culprit.thread_idx));
}

void Block::abandon() {
  switch_context(this_fiber(), main, /*from_ends=*/true);
  __builtin_unreachable();
}

void Block::fail_by_divergence(const Site& here, const Site& there, const Fiber& other) {
  fail(cudaErrorLaunchFailure, format("divergence: this thread waits in {}, thread {} in {}", here,
                                      other.thread_idx, there));
}

// Called when no fiber can run although some have not returned: they wait for lanes of their warp.
void Block::record_stuck() {
  const auto state_of = [&](const Warp& w, unsigned bit) {
    const uint3 thread = w.fibers[bit]->thread_idx;
    if (w.done >> bit & 1) return format("thread {} has returned from the kernel", thread);
    const Site& site = w.waiting >> bit & 1 ? *w.wait[bit].site : barrier;
    return format("thread {} waits in {}", thread, site);
  };
  for (const Warp* w = warps; w < warps + warp_count; ++w) {
    if (w->waiting == 0) continue;
    const unsigned waiter = __builtin_ctz(w->waiting);
    const uint32_t missing = w->wait[waiter].mask & ~w->waiting;
    const std::string what =
        format("{} waits for lanes that never arrive: {}", *w->wait[waiter].site,
               state_of(*w, missing != 0 ? __builtin_ctz(missing) : waiter));
    return record(cudaErrorLaunchFailure, what.c_str(), *w->fibers[waiter]);
  }
  for (const NamedBarrier& named : in_flight.named) {
    if (named.arrived == 0) continue;
    const std::string what = format("{} never passes{}", named.site, waiting_threads(*this));
    return record(cudaErrorLaunchFailure, what.c_str(), fiber(named.thread));
  }
}

// ---- One block --------------------------------------------------------------------------------

// Resets a fiber so that it starts in a function that never returns. `bottom` is the lowest address
// of its stack.
inline void start_over(Fiber& fiber, [[maybe_unused]] uintptr_t bottom, void (*function)()) {
  auto** const top = reinterpret_cast<void**>(&fiber);
#ifdef ATTENTION_EMULATOR_ASAN
  fiber.fake_stack = nullptr;
  fiber.bottom = reinterpret_cast<const void*>(bottom);
  fiber.size = reinterpret_cast<uintptr_t>(top) - bottom;
#endif
  // Laid out as switch_stack() leaves a stack. The function starts as if called, without a caller.
  auto** const entry = top - 2 - kEntryOffset / sizeof(void*);
  std::fill(entry, top, nullptr);
  entry[0] = reinterpret_cast<void*>(function);
  fiber.stack_pointer = entry;
}

void Block::fiber_main() {
#ifdef ATTENTION_EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  Block& block = *this_fiber().block;
  bool threw = false;
  try {
    block.launch->body(block.launch->arguments);
  } catch (const ThreadExit&) {
  } catch (...) {
    threw = true;  // reported only after this block, so that the exception is destroyed
  }
  if (!threw) block.finish();
  fail(cudaErrorLaunchFailure, "the kernel threw a C++ exception");
}

void Block::prepare(const Launch& next) {
  launch = &next;
  threads = count_in(next.block);
  warp_count = (threads + kWarpSize - 1) / kWarpSize;
  warp_slots = 1;
  while (warp_slots < warp_count) warp_slots *= 2;
  if (stacks == 0) {
    const size_t bytes = (kMaxThreads + 2) * kStackBytes;
    void* const memory = reserve(bytes);
    madvise(memory, bytes, MADV_NOHUGEPAGE);  // most of each stack is never touched
    stacks = (reinterpret_cast<uintptr_t>(memory) / kStackBytes + 2) * kStackBytes;
    mprotect(reinterpret_cast<void*>(stacks - kStackBytes), kStackBytes, PROT_NONE);
  }
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = fiber_on(stacks + i * kStackBytes);
    warps[i / kWarpSize].fibers[i % kWarpSize] = &f;
    f.block = this;
    f.thread = i;
    f.thread_idx = index_in(next.block, i);
  }
  for (unsigned i = 0; i < warp_count; ++i) {
    warps[i].exists = ~0u >> (kWarpSize - std::min(threads - i * kWarpSize, kWarpSize));
  }
#ifdef ATTENTION_EMULATOR_ASAN
  pthread_attr_t attributes;
  void* bottom = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &main.size);
  pthread_attr_destroy(&attributes);
  main.bottom = bottom;
#endif
  shared.open(next.dynamic_shared);
}

bool Block::run(uint64_t number_in_grid) {
  number = number_in_grid;
  index = index_in(launch->grid, number);
  shared.poison(launch->poison);
  for (unsigned i = 0; i < warp_count; ++i) warps[i].waiting = warps[i].done = 0;
  for (unsigned i = 0; i < threads; ++i) {
    start_over(fiber(i), stacks + i * kStackBytes, &fiber_main);
  }
  error = cudaSuccess;
  signals.ticks = 0;
  signals.faulted = signals.stopped = false;
  finished = arrived = interval = 0;
  in_flight = {};
  in_flight.threads.resize(threads);
  in_flight.products.resize(warp_count);
  in_flight.issued.resize(warp_count / 4);
  cluster = launch->cluster > 0 ? &launch->clusters[number / launch->cluster] : nullptr;
  if (cluster != nullptr) cluster->begin(*this);
  if (checks_races && races == nullptr) races = new Races(*this);
  if (races != nullptr) races->begin_block();
  stuck_round = access = 0;
  begin_interval();
  switch_context(main, *next_ready());
  if (races != nullptr) races->end_block();
  const Site* const left = cluster == nullptr ? nullptr : cluster->end(*this);
  if (error == cudaSuccess && left != nullptr)
    set_error(*this, cudaErrorLaunchFailure,
              format("the block ends before {} is complete; block {}", *left, index));
  if (error == cudaSuccess) check_shared();
  if (signals.stopped) drop_stacks();  // and whatever a fiber was changing there
#ifdef ATTENTION_EMULATOR_ASAN
  if (error != cudaSuccess)
    __asan_unpoison_memory_region(reinterpret_cast<void*>(stacks), threads * kStackBytes);
#endif
  return error == cudaSuccess;
}

void Block::check_shared() {
  if (const unsigned char* const byte = shared.overwritten(launch->poison))
    set_error(*this, cudaErrorIllegalAddress,
              format("a thread wrote to {}; block {}", describe(shared, byte), index));
  if (std::exchange(shared.counted, true)) return;
  const size_t fixed = shared.count_fixed(launch->poison);
  if (launch->dynamic_shared + fixed > launch->shared_limit)
    set_error(
        *this, cudaErrorInvalidValue,
        format("{} bytes of dynamic and at least {} of static shared memory are more than the "
               "{} of the emulated device",
               launch->dynamic_shared, fixed, launch->shared_limit));
}

// Checked after a launch. A fiber that outgrows its stack runs into its neighbour's; the words
// between them must be untouched.
bool Block::stacks_overflowed() {
  bool overflowed = false;
  for (unsigned i = 0; i < threads; ++i) {
    const auto* const words = reinterpret_cast<const uint64_t*>(stacks + i * kStackBytes + 8192);
    overflowed |= std::any_of(words, words + 16, [](uint64_t word) { return word != 0; });
  }
  if (overflowed) drop_stacks();
  return overflowed;
}

void Block::drop_stacks() {
  madvise(reinterpret_cast<void*>(stacks), kMaxThreads * kStackBytes, MADV_DONTNEED);
}

int print(const char* file, int line, const char* format, ...) {
  std::string where = place(file, line) + ": ";
  if (const Block* const block = this_block())
    where = emulator::format("block {} thread {} {}", block->index, this_fiber().thread_idx, where);
  char* words = nullptr;
  va_list values;
  va_start(values, format);
  const int written = vasprintf(&words, format, values);
  va_end(values);
  if (written < 0) throw std::bad_alloc();
  const bool ends = written > 0 && words[written - 1] == '\n';
  std::fprintf(stderr, "%s%s%s", where.c_str(), words, ends ? "" : "\n");
  std::free(words);
  return written;
}

void fail(cudaError_t code, const char* what) {
  if (Block* const block = this_block()) {
    block->record(code, what);
    block->abandon();
  }
  throw std::runtime_error(what);
}

void fail(const Site& site, const char* what, cudaError_t code) {
  fail(site, std::string(what), code);
}

void check_shared(const void* address, const char* what, const Site& site) {
  if (!this_fiber().block->shared.has(address))
    fail(site, what + std::string(" is not in shared memory"), cudaErrorIllegalAddress);
}

}  // namespace attention::emulator
