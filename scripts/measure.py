"""Run the studies behind the documents, all or some of them.

    python scripts/measure.py --prefix results/2026-11-20_h200_ [NAME ...]

Writes <prefix><name>.json. Studies whose file exists are skipped, and an interrupted study resumes
where it stopped. Most studies need a GPU, the profiles also ncu on PATH. --studies takes your own
file in the format of gpt2_infer/bench/studies.toml. A study that fails does not stop the others,
but the exit status is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from attention_kernels import AttentionError
from gpt2_infer import GPT2InferError
from gpt2_infer.bench import study
from gpt2_infer.bench.show import tables


def main() -> int:
    """Run the requested studies that have no results yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="studies to run (default: all)")
    parser.add_argument("--prefix", default="results/", help="prefix of the output files")
    parser.add_argument("--studies", type=Path, default=study.STUDIES, help="TOML file of studies")
    arguments = parser.parse_args()
    try:
        known = study.load(arguments.studies)
    except GPT2InferError as error:
        parser.error(str(error))
    if unknown := {*arguments.names} - {*known}:
        parser.error(f"no study is named {', '.join(sorted(unknown))} (known: {', '.join(known)})")
    names = arguments.names or list(known)
    outputs = {name: Path(f"{arguments.prefix}{name}.json") for name in names}
    for out in outputs.values():
        if out.exists():
            print(f"{out} already exists")
    wanted = [name for name, out in outputs.items() if not out.exists()]
    if len(wanted) != 1:
        return _run_each(wanted, ["--prefix", arguments.prefix, "--studies", arguments.studies])
    (name,) = wanted
    out = outputs[name]
    try:
        print(tables.render(str(out), study.run(known[name], name, out)))
    except (GPT2InferError, AttentionError) as error:
        parser.error(str(error))
    return 0


def _run_each(names: list[str], options: list[str]) -> int:
    """Run each study in its own process, so that one that breaks the GPU stops no other."""
    failed = []
    for name in names:
        print(f"\n=== {name}", flush=True)
        if subprocess.run([sys.executable, __file__, *options, name], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
