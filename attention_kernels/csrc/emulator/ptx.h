// The emulator's versions of ptx.cuh's functions.
//
// A copy arrives when a thread waits for the copy's barrier, and not before: until then the
// destination holds poison.

#pragma once

#include <utility>

#include "barrier.h"
#include "cluster.h"
#include "cuda_pipeline.h"
#include "mma.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx {

// There is no L2 cache.
using CachePolicy = uint64_t;
inline CachePolicy evict_first() { return 0; }

__attribute__((noinline)) inline void copy_bulk(void* to, const void* from, unsigned bytes,
                                                Barrier* barrier, CachePolicy = 0,
                                                ATTENTION_EMULATOR_SITE) {
  load_bytes(to, from, bytes, barrier, __builtin_return_address(0), {"copy_bulk", file, line});
}

ATTENTION_EMULATOR_INLINE void copy_async(void* to, const void* from, CachePolicy,
                                          ATTENTION_EMULATOR_SITE) {
  __pipeline_memcpy_async(to, from, 16, 0, file, line);
}

inline void prefetch(const void*) {}

// Defined in tma.cpp. The second is for what later bulk copies read of global memory.
void proxy_fence();
void global_proxy_fence();

// Defined in registers.cpp.
bool has_registers(unsigned registers, bool raises, const Site& site);

ATTENTION_EMULATOR_INLINE void change_registers(unsigned registers, bool raises, const Site& site) {
  meet({nullptr, registers, raises, {}}, site);
  while (!has_registers(registers, raises, site)) {
    note_idle(nullptr, site);
    yield();
  }
}
template <int kRegisters>
void raise_registers(ATTENTION_EMULATOR_SITE) {
  static_assert(kRegisters >= 24 && kRegisters <= 240 && kRegisters % 8 == 0);
  change_registers(kRegisters, true, {"raise_registers", file, line});
}
template <int kRegisters>
void lower_registers(ATTENTION_EMULATOR_SITE) {
  static_assert(kRegisters >= 24 && kRegisters <= 240 && kRegisters % 8 == 0);
  change_registers(kRegisters, false, {"lower_registers", file, line});
}

// These multiply for a whole warp; defined in tensor_core.cpp.
void multiply_half(const MatrixCalls& calls, const Site& site);
void multiply_bfloat16(const MatrixCalls& calls, const Site& site);
void multiply_tf32(const MatrixCalls& calls, const Site& site);

template <bool kIsBfloat16>
ATTENTION_EMULATOR_INLINE void mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                   ATTENTION_EMULATOR_SITE) {
  meet({nullptr, 0, 0, {sums, a, b, nullptr}}, {"mma", file, line},
       kIsBfloat16 ? multiply_bfloat16 : multiply_half);
}
ATTENTION_EMULATOR_INLINE void mma_tf32(float (&sums)[4], const unsigned (&a)[4],
                                        const unsigned (&b)[2], ATTENTION_EMULATOR_SITE) {
  meet({nullptr, 0, 0, {sums, a, b, nullptr}}, {"mma_tf32", file, line}, multiply_tf32);
}

struct MatrixRow {
  uint16_t elements[8];
};
struct MatrixLoad {
  MatrixRow row;
  unsigned* x;
  unsigned count;
  bool is_transposed;
};

inline void check_row(const void* row, const Site& site) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    fail(site, "a row does not begin at a multiple of 16 bytes", cudaErrorMisalignedAddress);
  check_shared(row, "a row", site);
}

// The first eight lanes for each matrix read a row. The last lane to arrive distributes the elements.
template <int kCount>
ATTENTION_EMULATOR_INLINE void load(unsigned (&x)[kCount], const void* row, bool is_transposed,
                                    const Site& site) {
  MatrixLoad load{{}, x, kCount, is_transposed};
  if (this_fiber().thread % 32 < 8 * kCount) {
    check_row(row, site);
    load.row = *static_cast<const MatrixRow*>(row);
  }
  meet({nullptr, 0, is_transposed, {&load}}, site, [](const MatrixCalls& calls, const Site&) {
    const auto of = [&](unsigned lane) {
      return static_cast<const MatrixLoad*>(calls[lane]->fragments[0]);
    };
    for (unsigned lane = 0; lane < 32; ++lane) {
      for (unsigned i = 0; i < of(0)->count; ++i) {
        unsigned r[2] = {lane / 4, lane / 4}, c[2] = {lane % 4 * 2, lane % 4 * 2 + 1};
        if (of(0)->is_transposed) std::swap(r, c);
        of(lane)->x[i] = of(8 * i + r[0])->row.elements[c[0]] |
                         unsigned{of(8 * i + r[1])->row.elements[c[1]]} << 16;
      }
    }
  });
}

struct MatrixStore {
  const unsigned* x;
  MatrixRow row;
};

// The reverse: the last lane to arrive collects the rows, and each is stored by the lane that has its
// address.
template <int kCount>
ATTENTION_EMULATOR_INLINE void store(void* row, const unsigned (&x)[kCount], bool is_transposed,
                                     const Site& site) {
  const bool has_row = this_fiber().thread % 32 < 8 * kCount;
  if (has_row) check_row(row, site);
  MatrixStore store{x, {}};
  meet({nullptr, kCount, is_transposed, {&store}}, site, [](const MatrixCalls& calls, const Site&) {
    const auto of = [&](unsigned lane) {
      return static_cast<MatrixStore*>(const_cast<void*>(calls[lane]->fragments[0]));
    };
    for (unsigned lane = 0; lane < 8 * calls[0]->leading_dimension; ++lane) {
      for (unsigned i = 0; i < 8; ++i) {
        unsigned r = lane % 8, c = i;
        if (calls[0]->layout != 0) std::swap(r, c);
        of(lane)->row.elements[i] = of(4 * r + c / 2)->x[lane / 8] >> 16 * (c % 2) & 0xffff;
      }
    }
  });
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
