// What translated asm calls, besides the functions of ptx.h, tma.h and wgmma.h: see
// ladder/ptx.py, which has this file included before a kernel that contains asm.
//
// A PTX register is a variable; an instruction reads and writes bits of it as its own type. An
// address in shared memory is an offset from 1024: first the static arrays, then the dynamic part,
// each at the same place of 1024 bytes as the memory itself. The bits from kBlockShift on are the
// block of the cluster, plus 1, in an address from mapa.

#pragma once

#include <algorithm>

#include "cuda_bf16.h"
#include "host.h"
#include "ptx.h"
#include "tma.h"
#include "wgmma.h"

#pragma GCC visibility push(hidden)

namespace attention::ptx::text {

using namespace attention::ptx;

// ---- Registers ----------------------------------------------------------------------------------

using Half = Float16<HalfFormat>;
using Bfloat16 = Float16<BFloat16Format>;
template <typename Format>
Float16x2<Format> pair_of(Float16<Format>);
template <typename T>
using Pair = decltype(pair_of(T{}));
struct Tf32 {
  uint32_t bits;
};
inline constexpr struct Sink {
} sink;  // the operand _

template <typename T, int kParts>
using Part = Word<sizeof(T) / kParts>;
// The type of twice the size.
template <typename T>
using Wide = std::conditional_t<
    std::is_unsigned_v<T>, Word<2 * sizeof(T)>,
    std::conditional_t<sizeof(T) == 8, __int128, std::conditional_t<sizeof(T) == 4, int64_t, int>>>;

template <typename T, int kCount>
struct [[gnu::may_alias]] alignas(sizeof(T) * kCount) Pack {
  T x[kCount];
  const T& operator[](int i) const { return x[i]; }
};

template <typename To, typename From>
To bits(const From& from) {
  return bit_cast<To>(from);
}

// Returns a register, or a number, as an instruction of type T reads it. One that is too narrow is
// an error of the overload resolution, which names the kernel's line.
template <typename T, typename From, typename = std::enable_if_t<sizeof(From) >= sizeof(T)>>
constexpr T get(const From& from) {
  constexpr bool kIsNumber = std::is_floating_point_v<From> && std::is_floating_point_v<T>;
  if constexpr (std::is_same_v<T, From>) {
    return from;
  } else if constexpr (kIsNumber || (std::is_integral_v<From> && std::is_integral_v<T>)) {
    return static_cast<T>(from);
  } else {
    return bits<T>(static_cast<Word<sizeof(T)>>(bits<Word<sizeof(From)>>(from)));
  }
}

// Writes a register; a wider one is extended with zeros or with the sign.
template <typename T, typename To, typename = std::enable_if_t<sizeof(To) >= sizeof(T)>>
ATTENTION_EMULATOR_INLINE void set(To& to, const T& value) {
  Word<sizeof(To)> word;
  if constexpr (std::is_integral_v<T>) {
    word = static_cast<Word<sizeof(To)>>(value);
  } else {
    word = bits<Word<sizeof(T)>>(value);
  }
  std::memcpy(static_cast<void*>(&to), &word, sizeof(To));
}
template <typename T>
void set(const Sink&, const T&) {}

// An operand as its constraint takes it.
template <char kConstraint>
using Operand = std::conditional_t<kConstraint == 'f', float,
                                   std::conditional_t<kConstraint == 'd', double,
                                                      Word<kConstraint == 'h'   ? 2
                                                           : kConstraint == 'r' ? 4
                                                                                : 8>>>;
template <char kConstraint, typename From, typename To = Operand<kConstraint>,
          typename = std::enable_if_t<std::is_same_v<From, To> ||
                                      (std::is_integral_v<To> &&
                                       (std::is_integral_v<From> || std::is_enum_v<From>))>>
constexpr To input(From from) {
  return static_cast<To>(from);
}
template <char kConstraint, typename Target, typename = std::enable_if_t<kConstraint == 'l'>>
uint64_t input(Target* from) {
  return reinterpret_cast<uint64_t>(from);
}
template <char kConstraint, typename To,
          typename = std::enable_if_t<sizeof(To) == sizeof(Operand<kConstraint>)>>
constexpr To& output(To& to) {
  return to;
}
template <typename T>
constexpr std::conditional_t<std::is_pointer_v<T>, T, int64_t> constant(T value) {
  return value;
}

constexpr bool same(const char* a, const char* b) {
  while (*a != 0 && *a == *b) ++a, ++b;
  return *a == *b;
}

inline Fiber& self() { return this_fiber(); }
inline unsigned rank() { return rank_of(*self().block); }
inline unsigned blocks_of_cluster() { return self().block->launch->blocks_of_cluster(); }
inline unsigned processors() { return std::max(Device::emulated().multiprocessors, 1); }
// Barriers with a result are for the whole block.
inline int zero(int barrier, int result, ATTENTION_EMULATOR_SITE) {
  if (barrier != 0)
    fail(Site{"bar.red", file, line}, "only barrier 0 has a result", cudaErrorNotSupported);
  return result;
}
inline int block_threads() { return static_cast<int>(self().block->warp_count * 32); }

// ---- Addresses ----------------------------------------------------------------------------------

constexpr unsigned kBlockShift = 24;

template <typename T>
uint64_t address(const T& base) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "an address has 32 or 64 bits");
  return get<Word<sizeof(T)>>(base);
}

inline uint64_t shared_address(uint64_t pointer) {
  return self().block->shared.address_of(reinterpret_cast<void*>(pointer));
}
inline bool is_shared(uint64_t pointer) {
  return self().block->shared.has(reinterpret_cast<void*>(pointer));
}
inline unsigned in_block(unsigned address, unsigned block) {
  return (address & ((1u << kBlockShift) - 1)) | (block + 1) << kBlockShift;
}
inline unsigned block_of(uint64_t address) {
  return address >> kBlockShift == 0 ? rank() : static_cast<unsigned>(address >> kBlockShift) - 1;
}

// Returns the byte of the calling thread's block at an address in shared memory, whichever block it
// is of.
inline unsigned char* here(uint64_t address, ATTENTION_EMULATOR_SITE) {
  unsigned char* const byte =
      self().block->shared.at_address(static_cast<unsigned>(address & ((1u << kBlockShift) - 1)));
  if (byte == nullptr || address >> 32 != 0)
    fail(Site{"asm", file, line}, "the address is not in shared memory", cudaErrorIllegalAddress);
  return byte;
}
inline unsigned char* shared(uint64_t address, ATTENTION_EMULATOR_SITE) {
  unsigned char* const byte = here(address, file, line);
  if (block_of(address) == rank()) return byte;
  return block_memory(byte, block_of(address), {"asm", file, line});
}
inline Barrier* barrier(uint64_t address, ATTENTION_EMULATOR_SITE) {
  return reinterpret_cast<Barrier*>(here(address, file, line));
}
inline const TensorMap& map(uint64_t pointer) {
  return *reinterpret_cast<const TensorMap*>(pointer);
}

// Returns what an address points to, in a state space such as ".shared::cta": a T, or several.
template <typename T = void, int kCount = 0>
auto* at(const char* space, uint64_t address, ATTENTION_EMULATOR_SITE) {
  void* const memory = *space != 0 && space[1] == 's' ? shared(address, file, line)
                                                      : reinterpret_cast<void*>(address);
  return static_cast<std::conditional_t<kCount == 0, T, Pack<T, kCount>>*>(memory);
}

// ---- Arithmetic ---------------------------------------------------------------------------------

// Calls a function for numbers, those of 16 bits as float, or for both numbers of pairs.
template <typename Function, typename T, typename... More>
T each(Function function, T a, More... more) {
  if constexpr (std::is_arithmetic_v<T>)
    return function(a, more...);
  else
    return T(function(float(a), float(more)...));
}
template <typename Function, typename Format, typename... More>
auto each(Function function, Float16x2<Format> a, More... more) {
  return Float16x2<Format>{each(function, a.x, more.x...), each(function, a.y, more.y...)};
}

template <typename T>
T apply(const char* name, T a) {
  const auto is = [name](const char* other) { return same(name, other); };
  return each(
      [&](auto x) -> decltype(x) {
        if (is("ex2")) return std::exp2(x);
        if (is("lg2")) return std::log2(x);
        if (is("rcp")) return 1 / x;
        if (is("rsqrt")) return 1 / std::sqrt(x);
        if (is("sqrt")) return std::sqrt(x);
        if (is("sin")) return std::sin(x);
        if (is("cos")) return std::cos(x);
        if (is("tanh")) return std::tanh(x);
        return is("neg") ? -x : std::fabs(x);
      },
      a);
}

template <typename T>
T smaller(T a, T b) {
  return each([](auto x, auto y) { return min(x, y); }, a, b);
}
template <typename T>
T larger(T a, T b) {
  return each([](auto x, auto y) { return max(x, y); }, a, b);
}
template <typename T>
T fused(T a, T b, T c) {
  using Exact = std::conditional_t<std::is_arithmetic_v<T>, T, double>;  // rounded once
  return each([](Exact x, Exact y, Exact z) { return std::fma(x, y, z); }, a, b, c);
}

template <typename T>
T shifted_right(T a, unsigned count) {
  if (count >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : T{0};
  return static_cast<T>(a >> count);
}
inline uint32_t funnel(bool left, bool wraps, uint32_t low, uint32_t high, uint32_t count) {
  count = wraps ? count % 32 : std::min(count, 32u);
  const uint64_t both = uint64_t{high} << 32 | low;
  return static_cast<uint32_t>(left ? both << count >> 32 : both >> count);
}
template <typename T>
T extracted(T a, unsigned at, unsigned length) {
  constexpr unsigned kBits = 8 * sizeof(T);
  at &= 0xff, length &= 0xff;
  if (length == 0) return 0;
  const unsigned last = std::min(at + length - 1, kBits - 1);
  const bool negative = std::is_signed_v<T> && (a >> last & 1) != 0;
  const auto shifted = static_cast<uint64_t>(shifted_right(a, at));
  const uint64_t mask = length >= 64 ? ~uint64_t{0} : (uint64_t{1} << length) - 1;
  return static_cast<T>(negative ? shifted | ~mask : shifted & mask);
}
template <typename T>
T inserted(T a, T into, unsigned at, unsigned length) {
  at &= 0xff, length &= 0xff;
  if (at >= 8 * sizeof(T)) return into;
  const T mask = static_cast<T>((length >= 64 ? ~uint64_t{0} : (uint64_t{1} << length) - 1) << at);
  return static_cast<T>((into & ~mask) | (static_cast<T>(a << at) & mask));
}
template <typename T>
T reversed(T a) {
  T result = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) result = result << 1 | (a >> i & 1);
  return result;
}
template <typename T>
unsigned leading_zeros(T a) {
  return a == 0 ? 8 * sizeof(T) : __builtin_clzll(a) - (64 - 8 * sizeof(T));
}
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned choice = selector >> 4 * i & 15;
    const auto byte = static_cast<uint8_t>(both >> choice % 8 * 8);
    result |= uint32_t{choice < 8 ? byte : static_cast<uint8_t>(byte >> 7 ? 0xff : 0)} << 8 * i;
  }
  return result;
}
inline uint32_t looked_up(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (unsigned i = 0; i < 8; ++i)
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}

template <typename T>
bool compare(const char* how, T a, T b) {
  const bool unordered = a != a || b != b;
  if (same(how, "num")) return !unordered;
  if (unordered) return same(how, "nan") || (how[1] != 0 && how[2] == 'u');
  const char kind = how[0], more = how[1];
  if (kind == 'e') return a == b;
  if (same(how, "nan")) return false;
  if (kind == 'n') return a != b;
  const bool or_equal = more == 'e' || more == 's';
  return kind == 'l' ? a < b || (or_equal && a == b) : a > b || (or_equal && a == b);
}
inline bool join(const char* how, bool a, bool b) {
  return *how == 'a' ? a && b : *how == 'o' ? a || b : a != b;
}

// Rounds to an integer, as in the modifiers rni, rzi, rmi and rpi.
inline double rounded(const char* how, double x) {
  return how[1] == 'z'   ? std::trunc(x)
         : how[1] == 'm' ? std::floor(x)
         : how[1] == 'p' ? std::ceil(x)
                         : std::nearbyint(x);
}
template <typename To, typename From>
To convert(const char* how, bool relu, const char* saturates, From from) {
  if constexpr (std::is_same_v<To, Tf32>) {
    const auto word = bits<uint32_t>(float(from));
    if ((word & 0x7f800000) == 0x7f800000) return {word};
    const uint32_t up = same(how, "rna")             ? 0x1000
                        : *how == 0 || how[1] == 'z' ? 0
                                                     : 0xfff + (word >> 13 & 1);
    return {(relu && word >> 31 ? 0 : word + up) & ~0x1fffu};
  } else if constexpr (std::is_integral_v<To>) {
    if (std::is_integral_v<From> && *saturates == 0) return static_cast<To>(from);
    using Number = std::conditional_t<std::is_integral_v<From>, __int128, double>;
    const Number x = std::is_integral_v<From> ? Number(from) : Number(rounded(how, double(from)));
    using Limits = std::numeric_limits<To>;
    const Number least = Limits::min(), most = Limits::max();
    return x != x ? 0 : x <= least ? Limits::min() : x >= most ? Limits::max() : static_cast<To>(x);
  } else if constexpr (std::is_integral_v<From>) {
    return static_cast<To>(from);
  } else {
    double x = from;
    if (*how != 0 && how[2] == 'i') x = rounded(how, x);
    if (relu && x < 0) x = 0;
    if (same(saturates, ".sat")) x = x > 0 ? std::fmin(x, 1) : 0;
    if (same(saturates, ".satfinite") && sizeof(To) == 2 && std::fabs(x) > 0)
      x = std::copysign(std::fmin(std::fabs(x), std::is_same_v<To, Half> ? 65504 : 0x1.fep127), x);
    const To nearest = static_cast<To>(x);
    if (how[0] == 0 || how[1] != 'z' || !(std::fabs(double(nearest)) > std::fabs(x)))
      return nearest;
    using Bits = Word<sizeof(To)>;
    return bits<To>(static_cast<Bits>(bits<Bits>(nearest) - 1));
  }
}

// ---- Memory that other threads use at the same time ---------------------------------------------

constexpr Scope scope_of(const char* name) {
  return same(name, ".cta")       ? Scope::kBlock
         : same(name, ".cluster") ? Scope::kCluster
                                  : Scope::kDevice;
}
inline void fence(const char* scope) { emulator::fence(scope_of(scope)); }

// Each element of a vector is accessed on its own, as in PTX's memory model.
template <typename T, int kCount>
ATTENTION_EMULATOR_INLINE Pack<T, kCount> load_ordered(const char* order, const char* scope,
                                                       const char* space, uint64_t address,
                                                       ATTENTION_EMULATOR_SITE) {
  const auto* const from = at<Word<sizeof(T)>>(space, address, file, line);
  const Site site{"ld", file, line};
  Pack<T, kCount> result;
  for (int i = 0; i < kCount; ++i)
    result.x[i] =
        bits<T>(*order == 'a' ? load_atomic<__ATOMIC_ACQUIRE>(from + i, scope_of(scope), site)
                              : load_atomic<__ATOMIC_RELAXED>(from + i, scope_of(scope), site));
  return result;
}
template <typename T, int kCount>
ATTENTION_EMULATOR_INLINE void store_ordered(const char* order, const char* scope,
                                             const char* space, uint64_t address,
                                             const Pack<T, kCount>& value,
                                             ATTENTION_EMULATOR_SITE) {
  auto* const to = at<Word<sizeof(T)>>(space, address, file, line);
  for (int i = 0; i < kCount; ++i) {
    const auto word = bits<Word<sizeof(T)>>(value.x[i]);
    set_scope(scope_of(scope));
    if (same(order, "release")) {
      __atomic_store_n(to + i, word, __ATOMIC_RELEASE);
    } else {
      __atomic_store_n(to + i, word, __ATOMIC_RELAXED);
    }
  }
}

// Calls an atomic function that also orders other accesses, for ".acquire", ".release" and
// ".acq_rel".
template <typename Function>
ATTENTION_EMULATOR_INLINE auto ordered(const char* order, const char* scope, Function function) {
  if (same(order, ".release") || same(order, ".acq_rel")) fence(scope);
  const auto result = function(scope_of(scope));
  if (order[0] != 0 && order[1] == 'a') fence(scope);
  return result;
}

template <typename T>
T updated(const char* how, T old, T value) {
  if (same(how, "add")) return old + value;
  if (same(how, "min")) return smaller(old, value);
  if (same(how, "max")) return larger(old, value);
  if constexpr (std::is_integral_v<T>) {
    if (same(how, "and")) return old & value;
    if (same(how, "or")) return old | value;
    if (same(how, "xor")) return old ^ value;
    if (same(how, "inc")) return old >= value ? 0 : old + 1;
    if (same(how, "dec")) return old == 0 || old > value ? value : old - 1;
  }
  return value;
}
// With a name in the site, a thread that repeats it in vain waits. A maximum that changes nothing
// is no reason to.
template <typename T>
ATTENTION_EMULATOR_INLINE T atomic(const char* how, T* address, T value, Scope scope,
                                   Site site = {nullptr, nullptr, 0}) {
  if (*how == 'm') site.name = nullptr;
  return atomic_update(address, [&](T old) -> T { return updated(how, old, value); }, scope, site);
}
template <typename T, int kCount>
ATTENTION_EMULATOR_INLINE int reduce(const char* how, T* address, const Pack<T, kCount>& values,
                                     Scope scope) {
  for (int i = 0; i < kCount; ++i) atomic(how, address + i, values.x[i], scope);
  return 0;
}

// ---- Warps --------------------------------------------------------------------------------------

template <typename Valid>
uint32_t shuffled(char how, uint32_t a, uint32_t b, uint32_t c, uint32_t mask, Valid& valid,
                  ATTENTION_EMULATOR_SITE) {
  bool is_valid;
  const unsigned source = shuffle_source(how, b, c, is_valid);
  set<bool>(valid, is_valid);
  return exchange(mask, a, source, {"shfl", file, line});
}
// Calls function(lane, value) for the value of each lane in the mask.
template <typename T, typename Function>
void for_each_lane(T value, uint32_t mask, const Site& site, Function function) {
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) function(lane, exchange(mask, value, lane, site));
}
template <typename T>
T reduced(const char* how, T value, uint32_t mask, ATTENTION_EMULATOR_SITE) {
  T sum{};
  bool is_first = true;
  for_each_lane(value, mask, {"redux", file, line}, [&](unsigned, T other) {
    sum = std::exchange(is_first, false) ? other : updated(how, sum, other);
  });
  return sum;
}
template <typename T>
uint32_t matching(T value, uint32_t mask, ATTENTION_EMULATOR_SITE) {
  uint32_t same = 0;
  for_each_lane(value, mask, {"match", file, line},
                [&](unsigned lane, T other) { same |= uint32_t{other == value} << lane; });
  return same;
}
template <typename T, typename Match>
uint32_t all_matching(T value, uint32_t mask, Match& match, ATTENTION_EMULATOR_SITE) {
  const bool all = matching(value, mask, file, line) == mask;
  set<bool>(match, all);
  return all ? mask : 0;
}
inline bool uniform(uint32_t mask, bool predicate, ATTENTION_EMULATOR_SITE) {
  const unsigned ballot = __ballot_sync(mask, predicate, file, line);
  return ballot == 0 || ballot == mask;
}
template <typename Leads>
uint32_t elected(uint32_t mask, Leads& leads, ATTENTION_EMULATOR_SITE) {
  const unsigned leader = __builtin_ctz(__ballot_sync(mask, 1, file, line));
  set<bool>(leads, leader == self().thread % 32);
  return leader;
}

// sums += A B for a warp, in bytes: A is 16 x 32, B 32 x 8. A register of A or B has four bytes
// along k; otherwise their places are as in mma().
template <bool kSignedA, bool kSignedB>
void mma_int8(int (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
              ATTENTION_EMULATOR_SITE) {
  const auto multiply = [](const MatrixCalls& calls, const Site&) {
    const auto byte = [&](unsigned which, unsigned lane, unsigned i, unsigned k, bool is_signed) {
      const auto word = static_cast<const uint32_t*>(calls[lane]->fragments[which])[i];
      const auto bits = static_cast<uint8_t>(word >> k % 4 * 8);
      return is_signed ? int{static_cast<int8_t>(bits)} : int{bits};
    };
    for (unsigned lane = 0; lane < 32; ++lane) {
      auto* const mine = static_cast<int*>(const_cast<void*>(calls[lane]->fragments[0]));
      for (unsigned i = 0; i < 4; ++i) {
        for (unsigned k = 0; k < 32; ++k)
          mine[i] += byte(1, lane / 4 * 4 + k % 16 / 4, i / 2 + k / 16 * 2, k, kSignedA) *
                     byte(2, (lane % 4 * 2 + i % 2) * 4 + k % 16 / 4, k / 16, k, kSignedB);
      }
    }
  };
  meet({nullptr, 0, 0, {sums, a, b, nullptr}}, {"mma", file, line}, multiply);
}

// ---- Barriers and copies ------------------------------------------------------------------------

inline void wait_for_copies() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

// Returns the phase, whose lowest bit is its parity.
inline uint64_t arrive_at(uint64_t address, unsigned count, ATTENTION_EMULATOR_SITE) {
  Barrier* const barrier = text::barrier(address, file, line);
  const bool is_own = block_of(address) == rank();
  const uint64_t phase = is_own ? phase_of(barrier) : 0;
  for (unsigned i = 0; i < count; ++i) {
    if (is_own) {
      barrier_arrive(barrier, file, line);
    } else {
      barrier_arrive_at_block(barrier, block_of(address), file, line);
    }
  }
  return phase;
}
inline uint64_t expect_at(uint64_t address, unsigned bytes, ATTENTION_EMULATOR_SITE) {
  Barrier* const barrier = text::barrier(address, file, line);
  if (block_of(address) != rank())
    fail(Site{"mbarrier", file, line}, "expects bytes in its own block only",
         cudaErrorNotSupported);
  const uint64_t phase = phase_of(barrier);
  barrier_expect(barrier, bytes, file, line);
  return phase;
}

template <int kSums>
__attribute__((noinline)) void multiply_registers(float* const (&sums)[kSums],
                                                  const uint32_t* a_registers, uint64_t a,
                                                  uint64_t b, bool is_bfloat16, bool is_transposed,
                                                  bool accumulates, bool is_plain,
                                                  ATTENTION_EMULATOR_SITE) {
  const Site site{"wgmma.mma_async", file, line};
  if (!is_plain)
    fail(site, "the emulator has no negated operand and no transposed A", cudaErrorNotSupported);
  begin({sums[0], kSums, a_registers, a, b, is_bfloat16, is_transposed, accumulates,
         __builtin_return_address(0), sums},
        site);
}

[[noreturn]] inline void exit_thread() { throw ThreadExit{}; }

}  // namespace attention::ptx::text

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return attention::ptx::text::shared_address(reinterpret_cast<uint64_t>(pointer));
}
inline void* __cvta_shared_to_generic(size_t address) {
  return attention::ptx::text::shared(address);
}
inline size_t __cvta_generic_to_global(const void* pointer) {
  return reinterpret_cast<size_t>(pointer);
}

#define ATTENTION_EMULATOR_REDUCTION(name)                                    \
  template <typename T>                                                       \
  T __reduce_##name##_sync(unsigned mask, T value, ATTENTION_EMULATOR_SITE) { \
    return attention::ptx::text::reduced(#name, value, mask, file, line);     \
  }
ATTENTION_EMULATOR_REDUCTION(add)
ATTENTION_EMULATOR_REDUCTION(min)
ATTENTION_EMULATOR_REDUCTION(max)
ATTENTION_EMULATOR_REDUCTION(and)
ATTENTION_EMULATOR_REDUCTION(or)
ATTENTION_EMULATOR_REDUCTION(xor)
#undef ATTENTION_EMULATOR_REDUCTION
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, ATTENTION_EMULATOR_SITE) {
  return attention::ptx::text::matching(value, mask, file, line);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  return attention::ptx::text::permuted(a, b, selector);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned count) {
  return attention::ptx::text::funnel(true, true, low, high, count);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned count) {
  return attention::ptx::text::funnel(false, true, low, high, count);
}
inline unsigned __brev(unsigned x) { return attention::ptx::text::reversed(x); }

#pragma GCC visibility pop

// Defined last: headers that were included before, such as torch's, are for the host.
#define __CUDA_ARCH__ 900
