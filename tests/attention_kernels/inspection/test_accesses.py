"""Bank conflicts and sectors, counted in the emulator: of known patterns, and of the ladder."""

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
    Access,
    Recording,
    count_accesses,
    format_table,
    record,
)
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import parse_header

PATTERNS = """\
// v01 - access patterns
//
// Change: each pattern is one line, named by a comment.
// Why:    their costs are known.
// Cost:   none.
// Tile:   one block of 64 threads
// Layout: contiguous
// Flags:  (none)
// Expect: what the test says.

#include <cuda_pipeline.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

inline __device__ float helper(const float* row, int d, int64_t = 1, int64_t = 2, int64_t = 3,
                               int64_t = 4, int64_t = 5, int64_t = 6) {
  return row[d];
}

inline __device__ void store2(float* row, unsigned d, float x, float y) {
  reinterpret_cast<float2*>(row)[d / 2] = make_float2(x, y);
}

// Its frame is not where a function's with more arguments is.
inline __device__ float inner(const float* row) { return row == nullptr ? row[0] : 0.0f; }
inline __device__ float none(const float* row) {
  return inner(row) + (row == nullptr ? row[1] : 0.0f);
}

__global__ void patterns(const float* q, float* o, int head_dim) {
  ATTENTION_DYNAMIC_SHARED(float, smem);
  __shared__ float fixed[64];
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < 4096; i += 64) smem[i] = 0.0f;  // fill
  fixed[threadIdx.x] = 0.0f;                                    // static
  __syncthreads();
  float x = 0.0f;
  x += smem[lane];                                        // in order
  x += smem[7];                                           // broadcast
  x += smem[2 * lane];                                    // every second
  x += smem[32 * lane];                                   // a column
  x += smem[33 * lane];                                   // a padded column
  x += smem[lane % 16 * 32 + lane / 16];                  // half a column twice
  x += reinterpret_cast<float4*>(smem)[lane].x;           // one of four
  const float4 a = reinterpret_cast<float4*>(smem)[lane];      // vectors
  const float4 b = reinterpret_cast<float4*>(smem)[8 * lane];  // vectors in a column
  const float2 c = reinterpret_cast<float2*>(smem)[16 * lane]; // pairs in a column
  const float4 d = reinterpret_cast<float4*>(smem)[lane / 2];      // vectors of neighbours
  const float4 e = reinterpret_cast<float4*>(smem)[lane / 4 * 2 + lane % 2];  // two by two
  const float4 f = reinterpret_cast<float4*>(smem)[lane / 4];      // vectors of four
  const float2 g = reinterpret_cast<float2*>(smem)[lane / 2];      // pairs of neighbours
  const float4 h = reinterpret_cast<float4*>(smem)[lane % 16];     // vectors of both halves
  x += a.y + b.z + c.x + d.x + e.x + f.x + g.x + h.x;
  x += none(smem);               // called before
  x += helper(smem, 32 * lane);  // called
  x += fixed[16 * (lane % 4)];   // static column
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j <= lane; ++j) {
      x += smem[j];  // some leave early
    }
    x += smem[i];  // all again
  }
  if (lane < 8) {
    x += smem[lane];  // eight lanes
  } else {
    x += smem[64 + 32 * lane];  // the others
  }
  __pipeline_memcpy_async(smem + 4 * threadIdx.x, q + 8 * threadIdx.x, 16);  // asynchronous
  o[threadIdx.x] = x;         // store in order
  o[8 * threadIdx.x] = x;     // store apart
  x += q[threadIdx.x % 2];    // a pair
  store2(o, 2 * threadIdx.x, x, x);                               // store of a call
  reinterpret_cast<float4*>(o)[threadIdx.x] = reinterpret_cast<const float4*>(q)[threadIdx.x];
  atomicAdd(&smem[lane], 1.0f);      // an atomic each
  atomicAdd(&smem[lane / 4], 1.0f);  // an atomic of four lanes
  atomicMax(reinterpret_cast<int*>(o) + 8 * threadIdx.x, lane);  // an atomic apart
  if (threadIdx.x == 33) printf("x is %g\\n", 1.5f);
  if (threadIdx.x == 2) std::printf("1\\t2\\n");
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim == 128) return cudaErrorInvalidValue;
  return launch_kernel(patterns, dim3(1), dim3(64), 4096 * sizeof(float), stream,
                       static_cast<const float*>(params.q), static_cast<float*>(params.o),
                       params.head_dim);
}

}  // namespace attention::ATTENTION_VERSION
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, str]:
    """The recording, and what the kernel printed."""
    file = tmp_path_factory.mktemp("patterns") / "v01_patterns.cu"
    # Comments may be in any encoding.
    file.write_bytes(PATTERNS.replace("// v01 - access", "// v01 - caf\xe9").encode("latin-1"))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        return record(parse_header(file)), printed.getvalue()


@pytest.fixture(scope="module")
def recording(recorded: tuple[Recording, str]) -> Recording:
    return recorded[0]


@pytest.fixture(scope="module")
def patterns(recording: Recording) -> dict[str, list[Access]]:
    by_comment: dict[str, list[Access]] = {}
    lines = PATTERNS.splitlines()
    for access in recording.accesses:
        comment = lines[access.lines[0] - 1].rpartition("//")[2].strip()
        by_comment.setdefault(comment, []).append(access)
    return by_comment


# Of two warps: requests, wavefronts, bank conflicts, and the most words wanted of one bank.
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
def test_shared_memory_conflicts_as_hardware_does(
    patterns: dict[str, list[Access]], comment: str
) -> None:
    (found,) = patterns[comment]
    assert found.memory == "shared"
    assert (found.requests, found.wavefronts, found.conflicts, found.ways) == SHARED[comment]


def test_an_access_is_named_by_the_kernels_own_line_and_the_way_there(
    patterns: dict[str, list[Access]],
) -> None:
    lines = PATTERNS.splitlines()
    (called,) = patterns["called"]
    assert [lines[n - 1].split()[0] for n in called.lines] == ["x", "return"]
    assert called.source.startswith("x += helper(smem, 32 * lane)")
    assert patterns["vectors"][0].bytes == 16
    assert patterns["pairs in a column"][0].bytes == 8


def test_global_memory_moves_in_sectors(patterns: dict[str, list[Access]]) -> None:
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


def test_contiguous_inputs_are_tensors_of_their_own(patterns: dict[str, list[Access]]) -> None:
    (found,) = patterns["a pair"]
    assert found.costliest.array == "q"


def test_atomics_are_counted(patterns: dict[str, list[Access]]) -> None:
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


def test_what_a_kernel_prints_is_shown_and_not_counted(recorded: tuple[Recording, str]) -> None:
    line = next(n for n, line in enumerate(PATTERNS.splitlines(), 1) if "x is %g" in line)
    place = f"block (0, 0, 0) thread (33, 0, 0) v01_patterns.cu:{line}: "
    assert sorted(recorded[1].splitlines()) == ["1\t2", f"{place}x is 1.5"]


def test_one_request_tells_where_each_lane_went(patterns: dict[str, list[Access]]) -> None:
    def offsets(comment: str, cost: int) -> list[int | None]:
        (found,) = patterns[comment]
        at = found.costliest
        assert (at.block, at.warp, at.cost) == (0, 0, cost)
        assert at.array == {"shared": "dynamic", "global": "o"}[found.memory]
        return [*at.offsets]

    assert offsets("a column", 32) == [128 * lane for lane in range(32)]
    assert offsets("store apart", 32) == [32 * lane for lane in range(32)]
    assert offsets("eight lanes", 1) == [*(4 * lane for lane in range(8)), *[None] * 24]
    leaving = offsets("some leave early", 1)  # all are there at first, and 32 lanes cost no more
    assert leaving == [0] * 32


def test_the_warps_of_a_block_take_turns_between_barriers(recording: Recording) -> None:
    assert recording.block == 0
    assert {(turn.barriers, turn.warp) for turn in recording.turns} == {
        (barriers, warp) for barriers in (0, 1) for warp in (0, 1)
    }
    before = [turn.accesses for turn in recording.turns if turn.barriers == 0]
    assert before == [32 * 65, 32 * 65]  # fill and static
    assert [turn.barriers for turn in recording.turns] == [0, 0, 1, 1]


def test_an_asynchronous_copy_is_a_load_and_a_store_of_its_width(
    patterns: dict[str, list[Access]],
) -> None:
    load, store = sorted(patterns["asynchronous"], key=lambda access: access.kind)
    assert (load.memory, load.bytes, load.requests, load.sectors) == ("global", 16, 2, 64)
    assert (store.memory, store.bytes, store.requests) == ("shared", 16, 2)
    assert (store.wavefronts, store.conflicts) == (8, 0)


@functools.cache
def counted(name: str) -> list[Access]:
    """A version's accesses at the default case."""
    list_backends()
    return count_accesses(ladder.versions()[name])


def total(name: str) -> tuple[int, int, int]:
    """Of a version's shared loads: requests, conflicts, the most ways."""
    loads = [
        access for access in counted(name) if access.memory == "shared" and access.kind == "load"
    ]
    return (
        sum(access.requests for access in loads),
        sum(access.conflicts for access in loads),
        max(access.ways for access in loads),
    )


@pytest.mark.slow
def test_the_readme_shows_what_is_counted() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text("utf-8")
    _, shown = readme.split("$ gpt2-infer accesses CUSTOM_CUDA_VERSION_1\n")
    lines = shown.split("\n```")[0].splitlines()[1:]
    rows = format_table(counted("CUSTOM_CUDA_VERSION_1"), width=100).splitlines()
    assert {line for line in lines if line not in ("", "...")} <= {*rows}
    assert any("32-way" in line for line in lines)


@pytest.mark.slow
def test_wavefronts_are_the_profilers() -> None:
    """Of versions whose loads, or whose stores, nvcc leaves as they are, measured on an H200."""
    file = Path(__file__).parents[3] / "results" / "2026-11-22_h200_profile-fp32-128.json"
    rows = json.loads(file.read_text("utf-8"))["rows"]
    profile = {(row["contender"], row["metric"]): row["samples"] for row in rows}
    for number, kind, wavefronts in ((14, "load", 15_552), (11, "store", 3_840)):
        name = f"CUSTOM_CUDA_VERSION_{number}"
        assert profile[name, f"shared_{kind}_wavefronts"] == [wavefronts]
        found = [a for a in counted(name) if a.kind == kind]
        assert sum(a.wavefronts for a in found) == wavefronts


@pytest.mark.slow
def test_padding_k_ends_the_conflicts_of_the_first_version_and_changes_no_request() -> None:
    first, second = total("CUSTOM_CUDA_VERSION_1"), total("CUSTOM_CUDA_VERSION_2")
    assert first[0] == second[0]
    assert first[1] > first[0]
    assert first[2] == 32
    assert second[1:] == (0, 1)


@pytest.mark.slow
def test_swizzling_ends_the_conflicts_and_a_4_x_4_tile_halves_the_loads() -> None:
    before, last = total("CUSTOM_CUDA_VERSION_11"), total("CUSTOM_CUDA_VERSION_12")
    assert last[1:] == (0, 1)
    assert 2 * last[0] <= before[0]


@pytest.mark.slow
def test_a_version_is_counted_whose_second_kernel_starts_early() -> None:
    assert total("CUSTOM_CUDA_VERSION_17")[1:] == (0, 1)


@pytest.mark.slow
def test_what_cannot_be_counted_is_refused_with_every_reason(tmp_path: Path) -> None:
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
        ("std::exit(0);", {}, "nothing to count: .* or exits before"),
        ("std::exit(3);", {}, "its launch ended with exit status 3"),
        ("std::abort();", {}, r"its launch was killed by SIGABRT \(after a failed assertion"),
        ("", {"batch": 2**20, "seqlen": 2**19}, "no memory for the 140737488355328 bytes of q"),
    ],
)
def test_a_launch_that_tells_nothing_is_no_empty_table(
    does: str, case: dict[str, int], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "v01_patterns.cu"
    source = PATTERNS.replace("#include", "#include <cstdlib>\n#include", 1)
    file.write_text(source.replace(LAUNCH, LAUNCH + does))
    with pytest.raises(UnsupportedError, match=words):
        count_accesses(parse_header(file), **case)


ENDLESS = PATTERNS.replace(
    "float x = 0.0f;", "volatile float x = 0.0f; for (;;) x = 1.0f;"
).replace("x += none(smem);", "")


@pytest.mark.slow
def test_an_endless_block_ends_in_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "v01_patterns.cu"
    file.write_text(ENDLESS)
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "0.5")
    with pytest.raises(UnsupportedError, match=r"did not end in 0\.5 s, at v01_patterns\.cu:\d+"):
        count_accesses(parse_header(file))
    monkeypatch.delenv("ATTENTION_EMULATOR_TIMEOUT")
    with pytest.raises(UnsupportedError, match=r"its launch did not end in 0\.5 s"):
        count_accesses(parse_header(file), timeout_s=0.5)


@pytest.mark.slow
def test_who_is_killed_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
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
    environment = {**os.environ, "TMPDIR": str(temporary)}

    def recorders() -> list[str]:
        """The processes that this one's child started, all of which name its temporary folder."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(temporary) in os.readlink(process / "exe"):
                    found.append(process.name)
            except OSError:  # gone, or another user's
                continue
        return found

    with subprocess.Popen(command, env=environment) as running:
        while not any("recorder" in os.readlink(f"/proc/{pid}/exe") for pid in recorders()):
            assert running.poll() is None
            time.sleep(0.05)
        running.kill()
    assert list(temporary.iterdir()) == []
    for _ in range(100):
        if not recorders():
            break
        time.sleep(0.05)
    assert recorders() == []
