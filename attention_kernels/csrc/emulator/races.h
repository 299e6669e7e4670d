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

}  // namespace attention::emulator

#pragma GCC visibility pop
