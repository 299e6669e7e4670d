// v09 - two blocks of a cluster load tiles for each other, with faults
//
// Change: a field of the parameters chooses the fault in the lines that end with its number.
// Why:    a negative control: on a GPU most faults are races or hang.
// Cost:   none.
// Tile:   64 x 64, block 160
// Layout: contiguous
// Role:   struct
// Needs:  sm_90a
// Flags:  (none)
// Expect: an error for every fault; 0 has none.

#include <cuda_fp16.h>

#include "tma.cuh"
#include "wgmma.cuh"

namespace attention {

struct StructParams {
  const __half* q;  // 64 kCluster x 64
  const __half* k;  // 64 kTiles x 64
  float* o;         // 64 kCluster x 64: the sum of Q K^T of all tiles
  int fault;
};

namespace ATTENTION_VERSION {

using ptx::Barrier;

constexpr int kCluster = 2, kTiles = 5, kStages = 2, kAll = (1 << kCluster) - 1;
constexpr int kTileBytes = 64 * 64 * sizeof(__half);

struct Barriers {
  Barrier q_full, full[kStages], empty[kStages];
};

// Loads the block's half of each tile of K for both blocks.
__device__ void produce(const TensorMap& q, const TensorMap& k, unsigned char* sQ,
                        unsigned char* sK, Barriers& barriers, int rank, int fault) {
  ptx::barrier_expect(&barriers.q_full, kTileBytes);
  for (int half = 0; half < 2; ++half)
    ptx::load_tile(sQ + half * kTileBytes / 2, q, 0, 64 * rank + 32 * half, 0, 0, &barriers.q_full);
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages;
    if (fault != 1) ptx::barrier_wait(&barriers.empty[stage], tile / kStages % 2 ^ 1);     // 1
    ptx::barrier_expect(&barriers.full[stage], fault == 2 ? kTileBytes / 2 : kTileBytes);  // 2
    unsigned blocks = kAll;
    if (fault == 3) blocks |= 1 << kCluster;               // 3: there is no such block
    if (fault == 4 && rank == 0 && tile == 3) blocks = 1;  // 4: not for the other block
    if (fault == 5 && rank == 0 && tile == 3) blocks = 0;  // 5: for none
    const int half = fault == 6 ? 0 : rank;                // 6: both load the same half
    ptx::load_tile_to_blocks(blocks, sK + stage * kTileBytes + half * kTileBytes / 2, k, 0,
                             64 * tile + 32 * rank, 0, 0, &barriers.full[stage]);
  }
}

__device__ void consume(const unsigned char* sQ, const unsigned char* sK, float (&rO)[32],
                        Barriers& barriers, int rank, int fault) {
  const auto arrive = [&](int stage, int block) {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive_at_block(&barriers.empty[stage], block);
  };
  float loaded = 0.0f;
  ptx::barrier_wait(&barriers.q_full, 0);
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages;
    ptx::barrier_wait(&barriers.full[stage], tile / kStages % 2);
    const uint64_t a = ptx::matrix_descriptor(sQ);
    const uint64_t b = ptx::matrix_descriptor(sK + stage * kTileBytes);
    ptx::multiply_fence(rO);
    for (int step = 0; step < 4; ++step)
      ptx::multiply<false>(rO, ptx::advance(a, 32 * step), ptx::advance(b, 32 * step),
                           tile + step > 0);
    ptx::multiply_commit();
    if (fault == 7) arrive(stage, rank ^ 1);  // 7: the other block may write too early
    ptx::multiply_wait<0>(rO);
    if ((fault == 0 || fault == 15) && threadIdx.x % 32 == 0) {
      loaded += sK[stage * kTileBytes];    // a load as well
      if (fault == 0) ptx::proxy_fence();  // 15
    }
    arrive(stage, rank);
    if (fault != 7 && fault != 8) arrive(stage, rank ^ 1);  // 8: the other block never writes again
    if (fault == 9) arrive(stage, kCluster);                // 9: there is no such block
  }
  rO[0] += 0.0f * loaded;
}

__global__ void __launch_bounds__(160)
    attention_kernel(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                     float* o, int fault) {
  ATTENTION_ALIGNED_SHARED(unsigned char, sQ, 1024);
  unsigned char* sK = sQ + kTileBytes;
  __shared__ Barriers barriers;
  const int rank = blockIdx.x % kCluster;
  if (threadIdx.x == 0 && (fault != 10 || rank == 1)) {  // 10: one block's are not
    ptx::barrier_init(&barriers.q_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&barriers.full[stage], 1);
      ptx::barrier_init(&barriers.empty[stage], 4 * kCluster);
    }
    if (fault != 11) ptx::barrier_init_fence();  // 11
  }
  __syncthreads();
  if (fault == 14 && rank == 1) return;  // 14: the other one waits for it
  if (fault != 12) {                     // 12: copies may arrive before that
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  ptx::wait_for_previous();
  if (fault == 13 && rank == 1) return;  // 13: the other one still needs it
  if (threadIdx.x < 128) {
    float rO[32] = {};
    consume(sQ, sK, rO, barriers, rank, fault);
    for (int i = 0; i < 32; ++i) {
      const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
      o[(64 * rank + row) * 64 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = rO[i];
    }
  } else if (threadIdx.x == 128) {
    produce(q, k, sQ, sK, barriers, rank, fault);
  }
  __syncwarp();
  ptx::cluster_arrive();  // it may still arrive at this block's barriers
  ptx::cluster_wait();
}

int64_t scratch_floats(const StructParams&) { return 0; }

cudaError_t launch(const StructParams& p, cudaStream_t stream) {
  TensorMap q, k;
  cudaError_t error =
      make_tensor_map(&q, p.q, {64, 64 * kCluster, 1, 1}, {64, 64, 64}, {64, 32, 1, 1});
  if (error == cudaSuccess)
    error = make_tensor_map(&k, p.k, {64, 64 * kTiles, 1, 1}, {64, 64, 64}, {64, 32, 1, 1});
  if (error != cudaSuccess) return error;
  return launch_early(attention_kernel, kCluster, kCluster, 160, (1 + kStages) * kTileBytes, stream,
                      q, k, p.o, p.fault);
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
