// v02 - a warp per key
//
// Change: the lanes of a warp share a key, then the next kWarps further on. Each warp keeps a maximum,
//         a sum and its lanes' columns of O in registers, rescales them whenever the maximum grows, and
//         leaves a partial.
// Why:    a warp reads whole rows of the cache, all warps have keys, and none waits for another.
// Cost:   five shuffles per key, and each key waits for the maximum of the one before.
// Takes:  float32 float16 bfloat16
// Shared: 32 * (D + 2)

#include "slot/slot.cuh"

namespace attention::slot {

template <int kHeadDim>
struct Attention {
  static constexpr int kPartials = kWarps;
  static constexpr int kEach = kHeadDim / 32;  // columns of a lane
  struct Shared {};
  struct Query {
    float q[kEach];
    const Element *key, *value;  // the newest
  };
  struct Result {
    float row_max = -FLT_MAX, row_sum = 0.0f, o[kEach] = {};

    __device__ void store(Partial<kHeadDim> (&partials)[kPartials]) const {
      Partial<kHeadDim>& to = partials[threadIdx.x / 32];
#pragma unroll
      for (int i = 0; i < kEach; ++i) to.o[column(i)] = o[i];
      if (threadIdx.x % 32 == 0) to.row_max = row_max, to.row_sum = row_sum;
    }
  };

  const Cache cache;

  static __device__ int column(int i) { return threadIdx.x % 32 + 32 * i; }
  __device__ void load(int) {}

  template <bool kIsShared>
  __device__ Query receive(const Token<kIsShared>& token) const {
    Query query{{}, token.key, token.value};
#pragma unroll
    for (int i = 0; i < kEach; ++i) query.q[i] = token.q[column(i)];
    return query;
  }

  __device__ Result attend_to(const Query& query, float softmax_scale, int split, int,
                              Shared&) const {
    Result result;
    const int first = split * kSplit, end = min(first + kSplit, cache.newest + 1);
    for (int n = first + threadIdx.x / 32; n < end; n += kWarps) {
      const bool is_cached = n < cache.newest;
      const Element* const key = is_cached ? cache.keys + n * cache.key_stride : query.key;
      const Element* const value = is_cached ? cache.values + n * cache.value_stride : query.value;
      float s = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) s += query.q[i] * to_float(key[column(i)]);
#pragma unroll
      for (int width = 16; width > 0; width /= 2) s += __shfl_xor_sync(kWarp, s, width);
      s *= softmax_scale;
      const float row_max = fmaxf(result.row_max, s);
      const float kept = __expf(result.row_max - row_max), weight = __expf(s - row_max);
      result.row_max = row_max;
      result.row_sum = kept * result.row_sum + weight;
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        result.o[i] = kept * result.o[i] + weight * to_float(value[column(i)]);
    }
    return result;
  }
};

}  // namespace attention::slot
