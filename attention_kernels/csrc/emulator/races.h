// Races: two threads access the same bytes, at least one of them writes, and nothing orders the
// accesses. Shuffles, votes and matrix products do not order them.
//
// A version file that is compiled with -fsanitize=thread calls races.cpp before every load and
// store. Each two bytes have a cell with the last accesses to them, by threads of all blocks: a
// next one must be ordered after them. Each thread has a clock, which a synchronization advances,
// and knows up to which time other threads' accesses come before its own (a vector clock). Of its
// own block it knows that of each thread. Of other blocks it knows what it has learned: at a
// barrier of the cluster; or because one changed a word (an atomic, volatile or relaxed access)
// after a fence, or released it, and the other loaded it and then called a fence, or acquired it.
// Both need a scope that includes the other. An atomic operation that returns a word acquires what
// it is released with, without a fence: what a thread does because of the result comes after it. A
// barrier of the block passes on what a thread has learned.
//
// A launch is ordered after all before it, unless it is launched early. Then a thread that has
// called wait_for_previous() is ordered after them; until then, it is ordered after those launches
// that had ended for each block of the previous one when the block called allow_next() or ended.
// The first launch of a call, if it is early, follows one of which only its number is known: that
// may have written all tensors of an attention kernel, but of a struct's it is not known which are
// weights. What precedes wait_for_previous() is executed before the launches that it overlaps. So a
// race with the launch before last shows when the previous one has run: it is deferred till then.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fiber.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// kAtomic: reads and writes. kLoad, kStore: of a volatile, or atomic. kCopy: by a bulk copy.
// kFetch: a read by a product, or by a copy.
enum class AccessKind : uint32_t { kRead, kWrite, kAtomic, kCopy, kFetch, kLoad, kStore };

inline bool is_read(AccessKind kind) {
  return kind == AccessKind::kRead || kind == AccessKind::kFetch || kind == AccessKind::kLoad;
}
inline bool is_strong(AccessKind kind) {
  return kind == AccessKind::kAtomic || kind == AccessKind::kLoad || kind == AccessKind::kStore;
}

constexpr unsigned kMaxCluster = 8;
constexpr size_t kCellBytes = 2;

inline uint64_t next_random(uint64_t& state) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}

// Whose accesses an atomic operation or a fence orders.
enum class Scope : uint32_t { kBlock, kCluster, kDevice };
constexpr unsigned kScopes = 3;

// Up to which time the accesses of a block's threads come first.
struct Times {
  struct OfThread {
    uint32_t number;  // the thread's
    uint32_t clock = 0;
  };
  uint32_t number;               // the block's in the grid
  uint32_t all = 0;              // of every thread
  std::vector<OfThread> more{};  // of those that are further, ascending

  void merge(const Times& other);
};

// What a thread knows of other threads.
struct Knowledge {
  std::vector<Times> blocks;  // ascending
  uint32_t complete = 0;      // the last launch that has ended, with all before it

  bool is_empty() const { return blocks.empty() && complete == 0; }
  bool has(uint32_t block, unsigned thread, uint32_t clock) const;
  void merge(const Knowledge& other);
};

struct QueuedLaunch;  // in grid.cpp

// A launch's place in the order of launches.
struct LaunchOrder {
  uint32_t number = 0;
  uint32_t before_call = 0;   // the number of the last launch before the call
  uint32_t begins_after = 0;  // the last launch that has ended when blocks begin; 0: not yet known
  uint32_t allows = ~0u;      // the same for the next launch: the least of all blocks
  // A race, unless this launch begins after launch `deferred`.
  uint32_t deferred = 0;
  char message[1024];
  QueuedLaunch* previous = nullptr;  // the launch that it overlaps, which may not have run yet
  bool waited = false;               // whether a thread has waited for that
};

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

inline bool has_constants = false;  // whether kernels may read what no kernel writes

// While one exists, the launches of a call run; their numbers follow `before`.
struct Call {
  uint32_t before;
  explicit Call(size_t launches);
  ~Call();
  Call(const Call&) = delete;
};
// Call it before a launch runs, and after.
void register_launch(LaunchOrder& order, bool begins);

class Races {
 public:
  explicit Races(Block& of);

  // Call begin_interval() when all threads pass a barrier, begin_block() when the block begins and
  // end_block() when it ends.
  void begin_interval() {
    ordered = time++;
    if (!has_fenced.empty()) share_fences();
    if (has_news) share_news();
  }
  void begin_block();
  void end_block();

  // Some lanes of a warp pass a __syncwarp().
  void synchronize(unsigned first_thread, uint32_t lanes);

  // What the calling thread did comes before what its warp does next.
  void share(unsigned first_thread);

  // What the calling thread did before release() comes before a later acquire() of the barrier.
  void release(const void* barrier);
  void acquire(const void* barrier);
  // The same for a thread of another block, which knows `more`.
  void release(const void* barrier, const Knowledge& more);

  // What the calling thread knows, its own accesses included; and what it learns from another one.
  Knowledge knowledge() const;
  void learn(const Knowledge& more);
  // What it knew at its last fence.
  const Knowledge& fenced(Scope scope) const;

  // The calling thread calls __threadfence() or the like.
  void fence(Scope scope);
  // It calls allow_next() or wait_for_previous().
  void allow_next();
  void wait_for_previous();
  // The scope of the calling thread's next atomic operation; otherwise it is kDevice.
  void set_scope(Scope scope) { of_thread[this_fiber().thread].next_scope = scope; }
  // Call them before and after an atomic operation on a word, with its order as in
  // __ATOMIC_RELAXED. has_failed: whether it is a compare-and-swap that has only read.
  void begin_atomic(const void* word, size_t bytes, AccessKind kind, const void* code);
  void end_atomic(const void* word, AccessKind kind, int order, bool has_failed);

  // Returns the calling thread's time, and whether what another thread did then comes before what
  // the calling thread does now.
  uint32_t clock() const { return now(this_fiber().thread); }
  bool follows(unsigned thread, uint32_t clock) const {
    const unsigned self = this_fiber().thread;
    return thread == self || clock <= ordered || clocks[self * kMaxThreads + thread] >= clock;
  }
  void advance() { own[this_fiber().thread] = ++time; }

  // The calling thread calls proxy_fence(), or the same for global memory.
  void proxy_fence();
  void global_proxy_fence();
  // Returns a thread that has written some of these bytes without a proxy_fence() since, or -1.
  int unfenced_writer(const void* memory, size_t bytes);

  // Checks and records an access by the calling thread; `code` is the return address of the call.
  // A race ends the block. Returns whether the access is to global memory.
  bool access(const void* memory, size_t bytes, AccessKind kind, const void* code);
  // The same for a copy that a thread of another block began, which knew `sender`.
  void copy_from_block(const void* memory, size_t bytes, const void* code, const Knowledge& sender,
                       const void* barrier);

  // Lets other blocks run, where they take turns, and in a shuffled order other threads. Call it
  // only where a kernel calls.
  void delay();

 private:
  // Not a std::unordered_map: parsing it takes g++ as long as some kernels.
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

  bool is_global(uintptr_t address) const;
  uint64_t draw() { return next_random(random); }
  // Returns the offset of the first cell's bytes, or -1 outside shared memory.
  uintptr_t place_of(uintptr_t address) const;
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
  bool lacks_proxy_fence(const Access& before, const Access& next) const;
  Next next_access(AccessKind kind, const void* code, bool is_shared) const;
  ATTENTION_EMULATOR_INLINE bool comes_before(const Access& before, const Next& next) const;
  ATTENTION_EMULATOR_INLINE bool races_with(const Access& before, const Next& next) const;
  ATTENTION_EMULATOR_INLINE void keep(Access (&reads)[3], const Next& read) const;
  Race check(Cell* cell, uintptr_t begin, uintptr_t end, Next& next) const;
  void check_shared(uintptr_t address, uintptr_t place, size_t bytes, Next& next);
  void check_global(uintptr_t address, size_t bytes, Next next);
  // Returns if it is a race only if the launch begins too early, which is not yet known. `before`
  // is {} for what precedes the call.
  void report(const Access& before, const Next& next, uintptr_t address);
  const char* missing_order(const Access& before, const Next& next) const;
  void share_news();
  void share_fences();
  void acquire_flag(uintptr_t word, Scope scope);
  void release_flag(uintptr_t word, Scope scope, bool is_release, bool replaces);

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

#pragma GCC visibility pop
