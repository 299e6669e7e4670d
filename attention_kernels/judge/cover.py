"""Draw many cases at random, and choose those that try something new, the most for its cost first.

What a case tries are parts: combinations of two or three of its values, and its exact sizes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[Any]


class Cover:
    """Cases as columns: the places of their values in each dimension, their sizes and parts.

    powers: the dimensions that are sizes, and their powers in a case's work, which is `work` of
    sizes. Their values are ranges, of which each case has one number.
    """

    def __init__(
        self,
        values: Mapping[str, Sequence[Any]],
        powers: Mapping[str, int],
        work: Callable[[Mapping[str, Numbers]], Numbers],
        draw: np.random.Generator,
    ) -> None:
        self._values, self._powers, self._work, self._draw = values, powers, work, draw
        self.at: dict[str, Numbers] = {}
        self.sizes: dict[str, Numbers] = {}
        self.least: dict[str, Numbers] = {}
        """The least sizes in their ranges, or those that were given: what a case's cost counts."""
        self.costs: Numbers = np.zeros(0)
        self._parts: list[Numbers] = []
        self._count = 1  # part 0 means no part

    def add(self, count: int, usual: float, most: float = math.inf, **given: Numbers) -> None:
        """Draw cases with given sizes and places; others are free up to `usual` work.

        In a case of more than `most` work, some sizes but seqlen are the smallest.
        """
        at = {name: self._draw.integers(len(x), size=count) for name, x in self._values.items()}
        ranges = {name: self._values[name] for name in self._powers}
        for name, numbers in given.items():
            at[name] = numbers
            if name in ranges:  # a number in none of them counts as in the last
                places = {n: place for place, of in enumerate(ranges[name]) for n in of}
                last = len(ranges[name]) - 1
                at[name] = np.array([places.get(n, last) for n in numbers.tolist()])

        def least() -> dict[str, Numbers]:
            low = {name: np.array([x[0] for x in of])[at[name]] for name, of in ranges.items()}
            return low | {name: x for name, x in given.items() if name in ranges}

        for name in self._draw.permutation([name for name in ranges if name != "seqlen"]):
            smallest = int(np.argmin([x[0] for x in ranges[name]]))
            at[name] = np.where(self._work(least()) > most, smallest, at[name])
        low = least()
        sizes, room = dict(low), np.maximum(usual / self._work(low), 1.0)
        for name, power in self._powers.items():
            if name in given:
                continue
            last, step = np.array([(x[-1], x.step) for x in ranges[name]])[at[name]].T
            steps = (np.minimum(last, low[name] * room ** (1 / power)) - low[name]) // step
            sizes[name] = low[name] + step * self._draw.integers(steps.astype(np.int64) + 1)
            room = np.maximum(room / (sizes[name] / low[name]) ** power, 1.0)
        for columns, new in ((self.at, at), (self.sizes, sizes), (self.least, low)):
            columns |= {
                name: np.concatenate([columns.get(name, x[:0]), x]) for name, x in new.items()
            }

    def keep(self, kept: Numbers) -> None:
        """Drop the other cases."""
        for columns in (self.at, self.sizes, self.least):
            columns |= {name: x[kept] for name, x in columns.items()}

    def close(self, numbers: Numbers, where: Numbers | bool = True) -> None:
        """Add a part to each case, or some: cases with the same number have the same."""
        self._parts.append(np.where(where, self._count + numbers, 0))
        self._count += int(numbers.max()) + 1

    def combine(self, names: Sequence[str], count: int, where: Numbers | bool = True) -> None:
        """Add a part for each combination of `count` values."""
        for group in itertools.combinations(names, count):
            numbers = np.zeros(len(self.costs), dtype=np.int64)
            for name in group:
                numbers = numbers * len(self._values[name]) + self.at[name]
            self.close(numbers, where)

    def parts(self) -> Numbers:
        """Return the parts of each case, one row per case; 0 means no part."""
        return np.stack(self._parts, axis=1)


def in_order_of_gain(fixed: Sequence[float], drawn: Cover, own: int) -> Iterator[tuple[int, float]]:
    """Yield the numbers of cases, each time that with the most new parts for its cost.

    fixed: the costs of cases with `own` parts that no other has; their numbers are negative.
    With each comes the share of all parts that had occurred before it.
    """
    parts = drawn.parts()
    is_open = np.zeros(parts.max() + 1, dtype=bool)
    is_open[parts] = True
    is_open[0] = False
    total = left = int(is_open.sum()) + own * len(fixed)
    gains = [(-own / cost, n - len(fixed)) for n, cost in enumerate(fixed)]
    gains += zip((-(parts > 0).sum(1) / drawn.costs).tolist(), range(len(parts)), strict=True)
    heapq.heapify(gains)
    while gains:
        _, n = heapq.heappop(gains)
        new = own if n < 0 else int(np.count_nonzero(is_open[parts[n]]))
        if not new:
            continue
        if n >= 0 and gains and (now := -new / drawn.costs[n]) > gains[0][0]:
            heapq.heappush(gains, (now, n))  # others closed some of its parts
            continue
        yield n, 1 - left / total
        left -= new
        if n >= 0:
            is_open[parts[n]] = False
