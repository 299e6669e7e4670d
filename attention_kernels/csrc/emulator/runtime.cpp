// The part of the emulator that does not depend on the kernel. Each library or program of emulated
// kernels includes it once; kernels that do not include it compile in half the time.

#include "barrier.cpp"
#include "block.cpp"
#include "cluster.cpp"
#include "faults.cpp"
#include "global_races.cpp"
#include "grid.cpp"
#include "pipeline.cpp"
#include "races.cpp"
#include "registers.cpp"
#include "tensor_core.cpp"
#include "tma.cpp"
#include "wgmma.cpp"
