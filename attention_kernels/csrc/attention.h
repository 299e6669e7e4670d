// The contract between a kernel's version file and the rest of the project. No torch header here.
//
// A version file defines exactly two functions in `namespace attention::ATTENTION_VERSION`:
//
//   int64_t scratch_floats(const Params& params);
//   cudaError_t launch(const Params& params, cudaStream_t stream);
//
// If its header says `Role: decode`, they take DecodeParams instead; with `Role: struct`, for a
// kernel that is more than attention, a StructParams that the file defines and its caller fills.
//
// The first says how many floats of scratch launch() needs; launch() enqueues the work and does
// nothing else: it never allocates, synchronizes, prints, exits or copies from the host. A head_dim
// it has no kernel for, or more shared memory than the device has, is returned as the cudaError_t
// it is; the caller turns it into an exception.
//
// The file also runs on the CPU, in the emulator, which has most of CUDA but no inline PTX other
// than ptx.cuh's functions, no clock64() and no cooperative groups: a kernel that uses one of these
// does not compile there, and the error says so. See emulator/cuda_emulator.h for its other limits.

#pragma once

#include <cstdint>

namespace attention {

// Distances between neighbours, in elements. The stride of head_dim is 1: binding.cpp checks it.
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
  float* scratch;  // scratch_floats(params) floats, uninitialised; null where none are asked for
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  int batch;
  int seqlen;
  int num_heads;
  int head_dim;
  double softmax_scale;  // a float32 kernel takes it as a float
  bool is_causal;
};

// One new token per row against a cache. q and o are (batch, 1, num_heads, head_dim); k_cache and
// v_cache are (batch, max_seqlen, num_heads, head_dim). A captured graph replays the launch with
// other seqlens: neither the grid nor the scratch can depend on them, only on max_seqlen.
// One launch gets 65,535 rows at most, as many as a grid has on y or z: a larger batch is several.
struct DecodeParams {
  const void* q;
  const void* k_cache;
  const void* v_cache;
  void* o;
  float* scratch;      // as in Params
  const int* seqlens;  // (batch), on the device: the keys that each row sees, 1 to max_seqlen
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

// Of a file whose Role is struct.
struct StructParams;

#if defined(ATTENTION_DECODE)
using VersionParams = DecodeParams;
#elif defined(ATTENTION_STRUCT)
using VersionParams = StructParams;
#else
using VersionParams = Params;
#endif

// What binding.cpp knows of a version; common.cuh fills it in.
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
