// Finds races: see races.h.

namespace attention::emulator {

// ---- What threads know --------------------------------------------------------------------------

// Returns the place of a block or a thread in an ascending list, or where it belongs.
template <typename List>
auto place_in(List& list, uint32_t number) {
  return std::lower_bound(list.begin(), list.end(), number,
                          [](const auto& one, uint32_t n) { return one.number < n; });
}
template <typename T>
const T* find(const std::vector<T>& list, uint32_t number) {
  const auto at = place_in(list, number);
  return at != list.end() && at->number == number ? &*at : nullptr;
}
// The same, which is added if it is missing.
template <typename T>
T& entry(std::vector<T>& list, uint32_t number) {
  const auto at = place_in(list, number);
  return at != list.end() && at->number == number ? *at : *list.insert(at, T{number});
}

void Times::merge(const Times& other) {
  all = std::max(all, other.all);
  for (const OfThread& theirs : other.more) {
    uint32_t& clock = entry(more, theirs.number).clock;
    clock = std::max(clock, theirs.clock);
  }
  erase_if(more, [&](const OfThread& one) { return one.clock <= all; });
}

void Knowledge::merge(const Knowledge& other) {
  complete = std::max(complete, other.complete);
  if (blocks.empty())
    blocks = other.blocks;
  else
    for (const Times& theirs : other.blocks) entry(blocks, theirs.number).merge(theirs);
}

bool Knowledge::has(uint32_t block, unsigned thread, uint32_t clock) const {
  const Times* const times = find(blocks, block);
  if (times == nullptr || times->all >= clock) return times != nullptr;
  const Times::OfThread* const one = find(times->more, thread);
  return one != nullptr && one->clock >= clock;
}

struct Access {
  uint32_t clock;  // 0: no access
  uint32_t code;   // offset in the library's code
  uint32_t block;  // its number in the grid
  uint32_t launch : 15, thread : 10;
  AccessKind kind : 3;
  Scope scope : 2;
  uint32_t bytes : 2;  // mask of the cell's
};
constexpr uint32_t kLaunches = 1 << 15;

// The last write to two bytes, and reads that nothing orders, the latest last: at most two of a
// warp.
struct Cell {
  Access write, reads[3];
};

// ---- All of memory ------------------------------------------------------------------------------

// What a thread learns that reads a word, by scope: from those of a block, a cluster, or all.
struct Flag {
  uint32_t launch = 0;
  Knowledge by_scope[kScopes];
  uint32_t group[kScopes] = {};
  Knowledge unfenced;  // the same if every access to it were a fence
};

// For this many flags the message can say whether a fence is missing.
constexpr size_t kExplained = 256;

constexpr uintptr_t kPageBytes = 4096;
constexpr size_t kPages = 8192;  // 1 GB of cells at most, for 32 MB of memory

struct GlobalMemory {
  struct Page {
    std::mutex mutex;  // of the cells: no thread may fail before it unlocks it
    Cell cells[kPageBytes / kCellBytes];

    Cell& cell(uintptr_t address) { return cells[address % kPageBytes / kCellBytes]; }
  };

  std::mutex mutex;  // of what follows
  std::map<uintptr_t, Flag> flags;
  std::map<uint32_t, LaunchOrder*> launches;
  // By launch, block and thread, the time of the last proxy fence for global memory.
  std::map<std::array<uint32_t, 3>, uint32_t> proxy_fences;
  uint32_t calls = 0, last = 1, first = 1;  // first: the number of launch 0 in cells
  std::unordered_map<uintptr_t, Page> pages;

  static GlobalMemory& instance() {
    static GlobalMemory* const memory = new GlobalMemory;
    return *memory;
  }

  // Returns the page of an address. Null if there is none and `adds` is false, or no room for one.
  Page* find(uintptr_t address, bool adds) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = pages.find(address / kPageBytes);
    if (found != pages.end()) return &found->second;
    return adds && pages.size() < kPages ? &pages[address / kPageBytes] : nullptr;
  }

  // Notes a race unless launch `number` begins after `before`. Returns whether that is still
  // unknown.
  bool defer(uint32_t number, uint32_t before, const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = launches.find(number);
    if (found == launches.end()) return false;
    LaunchOrder& order = *found->second;
    if (before <= order.deferred) return true;
    order.deferred = before;
    std::snprintf(order.message, sizeof order.message, "%s", message.c_str());
    return true;
  }
};

inline uintptr_t end_of_page(uintptr_t address) { return (address / kPageBytes + 1) * kPageBytes; }

// Forgets accesses to memory that another block gets.
inline void forget(const void* memory, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(memory), end = first + bytes;
  for (uintptr_t at = first; at < end; at = end_of_page(at)) {
    GlobalMemory::Page* const page = GlobalMemory::instance().find(at, /*adds=*/false);
    if (page == nullptr) continue;
    const std::lock_guard<std::mutex> lock(page->mutex);
    std::fill_n(&page->cell(at), (std::min(end, end_of_page(at)) - at) / kCellBytes, Cell{});
  }
}

Call::Call(size_t launches) {
  GlobalMemory& memory = GlobalMemory::instance();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  if (memory.calls++ == 0) {
    memory.first = memory.last;
    memory.pages.clear();
  }
  before = ++memory.last;
  memory.last += static_cast<uint32_t>(launches);
}

Call::~Call() {
  GlobalMemory& memory = GlobalMemory::instance();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  if (--memory.calls > 0) return;
  memory.flags.clear();
  memory.proxy_fences.clear();
}

void register_launch(LaunchOrder& order, bool begins) {
  GlobalMemory& memory = GlobalMemory::instance();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  if (begins)
    memory.launches[order.number] = &order;
  else
    memory.launches.erase(order.number);
}

// ---- A block ------------------------------------------------------------------------------------

// Of a block: what its threads know, and their accesses.
class Races {
 public:
  explicit Races(Block& of)
      : block(of),
        cells(reserve<Cell>((kSharedBytes + Library::instance().tls_bytes) / kCellBytes + 1)),
        clocks(reserve<uint32_t>(kMaxThreads * kMaxThreads)) {}

  // Call begin_interval() when all threads pass a barrier, begin_block() when the block begins and
  // end_block() when it ends.
  void begin_interval() {
    ordered = time++;
    if (!has_fenced.empty()) share_fences();
    if (has_news) share_news();
  }
  void begin_block() {
    const LaunchOrder& order = *block.launch->in_stream;
    released.clear();
    floor = unfenced = {};
    // If that is not known yet, what precedes the call may still run.
    floor.complete = order.begins_after != 0 ? order.begins_after : order.before_call - 1;
    of_thread.assign(block.threads, {});
    for (Knowledge& one : at_fences) one = {};
    has_fenced.clear();
    has_news = has_allowed = false;
    random = (block.number + 1) * 0x9e3779b97f4a7c15u + block.launch->seed;
    begin_interval();
    begun = ordered;
    launch = (order.number - GlobalMemory::instance().first) % kLaunches;
  }

  void end_block() {
    allow_next();
    if (block.launch->cluster < 2) return;
    // Another block gets it.
    forget(block.shared.dynamic, block.shared.dynamic_bytes);
    forget(block.shared.fixed, Library::instance().tls_bytes);
  }

  // Some lanes of a warp pass a __syncwarp().
  void synchronize(unsigned first_thread, uint32_t lanes) {
    // Lanes differ in what they know of other warps only if one has learned it from them.
    const unsigned first = has_news ? 0 : first_thread;
    const unsigned end = has_news ? block.threads : first_thread + kWarpSize;
    uint32_t all[kMaxThreads] = {};
    Knowledge news;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const unsigned thread = first_thread + __builtin_ctz(rest);
      if (has_news) news.merge(of_thread[thread].news);
      for (unsigned of = first; of < end; ++of) all[of] = std::max(all[of], known(thread, of));
      all[thread] = now(thread);
    }
    ++time;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const unsigned thread = first_thread + __builtin_ctz(rest);
      std::copy(all + first, all + end, &known(thread, first));
      own[thread] = time;
      if (has_news) of_thread[thread].news = news;
    }
  }

  // What the calling thread did comes before what its warp does next.
  void share(unsigned first_thread) {
    const unsigned self = this_fiber().thread;
    for (unsigned thread = first_thread; thread < first_thread + kWarpSize; ++thread)
      known(thread, self) = std::max(known(thread, self), now(self));
    for (unsigned lane = 0; lane < kWarpSize && has_news; ++lane)
      if (first_thread + lane < block.threads)
        of_thread[first_thread + lane].news.merge(of_thread[self].news);
    advance();
  }

  // What the calling thread did before release() comes before a later acquire() of the barrier; or
  // what a thread of another block did, which knows `more`.
  void release(const void* barrier, const Knowledge& more) {
    const auto is_it = [&](const Released& one) { return one.barrier == barrier; };
    const auto found = std::find_if(released.begin(), released.end(), is_it);
    Released& one = found != released.end() ? *found : released.emplace_back(Released{barrier, {}});
    one.knowledge.merge(more);
  }

  void release(const void* barrier) {
    release(barrier, knowledge());
    advance();
  }

  void acquire(const void* barrier) {
    for (const Released& one : released)
      if (one.barrier == barrier) learn(one.knowledge);
  }

  // ---- What orders accesses ---------------------------------------------------------------------

  // What the calling thread knows, its own accesses included; and what it learns from another one.
  Knowledge knowledge() const {
    const unsigned self = this_fiber().thread;
    Knowledge all = floor;
    all.merge(of_thread[self].news);
    Times& mine = entry(all.blocks, static_cast<uint32_t>(block.number));
    mine = {mine.number, ordered, {}};
    for (unsigned of = 0; of < block.threads; ++of) {
      const uint32_t clock = of == self ? now(self) : clocks[self * kMaxThreads + of];
      if (clock > ordered) mine.more.push_back({of, clock});
    }
    return all;
  }

  void learn(const Knowledge& more) {
    const unsigned self = this_fiber().thread;
    Knowledge& news = of_thread[self].news;
    news.complete = std::max(news.complete, more.complete);
    for (const Times& theirs : more.blocks) {
      if (theirs.number != block.number) {
        entry(news.blocks, theirs.number).merge(theirs);
        continue;
      }
      for (const auto& [thread, clock] : theirs.more)
        known(self, thread) = std::max(known(self, thread), clock);
      for (unsigned of = 0; of < block.threads && theirs.all > ordered; ++of)
        known(self, of) = std::max(known(self, of), theirs.all);
    }
    has_news |= !more.is_empty();
  }

  // What it knew at its last fence.
  const Knowledge& fenced(Scope scope) const {
    return of_thread[this_fiber().thread].at_fence[static_cast<unsigned>(scope)];
  }

  // The calling thread calls __threadfence() or the like.
  void fence(Scope scope) {
    OfThread& mine = of_thread[this_fiber().thread];
    {
      const std::lock_guard<std::mutex> lock(GlobalMemory::instance().mutex);
      for (const uintptr_t word : mine.loaded) acquire_flag(word, scope);
    }
    if (scope == Scope::kDevice) mine.loaded.clear();
    std::fill_n(mine.at_fence, static_cast<unsigned>(scope) + 1, knowledge());
    const unsigned self = this_fiber().thread;
    if (has_fenced.empty() || has_fenced.back() != self) has_fenced.push_back(self);
    advance();
  }

  // It calls allow_next() or wait_for_previous().
  void allow_next() {
    if (std::exchange(has_allowed, true)) return;
    LaunchOrder& order = *block.launch->in_stream;
    uint32_t complete = floor.complete;
    for (const OfThread& one : of_thread) complete = std::max(complete, one.news.complete);
    const std::lock_guard<std::mutex> lock(GlobalMemory::instance().mutex);
    order.allows = std::min(order.allows, complete);
  }

  void wait_for_previous() {
    Knowledge all;
    all.complete = block.launch->in_stream->number - 1;
    learn(all);
  }

  // The scope of the calling thread's next atomic operation; otherwise it is kDevice.
  void set_scope(Scope scope) { of_thread[this_fiber().thread].next_scope = scope; }
  // Call them before and after an atomic operation on a word, with its order as in
  // __ATOMIC_RELAXED. has_failed: whether it is a compare-and-swap that has only read.
  void begin_atomic(const void* address, size_t bytes, AccessKind kind, const void* code) {
    access(address, bytes, kind, code);
    GlobalMemory::instance().mutex.lock();
  }

  void end_atomic(const void* address, AccessKind kind, int order, bool has_failed) {
    const uintptr_t word =
        reinterpret_cast<uintptr_t>(address) & ~uintptr_t{3};  // that has the flag
    auto& [news, at_fence, loaded, scope] = of_thread[this_fiber().thread];
    const bool acquires = order == __ATOMIC_ACQUIRE || order >= __ATOMIC_ACQ_REL;
    if (kind != AccessKind::kStore) {
      const bool is_known = std::find(loaded.begin(), loaded.end(), word) != loaded.end();
      if (kind == AccessKind::kAtomic || acquires || (!is_known && loaded.size() == 64))
        acquire_flag(word, scope);
      else if (!is_known)
        loaded.push_back(word);
      GlobalMemory& memory = GlobalMemory::instance();
      if (const auto flag = memory.flags.find(word); flag != memory.flags.end())
        unfenced.merge(flag->second.unfenced);
    }
    const bool changes = kind != AccessKind::kLoad && !has_failed;
    if (changes) release_flag(word, scope, order >= __ATOMIC_RELEASE, kind == AccessKind::kStore);
    scope = Scope::kDevice;
    GlobalMemory::instance().mutex.unlock();
    // Other blocks may see this before what the block does next. A volatile is stored after this
    // call.
    if (changes && !block.shared.has(address))
      lets_others_run = draw() % (kind == AccessKind::kStore ? 2 : 4) == 0;
  }

  // Returns the calling thread's time, and whether what another thread did then comes before what
  // the calling thread does now.
  uint32_t clock() const { return now(this_fiber().thread); }
  bool follows(unsigned thread, uint32_t clock) const {
    const unsigned self = this_fiber().thread;
    return thread == self || clock <= ordered || clocks[self * kMaxThreads + thread] >= clock;
  }
  void advance() { own[this_fiber().thread] = ++time; }

  // The calling thread calls proxy_fence(), or the same for global memory.
  void proxy_fence() {
    const unsigned self = this_fiber().thread;
    fences[self] = now(self);
    advance();
  }

  void global_proxy_fence() {
    const unsigned self = this_fiber().thread;
    GlobalMemory& memory = GlobalMemory::instance();
    const std::lock_guard<std::mutex> lock(memory.mutex);
    const auto number = static_cast<uint32_t>(block.number);
    memory.proxy_fences[{block.launch->in_stream->number, number, self}] = now(self);
    advance();
  }

  // ---- Accesses ---------------------------------------------------------------------------------

  // Returns a thread that has written some of these bytes without a proxy_fence() since, or -1.
  int unfenced_writer(const void* memory, size_t bytes) {
    const uintptr_t first = place_of(reinterpret_cast<uintptr_t>(memory));
    for (uintptr_t at = first; at < first + bytes && first != ~uintptr_t{0}; at += kCellBytes) {
      const Access& write = cells[at / kCellBytes].write;
      if (write.clock > begun && write.kind != AccessKind::kCopy &&
          fences[write.thread] < write.clock)
        return write.thread;
    }
    return -1;
  }

  // Checks and records an access by the calling thread; `code` is the return address of the call.
  // A race ends the block. Returns whether the access is to global memory.
  bool access(const void* memory, size_t bytes, AccessKind kind, const void* code) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t place = place_of(address);
    const bool is_shared = place != ~uintptr_t{0};
    if (!is_shared && !is_global(address)) return false;
    Next next = next_access(kind, code, is_shared);
    if (!is_shared) {
      check_global(address, bytes, next);
      return true;
    }
    check_shared(address, place, bytes, next);
    if (block.launch->cluster > 1 && kind != AccessKind::kCopy && kind != AccessKind::kFetch)
      check_global(address, bytes, next);  // other blocks may access it
    return false;
  }

  // The same for a copy that a thread of another block began, which knew `sender`.
  void copy_from_block(const void* memory, size_t bytes, const void* code, const Knowledge& sender,
                       const void* barrier) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    Next next = next_access(AccessKind::kCopy, code, true);
    next.sender = &sender;
    check_shared(address, place_of(address), bytes, next);
    release(barrier);
  }

  // Lets other blocks run, where they take turns, and in a shuffled order other threads. Call it
  // only where a kernel calls.
  void delay() {
    if (std::exchange(lets_others_run, false)) let_other_blocks_run(block, /*waits=*/false);
    if (block.launch->order != Launch::kShuffle || draw() % 64 != 0) return;
    switch_to(block.yield());
  }

 private:
  struct Released {
    const void* barrier;
    Knowledge knowledge;
  };

  // What fences and atomic operations of a thread order, by scope.
  struct OfThread {
    Knowledge news;                 // since the block's last barrier
    Knowledge at_fence[kScopes];    // what the thread knew at its last fence
    std::vector<uintptr_t> loaded;  // words that it has loaded since its last fence
    Scope next_scope = Scope::kDevice;
  };

  // An access that is compared with those before it. is_shared: to the block's shared memory, for
  // which cells of its own remain from earlier blocks. sender: what the thread of another block
  // knew that began it, or null.
  struct Next : Access {
    bool is_shared;
    const Knowledge* sender;
  };
  struct Race {
    Access before;  // or none
    uintptr_t at;
  };

  // All threads have passed a barrier.
  void share_news() {
    for (OfThread& one : of_thread) {
      floor.merge(one.news);
      one.news = {};
    }
    has_news = false;
  }

  void share_fences() {
    for (const unsigned thread : has_fenced)
      for (unsigned i = 0; i < kScopes; ++i) at_fences[i].merge(of_thread[thread].at_fence[i]);
    has_fenced.clear();
  }

  // The number of those whom a scope includes, of a block of the launch.
  uint32_t group_of(uint64_t of_block, unsigned scope) const {
    const uint64_t of[] = {of_block + 1, of_block / block.launch->blocks_of_cluster() + 1, 0};
    return static_cast<uint32_t>(of[scope]);
  }

  void acquire_flag(uintptr_t word, Scope scope) {
    GlobalMemory& memory = GlobalMemory::instance();
    const auto found = memory.flags.find(word);
    if (found == memory.flags.end() || found->second.launch != block.launch->in_stream->number)
      return;
    const Flag& flag = found->second;
    for (unsigned i = 0; i <= static_cast<unsigned>(scope); ++i)
      if (flag.group[i] == group_of(block.number, i)) learn(flag.by_scope[i]);
  }

  void release_flag(uintptr_t word, Scope scope, bool is_release, bool replaces) {
    const OfThread& mine = of_thread[this_fiber().thread];
    GlobalMemory& memory = GlobalMemory::instance();
    const bool is_rare = memory.flags.size() < kExplained;
    if (!is_release && mine.at_fence[0].is_empty() && at_fences[0].is_empty() && !is_rare &&
        memory.flags.count(word) == 0)
      return;
    const Knowledge all = is_release || is_rare ? knowledge() : Knowledge{};
    Flag& flag = memory.flags[word];
    if (flag.launch != block.launch->in_stream->number)
      flag = {block.launch->in_stream->number, {}, {}, {}};
    for (unsigned i = 0; i < kScopes; ++i) {
      const uint32_t group = group_of(block.number, i);
      if (replaces || flag.group[i] != group) flag.by_scope[i] = {};
      flag.group[i] = group;
      if (i > static_cast<unsigned>(scope)) continue;
      flag.by_scope[i].merge(is_release ? all : mine.at_fence[i]);
      flag.by_scope[i].merge(at_fences[i]);
    }
    flag.unfenced.merge(all);
    advance();
  }

  // Whether an address is of memory that other blocks may access and change: not of a thread's
  // stack, of a constant, nor what describes the launch.
  bool is_global(uintptr_t address) const {
    const Library& library = Library::instance();
    return !block.owns(address) && address - library.begin >= library.constant_bytes &&
           offset(address, &block) >= sizeof block &&
           offset(address, block.launch) >= sizeof *block.launch &&
           offset(address, block.launch->arguments) >= block.launch->argument_bytes;
  }

  uint64_t draw() { return next_random(random); }
  // Returns the offset of the first cell's bytes, or -1 outside shared memory.
  uintptr_t place_of(uintptr_t address) const {
    const size_t in_dynamic = offset(address, block.shared.dynamic);
    if (in_dynamic < block.shared.dynamic_bytes) return in_dynamic;
    const size_t in_fixed = offset(address, block.shared.fixed);
    return in_fixed < Library::instance().tls_bytes ? in_fixed + kSharedBytes : ~uintptr_t{0};
  }

  ATTENTION_EMULATOR_INLINE uint32_t& known(unsigned thread, unsigned of) {
    return clocks[thread * kMaxThreads + of];
  }
  ATTENTION_EMULATOR_INLINE uint32_t now(unsigned thread) const {
    return own[thread] > ordered ? own[thread] : ordered + 1;
  }
  // Returns whether a thread has read and may not have ended that when a later copy writes: loads
  // pass through another proxy than copies, and only a fence() orders them.
  ATTENTION_EMULATOR_INLINE bool lacks_fence(const Access& before) const {
    return before.clock > begun && is_read(before.kind) && before.kind != AccessKind::kFetch &&
           fences[before.thread] < before.clock;
  }

  // Returns whether a copy reads what a thread of the launch has stored in global memory without a
  // proxy fence since.
  bool lacks_proxy_fence(const Access& before, const Access& next) const {
    if (next.kind != AccessKind::kFetch || is_read(before.kind) ||
        before.kind == AccessKind::kCopy || before.launch != next.launch)
      return false;
    GlobalMemory& memory = GlobalMemory::instance();
    const std::lock_guard<std::mutex> lock(memory.mutex);
    const auto fence =
        memory.proxy_fences.find({block.launch->in_stream->number, before.block, before.thread});
    return fence == memory.proxy_fences.end() || fence->second < before.clock;
  }

  Next next_access(AccessKind kind, const void* code, bool is_shared) const {
    const unsigned self = this_fiber().thread;
    const auto from =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(code) - Library::instance().code);
    const Scope scope = is_strong(kind) && !is_shared ? of_thread[self].next_scope : Scope::kDevice;
    const Access access{now(self), from, static_cast<uint32_t>(block.number), launch, self, kind,
                        scope,     3};
    return {access, is_shared, nullptr};
  }

  // Returns whether an access comes before what the thread does now that does the next one.
  ATTENTION_EMULATOR_INLINE bool comes_before(const Access& before, const Next& next) const {
    if (before.clock == 0) return true;
    if (next.sender != nullptr)
      return before.clock <= begun || next.sender->has(next.block, before.thread, before.clock);
    if (next.is_shared || (before.launch == next.launch && before.block == next.block))
      return before.thread == next.thread || before.clock <= ordered ||
             clocks[next.thread * kMaxThreads + before.thread] >= before.clock;
    const Knowledge& news = of_thread[next.thread].news;
    if (before.launch == next.launch)
      return floor.has(before.block, before.thread, before.clock) ||
             news.has(before.block, before.thread, before.clock);
    return before.launch < next.launch && GlobalMemory::instance().first + before.launch <=
                                              std::max(floor.complete, news.complete);
  }

  ATTENTION_EMULATOR_INLINE bool races_with(const Access& before, const Next& next) const {
    if (before.clock == 0 || (before.bytes & next.bytes) == 0 ||
        (is_read(before.kind) && is_read(next.kind)))
      return false;
    if (next.is_shared ? next.kind == AccessKind::kCopy && lacks_fence(before)
                       : lacks_proxy_fence(before, next))
      return true;
    if (comes_before(before, next)) return false;
    if (!is_strong(before.kind) || !is_strong(next.kind)) return true;
    // In shared memory, a volatile does not order lanes of a warp.
    if (next.is_shared)
      return before.kind != AccessKind::kAtomic && next.kind != AccessKind::kAtomic &&
             before.thread / kWarpSize == next.thread / kWarpSize;
    const auto scope = static_cast<unsigned>(std::min(before.scope, next.scope));
    return before.launch != next.launch ||
           group_of(before.block, scope) != group_of(next.block, scope);
  }

  // Keeps a read, the latest last. It replaces the thread's own, or the older one of two of its
  // warp, else one that comes before it, or the oldest.
  ATTENTION_EMULATOR_INLINE void keep(Access (&reads)[3], const Next& read) const {
    const auto is_of_warp = [&](const Access& other) {
      return other.clock != 0 && other.block == read.block && other.launch == read.launch &&
             other.thread / kWarpSize == read.thread / kWarpSize;
    };
    auto& [oldest, older, last] = reads;
    if (is_of_warp(last) ? last.thread != read.thread : !comes_before(last, read)) {
      if (!(is_of_warp(last) && is_of_warp(older)) && !comes_before(older, read)) oldest = older;
      older = last;
    }
    last = read;
  }

  // Compares an access to the bytes from `begin` to `end`, whose cells begin with `cell`, with those
  // before it, and records it. Ends after a cell with a race.
  Race check(Cell* cell, uintptr_t begin, uintptr_t end, Next& next) const {
    for (uintptr_t at = begin, end_of_cell; at < end; at = end_of_cell, ++cell) {
      end_of_cell = std::min(end, (at / kCellBytes + 1) * kCellBytes);
      const uint32_t bytes = ((1u << (end_of_cell - at)) - 1) << at % kCellBytes;
      if (next.bytes != bytes) next.bytes = bytes;  // seldom, as a store here is slow
      Race race{{}, at};
      if (races_with(cell->write, next)) race.before = cell->write;
      if (is_read(next.kind)) {
        keep(cell->reads, next);
      } else {
        for (const Access& read : cell->reads)
          if (race.before.clock == 0 && races_with(read, next)) race.before = read;
        const uint32_t before = cell->write.bytes;
        const bool is_same = cell->write.clock == next.clock && cell->write.thread == next.thread &&
                             cell->write.block == next.block && cell->write.launch == next.launch;
        cell->write = next;
        if (is_same) cell->write.bytes |= before;
      }
      if (race.before.clock != 0) return race;
    }
    return {{}, end};
  }

  void check_shared(uintptr_t address, uintptr_t place, size_t bytes, Next& next) {
    const Race race = check(cells + place / kCellBytes, place, place + bytes, next);
    if (race.before.clock != 0) report(race.before, next, address + (race.at - place));
  }

  // Also for an access to another block's shared memory.
  void check_global(uintptr_t address, size_t bytes, Next next) {
    GlobalMemory& memory = GlobalMemory::instance();
    const LaunchOrder& order = *block.launch->in_stream;
    next.is_shared = false;
    if (order.deferred < order.before_call && !(is_read(next.kind) && has_constants) &&
        !block.shared.has(reinterpret_cast<const void*>(address)) &&
        std::max(floor.complete, of_thread[next.thread].news.complete) < order.before_call)
      report({}, next, address);
    for (uintptr_t at = address, end; at < address + bytes; at = end) {
      GlobalMemory::Page* const page = memory.find(at, /*adds=*/true);
      if (page == nullptr) return;
      end = std::min(address + bytes, end_of_page(at));
      Race race;
      {
        const std::lock_guard<std::mutex> lock(page->mutex);
        race = check(&page->cell(at), at, end, next);
      }
      if (race.before.clock != 0) report(race.before, next, race.at);
    }
  }

  // Returns if it is a race only if the launch begins too early, which is not yet known. `before` is
  // {} for what precedes the call.
  void report(const Access& before, const Next& next, uintptr_t address) {
    const LaunchOrder& order = *block.launch->in_stream;
    GlobalMemory& memory = GlobalMemory::instance();
    const uint32_t launch = next.is_shared      ? order.number
                            : before.clock == 0 ? order.before_call
                                                : memory.first + before.launch;
    const auto* const there = reinterpret_cast<const void*>(address);
    const bool is_next_early = launch < order.number;
    const auto does = [&](const Access& access, bool is_of_launch, const char* reads,
                          const char* changes, const char* writes) {
      std::string name =
          format("lane {} of warp {}", access.thread % kWarpSize, access.thread / kWarpSize);
      if (&access == &next && next.sender != nullptr)
        name = "another block";
      else if (!next.is_shared && is_of_launch)
        name += format(" of block {}", index_in(block.launch->grid, access.block));
      else if (!next.is_shared)
        name += format(" of block {} of the kernel {} it", access.block,
                       is_next_early ? "before" : "after");
      return name + (is_read(access.kind)                 ? reads
                     : access.kind == AccessKind::kAtomic ? changes
                                                          : writes);
    };
    // The return address comes just after the access.
    const auto at = [](const Access& access) {
      return place(Library::instance().code + access.code - 1);
    };
    std::string what = "race: " + does(next, true, " reads ", " changes ", " writes ") +
                       (next.is_shared            ? describe(block.shared, there)
                        : block.shared.has(there) ? "shared memory, byte " + hexadecimal(address)
                                                  : "global memory, byte " + hexadecimal(address)) +
                       at(next) + ", which ";
    if (before.clock == 0)
      what += "the kernel before may still write";
    else if (next.is_shared)
      what += does(before, true, " has read", " has changed", " has written") + at(before);
    else
      what += does(before, launch == order.number, " reads it", " changes it", " writes it") +
              at(before);
    if (launch == order.number) {
      what += next.is_shared ? ", " : ", and nothing orders them; ";
      what += missing_order(before, next);
    } else {
      what += format("; a wait_for_previous() {} would order them",
                     is_next_early ? "before it" : "there");
      const uint32_t first = std::min(launch, order.number),
                     second = std::max(launch, order.number);
      const bool is_unknown =
          is_next_early ? order.begins_after == 0 || before.clock == 0 : second > first + 1;
      if (is_unknown && memory.defer(second, first, what)) return;
    }
    fail(cudaErrorLaunchFailure, what);
  }

  // Says what would order two accesses of the launch.
  const char* missing_order(const Access& before, const Next& next) const {
    if (next.is_shared)
      return comes_before(before, next) ? "without a proxy_fence() after it"
                                        : "with no barrier between";
    if (lacks_proxy_fence(before, next))
      return "a proxy fence for global memory after the first of them, and "
             "what orders threads, would";
    if (before.block == next.block && before.thread / kWarpSize == next.thread / kWarpSize)
      return "a __syncwarp() between them would";
    if (before.block == next.block) return "a __syncthreads() between them would";
    if (is_strong(before.kind) && is_strong(next.kind))
      return "atomic operations of the device's scope, not the block's, would";
    GlobalMemory& memory = GlobalMemory::instance();
    Knowledge fenced;
    for (const uintptr_t word : of_thread[next.thread].loaded) {
      const std::lock_guard<std::mutex> lock(memory.mutex);
      const auto flag = memory.flags.find(word);
      if (flag != memory.flags.end()) fenced.merge(flag->second.by_scope[kScopes - 1]);
    }
    if (fenced.has(before.block, before.thread, before.clock))
      return "a __threadfence() after the load of the flag would";
    if (unfenced.has(before.block, before.thread, before.clock))
      return "a __threadfence() after the first of them, before the atomic or the flag, would";
    const auto cluster = static_cast<unsigned>(Scope::kCluster);
    if (group_of(before.block, cluster) == group_of(next.block, cluster))
      return "a barrier of the cluster between them would";
    return "an atomic or a flag with a __threadfence() on both sides, a "
           "barrier of the grid or a second kernel would";
  }

  Block& block;
  Cell* cells;
  uint32_t* clocks;
  uint32_t own[kMaxThreads]{};  // each thread's clock, unless it is behind `ordered`
  uint32_t ordered = 0;         // everything up to then comes before every thread's next access
  uint32_t time = 1;
  std::vector<Released> released;
  Knowledge floor;     // of other blocks, what all threads know
  Knowledge unfenced;  // what they would know if all atomic operations were fences
  std::vector<OfThread> of_thread;
  // What a thread of the block knew at a fence before its last barrier: since then each passes it on.
  Knowledge at_fences[kScopes];
  std::vector<unsigned> has_fenced;  // threads, since that barrier
  bool has_news = false;           // whether a thread has learned something since the last barrier
  bool lets_others_run = false;    // at the next access
  bool has_allowed = false;        // whether a thread has called allow_next()
  uint64_t random = 0;             // decides where a thread is delayed
  uint32_t begun = 0;              // when the block began
  uint32_t launch = 0;             // its launch, as in cells
  uint32_t fences[kMaxThreads]{};  // each thread's time of its last fence()
};

}  // namespace attention::emulator
