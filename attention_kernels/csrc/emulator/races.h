// Races in shared memory: two threads of a block access the same bytes, at least one of them writes,
// and nothing orders the accesses. A shuffle, a vote and a product of matrices order none.
//
// A version file that is compiled with -fsanitize=thread calls races.cpp before every load and
// store. Each access is compared with the last ones to the same bytes: it must come after them by
// __syncthreads(), by a __syncwarp() of both threads or by a barrier of ptx.h. Each thread has a
// clock, which a synchronization moves on, and knows how much of the other threads' pasts lies
// behind it (a vector clock).

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "fiber.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

enum class AccessKind : uint8_t { kRead, kWrite, kAtomic };

class Races {
 public:
  explicit Races(Block& of);

  // The block begins, or all of its threads pass a barrier.
  void begin_interval() { ordered = time++; }
  void begin_block();

  // Lanes of a warp pass a __syncwarp().
  void synchronize(unsigned first_thread, uint32_t lanes);

  // What the calling thread has done is seen by those that acquire the barrier afterwards.
  void release(const void* barrier);
  void acquire(const void* barrier);

  // The calling thread's access, from the code that `code` returns to. Ends the block at a race.
  void access(const void* memory, size_t bytes, AccessKind kind, const void* code);

 private:
  struct Access {
    uint32_t clock;  // 0: none
    uint32_t code;   // from where the library's code begins
    uint16_t thread;
    uint8_t bytes;  // of the cell, a mask
    AccessKind kind;
  };

  // The last write to two bytes, and reads since then: the last; the last before it of another lane
  // of that warp; and one of another warp.
  struct Cell {
    Access write, reads[3];
  };

  ATTENTION_EMULATOR_INLINE uint32_t& known(unsigned thread, unsigned of) {
    return clocks[thread * kMaxThreads + of];
  }
  ATTENTION_EMULATOR_INLINE uint32_t now(unsigned thread) const {
    return own[thread] > ordered ? own[thread] : ordered + 1;
  }
  ATTENTION_EMULATOR_INLINE bool conflict(const Access& before, const Access& next);
  ATTENTION_EMULATOR_INLINE void note_read(Cell& cell, const Access& read);
  [[noreturn]] void report(const Access& before, const Access& next, uintptr_t address);

  Block& block;
  Cell* cells;
  uint32_t* clocks;
  uint32_t own[kMaxThreads]{};  // each thread's clock, unless it is behind `ordered`
  uint32_t ordered = 0;         // what has happened up to then is behind everyone
  uint32_t time = 1;
  std::unordered_map<const void*, std::vector<uint32_t>> released;  // by barrier
};

}  // namespace attention::emulator

#pragma GCC visibility pop
