// Measures what `gpt2-infer predict` knows of a GPU and no table tells; the numbers are in
// attention_kernels/inspection/gpus.toml and at the head of multiprocessor.py.
//
//   nvcc -O3 -arch=native scripts/probe.cu -o probe && ./probe

#include <algorithm>
#include <cstdint>
#include <cstdio>

constexpr int kChain = 64, kLoops = 8;
enum Test { kExponential, kMma, kBarrier };

__device__ float sink[1024];

// Cycles of a chain in which each instruction waits for the one before.
template <Test kTest>
__global__ void chain(long long* cycles, float zero) {
  float x[4] = {zero, zero, zero, zero};
  const long long begin = clock64();
#pragma unroll 1
  for (int loop = 0; loop < kLoops; ++loop) {
#pragma unroll
    for (int i = 0; i < kChain; ++i) {
      if (kTest == kExponential) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[0]));
      if (kTest == kMma) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, "
            "{%4, %4}, {%0, %1, %2, %3};"
            : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
            : "r"(0));
      }
      if (kTest == kBarrier) __syncthreads();
    }
  }
  if (threadIdx.x == 0) *cycles = clock64() - begin;
  sink[threadIdx.x] = x[0] + x[1] + x[2] + x[3];
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

template <Test kTest>
double cycles_of(long long* cycles, int threads) {
  long long best = 1LL << 60, found;
  for (int i = 0; i < 4; ++i) {
    chain<kTest><<<1, threads>>>(cycles, 0);
    cudaMemcpy(&found, cycles, sizeof(found), cudaMemcpyDeviceToHost);
    best = std::min(best, found);
  }
  return static_cast<double>(best) / (kChain * kLoops);
}

int main() {
  const size_t bytes = size_t{1} << 32;
  long long *cycles, found;
  unsigned* zeros;
  cudaMalloc(&cycles, sizeof(*cycles));
  cudaMalloc(&zeros, bytes);
  cudaMemset(zeros, 0, bytes);
  std::printf("ex2 %.1f cycles\n", cycles_of<kExponential>(cycles, 32));
  std::printf("mma.sync %.1f cycles\n", cycles_of<kMma>(cycles, 32));
  for (int warps : {1, 4, 8, 16, 32})
    std::printf("barrier of %d warps %.1f cycles\n", warps,
                cycles_of<kBarrier>(cycles, 32 * warps));
  size_t at = 0;
  for (size_t step : {size_t{256}, size_t{4096}, size_t{1} << 20}) {
    for (const char* from : {"memory", "L2"}) {  // the second time
      chase<<<1, 1>>>(cycles, zeros + at, step / 4, 64);
      cudaMemcpy(&found, cycles, sizeof(found), cudaMemcpyDeviceToHost);
      std::printf("load from %s, %zu bytes apart %.0f cycles\n", from, step, found / 64.0);
    }
    at += 64 * step / 4;
  }
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (int round = 0; round < 2; ++round) {  // the first fills L2
    cudaEventRecord(begin);
    read<<<264, 1024>>>(reinterpret_cast<uint4*>(zeros), 24'000'000 / 16, 60);
    cudaEventRecord(end);
  }
  float ms;
  cudaEventSynchronize(end);
  cudaEventElapsedTime(&ms, begin, end);
  std::printf("24 MB from L2 %.0f GB/s\n%s\n", 24e6 * 60 / ms / 1e6,
              cudaGetErrorString(cudaGetLastError()));
}
