"""Run the studies behind the documents, one of them or all.

    python scripts/measure.py --list
    python scripts/measure.py --prefix results/2026-11-20_h200_ [NAME ...]

Writes <prefix><name>.json; what is there already is not measured again. Most studies need a GPU,
the profiles also ncu on PATH. A study that fails does not stop the others; the exit status tells.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from attention_kernels import AttentionError
from gpt2_infer import GPT2InferError
from gpt2_infer.bench import studies
from gpt2_infer.cli import Parser


def main() -> int:
    """Run what is wanted and not there."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--prefix", default="results/", help="of the files written")
    parser.add_argument("--list", action="store_true", help="print the studies and run none")
    arguments = parser.parse_args()
    known = studies.load()
    if unknown := {*arguments.names} - {*known}:
        parser.error(
            f"no study is named {', '.join(sorted(unknown))}: there are {', '.join(known)}"
        )
    names = arguments.names or list(known)
    if arguments.list:
        for name in names:
            print(name, msgspec.json.encode(known[name]).decode())
        return 0
    wanted = []
    for name in names:
        if Path(f"{arguments.prefix}{name}.json").exists():
            print(f"{arguments.prefix}{name}.json is there already")
        else:
            wanted.append(name)
    if len(wanted) == 1:
        (name,) = wanted
        try:
            print(studies.run(known[name], name, Path(f"{arguments.prefix}{name}.json")))
        except (GPT2InferError, AttentionError) as error:
            parser.error(str(error))
        return 0
    return _run_each(wanted, arguments.prefix)


def _run_each(names: list[str], prefix: str) -> int:
    """Run each study in a process of its own: one that breaks the GPU stops no other."""
    failed = []
    for name in names:
        print(f"\n=== {name}", flush=True)
        started = time.monotonic()
        child = subprocess.Popen([sys.executable, __file__, "--prefix", prefix, name])
        try:
            status = child.wait()
        except KeyboardInterrupt:  # the child gets it, too
            child.wait()
            print(f"interrupted at {name}: the same command goes on from there", file=sys.stderr)
            return 130
        print(f"=== {name}: {time.monotonic() - started:.0f} s", flush=True)
        if status:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
