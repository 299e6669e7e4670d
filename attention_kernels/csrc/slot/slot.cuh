// The slot of the fused step: its attention, `struct Attention`, in a file that includes this one.
//
//   template <int kHeadDim> struct Attention {     // in namespace attention::slot
//     static constexpr int kPartials;              // results that a block leaves for each split
//     struct Shared;                               // its own shared memory
//     Attention(const Cache&);                     // of one row and head
//     void load(int split);                        // optional work: it may request keys and values
//     Query receive(const Token<kIsShared>&);      // template; Query is a type of its own
//     Result attend_to(const Query&, float softmax_scale, int split, int next, Shared&);
//   };                                             // Result has store(Partial (&)[kPartials])
//
// All kThreads threads of a block call these in this order. Each block has one split or several.
//
// load() runs before the step has computed q, the newest key and the newest value. It must not read
// them: of the cache only keys n < newest exist. Its split may have none of them.
// receive() gets these three, in shared memory or, in a chain of kernels, in global memory. They may
// not be in the cache yet. What it returns is what attend_to() gets for each split.
// attend_to() computes the attention of q to the keys n <= newest of a split, at least one. If next > 0,
// the block's next split is split + next, whose keys and values it may request, if there are any.
// store() leaves the results of the split, which the step joins in order.
//
// load(), receive() and attend_to() may call __syncthreads(). Before store() the step calls it if
// the partials may still be read, and after store() always, so then Shared may be reused. Nothing may
// wait for another block.
//
// In the header of the file, `Takes` and `Needs` are as in a version file. `Shared` is a formula of
// the head_dim D, the most bytes that Shared and the partials occupy: one kernel runs all layers only
// where they fit, and no block has more than 48 KB, which also hold each split's partial.

#pragma once
#define ATTENTION_SLOT

#include <cfloat>

#include "element.cuh"

namespace attention::slot {

constexpr int kSplit = 128;  // split i has the keys from kSplit * i on
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr unsigned kWarp = 0xffffffff;

// Key n is at keys + n * key_stride; 16 bytes are aligned.
struct Cache {
  const Element *keys, *values;
  int64_t key_stride, value_stride;  // in elements
  int newest;                        // the key that this step adds
};

// q, and the newest key and value, each of kHeadDim.
template <bool kIsShared>
struct Token {
  const float* q;
  const Element *key, *value;

  // Reads 16 bytes of one of them; of global memory from L2, because a block reads them only once.
  static __device__ uint4 read(const void* from) {
    const auto* const chunk = static_cast<const uint4*>(from);
    return kIsShared ? *chunk : __ldcg(chunk);
  }
};

// For some keys, with s = softmax_scale q k: row_max, the maximum of s; row_sum, the sum of
// exp(s - row_max); o, that of exp(s - row_max) v. Without keys: -FLT_MAX and zeros.
template <int kHeadDim>
struct Partial {
  float o[kHeadDim];
  float row_max;
  float row_sum;
};

}  // namespace attention::slot
