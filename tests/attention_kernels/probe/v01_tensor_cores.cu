// v01 - one warp per product
//
// Change: a warp multiplies the fragments that it is given, or loads matrices with ldmatrix.
// Why:    a probe: the emulator's versions must give the same bits as tensor cores.
// Cost:   none.
// Tile:   none, block 32
// Layout: contiguous
// Role:   struct
// Flags:  (none)
// Expect: the same bits on the CPU and on a GPU.

#include "ptx.cuh"

namespace attention {

// Per product and lane, 4 words of a, 2 of b and 4 sums; or per load, 4 words of a.
struct StructParams {
  const unsigned* a;
  const unsigned* b;
  float* sums;
  int products;
  int kind;  // 0: float16, 1: bfloat16, 2: TF32, 3: load_matrices, 4: transposed
};

namespace ATTENTION_VERSION {

__global__ void probe(StructParams p) {
  const int at = blockIdx.x * 32 + threadIdx.x;
  unsigned a[4], b[2];
  float sums[4];
  for (int i = 0; i < 4; ++i) a[i] = p.a[at * 4 + i];
  for (int i = 0; i < 2; ++i) b[i] = p.b[at * 2 + i];
  for (int i = 0; i < 4; ++i) sums[i] = p.sums[at * 4 + i];
  if (p.kind == 0) ptx::mma<false>(sums, a, b);
  if (p.kind == 1) ptx::mma<true>(sums, a, b);
  if (p.kind == 2) ptx::mma_tf32(sums, a, b);
  if (p.kind >= 3) {
    ATTENTION_DYNAMIC_SHARED(unsigned, words);
    for (int i = 0; i < 4; ++i) words[threadIdx.x * 4 + i] = a[i];
    __syncthreads();
    const unsigned* row = words + (threadIdx.x ^ 5) * 4;
    if (p.kind == 3) ptx::load_matrices(a, row);
    if (p.kind == 4) ptx::load_matrices_transposed(a, row);
    for (int i = 0; i < 4; ++i) sums[i] = __uint_as_float(a[i]);
  }
  for (int i = 0; i < 4; ++i) p.sums[at * 4 + i] = sums[i];
}

int64_t scratch_floats(const StructParams&) { return 0; }

cudaError_t launch(const StructParams& params, cudaStream_t stream) {
  return launch_kernel(probe, dim3(params.products), dim3(32), 512, stream, params);
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
