"""The Triton kernel: compiled on the GPU and, from the same source, interpreted on the CPU."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import re
import threading
from types import ModuleType

import pytest
import torch

from attention_kernels import UnsupportedError, get_backend
from attention_kernels.judge.conformance import LENGTHS, Case, cases, future_leaks, run_case
from attention_kernels.judge.reference import judge
from tests.conftest import DEVICES, usable

NAMES = ["TRITON_FLASH_ATTENTION", "TRITON_FLASH_ATTENTION_TRANSPOSED_K"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEAD_DIMS = (32, 64, 128)
INF, NAN = torch.inf, torch.nan

on_every_device = pytest.mark.parametrize("device", DEVICES)
for_every_name = pytest.mark.parametrize(
    "name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)]
)
for_every_dtype = pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16],
    ids=str,
)


def op_of(name: str):
    get_backend(name).load()
    return getattr(torch.ops.attention_kernels, name.lower()).default


@pytest.fixture
def module(tmp_path, monkeypatch) -> ModuleType:
    """The module of the kernel, and a cache of this test's own for what Triton compiles."""
    pytest.importorskip("triton", reason="needs the Python package triton", exc_type=ImportError)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return importlib.import_module("attention_kernels.backends.triton.flash_attention")


@pytest.fixture
def compiled(module) -> ModuleType:
    """The module where Triton compiles: no GPU is needed for that."""
    if module.triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    return module


def test_the_backends():
    for name in NAMES:
        spec = get_backend(name)
        assert dict(spec.precisions) == {
            "float32": "ieee-fp32",
            "float16": "fp16",
            "bfloat16": "bf16",
        }
        assert spec.head_dims == HEAD_DIMS
        assert spec.emulated_on == ("cpu",)
        assert not spec.needs_contiguous


# Right results


@on_every_device
@for_every_name
@for_every_dtype
def test_conformance(name, device, dtype):
    spec = usable(name, device)
    suite = list(cases(HEAD_DIMS, dtype))
    if device == "cpu":
        # One function runs them all, and an interpreter takes its time: each backend and dtype has
        # others of the cases up to 200, which are four tiles. The six cases of a shape follow each
        # other, so every 11th is another shape and another of the six. gpt2-infer verify NAME
        # --device cpu runs all of them.
        suite = list(cases(HEAD_DIMS, dtype, lengths=LENGTHS[:-2]))
        suite = suite[3 * NAMES.index(name) + DTYPES.index(dtype) :: 11]
    failed = [str(case) for case in suite if not run_case(spec, case, device).passed]
    assert not failed


@for_every_name
@pytest.mark.parametrize(
    ("block_m", "block_n"), [(16, 16), (16, 128), (64, 32), (32, 64), (128, 16), (128, 128)]
)
def test_every_shape_of_a_tile(name, block_m, block_n, module, monkeypatch):
    """The masks, where a tile of keys is narrower than one of queries, as wide and wider."""
    monkeypatch.setattr(module, "INTERPRETED_TILE", {"block_m": block_m, "block_n": block_n})
    spec = usable(name, "cpu")
    for seqlen in (1, 64, 100):
        for is_causal in (True, False):
            case = Case(seqlen, 32, num_heads=1, is_causal=is_causal)
            assert run_case(spec, case, "cpu").passed, case


@for_every_name
@pytest.mark.parametrize(("is_causal", "full", "masked"), [(True, 6, 4), (False, 12, 4)])
def test_only_tiles_that_a_row_sees_are_visited_and_full_ones_unmasked(
    name, is_causal, full, masked, module, monkeypatch
):
    """Four blocks of 64 rows; without the causal mask the last tile of keys is not full."""
    from triton.runtime.interpreter import InterpreterBuilder

    calls = collections.Counter()

    def count(method):
        original = getattr(InterpreterBuilder, method)

        def counted(*arguments, **keywords):
            calls[method] += 1
            return original(*arguments, **keywords)

        monkeypatch.setattr(InterpreterBuilder, method, counted)

    for method in ("create_dot", "create_load", "create_masked_load"):
        count(method)
    monkeypatch.setattr(module, "INTERPRETED_TILE", {"block_m": 64, "block_n": 64})
    case = Case(250, 32, num_heads=1, is_causal=is_causal)
    assert run_case(usable(name, "cpu"), case, "cpu").passed
    assert calls["create_dot"] == 2 * (full + masked)
    assert calls["create_load"] == 2 * full
    # It has a mask, then, and is one of these, which also load the queries of the four blocks.
    assert calls["create_masked_load"] == 2 * (full + masked) + 4


@on_every_device
@for_every_name
@for_every_dtype
def test_the_future_does_not_change_the_past(name, device, dtype):
    spec = usable(name, device)
    for cut in (1, 41, 64, 99):
        assert not future_leaks(spec, Case(100, 64, dtype=dtype), device, cut)


@on_every_device
@for_every_name
@for_every_dtype
@pytest.mark.parametrize(("in_k", "in_v"), [(NAN, 1), (-INF, 1), (1, NAN), (1, INF), (NAN, NAN)])
def test_neither_does_a_future_that_is_not_finite(name, device, dtype, in_k, in_v):
    spec = usable(name, device)
    q, k, v = Case(150, 32, dtype=dtype, num_heads=1).inputs(device)
    before = spec.attention(q, k, v)
    k2, v2 = k.clone(), v.clone()
    k2[:, 70] *= in_k
    v2[:, 70] *= in_v
    after = spec.attention(q, k2, v2)
    assert torch.equal(before[:, :70], after[:, :70])
    if in_k != -INF:  # times q of either sign; some rows may well not look there
        assert not after[:, 70:].isfinite().all(3).any()


@on_every_device
@for_every_name
@pytest.mark.parametrize("is_causal", [True, False])
def test_neither_does_the_memory_around_the_inputs(name, device, is_causal):
    spec = usable(name, device)
    qkv = torch.full((3, 140, 3, 2, 32), NAN, device=device)
    views = qkv[1:2, 20:70].unbind(2)
    inputs = Case(50, 32).inputs(device)
    for view, x in zip(views, inputs, strict=True):
        view.copy_(x)
    o = spec.attention(*views, is_causal=is_causal)
    assert torch.equal(o, spec.attention(*inputs, is_causal=is_causal))


@on_every_device
@for_every_name
@for_every_dtype
@pytest.mark.parametrize("softmax_scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(name, device, dtype, softmax_scale):
    spec = usable(name, device)
    q, k, v = Case(70, 64, dtype=dtype).inputs(device)
    for is_causal in (True, False):
        o = spec.attention(q, k, v, softmax_scale=softmax_scale, is_causal=is_causal)
        assert judge(o, q, k, v, softmax_scale, is_causal).passed


@on_every_device
@for_every_name
def test_strided_views_need_no_copy(name, device, monkeypatch):
    spec = usable(name, device)
    torch.manual_seed(0)
    q = torch.randn(2, 3, 150, 64, device=device).transpose(1, 2)  # heads before positions
    one_key = torch.randn(2, 1, 3, 64, device=device).expand(2, 150, 3, 64)  # any gives the same O
    one_head = torch.randn(4, 150, 1, 80, device=device)[::2, ..., 8:72].expand(2, 150, 3, 64)
    v = torch.randn(4, 160, 3, 4 * 64 + 1, device=device)[1:3, 7:157, :, 65:129]  # not aligned
    for k in (one_key, one_head):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "contiguous", None)
            o = spec.attention(q, k, v)
        assert torch.equal(o, spec.attention(q.contiguous(), k.contiguous(), v.contiguous()))
        assert o.is_contiguous()


def test_two_threads():
    spec = usable(NAMES[0], "cpu")
    inputs = [Case(60, 32, seed=seed).inputs("cpu") for seed in range(2)]
    expected = [spec.attention(*qkv) for qkv in inputs]
    found: list[bool] = []

    def work(qkv, o):
        found.extend(torch.equal(spec.attention(*qkv), o) for _ in range(5))

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 10


# Part of torch


@on_every_device
@for_every_name
def test_opcheck(name, device):
    usable(name, device)
    for dtype in (torch.float32, torch.float16):
        qkv = Case(33, 32, batch=2, dtype=dtype).inputs(device)
        torch.library.opcheck(op_of(name), (*qkv, 0.2, True))


@on_every_device
@for_every_name
def test_torch_compile_fullgraph(name, device):
    """From a cold start, then for another length; on a GPU inductor compiles the kernel, too."""
    spec = usable(name, device)

    def model(q, k, v):
        return spec.attention(q * 2, k, v, softmax_scale=0.1) + 1

    spec._kernels.clear()
    torch.compiler.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seqlen in (33, 40):
        q, k, v = Case(seqlen, 64).inputs(device)
        torch.testing.assert_close(compiled(q, k, v), model(q, k, v), rtol=0, atol=1e-5)


def test_torch_compile_sees_the_kernel_and_the_buckets(compiled, monkeypatch):
    """What torch traces for a CUDA tensor, which takes no GPU: a launch, for sizes of a range."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    shapes = ShapeEnv()
    fake = FakeTensorMode(shape_env=shapes)
    batch, seqlen = fake.from_tensor(torch.empty(3, 100), static_shapes=False).shape
    with fake:
        qkv = torch.empty(batch, seqlen, 3, 4, 64, device="cuda", dtype=torch.float16)
        graph = make_fx(lambda q, k, v: compiled._forward(q, k, v, 0.1, True, True))(*qkv.unbind(2))
    (launch,) = [node for node in graph.graph.nodes if "triton_kernel" in str(node.target)]
    arguments = launch.kwargs["kwargs"]
    assert (arguments["seqlen_bucket"], arguments["heads_bucket"]) == (128, 16)
    assert isinstance(arguments["seqlen"], torch.fx.Node)  # still symbolic
    assert {str(guard.expr).split(" ", 1)[1] for guard in shapes.guards} >= {"<= 128", "<= 16"}


@for_every_name
def test_torch_knows_the_kernels_of_an_op(name, module):
    """Or its cache of compiled graphs would not notice a change of the kernel."""
    from torch._library.triton import get_triton_kernels_for_op

    kernels = get_triton_kernels_for_op(f"attention_kernels::{name.lower()}")
    expected = (module._half, module._half_128, module._float32, module._float32_128)
    assert {*map(id, kernels)} == {*map(id, expected)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "q_sign", "arch"),
    [
        ("fp32", {"q_sign": 1}, 80),
        ("fp32", {"q_sign": 1}, 90),
        ("fp16", {"q_sign": 1}, 80),
        ("bf16", {}, 90),
    ],
)
def test_it_compiles(arch, dtype, q_sign, compiled):
    """q_sign is known for a positive scale; for others it is an argument, and an integer."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    usable(NAMES[0], "cpu").attention(*Case(3, 32).inputs("cpu"))  # the interpreter leaves no trace
    config = (compiled._float32 if dtype == "fp32" else compiled._half).configs[-1]
    constants = {
        "head_dim": 64,
        "is_causal": True,
        "transposed_k": False,
        "interpreted": False,
        **q_sign,
        **config.kwargs,
    }
    names = compiled._compiled.arg_names
    # torch.compile passes a Python float as a double, and Triton as a float.
    types = {"scale_log2": "fp64" if dtype == "fp32" else "fp32"} | {
        name: f"*{dtype}" for name in names if name.endswith("_ptr")
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith("_ptr") or "_stride_" in name
    }
    source = ASTSource(
        compiled._compiled,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x[0-9a-f]+),", ptx)
    assert copies
    assert {*copies} == {"0x10"}  # K and V arrive by 16 bytes
    products = {*re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.\S+", ptx)}
    if dtype == "fp32":
        assert not products  # tensor cores would round to TF32
    else:
        assert products
        assert all(("wgmma" in product) == (arch == 90) for product in products)
        operands = dtype.replace("fp", "f")
        assert all(f"f32.{operands}.{operands}" in product for product in products)


# Refusals


@on_every_device
@for_every_name
def test_what_it_does_not_take(name, device):
    spec = usable(name, device)
    q = torch.zeros(1, 4, 2, 80, dtype=torch.float64, device=device)
    with pytest.raises(UnsupportedError) as caught:
        spec.attention(q, q, q)
    assert caught.value.reasons == [
        "dtype float64 (it takes float32, float16, bfloat16)",
        "head_dim 80 (it takes 32, 64, 128)",
    ]


def test_without_triton_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name in NAMES:
        assert get_backend(name).unavailable_reason("cpu") == "needs the Python package triton"


def test_an_interpreter_that_would_be_timed_is_a_reason(monkeypatch):
    probe = get_backend(NAMES[0]).probe
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert probe("cuda") is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET is set" in probe("cuda")
    assert probe("cpu") is None


def test_tuning_is_not_captured(module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call it once before the capture"):
        module._half.do_bench(None, (0.5,))


def test_buckets(module):
    sizes = [1, 64, 65, 128, 129, 1000]
    assert [module._bucket(size, 64) for size in sizes] == [64, 64, 128, 128, 256, 1024]
    assert [module._bucket(size, 1) for size in (1, 2, 3, 12)] == [1, 2, 4, 16]


# On a GPU; what all kernels share is in test_gpu.py


@pytest.mark.gpu
def test_a_length_of_a_tuned_bucket_is_captured_without_a_call_before(module):
    spec = usable(NAMES[0], "cuda")
    spec.attention(*Case(192, 64, dtype=torch.float16).inputs("cuda"))
    tuned = len(module._half.cache)
    q, k, v = Case(224, 64, dtype=torch.float16).inputs("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = spec.attention(q, k, v)
    graph.replay()
    assert torch.equal(o, spec.attention(q, k, v))
    assert len(module._half.cache) == tuned


@pytest.mark.gpu
def test_a_size_that_is_not_tuned_is_not_captured(module):
    spec = usable(NAMES[0], "cuda")
    q, k, v = Case(100, 64, num_heads=1, dtype=torch.float16).inputs("cuda")
    module._half.cache.clear()
    with (
        pytest.raises(RuntimeError, match="call it once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        spec.attention(q * 2, k, v)  # the product is captured: torch warns of an empty graph
    assert run_case(spec, Case(100, 64, num_heads=1, dtype=torch.float16), "cuda").passed
