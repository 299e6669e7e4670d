"""Read a kernel of any CUDA source file or binary, given its launch.

cuobjdump takes the machine code for the GPU out of an executable or a library; it says, too, which
registers, shared memory and parameters a kernel has. Arguments have no types: the binary knows how
many bytes each parameter has.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_kernels.errors import AttentionError
from attention_kernels.inspection.launches import Launch, Triple
from attention_kernels.inspection.resources import Compiled, reserved_first
from attention_kernels.inspection.sass import decode
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.inspection.sass.program import CUBIN, Program, find_disassembler
from attention_kernels.ladder import compilers
from attention_kernels.ladder.compilers import BuildError

_EM_CUDA = 190  # the machine in the ELF header of a cubin
_MAX_NAMES = 10  # kernels listed in a message
# Bytes per element of the buffers in arguments.
_ELEMENT = re.compile(r"(?:i|u|f|bf)(8|16|32|64)\[(\d+)\]")
# Buffers start at 8, 9, ... terabytes, so that they are told apart; those below are the ladders'.
_FIRST_BUFFER, _BUFFER_BITS = 8, 40


class BinaryError(AttentionError, ValueError):
    """A file has no such kernel for the GPU, or the arguments do not fit the kernel."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


@dataclass(frozen=True)
class Request:
    """A launch of one kernel in a file."""

    path: Path
    kernel: str
    """Mangled name, or a part of it that no other kernel has."""
    grid: Triple
    block: Triple
    dynamic_smem: int | None = None
    """Bytes of dynamic shared memory; None for as many as the kernel accesses."""
    arguments: Sequence[str] = ()
    """One text per parameter; see pack()."""


@dataclass(frozen=True)
class Parameter:
    """Where a kernel's parameter is, in bytes."""

    offset: int
    size: int


def read(request: Request, gpu: GpuModel, folder: Path) -> tuple[Program, Launch, int]:
    """Return a kernel's machine code, its launch, and the bytes of its buffers.

    Writes its cubin to the folder, as CUBIN. Raises BinaryError for a file without such a kernel
    for the GPU and for arguments that do not fit it, and BuildError if a program fails or is
    missing.
    """
    path, cubin = request.path, folder / CUBIN
    if not path.is_file():
        raise BinaryError(path.name, f"there is no file {path}")
    if path.suffix == ".cu":
        _compile(path, gpu.arch, cubin)
    elif _is_cubin(path):
        cubin.write_bytes(path.read_bytes())
    else:
        _extract(request, gpu.arch, folder)
    symbol = _choose(request, _symbols(cubin))
    program, parameters = _load(cubin, symbol, gpu, path)
    packed, size = pack(request.arguments, parameters, path.name)
    dynamic = request.dynamic_smem or 0
    return program, Launch(0, symbol, symbol, request.grid, request.block, dynamic, packed), size


def _load(cubin: Path, symbol: str, gpu: GpuModel, path: Path) -> tuple[Program, list[Parameter]]:
    """Return the machine code of a kernel in a cubin, and its parameters."""
    cuobjdump = find_disassembler()
    listed = compilers.output_of([cuobjdump, "-sass", "-fun", symbol, str(cubin)])
    arch = re.search(r"code for sm_(\d+)", listed)
    if arch and not _runs_on(arch[1], gpu.arch):
        reason = f"its machine code is for sm_{arch[1]}, and {gpu.name} is sm_{gpu.arch}"
        raise BinaryError(path.name, reason)
    code = {symbol: decode.parse(listed)[symbol]}
    usage = compilers.output_of([cuobjdump, "-res-usage", str(cubin)])
    found = re.search(rf"Function {re.escape(symbol)}:\s+REG:(\d+).*?SHARED:(\d+)", usage)
    assert found is not None
    registers, shared = map(int, found.groups())
    static = max(0, shared - reserved_first(gpu.arch))
    compiled = {symbol: Compiled(registers, 0, 0, static)}
    elf = compilers.output_of([cuobjdump, "-elf", "-fun", symbol, str(cubin)])
    return Program(path, path.stem, gpu, code, compiled), _parameters(elf, symbol)


def _parameters(elf: str, symbol: str) -> list[Parameter]:
    """Return a kernel's parameters, from the attributes in `cuobjdump -elf`."""
    (section,) = re.findall(
        rf"^\.nv\.info\.{re.escape(symbol)}\n(.*?)(?:\n\n\n|\Z)", elf, re.S | re.M
    )
    found = re.findall(r"Ordinal : (\w+)\s+Offset  : (\w+)\s+Size    : (\w+)", section)
    numbers = sorted(tuple(int(text, 16) for text in one) for one in found)
    return [Parameter(offset, size) for _, offset, size in numbers]


# ---- Files ---------------------------------------------------------------------------------------


def _compile(path: Path, arch: str, cubin: Path) -> None:
    nvcc = compilers.find_nvcc()
    if nvcc is None:
        raise BuildError(f"needs nvcc to compile {path.name}")
    flags = [f"-arch=sm_{arch}", "-std=c++17", "-O3", "-lineinfo", "-cubin"]
    compilers.output_of([str(nvcc), *flags, str(path), "-o", str(cubin)])


def _is_cubin(path: Path) -> bool:
    with path.open("rb") as file:
        header = file.read(20)
    return header[:4] == b"\x7fELF" and header[18:20] == _EM_CUDA.to_bytes(2, "little")


def _runs_on(arch: str, gpu: str) -> bool:
    """Return whether a GPU runs machine code: of its major compute capability, and none later."""
    return int(arch) // 10 == int(gpu) // 10 and int(arch) <= int(gpu)


def _symbols(path: Path) -> list[str]:
    """Return the mangled names of the kernels in a cubin."""
    return _kernels(compilers.output_of([find_disassembler(), "-symbols", str(path)]))


def _kernels(listing: str) -> list[str]:
    return re.findall(r"^STT_FUNC\s.*\bSTO_ENTRY\s+(\S+)$", listing, re.M)


def _choose(request: Request, symbols: Sequence[str]) -> str:
    """Return the one symbol that is, or contains, the requested name."""
    found = [*dict.fromkeys(one for one in symbols if request.kernel in one)]
    if request.kernel in found:
        return request.kernel
    if len(found) == 1:
        return found[0]
    names = found or [*dict.fromkeys(symbols)]
    listed = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
    what = "several kernels match" if found else "it has no kernel named"
    raise BinaryError(
        request.path.name, f"{what} {request.kernel} (for this GPU: {listed or 'none'})"
    )


def _extract(request: Request, arch: str, folder: Path) -> None:
    """Extract the cubin with the requested kernel from a library.

    cuobjdump lists the symbols of each cubin of an architecture, and the names of all cubins, in
    the same order.
    """
    cuobjdump, path = find_disassembler(), str(request.path.absolute())
    names = re.findall(r"ELF file\s+\d+: (\S+)", compilers.output_of([cuobjdump, "-lelf", path]))
    archs = {found[1] for name in names if (found := re.search(r"\.sm_(\d+)\.cubin$", name))}
    usable = [one for one in archs if _runs_on(one, arch)]
    if not usable:
        listed = ", ".join(f"sm_{one}" for one in sorted(archs, key=int)) or "no GPU"
        raise BinaryError(request.path.name, f"it has machine code for {listed}, not for sm_{arch}")
    best = max(usable, key=int)
    names = [name for name in names if name.endswith(f".sm_{best}.cubin")]
    listing = compilers.output_of([cuobjdump, "-arch", f"sm_{best}", "-symbols", path])
    parts = [_kernels(part) for part in listing.split("Fatbin elf code:")[1:]]
    symbol = _choose(request, [one for part in parts for one in part])
    name = next(name for name, part in zip(names, parts, strict=True) if symbol in part)
    compilers.output_of([cuobjdump, "-xelf", name, path], str(folder))
    (folder / name).rename(folder / CUBIN)


# ---- Arguments -----------------------------------------------------------------------------------


def pack(arguments: Sequence[str], parameters: Sequence[Parameter], name: str) -> tuple[bytes, int]:
    """Return a kernel's parameters as it reads them, and the bytes of all buffers together.

    An argument is `f32[786432]`, a buffer with as many elements (i, u, f or bf, and their bits);
    `ptr`, a buffer of unknown size; a number, a floating-point number if it has a point or an
    exponent; `hex:` and its bytes; or `@` and a file with its bytes. Raises BinaryError.
    """
    if len(arguments) != len(parameters):
        sizes = ", ".join(str(one.size) for one in parameters)
        reason = f"{len(arguments)} arguments for {len(parameters)} parameters of {sizes} bytes"
        raise BinaryError(name, reason)
    packed = bytearray()
    total = 0
    for number, (text, parameter) in enumerate(zip(arguments, parameters, strict=True)):
        packed += bytes(parameter.offset - len(packed))
        try:
            value, size = _value(text, parameter.size, number)
        except (ValueError, OverflowError, struct.error, OSError) as error:
            reason = f"argument {number + 1}, {text!r}, is not {parameter.size} bytes: {error}"
            raise BinaryError(name, reason) from error
        packed += value
        total += size
    return bytes(packed), total


def _value(text: str, size: int, number: int) -> tuple[bytes, int]:
    """Return an argument's bytes, and the size of its buffer."""
    buffer = _ELEMENT.fullmatch(text)
    if text == "ptr" or buffer:
        address = _FIRST_BUFFER + number << _BUFFER_BITS
        return address.to_bytes(size, "little"), (
            int(buffer[1]) // 8 * int(buffer[2]) if buffer else 0
        )
    if text.startswith("@"):
        value = Path(text[1:]).read_bytes()
    elif text.startswith("hex:"):
        value = bytes.fromhex(text[4:])
    elif re.fullmatch(r"[-+]?(0x[0-9a-fA-F]+|\d+)", text):
        value = int(text, 0).to_bytes(size, "little", signed=text.startswith("-"))
    else:
        value = struct.pack({2: "<e", 4: "<f", 8: "<d"}.get(size, "<d"), float(text))
    if len(value) != size:
        raise ValueError(f"it has {len(value)}")
    return value, 0
