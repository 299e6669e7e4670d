"""The command `gpt2-infer backends`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gpt2_infer.cli.console import show, show_json

if TYPE_CHECKING:
    from attention_kernels import BackendSpec


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from attention_kernels import list_backends

    rows = [_describe(spec) for spec in list_backends()]
    if arguments.json:
        show_json(rows)
        return 0
    width = max(len(row["name"]) for row in rows)
    indent = " " * (width + 31)
    family = None
    for row in rows:
        if row["family"] != family:
            show(row["family"] if family is None else f"\n{row['family']}")
            family = row["family"]
        here = [
            f"{device} (emulated)" if device in row["emulated_on"] else device
            for device, reason in row["unavailable"].items()
            if reason is None
        ]
        state = f"on {' and '.join(here)}" if here else "not here"
        show(f"  {row['name']:<{width}}  {state:<26} {row['summary']}")
        takes = ", ".join(f"{dtype} ({kind})" for dtype, kind in row["precisions"].items())
        dims = ", ".join(map(str, row["head_dims"])) or "any"
        show(f"{indent}takes {takes}; head_dim {dims}")
        if not here:
            reasons = [row["unavailable"][device] for device in row["devices"]]
            show(f"{indent}{'; '.join(dict.fromkeys(reasons))}")
    return 0


def _describe(spec: BackendSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "family": spec.family,
        "summary": spec.summary,
        "precisions": dict(spec.precisions),
        "head_dims": list(spec.head_dims),
        "devices": list(spec.device_types),
        "emulated_on": list(spec.emulated_on),
        "unavailable": {device: spec.unavailable_reason(device) for device in ("cuda", "cpu")},
    }
