"""Results as tables: the columns of each kind of study are data, and one pivot fills them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from gpt2_infer.bench.record import BASELINE, FREE_ATTENTION, File, KernelCell, Row, Shape
from gpt2_infer.bench.show.figures import (
    attention_share,
    cell_name,
    detail_length,
    figure,
    has_shapes,
    how,
    length,
    main_rows,
    quantiles,
    ratio,
    times,
    where,
    widest_spread,
    with_spread,
    within_budget,
)
from gpt2_infer.bench.show.pivot import Column, Entry, Layout, Table, Text, pivot

# What a profile's table derives: the counter, and its bytes. A wavefront is 128 bytes at most.
THROUGHPUTS = {
    "shared loads, GB/s at most": ("shared_load_wavefronts", 128),
    "shared loads by ldmatrix, GB/s at most": ("shared_matrix_wavefronts", 128),
    "shared stores, GB/s at most": ("shared_store_wavefronts", 128),
    "global loads, GB/s": ("global_load_bytes", 1),
    "asynchronous global loads, GB/s": ("global_async_load_sectors", 32),
    "global stores, GB/s": ("global_store_bytes", 1),
}


def render(name: str, file: File) -> str:
    """Return the tables of a results file as Markdown; `name` is the file's name in them."""
    return "\n".join(map(str, tables(name, file)))


def tables(name: str, file: File) -> list[Table]:
    """Return the tables of a results file."""
    kind = file.study["kind"]
    if kind == "kernel":
        layout = SHAPES if has_shapes(file) else KERNELS
        return pivot(name, file, main_rows(file), layout)
    if kind == "generation":
        layout = BESIDE_TRANSFORMERS if file.study.get("timed") == "call" else GENERATION
        return pivot(name, file, main_rows(file), layout)
    if kind == "prediction":
        return pivot(name, file, file.rows, predictions())
    return pivot(name, file, main_rows(file) if kind == "batch" else file.rows, LAYOUTS[kind])


# ---- Cells of a table ----------------------------------------------------------------------------


def _timed(text: Callable[[Row], str]) -> Text:
    """Return a text about a cell's row; blank if it has no samples."""
    return lambda line: text(line.row) if line.row and line.row.samples else ""


def _median(form: str) -> Text:
    """Return a text with the median of a cell's row, or with its status if it has no samples."""

    def text(line: Entry) -> str:
        if line.row is None:
            return ""
        return form.format(line.row.median) if line.row.samples else line.row.status

    return text


def _first(text: Callable[[Row], str]) -> Text:
    return lambda line: text(line.first)


def _extra(name: str, form: str = "{}") -> Text:
    """Return a field of `extra`; blank if a row lacks it."""
    return _first(lambda row: form.format(row.extra[name]) if name in row.extra else "")


def _count(metric: str, form: str, unit: float = 1) -> Text:
    def text(line: Entry) -> str:
        value = line.value(metric)
        return "" if value is None else form.format(value / unit)

    return text


def _beside(metric: str, form: str, unit: float) -> Text:
    """Return the median of another metric for the same contender and cell."""

    def text(line: Entry) -> str:
        found = line.row and line.file.beside(line.row, metric)
        return form.format(found.median / unit) if found else ""

    return text


def _ratio(line: Entry) -> str:
    if not line.row:
        return ""
    same = [row for row in line.block if row.cell == line.row.cell]
    return times(ratio(line.row, same, line.file.study["baseline"]))


def _code(line: Entry) -> str:
    return f"`{line.first.contender}`"


def _untimed(rows: Iterable[Row]) -> dict[str, str]:
    """Note for each backend why it has no time, or that its text was not compared."""
    rows = [*rows]
    notes = {row.contender: f"{row.status}: {row.reason}" for row in rows if not row.samples}
    for row in rows:
        if row.extra.get("text_compared") is False and row.contender != FREE_ATTENTION:
            notes[row.contender] = "its text was compared with nothing: the baseline wrote none"
    return notes


BACKEND = Column("backend", _code)
PRECISION = Column("precision", _extra("precision"))


# ---- Kernels -------------------------------------------------------------------------------------


def _has_one_length(line: Entry) -> bool:
    return len({length(row) for row in line.block}) == 1


def _if_one_length(text: Text) -> Text:
    return lambda line: text(line) if _has_one_length(line) else ""


def _rate(work: Callable[[KernelCell], int], unit: float) -> Text:
    return _timed(lambda row: f"{work(row.kernel) / (row.median * 1e-6) / unit:.3g}")


def _error(name: str, form: str) -> Text:
    return _timed(lambda row: form.format(getattr(row.check, name)) if row.check else "")


def _kernel_title(name: str, file: File, block: Sequence[Row]) -> str:
    cell, timed = block[0].kernel, [row for row in block if row.samples]
    chosen = detail_length(block)
    title = (
        f"{cell.shape}, {how(file)} ({name}). TFLOP/s, GB/s (q, k, v and o once) and the largest "
        f"error against float64 are at N={chosen}"
    )
    checks = [row.check for row in block if row.check and length(row) == chosen]
    # Only if plain PyTorch has no row; not for float64, where it is float32's error, scaled.
    if BASELINE not in {row.contender for row in timed} and cell.dtype != "float64":
        naive = [check.naive_error for check in checks if check.naive_error]
        title += f", where plain PyTorch's own error is {naive[0]:.1e}" if naive else ""
    if len({length(row) for row in block}) > 1 and all(map(within_budget, timed)):
        title += "; at every N what was timed was within its budget"
    limits = file.provenance.limits
    if tflops := limits.get(f"matmul_{cell.dtype}_tflops"):
        title += f"; in this run an 8192^3 matmul reached {tflops:.0f} TFLOP/s and a copy "
        title += f"{limits['copy_gbps']:.0f} GB/s"
    return title


KERNELS = Layout(
    title=_kernel_title,
    block=cell_name,
    line=lambda row: row.contender,
    at=detail_length,
    keeps=lambda line: any(row.samples for row in line.rows),
    notes=_untimed,
    columns=[
        BACKEND,
        PRECISION,
        Column(
            "N={at}, us",
            _median("{:.1f}"),
            over=length,
        ),
        Column("20 % .. 80 %", _if_one_length(_timed(lambda row: quantiles(row.samples)))),
        Column("spread", lambda line: "" if _has_one_length(line) else widest_spread(line.rows)),
        Column("x {baseline}, N={at}", _ratio),
        Column("TFLOP/s", _rate(lambda cell: cell.flops, 1e12)),
        Column("GB/s", _rate(lambda cell: cell.min_bytes, 1e9)),
        Column("error", _error("error", "{:.1e}")),
        Column("relative error", _if_one_length(_error("relative_error", "{:.1%}"))),
        Column("workspace, KiB", _beside("workspace", "{:.0f}", 1024)),
    ],
)


def _speed(line: Entry) -> str:
    row = line.row
    if not row or not any(one.samples for one in line.block if one.contender == row.contender):
        return ""
    if not row.samples:
        return row.status
    faster = _ratio(line) if row.contender != line.file.study["baseline"] else ""
    return f"{row.tflops:.3g}" + (f" ({faster} x)" if faster else "")


def _shapes_title(name: str, file: File, block: Sequence[Row]) -> str:
    timed = [row for row in block if row.samples]
    title = (
        f"TFLOP/s, and how many times as fast as `{file.study['baseline']}`; {how(file)} ({name}), "
        f"the widest spread of which is {widest_spread(timed)}"
    )
    return title + "; what was timed was within its budget" * all(map(within_budget, timed))


SHAPES = Layout(
    title=_shapes_title,
    line=lambda row: row.kernel,
    notes=_untimed,
    columns=[
        Column("shape", _first(lambda row: str(row.kernel))),
        Column("{at}", _speed, over=lambda row: f"`{row.contender}`, {row.extra['precision']}"),
    ],
)


# ---- Generation ----------------------------------------------------------------------------------


def _share(line: Entry) -> str:
    if not line.row or line.row.contender == FREE_ATTENTION:
        return ""
    same = [row for row in line.block if row.cell == line.row.cell]
    return figure(attention_share(line.row, same), "{:.1%}")


def _tokens_per_second(line: Entry) -> str:
    if not line.row or not line.row.samples:
        return ""
    new = length(line.row) - line.file.study["prompt_tokens"]
    return f"{int(line.row.cell['batch']) * new / line.row.median:.0f}"


GENERATION = Layout(
    title=lambda name, file, block: (
        f"{file.study['model']}, {cell_name(block[0])}, {how(file)} ({name})"
    ),
    block=cell_name,
    line=lambda row: row.contender,
    at=detail_length,
    keeps=lambda line: line.row is not None,
    notes=_untimed,
    columns=[
        BACKEND,
        PRECISION,
        Column(
            "{at} tokens, s",
            _median("{:.3f}"),
            over=length,
        ),
        Column(
            "spread",
            lambda line: widest_spread(line.rows) if line.row and line.row.samples else "",
        ),
        Column("x {baseline}", _ratio),
        Column("tokens/s", _tokens_per_second),
        Column("attention's share", _share),
        Column("peak memory, MiB", _beside("peak memory", "{:.0f}", 2**20)),
    ],
)


def _after_warm_up(line: Entry) -> float | None:
    """Return the seconds without warm-up, which transformers does not have."""
    if not line.first.samples:
        return None
    return (line.file.beside(line.first, "generation") or line.first).median


def _new_tokens(file: File, row: Row) -> int:
    return length(row) - int(file.study["prompt_tokens"])


def _rate_after_warm_up(line: Entry) -> str:
    seconds = _after_warm_up(line)
    return f"{_new_tokens(line.file, line.first) / seconds:.0f}" if seconds else ""


BESIDE_TRANSFORMERS = Layout(
    title=lambda name, file, block: (
        f"{file.study['model']}, {block[0].cell['dtype']}, {file.study['prompt_tokens']} + "
        f"{_new_tokens(file, block[0])} tokens, {how(file, 'transformers')} ({name})"
    ),
    notes=lambda _: {},
    columns=[
        Column(
            "program, mode",
            _first(lambda row: f"{row.extra.get('program', 'gpt2-infer')}, {row.cell['mode']}"),
        ),
        Column(
            "attention",
            _first(lambda row: f"`{row.extra.get('decode_attention') or row.extra['attention']}`"),
        ),
        PRECISION,
        Column("call, s (min .. max)", _first(lambda row: with_spread(row, "{:.3f}"))),
        Column("vs transformers", _ratio),
        Column("after warm-up, s", lambda line: figure(_after_warm_up(line), "{:.3f}")),
        Column("tokens/s", _rate_after_warm_up),
    ],
)


# ---- Decoding, batches, builds -------------------------------------------------------------------


def tokens_per_second(row: Row) -> float:
    """Return new tokens per second over a whole text, all rows of the batch together."""
    return int(row.cell["batch"]) * int(row.cell["new_tokens"]) / row.median


def _least_and_most(row: Row) -> str:
    speeds = (tokens_per_second(row) * row.median / seconds for seconds in reversed(row.spread))
    return " .. ".join(f"{speed:,.0f}" for speed in speeds)


def _step_us(row: Row) -> float:
    """Return microseconds per step, prompt included."""
    return 1e6 * row.median / int(row.cell["new_tokens"])


def _gb_per_second(row: Row) -> float | None:
    """Return GB/s of weights read; None in recompute, which is bound by arithmetic."""
    if _is_recompute(row):
        return None
    return float(row.extra["weight_bytes"] / _step_us(row) / 1e3)


def _is_recompute(row: Row) -> bool:
    return row.cell.get("mode") == "recompute"


def _of_bandwidth(line: Entry) -> str:
    speed = _gb_per_second(line.first) if line.first.samples else None
    return figure(speed and speed / line.file.provenance.limits["read_gbps"], "{:.0%}")


def _decode_title(name: str, file: File, block: Sequence[Row]) -> str:
    counts = sorted({int(row.cell["new_tokens"]) for row in block})
    return (
        f"{block[0].cell['prompt_tokens']} + {' and '.join(map(str, counts))} tokens, "
        f"{file.provenance.limits['read_gbps'] / 1000:.2f} TB/s of read bandwidth measured, "
        f"{how(file)} ({name})"
    )


def _decode_notes(rows: Sequence[Row]) -> dict[str, str]:
    notes = {
        row.contender: f"another text in {row.cell['model']}"
        for row in rows
        if row.extra.get("same_text") is False
    }
    return notes | {row.contender: row.reason for row in rows if row.reason}


def _cell(name: str) -> Text:
    return _first(lambda row: str(row.cell[name]))


DECODE = Layout(
    title=_decode_title,
    notes=_decode_notes,
    columns=[
        Column("model", _cell("model")),
        Column("dtype", _cell("dtype")),
        Column("batch", _cell("batch")),
        Column("contender", _first(lambda row: row.contender)),
        Column("seconds", _timed(lambda row: f"{row.median:.3f}" if _is_recompute(row) else "")),
        Column("tokens/s", _timed(lambda row: f"{tokens_per_second(row):,.0f}")),
        Column("least .. most", _timed(_least_and_most)),
        Column("us per step", _timed(lambda row: f"{_step_us(row):.0f}")),
        Column("weights, GB/s", _timed(lambda row: figure(_gb_per_second(row), "{:,.0f}"))),
        Column("of the bandwidth", _of_bandwidth),
    ],
)


def _job_tokens_per_second(line: Entry) -> str:
    """Return new tokens per second of the median sample, without the startup time."""
    if not line.first.samples:
        return ""
    start = line.file.beside(line.first, "start")
    seconds = line.first.median - (start.median if start else 0.0)
    return f"{line.first.extra['tokens'] / seconds:,.0f}"


BATCH = Layout(
    title=lambda name, file, block: (
        f"{block[0].cell['model']}, {block[0].cell['new_tokens']} new tokens each, "
        f"{how(file)} ({name})"
    ),
    columns=[
        Column("dtype", _cell("dtype")),
        Column("contender", _first(lambda row: row.contender)),
        Column("prompts", _extra("prompts", "{:,}")),
        Column("start, s", _beside("start", "{:.1f}", 1)),
        Column("seconds", _first(lambda row: with_spread(row, "{:.2f}"))),
        Column("tokens/s", _job_tokens_per_second),
        Column("same rows", _extra("same_rows", "{:.1%}")),
    ],
)

BUILD = Layout(
    title=lambda name, file, block: (
        f"{block[0].extra['versions']} versions on {file.study['jobs']} cores ({name})"
    ),
    columns=[
        Column("compiler", _first(lambda row: row.contender)),
        Column("seconds", _timed(lambda row: f"{row.median:.1f}")),
        Column("min .. max", _timed(lambda row: f"{row.spread[0]:.1f} .. {row.spread[1]:.1f}")),
    ],
)


# ---- Ladders: what was counted, inspected, predicted ---------------------------------------------


def shape_of(row: Row) -> Shape:
    """Return the shape that a version was profiled or inspected at."""
    return Shape(**row.cell)  # type: ignore[arg-type]


def _throughput(metric: str, size: int) -> Text:
    def text(line: Entry) -> str:
        counted, duration = line.value(metric), line.value("duration_us")
        if counted is None or duration is None:
            return ""
        return f"{counted * size / duration / 1e3:,.3g}"

    return text


PROFILE = Layout(
    title=lambda name, file, block: (
        f"{shape_of(block[0])}, {where(file.provenance)}; one profiled call each ({name})"
    ),
    columns=[
        BACKEND,
        Column(
            "{at}",
            lambda line: f"{line.row.samples[0]:,.4g}" if line.row else "",
            over=lambda row: row.metric.replace("_", " "),
        ),
        *(Column(what, _throughput(*of)) for what, of in THROUGHPUTS.items()),
    ],
)


def _shared(kind: str) -> Text:
    def text(line: Entry) -> str:
        requests, conflicts, ways = (
            line.value(f"shared_{kind}_{what}") for what in ("requests", "conflicts", "ways")
        )
        if requests is None:
            return ""
        return f"{requests:,.0f}" + (f" + {conflicts:,.0f} ({ways:.0f}-way)" if conflicts else "")

    return text


def _sectors(kind: str) -> Text:
    def text(line: Entry) -> str:
        count = line.value(f"global_{kind}_sectors")
        fewest = line.value(f"global_{kind}_fewest_sectors")
        if count is None or fewest is None:
            return ""
        return f"{count:,.0f}" + (f" ({fewest:,.0f} would do)" if fewest < count else "")

    return text


INSPECTION = Layout(
    title=lambda name, file, block: (
        f"{shape_of(block[0])}; nvcc {file.study['nvcc']} for sm_{file.study['arch']}, accesses "
        f"counted in the source ({name}). After a + are bank conflicts"
    ),
    keeps=lambda line: line.value("registers") is not None,
    notes=lambda rows: {row.contender: f"refused: {row.reason}" for row in rows if row.reason},
    columns=[
        BACKEND,
        Column("registers", _count("registers", "{:.0f}")),
        Column("spills, bytes", _count("spill_bytes", "{:.0f}")),
        Column("shared memory, KiB", _count("shared_bytes", "{:.3g}", 1024)),
        Column(
            "warps/SM, occupancy",
            lambda line: f"{line.value('warps'):.0f}, {line.value('occupancy_percent'):.0f} %",
        ),
        Column("shared loads", _shared("load")),
        Column("shared stores", _shared("store")),
        Column("sectors loaded", _sectors("load")),
        Column("sectors stored", _sectors("store")),
    ],
)


def _metric(name: str, form: str) -> Column:
    return Column(name, _count(name, form))


def _standard_errors(line: Entry) -> str:
    apart, error = line.value("difference"), line.value("standard error")
    return f"{apart / error:+.1f}" if apart is not None and error else ""


PERPLEXITY = Layout(
    title=lambda name, file, _: (
        f"{file.study['model']}, the first {file.study['tokens']:,} tokens of the held-out books, "
        f"windows of {file.study['window']}; {where(file.provenance)} ({name}). The last two "
        f"columns: apart from `{BASELINE}` in the same dtype"
    ),
    columns=[
        Column("dtype", _cell("dtype")),
        BACKEND,
        PRECISION,
        _metric("bits per byte", "{:.7f}"),
        _metric("perplexity", "{:.5f}"),
        Column("nats per token", _count("difference", "{:+.1e}")),
        Column("standard errors", _standard_errors),
    ],
)

PUBLISHED = Layout(
    title=lambda name, file, _: f"{file.study['note']} ({name})",
    line=lambda row: row.contender,
    columns=[
        BACKEND,
        Column(
            "{at}",
            lambda line: f"{line.row.median:.1f} s" if line.row else "",
            over=lambda row: row.cell["card"],
        ),
    ],
)

TESTS = Layout(
    title=lambda name, file, _: (
        "{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s".format(
            **file.study
        )
        + f"; {where(file.provenance)} ({name}). The slowest, and those that failed"
    ),
    columns=[
        Column("test", _code),
        Column("seconds", _timed(lambda row: f"{row.median:.1f}")),
        Column("outcome", _first(lambda row: row.status)),
    ],
)

LAYOUTS = {
    "tests": TESTS,
    "profile": PROFILE,
    "inspection": INSPECTION,
    "build": BUILD,
    "decode": DECODE,
    "batch": BATCH,
    "perplexity": PERPLEXITY,
    "published": PUBLISHED,
}


def predictions(measured: Sequence[Row] = ()) -> Layout:
    """Return the layout of predictions, with measured times of the same version files."""

    def text(line: Entry) -> str:
        if not (row := line.row):
            return ""
        if not row.samples:
            return "refused"
        found = measured_time(row, measured)
        beside = f" / {found:.4g} = {row.median / found:.2f}" if found else ""
        return f"{row.median:.4g}{beside}"

    return Layout(
        title=lambda name, file, block: (
            f"{cell_name(block[0])}, {file.study['gpu']}; microseconds, predicted / measured "
            f"({name})"
        ),
        block=cell_name,
        line=lambda row: row.contender,
        at=lambda block: max(map(length, block)),
        columns=[
            BACKEND,
            Column("N={at}", text, over=length),
            Column(
                "bound at the longest",
                lambda line: line.row.extra.get("bound", "") if line.row else "",
            ),
        ],
    )


def is_of(prediction: Row, timed: Row) -> bool:
    """Return whether a row timed the predicted version file in the same cell."""
    same_code = timed.extra.get("version_digest") == prediction.extra["version_digest"]
    same_cell = prediction.kernel == timed.kernel
    return same_code and same_cell and timed.contender == prediction.contender


def measured_time(prediction: Row, timed: Iterable[Row]) -> float | None:
    """Return the measured median of the same version file in the same cell, if any."""
    return next((row.median for row in timed if row.samples and is_of(prediction, row)), None)


def accuracy(file: File, timed: Sequence[Row]) -> str:
    """Summarize how far predictions are from measurements."""
    ratios = {
        (row.contender, length(row)): row.median / found
        for row in file.rows
        if row.samples and (found := measured_time(row, timed))
    }
    if not ratios:
        return "None of it has been measured yet."
    errors = {key: abs(ratio - 1) for key, ratio in ratios.items()}
    worst = max(errors, key=lambda key: errors[key])
    far = sum(error > 0.35 for error in errors.values())
    return (
        f"Of {len(ratios)} cells that were measured, the median error is "
        f"{statistics.median(errors.values()):.1%}; {far or 'none'} of them "
        f"{'is' if far < 2 else 'are'} off by more than 35 %. The worst is `{worst[0]}` at "
        f"N={worst[1]}: {ratios[worst]:.2f} times the measured time."
    )
