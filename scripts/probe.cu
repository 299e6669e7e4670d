// Measures what `gpt2-infer predict` knows of a GPU and no table tells, and prints it as JSON; the
// numbers are in attention_kernels/inspection/sass/gpus.toml and at the head of time.py.
// Cycles are those of a multiprocessor's clock. `rate` is per scheduler, for a whole warp.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I attention_kernels/csrc \\
//     -o probe scripts/probe.cu && ./probe

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "tma.cuh"
#include "wgmma.cuh"

// The headers are for version files, which define these.
namespace attention::ATTENTION_VERSION {
int64_t scratch_floats(const Params&) { return 0; }
cudaError_t launch(const Params&, cudaStream_t) { return cudaErrorNotSupported; }
}  // namespace attention::ATTENTION_VERSION

using namespace attention;

constexpr int kChain = 64, kLoops = 8, kSlots = 8, kMultiprocessors = 132;
enum Test {
  kFma,
  kMultiply,
  kAdd,
  kIntegerMad,
  kLogic,
  kMax,
  kPermute,
  kPack,
  kUnpack,
  kUnpackAndLogic,
  kSplit,
  kExponential,
  kShuffle,
  kMmaTf32,
  kMmaFloat16,
  kLoad,
  kLoad16,
  kLoadMatrix,
  kLoadEach,
  kLoadPairs,
  kLoadPairEach,
  kStoreEach,
  kStorePairEach,
  kStore16,
  kConstant,
  kBarrier,
  kFence,
  kArrive,
  kDoubleAdd,
  kDoubleFma,
  kDoubleConvert,
};

__device__ float sink[1024];
__constant__ unsigned table[1024];  // of zeros

void report(const std::string& name, double value, const char* unit = "cycles") {
  static bool is_first = true;
  std::printf("%s\n  \"%s\": [%.6g, \"%s\"]", is_first ? "{" : ",", name.c_str(), value, unit);
  is_first = false;
}

// One instruction on four registers.
template <Test kTest>
__device__ void execute(unsigned (&x)[4], unsigned y, unsigned z, unsigned shared) {
  if (kTest == kFma) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+r"(x[0]) : "r"(y), "r"(z));
  if (kTest == kMultiply) asm volatile("mul.f32 %0, %0, %1;" : "+r"(x[0]) : "r"(y));
  if (kTest == kAdd) asm volatile("add.f32 %0, %0, %1;" : "+r"(x[0]) : "r"(y));
  if (kTest == kIntegerMad)
    asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x[0]) : "r"(y), "r"(z));
  if (kTest == kLogic) asm volatile("lop3.b32 %0, %0, %1, %2, 0xe8;" : "+r"(x[0]) : "r"(y), "r"(z));
  if (kTest == kMax) asm volatile("max.f32 %0, %0, %1;" : "+r"(x[0]) : "r"(y));
  if (kTest == kPermute) asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(x[0]) : "r"(y), "r"(z));
  if (kTest == kPack) asm volatile("cvt.rn.f16x2.f32 %0, %0, %1;" : "+r"(x[0]) : "r"(y));
  if (kTest == kUnpack || kTest == kUnpackAndLogic) {  // the lower half
    asm volatile("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %0;\ncvt.f32.f16 %0, low;\n}"
                 : "+r"(x[0]));
  }
  if (kTest == kUnpackAndLogic)
    asm volatile("lop3.b32 %0, %0, %1, %2, 0xe8;" : "+r"(x[1]) : "r"(y), "r"(z));
  if (kTest ==
      kSplit) {  // two numbers, each into one of 16 bits and the rest: F2FP, HADD2.F32, FADD
    asm volatile(
        "{\n.reg .b32 pair;\n.reg .f16 low, high;\n.reg .f32 a, b;\n"
        "cvt.rn.f16x2.f32 pair, %1, %0;\nmov.b32 {low, high}, pair;\n"
        "cvt.f32.f16 a, low;\ncvt.f32.f16 b, high;\nsub.f32 %0, %0, a;\nsub.f32 %1, %1, b;\n}"
        : "+r"(x[0]), "+r"(x[1]));
  }
  if (kTest == kExponential) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+r"(x[0]));
  if (kTest == kShuffle) asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;" : "+r"(x[0]));
  if (kTest == kMmaTf32) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, "
        "{%4, %4}, {%0, %1, %2, %3};"
        : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
        : "r"(y));
  }
  if (kTest == kMmaFloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, "
        "{%4, %4}, {%0, %1, %2, %3};"
        : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
        : "r"(y));
  }
  if (kTest == kLoad || kTest == kLoadEach) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(x[0]));
  if (kTest == kLoadPairs || kTest == kLoadPairEach) {
    unsigned a;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%0];" : "+r"(x[0]), "=r"(a));
    x[1] ^= a;
  }
  if (kTest == kLoad16) {  // of results that are not used the compiler loads none
    unsigned a, b, c;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%0];"
                 : "+r"(x[0]), "=r"(a), "=r"(b), "=r"(c));
    x[1] ^= a ^ b ^ c;
  }
  if (kTest == kLoadMatrix) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%0];"
                 : "+r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]));
  }
  if (kTest == kStoreEach) asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(x[0]), "r"(x[0]));
  if (kTest == kStorePairEach)
    asm volatile("st.volatile.shared.v2.u32 [%0], {%1, %2};" ::"r"(x[0]), "r"(x[0]), "r"(x[1]));
  if (kTest == kStore16) {
    asm volatile("st.volatile.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(x[0]), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3]));
  }
  if (kTest == kConstant) x[0] = table[x[0]];  // with a shift
  if (kTest == kBarrier) __syncthreads();
  if (kTest == kFence) ptx::proxy_fence();
  if (kTest == kArrive) {  // an arrival completes the phase, and the wait sees it
    asm volatile(
        "{\n.reg .pred done;\n.reg .b64 state;\n"
        "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
        "wait:\nmbarrier.try_wait.shared::cta.b64 done, [%0], state;\n@!done bra wait;\n}" ::"r"(
            shared)
        : "memory");
  }
  if (kTest == kDoubleAdd) {
    asm volatile("{\n.reg .f64 d;\nmov.b64 d, {%0, %1};\nadd.f64 d, d, d;\nmov.b64 {%0, %1}, d;\n}"
                 : "+r"(x[0]), "+r"(x[1]));
  }
  if (kTest == kDoubleFma) {
    asm volatile(
        "{\n.reg .f64 d;\nmov.b64 d, {%0, %1};\nfma.rn.f64 d, d, d, d;\nmov.b64 {%0, %1}, d;\n}"
        : "+r"(x[0]), "+r"(x[1]));
  }
  if (kTest == kDoubleConvert) {  // to float64 and back
    asm volatile("{\n.reg .f64 wide;\ncvt.f64.f32 wide, %0;\ncvt.rn.f32.f64 %0, wide;\n}"
                 : "+r"(x[0]));
  }
}

// Each instruction waits for the one before (kApart = 1), or for the one kApart before it.
template <Test kTest, int kApart>
__global__ void chain(long long* cycles, unsigned y, unsigned z) {
  __shared__ alignas(16) unsigned words[4 * 1024];
  __shared__ ptx::Barrier barrier;
  const unsigned base = ptx::shared_address(words);
  for (int i = threadIdx.x; i < 4 * 1024; i += blockDim.x) words[i] = base + i / 4 * 16;
  if (threadIdx.x == 0) ptx::barrier_init(&barrier, 1);
  __syncthreads();
  y += threadIdx.x, z += threadIdx.x;  // what all lanes share would be computed once for the warp
  unsigned x[kApart][4];
  constexpr bool kIsAddress = kLoad <= kTest && kTest <= kLoadMatrix;
  if (kTest == kConstant) y = words[threadIdx.x % 4] - base;  // nvcc does not know that it is 0
  for (auto& slot : x)
    for (unsigned& word : slot) word = kIsAddress ? base + threadIdx.x % 32 * 16 : y;
  long long begin = 0;
  for (int loop = -1; loop < kLoops; ++loop) {
    if (loop == 0) {
      __syncthreads();
      begin = clock64();
    }
#pragma unroll
    for (int i = 0; i < kChain; ++i)
      execute<kTest>(x[i % kApart], y, z, ptx::shared_address(&barrier));
  }
  __syncthreads();
  if (threadIdx.x == 0) *cycles = clock64() - begin;
  unsigned sum = 0;
  for (auto& slot : x)
    for (unsigned word : slot) sum += word;
  sink[threadIdx.x] = sum;
}

// kSize multiply-adds, executed again and again: what it costs to fetch the instructions. Each waits
// for the one kApart before it.
template <int kSize, int kApart>
__global__ void straight(long long* cycles, float y) {
  float x[kApart] = {};
  long long begin = clock64();
  for (int loop = 0; loop < 5; ++loop) {
    if (loop == 1) {  // the first pass is on its own
      __syncthreads();
      if (threadIdx.x == 0) cycles[0] = clock64() - begin;
      begin = clock64();
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x[i % kApart]) : "f"(y));
  }
  __syncthreads();
  if (threadIdx.x == 0) cycles[1] = clock64() - begin;
  for (float one : x) sink[threadIdx.x] += one;
}

// One lane follows zeros that are so many words apart.
__global__ void chase(long long* cycles, const unsigned* zeros, size_t step, int count) {
  unsigned x = 0;
  const long long begin = clock64();
  for (int i = 0; i < count; ++i)
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(zeros + i * step + x));
  *cycles = clock64() - begin;
  sink[0] = static_cast<float>(x);
}

// One lane follows them again and again, past L1.
__global__ void chase_l2(long long* cycles, const unsigned* zeros, size_t step, int count,
                         int rounds) {
  unsigned x = 0;
  long long begin = 0;
  for (int round = -1; round < rounds; ++round) {
    if (round == 0) begin = clock64();
    for (int i = 0; i < count; ++i)
      asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x) : "l"(zeros + i * step + x));
  }
  *cycles = clock64() - begin;
  sink[0] = static_cast<float>(x);
}

// All blocks but the first store to some of the lines that chase() follows, or load them.
__global__ void touch(unsigned* zeros, size_t step, int count, bool stores) {
  if (blockIdx.x == 0) return;
  for (int i = blockIdx.x - 1; i < count; i += gridDim.x - 1) {
    if (stores)
      zeros[i * step] = 0;
    else
      sink[i] = zeros[i * step];
  }
}

__global__ void chase_l1(long long* cycles, const unsigned* zeros) {
  unsigned x = zeros[0];
  const long long begin = clock64();
#pragma unroll
  for (int i = 0; i < kChain; ++i)
    asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(x) : "l"(zeros + x));
  *cycles = clock64() - begin;
  sink[0] = static_cast<float>(x);
}

__global__ void read(const uint4* from, size_t count, int rounds) {
  const size_t all = static_cast<size_t>(gridDim.x) * blockDim.x;
  unsigned sum = 0;
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i + 3 * all < count; i += 4 * all) {
      uint4 x[4];
      for (int j = 0; j < 4; ++j) x[j] = __ldcg(from + i + j * all);
      for (int j = 0; j < 4; ++j) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
    }
  }
  if (sum == 12345) sink[0] = 1;
}

// Blocks in groups load all bytes of their group again and again, 32 KB at a time, and wait 3,000 cycles
// after each. found: for each block and round, the cycles.
__global__ void __launch_bounds__(256)
    load_again(const uint4* from, size_t group_words, int groups, int rounds, long long* found) {
  constexpr int kWords = 2048, kAtOnce = 2;
  __shared__ uint4 tile[kWords];
  const uint4* const mine = from + blockIdx.x % groups * group_words;
  unsigned sum = 0;
  for (int round = 0; round < rounds; ++round) {
    const long long begin = clock64();
    for (size_t at = 0; at < group_words; at += kWords) {
      for (int part = threadIdx.x; part < kWords; part += kAtOnce * blockDim.x) {
        uint4 x[kAtOnce];
        for (int j = 0; j < kAtOnce; ++j) x[j] = __ldcg(mine + at + part + j * blockDim.x);
        for (int j = 0; j < kAtOnce; ++j) tile[part + j * blockDim.x] = x[j];
        asm volatile("" ::: "memory");
      }
      __syncthreads();
      sum += tile[threadIdx.x * 37 % kWords].x;
      const long long until = clock64() + 3000;
      while (clock64() < until) continue;
      __syncthreads();
    }
    if (threadIdx.x == 0) found[blockIdx.x * rounds + round] = clock64() - begin;
  }
  if (sum == 12345) sink[0] = 1;
}

// ---- Products of warpgroups ----------------------------------------------------------------------

// Fills what the products multiply with numbers of 2^-8 to 2^-1.
__device__ void fill(unsigned char* tile, unsigned seed) {
  for (int i = threadIdx.x; i < 16384; i += blockDim.x) {
    const unsigned bits = (i * 2654435761u) ^ seed;
    reinterpret_cast<unsigned*>(tile)[i] = seed ? (bits & 0x9fff9fff) | 0x1c001c00 : 0;
  }
  ptx::proxy_fence();
}

// Groups of kCount products of 64 x 2 kSums x 16, each waited for before the next begins.
template <int kSums, bool kFromRegisters, int kCount>
__global__ void __launch_bounds__(384)
    products(long long* cycles, int loops, unsigned seed, unsigned long long* nanoseconds) {
  ATTENTION_ALIGNED_SHARED(unsigned char, tile, 1024);
  fill(tile, seed);
  // The same in all lanes of a warp, and nvcc has to know it: it would move the descriptor to uniform
  // registers for each product.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const uint64_t a = ptx::matrix_descriptor(tile + warpgroup * 8192);
  const uint64_t b = ptx::matrix_descriptor(tile + 32768, 16384);
  float sums[kSums] = {};
  unsigned rA[4];
  for (int i = 0; i < 4; ++i) rA[i] = seed ? 0x2c003100 + threadIdx.x + i : 0;
  __syncthreads();
  unsigned long long from = 0;
  long long begin = 0;
  for (int loop = -1; loop < loops; ++loop) {
    if (loop == 0) {
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
      begin = clock64();
    }
    ptx::multiply_fence(sums, rA);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kFromRegisters)
        ptx::multiply<false, true>(sums, rA, ptx::advance(b, i % 4 * 2048));
      else
        ptx::multiply<false>(sums, ptx::advance(a, i % 4 * 32), ptx::advance(b, i % 4 * 32));
    }
    ptx::multiply_commit();
    ptx::multiply_wait<0>(sums);
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    unsigned long long now;
    *cycles = clock64() - begin;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *nanoseconds = now - from;
  }
  for (float x : sums) sink[threadIdx.x] += x;
}

// Warpgroup 0 multiplies, 48 products at a time, until warpgroup 1 has executed kTest kChain times
// in each of its loops, each waiting for the one kApart before it. kSums = 0: without products.
// found: cycles of the loops, products, nanoseconds.
template <Test kTest, int kApart, int kSums, bool kFromRegisters>
__global__ void __launch_bounds__(256) beside(long long* found, int loops, unsigned seed) {
  ATTENTION_ALIGNED_SHARED(unsigned char, tile, 1024);
  __shared__ alignas(16) unsigned words[128];
  __shared__ volatile int stop;
  __shared__ volatile bool is_over;
  if (threadIdx.x == 0) stop = 0;
  const unsigned base = ptx::shared_address(words);
  // Loads of a word have a 4-way conflict or none; of pairs, each lane's own or one of four.
  constexpr bool kIsWord = kTest == kLoadEach || kTest == kStoreEach;
  constexpr bool kIsQuad = kLoad <= kTest && kTest <= kLoadMatrix || kTest == kStore16;
  constexpr unsigned kStep = kIsWord ? 4 : kIsQuad ? 16 : 8;
  if (threadIdx.x < 128) words[threadIdx.x] = base + threadIdx.x * 4 / kStep * kStep;
  fill(tile, seed);
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // as in products()
  if (warpgroup == 0) {
    long long count = 0;
    if constexpr (kSums > 0) {
      const uint64_t a = ptx::matrix_descriptor(tile);
      const uint64_t b = ptx::matrix_descriptor(tile + 32768, 16384);
      float sums[kSums] = {};
      unsigned rA[4][4];
      for (int i = 0; i < 16; ++i)
        rA[i / 4][i % 4] = ((threadIdx.x * 16 + i) * 2654435761u & 0x9fff9fff) | 0x1c001c00;
      for (;; count += 48) {
        if (threadIdx.x == 0) is_over = stop;  // one thread decides: a product needs all four warps
        ptx::named_barrier_sync(1, 128);
        if (is_over) break;
        ptx::multiply_fence(sums, rA[0], rA[1], rA[2], rA[3]);
#pragma unroll
        for (int i = 0; i < 48; ++i) {
          if constexpr (kFromRegisters)
            ptx::multiply<false, true>(sums, rA[i % 4], ptx::advance(b, i % 4 * 2048));
          else
            ptx::multiply<false>(sums, ptx::advance(a, i % 4 * 32), ptx::advance(b, i % 4 * 32));
        }
        ptx::multiply_commit();
        ptx::multiply_wait<0>(sums);
      }
      for (float x : sums) sink[threadIdx.x] += x;
    }
    if (threadIdx.x == 0 && blockIdx.x == 0) found[1] = count;
    return;
  }
  unsigned long long from, to;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
  const long long begin = clock64();
  unsigned x[kApart][4];
  for (auto& slot : x)
    for (unsigned& word : slot) {
      const unsigned lane = threadIdx.x % (kTest == kLoadPairs ? 4 : 32);
      word = kLoad <= kTest && kTest <= kStore16 ? base + lane * kStep : threadIdx.x;
    }
  for (int loop = 0; loop < loops; ++loop) {
#pragma unroll
    for (int i = 0; i < kChain; ++i) execute<kTest>(x[i % kApart], threadIdx.x, seed, 0);
  }
  stop = 1;
  if (threadIdx.x == 128 && blockIdx.x == 0) {
    found[0] = clock64() - begin;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(to));
    found[2] = to - from;
  }
  unsigned sum = 0;
  for (auto& slot : x) sum += slot[0] + slot[1];
  sink[threadIdx.x] += sum;
}

__device__ unsigned clock_now() {
  unsigned cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

// Two groups of kCount products, the second from registers, again and again. found, for each loop: the
// cycles to issue each group and to wait for each.
template <int kSums, int kCount, bool kFromRegisters>
__global__ void __launch_bounds__(256) issue(long long* found, int loops) {
  ATTENTION_ALIGNED_SHARED(unsigned char, tile, 1024);
  fill(tile, 0x5bd1e995);
  __syncthreads();
  const uint64_t a = ptx::matrix_descriptor(tile), b = ptx::matrix_descriptor(tile + 32768, 16384);
  float first[kSums] = {}, second[kSums] = {};
  unsigned rA[4] = {threadIdx.x, 1, 2, 3};
  unsigned total[4] = {};
  for (int loop = -8; loop < loops; ++loop) {  // the first ones do not count
    unsigned at[5] = {clock_now()};
    ptx::multiply_fence(first, second, rA);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kFromRegisters)
        ptx::multiply<false, true>(first, rA, ptx::advance(b, i % 4 * 2048));
      else
        ptx::multiply<false>(first, ptx::advance(a, i % 4 * 32), ptx::advance(b, i % 4 * 32));
    }
    ptx::multiply_commit();
    at[1] = clock_now();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      ptx::multiply<false, true>(second, rA, ptx::advance(b, i % 4 * 2048));
    ptx::multiply_commit();
    at[2] = clock_now();
    ptx::multiply_wait<1>(first);
    at[3] = clock_now();
    ptx::multiply_wait<0>(second);
    at[4] = clock_now();
    for (int i = 0; i < 4; ++i) total[i] = loop < 0 ? 0 : total[i] + at[i + 1] - at[i];
  }
  if (threadIdx.x == 0)
    for (int i = 0; i < 4; ++i) found[i] = total[i];
  for (int i = 0; i < kSums; ++i) sink[threadIdx.x] += first[i] + second[i];
}

// What attention's loop does: two warpgroups multiply operands that change, work on the sums with
// kPlain instructions each, and make the next operand A of them, while a thread copies 32 KB from L2 to
// shared memory for each of their loops. found: cycles and nanoseconds of each block.
template <int kPlain, bool kCopies>
__global__ void __launch_bounds__(384)
    mixed(long long* found, const unsigned char* from, int loops) {
  ATTENTION_ALIGNED_SHARED(unsigned char, tile, 1024);
  constexpr int kBytes = 32768;
  __shared__ ptx::Barrier full;
  __shared__ volatile int done;
  fill(tile, 0x5bd1e995);
  if (threadIdx.x == 0) {
    done = 0;
    ptx::barrier_init(&full, 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    if (!kCopies || threadIdx.x > 256) return;
    for (int i = 0; i < loops; ++i) {
      while (done < i) continue;
      ptx::barrier_expect(&full, kBytes);
      ptx::copy_bulk(tile + 65536, from + (i * 17 + blockIdx.x) % 64 * kBytes, kBytes, &full);
      ptx::barrier_wait(&full, i % 2);
    }
    return;
  }
  float sums[32];
  unsigned rA[4][4];
  for (int i = 0; i < 16; ++i)
    rA[i / 4][i % 4] = ((threadIdx.x * 16 + i) * 2654435761u & 0x83ff83ff) | 0x3c003c00;
  const uint64_t b = ptx::matrix_descriptor(tile);
  unsigned long long begun, ended;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  const long long begin = clock64();
#pragma unroll 1
  for (int loop = 0; loop < loops; ++loop) {
    ptx::multiply_fence(sums, rA);
#pragma unroll
    for (int i = 0; i < 12; ++i)
      ptx::multiply<false>(sums, rA[i % 4], ptx::advance(b, i / 4 * 8192 + i % 4 * 32), i > 0);
    ptx::multiply_commit();
    ptx::multiply_wait<0>(sums);
#pragma unroll
    for (int i = 0; i < kPlain; ++i) {
      float& x = sums[i % 32];
      if (i / 32 % 8 == 7)
        asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
      else
        asm volatile("fma.rn.f32 %0, %0, 0f3E000000, %1;" : "+f"(x) : "f"(sums[(i + 1) % 32]));
    }
    // Numbers from 1 to 2 with the sums' bits
    for (int i = 0; i < 16; ++i) {
      const __half2 pair = __floats2half2_rn(sums[2 * i], sums[2 * i + 1]);
      rA[i / 4][i % 4] = (reinterpret_cast<const unsigned&>(pair) & 0x83ff83ff) | 0x3c003c00;
    }
    if (kCopies && threadIdx.x == 0) done = loop + 1;
  }
  if (threadIdx.x == 0) {
    found[2 * blockIdx.x] = clock64() - begin;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ended));
    found[2 * blockIdx.x + 1] = ended - begun;
  }
  sink[threadIdx.x] += rA[0][0];
}

// ---- Tiles ---------------------------------------------------------------------------------------

// One thread copies tiles of `rows` rows of 128 bytes, with kDepth on their way at any time.
template <int kDepth>
__global__ void tiles(const __grid_constant__ TensorMap map, int rows, int count, int apart,
                      long long* cycles) {
  ATTENTION_ALIGNED_SHARED(unsigned char, tile, 1024);
  __shared__ ptx::Barrier full[kDepth];
  for (auto& barrier : full) ptx::barrier_init(&barrier, 1);
  ptx::barrier_init_fence();
  const auto copy = [&](int i) {
    ptx::barrier_expect(&full[i % kDepth], rows * 128);
    ptx::load_tile(tile + i % kDepth * rows * 128, map, 0, 0, (blockIdx.x * apart + i) * rows, 0,
                   &full[i % kDepth]);
  };
  long long begin = 0;
  for (int i = 0; i < kDepth; ++i) copy(i);
  for (int i = 0; i < count; ++i) {
    ptx::barrier_wait(&full[i % kDepth], i / kDepth % 2);
    if (i == kDepth - 1) begin = clock64();  // the first also waits for the tensor map
    if (i + kDepth < count) copy(i + kDepth);
  }
  if (blockIdx.x == 0) *cycles = clock64() - begin;
}

// Each block copies `count` tiles of 128 rows at once, those that `share` blocks have in common. found: for
// each block, the cycles until the first tile is there, and until all are.
__global__ void first_tiles(const __grid_constant__ TensorMap map, int share, int count,
                            long long* found) {
  constexpr int kMost = 12, kRows = 128;
  ATTENTION_ALIGNED_SHARED(unsigned char, tile, 1024);
  __shared__ ptx::Barrier full[kMost];
  for (auto& barrier : full) ptx::barrier_init(&barrier, 1);
  ptx::barrier_init_fence();
  const int row = blockIdx.x / share / 12 * count * kRows;
  const long long begin = clock64();
  for (int i = 0; i < count; ++i) {
    ptx::barrier_expect(&full[i], kRows * 128);
    ptx::load_tile(tile + i * kRows * 128, map, 0, blockIdx.x / share % 12, row + i * kRows, 0,
                   &full[i]);
  }
  for (int i = 0; i < count; ++i) {
    ptx::barrier_wait(&full[i], 0);
    if (i == 0) found[2 * blockIdx.x] = clock64() - begin;
  }
  found[2 * blockIdx.x + 1] = clock64() - begin;
}

// One thread copies tiles of 32 KB, 6 at a time, of which each group of `share` blocks copies the same
// `span` again and again; each of its blocks begins `skew` tiles after the one before.
__global__ void shared_tiles(const __grid_constant__ TensorMap map, int share, int span, int skew,
                             int count, long long* cycles) {
  constexpr int kDepth = 6, kRows = 256;
  ATTENTION_ALIGNED_SHARED(unsigned char, tile, 1024);
  __shared__ ptx::Barrier full[kDepth];
  for (auto& barrier : full) ptx::barrier_init(&barrier, 1);
  ptx::barrier_init_fence();
  const int group = blockIdx.x / share;
  int next = blockIdx.x % share * skew % span;
  const auto copy = [&](int i) {
    ptx::barrier_expect(&full[i % kDepth], kRows * 128);
    ptx::load_tile(tile + i % kDepth * kRows * 128, map, 0, 0, (group * span + next) * kRows, 0,
                   &full[i % kDepth]);
    next = next + 1 < span ? next + 1 : 0;
  };
  long long begin = 0;
  for (int i = 0; i < kDepth; ++i) copy(i);
  for (int i = 0; i < count; ++i) {
    ptx::barrier_wait(&full[i % kDepth], i / kDepth % 2);
    if (i == 4 * kDepth) begin = clock64();
    if (i + kDepth < count) copy(i + kDepth);
  }
  cycles[blockIdx.x] = clock64() - begin;
}

// Integer multiply-adds, logic, or both in turn, in chains of every eighth of a kind.
template <bool kMultiplies, bool kLogics>
__global__ void in_turn(long long* cycles, unsigned y) {
  unsigned a[8], b[8], sum = 0;
  for (int i = 0; i < 8; ++i) a[i] = y + i + threadIdx.x, b[i] = y * i + threadIdx.x;
  const long long begin = clock64();
#pragma unroll 1
  for (int loop = 0; loop < kChain; ++loop) {
#pragma unroll
    for (int i = 0; i < kChain; ++i) {
      if (kMultiplies) asm volatile("mad.lo.u32 %0, %0, 5, %0;" : "+r"(a[i % 8]));
      if (kLogics) asm volatile("lop3.b32 %0, %0, %1, %1, 0xe4;" : "+r"(b[i % 8]) : "r"(y));
    }
  }
  if (threadIdx.x == 0) *cycles = clock64() - begin;
  for (int i = 0; i < 8; ++i) sum += a[i] + b[i];
  sink[threadIdx.x] = sum;
}

// ---- Requests of several warps ------------------------------------------------------------------

constexpr int kParts = 8;

// Every warp loads kLoads times from shared memory, uses each result in kPlain multiply-adds, and so on,
// kParts x `loops` times. kWidth: 4 or 16 per lane, 1 or 4 wavefronts. found: for each warp, the clock at its
// start and after each part.
template <int kWidth, int kLoads, int kPlain>
__global__ void arbitration(unsigned* found, int loops) {
  __shared__ alignas(16) float words[1024];
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) words[i] = 0.0f;
  const unsigned base = ptx::shared_address(words) + threadIdx.x % 32 * kWidth;
  unsigned at[kParts + 1];
  float sums[kLoads] = {};
  __syncthreads();
  at[0] = clock_now();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll 1
    for (int loop = 0; loop < loops; ++loop) {
      float x[kLoads], y[kLoads], z[kLoads], w[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (kWidth == 4) {
          asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(x[i]) : "r"(base + i * 512));
          y[i] = z[i] = w[i] = x[i];
        } else {
          asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(x[i]), "=f"(y[i]), "=f"(z[i]), "=f"(w[i])
                       : "r"(base + i * 512));
        }
      }
#pragma unroll
      for (int j = 0; j < kPlain; ++j)
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          asm volatile("fma.rn.f32 %0, %1, %2, %0;"
                       : "+f"(sums[i])
                       : "f"(j % 2 ? x[i] : z[i]), "f"(j % 2 ? y[i] : w[i]));
    }
    at[part + 1] = clock_now();
  }
  if (threadIdx.x % 32 == 0)
    for (int i = 0; i <= kParts; ++i) found[threadIdx.x / 32 * (kParts + 1) + i] = at[i];
  for (float x : sums) sink[threadIdx.x] += x;
}

// Every warp asks for kCount x 512 bytes, then waits for the first and for all. kRows: as attention loads
// Q, 64 bytes of 8 rows that are 3 KB apart; otherwise 512 in a row. found: for each warp, the clock at
// its start, after it has issued each load, when the first is there, and when all are.
template <int kCount, bool kRows>
__global__ void outstanding(unsigned* found, const unsigned char* from, bool is_early) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const size_t number = size_t{blockIdx.x} * warps + warp;
  const unsigned char* const at =
      from + (kRows ? (number / 12 * 16 + lane / 4) * 3072 + number % 12 * 256 + lane % 4 * 16
                    : number * kCount * 512 + lane * 16);
  unsigned x[kCount][4], stamps[kCount + 3];
  stamps[0] = clock_now();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                 : "l"(at + (kRows ? i % 4 * 64 + i / 4 * 8 * 3072 : i * 512))
                 : "memory");
    stamps[i + 1] = clock_now();
  }
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("add.u32 %0, %0, %1;" : "+r"(sum) : "r"(x[i][0] ^ x[i][1] ^ x[i][2] ^ x[i][3]));
    if (i == 0 || i == kCount - 1) {
      // The clock is read after the sum is there.
      asm volatile(
          "{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0x9e3779b9;\n@p trap;\nmov.u32 %0, %%clock;\n}"
          : "=r"(stamps[kCount + 1 + (i > 0)])
          : "r"(sum)
          : "memory");
    }
  }
  if (is_early) ptx::wait_for_previous();
  if (lane == 0)
    for (int i = 0; i < kCount + 3; ++i) found[number * (kCount + 3) + i] = stamps[i];
}

// Allows the next kernel at once; every thread copies 16 bytes at a time.
__global__ void copy(const uint4* from, uint4* to, size_t count) {
  ptx::allow_next();
  const size_t all = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += all) {
    const uint4 x = from[i];
    to[i] = x;
    to[i + count] = x;
  }
}

// Every warp of every block executes the same loop. found: for each warp, the clock before and after, and
// its multiprocessor.
enum Loop { kArithmetic, kSharedLoads, kBoth };
template <Loop kWhat>
__global__ void together(unsigned* found, int loops) {
  extern __shared__ float4 words[];
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) words[i] = make_float4(i, 1.0f, 2.0f, 3.0f);
  __syncthreads();
  const unsigned begin = clock_now();
  const float4 a = words[threadIdx.x % 32], b = words[threadIdx.x % 64];
  float4 sum = make_float4(0.0f, 1.0f, 2.0f, 3.0f);
  const auto add = [&](float4 x) {
    sum = make_float4(fmaf(x.x, sum.x, b.x), fmaf(x.y, sum.y, b.y), fmaf(x.z, sum.z, b.z),
                      fmaf(x.w, sum.w, b.w));
  };
#pragma unroll 1
  for (int i = 0; i < loops; ++i) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (kWhat == kArithmetic) {
        add(a), add(a);
      } else {
        const int at = kWhat == kSharedLoads ? threadIdx.x : threadIdx.x / 8;
        const float4 x = words[(at + 37 * j + i) % 1024];
        for (int k = 0; k < (kWhat == kSharedLoads ? 1 : 4); ++k) add(x);
      }
    }
  }
  const unsigned end = clock_now();
  sink[threadIdx.x] = sum.x + sum.y + sum.z + sum.w;
  if (threadIdx.x % 32 != 0) return;
  found += 3 * (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  found[0] = begin, found[1] = end;
  asm("mov.u32 %0, %%smid;" : "=r"(found[2]));
}

__global__ void empty() {}

// ---- Early launches ------------------------------------------------------------------------------

__device__ void spin(long long count) {
  const long long begin = clock64();
  while (clock64() - begin < count) {
  }
}

// A kernel that is launched early: it takes some cycles before it waits for the previous one, and
// some after that. It allows the next one at once or, like the kernels of a batch, after its wait.
template <bool kAllowsFirst>
__global__ void early(int before, int after) {
  if (kAllowsFirst) ptx::allow_next();
  spin(before);
  ptx::wait_for_previous();
  if (!kAllowsFirst) ptx::allow_next();
  spin(after);
}

// Nanoseconds of a clock that all multiprocessors share, at a block's start, after its wait for the
// previous kernel, and at its end.
struct Span {
  unsigned long long start, waited, end;
};

__device__ unsigned long long now_ns() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// A kernel that takes some cycles after its wait, and may allow the next one before them.
__global__ void span(Span* seen, int after, bool allows) {
  Span mine{now_ns()};
  ptx::wait_for_previous();
  mine.waited = now_ns();
  if (allows) ptx::allow_next();
  spin(after);
  mine.end = now_ns();
  if (threadIdx.x == 0) seen[blockIdx.x] = mine;
}

template <bool kStores>
__global__ void cluster_barriers(long long* cycles) {
  __shared__ float there[256];
  long long begin = 0;
  for (int loop = -1; loop < kChain; ++loop) {
    if (loop == 0) begin = clock64();
    if (kStores) ptx::store_to_block(&there[threadIdx.x], 0, 1.0f);
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = clock64() - begin;
}

// How long a warp is held up where it arrives at a cluster's barrier.
__global__ void cluster_arrivals(long long* cycles) {
  long long sum = 0;
  for (int loop = -1; loop < kChain; ++loop) {
    const long long begin = clock64();
    ptx::cluster_arrive();
    if (loop >= 0) sum += clock64() - begin;
    ptx::cluster_wait();
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = sum;
}

// ---- Chains of kernels that pass on data ---------------------------------------------------------

// Every block copies as many bytes at the same time.
__global__ void copy_at_once(const unsigned char* from, unsigned bytes, long long* cycles) {
  ATTENTION_DYNAMIC_SHARED(unsigned char, copied);
  __shared__ ptx::Barrier arrived;
  ptx::barrier_init(&arrived, 1);
  ptx::barrier_init_fence();
  const long long begin = clock64();
  ptx::barrier_expect(&arrived, bytes);
  ptx::copy_bulk(copied, from + size_t{blockIdx.x} * bytes, bytes, &arrived);
  ptx::barrier_wait(&arrived, 0);
  cycles[blockIdx.x] = clock64() - begin;
}

// kSize multiply-adds after the wait. Each kId is a kernel of its own.
template <int kSize, int kId>
__global__ void straight_early(long long* cycles, float y) {
  ptx::allow_next();
  ptx::wait_for_previous();
  float x[kSlots];  // of different values: nvcc would compute equal ones once
  for (int i = 0; i < kSlots; ++i) x[i] = static_cast<float>(i);
  const long long begin = clock64();
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x[i % kSlots]) : "f"(y));
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - begin;
  for (float one : x) sink[threadIdx.x] += one;
}

// What a link does besides loading and waiting.
struct Link {
  bool allows_first, reduces, stores;
  unsigned weights;  // bytes that each block requests before the wait
};

// What a block has seen: cycles, nanoseconds of a clock that all multiprocessors share, its place.
struct Seen {
  long long waited, loaded, reduced, arrived;
  unsigned long long start_ns, waited_ns, end_ns;
  unsigned multiprocessor;
};

// A kernel like those of the decode step. A block asks for weights, waits for the previous kernel,
// loads 768 kRows floats that it has stored, computes moments as a LayerNorm does, and waits for the
// weights; then every thread stores a float. seen: null, or one per block.
template <int kRows>
__global__ void __launch_bounds__(256)
    chain_link(Link is, const unsigned char* weights, const float* from, float* to, Seen* seen) {
  ATTENTION_DYNAMIC_SHARED(unsigned char, copied);
  __shared__ ptx::Barrier arrived;
  __shared__ double moments[2][8];
  const int t = threadIdx.x;
  Seen mine{};
  const auto note = [&](long long& cycles) {
    if (seen) cycles = clock64();
  };
  if (seen) mine.start_ns = now_ns();
  if (t == 0 && is.weights > 0) {
    ptx::barrier_init(&arrived, 1);
    ptx::barrier_init_fence();
    ptx::barrier_expect(&arrived, is.weights);
    ptx::copy_bulk(copied, weights + size_t{blockIdx.x} * is.weights, is.weights, &arrived);
  }
  __syncthreads();
  if (is.allows_first) ptx::allow_next();
  ptx::wait_for_previous();
  if (!is.allows_first) ptx::allow_next();
  if (seen) mine.waited_ns = now_ns();
  note(mine.waited);
  float x[3 * kRows + 1] = {}, y = 0;
#pragma unroll
  for (int i = 0; i < 3 * kRows; ++i) x[i] = __ldcg(from + t + i * 256);
  for (float one : x) y += one;
  if (kRows > 0 && __syncthreads_or(y == 1)) y = 2;  // so all of the block's loads have ended
  note(mine.loaded);
  if (is.reduces) {
    double sum = 0, squares = 0;
    for (float one : x) sum += one, squares += double{one} * one;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      sum += __shfl_xor_sync(~0u, sum, width);
      squares += __shfl_xor_sync(~0u, squares, width);
    }
    if (t % 32 == 0) moments[0][t / 32] = sum, moments[1][t / 32] = squares;
    __syncthreads();
    sum = squares = 0;
    for (int warp = 0; warp < 8; ++warp) sum += moments[0][warp], squares += moments[1][warp];
    y = rsqrtf(static_cast<float>(squares + sum) + 1);
    __syncthreads();
  }
  note(mine.reduced);
  if (is.weights > 0) ptx::barrier_wait(&arrived, 0);
  note(mine.arrived);
  if (is.stores || y == 3) to[blockIdx.x * 256 + t] = y;
  if (seen && t == 0) {
    mine.end_ns = now_ns();
    asm volatile("mov.u32 %0, %%smid;" : "=r"(mine.multiprocessor));
    seen[blockIdx.x] = mine;
  }
}

// ---- What blocks send each other -----------------------------------------------------------------

constexpr int kRanks = 8, kMostWords = 96;

// In each round, every block of a cluster sends `count` words to `to` others, and waits for as many.
__global__ void exchange_in_cluster(long long* cycles, int to, int count) {
  __shared__ unsigned words[2][kRanks][kMostWords];
  __shared__ ptx::Barrier barriers[2];
  const unsigned rank = blockIdx.x % kRanks, bytes = 4 * to * count, t = threadIdx.x;
  if (t == 0) {
    for (auto& barrier : barriers) {
      ptx::barrier_init(&barrier, 1);
      ptx::barrier_init_fence();
      ptx::barrier_expect(&barrier, bytes);
    }
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  long long begin = 0;
  for (unsigned round = 0; round < 2 * kChain; ++round) {
    if (round == kChain) begin = clock64();
    ptx::Barrier& barrier = barriers[round % 2];
    for (int i = 1; i <= to; ++i) {
      if (t < count)
        ptx::send_words<1>(&words[round % 2][rank][t], (rank + i) % kRanks, {round}, &barrier);
    }
    ptx::barrier_wait(&barrier, round / 2 % 2);
    if (t == 0) ptx::barrier_expect(&barrier, bytes);
    __syncthreads();
  }
  if (t == 0 && blockIdx.x == 0) *cycles = clock64() - begin;
  ptx::cluster_arrive();  // no block ends while others send it words
  ptx::cluster_wait();
}

// In each round, every block stores `count` words in global memory, and waits for those of the kBlocks
// blocks of its group, itself among them. A group's blocks are as far apart as there are groups. The
// words are 0 before.
template <int kBlocks>
__global__ void exchange_words(long long* cycles, unsigned* words, int count) {
  const int groups = gridDim.x / kBlocks, t = threadIdx.x;
  long long begin = 0;
  for (int round = 0; round < 2 * kChain; ++round) {
    if (round == kChain) begin = clock64();
    unsigned* const of_round = words + size_t{gridDim.x} * kMostWords * round + t;
    const auto of = [=](int block) { return of_round + block * kMostWords; };
    if (t < count) {
      ptx::store_word(of(blockIdx.x), ~0u);
      for (;;) {
        unsigned found[kBlocks];
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
          found[i] = ptx::load_word(of(i * groups + blockIdx.x % groups));
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) sum += __uint_as_float(~found[i]);
        if (sum == 0) break;  // it is NaN
        // If nothing needed them later, nvcc would wait for some loads before it issues the others.
        unsigned least = found[0];
#pragma unroll
        for (int i = 1; i < kBlocks; ++i) least = min(least, found[i]);
        if (least != 0) break;
      }
    }
    __syncthreads();
  }
  if (t == 0 && blockIdx.x == 0) *cycles = clock64() - begin;
}

// ---- The host's side -----------------------------------------------------------------------------

long long* cycles;  // on the GPU
unsigned long long* nanoseconds;
constexpr size_t kBytes = size_t{1} << 32;
unsigned char* zeros;

// Returns memory of this size that has not been read lately, so none of it is in a cache.
unsigned char* fresh(size_t bytes) {
  static size_t end = kBytes / 2;
  if (end + bytes > kBytes) end = kBytes / 2;
  end += bytes;
  return zeros + end - bytes;
}

double fetch(int at = 0) {
  long long found;
  cudaMemcpy(&found, cycles + at, sizeof(found), cudaMemcpyDeviceToHost);
  return static_cast<double>(found);
}

template <Test kTest, int kApart>
double cycles_of(int threads) {
  double best = 1e30;
  for (int i = 0; i < 4; ++i) {
    chain<kTest, kApart><<<1, threads>>>(cycles, 0, 0);
    best = std::min(best, fetch());
  }
  return best / (kChain * kLoops);
}

template <Test kTest>
void instruction(const char* name) {
  report(std::string(name) + " latency", cycles_of<kTest, 1>(32));
  report(std::string(name) + " rate, 1 warp alone", cycles_of<kTest, kSlots>(32));
  report(std::string(name) + " rate, 1 warp per scheduler", cycles_of<kTest, kSlots>(128));
  report(std::string(name) + " rate, 4 warps per scheduler", cycles_of<kTest, kSlots>(512) / 4);
}

template <int kSize, int kApart = kSlots>
void code_size() {
  for (int warps : {1, 4, 8, 16}) {
    for (int i = 0; i < 2; ++i) straight<kSize, kApart><<<1, 32 * warps>>>(cycles, 0);
    const double share = kSize * std::max(1, warps / 4);
    const std::string name = std::to_string(kSize) + " instructions, each using the result " +
                             std::to_string(kApart) + " before, " + std::to_string(warps);
    report("cycles per instruction, " + name + " warps, first pass", fetch(0) / share);
    report("cycles per instruction, " + name + " warps", fetch(1) / 4 / share);
  }
}

template <int kSums, bool kFromRegisters, int kCount>
double product_cycles(int warpgroups, int blocks = 1, int loops = 64, unsigned seed = 0) {
  const auto kernel = products<kSums, kFromRegisters, kCount>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 66 * 1024);
  for (int i = 0; i < 2; ++i)
    kernel<<<blocks, 128 * warpgroups, 66 * 1024>>>(cycles, loops, seed, nanoseconds);
  return fetch() / loops;
}

template <int kSums, bool kFromRegisters>
void products_of(const char* name) {
  for (int groups : {1, 2, 3}) {
    const std::string full =
        std::string(name) + ", " + std::to_string(groups) + " warpgroups, group of ";
    report(full + "1", product_cycles<kSums, kFromRegisters, 1>(groups));
    report(full + "2", product_cycles<kSums, kFromRegisters, 2>(groups));
    report(full + "4", product_cycles<kSums, kFromRegisters, 4>(groups));
    report(full + "8", product_cycles<kSums, kFromRegisters, 8>(groups));
    report(full + "16", product_cycles<kSums, kFromRegisters, 16>(groups));
  }
}

template <int kDepth>
double tile_cycles(const void* from, int rows, int blocks, int apart, int count) {
  TensorMap map;
  const int64_t sizes[4] = {64, 1, 1 << 20, 1}, strides[3] = {64, 64, 64};
  make_tensor_map(&map, static_cast<const __half*>(from), sizes, strides, {64, 1, rows, 1});
  cudaFuncSetAttribute(tiles<kDepth>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  tiles<kDepth><<<blocks, 1, kDepth * rows * 128 + 1024>>>(map, rows, count, apart, cycles);
  return fetch() / (count - kDepth);
}

// The bytes per cycle that each of 132 blocks gets, on average.
void shared_copies(int share, int span, int skew) {
  TensorMap map;
  constexpr int kCount = 1024, kRows = 256;
  const int64_t sizes[4] = {64, 1, 1 << 20, 1}, strides[3] = {64, 64, 64};
  make_tensor_map(&map, reinterpret_cast<const __half*>(zeros), sizes, strides, {64, 1, kRows, 1});
  constexpr int kShared = 6 * kRows * 128 + 1024;
  cudaFuncSetAttribute(shared_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  for (int i = 0; i < 2; ++i)  // the second time from L2
    shared_tiles<<<kMultiprocessors, 1, kShared>>>(map, share, span, skew, kCount, cycles);
  double sum = 0;
  for (int i = 0; i < kMultiprocessors; ++i) sum += fetch(i);
  report("132 blocks, of which " + std::to_string(share) + " copy the same " +
             std::to_string(32 * span) + " KB, " + std::to_string(32 * skew) + " KB apart",
         (kCount - 24) * kRows * 128.0 * kMultiprocessors / sum, "bytes per cycle");
}

// What 264 blocks find in L2 of what they have all loaded before, in groups of blocks that load the same.
void kept_by_l2(int groups) {
  constexpr int kBlocks = 2 * kMultiprocessors, kRounds = 4, kStep = 32768;
  for (int megabytes : {12, 24, 30, 36, 48, 96}) {
    const size_t steps = (size_t{1} << 20) * megabytes / groups / kStep;
    const auto* const from = reinterpret_cast<const uint4*>(fresh(steps * kStep * groups));
    load_again<<<kBlocks, 256>>>(from, steps * kStep / 16, groups, kRounds, cycles);
    for (int round : {0, kRounds - 1}) {
      double sum = 0;
      for (int i = 0; i < kBlocks; ++i) sum += fetch(i * kRounds + round);
      report(std::to_string(megabytes) + " MB that " + std::to_string(groups) +
                 " groups of blocks load, " + (round > 0 ? "again" : "first") + ": 32 KB",
             sum / kBlocks / steps - 3000);
    }
  }
}

// What the first copies of a launch take, of rows of 12 heads that are in memory, or in L2.
void first_copies(int share, int count) {
  constexpr int kHeads = 12, kRows = 1 << 15;
  TensorMap map;
  const int64_t sizes[4] = {64, kHeads, kRows, 1},
                strides[3] = {64, 64 * kHeads, 64 * kHeads * kRows};
  const int shared = count * 16384 + 1024;
  cudaFuncSetAttribute(first_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 * 1024);
  for (const char* place : {"code", "memory", "L2"}) {  // the first launch only fetches the code
    if (*place != 'L') {
      const auto* const from = reinterpret_cast<const __half*>(fresh(size_t{128} * kHeads * kRows));
      make_tensor_map(&map, from, sizes, strides, {64, 1, 128, 1});
    }
    first_tiles<<<kMultiprocessors, 1, shared>>>(map, share, count, cycles);
    if (*place == 'c') continue;
    double first = 0, all = 0;
    for (int i = 0; i < kMultiprocessors; ++i) first += fetch(2 * i), all += fetch(2 * i + 1);
    const std::string name = "132 blocks that copy " + std::to_string(16 * count) + " KB from " +
                             place + " at once, " + std::to_string(share) + " of them the same: ";
    report(name + "the first 16 KB are there", first / kMultiprocessors);
    report(name + "all are there", all / kMultiprocessors);
  }
}

template <bool kMultiplies, bool kLogics>
void integers_in_turn(const char* name) {
  for (int i = 0; i < 2; ++i) in_turn<kMultiplies, kLogics><<<1, 128>>>(cycles, 3);
  report(std::string(name) + ", 1 warp per scheduler", fetch() / kChain / kChain);
}

// Microseconds per launch in a graph, of all launches in it and all launches of it.
template <typename Launch>
double graph_us(Launch launch, int launches = 200, int graphs = 1) {
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  for (int i = 0; i < launches; ++i) launch(stream);
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&executable, graph, 0);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float ms, best = 1e30f;
  for (int i = 0; i < 5; ++i) {
    cudaEventRecord(begin, stream);
    for (int j = 0; j < graphs; ++j) cudaGraphLaunch(executable, stream);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
    best = std::min(best, ms);
  }
  return best * 1e3 / launches / graphs;
}

double launch_us(int blocks, int threads, int shared) {
  cudaFuncSetAttribute(empty, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  return graph_us([=](cudaStream_t on) { empty<<<blocks, threads, shared, on>>>(); });
}

// A kernel's microseconds, with 6,000 cycles before its wait, after it, both or neither.
template <bool kAllowsFirst>
void early_launches(const char* name) {
  for (int shared : {0, 48 * 1024, 200 * 1024}) {  // the last ones do not fit beside each other
    for (int cycles : {0, 1, 2, 3}) {
      const int before = cycles % 2 * 6000, after = cycles / 2 * 6000;
      const auto us = graph_us([=](cudaStream_t on) {
        launch_early(early<kAllowsFirst>, 132, 1, 256, shared, on, before, after);
      });
      report(std::string("early launch, next allowed ") + name + " the wait, " +
                 std::to_string(shared / 1024) + " KB, " + std::to_string(before) + " + " +
                 std::to_string(after) + " cycles",
             us, "us");
    }
  }
}

struct Shape {
  int blocks, cluster, shared;
};

// Calls of two kernels, of which the second starts early, with three ordinary kernels between two
// calls, as the clock has them: the microseconds that each kernel adds, and what blocks see.
void calls(const Shape& first, const Shape& second) {
  constexpr int kCalls = 100, kMost = 1024, kAfter = 6000;
  Span* seen;  // of the first, the second and the third of the others
  cudaMalloc(&seen, 3 * kCalls * kMost * sizeof(Span));
  const auto us = [&](int kernels) {
    int call = 0;
    return graph_us(
        [&](cudaStream_t on) {
          Span* const mine = seen + call++ % kCalls * 3 * kMost;
          const auto launch = [&](const Shape& is, Span* to, bool allows) {
            launch_early(span, is.blocks, 1, 256, is.shared, on, to, kAfter, allows);
          };
          if (kernels > 0) launch(first, mine, true);
          if (kernels > 1) launch(second, mine + kMost, false);
          for (int i = 0; i < 3; ++i) span<<<24, 256, 0, on>>>(mine + 2 * kMost, 0, false);
        },
        kCalls);
  };
  const std::string name = "call of " + std::to_string(first.blocks) + " blocks with " +
                           std::to_string(first.shared >> 10) + " KB, then " +
                           std::to_string(second.blocks) + " with " +
                           std::to_string(second.shared >> 10) + " KB, of 6000 cycles: ";
  const double others = us(0), one = us(1), both = us(2);
  report(name + "the others", others, "us");
  report(name + "the first adds", one - others, "us");
  report(name + "the second adds", both - one, "us");
  std::vector<Span> all(3 * kCalls * kMost);
  cudaMemcpy(all.data(), seen, all.size() * sizeof(Span), cudaMemcpyDeviceToHost);
  cudaFree(seen);
  double starts[2] = {}, lasts[2] = {}, waited = 0;
  for (int call = 1; call < kCalls; ++call) {
    const Span* const mine = &all[size_t{3} * call * kMost];
    const auto by = [](unsigned long long Span::* of) {
      return [of](const Span& a, const Span& b) { return a.*of < b.*of; };
    };
    const auto least = [&](int of, int blocks, unsigned long long Span::* at) {
      return *std::min_element(mine + of * kMost, mine + of * kMost + blocks, by(at)).*at;
    };
    const auto most = [&](int of, int blocks, unsigned long long Span::* at) {
      return *std::max_element(mine + of * kMost, mine + of * kMost + blocks, by(at)).*at;
    };
    const auto add = [](double& to, unsigned long long at, unsigned long long from) {
      to += static_cast<double>(static_cast<long long>(at - from)) / 1e3 / (kCalls - 1);
    };
    const auto allowed = most(0, first.blocks, &Span::waited);
    const auto ended = most(0, first.blocks, &Span::end);
    add(starts[0], least(1, second.blocks, &Span::start), allowed);
    add(lasts[0], most(1, second.blocks, &Span::start), allowed);
    add(starts[1], least(1, second.blocks, &Span::start), ended);
    add(lasts[1], most(1, second.blocks, &Span::start), ended);
    add(waited, most(1, second.blocks, &Span::waited), ended);
  }
  report(name + "the second's first block starts, after it is allowed", starts[0], "us");
  report(name + "the second's last block starts, after it is allowed", lasts[0], "us");
  report(name + "the second's first block starts, after the first's end", starts[1], "us");
  report(name + "the second's last block starts, after the first's end", lasts[1], "us");
  report(name + "the second's last wait ends, after the first's end", waited, "us");
}

// What a call's launches cost, by what its kernels leave each other of a multiprocessor.
void calls_of_two() {
  calls({24, 1, 0}, {24, 1, 0});
  calls({24, 1, 0}, {24, 1, 200 << 10});         // on other multiprocessors, another division of L1
  calls({96, 1, 48 << 10}, {48, 1, 200 << 10});  // there is room for 36
  calls({132, 1, 0}, {132, 1, 0});
  calls({132, 1, 48 << 10}, {132, 1, 96 << 10});
  calls({132, 1, 0}, {132, 1, 200 << 10});
  calls({132, 1, 48 << 10}, {132, 1, 200 << 10});  // there is room for none
  calls({396, 1, 48 << 10}, {132, 1, 200 << 10});
  for (int shared : {100 * 1024, 200 * 1024}) {
    int launches = 0;
    cudaFuncSetAttribute(empty, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
    const double us = graph_us(
        [&](cudaStream_t on) { empty<<<kMultiprocessors, 256, launches++ % 2 * shared, on>>>(); });
    report(
        "launch, 132 blocks of 256 threads, 0 and " + std::to_string(shared >> 10) + " KB in turn",
        us, "us");
  }
}

// Microseconds per kernel of a chain whose kernels have the given shapes in turn: what differs in
// clusters or shared memory may not start early.
void early_shapes(const char* name, const std::vector<Shape>& shapes) {
  for (bool allows_first : {true, false}) {
    for (int before : {0, 6000}) {
      int launches = 0;
      const auto us = graph_us([&](cudaStream_t on) {
        const Shape& shape = shapes[launches++ % shapes.size()];
        launch_early(allows_first ? early<true> : early<false>, shape.blocks, shape.cluster, 256,
                     shape.shared, on, before, 0);
      });
      report(std::string("early launch, ") + name + ", next allowed " +
                 (allows_first ? "before" : "after") + " the wait, " + std::to_string(before) +
                 " cycles before it",
             us, "us");
    }
  }
}

// The cycles of the slowest block and of all, on average.
void copies_at_once(int blocks, int kilobytes) {
  constexpr int kTimes = 20;
  const int bytes = kilobytes * 1024;
  std::vector<long long> found(blocks);
  double slowest = 0, mean = 0;
  cudaFuncSetAttribute(copy_at_once, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  for (int i = -1; i < kTimes; ++i) {  // the first also fetches the code
    copy_at_once<<<blocks, 1, bytes>>>(fresh(size_t{1} * blocks * bytes), bytes, cycles);
    cudaMemcpy(found.data(), cycles, 8 * blocks, cudaMemcpyDeviceToHost);
    if (i < 0) continue;
    slowest += static_cast<double>(*std::max_element(found.begin(), found.end())) / kTimes;
    for (long long one : found) mean += static_cast<double>(one) / kTimes / blocks;
  }
  const std::string name = "copy of " + std::to_string(kilobytes) + " KB from memory by each of " +
                           std::to_string(blocks) + " blocks, ";
  report(name + "the slowest", slowest);
  report(name + "on average", mean);
}

template <int kSize>
void code_of_others() {
  constexpr decltype(&straight_early<kSize, 0>) kKernels[] = {
      straight_early<kSize, 0>, straight_early<kSize, 1>, straight_early<kSize, 2>,
      straight_early<kSize, 3>, straight_early<kSize, 4>};
  for (int kernels : {1, 5}) {
    int launches = 0;
    graph_us([&](cudaStream_t on) {
      launch_early(kKernels[launches++ % kernels], kMultiprocessors, 1, 256, 0, on, cycles, 0);
    });
    double mean = 0;
    for (int i = 0; i < kMultiprocessors; ++i) mean += fetch(i) / kMultiprocessors / (2 * kSize);
    report("cycles per instruction, " + std::to_string(kSize) + " instructions after a wait, " +
               std::to_string(kernels) + (kernels > 1 ? " kernels in turn" : " kernel"),
           mean);
  }
}

// Microseconds per kernel and, in a second run, what blocks see, on average over the kernels.
template <int kRows>
void links(int blocks, const Link& is) {
  constexpr int kLinks = 200, kFirst = 20;
  float* floats;  // those of two kernels
  Seen* seen;
  const int each = blocks * 256;
  cudaMalloc(&floats, 2 * each * sizeof(float));
  cudaMalloc(&seen, kLinks * blocks * sizeof(Seen));
  cudaMemset(floats, 0, 2 * each * sizeof(float));
  const auto us = [&](bool sees) {
    int i = 0;
    return graph_us(
        [&](cudaStream_t on) {
          launch_early(chain_link<kRows>, blocks, 1, 256, is.weights, on, is,
                       fresh(size_t{is.weights} * blocks), floats + i % 2 * each,
                       floats + (i + 1) % 2 * each, sees ? seen + i * blocks : nullptr);
          ++i;
        },
        kLinks);
  };
  std::string name = "chain of " + std::to_string(blocks) + " blocks";
  if (is.stores) name += ", stores";
  if (kRows > 0) name += ", loads " + std::to_string(3 * kRows) + " KB";
  if (is.reduces) name += ", moments";
  if (is.weights > 0) name += ", " + std::to_string(is.weights / 1024) + " KB of weights";
  name += is.allows_first ? ", next allowed before the wait: " : ", next allowed after the wait: ";
  report(name + "each", us(false), "us");
  us(true);
  std::vector<Seen> all(kLinks * blocks);
  cudaMemcpy(all.data(), seen, all.size() * sizeof(Seen), cudaMemcpyDeviceToHost);
  cudaFree(floats);
  cudaFree(seen);
  double started = 0, waited = 0, loaded = 0, reduced = 0, arrived = 0, most = 0;
  for (int i = kFirst; i < kLinks; ++i) {
    Seen slowest{};
    unsigned long long previous_end = 0, first_waited = ~0ull;
    int counts[256] = {};
    for (int block = 0; block < blocks; ++block) {
      const Seen& one = all[i * blocks + block];
      previous_end = std::max(previous_end, all[(i - 1) * blocks + block].end_ns);
      first_waited = std::min(first_waited, one.waited_ns);
      slowest.start_ns = std::max(slowest.start_ns, one.start_ns);
      slowest.loaded = std::max(slowest.loaded, one.loaded - one.waited);
      slowest.reduced = std::max(slowest.reduced, one.reduced - one.loaded);
      slowest.arrived = std::max(slowest.arrived, one.arrived - one.reduced);
      slowest.multiprocessor = std::max<int>(slowest.multiprocessor, ++counts[one.multiprocessor]);
    }
    const auto us_from = [&](unsigned long long ns) {
      return static_cast<double>(static_cast<long long>(ns - previous_end)) / 1e3;
    };
    constexpr double kShare = 1.0 / (kLinks - kFirst);
    started += kShare * us_from(slowest.start_ns);
    waited += kShare * us_from(first_waited);
    loaded += kShare * static_cast<double>(slowest.loaded);
    reduced += kShare * static_cast<double>(slowest.reduced);
    arrived += kShare * static_cast<double>(slowest.arrived);
    most += kShare * slowest.multiprocessor;
  }
  report(name + "start of the last block, after the previous end", started, "us");
  report(name + "end of the first wait, after the previous end", waited, "us");
  if (kRows > 0) report(name + "loads", loaded);
  if (is.reduces) report(name + "moments", reduced);
  if (is.weights > 0) report(name + "wait for weights", arrived);
  report(name + "most blocks on a multiprocessor", most, "blocks");
}

// The clock after some tenths of a second of products, by how busy they keep the tensor cores.
template <int kSums, bool kFromRegisters, int kCount>
void clock_under(const char* name, int warpgroups) {
  double found = 0, ghz = 0;
  for (int i = 0; i < 60; ++i) {
    constexpr int kGroups = 24000 / kCount;
    found = product_cycles<kSums, kFromRegisters, kCount>(warpgroups, kMultiprocessors, kGroups,
                                                          0x5bd1e995);
    unsigned long long ns;
    cudaMemcpy(&ns, nanoseconds, sizeof(ns), cudaMemcpyDeviceToHost);
    ghz = found * kGroups / static_cast<double>(ns);
  }
  const double busy = warpgroups * kCount * kSums / found;  // a product takes kSums cycles
  report(std::string("busy tensor cores, ") + name, busy, "of 1");
  report(std::string("clock, ") + name, ghz, "GHz");
}

// The cycles of an instruction beside products, and the clock if all multiprocessors are busy.
template <Test kTest, int kApart, int kSums, bool kFromRegisters>
void beside_products(const std::string& name, bool all) {
  const auto kernel = beside<kTest, kApart, kSums, kFromRegisters>;
  const int loops = all ? 10'000 : 1000;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 66 * 1024);
  for (int i = 0; i < (all ? 200 : 2); ++i)
    kernel<<<all ? kMultiprocessors : 1, 256, 66 * 1024>>>(cycles, loops, 0x5bd1e995);
  report(name, fetch() / (kChain * loops));
  report(name + ", busy tensor cores", fetch(1) * kSums / fetch(), "of 1");
  report(name + ", clock", fetch() / fetch(2), "GHz");
}

template <Test kTest, int kApart = 16>
void beside_each(const std::string& name, bool all = false) {
  beside_products<kTest, kApart, 0, false>(name + " without products", all);
  beside_products<kTest, kApart, 32, true>(name + " beside 64x64x16 from registers", all);
  beside_products<kTest, kApart, 32, false>(name + " beside 64x64x16 from shared memory", all);
  beside_products<kTest, kApart, 64, true>(name + " beside 64x128x16 from registers", all);
}

template <int kSums, int kCount, bool kFromRegisters>
void issue_ahead() {
  const auto kernel = issue<kSums, kCount, kFromRegisters>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 66 * 1024);
  constexpr const char* kWhat[] = {"issuing the first", "issuing the second",
                                   "waiting for the first", "waiting for the second"};
  for (int warpgroups : {1, 2}) {
    kernel<<<1, 128 * warpgroups, 66 * 1024>>>(cycles, 32);
    for (int i = 0; i < 4; ++i)
      report(std::to_string(warpgroups) + " warpgroups, two groups of " + std::to_string(kCount) +
                 " 64x" + std::to_string(2 * kSums) + "x16, the first from " +
                 (kFromRegisters ? "registers, " : "shared memory, ") + kWhat[i],
             fetch(i) / 32);
  }
}

template <int kPlain, bool kCopies>
void mixed_clock(const unsigned char* from) {
  const auto kernel = mixed<kPlain, kCopies>;
  constexpr int kSmem = (64 + 32 + 1) * 1024, kLoops = 100'000'000 / (1000 + 3 * kPlain);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  for (int i = 0; i < 6; ++i) kernel<<<kMultiprocessors, 384, kSmem>>>(cycles, from, kLoops);
  double found = 0, ns = 0;
  for (int i = 0; i < kMultiprocessors; ++i) found += fetch(2 * i), ns += fetch(2 * i + 1);
  const std::string name = std::to_string(kPlain) + " instructions between groups of 12 products" +
                           (kCopies ? ", with copies" : "");
  report(name + ": busy tensor cores", 2 * 12 * 32.0 * kLoops * kMultiprocessors / found, "of 1");
  report(name + ": clock", found / ns, "GHz");
}

// The clock in the first milliseconds of products after a rest.
template <int kPlain>
void clock_after_rest() {
  const auto kernel = mixed<kPlain, false>;
  constexpr int kSmem = (64 + 32 + 1) * 1024;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  for (int us : {20, 100, 1000, 5000, 50'000}) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const int loops = us * 1800 / (1000 + 3 * kPlain) + 1;
    straight<512, kSlots><<<kMultiprocessors, 512>>>(cycles, 0);  // awake, but without products
    kernel<<<kMultiprocessors, 384, kSmem>>>(cycles, zeros, loops);
    double found = 0, ns = 0;
    for (int i = 0; i < kMultiprocessors; ++i) found += fetch(2 * i), ns += fetch(2 * i + 1);
    const std::string name = std::to_string(kPlain) +
                             " instructions between groups of 12 products, " + std::to_string(us) +
                             " us after a rest: ";
    report(name + "busy tensor cores", 2 * 12 * 32.0 * loops * kMultiprocessors / found, "of 1");
    report(name + "clock", found / ns, "GHz");
  }
}

template <bool kCopies>
void mixed_clocks() {
  std::vector<unsigned> words(1 << 19);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<unsigned>(i) * 2654435761u;
  unsigned char* const from = fresh(words.size() * 4);
  cudaMemcpy(from, words.data(), words.size() * 4, cudaMemcpyHostToDevice);
  mixed_clock<0, kCopies>(from);
  mixed_clock<64, kCopies>(from);
  mixed_clock<128, kCopies>(from);
  mixed_clock<256, kCopies>(from);
  mixed_clock<512, kCopies>(from);
  mixed_clock<1024, kCopies>(from);
}

// What the time of the decode step's chain depends on.
void decode_step() {
  for (bool stores : {false, true}) {
    auto* const lines = reinterpret_cast<unsigned*>(fresh(64 * 4096));
    touch<<<kMultiprocessors, 1>>>(lines, 1024, 64, false);
    if (stores) touch<<<kMultiprocessors, 1>>>(lines, 1024, 64, true);
    for (const char* again : {"", ", again"}) {
      chase<<<1, 1>>>(cycles, lines, 1024, 64);
      const std::string name = stores ? "stored" : "loaded";
      report("load from L2 after others have " + name + again, fetch() / 64);
    }
  }
  const size_t most = size_t{64} * 1024 * kMultiprocessors * 18;  // bytes that read() reads evenly
  cudaStream_t other;
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  for (int rounds : {0, 4}) {
    const auto* const from = reinterpret_cast<const uint4*>(fresh(most));
    const auto* const lines = reinterpret_cast<const unsigned*>(fresh(16 * 4096));
    read<<<kMultiprocessors - 1, 1024, 0, other>>>(from, most / 16, rounds);
    chase_l2<<<1, 1>>>(cycles, lines, 1024, 16, 10);
    report(std::string("load from L2") + (rounds > 0 ? " while memory is read" : ", nothing else"),
           fetch() / 160);
    cudaStreamSynchronize(other);
  }
  for (int blocks : {1, 96, kMultiprocessors})
    for (int kilobytes : {4, 12, 24, 48, 96, 192}) copies_at_once(blocks, kilobytes);
  for (int rounds : {4, 9, 18}) {
    const size_t bytes = size_t{64} * 1024 * kMultiprocessors * rounds;
    const double us = graph_us(
        [=](cudaStream_t on) {
          const auto* const from = reinterpret_cast<const uint4*>(fresh(bytes));
          read<<<kMultiprocessors, 1024, 0, on>>>(from, bytes / 16, 1);
        },
        16);
    report("read of " + std::to_string(bytes / 1'000'000) + " MB from memory", us, "us");
  }
  early_shapes("0 and 96 KB", {{132, 1, 0}, {132, 1, 96 << 10}});
  early_shapes("48 and 96 KB", {{132, 1, 48 << 10}, {132, 1, 96 << 10}});
  early_shapes("clusters of 8", {{128, 8, 0}});
  early_shapes("clusters of 8 and blocks of 48 KB", {{96, 8, 0}, {132, 1, 48 << 10}});
  early_shapes("the step's kernels in float32 for 1 row", {{144, 1, 52 << 10},
                                                           {96, 8, 5 << 10},
                                                           {96, 1, 28 << 10},
                                                           {96, 1, 102 << 10},
                                                           {96, 1, 100 << 10}});
  early_shapes("the step's kernels in bfloat16 for 8 rows", {{72, 1, 72 << 10},
                                                             {192, 2, 5 << 10},
                                                             {96, 1, 16 << 10},
                                                             {96, 1, 72 << 10},
                                                             {96, 1, 52 << 10}});
  code_of_others<512>();
  code_of_others<1024>();
  code_of_others<2048>();
  links<0>(kMultiprocessors, {true, false, false, 0});
  links<0>(kMultiprocessors, {true, false, true, 0});
  links<1>(kMultiprocessors, {true, false, false, 0});
  links<1>(kMultiprocessors, {true, false, true, 0});
  links<1>(kMultiprocessors, {true, true, true, 0});
  links<8>(kMultiprocessors, {true, false, true, 0});
  links<8>(kMultiprocessors, {true, true, true, 0});
  for (unsigned weights : {24u << 10, 48u << 10, 96u << 10}) {
    links<1>(96, {true, true, true, weights});
    links<8>(96, {false, true, true, weights});
  }
}

// The clocks that the warps of some blocks have stored, from the earliest of their block on.
struct Stamps {
  std::vector<std::vector<double>> at;  // by stamp, then by warp

  Stamps(int blocks, int warps, int stamps) : at(stamps) {
    std::vector<unsigned> found(static_cast<size_t>(blocks) * warps * stamps);
    cudaMemcpy(found.data(), cycles, found.size() * sizeof(unsigned), cudaMemcpyDeviceToHost);
    for (int block = 0; block < blocks; ++block) {
      const unsigned* mine = &found[static_cast<size_t>(block) * warps * stamps];
      int begin = 0;
      for (int warp = 0; warp < warps; ++warp)
        begin = std::min(begin, static_cast<int>(mine[warp * stamps] - mine[0]));
      for (int i = 0; i < warps * stamps; ++i)
        at[i % stamps].push_back(static_cast<int>(mine[i] - mine[0]) - begin);
    }
  }
};

// When the first and the last warp end, and those of each scheduler on average.
template <int kWidth, int kPlain>
void arbitrations(const char* loads) {
  constexpr int kLoops = 64;
  for (int warps : {4, 5, 8, 16}) {
    for (int i = 0; i < 2; ++i)
      arbitration<kWidth, 4, kPlain>
          <<<1, 32 * warps>>>(reinterpret_cast<unsigned*>(cycles), kLoops);
    const auto ends = Stamps(1, warps, kParts + 1).at.back();
    const std::string name = std::string("4 loads of ") + loads + " and " +
                             std::to_string(4 * kPlain) + " multiply-adds in a loop, " +
                             std::to_string(warps) + " warps, ";
    report(name + "the first ends", *std::min_element(ends.begin(), ends.end()));
    report(name + "the last ends", *std::max_element(ends.begin(), ends.end()));
    for (int scheduler = 0; scheduler < 4; ++scheduler) {
      double sum = 0, count = 0;
      for (int warp = scheduler; warp < warps; warp += 4) sum += ends[warp], ++count;
      report(name + "scheduler " + std::to_string(scheduler), sum / count);
    }
  }
}

// Medians of all warps, and the latest one's.
void report_loads(const std::string& name, int blocks, int warps, int count) {
  Stamps found(blocks, warps, count + 3);
  for (int i : {1, count / 2, count, count + 1, count + 2}) {
    auto& one = found.at[i];
    std::sort(one.begin(), one.end());
    const std::string what = i <= count       ? "load " + std::to_string(i) + " issued"
                             : i == count + 1 ? "the first there"
                                              : "all there";
    report(name + what, one[one.size() / 2]);
    report(name + what + ", the latest warp", one.back());
  }
}

template <int kCount, bool kRows>
void outstanding_loads(const char* what) {
  const auto kernel = outstanding<kCount, kRows>;
  auto* const stamps = reinterpret_cast<unsigned*>(cycles);
  for (int blocks : {1, kMultiprocessors}) {
    for (int warps : {1, 4, 8, 12}) {
      const size_t bytes = size_t{kCount} * 512 * blocks * warps + (1 << 20);
      kernel<<<blocks, 32 * warps>>>(stamps, fresh(bytes), false);  // fetches the code
      unsigned char* const from = fresh(bytes);
      for (const char* where : {"memory", "L2", "memory after a flush"}) {
        // Stores of more than L2 holds: its lines have to be written to memory before others come.
        if (std::string(where) == "memory after a flush") cudaMemset(zeros, 0, size_t{1} << 28);
        kernel<<<blocks, 32 * warps>>>(stamps, from, false);
        report_loads(std::to_string(kCount) + " loads of " + what + " from " + where + ", " +
                         std::to_string(blocks) + " blocks of " + std::to_string(warps) +
                         " warps, ",
                     blocks, warps, kCount);
      }
    }
  }
}

// The loads of a kernel that starts early, while the previous one copies.
void loads_beside_copies() {
  for (bool is_flushed : {false, true}) {
    for (int kilobytes : {0, 1536, 3072, 6144, 12288}) {
      const size_t bytes = size_t{1024} * kilobytes;
      const auto* const from = reinterpret_cast<const uint4*>(fresh(bytes));
      auto* const to = reinterpret_cast<uint4*>(fresh(2 * bytes));
      if (is_flushed) cudaMemset(zeros, 0, size_t{1} << 28);
      copy<<<3 * kMultiprocessors, 256>>>(from, to, bytes / 16);
      launch_early(outstanding<8, true>, kMultiprocessors, 1, 256, 0, nullptr,
                   reinterpret_cast<unsigned*>(cycles), fresh(8 << 20), true);
      report_loads("8 loads of 64 bytes of 8 rows while " + std::to_string(kilobytes) +
                       " KB are copied twice" + (is_flushed ? ", after a flush, " : ", "),
                   kMultiprocessors, 8, 8);
    }
  }
}

// When the blocks of one multiprocessor end, the older first: their last warps.
template <Loop kWhat>
void blocks_together(const char* what) {
  for (int threads : {128, 256, 512}) {
    for (int count : {1, 2, 3}) {
      const int bytes = 200000 / count, warps = threads / 32;
      allow_shared(reinterpret_cast<const void*>(together<kWhat>), bytes);
      for (int i = 0; i < 2; ++i)
        together<kWhat><<<count * kMultiprocessors, threads, bytes>>>(
            reinterpret_cast<unsigned*>(cycles), 400);
      std::vector<unsigned> found(3 * count * kMultiprocessors * warps);
      cudaMemcpy(found.data(), cycles, found.size() * sizeof(unsigned), cudaMemcpyDeviceToHost);
      for (int block = 0, nth = 0; block < count * kMultiprocessors; ++block) {
        const unsigned* mine = &found[3 * block * warps];
        if (mine[2] != found[2]) continue;
        int end = 0;
        for (int warp = 0; warp < warps; ++warp)
          end = std::max(end, static_cast<int>(mine[3 * warp + 1] - found[0]));
        report(std::string(what) + ", " + std::to_string(count) + " blocks of " +
                   std::to_string(threads) + " threads, block " + std::to_string(nth++) + " ends",
               end);
      }
    }
  }
}

// What warps cost each other that ask for the same unit.
void several_warps() {
  arbitrations<4, 1>("1 wavefront");
  arbitrations<4, 4>("1 wavefront");
  arbitrations<16, 1>("4 wavefronts");
  arbitrations<16, 4>("4 wavefronts");
  arbitrations<16, 16>("4 wavefronts");
  outstanding_loads<16, false>("512 bytes in a row");
  outstanding_loads<8, true>("64 bytes of 8 rows");
  loads_beside_copies();
  blocks_together<kArithmetic>("multiply-adds");
  blocks_together<kSharedLoads>("loads from shared memory");
  blocks_together<kBoth>("loads with 16 multiply-adds each");
}

// The cycles of a round in which blocks send each other words.
template <int kBlocks>
void exchanges_of_words(int groups, int count) {
  const size_t bytes = size_t{4} * 2 * kChain * kBlocks * groups * kMostWords;
  for (int i = 0; i < 3; ++i) {
    cudaMemset(zeros, 0, bytes);
    exchange_words<kBlocks>
        <<<kBlocks * groups, 256>>>(cycles, reinterpret_cast<unsigned*>(zeros), count);
  }
  report("exchange of " + std::to_string(count) + " words through memory, groups of " +
             std::to_string(kBlocks) + " of " + std::to_string(kBlocks * groups) + " blocks",
         fetch() / kChain);
  cudaMemset(zeros, 0, bytes);
}

void exchanges() {
  for (int clusters : {1, 12}) {
    for (int to : {1, 8}) {
      for (int count : {1, 32, kMostWords}) {
        for (int i = 0; i < 3; ++i)
          launch_early(exchange_in_cluster, kRanks * clusters, kRanks, 256, 0, nullptr, cycles, to,
                       count);
        report("exchange of " + std::to_string(count) + " words with " + std::to_string(to) +
                   " blocks of a cluster, of " + std::to_string(clusters),
               fetch() / kChain);
      }
    }
  }
  exchanges_of_words<2>(1, 1);
  exchanges_of_words<2>(1, kMostWords);
  exchanges_of_words<12>(1, kMostWords);
  exchanges_of_words<12>(kRanks, 1);
  exchanges_of_words<12>(kRanks, kMostWords);
}

int main() {
  cudaMalloc(&cycles, 1 << 18);
  cudaMalloc(&nanoseconds, sizeof(*nanoseconds));
  cudaMalloc(&zeros, kBytes);
  cudaMemset(zeros, 0, kBytes);
  instruction<kFma>("FFMA");
  instruction<kMultiply>("FMUL");
  instruction<kAdd>("FADD");
  instruction<kIntegerMad>("IMAD");
  instruction<kLogic>("LOP3");
  instruction<kMax>("FMNMX");
  instruction<kPermute>("PRMT");
  instruction<kPack>("F2FP");
  instruction<kUnpack>("HADD2.F32");
  instruction<kExponential>("MUFU.EX2");
  instruction<kShuffle>("SHFL");
  instruction<kMmaTf32>("HMMA.1688.TF32");
  instruction<kMmaFloat16>("HMMA.16816");
  instruction<kLoad>("LDS, 4-way conflict");
  instruction<kLoad16>("LDS.128");
  instruction<kLoadMatrix>("LDSM.4");
  instruction<kConstant>("LDC and a shift");
  instruction<kDoubleAdd>("DADD");
  instruction<kDoubleFma>("DFMA");
  instruction<kDoubleConvert>("F2F.F64.F32 and back");
  report("fence.proxy.async", cycles_of<kFence, 1>(32));
  report("mbarrier, arrival and wait by one thread", cycles_of<kArrive, 1>(1));
  for (int warps : {1, 4, 8, 16, 32})
    report("barrier of " + std::to_string(warps) + " warps", cycles_of<kBarrier, 1>(32 * warps));
  code_size<512>();
  code_size<1024>();
  code_size<2048>();
  code_size<2560>();
  code_size<3072>();
  code_size<4096>();
  code_size<8192>();
  code_size<12288>();
  code_size<1024, 2>();
  code_size<4096, 2>();
  code_size<1024, 1>();
  code_size<4096, 1>();
  products_of<16, false>("wgmma 64x32x16 from shared memory");
  products_of<32, false>("wgmma 64x64x16 from shared memory");
  products_of<64, false>("wgmma 64x128x16 from shared memory");
  products_of<16, true>("wgmma 64x32x16 from registers");
  products_of<32, true>("wgmma 64x64x16 from registers");
  products_of<64, true>("wgmma 64x128x16 from registers");
  size_t at = 0;
  for (size_t step : {size_t{256}, size_t{4096}, size_t{1} << 20}) {
    for (const char* from : {"memory", "L2"}) {  // the second time
      chase<<<1, 1>>>(cycles, reinterpret_cast<unsigned*>(zeros + at), step / 4, 64);
      report(std::string("load from ") + from + ", " + std::to_string(step) + " bytes apart",
             fetch() / 64);
    }
    at += 64 * step;
  }
  for (int i = 0; i < 2; ++i) chase_l1<<<1, 1>>>(cycles, reinterpret_cast<unsigned*>(zeros));
  report("load from L1", fetch() / kChain);
  at = size_t{1} << 30;
  for (int rows : {8, 32, 64, 128}) {
    for (const char* from : {"memory", "L2"})
      report("tile of " + std::to_string(rows) + " rows of 128 bytes from " + from,
             tile_cycles<1>(zeros + at, rows, 1, 0, 33));
    at += size_t{1} << 24;
  }
  for (int blocks : {1, kMultiprocessors}) {  // 64 tiles of 16 KB in all, so from L2
    const std::string name = "tile of 128 rows, " + std::to_string(blocks) + " blocks, ";
    tile_cycles<1>(zeros, 128, kMultiprocessors, 2, 66);
    report(name + "1 on its way", tile_cycles<1>(zeros, 128, blocks, 2, 66));
    report(name + "2 on their way", tile_cycles<2>(zeros, 128, blocks, 2, 66));
    report(name + "4 on their way", tile_cycles<4>(zeros, 128, blocks, 2, 66));
    report(name + "8 on their way", tile_cycles<8>(zeros, 128, blocks, 2, 66));
  }
  for (int share : {1, 2, 4, 12, 132}) shared_copies(share, 6, 0);
  for (int skew : {0, 1, 5}) shared_copies(12, 64, skew);
  integers_in_turn<true, false>("IMAD");
  integers_in_turn<false, true>("LOP3");
  integers_in_turn<true, true>("IMAD and LOP3 in turn");
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (int blocks : {2, 2 * kMultiprocessors}) {
    const int rounds = blocks == 2 ? 2 : 60;
    for (int round = 0; round < 2; ++round) {  // the first fills L2
      cudaEventRecord(begin);
      read<<<blocks, 1024>>>(reinterpret_cast<uint4*>(zeros), 24'000'000 / 16, rounds);
      cudaEventRecord(end);
    }
    float ms;
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
    report("24 MB from L2, " + std::to_string(blocks) + " blocks", 24e6 * rounds / ms / 1e6,
           "GB/s");
  }
  for (int shared : {0, 100 * 1024, 200 * 1024}) {
    for (int blocks : {1, 132, 264, 528, 1056})
      report("launch, " + std::to_string(blocks) + " blocks of 256 threads, " +
                 std::to_string(shared / 1024) + " KB",
             launch_us(blocks, 256, shared), "us");
  }
  early_launches<true>("before");
  early_launches<false>("after");
  calls_of_two();
  const auto one_empty = [](cudaStream_t on) { empty<<<1, 256, 0, on>>>(); };
  for (int launches : {1, 2, 60})
    report("graph of " + std::to_string(launches) + " empty kernels",
           graph_us(one_empty, launches, 100) * launches, "us");
  for (int size : {2, 8}) {
    const std::string name = "barrier of a cluster of " + std::to_string(size) + " blocks";
    for (int i = 0; i < 2; ++i)
      launch_early(cluster_barriers<false>, size, size, 256, 0, nullptr, cycles);
    report(name, fetch() / kChain);
    for (int i = 0; i < 2; ++i)
      launch_early(cluster_barriers<true>, size, size, 256, 0, nullptr, cycles);
    report(name + ", after stores to one of them", fetch() / kChain);
    for (int i = 0; i < 2; ++i) launch_early(cluster_arrivals, size, size, 256, 0, nullptr, cycles);
    report(name + ", the arrival", fetch() / kChain);
  }
  several_warps();
  exchanges();
  decode_step();
  clock_under<32, false, 1>("groups of 1 64x64x16 from shared memory, 1 warpgroup", 1);
  clock_under<32, true, 1>("groups of 1 64x64x16 from registers, 1 warpgroup", 1);
  clock_under<32, true, 4>("groups of 4 64x64x16 from registers, 1 warpgroup", 1);
  clock_under<64, false, 1>("groups of 1 64x128x16 from shared memory, 1 warpgroup", 1);
  clock_under<64, true, 4>("groups of 4 64x128x16 from registers, 1 warpgroup", 1);
  clock_under<32, false, 8>("groups of 8 64x64x16 from shared memory, 2 warpgroups", 2);
  clock_under<64, true, 8>("groups of 8 64x128x16 from registers, 2 warpgroups", 2);
  beside_each<kFma>("FFMA");
  beside_each<kFma, 1>("FFMA latency");
  beside_each<kMultiply>("FMUL");
  beside_each<kMax>("FMNMX");
  beside_each<kPack>("F2FP");
  beside_each<kLogic>("LOP3");
  beside_each<kPermute>("PRMT");
  beside_each<kUnpack>("HADD2.F32");
  beside_each<kUnpackAndLogic>("HADD2.F32 and LOP3");
  beside_each<kSplit>("F2FP, two HADD2.F32, two FADD");
  beside_each<kIntegerMad>("IMAD");
  beside_each<kExponential>("MUFU.EX2");
  beside_each<kExponential, 1>("MUFU.EX2 latency");
  beside_each<kShuffle>("SHFL");
  beside_each<kLoad>("LDS, 4-way conflict");
  beside_each<kLoadEach>("LDS");
  beside_each<kLoadPairs>("LDS.64 of four pairs");
  beside_each<kLoadPairEach>("LDS.64");
  beside_each<kLoad16>("LDS.128");
  beside_each<kLoadMatrix>("LDSM.4");
  beside_each<kStoreEach>("STS");
  beside_each<kStorePairEach>("STS.64");
  beside_each<kStore16>("STS.128");
  issue_ahead<16, 12, true>();
  issue_ahead<32, 12, true>();
  issue_ahead<32, 12, false>();
  issue_ahead<64, 12, true>();
  clock_after_rest<0>();
  clock_after_rest<256>();
  clock_after_rest<1024>();
  for (int groups : {48, 12}) kept_by_l2(groups);
  for (int share : {1, 2, 3, 6})
    for (int count : {1, 2, 3, 4, 6, 12}) first_copies(share, count);
  mixed_clocks<false>();
  mixed_clocks<true>();
  beside_each<kFma>("on all multiprocessors, FFMA", true);
  beside_each<kExponential>("on all multiprocessors, MUFU.EX2", true);
  std::printf("\n}\n");
  const cudaError_t error = cudaGetLastError();
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
