// v03 - decode with one warp per row and head
//
// Change: a warp has a whole row and head, and a block has kWarps of them, which do not meet. Tiles
//         are of kSteps keys per group of lanes, fewer than in v02.
// Why:    a batch of hundreds of rows has thousands of heads, so that the GPU is full without any
//         split; and most keys of a block of v02 are past the end of a short row. Warps that do not
//         wait for each other keep more of the cache in flight.
// Cost:   a single row has as many warps as heads: a long row of a small batch takes many times as
//         long as in v02.
// Tile:   kBlockN = kSteps * 32 / (lanes of a key) keys, block (128)
// Layout: strided
// Role:   decode
// Takes:  float32 float16 bfloat16
// Flags:  (none)
// Expect: from about a thousand heads on, the time of reading the cache from memory.
//
// Which lanes have a key, and the order in which they are joined, depend only on the key's
// position: neither the batch nor max_seqlen changes a single bit of a row.

#include <cfloat>

#include "element.cuh"
#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kSteps = 4;  // keys per tile and group of lanes
constexpr int kWarps = 4;
constexpr int kResident = 6;  // blocks per multiprocessor
constexpr int kThreads = 32 * kWarps;
constexpr int kPerChunk = 16 / sizeof(Element);  // elements in 16 bytes
constexpr unsigned kWarp = 0xffffffff;

// Loads 16 bytes of each of the keys n, n + kKeys, ...; zeros past the end of the row.
template <int kKeys>
__device__ void load(uint4 (&chunks)[kSteps], const Element* from, int64_t stride, int n,
                     int seqlen) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = n + step * kKeys;
    chunks[step] = make_uint4(0, 0, 0, 0);
    if (at < seqlen) chunks[step] = *reinterpret_cast<const uint4*>(from + at * stride);
  }
}

// Consecutive warps have the heads of a row. Consecutive lanes have the chunks of a key, so a warp
// reads several keys at once.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, kResident)
    decode_kernel(const Element* __restrict__ q, const Element* __restrict__ k_cache,
                  const Element* __restrict__ v_cache, Element* __restrict__ o,
                  const int* __restrict__ seqlens, Strides q_strides, Strides k_strides,
                  Strides v_strides, Strides o_strides, int batch_size, int num_heads,
                  float softmax_scale) {
  ptx::allow_next();
  constexpr int kKeyLanes = kHeadDim / kPerChunk;  // lanes that share a key
  constexpr int kKeys = 32 / kKeyLanes;            // keys that the warp reads at a time
  constexpr int kBlockN = kKeys * kSteps;
  const int warp_id = blockIdx.x * kWarps + threadIdx.x / 32;
  const int head = warp_id % num_heads;
  const int batch = warp_id / num_heads;
  const int lane_id = threadIdx.x % 32;
  const int column = lane_id % kKeyLanes * kPerChunk;
  const int first = lane_id / kKeyLanes;
  const Element* const gQ = q + batch * q_strides.batch + head * q_strides.head;
  const Element* const gK = k_cache + batch * k_strides.batch + head * k_strides.head + column;
  const Element* const gV = v_cache + batch * v_strides.batch + head * v_strides.head + column;

  ptx::wait_for_previous();
  if (batch >= batch_size) return;
  const int seqlen = seqlens[batch];
  uint4 rK[kSteps], rV[kSteps];
  load<kKeys>(rK, gK, k_strides.seqlen, first, seqlen);
  load<kKeys>(rV, gV, v_strides.seqlen, first, seqlen);
  float rQ[kPerChunk];
  unpack<Element>(*reinterpret_cast<const uint4*>(gQ + column), rQ);

  // The initial maximum is finite, so that a group without keys does not compute inf - inf.
  float row_max = -FLT_MAX;
  float row_sum = 0.0f;
  float rO[kPerChunk] = {};
  for (int n_start = 0; n_start < seqlen; n_start += kBlockN) {
    // S = softmax_scale * Q K^T
    float s[kSteps];
    float new_max = row_max;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float key[kPerChunk];
      unpack<Element>(rK[step], key);
      s[step] = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerChunk; ++i) s[step] += rQ[i] * key[i];
#pragma unroll
      for (int width = kKeyLanes / 2; width > 0; width /= 2)
        s[step] += __shfl_xor_sync(kWarp, s[step], width);
      s[step] = n_start + first + step * kKeys < seqlen ? softmax_scale * s[step] : -INFINITY;
      new_max = fmaxf(new_max, s[step]);
    }
    load<kKeys>(rK, gK, k_strides.seqlen, n_start + kBlockN + first, seqlen);

    // P = exp(S - row_max), O = row_scale * O + P V
    const float row_scale = __expf(row_max - new_max);
    row_max = new_max;
    row_sum *= row_scale;
#pragma unroll
    for (int i = 0; i < kPerChunk; ++i) rO[i] *= row_scale;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float value[kPerChunk];
      unpack<Element>(rV[step], value);
      const float p = __expf(s[step] - row_max);
      row_sum += p;
#pragma unroll
      for (int i = 0; i < kPerChunk; ++i) rO[i] += p * value[i];
    }
    load<kKeys>(rV, gV, v_strides.seqlen, n_start + kBlockN + first, seqlen);
  }

  // Joins the groups.
  float warp_max = row_max;
#pragma unroll
  for (int width = kKeyLanes; width < 32; width *= 2)
    warp_max = fmaxf(warp_max, __shfl_xor_sync(kWarp, warp_max, width));
  const float group_scale = __expf(row_max - warp_max);
  row_sum *= group_scale;
#pragma unroll
  for (int i = 0; i < kPerChunk; ++i) rO[i] *= group_scale;
#pragma unroll
  for (int width = kKeyLanes; width < 32; width *= 2) {
    row_sum += __shfl_xor_sync(kWarp, row_sum, width);
#pragma unroll
    for (int i = 0; i < kPerChunk; ++i) rO[i] += __shfl_xor_sync(kWarp, rO[i], width);
  }

  if (lane_id >= kKeyLanes) return;
  Element* const gO = o + batch * o_strides.batch + head * o_strides.head + column;
  alignas(16) Element chunk[kPerChunk];
#pragma unroll
  for (int i = 0; i < kPerChunk; ++i) chunk[i] = from_float<Element>(rO[i] / row_sum);
  *reinterpret_cast<uint4*>(gO) = *reinterpret_cast<const uint4*>(chunk);
}

int64_t scratch_floats(const DecodeParams&) { return 0; }

template <int kHeadDim>
cudaError_t launch_for(const DecodeParams& params, cudaStream_t stream) {
  return launch_early(
      decode_kernel<kHeadDim>, dim3(ceil_div(params.batch * params.num_heads, kWarps)), 1,
      dim3(kThreads), 0, stream, static_cast<const Element*>(params.q),
      static_cast<const Element*>(params.k_cache), static_cast<const Element*>(params.v_cache),
      static_cast<Element*>(params.o), params.seqlens, params.q_strides, params.k_strides,
      params.v_strides, params.o_strides, params.batch, params.num_heads, params.softmax_scale);
}

cudaError_t launch(const DecodeParams& params, cudaStream_t stream) {
  if (params.head_dim == 32) return launch_for<32>(params, stream);
  if (params.head_dim == 64) return launch_for<64>(params, stream);
  if (params.head_dim == 128) return launch_for<128>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace attention::ATTENTION_VERSION
