// v02 - copies by TMA and products of a warpgroup whose counts are known
//
// Change: none. The comments have bytes/requests/wavefronts/sectors/fewest sectors; rows of 128
//         bytes are 4 sectors, and rows of 16 bytes fill half of one.
// Why:    the recorder of accesses must count each as the hardware executes it.
// Cost:   none.
// Tile:   64 x 32, block 128
// Layout: contiguous
// Needs:  sm_90a
// Flags:  (none)
// Expect: the counts in test_accesses.py, by comment.

#include "tma.cuh"
#include "wgmma.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kTileBytes = 64 * 128;

__device__ void load(unsigned char* to, const TensorMap& map, int row, ptx::Barrier* barrier) {
  ptx::load_tile(to, map, 0, 0, row, 0, barrier);  // called twice
}

__global__ void tiles(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap narrow,
                      const __grid_constant__ TensorMap o, const float* k) {
  ATTENTION_ALIGNED_SHARED(unsigned char, smem, 1024);
  __shared__ ptx::Barrier barrier;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&barrier, 1);
    ptx::barrier_init_fence();
    ptx::barrier_expect(&barrier, 2 * kTileBytes + 1024 + 256);
    load(smem, q, 0, &barrier);                // all rows 8192/1/64/256/256
    load(smem + kTileBytes, q, 64, &barrier);  // eight rows 8192/1/64/32/32
    ptx::load_tile(smem + 2 * kTileBytes, narrow, 0, 0, 0, 0, &barrier);  // narrow 1024/1/8/64/32
    ptx::copy_bulk(smem + 2 * kTileBytes + 1024, k, 256, &barrier);       // contiguous 256/1/2/8/8
  }
  __syncthreads();
  ptx::barrier_wait(&barrier, 0);
  float sums[32] = {};
  unsigned a[4] = {};
  const uint64_t first = ptx::matrix_descriptor(smem);
  const uint64_t second = ptx::matrix_descriptor(smem + kTileBytes);
  ptx::multiply_fence(sums, a);
  for (int at = 0; at < 128; at += 32) {
    const uint64_t to = ptx::advance(second, at);
    ptx::multiply<false>(sums, ptx::advance(first, at), to);  // A and B 4096/4/128/0/0
  }
  ptx::multiply<false, true>(sums, a, second);  // B 2048/1/16/0/0
  ptx::multiply_commit();
  ptx::multiply_wait<0>(sums);
  if (threadIdx.x == 0) {
    ptx::store_tile(o, 32, 0, 64, 0, smem);  // stored 8192/1/64/32/32
    ptx::store_tiles_commit();
    ptx::store_tiles_wait<0>();
  }
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& params, cudaStream_t stream) {
  const int64_t sizes[4] = {64, 1, params.seqlen, 1};
  const int64_t strides[3] = {64, 64, 64};
  TensorMap q, narrow, o;
  cudaError_t error =
      make_tensor_map(&q, static_cast<const float*>(params.q), sizes, strides, {32, 1, 64, 1});
  if (error == cudaSuccess)
    error = make_tensor_map(&narrow, static_cast<const float*>(params.q), sizes, strides,
                            {4, 1, 64, 1}, Swizzle::kNone);
  if (error == cudaSuccess)
    error =
        make_tensor_map(&o, static_cast<const float*>(params.o), sizes, strides, {32, 1, 64, 1});
  if (error != cudaSuccess) return error;
  return launch_kernel(tiles, 1, 128, 2 * kTileBytes + 2048, stream, q, narrow, o,
                       static_cast<const float*>(params.k));
}

}  // namespace attention::ATTENTION_VERSION
