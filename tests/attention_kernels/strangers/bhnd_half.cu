// Causal attention in half precision over (B, H, N, D) tensors.
//
// A block of BR threads takes BR queries, one per thread; keys and values pass through shared
// memory in tiles of BC rows. Products are summed in half2, four at a time, then in float.
// Launch with grid (ceil(N / BR), H, B) and block BR.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

template <int HEAD_DIM, int BR = 64, int BC = 32>
__global__ void __launch_bounds__(BR)
    attention_bhnd(const __half* __restrict__ Q, const __half* __restrict__ K,
                   const __half* __restrict__ V, __half* __restrict__ O, int N, float scale) {
  constexpr int PAIRS = HEAD_DIM / 2, VECS = HEAD_DIM / 8;
  static_assert(HEAD_DIM % 8 == 0, "rows are copied 16 bytes at a time");
  __shared__ __align__(16) __half2 Ks[BC][PAIRS];
  __shared__ __align__(16) __half2 Vs[BC][PAIRS];

  const long long plane = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * N * HEAD_DIM;
  const int row = blockIdx.x * BR + threadIdx.x;
  const bool active = row < N;
  Q += plane, K += plane, V += plane, O += plane;

  __half2 q[PAIRS];
  float2 acc[PAIRS];
#pragma unroll
  for (int v = 0; v < VECS; ++v)
    *reinterpret_cast<uint4*>(&q[4 * v]) =
        active ? reinterpret_cast<const uint4*>(Q + (size_t)row * HEAD_DIM)[v]
               : make_uint4(0u, 0u, 0u, 0u);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) acc[i] = make_float2(0.f, 0.f);

  float row_m = -1e30f, row_l = 0.f;
  const int last = min(N, (int)(blockIdx.x + 1) * BR);
  for (int j0 = 0; j0 < last; j0 += BC) {
    for (int t = threadIdx.x; t < BC * VECS; t += BR) {
      const int r = t / VECS, c = t % VECS;
      if (j0 + r < N) {
        const size_t at = (size_t)(j0 + r) * VECS + c;
        reinterpret_cast<uint4*>(&Ks[r][0])[c] = reinterpret_cast<const uint4*>(K)[at];
        reinterpret_cast<uint4*>(&Vs[r][0])[c] = reinterpret_cast<const uint4*>(V)[at];
      }
    }
    __syncthreads();

    const int limit = active ? min(BC, row + 1 - j0) : 0;
    for (int j = 0; j < limit; ++j) {
      float s = 0.f;
#pragma unroll
      for (int i = 0; i < PAIRS; i += 4) {
        __half2 part = __hmul2(q[i], Ks[j][i]);
        part = __hfma2(q[i + 1], Ks[j][i + 1], part);
        const __half2 more = __hfma2(q[i + 3], Ks[j][i + 3], __hmul2(q[i + 2], Ks[j][i + 2]));
        const float2 f = __half22float2(part), g = __half22float2(more);
        s += (f.x + f.y) + (g.x + g.y);
      }
      s *= scale;
      const float m_new = fmaxf(row_m, s);
      const float c = __expf(row_m - m_new), p = __expf(s - m_new);
      row_l = fmaf(row_l, c, p);
      row_m = m_new;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const float2 val = __half22float2(Vs[j][i]);
        acc[i].x = fmaf(acc[i].x, c, p * val.x);
        acc[i].y = fmaf(acc[i].y, c, p * val.y);
      }
    }
    __syncthreads();
  }

  if (!active) return;
  const float inv = 1.f / row_l;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i)
    reinterpret_cast<__half2*>(O + (size_t)row * HEAD_DIM)[i] =
        __float22half2_rn(make_float2(acc[i].x * inv, acc[i].y * inv));
}
