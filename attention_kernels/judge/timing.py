"""The time of one kernel on one case, by the judge's rules."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass

import torch

from attention_kernels.errors import ArgumentError, RejectedTimeError, UnsupportedError
from attention_kernels.judge.clock import Clock, Numbers
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import judged, run_check
from attention_kernels.judge.truth import check_precision
from attention_kernels.judge.worker import TIMEOUT_S, open_runner
from attention_kernels.registry import BackendSpec

MIN_ROTATED_BYTES = 96 * 2**20
MIN_CALLS, MIN_DECODE_CALLS = 5, 2  # the caches of a batch take gigabytes
CPU_CALLS = 4


@dataclass(frozen=True)
class Time:
    """The time of a kernel, in microseconds per call."""

    samples_us: tuple[float, ...]
    """The samples, in the order in which they were taken."""
    median_us: float
    """The median sample."""
    spread_us: tuple[float, float]
    """The smallest and the largest sample."""


def time_kernel(
    what: str | BackendSpec,
    case: Case | DecodeCase,
    device: str = "",
    *,
    samples: int = 5,
    floor_us: float = 0.0,
    timeout_s: float = TIMEOUT_S,
) -> Time:
    """Check a kernel on one case, then time it there; every timed output is judged as well.

    what, device, timeout_s: as for verify(). case: the shape, layout and kind of values; the timed
    numbers are new in each sample and each of its calls. samples: how many to take, after one that
    does not count; each is a mean over several calls. floor_us: the least time of a call that the
    device allows, in microseconds; 0 if unknown.

    Raises RejectedTimeError if an output is wrong, the clocks disagree or a sample is beneath
    floor_us; UnsupportedError if the kernel does not take the case, or is emulated; KernelError,
    OutputError or CallError if a call fails, EndedError if it ends its process or takes longer than
    timeout_s; ArgumentError for a bad number of samples; and the errors of verify().
    """
    if samples < 1:
        raise ArgumentError(f"samples must be 1 or more, not {samples}")
    check_precision()
    with contextlib.closing(open_runner(what, device, timeout_s=timeout_s)) as runner:
        if runner.is_emulated:
            raise UnsupportedError(runner.spec.name, ["timing: it is emulated on this device"])
        verdict = run_check(runner, judged(runner, case))
        if not verdict.passed:  # type: ignore[union-attr]
            raise RejectedTimeError(f"its output is wrong: {verdict}")
        numbers = Numbers(case, sets_of(case, runner.device), runner.device)
        clock = Clock(runner, numbers, floor_us=floor_us)
        found = [clock.sample() for _ in range(samples + 1)][1:]
        clock.check()
    return Time(tuple(found), statistics.median(found), (min(found), max(found)))


def sets_of(case: Case | DecodeCase, device: str) -> int:
    """Return the number of input sets of a sample, which on CUDA together exceed the L2."""
    if device == "cpu":
        return CPU_CALLS
    tensors, least = (3, MIN_CALLS) if isinstance(case, Case) else (2, MIN_DECODE_CALLS)
    numbers = tensors * case.batch * case.seqlen * case.num_heads * case.head_dim
    rotated = max(2 * torch.cuda.get_device_properties().L2_cache_size, MIN_ROTATED_BYTES)
    return max(-(-rotated // (numbers * case.dtype.itemsize)), least)
