"""The command `gpt2-infer backends`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from tabulate import tabulate

NOT_HERE = "not here"


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
    emulated_on: list[str]
    """The devices on which an emulator runs it."""
    prebuilt: bool
    """Whether its CUDA kernels are in the wheel, so that it needs no nvcc."""
    predecessor: str | None
    """The backend that it changes, if it is a step of a ladder."""
    unavailable: dict[str, str | None]
    """Why it does not run here on each of its devices; None: it does."""

    @property
    def state(self) -> str:
        """Where it runs on this machine, in words."""
        here = [
            f"{device} (emulated)" if device in self.emulated_on else device
            for device, reason in self.unavailable.items()
            if reason is None
        ]
        return f"on {' and '.join(here)}" if here else NOT_HERE


def backends(names: Annotated[tuple[str, ...], Parameter(name="WHAT")] = (), /) -> list[Backend]:
    """List the attention backends, what each takes, and why it does not run here, if it does not.

    Nothing is built: a listed backend may still fail to compile. Raises the errors of
    ladder.resolve() for an unknown name.

    Args:
        names: families, backends or version files, *.cu, to show in detail (default: list all
            in brief)
    """
    from attention_kernels import ladder, list_backends

    specs = list_backends()
    if names:
        families = {name: [spec for spec in specs if spec.family == name] for name in names}
        named = (families[name] or [ladder.resolve(name)] for name in names)
        specs = [*dict.fromkeys(itertools.chain.from_iterable(named))]
    predecessors: dict[str, str | None] = {}
    for family in ladder.families():
        predecessors |= ladder.predecessors(ladder.versions(family))
    return [
        Backend(
            spec.name,
            spec.family,
            spec.summary,
            precisions=dict(spec.precisions),
            head_dims=[*spec.head_dims],
            emulated_on=[*spec.emulated_on],
            prebuilt=ladder.is_prebuilt(spec),
            predecessor=predecessors.get(spec.name),
            unavailable={device: spec.unavailable_reason(device) for device in spec.device_types},
        )
        for spec in specs
    ]


def text(rows: Sequence[Backend], names: Sequence[str]) -> str:
    """Return a line per backend or numbered ladder, or the details of named backends."""
    if names:
        return "\n".join(line for row in rows for line in _details(row))
    table, before = [], ""
    kinds = itertools.groupby(
        rows, key=lambda row: (row.family, re.sub(r"(?<=_)\d+$", "", row.name), row.state)
    )
    for (family, _, state), group in kinds:
        first, *more = group
        name, what = first.name, first.summary
        if more:
            last = re.search(r"\d+$", more[-1].name)
            name, what = f"{name} to {last[0] if last else ''}", f"{len(more) + 1} versions"
        table.append(("" if family == before else family, name, state, what))
        before = family
    lines = tabulate(table, tablefmt="plain", disable_numparse=True)
    return f"{lines}\n\n`gpt2-infer backends WHAT` has the details of a family or a backend."


def _details(row: Backend) -> Iterator[str]:
    takes = ", ".join(f"{dtype} ({kind})" for dtype, kind in row.precisions.items())
    dims = ", ".join(map(str, row.head_dims)) or "any"
    start = f"; changes {row.predecessor}" if row.predecessor else ""
    origin = "; its CUDA kernels are prebuilt" if row.prebuilt else ""
    yield f"{row.name} ({row.family}), {row.state}: {row.summary}"
    yield f"  takes {takes}; head_dim {dims}{start}{origin}"
    if row.state == NOT_HERE:
        yield f"  {'; '.join(dict.fromkeys(reason or '' for reason in row.unavailable.values()))}"
