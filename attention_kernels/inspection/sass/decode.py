"""Read the kernels of a cubin: their machine code (SASS), registers, shared memory, parameters.

NVIDIA publishes the names of the instructions but not their exact meaning (CUDA Binary Utilities,
"Instruction Set Reference"). Arguments have no types: a cubin says only how many bytes each
parameter has.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_kernels.errors import AttentionError
from attention_kernels.inspection.resources import LIMITS
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.ladder import compilers
from attention_kernels.ladder.compilers import BuildError

IS_PREDICATE = re.compile(r"!?U?P(\d|T)")
_LINE = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w)\s+)?(?P<name>[A-Z][\w.]*)"
    r"(?P<operands>[^;]*);\s*/\* 0x\w{16} \*/\s*/\* 0x(?P<high>\w{16}) \*/"
)
_WRITES_NO_REGISTER = re.compile(r"ST|RED|BRA|BAR|EXIT|[IF]SETP|R2P|LDGSTS")
_SIZES = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
_EM_CUDA = b"\xbe\0"  # the machine in the ELF header of a cubin
# A buffer in the arguments: the bits of an element, and the number of elements.
_BUFFER = re.compile(r"(?:i|u|f|bf)(8|16|32|64)\[(\d+)\]")
# Buffers start at 8, 9, ... terabytes, so that an address tells which buffer it is in. The launches
# of version files use the terabytes below.
_FIRST_BUFFER, _BUFFER_BITS = 8, 40
_MAX_NAMES = 10  # kernels listed in a message


class SassError(AttentionError, RuntimeError):
    """A kernel's machine code has an unknown instruction or operand."""


class BinaryError(AttentionError, ValueError):
    """A file has no such kernel for the GPU, or the arguments do not fit the kernel."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


@dataclass(frozen=True)
class Instruction:
    """One instruction, with the scheduling information that the compiler encoded in it."""

    name: str
    """Name with modifiers: "LDS.128"."""
    operands: tuple[str, ...]
    guard: str = ""
    """Predicate that must hold for it to take effect: "P0", "!UP1" or ""."""
    stall: int = 1
    """Cycles until the warp's next instruction."""
    writes: int = 7
    """Scoreboard, 0 to 5, that it releases when its result is ready; 7 for none."""
    reads: int = 7
    """Scoreboard that it releases when its operands have been read; 7 for none."""
    waits: tuple[int, ...] = ()
    """Scoreboards that it waits for."""
    registers: tuple[int, int] = (0, 0)
    """Number of even and of odd registers that it reads: each kind is a bank of the file."""

    @functools.cached_property
    def base(self) -> str:
        """The name without modifiers."""
        return self.name.split(".")[0]

    @functools.cached_property
    def modifiers(self) -> tuple[str, ...]:
        """The modifiers, in order."""
        return tuple(self.name.split(".")[1:])

    @functools.cached_property
    def split(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The predicates after the destination, the sources, and the predicates at the end."""
        first, last = 1, len(self.operands)
        while first < last and IS_PREDICATE.fullmatch(self.operands[first]):
            first += 1
        while first < last and IS_PREDICATE.fullmatch(self.operands[last - 1]):
            last -= 1
        return self.operands[1:first], self.operands[first:last], self.operands[last:]

    @functools.cached_property
    def memory(self) -> tuple[str, ...]:
        """The operands that are addresses: "[R2.64+0x10]"."""
        return tuple(operand for operand in self.operands if "[" in operand)

    @functools.cached_property
    def size(self) -> int:
        """The bytes of memory that a lane accesses."""
        return next((size for part, size in _SIZES.items() if part in self.modifiers), 4)

    @functools.cached_property
    def product(self) -> tuple[int, int]:
        """The FLOP of a product of a warpgroup (HGMMA), and the wavefronts of its operands.

        B is in shared memory, and A may be. Each is read once, for all four warps.
        """
        m, n, k = map(int, self.modifiers[0].split("x"))
        rows = n + (m if self.operands[1].startswith("gdesc") else 0)
        return 2 * m * n * k, rows * k * 2 // 128

    @functools.cached_property
    def loaded(self) -> list[str]:
        """The registers that a load writes."""
        found = [x for x in self.operands if re.fullmatch(r"R\d+", x)]
        if not found or self.base == "LDGSTS" or not self.base.startswith(("LD", "ATOM")):
            return []
        matrices = int(self.modifiers[-1]) if self.base == "LDSM" else 0
        return consecutive(found[0], matrices or max(1, self.size // 4))


def consecutive(register: str, count: int) -> list[str]:
    """Return the names of the registers that hold a wide value, the lowest word's first."""
    file, number = register.split("R")
    if number == "Z":
        return [register] * count
    return [f"{file}R{int(number) + i}" for i in range(count)]


# ---- Files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """The kernels of a cubin, by mangled name."""

    path: Path
    """Their source, or the binary that contains them."""
    cubin: Path
    gpu: GpuModel
    code: dict[str, list[Instruction]]
    needs: dict[str, tuple[int, int]]
    """Each kernel's registers per thread, and its bytes of static shared memory."""
    heads_first: bool = False
    """Whether the first of several axes of the grid counts heads, whose blocks are alike, as in all
    versions of our own."""


def read_cubin(
    cubin: Path, path: Path, gpu: GpuModel, kernel: str = "", *, heads_first: bool = False
) -> Program:
    """Read the kernels of a cubin made from the file `path`, or only one.

    kernel: its mangled name, or a part of it that no other kernel has. Raises BinaryError if there
    is no such kernel or if the code is for other GPUs, and BuildError if cuobjdump fails.
    """
    usage = cuobjdump(cubin, "-res-usage")
    found = re.findall(r"Function (\S+):\s+REG:(\d+).*?SHARED:(\d+)", usage)
    # From sm_90 on, the size includes the shared memory that is reserved before a block's own.
    reserved = LIMITS[gpu.arch].reserved_bytes if int(gpu.arch) >= 90 else 0
    needs = {name: (int(count), max(0, int(size) - reserved)) for name, count, size in found}
    only = ["-fun", choose(kernel, [*needs], path.name)] if kernel else []
    listed = cuobjdump(cubin, "-sass", *only)
    arch = re.search(r"code for sm_(\d+)", listed)
    # A GPU runs code for its own major compute capability up to its own.
    if arch and (arch[1][:-1] != gpu.arch[:-1] or int(arch[1]) > int(gpu.arch)):
        reason = f"its machine code is for sm_{arch[1]}, and {gpu.name} is sm_{gpu.arch}"
        raise BinaryError(path.name, reason)
    return Program(path, cubin, gpu, parse(listed), needs, heads_first)


def read_kernel(
    path: Path, gpu: GpuModel, kernel: str, arguments: Sequence[str], cubin: Path
) -> tuple[Program, str, bytes, int]:
    """Return a file's machine code, a kernel's symbol and parameters, and the size of its buffers.

    kernel: as in read_cubin(). arguments: as in pack(). Writes the cubin. Raises BinaryError for a
    file without such a kernel for the GPU and for arguments that do not fit it, and BuildError if a
    program fails or is missing.
    """
    if not path.is_file():
        raise BinaryError(path.name, f"there is no file {path}")
    code = path.read_bytes()
    if path.suffix == ".cu":
        flags = [f"-arch=sm_{gpu.arch}", "-O3", "-lineinfo", "-cubin", str(path), "-o", str(cubin)]
        compilers.output_of([*compilers.binding_flags("cuda", path.parent), *flags])
    elif code[:4] == b"\x7fELF" and code[18:20] == _EM_CUDA:
        cubin.write_bytes(code)
    else:
        reason = "it is neither CUDA source, *.cu, nor a cubin; `cuobjdump -xelf all` extracts"
        raise BinaryError(path.name, f"{reason} the cubins of a library")
    program = read_cubin(cubin, path, gpu, kernel)
    (symbol,) = program.code
    section = cuobjdump(cubin, "-elf", "-fun", symbol).split(f"\n.nv.info.{symbol}\n")[1]
    found = re.findall(
        r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)", section.split("\n\n\n")[0]
    )
    parameters = sorted([int(number, 16) for number in one] for one in found)
    return program, symbol, *pack(arguments, [(at, size) for _, at, size in parameters], path.name)


def choose(kernel: str, symbols: Sequence[str], name: str) -> str:
    """Return the only symbol that is, or contains, the given text; raises BinaryError."""
    matching = [symbol for symbol in symbols if kernel in symbol]
    if kernel in matching or len(matching) == 1:
        return kernel if kernel in matching else matching[0]
    what = "several kernels match" if matching else "it has no kernel named"
    names = matching or symbols
    listed = ", ".join(names[:_MAX_NAMES]) + ", ..." * (len(names) > _MAX_NAMES)
    raise BinaryError(name, f"{what} {kernel} (it has: {listed or 'none'})")


def cuobjdump(file: Path, *options: str) -> str:
    """Return what cuobjdump prints of a file; raises BuildError."""
    return compilers.output_of([find_disassembler("cuobjdump"), *options, str(file)])


def find_disassembler(program: str) -> str:
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


# ---- Machine code --------------------------------------------------------------------------------


def parse(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel in cuobjdump's output, by mangled name."""
    kernels: dict[str, list[Instruction]] = {}
    for part in re.split(r"\n\s*Function : ", text)[1:]:
        code: list[Instruction] = []
        kept: set[tuple[int, str]] = set()  # operands that the previous instruction marked .reuse
        for found in _LINE.finditer(part):
            sources = list(enumerate(re.findall(r"\bR\d+\b(?:\.reuse)?", found["operands"])))
            if not _WRITES_NO_REGISTER.match(found["name"]):
                sources = sources[1:]
            names = {(place, name.removesuffix(".reuse")) for place, name in sources}
            read = {name for _, name in names - kept}
            kept = {(place, name[:-6]) for place, name in sources if name.endswith(".reuse")}
            odd = sum(int(name[1:]) % 2 for name in read)
            operands = found["operands"].replace(".reuse", "").split(",")
            # Bits 105 to 121: stall (4), yield (1), write and read scoreboard (3 each), wait mask
            # (6).
            control = int(found["high"], 16) >> 41
            one = Instruction(
                name=found["name"],
                operands=tuple(part.strip() for part in operands if part.strip()),
                guard=found["guard"] or "",
                stall=control & 15,
                writes=control >> 5 & 7,
                reads=control >> 8 & 7,
                waits=tuple(bit for bit in range(6) if control >> 11 + bit & 1),
                registers=(len(read) - odd, odd),
            )
            code.append(one)
        kernels[part.split("\n", 1)[0].strip()] = code
    return kernels


# ---- Arguments -----------------------------------------------------------------------------------


def pack(
    arguments: Sequence[str], parameters: Sequence[tuple[int, int]], name: str
) -> tuple[bytes, int]:
    """Return a kernel's parameters as it reads them, and the bytes of all buffers together.

    An argument is `f32[786432]`, a buffer with as many elements (i, u, f or bf, and their bits);
    `ptr`, a buffer of unknown size; a number, a floating-point number if it has a point or an
    exponent; or `@` and a file with its bytes. Raises BinaryError.
    """
    if len(arguments) != len(parameters):
        sizes = ", ".join(str(size) for _, size in parameters)
        reason = f"{len(arguments)} arguments for {len(parameters)} parameters of {sizes} bytes"
        raise BinaryError(name, reason)
    packed = bytearray()
    total = 0
    for number, (text, (offset, size)) in enumerate(zip(arguments, parameters, strict=True)):
        packed += bytes(offset - len(packed))
        try:
            value, in_buffer = _value(text, size, number)
        except (ValueError, OverflowError, struct.error, OSError) as error:
            reason = f"argument {number + 1}, {text!r}, is not {size} bytes: {error}"
            raise BinaryError(name, reason) from error
        packed += value
        total += in_buffer
    return bytes(packed), total


def _value(text: str, size: int, number: int) -> tuple[bytes, int]:
    """Return an argument's bytes, and the size of its buffer."""
    buffer = _BUFFER.fullmatch(text)
    if buffer or text == "ptr":
        address = _FIRST_BUFFER + number << _BUFFER_BITS
        bits, count = map(int, buffer.groups()) if buffer else (0, 0)
        return address.to_bytes(size, "little"), bits // 8 * count
    if text.startswith("@"):
        value = Path(text[1:]).read_bytes()
    elif re.fullmatch(r"[-+]?(0x[0-9a-fA-F]+|\d+)", text):
        value = int(text, 0).to_bytes(size, "little", signed=text.startswith("-"))
    else:
        value = struct.pack({2: "<e", 4: "<f", 8: "<d"}.get(size, "<d"), float(text))
    if len(value) != size:
        raise ValueError(f"it has {len(value)}")
    return value, 0
