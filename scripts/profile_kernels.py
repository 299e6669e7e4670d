"""What the profiler says of each version of a ladder: bank conflicts, occupancy, issue.

    python scripts/profile_kernels.py --out results/<date>_<gpu>_profile.json

Runs itself under Nsight Compute (`ncu`, on PATH), which replays each kernel that a version launches
once per group of counters. Where a version launches several, its counts and its duration are their
sums, its percentages their means weighted by duration, its registers the most.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterable

import torch

from attention_kernels import AttentionError, BackendSpec, ladder, list_backends
from attention_kernels.conformance import Case
from gpt2_infer import GPT2InferError
from gpt2_infer.bench import environment, tables
from gpt2_infer.bench.results import OUT_HELP, Results, Series, at_least, output_file, task_name
from gpt2_infer.checkpoint import resolve_device
from gpt2_infer.cli import Parser

METRICS = {
    "shared_load_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "sm_efficiency_percent": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue_active_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "fma_pipe_percent": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor_pipe_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "global_load_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
    # What cp.async loads is counted apart.
    "global_async_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum",
    "global_store_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",
    "registers_per_thread": "launch__registers_per_thread",
    "duration_us": "gpu__time_duration.sum",
}
DURATION = "duration_us"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_file, required=True, help=OUT_HELP)
    parser.add_argument(
        "--name", type=task_name, default="profile", help="the task's name in the results"
    )
    parser.add_argument("--family", default="custom-cuda", help="default: %(default)s")
    parser.add_argument("--seqlen", type=at_least(1), default=1024)
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--heads", type=at_least(1), default=12)
    parser.add_argument("--head-dim", type=at_least(1), default=64)
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Profile, write, print."""
    arguments = parse()
    if arguments.worker:
        launch_each(arguments)
        return
    specs = specs_of(arguments.family)
    shape = ("batch", "heads", "seqlen", "head_dim", "full")
    settings = {name: getattr(arguments, name) for name in shape} | {"measures": "profile"}
    counters, settings["not_on_this_gpu"] = known_counters()
    results = Results(arguments.name, environment.provenance(), settings, [])
    try:
        launch_each(arguments)  # builds what is not built, outside the profiler
    except (GPT2InferError, AttentionError) as error:
        sys.exit(str(error))
    rows = profile(counters)
    ops = {ladder.versions()[spec.name].op: spec.name for spec in specs}
    if missing := ops.keys() - rows.keys():
        sys.exit(f"ncu reported nothing for {', '.join(sorted(missing))}")
    for op, name in ops.items():
        for metric, value in combined(rows[op]).items():
            labels = {"metric": metric, "counter": METRICS[metric], "kernels": len(rows[op])}
            unit = "percent" if metric.endswith("percent") else metric.rsplit("_", 1)[1]
            results.series.append(Series(name, labels, unit, [value]))
    results.write(arguments.out)
    print(tables.render(arguments.out, results))


def specs_of(family: str) -> list[BackendSpec]:
    """The backends of a ladder that run on a GPU."""
    if family not in ladder.families():
        sys.exit(f"no ladder is of the family {family}: there are {', '.join(ladder.families())}")
    return [
        spec for spec in list_backends() if spec.family == family and "cuda" in spec.device_types
    ]


def launch_each(arguments: argparse.Namespace) -> None:
    """One call of every version."""
    resolve_device("cuda")
    specs = specs_of(arguments.family)
    ladder.build_all("cuda", specs)
    for spec in specs:
        (dtype,) = spec.dtypes
        case = Case(
            arguments.seqlen,
            arguments.head_dim,
            batch=arguments.batch,
            num_heads=arguments.heads,
            dtype=getattr(torch, dtype),
        )
        spec.attention(*case.inputs("cuda"), is_causal=not arguments.full)
    torch.cuda.synchronize()


def known_counters() -> tuple[list[str], list[str]]:
    """The counters of METRICS that ncu has for this GPU, and the metrics that it has not.

    Asking it for one that it does not know would end the profile.
    """
    query = ["ncu", "--query-metrics"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit("ncu, of Nsight Compute, is not on PATH")
    listed = {line.split(maxsplit=1)[0] for line in done.stdout.splitlines() if line.strip()}
    if done.returncode or not listed:
        sys.exit(f"ncu failed: {(done.stdout + done.stderr)[-2000:]}")
    known = {
        name: counter
        for name, counter in METRICS.items()
        if counter.startswith("launch__") or counter.split(".", maxsplit=1)[0] in listed
    }
    if missing := [name for name in METRICS if name not in known]:
        print(f"not on this GPU: {', '.join(missing)}", file=sys.stderr)
    return list(known.values()), missing


def profile(counters: list[str]) -> dict[str, list[dict[str, float]]]:
    """Metrics of each launch by op ("v01"), from ncu's CSV."""
    command = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base"]
    command += ["--kernel-name", "regex:9attention", "--print-kernel-base", "mangled"]
    command += ["--kernel-name-base", "mangled", "--metrics", ",".join(counters)]
    command += [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--worker"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        sys.exit(f"ncu failed: {(done.stdout + done.stderr)[-2000:]}")
    return parse_csv(lines)


def parse_csv(lines: Iterable[str]) -> dict[str, list[dict[str, float]]]:
    """The rows of ncu's CSV, a metric each, gathered by op and launch."""
    by_counter = {counter: name for name, counter in METRICS.items()}
    launches: dict[str, dict[str, dict[str, float]]] = {}
    for row in csv.DictReader(lines):
        op, name = op_of(row["Kernel Name"]), by_counter.get(row["Metric Name"])
        if op and name:
            try:
                value = float(row["Metric Value"].replace(",", ""))
            except ValueError:  # "n/a"
                print(f"{op}: {name} is {row['Metric Value']}", file=sys.stderr)
                continue
            value = value / 1e3 if name == DURATION else value
            launches.setdefault(op, {}).setdefault(row["ID"], {})[name] = value
    return {op: list(by_id.values()) for op, by_id in launches.items()}


def op_of(mangled: str) -> str | None:
    """The version's namespace in a mangled name: attention::v06 is 9attention3v06."""
    found = re.search(r"9attention(\d+)", mangled)
    return mangled[found.end() :][: int(found[1])] if found else None


def combined(launches: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a version from those of its launches."""
    total = sum(launch[DURATION] for launch in launches)
    found = {}
    for metric in launches[0]:
        values = [launch[metric] for launch in launches]
        if metric.endswith("percent"):
            weighted = (launch[metric] * launch[DURATION] for launch in launches)
            found[metric] = sum(weighted) / total
        else:
            found[metric] = max(values) if metric == "registers_per_thread" else sum(values)
    return found


if __name__ == "__main__":
    main()
