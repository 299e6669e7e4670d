// v03 - a forward pass before its first product and after its last
//
// Change: begin() adds the embeddings and applies the first LayerNorm; keep() gathers the positions
//         whose logits are wanted, before the last layer's projection; logits() computes them and
//         finds the largest; choose() appends its token.
// Why:    in PyTorch these are some twenty kernels, most of which take longer to start than to run.
//         Finding the largest of 50,257 logits alone takes 16 us.
// Cost:   logits() reads the head's weights once per eight rows, from L2 after the first eight.
// Tile:   a row per block, four floats per thread; logits(): four logits per warp at a time, for up to
//         eight rows
// Layout: contiguous
// Role:   struct
// Flags:  (none)
// Expect: latency is the bottleneck; for logits(), memory bandwidth.

#include <algorithm>

#include "rows.cuh"

namespace attention {

enum Kernel { kBegin, kKeep, kLogits, kChoose };

// Must match EndsParams in ends.py. Rows of floats are 16-byte aligned, but not those of logits.
struct StructParams {
  int64_t* tokens;         // (batch, token_stride); -1 is read as 0
  int64_t* lengths;        // (batch): tokens so far
  int64_t* newest;         // (batch): choose() stores its token
  const float* wte;        // (vocab_size, width)
  const float* wpe;        // (at least seqlen, width)
  const float* ln_weight;  // (width)
  const float* ln_bias;    // (width)
  float* x;                // (batch * seqlen, width): begin() writes it
  float* normed;           // (batch * seqlen, width); null: packed is given
  uint4* packed;           // the same without ln_bias, packed
  const float* heads;      // (batch * seqlen, width)
  float* kept_x;           // (batch, width)
  float* kept_heads;       // (batch, width)
  const float* head;       // (vocab_size, width)
  float* logits;           // (batch, vocab_size): of the rows of x
  uint64_t* largest;       // (batch): key_of() of the largest logit; begin() clears it
  int kernel;
  int batch, seqlen, width, vocab_size, token_stride;
  int multiprocessors;
  float epsilon;
};
using EndsParams = StructParams;

namespace {

constexpr int kMaxThreads = 1024;

__global__ void __launch_bounds__(kMaxThreads) begin(EndsParams p) {
  __shared__ float warps[2][32];
  ptx::allow_next();
  const int row = blockIdx.x, column = 4 * threadIdx.x, position = row % p.seqlen;
  const bool is_here = column < p.width;
  float4 weight = {}, bias = {}, v = {};
  if (is_here) {
    weight = load4(p.ln_weight + column);
    if (p.packed == nullptr) bias = load4(p.ln_bias + column);
    v = load4(p.wpe + static_cast<int64_t>(position) * p.width + column);
  }
  ptx::wait_for_previous();
  if (row < p.batch && threadIdx.x == 0) p.largest[row] = 0;
  if (is_here) {
    const int64_t at = static_cast<int64_t>(row / p.seqlen) * p.token_stride + position;
    const int64_t token = p.tokens[at];
    v = load4(p.wte + (token < 0 ? 0 : token) * p.width + column) + v;
    store4(p.x + static_cast<int64_t>(row) * p.width + column, v);
  }
  v = layer_norm(v, is_here, p.width, p.epsilon, weight, bias, warps);
  if (p.packed != nullptr) {
    pack4(p.packed, p.width, row, column, v, is_here);
  } else if (is_here) {
    store4(p.normed + static_cast<int64_t>(row) * p.width + column, v);
  }
}

__global__ void __launch_bounds__(kMaxThreads) keep(EndsParams p) {
  ptx::allow_next();
  const int row = blockIdx.x, column = 4 * threadIdx.x;
  ptx::wait_for_previous();
  if (column >= p.width) return;
  const int64_t kept = static_cast<int64_t>(row) * p.seqlen + p.lengths[row] - 1;
  const int64_t from = kept * p.width + column, to = static_cast<int64_t>(row) * p.width + column;
  const float4 x = load4(p.x + from), heads = load4(p.heads + from);
  store4(p.kept_x + to, x);
  store4(p.kept_heads + to, heads);
}

// Larger for a larger float, above all for NaN, and among equals for a lower index.
__device__ inline uint64_t key_of(float value, int index) {
  const unsigned bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
  const unsigned order = value != value ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
  return static_cast<uint64_t>(order) << 32 | ~static_cast<unsigned>(index);
}

__device__ inline uint64_t larger(uint64_t a, uint64_t b) { return a < b ? b : a; }

constexpr int kLogitWarps = 8, kLogitThreads = 32 * kLogitWarps;
constexpr int kHeadRows = 4;     // rows of the head per warp at a time
constexpr int kAtOnce = 3;       // loads of 16 bytes per lane and row in flight
constexpr int kMostOfBatch = 8;  // rows of x per block
// Blocks per multiprocessor: as many as fit.
template <int kBatch>
constexpr int kResident = kBatch == 1 ? 3 : 2;

// Grid: blocks that share the rows of the head, groups of kBatch rows of x.
template <int kBatch>
__global__ void __launch_bounds__(kLogitThreads, kResident<kBatch>) logits(EndsParams p) {
  __shared__ uint64_t warps[kBatch][kLogitWarps];
  ptx::allow_next();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.y * kBatch;
  const int blocks = gridDim.x;
  int row = (warp * blocks + blockIdx.x) * kHeadRows;
  const auto head_row = [&](int i) {
    return p.head + static_cast<int64_t>(min(row + i, p.vocab_size - 1)) * p.width;
  };
  ptx::wait_for_previous();
  constexpr int kSums = kBatch * kHeadRows, kSame = 32 / kSums;  // lanes with the same logit
  const int mine = lane / kSame % kHeadRows, x_row = first + lane / (32 / kBatch);
  uint64_t key = 0;
  for (; row < p.vocab_size; row += blocks * kLogitWarps * kHeadRows) {
    float sums[kSums] = {};
    for (int start = 4 * lane; start < p.width; start += kAtOnce * 4 * 32) {
      float4 weights[kAtOnce][kHeadRows] = {};
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int column = start + a * 4 * 32;
#pragma unroll
        for (int i = 0; i < kHeadRows; ++i)
          if (column < p.width) weights[a][i] = load4(head_row(i) + column);
      }
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int column = start + a * 4 * 32;
        if (column >= p.width) continue;
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const float4 x =
              load4(p.x + static_cast<int64_t>(min(first + b, p.batch - 1)) * p.width + column);
#pragma unroll
          for (int i = 0; i < kHeadRows; ++i) {
            const float4 w = weights[a][i];
            sums[b * kHeadRows + i] += w.x * x.x + w.y * x.y + w.z * x.z + w.w * x.w;
          }
        }
      }
    }
    float logit[1];
    fold<1, 16>(sums, logit);
    if (row + mine >= p.vocab_size || x_row >= p.batch) continue;
    if (lane % kSame == 0)
      p.logits[static_cast<int64_t>(x_row) * p.vocab_size + row + mine] = logit[0];
    key = larger(key, key_of(logit[0], row + mine));
  }
  constexpr int kLanes = 32 / kBatch;  // of a row of x
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2)
    key = larger(key, __shfl_xor_sync(kWarp, static_cast<unsigned long long>(key), width));
  if (lane % kLanes == 0) warps[lane / kLanes][warp] = key;
  __syncthreads();
  if (threadIdx.x >= kBatch || first + threadIdx.x >= p.batch) return;
  uint64_t largest = 0;
  for (uint64_t other : warps[threadIdx.x]) largest = larger(largest, other);
  atomicMax(reinterpret_cast<unsigned long long*>(p.largest + first + threadIdx.x),
            static_cast<unsigned long long>(largest));
}

__global__ void choose(EndsParams p) {
  const int row = blockIdx.x;
  ptx::wait_for_previous();
  const uint64_t key = p.largest[row];
  constexpr unsigned kInfinity = 0xff800000;  // in the order of keys
  const unsigned order = static_cast<unsigned>(key >> 32);
  const bool is_finite = ~kInfinity < order && order < kInfinity;
  const int index = static_cast<int>(~static_cast<unsigned>(key));
  const int64_t token = is_finite ? index : -1;
  p.newest[row] = token;
  p.tokens[static_cast<int64_t>(row) * p.token_stride + p.lengths[row]++] = token;
}

template <int kBatch = 1>
cudaError_t launch_logits(const EndsParams& p, cudaStream_t stream) {
  if constexpr (kBatch < kMostOfBatch) {
    if (kBatch < p.batch) return launch_logits<2 * kBatch>(p, stream);
  }
  // All run at once, so that the groups read the same weights at about the same time: once from
  // memory, then from L2.
  const int groups = ceil_div(p.batch, kBatch);
  const dim3 grid(std::max(1, kResident<kBatch> * p.multiprocessors / groups), groups);
  return launch_early(logits<kBatch>, grid, 1, dim3(kLogitThreads), 0, stream, p);
}

}  // namespace

namespace ATTENTION_VERSION {

int64_t scratch_floats(const EndsParams&) { return 0; }

cudaError_t launch(const EndsParams& p, cudaStream_t stream) {
  const dim3 threads(ceil_div(p.width / 4, 32) * 32);
  switch (p.kernel) {
    case kBegin:
      return launch_early(begin, dim3(p.batch * p.seqlen), 1, threads, 0, stream, p);
    case kKeep:
      return launch_early(keep, dim3(p.batch), 1, threads, 0, stream, p);
    case kLogits:
      return launch_logits(p, stream);
    case kChoose:
      return launch_early(choose, dim3(p.batch), 1, dim3(1), 0, stream, p);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
