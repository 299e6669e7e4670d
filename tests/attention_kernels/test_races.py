"""The emulator reports races within a block, and none in the ladders' kernels."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from attention_kernels import KernelError, get_backend, ladder
from attention_kernels.judge.suite import race_checks, run_check, verify
from attention_kernels.judge.worker import Runner
from attention_kernels.ladder import header
from tests.attention_kernels.backends.common import EMULATED, NEWEST, changed
from tests.conftest import needs_compiler, usable

FILE = Path(__file__).parent / "negative" / "v06_races.cu"
LINES = FILE.read_text("utf-8").splitlines()

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def races():
    version = header.race_checked(header.parse_header(FILE, "negative_"))
    spec = ladder.backend("RACES", "test", version)
    spec.prepare("cpu")

    def launch(number: int) -> None:
        x = torch.zeros(1, number, 1, 32)
        spec.attention(x, x, x)

    return launch


@pytest.mark.parametrize("order", ["", "reverse", "shuffle:1"])
@pytest.mark.parametrize("race", range(2, 11))
def test_a_race_is_reported_with_both_lanes_and_lines(races, race, order, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    with pytest.raises(KernelError) as caught:
        races(race)
    found = re.search(
        r"race: lane \d+ of warp (\d) (?:reads|writes|changes) "
        r"byte \d+ of (?:256 |512 |static ).*?, "
        r"at v06_races\.cu:(\d+), which lane \d+ of warp (\d) has (?:read|written|changed), "
        r"at v06_races\.cu:(\d+), with no barrier between; block \(0, 0, 0\), thread \(",
        str(caught.value.__cause__),
    )
    assert found
    lines = {n for n, line in enumerate(LINES, 1) if line.endswith(f"// {race}")}
    assert {int(found[2]), int(found[4])} == lines
    assert (found[1] == found[3]) == (race != 5)
    races(1)


def test_verify_fails_a_kernel_whose_race_changes_no_result(tmp_path):
    """In an earlier WMMA version 4, only a shuffle separated reads of S from stores of O there."""
    source = get_backend("WMMA_FLASH_ATTENTION_2_VERSION_4").version.path
    barrier = re.compile(r"^ *__syncwarp\(\);  // all lanes have read S.*\n", re.M)
    text, count = barrier.subn("", source.read_text("utf-8"))
    assert count == 1
    file = tmp_path / source.name
    file.write_text(text, "utf-8")
    (failure,) = verify(ladder.resolve(str(file)), "cpu", seed=0, max_failures=1).failures
    assert failure.what.startswith("races, seqlen 1")
    reads = next(n for n, line in enumerate(text.splitlines(), 1) if "const float s = sS[" in line)
    assert f"has read, at {source.name}:{reads}, with no barrier between" in failure.why


def test_a_kernel_that_reads_without_waiting_needs_a_previous_one_that_has_waited():
    """Attention reads Q before it waits: all blocks that split K must have waited by then."""
    source = get_backend("CUSTOM_CUDA_VERSION_36").version.path
    waits, allows = (
        "  ptx::wait_for_previous();\n  // Not before",
        "  ptx::allow_next();\n  split_tile",
    )
    spec = changed(
        source,
        (waits, "  // Not before"),
        (allows, f"{allows[:20]}  ptx::wait_for_previous();\n  split_tile"),
    )
    spec = ladder.backend(spec.name, "test", header.race_checked(spec.version))
    x = torch.zeros(1, 70, 1, 64)
    with pytest.raises(KernelError) as caught:
        spec.attention(x, x, x)
    assert re.search(
        r"race: lane .* reads global memory, .*v36_diagonal_once\.cu:.*, which the kernel "
        r"before may still write; a wait_for_previous\(\) before it would order them",
        str(caught.value.__cause__),
    )


VERSIONS = [
    pytest.param(name, marks=[pytest.mark.gpu] * (name not in NEWEST)) for name, _ in EMULATED
]


@pytest.mark.slow
@pytest.mark.parametrize("name", VERSIONS)
def test_a_version_has_no_race(name):
    spec = usable(name, "cpu")
    runner = Runner(spec, "cpu")
    checks = race_checks(runner, [getattr(torch, spec.dtypes[0])], 0)
    for _, steps in itertools.islice(checks, 2):  # of the first head_dim
        run_check(runner, steps())
