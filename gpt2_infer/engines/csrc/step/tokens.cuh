// A step's first kernel, embed(), which reads the newest tokens, and its last, choose(), which chooses the
// next.
//
// STEP_GUESSES builds a step that also reads guesses of the next tokens, as rows of the batch that share
// the first one's cache: each row's key and value are the next one's, and of the chosen tokens those
// up to the first wrong guess count. The guesses are what followed the last tokens before.

#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kEmbedWarps = 8, kEmbedThreads = 32 * kEmbedWarps;

// Returns where the last kGram tokens, or as many as have occurred before, last did so: the index of
// the last of them, or that of the newest token. All threads of a block take part.
__device__ inline int find_earlier(const int64_t* tokens, int length) {
  constexpr int kGram = 3, kBits = 24;  // of an index
  __shared__ int s_best[kEmbedWarps];
  int best = length - 1;
  for (int i = threadIdx.x; i < length - 1; i += kEmbedThreads) {
    int same = 0;
    while (same < kGram && same <= i && tokens[i - same] == tokens[length - 1 - same]) ++same;
    if (same > 0) best = max(best, same << kBits | i);
  }
#pragma unroll
  for (int width = 16; width > 0; width /= 2) best = max(best, __shfl_xor_sync(kWarp, best, width));
  if (threadIdx.x % 32 == 0) s_best[threadIdx.x / 32] = best;
  __syncthreads();
  for (int w = 0; w < kEmbedWarps; ++w) best = max(best, s_best[w]);
  return best & ((1 << kBits) - 1);
}

__global__ void __launch_bounds__(kEmbedThreads) embed(const StepParams p) {
  ptx::allow_next();
  int earlier = 0, length = 0;
  if constexpr (kGuesses) {
    length = p.lengths[0];
    earlier = find_earlier(p.tokens, length);
  }
  const int i = blockIdx.x * kEmbedThreads + threadIdx.x;
  if (i >= kBatch * kEmbd) return;
  const int row = i / kEmbd, column = i % kEmbd;
  int64_t token = p.newest[kGuesses ? 0 : row];
  if (kGuesses && row > 0) {  // what is repeated may be shorter than the guesses
    const int repeated = max(length - 1 - earlier, 1);
    token = p.tokens[min(earlier + 1 + (row - 1) % repeated, length - 1)];
    if (column == 0) p.newest[row] = token;
  }
  if (token < 0) token = 0;
  p.scratch->x[row][column] = to_float(p.wte[token * kEmbd + column]) +
                              to_float(p.wpe[int64_t{position_of(p, row)} * kEmbd + column]);
}

// Chooses the next tokens; one warp per row of the batch.
__global__ void __launch_bounds__(32 * kBatch) choose(const StepParams p) {
  ptx::wait_for_previous();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  Best best{-INFINITY, kVocab};
  for (int i = lane; i < kHeadBlocks; i += 32) {
    const Best& other = p.scratch->best[i][row];
    best.see(__ldcg(&other.value), __ldcg(&other.row));
  }
#pragma unroll
  for (int width = 16; width > 0; width /= 2) best.see_lane(width);
  const int64_t token = best.value - best.value == 0.0f ? best.row : -1;
  if constexpr (kGuesses) {
    __shared__ int64_t s_chosen[kBatch];
    if (lane == 0) s_chosen[row] = token;
    __syncthreads();
    if (row > 0) return;
    const bool is_right = lane < kBatch - 1 && p.newest[lane + 1] == s_chosen[lane];
    const int count = __ffs(~__ballot_sync(kWarp, is_right));  // right guesses, and the next token
    if (lane != 0) return;
    const int64_t at = p.lengths[0];
    for (int i = 0; i < count; ++i) p.tokens[at + i] = s_chosen[i];
    p.newest[0] = s_chosen[count - 1];
    p.seqlens[0] += count;
    p.lengths[0] = at + count;
    return;
  }
  if (lane != 0) return;
  if (kIsOneKernel) p.scratch->epoch += 1;
  p.seqlens[row] += 1;
  if (!p.is_greedy) return;
  const int64_t at = p.lengths[row];
  p.newest[row] = token;
  p.tokens[row * p.capacity + at] = token;
  p.lengths[row] = at + 1;
}

}  // namespace attention::ATTENTION_VERSION
