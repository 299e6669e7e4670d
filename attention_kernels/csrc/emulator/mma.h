// nvcuda::wmma on the CPU: warp-level products of half matrices, as <mma.h> declares them.
//
// A fragment is one lane's part of a matrix. Which elements a lane holds is opaque in CUDA and
// differs between architectures, and here, too: with ATTENTION_EMULATOR_ARCH >= 80 the layout is
// that of sm_80's mma.m16n8k16, where an accumulator is laid out like matrix_a; below 80 the two
// differ. As in CUDA, matrix_a and matrix_b have 16 elements per lane, including duplicates.
//
// load_matrix_sync(), store_matrix_sync() and mma_sync() wait for the warp. Errors, reported with
// the caller's line: lanes that call different functions or pass different arguments, an incomplete
// warp, a pointer that is not aligned to 32 bytes, a leading dimension that is not a multiple of
// 16 bytes, duplicates that differ, and a matrix that is written while it is loaded (only
// __syncwarp() orders memory accesses, these functions do not). A store is visible when the call
// returns, and not before. Elements that were never set are NaN.
//
// Products of halves are exact in float. They are summed in float in ascending order; hardware uses
// another order.

#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

struct Position {
  unsigned row, column;
};

// Returns the position of a lane's element i in a matrix of kRows x kColumns.
template <unsigned kRows, unsigned kColumns, bool kTransposed>
ATTENTION_EMULATOR_INLINE Position position(unsigned lane, unsigned i, bool ampere) {
  if constexpr (kTransposed) {
    const Position p = position<kColumns, kRows, false>(lane, i, ampere);
    return {p.column, p.row};
  } else {
    i %= kRows * kColumns / kWarpSize;
    if (!ampere) {
      const unsigned at = i * kWarpSize + lane;
      return {at / kColumns, at % kColumns};
    }
    // In each block of 8 x 8, a lane has two neighbouring elements.
    const unsigned block = i / 2;
    return {lane / 4 + 8 * (block % (kRows / 8)), lane % 4 * 2 + i % 2 + 8 * (block / (kRows / 8))};
  }
}

// A lane's arguments to a warp-level operation. All lanes must agree on all but `fragments`.
struct MatrixCall {
  const void* memory;
  unsigned leading_dimension;
  int layout;
  const void* fragments[4];
};

// The calls of all lanes of a warp, including the caller's.
using MatrixCalls = const MatrixCall* [kWarpSize];

// Returns whether the caller is the last lane of its warp to arrive; `calls` is complete then.
__attribute__((noinline)) inline bool is_last(const MatrixCall& call, const Site& site,
                                              MatrixCalls& calls) {
  const Fiber& self = this_fiber();
  Block& block = *self.block;
  const Warp& warp = *block.warp;
  const unsigned lane = self.thread % kWarpSize;
  if (warp.exists != ~0u) fail(site, "the warp has fewer than 32 threads");
  if (warp.waiting != ~(1u << lane)) return false;
  calls[lane] = &call;
  for (unsigned other = 0; other < kWarpSize; ++other) {
    if (other == lane) continue;
    const auto& wait = warp.wait[other];
    if (wait.op != WarpOp::kMatrix || wait.site->line != site.line ||
        std::strcmp(wait.site->name, site.name) != 0 ||
        std::strcmp(wait.site->file, site.file) != 0) {
      Block::fail_by_divergence(site, *wait.site, *warp.fibers[other]);
    }
    calls[other] = reinterpret_cast<const MatrixCall*>(wait.value);
    if (calls[other]->memory != call.memory || calls[other]->layout != call.layout ||
        calls[other]->leading_dimension != call.leading_dimension) {
      fail(site, "the lanes' arguments differ");
    }
  }
  return true;
}

// Waits for the warp. The last lane to arrive does the work for all. Only the wait itself is
// inlined in kernels: inlining more takes the compiler too long.
ATTENTION_EMULATOR_INLINE void meet(const MatrixCall& call, const Site& site,
                                    void (*work)(const MatrixCalls&, const Site&) = nullptr) {
  MatrixCalls calls;
  if (is_last(call, site, calls) && work != nullptr) work(calls, site);
  wait_for_warp(WarpOp::kMatrix, ~0u, reinterpret_cast<uint64_t>(&call), 0, site);
}

}  // namespace attention::emulator

namespace nvcuda::wmma {

namespace emulator = attention::emulator;

enum layout_t { mem_row_major, mem_col_major };
struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;

namespace precision {
struct tf32;
}
template <typename T>
using Stored = std::conditional_t<std::is_same_v<T, precision::tf32>, float, T>;
inline float __float_to_tf32(float x) {  // rounded to nearest
  const auto bits = attention::emulator::bit_cast<uint32_t>(x);
  return attention::emulator::bit_cast<float>((bits + 0x1000) & ~0x1fffu);
}

template <typename Use, int m, int n, int k, typename T, typename Layout = void>
class fragment {
  static constexpr bool kIsA = std::is_same_v<Use, matrix_a>;
  static constexpr bool kIsB = std::is_same_v<Use, matrix_b>;
  static constexpr bool kIsRowMajor = std::is_same_v<Layout, row_major>;
  static constexpr bool kIsTf32 = std::is_same_v<T, precision::tf32>;
  static_assert((m == 16 && n == 16 && (k == 16 || k == 8)) || (m == 32 && n == 8 && k == 16) ||
                    (m == 8 && n == 32 && k == 16),
                "shapes are 16 x 16 x 16, 32 x 8 x 16, 8 x 32 x 16 and, for tf32, 16 x 16 x 8");
  static_assert(kIsA || kIsB || std::is_same_v<Use, accumulator>);
  static_assert(std::is_same_v<T, half> ||
                    ((std::is_same_v<T, __nv_bfloat16> || (kIsTf32 && k == 8)) && (kIsA || kIsB)) ||
                    (!kIsA && !kIsB && std::is_same_v<T, float>),
                "the emulator has half, bfloat16, tf32, and float accumulators");
  static_assert(kIsA || kIsB ? kIsRowMajor || std::is_same_v<Layout, col_major>
                             : std::is_void_v<Layout>);

 public:
  using element_type = Stored<T>;
  using storage_element_type = Stored<T>;
  enum { num_elements = kIsTf32 ? 4 : kIsA || kIsB ? 16 : 8, num_storage_elements = num_elements };
  element_type x[num_elements];

  fragment() {
    for (element_type& element : x) element = element_type(std::numeric_limits<float>::quiet_NaN());
  }

  // These are not in CUDA.
  static constexpr unsigned kRows = kIsB ? k : m;
  static constexpr unsigned kColumns = kIsA ? k : n;
  static constexpr unsigned kOwn = kRows * kColumns / 32;      // elements, without duplicates
  static constexpr uint32_t kUsed = kIsTf32 ? ~0x1fffu : ~0u;  // bits of an element as a float
  static constexpr layout_t kLayout = kIsRowMajor ? mem_row_major : mem_col_major;
  static emulator::Position position(unsigned lane, unsigned i) {
    const bool ampere = emulator::this_fiber().block->launch->arch >= 80;
    // Below sm_80 a lane holds different elements of matrix_a than of an accumulator.
    return emulator::position<kRows, kColumns, kIsB>(lane, i ^ (kIsA && !ampere), ampere);
  }
};

}  // namespace nvcuda::wmma

namespace attention::emulator {

template <typename T>
void check_matrix(const T* memory, unsigned leading_dimension, const Site& site) {
  if (reinterpret_cast<uintptr_t>(memory) % 32 != 0)
    fail(site, "the pointer is not aligned to 32 bytes", cudaErrorMisalignedAddress);
  if (leading_dimension * sizeof(T) % 16 != 0) {
    fail(site,
         sizeof(T) == 2 ? "the leading dimension is not a multiple of 8 halfs"
                        : "the leading dimension is not a multiple of 4 floats",
         cudaErrorInvalidValue);
  }
}

// Computes the offset of each of the caller's elements.
template <typename Fragment>
void element_offsets(size_t (&offsets)[Fragment::num_elements], size_t leading_dimension,
                     nvcuda::wmma::layout_t layout) {
  const unsigned lane = this_fiber().thread % kWarpSize;
  for (unsigned i = 0; i < Fragment::num_elements; ++i) {
    const Position at = Fragment::position(lane, i);
    offsets[i] = layout == nvcuda::wmma::mem_row_major ? at.row * leading_dimension + at.column
                                                       : at.column * leading_dimension + at.row;
  }
}

template <typename Fragment, typename T = typename Fragment::element_type>
ATTENTION_EMULATOR_INLINE void load_matrix(Fragment& fragment, const T* memory,
                                           unsigned leading_dimension,
                                           nvcuda::wmma::layout_t layout, const Site& site) {
  check_matrix(memory, leading_dimension, site);
  size_t offsets[Fragment::num_elements];
  element_offsets<Fragment>(offsets, leading_dimension, layout);
  for (unsigned i = 0; i < Fragment::num_elements; ++i) fragment.x[i] = memory[offsets[i]];
  meet({memory, leading_dimension, layout, {}}, site);
  bool same = true;
  for (unsigned i = 0; i < Fragment::num_elements; ++i) {
    same &= std::memcmp(&fragment.x[i], &memory[offsets[i]], sizeof(T)) == 0;
  }
  if (!same)
    fail(site, "another thread writes to the matrix at the same time: a barrier is missing");
}

// Gathers a matrix from the lanes' fragments.
template <typename Fragment>
void gather(float (&matrix)[Fragment::kRows][Fragment::kColumns], const MatrixCalls& calls,
            int which, const Site& site) {
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const auto& fragment = *static_cast<const Fragment*>(calls[lane]->fragments[which]);
    for (unsigned i = 0; i < Fragment::num_elements; ++i) {
      const Position at = Fragment::position(lane, i);
      if (i < Fragment::kOwn) {
        matrix[at.row][at.column] =
            bit_cast<float>(bit_cast<uint32_t>(float(fragment.x[i])) & Fragment::kUsed);
      } else if (std::memcmp(&fragment.x[i], &fragment.x[i % Fragment::kOwn], 2) != 0) {
        fail(site, "an element and its duplicate differ");
      }
    }
  }
}

// Multiplies for a whole warp, whose calls hold the addresses of d, a, b and c.
template <typename D, typename A, typename B, typename C>
void multiply(const MatrixCalls& calls, const Site& site) {
  const Subnormals kept(false);  // tensor cores do not flush subnormals
  constexpr unsigned m = D::kRows, n = D::kColumns, k = A::kColumns;
  float rA[m][k], rB[k][n], rC[m][n];
  gather<A>(rA, calls, 1, site);
  gather<B>(rB, calls, 2, site);
  gather<C>(rC, calls, 3, site);
  for (unsigned row = 0; row < m; ++row) {
    for (unsigned i = 0; i < k; ++i) {
      for (unsigned column = 0; column < n; ++column) rC[row][column] += rA[row][i] * rB[i][column];
    }
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    auto& out = *static_cast<D*>(const_cast<void*>(calls[lane]->fragments[0]));
    for (unsigned i = 0; i < D::num_elements; ++i) {
      const Position at = D::position(lane, i);
      out.x[i] = rC[at.row][at.column];
    }
  }
}

}  // namespace attention::emulator

namespace nvcuda::wmma {

template <typename Use, int m, int n, int k, typename T, typename Layout>
void fill_fragment(fragment<Use, m, n, k, T, Layout>& f, std::common_type_t<Stored<T>> value) {
  for (auto& element : f.x) element = value;
}

template <typename Use, int m, int n, int k, typename T, typename Layout>
ATTENTION_EMULATOR_INLINE void load_matrix_sync(fragment<Use, m, n, k, T, Layout>& f,
                                                std::common_type_t<const Stored<T>*> memory,
                                                unsigned leading_dimension,
                                                ATTENTION_EMULATOR_SITE) {
  emulator::load_matrix(f, memory, leading_dimension, f.kLayout, {"load_matrix_sync", file, line});
}
template <int m, int n, int k, typename T>
ATTENTION_EMULATOR_INLINE void load_matrix_sync(fragment<accumulator, m, n, k, T>& f,
                                                std::common_type_t<const T*> memory,
                                                unsigned leading_dimension, layout_t layout,
                                                ATTENTION_EMULATOR_SITE) {
  emulator::load_matrix(f, memory, leading_dimension, layout, {"load_matrix_sync", file, line});
}

template <int m, int n, int k, typename T>
ATTENTION_EMULATOR_INLINE void store_matrix_sync(std::common_type_t<T*> memory,
                                                 const fragment<accumulator, m, n, k, T>& f,
                                                 unsigned leading_dimension, layout_t layout,
                                                 ATTENTION_EMULATOR_SITE) {
  using Fragment = fragment<accumulator, m, n, k, T>;
  const emulator::Site site{"store_matrix_sync", file, line};
  emulator::check_matrix(memory, leading_dimension, site);
  emulator::meet({memory, leading_dimension, layout, {}}, site);
  size_t offsets[Fragment::num_elements];
  emulator::element_offsets<Fragment>(offsets, leading_dimension, layout);
  for (int i = 0; i < Fragment::num_elements; ++i) memory[offsets[i]] = f.x[i];
}

// d = a * b + c; d may be c.
template <int m, int n, int k, typename T, typename LayoutA, typename LayoutB, typename D,
          typename C>
ATTENTION_EMULATOR_INLINE void mma_sync(fragment<accumulator, m, n, k, D>& d,
                                        const fragment<matrix_a, m, n, k, T, LayoutA>& a,
                                        const fragment<matrix_b, m, n, k, T, LayoutB>& b,
                                        const fragment<accumulator, m, n, k, C>& c,
                                        ATTENTION_EMULATOR_SITE) {
  emulator::meet({nullptr, 0, 0, {&d, &a, &b, &c}}, {"mma_sync", file, line},
                 emulator::multiply<std::decay_t<decltype(d)>, std::decay_t<decltype(a)>,
                                    std::decay_t<decltype(b)>, std::decay_t<decltype(c)>>);
}

}  // namespace nvcuda::wmma

#pragma GCC visibility pop
