// Tiles in shared memory; row sums and maxima in global memory, which the caller sets to 0 and
// -infinity, as in early code after the FlashAttention paper.
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                                                                   \
  do {                                                                                \
    cudaError_t status_ = (call);                                                     \
    if (status_ != cudaSuccess) {                                                     \
      fprintf(stderr, "%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      exit(EXIT_FAILURE);                                                             \
    }                                                                                 \
  } while (0)

__global__ void forward_kernel(const float* Q, const float* K, const float* V, const int N,
                               const int d, const int Tc, const int Tr, const int Bc, const int Br,
                               const float softmax_scale, float* l, float* m, float* O) {
  const int tx = threadIdx.x;
  const int qkv_offset = (blockIdx.x * gridDim.y * N * d) + (blockIdx.y * N * d);
  const int lm_offset = (blockIdx.x * gridDim.y * N) + (blockIdx.y * N);
  extern __shared__ float sram[];
  const int tile_size = Bc * d;
  float* Qi = sram;
  float* Kj = &sram[tile_size];
  float* Vj = &sram[tile_size * 2];
  float* S = &sram[tile_size * 3];
  for (int j = 0; j < Tc; j++) {
    for (int x = 0; x < d; x++) {
      const bool inside = j * Bc + tx < N;
      Kj[tx * d + x] = inside ? K[qkv_offset + tile_size * j + tx * d + x] : 0;
      Vj[tx * d + x] = inside ? V[qkv_offset + tile_size * j + tx * d + x] : 0;
    }
    __syncthreads();
    for (int i = 0; i < Tr; i++) {
      const int row = i * Br + tx;
      if (row >= N) break;
      for (int x = 0; x < d; x++) Qi[tx * d + x] = Q[qkv_offset + row * d + x];
      const float row_m_prev = m[lm_offset + row], row_l_prev = l[lm_offset + row];
      float row_m = -INFINITY, row_l = 0;
      const int keys = min(Bc, N - j * Bc);
      for (int y = 0; y < keys; y++) {
        float sum = 0;
        for (int x = 0; x < d; x++) sum += Qi[tx * d + x] * Kj[y * d + x];
        sum *= softmax_scale;
        S[Bc * tx + y] = sum;
        if (sum > row_m) row_m = sum;
      }
      for (int y = 0; y < keys; y++) {
        S[Bc * tx + y] = __expf(S[Bc * tx + y] - row_m);
        row_l += S[Bc * tx + y];
      }
      const float row_m_new = max(row_m_prev, row_m);
      const float row_l_new =
          __expf(row_m_prev - row_m_new) * row_l_prev + __expf(row_m - row_m_new) * row_l;
      for (int x = 0; x < d; x++) {
        float pv = 0;
        for (int y = 0; y < keys; y++) pv += S[Bc * tx + y] * Vj[y * d + x];
        float* out = &O[qkv_offset + row * d + x];
        *out = (1 / row_l_new) *
               (row_l_prev * __expf(row_m_prev - row_m_new) * (row_l_prev == 0 ? 0 : *out) +
                __expf(row_m - row_m_new) * pv);
      }
      m[lm_offset + row] = row_m_new;
      l[lm_offset + row] = row_l_new;
    }
    __syncthreads();
  }
}

// Copies the keys to a workspace of its own first.
void flash_forward(const float* Q, const float* K, const float* V, float* O, float* l, float* m,
                   int B, int nh, int N, int d, float scale) {
  const int Bc = 32, Br = 32;
  const int Tc = (N + Bc - 1) / Bc, Tr = (N + Br - 1) / Br;
  const int sram_size = (3 * Bc * d * sizeof(float)) + (Bc * Br * sizeof(float));
  int max_sram_size;
  cudaDeviceGetAttribute(&max_sram_size, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  if (sram_size > max_sram_size) exit(EXIT_FAILURE);
  CHECK(
      cudaFuncSetAttribute(forward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sram_size));
  float* workspace;
  const size_t bytes = (size_t)B * nh * N * d * sizeof(float);
  CHECK(cudaMalloc((void**)&workspace, bytes));
  CHECK(cudaMemcpy(workspace, K, bytes, cudaMemcpyDeviceToDevice));
  dim3 grid_dim(B, nh);  // batch_size x num_heads
  dim3 block_dim(Bc);
  forward_kernel<<<grid_dim, block_dim, sram_size>>>(Q, workspace, V, N, d, Tc, Tr, Bc, Br, scale,
                                                     l, m, O);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaFree(workspace));
}
