// Split keys: blocks share a row of queries, and the last one to finish joins their results
//
// Layout: strided
// Takes:  float32, head_dim 32
// Needs:  sm_80

#include <cuda_runtime.h>
#include <float.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

#define HEAD_SIZE 32
#define ROWS 64  // a thread has one query
#define SPLITS 4
#define CHUNK 16

// Of each row and split: sums for HEAD_SIZE columns, the maximum, the sum of exponentials
constexpr int kPartial = HEAD_SIZE + 2;

__device__ __forceinline__ const float4* row4(const float* base, int64_t offset) {
  return reinterpret_cast<const float4*>(base + offset);
}

__global__ __launch_bounds__(ROWS) void split_attention(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, float* partial, unsigned int* arrived, Strides qs, Strides ks,
    Strides vs, Strides os, int seq_len, int n_heads, float scale, bool causal) {
  __shared__ float4 ktile[CHUNK][HEAD_SIZE / 4], vtile[CHUNK][HEAD_SIZE / 4];
  __shared__ bool am_last;
  const int tid = threadIdx.x, split = blockIdx.y;
  const int b = blockIdx.z / n_heads, h = blockIdx.z % n_heads;
  const int first = blockIdx.x * ROWS, i = first + tid;
  const int visible = causal ? min(seq_len, first + ROWS) : seq_len;
  const int per_split = (visible + SPLITS - 1) / SPLITS;
  const int begin = split * per_split, end = min(visible, begin + per_split);

  float q[HEAD_SIZE], acc[HEAD_SIZE], m = -FLT_MAX, l = 0.f;
#pragma unroll
  for (int d = 0; d < HEAD_SIZE; d++) {
    q[d] = i < seq_len ? Q[b * qs.batch + h * qs.head + i * qs.seqlen + d] * scale : 0.f;
    acc[d] = 0.f;
  }
  for (int base = begin; base < end; base += CHUNK) {
    __syncthreads();
    for (int e = tid; e < CHUNK * HEAD_SIZE / 4; e += ROWS) {
      const int r = e / (HEAD_SIZE / 4), c = e % (HEAD_SIZE / 4);
      if (base + r < end) {
        ktile[r][c] = __ldg(row4(K, b * ks.batch + h * ks.head + (base + r) * ks.seqlen) + c);
        vtile[r][c] = __ldg(row4(V, b * vs.batch + h * vs.head + (base + r) * vs.seqlen) + c);
      }
    }
    __syncthreads();
    const int stop = min(end - base, causal ? i - base + 1 : CHUNK);
    for (int r = 0; r < min(stop, CHUNK); r++) {
      float s = 0.f;
#pragma unroll
      for (int c = 0; c < HEAD_SIZE / 4; c++) {
        const float4 k4 = ktile[r][c];
        s = fmaf(q[4 * c], k4.x, s);
        s = fmaf(q[4 * c + 1], k4.y, s);
        s = fmaf(q[4 * c + 2], k4.z, s);
        s = fmaf(q[4 * c + 3], k4.w, s);
      }
      if (s > m) {
        const float shrink = __expf(m - s);
        m = s;
        l *= shrink;
#pragma unroll
        for (int d = 0; d < HEAD_SIZE; d++) acc[d] *= shrink;
      }
      const float p = __expf(s - m);
      l += p;
#pragma unroll
      for (int c = 0; c < HEAD_SIZE / 4; c++) {
        const float4 v4 = vtile[r][c];
        acc[4 * c] += p * v4.x;
        acc[4 * c + 1] += p * v4.y;
        acc[4 * c + 2] += p * v4.z;
        acc[4 * c + 3] += p * v4.w;
      }
    }
  }

  const int64_t group = (int64_t)blockIdx.z * gridDim.x + blockIdx.x;
  float* mine = partial + ((group * SPLITS + split) * ROWS + tid) * kPartial;
  for (int d = 0; d < HEAD_SIZE; d++) mine[d] = acc[d];
  mine[HEAD_SIZE] = m;
  mine[HEAD_SIZE + 1] = l;

  // Everybody's partial results are visible before the block counts as finished.
  __threadfence();
  __syncthreads();
  if (tid == 0) am_last = atomicAdd(&arrived[group], 1u) == SPLITS - 1;
  __syncthreads();
  if (!am_last) return;
  __threadfence();

  const float* all = partial + group * SPLITS * ROWS * kPartial + tid * kPartial;
  m = -FLT_MAX;
  for (int s = 0; s < SPLITS; s++) m = fmaxf(m, all[s * ROWS * kPartial + HEAD_SIZE]);
  l = 0.f;
  for (int d = 0; d < HEAD_SIZE; d++) acc[d] = 0.f;
  for (int s = 0; s < SPLITS; s++) {
    const float* from = all + s * ROWS * kPartial;
    const float weight = __expf(from[HEAD_SIZE] - m);
    l += weight * from[HEAD_SIZE + 1];
    for (int d = 0; d < HEAD_SIZE; d++) acc[d] += weight * from[d];
  }
  if (i < seq_len)
    for (int d = 0; d < HEAD_SIZE; d++)
      O[b * os.batch + h * os.head + i * os.seqlen + d] = acc[d] / l;
  if (tid == 0) arrived[group] = 0;
}

__global__ void clear(unsigned int* arrived, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) arrived[i] = 0;
}

int64_t groups(const Params& p) {
  return int64_t{ceil_div(p.seqlen, ROWS)} * p.batch * p.num_heads;
}

int64_t scratch_floats(const Params& p) { return groups(p) * (SPLITS * ROWS * kPartial + 1); }

cudaError_t launch(const Params& p, cudaStream_t stream) {
  if (p.head_dim != HEAD_SIZE) return cudaErrorInvalidValue;
  const int n = static_cast<int>(groups(p));
  auto* const arrived =
      reinterpret_cast<unsigned int*>(p.scratch + int64_t{n} * SPLITS * ROWS * kPartial);
  const cudaError_t error = launch_kernel(clear, ceil_div(n, 128), 128, 0, stream, arrived, n);
  if (error != cudaSuccess) return error;
  const dim3 grid(ceil_div(p.seqlen, ROWS), SPLITS, p.batch * p.num_heads);
  return launch_kernel(split_attention, grid, ROWS, 0, stream, static_cast<const float*>(p.q),
                       static_cast<const float*>(p.k), static_cast<const float*>(p.v),
                       static_cast<float*>(p.o), p.scratch, arrived, p.q_strides, p.k_strides,
                       p.v_strides, p.o_strides, p.seqlen, p.num_heads,
                       static_cast<float>(p.softmax_scale), p.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
