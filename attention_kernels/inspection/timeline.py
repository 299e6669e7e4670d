"""When the warps of a kernel arrive at its barriers and leave them, on a GPU and as predicted.

csrc/recorders/stamps.cuh, which a build includes first, stamps the waits of a launch's first
blocks. The prediction is of the same machine code, and is read off where it reads the clock. Both
are of a call whose code is in the caches and whose inputs are in memory. Cycles are counted from a
block's first stamp.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from attention_kernels.errors import KernelError, UnsupportedError
from attention_kernels.inspection.sass import explain, predict
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.ladder import build, compilers
from attention_kernels.ladder.compilers import TARGETS
from attention_kernels.ladder.header import VersionHeader, csrc_of
from attention_kernels.ladder.op import fault, load_op

# Those of stamps.cuh.
_SHAPE = (4, 32, 1 << 16)
_STAMP = np.dtype([(name, np.uint32) for name in ("arrived", "place", "left", "grid")])
_ROUNDS = 11  # after one warm-up round
_LOADED_BYTES = 2**28  # more than the L2 cache of any GPU
_NAMED = re.compile(r'\bSTAMP\(\s*"([^"]*)"')
Call: TypeAlias = tuple[int, int, int, int]
"""Batch, seqlen, num_heads and is_causal."""


class Stamp(NamedTuple):
    """A wait of a warp, or its passing a name; times are in cycles."""

    place: str
    """The line, or its name in the source."""
    arrived: float
    left: float
    """The same as `arrived` at a name."""


@dataclass(frozen=True)
class Warp:
    """What a warp did in a launch."""

    launch: int
    """Number of the launch among those that stamp something."""
    block: int
    warp: int
    stamps: list[Stamp] = field(default_factory=list)


@dataclass(frozen=True)
class Phase:
    """What warps do from one place to the next, or a wait; cycles are medians."""

    begin: str
    end: str | None
    """The next place; None for a wait."""
    source: str
    """The line where it begins; empty if that is in a header or has a name."""
    count: int
    """How often the warps of a block do it, on the GPU if there is one."""
    measured: float | None
    predicted: float | None
    ratio: float | None
    """The predicted cycles over the measured ones."""


@dataclass(frozen=True)
class Timeline:
    """The warps of a call by time."""

    version: str
    call: Call
    head_dim: int
    gpu: str
    """The GPU of the prediction."""
    phases: list[Phase]
    predicted: list[Warp]
    """The warps of each launch's first block."""
    measured: list[Warp]
    """The warps of each launch's first blocks; empty without a GPU."""
    measured_on: str | None = None
    plain_us: float | None = None
    """Median time of a call without stamps."""
    stamped_us: float | None = None
    overhead: float | None = None
    """The share by which stamps lengthen a call."""


def timeline(version: VersionHeader, gpu: GpuModel, call: Call, head_dim: int) -> Timeline:
    """Predict when the warps of a version wait, in its first dtype, and measure it on a GPU here.

    Raises UnsupportedError for a version that is not an attention kernel or stamps nothing, the
    errors of predict() and, on a GPU, those of a call.
    """
    version = version.builds()[0]
    if version.role != "attention":
        raise UnsupportedError(version.path.name, ["it is not an attention kernel"])
    predicted = predicted_warps(version, gpu, call, head_dim)
    if not predicted:
        reason = "its first block executes no __syncthreads(), no wait of ptx.cuh and no STAMP"
        raise UnsupportedError(version.path.name, [reason])
    measured: list[Warp] = []
    times: tuple[Any, ...] = ()
    if torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        if not version.compiles_for("{}{}".format(*capability)):
            raise UnsupportedError(version.path.name, [f"its instructions are not those of {name}"])
        measured, plain, stamped = measure(version, call, head_dim)
        times = name, plain, stamped, stamped / plain - 1
    phases = _phases(version, measured, predicted)
    return Timeline(version.label, call, head_dim, gpu.name, phases, predicted, measured, *times)


def stamping(version: VersionHeader, device_type: str = "cuda") -> VersionHeader:
    """Return a version with flags that make it stamp its waits."""
    path = csrc_of(version) / "recorders" / "stamps.cuh"
    include = ["-include", str(path)] if device_type == "cuda" else [f"-Xcompiler=-include,{path}"]
    # The cache knows a build by its flags, not by what they include.
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return replace(version, flags=(*version.flags, *include, f"-DATTENTION_STAMPS={digest}"))


# ---- Prediction ----------------------------------------------------------------------------------


def predicted_warps(version: VersionHeader, gpu: GpuModel, call: Call, head_dim: int) -> list[Warp]:
    """Return the predicted warps of the first block of each launch that stamps something.

    Raises the errors of predict().
    """
    found: list[Warp] = []
    with tempfile.TemporaryDirectory() as folder:
        program, launches, min_bytes = predict.read(
            stamping(version), gpu, call, head_dim, Path(folder), lines=True
        )
        table = explain.line_table(program.cubin)
    by_symbol = {name: [*map(_place, frames)] for name, frames in table.items()}
    stamping_some = [launch for launch in launches if any(by_symbol[launch.symbol])]
    for launch in dict.fromkeys(stamping_some):
        places = by_symbol[launch.symbol]
        stamps: defaultdict[int, list[list[float]]] = defaultdict(list)
        begun: dict[tuple[int, int], float] = {}
        for warp, index, cycle in predict.marks(program, launch, min_bytes):
            where = warp, places[index]
            if where in begun:
                stamps[warp].append([begun.pop(where), cycle, places[index]])
            elif places[index]:  # not the kernel's own use of the clock
                begun[where] = cycle
        found += _warps(version, stamping_some.index(launch), 0, stamps)
    return found


def _place(frames: Sequence[tuple[str, int]]) -> int:
    """Return an instruction's place in a stamp, given its lines; 0 if it belongs to none."""
    if not frames or Path(frames[-1][0]).name != "stamps.cuh":
        return 0
    file, line = next(one for one in reversed(frames) if Path(one[0]).name != "stamps.cuh")
    return 2 * line + (not file.endswith(".cu"))


# ---- Measurement ---------------------------------------------------------------------------------


def measure(
    version: VersionHeader, call: Call, head_dim: int, device_type: str = "cuda"
) -> tuple[list[Warp], float, float]:
    """Return the warps of a call, and the median microseconds without and with stamps.

    Before each call, loads of other data replace all that L2 has, and then a call on other tensors
    executes the same code: the code is in the caches, the inputs are not. Stores would have to be
    written back during the call. Raises BuildError, and the errors of a call. The emulator has no
    clock: on "cpu" a stamp's times only tell the order, and nothing is timed.
    """
    arch = compilers.architectures() if device_type == "cuda" else ""
    other = stamping(replace(version, op=f"{version.op}_stamps"), device_type)
    plain, stamped = (load_op(one, device_type, version.label, arch) for one in (version, other))
    library = ctypes.CDLL(str(build.build(other, TARGETS[device_type], arch)))

    def take() -> np.ndarray[Any, Any]:
        found = np.zeros(_SHAPE, _STAMP)
        to, size = ctypes.c_void_p(found.ctypes.data), ctypes.c_size_t(found.nbytes)
        if error := library.attention_take_stamps(to, size):
            raise KernelError(version.label, f"has stamps that cannot be read: CUDA error {error}")
        return found

    *sizes, is_causal = call
    dtype, how = getattr(torch, version.dtype), (head_dim**-0.5, bool(is_causal))
    inputs = [torch.randn(*sizes, head_dim, device=device_type).to(dtype) for _ in range(6)]
    calls = (*inputs[:3], *how), (*inputs[3:], *how)
    try:
        times = _times([plain, stamped], calls) if device_type == "cuda" else [0.0, 0.0]
        take()
        for arguments in calls:
            stamped(*arguments)
            if device_type == "cuda":
                torch.cuda.synchronize()
    except RuntimeError as error:
        raise fault(version.label, error) from error
    return [*_read(version, take())], times[0], times[1]


def _times(ops: Sequence[Any], calls: Sequence[Sequence[Any]]) -> list[float]:
    """Return each op's median microseconds on the second arguments, after loads of more than L2
    holds and a call on the first; then load the same once more.
    """
    others = torch.zeros(_LOADED_BYTES // 8, dtype=torch.int64, device="cuda")
    times: list[list[float]] = [[] for _ in ops]
    for _ in range(1 + _ROUNDS):
        for op, mine in zip(ops, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            others.sum()
            op(*calls[0])
            begin.record()
            op(*calls[1])
            end.record()
            end.synchronize()
            mine.append(begin.elapsed_time(end) * 1e3)
    others.sum()
    return [statistics.median(mine[1:]) for mine in times]


def _read(version: VersionHeader, found: np.ndarray[Any, Any]) -> Iterator[Warp]:
    """Yield the warps of the second of two calls whose stamps were taken, the first to warm up."""
    grids = np.unique(found["grid"][is_used := found["place"] > 0])
    # Of the first call's launches, some may have no stamps left: the second one's lie there.
    for number, grid in enumerate(grids[len(grids) // 2 :]):
        used = is_used & (found["grid"] == grid)
        for block in np.flatnonzero(used.any((1, 2))).tolist():
            mask, mine = used[block], found[block][used[block]]
            # Clocks have 32 bits, and start again at 0.
            times = np.stack([mine["arrived"], mine["left"]], 1) - mine["arrived"][0]
            times = times.view(np.int32).astype(int)
            stamps: defaultdict[int, list[list[float]]] = defaultdict(list)
            for warp, at, place in zip(np.nonzero(mask)[0], times, mine["place"], strict=True):
                stamps[int(warp)].append([*at.tolist(), int(place)])
            yield from _warps(version, number, block, stamps)


# ---- Both ----------------------------------------------------------------------------------------


def _warps(
    version: VersionHeader, launch: int, block: int, stamps: dict[int, list[list[float]]]
) -> Iterator[Warp]:
    """Yield the warps of a block, given when each arrives, when it leaves, and the place."""
    lines = _lines(version)
    zero = min((first for mine in stamps.values() for first, *_ in mine), default=0.0)
    for warp, mine in sorted(stamps.items()):
        found = Warp(launch, block, warp)
        for arrived, left, place in sorted(mine):
            line, is_header = divmod(int(place), 2)
            name = None if is_header else _NAMED.search(lines.get(f"{line}", ""))
            where = f"header:{line}" if is_header else name[1] if name else f"{line}"
            times = [round(t - zero, 1) for t in (arrived, arrived if name else left)]
            found.stamps.append(Stamp(where, *times))
        yield found


def _lines(version: VersionHeader) -> dict[str, str]:
    return {f"{number}": line.strip() for number, line in enumerate(version.source.split("\n"), 1)}


def _phases(
    version: VersionHeader, measured: Sequence[Warp], predicted: Sequence[Warp]
) -> list[Phase]:
    """Return the phases in the order in which warps begin them."""
    lines, found = _lines(version), []
    real, model = _spans(measured), _spans(predicted)
    blocks = len({one.block for one in measured})
    for key in dict.fromkeys([*model, *real]):
        count = round(len(real.get(key, ())) / blocks) if measured else len(model[key])
        cycles, expected = (
            round(statistics.median(spans[key]), 1) if key in spans else None
            for spans in (real, model)
        )
        ratio = round(expected / cycles, 3) if cycles and expected is not None else None
        found.append(Phase(*key, lines.get(key[0], ""), count, cycles, expected, ratio))
    return found


def _spans(warps: Iterable[Warp]) -> dict[tuple[str, str | None], list[float]]:
    """Return the cycles of the waits, and from each stamp to the next, by where they are."""
    found: defaultdict[tuple[str, str | None], list[float]] = defaultdict(list)
    for warp in warps:
        for one, other in itertools.zip_longest(warp.stamps, warp.stamps[1:]):
            if one.left > one.arrived:
                found[one.place, None].append(one.left - one.arrived)
            if other:
                found[one.place, other.place].append(other.arrived - one.left)
    return found
