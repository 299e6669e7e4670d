"""The command `gpt2-infer backends`."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2_infer.cli.console import show, show_json

if TYPE_CHECKING:
    from attention_kernels import BackendSpec


@dataclass(frozen=True)
class Backend:
    """A backend, what it takes, and where it runs."""

    name: str
    family: str
    summary: str
    precisions: dict[str, str]
    """The precision class of each dtype that it takes."""
    head_dims: list[int]
    """The head dimensions that it takes; empty: any."""
    devices: list[str]
    emulated_on: list[str]
    """The devices on which an emulator runs it."""
    choices: list[str]
    """For an alias: what it picks and when."""
    prebuilt: bool
    """Whether its CUDA kernels are in the wheel, so that it needs no nvcc."""
    unavailable: dict[str, str | None]
    """Why it does not run here on "cuda" and on "cpu"; None: it does."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    rows = find()
    if arguments.json:
        show_json([dataclasses.asdict(row) for row in rows])
        return 0
    width = max(len(row.name) for row in rows)
    indent = " " * (width + 31)
    family = None
    for row in rows:
        if row.family != family:
            show(row.family if family is None else f"\n{row.family}")
            family = row.family
        here = [
            f"{device} (emulated)" if device in row.emulated_on else device
            for device, reason in row.unavailable.items()
            if reason is None
        ]
        state = f"on {' and '.join(here)}" if here else "not here"
        show(f"  {row.name:<{width}}  {state:<26} {row.summary}")
        takes = ", ".join(f"{dtype} ({kind})" for dtype, kind in row.precisions.items())
        dims = ", ".join(map(str, row.head_dims)) or "any"
        origin = "; its CUDA kernels are prebuilt" if row.prebuilt else ""
        show(f"{indent}takes {takes}; head_dim {dims}{origin}")
        for choice in row.choices:
            show(f"{indent}{choice}")
        if not here:
            reasons = dict.fromkeys(row.unavailable[device] or "" for device in row.devices)
            show(f"{indent}{'; '.join(reasons)}")
    return 0


def find() -> list[Backend]:
    """Return every backend, by family."""
    from attention_kernels import list_backends

    return [_describe(spec) for spec in list_backends()]


def _describe(spec: BackendSpec) -> Backend:
    from attention_kernels import ladder

    return Backend(
        spec.name,
        spec.family,
        spec.summary,
        precisions=dict(spec.precisions),
        head_dims=[*spec.head_dims],
        devices=[*spec.device_types],
        emulated_on=[*spec.emulated_on],
        choices=[*spec.choices],
        prebuilt=ladder.is_prebuilt(spec),
        unavailable={device: spec.unavailable_reason(device) for device in ("cuda", "cpu")},
    )
