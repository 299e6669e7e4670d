"""Why warps of a simulated multiprocessor do not issue: by instruction, reason and cause.

Reasons are Nsight Compute's (`smsp__pcsamp_warps_issue_stalled_*`). As in its samples, a stall
belongs to the instruction that the warp issues next. After a barrier, or an instruction that waits
for asynchronous copies, that is the one behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

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
        self.copies: dict[int, int] = {}
        """The last asynchronous copy of each warp."""
        self._until: defaultdict[int, float] = defaultdict(float)
        self._producers: dict[tuple[int, int], tuple[float, int, bool]] = {}

    def add(
        self, warp: int, until: float, index: int, reason: str, cause: int | None = None
    ) -> None:
        """Record what a warp does from the end of its last record until a time."""
        if until > self._until[warp]:
            stall = Stall(index, reason, index if cause is None else cause)
            self.cycles[stall] += until - self._until[warp]
            self._until[warp] = until

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


class StalledInstruction(msgspec.Struct, frozen=True, array_like=True):
    """The stalls of one machine instruction."""

    kernel: int
    """Its kernel's index in Stalls.kernels."""
    address: int
    """Its offset in the kernel in bytes."""
    text: str
    share: float
    """Share of the call's stall cycles."""
    reason: str
    """The main reason."""


class StalledLine(msgspec.Struct, frozen=True):
    """The stalls of one source line; line 0 has the instructions without a line."""

    line: int
    share: float
    """Share of the call's stall cycles."""
    reasons: dict[str, float]
    """Shares of the line's stalls, the largest first."""
    through: list[int]
    """The inlined lines that stall most, if the line calls a function."""
    waits_for: dict[int, float]
    """Shares of the line's stalls, by the line whose result is awaited."""
    instructions: list[StalledInstruction]
    """The instructions that stall most, in order."""
    others: int
    """Number of the line's other instructions that stall."""
    source: str = ""


class Stalls(msgspec.Struct, frozen=True):
    """Why a call's warps do not issue, by source line."""

    gpu: str
    time_us: float
    issuing: float
    """Share of the warps' cycles in which they issue; they stall in the others."""
    reasons: dict[str, float]
    """Shares of the stall cycles by reason, the largest first."""
    kernels: list[str]
    lines: list[StalledLine]
    """Lines with stalls, the worst first."""

    def us(self, share: float) -> float:
        """Return the part of the predicted time that warps spend in a share of the stalls."""
        return share * (1 - self.issuing) * self.time_us


def after(base: str) -> str:
    """Return what a warp waits for during the fixed latency of an instruction."""
    return BRANCH if base in ("BRA", "BRX", "CALL", "RET", "JMP") else WAIT


def awaiting(base: str) -> str:
    """Return the reason for which a warp waits that others have to wake."""
    return {"SYNCS": LONG, "WARPGROUP": GMMA, "BAR": BARRIER}.get(base, WAIT)
