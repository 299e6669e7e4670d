// Hopper: raw wgmma with 64-bit descriptors, tiles by TMA with maps from the driver
//
// Layout: strided
// Takes:  float16, head_dim 64
// Needs:  sm_90a

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int D = 64, BM = 64, BN = 64;

__device__ static inline uint64_t encode(uint64_t x) { return (x & 0x3FFFF) >> 4; }

__device__ uint64_t make_smem_desc(const half* ptr) {
  const uint32_t addr = static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
  uint64_t desc = 0;
  desc |= encode(addr);
  desc |= encode(16) << 16;
  desc |= encode(1024) << 32;
  desc |= 1llu << 62;  // 128B swizzle
  return desc;
}

#define ACC(d)                                                                                  \
  "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),     \
      "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), \
      "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), \
      "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), \
      "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), \
      "+f"(d[7][2]), "+f"(d[7][3])
#define ACC_TEXT                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "

template <int ScaleA, int ScaleB, int TnspA, int TnspB>
__device__ void wgmma_ss(float d[8][4], const half* sA, const half* sB, int scale_d) {
  const uint64_t desc_a = make_smem_desc(sA), desc_b = make_smem_desc(sB);
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " ACC_TEXT
      "%32, %33, p, %35, %36, %37, %38;\n"
      "}\n"
      : ACC(d)
      : "l"(desc_a), "l"(desc_b), "r"(scale_d), "n"(int32_t(ScaleA)), "n"(int32_t(ScaleB)),
        "n"(int32_t(TnspA)), "n"(int32_t(TnspB)));
}

__device__ void wgmma_rs_t(float d[8][4], const uint32_t (&a)[4], const half* sB) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " ACC_TEXT
               "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
               : ACC(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(make_smem_desc(sB)));
}

__device__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int N>
__device__ void warpgroup_wait() {
  static_assert(N >= 0 && N <= 7, "N must be 0 to 7");
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}

__device__ void tma_load(half* dst, const CUtensorMap* map, uint64_t* bar, int row, int head,
                         int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(dst))),
      "l"(reinterpret_cast<uint64_t>(map)),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(bar))), "r"(0), "r"(row), "r"(head),
      "r"(batch)
      : "memory");
}

__device__ void wait(uint64_t* bar, uint32_t parity) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(bar));
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred P_OUT; "
        "mbarrier.try_wait.parity.shared::cta.b64 P_OUT, [%1], %2; "
        "selp.b32 %0, 1, 0, P_OUT; }"
        : "=r"(done)
        : "r"(at), "r"(parity)
        : "memory");
  }
}

__global__ void __launch_bounds__(128)
    flash(const __grid_constant__ CUtensorMap mq, const __grid_constant__ CUtensorMap mk,
          const __grid_constant__ CUtensorMap mv, half* o, Strides so, int n, int heads,
          float scale_log2, bool causal) {
  __shared__ alignas(1024) half sQ[BM * D];
  __shared__ alignas(1024) half sK[BN * D];
  __shared__ alignas(1024) half sV[BN * D];
  __shared__ uint64_t bar;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = blockIdx.x * BM;
  const int head = blockIdx.y % heads, batch = blockIdx.y / heads;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(
        static_cast<uint32_t>(__cvta_generic_to_shared(&bar))));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  float rO[8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
  const int end = causal ? min(n, m0 + BM) : n;
  for (int n0 = 0, phase = 0; n0 < end; n0 += BN, phase ^= 1) {
    if (threadIdx.x == 0) {
      const int bytes = (n0 == 0 ? BM * D : 0) * 2 + 2 * BN * D * 2;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                       static_cast<uint32_t>(__cvta_generic_to_shared(&bar))),
                   "r"(bytes)
                   : "memory");
      if (n0 == 0) tma_load(sQ, &mq, &bar, m0, head, batch);
      tma_load(sK, &mk, &bar, n0, head, batch);
      tma_load(sV, &mv, &bar, n0, head, batch);
    }
    wait(&bar, phase);
    float rS[8][4];
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < D; k += 16) wgmma_ss<1, 1, 0, 0>(rS, sQ + k, sK + k, k > 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = m0 + warp * 16 + lane / 4 + 8 * r;
      float most = row_max[r];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int col = n0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
        float& s = rS[i / 2][2 * r + i % 2];
        s = col < n && (!causal || col <= row) ? s * scale_log2 : -INFINITY;
        most = fmaxf(most, s);
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      factor[r] = most == -INFINITY ? 1.0f : exp2f(row_max[r] - most);
      row_max[r] = most;
      row_sum[r] *= factor[r];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& s = rS[i / 2][2 * r + i % 2];
        s = most == -INFINITY ? 0.0f : exp2f(s - most);
        row_sum[r] += s;
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) rO[i / 4][i % 4] *= factor[i % 4 / 2];
    uint32_t rP[BN / 16][4];
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const pair = &rS[2 * i + j / 2][j % 2 * 2];
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(rP[i][j]) : "f"(pair[1]), "f"(pair[0]));
      }
    }
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) wgmma_rs_t(rO, rP[i], sV + i * 16 * D);
    warpgroup_commit();
    warpgroup_wait<0>();
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = m0 + warp * 16 + lane / 4 + 8 * r;
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
    if (row >= n) continue;
    half* const to = o + batch * so.batch + head * so.head + row * so.seqlen + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *reinterpret_cast<half2*>(to + 8 * j) =
          __floats2half2_rn(rO[j][2 * r] / row_sum[r], rO[j][2 * r + 1] / row_sum[r]);
  }
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t make_map(CUtensorMap* map, const void* x, const Strides& strides, const Params& p) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t sizes[4] = {D, cuuint64_t(p.seqlen), cuuint64_t(p.num_heads),
                               cuuint64_t(p.batch)};
  const cuuint64_t bytes[3] = {cuuint64_t(strides.seqlen) * 2, cuuint64_t(strides.head) * 2,
                               cuuint64_t(strides.batch) * 2};
  const cuuint32_t box[4] = {D, 64, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, const_cast<void*>(x), sizes, bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t launch(const Params& p, cudaStream_t stream) {
  if (p.head_dim != D) return cudaErrorInvalidValue;
  CUtensorMap maps[3];
  if (make_map(&maps[0], p.q, p.q_strides, p) != cudaSuccess ||
      make_map(&maps[1], p.k, p.k_strides, p) != cudaSuccess ||
      make_map(&maps[2], p.v, p.v_strides, p) != cudaSuccess)
    return cudaErrorInvalidValue;
  const dim3 grid((p.seqlen + BM - 1) / BM, p.batch * p.num_heads);
  return launch_kernel(flash, grid, dim3(128), 0, stream, maps[0], maps[1], maps[2],
                       static_cast<half*>(p.o), p.o_strides, p.seqlen, p.num_heads,
                       static_cast<float>(p.softmax_scale * 1.4426950408889634), p.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
