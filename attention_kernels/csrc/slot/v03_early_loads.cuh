// v03 - keys and values are requested before q exists
//
// Change: kLanes lanes share a key, of which each has 16 bytes, in registers: load() requests them for a
//         whole split, and attend_to() those of the next split as soon as it has used this one's. A
//         warp finds the maximum of all of its scores at once, and joins its lanes at the end.
// Why:    at batch 1 a step waits more than it computes: now the cache arrives while q is computed, and
//         no load waits for another.
// Cost:   2 * kSteps * 16 bytes of registers per thread.
// Takes:  float32 float16 bfloat16
// Shared: 32 * (D + 2)

#include "ptx.cuh"
#include "slot/slot.cuh"

namespace attention::slot {

// Chooses by value: of two variables, the compiler would keep both in memory.
__device__ inline uint4 choose_chunk(bool first, uint4 a, uint4 b) {
  return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// Consecutive lanes have the chunks of a key, 16 bytes each. Each warp leaves a partial.
template <int kHeadDim>
struct Attention {
  static constexpr int kPerChunk = 16 / sizeof(Element);  // elements in 16 bytes
  static constexpr int kLanes = kHeadDim / kPerChunk;     // that share a key
  static constexpr int kKeys = kThreads / kLanes;         // that the block reads at a time
  static constexpr int kSteps = kSplit / kKeys;
  static constexpr int kPartials = kWarps;
  using Chunks = uint4[kSteps];
  struct Shared {};

  struct Query {
    float q[kPerChunk];
    uint4 newest_k, newest_v;
  };

  struct Result {
    float row_max = -FLT_MAX, row_sum = 0.0f, o[kPerChunk] = {};

    __device__ void store(Partial<kHeadDim> (&partials)[kPartials]) const {
      const int lane = threadIdx.x % 32;
      Partial<kHeadDim>& to = partials[threadIdx.x / 32];
      if (lane < kLanes) {
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) to.o[column() + i] = o[i];
      }
      if (lane == 0) to.row_max = row_max, to.row_sum = row_sum;
    }
  };

  const Cache cache;  // from this lane's chunks on
  Chunks k, v;

  __device__ explicit Attention(const Cache& of)
      : cache{of.keys + column(), of.values + column(), of.key_stride, of.value_stride, of.newest} {
  }

  static __device__ int column() { return threadIdx.x % kLanes * kPerChunk; }
  static __device__ int key_of(int split, int step) {
    return split * kSplit + threadIdx.x / kLanes + step * kKeys;
  }

  __device__ void load(const Element* from, int64_t stride, int split, Chunks& to) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int64_t n = key_of(split, step);
      to[step] = n < cache.newest ? *reinterpret_cast<const uint4*>(from + n * stride)
                                  : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ void load(int split) {
    load(cache.keys, cache.key_stride, split, k);
    load(cache.values, cache.value_stride, split, v);
  }

  template <bool kIsShared>
  __device__ Query receive(const Token<kIsShared>& token) const {
    Query query;
#pragma unroll
    for (int i = 0; i < kPerChunk; i += 4) {
      const uint4 four = token.read(token.q + column() + i);
      query.q[i] = __uint_as_float(four.x), query.q[i + 1] = __uint_as_float(four.y);
      query.q[i + 2] = __uint_as_float(four.z), query.q[i + 3] = __uint_as_float(four.w);
    }
    query.newest_k = token.read(token.key + column());
    query.newest_v = token.read(token.value + column());
    return query;
  }

  __device__ Result attend_to(const Query& query, float softmax_scale, int split, int next,
                              Shared&) {
    // S = softmax_scale * Q K^T, and its maximum over the warp. The initial maximum is finite, so
    // that a warp without keys does not compute inf - inf.
    Result result;
    float s[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float key[kPerChunk];
      const bool is_newest = key_of(split, step) == cache.newest;
      unpack<Element>(choose_chunk(is_newest, query.newest_k, k[step]), key);
      s[step] = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerChunk; ++i) s[step] += query.q[i] * key[i];
    }
    // The steps' exchanges between lanes are in flight together.
#pragma unroll
    for (int width = kLanes / 2; width > 0; width /= 2) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) s[step] += __shfl_xor_sync(kWarp, s[step], width);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      s[step] = key_of(split, step) <= cache.newest ? softmax_scale * s[step] : -INFINITY;
      result.row_max = fmaxf(result.row_max, s[step]);
    }
    if (next > 0) load(cache.keys, cache.key_stride, split + next, k);
#pragma unroll
    for (int width = kLanes; width < 32; width *= 2)
      result.row_max = fmaxf(result.row_max, __shfl_xor_sync(kWarp, result.row_max, width));

    // P = exp(S - row_max), O = P V
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float value[kPerChunk];
      const bool is_newest = key_of(split, step) == cache.newest;
      unpack<Element>(choose_chunk(is_newest, query.newest_v, v[step]), value);
      const float weight = ptx::fast_exp(s[step] - result.row_max);
      result.row_sum += weight;
#pragma unroll
      for (int i = 0; i < kPerChunk; ++i) result.o[i] += weight * value[i];
    }
    if (next > 0) load(cache.values, cache.value_stride, split + next, v);
#pragma unroll
    for (int width = kLanes; width < 32; width *= 2) {
      result.row_sum += __shfl_xor_sync(kWarp, result.row_sum, width);
#pragma unroll
      for (int i = 0; i < kPerChunk; ++i) result.o[i] += __shfl_xor_sync(kWarp, result.o[i], width);
    }
    return result;
  }
};

}  // namespace attention::slot
