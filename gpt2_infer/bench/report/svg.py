"""Charts as SVG; their colours are classes of page.css."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup, escape

from attention_kernels.inspection.accesses import Access, Turn
from gpt2_infer.bench.report.source import busy_banks

_CELL = 9
_LANES = 32
_BAR = 440  # the longest


@dataclass(frozen=True)
class Mark:
    """A name with its class, and a point or a line of points."""

    name: str
    look: str
    points: list[tuple[float, float]]


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0").replace("-0.", "-.").removeprefix("0") or "0"


def _text(x: float, y: float, words: str, look: str = "", anchor: str = "start") -> str:
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    of = f' class="{look}"' if look else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{of}{at}>{escape(words)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, look: str) -> str:
    return f'<path class="{look}" d="M{_n(x)} {_n(y)}L{_n(to_x)} {_n(to_y)}"/>'


def _svg(width: float, height: float, label: str, parts: Iterable[str]) -> Markup:
    return Markup(
        f'<svg role="img" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


# ---- One request and one block -------------------------------------------------------------------


def lane_map(access: Access) -> tuple[int, Markup]:
    """Draw which bank or sector each lane goes to; return the width and the drawing.

    Banks where lanes want different words are striped as well as coloured. Of global memory only
    the sectors that are touched are columns.
    """
    size, unit = access.bytes, 4 if access.memory == "shared" else 32
    touched = [
        (lane, piece)
        for lane, offset in enumerate(access.costliest.offsets)
        if offset is not None
        for piece in range(offset // unit, (offset + size - 1) // unit + 1)
    ]
    names: Sequence[int]
    if access.memory == "shared":
        columns, busy = _LANES, busy_banks(access)
        cells = {(lane, word % _LANES) for lane, word in touched}
        names, title = range(columns), "bank"
    else:
        sectors = sorted({piece for _, piece in touched})
        columns, busy = len(sectors), set()
        cells = {(lane, sectors.index(piece)) for lane, piece in touched}
        names, title = sectors, "sector"
    paths = {"cell": _runs(cells - busy), "cell busy": _runs(busy)}
    parts = ['<use href="#lanes"/>', _text(0, -18, title)]
    parts += [_text(i * _CELL, -5, f"{names[i]}") for i in range(0, columns, 8)]
    parts += [f'<path class="{look}" d="{d}"/>' for look, d in paths.items() if d]
    return columns * _CELL, Markup("".join(parts))


def lanes() -> Markup:
    """Draw the numbers of the lanes, which every map has."""
    parts = [_text(-6, (lane + 1) * _CELL, f"{lane}") for lane in (0, 8, 16, 24, 31)]
    return Markup("".join([_text(-6, -18, "lane"), *parts]))


def _runs(cells: set[tuple[int, int]]) -> str:
    """Return lines through neighbouring cells, along rows or columns: whichever is shorter."""

    def along(axis: int) -> str:
        found, last = list[str](), (-1, -1)
        length = 0
        for cell in sorted(cells, key=lambda at: (at[1 - axis], at[axis])):
            if cell[1 - axis] == last[1 - axis] and cell[axis] == last[axis] + 1:
                length += _CELL
                found[-1] = re.sub(r"\d+$", f"{length}", found[-1])
            else:
                length = _CELL
                x, y = cell[1] * _CELL, cell[0] * _CELL
                middle = f"{x + _CELL // 2} {y}v" if axis == 0 else f"{x} {y + _CELL // 2}h"
                found.append(f"M{middle}{length}")
            last = cell
        return "".join(found)

    return min(along(0), along(1), key=len)


def turns(found: Sequence[Turn], label: str) -> Markup:
    """Draw the turns of a block's warps, one after the other, between its barriers."""
    warps = max(turn.warp for turn in found) + 1
    row = 14 if warps <= 16 else 8
    total = sum(turn.accesses for turn in found)
    left, top, width = 58.0, 22, 820
    bottom = top + warps * row
    step = -(-warps // 8)
    parts = [
        _text(left - 8, top + (w + 0.75) * row, f"warp {w}", "note", "end")
        for w in range(0, warps, step)
    ]
    at, pen, bars = 0, (0.0, 0), list[str]()
    for barriers, mine in itertools.groupby(found, lambda turn: turn.barriers):
        start = left + width * at / total
        parts.append(_line(start, top - 4, start, bottom, "barrier" if barriers else "axis"))
        here = list(mine)
        if sum(turn.accesses for turn in here) / total > 0.03:
            parts.append(_text(start + 3, top - 8, f"{barriers}", "note"))
        for turn in here:
            x, y = round(left + width * at / total, 1), top + turn.warp * row + row // 2
            wide = max(round(width * turn.accesses / total, 1), 0.4)
            bars.append(f"m{_n(x - pen[0])} {y - pen[1]}h{_n(wide)}")
            at, pen = at + turn.accesses, (x + wide, y)
    parts.append(f'<path class="turn" stroke-width="{row - 2}" d="{"".join(bars)}"/>')
    parts.append(_line(left, bottom, left + width, bottom, "axis"))
    words = "accesses of the block so far, in the emulator's order: not time"
    parts.append(_text(left, bottom + 18, words, "note"))
    parts.append(_text(left + width, bottom + 18, f"{total:,}", "note", "end"))
    parts.append(_text(left - 8, top - 8, "barriers", "note", "end"))
    return _svg(left + width + 4, bottom + 26, label, parts)


# ---- Measurements --------------------------------------------------------------------------------


def bar(look: str, value: float, most: float, spread: tuple[float, float] | None = None) -> Markup:
    """Draw a horizontal bar as long as its part of the most, with a whisker over its spread."""
    scale = _BAR / most
    whisker = _line(spread[0] * scale, 8, spread[1] * scale, 8, "whisker") if spread else ""
    return Markup(f'<svg class="bar {look}" width={_n(value * scale)}>{whisker}</svg>')


@dataclass(frozen=True)
class Axes:
    """Two logarithmic axes."""

    xs: tuple[float, float]
    ys: tuple[float, float]
    names: tuple[str, str]
    x_ticks: Sequence[float] = ()
    """If these are not the powers of ten."""
    left: float = 66
    top: float = 14
    width: float = 560
    height: float = 360

    def x(self, value: float) -> float:
        """Where a value is, from the left."""
        return self.left + self.width * _part(value, *self.xs)

    def y(self, value: float) -> float:
        """Where a value is, from the top."""
        return self.top + self.height * (1 - _part(value, *self.ys))

    def draw(self, marks: Sequence[Mark], label: str, extra: Iterable[str] = ()) -> Markup:
        """Draw the axes, and each mark with its name to the right of its last point."""
        bottom = self.top + self.height
        parts = []
        for value in self.x_ticks or _ticks(*self.xs):
            parts.append(_line(self.x(value), self.top, self.x(value), bottom, "grid"))
            parts.append(_text(self.x(value), bottom + 16, _number(value), "note", "middle"))
        for value in _ticks(*self.ys):
            parts.append(
                _line(self.left, self.y(value), self.left + self.width, self.y(value), "grid")
            )
            parts.append(_text(self.left - 8, self.y(value) + 4, _number(value), "note", "end"))
        parts += extra
        parts.append(_text(self.left + self.width, bottom + 36, self.names[0], "note", "end"))
        parts.append(_text(self.left, self.top - 4, self.names[1], "note"))
        places = _apart([self.y(mark.points[-1][1]) for mark in marks], 13, self.top, bottom)
        for mark, name_y in zip(marks, places, strict=True):
            at = [(self.x(x), self.y(y)) for x, y in mark.points]
            parts.append('<g class="mark">')
            if len(at) > 1:
                path = "L".join(f"{_n(x)} {_n(y)}" for x, y in at)
                parts.append(f'<path class="line {mark.look}" d="M{path}"/>')
            dots = "".join(f"M{_n(x)} {_n(y)}h0" for x, y in at)
            parts.append(f'<path class="dot {mark.look}" d="{dots}"/>')
            name_x = self.left + self.width + 12
            parts.append(_line(at[-1][0] + 5, at[-1][1], name_x - 3, name_y, "leader"))
            parts.append(_text(name_x, name_y + 4, mark.name, "name") + "</g>")
        room = 7.5 * max(len(mark.name) for mark in marks) + 20
        return _svg(self.left + self.width + room, bottom + 44, label, parts)

    def rules(self, named: Mapping[str, float]) -> list[str]:
        """Draw horizontal lines with their names, which keep apart."""
        ys = [self.y(value) for value in named.values()]
        places = _apart([y - 5 for y in ys], 13, self.top, self.top + self.height)
        end = self.left + self.width
        return [_line(self.left, y, end, y, "limit") for y in ys] + [
            _text(self.left + 6, y, words, "note strong")
            for words, y in zip(named, places, strict=True)
        ]


def _part(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def around(values: Iterable[float], by: float = 1.25) -> tuple[float, float]:
    """Return the range of an axis that has room for the values."""
    found = list(values)
    return min(found) / by, max(found) * by


def _ticks(low: float, high: float) -> list[float]:
    subs = (1, 2, 5) if high / low < 200 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [s * 10.0**p for p in powers for s in subs if low <= s * 10.0**p <= high]


def _number(value: float) -> str:
    return f"{value:,.10g}" if value >= 1e-3 else f"{value:.0e}"


def _apart(places: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Move what is too close together apart, in the same order and as little as possible."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    # Without the least distances the places need only not fall: those that do share their mean.
    groups: list[list[float]] = []
    for rank, i in enumerate(order):
        groups.append([places[i] - least * rank])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    means = [fmean(group) for group in groups for _ in group]
    room = high - least * (len(places) - 1)
    found = [min(max(mean, low), room) + least * rank for rank, mean in enumerate(means)]
    return [found[order.index(i)] for i in range(len(places))]
