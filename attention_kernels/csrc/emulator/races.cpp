// Finds races in shared memory: see races.h.

#include "races.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <string>

#include "report.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

constexpr size_t kCellBytes = 2;
constexpr char kNoFence[] = "without a proxy_fence() after it";

template <typename T>
T* zeros(size_t count) {
  void* const memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

Races::Races(Block& of)
    : block(of),
      cells(zeros<Cell>((kSharedBytes + Library::instance().tls_bytes) / kCellBytes + 1)),
      clocks(zeros<uint32_t>(kMaxThreads * kMaxThreads)) {}

void Knowledge::merge(const Knowledge& other) {
  for (unsigned block = 0; block < kMaxCluster; ++block) {
    const std::vector<uint32_t>& more = other.of[block];
    std::vector<uint32_t>& mine = of[block];
    if (mine.size() < more.size()) mine.resize(more.size());
    for (unsigned thread = 0; thread < more.size(); ++thread)
      mine[thread] = std::max(mine[thread], more[thread]);
  }
}

void Races::begin_block() {
  released.clear();
  others = {};
  begin_interval();
  begun = ordered;
}

void Races::synchronize(unsigned first_thread, uint32_t lanes) {
  // Lanes differ in what they know of other warps only after acquiring a barrier of ptx.h.
  const unsigned first = released.empty() ? first_thread : 0;
  const unsigned end = released.empty() ? first_thread + kWarpSize : block.threads;
  uint32_t all[kMaxThreads] = {};
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const unsigned thread = first_thread + __builtin_ctz(rest);
    for (unsigned of = first; of < end; ++of) all[of] = std::max(all[of], known(thread, of));
    all[thread] = now(thread);
  }
  ++time;
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const unsigned thread = first_thread + __builtin_ctz(rest);
    std::copy(all + first, all + end, &known(thread, first));
    own[thread] = time;
  }
}

void Races::share(unsigned first_thread) {
  const unsigned self = this_fiber().thread;
  for (unsigned thread = first_thread; thread < first_thread + kWarpSize; ++thread)
    known(thread, self) = std::max(known(thread, self), now(self));
  own[self] = ++time;
}

Races::Released& Races::at(const void* barrier) {
  for (Released& one : released)
    if (one.barrier == barrier) return one;
  released.push_back({barrier, std::vector<uint32_t>(kMaxThreads), {}});
  return released.back();
}

void Races::release(const void* barrier) {
  const unsigned self = this_fiber().thread;
  std::vector<uint32_t>& clock = at(barrier).clock;
  for (unsigned of = 0; of < block.threads; ++of) clock[of] = std::max(clock[of], known(self, of));
  clock[self] = now(self);
  own[self] = ++time;
}

void Races::acquire(const void* barrier) {
  const unsigned self = this_fiber().thread;
  const Released& one = at(barrier);
  for (unsigned of = 0; of < block.threads; ++of)
    known(self, of) = std::max(known(self, of), one.clock[of]);
  others.merge(one.others);
}

Knowledge Races::knowledge(unsigned rank) const {
  const unsigned self = this_fiber().thread;
  Knowledge all = others;
  std::vector<uint32_t>& mine = all.of[rank];
  mine.resize(block.threads);
  for (unsigned of = 0; of < block.threads; ++of)
    mine[of] = std::max(ordered, clocks[self * kMaxThreads + of]);
  mine[self] = now(self);
  return all;
}

void Races::release_from_block(const void* barrier, const Knowledge& sender, unsigned rank) {
  Released& one = at(barrier);
  one.others.merge(sender);
  const std::vector<uint32_t>& mine = sender.of[rank];
  for (unsigned of = 0; of < mine.size(); ++of) one.clock[of] = std::max(one.clock[of], mine[of]);
}

uint32_t Races::clock() const { return now(this_fiber().thread); }

bool Races::follows(unsigned thread, uint32_t clock) {
  const unsigned self = this_fiber().thread;
  return thread == self || clock <= ordered || known(self, thread) >= clock;
}

void Races::fence() {
  const unsigned self = this_fiber().thread;
  fences[self] = now(self);
  own[self] = ++time;
}

int Races::unfenced_writer(const void* memory, size_t bytes) {
  const uintptr_t first = place_of(reinterpret_cast<uintptr_t>(memory));
  for (uintptr_t at = first; at < first + bytes && first != ~uintptr_t{0}; at += kCellBytes) {
    const Access& write = cells[at / kCellBytes].write;
    if (write.clock > begun && write.kind != AccessKind::kCopy &&
        fences[write.thread] < write.clock)
      return write.thread;
  }
  return -1;
}

bool Races::conflict(const Access& before, const Access& next) {
  return before.clock > ordered && before.thread != next.thread &&
         (before.bytes & next.bytes) != 0 && known(next.thread, before.thread) < before.clock &&
         (before.kind != AccessKind::kAtomic || next.kind != AccessKind::kAtomic);
}

void Races::note_read(Cell& cell, const Access& read) {
  auto& [last, lane, warp] = cell.reads;
  if (last.clock <= ordered || last.thread / kWarpSize != read.thread / kWarpSize) {
    warp = last;
    lane = {};
  } else if (last.thread != read.thread) {
    lane = last;
  }
  last = read;
}

uintptr_t Races::place_of(uintptr_t address) const {
  const SharedMemory& shared = block.shared;
  uintptr_t first = address - reinterpret_cast<uintptr_t>(shared.dynamic);
  if (first < shared.dynamic_bytes) return first;
  first = address - reinterpret_cast<uintptr_t>(shared.fixed);
  return first < Library::instance().tls_bytes ? first + kSharedBytes : ~uintptr_t{0};
}

void Races::access(const void* memory, size_t bytes, AccessKind kind, const void* code) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const Library& library = Library::instance();
  const uintptr_t first = place_of(address);
  if (first == ~uintptr_t{0}) return;
  const auto thread = static_cast<uint16_t>(this_fiber().thread);
  const auto from = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(code) - library.code);
  Access next{now(thread), from, thread, 0, kind};
  for (uintptr_t at = first; at < first + bytes;) {
    uintptr_t end = at / kCellBytes * kCellBytes + kCellBytes;
    if (end > first + bytes) end = first + bytes;
    Cell& cell = cells[at / kCellBytes];
    next.bytes = ((1u << (end - at)) - 1) << at % kCellBytes;
    if (conflict(cell.write, next)) report(cell.write, next, address + (at - first));
    if (kind == AccessKind::kRead || kind == AccessKind::kFetch) {
      note_read(cell, next);
    } else {
      for (const Access& read : cell.reads) {
        if (conflict(read, next)) report(read, next, address + (at - first));
        if (kind == AccessKind::kCopy && lacks_fence(read))
          report(read, next, address + (at - first), false, kNoFence);
      }
      if (cell.write.clock == next.clock && cell.write.thread == thread)
        next.bytes |= cell.write.bytes;
      cell.write = next;
    }
    at = end;
  }
}

void Races::copy_from_block(const void* memory, size_t bytes, const void* code,
                            const std::vector<uint32_t>& sender, const void* barrier) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const unsigned self = this_fiber().thread;
  const auto from =
      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(code) - Library::instance().code);
  const Access next{now(self), from, static_cast<uint16_t>(self), 3, AccessKind::kCopy};
  const uintptr_t first = place_of(address);
  for (uintptr_t at = first; at < first + bytes; at += kCellBytes) {
    Cell& cell = cells[at / kCellBytes];
    for (const Access& before : {cell.write, cell.reads[0], cell.reads[1], cell.reads[2]}) {
      if (before.clock > begun &&
          (before.thread >= sender.size() || sender[before.thread] < before.clock))
        report(before, next, address + (at - first), /*is_from_block=*/true);
      if (lacks_fence(before))
        report(before, next, address + (at - first), /*is_from_block=*/true, kNoFence);
    }
    cell.write = next;
  }
  release(barrier);
}

void Races::report(const Access& before, const Access& next, uintptr_t address, bool is_from_block,
                   const char* lacking) {
  const auto lane = [](const Access& access) {
    return "lane " + std::to_string(access.thread % kWarpSize) + " of warp " +
           std::to_string(access.thread / kWarpSize);
  };
  const auto is_read = [](const Access& access) {
    return access.kind == AccessKind::kRead || access.kind == AccessKind::kFetch;
  };
  // The return address comes just after the access.
  const auto at = [](const Access& access) {
    return place(Library::instance().code + access.code - 1);
  };
  const bool is_dynamic =
      address - reinterpret_cast<uintptr_t>(block.shared.dynamic) < block.shared.dynamic_bytes;
  const std::string where =
      is_dynamic
          ? describe(block.shared, address)
          : "byte " + std::to_string(address - reinterpret_cast<uintptr_t>(block.shared.fixed)) +
                " of static shared memory";
  const std::string what =
      "race: " + (is_from_block ? "another block" : lane(next)) +
      (is_read(next) ? " reads " : " writes ") + where + at(next) + ", which " + lane(before) +
      (is_read(before) ? " has read" : " has written") + at(before) + ", " + lacking;
  block.record(cudaErrorLaunchFailure, what.c_str());
  block.abandon();
}

}  // namespace attention::emulator

#pragma GCC visibility pop
