// Persistent blocks that take tiles from a queue; the last one out resets it
//
// Layout: strided
// Takes:  float32, head_dim 64
// Needs:  sm_80

#include <cuda_runtime.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

namespace queued {

constexpr int kWarpsPerCta = 4, kHeadDim = 64, kTileRows = 16;

struct Ticket {
  int next;  // tile that the next block takes
  int gone;  // blocks that have found the queue empty
};

struct Problem {
  const float *q, *k, *v;
  float* o;
  Strides q_at, k_at, v_at, o_at;
  int seqlen, heads, tiles;
  float scale;
  bool causal;
};

__device__ inline float warp_total(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

class Worker {
 public:
  __device__ explicit Worker(const Problem& problem) : p(problem) {}

  // Later rows see more keys, so they come first.
  __device__ void tile(int number) const {
    const int rows = (p.seqlen + kTileRows - 1) / kTileRows;
    const int tile_row = rows - 1 - number % rows, head = number / rows % p.heads;
    const int batch = number / rows / p.heads;
    for (int r = warp(); r < kTileRows; r += kWarpsPerCta) {
      const int row = tile_row * kTileRows + r;
      if (row < p.seqlen) query(batch, head, row);
    }
  }

 private:
  __device__ static int warp() { return threadIdx.x >> 5; }
  __device__ static int lane() { return threadIdx.x & 31; }

  __device__ float2 pair(const float* base, const Strides& s, int b, int h, int row) const {
    const float* at = base + b * s.batch + h * s.head + row * s.seqlen;
    return reinterpret_cast<const float2*>(at)[lane()];
  }

  // A warp has one query; a lane has two of its columns.
  __device__ void query(int b, int h, int row) const {
    float2 x = pair(p.q, p.q_at, b, h, row), sum{0.0f, 0.0f};
    x.x *= p.scale, x.y *= p.scale;
    float top = -INFINITY, total = 0.0f;
    const int keys = p.causal ? row + 1 : p.seqlen;
    for (int j = 0; j < keys; ++j) {
      const float2 y = pair(p.k, p.k_at, b, h, j), z = pair(p.v, p.v_at, b, h, j);
      const float score = warp_total(x.x * y.x + x.y * y.y), higher = fmaxf(top, score);
      const float shrink = exp2f(top - higher), weight = exp2f(score - higher);
      total = total * shrink + weight;
      sum.x = sum.x * shrink + weight * z.x;
      sum.y = sum.y * shrink + weight * z.y;
      top = higher;
    }
    float* at = p.o + b * p.o_at.batch + h * p.o_at.head + row * p.o_at.seqlen;
    reinterpret_cast<float2*>(at)[lane()] = make_float2(sum.x / total, sum.y / total);
  }

  const Problem& p;
};

__global__ void __launch_bounds__(32 * kWarpsPerCta)
    persistent(const __grid_constant__ Problem problem, Ticket* queue) {
  __shared__ int taken;
  const Worker worker(problem);
  while (true) {
    if (threadIdx.x == 0) taken = atomicAdd(&queue->next, 1);
    __syncthreads();
    const int number = taken;
    __syncthreads();  // before the next ticket overwrites it
    if (number >= problem.tiles) break;
    worker.tile(number);
  }
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&queue->gone, 1) == static_cast<int>(gridDim.x) - 1) {
      __threadfence();
      atomicExch(&queue->next, 0);
      atomicExch(&queue->gone, 0);
    }
  }
}

__global__ void open_queue(Ticket* queue) { *queue = Ticket{0, 0}; }

}  // namespace queued

int64_t scratch_floats(const Params&) { return sizeof(queued::Ticket) / sizeof(float); }

cudaError_t launch(const Params& p, cudaStream_t stream) {
  using namespace queued;
  if (p.head_dim != kHeadDim) return cudaErrorInvalidValue;
  int device = 0, processors = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, persistent, 32 * kWarpsPerCta, 0);
  if (error != cudaSuccess) return error;
  auto* const queue = reinterpret_cast<Ticket*>(p.scratch);
  Problem problem{static_cast<const float*>(p.q),
                  static_cast<const float*>(p.k),
                  static_cast<const float*>(p.v),
                  static_cast<float*>(p.o),
                  p.q_strides,
                  p.k_strides,
                  p.v_strides,
                  p.o_strides,
                  p.seqlen,
                  p.num_heads,
                  p.batch * p.num_heads * ceil_div(p.seqlen, kTileRows),
                  static_cast<float>(p.softmax_scale * 1.4426950408889634),
                  p.is_causal};
  error = launch_kernel(open_queue, 1, 1, 0, stream, queue);
  if (error != cudaSuccess) return error;
  const int blocks = problem.tiles < processors * each ? problem.tiles : processors * each;
  return launch_kernel(persistent, blocks, 32 * kWarpsPerCta, 0, stream, problem, queue);
}

}  // namespace attention::ATTENTION_VERSION
