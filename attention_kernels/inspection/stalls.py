"""Why each warp of a simulated multiprocessor does not issue: by instruction, reason and cause.

Reasons are Nsight Compute's (`smsp__pcsamp_warps_issue_stalled_*`). As in its samples, a stall
belongs to the instruction that the warp issues next. After a barrier, or an instruction that waits
for asynchronous copies, that is the one behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

SELECTED = "selected"
NOT_SELECTED = "not selected"
LONG, SHORT = "long scoreboard", "short scoreboard"
MIO, LG = "MIO throttle", "LG throttle"
MATH, DISPATCH = "math pipe throttle", "dispatch stall"
WAIT, BRANCH, BARRIER = "wait", "branch resolving", "barrier"
GMMA = "gmma"
FETCH = "no instruction"
EXITED = "exited"
"""The warp has ended, but not yet the others: a profiler takes no sample of it."""


class Stall(NamedTuple):
    """What a warp waits for, and where."""

    place: int
    """Index of the instruction that is issued next."""
    reason: str
    cause: int
    """Index of the instruction whose result is awaited, or of the barrier, otherwise `place`."""


class Watch:
    """The warp-cycles of a simulation by stall: every cycle of every warp is in one of them."""

    def __init__(self) -> None:
        self.cycles: defaultdict[Stall, float] = defaultdict(float)
        self._until: defaultdict[int, float] = defaultdict(float)
        self._spans: defaultdict[int, list[tuple[float, tuple[int, str, int]]]] = defaultdict(list)
        self._producers: dict[tuple[int, int], tuple[float, int, bool]] = {}
        self._copies: dict[int, int] = {}

    def add(
        self, warp: int, until: float, index: int, reason: str, cause: int | None = None
    ) -> None:
        """Record what a warp does from the end of its last record until a time."""
        if until > self._until[warp]:
            self._until[warp] = until
            stall = index, reason, index if cause is None else cause
            spans = self._spans[warp]
            if spans and spans[-1][1] == stall:
                spans.pop()
            spans.append((until, stall))

    def issue(self, warp: int, now: float, index: int) -> None:
        """Record that a warp issues an instruction."""
        self.add(warp, now, index, NOT_SELECTED)
        self.add(warp, now + 1, index, SELECTED)

    def sets(self, warp: int, board: int, when: float, index: int, *, is_global: bool) -> None:
        """Record the time at which an instruction releases a scoreboard; the latest counts."""
        self._producers[warp, board] = max(
            (when, index, is_global), self._producers.get((warp, board), (0.0, 0, False))
        )

    def waits(self, warp: int, boards: Iterable[int], index: int) -> None:
        """Record that an instruction waits for scoreboards; the last one counts."""
        found = [self._producers[warp, x] for x in boards if (warp, x) in self._producers]
        if found:
            when, cause, is_global = max(found)
            self.add(warp, when, index, LONG if is_global else SHORT, cause)

    def copies(self, warp: int, index: int) -> None:
        """Record an asynchronous copy."""
        self._copies[warp] = index

    def arrive(self, warp: int, when: float, index: int) -> None:
        """Record that asynchronous copies are awaited before an instruction."""
        self.add(warp, when, index, LONG, self._copies[warp])

    def close(self, warp: int, end: float, index: int, reason: str) -> None:
        """Record what a warp does until the end, and sum its cycles up to then."""
        self.add(warp, end, index, reason)
        since = 0.0
        for until, stall in self._spans.pop(warp):
            self.cycles[Stall(*stall)] += max(0.0, min(until, end) - since)
            since = until


def after(base: str) -> str:
    """Return what a warp waits for during the fixed latency of an instruction."""
    return BRANCH if base in ("BRA", "BRX", "CALL", "RET", "JMP") else WAIT


def awaiting(base: str) -> str:
    """Return the reason for which a warp waits that others have to wake."""
    return {"SYNCS": LONG, "WARPGROUP": GMMA, "BAR": BARRIER}.get(base, WAIT)
