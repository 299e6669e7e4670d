// The emulator's versions of ptx.cuh's functions.
//
// A copy arrives when a thread waits for the copy's barrier, and not before: until then the
// destination holds poison.

#pragma once

#include <cfloat>
#include <cmath>
#include <utility>

#include "cluster.h"
#include "cuda_pipeline.h"
#include "mma.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx {

// There is no L2 cache.
using CachePolicy = uint64_t;
inline CachePolicy evict_first() { return 0; }

// Defined in tma.cpp.
void copy_bulk(void* to, const void* from, unsigned bytes, Barrier* barrier, CachePolicy = 0,
               ATTENTION_EMULATOR_SITE);

ATTENTION_EMULATOR_INLINE void copy_async(void* to, const void* from, CachePolicy,
                                          ATTENTION_EMULATOR_SITE) {
  __pipeline_memcpy_async(to, from, 16, 0, file, line);
}

inline void prefetch(const void*) {}

inline float fast_exp(float x) {
  const float y = std::exp(x);
  return y < FLT_MIN ? 0.0f : y;
}
inline float fast_rsqrt(float x) { return 1.0f / std::sqrt(x); }

// Defined in tma.cpp. The second is for what later bulk copies read of global memory.
void proxy_fence();
void global_proxy_fence();

// Defined in barrier.cpp.
void change_registers(unsigned registers, bool raises, const Site& site);
template <int kRegisters>
void raise_registers(ATTENTION_EMULATOR_SITE) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  change_registers(kRegisters, true, {"raise_registers", file, line});
}
template <int kRegisters>
void lower_registers(ATTENTION_EMULATOR_SITE) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  change_registers(kRegisters, false, {"lower_registers", file, line});
}

// These work for a whole warp; defined in tensor_core.cpp.
template <typename Format>
void multiply_halves(const MatrixCalls& calls, const Site& site);
void multiply_tf32(const MatrixCalls& calls, const Site& site);
void move_elements(const MatrixCalls& calls, const Site& site);
void check_row(const void* row, const Site& site);

template <bool kIsBfloat16>
ATTENTION_EMULATOR_INLINE void mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                   ATTENTION_EMULATOR_SITE) {
  meet({nullptr, 0, 0, {sums, a, b, nullptr}}, {"mma", file, line},
       multiply_halves<std::conditional_t<kIsBfloat16, BFloat16Format, HalfFormat>>);
}
ATTENTION_EMULATOR_INLINE void mma_tf32(float (&sums)[4], const unsigned (&a)[4],
                                        const unsigned (&b)[2], ATTENTION_EMULATOR_SITE) {
  meet({nullptr, 0, 0, {sums, a, b, nullptr}}, {"mma_tf32", file, line}, multiply_tf32);
}

struct MatrixRow {
  uint16_t elements[8];
};
struct MatrixAccess {
  MatrixRow row;
  unsigned* x;
  unsigned count;
  bool is_transposed, stores;
};

// The first eight lanes for each matrix have a row. The last lane to arrive moves the elements.
template <int kCount>
ATTENTION_EMULATOR_INLINE void load(unsigned (&x)[kCount], const void* row, bool is_transposed,
                                    const Site& site) {
  MatrixAccess load{{}, x, kCount, is_transposed, false};
  if (this_fiber().thread % 32 < 8 * kCount) {
    check_row(row, site);
    load.row = *static_cast<const MatrixRow*>(row);
  }
  meet({nullptr, 0, is_transposed, {&load}}, site, move_elements);
}
template <int kCount>
ATTENTION_EMULATOR_INLINE void store(void* row, const unsigned (&x)[kCount], bool is_transposed,
                                     const Site& site) {
  MatrixAccess store{{}, const_cast<unsigned*>(x), kCount, is_transposed, true};
  const bool has_row = this_fiber().thread % 32 < 8 * kCount;
  if (has_row) check_row(row, site);
  meet({nullptr, kCount, is_transposed, {&store}}, site, move_elements);
  if (has_row) *static_cast<MatrixRow*>(row) = store.row;
}
ATTENTION_EMULATOR_INLINE void load_matrices(unsigned (&x)[4], const void* row,
                                             ATTENTION_EMULATOR_SITE) {
  load(x, row, false, {"load_matrices", file, line});
}
ATTENTION_EMULATOR_INLINE void load_matrices_transposed(unsigned (&x)[4], const void* row,
                                                        ATTENTION_EMULATOR_SITE) {
  load(x, row, true, {"load_matrices_transposed", file, line});
}

using emulator::allow_next;
using emulator::wait_for_previous;

}  // namespace attention::ptx

#pragma GCC visibility pop
