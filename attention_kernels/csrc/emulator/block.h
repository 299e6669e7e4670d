// A launch and a block, as kernels see them. block.cpp runs a block's threads one after the other
// on one OS thread.
//
// Every CUDA thread runs until it must wait for others, at __syncthreads() or at a warp-level
// operation, and then switches straight to the next that can run. So between two barriers the
// threads of a block run one after the other, which turns a missing barrier from a rare race into a
// wrong result: a thread sees everything that earlier ones write and nothing that later ones do.
// Threads run in ascending order between some barriers and in descending order
// between others, in a pattern that does not repeat (Thue-Morse), so that each barrier of a loop
// sees both. ATTENTION_EMULATOR_ORDER chooses other orders; a correct kernel gives the same bits in
// all.

#pragma once

#include <signal.h>

#include <vector>

#include "in_flight.h"
#include "races.h"
#include "shared_memory.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// The device that the environment specifies, by default sm_90 with 8 multiprocessors. Read at each
// launch.
struct Device {
  int arch;
  size_t shared_limit;  // most that a block may request; 0 for an unknown device
  int multiprocessors;  // 0 if the setting is invalid

  // Returns how many blocks a multiprocessor holds. They are limited by shared memory, of which
  // each takes an extra 1 KB, and by the 1024 threads: the emulator does not know about registers.
  uint64_t blocks_at_once(uint64_t threads, size_t dynamic_shared) const {
    const uint64_t fit = (shared_limit + 1024) / (dynamic_shared + 1024);
    return std::min<uint64_t>(fit, 1024 / std::max<uint64_t>(threads, 1));
  }
  static Device emulated();
};

class Races;     // races.cpp
struct Cluster;  // runtime.h
struct GridRun;

struct Launch {
  dim3 grid;
  dim3 block;
  size_t dynamic_shared;
  void (*body)(const void* arguments);  // one CUDA thread
  const void* arguments;
  size_t argument_bytes = 0;
  int arch = 0;
  size_t shared_limit = 0;
  uint32_t poison = kPoison;
  unsigned tick_limit = 0;  // per block; 0: no limit
  unsigned interrupts = 0;  // interrupts counted before the launch began
  unsigned cluster = 0;     // blocks that run at the same time; 0: no clusters
  Cluster* clusters = nullptr;
  bool is_at_once = false;             // whether all clusters run at the same time
  mutable unsigned grid_arrivals = 0;  // of blocks at grid_group::sync()
  bool flushes = false;                // whether subnormal floats become 0
  bool is_early = false;               // it may start before the previous launch has ended
  LaunchOrder* in_stream = nullptr;    // its place among all launches
  GridRun* run = nullptr;              // which its blocks belong to
  uint64_t seed = 0;
  enum { kAlternating, kReverse, kShuffle } order = kAlternating;

  unsigned blocks_of_cluster() const { return cluster == 0 ? 1 : cluster; }
};

// What the signal handlers recorded about a block; see faults.cpp.
struct Signals {
  unsigned ticks = 0;  // since the block began
  bool stopped = false;
  bool faulted = false;
  siginfo_t fault{};
  uintptr_t code = 0;  // where the thread was
};

// Stacks and shared memory for one block at a time. Never freed, and reused by one OS thread at a
// time.
struct Block {
  Block* next_of_all = nullptr;
  bool in_use = false;

  // The launch.
  const Launch* launch = nullptr;
  unsigned threads = 0;
  unsigned warp_count = 0;
  unsigned warp_slots = 1;  // a power of two

  // The running block, and its error.
  uint64_t number = 0;
  uint3 index{};
  unsigned finished = 0;  // threads that have returned
  cudaError_t error = cudaSuccess;
  char message[1024];
  Signals signals;
  char signal_stack[64 * 1024];

  // The barrier that threads are arriving at, and the number of barriers passed.
  Site barrier{};
  unsigned barrier_thread = 0;  // the first to arrive
  unsigned arrived = 0;
  unsigned votes = 0;
  unsigned barrier_votes = 0;  // of the last barrier passed
  unsigned interval = 0;

  // Whose turn it is: lane lane_rank * lane_step + lane_offset (modulo 32); warps likewise.
  unsigned lane_step = 1, lane_offset = 0, lane_rank = 0, lane = 0;
  unsigned warp_step = 1, warp_offset = 0, warp_rank = 0;
  Warp* warp = nullptr;
  Warp warps[kMaxThreads / kWarpSize];

  Context main;
  uintptr_t stacks = 0;
  SharedMemory shared;
  InFlight in_flight;
  Cluster* cluster = nullptr;
  Races* races = nullptr;    // if the version file is compiled to detect them
  uint64_t stuck_round = 0;  // of the grid, in which the block was last found to wait
  uintptr_t access = 0;      // where the kernel has called, while an access of its is checked

  OfThread& own() { return in_flight.threads[this_fiber().thread]; }
  Fiber& fiber(unsigned thread) { return *warps[thread / kWarpSize].fibers[thread % kWarpSize]; }
  bool owns(uintptr_t address) const {
    return address - stacks + kStackBytes < (kMaxThreads + 1) * kStackBytes;
  }

  // Waiting: the calling fiber has arrived at a barrier, or at a warp-level operation of the lanes
  // in `mask`. Returns the fiber to switch to, which may be the same. When the caller resumes, the
  // barrier's votes or its lane's `result` are set.
  Fiber* arrive_at_barrier(bool predicate, const char* name, const char* file, int line);
  Fiber* arrive_in_warp(WarpOp op, uint32_t mask, uint64_t value, unsigned source,
                        const Site* site);
  // The same at one of the barriers with a number, where a fiber may also arrive without waiting.
  Fiber* arrive_at_named_barrier(int number, int for_threads, bool waits, const Site& site);
  // The calling fiber waits for memory to change. Returns the next fiber that can run, which is the
  // caller if no other can.
  Fiber* yield();
  // Returns a thread's fiber, whose turn it is then, or null if it cannot run.
  Fiber* turn_to(unsigned thread);

  // Failing: a failing fiber calls record() and then, when it has no object left to destroy,
  // abandon(), which ends the block and discards the frames of all its fibers.
  void record(cudaError_t code, const char* what, const Fiber& culprit = this_fiber());
  [[noreturn]] static void fail_by_divergence(const Site& here, const Site& there,
                                              const Fiber& other);
  [[noreturn]] void abandon();

  // prepare() makes room for the launch; run() runs one block of the grid. It returns false if the
  // block failed: see `error` and `message`.
  void prepare(const Launch& next);
  bool run(uint64_t number_in_grid);
  bool stacks_overflowed();

 private:
  void begin_interval();
  bool next_warp();
  Fiber* next_ready();
  Fiber* next_or_abandon();
  void pass_barrier();
  bool check_ends();
  [[noreturn]] void finish();
  void record_stuck();
  [[noreturn]] static void fiber_main();
  void check_shared();
  void drop_stacks();
};

inline bool checks_races = false;  // whether the version file is compiled to detect them

// Checks a launch as the CUDA runtime does, and runs it: at once or, after begin_launches(), in
// finish_launches(). Calls release(arguments) when they are no longer needed.
cudaError_t run_launch(const Launch& launch, void (*release)(const void* arguments));

// From here on, the calling thread's launches are queued for finish_launches(). Of consecutive
// early launches the last starts first, and the launch before each one runs when a thread waits for
// it, otherwise at the end: CUDA promises neither that they overlap nor that they do not.
void begin_launches();

// Runs the queued launches and returns the first error. If `error` is one, only returns it.
cudaError_t finish_launches(cudaError_t error);

// Runs what is queued, and returns its first error.
cudaError_t run_queued();

// Keeps the error of a launch that returns none; returns its argument. kept_error() returns it, once
// if it is taken, unless a later call on a GPU would return it as well; kEver: even after that.
cudaError_t keep_error(cudaError_t error);
enum Taking { kTake, kPeek, kEver };
cudaError_t kept_error(Taking taking);

// Called in a kernel: runs the launch before it, and lets the next one start.
void wait_for_previous();
void allow_next();

// Called in a kernel: a fence, and the scope of the next atomic operation. A kernel that is not
// compiled to detect races needs neither.
void fence(Scope scope);
void set_scope(Scope scope);

// A thread has read a word, or failed to change it, and may do so until another one has. The second
// time in a row, or if the word is null, it lets others run. If none can run that would change it,
// the launch fails. `site` or, if it has no name, `code` is where.
void note_poll(const void* word, uint64_t value, const Site& site, const void* code = nullptr);
// Lets other blocks run, if the blocks of the grid take turns. waits: whether this one waits for
// them.
void let_other_blocks_run(Block& block, bool waits);
// Counts a poll. Ends the thread if no running block can change what it polls.
void end_if_hopeless(const Site& site, const void* code = nullptr);

// Prints a line to standard error, prefixed with the block, the thread and the source line.
int print(const char* file, int line, const char* format, ...);

// Ends the calling thread's launch and discards the thread's frames: memory that they allocated
// leaks. In host code, throws an exception.
[[noreturn]] void fail(cudaError_t code, const char* what);
[[noreturn]] void fail(const Site& site, const char* what,
                       cudaError_t code = cudaErrorLaunchFailure);
// Fails if an address is not in the block's shared memory; `what` is of the message.
void check_shared(const void* address, const char* what, const Site& site);

}  // namespace attention::emulator

#pragma GCC visibility pop
