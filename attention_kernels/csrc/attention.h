// The contract between a kernel's version file and the rest of the project, without torch headers.
//
// A version file defines exactly two functions in `namespace attention::ATTENTION_VERSION`:
//
//   int64_t scratch_floats(const Params& params);
//   cudaError_t launch(const Params& params, cudaStream_t stream);
//
// If its header says `Role: decode`, they take DecodeParams instead. With `Role: struct`, for a
// kernel that does more than attention, they take a StructParams that the file defines and its
// caller fills in.
//
// The first returns how many floats of scratch launch() needs; launch() enqueues the work and does
// nothing else: it never allocates, synchronizes, prints, exits or copies from the host. For a
// head_dim without a kernel, or more shared memory than the device has, it returns the cudaError_t;
// the caller turns it into an exception.
//
// The file also runs on the CPU, in the emulator, which supports most of CUDA, but no clock64() and
// only the inline PTX in emulator/ptx.txt: a kernel that uses anything else does not compile there,
// and the error says so. emulator/cuda_emulator.h lists other limits.

#pragma once

#include <cstdint>

namespace attention {

// Strides in elements. The stride of head_dim is 1: binding.cpp checks it.
struct Strides {
  int64_t batch;
  int64_t seqlen;
  int64_t head;
};

// q, k, v and o are (batch, seqlen, num_heads, head_dim); seqlen_q == seqlen_k. With is_causal,
// query i sees the keys 0..i. The element type is the ladder's: float for fp32/.
struct Params {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  float* scratch;  // scratch_floats(params) floats, uninitialized; null if that is 0
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  int batch;
  int seqlen;
  int num_heads;
  int head_dim;
  double softmax_scale;  // a float32 kernel casts it to float
  bool is_causal;
};

// Attention of one new token per row over a cache. q and o are (batch, 1, num_heads, head_dim);
// k_cache and v_cache are (batch, max_seqlen, num_heads, head_dim). A captured graph replays the
// launch with different seqlens, so grid and scratch may depend on max_seqlen but not on seqlens. A
// launch has at most 65,535 rows, the limit of grid.y and grid.z: a larger batch takes several.
struct DecodeParams {
  const void* q;
  const void* k_cache;
  const void* v_cache;
  void* o;
  float* scratch;      // as in Params
  const int* seqlens;  // (batch), on the device: number of keys that each row sees, 1 to max_seqlen
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  int batch;
  int max_seqlen;
  int num_heads;
  int head_dim;
  double softmax_scale;
};

// Defined by a file whose Role is struct.
struct StructParams;

#if defined(ATTENTION_DECODE)
using VersionParams = DecodeParams;
#elif defined(ATTENTION_STRUCT)
using VersionParams = StructParams;
#else
using VersionParams = Params;
#endif

// What binding.cpp needs to know about a version; filled in by common.cuh.
struct Version {
  const char* op;
  const char* dtype;
  bool is_contiguous;
  bool is_decode;
  bool is_struct;
  int64_t (*scratch_floats)(const void* params);
  int (*launch)(const void* params, void* stream);  // returns a cudaError_t
};
extern const Version version;

}  // namespace attention
