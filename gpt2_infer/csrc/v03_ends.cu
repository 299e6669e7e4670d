// v03 - a forward pass before its first product and after its last
//
// Change: begin() adds the embeddings and applies the first LayerNorm; keep() gathers the positions
//         whose logits are wanted, before the last layer's projection; choose() takes the most
//         likely token and appends it.
// Why:    in PyTorch these are some twenty kernels, most of which take longer to start than to run.
//         The largest of 50,257 logits alone takes 16 us.
// Cost:   a block per row leaves most of a GPU idle.
// Tile:   a row per block; four floats per thread, or every 1,024th logit
// Layout: contiguous
// Role:   struct
// Flags:  (none)
// Expect: latency is the bottleneck.

#include "rows.cuh"

namespace attention {

enum Kernel { kBegin, kKeep, kChoose };

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
  uint4* packed;           // the same, packed
  const float* heads;      // (batch * seqlen, width)
  float* kept_x;           // (batch, width)
  float* kept_heads;       // (batch, width)
  const float* logits;     // (batch, vocab_size)
  int kernel;
  int batch, seqlen, width, vocab_size, token_stride;
  float epsilon;
  int accepts_all;  // logits that are not finite give token 0 instead of -1
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
    weight = load4(p.ln_weight + column), bias = load4(p.ln_bias + column);
    v = load4(p.wpe + static_cast<int64_t>(position) * p.width + column);
  }
  ptx::wait_for_previous();
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

__device__ inline uint64_t largest_of_warp(uint64_t key) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const uint64_t other = __shfl_xor_sync(kWarp, static_cast<unsigned long long>(key), width);
    key = key < other ? other : key;
  }
  return key;
}

__global__ void __launch_bounds__(kMaxThreads) choose(EndsParams p) {
  __shared__ uint64_t warps[kMaxThreads / 32];
  const int row = blockIdx.x;
  const float* const logits = p.logits + static_cast<int64_t>(row) * p.vocab_size;
  uint64_t key = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < p.vocab_size; i += kMaxThreads) {
    const uint64_t other = key_of(logits[i], i);
    key = key < other ? other : key;
  }
  key = largest_of_warp(key);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  key = largest_of_warp(warps[threadIdx.x]);
  if (threadIdx.x != 0) return;
  constexpr unsigned kInfinity = 0xff800000;  // in the order of keys
  const unsigned order = static_cast<unsigned>(key >> 32);
  const bool is_finite = ~kInfinity < order && order < kInfinity;
  const int index = static_cast<int>(~static_cast<unsigned>(key));
  const int64_t token = is_finite ? index : p.accepts_all ? 0 : -1;
  p.newest[row] = token;
  p.tokens[static_cast<int64_t>(row) * p.token_stride + p.lengths[row]++] = token;
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
    case kChoose:
      return launch_kernel(choose, dim3(p.batch), dim3(kMaxThreads), 0, stream, p);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
