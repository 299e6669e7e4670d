// The one file with torch headers: it registers a version's launch() as
// attention_kernels::<version.op>, for CUDA or, with ATTENTION_EMULATOR, for the CPU. It does not
// depend on the version, so it is compiled once and linked to each. The op's schema and its fake
// kernel are in Python. With ATTENTION_POISON, output and scratch are filled with NaN before the
// launch, so that elements nobody writes show; the emulator always does that, with NaN or the word
// ATTENTION_EMULATOR_POISON. ATTENTION_LIBRARY names another library of ops than attention_kernels.
//
// It does everything that a version's launch() does not: checks, allocation, the device guard, the
// current stream, and exceptions for errors. An error that begins with "refuses: " is about the
// call's arguments; it lists every reason, separated by "; ", and nothing has run.

// The stable interface of torch 2.10, which later releases keep.
#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))
#endif
#if !defined(ATTENTION_EMULATOR) && !defined(USE_CUDA)
#define USE_CUDA  // declares aoti_torch_get_current_cuda_stream()
#endif

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#ifdef ATTENTION_EMULATOR
#include "emulator/cuda_emulator.h"
#include "emulator/runtime.h"
#else
#include <cuda_runtime.h>
#endif

#ifndef ATTENTION_LIBRARY
#define ATTENTION_LIBRARY attention_kernels
#endif
// These expand ATTENTION_LIBRARY first.
#define ATTENTION_NAME(library) #library
#define ATTENTION_NAME_OF(library) ATTENTION_NAME(library)
#define ATTENTION_REGISTER(library, device, ops) STABLE_TORCH_LIBRARY_IMPL(library, device, ops)

namespace attention {

namespace {

using torch::stable::Tensor;

// Kernels load 16 bytes at a time.
constexpr int64_t kAlignment = 16;

[[noreturn]] void fail(const std::string& complaint) {
  throw std::runtime_error(ATTENTION_NAME_OF(ATTENTION_LIBRARY) "::" + std::string(version.op) +
                           ": " + complaint);
}

[[noreturn]] void refuse(const std::vector<std::string>& reasons) {
  std::string text = "refuses: ";
  for (const std::string& reason : reasons) text += (&reason == &reasons[0] ? "" : "; ") + reason;
  fail(text);
}

int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

int32_t version_dtype() {
  const std::string name = version.dtype;
  if (name == "float16") return aoti_torch_dtype_float16();
  if (name == "bfloat16") return aoti_torch_dtype_bfloat16();
  if (name == "float64") return aoti_torch_dtype_float64();
  return aoti_torch_dtype_float32();
}

// is_cache: the tensor's seqlen may differ from q's.
void check_input(const char* name, const Tensor& tensor, const Tensor& q, bool is_cache = false) {
  const auto check = [&](bool holds, const std::string& complaint) {
    if (!holds) fail(std::string(name) + " must " + complaint);
  };
  static const int32_t dtype = version_dtype();
  check(tensor.dim() == 4, "be (batch, seqlen, num_heads, head_dim)");
  for (int i = 0; i < 4; ++i)
    check(tensor.size(i) == q.size(i) || (is_cache && i == 1), "have the shape of q");
  check(dtype_of(tensor) == dtype, std::string("be ") + version.dtype);
#ifdef ATTENTION_EMULATOR
  check(tensor.is_cpu(), "be on the CPU");
#else
  check(tensor.is_cuda(), "be on a CUDA device");
#endif
  check(tensor.get_device_index() == q.get_device_index(), "be on the device of q");
  check(tensor.size(3) <= 1 || tensor.stride(3) == 1, "have a last stride of 1");
  check(!version.is_contiguous || tensor.is_contiguous(), "be contiguous");
}

bool is_aligned(const Tensor& tensor) {
  const auto element = static_cast<int64_t>(tensor.element_size());
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0;
  for (int i = 0; i < 3; ++i)
    aligned &= tensor.size(i) <= 1 || tensor.stride(i) * element % kAlignment == 0;
  return aligned;
}

struct Named {
  const char* name;
  const Tensor& tensor;
};

// Refuses inputs that no version can take. seqlen is that of the longest tensor.
void check_limits(int64_t seqlen, const Named& q, std::initializer_list<Named> others) {
  std::vector<std::string> reasons;
  const auto limit = [&](const char* what, int64_t size, int64_t most) {
    if (size > most)
      reasons.push_back(std::string(what) + " may be at most " + std::to_string(most) + ", not " +
                        std::to_string(size));
  };
  // Kernels that index a tile with int have tiles of at most 64 rows; all kernels have at most one
  // block per 16 rows, on grid.y.
  limit("seqlen", seqlen, 65535 * 16);
  limit("batch * num_heads", q.tensor.size(0) * q.tensor.size(2), INT_MAX);
  limit("num_heads * head_dim", q.tensor.size(2) * q.tensor.size(3), INT_MAX / 64);
  const auto align = [&](const Named& input) {
    if (!is_aligned(input.tensor))
      reasons.push_back(std::string(input.name) +
                        " must begin at a multiple of 16 bytes, and so must its rows");
  };
  align(q);
  for (const Named& input : others) align(input);
  if (!reasons.empty()) refuse(reasons);
}

// A version's own host code may divide by a setting, so a wrong one is reported before that runs.
void check_settings() {
#ifdef ATTENTION_EMULATOR
  if (const std::string wrong = emulator::wrong_setting(); !wrong.empty()) fail(wrong);
#endif
}

// Returns whether the launch ran nothing and can never succeed on this device.
bool is_refusal(cudaError_t error) {
  return error == cudaErrorInvalidValue || error == cudaErrorInvalidConfiguration ||
         error == cudaErrorLaunchOutOfResources || error == cudaErrorNoKernelImageForDevice
#ifndef ATTENTION_EMULATOR
         || error == cudaErrorInsufficientDriver || error == cudaErrorCooperativeLaunchTooLarge
#endif
      ;
}

// subject: names the refused argument
void check_launch(cudaError_t error, [[maybe_unused]] const Tensor& q, const std::string& subject) {
  if (error == cudaSuccess) return;
  std::string complaint = std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
#ifdef ATTENTION_EMULATOR
  if (const std::string reason = emulator::last_error(); !reason.empty())
    complaint += ": " + reason;
#endif
  if (!is_refusal(error)) fail(complaint);
#ifndef ATTENTION_EMULATOR
  int bytes = 0;
  (void)cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                               q.get_device_index());
  complaint +=
      " (a block of this device may have " + std::to_string(bytes) + " bytes of shared memory)";
#endif
  refuse({subject + "on this device: " + complaint});
}

Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Tensor& like) {
  int64_t strides[4];
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes.begin()[i]) strides[i] = stride;
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(),
                                                  strides, dtype, device_type,
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}

// All bits set is a NaN in every floating-point type.
void poison([[maybe_unused]] const Tensor& tensor, [[maybe_unused]] cudaStream_t stream) {
#if defined(ATTENTION_EMULATOR)
  const char* const word = emulator::setting("ATTENTION_EMULATOR_POISON");
  emulator::SharedMemory::fill(static_cast<unsigned char*>(tensor.mutable_data_ptr()),
                               tensor.numel() * tensor.element_size(),
                               word ? std::strtoul(word, nullptr, 16) : 0xffffffff);
#elif defined(ATTENTION_POISON)
  const cudaError_t error = cudaMemsetAsync(tensor.mutable_data_ptr(), 0xff,
                                            tensor.numel() * tensor.element_size(), stream);
  if (error != cudaSuccess) fail(cudaGetErrorString(error));
#endif
}

Strides strides_of(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

cudaStream_t current_stream([[maybe_unused]] const Tensor& of) {
#ifdef ATTENTION_EMULATOR
  return nullptr;
#else
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(of.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
#endif
}

// The most rows per launch. A decode kernel may map them to grid.y or grid.z, which are limited.
constexpr int64_t rows_at_once(const Params&) { return INT_MAX; }
constexpr int64_t rows_at_once(const DecodeParams&) { return 65535; }

// Advances params past the first rows.
void skip_rows(Params&, int64_t, size_t) {}
void skip_rows(DecodeParams& params, int64_t rows, size_t element_bytes) {
  const auto moved = [&](auto pointer, const Strides& strides) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    return reinterpret_cast<decltype(pointer)>(address + rows * strides.batch * element_bytes);
  };
  params.q = moved(params.q, params.q_strides);
  params.k_cache = moved(params.k_cache, params.k_strides);
  params.v_cache = moved(params.v_cache, params.v_strides);
  params.o = moved(params.o, params.o_strides);
  params.seqlens += rows;
}

// Allocates o and scratch, and launches the version on the current stream of q's device, once per
// rows_at_once() rows.
template <typename AnyParams>
Tensor launch(AnyParams params, const Tensor& q) {
#ifndef ATTENTION_EMULATOR
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
#endif
  const cudaStream_t stream = current_stream(q);
  const Tensor o = empty({q.size(0), q.size(1), q.size(2), q.size(3)}, dtype_of(q), q);
  if (o.numel() == 0) return o;
  check_settings();
  params.q = q.const_data_ptr();
  params.o = o.mutable_data_ptr();
  params.q_strides = strides_of(q);
  params.o_strides = strides_of(o);
  int64_t left = q.size(0);
  const auto first_rows = [&] { return static_cast<int>(std::min(left, rows_at_once(params))); };
  params.batch = first_rows();
  params.num_heads = static_cast<int>(q.size(2));
  params.head_dim = static_cast<int>(q.size(3));
  poison(o, stream);

  // Freed on return, when the kernel may still be running: the allocator reuses it only for later
  // work on this stream.
  std::optional<Tensor> scratch;
  const int64_t floats = version.scratch_floats(&params);
  if (floats < 0) fail("scratch_floats() returned " + std::to_string(floats) + ", less than 0");
  if (floats > 0) {
    scratch = empty({floats}, aoti_torch_dtype_float32(), q);
    params.scratch = static_cast<float*>(scratch->mutable_data_ptr());
    poison(*scratch, stream);
  }
  while (left > 0) {
    params.batch = first_rows();
    int error;
    try {
      error = version.launch(&params, stream);
    } catch (const std::invalid_argument& refusal) {  // of an Entry's call
      refuse({refusal.what()});
    }
    check_launch(static_cast<cudaError_t>(error), q, "head_dim " + std::to_string(q.size(3)) + " ");
    skip_rows(params, params.batch, q.element_size());
    left -= params.batch;
  }
  return o;
}

Tensor run(Tensor q, Tensor k, Tensor v, double softmax_scale, bool is_causal) {
  check_input("q", q, q);
  check_input("k", k, q);
  check_input("v", v, q);
  check_limits(q.size(1), {"q", q}, {{"k", k}, {"v", v}});
  Params params{};
  params.k = k.const_data_ptr();
  params.v = v.const_data_ptr();
  params.k_strides = strides_of(k);
  params.v_strides = strides_of(v);
  params.seqlen = static_cast<int>(q.size(1));
  params.softmax_scale = softmax_scale;
  params.is_causal = is_causal;
  return launch(params, q);
}

Tensor run_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seqlens, double softmax_scale) {
  check_input("q", q, q);
  check_input("k_cache", k_cache, q, /*is_cache=*/true);
  check_input("v_cache", v_cache, q, /*is_cache=*/true);
  if (q.size(1) != 1) fail("q must have one token per row");
  if (v_cache.size(1) != k_cache.size(1)) fail("v_cache must have the shape of k_cache");
  if (seqlens.dim() != 1 || seqlens.size(0) != q.size(0) || !seqlens.is_contiguous() ||
      dtype_of(seqlens) != aoti_torch_dtype_int32() || seqlens.is_cpu() != q.is_cpu() ||
      seqlens.get_device_index() != q.get_device_index())
    fail("seqlens must be int32 (batch), contiguous and on the device of q");
  check_limits(k_cache.size(1), {"q", q}, {{"k_cache", k_cache}, {"v_cache", v_cache}});
  DecodeParams params{};
  params.k_cache = k_cache.const_data_ptr();
  params.v_cache = v_cache.const_data_ptr();
  params.seqlens = static_cast<const int*>(seqlens.const_data_ptr());
  params.k_strides = strides_of(k_cache);
  params.v_strides = strides_of(v_cache);
  params.max_seqlen = static_cast<int>(k_cache.size(1));
  params.softmax_scale = softmax_scale;
  return launch(params, q);
}

// params: the bytes of a StructParams, on the CPU, with pointers to memory on the device of `on`.
// The caller has checked that memory and keeps it alive.
void run_struct(Tensor on, Tensor params) {
  if (!params.is_cpu() || !params.is_contiguous()) fail("params must be contiguous, on the CPU");
#ifndef ATTENTION_EMULATOR
  const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
#endif
  check_settings();
  const int error = version.launch(params.const_data_ptr(), current_stream(on));
  check_launch(static_cast<cudaError_t>(error), on, "");
}

}  // namespace
}  // namespace attention

#ifdef ATTENTION_EMULATOR
ATTENTION_REGISTER(ATTENTION_LIBRARY, CPU, library) {
#else
ATTENTION_REGISTER(ATTENTION_LIBRARY, CUDA, library) {
#endif
#ifdef ATTENTION_EMULATOR
  attention::emulator::has_constants = attention::version.is_struct;
#endif
  if (attention::version.is_struct)
    library.impl(attention::version.op, TORCH_BOX(&attention::run_struct));
  else if (attention::version.is_decode)
    library.impl(attention::version.op, TORCH_BOX(&attention::run_decode));
  else
    library.impl(attention::version.op, TORCH_BOX(&attention::run));
}
