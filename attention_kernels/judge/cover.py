"""Choose values of several dimensions such that all of their combinations occur, soonest first."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
# Of how many random choices the best is taken, and how many are drawn for them.
CANDIDATES, TRIES = 30, 60
Places: TypeAlias = NDArray[np.int64]
Group: TypeAlias = Mapping[str, Sequence[Any]]
"""Values of some dimensions, whose combinations must all occur."""


class Cover:
    """Choices of one value per dimension, until every combination in every group has occurred.

    cost: returns what choices cost, given the places of their values in each dimension; infinite
    if a choice is not allowed.
    """

    def __init__(
        self,
        dimensions: Mapping[str, Sequence[Any]],
        groups: Sequence[Group],
        draw: random.Random,
        cost: Callable[[Mapping[str, Places]], NDArray[np.float64]],
    ) -> None:
        self._dimensions, self._cost = dimensions, cost
        self._draw = np.random.default_rng(draw.getrandbits(64))
        self._names = [*dimensions]
        # Combination i of group g is element _first[g] + i of _open.
        sizes = [[len(dimensions[name]) for name in group] for group in groups]
        self._first = np.cumsum([0, *map(math.prod, sizes)])
        self._open = np.zeros(self._first[-1], dtype=bool)
        self._weights = np.zeros((len(dimensions), len(groups)), dtype=np.int64)
        self._groups = [(*group,) for group in groups]
        self._sizes = sizes
        for g, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            wanted = np.zeros(size, dtype=bool)
            places = [
                [dimensions[name].index(value) for value in values]
                for name, values in group.items()
            ]
            wanted[np.ix_(*places)] = True
            self._open[self._first[g] : self._first[g + 1]] = wanted.ravel()
            for at, name in enumerate(group):
                self._weights[self._names.index(name), g] = math.prod(size[at + 1 :])

    def choose(
        self, fixed: Mapping[str, Any], most: float = math.inf, tries: int = TRIES
    ) -> dict[str, Any] | None:
        """Return the choice with the fixed values that closes most combinations for its cost.

        It is the best of up to CANDIDATES random ones; None if none of `tries` costs at most
        `most`.
        """
        places = {name: self._dimensions[name].index(value) for name, value in fixed.items()}
        first = [places.get(name, 0) for name in self._names]
        end = [places.get(name, len(x) - 1) + 1 for name, x in self._dimensions.items()]
        drawn = self._draw.integers(first, end, (tries, len(first)))
        costs = self._cost(dict(zip(self._names, drawn.T, strict=True)))
        allowed = np.flatnonzero((costs <= most) & (costs < math.inf))[:CANDIDATES]
        if not len(allowed):
            return None
        drawn, costs = drawn[allowed], costs[allowed]
        closed = drawn @ self._weights + self._first[:-1]
        best = int((self._open[closed].sum(1) / costs).argmax())
        self._open[closed[best]] = False
        values = zip(self._dimensions.items(), drawn[best], strict=True)
        return {name: of_name[place] for (name, of_name), place in values}

    def next(
        self, most: float = math.inf, most_of_triple: float = math.inf
    ) -> dict[str, Any] | None:
        """Return a choice that contains an open combination; None if all have occurred.

        A combination is given up if no random choice with it costs at most `most`, or
        `most_of_triple` if it has three values.
        """
        while self._open.any():
            first = int(self._open.argmax())
            g = int(np.searchsorted(self._first, first, "right")) - 1
            places = np.unravel_index(first - self._first[g], self._sizes[g])
            fixed = {
                name: self._dimensions[name][place]
                for name, place in zip(self._groups[g], places, strict=True)
            }
            self._open[first] = False
            limit = most if len(fixed) == 2 else most_of_triple
            if (chosen := self.choose(fixed, limit, 10 * TRIES)) is not None:
                return chosen
        return None


def in_order_of_gain(
    items: Sequence[T], parts: Callable[[T], Iterable[Hashable]], cost: Callable[[T], float]
) -> Iterator[tuple[T, float]]:
    """Yield the items, each time the one with the most new parts for its cost.

    With each comes the share of all parts that had occurred before it.
    """
    numbers: dict[Hashable, int] = {}
    of_item = [np.array([numbers.setdefault(x, len(numbers)) for x in parts(it)]) for it in items]
    costs = [cost(item) for item in items]
    is_open, left = np.ones(len(numbers), dtype=bool), len(numbers)
    gains = [(-len(found) / costs[n], n) for n, found in enumerate(of_item)]
    heapq.heapify(gains)
    while gains:
        _, n = heapq.heappop(gains)
        new = int(is_open[of_item[n]].sum())
        if gains and new / costs[n] < -gains[0][0]:  # others closed some of its parts
            heapq.heappush(gains, (-new / costs[n], n))
            continue
        yield items[n], 1 - left / len(numbers)
        is_open[of_item[n]] = False
        left -= new
