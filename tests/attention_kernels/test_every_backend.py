"""What every backend must do on every device that it runs on.

On the CPU, kernels for a GPU are emulated or interpreted. That is slow, so each backend gets a
share of the judge's cases; `gpt2-infer verify NAME` runs all of them. Without a GPU, only the
newest version of each ladder and precision is emulated, and the first of some. The tests in
backends/ hold what is particular to one family.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attention_kernels import BackendSpec, UnsupportedError, list_backends
from attention_kernels.judge.cases import EDGES, usual_head_dim
from attention_kernels.judge.suite import Case, DecodeCase, cases_for, run_case
from attention_kernels.judge.worker import Runner
from tests.attention_kernels.backends.common import FP32, OLDER, QUICK, STRIDED_HALF, op_of
from tests.conftest import needs_flash_attention

SPECS = [spec for spec in list_backends() if spec.chooses is None]  # an alias runs one of them
HEAD_DIMS = (32, 64, 128)
one_tile = pytest.mark.usefixtures("one_tile")


def each(
    where: Callable[[BackendSpec], bool] = lambda _: True,
    *,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    dtypes: int | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test by backend, dtype (at most `dtypes` of them) and device."""
    found = []
    for spec in filter(where, SPECS):
        for at, name in enumerate(spec.dtypes[:dtypes]):
            for device in (device for device in devices if device in spec.device_types):
                is_slow = device == "cpu" and (spec.name not in QUICK or at > 0)
                needs_gpu = device == "cuda" or (spec.name in OLDER and spec.name not in QUICK)
                marks = [pytest.mark.gpu] * needs_gpu + [pytest.mark.slow] * is_slow
                values = spec, getattr(torch, name), device
                found.append(pytest.param(*values, id=f"{spec.name}-{name}-{device}", marks=marks))
    return pytest.mark.parametrize(("spec", "dtype", "device"), found)


def usable_head_dims(spec: BackendSpec, dtype: torch.dtype, device: str) -> list[int]:
    """Return the head_dims to test; skip the test if the backend cannot run or refuses all."""
    if reason := spec.unavailable_reason(device):
        pytest.skip(reason)
    if spec.name == "PYTORCH_SDPA_FLASH_ATTENTION":
        needs_flash_attention(dtype, device)
    if not spec.has_attention():
        return [*spec.head_dims]
    head_dims = spec.head_dims or HEAD_DIMS
    inputs = {d: torch.zeros(1, 8, 2, d, dtype=dtype, device=device) for d in head_dims}
    taken = [head_dim for head_dim, q in inputs.items() if not spec.refusals(q, q, q)]
    return taken or pytest.skip("it refuses the dtype or every head_dim")


def call(spec: BackendSpec, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return spec.attention(*inputs) if spec.has_attention() else spec.decode(*inputs)


# Right results


def passes(spec: BackendSpec, case: Case | DecodeCase, device: str) -> bool:
    try:
        return run_case(spec, case, device).passed
    except UnsupportedError:  # too little shared memory, or what PyTorch on a GPU refuses
        return case.head_dim == 128 or (spec.family == "pytorch" and device == "cuda")


@one_tile
@each()
def test_conformance(spec, dtype, device):
    """An output must also be contiguous and new, and the inputs unchanged."""
    usable_head_dims(spec, dtype, device)
    cases = cases_for(Runner(spec, device), [dtype], 0, quick=True)
    step = 10 if device == "cuda" else 150 if spec.family in ("triton", "numpy") else 40
    failed = [str(case) for case in cases[::step] if not passes(spec, case, device)]
    assert not failed


@one_tile
@each(lambda spec: spec.family not in ("decode", "pytorch"))
def test_a_future_of_any_size_changes_nothing(spec, dtype, device):
    """Later values choose no scale for earlier rows, and 0 times an overflow stays out of them."""
    head_dim = min(usable_head_dims(spec, dtype, device), key=lambda known: abs(known - 64))
    q, k, v = Case(100, head_dim, num_heads=1, dtype=dtype).inputs(device)
    before = spec.attention(q, k, v)
    for cut in (41, 64, 81):
        future = v.clone()
        future[:, cut:] = torch.finfo(v.dtype).max * v[:, cut:].sign()
        assert torch.equal(spec.attention(q, k, future)[:, :cut], before[:, :cut]), cut


@each(lambda spec: spec.version is not None, devices=("cpu",))
def test_neither_the_order_of_threads_nor_unwritten_memory_matters(
    spec, dtype, device, monkeypatch
):
    """A race, or a read of memory that nobody wrote, would make these runs differ."""
    head_dims = usable_head_dims(spec, dtype, device)
    inputs = [Case(70, d, dtype=dtype).inputs(device) for d in head_dims[::2]]
    if not spec.has_attention():
        case = DecodeCase(64, dtype, lengths=EDGES, max_seqlen=max(EDGES))
        inputs = [case.inputs(device)]
    expected = [call(spec, x) for x in inputs]
    for settings in (
        {"ORDER": "reverse", "POISON": "41200000", "THREADS": "1"},  # the poison is 10.0f
        {"ORDER": "shuffle:1"},
    ):
        for name, value in settings.items():
            monkeypatch.setenv(f"ATTENTION_EMULATOR_{name}", value)
        for x, o in zip(inputs, expected, strict=True):
            assert torch.equal(call(spec, x), o), settings


# Part of torch


def registers_an_op(spec: BackendSpec) -> bool:
    """Return whether to test the op; those of all version files are registered in one place."""
    tested = (FP32[0], "CUSTOM_CUDA_VERSION_36", STRIDED_HALF[0])
    return spec.name in tested or spec.family in ("triton", "numpy")


@each(registers_an_op, dtypes=2)
def test_opcheck(spec, dtype, device):
    head_dim = usable_head_dims(spec, dtype, device)[0]
    qkv = Case(33, head_dim, batch=2, dtype=dtype).inputs(device)
    if spec.version is not None:
        qkv = tuple(x.contiguous() for x in qkv)
    torch.library.opcheck(op_of(spec, device), (*qkv, 0.2, True))


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores .* available but not enabled")
@each(registers_an_op, dtypes=1)
def test_torch_compile_fullgraph(spec, dtype, device):
    """From a cold start: what tracing reaches first is built outside of it."""
    usable_head_dims(spec, dtype, device)
    is_triton = spec.family == "triton"
    compiler = "inductor" if is_triton and device == "cuda" else "aot_eager"

    def model(q, k, v):
        return 1 + spec.attention(q * 2, k, v, softmax_scale=0.1)

    spec._kernels.clear()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    tolerance = max(1e-5, 8 * torch.finfo(dtype).eps)
    for seqlen in (33, 40) if is_triton else (33,):
        q, k, v = Case(seqlen, 64, dtype=dtype).inputs(device)
        q = q.contiguous()
        torch.testing.assert_close(compiled(q, k, v), model(q, k, v), rtol=0, atol=tolerance)


# On a GPU

each_kernel_on_a_gpu = each(
    lambda spec: spec.version is not None or spec.family == "triton", devices=("cuda",)
)


def gpu_inputs(spec: BackendSpec, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a call; those of decode have other lengths for each seed."""
    usable_head_dims(spec, dtype, "cuda")
    if spec.has_attention():
        return Case(200, usual_head_dim(spec.head_dims), dtype=dtype, seed=seed).inputs("cuda")
    lengths = (EDGES, EDGES[::-1], (1,) * len(EDGES), (257,) * len(EDGES))[seed]
    case = DecodeCase(64, dtype, seed, lengths=lengths, max_seqlen=max(EDGES), num_heads=12)
    return case.inputs("cuda")


@one_tile
@each_kernel_on_a_gpu
def test_the_current_stream_is_used(spec, dtype, device):
    q, *rest = gpu_inputs(spec, dtype)
    expected = call(spec, (q, *rest))
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on the default stream the kernel would overtake the copy
        late.copy_(q)
        o = call(spec, (late, *rest))
    stream.synchronize()
    assert torch.equal(o, expected)


@one_tile
@each_kernel_on_a_gpu
def test_a_cuda_graph_replays_with_other_inputs(spec, dtype, device):
    inputs = gpu_inputs(spec, dtype)
    call(spec, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(spec, inputs)
    for seed in (1, 2, 3, 0):
        others = gpu_inputs(spec, dtype, seed)
        for x, y in zip(inputs, others, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(o, call(spec, others))
