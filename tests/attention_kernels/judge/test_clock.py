"""What the clock forgives, and the chain between calls; test_cheats.py has what it catches."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from attention_kernels import get_backend
from attention_kernels.judge.caller import Timed
from attention_kernels.judge.calls import Repeat, Request, chain, chain_weights
from attention_kernels.judge.clock import KINDS, Clock, Numbers
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import judged, run_check
from attention_kernels.judge.timing import sets_of
from attention_kernels.judge.truth import naive_attention
from attention_kernels.judge.worker import RejectedTimeError, Runner, Timing
from tests.attention_kernels.conftest import profiled
from tests.attention_kernels.judge import cuda_cheats  # noqa: F401 - adds its rows
from tests.attention_kernels.judge.cheats import CHEATS
from tests.conftest import DEVICES, version_file

# Two bytes per number and an odd count of them; head_dims that are no powers of two; both layouts.
CASES = [
    Case(9, 5, num_heads=1, dtype=torch.float16),
    Case(40, 33, batch=2, num_heads=3, dtype=torch.bfloat16),
    Case(40, 64, layout="contiguous"),
    Case(40, 64, group=2, dtype=torch.float64),
    DecodeCase(20, dtype=torch.float16),
]


def clock_of(timings, device="cuda", checks_s=1.5e-3):
    clock = Clock(SimpleNamespace(device=device), Numbers(Case(64, 32), 5, device))
    clock.numbers.checks_s, clock.numbers.chain_s = checks_s, 1e-5
    clock._timings = [
        Timing(
            *(0, [], {}, [], True, ""),
            **{"unchained_outside": timing["often_outside"], "passes": 11, **timing},
        )
        for timing in timings
    ]
    return clock


# As measured on an H200, with 1 GB of inputs and outputs and a kernel of 1.85 ms.
HONEST = {"once": 1.85e-3, "often": 1.85e-3, "once_outside": 4.45e-3, "often_outside": 1.86e-3}


@pytest.mark.parametrize(("checks_s", "passes"), [(1.5e-3, True), (1e-9, False)])
def test_the_time_of_factors_and_checksum_counts_for_nobody(checks_s, passes):
    clock = clock_of([HONEST] * 5, checks_s=checks_s)
    with contextlib.nullcontext() if passes else pytest.raises(RejectedTimeError, match="clocks"):
        clock.check()
    assert clock.notes == {}


@pytest.mark.parametrize("name", ["once", "often"])
def test_a_worker_s_varying_times_are_forgiven_nothing(name):
    timings = [HONEST | {name: HONEST[name] * factor} for factor in (0.0, 0.5, 1.0, 0.0, 0.5)]
    with pytest.raises(RejectedTimeError, match="by its own clock"):
        clock_of(timings).check()


@pytest.mark.parametrize(
    ("device", "rounds", "is_noted"), [("cuda", 8, 1), ("cpu", 8, 0), ("cpu", 16, 1)]
)
def test_a_time_that_depends_on_the_data_is_noted(device, rounds, is_noted):
    """On a CPU only where a second round of each kind shows the noise."""
    times = [1.4 if KINDS[n % len(KINDS)] == "peaky" else 1.0 for n in range(1, rounds + 2)]
    timings = [HONEST | {"often": 1.85e-3 * t, "often_outside": 1.86e-3 * t} for t in times]
    clock = clock_of(timings, device)
    clock._note()
    assert [*clock.notes.get("depends_us", [])][1:] == ["peaky"] * is_noted
    noisy = [HONEST | {"often_outside": 1.86e-3 * (1 + n % 3)} for n in range(17)]
    clock = clock_of(noisy, "cpu")
    clock._note()
    assert clock.notes == {}


def test_calls_that_overlap_without_the_chain_are_noted():
    clock = clock_of([HONEST | {"unchained_outside": 1.5e-3}] * 5)
    clock.check()
    assert clock.notes == {"overlapping_us": pytest.approx(300.0)}


def test_the_capture_of_a_graph_is_not_timed():
    runner, captured = Runner(get_backend("NAIVE_PYTORCH"), "cpu"), []

    def timed(message):
        captured.append(message.passes)
        seconds = 2e-3 * message.passes
        return seconds, seconds + 0.05 * (captured.count(message.passes) == 1)

    runner.device, runner._timed = "cuda", timed
    passes, often, outside = runner._often(Repeat(1), 11)
    assert passes * often >= 0.02
    assert often == outside == pytest.approx(2e-3)
    assert captured == [1, 1, 11, 11]
    runner._often(Repeat(passes), 11)
    assert captured[4:] == [11]


def request_of(case, sets=3):
    inputs = [case.inputs("cpu") for _ in range(sets)]
    return Request.of(case, inputs, order=[*range(sets)], clock=True)


def inputs_before(request, outputs):
    """The inputs, multiplied with seed 5, of calls that had these outputs."""
    sets = request.multiplied(5)
    for o, (_, k, *_) in zip(outputs, sets[1:], strict=False):
        chain(o, k, chain_weights(k))
    return sets


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_judge_knows_the_inputs_of_chained_calls(case, device):
    """A pass gets the inputs that follow from its outputs; the next one begins with its last."""
    request = request_of(case)
    seen = []

    def kernel(*inputs):
        seen.append([x.cpu().clone() for x in inputs])
        spec = get_backend("NAIVE_PYTORCH")
        return (spec.decode if request.calls.op == "decode" else spec.attention)(*inputs)

    timed = Timed(kernel, request.block.to(device, copy=True), request.calls, graph=False)
    timed.renew(request.block)
    seen.clear()
    timed.multiply(seed=5)
    timed.run()
    outputs = [o.cpu() for o in timed.outputs]
    known = inputs_before(request, outputs)
    for inputs, right in zip(seen, known, strict=True):
        assert all(map(torch.equal, inputs, right))
    unchained = inputs_before(request, [])
    assert not any(torch.equal(x[1], y[1]) for x, y in zip(known[1:], unchained[1:], strict=True))
    timed.run()
    chain(outputs[-1], known[0][1], chain_weights(known[0][1]))
    assert torch.equal(seen[len(outputs)][1], known[0][1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_bit_of_an_output_decides_on_the_next_inputs(case):
    q, k, *_ = case.inputs("cpu")
    o = torch.randn(q.shape).to(q.dtype)
    weights = chain_weights(k)
    chain(o, k, weights)
    for place in (0, o.numel() // 2, -1):
        other, changed = o.clone(), k.clone()
        number = other.view(-1)[place]
        number.copy_(torch.nextafter(number, number + 1))
        chain(other, changed, weights)
        assert not torch.equal(changed, k)
        assert torch.equal(changed.abs(), k.abs())
        assert torch.equal(changed[..., 1:], k[..., 1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plain_pytorch_is_right_for_the_timed_kinds(kind, dtype):
    runner = Runner(get_backend("NAIVE_PYTORCH"), "cpu")
    for case in (Case(70, 20, kind=kind, dtype=dtype), DecodeCase(32, kind=kind, dtype=dtype)):
        assert run_check(runner, judged(runner, case)).passed


@pytest.mark.gpu
def test_a_graph_s_calls_are_chained_too():
    for case in CASES[1:3]:
        request = request_of(case)
        block = request.block.to("cuda", copy=True)
        timed = Timed(lambda *x: naive_attention(*x, 0.1, True), block, request.calls, graph=True)
        for chained in (True, False, True):
            timed.renew(request.block)
            timed.multiply(seed=5)
            timed.run(chained=chained)
            outputs = [o.cpu() for o in timed.outputs]
            known = inputs_before(request, outputs if chained else [])
            for o, (q, k, v) in zip(outputs, known, strict=True):
                right = naive_attention(q.double(), k.double(), v.double(), 0.1, True)
                assert (o.double() - right).abs().max() < 0.05


ROTATES = """
from attention_kernels import ladder
from attention_kernels.judge.clock import Numbers
from attention_kernels.judge.inputs import Case
from attention_kernels.judge.timing import sets_of
from attention_kernels.judge.worker import Runner
case = Case(1024, {head_dim}, num_heads=12)
numbers = Numbers(case, sets_of(case, "cuda"), "cuda")
Runner(ladder.resolve({what!r}), "cuda").time(numbers.request(1, contiguous=False))
"""
(PERSISTS,) = (row for row in CHEATS if row.name == "keeps_its_inputs_in_l2")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("is_cheat", [False, True])
def test_no_call_finds_its_inputs_in_the_l2(is_cheat):
    """Each call reads its inputs from memory, except 64 bytes per row that the chain has read."""
    what, head_dim = "CUSTOM_CUDA_VERSION_15", 64
    if is_cheat:
        what, head_dim = str(version_file(f"v01_{PERSISTS.name}.cu", PERSISTS.source)), 32
    case = Case(1024, head_dim, num_heads=12)
    counter = "dram__bytes_read.sum"
    options = f"--page raw --cache-control none --graph-profiling node -c 200 --metrics {counter}"
    rows = profiled(options, ROTATES.format(what=what, head_dim=head_dim))
    read = [float(row[counter].replace(",", "")) for row in rows if row["ID"]]
    inputs = sum(x.nbytes for x in case.inputs("cpu"))
    touched = 64 * 1024 * 12
    # Persisting accesses end after the first call, which may allow them, and three untimed passes.
    later = sorted(read[1 + 3 * sets_of(case, "cuda") :])
    print(f"of {inputs} bytes, {later[0]:.0f} to {later[-1]:.0f} came from memory")
    assert len(later) > 60
    assert later[len(later) // 20] > 0.99 * (inputs - touched)
