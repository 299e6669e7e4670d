// The emulator's versions of wgmma.cuh.
//
// A product is computed when its warp waits for it, and not before; until then its sums are NaN.
// Errors, reported with the caller's line: registers that were accessed since the last
// multiply_fence(), sums that are accessed before they are complete or that multiply_wait() does
// not take, operands that threads wrote without a proxy_fence(), that a copy is still writing, or
// that change before the product has read them, and descriptors of anything but tiles with the
// 128-byte swizzle.

#pragma once

#include "ptx.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx {

// Registers of a thread: an array of the kernel, or none.
struct Registers {
  const void* first = nullptr;
  size_t bytes = 0;

  Registers() = default;
  template <typename T, size_t kCount>
  Registers(T (&array)[kCount]) : first(array), bytes(sizeof(array)) {}
};

// The complete sums that a wait takes.
struct WaitCall {
  Registers sums[2];
  bool takes_all = false;
};

// Defined in wgmma.cpp.
uint64_t matrix_descriptor(const void* tile, unsigned next_columns = 0, ATTENTION_EMULATOR_SITE);
void multiply_fence(Registers a = {}, Registers b = {}, Registers c = {}, Registers d = {},
                    ATTENTION_EMULATOR_SITE);
void fence_all();  // for asm, whose fence names no registers
void begin(const ProductCall& call, const Site& site);
void multiply_commit(ATTENTION_EMULATOR_SITE);
// Waits for all groups but the last ones.
void wait(int groups, const WaitCall& call, const Site& site);

// Checks that asynchronous reads see what threads have written.
void check_visible(const unsigned char* bytes, size_t count, const Site& site);
// Returns a product in flight that reads these bytes of shared memory, or null.
const Site* product_that_reads(const void* memory, size_t bytes);

inline uint64_t advance(uint64_t descriptor, unsigned bytes) { return descriptor + (bytes >> 4); }

template <int kGroups>
void multiply_wait(Registers a = {}, Registers b = {}, ATTENTION_EMULATOR_SITE) {
  wait(kGroups, {{a, b}}, {"multiply_wait", file, line});
}

// a: a descriptor, or four registers.
template <bool kIsBfloat16, bool kTransposed = false, int kSums, typename A>
__attribute__((noinline)) void multiply(float (&sums)[kSums], const A& a, uint64_t b,
                                        bool accumulate = true, ATTENTION_EMULATOR_SITE) {
  static_assert(kSums == 16 || kSums == 32 || kSums == 64, "B has 32, 64 or 128 columns");
  ProductCall call{sums,        kSums,      nullptr,
                   0,           b,          kIsBfloat16,
                   kTransposed, accumulate, __builtin_return_address(0)};
  if constexpr (std::is_array_v<A>)
    call.a_registers = a;
  else
    call.a = a;
  begin(call, {"multiply", file, line});
}

}  // namespace attention::ptx

#pragma GCC visibility pop
