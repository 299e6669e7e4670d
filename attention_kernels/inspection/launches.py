"""Record which kernels a version launches, with grids, blocks and parameters.

csrc/recorders/launches.cpp calls the version's launch(), compiled for the host. No GPU is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from attention_kernels.errors import UnsupportedError
from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.header import VersionHeader

# The longest sequence that csrc/binding.cpp accepts.
MAX_SEQLEN = 65535 * 16
_INT_MAX = 2**31 - 1
WARP = 32
SEQLENS = 6
"""The terabyte at which csrc/recorders/launches.cpp puts the lengths of a decode kernel's rows."""
Triple: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    head_dim: int
    kernel: str
    """Name with template arguments: "attention_kernel<64>"."""
    symbol: str
    """Mangled name."""
    grid: Triple
    block: Triple
    dynamic_smem: int
    """Bytes of dynamic shared memory."""
    parameters: bytes
    """The kernel's parameters as nvcc lays them out."""
    words: tuple[tuple[int, int], ...] = ()
    """What the kernel loads where data decide on the work: see Blocks.words."""

    @property
    def threads(self) -> int:
        """Threads per block."""
        return math.prod(self.block)


def case_faults(
    version: VersionHeader,
    *,
    seqlens: Iterable[int],
    head_dim: int,
    batch: int,
    num_heads: int,
    may_decode: bool = False,
) -> list[str]:
    """Return every reason why a version cannot be launched as an attention kernel of a shape.

    may_decode: it may also be attention of one query per row; seqlens are those of the cache.
    """
    faults = []
    if version.is_host:
        faults.append("it is host code, not a GPU kernel")
    if version.role != "attention" and not (may_decode and version.role == "decode"):
        faults.append("it is not an attention kernel")
    if head_dim not in version.head_dims:
        faults.append(f"head_dim {head_dim} (it takes {', '.join(map(str, version.head_dims))})")
    sizes = [("batch", batch), ("num_heads", num_heads), *(("seqlen", n) for n in seqlens)]
    faults += [f"{name} {size} (1 or more)" for name, size in sizes if size < 1]
    limits = (
        ("seqlen", max(seqlens), MAX_SEQLEN),
        ("batch * num_heads", batch * num_heads, _INT_MAX),
        ("num_heads * head_dim", num_heads * head_dim, _INT_MAX // 64),
    )
    faults += [f"{name} {size} ({most} or less)" for name, size, most in limits if size > most]
    return faults


def build_recorder(version: VersionHeader) -> Path:
    """Return the program that records a version's launches; raises BuildError."""
    csrc = header.csrc_of(version)
    command = [*compilers.compile_flags(version, "emulator", ""), "-O0"]
    runtime, recorder = "emulator/runtime.cpp", csrc / "recorders" / "launches.cpp"

    def link(program: Path) -> None:
        source = f'-DATTENTION_SOURCE="{version.path}"'
        objects = [str(recorder), str(build.object_file(csrc, runtime, "-O0"))]
        options = ["-rdynamic", "-o", str(program), "-pthread", "-ldl"]
        compilers.output_of([*command, source, *objects, *options])

    files = [version.path, recorder, csrc / runtime]
    return build.kept(f"launches-{version.op}", "", files, csrc, command, link)


def record(
    version: VersionHeader,
    recorder: Path,
    head_dims: Iterable[int] = (),
    *,
    case: Sequence[int] = (1, 1024, 1, 1),
    multiprocessors: int | None = None,
) -> list[Launch]:
    """Run a recorder and return the version's launches for each head_dim.

    case: batch, seqlen, num_heads and is_causal. multiprocessors: those of the GPU, on which a
    launch() may depend. Raises UnsupportedError for a version that launches nothing, BuildError if
    its launch() fails.
    """
    command = [str(recorder), f"--case={','.join(map(str, case))}", *map(str, head_dims)]
    if multiprocessors:
        command = ["env", f"ATTENTION_EMULATOR_MULTIPROCESSORS={multiprocessors}", *command]
    found = [_launch(*line.split("\t")) for line in compilers.output_of(command).splitlines()]
    if not found:
        raise UnsupportedError(version.path.name, ["its launch() launches no kernel"])
    return found


def _launch(
    head_dim: str, _: str, smem: str, symbol: str, words: str, grid: str, block: str, bytes_: str
) -> Launch:
    name = re.search(r"(\w+(<[^(]*>)?)\(", words)
    kernel, parameters = name[1] if name else words, bytes.fromhex(bytes_)
    return Launch(
        int(head_dim), kernel, symbol, _triple(grid), _triple(block), int(smem), parameters
    )


def _triple(text: str) -> Triple:
    x, y, z = map(int, text.split(","))
    return x, y, z


def launches_of(version: VersionHeader, head_dims: Iterable[int]) -> list[Launch]:
    """Build a recorder and return the version's launches for one head of 1,024 tokens."""
    return record(version, build_recorder(version), head_dims)
