// What ladder/entry.py puts before somebody else's kernel, so that a call of it, the field Entry of a
// version file, is a version's launch(). The names that the call may use are members of Names.

#pragma once

#include <stdexcept>
#include <string_view>

#include "element.cuh"

#ifdef ATTENTION_TORCH  // torch/extension.h was included first
// Nothing is registered, neither with Python nor with torch.
#undef PYBIND11_MODULE
#undef TORCH_LIBRARY
#undef TORCH_LIBRARY_FRAGMENT
#undef TORCH_LIBRARY_IMPL
#undef REGISTER_EXTENSION
#define ATTENTION_UNUSED_(line, module) \
  template <typename Module>            \
  [[maybe_unused]] static void attention_unused_##line(Module& module)
#define ATTENTION_UNUSED(line, module) ATTENTION_UNUSED_(line, module)
#define PYBIND11_MODULE(name, module, ...) ATTENTION_UNUSED(__LINE__, module)
#define TORCH_LIBRARY(name, module) ATTENTION_UNUSED(__LINE__, module)
#define TORCH_LIBRARY_FRAGMENT(name, module) ATTENTION_UNUSED(__LINE__, module)
#define TORCH_LIBRARY_IMPL(name, key, module) ATTENTION_UNUSED(__LINE__, module)
#define REGISTER_EXTENSION(name)
#ifdef ATTENTION_EMULATOR  // the CPU is the device
#include "emulator/torch_device.h"
#define is_cuda is_cpu
#define kCUDA kCPU
#endif
#endif

namespace attention_entry {

using attention::Element;
using attention::Params;

// Strides in elements; `part` is from q to k and from k to v in one tensor.
struct Order {
  int64_t part = 0, batch = 0, seqlen = 0, head = 0, dim = 0;
};

inline int size_of(char name, const Params& params) {
  if (name == 'B') return params.batch;
  if (name == 'N') return params.seqlen;
  if (name == 'H') return params.num_heads;
  return name == 'D' ? params.head_dim : 3;
}

// Returns the strides of a contiguous tensor, given its dimensions, such as BHND or BN3HD.
inline Order order_of(std::string_view dimensions, const Params& params) {
  int64_t strides['N' + 1] = {}, stride = 1;
  for (size_t i = dimensions.size(); i-- > 0; stride *= size_of(dimensions[i], params))
    strides[static_cast<int>(dimensions[i])] = stride;
  return {strides['3'], strides['B'], strides['N'], strides['H'], strides['D']};
}

template <typename To, typename From>
__global__ void copy(To* to, Order there, const From* from, Order here, Params sizes,
                     int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const int64_t d = i % sizes.head_dim, row = i / sizes.head_dim;
    const int64_t h = row % sizes.num_heads, n = row / sizes.num_heads % sizes.seqlen;
    const int64_t b = row / sizes.num_heads / sizes.seqlen;
    const From x = from[b * here.batch + n * here.seqlen + h * here.head + d * here.dim];
    To& y = to[b * there.batch + n * there.seqlen + h * there.head + d * there.dim];
    if constexpr (std::is_same_v<To, From> || std::is_same_v<To, double>) {
      y = x;
    } else {
      y = attention::from_float<To>(x);
    }
  }
}

template <typename T>
__global__ void fill(T* to, int64_t count, T first, T step) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to[i] = first + static_cast<T>(i) * step;
}

#ifdef ATTENTION_TORCH
// A tensor, or a pointer to its elements.
struct Input : torch::Tensor {
  using torch::Tensor::Tensor;
  Input& operator=(torch::Tensor tensor) {
    torch::Tensor::operator=(std::move(tensor));
    return *this;
  }
  operator Element*() const { return static_cast<Element*>(data_ptr()); }
};
#else
using Input = Element*;
#endif

// The names of an entry; those of its own functions end with _.
struct Names {
  const Params& params;
  const cudaStream_t stream;
  const int B = params.batch, N = params.seqlen, H = params.num_heads;
  const bool causal = params.is_causal;
  const std::conditional_t<std::is_same_v<Element, double>, double, float> scale =
      params.softmax_scale;
  const bool default_scale = std::abs(scale * std::sqrt(double(params.head_dim)) - 1) < 1e-6;
  Input q{}, k{}, v{}, o{}, qkv{};
  float* o_float = nullptr;
  int* cu_seqlens = nullptr;

  Names(const Params& of, cudaStream_t on, bool only_counts)
      : params(of), stream(on), only_counts_(only_counts) {}

  // An array of scratch: uninitialized, or set before the call.
  float* floats(int64_t count) { return array_<float>(count); }
  float* filled(int64_t count, float value) { return set_<float>(count, value, 0); }
  float* zeros(int64_t count) { return filled(count, 0); }
  int* ints(int64_t count, int first = 0, int step = 0) { return set_<int>(count, first, step); }

 protected:
  // Copies q, k and v to tensors of the given dimensions, unless they have them. dimensions: those of
  // one of them, or with 3 of all together.
  void prepare_(std::string_view dimensions, bool is_o_float, bool has_lengths) {
    const bool is_packed = dimensions.size() > 4;
    char* end = of_o_;
    for (const char name : dimensions) {
      if (name != '3') *end++ = name;
    }
    const Order order = order_of(dimensions, params);
    Element* const all = is_packed ? array_<Element>(3 * total_()) : nullptr;
    if (is_packed) qkv = tensor_(all, dimensions);
    int part = 0;
    for (const auto& [input, pointer, strides] :
         {Given{q, params.q, params.q_strides}, Given{k, params.k, params.k_strides},
          Given{v, params.v, params.v_strides}}) {
      auto* const from = static_cast<Element*>(const_cast<void*>(pointer));
      Element* to = from;
      if (dimensions != "BNHD") {
        to = is_packed ? all + part++ * order.part : array_<Element>(total_());
        copy_(to, order, from, {0, strides.batch, strides.seqlen, strides.head, 1});
      }
      if (!is_packed) input = tensor_(to, of_o_);
    }
    output_ = static_cast<Element*>(params.o);
    if (std::string_view(of_o_) != "BNHD") output_ = array_<Element>(total_());
    o = tensor_(output_, of_o_);
    if (is_o_float) o_float = floats(total_());
    if (has_lengths) cu_seqlens = ints(B + 1, 0, N);
  }

  // Copies the output to where it belongs.
  void finish_() {
    if (error_ != cudaSuccess) return;
    const Order from = order_of(of_o_, params), to = order_of("BNHD", params);
    auto* const there = static_cast<Element*>(params.o);
    if (o_float != nullptr) {
      copy_(there, to, static_cast<const float*>(o_float), from);
    } else if (output_ != there) {
      copy_(there, to, static_cast<const Element*>(output_), from);
    }
  }

  template <typename... Parameters, typename... Arguments>
  void launch_(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t smem_bytes,
               cudaStream_t on, Arguments... arguments) {
    check_(attention::launch_kernel(kernel, grid, block, smem_bytes, on, arguments...));
  }

  // Calls a host function, which may launch on the default stream.
  template <typename Function>
  void call_(Function function) {
    if (error_ != cudaSuccess) return;
    order_(stream, nullptr);
#ifdef ATTENTION_EMULATOR
    check_(cudaDeviceSynchronize());
#endif
    if constexpr (std::is_void_v<decltype(function())>)
      function();
    else
      take_(function());
    check_(cudaGetLastError());
    order_(nullptr, stream);
  }
  void check_(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }
  template <typename... Arguments>
  static void ignore_(Arguments&&...) {}

 public:
  cudaError_t error_ = cudaSuccess;
  int64_t used_ = 0;  // floats of scratch

 private:
  struct Given {
    Input& input;
    const void* pointer;
    const attention::Strides& strides;
  };

  int64_t total_() const { return int64_t{B} * N * H * params.head_dim; }

  template <typename T>
  T* array_(int64_t count) {
    T* const array = only_counts_ ? nullptr : reinterpret_cast<T*>(params.scratch + used_);
    used_ += attention::ceil_div<int64_t>(count * sizeof(T), 256) * 64;  // 256 bytes are 64 floats
    return array;
  }
  template <typename T>
  T* set_(int64_t count, T first, T step) {
    T* const array = array_<T>(count);
    if (!only_counts_ && count > 0)
      launch_(fill<T>, attention::ceil_div<int64_t>(count, 256), 256, 0, stream, array, count,
              first, step);
    return array;
  }
  template <typename To, typename From>
  void copy_(To* to, Order there, From* from, Order here) {
    if (only_counts_) return;
    const auto blocks = std::min<int64_t>(attention::ceil_div<int64_t>(total_(), 1024), 65535);
    launch_(copy<To, std::remove_const_t<From>>, blocks, 256, 0, stream, to, there, from, here,
            params, total_());
  }
  // Has `after` wait for what is in `before`. The default stream waits for others only if they were
  // not made to ignore it, as torch's are.
  void order_(cudaStream_t before, cudaStream_t after) {
    if (before == after) return;
    cudaEvent_t event;
    check_(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    check_(cudaEventRecord(event, before));
    check_(cudaStreamWaitEvent(after, event, 0));
    check_(cudaEventDestroy(event));
  }

#ifdef ATTENTION_TORCH
  torch::Tensor tensor_(Element* elements, std::string_view dimensions) const {
    if (only_counts_) return {};
    std::vector<int64_t> sizes;
    for (const char name : dimensions) sizes.push_back(size_of(name, params));
#ifdef ATTENTION_EMULATOR
    const torch::Device device = torch::kCPU;
#else
    int index = 0;
    (void)cudaGetDevice(&index);
    const torch::Device device(torch::kCUDA, index);
#endif
    return torch::from_blob(
        elements, sizes,
        torch::device(device).dtype(torch::CppTypeToScalarType<TorchElement_>::value));
  }
  using TorchElement_ = std::conditional_t<
      std::is_same_v<Element, __half>, c10::Half,
      std::conditional_t<std::is_same_v<Element, __nv_bfloat16>, c10::BFloat16, Element>>;
  void take_(const torch::Tensor& result) { o.copy_(result.reshape(o.sizes())); }
  template <typename... Others>
  void take_(const std::tuple<torch::Tensor, Others...>& results) {
    take_(std::get<0>(results));
  }
  void take_(const std::vector<torch::Tensor>& results) { take_(results.at(0)); }
#else
  static Element* tensor_(Element* elements, std::string_view) { return elements; }
#endif
  template <typename Result>
  void take_(const Result& result) {
    if constexpr (std::is_same_v<Result, cudaError_t>) check_(result);
  }

  const bool only_counts_;
  char of_o_[5] = "";
  Element* output_ = nullptr;
};

// Entry: a struct of the entry, which takes the names from Names.
template <typename Entry, int... kHeadDims>
int64_t scratch_floats(const Params& params) {
  Entry entry(params, nullptr, true);
  ((params.head_dim == kHeadDims ? entry.template count<kHeadDims>() : void()), ...);
  return entry.used_;
}

template <typename Entry, int... kHeadDims>
cudaError_t launch(const Params& params, cudaStream_t stream) {
  Entry entry(params, stream, false);
  bool is_known = false;
  ((params.head_dim == kHeadDims ? (is_known = true, entry.template call<kHeadDims>()) : void()),
   ...);
  return is_known ? entry.error_ : cudaErrorInvalidValue;
}

}  // namespace attention_entry
