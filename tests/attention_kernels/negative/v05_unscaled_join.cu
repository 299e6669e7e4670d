// v05 - two splits of the keys joined without their maxima
//
// Change: a decode kernel that adds up its splits without rescaling them.
// Why:    each split's O and sum are relative to its own maximum: verify must find this.
// Cost:   wrong results, except for rows with one split or equal maxima.
// Tile:   kSplit = 64 keys, block (head_dim)
// Layout: strided
// Role:   decode
// Flags:  (none)
// Expect: FAILED.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kSplit = 64;

// Returns the start of one row and head.
inline __device__ const float* at(const void* tensor, Strides strides) {
  return static_cast<const float*>(tensor) + blockIdx.y * strides.batch + blockIdx.x * strides.head;
}

// A thread has one column of O and computes every score itself.
__global__ void decode_kernel(DecodeParams params, float softmax_scale) {
  const float* const gQ = at(params.q, params.q_strides);
  const float* const gK = at(params.k_cache, params.k_strides);
  const float* const gV = at(params.v_cache, params.v_strides);
  const int seqlen = params.seqlens[blockIdx.y];
  float o = 0.0f, row_sum = 0.0f, row_max = -INFINITY;
  for (int first = 0; first < seqlen; first += kSplit) {
    float split_o = 0.0f, split_sum = 0.0f, split_max = -INFINITY;
    for (int n = first; n < min(first + kSplit, seqlen); ++n) {
      float s = 0.0f;
      for (int d = 0; d < params.head_dim; ++d) s += gQ[d] * gK[n * params.k_strides.seqlen + d];
      s *= softmax_scale;
      const float new_max = fmaxf(split_max, s);
      const float scale = expf(split_max - new_max), p = expf(s - new_max);
      split_sum = scale * split_sum + p;
      split_o = scale * split_o + p * gV[n * params.v_strides.seqlen + threadIdx.x];
      split_max = new_max;
    }
    const float new_max = fmaxf(row_max, split_max);
    const float scale = expf(row_max - new_max);
    const float split_scale = 1.0f;
    // BROKEN. The right line: const float split_scale = expf(split_max - new_max);
    row_sum = scale * row_sum + split_scale * split_sum;
    o = scale * o + split_scale * split_o;
    row_max = new_max;
  }
  const_cast<float*>(at(params.o, params.o_strides))[threadIdx.x] = o / row_sum;
}

int64_t scratch_floats(const DecodeParams&) { return 0; }

cudaError_t launch(const DecodeParams& params, cudaStream_t stream) {
  return launch_kernel(decode_kernel, dim3(params.num_heads, params.batch), params.head_dim, 0,
                       stream, params, params.softmax_scale);
}

}  // namespace attention::ATTENTION_VERSION
