// A block per query of each head; q, k, v and o are (batch, heads, tokens, head_dim).
#include <cuda_runtime.h>
#include <math.h>

#define B 32  // threads of a block
#define FULL 0xffffffffu

template <int kDim, bool kCausal = true>
__global__ void attn(const float* __restrict__ q, const float* __restrict__ k,
                     const float* __restrict__ v, float* __restrict__ o, int n, float scale) {
  const size_t head = (size_t)blockIdx.y * n * kDim;
  const int row = blockIdx.x, lane = threadIdx.x;
  float acc[kDim / B] = {}, m = -INFINITY, l = 0.0f;
  for (int key = 0; key < (kCausal ? row + 1 : n); ++key) {
    float s = 0.0f;
    for (int i = lane; i < kDim; i += B) s += q[head + row * kDim + i] * k[head + key * kDim + i];
    for (int step = B / 2; step > 0; step >>= 1) s += __shfl_xor_sync(FULL, s, step);
    s *= scale;
    const float m_new = fmaxf(m, s), alpha = expf(m - m_new), p = expf(s - m_new);
    l = l * alpha + p, m = m_new;
    for (int i = 0; i < kDim / B; ++i)
      acc[i] = acc[i] * alpha + p * v[head + key * kDim + i * B + lane];
  }
  for (int i = 0; i < kDim / B; ++i) o[head + row * kDim + i * B + lane] = acc[i] / l;
}

int main() { attn<64><<<1, B>>>(nullptr, nullptr, nullptr, nullptr, 0, 1.0f); }
