// Measures what `gpt2-infer predict` knows of a GPU and no table tells, and prints it as JSON; the
// numbers are in attention_kernels/inspection/gpus.toml and at the head of multiprocessor.py.
// Cycles are those of a multiprocessor's clock. `rate` is per scheduler, for a whole warp.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I attention_kernels/csrc \\
//     -o probe scripts/probe.cu && ./probe

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

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
  kAdd,
  kIntegerMad,
  kLogic,
  kMax,
  kPermute,
  kPack,
  kExponential,
  kShuffle,
  kMmaTf32,
  kMmaFloat16,
  kLoad,
  kLoad16,
  kLoadMatrix,
  kBarrier,
  kFence,
  kArrive,
};

__device__ float sink[1024];

void report(const std::string& name, double value, const char* unit = "cycles") {
  static bool is_first = true;
  std::printf("%s\n  \"%s\": [%.6g, \"%s\"]", is_first ? "{" : ",", name.c_str(), value, unit);
  is_first = false;
}

// One instruction on four registers.
template <Test kTest>
__device__ void execute(unsigned (&x)[4], unsigned y, unsigned z, unsigned shared) {
  if (kTest == kFma) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+r"(x[0]) : "r"(y), "r"(z));
  if (kTest == kAdd) asm volatile("add.f32 %0, %0, %1;" : "+r"(x[0]) : "r"(y));
  if (kTest == kIntegerMad)
    asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x[0]) : "r"(y), "r"(z));
  if (kTest == kLogic) asm volatile("lop3.b32 %0, %0, %1, %2, 0xe8;" : "+r"(x[0]) : "r"(y), "r"(z));
  if (kTest == kMax) asm volatile("max.f32 %0, %0, %1;" : "+r"(x[0]) : "r"(y));
  if (kTest == kPermute) asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(x[0]) : "r"(y), "r"(z));
  if (kTest == kPack) asm volatile("cvt.rn.f16x2.f32 %0, %0, %1;" : "+r"(x[0]) : "r"(y));
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
  if (kTest == kLoad) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(x[0]));
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

// ---- Products of warpgroups ----------------------------------------------------------------------

// Groups of kCount products of 64 x 2 kSums x 16, each waited for before the next begins.
template <int kSums, bool kFromRegisters, int kCount>
__global__ void __launch_bounds__(384)
    products(long long* cycles, int loops, unsigned seed, unsigned long long* nanoseconds) {
  ATTENTION_ALIGNED_SHARED(unsigned char, tile, 1024);
  for (int i = threadIdx.x; i < 16384; i += blockDim.x) {  // numbers of 2^-8 to 2^-1
    const unsigned bits = (i * 2654435761u) ^ seed;
    reinterpret_cast<unsigned*>(tile)[i] = seed ? (bits & 0x9fff9fff) | 0x1c001c00 : 0;
  }
  ptx::proxy_fence();
  const uint64_t a = ptx::matrix_descriptor(tile + threadIdx.x / 128 * 8192);
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

__global__ void cluster_barriers(long long* cycles) {
  long long begin = 0;
  for (int loop = -1; loop < kChain; ++loop) {
    if (loop == 0) begin = clock64();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = clock64() - begin;
}

// ---- The host's side -----------------------------------------------------------------------------

long long* cycles;  // on the GPU
unsigned long long* nanoseconds;

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
  for (int shared : {0, 48 * 1024}) {
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

int main() {
  const size_t bytes = size_t{1} << 32;
  unsigned char* zeros;
  cudaMalloc(&cycles, 2 * sizeof(*cycles));
  cudaMalloc(&nanoseconds, sizeof(*nanoseconds));
  cudaMalloc(&zeros, bytes);
  cudaMemset(zeros, 0, bytes);
  instruction<kFma>("FFMA");
  instruction<kAdd>("FADD");
  instruction<kIntegerMad>("IMAD");
  instruction<kLogic>("LOP3");
  instruction<kMax>("FMNMX");
  instruction<kPermute>("PRMT");
  instruction<kPack>("F2FP");
  instruction<kExponential>("MUFU.EX2");
  instruction<kShuffle>("SHFL");
  instruction<kMmaTf32>("HMMA.1688.TF32");
  instruction<kMmaFloat16>("HMMA.16816");
  instruction<kLoad>("LDS, 4-way conflict");
  instruction<kLoad16>("LDS.128");
  instruction<kLoadMatrix>("LDSM.4");
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
  const auto one_empty = [](cudaStream_t on) { empty<<<1, 256, 0, on>>>(); };
  for (int launches : {1, 2, 60})
    report("graph of " + std::to_string(launches) + " empty kernels",
           graph_us(one_empty, launches, 100) * launches, "us");
  for (int size : {2, 8}) {
    for (int i = 0; i < 2; ++i) launch_early(cluster_barriers, size, size, 256, 0, nullptr, cycles);
    report("barrier of a cluster of " + std::to_string(size) + " blocks", fetch() / kChain);
  }
  clock_under<32, false, 1>("groups of 1 64x64x16 from shared memory, 1 warpgroup", 1);
  clock_under<32, true, 1>("groups of 1 64x64x16 from registers, 1 warpgroup", 1);
  clock_under<32, true, 4>("groups of 4 64x64x16 from registers, 1 warpgroup", 1);
  clock_under<64, false, 1>("groups of 1 64x128x16 from shared memory, 1 warpgroup", 1);
  clock_under<64, true, 4>("groups of 4 64x128x16 from registers, 1 warpgroup", 1);
  clock_under<32, false, 8>("groups of 8 64x64x16 from shared memory, 2 warpgroups", 2);
  clock_under<64, true, 8>("groups of 8 64x128x16 from registers, 2 warpgroups", 2);
  std::printf("\n}\n");
  const cudaError_t error = cudaGetLastError();
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
