// cub::WarpReduce and cub::BlockReduce.
//
// As documented, only the first thread gets the result: the others get bytes of 0xff, a NaN in
// float. Temporary storage may be used again after a barrier.

#pragma once

#include "../cuda/functional"
#include "../cuda_emulator.h"

#pragma GCC visibility push(hidden)

namespace cub {

namespace emulator = attention::emulator;

template <typename T>
T undefined() {
  T value;
  std::memset(static_cast<void*>(&value), 0xff, sizeof(T));
  return value;
}

using Sum = std::plus<>;
using Max = cuda::maximum<>;
using Min = cuda::minimum<>;

template <typename T, int kThreads = 32>
class WarpReduce {
  static_assert(kThreads >= 1 && kThreads <= 32);

 public:
  struct TempStorage {};
  explicit WarpReduce(TempStorage&) {}

  // valid: how many of the first threads take part.
  template <typename Function>
  T Reduce(T value, Function function, int valid = kThreads, ATTENTION_EMULATOR_SITE) {
    const int lane = emulator::this_fiber().thread % 32, rank = lane % kThreads;
    const unsigned mask = (~0u >> (32 - kThreads)) << (lane - rank);
    for (int delta = 1; delta < kThreads; delta *= 2) {
      const T other = emulator::exchange(mask & emulator::this_fiber().block->warp->exists, value,
                                         rank + delta < kThreads ? lane + delta : lane,
                                         {"WarpReduce", file, line});
      if (rank + delta < valid) value = function(value, other);
    }
    return rank == 0 ? value : undefined<T>();
  }
  T Sum(T value, int valid = kThreads, ATTENTION_EMULATOR_SITE) {
    return Reduce(value, cub::Sum(), valid, file, line);
  }
};

enum BlockReduceAlgorithm {
  BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY,
  BLOCK_REDUCE_RAKING,
  BLOCK_REDUCE_WARP_REDUCTIONS,
};

template <typename T, int kX, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int kY = 1,
          int kZ = 1>
class BlockReduce {
  static constexpr int kThreads = kX * kY * kZ, kWarps = (kThreads + 31) / 32;

 public:
  struct TempStorage {
    T of_warp[kWarps];
  };
  explicit BlockReduce(TempStorage& to) : storage(to) {}

  template <typename Function>
  T Reduce(T value, Function function, int valid = kThreads, ATTENTION_EMULATOR_SITE) {
    const int thread = static_cast<int>(emulator::this_fiber().thread);
    typename WarpReduce<T>::TempStorage none;
    value = WarpReduce<T>(none).Reduce(value, function, valid - thread / 32 * 32, file, line);
    if (thread % 32 == 0) storage.of_warp[thread / 32] = value;
    emulator::wait_for_block(false, "BlockReduce", file, line);
    if (thread != 0) return undefined<T>();
    for (int warp = 1; warp * 32 < valid; ++warp) value = function(value, storage.of_warp[warp]);
    return value;
  }
  T Sum(T value, int valid = kThreads, ATTENTION_EMULATOR_SITE) {
    return Reduce(value, cub::Sum(), valid, file, line);
  }

 private:
  TempStorage& storage;
};

}  // namespace cub

#pragma GCC visibility pop
