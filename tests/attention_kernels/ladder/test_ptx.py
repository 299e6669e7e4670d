"""Inline PTX in the emulator: every instruction of the table, and what is refused."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels import ladder
from attention_kernels.errors import KernelError, UnavailableBackendError
from attention_kernels.ladder import build, header, ptx
from attention_kernels.ladder.op import load_op
from tests.attention_kernels.conftest import faulty_op
from tests.attention_kernels.test_negative import CONTROLS, NEGATIVE
from tests.conftest import needs_compiler, version_file

STRANGERS = header.CSRC.parents[1] / "tests" / "attention_kernels" / "strangers"
# Files that this project can call as they are, and the others by an entry beside them.
CALLED = [one.stem for one in STRANGERS.glob("*.cu") if '"common.cuh"' in one.read_text("utf-8")]
VERSIONS = sorted(CALLED + [one.stem for one in STRANGERS.glob("*.entry.cu")])
# A warp runs each case, which stores 1 where a result is right.
KERNEL = """
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstdint>
#include "common.cuh"
namespace attention::ATTENTION_VERSION {
#define BITS(type, x) emulator::bit_cast<type>(x)
__global__ void run(const float* memory, float* o) {
  __shared__ alignas(128) uint32_t shared[256];
  __shared__ uint64_t barrier;
  const unsigned lane = threadIdx.x;
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t at_barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
  for (int i = lane; i < 256; i += 32) shared[i] = i;
  __syncwarp();
%s
}
int64_t scratch_floats(const Params&) { return 0; }
cudaError_t launch(const Params& p, cudaStream_t s) {
  return launch_kernel(run, 1, 32, 0, s, static_cast<const float*>(p.q), static_cast<float*>(p.o));
}
}
"""
A, B, C = '"r"(0x89abcdefu + lane)', '"r"(0x01234567u)', '"r"(5)'
HALVES = '"r"(0x3c004000u), "r"(0x40003c00u)'  # (2, 1) and (1, 2), the lower one first
F, G = '"f"(1.5f + lane)', '"f"(-2.25f)'
WIDE = '"l"(0x123456789abcdef0ull), "l"(7ull)'
CASES = [
    # instruction, constraint of the result, inputs, expected
    ("mov.u32 %0, %%laneid;", "r", "", "lane"),
    ("mov.u32 %0, %tid.x;", "r", "", "lane"),
    ("mov.u32 %0, %%ntid.x;", "r", "", "32"),
    ("mov.u32 %0, %%lanemask_lt;", "r", "", "(1u << lane) - 1"),
    ("mov.u32 %0, %%lanemask_ge;", "r", "", "~((1u << lane) - 1)"),
    ("mov.b32 %0, 0x3f800000;", "f", "", "1.0f"),
    ("mov.f32 %0, 0f40490FDB;", "f", "", "3.14159274f"),
    ("mov.b32 %0, {%1, %2};", "r", '"h"((short)1), "h"((short)2)', "0x20001u"),
    ("mov.b64 %0, {%1, %2};", "l", f"{A}, {B}", "0x0123456789abcdefull + lane"),
    ("{.reg .b32 lo, hi; mov.b64 {lo, hi}, %1; mov.b32 %0, hi;}", "r", WIDE[:28], "0x12345678u"),
    ("add.s32 %0, %1, %2;", "r", f"{A}, {B}", "0x89abcdefu + lane + 0x01234567u"),
    ("sub.u32 %0, %1, %2;", "r", f"{B}, {C}", "0x01234562u"),
    ("add.u64 %0, 1, %1; sub.u64 %0, %0, %2;", "l", '"l"(~0ull), "n"(3)', "-3ull"),
    ("add.s32 %0, %1, %2;", "r", '"n"(0), "n"(-1)', "-1"),
    ("add.u64 %0, %1, %2;", "l", WIDE, "0x123456789abcdef7ull"),
    ("mul.lo.u32 %0, %1, %2;", "r", f"{A}, {B}", "(0x89abcdefu + lane) * 0x01234567u"),
    ("mul.hi.u32 %0, %1, %2;", "r", f"{A}, {B}", "(0x89abcdefull + lane) * 0x01234567u >> 32"),
    ("mul.hi.s32 %0, %1, %2;", "r", '"r"(-7), "r"(1 << 30)', "unsigned(-2)"),
    ("mul.wide.u32 %0, %1, %2;", "l", f"{A}, {B}", "(0x89abcdefull + lane) * 0x01234567u"),
    ("mul.wide.s16 %0, %1, %2;", "r", '"h"((short)-3), "h"((short)5)', "unsigned(-15)"),
    ("mad.lo.s32 %0, %1, %1, %1;", "r", C, "30"),
    ("mad.hi.u32 %0, %1, %2, %3;", "r", f"{A}, {B}, {C}",
     "((0x89abcdefull + lane) * 0x01234567u >> 32) + 5"),
    ("mad.wide.u32 %0, %1, %1, %2;", "l", f'{C}, "l"(1ull << 40)', "(1ull << 40) + 25"),
    ("div.s32 %0, %1, %2;", "r", f'"r"(-17), {C}', "unsigned(-3)"),
    ("rem.s32 %0, %1, %2;", "r", f'"r"(-17), {C}', "unsigned(-2)"),
    ("neg.s32 %0, %1;", "r", C, "unsigned(-5)"),
    ("abs.s32 %0, %1;", "r", '"r"(-9)', "9"),
    ("min.s32 %0, %1, %2;", "r", f"{A}, {C}", "0x89abcdefu + lane"),
    ("max.u32 %0, %1, %2;", "r", f"{A}, {C}", "0x89abcdefu + lane"),
    ("min.f32 %0, %1, %2;", "f", f"{F}, {G}", "-2.25f"),
    ("max.f16x2 %0, %1, %2;", "r", HALVES, "0x40004000u"),
    ("add.rn.ftz.f32 %0, %1, %2;", "f", f"{F}, {G}", "1.5f + lane - 2.25f"),
    ("sub.f64 %0, %1, 0.5;", "d", '"d"(2.0)', "1.5"),
    ("mul.f16x2 %0, %1, %2;", "r", HALVES, "0x40004000u"),
    ("add.f16 %0, %1, %1;", "h", '"h"((short)0x3c00)', "0x4000"),
    ("fma.rn.bf16x2 %0, %1, %1, %1;", "r", '"r"(0x40003f80u)', "0x40c04000u"),
    ("fma.rn.f32 %0, %1, %2, 0f3F800000;", "f", f"{F}, {G}", "fmaf(1.5f + lane, -2.25f, 1)"),
    ("div.approx.f32 %0, %1, %2;", "f", f"{F}, {G}", "(1.5f + lane) / -2.25f"),
    ("ex2.approx.ftz.f32 %0, %1;", "f", F, "exp2f(1.5f + lane)"),
    ("lg2.approx.f32 %0, %1;", "f", F, "log2f(1.5f + lane)"),
    ("rcp.rn.f32 %0, %1;", "f", F, "1 / (1.5f + lane)"),
    ("rsqrt.approx.f32 %0, %1;", "f", F, "1 / sqrtf(1.5f + lane)"),
    ("tanh.approx.f32 %0, %1;", "f", G, "tanhf(-2.25f)"),
    ("neg.f32 %0, %1;", "f", G, "2.25f"),
    ("abs.bf16x2 %0, %1;", "r", '"r"(0xbf80c000u)', "0x3f804000u"),
    ("and.b32 %0, %1, %2;", "r", f"{A}, {B}", "(0x89abcdefu + lane) & 0x01234567u"),
    ("or.b64 %0, %1, %2;", "l", WIDE, "0x123456789abcdef7ull"),
    ("xor.b32 %0, %1, 0xff;", "r", C, "0xfau"),
    ("not.b32 %0, %1;", "r", C, "~5u"),
    ("{.reg .pred p, q; setp.eq.u32 p, %1, 5; not.pred q, p; xor.pred p, p, q;"
     " selp.u32 %0, 7, 9, p;}", "r", C, "7"),
    ("shl.b32 %0, %1, 33;", "r", C, "0"),
    ("shr.s32 %0, %1, 40;", "r", A, "~0u"),
    ("shr.u32 %0, %1, 4;", "r", A, "(0x89abcdefu + lane) >> 4"),
    ("shf.l.wrap.b32 %0, %1, %2, 8;", "r", f"{A}, {B}", "0x23456789u"),
    ("shf.r.clamp.b32 %0, %1, %2, 32;", "r", f"{A}, {B}", "0x01234567u"),
    ("bfe.u32 %0, %1, 8, 12;", "r", B, "0x345u"),
    ("bfe.s32 %0, %1, 4, 4;", "r", '"r"(0xa0)', "unsigned(-6)"),
    ("bfi.b32 %0, %1, %2, 4, 8;", "r", f"{C}, {B}", "0x01234057u"),
    ("brev.b32 %0, %1;", "r", C, "0xa0000000u"),
    ("popc.b32 %0, %1;", "r", B, "12"),
    ("popc.b64 %0, %1;", "r", '"l"(~0ull)', "64"),
    ("clz.b32 %0, %1;", "r", B, "7"),
    ("bfind.u32 %0, %1;", "r", C, "2"),
    ("bfind.u64 %0, %1;", "r", '"l"(0ull)', "~0u"),
    ("sad.s32 %0, %1, %2, %1;", "r", f'{C}, "r"(-3)', "13"),
    ("slct.f32.s32 %0, %1, %2, -1;", "f", f"{F}, {G}", "-2.25f"),
    ("prmt.b32 %0, %1, %2, 0x5410;", "r", f"{B}, {C}", "0x00054567u"),
    ("lop3.b32 %0, %1, %2, %3, 0xe8;", "r", f"{C}, {B}, {A}",
     "(5u & 0x01234567u) | (5u & (0x89abcdefu + lane)) | (0x01234567u & (0x89abcdefu + lane))"),
    ("{.reg .pred p; setp.lt.and.s32 p, %1, 6, 1; selp.b32 %0, 1, 0, p;}", "r", C, "1"),
    ("{.reg .pred p; setp.neu.f32 p, %1, %1; selp.b32 %0, 1, 0, p;}", "r",
     '"f"(NAN)', "1"),
    ("{.reg .pred p; setp.ne.f32 p, %1, %1; selp.b32 %0, 1, 0, p;}", "r", '"f"(NAN)', "0"),
    ("{.reg .pred p; setp.gt.u32 p, %1, 9; mov.u32 %0, 1; @!p mov.u32 %0, 2;}", "r",
     '"r"(lane)', "lane > 9 ? 1 : 2"),
    ("{.reg .u32 i; mov.u32 i, 0; mov.u32 %0, 0; LOOP: add.u32 %0, %0, %1; add.u32 i, i, 1;"
     " {.reg .pred p; setp.lt.u32 p, i, 4; @p bra LOOP;} // four times\n}", "r", C, "20"),
    ("cvt.rn.f16.f32 %0, %1;", "h", G, "0xc080"),
    ("cvt.rn.bf16x2.f32 %0, %1, %2;", "r", '"f"(1.0f), "f"(2.0f)', "0x3f804000u"),
    ("cvt.rz.f16x2.f32 %0, %1, %1;", "r", '"f"(1.9999f)', "0x3fff3fffu"),
    ("cvt.rn.relu.f16x2.f32 %0, %1, %2;", "r", '"f"(-1.0f), "f"(2.0f)', "0x4000u"),
    ("cvt.f32.f16 %0, %1;", "f", '"h"((short)0x3c00)', "1.0f"),
    ("cvt.rna.tf32.f32 %0, %1;", "r", '"f"(1.0f + 0x1p-11f)', "0x3f802000u"),
    ("cvt.rni.s32.f32 %0, %1;", "r", '"f"(2.5f)', "2"),
    ("cvt.rzi.u32.f32 %0, %1;", "r", '"f"(-3.0f)', "0"),
    ("cvt.rmi.f32.f32 %0, %1;", "f", G, "-3.0f"),
    ("cvt.rn.f32.s32 %0, %1;", "f", '"r"(-3)', "-3.0f"),
    ("cvt.u64.u32 %0, %1;", "l", A, "0x89abcdefull + lane"),
    ("cvt.s32.s8 %0, %1;", "r", '"r"(0x80)', "unsigned(-128)"),
    ("cvt.sat.u8.s32 %0, %1;", "r", '"r"(300)', "255"),
    ("cvta.to.shared.u64 %0, %1;", "l", '"l"(shared)', "at"),
    ("cvta.to.global.u64 %0, %1;", "l", '"l"(memory)', "(uint64_t)memory"),
    ("cvta.shared.u64 %0, %1;", "l", '"l"((uint64_t)at)', "(uint64_t)shared"),
    ("{.reg .pred p; isspacep.shared p, %1; selp.b32 %0, 1, 0, p;}", "r", '"l"(shared)', "1"),
    ("{.reg .pred p; isspacep.global p, %1; selp.b32 %0, 1, 0, p;}", "r", '"l"(shared)', "0"),
    ("getctarank.shared::cluster.u32 %0, %1;", "r", '"r"(at)', "0"),
    ("ld.shared.u32 %0, [%1 + 8];", "r", '"r"(at)', "2"),
    ("{.reg .b32 a, b; ld.shared::cta.v2.b32 {a, b}, [%1]; add.u32 %0, a, b;}", "r",
     '"r"(at + 8 * lane)', "4 * lane + 1"),
    ("ld.shared.u8 %0, [%1+4];", "r", '"r"(at + 4)', "2"),
    ("ld.volatile.shared.u32 %0, [%1];", "r", '"r"(at + 4 * lane)', "lane"),
    ("ld.global.nc.L1::no_allocate.f32 %0, [%1];", "f", '"l"(memory)', "memory[0]"),
    ("ld.acquire.gpu.global.b32 %0, [%1];", "f", '"l"(memory)', "memory[0]"),
    ("ld.global.acquire.gpu.b32 %0, [%1];", "f", '"l"(memory)', "memory[0]"),
    ("{.reg .pred p; setp.lt.u32 p, %1, 3; bar.red.popc.u32 %0, 0, p;}", "r", '"r"(lane)', "3"),
    ("{.reg .pred p; setp.lt.u32 p, %1, 3; barrier.cta.red.or.aligned.pred p, 0, p;"
     " selp.u32 %0, 1, 0, p;}", "r", '"r"(lane)', "1"),
    ("{.reg .pred p; setp.lt.u32 p, %1, 3; bar.red.and.pred p, 0, p; selp.u32 %0, 1, 0, p;}", "r",
     '"r"(lane)', "0"),
    ("{.reg .u32 a; mov.u32 a, %smid; mov.u32 %0, %nsmid; add.u32 %0, %0, a;}", "r", "", "8"),
    ("mov.u32 %0, 0;", "r", "", "__reduce_add_sync(~0u, lane) - 496 + __byte_perm(0, 0, 0) +"
     " __match_any_sync(~0u, 1) + __funnelshift_l(0, 1, 0) - __brev(1u << 31) - ~0u - 0u"),
    ("mov.b32 %0, 0x3c00;", "r", "",
     "__half_as_ushort(__habs(__low2half(__floats2half2_rn(-1, 2))))"
     " + __hgt(__half(1), __half(2)) + __hisnan(__half(1))"),
    ("st.shared.v2.b32 [%1], {%2, 9}; ld.shared.u32 %0, [%1 + 4];", "r",
     f'"r"(at + 512 + 8 * lane), {C}', "9"),
    ("st.relaxed.cta.shared.u32 [%1], %2; ld.shared.u32 %0, [%1];", "r",
     f'"r"(at + 512 + 4 * lane), {C}', "5"),
    ("atom.shared.add.u32 %0, [%1], 3;", "r", '"r"(at + 4 * lane)', "lane"),
    ("atom.acq_rel.cta.shared.cas.b32 %0, [%1], 77, 78;", "r", '"r"(at + 4 * lane)', "lane + 3"),
    ("red.shared.max.s32 [%1], %2; ld.shared.u32 %0, [%1];", "r",
     '"r"(at + 512 + 4 * lane), "r"(1000)', "1000"),
    ("atom.shared.inc.u32 %0, [%1], 1000; ld.shared.u32 %0, [%1];", "r",
     '"r"(at + 512 + 4 * lane)', "0"),
    ("shfl.sync.bfly.b32 %0, %1, 1, 0x1f, 0xffffffff;", "r", '"r"(lane)', "lane ^ 1"),
    ("{.reg .pred p; .reg .b32 x; shfl.sync.up.b32 x|p, %1, 2, 0, -1; selp.b32 %0, x, 99, p;}",
     "r", '"r"(lane)', "lane < 2 ? 99 : lane - 2"),
    ("{.reg .pred p; .reg .b32 x; shfl.sync.down.b32 x|p, %1, 1, 0x1807, -1;"
     " selp.b32 %0, x, 99, p;}", "r", '"r"(lane)', "lane % 8 == 7 ? 99 : lane + 1"),
    ("shfl.sync.idx.b32 %0, %1, 3, 0x1f, -1;", "r", '"r"(lane * 2)', "6"),
    ("{.reg .pred p; setp.lt.u32 p, %1, 3; vote.sync.ballot.b32 %0, p, -1;}",
     "r", '"r"(lane)', "7"),
    ("{.reg .pred p; setp.lt.u32 p, %1, 3; vote.sync.any.pred p, !p, -1; selp.b32 %0, 1, 0, p;}",
     "r", '"r"(lane)', "1"),
    ("{.reg .pred p; setp.lt.u32 p, %1, 3; vote.sync.all.pred p, p, -1; selp.b32 %0, 1, 0, p;}",
     "r", '"r"(lane)', "0"),
    ("redux.sync.add.u32 %0, %1, 0xffffffff;", "r", '"r"(lane)', "496"),
    ("redux.sync.max.s32 %0, %1, 0xffffffff;", "r", '"r"(lane - 5)', "26"),
    ("match.any.sync.b32 %0, %1, 0xffffffff;", "r", '"r"(lane / 16)', "0xffffu << lane / 16 * 16"),
    ("{.reg .pred p, q; match.all.sync.b32 %0|p, %1, -1; vote.sync.uni.pred q, !p, -1;"
     " @!q mov.u32 %0, 5; @p mov.u32 %0, 6;}", "r", '"r"(lane)', "0"),
    ("add.sat.f32 %0, %1, %1; mul.sat.f32 %0, %0, %2; fma.rn.sat.f32 %0, %0, %0, %2;", "f",
     f"{F}, {G}", "0.0f"),
    ("activemask.b32 %0;", "r", "", "~0u"),
    ("{.reg .pred p; elect.sync %0|p, -1; @!p mov.u32 %0, 5;}", "r", "", "lane == 0 ? 0 : 5"),
    ("{.reg .b32 x; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%1], {%2};"
     " ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];}", "r",
     '"r"(at + 512 + 16 * (lane % 8)), "r"(lane * 2 | (lane * 2 + 1) << 16)',
     "(lane % 4 * 2 * 8 + lane / 4) | (lane % 4 * 2 * 8 + 8 + lane / 4) << 16"),
    ("cp.async.ca.shared.global [%1], [%2], 4; cp.async.wait_all; ld.shared.f32 %0, [%1];", "f",
     '"r"(at + 512 + 4 * lane), "l"(memory + lane)', "memory[lane]"),
    ("cp.async.ca.shared.global [%1], [%2], 4, 0; cp.async.commit_group; cp.async.wait_group 0;"
     " ld.shared.f32 %0, [%1];", "f", '"r"(at + 512 + 4 * lane), "l"(memory + lane)', "0.0f"),
    ("{.reg .b32 %%rx; .reg.pred %%px; elect.sync %%rx|%%px, %1; mov.u32 %0, 0;"
     " @%%px mov.s32 %0, 7;}", "r", '"r"(0xffffffff)', "lane == 0 ? 7 : 0"),
    ("{.reg .b32 x<3>; mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, x0, x1, x2},"
     " {%1, %1, %2, %2}, {%3, %3}, {5, 5, 5, 5};}", "r",
     '"r"(lane / 4 * 0x01010101), "r"(0xffffffff), "r"(lane / 4 * 0x01010101)',
     "5 + 16 * (lane / 4 - 1) * (lane % 4 * 2)"),
    ("max.NaN.f32 %0, %1, %2; min.NaN.f32 %0, %0, %2; copysign.f32 %0, %1, %2;", "f",
     f"{G}, {F}", "-1.5f - lane"),
    ("bar.warp.sync -1; fence.acq_rel.gpu; membar.cta; fence.proxy.async; nanosleep.u32 20;"
     " prefetch.global.L2 [%1]; mov.u32 %0, 1;", "r", '"l"(memory)', "1"),
    ("{.reg .pred p; .reg .b64 s; setp.ne.u32 p, %2, 0; @!p mbarrier.init.shared.b64 [%1], 32;"
     " bar.warp.sync -1; mbarrier.arrive.shared.b64 s, [%1];"
     " W: mbarrier.test_wait.shared.b64 p, [%1], s; @!p bra W; mov.u32 %0, 1;}",
     "r", '"r"(at_barrier), "r"(lane)', "1"),
    ("{.reg .pred p; cp.async.mbarrier.arrive.noinc.shared.b64 [%1];"
     " W: mbarrier.try_wait.parity.shared.b64 p, [%1], 1, 1000; @!p bra W; mov.u32 %0, 1;}",
     "r", '"r"(at_barrier)', "1"),
    ("cp.async.mbarrier.arrive.shared.b64 [%1]; mbarrier.expect_tx.relaxed.cta.shared.b64 [%1], 0;"
     " mbarrier.inval.shared.b64 [%1]; mov.u32 %0, 1;", "r", '"r"(at_barrier)', "1"),
    ("{.reg .pred p; setp.eq.u32 p, %2, 0; st.shared.f32 [%1], 0f40400000;"
     " fence.proxy.async.shared::cta; bar.warp.sync -1;"
     " @p cp.async.bulk.global.shared::cta.bulk_group [%3], [%1], 16;"
     " @p cp.async.bulk.commit_group; @p cp.async.bulk.wait_group 0; bar.warp.sync -1;"
     " ld.global.f32 %0, [%3];}", "f",
     '"r"(at + 512 + 4 * lane), "r"(lane), "l"(memory + 32)', "3.0f"),
    ("cp.async.bulk.prefetch.L2.global [%1], 16; fence.proxy.async.global; fence.sc.cta;"
     " cp.async.bulk.prefetch.tensor.2d.L2.global [%1, {0, 0}]; membar.gl; mov.u32 %0, 1;", "r",
     '"l"(memory)', "1"),
    ("{.reg .b32 x; mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, x}, {%1, %1, %1, %1},"
     " {%1, %1}, {%1, %1};}", "r", '"r"(0x3c003c00)', "0x4c404c40"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, _, _, _}, {%1, %1}, {%1},"
     " {%2, %2, %2, %2};", "f", '"r"(0x3f803f80), "f"(0.5f)', "8.5f"),
    ("barrier.cta.sync.aligned 0; bar.sync 1, 32; mov.u32 %0, 1;", "r", "", "1"),
    ("{.reg .pred p; setp.lt.u32 p, %1, 99; @p exit; trap;}", "r", '"r"(lane)', "0"),
]  # fmt: skip
STORED = {"r": "uint32_t", "l": "uint64_t", "h": "uint16_t", "f": "float", "d": "double"}

pytestmark = needs_compiler


def statement(text, constraint, inputs, expected, row):
    kind = STORED[constraint]
    escaped = text.replace("\n", "\\n")
    return (
        f"  {{ {kind} x = 0; o[{row} * 32 + lane] = {'1' if 'exit' in text else '0'}; "
        f'asm volatile("{escaped}" : "={constraint}"(x) : {inputs}); '
        f"o[{row} * 32 + lane] = x == static_cast<{kind}>({expected}); }}"
    )


def kernel_of(text):
    return ladder.resolve(str(version_file("asm.cu", text)))


def both_builds(text):
    """Return a kernel as it is, and with the check for races."""
    version = header.race_checked(header.of_file(version_file("asm.cu", text)))
    return kernel_of(text), ladder.backend("RACES", "test", version)


def test_every_instruction_does_what_plain_code_does():
    body = "\n  __syncwarp();\n".join(statement(*case, row) for row, case in enumerate(CASES))
    for spec in both_builds(KERNEL % body):
        q = torch.arange(32.0 * len(CASES)).reshape(1, -1, 1, 32) + 1
        right = spec.attention(q, q, q)[0, :, 0]
        wrong = [CASES[i][0] for i in range(len(CASES)) if not bool((right[i] == 1).all())]
        assert wrong == [], "\n".join(wrong)


def preprocessed(file, csrc=header.CSRC):
    command = [*build.compilers.binding_flags("emulator", csrc), *build.PTX_FLAGS]
    macros = build.compilers.macros(header.of_file(file).builds()[0])
    return build.compilers.output_of([*command, *macros, "-E", "-x", "c++", str(file)])


def raw_copy(folder):
    """Copy csrc so that its kernels call the asm of ptx.cuh, tma.cuh and wgmma.cuh.

    The copies of the functions have other names, as the emulator's are there, too.
    """
    csrc = folder / "csrc"
    shutil.copytree(header.CSRC, csrc)
    files = (csrc / f"{name}.cuh" for name in ("ptx", "tma", "wgmma", "fp32/three_products"))
    for file in (*files, *csrc.glob("*/v*.cu")):
        file.write_text(raw_source(file), "utf-8")
    return csrc


def raw_source(file):
    text = re.sub(r"\bptx(?=::| \{|;)", "raw", file.read_text("utf-8"))
    text = text.replace("#ifdef ATTENTION_EMULATOR", "#ifdef ATTENTION_NEVER")
    return re.sub(r"\b(Swizzle|make_tensor_map)\b", r"raw_\1", text) + "\n// asm(\n"


def test_the_cases_the_headers_and_the_strangers_use_the_whole_table(tmp_path, monkeypatch):
    used, matched = set(), ptx._Asm._matched

    def noting(self, row, *rest):
        if (code := matched(self, row, *rest)) is not None:
            used.add(row)
        return code

    monkeypatch.setattr(ptx._Asm, "_matched", noting)
    csrc = raw_copy(tmp_path)
    includes = (f'#include "{name}.cuh"\n' for name in ("ptx", "tma", "wgmma"))
    every = tmp_path / "csrc" / "fp32" / "every.cu"
    every.write_text("".join(includes))
    files = [every, *(STRANGERS / f"{name}.cu" for name in CALLED)]
    body = "\n".join(statement(*case, row) for row, case in enumerate(CASES))
    texts = [f'# 1 "/case.cu"\n{body}', *(preprocessed(file, csrc) for file in files)]
    for text in texts:
        translated = ptx.translate(text, csrc / "emulator")
        assert not re.search(r"asm[ a-z]*\(\s*\"[^\"]*%[0-9]", translated.rsplit(".cu", 1)[-1])
    assert not (unused := [row.name for row in ptx.ROWS if row not in used]), "\n".join(unused)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('asm("tcgen05.fence;");', "does not take `tcgen05.fence`"),
        (
            'asm("add.sat.s32 %0, %1, 1;" : "=r"(x) : "r"(x));',
            "does not take `add.sat.s32 %0, %1, 1`",
        ),
        ('asm("add.u32 %0, %1;" : "=r"(x) : "r"(x));', "`add.u32 %0, %1` with these operands"),
        ('asm("mov.u32 %0, r;" : "=r"(x));', "has no register r"),
        ('asm("mov.u64 %0, %%clock64;" : "=l"(y));', "has no register %clock64"),
        ('asm("mov.u32 %0, %2;" : "=r"(x) : "r"(x));', "has no register %2"),
        ('asm("mov.u32 %0, 1;" : "=a"(x));', 'does not take the operand "=a"(x)'),
        ('asm("{.reg .b128 q;}");', "has no register of type .b128"),
        ('asm("mov.u32 %0, 1" : "=r"(x));', "`;` is missing"),
        ('asm("bar.red.popc.u32 %0, 0, 0, p;" : "=r"(x));', "does not take `bar.red.popc.u32"),
        ('asm("mov.u32 %0, %1;" : "=r"(x) : "r"(y));', None),
        ('asm("mov.u32 %0, 1;" : "=l"(x));', "no matching function for call to 'output"),
        ('asm("mov.f32 %0, %1;" : "=f"(f) : "r"(f));', "no matching function for call to 'input"),
        ('asm("add.u64 %0, %0, 1;" : "+r"(x));', "no matching function for call to 'get"),
    ],
)
def test_what_is_not_taken_is_an_error_of_the_build_with_its_line(text, told):
    body = f"  unsigned x = 0; uint64_t y = 0; float f = 0;\n  {text}\n  o[lane] = x + y + f;"
    spec = kernel_of(KERNEL % body)
    if told is None:
        spec.prepare("cpu")
        return
    with pytest.raises(UnavailableBackendError) as caught:
        spec.prepare("cpu")
    line = (KERNEL % "\n§").split("§")[0].count("\n") + 1
    assert told in str(caught.value)
    assert f"asm.cu:{line}:" in str(caught.value)


FAULTS = [
    ("ld.shared.u32 %0, [%1];", '"r"(at + (1 << 20))', "address is not in shared memory"),
    ("ld.global.v2.f32 {%0, _}, [%1];", '"l"(memory + 1)', "misaligned"),
    (
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 %0, [%1];",
        '"r"(at + 2)',
        "ldmatrix() at {}: a row does not begin at a multiple of 16 bytes",
    ),
    ("mbarrier.arrive.shared.b64 _, [%1];", '"r"(at_barrier)', "barrier_arrive() at {}"),
    ("trap;", "", "__trap() at {}"),
]


@pytest.fixture(scope="module")
def faulty():
    """A kernel with all of FAULTS, of which the numbers in its memory choose one."""
    body = "  unsigned x = 0;\n"
    for number, (text, inputs, _) in enumerate(FAULTS):
        body += f'  if (memory[lane] == {number}) asm("{text}" : "=r"(x) :\n {inputs});\n'
    return kernel_of(KERNEL % f"{body}  o[lane] = x;")


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_an_error_of_an_instruction_names_the_line(faulty, number):
    line = (KERNEL % "\n§").split("§")[0].count("\n") + 1 + 2 * number
    told, x = FAULTS[number][2], torch.full((1, 1, 1, 32), float(number))
    with pytest.raises(KernelError) as caught:
        faulty.attention(x, x, x)
    assert told.format(f"asm.cu:{line}") in str(caught.value)
    assert f"asm.cu:{line}" in str(caught.value)


def test_asm_in_macros_templates_and_several_lines_is_taken_where_it_stands():
    head = """
#define TEXT(type) "add." #type " "
#define ADD(type, to, ...) \\
  asm volatile(TEXT(type) "%0, %0, %1;" /* the sum */ : "+r"(to) : "n"(__VA_ARGS__))
template <int kMore, typename T>
__device__ T more(T x) {
  if (x > 100)
    ADD(u32, x, kMore ? 2 : 1);
  else
    __asm__ __volatile__(R"(
      { .reg .u32 y; // a comment
        mov.u32 y, %1;
        add.u32 %0, %0, y; /* another */ })"
                         : "+r"(x)
                         : "n"(
// between
#if 1
                             kMore));
#endif
  return x;
}
namespace attention"""
    body = "  o[lane] = more<3>(10u) + more<1>(101u) * 100;\n  o[lane] += __LINE__ * 1e5f;"
    text = (KERNEL % body).replace("namespace attention", head.lstrip(), 1)
    x = torch.zeros(1, 1, 1, 32)
    line = text.split("__LINE__")[0].count("\n") + 1
    assert kernel_of(text).attention(x, x, x).unique().tolist() == [line * 1e5 + 10313]


PIPELINED = """
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  __shared__ float copied[64];
  if (lane == 0) init(&bar, 32);
  __syncwarp();
  auto token = bar.arrive();
  bar.wait(std::move(token));
  cuda::memcpy_async(&copied[lane], memory + lane, sizeof(float), bar);
  bar.arrive_and_wait();
  auto pipe = cuda::make_pipeline();
  for (int i = 0; i < 2; ++i) {
    pipe.producer_acquire();
    cuda::memcpy_async(&copied[lane + 32 * i], memory + lane + 32 * i, sizeof(float), pipe);
    pipe.producer_commit();
  }
  pipe.consumer_wait();
  const float first = copied[lane];
  const bool late = !(copied[lane + 32] == memory[lane + 32]);
  pipe.consumer_release();
  pipe.consumer_wait();
  namespace cg = cooperative_groups;
  const auto tile = cg::tiled_partition<16>(cg::this_thread_block());
  const auto warp = cg::coalesced_threads();
  o[lane] = first + copied[lane + 32] + (late ? 1000 : 0) +
            (tile.ballot(lane % 2) == 0xaaaa && tile.any(1) && !tile.all(lane % 2)) * 2000 +
            (tile.shfl(lane, 3) == lane / 16 * 16 + 3) * 4000 +
            (cg::reduce(warp, 1, cg::plus<int>()) == 32) * 8000;
"""


def test_barriers_pipelines_and_groups_of_the_headers():
    files = "cuda/barrier cuda/pipeline cooperative_groups.h cooperative_groups/reduce.h"
    text = "".join(f"#include <{name}>\n" for name in files.split()) + KERNEL % PIPELINED
    q = torch.arange(64.0).reshape(1, 2, 1, 32)
    for spec in both_builds(text):
        o = spec.attention(q, q, q)[0, 0, 0]
        assert o.tolist() == (q[0, 0, 0] + q[0, 1, 0] + 15000).tolist()


PRODUCT = """
  namespace wmma = nvcuda::wmma;
  __shared__ alignas(32) __nv_bfloat16 a[256];
  __shared__ alignas(32) float c[256];
  for (int i = lane; i < 256; i += 32) a[i] = float(i % 7);
  __syncwarp();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
  wmma::fill_fragment(fc, 0.0f);
  wmma::load_matrix_sync(fa, a, 16);
  wmma::load_matrix_sync(fb, a, 16);
  wmma::mma_sync(fc, fa, fb, fc);
  wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
  __syncwarp();
  o[lane] = c[lane];
"""


COPIED = """
  namespace cde = cuda::device::experimental;
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  __shared__ alignas(128) float tile[32];
  if (lane == 0) {
    init(&bar, 32);
    cde::fence_proxy_async_shared_cta();
  }
  __syncwarp();
  uint64_t token;
  if (lane == 0) {
    cde::cp_async_bulk_tensor_5d_global_to_shared(tile, &map, 0, 0, 0, 1, 0, bar);
    token = cuda::device::barrier_arrive_tx(bar, 1, sizeof(tile));
  } else {
    token = bar.arrive();
  }
  bar.wait(std::move(token));
  tile[lane] += 1;
  cde::fence_proxy_async_shared_cta();
  __syncwarp();
  if (lane == 0) {
    cde::cp_async_bulk_shared_to_global(o, tile, sizeof(tile));
    cde::cp_async_bulk_commit_group();
    cde::cp_async_bulk_wait_group_read<0>();
  }
"""
MAP = """
  CUtensorMap map;
  const cuuint64_t sizes[] = {32, 1, 1, 2, 1}, strides[] = {128, 128, 128, 256};
  const cuuint32_t box[] = {32, 1, 1, 1, 1}, steps[] = {1, 1, 1, 1, 1};
  cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, const_cast<void*>(p.q), sizes,
                         strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                         CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return launch_kernel(run, 1, 32, 0, s, map, """


CALLS = [
    "max(2, 3u) == 3 && abs(-2.5f) == 2.5f && !signbit(1.0f) && isinf(-INFINITY)",
    "CUDART_L2E_F > 1.44f && CUDART_MAX_NORMAL_F == FLT_MAX",
    "__float2int_rd(-2.1f) == -3 && __float2int_ru(2.1f) == 3 && __float2uint_rn(3.5f) == 4",
    "__float2uint_rz(3.9f) == 3 && __uint2float_rn(7) == 7 && __double2float_rn(1.5) == 1.5f",
    "__umulhi(1u << 31, 4) == 2",
    "__popcll(~0ull) == 64 && __ffsll(8) == 4 && __clzll(1) == 63",
    "__isShared(shared) && __isGlobal(memory)",
    "__ldca(memory) == __ldcv(memory) && __ldlu(memory) == *memory",
    "float(__hdiv(h, h)) == 1 && __low2float(__h2div(p, p)) == 1",
    "__low2float(__heq2(p, p)) == 1 && __high2float(__hlt2(p, p)) == 0",
    "__half_as_short(h) == 0x3e00 && __hbgt2(p + p, p) && !__hbeq2(p, p + p)",
    "__hisinf(-CUDART_INF_FP16) == -1 && __low2float(__lowhigh2highlow(p)) == __high2float(p)",
    "__half2int_rz(h) == 1 && __uint2half_rn(3) == 3 && __short_as_half(0x3e00) == 1.5f",
    "__half(__half_raw(h)) == h && (p += p, __high2float(p) == 4)",
    "cub::Max()(1, 2) == cuda::maximum<>{}(1, 2)",
    "cuda::std::numeric_limits<float>::max() == FLT_MAX",
    "block_sum(1.0f) == 32",
]
BLOCK_SUM = """
template <typename T> __device__ __noinline__ T block_sum(T x) {
  static __shared__ T part[4];
  part[0] = 0;
  __syncthreads();
  atomicAdd(part, x);
  __syncthreads();
  return reinterpret_cast<float4*>(part)->x;
}
"""


def test_functions_that_other_peoples_kernels_call():
    names = ("math_constants.h", "float.h", "cooperative_groups.h", "cub/cub.cuh")
    names += ("cuda/std/limits", "cublasLt.h", "cuda_runtime_api.h", "cudaTypedefs.h")
    names += ("driver_types.h", "cuda_fp8.h", "cuda_profiler_api.h")
    body = """
  const __half h = 1.5f;
  __half2 p(h, __float2half(2));
  cooperative_groups::thread_block_tile<32> warp =
      cooperative_groups::tiled_partition<32>(cooperative_groups::this_thread_block());
"""
    body += "\n".join(f"  o[{i} * 32 + lane] = {one};" for i, one in enumerate(CALLS))
    text = "".join(f"#include <{name}>\n" for name in names) + BLOCK_SUM + KERNEL % body
    q = torch.ones(1, len(CALLS), 1, 32)
    o = kernel_of(text).attention(q, q, q)[0, :, 0]
    assert [one for one, right in zip(CALLS, o, strict=True) if not (right == 1).all()] == []


TENSOR_FLOATS = """
  namespace wmma = nvcuda::wmma;
  __shared__ float a[128], c[256];
  for (int i = lane; i < 128; i += 32) a[i] = i % 7 * (1 + 0x1p-20f);
  __syncwarp();
  wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::col_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 8, float> fc;
  wmma::fill_fragment(fc, 0.0f);
  wmma::load_matrix_sync(fa, a, 8);
  wmma::load_matrix_sync(fb, a, 8);
  for (int i = 0; i < fb.num_elements; ++i) fb.x[i] = wmma::__float_to_tf32(fb.x[i]);
  wmma::mma_sync(fc, fa, fb, fc);
  wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
  __syncwarp();
  o[lane] = c[lane];
  asm volatile("");
"""


def test_fragments_of_tf32_are_rounded():
    x = torch.zeros(1, 1, 1, 32)
    a = (torch.arange(128) % 7).reshape(16, 8).float()
    o = kernel_of("#include <mma.h>\n" + KERNEL % TENSOR_FLOATS).attention(x, x, x)
    assert o.flatten().tolist() == (a @ a.T)[:2].flatten().tolist()


LAUNCHES = """
template <typename T> __global__ void one(T* o, int x) { *o = x; }
template <int kX, typename T> __global__ void __launch_bounds__(32) two(T* o) { one(o, kX); }
cudaError_t launch(const Params& p, cudaStream_t s) {
  float* o = static_cast<float*>(p.o);
  one<<<1, 1>>>(o, 1);
  one<float><<<dim3(1), 1, 0, s>>>(o + 1, 2);
  two<3><<<1, 1>>>(o + 2);
  auto* const local = &two<4, float>;
  local<<<1, 1>>>(o + 3);
  return cudaGetLastError();
}
"""


def test_a_launch_may_leave_arguments_of_a_template_to_be_deduced():
    whole = KERNEL % ""
    text = whole[: whole.index("cudaError_t launch")] + LAUNCHES + "}"
    x = torch.zeros(1, 1, 1, 32)
    assert kernel_of(text).attention(x, x, x).flatten()[:4].tolist() == [1, 2, 3, 4]
    text = text.replace("void __launch", "void __cluster_dims__(2) __launch")
    with pytest.raises(UnavailableBackendError, match=r"does not take __cluster_dims__"):
        kernel_of(text).attention(x, x, x)
    with pytest.raises(UnavailableBackendError, match=r"asm.cu:1.* in functions only"):
        kernel_of("extern __shared__ float memory[];\n" + whole).attention(x, x, x)


def test_tiles_and_bulk_copies_by_the_functions_of_cuda_barrier():
    text = "#include <cuda.h>\n#include <cuda/barrier>\n" + KERNEL % COPIED
    text = text.replace("run(const", "run(const __grid_constant__ CUtensorMap map, const")
    text = text.replace("  return launch_kernel(run, 1, 32, 0, s, ", MAP)
    q = torch.arange(64.0).reshape(1, 2, 1, 32)
    for spec in both_builds(text):
        assert spec.attention(q, q, q)[0, 0, 0].tolist() == [*range(33, 65)]


def test_a_grid_waits_for_all_of_its_blocks_if_they_run_at_once():
    body = """
  const auto grid = cooperative_groups::this_grid();
  for (int i = 0; i < 3; ++i) {
    if (blockIdx.x == 0) atomicAdd(&o[lane], 1.0f);
    grid.sync();
    if (blockIdx.x == 3) atomicAdd(&o[lane], o[lane]);
    grid.sync();
  }
"""
    zero = "  if (blockIdx.x == 0) o[threadIdx.x] = 0;\n  const unsigned lane"
    either = r"p.seqlen == 1 ? launch_at_once(run, 4, 1, \1) : launch_kernel(run, 4, \1);"
    text = KERNEL.replace("  const unsigned lane", zero) % body
    text = re.sub(r"launch_kernel\(run, 1, (.*)\);", either, text)
    one, two = torch.zeros(1, 1, 1, 32), torch.zeros(1, 2, 1, 32)
    for spec in both_builds("#include <cooperative_groups.h>\n" + text):
        assert spec.attention(one, one, one).unique().tolist() == [14]
        with pytest.raises(KernelError, match="blocks do not all run at once"):
            spec.attention(two, two, two)


def test_shared_memory_may_be_used_before_the_previous_kernel_has_ended():
    body = """
  asm volatile("st.shared.u32 [%1], %2; bar.sync 0; griddepcontrol.wait; ld.shared.f32 %0, [%1];"
               : "=f"(o[lane]) : "r"(at + 4 * lane), "r"(0x3f800000) : "memory");
"""
    text = (KERNEL % body).replace("launch_kernel(run, 1,", "launch_early(run, 1, 1,")
    x = torch.zeros(1, 1, 1, 32)
    for spec in both_builds(text):
        assert spec.attention(x, x, x).unique().tolist() == [1]


def test_wmma_multiplies_bfloat16():
    x = torch.zeros(1, 1, 1, 32)
    a = (torch.arange(256.0) % 7).view(16, 16)
    o = kernel_of("#include <mma.h>\n" + KERNEL % PRODUCT).attention(x, x, x)
    assert o.flatten().tolist() == (a @ a.T).flatten()[:32].tolist()


def bits(spec, dtype, head_dim):
    g = torch.Generator().manual_seed(0)
    outputs = []
    for seqlen, is_causal in ((65, True), (130, False)):
        q, k, v = (torch.randn(1, seqlen, 2, head_dim, generator=g).to(dtype) for _ in range(3))
        outputs.append((q, k, v, is_causal, spec.attention(q, k, v, is_causal=is_causal)))
    return outputs


# Races in a few of them; a machine with a GPU has more cores for the rest.
FEW = "groups_fp32", "split_k", "varlen.entry", "wgmma_tma"
SLOW, ON_A_GPU = [pytest.mark.slow], [pytest.mark.gpu]


@pytest.mark.parametrize(
    ("file", "races"),
    [
        *(pytest.param(one, False, marks=SLOW * (one not in FEW)) for one in VERSIONS),
        *(pytest.param(one, True, marks=SLOW if one in FEW else ON_A_GPU) for one in VERSIONS),
    ],
)
def test_a_strangers_kernel_is_right(file, races):
    version = header.of_file(STRANGERS / f"{file}.cu").builds()[0]
    if races:
        version = header.race_checked(version)
    op = load_op(version, "cpu", file)
    for seqlen, is_causal in ((65, True), (130, "causal" in version.only)):
        g = torch.Generator().manual_seed(seqlen)
        shape, dtype = (1, seqlen, 2, version.head_dims[0]), getattr(torch, version.dtype)
        q, k, v = (torch.randn(*shape, generator=g).to(dtype) for _ in range(3))
        o = op(q, k, v, shape[-1] ** -0.5, is_causal)
        inputs = (x.transpose(1, 2).double() for x in (q, k, v))
        expected = scaled_dot_product_attention(*inputs, is_causal=is_causal).transpose(1, 2)
        assert (o - expected).abs().max() < (2e-3 if dtype == torch.float16 else 1e-6)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=SLOW) for name in ("hopper/v09", "fp32/v36")),
        *(pytest.param(f"fp32/v{n}", marks=ON_A_GPU) for n in (17, 21, 27, 28)),
    ],
)
def test_the_asm_of_our_headers_gives_the_bits_of_their_twins(tmp_path, name):
    copy = raw_copy(tmp_path)
    results = []
    for csrc in (header.CSRC, copy):
        (file,) = csrc.glob(f"{name}_*.cu")
        spec, version = ladder.resolve(str(file)), header.of_file(file)
        outputs = bits(spec, getattr(torch, version.dtypes[0]), version.head_dims[-1])
        results.append([o for *_, o in outputs])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# Faults that show only where a function names registers: asm says which ones only in products.
NEEDS_REGISTERS = {"v08_hopper": {17, 22, 24}}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_the_faults_of_the_negative_controls_show_in_asm_too(tmp_path, name, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "2")
    file = tmp_path / "csrc" / "negative" / f"{name}.cu"
    raw_copy(tmp_path)
    file.parent.mkdir()
    file.write_text(raw_source(NEGATIVE / file.name))
    op, control = faulty_op(file, "races", "asm_"), CONTROLS[name]
    silent = {fault for fault in control.messages if not control.run(op, fault)}
    assert control.run(op, 0) == ""
    assert silent - control.may_pass == NEEDS_REGISTERS.get(name, set())
