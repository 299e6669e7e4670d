// Cooperative groups: the block, tiles of a warp, a warp's lanes, the cluster, the grid.
//
// A fiber does not know which lanes are with it in a branch, so coalesced_threads() are all lanes
// of the warp that have not returned: in a branch that some of them do not take, the group waits
// for lanes that never arrive, which is an error.

#pragma once

#include "cluster.h"
#include "cuda/functional"
#include "cuda_pipeline.h"

#pragma GCC visibility push(hidden)

namespace cooperative_groups {

namespace emulator = attention::emulator;

// The lanes of a warp in a mask. kSize: their number if it is a constant, a power of two; else 0.
template <unsigned kSize>
class lanes {
 public:
  explicit lanes(unsigned of) : mask(of) {}
  unsigned size() const { return kSize != 0 ? kSize : __popc(mask); }
  unsigned num_threads() const { return size(); }
  unsigned thread_rank() const { return __popc(mask & ((1u << lane()) - 1)); }
  unsigned meta_group_rank() const { return kSize != 0 ? thread() / kSize : 0; }
  unsigned meta_group_size() const {
    return kSize != 0 ? (emulator::this_fiber().block->threads + kSize - 1) / kSize : 1;
  }
  void sync(ATTENTION_EMULATOR_SITE) const { __syncwarp(mask, file, line); }
  unsigned ballot(int predicate, ATTENTION_EMULATOR_SITE) const {
    return compact(__ballot_sync(mask, predicate, file, line));
  }
  int any(int predicate, ATTENTION_EMULATOR_SITE) const {
    return __any_sync(mask, predicate, file, line);
  }
  int all(int predicate, ATTENTION_EMULATOR_SITE) const {
    return __all_sync(mask, predicate, file, line);
  }
#define ATTENTION_EMULATOR_SHUFFLE(name, source)                     \
  template <typename T>                                              \
  T name(T value, unsigned operand, ATTENTION_EMULATOR_SITE) const { \
    [[maybe_unused]] const unsigned rank = thread_rank();            \
    return from(value, source, {#name, file, line});                 \
  }
  ATTENTION_EMULATOR_SHUFFLE(shfl, operand)
  ATTENTION_EMULATOR_SHUFFLE(shfl_down, rank + operand < size() ? rank + operand : rank)
  ATTENTION_EMULATOR_SHUFFLE(shfl_up, operand <= rank ? rank - operand : rank)
  ATTENTION_EMULATOR_SHUFFLE(shfl_xor, rank ^ operand)
#undef ATTENTION_EMULATOR_SHUFFLE
  // Used by reduce().
  template <typename T, typename Function>
  T reduced(T value, Function function, const emulator::Site& site) const {
    for (unsigned bits = 1; bits < kSize; bits *= 2)
      value = function(value, from(value, thread_rank() ^ bits, site));
    if (kSize != 0) return value;
    T sum = from(value, 0, site);
    for (unsigned rank = 1; rank < size(); ++rank) sum = function(sum, from(value, rank, site));
    return sum;
  }

 private:
  static unsigned thread() { return emulator::this_fiber().thread; }
  static unsigned lane() { return thread() % 32; }
  // Returns the bits of the group's lanes, by rank.
  unsigned compact(unsigned bits) const {
    unsigned result = 0, rank = 0;
    for (unsigned rest = mask; rest != 0; rest &= rest - 1)
      result |= (bits >> __builtin_ctz(rest) & 1) << rank++;
    return result;
  }
  template <typename T>
  T from(T value, unsigned rank, const emulator::Site& site) const {
    unsigned rest = mask;
    for (unsigned i = rank % size(); i > 0; --i) rest &= rest - 1;
    return emulator::exchange(mask, value, __builtin_ctz(rest), site);
  }

  unsigned mask;
};

class thread_block {
 public:
  static void sync(ATTENTION_EMULATOR_SITE) {
    emulator::wait_for_block(false, "thread_block::sync", file, line);
  }
  static unsigned thread_rank() { return emulator::this_fiber().thread; }
  static unsigned size() { return emulator::this_fiber().block->threads; }
  static unsigned num_threads() { return size(); }
  static dim3 group_index() { return blockIdx; }
  static dim3 thread_index() { return threadIdx; }
  static dim3 dim_threads() { return blockDim; }
  static dim3 group_dim() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

// Of a kernel that is launched by launch_at_once().
class grid_group {
 public:
  static void sync(ATTENTION_EMULATOR_SITE) {
    const emulator::Launch& launch = *emulator::this_fiber().block->launch;
    if (!launch.is_at_once && num_blocks() > 1)
      emulator::fail(emulator::Site{"grid_group::sync", file, line},
                     "the kernel's blocks do not all run at once");
    thread_block::sync(file, line);
    if (thread_block::thread_rank() == 0) {
      __threadfence();
      const unsigned blocks = static_cast<unsigned>(num_blocks());
      const unsigned due = (atomicAdd(&launch.grid_arrivals, 1u) / blocks + 1) * blocks;
      const emulator::Site site{"grid_group::sync", file, line};
      while (static_cast<int>(emulator::load_atomic<__ATOMIC_ACQUIRE>(
                                  &launch.grid_arrivals, emulator::Scope::kDevice, site) -
                              due) < 0) {
      }
    }
    thread_block::sync(file, line);
  }
  static uint64_t num_blocks() { return emulator::count_in(gridDim); }
  static uint64_t block_rank() {
    return (uint64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  }
  static uint64_t size() { return num_blocks() * thread_block::size(); }
  static uint64_t num_threads() { return size(); }
  static uint64_t thread_rank() {
    return block_rank() * thread_block::size() + thread_block::thread_rank();
  }
};
inline grid_group this_grid() { return {}; }

class cluster_group {
 public:
  static void sync(ATTENTION_EMULATOR_SITE) {
    barrier_arrive(file, line);
    barrier_wait(file, line);
  }
  static void barrier_arrive(ATTENTION_EMULATOR_SITE) {
    attention::ptx::cluster_arrive(true, file, line);
  }
  static void barrier_wait(ATTENTION_EMULATOR_SITE) { attention::ptx::cluster_wait(file, line); }
  static unsigned block_rank() { return emulator::rank_of(*emulator::this_fiber().block); }
  static unsigned num_blocks() { return emulator::this_fiber().block->launch->blocks_of_cluster(); }
  static dim3 block_index() { return {block_rank()}; }
  static dim3 dim_blocks() { return {num_blocks()}; }
  static unsigned thread_rank() {
    return block_rank() * thread_block::size() + thread_block::thread_rank();
  }
  static unsigned num_threads() { return num_blocks() * thread_block::size(); }
  // Returns the address in another block's shared memory.
  template <typename T>
  static T* map_shared_rank(T* here, unsigned rank, ATTENTION_EMULATOR_SITE) {
    return attention::ptx::address_in(here, rank, {"map_shared_rank", file, line});
  }
};
inline cluster_group this_cluster() { return {}; }

template <unsigned kSize, typename Parent = void>
class thread_block_tile : public lanes<kSize> {
 public:
  static_assert(kSize <= 32 && (kSize & (kSize - 1)) == 0, "tiles of a warp: up to 32 threads");
  explicit thread_block_tile(unsigned mask) : lanes<kSize>(mask) {}
  template <typename Other>
  thread_block_tile(const thread_block_tile<kSize, Other>& tile) : lanes<kSize>(tile) {}
};
using coalesced_group = lanes<0>;

template <unsigned kSize, typename Parent>
thread_block_tile<kSize, Parent> tiled_partition(const Parent&) {
  const unsigned lane = emulator::this_fiber().thread % 32;
  return thread_block_tile<kSize, Parent>((~0u >> (32 - kSize)) << lane / kSize * kSize);
}
inline coalesced_group coalesced_threads() { return coalesced_group(__activemask()); }

template <typename Group>
ATTENTION_EMULATOR_INLINE void sync(const Group& group, ATTENTION_EMULATOR_SITE) {
  group.sync(file, line);
}

// ---- <cooperative_groups/reduce.h> and <cooperative_groups/memcpy_async.h> -----------------------

using std::bit_and, std::bit_or, std::bit_xor, std::plus;
template <typename T>
using less = cuda::minimum<T>;
template <typename T>
using greater = cuda::maximum<T>;

template <typename Group, typename T, typename Function>
T reduce(const Group& group, T value, Function function, ATTENTION_EMULATOR_SITE) {
  return group.reduced(value, function, {"reduce", file, line});
}

template <typename Group>
ATTENTION_EMULATOR_INLINE void memcpy_async(const Group& group, void* to, const void* from,
                                            size_t bytes, ATTENTION_EMULATOR_SITE) {
  emulator::copy_parts(to, from, bytes, group.thread_rank(), group.size(), file, line);
  __pipeline_commit();
}
template <typename Group>
ATTENTION_EMULATOR_INLINE void wait(const Group& group, ATTENTION_EMULATOR_SITE) {
  __pipeline_wait_prior(0);
  group.sync(file, line);
}
template <unsigned kStages, typename Group>
ATTENTION_EMULATOR_INLINE void wait_prior(const Group& group, ATTENTION_EMULATOR_SITE) {
  __pipeline_wait_prior(kStages);
  group.sync(file, line);
}

}  // namespace cooperative_groups

#pragma GCC visibility pop
