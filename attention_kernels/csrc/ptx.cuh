// One small function per PTX instruction that the kernels use; those for tiles are in tma.cuh, and
// for products of a warpgroup in wgmma.cuh. The CPU emulator has its own version of each in
// emulator/, which does what the instruction promises and no more.

#pragma once

#include "common.cuh"

#ifdef ATTENTION_EMULATOR
#include "emulator/ptx.h"
#else

namespace attention::ptx {

// An mbarrier, in shared memory.
using Barrier = unsigned long long;

inline __device__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

inline __device__ void barrier_init(Barrier* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// Call it after initializing the barriers, before any copy uses one.
inline __device__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
inline __device__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Arrives, and makes the phase also wait for `bytes` bytes of copies.
inline __device__ void barrier_expect(Barrier* barrier, unsigned bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Returns whether the phase with this parity is complete; may wait briefly first. It acquires at the
// scope of the block, also where another block of the cluster has sent the bytes: at the cluster's
// scope, sm_90's machine code would only discard L1 as well, and they are in shared memory.
inline __device__ bool barrier_test(Barrier* barrier, unsigned parity) {
  unsigned complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete;
}

// Waits until the phase with this parity is complete.
inline __device__ void barrier_wait(Barrier* barrier, unsigned parity) {
  while (!barrier_test(barrier, parity)) {
  }
}

// The block's barriers 1 to 15, for `threads` threads in whole warps: those that wait and those that
// only arrive. 0 is the barrier of __syncthreads().
inline __device__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
inline __device__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Makes what the thread has written to shared memory visible to later bulk copies and to products
// that read shared memory (wgmma.cuh), its own and those ordered after it by a barrier; and ends its
// loads before such a copy overwrites what they read, which a barrier alone does not.
inline __device__ void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for what it has written to global memory, and later bulk copies from there.
inline __device__ void global_proxy_fence() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Changes the registers per thread, for all warps of a warpgroup, to a multiple of 8 from 24 to 240.
// raise_registers() waits until other warps have given up enough.
template <int kRegisters>
__device__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Copies to shared memory; addresses and size are multiples of 16 bytes. When the bytes have
// arrived, they count towards the barrier's phase.
inline __device__ void copy_bulk(void* to, const void* from, unsigned bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// A policy for data that leave the L2 cache before others, and copies by such a policy; copy_async()
// is __pipeline_memcpy_async() of 16 bytes.
using CachePolicy = uint64_t;
inline __device__ CachePolicy evict_first() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
inline __device__ void copy_bulk(void* to, const void* from, unsigned bytes, Barrier* barrier,
                                 CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
inline __device__ void copy_async(void* to, const void* from, CachePolicy policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
      "l"(from), "l"(policy)
      : "memory");
}

// exp(x) in two instructions; __expf() takes six, for results below 2^-126, which are 0 here. And
// 1 / sqrt(x) in one, for x from 2^-126 on.
inline __device__ float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}
inline __device__ float fast_rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Starts to load the 128-byte line at an address into L2.
inline __device__ void prefetch(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// sums += A B for a warp, in float16 or bfloat16: A is 16 x 16, B 16 x 8, sums 16 x 8 in float32.
// Lane l holds rows l / 4 (a[0], a[2]) and l / 4 + 8 (a[1], a[3]) of A and column l / 4 of B, each
// at k = 2 (l % 4) and the next (a[0], a[1], b[0]) and at 8 further on (a[2], a[3], b[1]); of the
// sums it holds columns 2 (l % 4) and the next of both rows.
template <bool kIsBfloat16>
__device__ void mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (kIsBfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// The same in TF32: A is 16 x 8, B 8 x 8. a[0] and b[0] are at k = l % 4, a[2] and b[1] 4 further
// on. They are floats whose low 13 bits are ignored.
inline __device__ void mma_tf32(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four matrices of 8 x 8 16-bit elements from shared memory. Lane 8 i + r passes the address
// of row r of matrix i, 16 bytes. Of each matrix, lane l gets elements 2 (l % 4) and the next of
// row l / 4 or, transposed, of column l / 4.
inline __device__ void load_matrices(unsigned (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}
inline __device__ void load_matrices_transposed(unsigned (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}

// A barrier of all threads of a cluster. What a thread writes before it arrives is visible to
// threads after they have waited.
inline __device__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
inline __device__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Returns the address in a block of the cluster that corresponds to `here`, in shared memory. That
// block must have begun, and must not end before its memory has been accessed.
template <typename T>
__device__ T* in_block(T* here, unsigned block) {
  return static_cast<T*>(__cluster_map_shared_rank(here, block));
}
// Stores to the address in another block of the cluster that corresponds to `here`, in shared
// memory. That block must have begun and must not have ended.
inline __device__ void store_to_block(float* here, unsigned block, float value) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

// Words in global memory that blocks which run at the same time exchange, of which a thread reads all
// bits or none that another one has stored. They order no other accesses. Before a thread reads a
// word again, which has not arrived yet, it calls poll_again().
inline __device__ void store_word(unsigned* to, unsigned word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
inline __device__ unsigned load_word(const unsigned* from) {
  unsigned word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
inline __device__ void store_word(unsigned long long* to, unsigned long long word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
inline __device__ unsigned long long load_word(const unsigned long long* from) {
  unsigned long long word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
inline __device__ void poll_again() {}

// Returns its argument, of which the compiler knows nothing: it keeps what depends on it in registers
// instead of computing it again where it is used.
inline __device__ int kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <typename T>
__device__ T* kept(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Copies words to the address in a block of the cluster that corresponds to `here`, 1, 2 or 4 times
// 4 bytes and aligned to that. When they have arrived, they count towards the phase of that block's
// barrier.
template <int kWords>
__device__ void send_words(void* here, unsigned block, const unsigned (&words)[kWords],
                           Barrier* barrier) {
  unsigned there, barrier_there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(barrier_there)
      : "r"(shared_address(barrier)), "r"(block));
  if constexpr (kWords == 1) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
            there),
        "r"(words[0]), "r"(barrier_there)
        : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, "
        "[%3];" ::"r"(there),
        "r"(words[0]), "r"(words[1]), "r"(barrier_there)
        : "memory");
  } else {
    static_assert(kWords == 4);
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, "
        "%4}, [%5];" ::"r"(there),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier_there)
        : "memory");
  }
}

// Arrives at the barrier in another block of the cluster that corresponds to `here`.
inline __device__ void barrier_arrive_at_block(Barrier* here, unsigned block) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(here)),
      "r"(block)
      : "memory");
}

// For kernels launched by launch_early(). The next kernel in the stream may start once all blocks
// of this one have called allow_next(). wait_for_previous() returns when the previous kernels have
// ended and what they wrote can be read.
inline __device__ void allow_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
inline __device__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace attention::ptx

#endif  // ATTENTION_EMULATOR

#ifdef ATTENTION_STAMPED  // by recorders/stamps.cuh
#define barrier_wait(...) ATTENTION_STAMPED, ::attention::ptx::barrier_wait(__VA_ARGS__)
#define named_barrier_sync(...) ATTENTION_STAMPED, ::attention::ptx::named_barrier_sync(__VA_ARGS__)
#define cluster_wait() ATTENTION_STAMPED, ::attention::ptx::cluster_wait()
#endif
