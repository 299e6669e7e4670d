// Products of a few rows with a weight, on one thread of a CPU, and elementwise functions.
//
// They use the compiler's vectors, as wide as the CPU's. An element's sum is always taken in the
// same order, whatever the number of rows and the range of columns that a call computes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace attention {

// A weight (rows, columns), stored row by row or, if transposed, column by column.
struct Matrix {
  const float* data;
  const float* bias;  // null for the logits
  int64_t rows;
  int64_t columns;
  int64_t is_transposed;
};

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kTile = 512;  // columns whose sums stay in the L1 cache, at any batch size
constexpr int kRows = 8;
constexpr int kMaxBatch = 8;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int VecInt __attribute__((vector_size(4 * kLanes)));

Vec load(const float* from) {
  Vec vec;
  std::memcpy(&vec, from, sizeof vec);
  return vec;
}

void store(float* to, Vec vec) { std::memcpy(to, &vec, sizeof vec); }

template <int kCount>
struct Lanes {
  typedef float type __attribute__((vector_size(4 * kCount)));
};

// Adds the lanes in pairs that are half a vector apart.
template <int kCount = kLanes>
float sum_of(typename Lanes<kCount>::type vec) {
  if constexpr (kCount == 4) {
    return (vec[0] + vec[2]) + (vec[1] + vec[3]);
  } else {
    typename Lanes<kCount / 2>::type halves[2];
    std::memcpy(halves, &vec, sizeof vec);
    return sum_of<kCount / 2>(halves[0] + halves[1]);
  }
}

// Applies function to count floats, vector by vector.
template <typename Function>
void transform(float* x, int64_t count, const Function& function) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(x + i, function(load(x + i)));
  if (i == count) return;
  float rest[kLanes] = {};
  std::copy(x + i, x + count, rest);
  store(rest, function(load(rest)));
  std::copy(rest, rest + (count - i), x + i);
}

// Returns the sum of function(x) over count floats.
template <typename Function>
float sum_over(const float* x, int64_t count, const Function& function) {
  Vec sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += function(load(x + i));
  float sum = sum_of(sums);
  float rest[kLanes] = {};
  std::copy(x + i, x + count, rest);
  const Vec last = function(load(rest));
  for (int lane = 0; i + lane < count; ++lane) sum += last[lane];
  return sum;
}

// Returns the largest of count floats, at least low; NaN is ignored.
float largest_of(const float* x, int64_t count, float low) {
  Vec largest = Vec{} + low;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec vec = load(x + i);
    largest = vec > largest ? vec : largest;
  }
  for (int lane = 0; lane < kLanes; ++lane) low = std::max(low, largest[lane]);
  for (; i < count; ++i) low = std::max(low, x[i]);
  return low;
}

// Returns e^x to 1 unit in the last place, 0 below -87 and NaN for NaN; x is at most 88.
Vec exp(Vec x) {
  const Vec power = x * 1.44269504f;
  const Vec magic = Vec{} + 12582912.0f;  // 1.5 * 2^23: rounds to an integer, in the low bits
  const Vec shifted = power + magic;
  const Vec whole = shifted - magic;
  const Vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vec sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * (r * r) + r + 1.0f;
  const VecInt exponent = ((VecInt)shifted - (VecInt)magic + 127) << 23;
  return x < -87.0f ? Vec{} : sum * (Vec)exponent;
}

// GELU's tanh form: x * sigmoid(2u), because (1 + tanh(u)) / 2 is sigmoid(2u).
Vec gelu(Vec x) {
  const Vec u2 = x * (1.5957691216f + 0.0713548162726f * (x * x));
  const Vec low = u2 < 0.0f ? u2 : -u2;  // e^-|2u| cannot overflow
  const Vec e = exp(low);
  return u2 < 0.0f ? x * e / (1.0f + e) : x / (1.0f + e);
}

// Rows of activations: row b begins at data + b * stride.
template <typename Float>
struct Rows {
  Float* data;
  int64_t stride;
};

// sums (batch, kTile) += x (batch, kCount) times kCount rows of w, of these columns.
template <int kCount>
void add_rows(const float* __restrict w, int64_t w_stride, Rows<const float> x, int batch,
              float* __restrict sums, int64_t columns) {
  int64_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    Vec rows[kCount];
    for (int r = 0; r < kCount; ++r) rows[r] = load(w + r * w_stride + j);
    for (int b = 0; b < batch; ++b) {
      const float* const factors = x.data + b * x.stride;
      Vec sum = rows[0] * factors[0];
      for (int r = 1; r < kCount; ++r) sum += rows[r] * factors[r];
      store(sums + b * kTile + j, load(sums + b * kTile + j) + sum);
    }
  }
  for (; j < columns; ++j) {
    for (int b = 0; b < batch; ++b) {
      const float* const factors = x.data + b * x.stride;
      float sum = w[j] * factors[0];
      for (int r = 1; r < kCount; ++r) sum += w[r * w_stride + j] * factors[r];
      sums[b * kTile + j] += sum;
    }
  }
}

// y (batch, columns) = x (batch, rows) W, for the columns [begin, end) of a W stored by rows.
void multiply_rows(const float* w, int64_t w_stride, int64_t rows, Rows<const float> x, int batch,
                   Rows<float> y, int64_t begin, int64_t end) {
  alignas(64) float sums[kMaxBatch * kTile];
  for (; begin < end; begin += kTile) {
    const int64_t columns = std::min<int64_t>(kTile, end - begin);
    std::fill_n(sums, batch * kTile, 0.0f);
    const auto add = [&](auto count, int64_t k) {
      const float* const from = w + k * w_stride + begin;
      const Rows<const float> factors = {x.data + k, x.stride};
      if (batch == 1)  // the compiler then keeps the factors in registers
        add_rows<count>(from, w_stride, factors, 1, sums, columns);
      else
        add_rows<count>(from, w_stride, factors, batch, sums, columns);
    };
    int64_t k = 0;
    for (; k + kRows <= rows; k += kRows) add(std::integral_constant<int, kRows>(), k);
    for (; k < rows; ++k) add(std::integral_constant<int, 1>(), k);
    for (int b = 0; b < batch; ++b)
      std::copy_n(sums + b * kTile, columns, y.data + b * y.stride + begin);
  }
}

// y (kBatch, 1) = x (kBatch, rows) times one column. One at a time, because the CPU's prefetchers
// follow a single stream best; in several chains, because each addition waits for the previous one.
template <int kBatch>
void dot(const float* column, int64_t rows, Rows<const float> x, Rows<float> y) {
  constexpr int kChains = 4;
  Vec chains[kChains][kBatch] = {};
  int64_t k = 0;
  const auto add = [&](int chain) {
    const Vec factors = load(column + k);
    for (int b = 0; b < kBatch; ++b) chains[chain][b] += factors * load(x.data + b * x.stride + k);
    k += kLanes;
  };
  while (k + kChains * kLanes <= rows)
    for (int chain = 0; chain < kChains; ++chain) add(chain);
  while (k + kLanes <= rows) add(0);
  for (int b = 0; b < kBatch; ++b) {
    float sum = sum_of((chains[0][b] + chains[1][b]) + (chains[2][b] + chains[3][b]));
    for (int64_t i = k; i < rows; ++i) sum += column[i] * x.data[b * x.stride + i];
    y.data[b * y.stride] = sum;
  }
}

// As multiply_rows(), for a W stored by columns.
void multiply_columns(const float* w, int64_t rows, Rows<const float> x, int batch, Rows<float> y,
                      int64_t begin, int64_t end) {
  constexpr int kGroup = 4;  // rows whose sums fit in the registers
  for (int64_t j = begin; j < end; ++j) {
    const float* const column = w + j * rows;
    int b = 0;
    for (; b + kGroup <= batch; b += kGroup)
      dot<kGroup>(column, rows, {x.data + b * x.stride, x.stride},
                  {y.data + b * y.stride + j, y.stride});
    for (; b < batch; ++b)
      dot<1>(column, rows, {x.data + b * x.stride, x.stride},
             {y.data + b * y.stride + j, y.stride});
  }
}

// y = x W for the columns [begin, end) of W.
void multiply(const Matrix& w, const float* x, int batch, float* y, int64_t begin, int64_t end) {
  if (w.is_transposed)
    multiply_columns(w.data, w.rows, {x, w.rows}, batch, {y, w.columns}, begin, end);
  else
    multiply_rows(w.data, w.columns, w.rows, {x, w.rows}, batch, {y, w.columns}, begin, end);
}

}  // namespace
}  // namespace attention
