"""The command `gpt2-infer timeline`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gpt2_infer.cli.options import BACKEND, Count, KernelDtype
from gpt2_infer.cli.versions import adapted, build_of, call_shape, describe, version_of
from gpt2_infer.files import check_writable

if TYPE_CHECKING:
    from attention_kernels.inspection.timeline import Phase, Timeline, Warp

COLUMNS = {
    "phase": "left", "count": "right", "measured": "right", "predicted": "right",
    "ratio": "right", "source": "left",
}  # fmt: skip
ROW, WIDTH = 14, 1000  # of a picture, in its units


def timeline(
    name: Annotated[str, BACKEND],
    /,
    *,
    entry: str | None = None,
    gpu: str = "h200",
    seqlen: Count = 1024,
    head_dim: Count | None = None,
    batch: Count = 1,
    heads: Count = 12,
    full: bool = False,
    dtype: KernelDtype | None = None,
    out: Path | None = None,
) -> Timeline:
    """Show what a kernel's warps do by time, measured on a GPU here beside a prediction.

    The build stamps the clock at barriers, and where the source has STAMP("name"). Without a GPU
    there is the prediction alone. Raises RequestError, UnsupportedError, BuildError and the errors
    of a call.

    Args:
        name: backend name or version file, *.cu
        entry: how to call a file that is not a version file, in C++: 'attn(q, k, v, o, B, N, H, D,
            scale)'; header fields may follow, as in 'attn<<<N, 128>>>(q, k, v, o) | Tensors: BHND'
        gpu: GPU to predict for: h200, h100, a100, t4 or rtx4090
        seqlen: sequence length in tokens
        head_dim: head dimension (default: 64, or the first supported)
        batch: batch size
        heads: number of heads
        full: omit the causal mask
        dtype: dtype of a version that takes several (default: its first)
        out: HTML file for the table and pictures, a row for each warp
    """
    if out:
        check_writable(out)
    from attention_kernels.inspection import timeline as inspection
    from gpt2_infer.bench.prediction import find_gpu

    on = find_gpu(gpu)
    version = version_of(*adapted([name], entry))
    shape = call_shape(version, head_dim, batch, heads, full)
    call = batch, seqlen, heads, int(not full)
    found = inspection.timeline(build_of(version, dtype), on, call, shape["head_dim"])
    if out:
        out.write_text(page(found), "utf-8")
        print(f"wrote {out}", file=sys.stderr)
    return found


def text(found: Timeline, **_: object) -> str:
    """Return a table of the phases, and what the stamps cost."""
    from attention_kernels.inspection.table import table

    cells = zip(COLUMNS, *map(_row, found.phases), strict=True)
    columns = [(name, *column) for name, *column in cells if any(column)]
    names, *rows = zip(*columns, strict=True)
    shown = table({name: COLUMNS[name] for name in names}, rows)
    return "\n\n".join([_heading(found), shown, *_cost(found)])


def _heading(found: Timeline) -> str:
    batch, seqlen, heads, is_causal = found.call
    shape = {"batch": batch, "num_heads": heads, "head_dim": found.head_dim}
    where = f"measured on {found.measured_on}" if found.measured_on else "there is no GPU here"
    call = f"{found.version}, N={seqlen} {describe(shape | {'is_causal': is_causal})}"
    return f"{call}; cycles, predicted for {found.gpu}, {where}"


def _cost(found: Timeline) -> list[str]:
    if found.overhead is None:
        return []
    times = f"{found.stamped_us:.1f} us with them, {found.plain_us:.1f} us without"
    return [f"stamps cost {found.overhead:.1%}: a call takes {times}"]


def _row(phase: Phase) -> list[str]:
    cycles = ["" if x is None else f"{x:.0f}" for x in (phase.measured, phase.predicted)]
    ratio = "" if phase.ratio is None else f"{phase.ratio:.2f}"
    return [_name(phase.begin, phase.end), f"{phase.count}", *cycles, ratio, phase.source]


def _name(begin: str, end: str | None) -> str:
    return f"wait at {begin}" if end is None else f"{begin} to {end}"


# ---- The page ------------------------------------------------------------------------------------


def page(found: Timeline) -> str:
    """Return an HTML page with the table and, for each launch, its first block's warps by time."""
    from gpt2_infer.bench.show.worth_page import PAGE

    colors = {
        _name(one.begin, one.end): f"hsl({at * 137 % 360} {70 if one.end else 20}% 60%)"
        for at, one in enumerate(found.phases)
    }
    rows = ["<tr>" + "".join(f"<th>{head}" for head in COLUMNS)]
    for phase in found.phases:
        name, *others = _row(phase)
        cells = "".join(f"<td>{escape(cell)}" for cell in others)
        rows.append(f'<tr><td style="border-left: 1em solid {colors[name]}">{escape(name)}{cells}')
    notes = [f"<p>{line}" for line in _cost(found)]
    for launch in dict.fromkeys(warp.launch for warp in found.predicted):
        first = launch, 0
        both = [
            [one for one in warps if (one.launch, one.block) == first]
            for warps in (found.measured, found.predicted)
        ]
        end = max(warp.stamps[-1].left for warps in both for warp in warps)
        for what, warps in zip(("measured", "predicted"), both, strict=True):
            if warps:
                title = f"Launch {launch + 1}, block 0, {what}, {end:.0f} cycles wide"
                notes += [f"<h2>{title}</h2>", *_picture(warps, end, colors)]
    title = escape(f"Timeline of {found.version}")
    how, lines = escape(_heading(found)), ("\n".join(some) for some in (rows, notes))
    return PAGE.format(title=title, how=how, rows=next(lines), notes=next(lines))


def _picture(warps: Sequence[Warp], end: float, colors: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of an SVG: a row for each warp, with a bar for each phase."""
    yield f'<svg width="100%" viewBox="0 0 {WIDTH} {ROW * len(warps)}">'
    for row, warp in enumerate(warps):
        bars = [(_name(one.place, None), one.arrived, one.left) for one in warp.stamps]
        for one, other in itertools.pairwise(warp.stamps):
            bars.append((_name(one.place, other.place), one.left, other.arrived))
        for name, begin, stop in bars:
            if stop > begin:
                x, width = WIDTH * begin / end, WIDTH * (stop - begin) / end
                label = escape(f"warp {warp.warp}, {name}: {stop - begin:.0f} cycles")
                yield (
                    f'<rect x="{x:.2f}" y="{ROW * row}" width="{width:.2f}" height="{ROW - 2}" '
                    f'fill="{colors[name]}"><title>{label}</title></rect>'
                )
    yield "</svg>"
