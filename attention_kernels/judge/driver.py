"""How the checks of a backend are run: one request is under way, the next ones are prepared."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias

from attention_kernels.contract import dtype_name
from attention_kernels.errors import AttentionError, UnsupportedError
from attention_kernels.judge.calls import Outputs, Request
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.process import EndedError
from attention_kernels.judge.reference import Verdict
from attention_kernels.judge.worker import Runner

# What a failing kernel raises. CUDA reports a failed launch at a later, unrelated call of torch's,
# as a RuntimeError.
KERNEL_ERRORS = (AttentionError, RuntimeError)
# The most bytes of inputs of requests that are prepared ahead; references take as much again.
MOST_AHEAD = 2**26

What: TypeAlias = Case | DecodeCase | str
"""A case, or the name of another check."""
Found: TypeAlias = Verdict | str | None
"""What a check found: a verdict, or what is wrong, if anything."""
Steps: TypeAlias = Generator[Request, Outputs, Found]
Check: TypeAlias = tuple[What, Callable[[], Steps]]
_Begun: TypeAlias = tuple[What, Steps, Request]
"""A check whose first or next request is ready."""


def run_check(runner: Runner, steps: Steps) -> Found:
    """Take all steps of a check, one after the other."""
    request = next(steps)
    while True:
        try:
            request = steps.send(runner.call(request))
        except StopIteration as found:
            return found.value  # type: ignore[no-any-return]


class Driver:
    """Runs the checks of a backend.

    One request is under way at any time. While the backend is loaded or answers, those of the next
    checks are prepared.
    """

    def __init__(self, runner: Runner, checks: Sequence[Check]) -> None:
        self.runner, self.refused, self.total = runner, _Refused(), len(checks)
        self._left = iter(checks)
        self._ready: deque[_Begun] = deque()

    def prepare(self) -> None:
        """Prepare requests until the backend has answered."""
        while not self.runner.has_answered():
            size = sum(len(request.block) for _, _, request in self._ready)
            if size > MOST_AHEAD or (begun := self._begin()) is None:
                return
            self._ready.append(begun)

    def run(self) -> Iterator[tuple[What, Found | Exception]]:
        """Yield what each check found, or the exception that ended it."""
        under_way: _Begun | None = None
        while (following := self._next()) or under_way:
            outputs: Outputs | Exception | None = None
            if under_way:
                self.prepare()
                try:
                    outputs = self.runner.receive()
                except KERNEL_ERRORS as error:
                    outputs = error
            done, under_way = under_way, following
            if under_way and not isinstance(outputs, EndedError):
                self.runner.send(under_way[2])
            if done and isinstance(outputs, Outputs):
                what, steps, _ = done
                try:
                    self._ready.appendleft((what, steps, steps.send(outputs)))
                except StopIteration as found:
                    yield what, found.value
            elif done:
                assert isinstance(outputs, Exception)
                yield done[0], outputs

    def _begin(self) -> _Begun | None:
        """Begin the next check that is not refused; None if none is left."""
        for what, start in self._left:
            if what not in self.refused:
                steps = start()
                return what, steps, next(steps)
        return None

    def _next(self) -> _Begun | None:
        """Return the next check that is not refused, begun; None if none is left."""
        while self._ready:
            begun = self._ready.popleft()
            if begun[0] not in self.refused:
                return begun
        return self._begin()


class _Refused:
    """The cases that a backend refuses, so that similar ones are skipped.

    After one refusal, cases of the same dtype, head_dim and length are skipped. After refusals of
    two lengths, and nothing else, the cause must be the head_dim or the dtype, so every length is
    skipped.
    """

    def __init__(self) -> None:
        self._lengths: dict[object, set[int]] = defaultdict(set)
        self._taken: set[object] = set()

    def __contains__(self, what: What) -> bool:
        if isinstance(what, str):
            return False
        kind = type(what), what.dtype, what.head_dim
        lengths = self._lengths[kind]
        return what.seqlen in lengths or (len(lengths) > 1 and kind not in self._taken)

    def take(self, what: What) -> None:
        """Note a case that was not refused."""
        if not isinstance(what, str):
            self._taken.add((type(what), what.dtype, what.head_dim))

    def add(self, what: What, error: UnsupportedError) -> list[str]:
        """Note a refusal; return the lines to report: none for a case like one that was refused."""
        reasons = "; ".join(error.reasons)
        if isinstance(what, str):
            return [f"{what}: {reasons}"]
        if what in self:
            return []
        self._lengths[type(what), what.dtype, what.head_dim].add(what.seqlen)
        case = f"seqlen {what.seqlen}, head_dim {what.head_dim}, {dtype_name(what.dtype)}"
        return [f"{case}: {reasons}"]
