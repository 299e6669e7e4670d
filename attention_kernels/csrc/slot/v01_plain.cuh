// v01 - one thread per key, then one per column of O
//
// Change: a thread computes the score of its key. Then each thread finds the maximum of all scores, which
//         are in shared memory, and adds up the weights and its column of O.
// Why:    it is the definition of attention, as short as it gets.
// Cost:   half of the threads have no key. The lanes of a warp read different rows of the cache, and
//         nothing is requested before it is needed.
// Takes:  float32 float16 bfloat16
// Shared: 4 * (D + 2 + 128)

#include "slot/slot.cuh"

namespace attention::slot {

template <int kHeadDim>
struct Attention {
  static constexpr int kPartials = 1;
  struct Shared {
    float scores[kSplit];
  };
  struct Result {
    float row_max, row_sum, o;  // o: this thread's column

    __device__ void store(Partial<kHeadDim> (&partials)[1]) const {
      if (threadIdx.x < kHeadDim) partials[0].o[threadIdx.x] = o;
      if (threadIdx.x == 0) partials[0].row_max = row_max, partials[0].row_sum = row_sum;
    }
  };

  const Cache cache;

  __device__ void load(int) {}

  template <bool kIsShared>
  __device__ Token<kIsShared> receive(const Token<kIsShared>& token) const {
    return token;
  }

  template <bool kIsShared>
  __device__ Result attend_to(const Token<kIsShared>& token, float softmax_scale, int split, int,
                              Shared& shared) const {
    const int t = threadIdx.x, first = split * kSplit, n = first + t;
    if (t < kSplit) {
      const Element* const key = n < cache.newest ? cache.keys + n * cache.key_stride : token.key;
      float s = 0.0f;
      for (int i = 0; i < kHeadDim; ++i) s += token.q[i] * to_float(key[i]);
      shared.scores[t] = n <= cache.newest ? softmax_scale * s : -INFINITY;
    }
    __syncthreads();

    Result result{-FLT_MAX, 0.0f, 0.0f};
    for (const float s : shared.scores) result.row_max = fmaxf(result.row_max, s);
    for (int i = 0; i < kSplit && first + i <= cache.newest; ++i) {
      const float weight = __expf(shared.scores[i] - result.row_max);
      result.row_sum += weight;
      if (t >= kHeadDim) continue;
      const Element* const value =
          first + i < cache.newest ? cache.values + (first + i) * cache.value_stride : token.value;
      result.o += weight * to_float(value[t]);
    }
    return result;
  }
};

}  // namespace attention::slot
