// What the runtime's files share. Only they include this: parsing <string> takes g++ as long as
// most kernels.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <string>
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

// Called after each failed wait. Returns whether the calling thread must report that no thread of
// the block, and of its cluster, can ever go on.
bool never_ends(bool at_barrier);

}  // namespace attention::emulator

namespace attention::ptx {

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

// Sends a copy or an arrival to another block of the cluster.
void send(unsigned block, const BulkCopy& copy);
}  // namespace attention::ptx

#pragma GCC visibility pop
