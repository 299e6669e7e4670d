// v01 - a barrier is missing
//
// Change: no barrier between the last use of a tile and the load of the next.
// Why:    test data: the conformance suite, or the emulator, must catch it.
// Cost:   correct results only by luck: some warps read the next tile's keys and values.
// Tile:   kTile x kTile = 32 x 32, block (32, 32)
// Layout: contiguous
// Flags:  (none)
// Expect: wrong output from the second tile on.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kTile = 32;
constexpr int kMaxHeadDim = 128;

// A warp has one query; each lane has one key of the tile and head_dim / 32 columns of O.
__global__ void __launch_bounds__(kTile* kTile)
    attention_kernel(const float* q, const float* k, const float* v, float* o, int seqlen,
                     int num_heads, int head_dim, float softmax_scale, bool is_causal) {
  const int lane = threadIdx.x;
  const int m_start = blockIdx.y * kTile;
  const int row = m_start + threadIdx.y;
  const int64_t row_stride = int64_t{num_heads} * head_dim;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * head_dim;
  const float* gQ = q + offset + min(row, seqlen - 1) * row_stride;

  ATTENTION_DYNAMIC_SHARED(float, smem);
  float* sK = smem;
  float* sV = sK + kTile * head_dim;
  float row_max = -INFINITY;
  float row_sum = 0.0f;
  float rO[kMaxHeadDim / kTile] = {};

  const int n_end = is_causal ? min(m_start + kTile, seqlen) : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kTile) {
    const int key = n_start + threadIdx.y;
    const bool exists = key < seqlen;
    for (int d = lane; d < head_dim; d += kTile) {
      sK[threadIdx.y * head_dim + d] = exists ? k[offset + key * row_stride + d] : 0.0f;
      sV[threadIdx.y * head_dim + d] = exists ? v[offset + key * row_stride + d] : 0.0f;
    }
    __syncthreads();

    const int last = is_causal ? min(row, seqlen - 1) : seqlen - 1;
    float s = 0.0f;
    for (int d = 0; d < head_dim; ++d) {
      s += gQ[d] * sK[lane * head_dim + d];
    }
    s = n_start + lane <= last ? softmax_scale * s : -INFINITY;
    float tile_max = s;
    for (int i = kTile / 2; i > 0; i /= 2) {
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, i));
    }
    const float new_max = fmaxf(row_max, tile_max);
    const float row_scale = expf(row_max - new_max);
    row_max = new_max;
    const float p = expf(s - new_max);
    row_sum *= row_scale;
    for (int c = 0; c < head_dim / kTile; ++c) {
      rO[c] *= row_scale;
    }
    for (int j = 0; j < kTile; ++j) {
      const float p_j = __shfl_sync(0xffffffff, p, j);
      row_sum += p_j;
      for (int c = 0; c < head_dim / kTile; ++c) {
        rO[c] += p_j * sV[j * head_dim + c * kTile + lane];
      }
    }
    // no barrier
    // BROKEN. The right line: __syncthreads();
  }
  for (int c = 0; c < head_dim / kTile && row < seqlen; ++c) {
    o[offset + row * row_stride + c * kTile + lane] = rO[c] / row_sum;
  }
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim % kTile != 0 || params.head_dim > kMaxHeadDim) return cudaErrorInvalidValue;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kTile));
  const size_t smem_bytes = sizeof(float) * 2 * kTile * params.head_dim;
  return launch_kernel(attention_kernel, grid, dim3(kTile, kTile), smem_bytes, stream,
                       static_cast<const float*>(params.q), static_cast<const float*>(params.k),
                       static_cast<const float*>(params.v), static_cast<float*>(params.o),
                       params.seqlen, params.num_heads, params.head_dim, params.softmax_scale,
                       params.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
