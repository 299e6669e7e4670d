"""Somebody else's kernels, called as an Entry says: every way to call one, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels import ladder
from attention_kernels.errors import KernelError, UnavailableBackendError, UnsupportedError
from attention_kernels.inspection import resources
from attention_kernels.inspection.sass.gpus import gpus
from attention_kernels.inspection.sass.predict import predict
from attention_kernels.judge import suite
from attention_kernels.judge.cases import fitted
from attention_kernels.judge.inputs import Case
from attention_kernels.ladder import build, entry, header
from attention_kernels.ladder.header import HeaderError
from attention_kernels.ladder.op import load_op
from tests.attention_kernels.inspection.test_resources import needs_nvcc
from tests.conftest import ROOT, needs_compiler, version_file

STRANGERS = ROOT / "tests" / "attention_kernels" / "strangers"
BHND = "attn<D><<<dim3(N, B * H), 32>>>(q, k, v, o, N, scale) | Tensors: BHND"
ENTRIES = {
    "bhnd": f"{BHND} | Takes: float32, head_dim 32 64",
    "early_flash": """flash_forward(q, k, v, o, zeros(B * H * N),
        filled(B * H * N, -INFINITY), B, H, N, D, scale)
        | Tensors: BHND | Only: !causal | Takes: float32, head_dim 32 64""",
    "packed": """packed::forward(o, qkv, B, N, H, D, scale, causal, stream)
        | Tensors: BN3HD | Takes: float32 bfloat16, head_dim 32 64""",
    "varlen_struct": """run_varlen<D>(q, k, v, o_float, floats(B * N * H), cu_seqlens, B, N, H,
        scale, stream) | Takes: float16, head_dim 64""",
    "extension_accessor": """forward(q, k, v, scale) | Tensors: BHND | Only: !causal && N < 300
        | Takes: float16, head_dim 64""",
}
# torch's headers take the compiler a minute; test_ptx.py has them, too.
EVERY = [pytest.param(x, marks=[pytest.mark.gpu] * ("extension" in x)) for x in ENTRIES]
pytestmark = needs_compiler


def adapted(name, text=""):
    """Return the path of an adapter of a file in STRANGERS, or of another one."""
    file = name if isinstance(name, Path) else STRANGERS / f"{name}.cu"
    return str(entry.adapter(file, text or ENTRIES[file.stem], build.cache_dir()))


def error_of(spec, dtype, head_dim, seqlen, is_causal):
    """Return the largest error of one call with inputs of other strides than its own."""
    qkv = torch.randn(2, seqlen, 3, 3, head_dim, generator=torch.Generator().manual_seed(seqlen))
    q, k, v = qkv.to(getattr(torch, dtype)).unbind(2)
    inputs = (x.transpose(1, 2).double() for x in (q, k, v))
    expected = scaled_dot_product_attention(*inputs, is_causal=is_causal).transpose(1, 2)
    return (spec.attention(q, k, v, is_causal=is_causal) - expected).abs().max().item()


@pytest.mark.parametrize("name", EVERY)
def test_a_call_of_any_signature_is_right(name):
    spec = ladder.resolve(adapted(name))
    is_causal = "!causal" not in spec.version.only
    for dtype in spec.dtypes:
        limit = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
        for head_dim, seqlen in ((spec.head_dims[0], 65), (spec.head_dims[-1], 37)):
            assert error_of(spec, dtype, head_dim, seqlen, is_causal) < limit
    if name != "packed":
        refusal = f"it takes only calls with `{spec.version.only}`"
        with pytest.raises(UnsupportedError, match="it takes only calls") as caught:
            error_of(spec, spec.dtypes[0], spec.head_dims[-1], 5, not is_causal)
        assert caught.value.reasons == [refusal]


@pytest.mark.parametrize(
    "name",  # the others where there are more cores
    [
        pytest.param(x, marks=pytest.mark.slow if x == "early_flash" else pytest.mark.gpu)
        for x in ENTRIES
    ],
)
def test_the_judge_passes_it(name):
    """It tries only what an entry takes, and says so."""
    report = suite.verify(adapted(name), "cpu", quick=True, seed=1)
    assert report.passed
    refused = [one for one in report.refusals if "seqlen 1025" not in one]
    assert (report.checks > 900, refused) == (True, [])


@needs_nvcc
@pytest.mark.parametrize("name", [x for x in ENTRIES if "extension" not in x])
def test_nvcc_compiles_it(name):
    version = ladder.resolve(adapted(name)).version
    case = (1, 64, 1, int("!causal" not in version.only))
    for one in version.builds():
        compiled, _ = resources.compile_version(one, "90")
        launched = {launch.symbol for launch in resources.record(one, [64], case=case)}
        assert any("attention_entry" not in kernel for kernel in launched)
        assert launched <= compiled.keys()


@needs_nvcc
def test_the_predicted_work_grows_with_the_square_of_the_length():
    """Queries are along the first axis of its grid, which in our own kernels counts heads."""
    version, h200 = header.of_file(STRANGERS / "groups_fp32.cu"), gpus()["h200"]
    few, many = (predict(version, h200, seqlen=n, num_heads=3, head_dim=32) for n in (64, 256))
    assert 8 * few.instructions < many.instructions < 17 * few.instructions


def test_the_judge_tries_lengths_that_an_entry_takes():
    version = ladder.resolve(
        adapted("bhnd", f"{BHND} | Only: causal && (N % 64 == 0 || N < 8)")
    ).version
    assert [n for n in (7, 8, 63, 64) if version.takes(B=1, N=n, H=1, D=64, causal=True)] == [7, 64]
    assert not version.takes(B=1, N=64, H=1, D=64, causal=False)
    only = "!causal && B == 1 && N == 256 && default_scale && std::abs(scale) < 1"
    spec = ladder.resolve(adapted("bhnd", f"{BHND} | Only: {only}"))
    case = fitted(Case(65, 64, softmax_scale=0.5, batch=2), spec)
    assert (case.seqlen, case.batch, case.is_causal, case.softmax_scale) == (256, 1, False, None)
    # What is no such formula is not evaluated.
    for only in ("causal.__class__", "'x' * 999999999 * 999999999 == causal"):
        version = ladder.resolve(adapted("bhnd", f"{BHND} | Only: {only}")).version
        assert version.takes(B=1, N=1, H=1, D=64, causal=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attn(q", "bhnd.cu: Entry must be calls such as `attn(q, k, v, o, N)`"),
        ("attn<D><<<N>>>(q)", "bhnd.cu: Entry must be calls such as"),
        (f"{BHND}D", "bhnd.cu: Tensors must be B, N, H, D in any order"),
    ],
)
def test_a_wrong_entry_is_an_error_of_the_header(text, words):
    with pytest.raises(HeaderError, match=re.escape(words)):
        ladder.resolve(adapted("bhnd", text))


def test_a_wrong_name_is_an_error_of_the_adapters_line():
    spec = ladder.resolve(adapted("bhnd", "attm<D><<<N, 32>>>(q, k, v, o, N, scale)"))
    with pytest.raises(UnavailableBackendError, match=r"/bhnd\.cu:2:\d+: error: 'attm'"):
        error_of(spec, "float32", 64, 5, is_causal=True)
    with pytest.raises(UnavailableBackendError, match=r"bhnd\.cu is no version file.* --entry"):
        error_of(ladder.resolve(str(STRANGERS / "bhnd.cu")), "float32", 64, 5, is_causal=True)


def test_a_race_is_reported_although_host_code_exits():
    text = (STRANGERS / "early_flash.cu").read_text()
    file = version_file("racy.cu", text.replace("    __syncthreads();\n", "", 1))
    path = adapted(file, ENTRIES["early_flash"])
    op = load_op(header.race_checked(header.of_file(Path(path))), "cpu", "racy")
    q = torch.zeros(1, 70, 1, 64)
    with pytest.raises(RuntimeError, match="race: lane 1 of warp 0 writes byte"):
        op(q, q, q, 1.0, False)


# Launches of all forms, host code that asks, and errors that it keeps.
FORMS = r"""
#include <cooperative_groups.h>
#include <cstdio>
#define LAUNCH(kernel, ...) kernel<<<dim3(1), \
    32, 0>>>(__VA_ARGS__)
template <int kA, bool kB>
__global__ void add(float* o, float x) { if (kB) o[threadIdx.x] += x * kA; }
__global__ void sync_all(float* o, float x) {
  cooperative_groups::this_grid().sync();
  extern __shared__ __align__(sizeof(float4)) float4 shared[];
  shared[threadIdx.x] = make_float4(x, x, x, x);
  if (blockIdx.x == 0) atomicAdd(&o[threadIdx.x], shared[threadIdx.x].w);
}
namespace attention {
struct Params { float* o; };
void half_of(Params p, const dim3 gridDim, int blockDim);
__global__ void halve(float* o) { o[blockIdx.x * blockDim.x + threadIdx.x] /= 2; }
void half_of(Params p, const dim3 gridDim, int blockDim) { halve<<<gridDim, blockDim>>>(p.o); }
void host(float* o, int mode, cudaStream_t stream) {
  puts("kernel<<<1, 2>>>(text)");
  cudaMemsetAsync(o, 0, 128, stream);
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  size_t most;
  cudaMemGetInfo(&most, &p.totalConstMem);
  cudaMemcpy2D(o, 64, o, 64, 32, 2, cudaMemcpyDefault);
  const auto kernel = &add<2, (3 > 2)>;
  add<(1 > 2 ? 4 : 1), true><<<p.multiProcessorCount >> 3, dim3(32, 1), 0, stream>>>(o, 1);
  mode > 5 ? LAUNCH(kernel, o, 1) : kernel<<<
      1, 32>>>(o, 2);
  float x = 3;
  void* args[] = {&o, &x};
  cudaLaunchCooperativeKernel((void*)sync_all, dim3(2), dim3(32), args, 512, stream);
  cudaLaunchConfig_t config = {.gridDim = 1, .blockDim = 32};
  config.blockDim.x = 32;
  if (mode == 1) config.blockDim = dim3(33 * 32);
  cudaError_t error = cudaLaunchKernelEx(&config, add<1, true>, o, 10.0f);
  dim3 gridDim(1), blockDim(32);
  ::attention::half_of({o}, gridDim, blockDim.x);
  if (mode == 2) add<1, true><<<1, 2000>>>(o, 1);
  if (mode == 3) add<1, true><<<1, 32>>>(nullptr, 1), cudaGetLastError();
  if (error == cudaSuccess) cudaDeviceSynchronize();
}
}  // namespace attention
"""


def test_host_code_launches_and_asks():
    file = version_file("forms.cu", FORMS)
    spec = ladder.resolve(adapted(file, "attention::host(o, N - 1, stream) | Only: N > 0"))

    def first(mode):
        q = torch.zeros(1, 1 + mode, 1, 32)
        return spec.attention(q, q, q, is_causal=True)

    assert first(0).unique().tolist() == [(1 + 4 + 3 + 10) / 2]
    for mode, words in ((1, "InvalidConfiguration"), (2, "InvalidConfiguration")):
        with pytest.raises(UnsupportedError, match=words):
            first(mode)
    with pytest.raises(KernelError, match=r"cudaErrorIllegalAddress.*forms\.cu"):
        first(3)
