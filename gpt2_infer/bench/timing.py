"""Interleaved rounds: samples of A B C A B C, so that a drift of the machine reaches all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from tqdm import tqdm


class Rejected(Exception):  # noqa: N818 (it is no error of this program's)
    """Raised by a run whose result is wrong: it has no figure and is not run again."""


def interleave(
    runs: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up: int = 1,
    samples: dict[str, list[float]] | None = None,
    on_sample: Callable[[str], None] | None = None,
    on_rejected: Callable[[str, Rejected], None] | None = None,
    bar: tqdm[Any] | None = None,
) -> dict[str, list[float]]:
    """Samples of each run, taken A B C A B C so that a drift of the machine reaches all alike.

    Each run returns its own figure. The first `warm_up` rounds are not kept. samples: what an
    interrupted call had taken, which is completed in place; on_sample(name) is called after each,
    and on_rejected(name, error) for a run that raises Rejected, which loses its samples. bar: a
    longer work's, whose total counts these runs; none for one of their own.
    """
    samples = {} if samples is None else samples
    for name in runs:
        samples.setdefault(name, [])
    todo = [n for index in range(rounds) for n in runs if len(samples[n]) <= index]
    warming = [name for name in runs if name in todo] * warm_up
    rejected: set[str] = set()
    with ExitStack() as stack:
        if bar is None:
            own = tqdm(total=len(warming) + len(todo), unit="run", disable=None)
            bar = stack.enter_context(own)
        for position, name in enumerate(warming + todo):
            if name in rejected:
                leave_out(bar, 1)
                continue
            bar.set_postfix_str(name)
            try:
                figure = runs[name]()
            except Rejected as error:
                if on_rejected is None:
                    raise
                rejected.add(name)
                samples[name].clear()
                on_rejected(name, error)
            else:
                if position >= len(warming):
                    samples[name].append(figure)
                    if on_sample:
                        on_sample(name)
            bar.update()
    return samples


def leave_out(bar: tqdm[Any], runs: int) -> None:
    """Take runs that will not be made out of what a progress bar waits for."""
    bar.total = (bar.total or 0) - runs
    bar.refresh()


def device_seconds(work: Callable[[], Any]) -> float:
    """How long the GPU takes for what work() launches, between two events of its stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
