// setmaxnreg: warps give registers to others of their block. See ptx.h.

#include <algorithm>
#include <string>

#include "ptx.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx {

constexpr unsigned kRegistersOfMultiprocessor = 65536, kMostRegisters = 248;

// Called after the warp has met: returns whether it has got its registers. A block begins with as
// many as fit if it is alone on its multiprocessor.
bool has_registers(unsigned registers, bool raises, const Site& site) {
  const Fiber& self = this_fiber();
  Block& block = *self.block;
  InFlight& in_flight = block.in_flight;
  if (in_flight.registers.empty()) {
    const unsigned threads = block.warp_count * kWarpSize;
    in_flight.registers.assign(
        block.warp_count, std::min(kMostRegisters, kRegistersOfMultiprocessor / threads / 8 * 8));
    in_flight.free_registers = 0;
  }
  unsigned& mine = in_flight.registers[self.thread / kWarpSize];
  if (mine == registers) return true;
  if (raises != (registers > mine)) {
    fail(site, "the warp has " + std::to_string(mine) + " registers per thread");
  }
  if (raises && (registers - mine) * kWarpSize > in_flight.free_registers) return false;
  in_flight.free_registers += (mine - registers) * kWarpSize;  // modulo 2^32
  mine = registers;
  in_flight.progress();
  return true;
}

}  // namespace attention::ptx

#pragma GCC visibility pop
