// A CUDA thread is a fiber: it has its own stack, and switching threads means switching stacks.
//
// A fiber finds its own state by rounding its stack pointer down to the alignment of stacks. That
// is cheaper than thread_local in a shared library, and it leaves the library's thread-local
// storage to `__shared__` arrays alone.

#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

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
#error "the CPU emulator switches stacks on x86-64 and AArch64 only"
#endif

#pragma GCC visibility push(hidden)

namespace attention::emulator {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;
#if defined(__x86_64__) && !defined(ATTENTION_EMULATOR_ASAN)
constexpr uintptr_t kStackBytes = 64 * 1024;
#else
constexpr uintptr_t kStackBytes = 256 * 1024;  // pages or frames are larger
#endif
// How far below a multiple of 16 the stack pointer is when a function starts.
#ifdef __x86_64__
constexpr uintptr_t kEntryOffset = 24;
#else
constexpr uintptr_t kEntryOffset = 16;
#endif

struct Block;

struct ThreadExit {};  // what PTX's exit throws

// While this exists, subnormal floats on this OS thread are flushed to 0, or kept.
class Subnormals {
 public:
  explicit Subnormals(bool flushed) : before(get()) {
    set(flushed ? before | kFlush : before & ~kFlush);
  }
  ~Subnormals() { set(before); }
  Subnormals(const Subnormals&) = delete;

 private:
#ifdef __x86_64__
  using Register = unsigned;
  static constexpr Register kFlush = 0x8040;  // flush to zero, and denormals are zeros
  static Register get() { return __builtin_ia32_stmxcsr(); }
  static void set(Register value) { __builtin_ia32_ldmxcsr(value); }
#else
  using Register = uint64_t;
  static constexpr Register kFlush = 1 << 24;
  static Register get() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set(Register value) { asm volatile("msr fpcr, %0" ::"r"(value)); }
#endif
  const Register before;
};

// A place to switch back to: a fiber, or the OS thread's own stack.
struct Context {
  void* stack_pointer = nullptr;
#ifdef ATTENTION_EMULATOR_ASAN
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
#endif
};

// One CUDA thread. Lies at the top of its stack.
struct Fiber : Context {
  Block* block;
  uint3 thread_idx;
  unsigned thread;  // linear index in the block
};

// Fibers lie at different offsets within a page: at the same offset they would compete for the same
// few cache sets.
constexpr uintptr_t kFiberSlot = 192;
static_assert(sizeof(Fiber) <= kFiberSlot);

inline Fiber& fiber_on(uintptr_t stack) {
  return *reinterpret_cast<Fiber*>(stack + kStackBytes -
                                   kFiberSlot * (stack / kStackBytes % 16 + 1));
}

// The calling CUDA thread. The stack pointer is read without `volatile`, so that the compiler
// hoists it out of loops.
inline Fiber& this_fiber() {
  uintptr_t stack_pointer;
#ifdef __x86_64__
  asm("movq %%rsp, %0" : "=r"(stack_pointer));
#else
  asm("mov %0, sp" : "=r"(stack_pointer));
#endif
  return fiber_on(stack_pointer & ~(kStackBytes - 1));
}

// Saves the caller's place in *from and continues at `to`, a stack with a code address and a frame
// pointer on top. All other registers are declared clobbered, so that the compiler saves those it
// needs. Inlined so that each barrier of a kernel has its own jump, which always leads to the same
// place and is predicted; a shared return instruction would not be.
__attribute__((always_inline)) inline void switch_stack(void** from, void* to) {
#ifdef __x86_64__
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

// Switches to a fiber, unless it is the calling one; returns when that is switched to again.
__attribute__((always_inline)) inline void switch_to(Fiber* to) {
  Fiber& self = this_fiber();
  if (to != &self) switch_context(self, *to);
}

// ---- Warps --------------------------------------------------------------------------------------

// A warp: which of its lanes can run, and its joint operations (__syncwarp(), shuffles, votes).

enum class WarpOp { kSync, kShuffle, kVote, kMatrix };

// The operation that a lane waits in.
struct WarpWait {
  WarpOp op;
  uint32_t mask;    // participating lanes
  unsigned source;  // lane whose value a shuffle returns
  uint64_t value;
  const Site* site;
};

// Sets of lanes are bit masks.
struct Warp {
  uint32_t exists;   // lanes that have a thread
  uint32_t ready;    // lanes that can run
  uint32_t waiting;  // lanes in a warp-level operation, each described by its `wait`
  uint32_t done;     // lanes that have returned
  WarpWait wait[kWarpSize];
  uint64_t result[kWarpSize];  // of the lane's last operation
  Fiber* fibers[kWarpSize];

  // A lane arrives at an operation. When the last lane of the mask has arrived, each lane's result
  // is set to the value of its source lane or, in a vote, to the set of lanes whose value is not 0.
  // Returns a lane that waits in a different operation, or -1.
  int arrive(unsigned lane, const WarpWait& arriving, uint32_t poison) {
    const uint32_t mask = arriving.mask;
    wait[lane] = arriving;
    ready &= ~(1u << lane);
    waiting |= 1u << lane;
    if ((waiting & mask) != mask) return -1;
    uint64_t ballot = 0;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int other = __builtin_ctz(rest);
      if (wait[other].op != arriving.op || wait[other].mask != mask) return other;
      ballot |= uint64_t{wait[other].value != 0} << other;
    }
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int other = __builtin_ctz(rest);
      const unsigned from = wait[other].source;
      // The value of a lane that does not participate is undefined.
      const uint64_t shuffled =
          mask >> from & 1 ? wait[from].value : poison * uint64_t{0x100000001};
      result[other] = arriving.op == WarpOp::kVote ? ballot : shuffled;
    }
    waiting &= ~mask;
    ready |= mask;
    return -1;
  }
};

}  // namespace attention::emulator

#pragma GCC visibility pop
