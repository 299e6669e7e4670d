"""Bank conflicts and sectors counted in the emulator, for known patterns and for the ladder."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attention_kernels import UnsupportedError, ladder, list_backends
from attention_kernels.inspection.accesses import (
    KINDS,
    Access,
    count_accesses,
    format_table,
)
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import parse_header

PATTERNS = Path(__file__).with_name("v01_patterns.cu").read_text("utf-8")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The recording, and what the kernel printed."""
    file = tmp_path_factory.mktemp("patterns") / "v01_patterns.cu"
    # Comments may be in any encoding.
    file.write_bytes(PATTERNS.replace("// v01 - access", "// v01 - caf\xe9").encode("latin-1"))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        return count_accesses(parse_header(file)), printed.getvalue()


@pytest.fixture(scope="module")
def recording(recorded):
    return recorded[0]


@pytest.fixture(scope="module")
def patterns(recording):
    by_comment: dict[str, list[Access]] = {}
    lines = PATTERNS.splitlines()
    for access in recording:
        comment = lines[access.lines[0] - 1].rpartition("//")[2].strip()
        by_comment.setdefault(comment, []).append(access)
    return by_comment


# Counts of two warps: requests, wavefronts, bank conflicts, ways of the worst conflict.
SHARED = {
    "fill": (128, 128, 0, 1),
    "in order": (2, 2, 0, 1),
    "broadcast": (2, 2, 0, 1),
    "every second": (2, 4, 2, 2),
    "a column": (2, 64, 62, 32),
    "a padded column": (2, 2, 0, 1),
    "half a column twice": (2, 32, 30, 16),
    "one of four": (2, 8, 6, 4),
    "vectors": (2, 8, 0, 1),
    "vectors in a column": (2, 64, 2 * 4 * 7, 8),
    "pairs in a column": (2, 64, 2 * 2 * 15, 16),
    "vectors of neighbours": (2, 4, 0, 1),
    "two by two": (2, 4, 0, 1),
    "vectors of four": (2, 4, 0, 1),
    "pairs of neighbours": (2, 2, 0, 1),
    "vectors of both halves": (2, 8, 0, 1),
    "called": (2, 64, 62, 32),
    "static": (2, 2, 0, 1),
    "static column": (2, 4, 2, 2),
    "some leave early": (2 * 3 * 32, 192, 0, 1),
    "all again": (6, 6, 0, 1),
    "eight lanes": (2, 2, 0, 1),
    "the others": (2, 48, 2 * 23, 24),
}


@pytest.mark.parametrize("comment", SHARED)
def test_shared_memory_conflicts_as_hardware_does(patterns, comment):
    (found,) = patterns[comment]
    assert found.memory == "shared"
    assert (found.requests, found.wavefronts, found.conflicts, found.ways) == SHARED[comment]


def test_an_access_is_reported_with_its_call_chain(patterns):
    lines = PATTERNS.splitlines()
    (called,) = patterns["called"]
    assert [lines[n - 1].split()[0] for n in called.lines] == ["x", "return"]
    assert called.source.startswith("x += helper(smem, 32 * lane)")
    assert patterns["vectors"][0].bytes == 16
    assert patterns["pairs in a column"][0].bytes == 8


def test_global_memory_moves_in_sectors(patterns):
    for comment, sectors, fewest in (
        ("store in order", 8, 8),
        ("store apart", 64, 8),
        ("a pair", 2, 2),
        ("store of a call", 16, 16),
    ):
        (found,) = patterns[comment]
        assert (found.memory, found.requests) == ("global", 2)
        assert (found.sectors, found.fewest_sectors) == (sectors, fewest), comment
    vectors = [access for found in patterns.values() for access in found if access.bytes == 16]
    copies = [a for a in vectors if a.memory == "global" and a not in patterns["asynchronous"]]
    assert {access.kind for access in copies} == {"load", "store"}
    assert all((a.requests, a.sectors, a.fewest_sectors) == (2, 32, 32) for a in copies)
    assert patterns["a pair"][0].costliest.array == "q"  # contiguous inputs are separate tensors


def test_atomics_are_counted(patterns):
    for comment, *counts in (
        ("an atomic each", "shared", 2, 0, 1, 0),
        ("an atomic of four lanes", "shared", 8, 6, 4, 0),
        ("an atomic apart", "global", 0, 0, 0, 64),
    ):
        (found,) = patterns[comment]
        assert (found.kind, found.requests) == ("atomic", 2)
        shared = found.wavefronts, found.conflicts, found.ways
        assert [found.memory, *shared, found.sectors] == counts
        assert f"{found.memory} atomic" in format_table([found])


def test_printf_output_is_shown_and_not_counted(recorded):
    line = next(n for n, line in enumerate(PATTERNS.splitlines(), 1) if "x is %g" in line)
    place = f"block (0, 0, 0) thread (33, 0, 0) v01_patterns.cu:{line}: "
    assert sorted(recorded[1].splitlines()) == ["1\t2", f"{place}x is 1.5"]


def test_a_request_records_the_address_of_each_lane(patterns):
    def offsets(comment, cost):
        (found,) = patterns[comment]
        at = found.costliest
        assert (at.block, at.warp, at.cost) == (0, 0, cost)
        assert at.array == {"shared": "dynamic", "global": "o"}[found.memory]
        return [*at.offsets]

    assert offsets("a column", 32) == [128 * lane for lane in range(32)]
    assert offsets("store apart", 32) == [32 * lane for lane in range(32)]
    assert offsets("eight lanes", 1) == [*(4 * lane for lane in range(8)), *[None] * 24]
    assert offsets("some leave early", 1) == [0] * 32  # the first of equally costly requests


def test_an_asynchronous_copy_is_a_load_and_a_store_of_its_width(patterns):
    load, store = sorted(patterns["asynchronous"], key=lambda access: access.kind)
    assert (load.memory, load.bytes, load.requests, load.sectors) == ("global", 16, 2, 64)
    assert (store.memory, store.bytes, store.requests) == ("shared", 16, 2)
    assert (store.wavefronts, store.conflicts) == (8, 0)


# By comment: kind, bytes, requests; sectors and the fewest of them, or None; wavefronts. Rows of
# 128 bytes are 4 sectors; rows of 16 bytes fill half of one.
TILES = {
    "all rows": ("TMA load", 8192, 1, (256, 256), 64),
    "eight rows": ("TMA load", 8192, 1, (32, 32), 64),  # the other 56 are past the end
    "narrow": ("TMA load", 1024, 1, (64, 32), 8),
    "contiguous": ("TMA load", 256, 1, (8, 8), 2),
    "stored": ("TMA store", 8192, 1, (32, 32), 64),
    "A and B": ("wgmma", 4096, 4, None, 4 * 32),  # 64 x 16 of 16 bits each
    "B": ("wgmma", 2048, 1, None, 16),
}


def test_copies_by_tma_and_products_are_counted():
    file = Path(__file__).with_name("v02_tiles.cu")
    lines = file.read_text("utf-8").splitlines()
    found = {}
    for access in count_accesses(parse_header(file), seqlen=72):
        comment = lines[access.lines[0] - 1].rpartition("//")[2].strip()
        found.setdefault(comment, {})[access.memory] = access
    for comment, (kind, size, requests, sectors, wavefronts) in TILES.items():
        accesses = found.pop(comment)
        assert {a.kind for a in accesses.values()} == {kind}
        assert {(a.bytes, a.requests) for a in accesses.values()} == {(size, requests)}
        shared = accesses["shared"]
        assert (shared.wavefronts, shared.conflicts) == (wavefronts, 0), comment
        if sectors is None:
            assert "global" not in accesses
        else:
            moved = accesses["global"]
            assert (moved.sectors, moved.fewest_sectors) == sectors, comment
            array = {"stored": "o", "contiguous": "k"}.get(comment, "q")
            assert moved.costliest.array == array
    assert not {a.kind for rest in found.values() for a in rest.values()} & {*KINDS[3:]}


@functools.cache
def counted(name):
    """A version's accesses at the default case."""
    list_backends()
    return count_accesses(ladder.versions()[name])


def total(number):
    """Return a version's shared loads: requests, conflicts, the most ways."""
    accesses = counted(f"CUSTOM_CUDA_VERSION_{number}")
    loads = [a for a in accesses if (a.memory, a.kind) == ("shared", "load")]
    requests, conflicts = (sum(getattr(a, of) for a in loads) for of in ("requests", "conflicts"))
    return requests, conflicts, max(a.ways for a in loads)


@pytest.mark.slow
def test_the_readme_shows_what_is_counted():
    readme = (Path(__file__).parents[3] / "README.md").read_text("utf-8")
    _, shown = readme.split("$ gpt2-infer accesses CUSTOM_CUDA_VERSION_1\n")
    lines = shown.split("\n```")[0].splitlines()[1:]
    rows = format_table(counted("CUSTOM_CUDA_VERSION_1"), width=100).splitlines()
    assert {line for line in lines if line not in ("", "...")} <= {*rows}
    assert any("32-way" in line for line in lines)


@pytest.mark.slow
def test_wavefronts_are_the_profilers():
    """Counts equal the profiler's on an H200 if nvcc leaves the loads or stores as they are."""
    file = Path(__file__).parents[3] / "results" / "2026-11-22_h200_profile-fp32-128.json"
    rows = json.loads(file.read_text("utf-8"))["rows"]
    profile = {(row["contender"], row["metric"]): row["samples"] for row in rows}
    for number, kind, wavefronts in ((14, "load", 15_552), (11, "store", 3_840)):
        name = f"CUSTOM_CUDA_VERSION_{number}"
        assert profile[name, f"shared_{kind}_wavefronts"] == [wavefronts]
        found = [a for a in counted(name) if a.kind == kind]
        assert sum(a.wavefronts for a in found) == wavefronts


@pytest.mark.slow
def test_the_ladder_changes_what_its_headers_say():
    """Version 2 pads K, 12 swizzles and has a 4 x 4 tile, the second kernel of 17 starts early."""
    requests, conflicts, ways = total(1)
    assert ways == 32
    assert conflicts > requests
    assert total(2) == (requests, 0, 1)
    assert 2 * total(12)[0] <= total(11)[0]
    assert total(12)[1:] == total(17)[1:] == (0, 1)


@pytest.mark.slow
def test_what_cannot_be_counted_is_refused_with_every_reason(tmp_path):
    list_backends()
    versions = ladder.versions()
    with pytest.raises(UnsupportedError, match=r"head_dim 48.*seqlen 0 \(1 or more.*fragment"):
        count_accesses(versions["WMMA_FLASH_ATTENTION_2_VERSION_1"], head_dim=48, seqlen=0)
    with pytest.raises(UnsupportedError, match="host code"):
        count_accesses(versions["FLASH_ATTENTION_1_CPU"])
    file = tmp_path / "v01_patterns.cu"
    file.write_text(PATTERNS)
    with pytest.raises(UnsupportedError, match=r"v01_patterns\.cu.*cudaErrorInvalidValue"):
        count_accesses(parse_header(file), head_dim=128)
    file.write_text(PATTERNS.replace("float x = 0.0f;", "float x = ;"))
    with pytest.raises(BuildError, match=r"v01_patterns\.cu:\d+:\d+: error"):
        count_accesses(parse_header(file))


LAUNCH = "cudaError_t launch(const Params& params, cudaStream_t stream) {\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "case", "words"),
    [
        ("return cudaSuccess;", {}, "nothing to count: it launches no kernel"),
        ("std::exit(0);", {}, "nothing to count: .* or exits before it does"),
        ("std::exit(3);", {}, "its launch ended with exit status 3"),
        ("std::abort();", {}, r"its launch was killed by SIGABRT \(after a failed assertion"),
        ("", {"batch": 2**20, "seqlen": 2**19}, "no memory for the 140737488355328 bytes of q"),
    ],
)
def test_a_launch_without_results_is_an_error(does, case, words, tmp_path):
    file = tmp_path / "v01_patterns.cu"
    source = PATTERNS.replace("#include", "#include <cstdlib>\n#include", 1)
    file.write_text(source.replace(LAUNCH, LAUNCH + does))
    with pytest.raises(UnsupportedError, match=words):
        count_accesses(parse_header(file), **case)


ENDLESS = PATTERNS.replace(
    "float x = 0.0f;", "volatile float x = 0.0f; for (;;) x = 1.0f;"
).replace("x += none(smem);", "")


@pytest.mark.slow
def test_an_endless_block_ends_in_its_time(tmp_path, monkeypatch):
    file = tmp_path / "v01_patterns.cu"
    file.write_text(ENDLESS)
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "0.5")
    with pytest.raises(UnsupportedError, match=r"did not end in 0\.5 s, at v01_patterns\.cu:\d+"):
        count_accesses(parse_header(file))
    monkeypatch.delenv("ATTENTION_EMULATOR_TIMEOUT")
    with pytest.raises(UnsupportedError, match=r"its launch did not end in 0\.5 s"):
        count_accesses(parse_header(file), timeout_s=0.5)


@pytest.mark.slow
def test_a_killed_process_leaves_no_process_and_no_folder(tmp_path):
    file = tmp_path / "v01_patterns.cu"
    file.write_text(ENDLESS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = (
        "import sys; from pathlib import Path\n"
        "from attention_kernels.inspection.accesses import count_accesses\n"
        "from attention_kernels.ladder.header import parse_header\n"
        "count_accesses(parse_header(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(file)]

    def recorders() -> list[Path]:
        """Return the recorders that the child has started."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended or is another user's
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == running.pid and "accesses-" in os.readlink(process / "exe"):
                    found.append(process)
        return found

    def has_ended(process: Path) -> bool:
        try:
            return "accesses-" not in os.readlink(process / "exe")
        except OSError:
            return True

    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)}) as running:
        while not (started := recorders()):
            assert running.poll() is None
            time.sleep(0.05)
        running.kill()
    assert list(temporary.iterdir()) == []
    deadline = time.monotonic() + 60
    while not all(map(has_ended, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(has_ended, started))
