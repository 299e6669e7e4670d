// v01 - decode with each head's keys split over blocks
//
// Change: the first version. A block attends to kSplit keys of one row and head: it requests all
//         their rows of K and V, 16 bytes per load, before it needs the first. It stores O before
//         the division, the maximum and the sum in scratch, and a second kernel joins the splits of
//         each row and head.
// Why:    one block per row and head can leave most multiprocessors idle, and reading the cache
//         from memory takes most of the time. More blocks request more of it at once.
// Cost:   a second launch, and scratch: kHeadDim + 2 floats per split.
// Tile:   kSplit = 128 keys, block (256)
// Layout: strided
// Role:   decode
// Takes:  float32 float16 bfloat16
// Flags:  (none)
// Expect: constant time, the latency of two kernels, until the splits of all rows and heads fill
//         the GPU.
//
// A split has the same keys in the same order whatever the batch and max_seqlen, and splits are
// joined in order: neither changes a bit of a row.

#include <cfloat>

#include "element.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kSplit = 128;  // keys per block
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kPerChunk = 16 / sizeof(Element);  // elements in 16 bytes
constexpr int kAtOnce = 8;                       // splits that a join thread loads at once
constexpr unsigned kWarp = 0xffffffff;

// The result of a split: O before the division, row_max, row_sum. (batch, num_heads, splits)
template <int kHeadDim>
struct Partial {
  float o[kHeadDim];
  float row_max;
  float row_sum;
};

// Grid: splits, heads, rows. Consecutive lanes have the chunks of a key, so a warp reads several
// keys at once; a thread has kSteps chunks of keys and kSteps of values in registers.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    split_kernel(const Element* __restrict__ q, const Element* __restrict__ k_cache,
                 const Element* __restrict__ v_cache, Partial<kHeadDim>* __restrict__ partials,
                 const int* __restrict__ seqlens, Strides q_strides, Strides k_strides,
                 Strides v_strides, float softmax_scale) {
  constexpr int kKeyLanes = kHeadDim / kPerChunk;  // lanes that share a key
  constexpr int kKeys = kThreads / kKeyLanes;      // keys that the block reads at a time
  constexpr int kSteps = kSplit / kKeys;
  const int split = blockIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const int keys = seqlens[batch] - split * kSplit;  // from this split's first key to the row's end
  if (keys <= 0) return;

  const int lane_id = threadIdx.x % 32;
  const int warp_id = threadIdx.x / 32;
  const int column = lane_id % kKeyLanes * kPerChunk;
  const int first = threadIdx.x / kKeyLanes;  // this thread's keys are first + step * kKeys
  const int64_t n_start = static_cast<int64_t>(split) * kSplit;
  const Element* const gQ = q + batch * q_strides.batch + head * q_strides.head;
  const Element* const gK = k_cache + batch * k_strides.batch + head * k_strides.head;
  const Element* const gV = v_cache + batch * v_strides.batch + head * v_strides.head;

  uint4 rK[kSteps], rV[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int n = first + step * kKeys;
    const int64_t row = n_start + n;
    rK[step] = rV[step] = make_uint4(0, 0, 0, 0);
    if (n < keys) {
      rK[step] = *reinterpret_cast<const uint4*>(gK + row * k_strides.seqlen + column);
      rV[step] = *reinterpret_cast<const uint4*>(gV + row * v_strides.seqlen + column);
    }
  }
  float rQ[kPerChunk];
  unpack<Element>(*reinterpret_cast<const uint4*>(gQ + column), rQ);

  // S = softmax_scale * Q K^T, and its maximum over the warp. The initial maximum is finite, so
  // that a warp without keys does not compute inf - inf.
  float s[kSteps];
  float row_max = -FLT_MAX;
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
    s[step] = first + step * kKeys < keys ? softmax_scale * s[step] : -INFINITY;
    row_max = fmaxf(row_max, s[step]);
  }
#pragma unroll
  for (int width = kKeyLanes; width < 32; width *= 2)
    row_max = fmaxf(row_max, __shfl_xor_sync(kWarp, row_max, width));

  // P = exp(S - row_max), O = P V
  float row_sum = 0.0f;
  float rO[kPerChunk] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    float value[kPerChunk];
    unpack<Element>(rV[step], value);
    const float p = __expf(s[step] - row_max);
    row_sum += p;
#pragma unroll
    for (int i = 0; i < kPerChunk; ++i) rO[i] += p * value[i];
  }
#pragma unroll
  for (int width = kKeyLanes; width < 32; width *= 2) {
    row_sum += __shfl_xor_sync(kWarp, row_sum, width);
#pragma unroll
    for (int i = 0; i < kPerChunk; ++i) rO[i] += __shfl_xor_sync(kWarp, rO[i], width);
  }

  // Joins the warps' results.
  __shared__ Partial<kHeadDim> sPart[kWarps];
  if (lane_id < kKeyLanes) {
#pragma unroll
    for (int i = 0; i < kPerChunk; ++i) sPart[warp_id].o[column + i] = rO[i];
  }
  if (lane_id == 0) {
    sPart[warp_id].row_max = row_max;
    sPart[warp_id].row_sum = row_sum;
  }
  __syncthreads();
  if (threadIdx.x >= kHeadDim) return;
  float o = 0.0f;
  row_max = -FLT_MAX;
  row_sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) row_max = fmaxf(row_max, sPart[warp].row_max);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float row_scale = __expf(sPart[warp].row_max - row_max);
    row_sum += row_scale * sPart[warp].row_sum;
    o += row_scale * sPart[warp].o[threadIdx.x];
  }
  const int64_t row = (static_cast<int64_t>(batch) * gridDim.y + head) * gridDim.x + split;
  partials[row].o[threadIdx.x] = o;
  if (threadIdx.x == 0) {
    partials[row].row_max = row_max;
    partials[row].row_sum = row_sum;
  }
}

// Joins the splits. Grid: heads, rows. A thread has one column of O.
template <int kHeadDim>
__global__ void __launch_bounds__(kHeadDim)
    join_kernel(const Partial<kHeadDim>* __restrict__ partials, Element* __restrict__ o,
                const int* __restrict__ seqlens, Strides o_strides, int max_splits) {
  const int head = blockIdx.x;
  const int batch = blockIdx.y;
  const int splits = (seqlens[batch] + kSplit - 1) / kSplit;
  partials += (static_cast<int64_t>(batch) * gridDim.x + head) * max_splits;
  float row_max = -FLT_MAX;
  float row_sum = 0.0f;
  float total = 0.0f;
  for (int first = 0; first < splits; first += kAtOnce) {
    float maxima[kAtOnce], sums[kAtOnce], columns[kAtOnce];
    float new_max = row_max;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Partial<kHeadDim>& partial = partials[min(first + i, splits - 1)];
      maxima[i] = first + i < splits ? partial.row_max : -INFINITY;
      sums[i] = partial.row_sum;
      columns[i] = partial.o[threadIdx.x];
      new_max = fmaxf(new_max, maxima[i]);
    }
    const float row_scale = __expf(row_max - new_max);
    row_max = new_max;
    row_sum *= row_scale;
    total *= row_scale;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float split_scale = __expf(maxima[i] - row_max);
      row_sum += split_scale * sums[i];
      total += split_scale * columns[i];
    }
  }
  Element* const gO = o + batch * o_strides.batch + head * o_strides.head;
  gO[threadIdx.x] = from_float<Element>(total / row_sum);
}

int64_t scratch_floats(const DecodeParams& params) {
  return static_cast<int64_t>(params.batch) * params.num_heads *
         ceil_div(params.max_seqlen, kSplit) * (params.head_dim + 2);
}

template <int kHeadDim>
cudaError_t launch_for(const DecodeParams& params, cudaStream_t stream) {
  static_assert(sizeof(Partial<kHeadDim>) == (kHeadDim + 2) * sizeof(float));
  const int splits = ceil_div(params.max_seqlen, kSplit);
  const auto partials = reinterpret_cast<Partial<kHeadDim>*>(params.scratch);
  const cudaError_t error = launch_kernel(
      split_kernel<kHeadDim>, dim3(splits, params.num_heads, params.batch), kThreads, 0, stream,
      static_cast<const Element*>(params.q), static_cast<const Element*>(params.k_cache),
      static_cast<const Element*>(params.v_cache), partials, params.seqlens, params.q_strides,
      params.k_strides, params.v_strides, params.softmax_scale);
  if (error != cudaSuccess) return error;
  return launch_kernel(join_kernel<kHeadDim>, dim3(params.num_heads, params.batch), kHeadDim, 0,
                       stream, partials, static_cast<Element*>(params.o), params.seqlens,
                       params.o_strides, splits);
}

cudaError_t launch(const DecodeParams& params, cudaStream_t stream) {
  if (params.head_dim == 32) return launch_for<32>(params, stream);
  if (params.head_dim == 64) return launch_for<64>(params, stream);
  if (params.head_dim == 128) return launch_for<128>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace attention::ATTENTION_VERSION
