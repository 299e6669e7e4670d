// Warp-specialised: one producer warp fetches tiles with cp.async.bulk, mbarriers in a ring
//
// Layout: strided
// Takes:  float32, head_dim 32
// Needs:  sm_90
// Flags:  (none)

#include <cuda_runtime.h>

#include <cstdint>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

namespace {

constexpr int kDim = 32, kRows = 64, kKeys = 32, kStages = 3;
constexpr int kThreads = kRows + 32;  // the last warp is the producer
constexpr uint32_t kRowBytes = kDim * sizeof(float);

struct __align__(128) Smem {
  float k[kStages][kKeys][kDim];
  float v[kStages][kKeys][kDim];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

__device__ inline uint32_t smem_u32(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ inline void mbar_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(bar)), "r"(count));
}

__device__ inline void mbar_wait(uint64_t* bar, uint32_t phase) {
  asm volatile(
      "{\n\t"
      ".reg .pred P1;\n\t"
      "LAB_WAIT:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n\t"
      "@P1 bra DONE;\n\t"
      "bra LAB_WAIT;\n\t"
      "DONE:\n\t"
      "}" ::"r"(smem_u32(bar)),
      "r"(phase)
      : "memory");
}

__device__ inline void mbar_arrive(uint64_t* bar) {
  uint64_t state;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];"
               : "=l"(state)
               : "r"(smem_u32(bar))
               : "memory");
}

__device__ inline void mbar_expect_tx(uint64_t* bar, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(bar)),
      "r"(bytes)
      : "memory");
}

__device__ inline void bulk_copy(void* dst, const void* src, uint32_t bytes, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(smem_u32(dst)), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(smem_u32(bar))
      : "memory");
}

__device__ inline bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, %1;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected)
      : "r"(0xffffffff));
  return elected != 0;
}

__global__ void __launch_bounds__(kThreads)
    attend(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
           float* __restrict__ o, Strides sq, Strides sk, Strides sv, Strides so, int n, int heads,
           float scale_log2, bool causal) {
  extern __shared__ __align__(128) unsigned char memory[];
  Smem& smem = *reinterpret_cast<Smem*>(memory);
  const int warp = threadIdx.x / 32, m0 = blockIdx.x * kRows;
  const int head = blockIdx.y % heads, batch = blockIdx.y / heads;
  k += batch * sk.batch + head * sk.head;
  v += batch * sv.batch + head * sv.head;
  const int last = causal && m0 + kRows < n ? m0 + kRows : n;
  const int tiles = (last + kKeys - 1) / kKeys;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbar_init(&smem.full[s], 1);
      mbar_init(&smem.empty[s], kRows);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == kRows / 32) {
    if (elect_one()) {
      for (int t = 0; t < tiles; ++t) {
        const int stage = t % kStages, round = t / kStages;
        if (round > 0) mbar_wait(&smem.empty[stage], (round - 1) & 1);
        const int rows = n - t * kKeys < kKeys ? n - t * kKeys : kKeys;
        mbar_expect_tx(&smem.full[stage], 2 * rows * kRowBytes);
        for (int r = 0; r < rows; ++r) {
          const int64_t row = t * kKeys + r;
          bulk_copy(smem.k[stage][r], k + row * sk.seqlen, kRowBytes, &smem.full[stage]);
          bulk_copy(smem.v[stage][r], v + row * sv.seqlen, kRowBytes, &smem.full[stage]);
        }
      }
    }
    return;
  }

  const int row = m0 + threadIdx.x;
  float rq[kDim], acc[kDim] = {};
  const float* const mine =
      q + batch * sq.batch + head * sq.head + (row < n ? row : n - 1) * sq.seqlen;
  for (int d = 0; d < kDim; d += 4)
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(rq[d]), "=f"(rq[d + 1]), "=f"(rq[d + 2]), "=f"(rq[d + 3])
                 : "l"(mine + d));
  float most = -INFINITY, sum = 0.0f;
  for (int t = 0; t < tiles; ++t) {
    const int stage = t % kStages;
    mbar_wait(&smem.full[stage], t / kStages & 1);
    const int end = causal && row + 1 < n ? row + 1 : n;
    for (int j = 0; j < kKeys && t * kKeys + j < end; ++j) {
      float s = 0.0f;
      for (int d = 0; d < kDim; ++d)
        asm("fma.rn.f32 %0, %1, %2, %0;" : "+f"(s) : "f"(rq[d]), "f"(smem.k[stage][j][d]));
      s *= scale_log2;
      const float now = fmaxf(most, s), factor = exp2f(most - now), p = exp2f(s - now);
      most = now;
      sum = sum * factor + p;
      for (int d = 0; d < kDim; ++d) acc[d] = acc[d] * factor + p * smem.v[stage][j][d];
    }
    // The next copy into the stage must not overtake these loads.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    mbar_arrive(&smem.empty[stage]);
  }
  if (row >= n) return;
  float* const to = o + batch * so.batch + head * so.head + row * so.seqlen;
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  for (int d = 0; d < kDim; d += 4)
    asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + d), "f"(acc[d] * inverse),
                 "f"(acc[d + 1] * inverse), "f"(acc[d + 2] * inverse), "f"(acc[d + 3] * inverse)
                 : "memory");
}

}  // namespace

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& p, cudaStream_t stream) {
  if (p.head_dim != kDim) return cudaErrorInvalidValue;
  const dim3 grid((p.seqlen + kRows - 1) / kRows, p.batch * p.num_heads);
  return launch_kernel(attend, grid, dim3(kThreads), sizeof(Smem), stream,
                       static_cast<const float*>(p.q), static_cast<const float*>(p.k),
                       static_cast<const float*>(p.v), static_cast<float*>(p.o), p.q_strides,
                       p.k_strides, p.v_strides, p.o_strides, p.seqlen, p.num_heads,
                       static_cast<float>(p.softmax_scale * 1.4426950408889634), p.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
