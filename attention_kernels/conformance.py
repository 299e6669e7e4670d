"""The conformance suite: what a backend must get right before anyone times it.

It is library code, so that others can hold their own backends to it. Inputs are normal at three
scales, from a flat to a peaky softmax; lengths lie on and beside tile edges; q, k and v are strided
views of one fused projection, as GPT-2 hands them over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from attention_kernels import ladder
from attention_kernels.contract import dtype_name
from attention_kernels.errors import (
    ArgumentError,
    AttentionError,
    UnavailableBackendError,
    UnsupportedError,
)
from attention_kernels.reference import (
    Verdict,
    check_precision,
    extent,
    judge,
    measure,
    naive_error,
    reference_attention,
)
from attention_kernels.registry import BackendSpec

SCALES = (0.02, 1.0, 8.0)
# What a kernel that fails may raise: a failure of its own, and of nothing else.
KERNEL_ERRORS = (AttentionError, RuntimeError, ValueError, TypeError)
# After so many cases that fail the suite ends: more would say nothing new.
MOST_FAILURES = 20
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 200, 1023, 1024)


@dataclass(frozen=True)
class Case:
    """One input of the suite; two cases that are equal have equal inputs."""

    seqlen: int
    head_dim: int
    scale: float = 1.0
    batch: int = 1
    num_heads: int = 2
    is_causal: bool = True
    softmax_scale: float | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as views of a fused (batch, seqlen, 3, num_heads, head_dim) projection.

        Drawn on the CPU, so that every device gets the same numbers.
        """
        shape = (self.batch, self.seqlen, 3, self.num_heads, self.head_dim)
        generator = torch.Generator().manual_seed(self.seed + 1)
        qkv = torch.randn(shape, generator=generator) * self.scale
        q, k, v = qkv.to(device=device, dtype=self.dtype).unbind(2)
        return q, k, v

    def __str__(self) -> str:
        """The parameters that tell this case from the others."""
        kind = "causal" if self.is_causal else "full"
        softmax = "" if self.softmax_scale is None else f"softmax_scale {self.softmax_scale}, "
        return (
            f"seqlen {self.seqlen}, head_dim {self.head_dim}, batch {self.batch}, "
            f"{self.num_heads} heads, {kind}, scale {self.scale}, {softmax}"
            f"{dtype_name(self.dtype)}, seed {self.seed}"
        )


def cases(
    head_dims: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    seed: int = 0,
) -> Iterator[Case]:
    """Every length with every head_dim and scale; batch 3 and full attention where it is cheap."""
    for seqlen in lengths:
        for head_dim in head_dims:
            for scale in SCALES:
                yield Case(seqlen, head_dim, scale, dtype=dtype, seed=seed)
            if seqlen <= 200:
                heads = 12 if seqlen == 33 else 3  # GPT-2's, once
                yield Case(seqlen, head_dim, batch=3, num_heads=heads, dtype=dtype, seed=seed)
                yield Case(seqlen, head_dim, is_causal=False, dtype=dtype, seed=seed)
                yield Case(seqlen, head_dim, softmax_scale=0.3, dtype=dtype, seed=seed)


def run_case(spec: BackendSpec, case: Case, device: torch.device | str) -> Verdict:
    """Run one case."""
    q, k, v = case.inputs(device)
    poison_freed_memory(q)
    o = spec.attention(q, k, v, softmax_scale=case.softmax_scale, is_causal=case.is_causal)
    return judge(
        o,
        q,
        k,
        v,
        case.softmax_scale,
        case.is_causal,
        precision=spec.precisions[dtype_name(case.dtype)],
        naive_floor=naive_floor(case, str(device)),
    )


def poison_freed_memory(like: Tensor) -> None:
    """Free NaN of an output's size, in as many pieces as copies of inputs may take, too.

    An allocator that gives it back, as CUDA's does, makes what a kernel does not write show. The
    CPU emulator fills every output with NaN itself.
    """
    block = torch.full_like(like, torch.nan, memory_format=torch.contiguous_format)
    poison = [block.clone() for _ in range(6)]
    del block, poison


@functools.cache
def naive_floor(case: Case, device: str) -> float:
    """Plain PyTorch's largest error over 16 draws of a small case; 0 for a large one.

    One draw of a few rows may be exact by luck, and a budget of twice nothing would fail any kernel
    that sums in another order.
    """
    if case.seqlen > 65:
        return 0.0
    errors = []
    for seed in range(16):
        q, k, v = dataclasses.replace(case, seed=1000 + seed).inputs(device)
        errors.append(naive_error(q, k, v, case.softmax_scale, case.is_causal))
    return max(errors)


def future_leaks(spec: BackendSpec, case: Case, device: torch.device | str, cut: int) -> str | None:
    """Whether keys and values from position `cut` on change any earlier row by a bit: what is seen
    then, in a phrase; None for nothing.

    An output that is not finite, or not the same twice, is told as that: it differs anyway.
    """
    q, k, v = case.inputs(device)
    before = spec.attention(q, k, v)
    k2, v2 = k.clone(), v.clone()
    k2[:, cut:] *= -3
    v2[:, cut:] += 1e4
    after = spec.attention(q, k2, v2)
    changed = before[:, :cut] != after[:, :cut]  # NaN is not equal to itself
    if not changed.any():
        return None
    if not before.isfinite().all():
        return f"the output is not finite: {extent(~before.isfinite())}"
    # More than once: a race need not show every time.
    for again in (spec.attention(q, k, v) for _ in range(3)):
        if not torch.equal(before, again):
            return (
                "two runs of one input differ, by a race, or a read of memory that nobody wrote: "
                f"{extent(before != again)}"
            )
    return f"keys and values from {cut} on change earlier rows: {extent(changed)}"


@dataclass(frozen=True)
class Failure:
    """What was checked, and what is wrong with it, a phrase each."""

    what: str
    why: str

    def __str__(self) -> str:
        """Both."""
        return f"{self.what}: {self.why}"


@dataclass
class Report:
    """What verify() found.

    cases: how many of the suite's `total` ran; failed: how many of them failed; stopped: whether
    the rest did not run, after MOST_FAILURES or a kernel that does not end. failures: theirs and
    those of the other checks, which come first. killed: whether a signal ended the process that the
    kernel ran in.
    refusals: what the backend does not take here. worst: the case nearest to its budget, or
    farthest over it.
    """

    total: int = 0
    cases: int = 0
    failed: int = 0
    stopped: bool = False
    killed: bool = False
    failures: list[Failure] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    worst: tuple[Case, Verdict] | None = None

    @property
    def passed(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.cases > 0 and not self.failures


def verify(
    spec: BackendSpec,
    device: str,
    *,
    dtypes: tuple[str, ...] = (),
    seed: int = 0,
    progress: bool = False,
    on_check: Callable[[str], object] = lambda _: None,
) -> Report:
    """Run the whole suite on one backend: every case, the future against the past, decoding.

    dtypes: names out of spec.dtypes, none for all. on_check: called with the name of each check
    before it runs. A case that the backend refuses is told as such; one that raises anything else
    is a failure. Raises UnavailableBackendError where it cannot run or be built, and ArgumentError
    for a seed that is none.
    """
    check_precision()
    if not 0 <= seed < 2**63:
        raise ArgumentError(f"the seed must be between 0 and 2^63 - 1, not {seed}")
    if reason := spec.unavailable_reason(device):
        raise UnavailableBackendError(spec.name, reason)
    head_dims = spec.head_dims or (32, 64, 128)
    wanted = [getattr(torch, name) for name in dtypes or spec.dtypes]
    suite = [case for dtype in wanted for case in cases(head_dims, dtype, seed=seed)]
    report = Report(total=len(suite))
    # Lengths that are refused. One may be the length's own; after two of them it is the head_dim's.
    refused: dict[tuple[torch.dtype, int], set[int]] = {}
    for case in tqdm(suite, spec.name, unit="case", disable=None if progress else True):
        lengths = refused.setdefault((case.dtype, case.head_dim), set())
        if len(lengths) > 1 or case.seqlen in lengths:
            continue
        if report.failed == MOST_FAILURES:
            report.stopped = True
            break
        on_check(str(case))
        try:
            verdict = run_case(spec, case, device)
        except UnavailableBackendError:
            raise
        except UnsupportedError as error:
            lengths.add(case.seqlen)
            what = f"seqlen {case.seqlen}, head_dim {case.head_dim}, {dtype_name(case.dtype)}"
            report.refusals.append(f"{what}: {_OP.sub('', '; '.join(error.reasons))}")
            continue
        except KERNEL_ERRORS as error:
            why = describe_error(error)
        else:
            why = "" if verdict.passed else str(verdict)
            if report.worst is None or verdict.nearness > report.worst[1].nearness:
                report.worst = case, verdict
        report.cases += 1
        if why:
            report.failed += 1
            report.failures.append(Failure(str(case), why))
        if "cudaErrorLaunchTimeout" in why:  # as would all others, each after as long
            report.stopped = True
            return report
    more = []
    for case in (Case(100, head_dim, dtype=d, seed=seed) for d in wanted for head_dim in head_dims):
        if len(refused[case.dtype, case.head_dim]) < 2:
            for what, check in _more_checks(spec, case, device):
                on_check(what)
                try:
                    wrong = check()
                except UnavailableBackendError:
                    raise
                except KERNEL_ERRORS as error:
                    wrong = describe_error(error)
                if wrong:
                    more.append(Failure(what, wrong))
    report.failures = more + report.failures  # these say most
    return report


def _more_checks(
    spec: BackendSpec, case: Case, device: str
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """The checks that are not a comparison of one output; each says what is wrong."""

    def future() -> str | None:
        found = (future_leaks(spec, case, device, cut) for cut in (41, 1, 64, 99))
        return next(filter(None, found), None)

    def decode() -> str | None:
        verdict = decode_verdict(spec, device, case.head_dim, case.dtype, case.seed)
        return None if verdict.passed else str(verdict)

    yield str(case), future
    if spec.has_decode(device):
        dtype = dtype_name(case.dtype)
        yield f"decode, head_dim {case.head_dim}, {dtype}, seed {case.seed}", decode


def verify_in_child(what: str, device: str, **options: Any) -> Report:
    """verify() of a version, by name or file, in a process of its own, which its kernel may kill.

    That is a failure of the check that ran, and then nothing else is reported. options: verify()'s.
    Raises UnavailableBackendError where it cannot run or be built; other errors of verify()'s as an
    AttentionError.
    """
    spec = ladder.resolve(what)
    spec.prepare(device)
    context = multiprocessing.get_context("spawn")  # a fork has none of torch's threads
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_report, args=(sender, what, device, options))
    child.start()
    sender.close()
    report, running = Report(), ""
    try:
        with receiver, contextlib.suppress(EOFError):
            while True:
                message = receiver.recv()
                if isinstance(message, AttentionError):
                    raise message
                if isinstance(message, Report):
                    report, running = message, "the end of the process"
                else:
                    running = message
        child.join()
    finally:
        child.kill()
    if code := child.exitcode:
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        if not running:
            raise UnavailableBackendError(spec.name, f"the process of its suite ended ({how})")
        report.killed = code < 0
        report.failures.insert(0, Failure(running, f"the kernel killed the process ({how})"))
    return report


def _send_report(sender: Connection, what: str, device: str, options: dict[str, Any]) -> None:
    """The child: sends the name of each check, then the report or the error instead of one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is the parent that says so
    threading.Thread(target=_die_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
    try:
        sender.send(verify(ladder.resolve(what), device, on_check=sender.send, **options))
    except AttentionError as error:
        sender.send(AttentionError(str(error)))  # the others' arguments are not their text


def _die_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


# An op's own name and, in the emulator, the one error of every launch that fails.
_OP = re.compile(
    r"attention_kernels::\w+: (cudaErrorLaunchFailure: unspecified launch failure: (?=.))?"
)


def describe_error(error: Exception) -> str:
    """An exception of a kernel's in one line, from its cause on."""
    line = " ".join(str(error).splitlines()[:1])
    words = _OP.sub("", line, count=1)
    kind = "" if isinstance(error, AttentionError) or words != line else f"{type(error).__name__}: "
    return kind + words


def decode_verdict(
    spec: BackendSpec, device: torch.device | str, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> Verdict:
    """Worst decode over rows of different lengths against attention's own last row."""
    batch, max_seqlen, num_heads = 3, 70, 2
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, 3, num_heads, max_seqlen, head_dim)
    qkv = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
    q, k, v = (qkv[:, i].transpose(1, 2) for i in range(3))
    lengths = [1, 37, max_seqlen]
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    rows = torch.arange(batch, device=device)
    o = spec.decode(q[rows, seqlens.long() - 1][:, None], k, v, seqlens)
    verdicts = []
    for row, length in enumerate(lengths):
        one = [tensor[row : row + 1, :length] for tensor in (q, k, v)]
        # The whole row's budget: the naive error of one position alone may be zero by luck.
        full = judge(one[0], one[0], one[1], one[2], precision=spec.precisions[dtype_name(dtype)])
        last = one[0][:, -1:]
        reference = reference_attention(last, one[1], one[2], is_causal=False)
        verdict = measure(o[row : row + 1], reference, full.budget, full.naive_error)
        if verdict.where:  # in a batch of one
            where = f"sequence {row}, of {length} tokens: {verdict.where}"
            verdict = dataclasses.replace(verdict, where=where)
        verdicts.append(verdict)
    return max(verdicts, key=lambda verdict: verdict.nearness)
