"""Results as tables: the columns of each kind of study are data, and one pivot fills them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpt2_infer.bench.record import BASELINE, FREE_ATTENTION, File, Row
from gpt2_infer.bench.show.figures import (
    Value,
    attention_share,
    cell_name,
    detail_length,
    has_shapes,
    how,
    length,
    new_tokens,
    quantiles,
    ratio,
    reading_us,
    shape_of,
    step_us,
    times,
    where,
    widest_spread,
    with_spread,
    within_budget,
)
from gpt2_infer.bench.show.pivot import Column, Entry, Getter, Layout, Table, pivot
from gpt2_infer.bench.show.predicted import timings_of
from gpt2_infer.config import named_config


def render(name: str, file: File) -> str:
    """Return the tables of a results file as Markdown; `name` is the file's name in them."""
    return "\n".join(map(str, tables(name, file)))


def tables(name: str, file: File) -> list[Table]:
    """Return the tables of a results file."""
    kind = file.study["kind"]
    if kind == "kernel" and has_shapes(file):
        kind = "shapes"
    if file.study.get("timed") == "call":
        kind = "call"
    return pivot(name, file, LAYOUTS[kind])


LAYOUTS: dict[str, Layout] = {}
"""Layouts by kind of study; "shapes" and "call" are variants of "kernel" and "generation"."""


# ---- Values of columns ---------------------------------------------------------------------------


def _first(value: Callable[[Row], Value]) -> Getter:
    """Return a value of a line's first row."""
    return lambda line: value(line.first)


def _timed(value: Callable[[Row], Value]) -> Getter:
    """Return a value of a cell's row; blank if it has no samples."""
    return lambda line: value(line.row) if line.row and line.row.samples else None


def _median(line: Entry) -> Value:
    """Return the median of a cell's row, or its status if it has no samples."""
    if not line.row:
        return None
    return line.row.median if line.row.samples else line.row.status


def _cell(name: str) -> Getter:
    return _first(lambda row: row.cell[name])


def _extra(name: str) -> Getter:
    """Return a field of `extra`; blank if a row lacks it."""
    return _first(lambda row: row.extra.get(name))


def _beside(metric: str, unit: float = 1) -> Getter:
    """Return the median of another metric for the same contender and cell."""

    def value(line: Entry) -> Value:
        found = line.row and line.file.beside(line.row, metric)
        return found.median / unit if found else None

    return value


def _metric(name: str, unit: float = 1) -> Getter:
    def value(line: Entry) -> Value:
        found = line.value(name)
        return None if found is None else found / unit

    return value


def _ratio(line: Entry) -> str:
    found = ratio(line.row, line.same_cell, line.file.study["baseline"]) if line.row else None
    return times(found)


BACKEND = Column("backend", _first(lambda row: f"`{row.contender}`"))
CONTENDER = Column("contender", _first(lambda row: row.contender))
DTYPE = Column("dtype", _cell("dtype"))
PRECISION = Column("precision", _extra("precision"))


# ---- Kernels -------------------------------------------------------------------------------------


def _has_one_length(line: Entry) -> bool:
    return len({*map(length, line.block)}) == 1


def _if_one_length(value: Getter) -> Getter:
    return lambda line: value(line) if _has_one_length(line) else None


def _error(name: str) -> Getter:
    return _timed(lambda row: getattr(row.check, name, None))


def _kernel_title(name: str, file: File, block: Sequence[Row]) -> str:
    cell, timed = block[0].kernel, [row for row in block if row.samples]
    chosen = detail_length(block)
    title = (
        f"{cell.shape}, {how(file)} ({name}). TFLOP/s, GB/s (q, k, v and o once) and the largest "
        f"error against float64 are at N={chosen}"
    )
    checks = [row.check for row in block if row.check and length(row) == chosen]
    # Quote plain PyTorch's error if it has no row; in float64 that is float32's error, scaled.
    if BASELINE not in {row.contender for row in timed} and cell.dtype != "float64":
        naive = [check.naive_error for check in checks if check.naive_error]
        title += f", where plain PyTorch's own error is {naive[0]:.1e}" if naive else ""
    if len({*map(length, block)}) > 1 and all(map(within_budget, timed)):
        title += "; every timed backend was within its error budget at every N"
    limits = file.provenance.limits
    if tflops := limits.get(f"matmul_{cell.dtype}_tflops"):
        title += f"; in this run an 8192^3 matmul reached {tflops:.0f} TFLOP/s and a copy "
        title += f"{limits['copy_gbps']:.0f} GB/s"
    return title


LAYOUTS["kernel"] = Layout(
    title=_kernel_title,
    block=cell_name,
    line=lambda row: row.contender,
    at=detail_length,
    keeps=lambda line: any(row.samples for row in line.rows),
    columns=[
        BACKEND,
        PRECISION,
        Column("N={at}, us", _median, "{:.1f}", over=length),
        Column("20 % .. 80 %", _if_one_length(_timed(quantiles))),
        Column("spread", lambda line: None if _has_one_length(line) else widest_spread(line.rows)),
        Column("x {baseline}, N={at}", _ratio),
        Column("TFLOP/s", _timed(lambda row: row.tflops), "{:.3g}"),
        Column("GB/s", _timed(lambda row: row.kernel.min_bytes / row.median / 1e3), "{:.3g}"),
        Column("error", _error("error"), "{:.1e}"),
        Column("relative error", _if_one_length(_error("relative_error")), "{:.1%}"),
        Column("workspace, KiB", _beside("workspace", 1024), "{:.0f}"),
    ],
)


def _speed(line: Entry) -> Value:
    row = line.row
    if not row or not any(one.samples for one in line.block if one.contender == row.contender):
        return None
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
    within = "; every timed backend was within its error budget"
    return title + within * all(map(within_budget, timed))


LAYOUTS["shapes"] = Layout(
    title=_shapes_title,
    line=lambda row: row.kernel,
    columns=[
        Column("shape", _first(lambda row: str(row.kernel))),
        Column("{at}", _speed, over=lambda row: f"`{row.contender}`, {row.extra['precision']}"),
    ],
)


# ---- Generation ----------------------------------------------------------------------------------


def _share(line: Entry) -> Value:
    if not line.row or line.row.contender == FREE_ATTENTION:
        return None
    return attention_share(line.row, line.same_cell)


def _text_was_compared(row: Row) -> str:
    if row.extra.get("text_compared", True) or row.contender == FREE_ATTENTION:
        return ""
    return "its text was not compared: the baseline has none"


def _new_tokens(file: File, row: Row) -> int:
    return length(row) - int(file.study["prompt_tokens"])


def _tokens_per_second(line: Entry) -> Value:
    if not line.row or not line.row.samples:
        return None
    return int(line.row.cell["batch"]) * _new_tokens(line.file, line.row) / line.row.median


LAYOUTS["generation"] = Layout(
    title=lambda name, file, block: (
        f"{file.study['model']}, {cell_name(block[0])}, {how(file)} ({name})"
    ),
    block=cell_name,
    line=lambda row: row.contender,
    at=detail_length,
    keeps=lambda line: line.row is not None,
    remark=_text_was_compared,
    columns=[
        BACKEND,
        PRECISION,
        Column("{at} tokens, s", _median, "{:.3f}", over=length),
        Column("spread", lambda line: widest_spread(line.rows)),
        Column("x {baseline}", _ratio),
        Column("tokens/s", _tokens_per_second, "{:.0f}"),
        Column("attention's share", _share, "{:.1%}"),
        Column("peak memory, MiB", _beside("peak memory", 2**20), "{:.0f}"),
    ],
)


def _after_warm_up(value: Getter) -> Getter:
    """Return a value of the time without warm-up; of the call for transformers, which has none."""
    return lambda line: value(
        replace(line, row=line.file.beside(line.first, "generation") or line.first)
    )


LAYOUTS["call"] = Layout(
    title=lambda name, file, block: (
        f"{file.study['model']}, {block[0].cell['dtype']}, {file.study['prompt_tokens']} + "
        f"{_new_tokens(file, block[0])} tokens, {how(file, 'transformers')} ({name})"
    ),
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
        Column("after warm-up, s", _after_warm_up(_median), "{:.3f}"),
        Column("tokens/s", _after_warm_up(_tokens_per_second), "{:.0f}"),
    ],
)


# ---- Decoding, batches, builds -------------------------------------------------------------------


def _least_and_most(row: Row) -> str:
    least, most = row.spread
    return f"{new_tokens(row) / most:,.0f} .. {new_tokens(row) / least:,.0f}"


def _is_recompute(row: Row) -> bool:
    return row.cell.get("mode") == "recompute"


def _weights_gbps(row: Row) -> float | None:
    """Return GB/s of weights read; None in recompute, which is bound by arithmetic."""
    return None if _is_recompute(row) else row.extra["weight_bytes"] / step_us(row) / 1e3


def _of_bandwidth(line: Entry) -> Value:
    speed = _weights_gbps(line.first) if line.first.samples else None
    return speed and speed / line.file.provenance.limits["read_gbps"]


def _lost_per_layer(line: Entry) -> Value:
    """Return the microseconds of a step beyond those of reading the weights, per layer."""
    row, config = line.first, named_config(str(line.first.cell["model"]))
    if not row.samples or _is_recompute(row) or config is None:
        return None
    return (step_us(row) - reading_us(row, line.file)) / config.n_layer


def _decode_title(name: str, file: File, block: Sequence[Row]) -> str:
    counts = sorted({int(row.cell["new_tokens"]) for row in block})
    return (
        f"{block[0].cell['prompt_tokens']} + {' and '.join(map(str, counts))} tokens, "
        f"{file.provenance.limits['read_gbps'] / 1000:.2f} TB/s of read bandwidth measured, "
        f"{how(file)} ({name})"
    )


def _text_differs(row: Row) -> str:
    return "" if row.extra.get("same_text", True) else f"its text differs in {row.cell['model']}"


LAYOUTS["decode"] = Layout(
    title=_decode_title,
    remark=_text_differs,
    columns=[
        Column("model", _cell("model")),
        DTYPE,
        Column("batch", _cell("batch")),
        CONTENDER,
        Column("seconds", _timed(lambda row: row.median if _is_recompute(row) else None), "{:.3f}"),
        Column("tokens/s", _timed(lambda row: new_tokens(row) / row.median), "{:,.0f}"),
        Column("least .. most", _timed(_least_and_most)),
        Column("us per step", _timed(step_us), "{:.0f}"),
        Column("weights, GB/s", _timed(_weights_gbps), "{:,.0f}"),
        Column("of the bandwidth", _of_bandwidth, "{:.0%}"),
        Column("us lost per layer", _lost_per_layer, "{:.1f}"),
    ],
)


def _job_tokens_per_second(line: Entry) -> Value:
    """Return new tokens per second of the median sample, without the startup time."""
    if not line.first.samples:
        return None
    start = line.file.beside(line.first, "start")
    seconds = line.first.median - (start.median if start else 0.0)
    return float(line.first.extra["tokens"] / seconds)


LAYOUTS["batch"] = Layout(
    title=lambda name, file, block: (
        f"{block[0].cell['model']}, {block[0].cell['new_tokens']} new tokens each, "
        f"{how(file)} ({name})"
    ),
    columns=[
        DTYPE,
        CONTENDER,
        Column("prompts", _extra("prompts"), "{:,}"),
        Column("mean length", _extra("mean_length"), "{:.0f}"),
        Column("start, s", _beside("start"), "{:.1f}"),
        Column("seconds", _first(lambda row: with_spread(row, "{:.2f}"))),
        Column("tokens/s", _job_tokens_per_second, "{:,.0f}"),
        Column("same rows", _extra("same_rows"), "{:.1%}"),
    ],
)

LAYOUTS["build"] = Layout(
    title=lambda name, file, block: (
        f"{block[0].extra['versions']} versions on {file.study['jobs']} cores ({name})"
    ),
    columns=[
        Column("compiler", _first(lambda row: row.contender)),
        Column("seconds", _timed(lambda row: row.median), "{:.1f}"),
        Column("min .. max", _timed(lambda row: f"{row.spread[0]:.1f} .. {row.spread[1]:.1f}")),
    ],
)


# ---- Counters, machine code, predictions ---------------------------------------------------------


def _all_rows(file: File) -> list[Row]:
    return file.rows


def _throughput(metric: str, size: int) -> Getter:
    def value(line: Entry) -> Value:
        counted, duration = line.value(metric), line.value("duration_us")
        if counted is None or duration is None:
            return None
        return f"{counted * size / duration / 1e3:,.3g}"

    return value


LAYOUTS["profile"] = Layout(
    title=lambda name, file, block: (
        f"{shape_of(block[0])}, {where(file)}; one profiled call each ({name})"
    ),
    rows=_all_rows,
    columns=[
        BACKEND,
        Column("{at}", _median, "{:,.4g}", over=lambda row: row.metric.replace("_", " ")),
        # A wavefront is 128 bytes at most.
        Column("shared loads, GB/s at most", _throughput("shared_load_wavefronts", 128)),
        Column(
            "shared loads by ldmatrix, GB/s at most", _throughput("shared_matrix_wavefronts", 128)
        ),
        Column("shared stores, GB/s at most", _throughput("shared_store_wavefronts", 128)),
        Column("global loads, GB/s", _throughput("global_load_bytes", 1)),
        Column("asynchronous global loads, GB/s", _throughput("global_async_load_sectors", 32)),
        Column("global stores, GB/s", _throughput("global_store_bytes", 1)),
    ],
)


def _shared(line: Entry, kind: str) -> Value:
    """Return the requests and, after a +, the bank conflicts."""
    requests, conflicts, ways = (
        line.value(f"shared_{kind}_{what}") for what in ("requests", "conflicts", "ways")
    )
    return f"{requests:,.0f} + {conflicts:,.0f} ({ways:.0f}-way)" if conflicts else requests


def _sectors(line: Entry, kind: str) -> Value:
    count = line.value(f"global_{kind}_sectors")
    fewest = line.value(f"global_{kind}_fewest_sectors")
    return count if count == fewest else f"{count:,.0f} ({fewest:,.0f} would do)"


LAYOUTS["inspection"] = Layout(
    title=lambda name, file, block: (
        f"{shape_of(block[0])}; nvcc {file.study['nvcc']} for sm_{file.study['arch']}, accesses "
        f"counted in the source ({name}). Bank conflicts follow the +"
    ),
    rows=_all_rows,
    keeps=lambda line: line.value("registers") is not None,
    columns=[
        BACKEND,
        Column("registers", _metric("registers"), "{:.0f}"),
        Column("spills, bytes", _metric("spill_bytes"), "{:.0f}"),
        Column("shared memory, KiB", _metric("shared_bytes", 1024), "{:.3g}"),
        Column(
            "warps/SM, occupancy",
            lambda line: f"{line.value('warps'):.0f}, {line.value('occupancy_percent'):.0f} %",
        ),
        Column("shared loads", lambda line: _shared(line, "load"), "{:,.0f}"),
        Column("shared stores", lambda line: _shared(line, "store"), "{:,.0f}"),
        Column("sectors loaded", lambda line: _sectors(line, "load"), "{:,.0f}"),
        Column("sectors stored", lambda line: _sectors(line, "store"), "{:,.0f}"),
    ],
)


def _standard_errors(line: Entry) -> Value:
    apart, error = line.value("difference"), line.value("standard error")
    return apart / error if apart is not None and error else None


LAYOUTS["perplexity"] = Layout(
    title=lambda name, file, _: (
        f"{file.study['model']}, the first {file.study['tokens']:,} tokens of the held-out books, "
        f"windows of {file.study['window']}; {where(file)} ({name}). The last two "
        f"columns compare with `{BASELINE}` in the same dtype"
    ),
    rows=_all_rows,
    columns=[
        DTYPE,
        BACKEND,
        PRECISION,
        Column("bits per byte", _metric("bits per byte"), "{:.7f}"),
        Column("perplexity", _metric("perplexity"), "{:.5f}"),
        Column("nats per token", _metric("difference"), "{:+.1e}"),
        Column("standard errors", _standard_errors, "{:+.1f}"),
    ],
)

LAYOUTS["published"] = Layout(
    title=lambda name, file, _: f"{file.study['note']} ({name})",
    line=lambda row: row.contender,
    columns=[BACKEND, Column("{at}", _median, "{:.1f} s", over=lambda row: row.cell["card"])],
)

LAYOUTS["tests"] = Layout(
    title=lambda name, file, _: (
        "{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s".format(
            **file.study
        )
        + f"; {where(file)} ({name}). The slowest tests, and all that failed"
    ),
    rows=_all_rows,
    columns=[
        Column("test", BACKEND.value),
        Column("seconds", _timed(lambda row: row.median), "{:.1f}"),
        Column("outcome", _first(lambda row: row.status)),
    ],
)


def predictions(measured: Sequence[Row] = ()) -> Layout:
    """Return the layout of predictions, with measured times of the same version files."""

    def value(line: Entry) -> Value:
        row = line.row
        if not row or not row.samples:
            return row.status if row else None
        if not (found := timings_of(row, measured)):
            return row.median
        time = found[0].median
        return f"{row.median:.4g} / {time:.4g} = {row.median / time:.2f}"

    return Layout(
        title=lambda name, file, block: (
            f"{cell_name(block[0])}, {file.study['gpu']}; microseconds, predicted / measured "
            f"({name})"
        ),
        rows=_all_rows,
        block=cell_name,
        line=lambda row: row.contender,
        at=lambda block: max(map(length, block)),
        columns=[
            BACKEND,
            Column("N={at}", value, "{:.4g}", over=length),
            Column("bound at the longest", _timed(lambda row: row.extra["bound"])),
        ],
    )


LAYOUTS["prediction"] = predictions()
