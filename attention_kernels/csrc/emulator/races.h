// Races: two threads access the same bytes, at least one of them writes, and nothing orders the
// accesses. Shuffles, votes and matrix products do not order them.
//
// A version file that is compiled with -fsanitize=thread calls races.cpp before every load and
// store. Each access is compared with the last ones to the same bytes: it must be ordered after
// them. Each thread has a clock, which a synchronization advances, and knows up to which time other
// threads' accesses come before its own (a vector clock). Of its own block it knows that of each
// thread; of other blocks only what it has learned from them, by a barrier of the cluster or through
// memory: see global_races.h.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fiber.h"
#include "global_races.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

constexpr size_t kCellBytes = 2;

class Races {
 public:
  explicit Races(Block& of);

  // Call begin_interval() when all threads pass a barrier, begin_block() when the block begins and
  // end_block() when it ends.
  void begin_interval() {
    ordered = time++;
    if (!has_fenced_since.empty()) share_fences();
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

  // What the calling thread knows, its own accesses included; and what it learns from another one.
  Knowledge knowledge() const;
  void learn(const Knowledge& more);
  // What it knew at its last fence.
  const Knowledge& fenced(Scope scope) const;
  // A thread of another block that knows this releases a barrier of this block.
  void release_from_block(const void* barrier, const Knowledge& sender);

  // The calling thread calls __threadfence() or the like.
  void fence(Scope scope);
  // It calls allow_next() or wait_for_previous().
  void allow_next();
  void wait_for_previous();
  // The scope of the calling thread's next atomic operation; otherwise it is kDevice.
  void set_scope(Scope scope) { of_thread[this_fiber().thread].next_scope = scope; }
  // Surrounds an atomic operation on a word: changes it, and reads it.
  class Atomic {
   public:
    Atomic(Races* races, const void* word, size_t bytes, AccessKind kind, int order,
           const void* code);
    ~Atomic();
    Atomic(const Atomic&) = delete;
    bool has_failed = false;  // a compare-and-swap, which then only reads

   private:
    Races* const races;
    const void* const address;
    const uintptr_t word;  // that has the flag
    const AccessKind kind;
    const int order;
    Scope scope;
  };

  // Returns the calling thread's time, and whether what another thread did then comes before what
  // the calling thread does now.
  uint32_t clock() const;
  bool follows(unsigned thread, uint32_t clock);
  void advance() { own[this_fiber().thread] = ++time; }

  // The calling thread calls proxy_fence(), or the same for global memory.
  void proxy_fence();
  void global_proxy_fence();
  // Returns a thread that has written some of these bytes without a proxy_fence() since, or -1.
  int unfenced_writer(const void* memory, size_t bytes);

  // Checks and records an access by the calling thread; `code` is the return address of the call.
  // A race ends the block. Returns whether the access is to global memory.
  bool access(const void* memory, size_t bytes, AccessKind kind, const void* code);

  // Lets other blocks run, where they take turns, and in a shuffled order other threads. Call it only
  // where a kernel calls.
  void delay();

  // The same for a copy that a thread of another block began, which knew `sender`.
  void copy_from_block(const void* memory, size_t bytes, const void* code, const Knowledge& sender,
                       const void* barrier);
  // The same for an access to another block's shared memory, or to global memory.
  void access_global(uintptr_t address, size_t bytes, AccessKind kind, Scope scope, uint32_t code);

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

  // What fences and atomic operations of a thread order, by scope.
  struct OfThread {
    Knowledge news;               // since the block's last barrier
    Knowledge at_fence[kScopes];  // what the thread knew at its last fence
    bool has_fenced[kScopes] = {};
    std::vector<uintptr_t> loaded;  // words that it has loaded since its last fence
    Scope next_scope = Scope::kDevice;
  };

  bool is_global(uintptr_t address) const;
  uint64_t draw() { return next_random(random); }
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
  void share_news();
  void share_fences();
  void acquire_flag(uintptr_t word, Scope scope);
  void release_flag(uintptr_t word, Scope scope, bool is_release, bool replaces);
  bool knows(uint32_t of, unsigned thread, uint32_t clock) const;
  // Returns whether a copy reads what a thread of the launch has stored without a proxy fence since.
  bool lacks_proxy_fence(const GlobalAccess& before, const GlobalAccess& next) const;
  bool races_with(const GlobalAccess& before, const GlobalAccess& next);
  // Returns if it is a race only if the launch begins too early, which is not yet known. `before` is
  // {} for what precedes the call.
  void report_global(const GlobalAccess& before, const GlobalAccess& next, uintptr_t address);
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
  Knowledge floor;     // of other blocks, what all threads know
  Knowledge unfenced;  // what they would know if all atomic operations were fences
  std::vector<OfThread> of_thread;
  // What a thread of the block knew at a fence before its last barrier: since then each passes it on.
  Knowledge at_fences[kScopes];
  std::vector<unsigned> has_fenced_since;  // threads, since that barrier
  bool has_news = false;                   // whether a thread knows more than `floor`
  bool lets_others_run = false;            // at the next access
  bool has_allowed = false;                // whether a thread has called allow_next()
  uint64_t random = 0;                     // decides where a thread is delayed
  uint32_t begun = 0;                      // when the block began
  uint32_t fences[kMaxThreads]{};          // each thread's time of its last fence()
};

}  // namespace attention::emulator

#pragma GCC visibility pop
