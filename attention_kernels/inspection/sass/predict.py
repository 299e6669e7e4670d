"""Predict how long a kernel takes on a GPU, and what limits it, without running it there.

The machine code of some blocks is decoded and executed, one multiprocessor with its blocks is
simulated, and the blocks of the grid are distributed to all multiprocessors as these become free. A
version file says itself what it launches; any other kernel needs its launch. docs/prediction.md
says what is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection import resources
from attention_kernels.inspection.resources import WARP, Launch, Triple
from attention_kernels.inspection.sass import decode
from attention_kernels.inspection.sass.decode import Program
from attention_kernels.inspection.sass.execute import instructions
from attention_kernels.inspection.sass.execute.instructions import run_blocks
from attention_kernels.inspection.sass.execute.work import Line, counts_of, line_of, work_of
from attention_kernels.inspection.sass.explain import Stalls, explain
from attention_kernels.inspection.sass.gpus import SCHEDULERS, SECTOR, GpuModel
from attention_kernels.inspection.sass.time import MARKED, StallCycles, multiprocessors, time_grid
from attention_kernels.ladder.header import CSRC, VersionHeader

LOAD_STORE_UNIT = "load-store unit"
"""The unit that issues one wavefront a cycle: of shared memory, of an L1 line or of a shuffle."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one call of a version, or for one launch. Times are in microseconds."""

    version: str
    gpu: str
    seqlen: int
    time_us: float
    needs_us: dict[str, float]
    """Time that each resource would need if it were always busy on all multiprocessors with blocks.
    """
    waiting_us: float
    """Time beyond the longest need: warps wait for results, for barriers, for each other."""
    uneven_us: float
    """Time in which some multiprocessors idle: the last wave, and blocks of unequal length."""
    launch_us: float
    launches: int
    instructions: int
    """Instructions executed by all warps."""
    load_wavefronts: int
    store_wavefronts: int
    assumed: tuple[str, ...] = ()
    """Assumptions made for lack of data, such as the meaning of an instruction."""
    stalls: Stalls | None = None
    """Why warps stall, by source line; None unless requested."""

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the time by name: each resource, then the overheads."""
        waiting = {"latency": self.waiting_us, "uneven blocks": self.uneven_us}
        return self.needs_us | waiting | {"launch": self.launch_us}

    @property
    def bound(self) -> str:
        """The name of the largest part of the time."""
        parts = self.parts
        largest = max(parts, key=lambda name: parts[name])
        if largest == LOAD_STORE_UNIT:  # name the part that causes most of its work
            half = parts[LOAD_STORE_UNIT] / 2
            largest = next((x for x in ("shared memory", "L1") if parts[x] > half), largest)
        return largest


def predict(
    version: VersionHeader,
    gpu: GpuModel,
    *,
    seqlen: int = 1024,
    batch: int = 1,
    num_heads: int = 12,
    head_dim: int = 64,
    is_causal: bool = True,
    lines: bool = False,
) -> Prediction:
    """Predict one call of a version in its first dtype.

    seqlen: for a decode kernel, the length of the cache, which all rows fill. lines: also explain
    the stalls by source line. Raises UnsupportedError for a version or a shape that cannot be
    predicted, BuildError if a compiler is missing or the version does not compile, and SassError
    for an unknown branch or operand.
    """
    call = batch, seqlen, num_heads, int(is_causal)
    with tempfile.TemporaryDirectory() as folder:
        program, launches, size = read(version, gpu, call, head_dim, Path(folder), lines=lines)
        found = _predict_call(program, Counter(launches), size, lines=lines)
    return dataclasses.replace(found, version=version.label, seqlen=seqlen)


def read(
    version: VersionHeader,
    gpu: GpuModel,
    call: tuple[int, int, int, int],
    head_dim: int,
    folder: Path,
    *,
    lines: bool,
) -> tuple[Program, list[Launch], float]:
    """Return a version's machine code, what a call launches, and the bytes per launch.

    call: batch, seqlen, num_heads and is_causal. folder: gets the cubin. lines: it has a line
    table. Those bytes have to pass between the GPU and its memory. Raises the errors of predict().
    """
    batch, seqlen, num_heads, _ = call
    shape = {"batch": batch, "num_heads": num_heads, "head_dim": head_dim}
    reasons = resources.case_faults(version, seqlens=[seqlen], **shape, may_decode=True)
    if version.needs and not version.compiles_for(gpu.arch):
        needed = "".join(map(str, version.needs)) + "a" * version.needs_exactly
        reasons.append(f"it needs sm_{needed}, and {gpu.name} is sm_{gpu.arch}")
    if reasons:
        raise UnsupportedError(version.path.name, reasons)
    version = version.builds()[0]
    launches = resources.record(version, [head_dim], case=call, multiprocessors=gpu.multiprocessors)
    item = {"float32": 4, "float64": 8}.get(version.dtype, 2)
    rows = 2 * seqlen + 2 if version.role == "decode" else 4 * seqlen
    min_bytes = batch * rows * num_heads * head_dim * item / len(launches)
    cubin = folder / "kernel.cubin"
    # The line table leaves the code as it is: test_explain.py compares the predictions.
    _, code = resources.compile_version(version, gpu.arch, *["-lineinfo"] * lines)
    cubin.write_bytes(code)
    ours = CSRC in version.path.parents
    program = decode.read_cubin(cubin, version.listing, gpu, heads_first=ours)
    return program, launches, min_bytes


def predict_kernel(
    path: Path,
    gpu: GpuModel,
    *,
    kernel: str,
    grid: Triple,
    block: Triple,
    shared: int = 0,
    cluster: Triple = (1, 1, 1),
    args: Sequence[str] = (),
    lines: bool = False,
) -> Prediction:
    """Predict one launch of a kernel in a file.

    kernel: its mangled name, or a part of it that no other kernel has. shared: bytes of dynamic
    shared memory. cluster: its blocks along each axis. args: one text per parameter; see
    decode.pack(). lines: also explain the stalls by source line. Raises the errors of
    decode.read_kernel(), UnsupportedError, and SassError.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, symbol, given = decode.read_kernel(path, gpu, kernel, args, Path(folder))
        packed, size, words = given
        launch = Launch(0, symbol, symbol, grid, block, shared, packed, (*words.items(),), cluster)
        return _predict_call(program, {launch: 1}, size, lines=lines)


def _predict_call(
    program: Program, counted: Mapping[Launch, int], min_bytes: float, *, lines: bool
) -> Prediction:
    """Predict launches, given how often each occurs; lines: explain their stalls."""
    each, explained = [], list[tuple[Launch, float, StallCycles]]()
    before, gpu, block = list[Launch](), program.gpu, 0.0
    for launch, count in counted.items():
        stalls: StallCycles = defaultdict(float)
        recorded, released = stalls if lines else None, _released(program, [*before, launch], block)
        one, block = _predict_launch(program, launch, min_bytes, recorded, *(released or ()))
        if released is not None:
            time_us = one.time_us - gpu.launch_us + gpu.early_launch_us
            one = dataclasses.replace(one, time_us=time_us, launch_us=gpu.early_launch_us)
        before = [launch]
        each.append((count, one))
        explained.append((launch, count * (one.time_us - one.launch_us), stalls))
    found = _sum(each)
    stalled = explain(program, explained, found.time_us) if lines else None
    return dataclasses.replace(found, stalls=stalled)


def _released(program: Program, both: Sequence[Launch], block: float) -> list[float] | None:
    """Return how many cycles before the end of the first launch is known the second's blocks start.

    One for each multiprocessor where a block fits beside those of the first, which are spread
    evenly and take `block` cycles; None without a second one that starts early, and waits.
    """
    bases = [{at.base for at in program.code[one.symbol]} for one in both]
    if len(both) < 2 or "PREEXIT" not in bases[0] or "ACQBULK" not in bases[1]:
        return None
    gpu, count = program.gpu, program.gpu.multiprocessors
    theirs, mine = (resources.shares(gpu.arch, *_block(program, one)) for one in both)
    each, more = divmod(min(math.prod(both[0].grid), int(1 / max(theirs.values())) * count), count)
    fits = [all(mine[x] + n * theirs[x] <= 1 for x in mine) for n in (each, each + 1)]
    later = (gpu.early_start_us - gpu.early_launch_us) * gpu.clock_ghz * 1e3
    return [block - later] * (fits[0] * (count - more) + fits[1] * more)


def _block(program: Program, launch: Launch) -> tuple[int, int, int]:
    """Return a block's threads, registers per thread, and bytes of shared memory."""
    registers, static = program.needs[launch.symbol]
    return launch.threads, registers, static + launch.dynamic_smem


def _predict_launch(
    program: Program, launch: Launch, min_bytes: float, stalls: StallCycles | None, *released: float
) -> tuple[Prediction, float]:
    """Predict one launch; also return the cycles of a block.

    min_bytes: bytes that have to pass between the GPU and its memory; 0 if unknown. stalls and
    released: as for time_grid(). Raises UnsupportedError if no block fits on the GPU.
    """
    code, line = program.code[launch.symbol], line_of(program, launch)
    # Requests of several multiprocessors for the same sectors at the same time become one.
    rate = program.gpu.l2_bytes_per_cycle / line.distinct
    gpu = dataclasses.replace(program.gpu, l2_bytes_per_cycle=rate)
    total = line.totals()
    assumed = instructions.assumed([code[at] for at in sorted(line.executed)])
    assumed += ["a block that waits for others finds them as far as itself"] * line.waits
    assumed += ["all data is in L2: no argument has a buffer's size"] * (not min_bytes)
    place = _place(program, launch, line, min_bytes)
    end, equal, block = time_grid(gpu, code, line, *place, stalls, released)
    products = total["products"] / gpu.warpgroup_flop / gpu.multiprocessors
    busy = dataclasses.replace(gpu, multiprocessors=max(1, min(gpu.multiprocessors, line.busy)))
    cycles = max(1.0, end, *_needs(busy, total, 0.0, 1.0).values())
    hertz = gpu.clock_at(products / cycles, total["tensor"] > 0) * 1e3  # cycles per microsecond
    needs = _needs(busy, total, min_bytes, hertz)
    busiest = max(needs.values())
    finished = max(end / hertz, busiest)
    balanced = min(max(equal / hertz, busiest), finished)
    times = finished + gpu.launch_us, needs, balanced - busiest, finished - balanced, gpu.launch_us
    counts = round(total["issue"]), round(total["loads"]), round(total["stores"])
    return Prediction(program.path.stem, gpu.name, 0, *times, 1, *counts, tuple(assumed)), block


def marks(program: Program, launch: Launch, min_bytes: float) -> list[tuple[int, int, float]]:
    """Return when block 0 reads the clock, on a multiprocessor with the blocks that start with it.

    Each is a warp, the index of the instruction, and the cycle. A long block is not followed to its
    end. The arguments and errors are those of _predict_launch().
    """
    line, gpu = line_of(program, launch), program.gpu
    if not line.works:  # as in time_grid()
        return []
    place = _place(program, launch, line, min_bytes)
    fits, _, full = multiprocessors(gpu, program.code[launch.symbol], line, *place)
    order = itertools.product(*map(range, reversed(launch.grid)))  # one for each multiprocessor
    some = itertools.islice(order, 0, fits * gpu.multiprocessors, gpu.multiprocessors)
    blocks = run_blocks(program, launch, [(x, y, z) for z, y, x in some])
    works = [work_of(blocks, *numbered) for numbered in enumerate(counts_of(blocks))]
    full.run([dataclasses.replace(work, parts=[]) for work in works], MARKED)
    return [mark for mark in full.marks if mark[0] < blocks.warps]


def _place(program: Program, launch: Launch, line: Line, min_bytes: float) -> tuple[int, float]:
    """Return how many blocks fit on a multiprocessor, and the share of inputs from memory.

    Raises UnsupportedError if none fits.
    """
    room, limit = resources.resident_blocks(program.gpu.arch, *_block(program, launch))
    if room == 0:
        reason = f"a block does not fit on a multiprocessor of {program.gpu.name}: too much {limit}"
        raise UnsupportedError(program.path.name, [reason])
    return room, min(1.0, min_bytes / max(1.0, sum(line.each("inputs")) * SECTOR))


def _needs(gpu: GpuModel, total: dict[str, float], size: float, hertz: float) -> dict[str, float]:
    """Return the microseconds that each resource needs for a grid, given its counts.

    gpu: with the multiprocessors that have blocks. size: bytes that pass through memory.
    """
    rate = gpu.multiprocessors * hertz
    wavefronts = sum(total[kind] for kind in ("loads", "stores", "copies"))
    integer = max(total["integer"], total["multiply"])  # of two pipes
    products = total["products"] / gpu.warpgroup_flop
    tensor = total["tensor"] * gpu.tensor_cycles / SCHEDULERS + products
    return {
        "issue slots": total["issue"] / SCHEDULERS / rate,
        "float32 arithmetic": total["fma"] * WARP / gpu.fp32_lanes / rate,
        "integer arithmetic": integer * WARP / gpu.integer_lanes / rate,
        "special functions": total["special"] * WARP / gpu.special_lanes / rate,
        "tensor cores": tensor / rate,
        LOAD_STORE_UNIT: (wavefronts + total["lines"] + total["shuffle"]) / rate,
        "shared memory": (wavefronts + total["tiles"] + total["operands"]) / rate,
        "L1": total["lines"] / rate,
        "L2": total["misses"] * SECTOR / gpu.l2_bytes_per_cycle / hertz,
        "memory": size / gpu.memory_gb_s / 1e3,
    }


def _sum(each: Sequence[tuple[int, Prediction]]) -> Prediction:
    """Add up the predictions of a call's launches, given how often each occurs."""
    first = each[0][1]
    needs = {x: sum(count * one.needs_us[x] for count, one in each) for x in first.needs_us}
    added: dict[str, Any] = {
        field.name: sum(count * getattr(one, field.name) for count, one in each)
        for field in dataclasses.fields(Prediction)
        if field.name not in ("version", "gpu", "seqlen", "needs_us", "assumed", "stalls")
    }
    assumed = tuple(dict.fromkeys(itertools.chain(*(one.assumed for _, one in each))))
    return dataclasses.replace(first, needs_us=needs, assumed=assumed, **added)
