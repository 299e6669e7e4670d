// CUDA's types for launches and errors, and its vector types.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>

#pragma GCC visibility push(hidden)

// clang-format off
#define ATTENTION_EMULATOR_ERRORS(X)                                                    \
  X(cudaSuccess, 0, "no error")                                                         \
  X(cudaErrorInvalidValue, 1, "invalid argument")                                       \
  X(cudaErrorMemoryAllocation, 2, "out of memory")                                      \
  X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                 \
  X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                      \
  X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                              \
  X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for execution") \
  X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")           \
  X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")      \
  X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")             \
  X(cudaErrorAssert, 710, "device-side assert triggered")                               \
  X(cudaErrorIllegalInstruction, 715, "an illegal instruction was encountered")         \
  X(cudaErrorMisalignedAddress, 716, "misaligned address")                              \
  X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                          \
  X(cudaErrorCooperativeLaunchTooLarge, 720, "too many blocks in cooperative launch")   \
  X(cudaErrorNotSupported, 801, "operation not supported")                              \
  X(cudaErrorUnknown, 999, "unknown error")                                             \
  X(emulatorErrorSetting, 10000, "a setting of the emulator is wrong")                  \
  X(emulatorErrorCluster, 10001, "another block of the cluster has failed")
// clang-format on

enum cudaError_t {
#define X(name, code, text) name = code,
  ATTENTION_EMULATOR_ERRORS(X)
#undef X
};

// ---- Vectors ------------------------------------------------------------------------------------

#define ATTENTION_EMULATOR_VECTORS(name, type)                                           \
  struct name##1 { type x; };                                                            \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                               \
  struct name##3 { type x, y, z; };                                                      \
  struct alignas(sizeof(type) < 4 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
  constexpr name##1 make_##name##1(type x) { return {x}; }                               \
  constexpr name##2 make_##name##2(type x, type y) { return {x, y}; }                    \
  constexpr name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }         \
  constexpr name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

ATTENTION_EMULATOR_VECTORS(char, signed char)
ATTENTION_EMULATOR_VECTORS(uchar, unsigned char)
ATTENTION_EMULATOR_VECTORS(short, short)
ATTENTION_EMULATOR_VECTORS(ushort, unsigned short)
ATTENTION_EMULATOR_VECTORS(int, int)
ATTENTION_EMULATOR_VECTORS(uint, unsigned)
ATTENTION_EMULATOR_VECTORS(longlong, long long)
ATTENTION_EMULATOR_VECTORS(ulonglong, unsigned long long)
ATTENTION_EMULATOR_VECTORS(float, float)
ATTENTION_EMULATOR_VECTORS(double, double)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

namespace attention::emulator {

// The unsigned type of a size.
template <size_t kBytes>
auto word_of() {
  if constexpr (kBytes == 1) return uint8_t{};
  if constexpr (kBytes == 2) return uint16_t{};
  if constexpr (kBytes == 4) return uint32_t{};
  if constexpr (kBytes == 8) return uint64_t{};
  if constexpr (kBytes == 16) return static_cast<unsigned __int128>(0);
}
template <size_t kBytes>
using Word = decltype(word_of<kBytes>());

// The bytes from one address to another; more than anything has if the other comes first.
inline size_t offset(uintptr_t at, const void* from) {
  return at - reinterpret_cast<uintptr_t>(from);
}
inline size_t offset(const void* at, const void* from) {
  return offset(reinterpret_cast<uintptr_t>(at), from);
}

// The blocks of a grid or the threads of a block, and the index of one by its number.
constexpr uint64_t count_in(dim3 all) { return uint64_t{all.x} * all.y * all.z; }
constexpr uint3 index_in(dim3 all, uint64_t number) {
  return {static_cast<unsigned>(number % all.x), static_cast<unsigned>(number / all.x % all.y),
          static_cast<unsigned>(number / all.x / all.y)};
}

// A line of a kernel's source at which a thread waits or fails.
struct Site {
  const char* name;
  const char* file;
  int line;
};

// The caller's source line, as default arguments of the called function.
#define ATTENTION_EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

#define ATTENTION_EMULATOR_INLINE __attribute__((always_inline)) inline

}  // namespace attention::emulator

#pragma GCC visibility pop
