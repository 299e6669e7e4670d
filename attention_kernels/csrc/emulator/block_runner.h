// The engine of the CPU emulator: runs the blocks of a grid, each on one OS thread.
//
// Every CUDA thread is a fiber with a stack of its own. It runs until it must wait for others, at
// __syncthreads() or at a warp-level operation, and then switches straight to the next fiber that
// can run. So between two barriers the threads of a block run one after the other, which turns a
// missing barrier into a wrong result instead of a rare race: a thread sees nothing that a later
// one writes, and everything that an earlier one does. Threads run in ascending order between some
// barriers and in descending order between others, in a pattern that does not repeat (Thue-Morse),
// so that each barrier of a loop sees both. ATTENTION_EMULATOR_ORDER chooses other orders; a
// correct kernel gives the same bits in all.
//
// A loop without a barrier never yields. So each OS thread that runs blocks gets a signal every
// 50 ms, and its handler ends a block that has had its time, or that Ctrl-C is to end.
//
// A fiber finds its own state by rounding its stack pointer down to the alignment of stacks. That
// is cheaper than thread_local in a shared library, and it leaves the library's thread-local
// storage to `__shared__` arrays alone.

#pragma once

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define ATTENTION_EMULATOR_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__) && !defined(__aarch64__)
#define ATTENTION_EMULATOR_UCONTEXT 1  // no hand-written switch for this machine
#endif

extern "C" void* __tls_get_addr(size_t* index);

// Several versions live in one process, each with an emulator of its own: nothing here may be
// shared between libraries.
#pragma GCC visibility push(hidden)

// The few CUDA types that a launch is made of.
struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

// clang-format off
#define ATTENTION_EMULATOR_ERRORS(X)                                                    \
  X(cudaSuccess, 0, "no error")                                                         \
  X(cudaErrorInvalidValue, 1, "invalid argument")                                       \
  X(cudaErrorMemoryAllocation, 2, "out of memory")                                      \
  X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                 \
  X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                      \
  X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                              \
  X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for execution") \
  X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")           \
  X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")      \
  X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")             \
  X(cudaErrorAssert, 710, "device-side assert triggered")                               \
  X(cudaErrorMisalignedAddress, 716, "misaligned address")                              \
  X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                          \
  X(cudaErrorNotSupported, 801, "operation not supported")                              \
  X(cudaErrorUnknown, 999, "unknown error")
// clang-format on

enum cudaError_t {
#define X(name, code, text) name = code,
  ATTENTION_EMULATOR_ERRORS(X)
#undef X
};

namespace attention::emulator {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;
#if defined(__x86_64__) && !defined(ATTENTION_EMULATOR_ASAN)
constexpr uintptr_t kStackBytes = 64 * 1024;
#else
constexpr uintptr_t kStackBytes = 256 * 1024;  // larger pages, larger frames
#endif
#ifdef __x86_64__
constexpr uintptr_t kEntryOffset =
    24;  // of the stack pointer, when a function starts, below a multiple of 16
#else
constexpr uintptr_t kEntryOffset = 16;
#endif
#ifdef ATTENTION_EMULATOR_ASAN
constexpr size_t kRedzone = 0;  // the sanitizer's own is better
#else
constexpr size_t kRedzone = 1024;
#endif

// Kernels miscount dynamic shared memory by whole tiles: what lies within this many bytes of it is
// inaccessible. Whole pages of any size, as is the most that a block gets.
constexpr size_t kGuardBytes = 1024 * 1024;
constexpr size_t kSharedBytes = 256 * 1024;

constexpr long kTickNanoseconds = 50'000'000;
constexpr double kTicksPerSecond = 1e9 / kTickNanoseconds;
constexpr double kTimeout = 60;  // seconds

// What shared memory holds before anyone writes to it: a NaN as float, double, __half and bfloat16.
// A finite word in ATTENTION_EMULATOR_POISON replaces it: results that differ between two poisons
// have read what nobody wrote, also where fmaxf() or a comparison swallows a NaN.
constexpr uint32_t kPoison = 0x7ff47ff4;

// ---- Fibers -------------------------------------------------------------------------------------

struct BlockRunner;

// A place to come back to: a fiber, or where the OS thread came from.
struct Context {
  void* stack_pointer = nullptr;  // ucontext_t* without a hand-written switch
#ifdef ATTENTION_EMULATOR_ASAN
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
#endif
};

// 4, 8 or 16 bytes on their way to shared memory, or with size 0 the end of a group of them; see
// cuda_pipeline.h.
struct PendingCopy {
  void* to;
  size_t size;
  unsigned char data[16];
};

// One CUDA thread. Lies at the top of its stack.
struct Fiber : Context {
  BlockRunner* runner;
  uint3 thread_idx;
  unsigned thread;                    // linear index in the block
  std::vector<PendingCopy>* pending;  // null, as all of a new stack, until there are any
};

// Fibers lie at different offsets within a page: at equal ones they would compete for the same few
// cache sets.
constexpr uintptr_t kFiberSlot = 192;
static_assert(sizeof(Fiber) <= kFiberSlot);

inline Fiber& fiber_on(uintptr_t stack) {
  return *reinterpret_cast<Fiber*>(stack + kStackBytes -
                                   kFiberSlot * (stack / kStackBytes % 16 + 1));
}

// The calling CUDA thread. The stack pointer is read without `volatile`, so that the compiler
// hoists it out of loops.
inline Fiber& this_fiber() {
#if defined(__x86_64__)
  uintptr_t stack_pointer;
  asm("movq %%rsp, %0" : "=r"(stack_pointer));
#elif defined(__aarch64__)
  uintptr_t stack_pointer;
  asm("mov %0, sp" : "=r"(stack_pointer));
#else
  const auto stack_pointer = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
#endif
  return fiber_on(stack_pointer & ~(kStackBytes - 1));
}

// Saves the caller's place in *from and continues at `to`: a stack that has a code address and a
// frame pointer on top. All other registers are clobbered, so that the compiler saves those that it
// needs. Inlined, because the jump at one barrier of a kernel then leads to the same place each
// time and is predicted; a shared return instruction is not.
__attribute__((always_inline)) inline void switch_stack(void** from, void* to) {
#if defined(ATTENTION_EMULATOR_UCONTEXT)
  swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(to));
#elif defined(__x86_64__)
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n\t"  // the red zone may be in use
      "pushq %%rbp\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%%rdi)\n\t"
      "movq %%rsi, %%rsp\n\t"
      "popq %%rax\n\t"
      "popq %%rbp\n\t"
      "jmpq *%%rax\n"
      "1:\n\t"
      "leaq 128(%%rsp), %%rsp"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12", "xmm13", "xmm14", "xmm15",
#ifdef __AVX512F__
        "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",
        "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6",
        "k7",
#endif
        "memory", "cc");
#else
  register void** x0 asm("x0") = from;
  register void* x1 asm("x1") = to;
  asm volatile(
      "adr x9, 1f\n\t"
      "stp x9, x29, [sp, #-16]!\n\t"
      "mov x10, sp\n\t"
      "str x10, [x0]\n\t"
      "mov sp, x1\n\t"
      "ldp x16, x29, [sp], #16\n\t"
      "br x16\n"
      "1:\n\t"
      "hint #36"  // a landing pad, where branch targets are enforced
      : "+r"(x0), "+r"(x1)
      :
      : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15",
        "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28",
        "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12",
        "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25",
        "v26", "v27", "v28", "v29", "v30", "v31", "memory", "cc");
#endif
}

__attribute__((always_inline)) inline void switch_context(Context& from, Context& to,
                                                          [[maybe_unused]] bool from_ends = false) {
#ifdef ATTENTION_EMULATOR_ASAN
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.fake_stack, to.bottom, to.size);
#endif
  switch_stack(&from.stack_pointer, to.stack_pointer);
#ifdef ATTENTION_EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// ---- Launches -----------------------------------------------------------------------------------

struct Launch {
  dim3 grid;
  dim3 block;
  size_t dynamic_shared;
  void (*body)(const void* arguments);  // one CUDA thread
  const void* arguments;
  int arch = 0;
  size_t shared_limit = 0;
  uint32_t poison = kPoison;
  unsigned tick_limit = 0;  // of one block; 0: none
  unsigned interrupts = 0;  // counted before it began
  uint64_t seed = 0;
  enum { kAlternating, kReverse, kShuffle } order = kAlternating;
};

inline std::string text(uint3 v) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "(%u, %u, %u)", v.x, v.y, v.z);
  return buffer;
}

// Keyboard interrupts. The one thing that all libraries share, because a process has one handler of
// SIGINT: GCC makes an inline variable of default visibility unique in the process.
struct Interrupts {
  std::mutex mutex;
  unsigned launches = 0;  // that run
  std::atomic<unsigned> count{0};
  struct sigaction ours{}, previous{};
};
inline __attribute__((visibility("default"))) Interrupts interrupts;

// Where a thread waits.
struct Site {
  const char* name;
  const char* file;
  int line;

  std::string text() const {
    const char* const slash = std::strrchr(file, '/');
    return std::string(name) + "() at " + (slash ? slash + 1 : file) + ":" + std::to_string(line);
  }
};

enum class WarpOp { kSync, kShuffle, kVote, kMatrix };

struct Warp {
  uint32_t exists;   // lanes that the block has
  uint32_t ready;    // lanes that can run
  uint32_t waiting;  // lanes in a warp-level operation, each described by its `wait`
  uint32_t done;     // lanes that have returned
  struct {
    WarpOp op;
    uint32_t mask;
    unsigned source;  // lane whose value a shuffle returns
    uint64_t value;
    const Site* site;
  } wait[kWarpSize];
  uint64_t result[kWarpSize];
  Fiber* fibers[kWarpSize];
};

// Where this library's code and thread-local storage are. `__shared__` arrays are static
// thread_local, and nothing else in a version's library is: they are that storage. A program's own
// (a test's, say) holds others', so it is left alone.
struct Library {
  size_t tls_module = 0;
  size_t tls_bytes = 0;
  uintptr_t code = 0;
  size_t code_bytes = 0;

  static const Library& instance() {
    static const Library found = [] {
      Library result;
      dl_iterate_phdr(
          [](dl_phdr_info* info, size_t, void* data) {
            static const char here = 0;
            bool ours = false;
            Library library;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
              const auto& part = info->dlpi_phdr[i];
              const uintptr_t address = info->dlpi_addr + part.p_vaddr;
              if (part.p_type == PT_LOAD)
                ours |= reinterpret_cast<uintptr_t>(&here) - address < part.p_memsz;
              if (part.p_type == PT_LOAD && (part.p_flags & PF_X) != 0) {
                library.code = address;
                library.code_bytes = part.p_memsz;
              }
              if (part.p_type == PT_TLS) library.tls_bytes = part.p_memsz;
            }
            if (!ours) return 0;
            library.tls_module = info->dlpi_tls_modid;
            if (reinterpret_cast<uintptr_t>(info->dlpi_phdr) == getauxval(AT_PHDR))
              library.tls_bytes = 0;
            *static_cast<Library*>(data) = library;
            return 1;
          },
          &result);
      return result;
    }();
    return found;
  }

  // The calling OS thread's copy of the arrays.
  unsigned char* static_shared() const {
    size_t index[] = {tls_module, 0};  // the ABI's tls_index
    return tls_bytes == 0 ? nullptr : static_cast<unsigned char*>(__tls_get_addr(index));
  }
};

// Stacks and shared memory for one block at a time. Kept for ever and used again, by one OS thread
// at a time.
struct BlockRunner {
  BlockRunner* next_runner = nullptr;  // of all that exist
  bool in_use = false;

  // The launch.
  const Launch* launch = nullptr;
  unsigned threads = 0;
  unsigned warp_count = 0;
  unsigned warp_slots = 1;  // a power of two

  // The block, and what went wrong in it.
  uint64_t block = 0;
  uint3 block_idx{};
  unsigned finished = 0;
  cudaError_t error = cudaSuccess;
  std::string message;

  // The barrier that threads are arriving at, and the number of those passed.
  Site barrier{};
  unsigned barrier_thread = 0;
  unsigned arrived = 0;
  unsigned votes = 0;
  unsigned barrier_votes = 0;
  unsigned interval = 0;

  // Whose turn it is: lane lane_rank * lane_step + lane_offset (modulo 32); warps likewise.
  unsigned lane_step = 1, lane_offset = 0, lane_rank = 0, lane = 0;
  unsigned warp_step = 1, warp_offset = 0, warp_rank = 0;
  Warp* warp = nullptr;
  Warp warps[kMaxThreads / kWarpSize];

  Context main;
#ifdef ATTENTION_EMULATOR_UCONTEXT
  ucontext_t main_context;
#endif
  uintptr_t stacks = 0;
  // Dynamic shared memory, between two redzones, and these between pages that nobody may access.
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;  // with the redzones
  unsigned char* static_shared = nullptr;
  bool static_counted = false;

  // What the signal handlers saw, and the stack that they run on.
  unsigned ticks = 0;  // since the block began
  bool stopped = false;
  bool faulted = false;
  siginfo_t fault{};
  uintptr_t signal_code = 0;
  char signal_stack[64 * 1024];

  Fiber& fiber(unsigned thread) { return *warps[thread / kWarpSize].fibers[thread % kWarpSize]; }
  unsigned char* dynamic_shared() const { return shared + kRedzone; }
  bool owns(uintptr_t address) const {
    return address - stacks + kStackBytes < (kMaxThreads + 1) * kStackBytes;
  }

  // ---- Scheduling -------------------------------------------------------------------------------

  void begin_interval() {
    const uint64_t number = block << 20 ^ interval;
    uint64_t order = 0;  // ascending; ~0 is descending, and other bits are other permutations
    if (launch->order == Launch::kShuffle) {
      order = number + launch->seed * 0x632be59bd9b4e019u + 1;
      order *= 0x9e3779b97f4a7c15u;  // splitmix64
      order = (order ^ order >> 30) * 0xbf58476d1ce4e5b9u;
      order = (order ^ order >> 27) * 0x94d049bb133111ebu;
    } else if (__builtin_parityll(number) != (launch->order == Launch::kReverse)) {
      order = ~order;
    }
    lane_step = static_cast<unsigned>(order) | 1;
    lane_offset = static_cast<unsigned>(order >> 32);
    warp_step = static_cast<unsigned>(order >> 8) | 1;
    warp_offset = static_cast<unsigned>(order >> 40);
    for (unsigned i = 0; i < warp_count; ++i) warps[i].ready = warps[i].exists;
    warp_rank = ~0u;
    next_warp();
  }

  bool next_warp() {
    unsigned index;
    do {
      if (++warp_rank == warp_slots) return false;
      index = (warp_rank * warp_step + warp_offset) % warp_slots;
    } while (index >= warp_count);
    warp = &warps[index];
    lane_rank = ~0u;
    return true;
  }

  // The next fiber that can run, or null. A warp that has come to rest stays so until the next
  // barrier: no other warp can wake it.
  Fiber* next_ready() {
    while (warp->ready == 0) {
      if (!next_warp()) return nullptr;
    }
    do {
      lane = (++lane_rank * lane_step + lane_offset) % kWarpSize;
    } while ((warp->ready >> lane & 1) == 0);
    return warp->fibers[lane];
  }

  Fiber* next_or_abandon() {
    Fiber* const to = next_ready();
    if (to == nullptr) {
      record_stuck();
      abandon();
    }
    return to;
  }

  // The calling fiber has arrived at a __syncthreads(). Returns the fiber to switch to, which may
  // be the same.
  __attribute__((noinline)) Fiber* arrive_at_barrier(bool predicate, const char* name,
                                                     const char* file, int line) {
    if (arrived == 0) {
      barrier = {name, file, line};
      barrier_thread = this_fiber().thread;
      votes = 0;
    } else if (line != barrier.line ||
               (file != barrier.file && std::strcmp(file, barrier.file) != 0)) {
      record_divergence({name, file, line}, barrier, fiber(barrier_thread));
      abandon();
    }
    votes += predicate;
    if (++arrived == threads) {
      arrived = 0;
      barrier_votes = votes;
      ++interval;
      begin_interval();
    } else {
      warp->ready &= ~(1u << lane);
    }
    return next_or_abandon();
  }

  // The calling fiber has arrived at a warp-level operation of the lanes in `mask`. Returns the
  // fiber to switch to. When the caller is back, its lane's `result` is the value of lane `source`,
  // or the set of lanes with a value not 0.
  __attribute__((noinline)) Fiber* arrive_in_warp(WarpOp op, uint32_t mask, uint64_t value,
                                                  unsigned source, const Site* site) {
    Warp& w = *warp;
    if ((mask >> lane & 1) == 0) {
      record(cudaErrorLaunchFailure, site->text() + ": the mask does not name the caller");
      abandon();
    }
    mask &= w.exists;
    w.wait[lane] = {op, mask, source, value, site};
    w.ready &= ~(1u << lane);
    w.waiting |= 1u << lane;
    if ((w.waiting & mask) == mask) {
      uint64_t ballot = 0;
      for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        const unsigned other = __builtin_ctz(rest);
        if (w.wait[other].op != op || w.wait[other].mask != mask) {
          record_divergence(*site, *w.wait[other].site, *w.fibers[other]);
          abandon();
        }
        ballot |= uint64_t{w.wait[other].value != 0} << other;
      }
      for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        const unsigned other = __builtin_ctz(rest);
        const unsigned from = w.wait[other].source;
        // The value of a lane that takes no part is anyone's guess.
        const uint64_t shuffled =
            mask >> from & 1 ? w.wait[from].value : launch->poison * uint64_t{0x100000001};
        w.result[other] = op == WarpOp::kVote ? ballot : shuffled;
      }
      w.waiting &= ~mask;
      w.ready |= mask;
    }
    return next_or_abandon();
  }

  // The calling fiber has returned from the kernel.
  [[noreturn]] void finish() {
    warp->ready &= ~(1u << lane);
    warp->done |= 1u << lane;
    ++finished;
    Fiber* const to = next_ready();
    if (to == nullptr && finished < threads) record_stuck();
    switch_context(this_fiber(), to == nullptr ? main : *to, /*from_ends=*/true);
    __builtin_unreachable();
  }

  // ---- Failing ----------------------------------------------------------------------------------

  // A failing fiber calls record() and then, when no object is left to destroy, abandon(): that
  // ends the block, and the frames of all its fibers with it.
  void record(cudaError_t code, const std::string& what, const Fiber& culprit = this_fiber()) {
    error = code;
    message = what + "; block " + text(block_idx) + ", thread " + text(culprit.thread_idx);
  }

  [[noreturn]] void abandon() {
    switch_context(this_fiber(), main, /*from_ends=*/true);
    __builtin_unreachable();
  }

  void record_divergence(const Site& here, const Site& there, const Fiber& other) {
    record(cudaErrorLaunchFailure, "divergence: this thread waits in " + here.text() + ", thread " +
                                       text(other.thread_idx) + " in " + there.text());
  }

  // No fiber can run and not all have returned.
  void record_stuck() {
    const auto state_of = [&](const Warp& w, unsigned bit) {
      const std::string name = "thread " + text(w.fibers[bit]->thread_idx);
      if (w.done >> bit & 1) return name + " has returned from the kernel";
      return name + " waits in " + (w.waiting >> bit & 1 ? w.wait[bit].site : &barrier)->text();
    };
    for (const Warp* w = warps; w < warps + warp_count; ++w) {
      if (w->waiting == 0) continue;
      const unsigned waiter = __builtin_ctz(w->waiting);
      const uint32_t missing = w->wait[waiter].mask & ~w->waiting;
      record(cudaErrorLaunchFailure,
             w->wait[waiter].site->text() + " waits for lanes that never arrive: " +
                 state_of(*w, missing != 0 ? __builtin_ctz(missing) : waiter),
             *w->fibers[waiter]);
      return;
    }
    const Warp* w = warps;
    while (w->done == 0) ++w;
    record(cudaErrorLaunchFailure,
           barrier.text() + " is reached by only " + std::to_string(arrived) + " of the " +
               std::to_string(threads) +
               " threads of the block: " + state_of(*w, __builtin_ctz(w->done)),
           fiber(barrier_thread));
  }

  // Where a fiber continues after a fault, on its own stack again.
  [[noreturn]] static void after_fault() {
    BlockRunner& runner = *this_fiber().runner;
    runner.record_fault();
    runner.abandon();
  }

  // Where a fiber continues that is to end, likewise.
  [[noreturn]] static void after_stop() {
    BlockRunner& runner = *this_fiber().runner;
    std::string where = runner.place();
    if (runner.interval + runner.arrived > 0)
      where += ", the last barrier was " + runner.barrier.text();
    if (runner.is_late()) {
      char what[64];
      std::snprintf(what, sizeof what, "the block did not end in %g s",
                    runner.launch->tick_limit / kTicksPerSecond);
      runner.record(cudaErrorLaunchTimeout, what + where);
    } else {
      runner.record(cudaErrorLaunchFailure, "interrupted" + where);
    }
    runner.abandon();
  }

  bool is_late() const { return launch->tick_limit != 0 && ticks > launch->tick_limit; }

  // At each tick: whether the fiber that runs this code must end now. In other libraries' code it
  // may hold a lock (malloc's, say) and gets until the next tick; one that already fails ends by
  // itself.
  bool must_stop(uintptr_t code) {
    ++ticks;
    const Library& library = Library::instance();
    if (!is_late() && interrupts.count == launch->interrupts) return false;
    if (stopped || error != cudaSuccess || code - library.code >= library.code_bytes) return false;
    signal_code = code;
    return stopped = true;
  }

  // Where the signal handler found a fiber. ladder.py reads it and finds the source line.
  std::string place() const {
    Dl_info library{};
    dladdr(reinterpret_cast<void*>(signal_code), &library);
    char text[48];
    std::snprintf(text, sizeof text, ", in code at +0x%zx of ",
                  size_t(signal_code - reinterpret_cast<uintptr_t>(library.dli_fbase)));
    return text + std::string(library.dli_fname ? library.dli_fname : "an unknown library");
  }

  void record_fault() {
    const auto address = reinterpret_cast<uintptr_t>(fault.si_addr);
    char text[32];
    std::snprintf(text, sizeof text, " (address 0x%zx)", size_t(address));
    const std::string code = text + place();
    const uintptr_t shared_offset = address - reinterpret_cast<uintptr_t>(dynamic_shared());
    if (fault.si_signo == SIGFPE) {
      record(cudaErrorLaunchFailure, "integer division by zero" + code);
    } else if (owns(address)) {
      record(cudaErrorLaunchFailure, "stack overflow" + code);
    } else if (fault.si_signo == SIGBUS || fault.si_code == SI_KERNEL) {
      record(cudaErrorMisalignedAddress, "access of a misaligned or wild address" + code);
    } else if (shared_offset + kGuardBytes < kSharedBytes + 2 * kGuardBytes) {
      record(cudaErrorIllegalAddress, "illegal access to byte " +
                                          std::to_string(static_cast<ptrdiff_t>(shared_offset)) +
                                          " of " + std::to_string(launch->dynamic_shared) +
                                          " bytes of dynamic shared memory" + place());
    } else {
      record(cudaErrorIllegalAddress, "illegal memory access" + code);
    }
  }

  // ---- One block --------------------------------------------------------------------------------

  [[noreturn]] static void fiber_main() {
#ifdef ATTENTION_EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    BlockRunner& runner = *this_fiber().runner;
    bool returned = false;
    try {
      runner.launch->body(runner.launch->arguments);
      returned = true;
    } catch (...) {  // left before it is reported, for the exception to be destroyed
    }
    if (returned) runner.finish();
    runner.record(cudaErrorLaunchFailure, "the kernel threw a C++ exception");
    runner.abandon();
  }

  // Makes a fiber start from the beginning.
  void reset(Fiber& f) {
    if (f.pending != nullptr) f.pending->clear();
    auto** const top = reinterpret_cast<void**>(&f);
    [[maybe_unused]] auto* const bottom =
        reinterpret_cast<ucontext_t*>(stacks + f.thread * kStackBytes);
#ifdef ATTENTION_EMULATOR_ASAN
    f.fake_stack = nullptr;
    f.bottom = bottom;
    f.size = reinterpret_cast<uintptr_t>(top) - reinterpret_cast<uintptr_t>(bottom);
#endif
#ifdef ATTENTION_EMULATOR_UCONTEXT
    getcontext(bottom);
    bottom->uc_stack.ss_sp = bottom + 1;
    bottom->uc_stack.ss_size =
        reinterpret_cast<uintptr_t>(top) - reinterpret_cast<uintptr_t>(bottom + 1);
    makecontext(bottom, fiber_main, 0);
    f.stack_pointer = bottom;
#else
    // As switch_stack() leaves a stack. fiber_main() starts as if it were called, by nobody.
    auto** const entry = top - 2 - kEntryOffset / sizeof(void*);
    std::fill(entry, top, nullptr);
    entry[0] = reinterpret_cast<void*>(&fiber_main);
    f.stack_pointer = entry;
#endif
  }

  // Makes room for a launch.
  void prepare(const Launch& next) {
    launch = &next;
    threads = next.block.x * next.block.y * next.block.z;
    warp_count = (threads + kWarpSize - 1) / kWarpSize;
    warp_slots = 1;
    while (warp_slots < warp_count) warp_slots *= 2;
    if (stacks == 0) {
      const size_t bytes = (kMaxThreads + 2) * kStackBytes;
      void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      madvise(memory, bytes, MADV_NOHUGEPAGE);  // most of each stack is never touched
      stacks = (reinterpret_cast<uintptr_t>(memory) / kStackBytes + 2) * kStackBytes;
      mprotect(reinterpret_cast<void*>(stacks - kStackBytes), kStackBytes, PROT_NONE);
    }
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& f = fiber_on(stacks + i * kStackBytes);
      warps[i / kWarpSize].fibers[i % kWarpSize] = &f;
      f.runner = this;
      f.thread = i;
      f.thread_idx = {i % next.block.x, i / next.block.x % next.block.y,
                      i / next.block.x / next.block.y};
    }
    for (unsigned i = 0; i < warp_count; ++i) {
      warps[i].exists = ~0u >> (kWarpSize - std::min(threads - i * kWarpSize, kWarpSize));
    }
#ifdef ATTENTION_EMULATOR_UCONTEXT
    main.stack_pointer = &main_context;
#endif
#ifdef ATTENTION_EMULATOR_ASAN
    pthread_attr_t attributes;
    void* bottom = nullptr;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &main.size);
    pthread_attr_destroy(&attributes);
    main.bottom = bottom;
#endif
    open_shared(next.dynamic_shared);
    static_shared = Library::instance().static_shared();
    static_counted = false;
  }

  // Makes dynamic shared memory this large.
  void open_shared(size_t dynamic) {
    if (shared == nullptr) {
      void* const memory = mmap(nullptr, kSharedBytes + 2 * kGuardBytes, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      shared = static_cast<unsigned char*>(memory) + kGuardBytes;
    }
    const size_t page = sysconf(_SC_PAGESIZE);
    const size_t bytes = (dynamic + 2 * kRedzone + page - 1) / page * page;
    if (bytes != shared_bytes) {
      if (mprotect(shared, bytes, PROT_READ | PROT_WRITE) != 0 ||
          mprotect(shared + bytes, kSharedBytes - bytes, PROT_NONE) != 0) {
        throw std::bad_alloc();
      }
      shared_bytes = bytes;
    }
#ifdef ATTENTION_EMULATOR_ASAN  // its report, to the byte, comes before the fault
    __asan_poison_memory_region(shared - kGuardBytes, kSharedBytes + 2 * kGuardBytes);
    __asan_unpoison_memory_region(shared, dynamic);
    shared_bytes = dynamic;
#endif
  }

  static void fill(unsigned char* memory, size_t bytes, uint32_t word) {
    const size_t whole = bytes & ~size_t{3};
    for (size_t i = 0; i < whole; i += 4) std::memcpy(memory + i, &word, 4);
    if (whole < bytes) std::memcpy(memory + whole, &word, bytes - whole);
  }

  // Runs block `number` of the grid. False: it failed, see `error` and `message`.
  bool run(uint64_t number) {
    block = number;
    block_idx = {static_cast<unsigned>(number % launch->grid.x),
                 static_cast<unsigned>(number / launch->grid.x % launch->grid.y),
                 static_cast<unsigned>(number / launch->grid.x / launch->grid.y)};
    fill(shared, shared_bytes, launch->poison);
    fill(static_shared, Library::instance().tls_bytes, launch->poison);
    for (unsigned i = 0; i < warp_count; ++i) warps[i].waiting = warps[i].done = 0;
    for (unsigned i = 0; i < threads; ++i) reset(fiber(i));
    error = cudaSuccess;
    faulted = stopped = false;
    ticks = 0;
    finished = arrived = interval = 0;
    begin_interval();
    switch_context(main, *next_ready());
    if (error == cudaSuccess) check_shared();
    if (stopped) drop_stacks();  // and with them what a fiber was changing
#ifdef ATTENTION_EMULATOR_ASAN
    if (error != cudaSuccess)
      __asan_unpoison_memory_region(reinterpret_cast<void*>(stacks), threads * kStackBytes);
#endif
    return error == cudaSuccess;
  }

  void check_shared() {
    const size_t size = launch->dynamic_shared;
    const auto* const poison = reinterpret_cast<const unsigned char*>(&launch->poison);
    const auto untouched = [&](size_t i) { return shared[i] == poison[i % 4]; };
    size_t i = 0;
    const auto skip_untouched = [&](size_t end) {
      // All of it, where the first word is and each byte is like the one 4 before.
      const bool first =
          i + 4 <= end && untouched(i) && untouched(i + 1) && untouched(i + 2) && untouched(i + 3);
      if (first && std::memcmp(shared + i, shared + i + 4, end - i - 4) == 0) i = end;
      while (i < end && untouched(i)) ++i;
    };
    skip_untouched(kRedzone);
    if (i == kRedzone) {
      i += size;
      skip_untouched(shared_bytes);
    }
    if (i < shared_bytes) {
      error = cudaErrorIllegalAddress;
      message = "a thread wrote to byte " + std::to_string(static_cast<ptrdiff_t>(i - kRedzone)) +
                " of " + std::to_string(size) + " bytes of dynamic shared memory; block " +
                text(block_idx);
    }
    if (static_shared == nullptr || std::exchange(static_counted, true)) return;
    // The arrays of all kernels of the library lie here: this one's are those that it wrote to.
    size_t used = 0;
    for (size_t at = 0; at + 4 <= Library::instance().tls_bytes; at += 4) {
      used += std::memcmp(static_shared + at, poison, 4) == 0 ? 0 : 4;
    }
    if (size + used > launch->shared_limit) {
      error = cudaErrorInvalidValue;
      message = std::to_string(size) + " bytes of dynamic and at least " + std::to_string(used) +
                " of static shared memory are more than the " +
                std::to_string(launch->shared_limit) + " of the emulated device";
    }
  }

  // After a launch. A fiber that outgrows its stack runs into its neighbour's; what lies between
  // must be untouched.
  bool stacks_overflowed() {
    bool overflowed = false;
    for (unsigned i = 0; i < threads; ++i) {
      const auto* const words = reinterpret_cast<const uint64_t*>(stacks + i * kStackBytes + 8192);
      overflowed |= std::any_of(words, words + 16, [](uint64_t word) { return word != 0; });
    }
    if (overflowed) drop_stacks();
    return overflowed;
  }

  void drop_stacks() {
    madvise(reinterpret_cast<void*>(stacks), kMaxThreads * kStackBytes, MADV_DONTNEED);
  }
};

// All runners of this library, and what went wrong in each host thread's last launch.
struct Runners {
  std::mutex mutex;
  std::atomic<BlockRunner*> first{nullptr};  // only ever grows: the signal handler walks it
  std::map<std::thread::id, std::string> errors;

  static Runners& instance() {
    static Runners* const runners = new Runners;  // never destroyed: threads may outlive statics
    return *runners;
  }

  BlockRunner* acquire() {
    const std::lock_guard<std::mutex> lock(mutex);
    for (BlockRunner* r = first; r != nullptr; r = r->next_runner) {
      if (!std::exchange(r->in_use, true)) return r;
    }
    auto* const r = new BlockRunner;
    r->in_use = true;
    r->next_runner = first;
    first = r;
    return r;
  }

  void release(BlockRunner* runner) {
    const std::lock_guard<std::mutex> lock(mutex);
    runner->in_use = false;
  }

  // The runner whose fiber has this stack pointer, or null.
  BlockRunner* of(uintptr_t stack_pointer) const {
    BlockRunner* r = first;
    while (r != nullptr && !r->owns(stack_pointer)) r = r->next_runner;
    return r;
  }

  cudaError_t report(cudaError_t code, const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (code == cudaSuccess) {
      errors.erase(std::this_thread::get_id());
    } else {
      errors[std::this_thread::get_id()] = message;
    }
    return code;
  }
};

// What went wrong in the calling thread's last launch; empty if nothing did. `used`, so that a file
// which only declares it can call it.
__attribute__((used)) inline std::string last_error() {
  Runners& runners = Runners::instance();
  const std::lock_guard<std::mutex> lock(runners.mutex);
  const auto found = runners.errors.find(std::this_thread::get_id());
  return found == runners.errors.end() ? "" : found->second;
}

// ---- Signals ------------------------------------------------------------------------------------

#if defined(__x86_64__)
inline auto& code_of(mcontext_t& machine) { return machine.gregs[REG_RIP]; }
inline auto& stack_pointer_of(mcontext_t& machine) { return machine.gregs[REG_RSP]; }
#elif defined(__aarch64__)
inline auto& code_of(mcontext_t& machine) { return machine.pc; }
inline auto& stack_pointer_of(mcontext_t& machine) { return machine.sp; }
#else  // unknown, so that no fiber is ever found at fault
inline uintptr_t no_register = 0;
inline auto& code_of(mcontext_t&) { return no_register; }
inline auto& stack_pointer_of(mcontext_t&) { return no_register; }
#endif

// Makes a fiber go on at `function`, with an empty stack, when the signal handler returns.
inline void redirect(mcontext_t& machine, Fiber& fiber, void (*function)()) {
#ifdef ATTENTION_EMULATOR_ASAN
  __asan_unpoison_memory_region(fiber.bottom, fiber.size);
#endif
  code_of(machine) = reinterpret_cast<uintptr_t>(function);
  stack_pointer_of(machine) = reinterpret_cast<uintptr_t>(&fiber) - kEntryOffset;
}

inline BlockRunner* runner_of(mcontext_t& machine) {
  return Runners::instance().of(static_cast<uintptr_t>(stack_pointer_of(machine)));
}

inline struct sigaction previous_actions[65];

inline bool is_function(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

// Calls the handler that was there before; false where there was none.
inline bool pass_on(const struct sigaction& to, int signal, siginfo_t* info, void* context) {
  if (!is_function(to)) return false;
  if ((to.sa_flags & SA_SIGINFO) != 0) {
    to.sa_sigaction(signal, info, context);
  } else {
    to.sa_handler(signal);
  }
  return true;
}

inline void handle(int signal, void (*handler)(int, siginfo_t*, void*), int flags = 0) {
  struct sigaction action{};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | flags;
  sigaction(signal, &action, &previous_actions[signal]);
}

// A wild address in a kernel is an error of the launch, as on a GPU, and not the end of the
// process. Faults elsewhere go to the handler that was there before. AddressSanitizer keeps its own
// handlers, and names the thread at fault.
#ifdef ATTENTION_EMULATOR_ASAN
inline void catch_faults() {
  __asan_set_error_report_callback([](const char*) {
    const auto stack_pointer = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    if (const BlockRunner* const runner = Runners::instance().of(stack_pointer)) {
      std::fprintf(stderr, "emulated CUDA block %s, thread %s\n", text(runner->block_idx).c_str(),
                   text(this_fiber().thread_idx).c_str());
    }
  });
}
#else
inline void on_fault(int signal, siginfo_t* info, void* context) {
  auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  BlockRunner* const runner = runner_of(machine);
  if (runner != nullptr && !std::exchange(runner->faulted, true)) {
    runner->fault = *info;
    runner->signal_code = static_cast<uintptr_t>(code_of(machine));
    redirect(machine, *runner->warp->fibers[runner->lane], &BlockRunner::after_fault);
  } else if (!pass_on(previous_actions[signal], signal, info, context)) {
    sigaction(signal, &previous_actions[signal], nullptr);  // the instruction faults again
  }
}

inline void catch_faults() {
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE}) handle(signal, on_fault);
}
#endif

// The signal of ticks, which nothing else is likely to use. Each library handles its own fibers'.
inline int tick_signal() { return SIGRTMAX - 5; }

inline void on_tick(int signal, siginfo_t* info, void* context) {
  auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  BlockRunner* const runner = runner_of(machine);
  if (runner == nullptr) {
    pass_on(previous_actions[signal], signal, info, context);
  } else if (runner->must_stop(static_cast<uintptr_t>(code_of(machine)))) {
    const auto stack_pointer = static_cast<uintptr_t>(stack_pointer_of(machine));
    redirect(machine, fiber_on(stack_pointer & ~(kStackBytes - 1)), &BlockRunner::after_stop);
  }
}

// While this lives the calling OS thread gets a tick now and then. By system calls: older C
// libraries have the functions in a library of their own, and no name for a thread's timers.
struct Ticker {
  int timer = 0;

  Ticker() {
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = tick_signal();
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    if (syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer) != 0)
      throw std::system_error(errno, std::generic_category(), "timer_create");
    const itimerspec every{{0, kTickNanoseconds}, {0, kTickNanoseconds}};
    syscall(SYS_timer_settime, timer, 0, &every, nullptr);
  }
  ~Ticker() { syscall(SYS_timer_delete, timer); }
  Ticker(const Ticker&) = delete;
};

inline void on_interrupt(int signal, siginfo_t* info, void* context) {
  ++interrupts.count;
  pass_on(interrupts.previous, signal, info, context);
}

// While one lives, of any library, interrupts are counted, and handled as before. Where nothing
// handles them they end the process or are ignored: so they do still.
struct InterruptCounter {
  InterruptCounter() {
    const std::lock_guard<std::mutex> lock(interrupts.mutex);
    if (interrupts.launches++ != 0) return;
    struct sigaction now{};
    sigaction(SIGINT, nullptr, &now);
    if (!is_function(now) || is_ours(now)) return;
    interrupts.previous = interrupts.ours = now;
    interrupts.ours.sa_sigaction = on_interrupt;
    interrupts.ours.sa_flags |= SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGINT, &interrupts.ours, nullptr);
  }
  ~InterruptCounter() {
    const std::lock_guard<std::mutex> lock(interrupts.mutex);
    if (--interrupts.launches != 0) return;
    struct sigaction now{};
    sigaction(SIGINT, nullptr, &now);
    if (is_ours(now)) sigaction(SIGINT, &interrupts.previous, nullptr);
  }
  InterruptCounter(const InterruptCounter&) = delete;

  static bool counts() { return interrupts.ours.sa_sigaction != nullptr; }

  static bool is_ours(const struct sigaction& action) {
    return is_function(action) && action.sa_sigaction == interrupts.ours.sa_sigaction;
  }
};

// The stack that signal handlers get while this lives: a fiber's own may be what overflowed.
struct SignalStack {
  stack_t previous{};

  explicit SignalStack(BlockRunner& runner) {
    stack_t stack{};
    stack.ss_sp = runner.signal_stack;
    stack.ss_size = sizeof runner.signal_stack;
    sigaltstack(&stack, &previous);
  }
  ~SignalStack() { sigaltstack(&previous, nullptr); }
  SignalStack(const SignalStack&) = delete;
};

// ---- The grid -----------------------------------------------------------------------------------

inline const char* setting(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// What ATTENTION_EMULATOR_ARCH names, or sm_90. Read at each launch.
struct Device {
  int arch;
  size_t shared_limit;  // that a block may ask for; 0 for an unknown device

  static Device emulated() {
    const char* const name = setting("ATTENTION_EMULATOR_ARCH");
    const int arch = name == nullptr ? 90 : std::atoi(name);
    for (const auto& [known, kilobytes] : {std::pair{70, 96},
                                           {75, 64},
                                           {80, 163},
                                           {86, 99},
                                           {87, 163},
                                           {89, 99},
                                           {90, 227},
                                           {100, 227},
                                           {103, 227},
                                           {120, 99}}) {
      if (arch == known) return {arch, size_t(kilobytes) * 1024};
    }
    return {arch, 0};
  }
};

// The blocks of a launch, run by any number of OS threads. They are handed out in ascending order
// and each is run to its end, so the first one that fails is always the same.
struct GridRun {
  const Launch& launch;
  const uint64_t blocks;
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  uint64_t failed;
  cudaError_t error = cudaSuccess;
  std::string message;

  explicit GridRun(const Launch& l)
      : launch(l), blocks(uint64_t{l.grid.x} * l.grid.y * l.grid.z), failed(blocks) {}

  void fail(uint64_t block, cudaError_t code, const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    next = blocks;
    if (error != cudaSuccess && block >= failed) return;
    failed = block;
    error = code;
    message = what;
  }

  void work() {
    BlockRunner* runner = nullptr;
    try {
      runner = Runners::instance().acquire();
      runner->prepare(launch);
      const SignalStack signal_stack(*runner);
      std::optional<Ticker> ticker;
      if (launch.tick_limit != 0 || InterruptCounter::counts()) ticker.emplace();
      for (uint64_t block; (block = next++) < blocks;) {
        if (!runner->run(block)) fail(block, runner->error, runner->message);
      }
      if (runner->stacks_overflowed())
        fail(blocks, cudaErrorLaunchFailure, "a thread's stack overflowed");
    } catch (const std::exception& exception) {
      fail(blocks, cudaErrorMemoryAllocation, exception.what());
    }
    if (runner != nullptr) Runners::instance().release(runner);
  }

  // For std::thread, whose template instances are visible to other libraries whatever their
  // arguments: none of ours.
  static void thread_main(void* run) { static_cast<GridRun*>(run)->work(); }
};

// Checks a launch as the CUDA runtime does, and runs it.
inline cudaError_t run_launch(Launch launch) {
  const dim3 grid = launch.grid, block = launch.block;
  const auto report = [](cudaError_t code, const std::string& message) {
    return Runners::instance().report(code, message);
  };
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64) {
    return report(cudaErrorInvalidConfiguration,
                  "a block of " + text(block) + " threads: 1 to 1024 are possible");
  }
  if (grid.x - 1 >= 0x7fffffff || grid.y - 1 >= 65535 ||
      grid.z - 1 >= 65535) {  // 0 - 1 is the largest of all
    return report(cudaErrorInvalidConfiguration,
                  "a grid of " + text(grid) + " blocks is not possible");
  }
  const Device device = Device::emulated();
  launch.arch = device.arch;
  launch.shared_limit = device.shared_limit;
  if (launch.shared_limit == 0) {
    return report(cudaErrorInvalidDevice,
                  "ATTENTION_EMULATOR_ARCH is none of 70 75 80 86 87 89 90 100 103 120");
  }
  if (launch.dynamic_shared > launch.shared_limit) {
    return report(cudaErrorInvalidValue, std::to_string(launch.dynamic_shared) +
                                             " bytes of dynamic shared memory are more than the " +
                                             std::to_string(launch.shared_limit) +
                                             " of the emulated device");
  }
  if (const char* const poison = setting("ATTENTION_EMULATOR_POISON")) {
    launch.poison = static_cast<uint32_t>(std::strtoul(poison, nullptr, 16));
  }
  if (const char* const order = setting("ATTENTION_EMULATOR_ORDER")) {
    if (std::strncmp(order, "shuffle:", 8) == 0) {
      launch.order = Launch::kShuffle;
      launch.seed = std::strtoull(order + 8, nullptr, 10);
    } else if (std::strcmp(order, "reverse") == 0) {
      launch.order = Launch::kReverse;
    } else {
      return report(cudaErrorInvalidValue,
                    "ATTENTION_EMULATOR_ORDER is neither reverse nor shuffle:<seed>");
    }
  }
  launch.tick_limit = static_cast<unsigned>(kTimeout * kTicksPerSecond);
  if (const char* const timeout = setting("ATTENTION_EMULATOR_TIMEOUT")) {
    char* end;
    const double ticks = std::strtod(timeout, &end) * kTicksPerSecond;
    if (*end != '\0' || !(ticks >= 0 && ticks < 1e9))
      return report(cudaErrorInvalidValue, "ATTENTION_EMULATOR_TIMEOUT is no number of seconds");
    launch.tick_limit = static_cast<unsigned>(std::ceil(ticks));
  }
  [[maybe_unused]] static const bool handling = [] {
    catch_faults();
    handle(tick_signal(), on_tick, SA_RESTART);
    return true;
  }();
  const InterruptCounter counter;
  launch.interrupts = interrupts.count;

  GridRun run(launch);
  const char* const wanted = setting("ATTENTION_EMULATOR_THREADS");
  const uint64_t workers =
      wanted != nullptr ? std::atoi(wanted) : std::thread::hardware_concurrency();
  std::vector<std::thread> others;
  try {
    while (others.size() + 1 < std::min(workers, run.blocks)) {
      others.emplace_back(&GridRun::thread_main, static_cast<void*>(&run));
    }
  } catch (const std::system_error&) {  // as many threads as there can be
  }
  run.work();
  for (std::thread& other : others) other.join();
  return report(run.error, run.message);
}

}  // namespace attention::emulator

#pragma GCC visibility pop
