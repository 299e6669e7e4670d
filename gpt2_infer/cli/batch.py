"""The command `gpt2-infer batch`."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from pathlib import Path

from gpt2_infer.cli.console import EXIT_NO_ROW, print_error, show, show_json
from gpt2_infer.cli.generate import BACKEND
from gpt2_infer.cli.options import (
    POSITIVE,
    add_model_options,
    add_sampling_options,
    add_text_options,
    make_sampling,
)
from gpt2_infer.errors import RequestError

INPUT = (
    "prompts: JSON Lines (.jsonl) or Parquet (.parquet) with the columns prompt and, optionally, "
    "id; or text (.txt), one prompt per line"
)
DECODE_BACKEND = (
    "attention backend for decoding (default: the same as generate's, but NAIVE_PYTORCH on cpu)"
)
ENGINE = "engine: eager, graph, or auto, the faster one that supports the request (default)"
SHARD = "complete only output files I, I + N, I + 2N and so on, with I from 0 to N - 1"
RAY = "run on the Ray cluster at ADDRESS; without an address, on this machine"
WORKERS = "Ray workers, each with a GPU or, on cpu, a core (default: as many as the cluster has)"
BATCH_SIZE = "rows per batch, or auto (default): 32 on cpu; on cuda up to 512, by memory"
FORMAT = "format of the output files (default: %(default)s)"
PART_ROWS = "approximate rows per output file (default: %(default)s)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("input", metavar="INPUT", type=Path, nargs="+", help=INPUT)
    add("--out", type=Path, required=True, metavar="DIR", help="output folder")
    add("--format", choices=("jsonl", "parquet"), default="jsonl", help=FORMAT)
    add("--resume", action="store_true", help="resume the job in DIR, if any")
    add("--strict", action="store_true", help="stop at the first row that cannot be completed")
    model = parser.add_argument_group("model")
    add_model_options(model)
    add = model.add_argument
    add("--backend", metavar="NAME", help=f"attention backend for prompts; {BACKEND}")
    add("--decode-backend", metavar="NAME", help=DECODE_BACKEND)
    add_text_options(parser.add_argument_group("text").add_argument)
    add_sampling_options(parser)
    how = parser.add_argument_group("how")
    where = how.add_mutually_exclusive_group().add_argument
    where("--shard", type=shard, default=(0, 1), metavar="I/N", help=SHARD)
    where("--ray", nargs="?", const="local", metavar="ADDRESS", help=RAY)
    add = how.add_argument
    add("--workers", type=POSITIVE, metavar="N", help=WORKERS)
    add("--engine", default="auto", metavar="NAME", help=ENGINE)
    add("--batch-size", type=batch_size, metavar="N", help=BATCH_SIZE)
    add("--part-rows", type=POSITIVE, default=1000, metavar="N", help=PART_ROWS)
    add("--json", action="store_true", help="print one JSON object")


def batch_size(text: str) -> int | None:
    """Convert --batch-size; None means "auto"."""
    return None if text == "auto" else POSITIVE(text)


def shard(text: str) -> tuple[int, int]:
    """Convert --shard."""
    if not re.fullmatch(r"\d{1,9}/\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"must be a shard such as 0/4, not {text[:40]!r}")
    index, count = map(int, text.split("/"))
    return index, count


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from tqdm import tqdm

    from gpt2_infer import batch

    given = vars(arguments) | {"stop": tuple(arguments.stop), "sampling": make_sampling(arguments)}
    names = [field.name for field in dataclasses.fields(batch.Settings)]
    settings = batch.Settings(**{name: given[name] for name in names})
    how = {name: given[name] for name in ("device", "resume", "strict")}
    if arguments.workers and not arguments.ray:
        raise RequestError("--workers needs --ray")
    out, started = arguments.out, time.perf_counter()
    with tqdm(unit="row", disable=None) as bar:
        how |= {"on_rows": bar.update}
        if arguments.ray:
            how |= {"address": arguments.ray, "workers": arguments.workers}
            entries = batch.run_on_ray(arguments.input, out, settings, **how)
        else:
            entries = batch.run(arguments.input, out, settings, shard=arguments.shard, **how)
    rows, errors = sum(e.rows for e in entries), sum(e.errors for e in entries)
    files = len(entries)
    if arguments.json:
        show_json({"rows": rows, "errors": errors, "files": files, "out": str(out)})
    else:
        show(f"rows: {rows}, errors: {errors}, files: {files}, in {out}")
    print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    if errors < rows or not rows:  # a shard may have no file
        return 0
    print_error("gpt2-infer", "no row could be completed: see the column error")
    return EXIT_NO_ROW
