// What a compiler of a tile language leaves: one asm per instruction, registers and predicates
//
// Layout: strided
// Takes:  float16, head_dim 32
// Needs:  sm_80

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

// clang-format off
#define INST(...) asm volatile(__VA_ARGS__)
#define LOAD_V4(r, ptr, pred)                                                     \
  INST("{\n\t"                                                                    \
       ".reg .pred p;\n\t"                                                        \
       "setp.ne.b32 p, %5, 0;\n\t"                                                \
       "mov.u32 %0, 0x0;\n\t"                                                     \
       "mov.u32 %1, 0x0;\n\t"                                                     \
       "mov.u32 %2, 0x0;\n\t"                                                     \
       "mov.u32 %3, 0x0;\n\t"                                                     \
       "@p ld.global.v4.b32 { %0, %1, %2, %3 }, [ %4 + 0 ];\n\t"                  \
       "}"                                                                        \
       : "=&r"((r)[0]), "=&r"((r)[1]), "=&r"((r)[2]), "=&r"((r)[3])               \
       : "l"(ptr), "r"(pred))
#define STORE_B32(ptr, x, pred)                                                   \
  INST("{\n\t"                                                                    \
       ".reg .pred p;\n\t"                                                        \
       "setp.ne.b32 p, %2, 0;\n\t"                                                \
       "@p st.global.b32 [ %1 + 0 ], { %0 };\n\t"                                 \
       "}" : : "r"(x), "l"(ptr), "r"(pred) : "memory")
#define COPY_16(smem, ptr, bytes)                                                 \
  INST("cp.async.cg.shared.global [ %0 + 0 ], [ %1 + 0 ], 0x10, %2;"              \
       : : "r"(smem), "l"(ptr), "r"(bytes) : "memory")
#define LDMATRIX_X4(r, smem, trans)                                               \
  INST("ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0, %1, %2, %3}, [%4 + 0];" \
       : "=r"((r)[0]), "=r"((r)[1]), "=r"((r)[2]), "=r"((r)[3]) : "r"(smem) : "memory")
#define MMA(d, a, b0, b1)                                                         \
  INST("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "                       \
       "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"  \
       : "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3])                   \
       : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "r"(b0), "r"(b1))
// clang-format on

// num_warps = 4, num_stages = 2, BLOCK_M = 64, BLOCK_N = 32, HEAD_DIM = 32; a stage is K and V.
constexpr int kStage = 4096;

// Reduces over the four lanes of a row.
template <bool kMax>
__device__ __forceinline__ float reduce_row(float x) {
  float y;
  INST("shfl.sync.bfly.b32 %0, %1, 0x2, 0x1f, 0xffffffff;" : "=f"(y) : "f"(x));
  if (kMax)
    INST("max.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  else
    INST("add.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  INST("shfl.sync.bfly.b32 %0, %1, 0x1, 0x1f, 0xffffffff;" : "=f"(y) : "f"(x));
  if (kMax)
    INST("max.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  else
    INST("add.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
}

// Rows of 64 bytes; the row permutes their four chunks.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  uint32_t bits, at;
  INST("bfe.u32 %0, %1, 1, 2;" : "=r"(bits) : "r"(row));
  INST("xor.b32 %0, %1, %2;" : "=r"(at) : "r"(chunk), "r"(bits));
  INST("shl.b32 %0, %0, 4;" : "+r"(at));
  INST("mad.lo.s32 %0, %1, 64, %0;" : "+r"(at) : "r"(row));
  return at;
}

__device__ __forceinline__ void copy_tile(uint32_t smem, const half* ptr, int64_t stride, int rows,
                                          uint32_t tid) {
  uint32_t row, chunk, bytes;
  uint64_t from;
  INST("bfe.u32 %0, %1, 2, 5;" : "=r"(row) : "r"(tid));
  INST("and.b32 %0, %1, 3;" : "=r"(chunk) : "r"(tid));
  INST("{\n\t.reg .pred p;\n\tsetp.lt.s32 p, %1, %2;\n\tselp.b32 %0, 0x10, 0x0, p;\n\t}" : "=r"(
           bytes) : "r"(row),
       "r"(rows));
  const uint32_t last = static_cast<int>(row) < rows ? row : 0;
  INST("mad.wide.u32 %0, %1, %2, %3;" : "=l"(from) : "r"(last), "r"((uint32_t)(2 * stride)),
       "l"(ptr));
  INST("mad.wide.u32 %0, %1, 16, %0;" : "+l"(from) : "r"(chunk));
  COPY_16(smem + swizzled(row, chunk), from, bytes);
}

__global__ void __launch_bounds__(128, 1)
    attn_fwd_0d1d2d3d(const half* arg0, const half* arg1, const half* arg2, half* arg3, Strides sq,
                      Strides sk, Strides sv, Strides so, int arg4, int arg5, float arg6,
                      bool arg7) {
  extern __shared__ __align__(16) char global_smem[];
  uint32_t tid, pid0, pid1, lane, warp, smem;
  INST("mov.u32 %0, %%tid.x;" : "=r"(tid));
  INST("mov.u32 %0, %%ctaid.x;" : "=r"(pid0));
  INST("mov.u32 %0, %%ctaid.y;" : "=r"(pid1));
  INST("and.b32 %0, %1, 31;" : "=r"(lane) : "r"(tid));
  INST("bfe.u32 %0, %1, 5, 2;" : "=r"(warp) : "r"(tid));
  INST("{\n\t.reg .u64 t;\n\tcvta.to.shared.u64 t, %1;\n\tcvt.u32.u64 %0, t;\n\t}" : "=r"(
      smem) : "l"(global_smem));
  uint32_t head, batch;
  INST("rem.s32 %0, %1, %2;" : "=r"(head) : "r"(pid1), "r"(arg5));
  INST("div.s32 %0, %1, %2;" : "=r"(batch) : "r"(pid1), "r"(arg5));
  arg0 += batch * sq.batch + head * sq.head;
  arg1 += batch * sk.batch + head * sk.head;
  arg2 += batch * sv.batch + head * sv.head;
  arg3 += batch * so.batch + head * so.head;
  const int m0 = static_cast<int>(pid0) * 64;

  // q: global to registers, to shared memory, to the operands of the dot product
  uint32_t q[2][4], row, chunk, pred;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    INST("bfe.u32 %0, %1, 2, 5;" : "=r"(row) : "r"(tid));
    INST("and.b32 %0, %1, 3;" : "=r"(chunk) : "r"(tid));
    row += 32 * i;
    INST("{\n\t.reg .pred p;\n\tsetp.lt.s32 p, %1, %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(
             pred) : "r"(m0 + row),
         "r"(arg4));
    LOAD_V4(q[i], arg0 + static_cast<int64_t>(m0 + row) * sq.seqlen + chunk * 8, pred);
    INST("st.shared.v4.b32 [ %0 + 0 ], { %1, %2, %3, %4 };" ::"r"(smem + swizzled(row, chunk)),
         "r"(q[i][0]), "r"(q[i][1]), "r"(q[i][2]), "r"(q[i][3]) : "memory");
  }
  INST("bar.sync 0;" :: : "memory");
#pragma unroll
  for (int i = 0; i < 2; ++i)
    LDMATRIX_X4(q[i], smem + swizzled(warp * 16 + (lane & 15), i * 2 + (lane >> 4)), "");
  INST("bar.sync 0;" :: : "memory");

  int end = arg4;
  if (arg7) INST("min.s32 %0, %0, %1;" : "+r"(end) : "r"(m0 + 64));
  copy_tile(smem, arg1, sk.seqlen, arg4, tid);
  copy_tile(smem + 2048, arg2, sv.seqlen, arg4, tid);
  INST("cp.async.commit_group;");

  float acc[4][4], l_i[2], m_i[2];
#pragma unroll
  for (int i = 0; i < 16; ++i) INST("mov.f32 %0, 0f00000000;" : "=f"(acc[i / 4][i % 4]));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    INST("mov.f32 %0, 0fFF800000;" : "=f"(m_i[r]));
    INST("mov.f32 %0, 0f00000000;" : "=f"(l_i[r]));
  }
  for (int n0 = 0; n0 < end; n0 += 32) {
    const uint32_t now = smem + (n0 / 32 & 1) * kStage, next = smem + (~(n0 / 32) & 1) * kStage;
    if (n0 + 32 < end) {
      copy_tile(next, arg1 + (n0 + 32) * sk.seqlen, sk.seqlen, arg4 - n0 - 32, tid);
      copy_tile(next + 2048, arg2 + (n0 + 32) * sv.seqlen, sv.seqlen, arg4 - n0 - 32, tid);
    }
    INST("cp.async.commit_group;");
    INST("cp.async.wait_group 0x1;" :: : "memory");
    INST("bar.sync 0;" :: : "memory");

    float qk[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t b[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) INST("mov.b32 %0, 0x0;" : "=f"(qk[j][c]));
      LDMATRIX_X4(b, now + swizzled(j * 8 + (lane & 7), lane >> 3), "");
      MMA(qk[j], q[0], b[0], b[1]);
      MMA(qk[j], q[1], b[2], b[3]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int offs_m = m0 + warp * 16 + (lane >> 2) + 8 * r;
      float high = m_i[r];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = qk[i / 2][2 * r + i % 2];
        const int offs_n = n0 + (i / 2) * 8 + (lane & 3) * 2 + i % 2;
        INST("mul.f32 %0, %0, %1;" : "+f"(x) : "f"(arg6));
        INST(
            "{\n\t"
            ".reg .pred p;\n\t"
            ".reg .pred q;\n\t"
            "setp.lt.s32 p, %1, %2;\n\t"
            "setp.le.s32 q, %1, %3;\n\t"
            "and.pred p, p, q;\n\t"
            "selp.f32 %0, %0, 0fFF800000, p;\n\t"
            "}" : "+f"(x) : "r"(offs_n),
            "r"(arg4), "r"(arg7 ? offs_m : 0x7fffffff));
        INST("max.f32 %0, %0, %1;" : "+f"(high) : "f"(x));
      }
      high = reduce_row<true>(high);
      float alpha, sum;
      INST("sub.f32 %0, %1, %2;" : "=f"(alpha) : "f"(m_i[r]), "f"(high));
      INST("ex2.approx.f32 %0, %0;" : "+f"(alpha));
      INST("mov.b32 %0, %1;" : "=f"(m_i[r]) : "f"(high));
      INST("mov.f32 %0, 0f00000000;" : "=f"(sum));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = qk[i / 2][2 * r + i % 2];
        INST("sub.f32 %0, %0, %1;" : "+f"(x) : "f"(high));
        INST("ex2.approx.f32 %0, %0;" : "+f"(x));
        INST("add.f32 %0, %0, %1;" : "+f"(sum) : "f"(x));
      }
      sum = reduce_row<false>(sum);
      INST("fma.rn.f32 %0, %0, %1, %2;" : "+f"(l_i[r]) : "f"(alpha), "f"(sum));
#pragma unroll
      for (int i = 0; i < 8; ++i)
        INST("mul.f32 %0, %0, %1;" : "+f"(acc[i / 2][2 * r + i % 2]) : "f"(alpha));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t p[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = &qk[2 * k + i / 2][i % 2 * 2];
        INST("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(p[i]) : "f"(two[1]), "f"(two[0]));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        LDMATRIX_X4(b, now + 2048 + swizzled(k * 16 + (lane & 15), j * 2 + (lane >> 4)), ".trans");
        MMA(acc[2 * j], p, b[0], b[1]);
        MMA(acc[2 * j + 1], p, b[2], b[3]);
      }
    }
    INST("bar.sync 0;" :: : "memory");
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int offs_m = m0 + warp * 16 + (lane >> 2) + 8 * r;
    INST("{\n\t.reg .pred p;\n\tsetp.lt.s32 p, %1, %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(
             pred) : "r"(offs_m),
         "r"(arg4));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t pair;
      float* const x = &acc[j][2 * r];
      INST("div.full.f32 %0, %0, %1;" : "+f"(x[0]) : "f"(l_i[r]));
      INST("div.full.f32 %0, %0, %1;" : "+f"(x[1]) : "f"(l_i[r]));
      INST("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x[1]), "f"(x[0]));
      STORE_B32(arg3 + static_cast<int64_t>(offs_m) * so.seqlen + j * 8 + (lane & 3) * 2, pair,
                pred);
    }
  }
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& p, cudaStream_t stream) {
  if (p.head_dim != 32) return cudaErrorInvalidValue;
  const dim3 grid(ceil_div(p.seqlen, 64), p.batch * p.num_heads);
  return launch_kernel(attn_fwd_0d1d2d3d, grid, 128, 2 * kStage, stream,
                       static_cast<const half*>(p.q), static_cast<const half*>(p.k),
                       static_cast<const half*>(p.v), static_cast<half*>(p.o), p.q_strides,
                       p.k_strides, p.v_strides, p.o_strides, p.seqlen, p.num_heads,
                       static_cast<float>(p.softmax_scale * 1.4426950408889634), p.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
