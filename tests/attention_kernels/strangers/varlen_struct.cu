// Sequences of any lengths, one after the other: (all tokens, heads, head_dim) in half precision. The
// output is in single precision, and so is the logarithm of each row's sum.
#include <cuda_fp16.h>

#include <cstdint>

constexpr int kThreads = 64;

struct Arguments {
  const half *q, *k, *v;
  float *out, *lse;
  const int32_t* cu_seqlens;
  int heads;
  float scale_log2;
};

template <int HeadDim>
__global__ void __launch_bounds__(kThreads) attention(const __grid_constant__ Arguments a) {
  const int begin = a.cu_seqlens[blockIdx.z], length = a.cu_seqlens[blockIdx.z + 1] - begin;
  const int row = blockIdx.x * kThreads + threadIdx.x;
  __shared__ __half2 keys[kThreads][HeadDim / 2], values[kThreads][HeadDim / 2];
  const auto at = [&](const half* x, int token) {
    return reinterpret_cast<const __half2*>(x) +
           (size_t(begin + token) * a.heads + blockIdx.y) * (HeadDim / 2);
  };
  float2 acc[HeadDim / 2];
#pragma unroll
  for (auto& x : acc) x = make_float2(0.f, 0.f);
  float sum = 0.f, most = -INFINITY;
  for (int first = 0; first < length && first <= int(blockIdx.x) * kThreads; first += kThreads) {
    __syncthreads();
    if (first + int(threadIdx.x) < length) {
      for (int i = 0; i < HeadDim / 2; ++i) {
        keys[threadIdx.x][i] = at(a.k, first + threadIdx.x)[i];
        values[threadIdx.x][i] = at(a.v, first + threadIdx.x)[i];
      }
    }
    __syncthreads();
    if (row >= length) continue;
    for (int key = 0; key < kThreads && first + key <= row; ++key) {
      float s = 0.f;
      for (int i = 0; i < HeadDim / 2; ++i) {
        const float2 x = __half22float2(at(a.q, row)[i]), y = __half22float2(keys[key][i]);
        s += x.x * y.x + x.y * y.y;
      }
      s *= a.scale_log2;
      const float now = fmaxf(most, s), old = exp2f(most - now), p = exp2f(s - now);
      sum = sum * old + p, most = now;
      for (int i = 0; i < HeadDim / 2; ++i) {
        const float2 y = __half22float2(values[key][i]);
        acc[i].x = acc[i].x * old + p * y.x, acc[i].y = acc[i].y * old + p * y.y;
      }
    }
  }
  if (row >= length) return;
  const size_t place = size_t(begin + row) * a.heads + blockIdx.y;
  for (int i = 0; i < HeadDim / 2; ++i) {
    a.out[place * HeadDim + 2 * i] = acc[i].x / sum;
    a.out[place * HeadDim + 2 * i + 1] = acc[i].y / sum;
  }
  a.lse[place] = (most + log2f(sum)) * 0.69314718f;
}

template <int HeadDim>
void run_varlen(const half* q, const half* k, const half* v, float* out, float* lse,
                const int* cu_seqlens, int batch, int longest, int heads, float scale,
                cudaStream_t stream) {
  const Arguments arguments{q, k, v, out, lse, cu_seqlens, heads, scale * 1.44269504f};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((longest + kThreads - 1) / kThreads, heads, batch);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchKernelEx(&config, attention<HeadDim>, arguments);
}
