// The kernels of a layer, product() and attend(), and struct Chain, which launches the step's kernels.
//
// A kernel starts before the previous ones end (programmatic dependent launch) and loads what no
// kernel of the step writes. Then it waits for the one before it, which has waited for its own.

#pragma once

#include "portable.cuh"
#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

// A block's weights in shared memory, with one bulk copy.
template <Kind kKind>
struct BulkWeights {
  using P = Product<kKind>;
  static constexpr size_t kBytes = P::kBytes;
  using Shared = ptx::Barrier;

  const uint4* s_weights;
  Shared& arrived;

  // The caller synchronizes the threads before the first await().
  __device__ BulkWeights(uint4* to, const Element* packed, Shared& barrier)
      : s_weights(to), arrived(barrier) {
    if (threadIdx.x == 0) {
      ptx::barrier_init(&arrived, 1);
      ptx::barrier_init_fence();
      ptx::barrier_expect(&arrived, kBytes);
      ptx::copy_bulk(to, packed + int64_t{blockIdx.x} * P::K * P::kColumns, kBytes, &arrived,
                     ptx::evict_first());
    }
  }
  __device__ void await(int step) {
    if (step > 0) return;
    while (!ptx::barrier_test(&arrived, 0)) {
    }
  }
  __device__ uint4 at(int step, int i) const { return *P::piece(s_weights, step, i); }
  __device__ void replace(int) {}
};

template <Kind kKind>
using Weights = std::conditional_t<kIsPortable, ThreadWeights<kKind>, BulkWeights<kKind>>;
template <Kind kKind>
constexpr size_t kProductBytes = Weights<kKind>::kBytes + kXBytes<kKind>;

template <Kind kKind>
__global__ void __launch_bounds__(Product<kKind>::kThreads) product(const StepParams p, int layer) {
  using P = Product<kKind>;
  using LayerNorm = Norm<P::kWarps>;
  ATTENTION_DYNAMIC_SHARED(uint4, s_weights);
  auto* const s_x = reinterpret_cast<Factor*>(s_weights + Weights<kKind>::kBytes / 16);
  __shared__ typename P::Sums sums[P::kWarps];
  __shared__ typename LayerNorm::Shared s_norm;
  __shared__ typename Weights<kKind>::Shared arrived;
  const Element* const packed = p.weights[layer].*P::kMatrix;
  const LayerVectors& vectors = p.vectors[layer];
  const int t = threadIdx.x;
  Weights<kKind> weights(s_weights, packed, arrived);
  const LayerNorm norm(kKind == kQkv ? vectors.ln_1_weight : vectors.ln_2_weight,
                       kKind == kQkv ? vectors.ln_1_bias : vectors.ln_2_bias);
  // This thread's output, if it has one
  const int n = blockIdx.x * P::kColumns + t % P::kColumns, row = t / P::kColumns;
  static_assert(P::kThreads >= P::kColumns * kBatch);
  const bool has_output = t < P::kColumns * kBatch;
  const float my_bias = has_output ? (vectors.*P::kBias)[n] : 0.0f;
  const int position = kKind == kQkv && has_output ? position_of(p, row) : 0;
  __syncthreads();  // the barrier is initialized

  // With more rows, blocks that start early slow down those still running.
  if (kBatch == 1) ptx::allow_next();
  ptx::wait_for_previous();
  if (kBatch > 1) ptx::allow_next();
  Scratch& scratch = *p.scratch;
  const float residual = !kHasNorm<kKind> && has_output ? __ldcg(&scratch.x[row][n]) : 0.0f;
  const auto put = [&](int i, float sum) { sums[t / 32][i] = sum; };
  if constexpr (kHasNorm<kKind>) {
    const auto load = [&](int r, int k) { return __ldcg(&scratch.x[r][k]); };
    norm.apply(load, p.epsilon, s_norm, [&](int k, const float (&rows)[kBatch]) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r)
        s_x[factor_at<kEmbd, P::kPadding>(k, r)] = from_float<Factor>(rows[r]);
    });
    P::template multiply<false>(weights, s_x, put);
  } else if constexpr (kComputesX<kKind>) {
    for (int i = t; i < kBatch * kEmbd / 4; i += P::kThreads) {
      const int x_row = i / (kEmbd / 4), k = i % (kEmbd / 4) * 4;
      const float4 o = join_splits(scratch.splits, x_row, k, position_of(p, x_row));
      const float columns[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s_x[factor_at<kEmbd, P::kPadding>(k + c, x_row)] = from_float<Factor>(columns[c]);
    }
    __syncthreads();
    P::template multiply<false>(weights, s_x, put);
  } else {
    const Factor* const x = kKind == kProj ? scratch.o : scratch.hidden;
    P::template multiply<true>(weights, x, put);
  }
  __syncthreads();
  if (!has_output) return;
  float y = 0.0f;
#pragma unroll
  for (int w = 0; w < P::kWarps; ++w) y += sums[w][t % P::kColumns * kBatch + row];
  y += my_bias;
  if constexpr (kKind == kQkv) {
    const int matrix = n / kEmbd, head = n % kEmbd / kHeadDim, column = n % kHeadDim;
    if (matrix == 0) {
      scratch.q[row][n] = y;
    } else {
      cache_of(p, layer, matrix - 1, row, head)[int64_t{position} * kHeadDim + column] =
          from_float<Element>(y);
    }
  } else if constexpr (kKind == kFc) {
    scratch.hidden[factor_at<kInner>(n, row)] = from_float<Factor>(gelu(y));
  } else {
    scratch.x[row][n] = residual + y;
  }
}

// Limit on attention's blocks, which add_attention() exceeds for long caches: 1.6 per multiprocessor,
// found by trial on an H200. kHeadBlocks is one per multiprocessor.
constexpr int kMostAttending = kHeadBlocks * 8 / 5;
// The most blocks that share the splits of a row and head, a power of two.
constexpr int most_blocks(int blocks = 8) {
  return blocks == 1 || blocks * kHeads * kBatch <= kMostAttending ? blocks
                                                                   : most_blocks(blocks / 2);
}

// Grid: blocks, heads, rows. A cluster of kBlocks blocks attends to all splits of a row and head. If
// kIsPortable, each block attends to a split of its own.
template <int kBlocks>
__global__ void __launch_bounds__(kAttendThreads) attend(const StepParams p, int layer) {
  constexpr bool kIsCluster = kBlocks > 1;
  constexpr int kAtOnce = kIsPortable ? kMaxSplits : kBlocks;
  constexpr int kNext = kAtOnce < kMaxSplits ? kAtOnce : 0;
  __shared__ AttentionShared shared;
  __shared__ Partial splits[kMaxSplits];  // the cluster's, in its first block
  // Later all wait for this: the first block runs.
  if (kIsCluster) ptx::cluster_arrive();

  const int t = threadIdx.x;
  const int head = blockIdx.y, row = blockIdx.z;
  const int newest = position_of(p, row);
  const Element* const keys = cache_of(p, layer, 0, row, head);
  const Element* const values = cache_of(p, layer, 1, row, head);
  Attention attention{slot::Cache{keys, values, kHeadDim, kHeadDim, newest}};
  int split = blockIdx.x;
  if (!kGuesses) attention.load(split);

  // If a layer fits in shared memory, blocks of later products would start now and get in the way.
  constexpr bool kIsEarly = kBatch == 1 && !kHoldsLayer;
  if (kIsEarly) ptx::allow_next();
  ptx::wait_for_previous();
  if (!kIsEarly) ptx::allow_next();
  if (kGuesses) attention.load(split);  // the rows before have just written theirs
  const int64_t at = int64_t{newest} * kHeadDim;
  const auto query = attention.receive(
      slot::Token<false>{p.scratch->q[row] + head * kHeadDim, keys + at, values + at});
  bool is_first = true;
  for (; split * kSplit <= newest; split += kAtOnce) {
    const auto result = attention.attend_to(query, scale_of(p, layer), split, kNext, shared);
    if (!is_first) __syncthreads();  // the previous split's partials have been read
    result.store(shared.partials);
    __syncthreads();
    if (kIsCluster && is_first) ptx::cluster_wait();
    is_first = false;
    if (t >= kHeadDim) continue;
    const Join<1> join(shared.partials, kPartials, t);
    if (kIsPortable) {
      Splits& out = p.scratch->splits;
      out.o[row][split][head * kHeadDim + t] = join.o[0];
      if (t == 0) {
        out.row_max[row][head][split] = join.row_max;
        out.row_sum[row][head][split] = join.row_sum;
      }
      continue;
    }
    const auto put = [](float& here, float value) {
      if (kIsCluster)
        ptx::store_to_block(&here, 0, value);
      else
        here = value;
    };
    put(splits[split].o[t], join.o[0]);
    if (t == 0) put(splits[split].row_max, join.row_max), put(splits[split].row_sum, join.row_sum);
  }
  if (kIsPortable) return;
  if (kIsCluster) {
    if (is_first) ptx::cluster_wait();
    ptx::cluster_arrive();
    if (blockIdx.x != 0) return;
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  if (t >= kHeadDim) return;
  const Join<1> join(splits, newest / kSplit + 1, t);
  p.scratch->o[factor_at<kEmbd>(head * kHeadDim + t, row)] =
      from_float<Factor>(join.o[0] / join.row_sum);
}

// Launches kernels, early if possible, until one fails.
struct Chain {
  cudaStream_t stream;
  cudaError_t error;

  template <typename Kernel, typename... Arguments>
  void add(Kernel* kernel, dim3 grid, int cluster, int threads, size_t smem,
           Arguments... arguments) {
    if (error != cudaSuccess) return;
    error = kIsPortable ? launch_kernel(kernel, grid, threads, smem, stream, arguments...)
                        : launch_early(kernel, grid, cluster, threads, smem, stream, arguments...);
  }
  template <Kind kKind>
  void add_product(const StepParams& p, int layer) {
    using P = Product<kKind>;
    add(product<kKind>, P::N / P::kColumns, 1, P::kThreads, kProductBytes<kKind>, p, layer);
  }
  // One block for each split of a full cache, rounded up to a power of two, up to most_blocks(). Where
  // that is one, a block takes up to two splits, and two blocks share more.
  template <int kBlocks = 1>
  void add_attention(const StepParams& p, int layer) {
    const int splits = ceil_div(p.max_seqlen, kSplit);
    if constexpr (!kIsPortable && kBlocks < min_of(max_of(most_blocks(), 2), kMaxSplits)) {
      const int most_splits = kBlocks < most_blocks() ? kBlocks : 2;
      if (splits > most_splits) return add_attention<2 * kBlocks>(p, layer);
    }
    const dim3 grid(kIsPortable ? splits : kBlocks, kHeads, kBatch);
    add(attend<kBlocks>, grid, kBlocks, kAttendThreads, 0, p, layer);
  }
};

}  // namespace attention::ATTENTION_VERSION
