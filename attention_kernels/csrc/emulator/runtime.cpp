// The part of the emulator that no kernel changes. Each library or program of emulated kernels
// includes it once: kernels compile in half the time without it.

#include "block.cpp"
#include "faults.cpp"
#include "grid.cpp"
#include "races.cpp"
#include "tensor_core.cpp"
