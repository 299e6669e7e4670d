// cub: a block per query, its maximum and sum by BlockReduce
//
// Layout: strided
// Takes:  float32, head_dim 32

#include <cuda_runtime.h>

#include <cub/cub.cuh>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kDim = 32, kThreads = 128;

struct Larger {
  __device__ float operator()(float a, float b) const { return a > b ? a : b; }
};

template <int THREADS>
__global__ void attend(const float* q, const float* k, const float* v, float* o, Strides sq,
                       Strides sk, Strides sv, Strides so, int n, int heads, float scale,
                       bool causal) {
  using BlockReduce = cub::BlockReduce<float, THREADS>;
  using WarpReduce = cub::WarpReduce<float>;
  extern __shared__ float scores[];
  __shared__ union {
    typename BlockReduce::TempStorage block;
    typename WarpReduce::TempStorage warp[THREADS / 32];
  } temp;
  __shared__ float most, sum;
  const int row = blockIdx.x, head = blockIdx.y % heads, batch = blockIdx.y / heads;
  q += batch * sq.batch + head * sq.head + row * sq.seqlen;
  k += batch * sk.batch + head * sk.head;
  v += batch * sv.batch + head * sv.head;
  const int end = causal ? row + 1 : n;
  float mine = -INFINITY;
  for (int j = threadIdx.x; j < end; j += THREADS) {
    float s = 0.0f;
    for (int d = 0; d < kDim; ++d) s += q[d] * k[j * sk.seqlen + d];
    scores[j] = s * scale;
    mine = fmaxf(mine, s * scale);
  }
  const float largest = BlockReduce(temp.block).Reduce(mine, Larger());
  if (threadIdx.x == 0) most = largest;
  __syncthreads();
  mine = 0.0f;
  for (int j = threadIdx.x; j < end; j += THREADS) mine += scores[j] = expf(scores[j] - most);
  const float total = BlockReduce(temp.block).Sum(mine);
  if (threadIdx.x == 0) sum = total;
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int d = warp; d < kDim; d += THREADS / 32) {
    float x = 0.0f;
    for (int j = lane; j < end; j += 32) x += scores[j] * v[j * sv.seqlen + d];
    x = WarpReduce(temp.warp[warp]).Sum(x);
    __syncwarp();
    if (lane == 0) o[batch * so.batch + head * so.head + row * so.seqlen + d] = x / sum;
  }
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& p, cudaStream_t stream) {
  if (p.head_dim != kDim) return cudaErrorInvalidValue;
  const dim3 grid(p.seqlen, p.batch * p.num_heads);
  return launch_kernel(attend<kThreads>, grid, dim3(kThreads), p.seqlen * sizeof(float), stream,
                       static_cast<const float*>(p.q), static_cast<const float*>(p.k),
                       static_cast<const float*>(p.v), static_cast<float*>(p.o), p.q_strides,
                       p.k_strides, p.v_strides, p.o_strides, p.seqlen, p.num_heads,
                       static_cast<float>(p.softmax_scale), p.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
