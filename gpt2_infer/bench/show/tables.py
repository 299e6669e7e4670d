"""Results as tables: the columns of each kind of study are data, and one pivot fills them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpt2_infer.bench.record import BASELINE, FREE_ATTENTION, File, ResultsError, Row
from gpt2_infer.bench.show import columns, figures, inspected
from gpt2_infer.bench.show.pivot import Column, Entry, Getter, Layout, Table, pivot
from gpt2_infer.config import named_config


def render(name: str, file: File) -> str:
    """Return the tables of a results file as Markdown; `name` is the file's name in them."""
    return "\n".join(map(str, tables(name, file)))


def tables(name: str, file: File, kind: str = "") -> list[Table]:
    """Return the tables of a results file; raises ResultsError for an unknown kind of study.

    kind: one of LAYOUTS, by default the study's.
    """
    kind = kind or file.study["kind"]
    if kind not in LAYOUTS:
        raise ResultsError(f"{name}: unknown kind of study, {kind}")
    if kind == "kernel" and figures.has_shapes(file):
        kind = "shapes"
    if kind == "decode" and file.study.get("new_tokens") == [1]:
        kind = "prefill"
    return pivot(name, file, LAYOUTS[kind])


LAYOUTS: dict[str, Layout] = {**inspected.LAYOUTS}
"""Layouts by kind of study, or a variant of it: "shapes", "row errors" and "prefill"."""


# ---- Kernels -------------------------------------------------------------------------------------


def _error(name: str) -> Getter:
    return columns.timed(lambda row: getattr(row.check, name, None))


def _relative_error(line: Entry) -> figures.Value:
    """Return the relative error in a table of a single length."""
    return _error("relative_error")(line) if len({*map(figures.length, line.block)}) == 1 else None


def _decodes(file: File) -> bool:
    """Return whether decode kernels were timed, which are bound by the cache's bytes."""
    return bool(file.study.get("decode"))


def _tflops(line: Entry) -> figures.Value:
    return line.row.tflops if line.row and line.row.samples and not _decodes(line.file) else None


def _gbps(line: Entry) -> figures.Value:
    """Return the GB/s of reading the cache once."""
    if not line.row or not line.row.samples or not _decodes(line.file):
        return None
    return line.row.kernel.min_bytes / line.row.median / 2e3


def _roof_share(line: Entry) -> figures.Value:
    """Return the share of its roof that a line's longest timed row reaches."""
    timed = [row for row in line.rows if row.samples]
    if not timed or _decodes(line.file):
        return None
    return figures.roof_share(max(timed, key=figures.length), line.file.provenance.limits)


def _kernel_title(name: str, file: File, block: Sequence[Row]) -> str:
    cell, timed = block[0].kernel, [row for row in block if row.samples]
    chosen = figures.detail_length(block)
    what, speed = ("decode, ", "GB/s (the cache once)") if _decodes(file) else ("", "TFLOP/s")
    title = (
        f"{what}{cell.shape}, {figures.how(file)} ({name}). {speed} and the largest error against "
        f"float64 are at N={chosen}"
    )
    checks = [row.check for row in block if row.check and figures.length(row) == chosen]
    # Quote plain PyTorch's error if it has no row; in float64 that is float32's error, scaled.
    if BASELINE not in {row.contender for row in timed} and cell.dtype != "float64":
        naive = [check.naive_error for check in checks if check.naive_error]
        title += f", where plain PyTorch's own error is {naive[0]:.1e}" if naive else ""
    if len({*map(figures.length, block)}) > 1:
        title += "; every timed backend was within its error budget at every N"
    return title


LAYOUTS["kernel"] = Layout(
    title=_kernel_title,
    block=figures.cell_name,
    line=lambda row: row.contender,
    at=figures.detail_length,
    keeps=lambda line: any(row.samples for row in line.rows),
    remark=lambda row: row.remarks and f"N={figures.length(row)}: {row.remarks}",
    columns=[
        columns.BACKEND,
        columns.PRECISION,
        Column("N={at}, us", columns.median, "{:.1f}", over=figures.length),
        Column("spread", lambda line: figures.widest_spread(line.rows)),
        Column("x {baseline}, N={at}", columns.versus),
        Column("TFLOP/s", _tflops, "{:.3g}"),
        Column("GB/s", _gbps, "{:.3g}"),
        Column("of its roof, longest N", _roof_share, "{:.0%}"),
        Column("error", _error("error"), "{:.1e}"),
        Column("relative error", _relative_error, "{:.1%}"),
    ],
)


def _speed(line: Entry) -> figures.Value:
    row = line.row
    if not row or not any(one.samples for one in line.block if one.contender == row.contender):
        return None
    if not row.samples:
        return row.status
    faster = columns.versus(line) if row.contender != line.file.study["baseline"] else ""
    return f"{row.tflops:.3g}" + (f" ({faster} x)" if faster else "")


def _shapes_title(name: str, file: File, block: Sequence[Row]) -> str:
    return (
        f"TFLOP/s, and how many times as fast as `{file.study['baseline']}`; {figures.how(file)} "
        f"({name}), the widest spread of which is {figures.widest_spread(block)}; every timed "
        "backend was within its error budget"
    )


LAYOUTS["shapes"] = Layout(
    title=_shapes_title,
    line=lambda row: row.kernel,
    remark=lambda row: row.remarks and f"{row.kernel}: {row.remarks}",
    columns=[
        Column("shape", columns.first(lambda row: str(row.kernel))),
        Column("{at}", _speed, over=lambda row: f"`{row.contender}`, {row.extra['precision']}"),
    ],
)


def _row_error(line: Entry) -> figures.Value:
    found = line.row and line.row.check
    return f"{found.row_error:.1e} / {found.row_budget:.1e}" if found else None


LAYOUTS["row errors"] = Layout(
    title=lambda name, file, _: f"{figures.where(file)} ({name})",
    line=lambda row: row.contender,
    columns=[columns.BACKEND, Column("N={at}", _row_error, over=figures.length)],
)


# ---- Generation ----------------------------------------------------------------------------------


def _share(line: Entry) -> figures.Value:
    if not line.row or line.row.contender == FREE_ATTENTION:
        return None
    return figures.attention_share(line.row, line.same_cell)


def _text_was_compared(row: Row) -> str:
    if row.extra.get("text_compared", True) or row.contender == FREE_ATTENTION:
        return ""
    return "its text was not compared: the baseline has none"


LAYOUTS["generation"] = Layout(
    title=lambda name, file, block: (
        f"{file.study['model']}, {figures.cell_name(block[0])}, {figures.how(file)} ({name})"
    ),
    block=figures.cell_name,
    line=lambda row: row.contender,
    at=figures.detail_length,
    keeps=lambda line: line.row is not None,
    remark=_text_was_compared,
    columns=[
        columns.BACKEND,
        columns.PRECISION,
        Column("{at} tokens, s", columns.median, "{:.3f}", over=figures.length),
        Column("spread", lambda line: figures.widest_spread(line.rows)),
        Column("x {baseline}", columns.versus),
        columns.RATE,
        columns.CALL_RATE,
        Column("attention's share", _share, "{:.1%}"),
    ],
)


# ---- What a kernel is worth in a model -----------------------------------------------------------


def _mode(row: Row) -> str:
    return "alone" if "seqlen" in row.cell else str(row.cell["mode"])


def _time(line: Entry) -> figures.Value:
    row = line.first
    if not row.samples:
        return "-" if row.status == "refused" else row.status
    number = f"{row.median:,.1f}" if row.unit == "us" else f"{row.median:.3g}"
    return "p " * ("predicted" in row.extra) + f"{number} {row.unit}"


def _in_model(value: Getter) -> Getter:
    """Return a value of a line that has the time of a model; blank for a kernel alone."""
    return lambda line: None if _mode(line.first) == "alone" else value(line)


def _saved(line: Entry) -> figures.Value:
    return figures.saved_share(line.first, line.same_cell, line.file.study["baseline"])


def _joules(line: Entry) -> figures.Value:
    energy = line.file.beside(line.first, "energy")
    return energy.median / columns.tokens(line) if energy and energy.samples else None


def _decoder(row: Row) -> str:
    other = row.extra.get("decoder")
    return f"it has no decode kernel, {other} decodes with the kv-cache" if other else ""


def _worth_title(name: str, file: File, block: Sequence[Row]) -> str:
    lengths = {_mode(row): row.cell.get("seqlen", row.cell.get("max_tokens")) for row in block}
    shown = f"N={lengths.get('alone')} alone, {lengths.get('recompute')} tokens"
    return f"{file.study['model']}, {shown}; {figures.how(file)}{f' ({name})' if name else ''}"


LAYOUTS["worth"] = Layout(
    title=_worth_title,
    rows=lambda file: [row for row in file.rows if row.metric in ("time", "generation")],
    remark=_decoder,
    columns=[
        Column("mode", columns.first(_mode)),
        Column("contender", columns.first(lambda row: row.contender[:28])),
        Column("time", _time),
        Column("tokens/s", _in_model(columns.RATE.value), "{:,.0f}"),
        Column("attention", _in_model(_share), "{:.0%}"),
        Column("saves", _in_model(_saved), "{:.0%}"),
        Column("J/token", _in_model(_joules), "{:.3g}"),
        Column("text", columns.extra("diverges")),
        Column("logits", columns.extra("logits_difference"), "{:.0e}"),
    ],
)


# ---- Decoding, batches ---------------------------------------------------------------------------


def _is_recompute(row: Row) -> bool:
    return row.cell.get("mode") == "recompute"


def _recompute_seconds(row: Row) -> str | None:
    """Return the seconds of a whole call with their spread; None with a cache."""
    return figures.with_spread(row, "{:.3f}") if _is_recompute(row) else None


def _step_us(row: Row, _: object = None) -> float:
    """Return the microseconds per step of a decoding's seconds, prompt included."""
    return 1e6 * row.median / int(row.cell["new_tokens"])


def _weights_gbps(row: Row) -> float | None:
    """Return GB/s of weights read; None in recompute, which is bound by arithmetic."""
    return None if _is_recompute(row) else row.extra["weight_bytes"] / _step_us(row) / 1e3


def _of_bandwidth(line: Entry) -> figures.Value:
    speed, limits = columns.timed(_weights_gbps)(line), line.file.provenance.limits
    return speed / limits["read_gbps"] if isinstance(speed, float) and limits else None


def _lost_per_layer(line: Entry) -> figures.Value:
    """Return the microseconds of a step beyond those of reading the weights, per layer."""
    row, config = line.first, named_config(str(line.first.cell["model"]))
    if _of_bandwidth(line) is None or config is None:
        return None
    reading_us = row.extra["weight_bytes"] / line.file.provenance.limits["read_gbps"] / 1e3
    return float(_step_us(row) - reading_us) / config.n_layer


def _decode_title(name: str, file: File, block: Sequence[Row]) -> str:
    counts = sorted({int(row.cell["new_tokens"]) for row in block})
    read_gbps = file.provenance.limits.get("read_gbps")
    return (
        f"{block[0].cell['prompt_tokens']} + {' and '.join(map(str, counts))} tokens, "
        + (f"{read_gbps / 1000:.2f} TB/s of read bandwidth measured, " if read_gbps else "")
        + f"{figures.how(file)} ({name})"
    )


def _call_ratio(line: Entry) -> str:
    """Return how many times as fast as the baseline's a whole call is."""
    calls = [figures.calls_of(line.file, row) for row in line.same_cell]
    mine, baseline = figures.calls_of(line.file, line.first), line.file.study.get("baseline")
    return figures.times(
        figures.ratio(mine, filter(None, calls), baseline) if mine and baseline else None
    )


def _text_differs(row: Row) -> str:
    return "" if row.extra.get("same_text", True) else f"its text differs in {row.cell['model']}"


def _times_without_guesses(line: Entry) -> str:
    plain = re.sub(", . guess(es)?", "", line.first.contender)
    guesses = plain != line.first.contender
    return figures.times(figures.ratio(line.first, line.same_cell, plain) if guesses else None)


LAYOUTS["decode"] = Layout(
    title=_decode_title,
    remark=_text_differs,
    columns=[
        *columns.DECODED,
        Column("seconds", columns.timed(_recompute_seconds)),
        columns.RATE,
        Column("least .. most", columns.of(figures.steps_of, columns.least_and_most)),
        columns.CALL_RATE,
        Column("tokens per pass", columns.extra("tokens_per_pass")),
        Column("x without guesses", _times_without_guesses),
        Column("vs transformers", _call_ratio),
        columns.ENERGY,
        Column("us per step", columns.of(figures.steps_of, _step_us), "{:.0f}"),
        Column("of the bandwidth", _of_bandwidth, "{:.0%}"),
        Column("us lost per layer", _lost_per_layer, "{:.1f}"),
    ],
)


def _prompt_speed(row: Row) -> float:
    """Return the prompt's tokens per second, those of a batch together."""
    return int(row.cell["batch"]) * int(row.cell["prompt_tokens"]) / row.median


def _times_the_first(line: Entry) -> figures.Value:
    first = line.same_cell[0]
    return first.median / line.first.median if first.samples and line.first.samples else None


LAYOUTS["prefill"] = Layout(
    title=lambda name, file, block: (
        f"{block[0].cell['prompt_tokens']} tokens, {figures.how(file)} ({name})"
    ),
    remark=_text_differs,
    columns=[
        *columns.DECODED,
        Column("ms", columns.timed(lambda row: 1e3 * row.median), "{:.2f}"),
        Column(
            "least .. most",
            columns.timed(lambda row: f"{1e3 * row.spread[0]:.2f} .. {1e3 * row.spread[1]:.2f}"),
        ),
        Column("tokens/s", columns.timed(_prompt_speed), "{:,.0f}"),
        Column("x the first", _times_the_first, "{:.2f}"),
    ],
)


LAYOUTS["batch"] = Layout(
    title=lambda name, file, block: (
        f"{block[0].cell['model']}, {block[0].cell['new_tokens']} new tokens each, "
        f"{figures.how(file)} ({name})"
    ),
    columns=[
        columns.DTYPE,
        columns.CONTENDER,
        Column("prompts", columns.extra("prompts"), "{:,}"),
        Column("seconds", columns.first(lambda row: figures.with_spread(row, "{:.2f}"))),
        columns.RATE,
        columns.CALL_RATE,
        columns.ENERGY,
        Column("same rows", columns.extra("same_rows"), "{:.1%}"),
    ],
)
