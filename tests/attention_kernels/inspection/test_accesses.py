"""Bank conflicts and sectors counted in the emulator, for known patterns and for the ladder."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from attention_kernels import UnsupportedError, ladder, list_backends
from attention_kernels.inspection.accesses import BY_LANE, Access, count_accesses, format_table
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import parse_header
from tests.attention_kernels.ladder.test_ptx import STRANGERS
from tests.conftest import ROOT

PATTERNS = Path(__file__).with_name("v01_patterns.cu").read_text("utf-8")


LINES = PATTERNS.splitlines()


def comment_of(line):
    return re.sub(r" [\d/]+$", "", line.rpartition("//")[2].strip())


@pytest.fixture(scope="module")
def patterns(tmp_path_factory):
    """The accesses by the comment in their line."""
    file = tmp_path_factory.mktemp("patterns") / "v01_patterns.cu"
    # Comments may be in any encoding.
    file.write_bytes(PATTERNS.replace("// v01 - access", "// v01 - caf\xe9").encode("latin-1"))
    by_comment: dict[str, list[Access]] = {}
    for access in count_accesses(parse_header(file)):
        by_comment.setdefault(comment_of(LINES[access.lines[0] - 1]), []).append(access)
    return by_comment


def counts_in(name):
    """Return the counts in the comments of a file, by the words before them."""
    text = Path(__file__).with_name(name).read_text("utf-8")
    found = re.findall(r"// (.+) (\d+(?:/\d+)+)$", text, re.M)
    return {comment: tuple(map(int, counts.split("/"))) for comment, counts in found}


SHARED = counts_in("v01_patterns.cu")


@pytest.mark.parametrize("comment", SHARED)
def test_shared_memory_conflicts_as_hardware_does(patterns, comment):
    (found,) = patterns[comment]
    assert found.memory == "shared"
    assert (found.requests, found.wavefronts, found.conflicts, found.ways) == SHARED[comment]


def test_structs_are_counted_and_flags_of_the_compiler_are_not():
    """Stores of half2 that a call returns, and static arrays of half."""
    found = count_accesses(parse_header(STRANGERS / "wgmma_tma.cu"), num_heads=2)
    assert {(x.memory, x.kind) for x in found} == {
        *itertools.product(("shared", "global"), ["TMA load"]),
        *(("shared", "wgmma"), ("global", "store")),
    }
    assert sum(x.sectors for x in found if x.kind == "store") == 2048


def test_an_access_has_its_call_chain_its_width_and_the_address_of_each_lane(patterns):
    (called,) = patterns["called"]
    assert [LINES[n - 1].split()[0] for n in called.lines] == ["x", "return"]
    assert called.source.startswith("x += helper(smem, 32 * lane)")
    widths = {"a column": 4, "vectors": 16, "pairs in a column": 8}
    assert {comment: patterns[comment][0].bytes for comment in widths} == widths
    lanes = range(32)
    for comment, array, cost, offsets in (
        ("a column", "dynamic", 32, [128 * lane for lane in lanes]),
        ("store apart", "o", 32, [32 * lane for lane in lanes]),
        ("eight lanes", "dynamic", 1, [4 * lane if lane < 8 else None for lane in lanes]),
        ("some leave early", "dynamic", 1, [0] * 32),  # the first of equally costly requests
    ):
        at = patterns[comment][0].costliest
        assert (at.block, at.warp, at.array, at.cost) == (0, 0, array, cost)
        assert [*at.offsets] == offsets


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


@pytest.mark.parametrize(
    ("comment", "kind", "memory", "counts"),
    [
        ("an atomic each", "atomic", "shared", (2, 0, 1, 0)),
        ("an atomic of four lanes", "atomic", "shared", (8, 6, 4, 0)),
        ("an atomic apart", "atomic", "global", (0, 0, 0, 64)),
        ("asynchronous", "load", "global", (0, 0, 0, 64)),
        ("asynchronous", "store", "shared", (8, 0, 1, 0)),
    ],
)
def test_atomics_and_asynchronous_copies_are_counted(patterns, comment, kind, memory, counts):
    (found,) = (access for access in patterns[comment] if access.kind == kind)
    assert (found.memory, found.requests) == (memory, 2)
    assert (found.wavefronts, found.conflicts, found.ways, found.sectors) == counts
    assert f"{memory} {kind}" in format_table([found])


def test_copies_by_tma_and_products_are_counted():
    file = Path(__file__).with_name("v02_tiles.cu")
    lines = file.read_text("utf-8").splitlines()
    found = {}
    for access in count_accesses(parse_header(file), seqlen=72):
        found.setdefault(comment_of(lines[access.lines[0] - 1]), {})[access.memory] = access
    for comment, (size, requests, wavefronts, *sectors) in counts_in(file.name).items():
        accesses = found.pop(comment)
        kind = {"A and B": "wgmma", "B": "wgmma", "stored": "TMA store"}.get(comment, "TMA load")
        counted = {(a.kind, a.bytes, a.requests) for a in accesses.values()}
        assert counted == {(kind, size, requests)}
        shared = accesses["shared"]
        assert (shared.wavefronts, shared.conflicts) == (wavefronts, 0), comment
        assert ("global" in accesses) == (kind != "wgmma")
        if moved := accesses.get("global"):
            array = {"stored": "o", "contiguous": "k"}.get(comment, "q")
            assert [moved.sectors, moved.fewest_sectors] == sectors, comment
            assert moved.costliest.array == array
    assert {a.kind for rest in found.values() for a in rest.values()} <= {*BY_LANE}


@pytest.mark.slow
def test_wavefronts_are_the_profilers():
    """Counts equal the profiler's on an H200 if nvcc leaves the loads or stores as they are."""
    file = ROOT / "results" / "2026-11-22_h200_profile-fp32-128.json"
    rows = json.loads(file.read_text("utf-8"))["rows"]
    profile = {(row["contender"], row["metric"]): row["samples"] for row in rows}
    list_backends()
    for number, kind, wavefronts in ((14, "load", 15_552), (11, "store", 3_840)):
        name = f"CUSTOM_CUDA_VERSION_{number}"
        assert profile[name, f"shared_{kind}_wavefronts"] == [wavefronts]
        found = count_accesses(ladder.versions()[name])
        assert sum(a.wavefronts for a in found if a.kind == kind) == wavefronts


LAUNCH = "cudaError_t launch(const Params& params, cudaStream_t stream) {\n"
ENDLESS = "volatile float x = 0.0f; for (;;) x = 1.0f;", "float x = 0.0f;"


def patterns_file(folder, new="", old=LAUNCH):
    """Write the patterns, with something new after the beginning of launch(), or instead of old."""
    source = PATTERNS.replace("#include", "#include <cstdlib>\n#include", 1)
    source = source.replace(old, LAUNCH + new if old == LAUNCH else new)
    (folder / "v01_patterns.cu").write_text(source.replace("x += none(smem);", ""))
    return parse_header(folder / "v01_patterns.cu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "case", "words"),
    [
        ([], {"head_dim": 128}, r"v01_patterns\.cu.*cudaErrorInvalidValue"),
        (["return cudaSuccess;"], {}, "nothing to count: it launches no kernel, or exits before"),
        (["std::exit(3);"], {}, "its launch ended with exit status 3"),
        ([], {"batch": 2**20, "seqlen": 2**19}, "no memory for the 140737488355328 bytes of q"),
        (["float x = ;", "float x = 0.0f;"], {}, r"v01_patterns\.cu:\d+:\d+: error"),
        (ENDLESS, {"timeout_s": 0.5}, r"its launch did not end in 0\.5 s"),
    ],
)
def test_a_launch_without_results_is_an_error(change, case, words, tmp_path):
    with pytest.raises((UnsupportedError, BuildError), match=words):
        count_accesses(patterns_file(tmp_path, *change), **case)


def test_what_cannot_be_counted_is_refused_with_every_reason():
    list_backends()
    versions = ladder.versions()
    with pytest.raises(UnsupportedError, match=r"head_dim 48.*seqlen 0 \(1 or more.*fragment"):
        count_accesses(versions["WMMA_FLASH_ATTENTION_2_VERSION_1"], head_dim=48, seqlen=0)
    with pytest.raises(UnsupportedError, match="host code"):
        count_accesses(versions["FLASH_ATTENTION_1_CPU"])
