// v03 - a kernel that writes late, or one that may start before it has
//
// Change: write() lets the next kernel start and stores 1 a long time later; read() waits and copies.
// Why:    a probe: code that was compiled for an older GPU does not wait, so it must not start early.
// Cost:   none.
// Tile:   none, block 1
// Layout: contiguous
// Role:   struct
// Flags:  (none)
// Expect: read() copies a 1.

#include "ptx.cuh"

namespace attention {

struct StructParams {
  int* value;
  int* seen;
  int reads;
};

namespace ATTENTION_VERSION {

__global__ void write(int* value) {
  ptx::allow_next();
  for (const long long start = clock64(); clock64() - start < 10'000'000;) {
  }
  *value = 1;
}

__global__ void read(const int* value, int* seen) {
  ptx::wait_for_previous();
  *seen = *value;
}

int64_t scratch_floats(const StructParams&) { return 0; }

cudaError_t launch(const StructParams& p, cudaStream_t stream) {
  return p.reads ? launch_early(read, 1, 1, 1, 0, stream, p.value, p.seen)
                 : launch_kernel(write, 1, 1, 0, stream, p.value);
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
