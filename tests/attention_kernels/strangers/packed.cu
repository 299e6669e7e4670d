// A thread per query; q, k and v in one tensor, (batch, tokens, 3, heads, head_dim).
#include <cuda_runtime.h>

namespace packed {

template <typename T, int kDim>
__global__ void kernel(T* o, const T* qkv, int tokens, int heads, float scale, bool masked) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= tokens) return;
  const int head = blockIdx.y % heads, batch = blockIdx.y / heads, stride = 3 * heads * kDim;
  const T* const base = qkv + (long long)batch * tokens * stride + head * kDim;
  float acc[kDim], sum = 0, most = -1e30f;
  for (int i = 0; i < kDim; ++i) acc[i] = 0;
  for (int key = 0; key < (masked ? row + 1 : tokens); ++key) {
    float s = 0;
    for (int i = 0; i < kDim; ++i)
      s += float(base[row * stride + i]) * float(base[key * stride + heads * kDim + i]);
    s *= scale;
    const float now = s > most ? s : most, old = expf(most - now), p = expf(s - now);
    sum = sum * old + p, most = now;
    for (int i = 0; i < kDim; ++i)
      acc[i] = acc[i] * old + p * float(base[key * stride + 2 * heads * kDim + i]);
  }
  for (int i = 0; i < kDim; ++i)
    o[((long long)(batch * tokens + row) * heads + head) * kDim + i] = T(acc[i] / sum);
}

template <typename T>
cudaError_t forward(T* o, const T* qkv, int batch, int tokens, int heads, int dim, float scale,
                    bool masked, cudaStream_t stream) {
  const dim3 grid((tokens + 31) / 32, batch * heads);
  if (dim == 32) {
    kernel<T, (1 << 5)><<<grid, 32, 0, stream>>>(o, qkv, tokens, heads, scale, masked);
  } else if (dim == 64) {
    kernel<T, 64><<<grid, 32, 0, stream>>>(o, qkv, tokens, heads, scale, masked);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace packed
