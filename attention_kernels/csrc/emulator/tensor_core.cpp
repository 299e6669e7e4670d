// What ptx.h's matrix functions do for a whole warp. mma() and mma_tf32() are equal to Hopper's
// tensor cores bit for bit. Each product is exact. Products and the old sum are truncated two bits
// below the last place of the largest of them, then added, and the total is truncated to a float.
// The exponent of a product is the sum of its factors' exponents.

namespace attention::ptx {

constexpr int kExtraBits = 2;

ATTENTION_EMULATOR_INLINE double power_of_two(int exponent) {
  return bit_cast<double>(uint64_t(exponent + 1023) << 52);
}

// Returns a float's exponent; 0 has a smaller one than any other float.
ATTENTION_EMULATOR_INLINE int exponent_of(float x, int least) {
  const int biased = bit_cast<uint32_t>(x) >> 23 & 0xff;
  return x == 0.0f ? -400 : std::max(biased - 127, least);
}

ATTENTION_EMULATOR_INLINE float towards_zero(double x) {
  const auto nearest = static_cast<float>(x);
  return bit_cast<float>(bit_cast<uint32_t>(nearest) - (std::fabs(nearest) > std::fabs(x)));
}

// A row of A or a column of B.
template <int kDepth>
struct Operands {
  float values[kDepth];
  int16_t exponents[kDepth];  // a vector holds twice as many as of int
  int16_t largest = -400;     // exponent

  void set(unsigned k, float value, int least) {
    values[k] = value;
    exponents[k] = static_cast<int16_t>(exponent_of(value, least));
    largest = std::max(largest, exponents[k]);
  }
};

// What takes most of the time of emulated tensor cores: optimized even if the rest is not.
#if defined(__GNUC__) && !defined(__clang__)
#define ATTENTION_EMULATOR_HOT __attribute__((optimize("O3")))
#else
#define ATTENTION_EMULATOR_HOT
#endif

template <int kDepth>
ATTENTION_EMULATOR_HOT float tensor_core_sum(float sum, const Operands<kDepth>& a,
                                             const Operands<kDepth>& b) {
  constexpr int kNotFinite = 128;  // exponent
  auto largest = static_cast<int16_t>(exponent_of(sum, -126));
  const bool is_finite = std::max({largest, a.largest, b.largest}) < kNotFinite;
  for (int k = 0; k < kDepth; ++k)
    largest = std::max(largest, static_cast<int16_t>(a.exponents[k] + b.exponents[k]));
  double products[kDepth];
  for (int k = 0; k < kDepth; ++k) products[k] = double(a.values[k]) * b.values[k];
  if (!is_finite) {
    double exact = sum;
    for (const double product : products) exact += product;
    return static_cast<float>(exact);
  }
  if (largest < -300) largest = -300;  // all are 0
  const double up = power_of_two(23 + kExtraBits - largest);
  int terms[kDepth];
  for (int k = 0; k < kDepth; ++k) terms[k] = static_cast<int>(products[k] * up);
  int64_t total = static_cast<int>(sum * up);
  for (int k = 0; k < kDepth; k += 8) {
    int eight = 0;  // terms of less than 2^27
    for (int i = 0; i < 8; ++i) eight += terms[k + i];
    total += eight;
  }
  if (total == 0) {
    bool is_negative = std::signbit(sum);
    for (const double product : products) is_negative &= std::signbit(product);
    return is_negative ? -0.0f : 0.0f;
  }
  return towards_zero(static_cast<double>(total) * power_of_two(largest - 23 - kExtraBits));
}

// Multiplies for a whole warp. least: the exponent of the operands' subnormal numbers. values():
// unpacks a register.
template <int kDepth, typename Values>
void multiply_warp(const MatrixCalls& calls, int least, Values values) {
  const Subnormals kept(false);
  constexpr int kInWord = kDepth / 8;
  Operands<kDepth> a[16], b[8];
  const auto unpack = [&](unsigned word, Operands<kDepth>& to, unsigned k) {
    float unpacked[kInWord];
    values(word, unpacked);
    for (int i = 0; i < kInWord; ++i) to.set(k * kInWord + i, unpacked[i], least);
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
void multiply_halves(const MatrixCalls& calls, const Site&) {
  multiply_warp<16>(calls, Format::kLeast, [](unsigned word, float* values) {
    values[0] = Format::decode(static_cast<uint16_t>(word));
    values[1] = Format::decode(static_cast<uint16_t>(word >> 16));
  });
}

template void multiply_halves<HalfFormat>(const MatrixCalls&, const Site&);
template void multiply_halves<BFloat16Format>(const MatrixCalls&, const Site&);
void multiply_tf32(const MatrixCalls& calls, const Site&) {
  multiply_warp<8>(calls, -126,
                   [](unsigned word, float* value) { *value = bit_cast<float>(word & ~0x1fffu); });
}

// Moves the elements between the lanes' rows and registers.
void move_elements(const MatrixCalls& calls, const Site&) {
  const auto of = [&](unsigned lane) -> MatrixAccess& {
    return *static_cast<MatrixAccess*>(const_cast<void*>(calls[lane]->fragments[0]));
  };
  const auto [row, x, count, is_transposed, stores] = of(0);
  for (unsigned i = 0; i < count; ++i) {
    for (unsigned r = 0; r < 8; ++r) {
      for (unsigned c = 0; c < 8; ++c) {
        uint16_t& element = of(8 * i + (is_transposed ? c : r)).row.elements[is_transposed ? r : c];
        unsigned& pair = of(4 * r + c / 2).x[i];
        const unsigned shift = c % 2 * 16;
        if (stores)
          element = static_cast<uint16_t>(pair >> shift);
        else
          pair = (pair & ~(0xffffu << shift)) | unsigned{element} << shift;
      }
    }
  }
}

void check_row(const void* row, const Site& site) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    fail(site, "a row does not begin at a multiple of 16 bytes", cudaErrorMisalignedAddress);
  check_shared(row, "a row", site);
}

}  // namespace attention::ptx
