"""Draw which bank or sector each lane accesses, and when each warp runs, as SVG.

The colours are classes in page.css.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from attention_kernels.inspection.accesses import Access, Turn
from gpt2_infer.bench.show.page.source import busy_banks

_CELL = 9
_LANES = 32


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


def lane_map(access: Access) -> tuple[int, Markup]:
    """Draw which bank or sector each lane accesses; return the width and the drawing.

    Banks where lanes need different words are striped as well as coloured. For global memory only
    the accessed sectors are columns.
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
    """Draw the lane numbers, which all maps share."""
    parts = [_text(-6, (lane + 1) * _CELL, f"{lane}") for lane in (0, 8, 16, 24, 31)]
    return Markup("".join([_text(-6, -18, "lane"), *parts]))


def _runs(cells: set[tuple[int, int]]) -> str:
    """Return an SVG path through adjacent cells, along rows or columns, whichever is shorter."""

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
    """Draw the turns of a block's warps in order, between its barriers."""
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
