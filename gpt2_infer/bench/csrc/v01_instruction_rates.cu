// v01 - multiply-adds in registers
//
// Change: the first version. Each thread repeats multiply-adds on registers, of float32 (FFMA)
//         or, with its warp, of fragments (mma.sync), and stores how many it did: all factors are
//         1.
// Why:    to measure a GPU's peak rate of each: no kernel made of such instructions is faster.
// Cost:   (none)
// Tile:   block 256
// Layout: contiguous
// Role:   struct
// Needs:  sm_80
// Flags:  (none)
// Expect: every multiprocessor issues the instruction in nearly every cycle that can take one.

#include "ptx.cuh"

namespace attention {

struct StructParams {
  float* counts;  // (blocks, kThreads)
  int blocks;
  int iterations;
  int kind;  // 0: FFMA, 1: mma.sync of float16, 2: of TF32
};

namespace ATTENTION_VERSION {

constexpr int kThreads = 256;
constexpr int kChains = 16;    // FFMAs that are independent of each other
constexpr int kFragments = 8;  // products that are independent

__global__ void __launch_bounds__(kThreads) ffma(StructParams p, float one) {
  float sums[kChains] = {};
#pragma unroll 8
  for (int i = 0; i < p.iterations; ++i) {
#pragma unroll
    for (float& sum : sums) sum = fmaf(one, sum, one);
  }
  float count = 0.0f;
  for (const float sum : sums) count += sum;
  p.counts[blockIdx.x * kThreads + threadIdx.x] = count;
}

template <bool kIsTf32>
__global__ void __launch_bounds__(kThreads) mma(StructParams p, unsigned ones) {
  const unsigned a[4] = {ones, ones, ones, ones}, b[2] = {ones, ones};
  float sums[kFragments][4] = {};
  for (int i = 0; i < p.iterations; ++i) {
#pragma unroll
    for (auto& sum : sums) {
      if constexpr (kIsTf32) {
        ptx::mma_tf32(sum, a, b);
      } else {
        ptx::mma<false>(sum, a, b);
      }
    }
  }
  float count = 0.0f;
  for (const auto& sum : sums) count += sum[0] + sum[1] + sum[2] + sum[3];
  p.counts[blockIdx.x * kThreads + threadIdx.x] = count;
}

int64_t scratch_floats(const StructParams&) { return 0; }

cudaError_t launch(const StructParams& params, cudaStream_t stream) {
  const dim3 grid(params.blocks), block(kThreads);
  switch (params.kind) {
    case 0:
      return launch_kernel(ffma, grid, block, 0, stream, params, 1.0f);
    case 1:
      return launch_kernel(mma<false>, grid, block, 0, stream, params, 0x3c003c00u);
    case 2:
      return launch_kernel(mma<true>, grid, block, 0, stream, params, 0x3f800000u);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
