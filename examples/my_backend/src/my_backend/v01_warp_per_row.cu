// v01 - one warp per query, one key per lane
//
// Change: the first of its ladder. A warp walks over its query's keys 32 at a time: each lane
//         computes one score, shuffles give the warp their maximum and sum, and each lane owns
//         every 32nd column of O, in registers.
// Why:    the least that is Flash Attention: no shared memory, no barrier, no scratch.
// Cost:   lanes read 32 rows of K at once, which does not coalesce; nothing is reused between the
//         queries of a block but through the caches.
// Tile:   kBlockM x kBlockN = 32 x 32, block (32, 32)
// Layout: strided
// Flags:  (none)
// Expect: loads of K are the limit by far.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kBlockM = 32;  // queries of a block, a warp for each
constexpr int kBlockN = 32;  // keys of a tile, a lane for each
constexpr int kThreads = kBlockM * kBlockN;
constexpr unsigned kWarp = 0xffffffff;

// The maximum, or the sum, of x over the warp; every lane gets it.
inline __device__ float reduce_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kWarp, x, offset));
  return x;
}

inline __device__ float reduce_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kWarp, x, offset);
  return x;
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ k,
                     const float* __restrict__ v, float* __restrict__ o, Strides q_strides,
                     Strides k_strides, Strides v_strides, Strides o_strides, int seqlen,
                     int num_heads, float softmax_scale, bool is_causal) {
  const int lane_id = threadIdx.x;
  const int row = blockIdx.y * kBlockM + threadIdx.y;
  if (row >= seqlen) return;  // the whole warp, and no other warp waits for it
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const float* gQ = q + batch * q_strides.batch + head * q_strides.head + row * q_strides.seqlen;
  const float* gK = k + batch * k_strides.batch + head * k_strides.head;
  const float* gV = v + batch * v_strides.batch + head * v_strides.head;
  float* gO = o + batch * o_strides.batch + head * o_strides.head + row * o_strides.seqlen;

  constexpr int kColumns = kHeadDim / 32;
  float rO[kColumns] = {};
  float row_max = -INFINITY;
  float row_sum = 0.0f;

  const int n_end = is_causal ? row + 1 : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    // S = softmax_scale * Q K^T, the lane's element
    const int n = n_start + lane_id;
    float s = 0.0f;
    for (int d = 0; n < n_end && d < kHeadDim; ++d) s += gQ[d] * gK[n * k_strides.seqlen + d];
    s = n < n_end ? softmax_scale * s : -INFINITY;

    // P = exp(S - row_max), and the statistics of the keys seen so far
    const float new_max = fmaxf(row_max, reduce_max(s));
    const float row_scale = expf(row_max - new_max);
    const float p = expf(s - new_max);
    row_sum = row_scale * row_sum + reduce_sum(p);
    row_max = new_max;

    // O = row_scale * O + P V
    float acc[kColumns] = {};
    for (int i = 0; i < min(kBlockN, n_end - n_start); ++i) {
      const float p_i = __shfl_sync(kWarp, p, i);
      for (int c = 0; c < kColumns; ++c) {
        acc[c] += p_i * gV[(n_start + i) * v_strides.seqlen + 32 * c + lane_id];
      }
    }
    for (int c = 0; c < kColumns; ++c) rO[c] = row_scale * rO[c] + acc[c];
  }
  for (int c = 0; c < kColumns; ++c) gO[32 * c + lane_id] = rO[c] / row_sum;
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch_for(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  const dim3 block(kBlockN, kBlockM);
  return launch_kernel(attention_kernel<kHeadDim>, grid, block, 0, stream,
                       static_cast<const float*>(params.q), static_cast<const float*>(params.k),
                       static_cast<const float*>(params.v), static_cast<float*>(params.o),
                       params.q_strides, params.k_strides, params.v_strides, params.o_strides,
                       params.seqlen, params.num_heads, params.softmax_scale, params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim == 32) return launch_for<32>(params, stream);
  if (params.head_dim == 64) return launch_for<64>(params, stream);
  if (params.head_dim == 128) return launch_for<128>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace attention::ATTENTION_VERSION
