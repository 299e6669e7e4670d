"""The conformance suite: what a backend must get right before anyone times it.

It is library code, so that others can test their own backends with it. cases.py defines the inputs,
reference.py the allowed error.

A kernel is given copies of the inputs, and the reference is computed from the originals. A kernel
that changes its inputs fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from attention_kernels import ladder
from attention_kernels.contract import dtype_name
from attention_kernels.errors import (
    ArgumentError,
    AttentionError,
    KernelError,
    OutputError,
    UnavailableBackendError,
    UnsupportedError,
)
from attention_kernels.judge.cases import (
    ANY_HEAD_DIM,
    LARGE,
    LENGTHS,
    SCALES,
    Case,
    DecodeCase,
    cases,
    decode_cases,
    every_length,
    every_width,
    extreme_cases,
    hard_cases,
    random_cases,
    usual_head_dim,
)
from attention_kernels.judge.reference import Verdict, check_precision, extent, truth
from attention_kernels.registry import BackendSpec

__all__ = [
    "KERNEL_ERRORS",
    "LENGTHS",
    "SCALES",
    "Case",
    "DecodeCase",
    "Failure",
    "Report",
    "cases",
    "describe_error",
    "future_leaks",
    "poison_freed_memory",
    "repeat",
    "run_case",
    "verify",
]

# What a failing kernel raises. CUDA reports a failed launch at a later, unrelated call of torch's,
# as a RuntimeError.
KERNEL_ERRORS = (AttentionError, RuntimeError)
# The suite stops after this many failures: more would say nothing new.
MOST_FAILURES = 20
# How many times small cases are repeated. A random fault in one call of a thousand is missed with
# probability 0.999^5000 = 0.7 %. The emulator is slow and deterministic, so it repeats less.
REPEATS, EMULATED_REPEATS = 5000, 50
THREADS = (1, 2, 5)
PROGRESS_S = 10.0  # between two progress lines, if standard error is not a terminal
# How many cases run before the other checks. The cases are sorted by their work.
CHEAP = 200
# A case or the name of another check, and the function that runs it; a string says what is wrong.
_Check = tuple[Case | DecodeCase | str, Callable[[], Verdict | str | None]]
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Inputs:
    """The tensors of one call: the originals, and the copies that the kernel is given."""

    def __init__(self, **tensors: Tensor) -> None:
        self.kept = tensors
        self.given = {name: _copy(x) for name, x in tensors.items()}
        self.settings = _settings()

    def fault(self, o: Tensor) -> str:
        """Return which rule the call broke: its output is an input, or changed(); else ''."""
        for name, x in self.given.items():
            if o.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                return f"its output shares the memory of its input {name}"
        return self.changed()

    def changed(self) -> str:
        """Return which input or torch setting the call changed, as text; '' if none."""
        for name, x in self.given.items():
            differs = _bits(x) != _bits(self.kept[name])
            if differs.any():
                where = f": {extent(differs)}" if differs.dim() == 4 else ""
                return f"it changed its input {name}{where}"
        for name, x in self.given.items():
            if not torch.equal(_bits(_storage(x)), _bits(_storage(self.kept[name]))):
                return f"it wrote outside its input {name}, between rows or around them"
        for name, value in _settings().items():
            if value != self.settings[name]:
                return f"it changed torch's {name} from {self.settings[name]} to {value}"
        return ""


def run_case(spec: BackendSpec, case: Case | DecodeCase, device: torch.device | str) -> Verdict:
    """Run one case and judge its output; a changed input is a failure.

    Raises the errors of BackendSpec.attention() and decode().
    """
    inputs = _inputs(case, device)
    o = _call(spec, case, inputs)
    if fault := inputs.fault(o):
        return Verdict(math.inf, math.inf, math.inf, fault=fault)
    return _judge(spec, case, inputs, o)


def poison_freed_memory(like: Tensor) -> None:
    """Allocate and free several blocks of NaN of an output's size.

    An allocator that reuses one of them for the output, as CUDA's does, exposes elements that the
    kernel does not write. There are several, because copies of the inputs may take some. The CPU
    emulator fills every output with NaN itself.
    """
    block = torch.full_like(like, torch.nan, memory_format=torch.contiguous_format)
    poison = [block.clone() for _ in range(6)]
    del block, poison


def future_leaks(spec: BackendSpec, case: Case, device: torch.device | str, cut: int) -> str | None:
    """Return how keys and values from position `cut` on change earlier rows; None if they do not.

    An output that is not finite or not reproducible differs anyway, and is reported as such.
    """
    past, future = _inputs(case, device), _inputs(case, device)
    before = _call(spec, case, past)
    for name in ("k", "v"):
        later = future.given[name][:, cut:]
        later.copy_(later.sign() * -LARGE[case.dtype])
    changed = before[:, :cut] != _call(spec, case, future)[:, :cut]  # NaN is not equal to itself
    if fault := past.fault(before):
        return fault
    if not changed.any():
        return None
    if not before.isfinite().all():
        return f"the output is not finite: {extent(~before.isfinite())}"
    # Three times, because a race does not show every time.
    for again in (_call(spec, case, past) for _ in range(3)):
        if not torch.equal(before, again):
            return (
                "two runs on the same input differ: a race, or a read of uninitialized memory: "
                f"{extent(before != again)}"
            )
    return f"keys and values from {cut} on change earlier rows: {extent(changed)}"


def repeat(
    spec: BackendSpec, cases: Sequence[Case | DecodeCase], device: torch.device | str, times: int
) -> str | None:
    """Call a backend many times with several inputs in turn; return what goes wrong, if anything.

    This finds rare faults, and state shared between calls: a cached result, one buffer for all
    outputs, scratch memory left filled by a longer call. Two outputs of the same input may differ,
    but each is judged. cases: must be contiguous, because halfway through, new numbers are copied
    into the same buffers.
    """
    sides = [(case, _inputs(case, device)) for case in cases]
    for half in range(2):
        first = []
        for case, inputs in sides:
            if half:
                other = dataclasses.replace(case, seed=case.seed + 1000)
                for name, numbers in _inputs(other, device).kept.items():
                    inputs.kept[name].copy_(numbers)
                    inputs.given[name].copy_(numbers)
            o = _call(spec, case, inputs)
            first.append((o, o.clone()))
        for call in range(len(sides), times // 2):
            at = call * (call // len(sides) + 1) % len(sides)  # in a varying order
            case, inputs = sides[at]
            o = _call(spec, case, inputs)
            if not torch.equal(o, first[at][1]):
                verdict = _judge(spec, case, inputs, o)
                if not verdict.passed:
                    return f"call {half * times // 2 + call + 1} of {times}, {case}: {verdict}"
        for (case, inputs), (o, copy) in zip(sides, first, strict=True):
            if not torch.equal(_bits(o), _bits(copy)):
                return "a later call changed an output that was already returned"
            verdict = _judge(spec, case, inputs, o)
            if fault := inputs.changed() or ("" if verdict.passed else f"{case}: {verdict}"):
                return fault
    return None


@dataclass(frozen=True)
class Failure:
    """A failed check: what was checked and what is wrong, a phrase each."""

    what: str
    why: str

    def __str__(self) -> str:
        """Return both phrases."""
        return f"{self.what}: {self.why}"


@dataclass
class Report:
    """What verify() found."""

    seed: int = 0
    total: int = 0
    """The number of checks in the suite: cases and others."""
    checks: int = 0
    """The number of checks that ran."""
    cases: int = 0
    """The number of cases that ran."""
    stopped: bool = False
    """Whether the suite stopped early: too many checks failed, or a kernel did not end."""
    killed: bool = False
    """Whether a signal killed the process that the kernel ran in."""
    failures: list[Failure] = field(default_factory=list)
    """The failed checks, in the order in which they ran."""
    refusals: list[str] = field(default_factory=list)
    """The cases that the backend refuses, with its reasons."""
    worst: tuple[Case | DecodeCase, Verdict] | None = None
    """The case nearest to its budget, or farthest over it."""

    @property
    def passed(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.cases > 0 and not self.failures

    def note(self, what: Case | DecodeCase | str, found: Verdict | str | None) -> None:
        """Add the outcome of a check: a verdict, or what is wrong, if anything."""
        why = found
        self.checks += 1
        if isinstance(found, Verdict):
            why = "" if found.passed else str(found)
        if why:
            self.failures.append(Failure(str(what), str(why)))
        if isinstance(what, str):
            return
        self.cases += 1
        nearest = self.worst[1].nearness if self.worst else -1.0
        if isinstance(found, Verdict) and found.nearness > nearest:
            self.worst = what, found


def suite(
    spec: BackendSpec, device: str, dtypes: Sequence[torch.dtype], seed: int
) -> list[Case | DecodeCase]:
    """Return every case for a backend, cheap ones first."""
    is_emulated = device in spec.emulated_on
    head_dims = spec.head_dims or ANY_HEAD_DIM
    decoding: list[DecodeCase] = []
    if spec.has_decode(device):
        decoding += decode_cases(head_dims, dtypes, seed, is_emulated=is_emulated)
    if not spec.has_attention():
        return [*decoding]
    found: list[Case] = []
    for dtype in dtypes:
        found += hard_cases(head_dims, dtype, seed, is_emulated=is_emulated)
        found += extreme_cases(usual_head_dim(head_dims), dtype, seed)
    found += every_length(head_dims, dtypes, seed)
    found += every_width(head_dims, dtypes, seed, is_emulated=is_emulated)
    found += random_cases(head_dims, dtypes, seed, is_emulated=is_emulated)
    found.sort(key=lambda case: case.work)
    return [*found[: CHEAP // 2], *decoding, *found[CHEAP // 2 :]]


def verify(
    spec: BackendSpec,
    device: str,
    *,
    dtypes: tuple[str, ...] = (),
    seed: int = 0,
    max_failures: int = MOST_FAILURES,
    progress: bool = False,
    on_check: Callable[[str, int, int], object] = lambda *_: None,
) -> Report:
    """Run the whole suite on one backend: the cases, leaks from the future, repeated calls.

    dtypes: names from spec.dtypes; empty for all. max_failures: the number of failures to stop
    after. on_check: called before each check with its name, its number and the total. A case that
    the backend refuses is reported as a refusal; any other error is a failure. Raises
    UnavailableBackendError if the backend cannot run or be built, and ArgumentError for a bad seed.
    """
    check_precision()
    if not 0 <= seed < 2**62:
        raise ArgumentError(f"the seed must be between 0 and 2^62 - 1, not {seed}")
    if reason := spec.unavailable_reason(device):
        raise UnavailableBackendError(spec.name, reason)
    wanted = [getattr(torch, name) for name in dtypes or spec.dtypes]
    todo = suite(spec, device, wanted, seed)
    checks: list[_Check] = [
        (case, functools.partial(run_case, spec, case, device)) for case in todo
    ]
    checks[CHEAP:CHEAP] = _more_checks(spec, device, wanted[0], seed)
    if device in spec.emulated_on and spec.version is not None:
        checks[:0] = _race_checks(spec, device, wanted, seed)
    if spec.has_attention():
        checks[:0] = _future_checks(spec, device, wanted, seed)  # first: they find the most
    report = Report(seed=seed, total=len(checks))
    refused = _Refused()
    for number, (what, check) in enumerate(_shown(checks, spec.name) if progress else checks, 1):
        if what in refused:
            continue
        if len(report.failures) >= max_failures:
            report.stopped = True
            break
        on_check(str(what), number, len(checks))
        found: Verdict | str | None
        try:
            found = check()
        except UnavailableBackendError:
            raise
        except UnsupportedError as error:
            report.refusals += refused.add(what, error)
            continue
        except KERNEL_ERRORS as error:
            found = describe_error(error)
        report.note(what, found)
        if isinstance(found, str) and "cudaErrorLaunchTimeout" in found:
            report.stopped = True  # every other check would time out, too
            break
    return report


def _shown(checks: Sequence[_Check], name: str) -> Iterator[_Check]:
    """Yield the checks and show progress: a bar on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        yield from tqdm(checks, name, unit="check")
        return
    told = time.monotonic()
    for done, check in enumerate(checks):
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            print(f"{name}: {done} of {len(checks)} checks", file=sys.stderr, flush=True)
        yield check


class _Refused:
    """The cases that a backend refuses, so that similar ones are skipped.

    After one refusal, cases of the same dtype, head_dim and length are skipped. After refusals of
    two lengths the cause must be the head_dim or the dtype, so every length is skipped.
    """

    def __init__(self) -> None:
        self._lengths: dict[object, set[int]] = defaultdict(set)

    def __contains__(self, what: Case | DecodeCase | str) -> bool:
        if isinstance(what, str):
            return False
        lengths = self._lengths[type(what), what.dtype, what.head_dim]
        return len(lengths) > 1 or what.seqlen in lengths

    def add(self, what: Case | DecodeCase | str, error: UnsupportedError) -> list[str]:
        """Note a refusal; return the lines to report: one for a case, none for another check."""
        if isinstance(what, str):
            return []
        self._lengths[type(what), what.dtype, what.head_dim].add(what.seqlen)
        case = f"seqlen {what.seqlen}, head_dim {what.head_dim}, {dtype_name(what.dtype)}"
        return [f"{case}: {'; '.join(error.reasons)}"]


def _future_checks(
    spec: BackendSpec, device: str, dtypes: Sequence[torch.dtype], seed: int
) -> Iterator[_Check]:
    """Yield checks that no row depends on later keys or values."""

    def future(case: Case) -> str | None:
        cuts = (41, 1, 64, case.seqlen - 1)
        return next(filter(None, (future_leaks(spec, case, device, cut) for cut in cuts)), None)

    head_dims = spec.head_dims or (32, 64, 128)
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        case = Case(100, head_dim, dtype=dtype, seed=seed)
        yield str(case), functools.partial(future, case)
    if device not in spec.emulated_on:
        long = Case(1500, head_dims[0], num_heads=1, dtype=dtypes[0], seed=seed)
        yield str(long), lambda: future(long)


def _race_checks(
    spec: BackendSpec, device: str, dtypes: Sequence[torch.dtype], seed: int
) -> Iterator[_Check]:
    """Yield calls of a version that is built for the emulator to report shared-memory races."""
    assert spec.version is not None
    checked = ladder.backend(spec.name, spec.family, ladder.race_checked(spec.version))

    def call(case: Case | DecodeCase) -> None:
        _call(checked, case, _inputs(case, device))

    for dtype, head_dim in itertools.product(dtypes, spec.head_dims):
        found: list[Case | DecodeCase] = [DecodeCase(head_dim, dtype, seed)]
        if spec.has_attention():  # several tiles, and rows whose largest scores differ a lot
            found = [
                Case(130, head_dim, 4.0, num_heads=1, is_causal=causal, dtype=dtype, seed=seed)
                for causal in (True, False)
            ]
        for case in found:
            yield f"races in shared memory, {case}", functools.partial(call, case)


def _more_checks(spec: BackendSpec, device: str, dtype: torch.dtype, seed: int) -> Iterator[_Check]:
    """Yield the other checks: repeated calls, and calls with several numbers of threads."""
    is_emulated = device in spec.emulated_on
    head_dim = spec.head_dims[0] if spec.head_dims else 32
    times = EMULATED_REPEATS if is_emulated else REPEATS
    if spec.has_decode(device):
        decoding = [DecodeCase(head_dim, dtype, seed + n, layout="contiguous") for n in (0, 1)]
        yield f"{times // 10} calls of decode", lambda: repeat(spec, decoding, device, times // 10)
    if not spec.has_attention():
        return
    small = [
        Case(seqlen, head_dim, dtype=dtype, seed=seed + more, layout="contiguous")
        for seqlen, more in itertools.product((33, 80), (0, 1))
    ]
    yield f"{times} calls", lambda: repeat(spec, small, device, times)

    def with_threads(count: int, case: Case) -> Verdict:
        with _threads(count), torch.inference_mode():
            return run_case(spec, case, device)

    if device == "cpu" and not is_emulated:
        wide = Case(300, head_dim, batch=2, num_heads=5, dtype=dtype, seed=seed)
        for count in THREADS:
            what = f"{count} thread{'s' * (count > 1)}, {wide}"
            yield what, functools.partial(with_threads, count, wide)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _inputs(case: Case | DecodeCase, device: torch.device | str) -> Inputs:
    if isinstance(case, Case):
        return Inputs(**dict(zip(("q", "k", "v"), case.inputs(device), strict=True)))
    names = ("q", "k_cache", "v_cache", "seqlens")
    return Inputs(**dict(zip(names, case.inputs(device), strict=True)))


def _call(spec: BackendSpec, case: Case | DecodeCase, inputs: Inputs) -> Tensor:
    poison_freed_memory(inputs.kept["q"])
    if isinstance(case, DecodeCase):
        return spec.decode(**inputs.given, softmax_scale=case.softmax_scale)
    return spec.attention(
        **inputs.given, softmax_scale=case.softmax_scale, is_causal=case.is_causal
    )


def _judge(spec: BackendSpec, case: Case | DecodeCase, inputs: Inputs, o: Tensor) -> Verdict:
    """Judge an output; for decode, judge each row against its own keys and return the worst."""
    precision = spec.precisions[dtype_name(case.dtype)]
    if isinstance(case, Case):
        right = truth(**inputs.kept, softmax_scale=case.softmax_scale, is_causal=case.is_causal)
        return right.judge(o, precision, spec.error_slack)
    q, k_cache, v_cache, _ = inputs.kept.values()
    rows = [slice(row, row + 1) for row in range(len(case.lengths))]
    truths = [
        truth(q[row], k_cache[row, :n], v_cache[row, :n], case.softmax_scale, is_causal=False)
        for row, n in zip(rows, case.lengths, strict=True)
    ]
    # The largest of all rows, as in attention.
    naive_error = max(right.rows.naive_error for right in truths)
    verdicts = []
    for row, (length, right) in enumerate(zip(case.lengths, truths, strict=True)):
        of_rows = dataclasses.replace(right.rows, naive_error=naive_error)
        verdict = dataclasses.replace(right, rows=of_rows).judge(
            o[rows[row]], precision, spec.error_slack
        )
        if verdict.where:  # it names a place in a batch of one
            where = f"sequence {row}, of {length} tokens: {verdict.where}"
            verdict = dataclasses.replace(verdict, where=where)
        verdicts.append(verdict)
    return max(verdicts, key=lambda verdict: verdict.nearness)


def _settings() -> dict[str, object]:
    """Return the torch settings that affect plain PyTorch's error, and so a kernel's budget."""
    return {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
    }


# An op's name and, in the emulator, the error that every failed launch begins with.
_OP = re.compile(
    r"attention_kernels::\w+: (cudaErrorLaunchFailure: unspecified launch failure: (?=.))?"
)


def describe_error(error: BaseException) -> str:
    """Return a kernel's exception in one line, without the backend's name."""
    cause = error.__cause__
    if isinstance(error, KernelError) and cause and _OP.search(str(cause)):
        error = cause  # the emulator's or CUDA's own message, which names the place
    line = " ".join(str(error).splitlines()[:1])
    words = _OP.sub("", line, count=1)
    if isinstance(error, KernelError | OutputError):
        words = re.sub(r"^attention backend \w+ ", "it ", words)
    kind = "" if isinstance(error, AttentionError) or words != line else f"{type(error).__name__}: "
    return kind + words


def _storage(x: Tensor) -> Tensor:
    """Return the whole storage of a tensor as a one-dimensional tensor."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((count,), (1,), 0)


def _copy(x: Tensor) -> Tensor:
    """Copy a tensor with its strides and the memory between its rows."""
    return _storage(x).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def _bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.element_size()])
