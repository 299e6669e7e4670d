// The arithmetic of ptx.h's mma and mma_tf32, equal to that of Hopper's tensor cores bit for bit.
// Each product is exact. Products and the old sum are truncated two bits below the last place of
// the largest of them, then added, and the total is truncated to a float. The exponent of a product
// is the sum of its factors' exponents.

#include "ptx.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx {

constexpr int kExtraBits = 2;

ATTENTION_EMULATOR_INLINE double power_of_two(int exponent) {
  return emulator::bit_cast<double>(uint64_t(exponent + 1023) << 52);
}

// Returns a float's exponent; 0 has a smaller one than any other float.
ATTENTION_EMULATOR_INLINE int exponent_of(float x, int least) {
  const int biased = emulator::bit_cast<uint32_t>(x) >> 23 & 0xff;
  return x == 0.0f ? -400 : std::max(biased - 127, least);
}

ATTENTION_EMULATOR_INLINE float towards_zero(double x) {
  const auto nearest = static_cast<float>(x);
  if (std::fabs(nearest) <= std::fabs(x)) return nearest;
  return emulator::bit_cast<float>(emulator::bit_cast<uint32_t>(nearest) - 1);
}

ATTENTION_EMULATOR_INLINE double trunc(double x) {  // for less than 2^31; std::trunc() is a call
  return std::copysign(static_cast<double>(static_cast<int>(x)), x);
}

// A row of A or a column of B.
template <int kDepth>
struct Operands {
  float values[kDepth];
  int exponents[kDepth];
};

template <int kDepth>
float tensor_core_sum(float sum, const Operands<kDepth>& a, const Operands<kDepth>& b) {
  int largest = exponent_of(sum, -126);
  double products[kDepth], exact = sum;
  for (int k = 0; k < kDepth; ++k) {
    const int exponent = a.exponents[k] + b.exponents[k];
    if (exponent > largest) largest = exponent;
    products[k] = double(a.values[k]) * b.values[k];
    exact += products[k];
  }
  if (!(std::fabs(exact) <= std::numeric_limits<double>::max())) return static_cast<float>(exact);
  if (largest < -300) largest = -300;  // all are 0
  const double up = power_of_two(23 + kExtraBits - largest);
  double total = trunc(sum * up);
  for (int k = 0; k < kDepth; ++k) total += trunc(products[k] * up);
  return towards_zero(total * power_of_two(largest - 23 - kExtraBits));
}

// Multiplies for a whole warp. least: the exponent of the operands' subnormal numbers. values():
// unpacks a register.
template <int kDepth, typename Values>
void multiply_warp(const emulator::MatrixCalls& calls, int least, Values values) {
  const emulator::Subnormals kept(false);
  constexpr int kInWord = kDepth / 8;
  Operands<kDepth> a[16], b[8];
  const auto unpack = [&](unsigned word, Operands<kDepth>& to, unsigned k) {
    values(word, &to.values[k * kInWord]);
    for (int i = 0; i < kInWord; ++i)
      to.exponents[k * kInWord + i] = exponent_of(to.values[k * kInWord + i], least);
  };
  for (unsigned lane = 0; lane < 32; ++lane) {
    const auto* const words_a = static_cast<const unsigned*>(calls[lane]->fragments[1]);
    const auto* const words_b = static_cast<const unsigned*>(calls[lane]->fragments[2]);
    for (unsigned i = 0; i < 4; ++i)
      unpack(words_a[i], a[lane / 4 + i % 2 * 8], lane % 4 + i / 2 * 4);
    for (unsigned i = 0; i < 2; ++i) unpack(words_b[i], b[lane / 4], lane % 4 + i * 4);
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    auto* const sums = static_cast<float*>(const_cast<void*>(calls[lane]->fragments[0]));
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      sums[i] = tensor_core_sum(sums[i], a[row], b[column]);
    }
  }
}

template <typename Format>
void multiply_halves(const emulator::MatrixCalls& calls, int least) {
  multiply_warp<16>(calls, least, [](unsigned word, float* values) {
    values[0] = Format::decode(static_cast<uint16_t>(word));
    values[1] = Format::decode(static_cast<uint16_t>(word >> 16));
  });
}

void multiply_half(const emulator::MatrixCalls& calls, const emulator::Site&) {
  multiply_halves<emulator::HalfFormat>(calls, -14);
}
void multiply_bfloat16(const emulator::MatrixCalls& calls, const emulator::Site&) {
  multiply_halves<emulator::BFloat16Format>(calls, -126);
}
void multiply_tf32(const emulator::MatrixCalls& calls, const emulator::Site&) {
  multiply_warp<8>(calls, -126, [](unsigned word, float* value) {
    *value = emulator::bit_cast<float>(word & ~0x1fffu);
  });
}

}  // namespace attention::ptx

#pragma GCC visibility pop
