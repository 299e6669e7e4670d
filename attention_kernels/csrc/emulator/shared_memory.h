// Shared memory: the dynamic part between pages that nobody may access, and the static arrays.

#pragma once

#include <link.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#include "fiber.h"

extern "C" void* __tls_get_addr(size_t* index);

#pragma GCC visibility push(hidden)

namespace attention::emulator {

#ifdef ATTENTION_EMULATOR_ASAN
constexpr size_t kRedzone = 0;  // the sanitizer's own is better
#else
constexpr size_t kRedzone = 1024;
#endif

// A kernel that miscounts dynamic shared memory is off by whole tiles, so this many bytes around it
// are inaccessible. Like kSharedBytes, the most that a block gets, a multiple of any page size.
constexpr size_t kGuardBytes = 1024 * 1024;
constexpr size_t kSharedBytes = 256 * 1024;

constexpr size_t kSharedAlignment = 128;  // alignment of dynamic shared memory

// The initial content of shared memory: a NaN as float, double, __half and bfloat16.
// ATTENTION_EMULATOR_POISON replaces it by a finite word: if results differ between two such words,
// the kernel read memory that nobody wrote, even if fmaxf() or a comparison swallows a NaN.
constexpr uint32_t kPoison = 0x7ff47ff4;

// Returns memory that is 0 and takes up none before it is used.
template <typename T = unsigned char>
T* reserve(size_t count, int protection = PROT_READ | PROT_WRITE) {
  void* const memory = mmap(nullptr, count * sizeof(T), protection,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

// The location of this library's code and thread-local storage. `__shared__` arrays are static
// thread_local, and nothing else in a version's library is, so they make up that storage. The
// storage of a program (a test's, say) also holds other variables, so it is left alone.
struct Library {
  size_t tls_module = 0;
  size_t tls_bytes = 0;
  size_t storage_bytes = 0;  // the same, with the other variables of a program
  uintptr_t code = 0;
  size_t code_bytes = 0;
  uintptr_t begin = 0;        // of what is loaded
  size_t constant_bytes = 0;  // from there on that no one writes

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
              if (part.p_type == PT_LOAD && library.begin == 0) library.begin = address;
              if ((part.p_type == PT_LOAD && (part.p_flags & PF_W) == 0) ||
                  part.p_type == PT_GNU_RELRO)
                library.constant_bytes = address + part.p_memsz - library.begin;
              if (part.p_type == PT_TLS) library.tls_bytes = library.storage_bytes = part.p_memsz;
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

  // Returns the calling OS thread's copy of the storage, or null.
  unsigned char* storage() const {
    size_t index[] = {tls_module, 0};  // the ABI's tls_index
    return storage_bytes == 0 ? nullptr : static_cast<unsigned char*>(__tls_get_addr(index));
  }
};

// The shared memory of one block at a time.
//
// Dynamic shared memory ends at the end of a page, up to its alignment, so an access past its end
// faults immediately. The bytes before it, and those left over by the alignment, hold poison, which
// is checked when the block has ended.
struct SharedMemory {
  unsigned char* memory = nullptr;  // accessible pages: before, dynamic, remainder
  size_t open_bytes = 0;
  size_t dynamic_bytes = 0;
  unsigned char* dynamic = nullptr;
  unsigned char* fixed = nullptr;    // the static arrays of the calling OS thread
  unsigned char* statics = nullptr;  // the same, and in a program where they are among others
  bool counted = false;

  // Makes room for a launch.
  void open(size_t bytes) {
    if (memory == nullptr)
      memory = reserve(kSharedBytes + 2 * kGuardBytes, PROT_NONE) + kGuardBytes;
    const size_t page = sysconf(_SC_PAGESIZE);
    const size_t aligned = (bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
    const size_t needed = (kRedzone + aligned + page - 1) / page * page;
    if (needed != open_bytes) {
      if (mprotect(memory, needed, PROT_READ | PROT_WRITE) != 0 ||
          mprotect(memory + needed, kSharedBytes - needed, PROT_NONE) != 0) {
        throw std::bad_alloc();
      }
      open_bytes = needed;
    }
    dynamic = memory + needed - aligned;
    dynamic_bytes = bytes;
#ifdef ATTENTION_EMULATOR_ASAN  // reports before the access faults
    __asan_poison_memory_region(memory - kGuardBytes, kSharedBytes + 2 * kGuardBytes);
    __asan_unpoison_memory_region(dynamic, bytes);
#endif
    statics = Library::instance().storage();
    fixed = Library::instance().tls_bytes == 0 ? nullptr : statics;
    counted = false;
  }

  // Returns dynamic shared memory, aligned like this. It moves when the first thread asks for it,
  // before the block uses it.
  unsigned char* align(size_t alignment) {
    const size_t excess = reinterpret_cast<uintptr_t>(dynamic) % alignment;
#ifdef ATTENTION_EMULATOR_ASAN
    __asan_poison_memory_region(dynamic + dynamic_bytes - excess, excess);
    __asan_unpoison_memory_region(dynamic - excess, dynamic_bytes);
#endif
    return dynamic -= excess;
  }

  // Fills shared memory, before a block runs.
  void poison(uint32_t word) {
#ifdef ATTENTION_EMULATOR_ASAN
    fill(dynamic, dynamic_bytes, word);
#else
    fill(memory, open_bytes, word);
#endif
    fill(fixed, Library::instance().tls_bytes, word);
  }

  static void fill(unsigned char* memory, size_t bytes, uint32_t word) {
    const size_t whole = bytes & ~size_t{3};
    for (size_t i = 0; i < whole; i += 4) std::memcpy(memory + i, &word, 4);
    if (whole < bytes) std::memcpy(memory + whole, &word, bytes - whole);
  }

  // Defined in block.cpp, so that a check for races does not see what they read.
  bool has(const void* address) const;
  // Where PTX's addresses of static arrays or of the dynamic part begin. Modulo 1024, which is what
  // swizzles depend on, they equal the memory's own addresses.
  unsigned first_address(bool is_fixed) const;
  unsigned address_of(const void* memory_of_block) const;
  // Returns the byte at such an address, or past the end of dynamic shared memory, or null.
  unsigned char* at_address(unsigned address) const;

  // Returns the byte of another block's shared memory that corresponds to `here`.
  unsigned char* in_other(unsigned char* here, const SharedMemory& other) const {
    const bool is_dynamic = static_cast<size_t>(here - dynamic) < dynamic_bytes;
    return is_dynamic ? other.dynamic + (here - dynamic) : other.statics + (here - statics);
  }

  // Returns whether an address is in or near dynamic shared memory.
  bool is_near(uintptr_t address) const {
    return offset(address, memory) + kGuardBytes < kSharedBytes + 2 * kGuardBytes;
  }

  // Returns the first byte around dynamic shared memory that is no longer poison, or null.
  const unsigned char* overwritten([[maybe_unused]] uint32_t word) const {
#ifndef ATTENTION_EMULATOR_ASAN
    const auto* const expected = reinterpret_cast<const unsigned char*>(&word);
    for (const unsigned char* at = memory; at < memory + open_bytes;) {
      if (*at != expected[(at - memory) % 4]) return at;
      if (++at == dynamic) at += dynamic_bytes;
    }
#endif
    return nullptr;
  }

  // Counts the bytes of static arrays that the first block has written. The arrays of all the
  // library's kernels lie together; those written belong to this kernel.
  size_t count_fixed(uint32_t word) const {
    size_t used = 0;
    for (size_t at = 0; fixed != nullptr && at + 4 <= Library::instance().tls_bytes; at += 4)
      used += std::memcmp(fixed + at, &word, 4) == 0 ? 0 : 4;
    return used;
  }
};

}  // namespace attention::emulator

#pragma GCC visibility pop
