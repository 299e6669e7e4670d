// Attention over packed sequences of different lengths.
//
// q, k, v and out have the shape (total_tokens, heads, dim). Sequence b has the tokens
// cu_seqlens[b] up to cu_seqlens[b + 1]; a token sees those of its sequence that are not after it.

#include <cuda_runtime.h>
#include <math_constants.h>
#include <stdint.h>
#include <stdio.h>

namespace varlen {

constexpr int WARP = 32;
constexpr int QUERIES_PER_BLOCK = 8;  // one per warp

template <int DIM>
__global__ void fwd_kernel(const float* __restrict__ q, const float* __restrict__ k,
                           const float* __restrict__ v, float* __restrict__ out,
                           const int* __restrict__ cu_seqlens, int heads, float scale) {
  static_assert(DIM % WARP == 0, "each lane owns DIM / 32 columns");
  constexpr int COLS = DIM / WARP;

  const int seq = blockIdx.z;
  const int start = cu_seqlens[seq];
  const int len = cu_seqlens[seq + 1] - start;
  const int pos = blockIdx.x * QUERIES_PER_BLOCK + threadIdx.y;
  if (pos >= len) return;  // warps of short sequences have nothing to do

  const int head = blockIdx.y;
  const size_t token_stride = (size_t)heads * DIM;
  const size_t base = (size_t)start * token_stride + (size_t)head * DIM;
  const float* my_q = q + base + pos * token_stride;

  float rq[COLS], acc[COLS];
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    rq[c] = my_q[threadIdx.x + c * WARP] * scale;
    acc[c] = 0.f;
  }

  float m = -CUDART_INF_F, denom = 0.f;
  for (int j = 0; j <= pos; ++j) {
    const float* kj = k + base + j * token_stride;
    float dot = 0.f;
#pragma unroll
    for (int c = 0; c < COLS; ++c) dot += rq[c] * __ldg(kj + threadIdx.x + c * WARP);
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
      dot += __shfl_down_sync(0xffffffff, dot, offset);
    dot = __shfl_sync(0xffffffff, dot, 0);

    const float m_new = max(m, dot);
    const float alpha = __expf(m - m_new), p = __expf(dot - m_new);
    denom = denom * alpha + p;
    const float* vj = v + base + j * token_stride;
#pragma unroll
    for (int c = 0; c < COLS; ++c) acc[c] = acc[c] * alpha + p * __ldg(vj + threadIdx.x + c * WARP);
    m = m_new;
  }

  float* my_out = out + base + pos * token_stride;
#pragma unroll
  for (int c = 0; c < COLS; ++c) my_out[threadIdx.x + c * WARP] = __fdividef(acc[c], denom);
}

}  // namespace varlen

void varlen_fwd(const float* q, const float* k, const float* v, float* out, const int* cu_seqlens,
                int batch, int max_seqlen, int heads, int dim, float scale, cudaStream_t stream) {
  using namespace varlen;
  const dim3 grid((max_seqlen + QUERIES_PER_BLOCK - 1) / QUERIES_PER_BLOCK, heads, batch);
  const dim3 block(WARP, QUERIES_PER_BLOCK);
  switch (dim) {
    case 32:
      fwd_kernel<32><<<grid, block, 0, stream>>>(q, k, v, out, cu_seqlens, heads, scale);
      break;
    case 64:
      fwd_kernel<64><<<grid, block, 0, stream>>>(q, k, v, out, cu_seqlens, heads, scale);
      break;
    case 128:
      fwd_kernel<128><<<grid, block, 0, stream>>>(q, k, v, out, cu_seqlens, heads, scale);
      break;
    default:
      fprintf(stderr, "varlen_fwd: unsupported dim %d\n", dim);
  }
}
