// v01 - one warp per head and row
//
// Change: the first of its ladder. A warp walks over the cache 32 keys at a time: each lane
//         computes one score, shuffles give the warp their maximum and sum, and each lane owns
//         every 32nd column of O, in registers.
// Why:    the least that is Flash Attention for one query: no shared memory, no barrier, no
//         scratch.
// Cost:   one warp reads a whole head's cache; a GPU has far more multiprocessors than warps here.
// Tile:   kBlockN = 32 keys, block (32)
// Layout: strided
// Role:   decode
// Flags:  (none)
// Expect: its time grows with seqlen while most of the GPU is idle; splitting the keys over blocks
//         and adding up their parts (split-KV) is the next step.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kBlockN = 32;  // keys of a tile, a lane for each
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
__global__ void __launch_bounds__(kBlockN)
    decode_kernel(const float* __restrict__ q, const float* __restrict__ k_cache,
                  const float* __restrict__ v_cache, float* __restrict__ o,
                  const int* __restrict__ seqlens, Strides q_strides, Strides k_strides,
                  Strides v_strides, Strides o_strides, float softmax_scale) {
  const int lane_id = threadIdx.x;
  const int head = blockIdx.x;
  const int batch = blockIdx.y;
  const float* gQ = q + batch * q_strides.batch + head * q_strides.head;
  const float* gK = k_cache + batch * k_strides.batch + head * k_strides.head;
  const float* gV = v_cache + batch * v_strides.batch + head * v_strides.head;
  float* gO = o + batch * o_strides.batch + head * o_strides.head;

  constexpr int kColumns = kHeadDim / 32;
  float rO[kColumns] = {};
  float row_max = -INFINITY;
  float row_sum = 0.0f;

  const int seqlen = seqlens[batch];
  for (int n_start = 0; n_start < seqlen; n_start += kBlockN) {
    // S = softmax_scale * Q K^T, the lane's element
    const int n = n_start + lane_id;
    float s = 0.0f;
    for (int d = 0; n < seqlen && d < kHeadDim; ++d) s += gQ[d] * gK[n * k_strides.seqlen + d];
    s = n < seqlen ? softmax_scale * s : -INFINITY;

    // P = exp(S - row_max), and the statistics of the keys seen so far
    const float new_max = fmaxf(row_max, reduce_max(s));
    const float row_scale = expf(row_max - new_max);
    const float p = expf(s - new_max);
    row_sum = row_scale * row_sum + reduce_sum(p);
    row_max = new_max;

    // O = row_scale * O + P V
    for (int c = 0; c < kColumns; ++c) rO[c] *= row_scale;
    for (int i = 0; i < min(kBlockN, seqlen - n_start); ++i) {
      const float p_i = __shfl_sync(kWarp, p, i);
      for (int c = 0; c < kColumns; ++c) {
        rO[c] += p_i * gV[(n_start + i) * v_strides.seqlen + 32 * c + lane_id];
      }
    }
  }
  for (int c = 0; c < kColumns; ++c) gO[32 * c + lane_id] = rO[c] / row_sum;
}

int64_t scratch_floats(const DecodeParams&) { return 0; }

template <int kHeadDim>
cudaError_t launch_for(const DecodeParams& params, cudaStream_t stream) {
  const dim3 grid(params.num_heads, params.batch);
  return launch_kernel(
      decode_kernel<kHeadDim>, grid, kBlockN, 0, stream, static_cast<const float*>(params.q),
      static_cast<const float*>(params.k_cache), static_cast<const float*>(params.v_cache),
      static_cast<float*>(params.o), params.seqlens, params.q_strides, params.k_strides,
      params.v_strides, params.o_strides, params.softmax_scale);
}

cudaError_t launch(const DecodeParams& params, cudaStream_t stream) {
  if (params.head_dim == 32) return launch_for<32>(params, stream);
  if (params.head_dim == 64) return launch_for<64>(params, stream);
  if (params.head_dim == 128) return launch_for<128>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace attention::ATTENTION_VERSION
