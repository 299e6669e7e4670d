"""Kernels that would hang or kill the process: the emulator ends them and says where they were."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from attention_kernels import UnsupportedError, ladder
from attention_kernels.inspection.sanitize import sanitize
from attention_kernels.ladder import compilers

RIGHT, SPIN, BARRIERS, ABOVE, BELOW, NULL, DIVERGENCE = range(1, 8)
SOURCE = """\
// v90 - one kernel with many faults
//
// Change: seqlen chooses the fault.
// Why:    test data: the emulator must survive it.
// Cost:   none.
// Tile:   none, block 64
// Layout: contiguous
// Flags:  (none)
// Expect: an error that names the line.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

__global__ void faults(volatile float* o, int fault) {
  ATTENTION_DYNAMIC_SHARED(float, smem);
  smem[threadIdx.x] = 1.0f;
  __syncthreads();
  while (fault == 2) o[0] = o[0] + 1.0f;  // 2
  while (fault == 3) __syncthreads();     // 3
  if (fault == 4) smem[100000] = 1.0f;    // 4
  if (fault == 5) smem[-100000] = 1.0f;   // 5
  if (fault == 6) static_cast<volatile float*>(nullptr)[fault] = 1.0f;  // 6
  if (fault == 7 && threadIdx.x == 0) __syncthreads();                  // 7
  if (threadIdx.x < 32) o[blockIdx.x * 32 + threadIdx.x] = smem[threadIdx.x];
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& params, cudaStream_t stream) {
  return launch_kernel(faults, params.batch * params.seqlen, 64, 64 * sizeof(float), stream,
                       static_cast<float*>(params.o), params.seqlen);
}

}  // namespace attention::ATTENTION_VERSION
"""

pytestmark = pytest.mark.skipif(
    compilers.missing_compiler("emulator") is not None, reason="needs a C++ compiler"
)


def spec_in(folder: Path):
    folder.mkdir(exist_ok=True)
    (folder / "v90_faults.cu").write_text(SOURCE)
    spec = ladder.resolve(str(folder / "v90_faults.cu"))
    spec.prepare("cpu")
    return spec


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return spec_in(tmp_path_factory.mktemp("faults"))


@pytest.fixture(params=["1", "2"])
def threads(request, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_THREADS", request.param)


def launch(spec, fault):
    x = torch.zeros(4, fault, 1, 32)
    return spec.attention(x, x, x)


def place_of(fault):
    lines = SOURCE.splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"// {fault}"))
    return f"v90_faults.cu:{number}"


def runs_right(spec):
    return bool((launch(spec, RIGHT) == 1).all())


def interrupt_handler() -> bytes:
    """What the process does on SIGINT, as the operating system has it."""
    action = ctypes.create_string_buffer(256)
    assert ctypes.CDLL(None).sigaction(signal.SIGINT, None, action) == 0
    return action.raw[:16]  # the handler, and as many of the blocked signals as Linux has


@pytest.fixture
def python_handler():
    """Python's own handler of SIGINT, and nothing of the emulator's when the test is over."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = interrupt_handler()
    yield
    assert interrupt_handler() == before
    signal.signal(signal.SIGINT, previous)


def interrupt_a_launch():
    """Press Ctrl-C once a launch runs: it answers SIGINT itself, so what answers has changed."""
    before = interrupt_handler()

    def wait():
        while interrupt_handler() == before:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("fault", [SPIN, BARRIERS])
def test_an_endless_block_ends_in_its_time(spec, fault, threads, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "0.3")
    with pytest.raises(RuntimeError, match=r"the block did not end in 0\.3 s, ") as caught:
        launch(spec, fault)
    message = str(caught.value)
    assert "cudaErrorLaunchTimeout: the launch timed out and was terminated" in message
    assert place_of(fault) in message
    assert "; block (0, 0, 0), thread (" in message
    assert runs_right(spec)


def test_a_time_limit_is_a_number(spec, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "60 s")
    with pytest.raises(UnsupportedError, match="ATTENTION_EMULATOR_TIMEOUT is no number"):
        launch(spec, RIGHT)
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "0")
    assert runs_right(spec)


@pytest.mark.parametrize("fault", [SPIN, BARRIERS])
def test_ctrl_c_ends_an_endless_launch(spec, fault, threads, python_handler):
    interrupt_a_launch()
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(spec, fault)
    message = str(caught.value.__context__)
    assert "cudaErrorLaunchFailure: unspecified launch failure: interrupted, " in message
    assert "; block (0, 0, 0), thread (" in message
    assert runs_right(spec)


def test_ctrl_c_ends_the_launches_of_all_threads_and_libraries(spec, tmp_path, python_handler):
    specs = [spec, spec_in(tmp_path / "other"), spec]
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(launch, each, SPIN) for each in specs]
        time.sleep(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        for future in running:
            with pytest.raises(RuntimeError, match="interrupted, at v90_faults"):
                future.result(timeout=20)
        assert all(pool.map(runs_right, specs))


def test_who_ignores_interrupts_still_does(spec, python_handler, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(RuntimeError, match="did not end in 1 s"):
        launch(spec, SPIN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (ABOVE, "illegal access to byte 400000 of 256 bytes of dynamic shared memory"),
        (BELOW, "illegal access to byte -400000 of 256 bytes of dynamic shared memory"),
        (NULL, "illegal memory access (address 0x18)"),
    ],
)
def test_a_wild_access_is_told_with_its_line(spec, fault, what, threads):
    with pytest.raises(RuntimeError) as caught:
        launch(spec, fault)
    assert f"{what}, at {place_of(fault)}; block (0, 0, 0), thread (" in str(caught.value)
    assert runs_right(spec)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (ABOVE, "AddressSanitizer: use-after-poison at {}"),
        (NULL, "AddressSanitizer: SEGV at {}"),
        (DIVERGENCE, "__syncthreads() at {}"),  # a launch that fails with an exception
        (SPIN, "the block did not end in 0.5 s, at {}"),
    ],
)
def test_the_sanitizer_names_the_line(fault, what, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "0.5")
    file = tmp_path / "v90_faults.cu"
    file.write_text(SOURCE.replace("params.seqlen);", f"{fault});"))
    (found,) = sanitize([str(file)], "cpu")
    assert what.format(place_of(fault)) in found
