// A decode kernel around the slot, whose file is included first: each block attends to all splits of a
// row and head. So attention of the fused step is judged alone, and decodes in every engine.

#pragma once

#include "slot/slot.cuh"

namespace attention::slot {

// Grid: heads, rows.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodeParams p) {
  __shared__ typename Attention<kHeadDim>::Shared shared;
  __shared__ Partial<kHeadDim> partials[Attention<kHeadDim>::kPartials];
  __shared__ alignas(16) float q[kHeadDim];
  __shared__ alignas(16) Element newest_key[kHeadDim], newest_value[kHeadDim];
  const int t = threadIdx.x, head = blockIdx.x, row = blockIdx.y;
  const int newest = p.seqlens[row] - 1;
  const auto part = [&](const void* all, const Strides& strides) {
    return static_cast<const Element*>(all) + row * strides.batch + head * strides.head;
  };
  const Element* const keys = part(p.k_cache, p.k_strides);
  const Element* const values = part(p.v_cache, p.v_strides);
  Attention<kHeadDim> attention{
      Cache{keys, values, p.k_strides.seqlen, p.v_strides.seqlen, newest}};
  attention.load(0);
  if (t < kHeadDim) {
    q[t] = to_float(part(p.q, p.q_strides)[t]);
    newest_key[t] = keys[newest * p.k_strides.seqlen + t];
    newest_value[t] = values[newest * p.v_strides.seqlen + t];
  }
  __syncthreads();
  const auto query = attention.receive(Token<true>{q, newest_key, newest_value});
  float row_max = -FLT_MAX, row_sum = 0.0f, o = 0.0f;
  for (int split = 0; split * kSplit <= newest; ++split) {
    const float softmax_scale = static_cast<float>(p.softmax_scale);
    const auto result = attention.attend_to(query, softmax_scale, split, 1, shared);
    if (split > 0) __syncthreads();
    result.store(partials);
    __syncthreads();
    if (t >= kHeadDim) continue;
    for (const Partial<kHeadDim>& partial : partials) {
      const float old_max = row_max;
      row_max = fmaxf(row_max, partial.row_max);
      const float kept = __expf(old_max - row_max), scale = __expf(partial.row_max - row_max);
      row_sum = kept * row_sum + scale * partial.row_sum;
      o = kept * o + scale * partial.o[t];
    }
  }
  if (t < kHeadDim)
    const_cast<Element*>(part(p.o, p.o_strides))[t] = from_float<Element>(o / row_sum);
}

}  // namespace attention::slot

namespace attention::ATTENTION_VERSION {

int64_t scratch_floats(const DecodeParams&) { return 0; }

template <int... kHeadDims>
cudaError_t launch_for(const DecodeParams& p, cudaStream_t stream) {
  const dim3 grid(p.num_heads, p.batch);
  cudaError_t error = cudaErrorInvalidValue;
  (void)(... ||
         (p.head_dim == kHeadDims && (error = launch_kernel(slot::decode_kernel<kHeadDims>, grid,
                                                            slot::kThreads, 0, stream, p),
                                      true)));
  return error;
}

cudaError_t launch(const DecodeParams& p, cudaStream_t stream) {
  return launch_for<SLOT_HEAD_DIMS>(p, stream);  // those that the slot's file takes
}

}  // namespace attention::ATTENTION_VERSION
