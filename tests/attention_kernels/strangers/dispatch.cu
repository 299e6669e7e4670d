/*
 * Attention over packed QKV, as a GPT-2 training loop has it.
 *
 *   qkv  (B, T, 3, NH, HS)   the output of the projection
 *   out  (B, T, NH, HS)      the input of the next one
 *   C = NH * HS
 */
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>

#include <type_traits>

#define RETURN_IF_ERROR(call)                   \
  do {                                          \
    const cudaError_t status_ = (call);         \
    if (status_ != cudaSuccess) return status_; \
  } while (0)

// Runs a lambda with a constant NAME, so that its body can use it as a template argument.
#define IF_CONSTANT(CONDITION, NAME, ...) \
  [&]() -> cudaError_t {                  \
    if (CONDITION) {                      \
      constexpr bool NAME = true;         \
      return __VA_ARGS__();               \
    }                                     \
    constexpr bool NAME = false;          \
    return __VA_ARGS__();                 \
  }()

#define FOR_HEAD_SIZE(VALUE, NAME, ...) \
  [&]() -> cudaError_t {                \
    switch (VALUE) {                    \
      case 32: {                        \
        constexpr int NAME = 32;        \
        return __VA_ARGS__();           \
      }                                 \
      case 64: {                        \
        constexpr int NAME = 64;        \
        return __VA_ARGS__();           \
      }                                 \
    }                                   \
    return cudaErrorInvalidValue;       \
  }()

template <int HS, int Tq, int Tk>
struct Tiles {
  static constexpr int kThreadsPerQuery = 4;
  static constexpr int kThreads = Tq * kThreadsPerQuery;
  static constexpr int kColumns = HS / kThreadsPerQuery;
  static constexpr int kPitch = HS + 4;
  static constexpr size_t kBytes = sizeof(float) * 2 * Tk * kPitch;
};

template <int HS, int Tq, int Tk, bool kCausal, bool kEven>
__global__ void attention_kernel(float* __restrict__ out, const float* __restrict__ qkv, int T,
                                 int NH, float scale) {
  using Tile = Tiles<HS, Tq, Tk>;
  extern __shared__ float4 smem4[];
  float* const ks = reinterpret_cast<float*>(smem4);
  float* const vs = ks + Tk * Tile::kPitch;

  const int nh = blockIdx.y % NH, b = blockIdx.y / NH;
  const int C = NH * HS;
  const int t0 = blockIdx.x * Tq;
  const int t = t0 + threadIdx.x / Tile::kThreadsPerQuery;
  const int part = threadIdx.x % Tile::kThreadsPerQuery;
  const float* const tokens = qkv + (size_t)b * T * 3 * C + nh * HS;
  const bool in_range = kEven || t < T;

  // The four threads of a query have its columns part, part + 4, ...
  float qr[Tile::kColumns], o[Tile::kColumns] = {};
  for (int c = 0; c < Tile::kColumns; ++c)
    qr[c] = in_range ? tokens[(size_t)t * 3 * C + c * Tile::kThreadsPerQuery + part] : 0.0f;

  float maxval = -FLT_MAX, sum = 0.0f;
  const int tend = kCausal ? (t0 + Tq < T ? t0 + Tq : T) : T;
  for (int s0 = 0; s0 < tend; s0 += Tk) {
    for (int i = threadIdx.x * 4; i < Tk * HS; i += Tile::kThreads * 4) {
      const int r = i / HS, c = i % HS;
      if (kEven || s0 + r < T) {
        const float* const token = tokens + (size_t)(s0 + r) * 3 * C + c;
        *reinterpret_cast<float4*>(ks + r * Tile::kPitch + c) =
            *reinterpret_cast<const float4*>(token + C);
        *reinterpret_cast<float4*>(vs + r * Tile::kPitch + c) =
            *reinterpret_cast<const float4*>(token + 2 * C);
      }
    }
    __syncthreads();
    for (int r = 0; r < Tk && s0 + r < tend; ++r) {
      float dot = 0.0f;
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c)
        dot += qr[c] * ks[r * Tile::kPitch + c * Tile::kThreadsPerQuery + part];
      dot += __shfl_xor_sync(0xFFFFFFFF, dot, 1, Tile::kThreadsPerQuery);
      dot += __shfl_xor_sync(0xFFFFFFFF, dot, 2, Tile::kThreadsPerQuery);
      dot *= scale;
      if constexpr (kCausal) {
        if (s0 + r > t) dot = -FLT_MAX;
      }
      const float newmax = fmaxf(maxval, dot);
      const float rescale = expf(maxval - newmax), e = expf(dot - newmax);
      sum = sum * rescale + e;
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c)
        o[c] = o[c] * rescale + e * vs[r * Tile::kPitch + c * Tile::kThreadsPerQuery + part];
      maxval = newmax;
    }
    __syncthreads();
  }
  if (!in_range) return;
  for (int c = 0; c < Tile::kColumns; ++c)
    out[((size_t)b * T + t) * C + nh * HS + c * Tile::kThreadsPerQuery + part] = o[c] / sum;
}

template <bool kCausal = true>
cudaError_t launch_attention(float* out, const float* qkv, int B, int T, int C, int NH,
                             cudaStream_t stream) {
  if (NH <= 0 || C % NH != 0) return cudaErrorInvalidValue;
  const int head_size = C / NH;
  return FOR_HEAD_SIZE(head_size, HS, [&] {
    constexpr int Tq = HS == 64 ? 16 : 32, Tk = 32;
    return IF_CONSTANT(T % Tq == 0 && T % Tk == 0, kEven, [&] {
      auto kernel = attention_kernel<HS, Tq, Tk, kCausal, kEven>;
      constexpr size_t bytes = Tiles<HS, Tq, Tk>::kBytes;
      RETURN_IF_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes)));
      const dim3 grid((T + Tq - 1) / Tq, B * NH);
      kernel<<<grid, Tiles<HS, Tq, Tk>::kThreads, bytes, stream>>>(
          out, qkv, T, NH, 1.0f / sqrtf(static_cast<float>(head_size)));
      return cudaGetLastError();
    });
  });
}

cudaError_t attention_forward(float* out, const float* qkv, int B, int T, int C, int NH,
                              cudaStream_t stream) {
  return launch_attention<true>(out, qkv, B, T, C, NH, stream);
}
