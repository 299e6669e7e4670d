// The emulator's versions of wgmma.cuh.
//
// A product is computed when its warp waits for it, and not before; until then its sums are NaN.
// Errors, reported with the caller's line: registers that were accessed since the last
// multiply_fence(), sums that are accessed before they are complete or that multiply_wait() does not
// take, operands that threads wrote without a proxy_fence(), that a copy is still writing, or that
// change before the product has read them, and descriptors of anything but tiles with the 128-byte
// swizzle.

#pragma once

#include "ptx.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx {

// A lane's arguments.
struct ProductCall {
  float* sums;
  int count;
  const unsigned* a_registers;  // or null
  uint64_t a, b;
  bool is_bfloat16, is_transposed, accumulates;
  const void* code;              // the call's return address
  float* const* each = nullptr;  // each of the sums, in asm, whose fence names no registers
};

// Registers of a thread: a variable of the kernel.
struct Registers {
  const void* first;
  size_t bytes;
};

// The complete sums that a wait takes; a count of -1: all.
struct WaitCall {
  const Registers* sums;
  int count;
};

// Defined in wgmma.cpp.
unsigned shared_address(const void* pointer, const emulator::Site& site);
void note_fence(const Registers* registers, int count);
void check_fenced(const ProductCall& call, const emulator::Site& site);
void fence_all();  // for asm, whose fence names no registers
void begin_product(const emulator::MatrixCalls& calls, const emulator::Site& site);
void end_product_group(const emulator::MatrixCalls& calls, const emulator::Site& site);
void finish_products(const emulator::MatrixCalls& calls, const emulator::Site& site);
void check_complete(const WaitCall& call, const emulator::Site& site);

// Checks that asynchronous reads see what threads have written.
void check_visible(const unsigned char* bytes, size_t count, const emulator::Site& site);
// Returns a product in flight that reads these bytes of shared memory, or null.
const emulator::Site* product_that_reads(const void* memory, size_t bytes);

inline uint64_t matrix_descriptor(const void* tile, unsigned next_columns = 0,
                                  ATTENTION_EMULATOR_SITE) {
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1;
  return shared_address(tile, {"matrix_descriptor", file, line}) >> 4 |
         uint64_t{next_columns >> 4} << 16 | kEightRows >> 4 << 32 | kSwizzle128 << 62;
}
inline uint64_t advance(uint64_t descriptor, unsigned bytes) { return descriptor + (bytes >> 4); }

ATTENTION_EMULATOR_INLINE void fence(const Registers* registers, int count,
                                     const emulator::Site& site) {
  note_fence(registers, count);
  emulator::meet({}, site);
}
ATTENTION_EMULATOR_INLINE void wait(int groups, const Registers* sums, int count,
                                    const emulator::Site& site) {
  const WaitCall call{sums, count};
  emulator::meet({nullptr, static_cast<unsigned>(groups), 0, {&call}}, site, finish_products);
  check_complete(call, site);
}

// A function's last arguments are its caller's line, so it cannot take any number of arrays.
#define ATTENTION_EMULATOR_LINE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void multiply_fence(ATTENTION_EMULATOR_LINE) {
  fence(nullptr, 0, {"multiply_fence", file, line});
}
template <typename A>
void multiply_fence(A& a, ATTENTION_EMULATOR_LINE) {
  const Registers all[] = {{&a, sizeof(a)}};
  fence(all, 1, {"multiply_fence", file, line});
}
template <typename A, typename B>
void multiply_fence(A& a, B& b, ATTENTION_EMULATOR_LINE) {
  const Registers all[] = {{&a, sizeof(a)}, {&b, sizeof(b)}};
  fence(all, 2, {"multiply_fence", file, line});
}
template <typename A, typename B, typename C>
void multiply_fence(A& a, B& b, C& c, ATTENTION_EMULATOR_LINE) {
  const Registers all[] = {{&a, sizeof(a)}, {&b, sizeof(b)}, {&c, sizeof(c)}};
  fence(all, 3, {"multiply_fence", file, line});
}
template <typename A, typename B, typename C, typename D>
void multiply_fence(A& a, B& b, C& c, D& d, ATTENTION_EMULATOR_LINE) {
  const Registers all[] = {{&a, sizeof(a)}, {&b, sizeof(b)}, {&c, sizeof(c)}, {&d, sizeof(d)}};
  fence(all, 4, {"multiply_fence", file, line});
}
template <int kGroups>
void multiply_wait(ATTENTION_EMULATOR_LINE) {
  wait(kGroups, nullptr, 0, {"multiply_wait", file, line});
}
template <int kGroups, typename A>
void multiply_wait(A& a, ATTENTION_EMULATOR_LINE) {
  const Registers all[] = {{&a, sizeof(a)}};
  wait(kGroups, all, 1, {"multiply_wait", file, line});
}
template <int kGroups, typename A, typename B>
void multiply_wait(A& a, B& b, ATTENTION_EMULATOR_LINE) {
  const Registers all[] = {{&a, sizeof(a)}, {&b, sizeof(b)}};
  wait(kGroups, all, 2, {"multiply_wait", file, line});
}
#undef ATTENTION_EMULATOR_LINE

inline void multiply_commit(ATTENTION_EMULATOR_SITE) {
  emulator::meet({}, {"multiply_commit", file, line}, end_product_group);
}

ATTENTION_EMULATOR_INLINE void begin(const ProductCall& call, const emulator::Site& site) {
  check_fenced(call, site);
  emulator::meet({nullptr, 0, 0, {&call}}, site, begin_product);
}
template <bool kIsBfloat16, bool kTransposed = false, int kSums>
__attribute__((noinline)) void multiply(float (&sums)[kSums], uint64_t a, uint64_t b,
                                        bool accumulate = true, ATTENTION_EMULATOR_SITE) {
  static_assert(kSums == 16 || kSums == 32 || kSums == 64, "B has 32, 64 or 128 columns");
  begin({sums, kSums, nullptr, a, b, kIsBfloat16, kTransposed, accumulate,
         __builtin_return_address(0)},
        {"multiply", file, line});
}
template <bool kIsBfloat16, bool kTransposed = false, int kSums>
__attribute__((noinline)) void multiply(float (&sums)[kSums], const unsigned (&a)[4], uint64_t b,
                                        bool accumulate = true, ATTENTION_EMULATOR_SITE) {
  static_assert(kSums == 16 || kSums == 32 || kSums == 64, "B has 32, 64 or 128 columns");
  begin({sums, kSums, a, 0, b, kIsBfloat16, kTransposed, accumulate, __builtin_return_address(0)},
        {"multiply", file, line});
}

}  // namespace attention::ptx

#pragma GCC visibility pop
