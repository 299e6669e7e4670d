// The functions that a file compiled with -fsanitize=thread calls at each load and store, in place
// of ThreadSanitizer's library. The including file defines ON_ACCESS(address, bytes, kind), the
// same for volatiles, ON_ATOMIC(address, bytes, kind, order), which is called before an atomic
// operation, and END_ATOMIC(changed), after an atomic function.

#pragma once

#include "races.h"

#pragma GCC visibility push(hidden)

#define PLAIN(bytes)                                                                    \
  void __tsan_read##bytes(void* p) { ON_ACCESS(p, bytes, kRead); }                      \
  void __tsan_write##bytes(void* p) { ON_ACCESS(p, bytes, kWrite); }                    \
  void __tsan_unaligned_read##bytes(void* p) { ON_ACCESS(p, bytes, kRead); }            \
  void __tsan_unaligned_write##bytes(void* p) { ON_ACCESS(p, bytes, kWrite); }          \
  void __tsan_volatile_read##bytes(void* p) { ON_VOLATILE(p, bytes, kLoad); }           \
  void __tsan_volatile_write##bytes(void* p) { ON_VOLATILE(p, bytes, kStore); }         \
  void __tsan_unaligned_volatile_read##bytes(void* p) { ON_VOLATILE(p, bytes, kLoad); } \
  void __tsan_unaligned_volatile_write##bytes(void* p) { ON_VOLATILE(p, bytes, kStore); }
#define OPERATION(bits, result, name, kind, function)                                   \
  result __tsan_atomic##bits##_##name(uint##bits##_t* p, uint##bits##_t x, int order) { \
    ON_ATOMIC(p, bits / 8, kind, order);                                                \
    return function(p, x, __ATOMIC_SEQ_CST);                                            \
  }
// All of a kernel's atomic functions begin with a load in order "consume", which belongs to the
// last of these.
#define ATOMIC(bits)                                                                              \
  uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t* p, int order) {                 \
    if (order == __ATOMIC_CONSUME) return __atomic_load_n(p, __ATOMIC_SEQ_CST);                   \
    ON_ATOMIC(p, bits / 8, kLoad, order);                                                         \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                               \
  OPERATION(bits, void, store, kStore, __atomic_store_n)                                          \
  OPERATION(bits, uint##bits##_t, fetch_add, kAtomic, __atomic_fetch_add)                         \
  OPERATION(bits, uint##bits##_t, fetch_sub, kAtomic, __atomic_fetch_sub)                         \
  OPERATION(bits, uint##bits##_t, fetch_and, kAtomic, __atomic_fetch_and)                         \
  OPERATION(bits, uint##bits##_t, fetch_or, kAtomic, __atomic_fetch_or)                           \
  OPERATION(bits, uint##bits##_t, fetch_xor, kAtomic, __atomic_fetch_xor)                         \
  OPERATION(bits, uint##bits##_t, exchange, kAtomic, __atomic_exchange_n)                         \
  bool __tsan_atomic##bits##_compare_exchange_strong(uint##bits##_t* p, uint##bits##_t* expected, \
                                                     uint##bits##_t x, int order, int) {          \
    ON_ATOMIC(p, bits / 8, kAtomic, order);                                                       \
    const bool changes = *expected != x;                                                          \
    const bool done =                                                                             \
        __atomic_compare_exchange_n(p, expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);   \
    END_ATOMIC(done && changes);                                                                  \
    return done;                                                                                  \
  }

namespace attention::emulator {
extern "C" {
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
ATOMIC(8)
ATOMIC(16)
ATOMIC(32)
ATOMIC(64)
void __tsan_read_range(void* p, size_t bytes) { ON_ACCESS(p, bytes, kRead); }
void __tsan_write_range(void* p, size_t bytes) { ON_ACCESS(p, bytes, kWrite); }
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_vptr_update(void**, void*) {}
}
}  // namespace attention::emulator

#undef ATOMIC
#undef OPERATION
#undef PLAIN

#pragma GCC visibility pop
