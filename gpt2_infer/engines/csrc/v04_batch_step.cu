// v04 - what a decode step of a large batch does between its matrix products
//
// Change: with hundreds of rows a library's products are hard to beat, so only the rest are our own
//         kernels: begin() adds a row's embeddings and applies the first LayerNorm; attend() stores
//         the new key and value and computes attention; append() only stores keys and values, for
//         prompts and other backends; add() adds a product to the residual stream and applies the
//         next LayerNorm; choose() finds the most likely token, whether the logits are finite, and
//         the token's log-probability.
// Why:    each of them replaces several kernels of PyTorch that take as long to start as to run,
//         and log_softmax() needs the logits in float32: four times the traffic.
// Cost:   a block per row: a small batch does not fill a GPU.
// Tile:   a row per block; 16 bytes per thread at a time
// Layout: contiguous
// Role:   struct
// Takes:  float16 bfloat16
// Flags:  (none)
// Expect: choose() is bound by memory from some hundred rows on, the others by latency.
//
// A row's result does not depend on the other rows: sums are in float32, in a fixed order.

#include <cfloat>
#include <climits>
#include <cstdint>

#include "../../csrc/block_sum.cuh"
#include "element.cuh"
#include "ptx.cuh"

namespace attention {

enum Kernel { kBegin, kAppend, kAttend, kAdd, kChoose };

// Must match KernelParams in batch_step.py. Rows begin at a multiple of 16 bytes.
struct StructParams {
  int64_t* tokens;           // (rows): begin() reads them, choose() replaces them; -1: not finite
  int* lengths;              // (rows): tokens in the cache; choose() adds `active`, if not null
  int* seqlens;              // (rows): begin() stores lengths + 1
  const int* active;         // (rows): 1 or 0
  float* logprobs;           // (rows): of the chosen token
  const Element* wte;        // (vocab_size, width)
  const Element* wpe;        // (positions, width)
  const Element* ln_weight;  // (width)
  const Element* ln_bias;    // (width)
  Element* x;                // (rows, width): the residual stream
  Element* heads;            // (rows, width): attend()'s output
  const Element* qkv;        // (rows, 3, width): append() stores keys and values
  const float* sums;         // (parts, rows, width): add() adds them to x
  const Element* bias;       // (width): and this
  Element* normed;           // (rows, width)
  const Element* logits;     // (rows, vocab_size), with row_stride elements between rows
  Element* kv;               // a layer's cache, (2, slots, num_heads, max_seqlen, head_dim)
  const int64_t* slots;      // (rows / seqlen): of prompts; null: row i belongs to slot i
  int64_t row_stride;
  int64_t kv_stride;  // elements from keys to values
  int kernel;
  int rows;
  int parts;
  int width;       // a multiple of 8
  int vocab_size;  // of choose()
  int seqlen;      // of prompts: a row's position is row % seqlen; else it is seqlens - 1
  int num_heads;
  int max_seqlen;
  float epsilon;
  float softmax_scale;
};
using KernelParams = StructParams;

namespace {

constexpr int kChunk = 8;            // elements in 16 bytes
constexpr int kMaxThreads = 1024;    // a row of 8,192 columns
constexpr int kChooseThreads = 512;  // of choose()
constexpr int kAttendThreads = 128;  // of attend()
constexpr int kAttendResident = 6;   // blocks of attend() per multiprocessor
constexpr int kSteps = 4;            // keys of a tile per group of lanes
constexpr int kAtOnce = 4;           // chunks of logits that a thread loads at once

__device__ inline void load(const Element* from, float (&v)[kChunk]) {
  unpack<Element>(*reinterpret_cast<const uint4*>(from), v);
}
__device__ inline void store(Element* to, const float (&v)[kChunk]) {
  alignas(16) Element chunk[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) chunk[i] = from_float<Element>(v[i]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(chunk);
}

// LayerNorm of a row; each thread has a chunk of it.
struct Norm {
  float weight[kChunk], bias[kChunk];

  __device__ Norm(const KernelParams& p, int column) {
    if (column >= p.width) return;
    load(p.ln_weight + column, weight);
    load(p.ln_bias + column, bias);
  }
  __device__ void apply(const KernelParams& p, int column, float (&v)[kChunk], Element* to) const {
    __shared__ float warps[2][kMaxThreads / 32];
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum += v[i];
    const float mean = block_sum(sum, warps[0]) / p.width;
    if (column < p.width) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) v[i] -= mean, square += v[i] * v[i];
    }
    const float scale = rsqrtf(block_sum(square, warps[1]) / p.width + p.epsilon);
    if (column >= p.width) return;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) v[i] = v[i] * scale * weight[i] + bias[i];
    store(to + column, v);
  }
};

__device__ inline void add_chunk(const float (&other)[kChunk], float (&v)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) v[i] += other[i];
}

// A step's first kernel is launched normally, so that those after it may start early and still read
// what came before it.
__global__ void __launch_bounds__(kMaxThreads) begin(KernelParams p) {
  ptx::allow_next();
  const int row = blockIdx.x, column = kChunk * threadIdx.x;
  const int64_t at = static_cast<int64_t>(row) * p.width;
  const Norm norm(p, column);
  const int64_t token = p.tokens[row] < 0 ? 0 : p.tokens[row];
  const int length = p.lengths[row];
  if (threadIdx.x == 0) p.seqlens[row] = length + 1;
  float v[kChunk] = {};
  if (column < p.width) {
    float position[kChunk];
    load(p.wte + token * p.width + column, v);
    load(p.wpe + static_cast<int64_t>(length) * p.width + column, position);
    add_chunk(position, v);
    store(p.x + at + column, v);
  }
  norm.apply(p, column, v, p.normed + at);
}

__global__ void __launch_bounds__(kMaxThreads) add(KernelParams p) {
  ptx::allow_next();
  const int row = blockIdx.x, column = kChunk * threadIdx.x;
  const int64_t at = static_cast<int64_t>(row) * p.width;
  const Norm norm(p, column);
  float v[kChunk] = {};
  if (column < p.width) load(p.bias + column, v);
  ptx::wait_for_previous();
  if (column < p.width) {
    float x[kChunk];
    load(p.x + at + column, x);
#pragma unroll 4
    for (int part = 0; part < p.parts; ++part) {
      const float* const from =
          p.sums + (static_cast<int64_t>(part) * p.rows + row) * p.width + column;
      const float4 a = *reinterpret_cast<const float4*>(from);
      const float4 b = *reinterpret_cast<const float4*>(from + 4);
      add_chunk({a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, v);
    }
    add_chunk(x, v);
    store(p.x + at + column, v);
  }
  norm.apply(p, column, v, p.normed + at);
}

// Threads have the chunks of a row's key, then those of its value.
__global__ void __launch_bounds__(kMaxThreads) append(KernelParams p) {
  ptx::allow_next();
  const int row = blockIdx.x, head_dim = p.width / p.num_heads;
  ptx::wait_for_previous();
  const bool is_prompt = p.seqlen > 0;
  const int position = is_prompt ? row % p.seqlen : p.seqlens[row] - 1;
  const int64_t slot = is_prompt ? p.slots[row / p.seqlen] : row;
  const Element* const from = p.qkv + static_cast<int64_t>(row) * 3 * p.width + p.width;
  for (int i = kChunk * threadIdx.x; i < 2 * p.width; i += kChunk * blockDim.x) {
    const int part = i < p.width ? 0 : 1, column = i - part * p.width;
    const int64_t head = slot * p.num_heads + column / head_dim;
    Element* const to = p.kv + part * p.kv_stride + (head * p.max_seqlen + position) * head_dim;
    *reinterpret_cast<uint4*>(to + column % head_dim) = *reinterpret_cast<const uint4*>(from + i);
  }
}

// Attention of each row's newest token, as in DECODE_SPLIT_KV_VERSION_3: a warp per row and head.
// The new key and value come from qkv and are stored in the cache. The loop is repeated here rather
// than shared, because each kernel is tuned by itself: this one reads the cache before it waits.
template <int kHeadDim>
__global__ void __launch_bounds__(kAttendThreads, kAttendResident) attend(KernelParams p) {
  ptx::allow_next();
  constexpr int kKeyLanes = kHeadDim / kChunk;  // lanes that share a key
  constexpr int kKeys = 32 / kKeyLanes;         // keys that the warp reads at a time
  constexpr int kTile = kKeys * kSteps;
  const int lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int head = warp % p.num_heads, row = warp / p.num_heads;
  const int first = lane / kKeyLanes, column = lane % kKeyLanes * kChunk;
  if (row >= p.rows) return;
  const int newest = p.lengths[row];  // not seqlens, which begin() may still be writing
  Element* const keys = p.kv + static_cast<int64_t>(warp) * p.max_seqlen * kHeadDim + column;
  Element* const values = keys + p.kv_stride;
  const auto load_tile = [&](uint4(&chunks)[kSteps], const Element* from, int n) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = n + first + step * kKeys;
      chunks[step] = make_uint4(0, 0, 0, 0);
      if (at < newest)
        chunks[step] = *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(at) * kHeadDim);
    }
  };
  uint4 rK[kSteps], rV[kSteps];
  load_tile(rK, keys, 0);
  load_tile(rV, values, 0);
  ptx::wait_for_previous();
  const Element* const qkv =
      p.qkv + static_cast<int64_t>(row) * 3 * p.width + head * kHeadDim + column;
  float rQ[kChunk];
  load(qkv, rQ);
  const uint4 new_key = *reinterpret_cast<const uint4*>(qkv + p.width);
  const uint4 new_value = *reinterpret_cast<const uint4*>(qkv + 2 * p.width);
  if (first == 0) {
    *reinterpret_cast<uint4*>(keys + static_cast<int64_t>(newest) * kHeadDim) = new_key;
    *reinterpret_cast<uint4*>(values + static_cast<int64_t>(newest) * kHeadDim) = new_value;
  }

  float row_max = -FLT_MAX, row_sum = 0.0f, rO[kChunk] = {};
  for (int n_start = 0; n_start <= newest; n_start += kTile) {
    float s[kSteps], new_max = row_max;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = n_start + first + step * kKeys;
      float key[kChunk];
      unpack<Element>(at == newest ? new_key : rK[step], key);
      s[step] = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) s[step] += rQ[i] * key[i];
#pragma unroll
      for (int width = kKeyLanes / 2; width > 0; width /= 2)
        s[step] += __shfl_xor_sync(kWarp, s[step], width);
      s[step] = at <= newest ? p.softmax_scale * s[step] : -INFINITY;
      new_max = fmaxf(new_max, s[step]);
    }
    load_tile(rK, keys, n_start + kTile);

    const float row_scale = __expf(row_max - new_max);
    row_max = new_max;
    row_sum *= row_scale;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) rO[i] *= row_scale;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float value[kChunk];
      unpack<Element>(n_start + first + step * kKeys == newest ? new_value : rV[step], value);
      const float probability = __expf(s[step] - row_max);
      row_sum += probability;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) rO[i] += probability * value[i];
    }
    load_tile(rV, values, n_start + kTile);
  }

  float warp_max = row_max;
#pragma unroll
  for (int width = kKeyLanes; width < 32; width *= 2)
    warp_max = fmaxf(warp_max, __shfl_xor_sync(kWarp, warp_max, width));
  const float group_scale = __expf(row_max - warp_max);
  row_sum *= group_scale;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) rO[i] *= group_scale;
#pragma unroll
  for (int width = kKeyLanes; width < 32; width *= 2) {
    row_sum += __shfl_xor_sync(kWarp, row_sum, width);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) rO[i] += __shfl_xor_sync(kWarp, rO[i], width);
  }
  if (first != 0) return;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) rO[i] /= row_sum;
  store(p.heads + static_cast<int64_t>(row) * p.width + head * kHeadDim + column, rO);
}

// The largest of some logits, the first where it occurs, and the sum of exp(logit - largest). The
// initial largest is finite, so that -inf does not become inf - inf. NaN and +inf make the sum NaN.
struct Seen {
  float largest = -FLT_MAX;
  int token = INT_MAX;
  float sum = 0.0f;

  __device__ void add_lane(int width) {
    const float other = __shfl_xor_sync(kWarp, largest, width);
    const int other_token = __shfl_xor_sync(kWarp, token, width);
    const float other_sum = __shfl_xor_sync(kWarp, sum, width);
    if (other > largest || (other == largest && other_token < token)) token = other_token;
    const float both = fmaxf(largest, other);
    sum = sum * __expf(largest - both) + other_sum * __expf(other - both);
    largest = both;
  }
};

__global__ void __launch_bounds__(kChooseThreads) choose(KernelParams p) {
  __shared__ Seen warps[32];
  ptx::allow_next();
  const int row = blockIdx.x, lane = threadIdx.x % 32;
  const auto* const from = reinterpret_cast<const uint4*>(p.logits + row * p.row_stride);
  ptx::wait_for_previous();
  Seen seen;
  const int chunks = (p.vocab_size + kChunk - 1) / kChunk;
  for (int first = threadIdx.x; first < chunks; first += kAtOnce * kChooseThreads) {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * kChooseThreads < chunks) loaded[i] = from[first + i * kChooseThreads];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = first + i * kChooseThreads;
      if (chunk >= chunks) break;
      float x[kChunk];
      unpack<Element>(loaded[i], x);
      if (chunk == chunks - 1) {
#pragma unroll
        for (int e = 0; e < kChunk; ++e)
          if (chunk * kChunk + e >= p.vocab_size) x[e] = -INFINITY;
      }
      float largest = x[0];
#pragma unroll
      for (int e = 1; e < kChunk; ++e) largest = fmaxf(largest, x[e]);
      if (largest > seen.largest) {
        seen.sum *= __expf(seen.largest - largest);
        seen.largest = largest;
#pragma unroll
        for (int e = kChunk - 1; e >= 0; --e)
          if (x[e] == largest) seen.token = chunk * kChunk + e;
      }
#pragma unroll
      for (int e = 0; e < kChunk; ++e) seen.sum += __expf(x[e] - seen.largest);
    }
  }
#pragma unroll
  for (int width = 16; width > 0; width /= 2) seen.add_lane(width);
  if (lane == 0) warps[threadIdx.x / 32] = seen;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  seen = lane < kChooseThreads / 32 ? warps[lane] : Seen{};
#pragma unroll
  for (int width = 16; width > 0; width /= 2) seen.add_lane(width);
  if (lane != 0) return;
  p.tokens[row] = seen.sum > 0.0f ? seen.token : -1;  // false for NaN
  p.logprobs[row] = -logf(seen.sum);
  if (p.lengths != nullptr) p.lengths[row] += p.active[row];
}

}  // namespace

namespace ATTENTION_VERSION {

int64_t scratch_floats(const KernelParams&) { return 0; }

cudaError_t launch(const KernelParams& params, cudaStream_t stream) {
  if (params.rows < 1 || params.width % kChunk != 0 || params.width > kChunk * kMaxThreads)
    return cudaErrorInvalidValue;
  const dim3 grid(params.rows), block(ceil_div(params.width / kChunk, 32) * 32);
  switch (params.kernel) {
    case kBegin:
      return launch_kernel(begin, grid, block, 0, stream, params);
    case kAppend:
      return launch_early(append, grid, 1, block, 0, stream, params);
    case kAttend: {
      const dim3 warps(ceil_div(params.rows * params.num_heads, kAttendThreads / 32));
      const int head_dim = params.width / params.num_heads;
      if (head_dim != 32 && head_dim != 64 && head_dim != 128) return cudaErrorInvalidValue;
      return launch_early(head_dim == 32   ? attend<32>
                          : head_dim == 64 ? attend<64>
                                           : attend<128>,
                          warps, 1, dim3(kAttendThreads), 0, stream, params);
    }
    case kAdd:
      return launch_early(add, grid, 1, block, 0, stream, params);
    case kChoose:
      return launch_early(choose, grid, 1, dim3(kChooseThreads), 0, stream, params);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
