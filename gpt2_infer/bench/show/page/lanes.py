"""Draw which bank or sector each lane accesses, as SVG. The colours are classes in page.css."""

from __future__ import annotations

from markupsafe import Markup

from attention_kernels.inspection.accesses import Access
from gpt2_infer.bench.show.figures import group_by

_CELL = 9
_LANES = 32


def lane_map(access: Access) -> Markup:
    """Draw which bank or sector each lane accesses.

    Banks where lanes need different words are striped as well as coloured. For global memory only
    the accessed sectors are columns.
    """
    is_shared = access.memory == "shared"
    unit = 4 if is_shared else 32
    touched = [
        (lane, piece)
        for lane, offset in enumerate(access.costliest.offsets)
        if offset is not None
        for piece in range(offset // unit, (offset + access.bytes - 1) // unit + 1)
    ]
    if is_shared:
        names, busy = [*range(_LANES)], busy_banks(access)
        cells = {(lane, word % _LANES) for lane, word in touched}
    else:
        names, busy = sorted({sector for _, sector in touched}), set()
        cells = {(lane, names.index(sector)) for lane, sector in touched}
    parts = [_text(-6, -18, "lane", "end"), _text(0, -18, "bank" if is_shared else "sector")]
    parts += [_text(-6, (i + 1) * _CELL, f"{i}", "end") for i in (0, 8, 16, 24, 31)]
    parts += [_text(i * _CELL, -5, f"{names[i]}") for i in range(0, len(names), 8)]
    for look, some in (("cell", cells - busy), ("cell busy", busy)):
        places = ((x * _CELL, lane * _CELL + _CELL // 2) for lane, x in sorted(some))
        path = "".join(f"M{x} {y}h{_CELL - 1}" for x, y in places)
        parts += [f'<path class="{look}" d="{path}"/>'] if path else []
    return Markup(f'<svg class="map" width="{len(names) * _CELL}">{"".join(parts)}</svg>')


def busy_banks(access: Access) -> set[tuple[int, int]]:
    """Return (lane, bank) pairs in conflict: lanes served together need different words."""
    group = 32 if access.bytes <= 4 else max(1, 128 // access.bytes)
    wanted = [
        (lane, (offset + byte) // 4)
        for lane, offset in enumerate(access.costliest.offsets)
        if offset is not None
        for byte in range(0, access.bytes, 4)
    ]
    found = set[tuple[int, int]]()
    for (_, bank), here in group_by(wanted, lambda one: (one[0] // group, one[1] % 32)).items():
        if len({word for _, word in here}) > 1:
            found |= {(lane, bank) for lane, _ in here}
    return found


def _text(x: int, y: int, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'
