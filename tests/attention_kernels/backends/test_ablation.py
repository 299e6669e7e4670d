"""The ablation: each version is one step from the last, and the maximum is needed.

That each step is right is in test_every_backend.py.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from attention_kernels import BackendSpec, get_backend, list_backends
from attention_kernels.inspection.launches import launches_of
from attention_kernels.judge.suite import Case, run_case
from attention_kernels.judge.truth import judge
from attention_kernels.ladder import header
from tests.attention_kernels.backends.common import spec_of
from tests.conftest import on_every_device, usable

FOLDER = header.CSRC / "ablation"
STEPS = header.versions(FOLDER, "ablation_")
NO_MAXIMUM = header.parse_header(FOLDER / "no_maximum" / "v09_no_maximum.cu", "no_maximum_")


def step(number: int) -> BackendSpec:
    return get_backend(f"ABLATION_STEP_{number}")


# Neighbours


def code(version: header.VersionHeader) -> list[str]:
    """Return the lines after the header."""
    return version.path.read_text().split("#include", 1)[1].splitlines()


def changes(number: int) -> tuple[list[str], list[str]]:
    """Return the lines that a step removes from the one before it, and those that it adds."""
    diff = list(difflib.ndiff(code(STEPS[number - 2]), code(STEPS[number - 1])))
    removed, added = ([line[2:].strip() for line in diff if line[0] == sign] for sign in "-+")
    return removed, added


def test_unrolling_padding_and_barriers_change_nothing_else():
    assert {version.flags for version in STEPS} == {()}
    assert changes(3) == ([], ["#pragma unroll"] * 10)
    padding = ["constexpr int kStride = kHeadDim;"], ["constexpr int kStride = kHeadDim + 1;"]
    assert changes(4) == padding
    removed, added = changes(7)
    assert {*removed} == {"__syncthreads();"}
    assert {*added} == {"__syncwarp();"}


def test_every_loop_of_a_kernel_is_unrolled_from_step_3_on():
    for version in STEPS:
        kernels = "\n".join(code(version)).split("int64_t scratch_floats")[0]
        loops = len(re.findall(r"\bfor \((?!int n_start)", kernels))  # those of constant length
        assert loops > 5
        assert kernels.count("#pragma unroll\n") == (loops if version.number >= 3 else 0)


def test_step_1_has_no_shared_memory():
    for version in STEPS:
        assert ("__shared__" in "\n".join(code(version))) == (version.number > 1)


@pytest.mark.slow
def test_kernels_and_launches_fall_where_the_headers_say_so():
    """The launch has one batch entry and 1,024 keys, which are 32 tiles."""
    launches = {}
    for number in (4, 5, 6):
        recorded = launches_of(STEPS[number - 1], [64])
        assert {launch.threads for launch in recorded} == {1024}
        launches[number] = Counter(launch.kernel.split("<")[0] for launch in recorded)
    stages = ["qk_dot_kernel", "row_max_kernel", "exp_kernel", "row_sum_kernel", "update_kernel"]
    once = {"init_kernel": 1}
    copies = {"copy_in_kernel": 3, "copy_out_kernel": 1}
    assert launches[4] == dict.fromkeys(stages, 32) | once | copies
    assert launches[5] == dict.fromkeys(stages, 32) | once
    assert launches[6] == {"attention_kernel": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "emulated"),
    [
        ("cpu", (6, 7, 8)),
        pytest.param("cpu", range(1, 9), marks=pytest.mark.gpu),  # their builds take long
        pytest.param("cuda", (), marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_steps_give_the_same_bits(device, emulated, is_causal):
    """They compute the same numbers in the same order."""
    usable("ABLATION_STEP_8", device)
    for seqlen, head_dim in ((1, 64), (33, 32), (70 if device == "cpu" else 200, 64)):
        q, k, v = Case(seqlen, head_dim, 2.0, batch=2, num_heads=3).inputs(device)
        steps = emulated if seqlen == 70 else (7, 8)
        expected, *others = (step(n).attention(q, k, v, is_causal=is_causal) for n in steps)
        assert all(torch.equal(o, expected) for o in others)


# The remaining barriers


@pytest.mark.slow
def test_each_remaining_barrier_is_needed(tmp_path, monkeypatch):
    """Without one of them, the output of step 7 depends on the order of threads."""
    usable("ABLATION_STEP_7", "cpu")
    barriers = 0

    def droppable(barrier: re.Match[str]) -> str:
        nonlocal barriers
        barriers += 1
        return f'if (kept("{barriers}")) {barrier[0]}'

    opening, body = STEPS[6].path.read_text().split('#include "common.cuh"\n')
    body = re.sub(r"__sync(threads|warp)\(\);", droppable, body)
    assert barriers == 6
    (tmp_path / "v07_droppable.cu").write_text(f"""{opening}#include "common.cuh"
#include <cstdlib>
#include <cstring>
inline bool kept(const char* barrier) {{
  const char* const dropped = std::getenv("DROPPED_BARRIER");
  return dropped == nullptr || std::strcmp(dropped, barrier) != 0;
}}
{body}""")
    spec = spec_of(header.parse_header(tmp_path / "v07_droppable.cu", "droppable_"))
    q, k, v = Case(70, 32, num_heads=1).inputs("cpu")
    expected = step(7).attention(q, k, v)

    def is_right_in_any_order() -> bool:
        outputs = []
        for order in ("", "reverse", "shuffle:1", "shuffle:2"):
            monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
            outputs.append(spec.attention(q, k, v))
        return all(torch.equal(o, expected) for o in outputs)

    assert is_right_in_any_order()
    for barrier in range(1, barriers + 1):
        monkeypatch.setenv("DROPPED_BARRIER", str(barrier))
        assert not is_right_in_any_order(), f"barrier {barrier} of step 7 orders nothing"


# Do we need the maximum?

LARGEST = math.log(torch.finfo(torch.float32).max)  # 88.72
SMALLEST = math.log(torch.finfo(torch.float32).tiny)  # -87.34: exp() is subnormal below this
ZERO = -150 * math.log(2)  # -103.97: exp() is 0 below this


@pytest.fixture(scope="module")
def no_maximum() -> BackendSpec:
    return spec_of(NO_MAXIMUM)


def equal_scores(score: float, keys: int, value: float | None, device: str):
    """Return q, k, v with equal scores for all keys; values between -1 and 1, or all equal."""
    q = torch.zeros(1, keys, 1, 32)
    k, v = torch.zeros_like(q), torch.full_like(q, value or 0.0)
    q[..., 0], k[..., 0] = score, 1.0
    if value is None:
        v.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    return q.to(device), k.to(device), v.to(device)


def output(spec: BackendSpec, *inputs) -> torch.Tensor:
    return spec.attention(*equal_scores(*inputs), softmax_scale=1.0, is_causal=False)


def is_right(spec: BackendSpec, *inputs) -> bool:
    """Return whether the output is within its budget."""
    q, k, v = equal_scores(*inputs)
    o = output(spec, *inputs)
    return judge(o, q, k, v, 1.0, is_causal=False).passed


def first_wrong(holds: Callable[[float], bool], right: float, wrong: float) -> float:
    """Return where between the two it stops holding, by bisection."""
    assert holds(right)
    assert not holds(wrong)
    for _ in range(20):
        middle = (right + wrong) / 2
        right, wrong = (middle, wrong) if holds(middle) else (right, middle)
    return wrong


@pytest.mark.slow
def test_the_version_without_a_maximum_is_no_backend(no_maximum):
    assert "NO_MAXIMUM" not in " ".join(spec.name for spec in list_backends())
    failed = {
        scale: not run_case(no_maximum, Case(64, 64, scale), "cpu").passed
        for scale in (0.02, 1.0, 8.0)
    }
    assert failed == {0.02: False, 1.0: False, 8.0: True}


@on_every_device
@pytest.mark.parametrize(("keys", "value"), [(1, None), (300, None), (64, 1000.0)])
def test_the_smallest_score_that_overflows(no_maximum, device, keys, value):
    """An exponential overflows at 88.72; a sum of several, or a product with V, before that."""
    found = first_wrong(lambda score: is_right(no_maximum, score, keys, value, device), 0, 200)
    assert found == pytest.approx(LARGEST - math.log(keys * (value or 1.0)), abs=0.01)
    assert not output(no_maximum, 200.0, keys, value, device).isfinite().any()
    assert is_right(usable("ABLATION_STEP_8", device), found, keys, value, device)
    assert is_right(step(8), 200.0, keys, value, device)


@on_every_device
def test_a_sum_that_overflows_can_look_like_an_answer(no_maximum, device):
    """In the last tile the product with V may still be finite, and finite / infinity is 0."""
    o = output(no_maximum, LARGEST - math.log(32) + 0.5, 32, 0.25, device)
    assert torch.equal(o, torch.zeros_like(o))


@on_every_device
@pytest.mark.parametrize("keys", [1, 64])
def test_the_largest_score_that_underflows(no_maximum, device, keys):
    """Below -87.34 an exponential is subnormal and loses digits; below -103.97 it is 0.

    Its product with a value below 1 is subnormal before that.
    """
    found = first_wrong(lambda score: is_right(no_maximum, score, keys, None, device), 0, -200)
    smallest_value = equal_scores(0.0, keys, None, device)[2].abs().min().item()
    assert SMALLEST - 6 < found < SMALLEST - math.log(smallest_value)
    assert output(no_maximum, ZERO + 0.1, keys, None, device).isfinite().all()
    assert output(no_maximum, ZERO - 0.1, keys, None, device).isnan().all()
    assert is_right(usable("ABLATION_STEP_8", device), found, keys, None, device)
    assert is_right(step(8), ZERO - 0.1, keys, None, device)


@pytest.mark.slow
@on_every_device
def test_the_smallest_scale_of_normal_inputs_that_breaks_it(no_maximum, device):
    """At a scale of about 4 the largest score of a thousand keys reaches the limit."""

    def case(scale: float) -> Case:
        return Case(200, 64, scale)

    def holds(scale: float) -> bool:
        return run_case(no_maximum, case(scale), device).passed

    found = first_wrong(holds, 1.0, 8.0)
    q, k, _ = case(found).inputs("cpu")
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(64)
    assert LARGEST - 10 < scores.tril().max() < LARGEST + 1
    assert 3 < found < 6
    assert run_case(usable("ABLATION_STEP_8", device), case(found), device).passed
