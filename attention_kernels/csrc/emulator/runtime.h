// What the runtime's files share, also with the binding and the recorders. Kernels do not include
// this: parsing <string> takes g++ as long as most kernels.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tma.h"
#include "wgmma.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// "v07.cu:31", and ", in code at +0x1f of v07.so", from which the ladder finds the source line
std::string place(const char* file, int line);
std::string place(uintptr_t code);

inline std::string hexadecimal(size_t number) {
  char buffer[24];
  std::snprintf(buffer, sizeof buffer, "0x%zx", number);
  return buffer;
}

// "byte 256 of 256 bytes of dynamic shared memory", "byte 8 of static shared memory"
std::string describe(const SharedMemory& shared, const void* address);

// "__syncthreads() at v07.cu:31", "(0, 0, 1)", "12", or a text as it is
inline std::string text(const Site& site) {
  return site.name + ("() at " + place(site.file, site.line));
}
inline std::string text(uint3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}
inline std::string text(dim3 v) { return text(uint3(v)); }
inline std::string text(const std::string& words) { return words; }
template <typename Number>
std::enable_if_t<std::is_integral_v<Number>, std::string> text(Number number) {
  return std::to_string(number);
}

// Returns a sentence in which the values stand for each {}.
template <typename... Values>
std::string format(std::string sentence, const Values&... values) {
  (sentence.replace(sentence.find("{}"), 2, text(values)), ...);
  return sentence;
}

[[noreturn]] inline void fail(cudaError_t code, const std::string& what) {
  fail(code, what.c_str());
}
[[noreturn]] inline void fail(const Site& site, const std::string& what,
                              cudaError_t code = cudaErrorLaunchFailure) {
  fail(code, format("{}: {}", site, what));
}

template <typename T, typename Predicate>
void erase_if(std::vector<T>& all, Predicate is_due) {
  all.erase(std::remove_if(all.begin(), all.end(), is_due), all.end());
}

// Says where the threads of a block wait that cannot run: "; 128 of 256 threads have arrived in
// ...".
std::string waiting_threads(const Block& block);

// Returns a complaint if a thread ends before what it has begun, or "".
std::string left_by(const InFlight& in_flight, unsigned thread, bool is_last);

// What one block sends to another: a copy into its shared memory or, of 0 bytes, an arrival at one
// of its barriers.
struct Message : BulkCopy {
  Knowledge knowledge;  // of the sending thread
};

struct Cluster {
  std::atomic<uint64_t> arrived{0};  // threads at the cluster's barrier since the launch began
  std::atomic<Block*> blocks[kMaxCluster]{};  // those that are running
  std::atomic<bool> failed{false};            // whether one of the blocks failed
  std::atomic<uint64_t> events{0};            // messages, and blocks that began or ended

  // Of what follows, and of changes to the above. No thread may fail before it unlocks it: its
  // frames would be discarded.
  std::mutex mutex;
  bool ended[kMaxCluster]{};
  std::vector<Message> messages[kMaxCluster];
  struct {
    unsigned arrival = 0;                     // of each thread, counted from 1
    Knowledge knowledge;                      // of the threads that have arrived
  } barriers[2];                              // an odd and an even one
  std::deque<std::array<unsigned, 4>> words;  // that have been sent
  struct {
    uint64_t events;  // when all of the block's threads had waited in vain, plus 1
    bool at_barrier;  // whether one waits for a barrier in shared memory
  } stuck[kMaxCluster]{};

  void begin(Block& block) {
    const std::lock_guard<std::mutex> lock(mutex);
    blocks[rank_of(block)] = &block;
    ++events;
  }
  // Returns the call that began a copy to the block which has not arrived, or null.
  const Site* end(const Block& block) {
    const std::lock_guard<std::mutex> lock(mutex);
    const unsigned rank = rank_of(block);
    blocks[rank] = nullptr;
    ended[rank] = true;
    if (block.error != cudaSuccess) failed = true;
    ++events;
    for (const Message& message : messages[rank])
      if (message.bytes > 0) return &message.site;
    return nullptr;
  }
};

// All blocks of this library.
struct Blocks {
  std::mutex mutex;
  std::atomic<Block*> first{nullptr};  // only ever grows: the signal handlers walk it

  static Blocks& instance() {
    static Blocks* const blocks = new Blocks;  // never destroyed: threads may outlive statics
    return *blocks;
  }

  Block* acquire() {
    const std::lock_guard<std::mutex> lock(mutex);
    for (Block* block = first; block != nullptr; block = block->next_of_all) {
      if (!std::exchange(block->in_use, true)) return block;
    }
    auto* const block = new Block;
    block->in_use = true;
    block->next_of_all = first;
    first = block;
    return block;
  }

  void release(Block* block) {
    const std::lock_guard<std::mutex> lock(mutex);
    block->in_use = false;
  }

  // Returns the block whose fiber has this stack pointer, or null.
  Block* of(uintptr_t stack_pointer) const {
    Block* block = first;
    while (block != nullptr && !block->owns(stack_pointer)) block = block->next_of_all;
    return block;
  }
};

// Returns the block that the calling CUDA thread belongs to, or null in host code.
inline Block* this_block() {
  return Blocks::instance().of(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)));
}

// Returns a variable of the environment, or null if it is not set or empty.
const char* setting(const char* name);
// Returns a complaint about a setting of the environment, or "".
std::string wrong_setting();

// Returns the error of the calling thread's last launch, or an empty string.
std::string last_error();

// The most launches that may overlap.
inline size_t most_overlapping = 4;

// Called after each failed wait. Returns whether the calling thread must report that no thread of
// the block, and of its cluster, can ever go on.
bool never_ends(bool at_barrier);

}  // namespace attention::emulator

namespace attention::ptx {

constexpr unsigned kDepth = 16;  // of a product
constexpr unsigned kRows = 16;   // of a warp

// Reads what other blocks of the cluster have sent. Defined in cluster.cpp.
void receive_messages();

// Shows bytes of shared memory to asynchronous copies and products, which do not see what threads
// write. Defined in tma.cpp, like the next ones.
void show(const void* from, size_t bytes);
// begin_copy() begins a copy of the calling thread; add_copy() one that may also
// be another block's, if nothing in flight uses its destination; fill_tile() copies a box.
void begin_copy(const BulkCopy& copy);
void add_copy(const BulkCopy& copy);
void fill_tile(const BulkCopy& copy);
// Returns the box of contiguous bytes.
Box line_of(const void* memory, size_t bytes);

inline size_t box_bytes(const TensorMap& map) {
  return std::accumulate(map.box, map.box + 5, size_t(map.element_bytes), std::multiplies<>());
}

// Calls row(offset in the tile, address in the tensor, bytes within bounds) for each row of a box.
template <typename Row>
void for_each_row(const Box& box, Row row) {
  const auto& [map, at] = box;
  const int width = map.box[0] * map.element_bytes;
  const int64_t first = std::clamp<int64_t>(at[0], 0, map.sizes[0]);
  const int64_t end = std::clamp<int64_t>(int64_t{at[0]} + map.box[0], first, map.sizes[0]);
  for (size_t offset = 0; offset < box_bytes(map); offset += width) {
    bool inside = true;
    int64_t address = first * map.element_bytes;
    size_t rest = offset / width;
    for (int d = 1; d < 5; rest /= map.box[d++]) {
      const auto where = static_cast<int64_t>(rest % map.box[d]) + at[d];
      inside &= where >= 0 && where < map.sizes[d];
      address += where * map.strides[d];
    }
    row(offset, map.tensor + (inside ? address : 0), size_t(first - at[0]) * map.element_bytes,
        inside ? size_t(end - first) * map.element_bytes : 0);
  }
}

// Sends a copy or an arrival to another block of the cluster.
void send(unsigned block, const BulkCopy& copy);
}  // namespace attention::ptx

#pragma GCC visibility pop
