"""Profile one call of each version of a ladder with Nsight Compute.

`ncu` replays each kernel that a version launches once per group of counters. If a version launches
several, its counts and duration are sums, its percentages are means weighted by duration, and its
registers are the maximum.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

import msgspec
import torch

from attention_kernels import BackendSpec, get_backend
from gpt2_infer.bench import selection
from gpt2_infer.bench.record import Row, Shape
from gpt2_infer.bench.study import Contender, ProfileStudy, Subject
from gpt2_infer.checkpoint import resolve_device
from gpt2_infer.errors import RequestError

METRICS = {
    "shared_load_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    # These counters are per instruction. The unit's own, without "sass", also count contention
    # between requests of different warps as bank conflicts.
    "shared_load_wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_matrix_wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum",
    "shared_store_wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "sm_efficiency_percent": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue_active_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "fma_pipe_percent": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor_pipe_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "global_load_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
    "global_store_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",
    "registers_per_thread": "launch__registers_per_thread",
    "duration_us": "gpu__time_duration.sum",
}
DURATION = "duration_us"


class Profile(Subject[Shape]):
    """Profiles one call of each version of a ladder."""

    def __init__(self, study: ProfileStudy) -> None:
        resolve_device("cuda")
        self.device, self.specs = "cuda", _specs(study.family)
        self.family, self.cells = study.family, [study.shape]
        self.facts = {"counters": METRICS}

    def contenders(self, cell: Shape) -> Iterator[Contender]:
        """Profile every version."""
        launches = _run_profiler(self.family, cell)
        ops = {spec.version.op: spec.name for spec in self.specs if spec.version}
        if unseen := ops.keys() - launches.keys():
            raise RequestError(f"ncu reported nothing for {', '.join(sorted(unseen))}")
        for op, name in ops.items():
            first, *others = (
                Row(contender=name, metric=metric, unit="", samples=[value])
                for metric, value in combined(launches[op]).items()
            )
            first.extra["kernels"] = len(launches[op])
            yield Contender(first, beside=others)


def _specs(family: str) -> list[BackendSpec]:
    """Return the backends of a ladder that run on a GPU."""
    specs = map(get_backend, selection.versions_of(family))
    return [spec for spec in specs if "cuda" in spec.device_types]


def launch_each(family: str, shape: Shape) -> None:
    """Call every version once on the GPU."""
    for spec in _specs(family):
        (dtype,) = spec.dtypes
        case = selection.case_of(shape, dtype)
        spec.attention(*case.inputs("cuda"), is_causal=shape.is_causal)
    torch.cuda.synchronize()


def _run_profiler(family: str, shape: Shape) -> dict[str, list[dict[str, float]]]:
    """Run ncu; return the metrics of each launch by op ("v01")."""
    options = ["--clock-control", "none", "--csv", "--print-units", "base"]
    options += ["--kernel-name", "regex:9attention", "--print-kernel-base", "mangled"]
    options += ["--kernel-name-base", "mangled", "--metrics", ",".join(METRICS.values())]
    launch = [sys.executable, "-m", __name__, family, msgspec.json.encode(shape).decode()]
    return parse_csv(line for line in _ncu(*options, *launch) if line.startswith('"'))


def _ncu(*words: str) -> list[str]:
    """Run ncu and return the lines that it prints; raises RequestError if it fails."""
    try:
        done = subprocess.run(["ncu", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RequestError("ncu (Nsight Compute) is not on PATH") from error
    if done.returncode or not done.stdout:
        raise RequestError(f"ncu failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout.splitlines()


def parse_csv(lines: Iterable[str]) -> dict[str, list[dict[str, float]]]:
    """Group the rows of ncu's CSV, one metric each, by op and launch."""
    by_counter = {counter: name for name, counter in METRICS.items()}
    launches: dict[str, dict[str, dict[str, float]]] = {}
    for row in csv.DictReader(lines):
        op, name = op_of(row["Kernel Name"]), by_counter.get(row["Metric Name"])
        if op and name:
            try:
                value = float(row["Metric Value"].replace(",", ""))
            except ValueError:  # ncu printed "n/a"
                print(f"{op}: {name} is {row['Metric Value']}", file=sys.stderr)
                continue
            value = value / 1e3 if name == DURATION else value
            launches.setdefault(op, {}).setdefault(row["ID"], {})[name] = value
    return {op: list(by_id.values()) for op, by_id in launches.items()}


def op_of(mangled: str) -> str | None:
    """Return the version's namespace in a mangled name: attention::v06 is 9attention3v06."""
    found = re.search(r"9attention(\d+)", mangled)
    return mangled[found.end() :][: int(found[1])] if found else None


def combined(launches: list[dict[str, float]]) -> dict[str, float]:
    """Combine the metrics of a version's launches."""
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


if __name__ == "__main__":  # ncu runs this module
    launch_each(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Shape))
