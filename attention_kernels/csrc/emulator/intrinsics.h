// Intrinsics that other people's kernels call; cuda_emulator.h, which includes this, has the others.

#pragma once

#include <math.h>  // the overloads for float, such as abs(), in the global namespace
#include <stdlib.h>

#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_assume(condition) static_cast<void>(0)

inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(std::ceil(x)); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(std::nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return static_cast<unsigned>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline int __mulhi(int a, int b) { return static_cast<int>(int64_t{a} * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline unsigned __isShared(const void* at) {
  return attention::emulator::this_fiber().block->shared.has(at);
}
inline unsigned __isGlobal(const void* at) { return !__isShared(at); }
