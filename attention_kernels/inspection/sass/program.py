"""Compile a version for a GPU, and execute blocks of its launches: the basis of a prediction."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_kernels.inspection import launches
from attention_kernels.inspection.launches import Launch, Triple
from attention_kernels.inspection.resources import Compiled, compile_version
from attention_kernels.inspection.sass import decode, execute
from attention_kernels.inspection.sass.asynchronous import with_bank_pointer
from attention_kernels.inspection.sass.decode import Instruction
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.inspection.sass.state import Blocks
from attention_kernels.ladder import compilers
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import VersionHeader

_MAX_ISSUED = 3_000_000  # most instructions to execute: takes seconds
# Offset of the parameters in constant bank 0, by compute capability.
_PARAMETERS = {"75": 0x160, "80": 0x160, "86": 0x160, "89": 0x160, "90": 0x210}
_CLUSTER = 0x140  # of the word that tells whether a kernel was launched in clusters
CUBIN = "kernel.cubin"
"""Name of the file in which a kernel's machine code lies in a folder."""
_MAP_ALIGNMENT = 128  # of a tensor map, in cuda.h of CUDA 13


@dataclass
class Program:
    """Kernels compiled for a GPU."""

    path: Path
    """Their source, or the binary that they are in."""
    label: str
    """Their name in tables."""
    gpu: GpuModel
    code: dict[str, list[Instruction]]
    """The kernels' instructions, by mangled name."""
    compiled: dict[str, Compiled]
    heads_first: bool = False
    """Whether the first of several axes of the grid counts heads: its blocks are alike."""


def find_disassembler(program: str = "cuobjdump") -> str:
    """Find a program next to nvcc, on PATH or in Triton's package, or raise BuildError."""
    folders = [str(compilers.cuda_root(nvcc) / "bin")] if (nvcc := compilers.find_nvcc()) else []
    folders.append(os.environ.get("PATH", ""))
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        folders.append(f"{folder}/backends/nvidia/bin")
    found = shutil.which(program, path=os.pathsep.join(folders))
    if found is None:
        raise BuildError(f"needs {program}, from the CUDA toolkit or the triton package")
    return found


def compile_program(version: VersionHeader, gpu: GpuModel, folder: Path, *flags: str) -> Program:
    """Compile a version to CUBIN in a folder, with additional flags for nvcc."""
    compiled = compile_version(version, gpu.arch, folder, *flags)
    text = compilers.output_of([find_disassembler(), "-sass", str(folder / CUBIN)])
    return Program(version.path, version.label, gpu, decode.parse(text), compiled, True)


def launches_of(
    version: VersionHeader, gpu: GpuModel, case: Sequence[int], head_dim: int
) -> Counter[Launch]:
    """Count the launches of a call; those that differ only in parameters count as the first."""
    recorder, count = launches.build_recorder(version), gpu.multiprocessors
    recorded = launches.record(version, recorder, [head_dim], case=case, multiprocessors=count)
    if version.role == "decode":  # all rows are as long as the cache
        seqlens = ((launches.SEQLENS, case[1]),)
        recorded = [dataclasses.replace(launch, words=seqlens) for launch in recorded]
    found: Counter[Launch] = Counter()
    first: dict[Launch, Launch] = {}
    for launch in recorded:
        alike = dataclasses.replace(launch, parameters=b"")
        found[first.setdefault(alike, launch)] += 1
    return found


def run_blocks(program: Program, launch: Launch, indices: Sequence[Triple]) -> Blocks:
    """Execute some blocks of a launch."""
    dimensions = b"".join(n.to_bytes(4, "little") for n in (*launch.block, *launch.grid))
    base = _PARAMETERS[program.gpu.arch]
    if "CUtensorMap" in launch.symbol:
        base = -(-base // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    constants = with_bank_pointer(dimensions.ljust(base, b"\0") + launch.parameters)
    if any(one.base == "UCGABAR_ARV" for one in program.code[launch.symbol]):
        constants = constants[:_CLUSTER] + b"\1" + constants[_CLUSTER + 1 :]
    words = dict(launch.words)
    blocks = Blocks(program.code[launch.symbol], constants, launch.block, indices, words)
    execute.run(blocks, _MAX_ISSUED)
    return blocks
