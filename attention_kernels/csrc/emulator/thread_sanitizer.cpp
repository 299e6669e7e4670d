// Looks for races in a version file that is compiled with -fsanitize=thread; other files do not
// call this. See races.h.

#include "block.h"

#define ON_ACCESS(address, bytes, kind)                                                  \
  attention::emulator::check_race(address, bytes, attention::emulator::AccessKind::kind, \
                                  __builtin_return_address(0))

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// Called at each access, also the host's, which are ignored.
inline void check_race(const void* address, size_t bytes, AccessKind kind, const void* code) {
  Block* const block = this_block();
  if (block == nullptr) return;
  if (block->races == nullptr) block->races = new Races(*block);
  block->races->access(address, bytes, kind, code);
}

}  // namespace attention::emulator

extern "C" {
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}

#pragma GCC visibility pop

#include "thread_sanitizer.h"
