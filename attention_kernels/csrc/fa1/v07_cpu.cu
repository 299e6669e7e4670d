// v07 - standard attention on the CPU, parallelized with OpenMP
//
// Change: the reference for the others. Host code: a task is kBlockM queries of one head; for each
//         query it computes a whole row of S, its softmax, and the weighted sum of V.
// Why:    the yardstick for a GPU's speed-up, and a check by other means than tiles and rescaling.
// Cost:   each query reads all keys and values that it sees, at best from the cache.
// Tile:   kBlockM = 16 queries, whole rows of S
// Layout: strided
// Takes:  float32, on the CPU
// Error:  2x: a sum over the keys is one chain of additions; the budget assumes blockwise sums.
// Flags:  -Xcompiler=-fopenmp
// Expect: a speed-up of nearly the number of threads, and the same bits with any number.

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kBlockM = 16;

namespace {

// Computes one query's output. s has room for `visible` floats.
void attend(const float* q, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
            float* o, float* s, int visible, int head_dim, float softmax_scale) {
  // S = softmax_scale * Q K^T
  float row_max = -INFINITY;
  for (int n = 0; n < visible; ++n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int d = 0; d < head_dim; ++d) {
      sum += q[d] * k[n * k_stride + d];
    }
    s[n] = softmax_scale * sum;
    row_max = std::max(row_max, s[n]);
  }

  // P = exp(S - row_max), in place of S
  float row_sum = 0.0f;
  for (int n = 0; n < visible; ++n) {
    s[n] = std::exp(s[n] - row_max);
    row_sum += s[n];
  }

  // O = P V / row_sum
  for (int d = 0; d < head_dim; ++d) {
    o[d] = 0.0f;
  }
  for (int n = 0; n < visible; ++n) {
    const float p = s[n] / row_sum;
    for (int d = 0; d < head_dim; ++d) {
      o[d] += p * v[n * v_stride + d];
    }
  }
}

}  // namespace

// One row of S per thread.
int64_t scratch_floats(const Params& params) {
  return int64_t{omp_get_max_threads()} * params.seqlen;
}

cudaError_t launch(const Params& params, cudaStream_t) {
  const auto* q = static_cast<const float*>(params.q);
  const auto* k = static_cast<const float*>(params.k);
  const auto* v = static_cast<const float*>(params.v);
  auto* o = static_cast<float*>(params.o);
  const int heads = params.batch * params.num_heads;
  const int m_blocks = ceil_div(params.seqlen, kBlockM);

  // Dynamic: under a causal mask the last queries take the longest.
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int i = 0; i < heads; ++i) {
    for (int m_block = 0; m_block < m_blocks; ++m_block) {
      const int batch = i / params.num_heads;
      const int head = i % params.num_heads;
      const auto offset = [&](const Strides& strides) {
        return batch * strides.batch + head * strides.head;
      };
      float* s = params.scratch + int64_t{omp_get_thread_num()} * params.seqlen;
      const int m_end = std::min((m_block + 1) * kBlockM, params.seqlen);
      for (int m = m_block * kBlockM; m < m_end; ++m) {
        const int visible = params.is_causal ? m + 1 : params.seqlen;
        attend(q + offset(params.q_strides) + m * params.q_strides.seqlen,
               k + offset(params.k_strides), params.k_strides.seqlen, v + offset(params.v_strides),
               params.v_strides.seqlen, o + offset(params.o_strides) + m * params.o_strides.seqlen,
               s, visible, params.head_dim, params.softmax_scale);
      }
    }
  }
  return cudaSuccess;
}

}  // namespace attention::ATTENTION_VERSION
