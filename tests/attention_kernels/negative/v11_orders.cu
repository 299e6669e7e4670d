// v11 - patterns of how threads, blocks and launches exchange data, each right and racy
//
// Change: a field of the parameters chooses the pattern, another whether it has its race.
// Why:    a negative control: on a GPU most of these races do not show.
// Cost:   none.
// Tile:   none, block 64
// Layout: contiguous
// Role:   struct
// Needs:  sm_90
// Flags:  (none)
// Expect: an error for every racy pattern, and none for a right one.
//
// Patterns that published suites of races have, too: missing barriers, fences and atomics, scopes that
// are too narrow, flags, last blocks, locks, queues, barriers of the grid, clusters, early launches.

#include <cuda_fp16.h>

#include "ptx.cuh"

namespace attention {

struct StructParams {
  float* x;                   // 1024, only read
  float* y;                   // 1024
  unsigned* words;            // 64, 0 at first
  unsigned long long* pairs;  // 64, 0 at first
  int pattern;
  int is_racy;
};

namespace ATTENTION_VERSION {

using Params = StructParams;
constexpr int kThreads = 64, kBlocks = 4;

// A barrier of the grid, for blocks that all run at once.
__device__ void meet(unsigned* count, unsigned blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(count, 1u);
    while (*static_cast<volatile unsigned*>(count) < blocks) {
    }
    __threadfence();
  }
  __syncthreads();
}

// ---- Within a block -----------------------------------------------------------------------------

template <bool kRacy>
__global__ void between_warps(Params p) {
  p.y[threadIdx.x] = 1.0f;
  if (!kRacy) __syncthreads();
  p.y[threadIdx.x + 64] = p.y[threadIdx.x ^ 32];
}

template <bool kRacy>
__global__ void within_a_warp(Params p) {
  p.y[threadIdx.x] = 1.0f;
  if (!kRacy) __syncwarp();
  p.y[threadIdx.x + 64] = p.y[threadIdx.x ^ 1];
}

template <bool kRacy>
__global__ void stencil_in_place(Params p) {
  const int t = threadIdx.x;
  const float sum = p.y[t] + p.y[t + 1];
  if (!kRacy) __syncthreads();
  p.y[t] = sum;
}

template <bool kRacy>
__global__ void two_buffers(Params p) {
  __shared__ float s[2][kThreads];
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) {
    s[i % 2][threadIdx.x] = p.x[i * kThreads + threadIdx.x];
    if (!kRacy || i % 2 == 0) __syncthreads();
    sum += s[i % 2][threadIdx.x ^ 32];
  }
  p.y[threadIdx.x] = sum;
}

template <bool kRacy>
__global__ void reduction_by_halves(Params p) {
  __shared__ float s[kThreads];
  s[threadIdx.x] = p.x[threadIdx.x];
  for (int width = kThreads / 2; width > 0; width /= 2) {
    if (!kRacy || width > 32) __syncthreads();
    if (threadIdx.x < width) s[threadIdx.x] += s[threadIdx.x + width];
  }
  if (threadIdx.x == 0) p.y[0] = s[0];
}

// A volatile alone does not keep lanes together.
template <bool kRacy>
__global__ void volatile_within_a_warp(Params p) {
  __shared__ volatile float s[32];
  if (threadIdx.x >= 32) return;
  s[threadIdx.x] = p.x[threadIdx.x];
  for (int width = 16; width > 0; width /= 2) {
    if (!kRacy) __syncwarp();
    const float other = s[threadIdx.x ^ width];
    if (!kRacy) __syncwarp();
    s[threadIdx.x] = s[threadIdx.x] + other;
  }
  if (threadIdx.x == 0) p.y[0] = s[0];
}

template <bool kRacy>
__global__ void named_barrier(Params p) {
  if (threadIdx.x < 32) {
    p.y[threadIdx.x] = 1.0f;
    ptx::named_barrier_arrive(1, 64);
  } else {
    float early = 0.0f;
    if (kRacy) early = p.y[threadIdx.x - 32];
    ptx::named_barrier_sync(1, 64);
    p.y[threadIdx.x + 64] = p.y[threadIdx.x - 32] + early;
  }
}

template <bool kRacy>
__global__ void histogram(Params p) {
  __shared__ unsigned s[4];
  if (threadIdx.x < 4) s[threadIdx.x] = 0;
  __syncthreads();
  if (kRacy)
    s[threadIdx.x % 4] += 1;
  else
    atomicAdd(&s[threadIdx.x % 4], 1u);
  __syncthreads();
  if (threadIdx.x < 4) p.y[threadIdx.x] = s[threadIdx.x];
}

// Between warps, through shared memory.
template <bool kRacy>
__global__ void flag_of_the_block(Params p) {
  __shared__ unsigned flag;
  __shared__ float value;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    value = 1.0f;
    if (!kRacy) __threadfence_block();
    *static_cast<volatile unsigned*>(&flag) = 1;
  } else if (threadIdx.x == 32) {
    while (*static_cast<volatile unsigned*>(&flag) == 0) {
    }
    __threadfence_block();
    p.y[0] = value;
  }
}

// ---- Between blocks -----------------------------------------------------------------------------

template <bool kRacy>
__global__ void neighbours_overlap(Params p) {
  constexpr int kEach = kRacy ? kThreads - 1 : kThreads;
  p.y[blockIdx.x * kEach + threadIdx.x] = blockIdx.x;
}

template <bool kRacy>
__global__ void same_value(Params p) {
  if (threadIdx.x != 0) return;
  if (kRacy)
    p.words[0] = 1;
  else
    atomicExch(&p.words[0], 1u);
}

template <bool kRacy>
__global__ void halo(Params p) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const float next = kRacy ? p.y[i + 1] : p.x[i + 1];
  __syncthreads();
  p.y[i] = next;
}

template <bool kRacy>
__global__ void sum(Params p) {
  if (threadIdx.x != 0) return;
  if (kRacy)
    p.y[0] += 1.0f;
  else
    atomicAdd(&p.y[0], 1.0f);
}

template <bool kRacy>
__global__ void atomic_and_plain(Params p) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x > 0)
    atomicAdd(&p.words[0], 1u);
  else
    atomicExch(&p.words[1], kRacy ? p.words[0] : atomicAdd(&p.words[0], 0u));
}

template <bool kRacy>
__global__ void scope_of_an_atomic(Params p) {
  if (threadIdx.x != 0) return;
  if (kRacy)
    atomicAdd_block(&p.words[0], 1u);
  else
    atomicAdd(&p.words[0], 1u);
}

template <bool kRacy>
__global__ void parts_of_words(Params p) {
  auto* const halves = reinterpret_cast<__half*>(p.y);
  if (threadIdx.x != 0) return;
  if (kRacy)
    reinterpret_cast<unsigned*>(p.y)[0] = blockIdx.x;
  else
    halves[blockIdx.x] = __float2half(1.0f);
}

template <bool kRacy>
__global__ void vectors_and_scalars(Params p) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0)
    reinterpret_cast<float4*>(p.y)[0] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
  else
    p.y[blockIdx.x + (kRacy ? 2 : 3)] = 2.0f;
}

// The last block adds up the partial sums of all. 0: right. 1: no fence. 2: a fence of the block.
// 3: the fence orders only what its thread has written. 4: others do not wait for the result.
template <int kFault>
__global__ void last_block(Params p) {
  __shared__ bool is_last;
  const int t = threadIdx.x;
  p.y[blockIdx.x * kThreads + t] = p.x[t];
  if (kFault != 3) __syncthreads();
  if (t == 0) {
    if (kFault == 2)
      __threadfence_block();
    else if (kFault != 1)
      __threadfence();
    is_last = atomicAdd(&p.words[0], 1u) == gridDim.x - 1;
  }
  if (kFault != 4) __syncthreads();
  if (!is_last) return;
  float sum = 0.0f;
  for (int i = 0; i < gridDim.x; ++i) sum += p.y[i * kThreads + t];
  p.y[512 + t] = sum;
}

// Each thread calls a fence before the barrier, and one sends for all. 1: before it stores.
template <int kFault>
__global__ void fences_before_a_barrier(Params p) {
  __shared__ bool is_last;
  const int t = threadIdx.x;
  if (kFault == 1) __threadfence();
  p.y[blockIdx.x * kThreads + t] = p.x[t];
  if (kFault == 0) __threadfence();
  __syncthreads();
  if (t == 0) is_last = atomicAdd(&p.words[0], 1u) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  float sum = 0.0f;
  for (int i = 0; i < gridDim.x; ++i) sum += p.y[i * kThreads + t];
  p.y[512 + t] = sum;
}

// Block 0 sends to block 1. 0: right. 1: no fence before the flag. 2: none after it. 3: the fence
// comes after the flag. 4: a flag that is not volatile.
template <int kFault>
__global__ void send(Params p) {
  auto* const flag = static_cast<volatile unsigned*>(p.words);
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    p.y[0] = 1.0f;
    if (kFault != 1 && kFault != 3) __threadfence();
    if (kFault == 4)
      p.words[0] = 1;
    else
      *flag = 1;
    if (kFault == 3) __threadfence();
  } else {
    while (*flag == 0) {
    }
    if (kFault != 2) __threadfence();
    p.y[1] = p.y[0];
  }
}

// With acquire and release, of which nvcc has no such functions.
template <bool kRacy>
__global__ void acquire_and_release(Params p) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    p.y[0] = 1.0f;
    __atomic_store_n(p.words, 1u, kRacy ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
  } else {
    while (__atomic_load_n(p.words, __ATOMIC_ACQUIRE) == 0) {
    }
    p.y[1] = p.y[0];
  }
}

// Words that carry data and tag at once.
template <bool kRacy>
__global__ void tagged_words(Params p) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    p.y[0] = 1.0f;
    ptx::store_word(p.pairs, 7ull << 32 | __float_as_uint(1.0f));
    return;
  }
  unsigned long long word = ptx::load_word(p.pairs);
  while (word >> 32 != 7) {
    ptx::poll_again();
    word = ptx::load_word(p.pairs);
  }
  p.y[1] = kRacy ? p.y[0] : __uint_as_float(static_cast<unsigned>(word));
}

// A buffer that is used again. 1: before the other block has read it.
template <bool kRacy>
__global__ void two_way(Params p) {
  auto* const full = static_cast<volatile unsigned*>(p.words);
  auto* const empty = static_cast<volatile unsigned*>(p.words + 32);
  if (threadIdx.x != 0) return;
  for (unsigned i = 1; i <= 3; ++i) {
    if (blockIdx.x == 0) {
      while (!kRacy && *empty != i - 1) {
      }
      __threadfence();
      p.y[0] = i;
      __threadfence();
      *full = i;
    } else {
      while (*full < i) {
      }
      __threadfence();
      p.y[i] = p.y[0];
      __threadfence();
      *empty = i;
    }
  }
}

template <bool kRacy>
__global__ void lock(Params p) {
  if (threadIdx.x != 0) return;
  while (atomicCAS(&p.words[0], 0u, 1u) != 0) {
  }
  p.y[0] += 1.0f;
  if (!kRacy) __threadfence();
  atomicExch(&p.words[0], 0u);
}

// In turn, as blocks do that share a tile's keys.
template <bool kRacy>
__global__ void turns(Params p) {
  auto* const turn = static_cast<volatile unsigned*>(p.words);
  if (threadIdx.x == 0) {
    while (*turn != blockIdx.x) {
    }
    __threadfence();
  }
  __syncthreads();
  p.y[threadIdx.x] += 1.0f;
  if (!kRacy) __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *turn = blockIdx.x + 1;
  }
}

template <bool kRacy>
__global__ void queue(Params p) {
  __shared__ unsigned item;
  for (;;) {
    if (threadIdx.x == 0) item = kRacy ? p.words[0]++ : atomicAdd(&p.words[0], 1u);
    __syncthreads();
    if (item >= 8) return;
    p.y[item * kThreads + threadIdx.x] = item;
    __syncthreads();
  }
}

// 0: right. 1: it does not wait for the last block. 2: only one thread waits. 3: it does not wait for
// the other threads. 4: none.
template <int kFault>
__global__ void grid_barrier(Params p) {
  const int t = threadIdx.x;
  p.y[blockIdx.x * kThreads + t] = 1.0f;
  if (kFault == 0) {
    meet(p.words, gridDim.x);
  } else if (kFault != 4) {
    if (kFault != 3) __syncthreads();
    if (t == 0) {
      __threadfence();
      atomicAdd(p.words, 1u);
      while (*static_cast<volatile unsigned*>(p.words) < gridDim.x - (kFault == 1)) {
      }
      __threadfence();
    }
    if (kFault != 2) __syncthreads();
  }
  p.y[512 + blockIdx.x * kThreads + t] = p.y[(blockIdx.x + 1) % gridDim.x * kThreads + t];
}

// ---- Clusters -----------------------------------------------------------------------------------

// 0: right. 1: no barrier before it is read. 2: it is overwritten while it may still be read.
template <int kFault>
__global__ void cluster_exchange(Params p) {
  __shared__ float s[kThreads];
  s[threadIdx.x] = 0.0f;
  ptx::cluster_arrive();
  ptx::cluster_wait();
  float sum = 0.0f;
  for (int i = 0; i < 2; ++i) {
    ptx::store_to_block(&s[threadIdx.x], blockIdx.x ^ 1, i);
    if (kFault != 1) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
    sum += s[threadIdx.x ^ 32];
    if (kFault != 2) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  p.y[blockIdx.x * kThreads + threadIdx.x] = sum;
}

template <bool kRacy>
__global__ void cluster_through_global(Params p) {
  const int t = threadIdx.x;
  p.y[blockIdx.x * kThreads + t] = 1.0f;
  ptx::cluster_arrive();
  ptx::cluster_wait();
  const int other = kRacy ? (blockIdx.x + 2) % gridDim.x : blockIdx.x ^ 1;
  p.y[512 + blockIdx.x * kThreads + t] = p.y[other * kThreads + t];
}

// ---- Launches -----------------------------------------------------------------------------------

__global__ void write(Params p) { p.y[blockIdx.x * kThreads + threadIdx.x] = 1.0f; }
__global__ void read(Params p) {
  p.y[512 + blockIdx.x * kThreads + threadIdx.x] = p.y[blockIdx.x * kThreads + (threadIdx.x ^ 32)];
}

template <bool kRacy>
__global__ void read_early(Params p) {
  if (!kRacy) ptx::wait_for_previous();
  const float y = p.y[threadIdx.x];
  ptx::wait_for_previous();
  p.y[512 + blockIdx.x * kThreads + threadIdx.x] = y;
}

__global__ void read_x_late(Params p) {
  ptx::wait_for_previous();
  p.y[512 + blockIdx.x * kThreads + threadIdx.x] = p.y[256 + threadIdx.x];
}

template <bool kRacy>
__global__ void write_early(Params p) {
  if (!kRacy) ptx::wait_for_previous();
  if (blockIdx.x == 0) p.y[256 + threadIdx.x] = 1.0f;
  ptx::wait_for_previous();
}

// Lets the next kernel start before, or after, the one before has ended.
template <bool kRacy>
__global__ void allow(Params) {
  if (kRacy) ptx::allow_next();
  ptx::wait_for_previous();
  ptx::allow_next();
}

// ---- The asynchronous proxy ----------------------------------------------------------------------

// 0: right. 1: no proxy fence. 2: no barrier. 3: the copy's bytes are read before they have arrived.
template <int kFault>
__global__ void copy_of_what_is_stored(Params p) {
  __shared__ __align__(16) float s[kThreads];
  __shared__ ptx::Barrier arrived;
  p.y[threadIdx.x] = 1.0f;
  if (kFault != 1) ptx::global_proxy_fence();
  if (threadIdx.x == 0) {
    ptx::barrier_init(&arrived, 1);
    ptx::barrier_init_fence();
  }
  if (kFault != 2) __syncthreads();
  if (threadIdx.x == 0) {
    ptx::barrier_expect(&arrived, sizeof(s));
    ptx::copy_bulk(s, p.y, sizeof(s), &arrived);
  }
  if (kFault == 2) __syncthreads();
  if (kFault != 3) ptx::barrier_wait(&arrived, 0);
  const float y = s[threadIdx.x ^ 1];
  __syncthreads();
  if (kFault == 3) ptx::barrier_wait(&arrived, 0);
  p.y[512 + threadIdx.x] = y;
}

// A thread polls a word of each of the other blocks, while the others of its block wait for a barrier in
// shared memory.
template <bool kRacy>
__global__ void many_flags(Params p) {
  __shared__ ptx::Barrier ready;
  if (threadIdx.x == 0) ptx::barrier_init(&ready, 1);
  if (blockIdx.x != 0) {
    p.y[blockIdx.x * kThreads + threadIdx.x] = 1.0f;
    for (int i = 0; i < 100; ++i) ptx::poll_again();
    __syncthreads();
    if (threadIdx.x == 0) {
      if (!kRacy) __threadfence();
      atomicExch(&p.words[blockIdx.x], 1u);
    }
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (bool waits = true; waits;) {
      waits = false;
      for (int i = 1; i < gridDim.x; ++i) waits |= static_cast<volatile unsigned*>(p.words)[i] == 0;
    }
    __threadfence();
    ptx::barrier_arrive(&ready);
  }
  ptx::barrier_wait(&ready, 0);
  float sum = 0.0f;
  for (int i = 1; i < gridDim.x; ++i) sum += p.y[i * kThreads + threadIdx.x];
  p.y[threadIdx.x] = sum;
}

// ---- Inline PTX ---------------------------------------------------------------------------------

// 0: right. 1: no release. 2: a plain store of the flag. 3: a release to its own block. 4: no acquire.
// 5: a fence for its own block.
template <int kFault>
__global__ void asm_flag(Params p) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    asm volatile("st.global.f32 [%0], 0f3F800000;" ::"l"(p.y) : "memory");
    if (kFault == 5) asm volatile("fence.acq_rel.cta;" ::: "memory");
    if (kFault == 1 || kFault == 5)
      asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(p.words) : "memory");
    else if (kFault == 2)
      asm volatile("st.global.u32 [%0], 1;" ::"l"(p.words) : "memory");
    else if (kFault == 3)
      asm volatile("st.release.cta.global.u32 [%0], 1;" ::"l"(p.words) : "memory");
    else
      asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(p.words) : "memory");
  } else {
    unsigned flag = 0;
    float y;
    while (flag == 0) {
      if (kFault == 4)
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(flag) : "l"(p.words) : "memory");
      else
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(flag) : "l"(p.words) : "memory");
    }
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(y) : "l"(p.y) : "memory");
    p.y[1] = y;
  }
}

// A label and a predicate instead of a loop; fences around a volatile. 1: no fence before. 2: none after.
template <int kFault>
__global__ void asm_volatile_flag(Params p) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    p.y[0] = 1.0f;
    if (kFault != 1) asm volatile("fence.sc.gpu;" ::: "memory");
    asm volatile("st.volatile.global.u32 [%0], 1;" ::"l"(p.words) : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; .reg .u32 f;\n"
        "WAIT: ld.volatile.global.u32 f, [%0]; setp.eq.u32 p, f, 0; @p bra WAIT; }" ::"l"(p.words)
        : "memory");
    if (kFault != 2) asm volatile("membar.gl;" ::: "memory");
    p.y[1] = p.y[0];
  }
}

// Split keys with a last block that joins them, or a block that waits for all. 1: no release.
template <int kFault>
__global__ void asm_last_block(Params p) {
  __shared__ bool is_last;
  p.y[blockIdx.x * kThreads + threadIdx.x] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned count;
    if (kFault == 1)
      asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                   : "=r"(count)
                   : "l"(p.words)
                   : "memory");
    else
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                   : "=r"(count)
                   : "l"(p.words)
                   : "memory");
    is_last = count == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last) p.y[512 + threadIdx.x] = p.y[threadIdx.x] + p.y[kThreads + threadIdx.x];
}

template <int kFault>
__global__ void asm_reduction(Params p) {
  p.y[blockIdx.x * kThreads + threadIdx.x] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (kFault == 1)
      asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p.words) : "memory");
    else
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.words) : "memory");
  }
  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) {
    unsigned count = 0;
    while (count < gridDim.x)
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(p.words) : "memory");
  }
  __syncthreads();
  p.y[512 + threadIdx.x] = p.y[threadIdx.x] + p.y[kThreads + threadIdx.x];
}

// 1: no release. 2: taken with the scope of the block.
template <int kFault>
__global__ void asm_lock(Params p) {
  if (threadIdx.x != 0) return;
  unsigned was = 1;
  while (was != 0) {
    if (kFault == 2)
      asm volatile("atom.acquire.cta.global.cas.b32 %0, [%1], 0, 1;"
                   : "=r"(was)
                   : "l"(p.words)
                   : "memory");
    else
      asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;"
                   : "=r"(was)
                   : "l"(p.words)
                   : "memory");
  }
  p.y[0] += 1.0f;
  if (kFault == 1)
    asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(p.words) : "memory");
  else
    asm volatile("st.release.gpu.global.u32 [%0], 0;" ::"l"(p.words) : "memory");
}

// 1: no proxy fence. 2: the one for shared memory. 3: the bytes are read before they have arrived.
template <int kFault>
__global__ void asm_bulk_copy(Params p) {
  __shared__ __align__(16) float s[kThreads];
  __shared__ uint64_t arrived;
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(s));
  const auto barrier = static_cast<unsigned>(__cvta_generic_to_shared(&arrived));
  p.y[threadIdx.x] = 1.0f;
  if (kFault == 2) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (kFault == 0 || kFault == 3) asm volatile("fence.proxy.async;" ::: "memory");
  if (threadIdx.x == 0)
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(barrier)
        : "memory");
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%1], [%2], 256, "
        "[%0];" ::"r"(barrier),
        "r"(to), "l"(p.y)
        : "memory");
  float y = 0.0f;
  if (kFault == 3) y = s[threadIdx.x];
  asm volatile(
      "{ .reg .pred p;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra WAIT; }" ::"r"(barrier)
      : "memory");
  p.y[512 + threadIdx.x] = y + s[threadIdx.x];
}

// Through the shared memory of the other block. 1: no barrier before it is read. 2: one that orders
// nothing.
template <int kFault>
__global__ void asm_cluster(Params p) {
  __shared__ float s[kThreads];
  const auto mine = static_cast<unsigned>(__cvta_generic_to_shared(&s[threadIdx.x]));
  s[threadIdx.x] = 0.0f;
  asm volatile(
      "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;" ::
          : "memory");
  asm volatile(
      "{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.f32 [a], 0f3F800000; "
      "}" ::"r"(mine),
      "r"(blockIdx.x ^ 1)
      : "memory");
  if (kFault == 2)
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::
                     : "memory");
  else if (kFault != 1)
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
  const float y = s[threadIdx.x ^ 32];
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
  p.y[blockIdx.x * kThreads + threadIdx.x] = y;
}

// Racy if the flag is for another cluster.
template <bool kRacy>
__global__ void asm_scope_of_a_cluster(Params p) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    p.y[0] = 1.0f;
    asm volatile("st.release.cluster.global.u32 [%0], 1;" ::"l"(p.words) : "memory");
  } else if (blockIdx.x == (kRacy ? 2 : 1)) {
    unsigned flag = 0;
    while (flag == 0)
      asm volatile("ld.acquire.cluster.global.u32 %0, [%1];"
                   : "=r"(flag)
                   : "l"(p.words)
                   : "memory");
    p.y[1] = p.y[0];
  }
}

// Data in words that are polled themselves.
template <bool kRacy>
__global__ void asm_vector(Params p) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    if (kRacy)
      asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(p.words), "r"(7) : "memory");
    else
      asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(p.words), "r"(7)
                   : "memory");
    return;
  }
  uint4 w{0, 0, 0, 0};
  while (w.x == 0 || w.y == 0 || w.z == 0 || w.w == 0)
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p.words)
                 : "memory");
  p.y[1] = w.x + w.w;
}

template <bool kRacy>
__global__ void asm_read_early(Params p) {
  if (!kRacy) asm volatile("griddepcontrol.wait;" ::: "memory");
  float y;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(y) : "l"(p.y + threadIdx.x) : "memory");
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
  p.y[512 + blockIdx.x * kThreads + threadIdx.x] = y;
}

// ---- Waiting for ever ---------------------------------------------------------------------------

template <int kFault>
__global__ void asm_flag_of_nobody(Params p) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0 && kFault == 0)
    asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(p.words) : "memory");
  unsigned flag = 0;
  while (flag == 0)
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(flag) : "l"(p.words) : "memory");
}

// 0: right. 1: nobody sets the flag.
template <int kFault>
__global__ void flag_of_nobody(Params p) {
  if (threadIdx.x == 0 && blockIdx.x == 0 && kFault == 0) atomicExch(&p.words[0], 1u);
  if (threadIdx.x < 32)
    while (*static_cast<volatile unsigned*>(p.words) == 0) {
    }
  __syncthreads();
}

template <int kFault>
__global__ void lock_that_is_kept(Params p) {
  if (threadIdx.x != 0) return;
  while (atomicCAS(&p.words[0], 0u, 1u) != 0) {
  }
  __threadfence();
  if (kFault == 0) atomicExch(&p.words[0], 0u);
}

// A barrier of a grid whose blocks need not run at once.
__global__ void meet_by_chance(Params p) { meet(p.words, gridDim.x); }

int64_t scratch_floats(const StructParams&) { return 0; }

// Launches a kernel's right or racy form.
#define PLAIN(number, kernel, blocks)                                                \
  if (p.pattern == number) {                                                         \
    return p.is_racy ? launch_kernel(kernel<true>, blocks, kThreads, 0, stream, p)   \
                     : launch_kernel(kernel<false>, blocks, kThreads, 0, stream, p); \
  }
#define FAULT(number, kernel, fault, blocks, cluster)                                         \
  if (p.pattern == number) {                                                                  \
    return p.is_racy ? launch_at_once(kernel<fault>, blocks, cluster, kThreads, 0, stream, p) \
                     : launch_at_once(kernel<0>, blocks, cluster, kThreads, 0, stream, p);    \
  }

cudaError_t launch(const StructParams& p, cudaStream_t stream) {
  PLAIN(1, between_warps, 1)
  PLAIN(2, within_a_warp, 1)
  PLAIN(3, stencil_in_place, 1)
  PLAIN(4, two_buffers, 1)
  PLAIN(5, reduction_by_halves, 1)
  PLAIN(6, volatile_within_a_warp, 1)
  PLAIN(7, named_barrier, 1)
  PLAIN(8, histogram, 1)
  PLAIN(9, flag_of_the_block, 1)
  PLAIN(10, neighbours_overlap, kBlocks)
  PLAIN(11, same_value, kBlocks)
  PLAIN(12, halo, kBlocks)
  PLAIN(13, sum, kBlocks)
  PLAIN(14, atomic_and_plain, kBlocks)
  PLAIN(15, scope_of_an_atomic, kBlocks)
  PLAIN(16, parts_of_words, 2)
  PLAIN(17, vectors_and_scalars, 2)
  FAULT(18, last_block, 1, kBlocks, 1)
  FAULT(19, last_block, 2, kBlocks, 1)
  FAULT(20, last_block, 3, kBlocks, 1)
  FAULT(21, last_block, 4, kBlocks, 1)
  FAULT(22, send, 1, 2, 1)
  FAULT(23, send, 2, 2, 1)
  FAULT(24, send, 3, 2, 1)
  FAULT(25, send, 4, 2, 1)
  FAULT(26, acquire_and_release, 1, 2, 1)
  FAULT(27, tagged_words, 1, 2, 1)
  FAULT(28, two_way, 1, 2, 1)
  FAULT(29, lock, 1, kBlocks, 1)
  FAULT(30, turns, 1, kBlocks, 1)
  PLAIN(31, queue, kBlocks)
  FAULT(32, grid_barrier, 1, kBlocks, 1)
  FAULT(33, grid_barrier, 2, kBlocks, 1)
  FAULT(34, grid_barrier, 3, kBlocks, 1)
  FAULT(35, grid_barrier, 4, kBlocks, 1)
  FAULT(36, cluster_exchange, 1, 2, 2)
  FAULT(37, cluster_exchange, 2, 2, 2)
  FAULT(38, cluster_through_global, 1, kBlocks, 2)
  FAULT(44, copy_of_what_is_stored, 1, 1, 1)
  FAULT(45, copy_of_what_is_stored, 2, 1, 1)
  FAULT(46, copy_of_what_is_stored, 3, 1, 1)
  FAULT(54, asm_flag, 1, 2, 1)
  FAULT(55, asm_flag, 2, 2, 1)
  FAULT(56, asm_flag, 3, 2, 1)
  FAULT(57, asm_flag, 4, 2, 1)
  FAULT(58, asm_flag, 5, 2, 1)
  FAULT(59, asm_volatile_flag, 1, 2, 1)
  FAULT(60, asm_volatile_flag, 2, 2, 1)
  FAULT(61, asm_last_block, 1, kBlocks, 1)
  FAULT(62, asm_reduction, 1, kBlocks, 1)
  FAULT(63, asm_lock, 1, kBlocks, 1)
  FAULT(64, asm_lock, 2, kBlocks, 1)
  FAULT(65, asm_bulk_copy, 1, 1, 1)
  FAULT(66, asm_bulk_copy, 2, 1, 1)
  FAULT(67, asm_bulk_copy, 3, 1, 1)
  FAULT(68, asm_cluster, 1, 2, 2)
  FAULT(72, asm_cluster, 2, 2, 2)
  FAULT(73, fences_before_a_barrier, 1, kBlocks, 1)
  if (p.pattern == 47)
    return launch_at_once(p.is_racy ? many_flags<true> : many_flags<false>, 8, 1, kThreads, 0,
                          stream, p);
  if (p.pattern == 70)
    return p.is_racy
               ? launch_at_once(asm_scope_of_a_cluster<true>, kBlocks, 2, kThreads, 0, stream, p)
               : launch_at_once(asm_scope_of_a_cluster<false>, kBlocks, 2, kThreads, 0, stream, p);
  if (p.pattern == 71)
    return p.is_racy ? launch_at_once(asm_vector<true>, 2, 1, kThreads, 0, stream, p)
                     : launch_at_once(asm_vector<false>, 2, 1, kThreads, 0, stream, p);
  FAULT(50, flag_of_nobody, 1, kBlocks, 1)
  FAULT(49, asm_flag_of_nobody, 1, kBlocks, 1)
  FAULT(51, lock_that_is_kept, 1, kBlocks, 1)
  // Right on a device with room for 8 blocks, but not for 200
  if (p.pattern == 52)
    return launch_kernel(meet_by_chance, p.is_racy ? 200 : 8, kThreads, 0, stream, p);
  if (p.pattern == 53)
    return launch_at_once(meet_by_chance, p.is_racy ? 200 : 8, 1, kThreads, 0, stream, p);
  cudaError_t error = cudaSuccess;
  const auto add = [&](auto* kernel, bool is_early) {
    if (error != cudaSuccess) return;
    error = is_early ? launch_early(kernel, kBlocks, 1, kThreads, 0, stream, p)
                     : launch_kernel(kernel, kBlocks, kThreads, 0, stream, p);
  };
  if (p.pattern == 39) {
    add(write, false);
    add(p.is_racy ? read_early<true> : read_early<false>, true);
  } else if (p.pattern == 69) {
    add(write, false);
    add(p.is_racy ? asm_read_early<true> : asm_read_early<false>, true);
  } else if (p.pattern == 40) {
    add(read_x_late, false);
    add(p.is_racy ? write_early<true> : write_early<false>, true);
  } else if (p.pattern == 41) {
    add(write, false);
    add(p.is_racy ? allow<true> : allow<false>, true);
    add(read_early<true>, true);
  } else if (p.pattern == 42) {
    add(p.is_racy ? write_early<true> : write_early<false>, true);
  } else if (p.pattern == 43) {  // the end of a kernel orders all
    add(write, false);
    add(read, false);
  }
  return error;
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
