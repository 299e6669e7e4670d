// A warpgroup that copies tiles and two that multiply them in turn. test_asynchronous.py executes its
// machine code.
//
//     nvcc -cubin -arch=sm_90a -std=c++17 -I attention_kernels/csrc warpgroups.cu -o warpgroups.cubin
//     cuobjdump -sass warpgroups.cubin | tr -s " \t" " " > warpgroups_sm_90a.sass

#include "tma.cuh"
#include "wgmma.cuh"

using namespace attention;

constexpr int kStages = 2;
constexpr int kRows = 64, kColumns = 64;  // of a tile of 2-byte elements

extern "C" __global__ void __launch_bounds__(384, 1)
    kernel(const __grid_constant__ TensorMap map, const unsigned char* row, float* out, int tiles) {
  extern __shared__ __align__(1024) unsigned char s_tiles[];
  unsigned char* s_row = s_tiles + kStages * kRows * kColumns * 2;
  __shared__ ptx::Barrier full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&full[stage], 1);
      ptx::barrier_init(&empty[stage], 8);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::lower_registers<24>();
    if (threadIdx.x != 0) return;
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % kStages;
      ptx::barrier_wait(&empty[stage], tile / kStages % 2 ^ 1);
      ptx::barrier_expect(&full[stage], kRows * kColumns * 2 + 256);
      ptx::load_tile(s_tiles + stage * kRows * kColumns * 2, map, 0, 0, tile * kRows, 0,
                     &full[stage]);
      ptx::copy_bulk(s_row + stage * 256, row, 256, &full[stage]);
    }
    return;
  }
  ptx::raise_registers<160>();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1;
  float sums[32] = {};
  if (warpgroup == 1) ptx::named_barrier_arrive(1, 256);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages;
    ptx::barrier_wait(&full[stage], tile / kStages % 2);
    ptx::named_barrier_sync(1 + warpgroup, 256);
    const uint64_t a = ptx::matrix_descriptor(s_tiles + stage * kRows * kColumns * 2);
    ptx::multiply_fence(sums);
    for (int k = 0; k < 4; ++k)
      ptx::multiply<false>(sums, ptx::advance(a, 32 * k), ptx::advance(a, 32 * k));
    ptx::multiply_commit();
    if (warpgroup == 0 || tile + 1 < tiles) ptx::named_barrier_arrive(2 - warpgroup, 256);
    ptx::multiply_wait<0>(sums);
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&empty[stage]);
  }
  for (int i = 0; i < 32; ++i) out[i * 256 + threadIdx.x - 128] = sums[i];
}
