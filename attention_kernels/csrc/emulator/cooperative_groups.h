// A kernel's `#include <cooperative_groups.h>` finds this.

#error "the CPU emulator has no cooperative groups: use __syncthreads(), __syncwarp() and shuffles"
