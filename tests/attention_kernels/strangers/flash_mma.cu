// FlashAttention-2 with raw PTX: mma.sync m16n8k16, ldmatrix, cp.async in two stages
//
// Layout: strided
// Takes:  float16, head_dim 64
// Needs:  sm_80

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "common.cuh"

#define LDSM_X4(r, addr)                                                            \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n" \
               : "=r"((r)[0]), "=r"((r)[1]), "=r"((r)[2]), "=r"((r)[3])             \
               : "r"(addr))
#define LDSM_X2_T(r0, r1, addr)                                                   \
  asm volatile("ldmatrix.sync.aligned.x2.trans.m8n8.shared.b16 {%0, %1}, [%2];\n" \
               : "=r"(r0), "=r"(r1)                                               \
               : "r"(addr))
#define MMA_TEXT(type) "mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 "
#define MMA(d, a, b0, b1) \
  asm volatile(MMA_TEXT(f16)                                                            \
               "{%0,  %1,  %2,  %3}, "                                                  \
               "{%4,  %5,  %6,  %7}, "                                                  \
               "{%8,  %9}, {%0,  %1,  %2,  %3};\n"                                      \
               : "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3])                 \
               : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "r"(b0), "r"(b1))
#define CP_ASYNC_COMMIT() asm volatile("cp.async.commit_group;\n" ::)

namespace attention::ATTENTION_VERSION {

constexpr int D = 64, BM = 64, BN = 64, THREADS = 128;
constexpr int TILE_BYTES = 64 * D * 2;

template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  uint32_t x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
  return x;
}

__device__ __forceinline__ float butterfly(float x, int lanes) {
  float y;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(y) : "f"(x), "r"(lanes));
  return y;
}

// 128-byte rows, whose 16-byte chunks are permuted by the row
__device__ __forceinline__ uint32_t swizzle(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void load_tile(uint32_t smem, const half* g, int64_t stride, int rows) {
#pragma unroll
  for (int i = threadIdx.x; i < 64 * 8; i += THREADS) {
    const int r = i / 8, c = i % 8;
    const int bytes = r < rows ? 16 : 0;
    const half* src = g + (r < rows ? r : 0) * stride + c * 8;
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(smem + swizzle(r, c)),
        "l"(src), "r"(bytes));
  }
}

__global__ void __launch_bounds__(THREADS)
    flash(const half* q, const half* k, const half* v, half* o, Strides sq, Strides sk, Strides sv,
          Strides so, int n, int heads, float scale_log2, bool causal) {
  extern __shared__ __align__(128) uint8_t smem_raw[];
  uint32_t warp, lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  warp = threadIdx.x >> 5;
  const uint32_t sQ = static_cast<uint32_t>(__cvta_generic_to_shared(smem_raw));
  const uint32_t sK = sQ + TILE_BYTES, sV = sK + 2 * TILE_BYTES;
  const int m0 = blockIdx.x * BM, head = blockIdx.y % heads, batch = blockIdx.y / heads;
  q += batch * sq.batch + head * sq.head + m0 * sq.seqlen;
  k += batch * sk.batch + head * sk.head;
  v += batch * sv.batch + head * sv.head;
  o += batch * so.batch + head * so.head;
  const int end = causal && m0 + BM < n ? m0 + BM : n;
  const int tiles = (end + BN - 1) / BN;

  load_tile(sQ, q, sq.seqlen, n - m0);
  load_tile(sK, k, sk.seqlen, n);
  load_tile(sV, v, sv.seqlen, n);
  CP_ASYNC_COMMIT();

  uint32_t rQ[D / 16][4];
  float rO[D / 8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
  for (int t = 0; t < tiles; ++t) {
    const int n0 = t * BN, stage = t & 1;
    if (t + 1 < tiles) {
      load_tile(sK + (stage ^ 1) * TILE_BYTES, k + (n0 + BN) * sk.seqlen, sk.seqlen, n - n0 - BN);
      load_tile(sV + (stage ^ 1) * TILE_BYTES, v + (n0 + BN) * sv.seqlen, sv.seqlen, n - n0 - BN);
    }
    CP_ASYNC_COMMIT();
    cp_async_wait<1>();
    asm volatile("bar.sync 0;" ::: "memory");
    if (t == 0) {
#pragma unroll
      for (int i = 0; i < D / 16; ++i)
        LDSM_X4(rQ[i], sQ + swizzle(warp * 16 + lane % 16, i * 2 + lane / 16));
    }

    float rS[BN / 8][4] = {};
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < D / 16; i += 2) {
        uint32_t b[4];
        LDSM_X4(b, sK + stage * TILE_BYTES + swizzle(j * 8 + lane % 8, i * 2 + lane / 8));
        MMA(rS[j], rQ[i], b[0], b[1]);
        MMA(rS[j], rQ[i + 1], b[2], b[3]);
      }
    }

    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = m0 + warp * 16 + lane / 4 + 8 * r;
      float most = row_max[r];
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int col = n0 + j * 8 + lane % 4 * 2 + c;
          float& s = rS[j][2 * r + c];
          s = col < n && (!causal || col <= row) ? s * scale_log2 : -INFINITY;
          most = fmaxf(most, s);
        }
      }
      most = fmaxf(most, butterfly(most, 1));
      most = fmaxf(most, butterfly(most, 2));
      factor[r] = most == -INFINITY ? 1.0f : fast_exp2(row_max[r] - most);
      row_max[r] = most;
      row_sum[r] *= factor[r];
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& s = rS[j][2 * r + c];
          s = most == -INFINITY ? 0.0f : fast_exp2(s - most);
          row_sum[r] += s;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) rO[j][c] *= factor[c / 2];
    }
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) {
      const uint32_t rP[4] = {pack(rS[2 * i][0], rS[2 * i][1]), pack(rS[2 * i][2], rS[2 * i][3]),
                              pack(rS[2 * i + 1][0], rS[2 * i + 1][1]),
                              pack(rS[2 * i + 1][2], rS[2 * i + 1][3])};
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        uint32_t b0, b1;
        LDSM_X2_T(b0, b1, sV + stage * TILE_BYTES + swizzle(i * 16 + lane % 16, j));
        MMA(rO[j], rP, b0, b1);
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = m0 + warp * 16 + lane / 4 + 8 * r;
    row_sum[r] += butterfly(row_sum[r], 1);
    row_sum[r] += butterfly(row_sum[r], 2);
    const float scale = 1.0f / row_sum[r];
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      half* const to = o + int64_t{row} * so.seqlen + j * 8 + lane % 4 * 2;
      const uint32_t x = pack(rO[j][2 * r] * scale, rO[j][2 * r + 1] * scale);
      asm volatile(
          "{\n"
          "  .reg .pred p;\n"
          "  setp.lt.s32 p, %2, %3;\n"
          "  @p st.global.b32 [%0], %1;\n"
          "}\n" ::"l"(to),
          "r"(x), "r"(row), "r"(n)
          : "memory");
    }
  }
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& p, cudaStream_t stream) {
  if (p.head_dim != D) return cudaErrorInvalidValue;
  const dim3 grid((p.seqlen + BM - 1) / BM, p.batch * p.num_heads);
  return launch_kernel(flash, grid, dim3(THREADS), 5 * TILE_BYTES, stream,
                       static_cast<const half*>(p.q), static_cast<const half*>(p.k),
                       static_cast<const half*>(p.v), static_cast<half*>(p.o), p.q_strides,
                       p.k_strides, p.v_strides, p.o_strides, p.seqlen, p.num_heads,
                       static_cast<float>(p.softmax_scale * 1.4426950408889634), p.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
