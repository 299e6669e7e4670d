"""What the warps of a block wait for that other warps, copies or tensor cores complete.

Phases of mbarriers, numbered barriers, products of warpgroups and registers that others give up are
events. An event is complete when all have contributed to it: threads that arrive, copies, the four
warps that ask for a product. asynchronous.py says who contributes to what, so it does not matter in
which order the timed warps do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attention_kernels.inspection.sass.state import WARPGROUP, Blocks, Event, Issue


@dataclass
class Events:
    """The events of a block, by number."""

    needs: list[int] = field(default_factory=list)
    """Contributions to each."""
    signals: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """To which one a warp contributes, by position in its instructions."""
    awaits: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """For which one a warp waits, by position in its instructions."""


def events_of(blocks: Blocks, number: int, issued: Sequence[Issue]) -> Events:
    """Return the events of block `number` of the emulated blocks, given its instructions."""
    found = Events()
    numbers: dict[Event, int] = {}

    def number_of(event: Event) -> int:
        if event not in numbers:
            numbers[event] = len(found.needs)
            found.needs.append(0)
        return numbers[event]

    def signal(warp: int, event: Event) -> int:
        at = number_of(event)
        found.needs[at] += 1
        found.signals[warp][position[warp]] = at
        return at

    first = number * blocks.warps
    position = [0] * blocks.warps
    products = [0] * blocks.warps
    groups: list[list[int]] = [[] for _ in position]  # the last product of each group, by warp
    for issue in issued:
        one = blocks.code[issue.index]
        warps = np.flatnonzero(issue.warps[first : first + blocks.warps]).tolist()
        for warp in warps:
            if one.base == "HGMMA":
                at = signal(warp, ("product", number, warp // WARPGROUP, products[warp]))
                products[warp] += 1
                if "gsb0" in one.operands:
                    groups[warp].append(at)
            elif one.base == "WARPGROUP" and "DEPBAR" in one.modifiers:
                running = int(one.operands[1], 16)
                if len(groups[warp]) > running:
                    found.awaits[warp][position[warp]] = groups[warp][-1 - running]
            if first + warp in issue.signals:
                signal(warp, issue.signals[first + warp])
            if first + warp in issue.awaits:
                found.awaits[warp][position[warp]] = number_of(issue.awaits[first + warp])
            position[warp] += 1
    return found


class Pending:
    """The events of a block while its warps are timed."""

    def __init__(self, events: Events, starts: Sequence[int]) -> None:
        """starts: position of each warp's first instruction that is timed."""
        self.events = events
        self.left = [*events.needs]
        self.when = [0.0] * len(self.left)  # the last contribution, then the completion
        self.cause = [0] * len(self.left)  # the instruction that made it
        # Warps that wait, and the time from which they could go on.
        self.waiting: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for warp, start in enumerate(starts):
            for position, event in events.signals[warp].items():
                self.left[event] -= position < start

    def contribute(self, event: int, when: float, index: int) -> bool:
        """Record a contribution, and return whether it was the last one."""
        self.left[event] -= 1
        if when >= self.when[event]:
            self.when[event], self.cause[event] = when, index
        return self.left[event] == 0
