// Finds races in global memory: see global_races.h.

#include "global_races.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "report.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// ---- What threads know --------------------------------------------------------------------------

void Times::merge(const Times& other) {
  all = std::max(all, other.all);
  std::vector<OfThread> both;
  auto mine = more.begin();
  const auto keep = [&](const OfThread& one) {
    if (one.clock > all) both.push_back(one);
  };
  for (const OfThread& theirs : other.more) {
    while (mine != more.end() && mine->thread < theirs.thread) keep(*mine++);
    const bool is_both = mine != more.end() && mine->thread == theirs.thread;
    keep({theirs.thread, is_both ? std::max(theirs.clock, mine++->clock) : theirs.clock});
  }
  while (mine != more.end()) keep(*mine++);
  more = std::move(both);
}

Times& Knowledge::of(uint32_t block) {
  const auto at = std::lower_bound(blocks.begin(), blocks.end(), block,
                                   [](const Times& one, uint32_t b) { return one.block < b; });
  if (at != blocks.end() && at->block == block) return *at;
  return *blocks.insert(at, {block, 0, {}});
}

void Knowledge::merge(const Knowledge& other) {
  complete = std::max(complete, other.complete);
  if (blocks.empty()) {
    blocks = other.blocks;
  } else {
    for (const Times& theirs : other.blocks) of(theirs.block).merge(theirs);
  }
}

bool Knowledge::has(uint32_t block, unsigned thread, uint32_t clock) const {
  const auto found = std::lower_bound(blocks.begin(), blocks.end(), block,
                                      [](const Times& one, uint32_t b) { return one.block < b; });
  if (found == blocks.end() || found->block != block) return false;
  if (found->all >= clock) return true;
  const auto is_it = [&](const auto& one) { return one.thread == thread && one.clock >= clock; };
  return std::any_of(found->more.begin(), found->more.end(), is_it);
}

template <typename T>
T* zeros(size_t count) {
  void* const memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

// ---- All of memory ------------------------------------------------------------------------------

// The last write to two bytes, and reads since then. A read that comes after an earlier one takes its
// place; of others, the last three are kept.
struct GlobalCell {
  GlobalAccess write, reads[3];
};

// What a thread learns that reads a word, by scope: from those of a block, a cluster, or all.
struct Flag {
  uint32_t launch = 0;
  Knowledge by_scope[kScopes];
  uint32_t group[kScopes] = {};
  Knowledge unfenced;  // the same if every access to it were a fence
};

// Of so many flags it is known whether a fence is missing.
constexpr size_t kExplained = 256;

constexpr uintptr_t kPageBytes = 4096;
constexpr size_t kPages = 8192, kSlots = 2 * kPages;  // 1 GB of cells at most, for 32 MB of memory
constexpr size_t kCellsPerPage = kPageBytes / kCellBytes;

struct GlobalMemory {
  struct Page {
    std::atomic<uintptr_t> number{0};
    GlobalCell* cells = nullptr;
    std::atomic<bool> is_locked{false};
  };
  // No thread may fail while it holds one.
  struct Locked {
    Page& page;
    explicit Locked(Page& p) : page(p) {
      while (page.is_locked.exchange(true, std::memory_order_acquire)) sched_yield();
    }
    ~Locked() { page.is_locked.store(false, std::memory_order_release); }
  };

  std::mutex mutex;  // of what follows, and of new pages
  std::map<uintptr_t, Flag> flags;
  std::map<uint32_t, LaunchOrder*> launches;
  // By launch, block and thread, the time of the last proxy fence for global memory.
  std::map<std::array<uint32_t, 3>, uint32_t> proxy_fences;
  uint32_t calls = 0, last = 1, first = 1;  // first: the number of launch 0 in cells
  size_t used = 0;
  GlobalCell* cells = nullptr;
  Page pages[kSlots];

  static GlobalMemory& instance() {
    static GlobalMemory* const memory = new GlobalMemory;
    return *memory;
  }

  // Returns the slot of a page's number, or the empty one where it belongs.
  Page& slot_of(uintptr_t number) {
    for (size_t i = number * 0x9e3779b97f4a7c15u >> 40;; ++i) {
      const uintptr_t there = pages[i % kSlots].number.load(std::memory_order_acquire);
      if (there == number || there == 0) return pages[i % kSlots];
    }
  }

  // Returns the page of an address, or null: it is full, or `adds` is false and there is none.
  Page* find(uintptr_t address, bool adds) {
    const uintptr_t number = address / kPageBytes;
    if (Page& page = slot_of(number); page.number == number) return &page;
    if (!adds) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    Page& page = slot_of(number);
    if (page.number == number) return &page;
    if (used == kPages) return nullptr;
    if (cells == nullptr) cells = zeros<GlobalCell>(kPages * kCellsPerPage);
    page.cells = cells + used++ * kCellsPerPage;
    page.number.store(number, std::memory_order_release);
    return &page;
  }

  void clear() {
    first = last;
    if (used == 0) return;
    for (Page& page : pages) page.number = 0;
    madvise(cells, used * kCellsPerPage * sizeof(GlobalCell), MADV_DONTNEED);
    used = 0;
  }

  Flag& flag(uintptr_t word, uint32_t launch) {
    Flag& found = flags[word];
    if (found.launch != launch) found = {launch, {}, {}, {}};
    return found;
  }

  // Notes a race unless launch `number` begins after `before`. Returns whether that is still unknown.
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

void forget(const void* memory, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(memory), end = first + bytes;
  for (uintptr_t at = first; at < end; at = (at / kPageBytes + 1) * kPageBytes) {
    GlobalMemory::Page* const page = GlobalMemory::instance().find(at, /*adds=*/false);
    if (page == nullptr) continue;
    const GlobalMemory::Locked locked(*page);
    const size_t begin = at % kPageBytes / kCellBytes;
    const size_t count = (std::min(end, (at / kPageBytes + 1) * kPageBytes) - at) / kCellBytes;
    std::fill_n(page->cells + begin, count, GlobalCell{});
  }
}

uint32_t begin_call(uint32_t count) {
  GlobalMemory& memory = GlobalMemory::instance();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  if (memory.calls++ == 0) memory.clear();
  const uint32_t before = ++memory.last;
  memory.last += count;
  return before;
}

void end_call() {
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

// ---- What orders accesses -----------------------------------------------------------------------

Knowledge Races::knowledge() const {
  const unsigned self = this_fiber().thread;
  Knowledge all = floor;
  all.merge(of_thread[self].news);
  Times& mine = all.of(static_cast<uint32_t>(block.number));
  mine = {mine.block, ordered, {}};
  for (unsigned of = 0; of < block.threads; ++of) {
    const uint32_t clock = of == self ? now(self) : clocks[self * kMaxThreads + of];
    if (clock > ordered) mine.more.push_back({of, clock});
  }
  return all;
}

const Knowledge& Races::fenced(Scope scope) const {
  return of_thread[this_fiber().thread].at_fence[static_cast<unsigned>(scope)];
}

void Races::learn(const Knowledge& more) {
  const unsigned self = this_fiber().thread;
  Knowledge& news = of_thread[self].news;
  news.complete = std::max(news.complete, more.complete);
  for (const Times& theirs : more.blocks) {
    if (theirs.block != block.number) {
      news.of(theirs.block).merge(theirs);
      continue;
    }
    for (const auto& [thread, clock] : theirs.more)
      known(self, thread) = std::max(known(self, thread), clock);
    for (unsigned of = 0; of < block.threads && theirs.all > ordered; ++of)
      known(self, of) = std::max(known(self, of), theirs.all);
  }
  has_news |= !news.is_empty();
}

// All threads have passed a barrier.
void Races::share_news() {
  for (OfThread& one : of_thread) {
    floor.merge(one.news);
    one.news = {};
  }
  has_news = false;
}

// All threads have passed a barrier.
void Races::share_fences() {
  for (const unsigned thread : has_fenced_since)
    for (unsigned i = 0; i < kScopes; ++i) at_fences[i].merge(of_thread[thread].at_fence[i]);
  has_fenced_since.clear();
}

bool Races::knows(uint32_t of, unsigned thread, uint32_t clock) const {
  return floor.has(of, thread, clock) || of_thread[this_fiber().thread].news.has(of, thread, clock);
}

void Races::fence(Scope scope) {
  const unsigned self = this_fiber().thread;
  OfThread& mine = of_thread[self];
  {
    const std::lock_guard<std::mutex> lock(GlobalMemory::instance().mutex);
    for (const uintptr_t word : mine.loaded) acquire_flag(word, scope);
  }
  if (scope == Scope::kDevice) mine.loaded.clear();
  for (unsigned i = 0; i <= static_cast<unsigned>(scope); ++i) {
    mine.at_fence[i] = knowledge();
    mine.has_fenced[i] = true;
  }
  if (has_fenced_since.empty() || has_fenced_since.back() != self) has_fenced_since.push_back(self);
  own[self] = ++time;
}

// The number of those whom a scope includes.
inline uint32_t group_of(const Block& block, unsigned scope) {
  if (scope == 0) return static_cast<uint32_t>(block.number) + 1;
  return scope == 1 ? static_cast<uint32_t>(block.number) / std::max(block.launch->cluster, 1u) + 1
                    : 0;
}

void Races::acquire_flag(uintptr_t word, Scope scope) {
  GlobalMemory& memory = GlobalMemory::instance();
  const auto found = memory.flags.find(word);
  if (found == memory.flags.end() || found->second.launch != block.launch->in_stream->number)
    return;
  const Flag& flag = found->second;
  for (unsigned i = 0; i <= static_cast<unsigned>(scope); ++i)
    if (flag.group[i] == group_of(block, i)) learn(flag.by_scope[i]);
}

void Races::release_flag(uintptr_t word, Scope scope, bool is_release, bool replaces) {
  const unsigned self = this_fiber().thread;
  const OfThread& mine = of_thread[self];
  GlobalMemory& memory = GlobalMemory::instance();
  const bool is_rare = memory.flags.size() < kExplained;
  if (!is_release && !mine.has_fenced[0] && at_fences[0].is_empty() && !is_rare &&
      memory.flags.count(word) == 0)
    return;
  const Knowledge all = is_release || is_rare ? knowledge() : Knowledge{};
  Flag& flag = memory.flag(word, block.launch->in_stream->number);
  for (unsigned i = 0; i < kScopes; ++i) {
    const uint32_t group = group_of(block, i);
    if (replaces || flag.group[i] != group) flag.by_scope[i] = {};
    flag.group[i] = group;
    if (i > static_cast<unsigned>(scope)) continue;
    if (is_release || mine.has_fenced[i])
      flag.by_scope[i].merge(is_release ? all : mine.at_fence[i]);
    flag.by_scope[i].merge(at_fences[i]);
  }
  flag.unfenced.merge(all);
  own[self] = ++time;
}

Races::Atomic::Atomic(Races* of, const void* at, size_t bytes, AccessKind access_kind,
                      int memory_order, const void* code)
    : races(of),
      address(at),
      word(reinterpret_cast<uintptr_t>(at) & ~uintptr_t{3}),
      kind(access_kind),
      order(memory_order),
      scope(of == nullptr ? Scope::kDevice : of->of_thread[this_fiber().thread].next_scope) {
  if (races == nullptr) return;
  races->access(address, bytes, kind, code);
  races->set_scope(Scope::kDevice);
  GlobalMemory::instance().mutex.lock();
}

Races::Atomic::~Atomic() {
  if (races == nullptr) return;
  const bool acquires = order == __ATOMIC_ACQUIRE || order >= __ATOMIC_ACQ_REL;
  if (kind != AccessKind::kStore) {
    auto& loaded = races->of_thread[this_fiber().thread].loaded;
    const bool is_known = std::find(loaded.begin(), loaded.end(), word) != loaded.end();
    if (kind == AccessKind::kAtomic || acquires || (!is_known && loaded.size() == 64))
      races->acquire_flag(word, scope);
    else if (!is_known)
      loaded.push_back(word);
    GlobalMemory& memory = GlobalMemory::instance();
    if (const auto flag = memory.flags.find(word); flag != memory.flags.end())
      races->unfenced.merge(flag->second.unfenced);
  }
  const bool changes = kind != AccessKind::kLoad && !has_failed;
  if (changes)
    races->release_flag(word, scope, order >= __ATOMIC_RELEASE, kind == AccessKind::kStore);
  GlobalMemory::instance().mutex.unlock();
  // Other blocks may see this before what the block does next. A volatile is stored after this call.
  if (changes && !races->block.shared.has(address))
    races->lets_others_run = races->draw() % (kind == AccessKind::kStore ? 2 : 4) == 0;
}

void Races::allow_next() {
  if (std::exchange(has_allowed, true)) return;
  LaunchOrder& order = *block.launch->in_stream;
  uint32_t complete = floor.complete;
  for (const OfThread& one : of_thread) complete = std::max(complete, one.news.complete);
  const std::lock_guard<std::mutex> lock(GlobalMemory::instance().mutex);
  order.allows = std::min(order.allows, complete);
}

void Races::wait_for_previous() {
  Knowledge all;
  all.complete = block.launch->in_stream->number - 1;
  learn(all);
}

// ---- Accesses -----------------------------------------------------------------------------------

void Races::global_proxy_fence() {
  const unsigned self = this_fiber().thread;
  GlobalMemory& memory = GlobalMemory::instance();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  const auto number = static_cast<uint32_t>(block.number);
  memory.proxy_fences[{block.launch->in_stream->number, number, self}] = now(self);
  own[self] = ++time;
}

bool Races::lacks_proxy_fence(const GlobalAccess& before, const GlobalAccess& next) const {
  const auto kind = static_cast<AccessKind>(before.kind);
  if (static_cast<AccessKind>(next.kind) != AccessKind::kFetch || is_read(kind) ||
      kind == AccessKind::kCopy || before.launch != next.launch)
    return false;
  GlobalMemory& memory = GlobalMemory::instance();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  const auto fence =
      memory.proxy_fences.find({block.launch->in_stream->number, before.block, before.thread});
  return fence == memory.proxy_fences.end() || fence->second < before.clock;
}

bool Races::races_with(const GlobalAccess& before, const GlobalAccess& next) {
  if (before.clock == 0 || (before.bytes & next.bytes) == 0) return false;
  const auto kind = static_cast<AccessKind>(before.kind),
             now_kind = static_cast<AccessKind>(next.kind);
  if (is_read(kind) && is_read(now_kind)) return false;
  const uint32_t launch = GlobalMemory::instance().first + before.launch;
  const uint32_t mine = block.launch->in_stream->number;
  if (launch > mine) return true;
  if (launch < mine) return launch > std::max(floor.complete, of_thread[next.thread].news.complete);
  if (lacks_proxy_fence(before, next)) return true;
  const bool is_same = before.block == next.block;
  if (is_strong(kind) && is_strong(now_kind)) {
    const unsigned scope = std::min(before.scope, next.scope);
    const unsigned cluster = std::max(block.launch->cluster, 1u);
    if (is_same || scope == static_cast<unsigned>(Scope::kDevice) ||
        (scope == static_cast<unsigned>(Scope::kCluster) &&
         before.block / cluster == next.block / cluster))
      return false;
  }
  if (is_same)
    return before.thread != next.thread && before.clock > ordered &&
           known(next.thread, before.thread) < before.clock;
  return !knows(before.block, before.thread, before.clock);
}

void Races::access_global(uintptr_t address, size_t bytes, AccessKind kind, Scope scope,
                          uint32_t code) {
  GlobalMemory& memory = GlobalMemory::instance();
  const LaunchOrder& order = *block.launch->in_stream;
  const unsigned self = this_fiber().thread;
  GlobalAccess next{now(self),
                    code,
                    static_cast<uint32_t>(block.number),
                    (order.number - memory.first) % kLaunches,
                    self,
                    static_cast<unsigned>(kind),
                    static_cast<unsigned>(scope),
                    0};
  if (order.deferred < order.before_call && !(is_read(kind) && has_constants) &&
      std::max(floor.complete, of_thread[self].news.complete) < order.before_call)
    report_global({}, next, address);
  const auto is_later = [&](const GlobalAccess& before) {
    if (before.clock == 0 || before.launch != next.launch) return true;
    if (before.block != next.block) return knows(before.block, before.thread, before.clock);
    return before.thread == self || before.clock <= ordered ||
           known(self, before.thread) >= before.clock;
  };
  for (uintptr_t at = address, end = address + bytes; at < end;) {
    GlobalMemory::Page* const page = memory.find(at, /*adds=*/true);
    const uintptr_t end_of_page = std::min(end, (at / kPageBytes + 1) * kPageBytes);
    if (page == nullptr) return;
    GlobalAccess race{};
    uintptr_t where = 0;
    const auto check = [&](const GlobalAccess& before) {
      if (race.clock == 0 && races_with(before, next)) race = before, where = at;
    };
    {
      const GlobalMemory::Locked locked(*page);
      while (at < end_of_page && race.clock == 0) {
        GlobalCell& cell = page->cells[at % kPageBytes / kCellBytes];
        const uintptr_t end_of_cell = std::min(end, (at / kCellBytes + 1) * kCellBytes);
        next.bytes = ((1u << (end_of_cell - at)) - 1) << at % kCellBytes;
        check(cell.write);
        if (is_read(kind)) {
          GlobalAccess* to = std::find_if(cell.reads, cell.reads + 3, is_later);
          if (to == cell.reads + 3) {
            to = cell.reads + 2;
            std::copy(cell.reads + 1, cell.reads + 3, cell.reads);
          }
          *to = next;
        } else {
          for (const GlobalAccess& read : cell.reads) check(read);
          GlobalAccess write = next;
          if (cell.write.block == next.block && cell.write.thread == self && is_later(cell.write) &&
              cell.write.clock == next.clock)
            write.bytes |= cell.write.bytes;
          cell.write = write;
          for (GlobalAccess& read : cell.reads)
            if (is_later(read)) read = {};
        }
        at = end_of_cell;
      }
    }
    if (race.clock != 0) report_global(race, next, where);
  }
}

void Races::report_global(const GlobalAccess& before, const GlobalAccess& next, uintptr_t address) {
  GlobalMemory& memory = GlobalMemory::instance();
  const LaunchOrder& order = *block.launch->in_stream;
  const uint32_t launch = before.clock == 0 ? order.before_call : memory.first + before.launch;
  const auto lane = [&](const GlobalAccess& access, bool in_grid) {
    const dim3 grid = block.launch->grid;
    const uint3 at{access.block % grid.x, access.block / grid.x % grid.y,
                   access.block / grid.x / grid.y};
    return "lane " + std::to_string(access.thread % kWarpSize) + " of warp " +
           std::to_string(access.thread / kWarpSize) + " of block " +
           (in_grid ? text(at) : std::to_string(access.block));
  };
  const auto verb = [](const GlobalAccess& access) {
    const auto kind = static_cast<AccessKind>(access.kind);
    return is_read(kind) ? " reads " : kind == AccessKind::kAtomic ? " changes " : " writes ";
  };
  const auto at = [](const GlobalAccess& access) {
    return place(Library::instance().code + access.code - 1);
  };
  const bool is_local = block.shared.has(reinterpret_cast<const void*>(address));
  char hexadecimal[24];
  std::snprintf(hexadecimal, sizeof hexadecimal, "0x%zx", size_t(address));
  std::string what = "race: " + lane(next, true) + verb(next) +
                     (is_local ? "shared memory, byte " : "global memory, byte ") + hexadecimal +
                     at(next) + ", which ";
  if (launch != order.number) {
    const bool is_next_early = launch < order.number;
    what += before.clock == 0
                ? std::string("the kernel before may still write")
                : lane(before, false) + " of the kernel " +
                      (is_next_early ? "before it" : "after it") + verb(before) + "it" + at(before);
    what += is_next_early ? "; a wait_for_previous() before it would order them"
                          : "; a wait_for_previous() there would order them";
    const uint32_t first = std::min(launch, order.number), second = std::max(launch, order.number);
    const bool is_unknown =
        is_next_early ? order.begins_after == 0 || before.clock == 0 : second > first + 1;
    if (is_unknown && memory.defer(second, first, what)) return;
  } else {
    const auto is_atomic = [](const GlobalAccess& access) {
      return is_strong(static_cast<AccessKind>(access.kind));
    };
    Knowledge fenced;
    for (const uintptr_t word : of_thread[next.thread].loaded) {
      const std::lock_guard<std::mutex> lock(memory.mutex);
      const auto flag = memory.flags.find(word);
      if (flag != memory.flags.end()) fenced.merge(flag->second.by_scope[kScopes - 1]);
    }
    const bool is_same = before.block == next.block;
    const unsigned cluster = block.launch->cluster;
    what += lane(before, true) + verb(before) + "it" + at(before) + ", and nothing orders them; ";
    if (lacks_proxy_fence(before, next))
      what +=
          "a proxy fence for global memory after the first of them, and what orders threads, would";
    else if (is_same && before.thread / kWarpSize == next.thread / kWarpSize)
      what += "a __syncwarp() between them would";
    else if (is_same)
      what += "a __syncthreads() between them would";
    else if (is_atomic(before) && is_atomic(next))
      what += "atomic operations of the device's scope, not the block's, would";
    else if (fenced.has(before.block, before.thread, before.clock))
      what += "a __threadfence() after the load of the flag would";
    else if (unfenced.has(before.block, before.thread, before.clock))
      what += "a __threadfence() after the first of them, before the atomic or the flag, would";
    else if (cluster > 1 && before.block / cluster == next.block / cluster)
      what += "a barrier of the cluster between them would";
    else
      what +=
          "an atomic or a flag with a __threadfence() on both sides, a barrier of the grid or a "
          "second kernel would";
  }
  block.record(cudaErrorLaunchFailure, what.c_str());
  block.abandon();
}

}  // namespace attention::emulator

#pragma GCC visibility pop
