"""What the profiler says of each version of the float32 ladder: bank conflicts, occupancy, issue.

    python scripts/profile_kernels.py --out results/<date>_<gpu>_profile.json

Runs itself under Nsight Compute (`ncu`, on PATH), which replays each version's kernel once per
group of counters, at B=1, H=12, N=1024, head_dim=64.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys

import torch

from attention_kernels import BackendSpec, backends
from attention_kernels.conformance import Case
from gpt2_infer import bench
from gpt2_infer.results import Results, Series, output_file

METRICS = {
    "shared_load_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue_active_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "fma_pipe_percent": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "global_load_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
    "global_store_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",
    "registers_per_thread": "launch__registers_per_thread",
    "duration_us": "gpu__time_duration.sum",
}
CASE = Case(1024, 64, num_heads=12)
FAMILY = "custom-cuda"


def main() -> None:
    """Profile, write, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=output_file, help="JSON to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        launch_each()
        return
    if arguments.out is None:
        parser.error("--out is needed")
    settings = {"batch": 1, "heads": 12, "seqlen": CASE.seqlen, "head_dim": CASE.head_dim}
    results = Results("profile", bench.provenance(), settings, [])
    launch_each()  # builds what is not built, outside the profiler
    rows = profile()
    names = {f"v{spec.name.rsplit('_', 1)[1]:0>2}": spec.name for spec in ladder()}
    if missing := names.keys() - rows.keys():
        sys.exit(f"ncu reported nothing for {', '.join(sorted(missing))}")
    for version, values in rows.items():
        for metric, value in values.items():
            labels = {"metric": metric, "counter": METRICS[metric]}
            unit = "percent" if metric.endswith("percent") else metric.rsplit("_", 1)[1]
            results.series.append(Series(names[version], labels, unit, [value]))
    results.write(arguments.out)
    for version, values in rows.items():
        print(version, " ".join(f"{name}={value:.4g}" for name, value in values.items()))


def ladder() -> list[BackendSpec]:
    """The versions of the float32 ladder."""
    return [spec for spec in backends() if spec.family == FAMILY]


def launch_each() -> None:
    """One call of every version."""
    q, k, v = CASE.inputs("cuda")
    for spec in ladder():
        spec.attention(q, k, v)
    torch.cuda.synchronize()


def profile() -> dict[str, dict[str, float]]:
    """Metrics by version ("v01"), from ncu's CSV."""
    command = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base"]
    command += ["--kernel-name", "regex:attention_kernel", "--print-kernel-base", "mangled"]
    command += ["--metrics", ",".join(METRICS.values())]
    command += [sys.executable, os.path.abspath(__file__), "--worker"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        sys.exit(f"ncu failed: {(done.stdout + done.stderr)[-2000:]}")
    by_counter = {counter: name for name, counter in METRICS.items()}
    rows: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        # Mangled, a name follows its length: attention::v06::attention_kernel is
        # 9attention3v0616attention_kernel.
        mangled = re.search(r"attention(\d)(v\d+)attention_kernel", row["Kernel Name"])
        name = by_counter.get(row["Metric Name"])
        if mangled and name:
            version = mangled[2][: int(mangled[1])]
            try:
                value = float(row["Metric Value"].replace(",", ""))
            except ValueError:
                print(f"{version}: {name} is {row['Metric Value']}", file=sys.stderr)
                continue
            rows.setdefault(version, {})[name] = value / 1e3 if name == "duration_us" else value
    return rows


if __name__ == "__main__":
    main()
