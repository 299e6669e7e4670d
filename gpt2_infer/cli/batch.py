"""The command `gpt2-infer batch`."""

from __future__ import annotations

import argparse
import dataclasses
import os
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
DEVICES = (
    "devices, one process each: all, CUDA indices such as 0,1, cpu, or cpu:N for N single-threaded "
    "processes (default: one CUDA device if available, else cpu; under torchrun LOCAL_RANK's)"
)
RAY = (
    "address of the Ray cluster to run on, with one actor per GPU, or N with --devices cpu:N; "
    "without an address, a new local cluster"
)
BATCH_SIZE = "rows per batch and device, or auto (default): 32 on cpu; on cuda up to 512, by memory"
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
    add_model_options(model, device=False)
    add = model.add_argument
    add("--backend", metavar="NAME", help=f"attention backend for prompts; {BACKEND}")
    add("--decode-backend", metavar="NAME", help=DECODE_BACKEND)
    add_text_options(parser.add_argument_group("text").add_argument)
    add_sampling_options(parser)
    add = parser.add_argument_group("how").add_argument
    add("--devices", metavar="NAMES", help=DEVICES)
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help=RAY)
    add("--engine", default="auto", metavar="NAME", help=ENGINE)
    add("--batch-size", type=batch_size, metavar="N", help=BATCH_SIZE)
    add("--part-rows", type=POSITIVE, default=1000, metavar="N", help=PART_ROWS)
    add("--json", action="store_true", help="print one JSON object")


def batch_size(text: str) -> int | None:
    """Convert --batch-size; None means "auto"."""
    return None if text == "auto" else POSITIVE(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from tqdm import tqdm

    from gpt2_infer import batch

    given = vars(arguments) | {"stop": tuple(arguments.stop), "sampling": make_sampling(arguments)}
    names = [field.name for field in dataclasses.fields(batch.Settings)]
    settings = batch.Settings(**{name: given[name] for name in names})
    inputs, out = arguments.input, arguments.out
    how = {"resume": arguments.resume, "strict": arguments.strict}
    started = time.perf_counter()
    if arguments.ray:
        try:
            from gpt2_infer.batch import cluster
        except ImportError:
            raise RequestError("--ray needs Ray: install gpt2-infer[ray]") from None
        rows, errors = cluster.run_on_ray(
            inputs, out, settings, address=arguments.ray, devices=arguments.devices, **how
        )
    else:
        devices = batch.find_devices(arguments.devices)
        with tqdm(unit="row", disable=None) as bar:
            job = batch.run(inputs, out, settings, devices=devices, on_rows=bar.update, **how)
        if os.environ.get("RANK", "0") != "0":
            return 0  # only torchrun's first process reports
        entries = batch.entries(job)
        rows, errors = sum(e.rows for e in entries), sum(e.errors for e in entries)
        print(f"batches of {job.batch}", file=sys.stderr)
    files = len([*out.glob(f"*.{settings.format}")])
    if arguments.json:
        show_json({"rows": rows, "errors": errors, "files": files, "out": str(out)})
    else:
        show(f"rows: {rows}, errors: {errors}, files: {files}, in {out}")
    print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    if errors < rows:
        return 0
    print_error("gpt2-infer", "no row could be completed: see the column error")
    return EXIT_NO_ROW
