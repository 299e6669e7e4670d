// setmaxnreg: warps give registers to others of their block. See ptx.h.

#include <algorithm>
#include <string>

#include "ptx.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx {

constexpr unsigned kRegistersOfMultiprocessor = 65536, kMostRegisters = 248;

// Called after the warp has met: returns whether it has got its registers. A block begins with as
// many as fit if it is alone on its multiprocessor.
bool has_registers(unsigned registers, bool raises, const emulator::Site& site) {
  const emulator::Fiber& self = emulator::this_fiber();
  emulator::Block& block = *self.block;
  emulator::InFlight& in_flight = block.in_flight;
  if (in_flight.registers.empty()) {
    const unsigned threads = block.warp_count * emulator::kWarpSize;
    in_flight.registers.assign(
        block.warp_count, std::min(kMostRegisters, kRegistersOfMultiprocessor / threads / 8 * 8));
    in_flight.free_registers = 0;
  }
  unsigned& mine = in_flight.registers[self.thread / emulator::kWarpSize];
  if (mine == registers) return true;
  if (raises != (registers > mine)) {
    const std::string what = ": the warp has " + std::to_string(mine) + " registers per thread";
    emulator::fail(cudaErrorLaunchFailure, (site.text().text + what).c_str());
  }
  if (raises && (registers - mine) * emulator::kWarpSize > in_flight.free_registers) return false;
  in_flight.free_registers += (mine - registers) * emulator::kWarpSize;  // modulo 2^32
  mine = registers;
  in_flight.progress();
  return true;
}

}  // namespace attention::ptx

#pragma GCC visibility pop
