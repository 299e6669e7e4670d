// Races in shared memory: two threads of a block access the same bytes, at least one of them
// writes, and nothing orders the accesses. Shuffles, votes and matrix products do not order them.
//
// A version file that is compiled with -fsanitize=thread calls races.cpp before every load and
// store. Each access is compared with the last ones to the same bytes: it must be ordered after
// them by __syncthreads(), by a __syncwarp() of both threads or by a barrier of ptx.h. Each thread
// has a clock, which a synchronization advances, and knows up to which time each other thread's
// accesses come before its own (a vector clock).

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fiber.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// kCopy: by a bulk copy. kFetch: a read by a product, or by a copy from shared memory.
enum class AccessKind : uint8_t { kRead, kWrite, kAtomic, kCopy, kFetch };

constexpr unsigned kMaxCluster = 8;

// By block of a cluster and by thread, the time up to which the thread's accesses come first.
struct Knowledge {
  std::vector<uint32_t> of[kMaxCluster];

  void merge(const Knowledge& other);
};

class Races {
 public:
  explicit Races(Block& of);

  // Call begin_interval() when all threads pass a barrier, begin_block() when the block begins.
  void begin_interval() { ordered = time++; }
  void begin_block();

  // Some lanes of a warp pass a __syncwarp().
  void synchronize(unsigned first_thread, uint32_t lanes);

  // What the calling thread did comes before what its warp does next.
  void share(unsigned first_thread);

  // What the calling thread did before release() comes before a later acquire() of the barrier.
  void release(const void* barrier);
  void acquire(const void* barrier);

  // The same between blocks of a cluster: what the calling thread, of block `rank`, knows; its block
  // knows it from now on; a thread that knows it releases a barrier of block `rank`.
  Knowledge knowledge(unsigned rank) const;
  void learn(const Knowledge& more) { others.merge(more); }
  void release_from_block(const void* barrier, const Knowledge& sender, unsigned rank);

  // Returns the calling thread's time, and whether what another thread did then comes before what
  // the calling thread does now.
  uint32_t clock() const;
  bool follows(unsigned thread, uint32_t clock);
  void advance() { own[this_fiber().thread] = ++time; }

  // The calling thread calls proxy_fence().
  void fence();
  // Returns a thread that has written some of these bytes without a fence() since, or -1.
  int unfenced_writer(const void* memory, size_t bytes);

  // Checks and records an access by the calling thread; `code` is the return address of the call.
  // A race ends the block.
  void access(const void* memory, size_t bytes, AccessKind kind, const void* code);

  // The same for a copy that a thread of another block began, which knew `sender` of this block.
  void copy_from_block(const void* memory, size_t bytes, const void* code,
                       const std::vector<uint32_t>& sender, const void* barrier);

 private:
  struct Access {
    uint32_t clock;  // 0: no access
    uint32_t code;   // offset in the library's code
    uint16_t thread;
    uint8_t bytes;  // mask of the cell's bytes
    AccessKind kind;
  };

  // The last write to two bytes, and reads since then: the last one, the last one before it by
  // another lane of its warp, and one by another warp.
  struct Cell {
    Access write, reads[3];
  };

  // Not a std::unordered_map: parsing it takes g++ as long as some kernels.
  struct Released {
    const void* barrier;
    std::vector<uint32_t> clock;
    Knowledge others;
  };

  // Returns the offset of the first cell's bytes, or -1 outside shared memory.
  uintptr_t place_of(uintptr_t address) const;
  Released& at(const void* barrier);
  ATTENTION_EMULATOR_INLINE uint32_t& known(unsigned thread, unsigned of) {
    return clocks[thread * kMaxThreads + of];
  }
  ATTENTION_EMULATOR_INLINE uint32_t now(unsigned thread) const {
    return own[thread] > ordered ? own[thread] : ordered + 1;
  }
  ATTENTION_EMULATOR_INLINE bool conflict(const Access& before, const Access& next);
  ATTENTION_EMULATOR_INLINE void note_read(Cell& cell, const Access& read);
  // Returns whether a thread has read and may not have ended that when a later copy writes: loads pass
  // through another proxy than copies, and only a fence() orders them.
  ATTENTION_EMULATOR_INLINE bool lacks_fence(const Access& before) const {
    return before.clock > begun && before.kind == AccessKind::kRead &&
           fences[before.thread] < before.clock;
  }
  [[noreturn]] void report(const Access& before, const Access& next, uintptr_t address,
                           bool is_from_block = false,
                           const char* lacking = "with no barrier between");

  Block& block;
  Cell* cells;
  uint32_t* clocks;
  uint32_t own[kMaxThreads]{};  // each thread's clock, unless it is behind `ordered`
  uint32_t ordered = 0;         // everything up to then comes before every thread's next access
  uint32_t time = 1;
  std::vector<Released> released;
  Knowledge others;                // of other blocks
  uint32_t begun = 0;              // when the block began
  uint32_t fences[kMaxThreads]{};  // each thread's time of its last fence()
};

}  // namespace attention::emulator

#pragma GCC visibility pop
