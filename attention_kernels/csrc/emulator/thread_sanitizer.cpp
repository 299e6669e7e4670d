// Looks for races in a version file that is compiled with -fsanitize=thread and
// ATTENTION_EMULATOR_RACES; without the latter, only lets others run where a volatile is polled. Other
// files do not call this. See races.h.

#include "block.h"

#define ON_ACCESS(address, bytes, kind) \
  check_race(address, bytes, AccessKind::kind, __builtin_return_address(0))
#define ON_ATOMIC(address, bytes, kind, order) \
  const Atomic around(address, bytes, AccessKind::kind, order, __builtin_return_address(0))
#define ON_VOLATILE(address, bytes, kind) ON_ATOMIC(address, bytes, kind, __ATOMIC_RELAXED)
#define END_ATOMIC(changed) around.has_failed = !(changed)

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// Called at each access, also the host's, which are ignored.
inline void check_race(const void* address, size_t bytes, AccessKind kind, const void* code) {
  Block* const block = this_block();
  if (block == nullptr || block->races == nullptr) return;
  block->access = reinterpret_cast<uintptr_t>(code);
  const bool is_global = block->races->access(address, bytes, kind, code);
  block->access = 0;
  if (is_global) block->races->delay();
}

// A load of a volatile, or an atomic one, may be repeated until the value changes. Others run
// first.
inline void check_poll(const void* address, size_t bytes, AccessKind kind, const void* code) {
  Block* const block = this_block();
  if (block == nullptr) return;
  if (block->races != nullptr) block->races->delay();
  if (kind == AccessKind::kStore) block->in_flight.progress();
  if (kind != AccessKind::kLoad) return;
  uint64_t value = 0;
  block->access = reinterpret_cast<uintptr_t>(code);
  std::memcpy(&value, address, std::min(bytes, sizeof value));
  block->access = 0;
  note_poll(address, value, {nullptr, nullptr, 0}, code);
}

// Surrounds an atomic operation.
struct Atomic {
  Races* const races = this_block() == nullptr ? nullptr : this_block()->races;
  const void* const address;
  const AccessKind kind;
  const int order;
  mutable bool has_failed = false;

  Atomic(const void* at, size_t bytes, AccessKind access_kind, int memory_order, const void* code)
      : address(at), kind(access_kind), order(memory_order) {
    check_poll(at, bytes, kind, code);
    if (races != nullptr) races->begin_atomic(at, bytes, kind, code);
  }
  ~Atomic() {
    if (races != nullptr) races->end_atomic(address, kind, order, has_failed);
  }
  Atomic(const Atomic&) = delete;
};

}  // namespace attention::emulator

extern "C" {
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}

#pragma GCC visibility pop

#include "thread_sanitizer.h"
