"""The emulator: blocks, copies, and kernels that would hang or kill the process."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch

from attention_kernels import UnavailableBackendError, get_backend, ladder
from attention_kernels.inspection.sanitize import sanitize
from tests.attention_kernels.backends.common import changed
from tests.attention_kernels.conftest import place_of
from tests.conftest import needs_compiler, version_file

NEGATIVE = Path(__file__).parent / "negative"
FILE = NEGATIVE / "v04_faults.cu"
SOURCE = FILE.read_text("utf-8")
RIGHT, SPIN, BARRIERS, ABOVE, BELOW, NULL = range(1, 7)
PAST_AN_ARRAY, PAST_A_POINTER, FLOAT2, FLOAT4, JUST_PAST, ASSERT, TRAP, EXIT, ABORT = range(8, 17)
PAST_A_FUNCTION, RACE, EXIT_OF_THE_HOST, RETURNED = range(17, 21)
NO_SUCH_BLOCK, NOT_SHARED, A_BLOCK_FAILS, PRINTS, SUBNORMAL, ARRIVES_TWICE, WAITS_TWICE = range(
    21, 28
)
# Of the blocks of a cluster, which run at the same time, either may be the first.
BLOCK = r"; block \([01], 0, 0\), thread \("

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def spec():
    spec = ladder.resolve(str(FILE))
    spec.prepare("cpu")
    return spec


@pytest.fixture(params=["1", "2"])
def threads(request, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_THREADS", request.param)


def launch(spec, fault):
    x = torch.zeros(4, fault, 1, 32)
    return spec.attention(x, x, x)


def runs_right(spec):
    return bool((launch(spec, RIGHT) == 1).all())


@pytest.mark.parametrize("fault", [SPIN, BARRIERS])
def test_an_endless_block_ends_in_its_time(spec, fault, threads, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "0.05")
    for _ in range(8):  # each stops in some other instruction
        with pytest.raises(RuntimeError, match=r"the block did not end in 0\.05 s, ") as caught:
            launch(spec, fault)
        message = str(caught.value)
        assert "cudaErrorLaunchTimeout: the launch timed out and was terminated" in message
        assert place_of(fault, FILE) in message
        assert re.search(BLOCK, message)
    monkeypatch.delenv("ATTENTION_EMULATOR_TIMEOUT")
    assert runs_right(spec)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TIMEOUT", "60 s"),
        ("ORDER", "shuffle:"),
        ("POISON", "xyz"),
        ("ARCH", "90a"),
        ("MULTIPROCESSORS", "0"),
    ],
)
def test_a_wrong_setting_is_reported_as_such(spec, variable, value, monkeypatch):
    """The message must not blame the head_dim; scratch_floats() divides by MULTIPROCESSORS."""
    monkeypatch.setenv(f"ATTENTION_EMULATOR_{variable}", value)
    with pytest.raises(RuntimeError) as caught:
        launch(spec, RIGHT)
    assert f"ATTENTION_EMULATOR_{variable} is `{value}`: it takes " in str(caught.value)
    assert "head_dim" not in str(caught.value)


@pytest.mark.parametrize("fault", [SPIN, BARRIERS])
def test_ctrl_c_ends_an_endless_launch(spec, fault, threads):
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(spec, fault)
    message = str(caught.value.__context__)
    assert "cudaErrorLaunchFailure: unspecified launch failure: interrupted, " in message
    assert re.search(BLOCK, message)
    with pytest.raises(KeyboardInterrupt):  # Python's own handler is back
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, previous)
    assert runs_right(spec)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (ABOVE, "illegal access to byte 400000 of 256 bytes of dynamic shared memory, at {}"),
        (BELOW, "illegal access to byte -400000 of 256 bytes of dynamic shared memory, at {}"),
        (JUST_PAST, "illegal access to byte 256 of 256 bytes of dynamic shared memory, at {}"),
        (NULL, "illegal memory access (address 0x18), at {}"),
        (PAST_AN_ARRAY, "access out of bounds of an array at {}: index 64 of a 'float [64]'"),
        (PAST_A_POINTER, "access out of bounds of an array at {}: no room for a 'float'"),
        (FLOAT2, "misaligned access at {}: a 'struct float2' that is not at a multiple of 8 bytes"),
        (FLOAT4, "misaligned access at {}: a 'struct float4' that is not at a multiple of 16 b"),
        (ASSERT, "device-side assert triggered: assert() at {}: threadIdx.x < 32"),
        (TRAP, "__trap() at {}"),
        (EXIT, "the version file calls exit(3)"),
        (ABORT, "the version file calls abort()"),
        (NO_SUCH_BLOCK, "store_to_block() at {}: that block of the cluster has not begun, or has"),
        (ARRIVES_TWICE, "cluster_arrive() at {}: the thread has not waited since it arrived"),
        (WAITS_TWICE, "cluster_wait() at {}: the thread has not arrived"),
        (NOT_SHARED, "store_to_block() at {}: the address is not in shared memory"),
        (EXIT_OF_THE_HOST, "the version file calls exit(3)"),
        (PAST_A_FUNCTION, "access out of bounds of an array at v04_faults"),
        (A_BLOCK_FAILS, "__trap() at v04_faults"),  # the others of its cluster do not wait for it
    ],
)
def test_a_fault_is_reported_with_block_thread_and_line(spec, fault, what, threads):
    with pytest.raises(RuntimeError) as caught:
        launch(spec, fault)
    message = str(caught.value).replace("'float4'", "'struct float4'")
    assert (what.format(place_of(fault, FILE)) if "{}" in what else what) in message
    assert re.search(BLOCK, message) or fault == EXIT_OF_THE_HOST
    assert runs_right(spec)


def test_printf_output_is_shown_with_block_thread_and_line(spec, capfd):
    launch(spec, PRINTS)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 4 * PRINTS
    assert f"block (3, 0, 0) thread (33, 0, 0) {place_of(PRINTS, FILE)}: 7 of 8" in lines


def test_subnormal_numbers_are_flushed_where_nvcc_would_flush_them(spec):
    kept = launch(spec, SUBNORMAL)
    assert bool((kept > 0).all() & (kept < torch.finfo(torch.float32).tiny).all())
    flushes = changed(FILE, ("Flags:  (none)", "Flags:  --use_fast_math"))
    assert not launch(flushes, SUBNORMAL).any()
    assert bool((launch(spec, SUBNORMAL) == kept).all())
    assert torch.tensor([1e-38]) * 0.1 > 0  # and not in torch's own operations afterwards


@pytest.mark.parametrize("order", ["", "reverse"])
def test_early_launches_overlap_all_that_are_in_a_row(order, threads, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    spec = ladder.resolve(str(NEGATIVE / "v07_early.cu"))

    def run(fault: int) -> torch.Tensor:
        x = torch.zeros(1, fault, 1, 32)
        return spec.attention(x, x, x)[0, 0, 0]

    right = torch.full((32,), 2.0)
    assert torch.equal(run(1), right)
    with pytest.raises(RuntimeError, match="launched early ended, and none of its threads called"):
        run(2)
    assert torch.equal(run(3), right)
    assert run(4).isnan().any()
    assert torch.equal(run(1), right)


@pytest.mark.slow
def test_a_version_whose_second_kernel_might_end_first_fails():
    """In version 17, if nothing is cut, one block must wait for the first kernel."""
    waits = "if (!is_cut && blockIdx.x > 0) return;"
    source = get_backend("CUSTOM_CUDA_VERSION_17").version.path
    spec = changed(source, (waits, "if (!is_cut) return;"))
    x = torch.zeros(1, 65, 16, 32)
    with pytest.raises(RuntimeError, match="launched early ended"):
        spec.attention(x, x, x, is_causal=False)


def test_barriers_wait_only_for_threads_that_have_not_returned(spec):
    assert bool((launch(spec, RETURNED) == 1).all())


def test_a_race_between_blocks_shows_in_another_order_of_blocks(spec, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_THREADS", "1")
    right = {}
    for order in ("", "reverse", "shuffle:1"):
        monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
        right[order] = bool((launch(spec, RACE) == 1).all())
        assert runs_right(spec)
    assert right == {"": True, "reverse": False, "shuffle:1": False}


@pytest.mark.slow
def test_the_sanitizer_names_the_line():
    file = version_file(FILE.name, SOURCE.replace("params.seqlen);", f"{ABOVE});"))
    (found,) = sanitize([str(file)], "cpu")
    assert f"AddressSanitizer: use-after-poison at {place_of(ABOVE, FILE)}" in found


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ('asm volatile("mov.u64 %0, %clock64;" : "=l"(lane));', "has no register %clock64"),
        ("lane = clock64();", "has no clock"),
    ],
)
def test_unsupported_features_are_compile_errors(statement, told):
    source = SOURCE.replace("  __syncthreads();\n", f"  long lane = 0;\n  {statement}\n", 1)
    spec = ladder.resolve(str(version_file(FILE.name, source)))
    with pytest.raises(UnavailableBackendError, match=f"the CPU emulator {told}"):
        spec.prepare("cpu")


# Blocks, asynchronous copies and products of matrices


CALLS = {
    "block": lambda fault: ("run_reverse", fault, 256, torch.zeros(2, 64)),
    "copy": lambda fault: ("run_copy", fault, torch.zeros(32), torch.zeros(48)),
    "mma": lambda fault: ("run_fail", fault, 32, torch.ones(512).half(), torch.zeros(256)),
    "half a warp": lambda fault: ("run_fail", fault, 16, torch.ones(512).half(), torch.zeros(256)),
}
DIVERGED, COPY = "divergence: this thread waits in ", "__pipeline_memcpy_async() at {}: "


@pytest.mark.parametrize(
    ("call", "fault", "words", "markers"),
    [
        ("block", 0, "", []),
        ("block", 1, f"{DIVERGED}__syncthreads()", ["ONE BARRIER", "BARRIER"]),
        ("block", 2, "the mask does not name the caller", ["NOT NAMED"]),
        ("block", 3, f"{DIVERGED}__syncwarp()", ["MASKS"]),
        ("block", 4, "illegal access to byte 256 of 256 bytes of dynamic shared memory", []),
        ("block", 5, "a thread wrote to byte -4 of 256 bytes of dynamic shared memory", []),
        ("block", 6, "cudaErrorIllegalAddress: illegal memory access (address 0x", []),
        ("block", 7, "a thread's stack overflowed", []),
        ("copy", 3, f"{COPY}4, 8 or 16 bytes can be copied", ["SIZE"]),
        ("copy", 4, f"{COPY}an address is not a multiple of the size", ["ADDRESS"]),
        ("copy", 5, f"{COPY}the destination is not in shared memory", ["NOT SHARED"]),
        ("mma", 0, "", []),
        ("half a warp", 0, "the warp has fewer than 32 threads", []),
        ("mma", 1, "waits for lanes that never arrive: thread (16, 0, 0) has returned", ["LOAD"]),
        ("mma", 2, f"{DIVERGED}mma_sync() at", ["ONE PLACE", "MMA"]),
        ("mma", 3, DIVERGED, ["SYNCWARP", "MMA"]),
        ("mma", 4, "cudaErrorMisalignedAddress: load_matrix_sync() at", ["MISALIGNED"]),
        ("mma", 5, "leading dimension is not a multiple of 8 halfs", ["LEADING DIMENSION"]),
        ("mma", 6, "the lanes' arguments differ", ["ARGUMENTS"]),
        ("mma", 7, "another thread writes to the matrix at the same time", []),
        ("mma", 8, "another thread writes to the matrix at the same time", ["LOAD"]),
        ("mma", 10, "an element and its duplicate differ", []),
    ],
)
@pytest.mark.parametrize("order", ["", "reverse", "shuffle:1"])
def test_wrong_use_is_reported(probe, call, fault, words, markers, order, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    arguments = CALLS[call](fault)
    message = probe(*arguments)
    if (call, fault) == ("block", 0):
        assert torch.equal(arguments[-1], torch.arange(63.0, -1, -1).expand(2, 64))
    assert bool(message) == bool(words)
    assert words.format(*map(place_of, markers)) in message
    assert all(place_of(marker) in message for marker in markers)


@pytest.mark.parametrize(
    ("fault", "missing"),
    [(8, [(1, 58)]), (9, [(1, 58)]), (10, [(block, i) for block in (0, 1) for i in range(16)])],
)
def test_values_that_nobody_wrote_or_sent_are_nan(probe, fault, missing):
    """Shared memory that a block has not written, and lanes that take no part in a shuffle."""
    d = torch.zeros(2, 64)
    assert probe("run_reverse", fault, 256, d) == ""
    assert [tuple(place) for place in d.isnan().nonzero().tolist()] == missing


def test_shared_memory_of_both_kinds_counts(probe, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", "75")
    d = torch.zeros(2, 64)
    assert probe("run_reverse", 0, 65536 - 256, d) == ""
    message = probe("run_reverse", 0, 65536 - 252, d)
    assert "65284 bytes of dynamic and at least 256 of static shared memory are more" in message
    assert "65540 bytes of dynamic shared memory are more" in probe("run_reverse", 0, 65540, d)


def test_copies_arrive_when_they_are_waited_for(probe):
    data = torch.arange(32.0)
    for fault, early in ((0, 16), (1, 0), (2, 0)):
        to = torch.zeros(48)
        assert probe("run_copy", fault, data, to) == ""
        assert torch.equal(to[:early], data[:early])
        assert to[early:32].isnan().all()
        last = data[16:].view(4, 4)
        last[:, 2:] = 0  # the copy was to fill the last 8 of 16 bytes with zeros
        assert torch.equal(to[32:], last.flatten())
        data = torch.arange(32.0)
