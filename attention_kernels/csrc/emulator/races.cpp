// Finds races in shared memory: see races.h.

#include "races.h"

#include <algorithm>
#include <string>
#include <utility>

#include "report.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

constexpr char kNoFence[] = "without a proxy_fence() after it";

Races::Races(Block& of)
    : block(of),
      cells(zeros<Cell>((kSharedBytes + Library::instance().tls_bytes) / kCellBytes + 1)),
      clocks(zeros<uint32_t>(kMaxThreads * kMaxThreads)) {}

void Races::begin_block() {
  const LaunchOrder& order = *block.launch->in_stream;
  released.clear();
  floor = unfenced = {};
  // If that is not known yet, what precedes the call may still run.
  floor.complete = order.begins_after != 0 ? order.begins_after : order.before_call - 1;
  of_thread.assign(block.threads, {});
  has_news = has_allowed = false;
  has_fenced_since.clear();
  for (Knowledge& one : at_fences) one = {};
  random = (block.number + 1) * 0x9e3779b97f4a7c15u + block.launch->seed;
  begin_interval();
  begun = ordered;
}

void Races::end_block() {
  allow_next();
  if (block.launch->cluster < 2) return;
  // Another block gets it.
  forget(block.shared.dynamic, block.shared.dynamic_bytes);
  forget(block.shared.fixed, Library::instance().tls_bytes);
}

void Races::synchronize(unsigned first_thread, uint32_t lanes) {
  // Lanes differ in what they know of other warps only after acquiring a barrier of ptx.h.
  const unsigned first = released.empty() ? first_thread : 0;
  const unsigned end = released.empty() ? first_thread + kWarpSize : block.threads;
  uint32_t all[kMaxThreads] = {};
  Knowledge news;
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const unsigned thread = first_thread + __builtin_ctz(rest);
    if (has_news) news.merge(of_thread[thread].news);
    for (unsigned of = first; of < end; ++of) all[of] = std::max(all[of], known(thread, of));
    all[thread] = now(thread);
  }
  ++time;
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const unsigned thread = first_thread + __builtin_ctz(rest);
    std::copy(all + first, all + end, &known(thread, first));
    own[thread] = time;
    if (has_news) of_thread[thread].news = news;
  }
}

void Races::share(unsigned first_thread) {
  const unsigned self = this_fiber().thread;
  for (unsigned thread = first_thread; thread < first_thread + kWarpSize; ++thread)
    known(thread, self) = std::max(known(thread, self), now(self));
  for (unsigned lane = 0; lane < kWarpSize && has_news; ++lane)
    if (first_thread + lane < block.threads)
      of_thread[first_thread + lane].news.merge(of_thread[self].news);
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
  at(barrier).others.merge(of_thread[self].news);
  for (unsigned of = 0; of < block.threads; ++of) clock[of] = std::max(clock[of], known(self, of));
  clock[self] = now(self);
  own[self] = ++time;
}

void Races::acquire(const void* barrier) {
  const unsigned self = this_fiber().thread;
  const Released& one = at(barrier);
  for (unsigned of = 0; of < block.threads; ++of)
    known(self, of) = std::max(known(self, of), one.clock[of]);
  learn(one.others);
}

void Races::release_from_block(const void* barrier, const Knowledge& sender) {
  at(barrier).others.merge(sender);
}

uint32_t Races::clock() const { return now(this_fiber().thread); }

bool Races::follows(unsigned thread, uint32_t clock) {
  const unsigned self = this_fiber().thread;
  return thread == self || clock <= ordered || known(self, thread) >= clock;
}

void Races::proxy_fence() {
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
         !(is_strong(before.kind) && is_strong(next.kind) &&
           // A volatile does not order lanes of a warp.
           (before.kind == AccessKind::kAtomic || next.kind == AccessKind::kAtomic ||
            before.thread / kWarpSize != next.thread / kWarpSize));
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

// Whether an address is of memory that other blocks may access and change: not of a thread's stack, of
// a constant, nor what describes the launch.
bool Races::is_global(uintptr_t address) const {
  const auto is_of = [&](const void* object, size_t bytes) {
    return address - reinterpret_cast<uintptr_t>(object) < bytes;
  };
  const Library& library = Library::instance();
  return !block.owns(address) && address - library.begin >= library.constant_bytes &&
         !is_of(&block, sizeof block) && !is_of(block.launch, sizeof *block.launch) &&
         !is_of(block.launch->arguments, block.launch->argument_bytes);
}

void Races::delay() {
  if (std::exchange(lets_others_run, false)) let_other_blocks_run(block, /*waits=*/false);
  if (block.launch->order != Launch::kShuffle || draw() % 64 != 0) return;
  Fiber& self = this_fiber();
  Fiber* const to = block.yield();
  if (to != &self) switch_context(self, *to);
}

bool Races::access(const void* memory, size_t bytes, AccessKind kind, const void* code) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const Library& library = Library::instance();
  const uintptr_t first = place_of(address);
  const auto thread = static_cast<uint16_t>(this_fiber().thread);
  const auto from = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(code) - library.code);
  const bool is_shared = first != ~uintptr_t{0};
  if (!is_shared) {
    if (!is_global(address)) return false;
    access_global(address, bytes, kind,
                  is_strong(kind) ? of_thread[thread].next_scope : Scope::kDevice, from);
    return true;
  }
  Access next{now(thread), from, thread, 0, kind};
  for (uintptr_t at = first; at < first + bytes;) {
    uintptr_t end = at / kCellBytes * kCellBytes + kCellBytes;
    if (end > first + bytes) end = first + bytes;
    Cell& cell = cells[at / kCellBytes];
    next.bytes = ((1u << (end - at)) - 1) << at % kCellBytes;
    if (conflict(cell.write, next)) report(cell.write, next, address + (at - first));
    if (is_read(kind)) {
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
  if (block.launch->cluster > 1 && kind != AccessKind::kCopy && kind != AccessKind::kFetch)
    access_global(address, bytes, kind, Scope::kDevice, from);  // other blocks may access it
  return false;
}

void Races::copy_from_block(const void* memory, size_t bytes, const void* code,
                            const Knowledge& sender, const void* barrier) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const unsigned self = this_fiber().thread;
  const auto number = static_cast<uint32_t>(block.number);
  const auto from =
      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(code) - Library::instance().code);
  const Access next{now(self), from, static_cast<uint16_t>(self), 3, AccessKind::kCopy};
  const uintptr_t first = place_of(address);
  for (uintptr_t at = first; at < first + bytes; at += kCellBytes) {
    Cell& cell = cells[at / kCellBytes];
    for (const Access& before : {cell.write, cell.reads[0], cell.reads[1], cell.reads[2]}) {
      if (before.clock > begun && !sender.has(number, before.thread, before.clock))
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
      (is_read(next.kind) ? " reads " : " writes ") + where + at(next) + ", which " + lane(before) +
      (is_read(before.kind) ? " has read" : " has written") + at(before) + ", " + lacking;
  block.record(cudaErrorLaunchFailure, what.c_str());
  block.abandon();
}

}  // namespace attention::emulator

#pragma GCC visibility pop
