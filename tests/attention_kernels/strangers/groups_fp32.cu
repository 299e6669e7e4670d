// Cooperative groups: a tile of eight threads per query, keys in shared memory
//
// Layout: strided
// Takes:  float32, head_dim 32
// Needs:  sm_80

#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cuda_runtime.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

namespace cg = cooperative_groups;

constexpr int kDim = 32, kTile = 8, kThreads = 128, kQueries = kThreads / kTile, kKeys = 32;

__global__ void attend(const float* q, const float* k, const float* v, float* o, Strides sq,
                       Strides sk, Strides sv, Strides so, int n, int heads, float scale,
                       bool causal) {
  __shared__ alignas(16) float sK[kKeys][kDim];
  __shared__ alignas(16) float sV[kKeys][kDim];
  const cg::thread_block block = cg::this_thread_block();
  const auto tile = cg::tiled_partition<kTile>(block);
  const int head = block.group_index().y % heads, batch = block.group_index().y / heads;
  const int first = block.group_index().x * kQueries;
  const int row = first + tile.meta_group_rank();
  k += batch * sk.batch + head * sk.head;
  v += batch * sv.batch + head * sv.head;
  const int lane = tile.thread_rank();
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f), sum4 = x;
  if (row < n)
    x = *reinterpret_cast<const float4*>(q + batch * sq.batch + head * sq.head + row * sq.seqlen +
                                         4 * lane);
  float most = -INFINITY, sum = 0.0f;
  const int end = causal ? min(n, first + kQueries) : n;
  for (int n0 = 0; n0 < end; n0 += kKeys) {
    const int keys = min(kKeys, n - n0);
    for (int j = 0; j < keys; ++j) {
      cg::memcpy_async(block, sK[j], k + (n0 + j) * sk.seqlen, sizeof(sK[j]));
      cg::memcpy_async(block, sV[j], v + (n0 + j) * sv.seqlen, sizeof(sV[j]));
    }
    cg::wait(block);
    for (int j = 0; j < keys; ++j) {
      const float4 y = *reinterpret_cast<const float4*>(&sK[j][4 * lane]);
      float s = cg::reduce(tile, x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w, cg::plus<float>());
      s = causal && n0 + j > row ? -INFINITY : s * scale;
      const float now = fmaxf(most, s);
      const float factor = expf(most - now), p = expf(s - now);
      const float4 z = *reinterpret_cast<const float4*>(&sV[j][4 * lane]);
      sum = sum * factor + p;
      sum4.x = sum4.x * factor + p * z.x, sum4.y = sum4.y * factor + p * z.y;
      sum4.z = sum4.z * factor + p * z.z, sum4.w = sum4.w * factor + p * z.w;
      most = now;
    }
    block.sync();
  }
  if (row < n) {
    float* const to = o + batch * so.batch + head * so.head + row * so.seqlen + 4 * lane;
    *reinterpret_cast<float4*>(to) =
        make_float4(sum4.x / sum, sum4.y / sum, sum4.z / sum, sum4.w / sum);
  }
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& p, cudaStream_t stream) {
  if (p.head_dim != kDim) return cudaErrorInvalidValue;
  const dim3 grid(ceil_div(p.seqlen, kQueries), p.batch * p.num_heads);
  return launch_kernel(attend, grid, dim3(kThreads), 0, stream, static_cast<const float*>(p.q),
                       static_cast<const float*>(p.k), static_cast<const float*>(p.v),
                       static_cast<float*>(p.o), p.q_strides, p.k_strides, p.v_strides, p.o_strides,
                       p.seqlen, p.num_heads, static_cast<float>(p.softmax_scale), p.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
