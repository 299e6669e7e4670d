// A warp: which of its lanes can run, and its joint operations (__syncwarp(), shuffles, votes).

#pragma once

#include <cstdint>

#include "fiber.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

enum class WarpOp { kSync, kShuffle, kVote, kMatrix };

// The operation that a lane waits in.
struct WarpWait {
  WarpOp op;
  uint32_t mask;    // participating lanes
  unsigned source;  // lane whose value a shuffle returns
  uint64_t value;
  const Site* site;
};

// Sets of lanes are bit masks.
struct Warp {
  uint32_t exists;   // lanes that have a thread
  uint32_t ready;    // lanes that can run
  uint32_t waiting;  // lanes in a warp-level operation, each described by its `wait`
  uint32_t done;     // lanes that have returned
  WarpWait wait[kWarpSize];
  uint64_t result[kWarpSize];  // of the lane's last operation
  Fiber* fibers[kWarpSize];

  // A lane arrives at an operation. When the last lane of the mask has arrived, each lane's result
  // is set to the value of its source lane or, in a vote, to the set of lanes whose value is not 0.
  // Returns a lane that waits in a different operation, or -1.
  int arrive(unsigned lane, const WarpWait& arriving, uint32_t poison) {
    const uint32_t mask = arriving.mask;
    wait[lane] = arriving;
    ready &= ~(1u << lane);
    waiting |= 1u << lane;
    if ((waiting & mask) != mask) return -1;
    uint64_t ballot = 0;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int other = __builtin_ctz(rest);
      if (wait[other].op != arriving.op || wait[other].mask != mask) return other;
      ballot |= uint64_t{wait[other].value != 0} << other;
    }
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int other = __builtin_ctz(rest);
      const unsigned from = wait[other].source;
      // The value of a lane that does not participate is undefined.
      const uint64_t shuffled =
          mask >> from & 1 ? wait[from].value : poison * uint64_t{0x100000001};
      result[other] = arriving.op == WarpOp::kVote ? ballot : shuffled;
    }
    waiting &= ~mask;
    ready |= mask;
    return -1;
  }
};

}  // namespace attention::emulator

#pragma GCC visibility pop
