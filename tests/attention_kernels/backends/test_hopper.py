"""The Hopper ladder: faults planted in its versions are found without a GPU."""

from __future__ import annotations

import pytest
import torch

from attention_kernels import AttentionError, BackendSpec
from attention_kernels.judge.suite import Case, run_case
from attention_kernels.ladder import header
from tests.attention_kernels.backends.common import changed, spec_of
from tests.conftest import needs_compiler

FILES = header.version_files(header.CSRC / "hopper")

pytestmark = [pytest.mark.slow, needs_compiler]


def fault_of(spec: BackendSpec, softmax_scale: float | None = None) -> str:
    """Run a case of several tiles; return the error's text, "wrong" for a wrong output, or ""."""
    case = Case(500, 64, num_heads=2, dtype=torch.float16, softmax_scale=softmax_scale)
    try:
        return "" if run_case(spec, case, "cpu").passed else "wrong"
    except AttentionError as error:
        return str(error)


@pytest.mark.parametrize(
    ("version", "old", "new", "fault"),
    [
        (1, "    ptx::proxy_fence();\n", "", "without a proxy_fence()"),
        (1, "[chunk % 8 ^ r % 8]", "[chunk % 8]", "wrong"),
        (1, "multiply_fence(rO, rP)", "multiply_fence(rO)", "no multiply_fence()"),
        (2, "wait(&k_full, tile % 2)", "wait(&k_full, tile % 2 ^ 1)", "still written"),
        (2, "    ptx::barrier_wait(&v_full, tile % 2);\n", "", "still written"),
        (3, "tile / kStages % 2", "tile % 2", "still written"),
        (5, "? 232 : 160", "? 232 : 168", "never passes"),
        (6, "  if (warpgroup == kLast) pass_turn(0);\n", "", "never passes"),
        (8, "          ptx::barrier_wait(&q_empty, (i + 1) % 2);\n", "", "still written"),
    ],
)
def test_a_planted_fault_is_found(version, old, new, fault, monkeypatch):
    # Persistent blocks then have several tiles of queries.
    monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", "2")
    assert fault in fault_of(changed(FILES[version - 1], (old, new)))


@pytest.mark.parametrize(
    ("version", "wait", "free"),
    [
        (4, "    ptx::multiply_wait<0>(rO);\n", "    arrive(&empty[stage]);\n"),
        (5, "    ptx::multiply_wait<0>(rS);\n", "    arrive(&k_empty[stage]);\n"),
        (5, "    ptx::multiply_wait<0>(rO);\n", "    arrive(&v_empty[stage]);\n"),
    ],
)
def test_a_tile_that_is_freed_early_is_a_race(version, wait, free):
    early = changed(FILES[version - 1], (wait + free, free + wait))
    assert early.version is not None
    assert "race" in fault_of(spec_of(header.race_checked(early.version)))


def test_q_is_negated_behind_a_fence():
    assert not fault_of(spec_of(header.parse_header(FILES[1], "negated_")), -0.7)
    unfenced = changed(FILES[1], ("  ptx::proxy_fence();\n", ""))
    assert "without a proxy_fence()" in fault_of(unfenced, -0.7)
