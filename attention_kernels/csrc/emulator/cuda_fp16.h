// __half, __nv_bfloat16 and their pairs, as far as attention kernels use them. Every operation is
// done in float and rounded once, to nearest even: for + - * / that is exactly the result of the
// 16-bit operation.

#pragma once

#include "cuda_emulator.h"

// Nothing here has state, and nothing has hidden visibility: a hidden type in a kernel's parameters
// would hide the kernel, too, and recorders/launches.cpp could not find its name.

namespace attention::emulator {

struct HalfFormat {
  static constexpr int kLeast = -14;  // exponent of subnormal numbers
#if defined(__FLT16_MAX__)
  using Native = _Float16;
#else
  using Native = __fp16;  // aarch64 before g++ 13
#endif
  static uint16_t encode(float value) { return bit_cast<uint16_t>(static_cast<Native>(value)); }
  // Makes no calls, so that it vectorizes, and no subnormal floats, which may be flushed to 0.
  static float decode(uint16_t bits) {
    const uint32_t moved = uint32_t{bits & 0x7fffu} << 13;  // to their place in a float
    const float subnormal = bit_cast<float>(moved + (113u << 23)) - 0x1p-14f;
    const uint32_t magnitude =
        (bits & 0x7c00) == 0 ? bit_cast<uint32_t>(subnormal) : moved + (112u << 23);
    const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return bit_cast<float>(magnitude | special | (bits & 0x8000u) << 16);
  }
};

struct BFloat16Format {
  static constexpr int kLeast = -126;
  static uint16_t encode(float value) {
    const auto bits = bit_cast<uint32_t>(value);
    if (value != value) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static float decode(uint16_t bits) { return bit_cast<float>(uint32_t{bits} << 16); }
};

// Trivial, so that it can be __shared__ and moved by shuffles.
template <typename Format>
struct Float16 {
  uint16_t bits;

  Float16() = default;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  Float16(T value) : bits(Format::encode(static_cast<float>(value))) {}
  operator float() const { return Format::decode(bits); }

  // Friends of the template, so that mixing this with float is not ambiguous: the result is float.
#define ATTENTION_EMULATOR_OPERATOR(op)                                             \
  friend Float16 operator op(Float16 a, Float16 b) { return float(a) op float(b); } \
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>       \
  friend auto operator op(Float16 a, T b) {                                         \
    return float(a) op b;                                                           \
  }                                                                                 \
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>       \
  friend auto operator op(T a, Float16 b) {                                         \
    return a op float(b);                                                           \
  }                                                                                 \
  Float16& operator op## = (Float16 b) { return *this = *this op b; }
  ATTENTION_EMULATOR_OPERATOR(+)
  ATTENTION_EMULATOR_OPERATOR(-)
  ATTENTION_EMULATOR_OPERATOR(*)
  ATTENTION_EMULATOR_OPERATOR(/)
#undef ATTENTION_EMULATOR_OPERATOR
  friend Float16 operator-(Float16 a) { return -float(a); }
};

template <typename Format>
struct alignas(4) Float16x2 {
  Float16<Format> x, y;

  Float16x2() = default;
  Float16x2(Float16<Format> low, Float16<Format> high) : x(low), y(high) {}
  Float16x2& operator+=(Float16x2 b) { return *this = *this + b; }
  Float16x2& operator-=(Float16x2 b) { return *this = *this - b; }
  Float16x2& operator*=(Float16x2 b) { return *this = *this * b; }
  friend Float16x2 operator+(Float16x2 a, Float16x2 b) { return {a.x + b.x, a.y + b.y}; }
  friend Float16x2 operator-(Float16x2 a, Float16x2 b) { return {a.x - b.x, a.y - b.y}; }
  friend Float16x2 operator*(Float16x2 a, Float16x2 b) { return {a.x * b.x, a.y * b.y}; }
  friend Float16x2 operator/(Float16x2 a, Float16x2 b) { return {a.x / b.x, a.y / b.y}; }
};

}  // namespace attention::emulator

// Structs, so that kernels get the same mangled names as from nvcc.
#define ATTENTION_EMULATOR_SCALAR(name, Format)                  \
  struct name##_raw {                                            \
    unsigned short x;                                            \
  };                                                             \
  struct name : attention::emulator::Float16<Format> {           \
    using Float16::Float16;                                      \
    name() = default;                                            \
    name(attention::emulator::Float16<Format> x) : Float16(x) {} \
    name(name##_raw raw) { bits = raw.x; }                       \
    operator name##_raw() const { return {bits}; }               \
  };
ATTENTION_EMULATOR_SCALAR(__half, attention::emulator::HalfFormat)
ATTENTION_EMULATOR_SCALAR(__nv_bfloat16, attention::emulator::BFloat16Format)
#undef ATTENTION_EMULATOR_SCALAR
using __half2 = attention::emulator::Float16x2<attention::emulator::HalfFormat>;
using __nv_bfloat162 = attention::emulator::Float16x2<attention::emulator::BFloat16Format>;
#define CUDART_ZERO_FP16 __half(0)
#define CUDART_ONE_FP16 __half(1)
#define CUDART_INF_FP16 __half(INFINITY)
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

// Conversions, whose names differ by type.
#define ATTENTION_EMULATOR_CONVERSIONS(type, type2, name, name2)                            \
  inline type __float2##name(float x) { return x; }                                         \
  inline type __float2##name##_rn(float x) { return x; }                                    \
  inline type __double2##name(double x) { return static_cast<float>(x); }                   \
  inline float __##name##2float(type x) { return x; }                                       \
  inline type2 __float2##name2##_rn(float x) { return {x, x}; }                             \
  inline type2 __floats2##name2##_rn(float x, float y) { return {x, y}; }                   \
  inline type2 __float22##name2##_rn(float2 v) { return {v.x, v.y}; }                       \
  inline float2 __##name2##2float2(type2 v) { return {v.x, v.y}; }                          \
  inline type2 __halves2##name2(type x, type y) { return {x, y}; }                          \
  inline type2 make_##name2(type x, type y) { return {x, y}; }                              \
  inline type2 __##name##2##name2(type x) { return {x, x}; }                                \
  inline float __low2float(type2 v) { return v.x; }                                         \
  inline float __high2float(type2 v) { return v.y; }                                        \
  inline bool __hisnan(type x) { return std::isnan(float(x)); }                             \
  inline type __low2##name(type2 v) { return v.x; }                                         \
  inline type __high2##name(type2 v) { return v.y; }                                        \
  inline type2 __low2##name2(type2 v) { return {v.x, v.x}; }                                \
  inline type2 __high2##name2(type2 v) { return {v.y, v.y}; }                               \
  inline type2 __lows2##name2(type2 v, type2 w) { return {v.x, w.x}; }                      \
  inline type2 __highs2##name2(type2 v, type2 w) { return {v.y, w.y}; }                     \
  inline int __##name##2int_rn(type x) { return __float2int_rn(x); }                        \
  inline int __##name##2int_rz(type x) { return __float2int_rz(x); }                        \
  inline type __uint2##name##_rn(unsigned x) { return x; }                                  \
  inline short __##name##_as_short(type x) { return short(x.bits); }                        \
  inline type __short_as_##name(short x) { return attention::emulator::bit_cast<type>(x); } \
  inline type __int2##name##_rn(int x) { return x; }                                        \
  inline unsigned short __##name##_as_ushort(type x) { return x.bits; }                     \
  inline type __ushort_as_##name(unsigned short x) {                                        \
    return attention::emulator::bit_cast<type>(x);                                          \
  }
ATTENTION_EMULATOR_CONVERSIONS(__half, __half2, half, half2)
ATTENTION_EMULATOR_CONVERSIONS(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat162)
#undef ATTENTION_EMULATOR_CONVERSIONS

// Functions whose names do not differ by type, found by that of their arguments.
namespace attention::emulator {

#define ATTENTION_EMULATOR_BINARY(name, expression)                          \
  template <typename Format>                                                 \
  auto __h##name(Float16<Format> a, Float16<Format> b) {                     \
    return expression;                                                       \
  }                                                                          \
  template <typename Format>                                                 \
  Float16x2<Format> __h##name##2(Float16x2<Format> a, Float16x2<Format> b) { \
    return {__h##name(a.x, b.x), __h##name(a.y, b.y)};                       \
  }
ATTENTION_EMULATOR_BINARY(add, a + b)
ATTENTION_EMULATOR_BINARY(sub, a - b)
ATTENTION_EMULATOR_BINARY(mul, a* b)
ATTENTION_EMULATOR_BINARY(div, a / b)
ATTENTION_EMULATOR_BINARY(max, Float16<Format>(std::fmax(float(a), float(b))))
ATTENTION_EMULATOR_BINARY(min, Float16<Format>(std::fmin(float(a), float(b))))
#undef ATTENTION_EMULATOR_BINARY
#define __h2div __hdiv2

template <typename Format>
auto __hfma(Float16<Format> a, Float16<Format> b, Float16<Format> c) {
  return Float16<Format>(std::fma(double(a), double(b), double(c)));
}
template <typename Format>
Float16x2<Format> __hfma2(Float16x2<Format> a, Float16x2<Format> b, Float16x2<Format> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
// Functions of one number and of a pair; comparisons, which are false if one is a NaN.
#define ATTENTION_EMULATOR_UNARY(name, expression) \
  template <typename Format>                       \
  auto name(Float16<Format> v) {                   \
    const float x = v;                             \
    return Float16<Format>(expression);            \
  }
#define ATTENTION_EMULATOR_UNARIES(name, name2, expression) \
  ATTENTION_EMULATOR_UNARY(name, expression)                \
  template <typename Format>                                \
  Float16x2<Format> name2(Float16x2<Format> v) {            \
    return {name(v.x), name(v.y)};                          \
  }
ATTENTION_EMULATOR_UNARIES(__hneg, __hneg2, -x)
ATTENTION_EMULATOR_UNARIES(__habs, __habs2, std::fabs(x))
ATTENTION_EMULATOR_UNARIES(hexp, h2exp, std::exp(x))
ATTENTION_EMULATOR_UNARIES(hexp2, h2exp2, std::exp2(x))
ATTENTION_EMULATOR_UNARIES(hlog, h2log, std::log(x))
ATTENTION_EMULATOR_UNARIES(hlog2, h2log2, std::log2(x))
ATTENTION_EMULATOR_UNARIES(hrcp, h2rcp, 1 / x)
ATTENTION_EMULATOR_UNARIES(hsqrt, h2sqrt, std::sqrt(x))
ATTENTION_EMULATOR_UNARIES(hrsqrt, h2rsqrt, 1 / std::sqrt(x))
ATTENTION_EMULATOR_UNARIES(htanh, h2tanh, std::tanh(x))
#undef ATTENTION_EMULATOR_UNARIES
#undef ATTENTION_EMULATOR_UNARY

#define ATTENTION_EMULATOR_COMPARISON(name, expression)                      \
  template <typename Format>                                                 \
  bool __h##name(Float16<Format> v, Float16<Format> w) {                     \
    const float a = v, b = w;                                                \
    return expression;                                                       \
  }                                                                          \
  template <typename Format>                                                 \
  Float16x2<Format> __h##name##2(Float16x2<Format> v, Float16x2<Format> w) { \
    return {float(__h##name(v.x, w.x)), float(__h##name(v.y, w.y))};         \
  }                                                                          \
  template <typename Format>                                                 \
  bool __hb##name##2(Float16x2<Format> v, Float16x2<Format> w) {             \
    return __h##name(v.x, w.x) && __h##name(v.y, w.y);                       \
  }
ATTENTION_EMULATOR_COMPARISON(eq, a == b)
ATTENTION_EMULATOR_COMPARISON(ne, a<b || a> b)
ATTENTION_EMULATOR_COMPARISON(lt, a < b)
ATTENTION_EMULATOR_COMPARISON(le, a <= b)
ATTENTION_EMULATOR_COMPARISON(gt, a > b)
ATTENTION_EMULATOR_COMPARISON(ge, a >= b)
#undef ATTENTION_EMULATOR_COMPARISON
template <typename Format>
int __hisinf(Float16<Format> v) {
  return std::isinf(float(v)) ? float(v) > 0 ? 1 : -1 : 0;
}
template <typename Format>
Float16x2<Format> __lowhigh2highlow(Float16x2<Format> v) {
  return {v.y, v.x};
}

}  // namespace attention::emulator
