// Clusters: the functions of ptx.cuh for blocks that run at the same time and reach each other's
// shared memory. Each block has an OS thread of its own.
//
// A copy or an arrival from another block is a message. A block reads its messages when one of its
// threads waits for a barrier or begins a copy or a product. Errors, reported with the caller's
// line: a block that has not begun or has ended, a copy that another block did not expect yet, and a
// wait that can never end because all blocks of the cluster wait.

#pragma once

#include <pthread.h>

#include <array>
#include <deque>
#include <vector>

#include "barrier.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// What one block sends to another: a copy into its shared memory or, of 0 bytes, an arrival at one
// of its barriers.
struct Message {
  BulkCopy copy;
  const void* code;     // the call's return address
  Knowledge knowledge;  // of the sending thread
};

struct Cluster {
  uint64_t arrived = 0;          // threads at the cluster's barrier since the launch began
  Block* blocks[kMaxCluster]{};  // those that are running
  bool failed = false;           // whether one of the blocks failed
  uint64_t events = 0;           // messages, and blocks that began or ended

  pthread_mutex_t mutex =
      PTHREAD_MUTEX_INITIALIZER;  // of what follows, and of changes to the above
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

  void begin(Block& block);
  // Returns the call that began a copy to the block which has not arrived, or null.
  const Site* end(const Block& block);
  // Returns false if the block is not running.
  bool send(unsigned block, const Message& message);
};

// Returns the number of a block in its cluster.
unsigned rank_of(const Block& block);

// Called after each failed wait. Returns whether the calling thread must report that no thread of
// the block, and of its cluster, can ever go on.
bool never_ends(bool at_barrier);

}  // namespace attention::emulator

namespace attention::ptx {

// Defined in cluster.cpp.
// releases: what the thread did comes before what others do after it, else only what it has fenced.
void arrive_at_cluster(bool releases, const Site& site);
uint64_t begin_cluster_wait(const Site& site);
bool has_cluster_arrived(uint64_t due, const Site& site);
unsigned char* block_memory(unsigned char* here, unsigned block, const Site& site);
void store_float_to_block(float* here, unsigned block, float value, const void* code,
                          const Site& site);
void send(unsigned block, const BulkCopy& copy, const void* code);
void arrive_at_block(Barrier* here, unsigned block, const Site& site);
void send_bytes(void* here, unsigned block, const unsigned* words, unsigned bytes, Barrier* barrier,
                const void* code, const Site& site);

// Words that blocks exchange through global memory; see ptx.cuh.
ATTENTION_EMULATOR_INLINE void store_word(unsigned long long* to, unsigned long long word) {
  __atomic_store_n(to, word, __ATOMIC_RELAXED);
}
ATTENTION_EMULATOR_INLINE unsigned long long load_word(const unsigned long long* from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline void poll_again(ATTENTION_EMULATOR_SITE) {
  note_poll(nullptr, 0, {"poll_again", file, line});
}

// Each thread must alternate between arriving and waiting.
inline void cluster_arrive(ATTENTION_EMULATOR_SITE) {
  arrive_at_cluster(true, {"cluster_arrive", file, line});
}
ATTENTION_EMULATOR_INLINE void cluster_wait(ATTENTION_EMULATOR_SITE) {
  const Site site{"cluster_wait", file, line};
  const uint64_t due = begin_cluster_wait(site);
  while (!has_cluster_arrived(due, site)) yield();
}
__attribute__((noinline)) inline void store_to_block(float* here, unsigned block, float value,
                                                     ATTENTION_EMULATOR_SITE) {
  store_float_to_block(here, block, value, __builtin_return_address(0),
                       {"store_to_block", file, line});
}
template <int kWords>
__attribute__((noinline)) void send_words(void* here, unsigned block,
                                          const unsigned (&words)[kWords], Barrier* barrier,
                                          ATTENTION_EMULATOR_SITE) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  send_bytes(here, block, words, sizeof(words), barrier, __builtin_return_address(0),
             {"send_words", file, line});
}
inline void barrier_arrive_at_block(Barrier* here, unsigned block, ATTENTION_EMULATOR_SITE) {
  arrive_at_block(here, block, {"barrier_arrive_at_block", file, line});
}

}  // namespace attention::ptx

#pragma GCC visibility pop
