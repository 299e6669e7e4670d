// v10 - blocks send words within and between clusters that all run at once, with faults
//
// Change: a field of the parameters chooses the fault in the lines that end with its number.
// Why:    a negative control: on a GPU most faults are races or hang.
// Cost:   none.
// Tile:   none, block 32
// Layout: contiguous
// Role:   struct
// Needs:  sm_90
// Flags:  (none)
// Expect: an error or a wrong sum for every fault; 0 has none.

#include "ptx.cuh"

namespace attention {

struct StructParams {
  float* o;                   // (clusters, blocks): the sum over all blocks of their numbers
  unsigned long long* words;  // (clusters), not 0 at first
  int fault;
};

namespace ATTENTION_VERSION {

constexpr int kClusters = 2, kCluster = 2;

__global__ void __launch_bounds__(32) attention_kernel(const StructParams p) {
  __shared__ float numbers[kCluster];
  __shared__ ptx::Barrier arrived;
  const int fault = p.fault, lane = threadIdx.x;
  const int rank = blockIdx.x % kCluster, cluster = blockIdx.x / kCluster;
  if (lane == 0) {
    ptx::barrier_init(&arrived, 1);
    ptx::barrier_init_fence();
    ptx::barrier_expect(&arrived, sizeof(float) * (fault == 1 ? 3 : kCluster));  // 1
  }
  __syncwarp();
  if (fault != 2) {  // 2: the other block's barrier may not be initialized
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  if (lane < (fault == 3 ? kCluster + 1 : kCluster)) {  // 3: there is no such block
    const float number = blockIdx.x + 1;
    auto* const here = reinterpret_cast<char*>(&numbers[rank]) + (fault == 4);  // 4: not aligned
    ptx::send_words<1>(here, lane, {__float_as_uint(number)}, &arrived);
  }
  if (fault != 5) ptx::barrier_wait(&arrived, 0);  // 5
  const float mine = numbers[0] + numbers[1];
  if (rank == 0 && lane == 0 && (fault != 6 || cluster == 0))  // 6: a word that never comes
    ptx::store_word(&p.words[cluster], 7ull << 32 | __float_as_uint(mine));
  float sum = 0.0f;
  for (int i = 0; i < kClusters; ++i) {
    unsigned long long word = ptx::load_word(&p.words[i]);
    while (fault != 7 && word >> 32 != 7) {  // 7
      ptx::poll_again();
      word = ptx::load_word(&p.words[i]);
    }
    sum += __uint_as_float(static_cast<unsigned>(word));
  }
  if (lane == 0) p.o[blockIdx.x] = sum;
}

int64_t scratch_floats(const StructParams&) { return 0; }

cudaError_t launch(const StructParams& p, cudaStream_t stream) {
  return launch_at_once(attention_kernel, kClusters * kCluster, kCluster, 32, 0, stream, p);
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
