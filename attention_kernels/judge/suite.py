"""The suite: the checks that a backend must pass before anyone times it.

It is library code, so that others can test their own backends with it. cases.py defines the inputs,
truth.py the allowed error, and worker.py where the backend runs.

A check is a generator: it yields requests, receives their outputs, and returns what is wrong. While
the backend is loaded or answers one request, the judge draws the inputs of the next ones and
computes their references.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
import random
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from attention_kernels import registry
from attention_kernels.contract import dtype_name
from attention_kernels.errors import ArgumentError, AttentionError, UnsupportedError
from attention_kernels.judge.caller import threads
from attention_kernels.judge.calls import ALIGNMENT, Outputs, Request, bits, describe_error
from attention_kernels.judge.cases import LARGEST_WORK, fitted, ordered_cases, with_few_shapes
from attention_kernels.judge.inputs import LARGE, Case, Context, DecodeCase, Op, own_seed
from attention_kernels.judge.process import EndedError, Judges
from attention_kernels.judge.truth import Truth, Verdict, check_precision, extent, truth
from attention_kernels.judge.worker import TIMEOUT_S, Runner, Worker, open_runner
from attention_kernels.registry import BackendSpec

# What a failing kernel raises. CUDA reports a failed launch at a later, unrelated call of torch's,
# as a RuntimeError.
KERNEL_ERRORS = (AttentionError, RuntimeError)
# The suite stops after this many failures: more would say nothing new. It also stops after this
# many refusals if the backend has taken nothing.
MOST_FAILURES, MOST_REFUSALS = 20, 200
# How many times small cases are repeated. A random fault in one call of a thousand is missed with
# probability 0.999^5000 = 0.7 %. The emulator is slow and deterministic, so it repeats less.
REPEATS, EMULATED_REPEATS = 5000, 50
THREADS = (1, 2, 5)
ROWS = 64  # that are judged of an output at a time, where not all are
# How many outputs, for each core, wait to be judged before the next call is made: one may take as
# long as twenty others.
AHEAD = 4
# The most bytes of inputs of requests that are prepared ahead; references take as much again.
MOST_AHEAD = 2**26
RACES = "races"
# How many cases run before repeated calls, and over how many places their order is drawn.
CHEAP, WINDOW = 200, 20
# How many pairs are called, of short cases and of long ones of each op, and the most work of a
# case of them: on a device and emulated. Where the inputs of a case may begin, in ALIGNMENT.
PAIRS, LONG, PLACES = ((2, 5e7), (1, 5e6)), 256, 2**14
# A quick run tries this share of the suite's combinations, on a device and emulated, and shows at
# least QUICK_SHARE of the planted faults; see tests/attention_kernels/judge/faults.py.
QUICK, QUICK_EMULATED, QUICK_SHARE = 0.88, 0.92, 0.95

What: TypeAlias = Case | DecodeCase | str
"""A case, or the name of another check."""
Found: TypeAlias = Verdict | str | None
"""The outcome of a check: a verdict, the fault in words, or None."""
Steps: TypeAlias = Generator[Request, Outputs, Found]
Check: TypeAlias = tuple[What, Callable[[], Steps]]


def run_case(spec: BackendSpec, case: Case | DecodeCase, device: torch.device | str) -> Verdict:
    """Run one case in this process and judge its output; a changed input is a failure.

    Raises the errors of Runner.call().
    """
    runner = Runner(spec, str(device))
    return run_check(runner, judged(runner, case))  # type: ignore[return-value]


def run_check(runner: Runner, steps: Steps) -> Found:
    """Take all steps of a check, one after the other."""
    after: Request | Found = next(steps)
    while isinstance(after, Request):
        after = _next(steps, runner.call(after))
    return after


class Driver:
    """Runs the checks of a backend, one call at a time.

    Meanwhile other cores draw inputs, compute references and judge outputs, a check each.
    """

    def __init__(self, runner: Runner, checks: Sequence[Check], cores: int) -> None:
        self.runner, self.total, self._cores = runner, len(checks), cores
        self._pool, self._lock = ThreadPoolExecutor(cores), threading.RLock()
        self._left, self._begun, self._waiting_bytes = iter(checks), 0, 0
        self._ready: deque[tuple[What, Steps, Future[Request]]] = deque()
        self._prepare()

    def run(self) -> Iterator[tuple[What, Found | Exception]]:
        """Yield the outcome of each check, or the exception that ended it."""
        judging: deque[tuple[What, Steps, Future[Any]]] = deque()
        most = ahead = AHEAD * self._cores
        while self._ready or judging:
            if len(judging) > most or not self._ready:
                what, steps, after = judging.popleft()
                if isinstance(after.result(), Request):
                    self._ready.appendleft((what, steps, after))
                    with self._lock:
                        self._waiting_bytes += after.result().block.nbytes
                else:
                    yield what, after.result()
                continue
            what, steps, first = self._ready.popleft()
            request = first.result()
            with self._lock:
                self._waiting_bytes -= request.block.nbytes
                self._prepare()
            try:
                outputs = self.runner.call(request)
            except KERNEL_ERRORS as error:
                after, most = Future(), 0  # it may end the suite: no call before it is reported
                after.set_result(error)
            else:
                after, most = self._pool.submit(_next, steps, outputs), ahead
            judging.append((what, steps, after))

    def close(self) -> None:
        """Stop preparing."""
        with self._lock:
            self._left = iter(())
        self._pool.shutdown(cancel_futures=True)

    def _prepare(self) -> None:
        """Begin as many checks as there are cores, unless the inputs that wait are too large."""
        while self._begun < self._cores and self._waiting_bytes < MOST_AHEAD:
            check = next(self._left, None)
            if check is None:
                return
            what, start = check
            steps = start()
            self._begun += 1
            self._ready.append((what, steps, self._pool.submit(self._first, steps)))

    def _first(self, steps: Steps) -> Request:
        """Return the first request of a check, and let the next check begin."""
        request = next(steps)
        with self._lock:
            self._begun -= 1
            self._waiting_bytes += request.block.nbytes
            self._prepare()
        return request


def _next(steps: Steps, outputs: Outputs) -> Request | Found:
    """Return the next request of a check, or what it has found."""
    try:
        return steps.send(outputs)
    except StopIteration as found:
        return found.value  # type: ignore[no-any-return]


def judged(
    runner: Runner, case: Case | DecodeCase, judges: Judges | None = None, **options: Any
) -> Steps:
    """Run one case and judge its output, if that is large some rows of all heads.

    A changed input is a failure. judges: of outputs that are judged as a whole; by default, this
    process is. options: of Calls.
    """
    request = Request.of(case, [case.inputs("cpu")], place=_place(case), **options)
    found = yield request
    if found.fault:
        return Verdict(math.inf, math.inf, math.inf, fault=found.fault)
    if case.work <= LARGEST_WORK[runner.is_emulated]:
        if judges is None:
            return _judge(runner, _truth(case, request.sets[0]), found.o[0])
        spec, o = runner.spec, bits(found.o[0]).numpy()
        precision = spec.precisions[dtype_name(case.dtype)]
        return judges.run(_verdict, case, o, precision, spec.error_slack)  # type: ignore[no-any-return]
    draw, heads = random.Random(own_seed(case)).randrange, case.num_heads * case.group
    return judge_rows(runner, case, request.sets, found.o, draw, each=heads, device="cpu")


def judge_rows(
    runner: Runner,
    case: Case | DecodeCase,
    sets: Sequence[Sequence[Tensor]],
    outputs: Sequence[Tensor],
    below: Callable[[int], int],
    *,
    each: int,
    device: str,
) -> Verdict:
    """Judge ROWS rows of `each` heads of every output, or of as many as it has up to ROWS.

    The rows, for all the same ones, are drawn, the first and the last most often, and so are the
    batch entries. below: draws a number below another. device: where the reference is computed.
    """
    is_causal, rows, heads = False, slice(None), case.num_heads * case.group
    if isinstance(case, Case):
        count = min(ROWS, case.seqlen)
        first = min(max(0, below(case.seqlen + count) - count), case.seqlen - count)
        is_causal, rows = case.is_causal, slice(first, first + count)
    keys = slice(rows.stop if is_causal else None)
    drawn = [
        (place, below(case.batch), (start + n) % heads)
        for place, start in enumerate(below(heads) for _ in sets)
        for n in range(min(each, ROWS))
    ]

    def of_all(tensors: Sequence[Tensor], part: slice, group: int = 1) -> Tensor:
        found = [tensors[place][entry, part, [head // group]] for place, entry, head in drawn]
        return torch.stack(found).to(device)

    q, k, v, *seqlens = zip(*sets, strict=True)
    lengths = [
        torch.stack([x[place][entry] for place, entry, _ in drawn]).to(device) for x in seqlens
    ]
    right = truth(
        of_all(q, rows),
        of_all(k, keys, case.group),
        of_all(v, keys, case.group),
        case.softmax_scale,
        is_causal,
        *lengths,
    )
    return _judge(runner, right, of_all(outputs, rows))


def leaks(runner: Runner, case: Case, cuts: Sequence[int]) -> Steps:
    """Return how keys and values from a position on change earlier rows; None if they do not.

    Rows that change may be as right as before: a kernel may add in another order each time.
    """
    for cut in cuts:
        sets = [case.inputs("cpu") for _ in range(2)]
        for later in (x[:, cut:] for x in sets[1][1:]):
            later.copy_(torch.tensor(LARGE[case.dtype]).copysign(-later))
        found = yield Request.of(case, sets, order=[0, 1])
        before, after = (o[:, :cut] for o in found.o)
        changed = before != after  # NaN is not equal to itself
        if found.fault:
            return found.fault
        if not changed.any():
            continue
        if not before.isfinite().all():
            return f"the output is not finite: {extent(~before.isfinite())}"
        right = _truth(case, [x[:, :cut] for x in sets[0]])
        if not _judge(runner, right, after).passed:
            return f"keys and values from {cut} on change earlier rows: {extent(changed)}"
    return None


def changed(runner: Runner, case: Case | DecodeCase) -> Steps:
    """Call a backend, and again when rows of k and v have changed: what it kept is then wrong.

    At the same addresses, and with the same q, all change, then one row that is drawn, and the
    last. From each call to the next, the sequences of a cache grow by one, as they do when a model
    decodes.
    """
    drawn, last = 1 + own_seed(case) % (case.seqlen - 6), case.seqlen - 1
    inputs, others = (dataclasses.replace(case, seed=case.seed + n).inputs("cpu") for n in (0, 1))
    for step, rows in enumerate(([], [*range(case.seqlen)], [drawn], [last])):
        for x, other in zip(inputs[1:3], others[1:3], strict=True):
            x[:, rows] = other[:, rows] - x[:, rows]
        for lengths in inputs[3:]:
            lengths.fill_(case.seqlen - 3 + step)
        request = Request.of(case, [inputs], place=_place(case))
        right = _truth(case, inputs)
        found = yield request
        verdict = _judge(runner, right, found.o[0])
        if found.fault or not verdict.passed:
            return found.fault or verdict
    return None


def repeat(runner: Runner, cases: Sequence[Case | DecodeCase], times: int) -> Steps:
    """Call a backend many times with several inputs in turn; return the first fault, if any.

    This finds rare faults, and state shared between calls: a cached result, one buffer for all
    outputs, scratch memory left filled by a longer call. Two outputs of the same input may differ,
    but each is judged. Halfway through, the same memory holds new numbers.
    """
    count = len(cases)
    # Each once, then in a varying order.
    order = [call * (call // count + 1) % count for call in range(times // 2)]
    order[:count] = random.Random(own_seed(cases[0])).sample(range(count), count)
    for half in range(2):
        inputs = [dataclasses.replace(case, seed=case.seed + 1000 * half) for case in cases]
        sets = [case.inputs("cpu") for case in inputs]
        request = Request.of(inputs[0], sets, order=order, again=count, place=_place(cases[0]))
        found = yield request
        first: dict[int, Tensor] = {}
        for call, (place, o) in enumerate(zip(order, found.o, strict=True)):
            if first.setdefault(place, o) is o or not torch.equal(o, first[place]):
                right = _truth(inputs[place], request.sets[place])
                verdict = _judge(runner, right, o)
                if not verdict.passed:
                    number = half * times // 2 + call + 1
                    return f"call {number} of {times}, {inputs[place]}: {verdict}"
        for o, again in zip(found.o, found.again, strict=False):
            if not torch.equal(o.view(torch.uint8), again.view(torch.uint8)):
                return "a later call changed an output that was already returned"
        if found.fault:
            return found.fault
    return None


@dataclass(frozen=True)
class Failure:
    """A failed check: what was checked and what is wrong, a phrase each."""

    what: str
    why: str
    stage: Literal["suite", "sanitizers", "nvcc", "timing"] = "suite"
    """The stage of the verdict; verify() runs the suite only."""


@dataclass
class Report:
    """The outcome of verify()."""

    spec: BackendSpec
    device: str
    seed: int = 0
    has_attention: bool = False
    total: int = 0
    """The number of checks in the suite: cases and others."""
    checks: int = 0
    """The number of checks that ran."""
    cases: int = 0
    """The number of cases that ran."""
    calls: int = 0
    """The number of calls of the kernel, all in one process."""
    stopped: bool = False
    """Whether the suite stopped early: too many checks failed, or a kernel did not end."""
    killed: bool = False
    """Whether a signal killed the process that the kernel ran in."""
    failures: list[Failure] = field(default_factory=list)
    """The failed checks, in the order in which they ran."""
    not_isolated: list[str] = field(default_factory=list)
    """What kept the kernel from being isolated, in sentences."""
    refusals: list[str] = field(default_factory=list)
    """The cases that the backend refuses, with its reasons."""
    tried: list[tuple[Case | DecodeCase, bool]] = field(default_factory=list)
    """The cases that ran, and whether each passed."""
    worst: tuple[Case | DecodeCase, Verdict] | None = None
    """The case nearest to its budget, or farthest over it."""

    @property
    def passed(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.cases > 0 and not self.failures

    def note(self, what: What, found: Found | Exception) -> None:
        """Add the outcome of a check."""
        if isinstance(found, UnsupportedError):
            self._note_refusal(what, "; ".join(found.reasons))
            return
        self.checks += 1
        why = "" if found is None else str(found)
        if isinstance(found, Verdict) and found.passed:
            why = ""
        elif isinstance(found, Exception):
            why = describe_error(found)
        if why:
            self.failures.append(Failure(str(what), why))
        if isinstance(found, EndedError):
            self.stopped, self.killed = True, found.killed
        elif "cudaErrorLaunchTimeout" in why:
            self.stopped = True  # every other check would time out, too
        if isinstance(what, str):
            return
        self.cases += 1
        self.tried.append((what, not why))
        nearest = self.worst[1].nearness if self.worst else -1.0
        if isinstance(found, Verdict) and found.nearness > nearest:
            self.worst = what, found

    def _note_refusal(self, what: What, reasons: str) -> None:
        """Add a refusal, unless another case was refused for the same reasons."""
        if isinstance(what, str):
            self.refusals.append(f"{what}: {reasons}")
        elif not any(text.endswith(f": {reasons}") for text in self.refusals):
            case = f"seqlen {what.seqlen}, head_dim {what.head_dim}, {dtype_name(what.dtype)}"
            self.refusals.append(f"{case}: {reasons}")


# Many backends have the same; a server of verdicts draws new ones without end.
_ordered_cases = functools.lru_cache(maxsize=32)(ordered_cases)


def cases_for(
    runner: Runner, dtypes: Sequence[torch.dtype], seed: int, *, quick: bool = False
) -> list[Case | DecodeCase]:
    """Return every case for a backend, those that find the most in their time first.

    quick: until most of what they try has been tried.
    """
    spec = runner.spec
    share = 1.0 if not quick else QUICK_EMULATED if runner.is_emulated else QUICK
    has_few_shapes = runner.device in spec.compiles_per_shape_on
    contexts: tuple[Context, ...] = ("plain", "no_grad", "inference_mode") * 4
    if runner.device == "cuda":
        contexts += ("stream", "stream")
        if spec.cuda_graphs:  # a capture takes longer than most calls
            contexts += ("graph",)
    options: dict[str, Any] = {
        "share": 1.0 if has_few_shapes else share,
        "is_emulated": runner.is_emulated,
        "has_groups": spec.supports_gqa,
        "contexts": contexts,
        # The op of a version file refuses other addresses, also under an alias.
        "is_aligned": spec.version is not None or spec.chooses is not None,
    }
    has: dict[Op, bool] = {"attention": runner.has_attention, "decode": runner.has_decode}
    arguments = spec.head_dims, tuple(dtypes), seed
    found = [_ordered_cases(op, *arguments, **options) for op, has_it in has.items() if has_it]

    def is_fair(case: Case | DecodeCase) -> bool:
        """Return whether rounding does not decide which key wins: in TF32, scores of 1e8 do."""
        return case.scale < 1e3 or spec.precisions[dtype_name(case.dtype)] != "tf32"

    if has_few_shapes:
        found = [with_few_shapes(of_op, spec) for of_op in found]
    both, draw = [*heapq.merge(*found, key=lambda pair: pair[1])], random.Random(f"order {seed}")
    places = sorted(range(len(both)), key=lambda n: n + draw.uniform(0, WINDOW))
    drawn = [both[n] for n in places]
    chosen = [case for case, tried in drawn if is_fair(case) and tried < share]
    fit = (fitted(case, spec) if isinstance(case, Case) else case for case in chosen)
    return sorted(dict.fromkeys(fit), key=_is_inference)


def _is_inference(case: Case | DecodeCase) -> bool:
    """Return whether a case runs last: a buffer that a kernel keeps since then is for no other."""
    return case.context == "inference_mode"


def checks_of(
    runner: Runner,
    dtypes: Sequence[torch.dtype],
    seed: int,
    quick: bool = False,
    judges: Judges | None = None,
) -> list[Check]:
    """Return the checks of a backend, those that find the most first."""
    cases = cases_for(runner, dtypes, seed, quick=quick)
    one = functools.partial(judged, runner, judges=judges)
    found: list[Check] = [(case, functools.partial(one, case)) for case in cases]
    cheap = min(CHEAP, len(cases) - sum(map(_is_inference, cases)))
    found[cheap:cheap] = [
        *_more_checks(runner, dtypes[0], seed),
        *_pair_checks(runner, cases, seed),
    ]
    if runner.has_attention:
        found[:0] = _future_checks(runner, dtypes, seed)
    if runner.is_emulated and runner.spec.version is not None:
        found[:0] = race_checks(runner, dtypes, seed)  # first: a race explains other failures
    return found


def verify(
    what: str | BackendSpec,
    device: str = "",
    *,
    dtypes: tuple[str, ...] = (),
    seed: int | None = None,
    quick: bool = False,
    max_failures: int = MOST_FAILURES,
    timeout_s: float = TIMEOUT_S,
    on_check: Callable[[int, int], object] = lambda done, total: None,
) -> Report:
    """Run the whole suite on one backend: the cases, leaks from the future, repeated calls.

    what: the name of a backend, a version file, or a spec. It is loaded and called in a process of
    its own, unless only this process knows it. device: "cuda", "cpu", or "" for cuda if the
    backend runs there, else cpu. dtypes: names from spec.dtypes; empty for all. seed: of all
    inputs; None draws one. quick: leave out the cases that find the least in their time.
    max_failures: the number of failures to stop after. timeout_s: the limit of each request.
    on_check: called after each check with the number that are done and of all; what it raises ends
    the suite.

    A case that the backend refuses is reported as a refusal; any other error is a failure. A kernel
    that ends its process or does not end in time has failed, and the suite stops there. Raises
    UnavailableBackendError if the backend cannot run or be built, UnknownBackendError,
    ArgumentError for a bad seed or time limit, and UnsupportedError for a dtype that it does not
    take.
    """
    check_precision()
    # No kernel can try all of these; JSON can represent them.
    seed = secrets.randbelow(2**53) if seed is None else seed
    if not 0 <= seed < 2**62:
        raise ArgumentError(f"the seed must be between 0 and 2^62 - 1, not {seed}")
    # Half of the cores are the judge's, with a thread each; the rest are the kernel's.
    cores = max(1, torch.get_num_threads() // 2)
    with threads(1), contextlib.ExitStack() as stack:
        try:
            runner = open_runner(what, device, timeout_s=timeout_s, races=True, load=False)
            stack.enter_context(contextlib.closing(runner))
            judges = None
            if isinstance(runner, Worker) and cores > 1:
                judges = stack.enter_context(contextlib.closing(Judges(cores)))
            checks = checks_of(runner, _dtypes(runner.spec, dtypes), seed, quick, judges)
            driver = Driver(runner, checks, cores)
            stack.enter_context(contextlib.closing(driver))
            runner.load()
        except EndedError as error:
            report = Report(registry.stand_in(str(what)), device, seed)
            report.note("loading it", error)
            return report
        report = Report(runner.spec, runner.device, seed, runner.has_attention, driver.total)
        report.not_isolated = runner.not_isolated
        # disable=None shows the bar on a terminal only.
        bar = tqdm(driver.run(), runner.spec.name, driver.total, unit="check", disable=None)
        for done, (check, found) in enumerate(bar, 1):
            on_check(done, report.total)
            report.calls = runner.calls
            report.note(check, found)
            takes_nothing = not report.cases and done >= MOST_REFUSALS
            if report.stopped or takes_nothing or len(report.failures) >= max_failures:
                report.stopped = report.checks < report.total
                break
        return report


def _dtypes(spec: BackendSpec, names: Sequence[str]) -> list[torch.dtype]:
    """Return the dtypes of these names, or all; raises UnsupportedError."""
    if unknown := [name for name in names if name not in spec.dtypes]:
        reason = f"dtype {', '.join(unknown)} (it takes {', '.join(spec.dtypes)})"
        raise UnsupportedError(spec.name, [reason])
    return [getattr(torch, name) for name in names or spec.dtypes]


def _future_checks(runner: Runner, dtypes: Sequence[torch.dtype], seed: int) -> Iterator[Check]:
    """Yield checks that no row depends on later keys or values."""
    head_dims = runner.spec.head_dims or (32, 64, 128)
    draw = random.Random(f"leaks {seed}")
    found = [
        Case(draw.randint(66, 135), head_dim, dtype=dtype, seed=seed)
        for dtype, head_dim in itertools.product(dtypes, head_dims)
    ]
    if runner.device in runner.spec.compiles_per_shape_on:
        found = found[:: len(head_dims) + 1]  # each dtype and head_dim once
    if not runner.is_emulated:
        seqlen = draw.randint(1025, 1500)
        found += [Case(seqlen, head_dims[0], num_heads=1, dtype=dtypes[0], seed=seed)]
    for case in (fitted(case, runner.spec) for case in found):
        if not case.is_causal:
            continue
        yield str(case), functools.partial(leaks, runner, case, (41, 1, 64, case.seqlen - 1))


def race_checks(runner: Runner, dtypes: Sequence[torch.dtype], seed: int) -> Iterator[Check]:
    """Yield calls of a version that is built for the emulator to report races."""

    def races(case: Case | DecodeCase) -> Steps:
        yield Request.of(case, [case.inputs("cpu")], races=True)
        return None

    draw = random.Random(f"races {seed}")
    for dtype, head_dim in itertools.product(dtypes, runner.spec.head_dims):
        same: dict[str, Any] = {"num_heads": 1, "dtype": dtype, "seed": seed}
        found: list[Case | DecodeCase] = [_small_decode_case(draw, head_dim, dtype, seed)]
        if runner.has_attention:  # several tiles, and rows whose largest scores differ a lot
            version = runner.spec.version
            # A kernel with wgmma has up to five tiles of 64 keys at once; the sixth reuses a slot.
            least = 321 if version is not None and version.needs_exactly else 129
            found = [
                fitted(Case(draw.randint(least, least + 15), head_dim, 4.0, **fields), runner.spec)
                for fields in ({**same, "is_causal": causal} for causal in (True, False))
            ]
        for case in dict.fromkeys(found):
            yield f"{RACES}, {case}", functools.partial(races, case)


def _more_checks(runner: Runner, dtype: torch.dtype, seed: int) -> Iterator[Check]:
    """Yield the other checks: repeated calls, and calls with several numbers of threads."""
    head_dim = runner.spec.head_dims[0] if runner.spec.head_dims else 32
    times = EMULATED_REPEATS if runner.is_emulated else REPEATS
    draw = random.Random(f"repeated calls {seed}")
    if runner.has_decode:
        row = _small_decode_case(draw, head_dim, dtype, seed)
        decoding = [dataclasses.replace(row, seed=seed + n, layout="contiguous") for n in (0, 1)]
        steps = functools.partial(repeat, runner, decoding, times // 10)
        yield f"{times // 10} calls of decode", steps
        growing = DecodeCase(head_dim, dtype, seed, (24, 24), 24, layout="contiguous")
        yield f"rows changed, {growing}", functools.partial(changed, runner, growing)
    if not runner.has_attention:
        return
    lengths = draw.randint(17, 48), draw.randint(49, 160)
    small = [
        fitted(
            Case(seqlen, head_dim, dtype=dtype, seed=seed + more, layout="contiguous"), runner.spec
        )
        for seqlen, more in itertools.product(lengths, (0, 1))
    ]
    yield f"{times} calls", functools.partial(repeat, runner, small, times)
    yield f"rows changed, {small[0]}", functools.partial(changed, runner, small[0])
    if runner.device == "cpu" and not runner.is_emulated:
        for count in THREADS:
            seqlen = draw.randint(257, 340)
            wide = Case(seqlen, head_dim, batch=2, num_heads=5, dtype=dtype, seed=seed)
            what = f"{count} thread{'s' * (count > 1)}, {wide}"
            yield what, functools.partial(judged, runner, wide, threads=count)


def _pair_checks(runner: Runner, cases: Sequence[Case | DecodeCase], seed: int) -> Iterator[Check]:
    """Yield pairs of calls, as in some of the cases.

    The second has other numbers at other addresses; then both have new numbers where they are.
    """
    draw, (count, most) = random.Random(f"pairs {seed}"), PAIRS[runner.is_emulated]
    for op, is_long in itertools.product(("attention", "decode"), (False, True)):
        alike = [
            case
            for case in cases
            if (case.op, case.seqlen > LONG, case.kind) == (op, is_long, "normal")
            if case.work <= most and not _is_inference(case)
        ]
        for case in draw.sample(alike, min(count, len(alike))):
            pair = [case, dataclasses.replace(case, seed=seed + 1)]
            yield f"pairs of calls, {case}", functools.partial(repeat, runner, pair, 4)


def _small_decode_case(
    draw: random.Random, head_dim: int, dtype: torch.dtype, seed: int
) -> DecodeCase:
    longest = draw.randint(65, 96)
    return DecodeCase(head_dim, dtype, seed, (1, draw.randint(17, 48), longest), longest)


def _place(case: Case | DecodeCase) -> int:
    """Return where the inputs of a case begin in the shared memory, which no other case tells."""
    return own_seed(case) % PLACES * ALIGNMENT


def _truth(case: Case | DecodeCase, inputs: Sequence[Tensor]) -> Truth:
    q, k, v, *seqlens = inputs
    is_causal = isinstance(case, Case) and case.is_causal
    return truth(q, k, v, case.softmax_scale, is_causal, *seqlens)


def _verdict(case: Case | DecodeCase, o: NDArray[Any], precision: str, slack: float) -> Verdict:
    """Judge a whole output, given its bits, in a process that has only the case."""
    out = torch.from_numpy(o).view(case.dtype)
    return _truth(case, case.inputs("cpu")).judge(out, precision, slack)


def _judge(runner: Runner, right: Truth, o: Tensor) -> Verdict:
    spec = runner.spec
    o = o.to(right.reference.device)
    return right.judge(o, spec.precisions[dtype_name(right.dtype)], spec.error_slack)
