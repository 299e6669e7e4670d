// Products of a warpgroup on Hopper's tensor cores (wgmma), for files with `Needs:  sm_90a`. They
// are asynchronous:
//
//   ptx::multiply_fence(rS);             // after rS or the registers of A have been used
//   ptx::multiply<kIsBfloat16>(rS, a, b);
//   ptx::multiply_commit();
//   ptx::multiply_wait<0>(rS);           // before rS is used
//
// A warpgroup is four consecutive warps, the first a multiple of four, which all make the same
// calls.

#pragma once

#include "ptx.cuh"

#ifdef ATTENTION_EMULATOR
#include "emulator/wgmma.h"
#else

namespace attention::ptx {

// Describes an operand in shared memory: 64 columns of 16 bits, in rows of 128 bytes one after the
// other, swizzled: the 16-byte chunk c of row r lies where chunk c ^ (r % 8) would. That is how
// load_tile() stores a box of 64 columns. The tile starts at a multiple of 1024 bytes.
//
// next_columns is for a transposed B of more than 64 columns: the bytes from the first 64 of them
// to the next 64.
inline __device__ uint64_t matrix_descriptor(const void* tile, unsigned next_columns = 0) {
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1;
  return (shared_address(tile) & 0x3ffff) >> 4 | uint64_t{next_columns >> 4} << 16 |
         kEightRows >> 4 << 32 | kSwizzle128 << 62;
}

// Returns the descriptor of an operand `bytes` further on: 32 for the next 16 columns of a tile, or
// 128 times the rows.
inline __device__ uint64_t advance(uint64_t descriptor, unsigned bytes) {
  return descriptor + (bytes >> 4);
}

// Keeps the compiler from moving accesses of registers over the instructions before and after.
inline __device__ void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
inline __device__ void pin(unsigned& x) { asm volatile("" : "+r"(x)::"memory"); }
template <typename T, int kCount>
__device__ void pin(T (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) pin(registers[i]);
}

// Call it before a product whose sums or registers of A have been accessed by anything but products
// of the same shape. It takes all these arrays.
template <typename... Registers>
__device__ void multiply_fence(Registers&... registers) {
  (pin(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group of products.
inline __device__ void multiply_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all groups of products but the last kGroups. It takes the sums that are then complete.
template <int kGroups, typename... Sums>
__device__ void multiply_wait(Sums&... sums) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
  (pin(sums), ...);
}

// The text of a product of 64 x n with its operands, and lists of operands.
#define ATTENTION_MULTIPLY(n, sums, a, b, accumulate, type, transposed)                    \
  "{\n"                                                                                    \
  ".reg .pred accumulate;\n"                                                               \
  "setp.ne.b32 accumulate, " accumulate                                                    \
  ", 0;\n"                                                                                 \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" sums "}, " a ", " b \
  ", accumulate, 1, 1, " transposed                                                        \
  ";\n"                                                                                    \
  "}"
#define ATTENTION_TEN(t) \
  "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9"
#define ATTENTION_16 ATTENTION_TEN("") ", %10, %11, %12, %13, %14, %15"
#define ATTENTION_32 ATTENTION_TEN("") ", " ATTENTION_TEN("1") ", " ATTENTION_TEN("2") ", %30, %31"
#define ATTENTION_64                                                                          \
  ATTENTION_TEN("")                                                                           \
  ", " ATTENTION_TEN("1") ", " ATTENTION_TEN("2") ", " ATTENTION_TEN("3") ", " ATTENTION_TEN( \
      "4") ", " ATTENTION_TEN("5") ", %60, %61, %62, %63"
#define ATTENTION_SUMS4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define ATTENTION_SUMS16(i) \
  ATTENTION_SUMS4(i), ATTENTION_SUMS4(i + 4), ATTENTION_SUMS4(i + 8), ATTENTION_SUMS4(i + 12)
#define ATTENTION_SUMS32(i) ATTENTION_SUMS16(i), ATTENTION_SUMS16(i + 16)

template <bool kIsBfloat16>
struct TypeName {
  static constexpr char text[] = "f16";
};
template <>
struct TypeName<true> {
  static constexpr char text[] = "bf16";
};

// sums = A B, or sums += A B, in float16 or bfloat16: A is 64 x 16, B 16 x n, sums 64 x n in
// float32, with n = 32, 64 or 128. Warp w of the warpgroup holds rows 16 w to 16 w + 15 of the sums;
// lane l holds columns 8 i + 2 (l % 4) and the next of row l / 4 in sums[4 i] and sums[4 i + 1], and
// of row l / 4 + 8 in the next two.
//
// The rows of A are rows of its tile. The columns of B are rows of its tile, or transposed its rows
// are.
template <bool kIsBfloat16, bool kTransposed = false, int kSums>
__device__ void multiply(float (&sums)[kSums], uint64_t a, uint64_t b, bool accumulate = true) {
  static_assert(kSums == 16 || kSums == 32 || kSums == 64, "B has 32, 64 or 128 columns");
  const int add = accumulate;
  if constexpr (kSums == 16)
    asm volatile(ATTENTION_MULTIPLY(32, ATTENTION_16, "%16", "%17", "%18", "%19", "0, %20")
                 : ATTENTION_SUMS16(0)
                 : "l"(a), "l"(b), "r"(add), "C"(TypeName<kIsBfloat16>::text), "n"(kTransposed));
  if constexpr (kSums == 32)
    asm volatile(ATTENTION_MULTIPLY(64, ATTENTION_32, "%32", "%33", "%34", "%35", "0, %36")
                 : ATTENTION_SUMS32(0)
                 : "l"(a), "l"(b), "r"(add), "C"(TypeName<kIsBfloat16>::text), "n"(kTransposed));
  if constexpr (kSums == 64)
    asm volatile(ATTENTION_MULTIPLY(128, ATTENTION_64, "%64", "%65", "%66", "%67", "0, %68")
                 : ATTENTION_SUMS32(0), ATTENTION_SUMS32(32)
                 : "l"(a), "l"(b), "r"(add), "C"(TypeName<kIsBfloat16>::text), "n"(kTransposed));
}

// The same with A in registers: warp w holds its rows 16 w to 16 w + 15, as in mma(). So of two
// neighbouring groups of 8 columns of sums, rounded to 16 bits, a[0] and a[1] are the first and a[2]
// and a[3] the second.
template <bool kIsBfloat16, bool kTransposed = false, int kSums>
__device__ void multiply(float (&sums)[kSums], const unsigned (&a)[4], uint64_t b,
                         bool accumulate = true) {
  static_assert(kSums == 16 || kSums == 32 || kSums == 64, "B has 32, 64 or 128 columns");
  const int add = accumulate;
#define ATTENTION_INPUTS                                                                          \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "C"(TypeName<kIsBfloat16>::text), \
      "n"(kTransposed)
  if constexpr (kSums == 16)
    asm volatile(
        ATTENTION_MULTIPLY(32, ATTENTION_16, "{%16, %17, %18, %19}", "%20", "%21", "%22", "%23")
        : ATTENTION_SUMS16(0)
        : ATTENTION_INPUTS);
  if constexpr (kSums == 32)
    asm volatile(
        ATTENTION_MULTIPLY(64, ATTENTION_32, "{%32, %33, %34, %35}", "%36", "%37", "%38", "%39")
        : ATTENTION_SUMS32(0)
        : ATTENTION_INPUTS);
  if constexpr (kSums == 64)
    asm volatile(
        ATTENTION_MULTIPLY(128, ATTENTION_64, "{%64, %65, %66, %67}", "%68", "%69", "%70", "%71")
        : ATTENTION_SUMS32(0), ATTENTION_SUMS32(32)
        : ATTENTION_INPUTS);
#undef ATTENTION_INPUTS
}

#undef ATTENTION_MULTIPLY
#undef ATTENTION_TEN
#undef ATTENTION_16
#undef ATTENTION_32
#undef ATTENTION_64
#undef ATTENTION_SUMS4
#undef ATTENTION_SUMS16
#undef ATTENTION_SUMS32

}  // namespace attention::ptx

#endif  // ATTENTION_EMULATOR

namespace attention {

// Finds the largest sum of the lane's two rows; all four lanes that share a row get it. Compares
// integers, three with one instruction: they are in the order of the numbers unless all are negative,
// and then in the opposite one.
template <int kSums>
inline __device__ void largest_of_rows(float (&largest)[2], const float (&sums)[kSums]) {
  const auto reduce = [&](int r, auto larger) {
    int most = larger(__float_as_int(sums[2 * r]), __float_as_int(sums[2 * r + 1]));
#pragma unroll
    for (int i = 4 + 2 * r; i < kSums; i += 4) {
      most = larger(larger(most, __float_as_int(sums[i])), __float_as_int(sums[i + 1]));
    }
    most = larger(most, __shfl_xor_sync(0xffffffff, most, 1));
    return larger(most, __shfl_xor_sync(0xffffffff, most, 2));
  };
  int most[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) most[r] = reduce(r, [](int x, int y) { return max(x, y); });
  if (__any_sync(0xffffffff, (most[0] | most[1]) < 0)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int least = reduce(r, [](int x, int y) { return min(x, y); });
      if (most[r] < 0) most[r] = least;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) largest[r] = __int_as_float(most[r]);
}

}  // namespace attention
