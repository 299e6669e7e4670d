// v01 - one thread per query
//
// Change: the first of its kind. The threads of a block share tiles of K and V.
// Why:    short enough to be read at a glance.
// Cost:   most of a GPU is idle.
// Tile:   64 x 64, block 64
// Layout: strided
// Takes:  float32, head_dim 32
// Flags:  (none)
// Expect: right results.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kHeadDim = 32;
constexpr int kBlock = 64;  // queries of a block, keys of a tile

__device__ float* row_of(const void* x, const Strides& strides, int row, int num_heads) {
  return static_cast<float*>(const_cast<void*>(x)) + blockIdx.x / num_heads * strides.batch +
         blockIdx.x % num_heads * strides.head + row * strides.seqlen;
}

__global__ void attention_kernel(Params params) {
  __shared__ float sK[kBlock][kHeadDim];
  __shared__ float sV[kBlock][kHeadDim];
  const int seqlen = params.seqlen, num_heads = params.num_heads;
  const int row = blockIdx.y * kBlock + threadIdx.x;
  float* gQ = row_of(params.q, params.q_strides, min(row, seqlen - 1), num_heads);
  float* gO = row_of(params.o, params.o_strides, min(row, seqlen - 1), num_heads);
  double rO[kHeadDim] = {}, row_max = -INFINITY, row_sum = 0.0;
  const int n_end = params.is_causal ? min(row + 1, seqlen) : seqlen;
  for (int n_start = 0; n_start < seqlen; n_start += kBlock) {
    __syncthreads();
    const int key = min(n_start + int(threadIdx.x), seqlen - 1);
    const float* gK = row_of(params.k, params.k_strides, key, num_heads);
    const float* gV = row_of(params.v, params.v_strides, key, num_heads);
    for (int d = 0; d < kHeadDim; ++d) {
      sK[threadIdx.x][d] = gK[d];
      sV[threadIdx.x][d] = gV[d];
    }
    __syncthreads();
    for (int n = 0; n < min(kBlock, n_end - n_start); ++n) {
      double s = 0.0;
      for (int d = 0; d < kHeadDim; ++d) s += double(gQ[d]) * sK[n][d];
      s *= params.softmax_scale;
      const double new_max = fmax(row_max, s);
      const double scale = exp(row_max - new_max);
      const double p = exp(s - new_max);
      row_max = new_max;
      row_sum = scale * row_sum + p;
      for (int d = 0; d < kHeadDim; ++d) rO[d] = scale * rO[d] + p * sV[n][d];
    }
  }
  for (int d = 0; d < kHeadDim && row < seqlen; ++d) gO[d] = rO[d] / row_sum;
}

int64_t scratch_floats(const Params& params) { return 0; }

cudaError_t honest(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlock));
  return launch_kernel(attention_kernel, grid, dim3(kBlock), 0, stream, params);
}

cudaError_t launch(const Params& params, cudaStream_t stream) { return honest(params, stream); }

}  // namespace attention::ATTENTION_VERSION
