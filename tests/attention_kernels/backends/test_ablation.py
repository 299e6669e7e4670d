"""The ablation: every step gives the same bits, and barriers and the maximum are needed.

That each step is right is in test_every_backend.py.
"""

from __future__ import annotations

import math
import re

import pytest
import torch

from attention_kernels import BackendSpec, get_backend, ladder, list_backends
from attention_kernels.judge.suite import Case, run_case
from attention_kernels.judge.truth import truth
from attention_kernels.ladder import header
from tests.attention_kernels.backends.common import spec_of
from tests.conftest import on_every_device, usable, version_file

FOLDER = header.CSRC / "ablation"
NO_MAXIMUM = header.parse_header(FOLDER / "no_maximum" / "v09_no_maximum.cu", "no_maximum_")


def step(number: int) -> BackendSpec:
    return get_backend(f"ABLATION_STEP_{number}")


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


@pytest.mark.slow
def test_each_remaining_barrier_is_needed(monkeypatch):
    """Without one of them, the output of step 7 depends on the order of threads."""
    spec = usable("ABLATION_STEP_7", "cpu")
    inputs = Case(70, 32, num_heads=1).inputs("cpu")
    expected = spec.attention(*inputs)
    pieces = re.split(r"(__sync(?:threads|warp)\(\);)", spec.version.source)
    barriers = range(1, len(pieces), 2)
    assert len(barriers) == 6
    for barrier in barriers:
        text = "".join(pieces[:barrier] + pieces[barrier + 1 :])
        without = ladder.resolve(str(version_file(spec.version.path.name, text)))
        outputs = []
        for order in ("", "reverse", "shuffle:1", "shuffle:2"):
            monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
            outputs.append(without.attention(*inputs))
        assert not all(torch.equal(o, expected) for o in outputs), barrier


# Do we need the maximum?

LARGEST = math.log(torch.finfo(torch.float32).max)  # 88.72


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
    o = output(spec, *inputs)
    return truth(*equal_scores(*inputs), 1.0, is_causal=False).judge(o).passed


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
    limit = LARGEST - math.log(keys * (value or 1.0))
    assert is_right(no_maximum, limit - 0.01, keys, value, device)
    with_maximum = usable("ABLATION_STEP_8", device)
    for score in (limit + 0.01, 200.0):
        assert not is_right(no_maximum, score, keys, value, device)
        assert is_right(with_maximum, score, keys, value, device)
    assert not output(no_maximum, 200.0, keys, value, device).isfinite().any()
