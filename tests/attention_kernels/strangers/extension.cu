// A PyTorch extension, compiled by torch.utils.cpp_extension:
//
//   o = extension.forward(q, k, v)   # (batch, heads, seqlen, head_dim), causal

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>

#include <cmath>
#include <limits>

#define CHECK_INPUT(x)                                        \
  TORCH_CHECK((x).is_cuda(), #x " must be on a GPU");         \
  TORCH_CHECK((x).is_contiguous(), #x " must be contiguous"); \
  TORCH_CHECK((x).dim() == 4, #x " must have four dimensions")

namespace {

constexpr int kThreads = 128;

// A block computes one row: scores in shared memory, then their softmax, then the sum of values.
template <typename scalar_t>
__global__ void attention_row(const scalar_t* __restrict__ q, const scalar_t* __restrict__ k,
                              const scalar_t* __restrict__ v, scalar_t* __restrict__ o, int seqlen,
                              int head_dim, float scale) {
  extern __shared__ float scores[];
  __shared__ float reduced[kThreads / 32];
  const int row = blockIdx.x, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int64_t plane = static_cast<int64_t>(blockIdx.y) * seqlen * head_dim;
  const scalar_t* const q_row = q + plane + static_cast<int64_t>(row) * head_dim;

  auto reduce = [&](float x, auto combine) {
    for (int offset = 16; offset > 0; offset >>= 1)
      x = combine(x, __shfl_xor_sync(0xffffffff, x, offset));
    if (lane == 0) reduced[warp] = x;
    __syncthreads();
    x = reduced[0];
    for (int i = 1; i < kThreads / 32; ++i) x = combine(x, reduced[i]);
    __syncthreads();
    return x;
  };

  float highest = -std::numeric_limits<float>::infinity();
  for (int j = tid; j <= row; j += kThreads) {
    const scalar_t* const k_row = k + plane + static_cast<int64_t>(j) * head_dim;
    float dot = 0.0f;
    for (int d = 0; d < head_dim; ++d)
      dot += static_cast<float>(q_row[d]) * static_cast<float>(k_row[d]);
    scores[j] = dot * scale;
    highest = fmaxf(highest, scores[j]);
  }
  highest = reduce(highest, [](float a, float b) { return fmaxf(a, b); });

  float sum = 0.0f;
  for (int j = tid; j <= row; j += kThreads) {
    scores[j] = __expf(scores[j] - highest);
    sum += scores[j];
  }
  sum = reduce(sum, [](float a, float b) { return a + b; });

  for (int d = tid; d < head_dim; d += kThreads) {
    float total = 0.0f;
    for (int j = 0; j <= row; ++j)
      total += scores[j] * static_cast<float>(v[plane + static_cast<int64_t>(j) * head_dim + d]);
    o[plane + static_cast<int64_t>(row) * head_dim + d] = static_cast<scalar_t>(total / sum);
  }
}

}  // namespace

torch::Tensor forward(torch::Tensor q, torch::Tensor k, torch::Tensor v) {
  CHECK_INPUT(q);
  CHECK_INPUT(k);
  CHECK_INPUT(v);
  TORCH_CHECK(q.sizes() == k.sizes() && k.sizes() == v.sizes(), "q, k and v differ in shape");
  const at::cuda::CUDAGuard guard(q.device());
  auto o = torch::empty_like(q);
  const int seqlen = static_cast<int>(q.size(2)), head_dim = static_cast<int>(q.size(3));
  const dim3 grid(seqlen, static_cast<unsigned>(q.size(0) * q.size(1)));
  const size_t bytes = seqlen * sizeof(float);
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::ScalarType::Half, at::ScalarType::BFloat16, q.scalar_type(), "forward", [&] {
        attention_row<scalar_t><<<grid, kThreads, bytes, stream>>>(
            q.data_ptr<scalar_t>(), k.data_ptr<scalar_t>(), v.data_ptr<scalar_t>(),
            o.data_ptr<scalar_t>(), seqlen, head_dim, scale);
      });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return o;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward, "Causal attention (CUDA)", py::arg("q"), py::arg("k"), py::arg("v"));
}
