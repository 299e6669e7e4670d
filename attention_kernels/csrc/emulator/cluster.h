// The functions of ptx.cuh for barriers, in shared memory and with a number, and for clusters:
// blocks that run at the same time and reach each other's shared memory. Each has an OS thread of
// its own.
//
// A copy or an arrival from another block is a message. A block reads its messages when one of its
// threads waits for a barrier or begins a copy or a product.
//
// Errors, reported with the caller's line: a barrier that was not initialized, a copy that may not
// see that it was, an arrival too many, a named barrier whose threads disagree on their number, a
// block of the cluster that has not begun or has ended, a copy that another block did not expect
// yet, and a wait that can never end, because all threads or all blocks of the cluster wait.

#pragma once

#include "cuda_emulator.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// Returns the number of a block in its cluster.
inline unsigned rank_of(const Block& block) {
  return block.number % block.launch->blocks_of_cluster();
}

}  // namespace attention::emulator

namespace attention::ptx {

using namespace emulator;

// 64 bits, like an mbarrier in shared memory.
struct Barrier {
  unsigned short expected, left;  // arrivals of a phase
  int bytes : 31;                 // in flight that the phase waits for
  unsigned phase : 1;
};
static_assert(sizeof(Barrier) == 8);

// Defined in barrier.cpp, without what the kernel's recorders would see.
void barrier_init(Barrier* barrier, unsigned arrivals, ATTENTION_EMULATOR_SITE);
void barrier_init_fence();
unsigned phase_of(const Barrier* barrier);
// An arrival that completes a phase lets a waiting thread continue before it returns. So a slot
// that is given back too early is overwritten before products read it.
void barrier_arrive(Barrier* barrier, ATTENTION_EMULATOR_SITE);
void barrier_expect(Barrier* barrier, unsigned bytes, ATTENTION_EMULATOR_SITE);
// Makes the phase also wait for `bytes` bytes of copies.
void barrier_add(Barrier* barrier, unsigned bytes, ATTENTION_EMULATOR_SITE);
bool barrier_test(Barrier* barrier, unsigned parity, ATTENTION_EMULATOR_SITE);
void barrier_wait(Barrier* barrier, unsigned parity, ATTENTION_EMULATOR_SITE);
void named_barrier_sync(int barrier, int threads, ATTENTION_EMULATOR_SITE);
void named_barrier_arrive(int barrier, int threads, ATTENTION_EMULATOR_SITE);

// Defined in cluster.cpp. Each thread must alternate between arriving and waiting.
// releases: what the thread did comes before what others do after it, else only what it has fenced.
void cluster_arrive(bool releases = true, ATTENTION_EMULATOR_SITE);
void cluster_wait(ATTENTION_EMULATOR_SITE);
// Returns the byte of another block's shared memory that corresponds to `here`.
unsigned char* block_memory(unsigned char* here, unsigned block, const Site& site);
template <typename T>
ATTENTION_EMULATOR_INLINE T* address_in(T* here, unsigned block, const Site& site) {
  if (block == rank_of(*this_fiber().block)) return here;
  auto* const byte = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(here));
  return reinterpret_cast<T*>(block_memory(byte, block, site));
}
template <typename T>
ATTENTION_EMULATOR_INLINE T* in_block(T* here, unsigned block, ATTENTION_EMULATOR_SITE) {
  return address_in(here, block, {"in_block", file, line});
}
void store_to_block(float* here, unsigned block, float value, ATTENTION_EMULATOR_SITE);
void barrier_arrive_at_block(Barrier* here, unsigned block, ATTENTION_EMULATOR_SITE);
void send_bytes(void* here, unsigned block, const unsigned* words, unsigned bytes, Barrier* barrier,
                const char* file, int line);
template <int kWords>
ATTENTION_EMULATOR_INLINE void send_words(void* here, unsigned block,
                                          const unsigned (&words)[kWords], Barrier* barrier,
                                          ATTENTION_EMULATOR_SITE) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  send_bytes(here, block, words, sizeof(words), barrier, file, line);
}

// Words that blocks exchange through global memory; see ptx.cuh.
template <typename Word>
ATTENTION_EMULATOR_INLINE void store_word(Word* to, Word word) {
  __atomic_store_n(to, word, __ATOMIC_RELAXED);
}
template <typename Word>
ATTENTION_EMULATOR_INLINE Word load_word(const Word* from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline void poll_again(ATTENTION_EMULATOR_SITE) {
  note_poll(nullptr, 0, {"poll_again", file, line});
}
template <typename T>
T kept(T x) {
  return x;
}

}  // namespace attention::ptx

#pragma GCC visibility pop
