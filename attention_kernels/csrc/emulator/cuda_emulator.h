// CUDA for g++, as far as the attention kernels use it: with -x c++ -std=c++17
// -DATTENTION_EMULATOR, g++ builds the same files as nvcc. It is meant to find wrong kernels and to
// count, not to be fast.
//
// This file declares CUDA's names. Below it, block.h has a launch and a block, fiber.h a thread and
// a warp, shared_memory.h a block's memory, in_flight.h what it has begun and
// not finished, and types.h CUDA's types. Half precision is in cuda_fp16.h and cuda_bf16.h,
// fragments (nvcuda::wmma) are in mma.h and asynchronous copies in cuda_pipeline.h: with -I for
// this folder, a kernel's own `#include <mma.h>` finds them. The functions of ptx.cuh are in
// cluster.h and ptx.h, those of tma.cuh and wgmma.cuh in tma.h and wgmma.h.
//
// The part that does not depend on the kernel is in runtime.cpp, compiled once and linked to every
// kernel: grid.cpp runs a launch, block.cpp a block, and faults.cpp reports faults.
//
// Environment, read at each launch:
//   ATTENTION_EMULATOR_ARCH     compute capability, which limits shared memory: 90 by default
//   ATTENTION_EMULATOR_MULTIPROCESSORS  number that the device reports: 8 by default
//   ATTENTION_EMULATOR_THREADS  OS threads; results do not depend on them (float atomics aside)
//   ATTENTION_EMULATOR_ORDER    reverse or shuffle:<seed>: the order of blocks and of their threads
//   ATTENTION_EMULATOR_POISON   hexadecimal word that fills shared memory, scratch and outputs
//   ATTENTION_EMULATOR_TIMEOUT  seconds that a block may take: 60 by default; 0: no limit
//
// Limits: clock64() is a compile error, and so is inline PTX that ptx.txt does not have. Threads
// that wait at different __syncthreads() are an error, as in CUDA's documentation, though hardware
// tolerates it. A shuffle orders memory accesses here, which CUDA does not promise: compiled with
// -fsanitize=thread, a kernel that relies on it is reported (races.h). A thread that reads a plain
// word until another one writes spins until the block's time is up, unless it calls poll_again() or
// __nanosleep(); volatiles and atomics let others run. A library of emulated kernels must not
// define a thread_local of its own, nor link one from a static C++ library (see Library). Where
// races are looked for, what an inline function of these headers accesses counts as the kernel's
// own: apart from the block and its threads it may touch no memory of the emulator's.

#pragma once

#include <cassert>
#include <cmath>
#include <cstddef>
#include <limits>
#include <tuple>
#include <type_traits>

#include "block.h"

#pragma GCC visibility push(hidden)

#ifdef ATTENTION_EMULATOR_RACES
namespace attention::emulator {
[[maybe_unused]] static const bool is_checked = checks_races = true;
}
#endif

// ---- Qualifiers and built-in variables ----------------------------------------------------------

#if defined(__SANITIZE_THREAD__) || defined(ATTENTION_EMULATOR_RACES)
// g++ sees no access in a call that returns a struct directly into memory, so calls are inlined.
#define __global__ __attribute__((flatten))
#else
#define __global__
#endif
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static thread_local  // one OS thread runs one block at a time
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (::attention::emulator::this_fiber().thread_idx)
#define blockIdx (::attention::emulator::this_fiber().block->index)
#define blockDim (::attention::emulator::this_fiber().block->launch->block)
#define gridDim (::attention::emulator::this_fiber().block->launch->grid)
constexpr int warpSize = 32;

#define ATTENTION_DYNAMIC_SHARED(type, name) \
  type* const name =                         \
      reinterpret_cast<type*>(::attention::emulator::this_fiber().block->shared.dynamic)
#define ATTENTION_ALIGNED_SHARED(type, name, bytes) \
  type* const name =                                \
      reinterpret_cast<type*>(::attention::emulator::this_fiber().block->shared.align(bytes))

#define CUDART_INF_F (std::numeric_limits<float>::infinity())
#define CUDART_NAN_F (std::numeric_limits<float>::quiet_NaN())
#define CUDART_INF (std::numeric_limits<double>::infinity())

// ---- Waiting for others -------------------------------------------------------------------------

namespace attention::emulator {

ATTENTION_EMULATOR_INLINE unsigned wait_for_block(bool predicate, const char* name,
                                                  const char* file, int line) {
  Block& block = *this_fiber().block;
  switch_to(block.arrive_at_barrier(predicate, name, file, line));
  return block.barrier_votes;
}

ATTENTION_EMULATOR_INLINE uint64_t wait_for_warp(WarpOp op, unsigned mask, uint64_t value,
                                                 unsigned source, const Site& site) {
  Fiber& self = this_fiber();
  switch_to(self.block->arrive_in_warp(op, mask, value, source, &site));
  return self.block->warp->result[self.thread % kWarpSize];
}

// Returns the value of lane `source`.
template <typename T>
ATTENTION_EMULATOR_INLINE T exchange(unsigned mask, T value, unsigned source, const Site& site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = wait_for_warp(WarpOp::kShuffle, mask, bits, source, site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Returns the lane that PTX's shfl reads, which is the caller's if the other is not in its segment.
// how: the first letter of up, down, bfly or idx. b, c: PTX's operands.
inline unsigned shuffle_source(char how, unsigned b, unsigned c, bool& is_valid) {
  const unsigned lane = this_fiber().thread % kWarpSize, segment = c >> 8 & 31;
  const unsigned first = lane & segment, last = first | (c & 31 & ~segment);
  b &= 31;
  const unsigned source = how == 'u'   ? lane - b
                          : how == 'd' ? lane + b
                          : how == 'b' ? lane ^ b
                                       : first | (b & ~segment);
  is_valid = how == 'u' ? int(source) >= int(last) : source <= last;
  return is_valid ? source : lane;
}

}  // namespace attention::emulator

ATTENTION_EMULATOR_INLINE void __syncthreads(ATTENTION_EMULATOR_SITE) {
  attention::emulator::wait_for_block(false, "__syncthreads", file, line);
}
ATTENTION_EMULATOR_INLINE int __syncthreads_count(int predicate, ATTENTION_EMULATOR_SITE) {
  return static_cast<int>(
      attention::emulator::wait_for_block(predicate != 0, "__syncthreads_count", file, line));
}
ATTENTION_EMULATOR_INLINE int __syncthreads_or(int predicate, ATTENTION_EMULATOR_SITE) {
  return attention::emulator::wait_for_block(predicate != 0, "__syncthreads_or", file, line) != 0;
}
ATTENTION_EMULATOR_INLINE int __syncthreads_and(int predicate, ATTENTION_EMULATOR_SITE) {
  return attention::emulator::wait_for_block(predicate == 0, "__syncthreads_and", file, line) == 0;
}

ATTENTION_EMULATOR_INLINE void __syncwarp(unsigned mask = ~0u, ATTENTION_EMULATOR_SITE) {
  attention::emulator::wait_for_warp(attention::emulator::WarpOp::kSync, mask, 0, 0,
                                     {"__syncwarp", file, line});
}
ATTENTION_EMULATOR_INLINE unsigned __ballot_sync(unsigned mask, int predicate,
                                                 ATTENTION_EMULATOR_SITE) {
  return static_cast<unsigned>(attention::emulator::wait_for_warp(
      attention::emulator::WarpOp::kVote, mask, predicate != 0, 0, {"__ballot_sync", file, line}));
}
ATTENTION_EMULATOR_INLINE int __any_sync(unsigned mask, int predicate, ATTENTION_EMULATOR_SITE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
ATTENTION_EMULATOR_INLINE int __all_sync(unsigned mask, int predicate, ATTENTION_EMULATOR_SITE) {
  return __ballot_sync(mask, !predicate, file, line) == 0;
}
inline unsigned __activemask() {
  const auto& fiber = attention::emulator::this_fiber();
  const auto& warp = fiber.block->warps[fiber.thread / 32];
  return warp.exists & ~warp.done;
}

#define ATTENTION_EMULATOR_SHUFFLE(name, how, last)                                           \
  template <typename T>                                                                       \
  ATTENTION_EMULATOR_INLINE T name(unsigned mask, T value, unsigned operand, int width = 32,  \
                                   ATTENTION_EMULATOR_SITE) {                                 \
    using namespace attention::emulator;                                                      \
    const Site site{#name, file, line};                                                       \
    if (width < 1 || width > 32 || (width & (width - 1)) != 0)                                \
      fail(site, "width is not a power of two up to 32");                                     \
    bool is_valid;                                                                            \
    const unsigned source = shuffle_source(how, operand, (32 - width) << 8 | last, is_valid); \
    return exchange(mask, value, source, site);                                               \
  }
ATTENTION_EMULATOR_SHUFFLE(__shfl_sync, 'i', 31)
ATTENTION_EMULATOR_SHUFFLE(__shfl_up_sync, 'u', 0)
ATTENTION_EMULATOR_SHUFFLE(__shfl_down_sync, 'd', 31)
ATTENTION_EMULATOR_SHUFFLE(__shfl_xor_sync, 'b', 31)
#undef ATTENTION_EMULATOR_SHUFFLE

// Time is meaningless when threads run one after the other.
long long clock64()
    __attribute__((error("the CPU emulator has no clock: its threads run one after the other")));

inline void __threadfence() { attention::emulator::fence(attention::emulator::Scope::kDevice); }
inline void __threadfence_system() { __threadfence(); }
inline void __threadfence_block() {
  attention::emulator::fence(attention::emulator::Scope::kBlock);
}
inline void __nanosleep(unsigned, ATTENTION_EMULATOR_SITE) {
  attention::emulator::note_poll(nullptr, 0, {"__nanosleep", file, line});
}
[[noreturn]] inline void __trap(ATTENTION_EMULATOR_SITE) {
  attention::emulator::fail({"__trap", file, line}, "the kernel traps");
}

// ---- Memory -------------------------------------------------------------------------------------

// Loads and stores that differ only in their caching.
#define ATTENTION_EMULATOR_ACCESS(load, store)          \
  template <typename T>                                 \
  T load(const T* address) {                            \
    return *address;                                    \
  }                                                     \
  template <typename T>                                 \
  void store(T* address, std::common_type_t<T> value) { \
    *address = value;                                   \
  }
ATTENTION_EMULATOR_ACCESS(__ldg, __stwb)
ATTENTION_EMULATOR_ACCESS(__ldcg, __stcg)
ATTENTION_EMULATOR_ACCESS(__ldcs, __stcs)
ATTENTION_EMULATOR_ACCESS(__ldca, __stwt)
ATTENTION_EMULATOR_ACCESS(__ldcv, __stcv)
ATTENTION_EMULATOR_ACCESS(__ldlu, __stlu)
#undef ATTENTION_EMULATOR_ACCESS

namespace attention::emulator {

// Blocks run on several OS threads, so this must be atomic on the host. Returns the old value. With
// a site, a thread that repeats it in vain lets others run.
template <typename T, typename Function>
ATTENTION_EMULATOR_INLINE T atomic_update(T* address, Function function,
                                          Scope scope = Scope::kDevice,
                                          const Site& site = {nullptr, nullptr, 0}) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
  using Bits = Word<sizeof(T)>;
  typedef Bits __attribute__((may_alias)) Aliasing;
  auto* const word = reinterpret_cast<Aliasing*>(address);
  // The sanitizer's functions know by its order that this is a part of what follows.
  Bits before = __atomic_load_n(word, __ATOMIC_CONSUME);
  for (;;) {
    T old_value;
    std::memcpy(&old_value, &before, sizeof(T));
    const T new_value = function(old_value);
    Bits after;
    std::memcpy(&after, &new_value, sizeof(T));
    if (scope != Scope::kDevice) set_scope(scope);
    if (__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
      if (after == before && site.name != nullptr) note_poll(address, before, site);
      return old_value;
    }
  }
}

// Loads a word that others change, which a thread may repeat until one has.
template <int kOrder, typename T>
ATTENTION_EMULATOR_INLINE T load_atomic(const T* from, Scope scope,
                                        [[maybe_unused]] const Site& site) {
#ifndef __SANITIZE_THREAD__  // the sanitizer's functions do this
  note_poll(from, __atomic_load_n(from, __ATOMIC_RELAXED), site);
#endif
  if (scope != Scope::kDevice) set_scope(scope);
  return __atomic_load_n(from, kOrder);
}

}  // namespace attention::emulator

// Each also with the scope of the block, and of the system, which includes only one device here.
// A maximum that changes nothing is no reason to wait.
#define ATTENTION_EMULATOR_SCOPED(name, scope, polls, expression, ...)                         \
  template <typename T>                                                                        \
  ATTENTION_EMULATOR_INLINE T name(T* address, __VA_ARGS__, ATTENTION_EMULATOR_SITE) {         \
    return attention::emulator::atomic_update(address, [&](T old) -> T { return expression; }, \
                                              attention::emulator::Scope::scope,               \
                                              {polls ? #name : nullptr, file, line});          \
  }
#define ATTENTION_EMULATOR_SCOPES(name, polls, expression, ...)                     \
  ATTENTION_EMULATOR_SCOPED(name, kDevice, polls, expression, __VA_ARGS__)          \
  ATTENTION_EMULATOR_SCOPED(name##_system, kDevice, polls, expression, __VA_ARGS__) \
  ATTENTION_EMULATOR_SCOPED(name##_block, kBlock, polls, expression, __VA_ARGS__)
#define ATTENTION_EMULATOR_ATOMIC(name, polls, expression) \
  ATTENTION_EMULATOR_SCOPES(name, polls, expression, std::common_type_t<T> value)
ATTENTION_EMULATOR_ATOMIC(atomicAdd, true, old + value)
ATTENTION_EMULATOR_ATOMIC(atomicSub, true, old - value)
ATTENTION_EMULATOR_ATOMIC(atomicMax, false, old < value ? value : old)
ATTENTION_EMULATOR_ATOMIC(atomicMin, false, value < old ? value : old)
ATTENTION_EMULATOR_ATOMIC(atomicAnd, true, old& value)
ATTENTION_EMULATOR_ATOMIC(atomicOr, true, old | value)
ATTENTION_EMULATOR_ATOMIC(atomicXor, true, old ^ value)
ATTENTION_EMULATOR_ATOMIC(atomicExch, true, (void(old), value))
ATTENTION_EMULATOR_ATOMIC(atomicInc, true, old >= value ? T(0) : T(old + 1))
ATTENTION_EMULATOR_ATOMIC(atomicDec, true, old == 0 || old > value ? value : T(old - 1))
ATTENTION_EMULATOR_SCOPES(atomicCAS, true, old == expected ? value : old,
                          std::common_type_t<T> expected, std::common_type_t<T> value)
#undef ATTENTION_EMULATOR_ATOMIC
#undef ATTENTION_EMULATOR_SCOPES
#undef ATTENTION_EMULATOR_SCOPED

// ---- Arithmetic ---------------------------------------------------------------------------------

template <typename A, typename B, typename T = std::common_type_t<A, B>>
constexpr std::enable_if_t<std::is_arithmetic_v<T>, T> min(A a, B b) {
  if constexpr (std::is_floating_point_v<T>) return __builtin_fmin(T(a), T(b));
  return T(b) < T(a) ? T(b) : T(a);
}
template <typename A, typename B, typename T = std::common_type_t<A, B>>
constexpr std::enable_if_t<std::is_arithmetic_v<T>, T> max(A a, B b) {
  if constexpr (std::is_floating_point_v<T>) return __builtin_fmax(T(a), T(b));
  return T(a) < T(b) ? T(b) : T(a);
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float fdividef(float x, float y) { return x / y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fmaf_rd(float x, float y, float z) {  // rounded down
  const double product = double{x} * y, sum = product + z,
               part = sum - product;  // product is exact
  const double lost = (product - (sum - part)) + (z - part);
  const float nearest = static_cast<float>(sum);
  const bool is_above = nearest > sum || (nearest == sum && lost < 0);
  return is_above ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }

// The fast approximations call the accurate functions. They are macros because <math.h> declares
// some of these names.
#define __expf expf
#define __exp2f exp2f
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf

namespace attention::emulator {
template <typename To, typename From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
}  // namespace attention::emulator

inline int __float_as_int(float x) { return attention::emulator::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return attention::emulator::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return attention::emulator::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return attention::emulator::bit_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

#include "intrinsics.h"

// ---- The runtime --------------------------------------------------------------------------------

using cudaStream_t =
    struct CUstream_st*;  // work is done when a launch returns; the stream does not matter

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 14,
};

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrClockRate = 13,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

#define ATTENTION_EMULATOR_NAME(name, code, text) \
  if (error == name) return #name;
#define ATTENTION_EMULATOR_TEXT(name, code, text) \
  if (error == name) return text;
inline const char* cudaGetErrorName(cudaError_t error) {
  ATTENTION_EMULATOR_ERRORS(ATTENTION_EMULATOR_NAME)
  return "unrecognized error code";
}
inline const char* cudaGetErrorString(cudaError_t error) {
  ATTENTION_EMULATOR_ERRORS(ATTENTION_EMULATOR_TEXT)
  return "unrecognized error code";
}
#undef ATTENTION_EMULATOR_NAME
#undef ATTENTION_EMULATOR_TEXT

// Only of a launch by <<<>>>: every other call returns its own error.
inline cudaError_t cudaGetLastError() {
  return attention::emulator::kept_error(attention::emulator::kTake);
}
inline cudaError_t cudaPeekAtLastError() {
  return attention::emulator::kept_error(attention::emulator::kPeek);
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  const attention::emulator::Device device = attention::emulator::Device::emulated();
  const std::pair<cudaDeviceAttr, int> known[] = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxSharedMemoryPerBlock, 48 * 1024},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrClockRate, 1},  // nobody times this
      {cudaDevAttrL2CacheSize, 1 << 25},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 1024},
      {cudaDevAttrMultiProcessorCount, device.multiprocessors},
      {cudaDevAttrComputeCapabilityMajor, device.arch / 10},
      {cudaDevAttrComputeCapabilityMinor, device.arch % 10},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, static_cast<int>(device.shared_limit) + 1024},
      {cudaDevAttrCooperativeLaunch, 1},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(device.shared_limit)}};
  for (const auto& [one, answer] : known) {
    if (one != attribute) continue;
    *value = answer;
    return device.shared_limit == 0 ? cudaErrorInvalidDevice : cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

template <typename Function>
cudaError_t cudaFuncSetAttribute(Function*, cudaFuncAttribute attribute, int value) {
  const size_t limit = attention::emulator::Device::emulated().shared_limit;
  const bool fits = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize ||
                    (value >= 0 && size_t(value) <= limit);
  return fits ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Function>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function*, int threads,
                                                          size_t smem_bytes) {
  const auto device = attention::emulator::Device::emulated();
  *blocks = static_cast<int>(device.blocks_at_once(threads, smem_bytes));
  return cudaSuccess;
}

namespace attention {

// Kernels are in this namespace, so they find these functions before libm's, which g++ would call
// instead of inlining.
inline float fmaxf(float x, float y) { return x < y || x != x ? y : x; }
inline float fminf(float x, float y) { return y < x || x != x ? y : x; }

// Likewise found before C's printf().
struct Format {
  const char* text;
  const char* file;
  int line;

  Format(const char* words, const char* in = __builtin_FILE(), int at = __builtin_LINE())
      : text(words), file(in), line(at) {}
};

template <typename... Values>
int printf(Format format, Values... values) {
  return emulator::print(format.file, format.line, format.text, values...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_any([[maybe_unused]] bool is_early, [[maybe_unused]] bool is_at_once,
                       void (*kernel)(Parameters...), dim3 grid, [[maybe_unused]] int cluster,
                       dim3 block, size_t smem_bytes, Arguments... arguments) {
#ifdef ATTENTION_RECORDS_LAUNCHES  // instead of running them: see recorders/launches.cpp
  return record_launch(kernel, grid, block, smem_bytes, static_cast<Parameters>(arguments)...);
#else
  using Call = std::pair<decltype(kernel), std::tuple<Parameters...>>;
  const auto run = [](const void* call) {
    const auto& [function, parameters] = *static_cast<const Call*>(call);
    std::apply(function, parameters);
  };
  const auto* const call =
      new Call(kernel, std::tuple<Parameters...>(static_cast<Parameters>(arguments)...));
  emulator::Launch launch{grid, block, smem_bytes, run, call, sizeof(Call)};
  launch.cluster = cluster;
  launch.is_early = is_early;
  launch.is_at_once = is_at_once;
#ifdef ATTENTION_EMULATOR_FLUSHES
  launch.flushes = true;
#endif
  return emulator::run_launch(launch,
                              [](const void* used) { delete static_cast<const Call*>(used); });
#endif
}

template <typename Kernel, typename... Arguments>
cudaError_t launch_kernel(Kernel* kernel, dim3 grid, dim3 block, size_t smem_bytes,
                          cudaStream_t /*stream*/, Arguments... arguments) {
  return launch_any(false, false, kernel, grid, 0, block, smem_bytes, arguments...);
}

template <typename Kernel, typename... Arguments>
cudaError_t launch_early(Kernel* kernel, dim3 grid, int cluster, dim3 block, size_t smem_bytes,
                         cudaStream_t /*stream*/, Arguments... arguments) {
  return launch_any(true, false, kernel, grid, cluster, block, smem_bytes, arguments...);
}

template <typename Kernel, typename... Arguments>
cudaError_t launch_at_once(Kernel* kernel, dim3 grid, int cluster, dim3 block, size_t smem_bytes,
                           cudaStream_t /*stream*/, Arguments... arguments) {
  return launch_any(false, true, kernel, grid, cluster, block, smem_bytes, arguments...);
}

// Calls launches() and runs the kernels that it launches.
template <typename Launches>
cudaError_t complete(Launches launches) {
  cudaError_t error;
  emulator::begin_launches();
  try {
    error = launches();
  } catch (...) {  // exit() in host code
    emulator::finish_launches(cudaErrorUnknown);
    if ((error = emulator::kept_error(emulator::kEver)) == cudaSuccess) throw;
    return error;  // why it exits
  }
  return emulator::finish_launches(error);
}

}  // namespace attention

#pragma GCC visibility pop
