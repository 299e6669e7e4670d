"""Read the kernels of a cubin: their machine code (SASS), registers, shared memory, parameters.

NVIDIA publishes the names of the instructions but not their exact meaning (CUDA Binary Utilities,
"Instruction Set Reference"). Arguments have no types: a cubin says only how many bytes each
parameter has.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import shutil
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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
PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
"""Products of warpgroups: of floating-point numbers, of those of 8 bits, of integers."""
_EM_CUDA = b"\xbe\0"  # the machine in the ELF header of a cubin
# A buffer in the arguments: the bits of an element, its sizes, a tensor map's box, and a value.
_BUFFER = re.compile(
    r"(?:i|u|f|bf)(?P<bits>8|16|32|64)\[(?P<sizes>\d+(?:x\d+)*)(?:/(?P<box>\d+(?:x\d+)*))?\]"
    r"(?:=(?P<word>\d+))?"
)
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
        """The FLOP of a product of a warpgroup (wgmma), and the wavefronts of its operands.

        Whatever the type, a row of A or B has 32 bytes, and takes as long as 16 elements of 16
        bits: the FLOP are of those. B is in shared memory, and A may be. Each is read once, for all
        four warps.
        """
        m, n, _ = map(int, self.modifiers[0].split("x"))
        rows = n + (m if self.operands[1].startswith("gdesc") else 0)
        return 2 * m * n * 16, rows * 32 // 128

    @functools.cached_property
    def loaded(self) -> list[str]:
        """The registers that a load writes."""
        found = [x for x in self.operands if re.fullmatch(r"R(\d+|Z)", x)]
        if not found or self.base == "LDGSTS" or not self.base.startswith(("LD", "ATOM")):
            return []
        matrices = int(self.modifiers[-1]) if self.base == "LDSM" else 0
        return consecutive(found[0], matrices or max(1, self.size // 4))

    @functools.cached_property
    def takes_part(self) -> bool:
        """Whether it adds to a counter and returns its value, such as the next part of a queue."""
        return self.base[:4] == "ATOM" and "ADD" in self.modifiers and "RZ" not in self.loaded


Code: TypeAlias = Sequence[Instruction]


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
    path: Path, gpu: GpuModel, kernel: str, arguments: Sequence[str], folder: Path
) -> tuple[Program, str, tuple[bytes, int, dict[int, int]]]:
    """Return a file's machine code, a kernel's symbol, and its parameters as pack() returns them.

    path: CUDA source or PTX, a cubin, or a library, object or program that contains cubins. kernel:
    as in read_cubin(). arguments: as in pack(). folder: gets a cubin that is not there yet. Raises
    BinaryError for a file without such a kernel for the GPU and for arguments that do not fit it,
    and BuildError if a program fails or is missing.
    """
    if not path.is_file():
        raise BinaryError(path.name, f"there is no file {path}")
    with path.open("rb") as file:
        head = file.read(20)
    cubin = path
    if path.suffix in (".cu", ".ptx"):
        cubin, arch = folder / "kernel.cubin", gpu.arch + "a" * (gpu.arch == "90")
        flags = [f"-arch=sm_{arch}", "-O3", "-lineinfo", "-cubin", str(path), "-o", str(cubin)]
        compilers.output_of([*compilers.binding_flags("cuda", path.parent), *flags])
    elif head[:4] != b"\x7fELF" or head[18:20] != _EM_CUDA:
        cubin = _embedded(path, gpu, kernel, folder)
    program = read_cubin(cubin, path, gpu, kernel)
    (symbol,) = program.code
    section = cuobjdump(cubin, "-elf").split(f"\n.nv.info.{symbol}\n")[1].split("\n\n\n")[0]
    found = re.findall(r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)", section)
    parameters = sorted([int(number, 16) for number in one] for one in found)
    return program, symbol, pack(arguments, [(at, size) for _, at, size in parameters], path.name)


def _embedded(path: Path, gpu: GpuModel, kernel: str, folder: Path) -> Path:
    """Extract the cubins of a file, and return the one whose kernel the GPU would run."""
    command = [find_disassembler("cuobjdump"), "-xelf", "all", str(path.resolve())]
    compilers.output_of(command, str(folder))
    # A GPU runs code for its own major compute capability up to its own.
    runs = re.compile(rf"sm_{gpu.arch[:-1]}([0-{gpu.arch[-1]}]a?)\.cubin$")
    found = defaultdict(list)
    for cubin in folder.iterdir():
        name = runs.search(cubin.name)
        if name and kernel.encode() in cubin.read_bytes():
            found[name[1]].append(cubin)
    if not found or len(found[max(found)]) > 1:
        count = "several of its cubins have" if found else "none of its cubins has"
        raise BinaryError(path.name, f"{count} a kernel named {kernel} for {gpu.name}")
    return found[max(found)][0]


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
    nvcc, triton = compilers.find_nvcc(), importlib.util.find_spec("triton")
    folders = [f"{compilers.cuda_root(nvcc)}/bin"] if nvcc else []
    packages = (triton.submodule_search_locations or ()) if triton else ()
    folders += [os.environ.get("PATH", ""), *(f"{x}/backends/nvidia/bin" for x in packages)]
    found = shutil.which(program, path=os.pathsep.join(folders))
    if found is None:
        raise BuildError(f"needs {program}, from the CUDA toolkit or the triton package")
    return found


# ---- Machine code --------------------------------------------------------------------------------


def parse(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel in cuobjdump's output, by mangled name."""
    kernels: dict[str, list[Instruction]] = {}
    for part in re.split(r"\n\s*Function : ", text)[1:]:
        code = kernels[part.split("\n", 1)[0].strip()] = []
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
    return kernels


# ---- Arguments -----------------------------------------------------------------------------------


def pack(
    arguments: Sequence[str], parameters: Sequence[tuple[int, int]], name: str
) -> tuple[bytes, int, dict[int, int]]:
    """Return a kernel's parameters as it reads them, the bytes of all buffers, and loaded values.

    An argument is `f32[786432]` or `f32[12x65536]`, a buffer with as many elements (i, u, f or bf,
    and their bits); `i32[1]=512`, one whose elements are all 512; `f16[12288x64/128x64]`, a tensor
    map of a contiguous buffer that is copied in boxes of 128 x 64; `ptr`, a buffer of unknown size;
    a number, a floating-point number if it has a point or an exponent; or `@` and a file with its
    bytes. Further arguments are buffers to which pointers in such a file point. Argument n, from 0
    on, is at 8 + n terabytes, by which the values are. Raises BinaryError.
    """
    buffers = [_BUFFER.fullmatch(text) for text in arguments]
    if len(arguments) < len(parameters) or not all(buffers[len(parameters) :]):
        sizes = ", ".join(str(size) for _, size in parameters)
        reason = f"{len(arguments)} arguments for {len(parameters)} parameters of {sizes} bytes"
        raise BinaryError(name, reason)
    packed = bytearray()
    for number, (text, (offset, size)) in enumerate(zip(arguments, parameters, strict=False)):
        packed += bytes(offset - len(packed))
        try:
            value = _value(text, size, number, buffers[number])
            if len(value) != size:
                raise ValueError(f"it has {len(value)}")
        except (ValueError, OverflowError, struct.error, OSError) as error:
            reason = f"argument {number + 1}, {text!r}, is not {size} bytes: {error}"
            raise BinaryError(name, reason) from error
        packed += value
    given = {number: buffer for number, buffer in enumerate(buffers) if buffer}
    total = sum(int(x["bits"]) // 8 * math.prod(_axes(x["sizes"])) for x in given.values())
    words = {_FIRST_BUFFER + n: int(x["word"]) for n, x in given.items() if x["word"]}
    return bytes(packed), total, words


def _axes(text: str) -> list[int]:
    return [*map(int, text.split("x"))]


def _value(text: str, size: int, number: int, buffer: re.Match[str] | None) -> bytes:
    """Return an argument's bytes."""
    address = _FIRST_BUFFER + number << _BUFFER_BITS
    if buffer and buffer["box"]:
        element, sizes = int(buffer["bits"]) // 8, _axes(buffer["sizes"])
        return _map_of(address, element, sizes, _axes(buffer["box"]))
    if buffer or text == "ptr":
        return address.to_bytes(size, "little")
    if text.startswith("@"):
        return Path(text[1:]).read_bytes()
    if re.fullmatch(r"[-+]?(0x[0-9a-fA-F]+|\d+)", text):
        return int(text, 0).to_bytes(size, "little", signed=text.startswith("-"))
    return struct.pack({2: "<e", 4: "<f", 8: "<d"}.get(size, "<d"), float(text))


# ---- Tensor maps ---------------------------------------------------------------------------------

MAP_BYTES = 128
# The emulator's map, see csrc/emulator/in_flight.h: the address, sizes, strides in bytes, box,
# bytes of an element, swizzle.
_EMULATED = struct.Struct("<Q5q5q5iii")
# Hopper's, as ptxas compiles `tensormap.replace`: the address; the rank - 1 from bit 4 and the type
# from bit 7 on; four strides in units of 16 bytes, and their upper bits; sizes - 1; and those of a
# box - 1.
_HOPPER = struct.Struct("<QI4II5I3x5B")
_TYPE_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)  # by CUtensorMapDataType


def read_map(raw: bytes) -> tuple[int, int, list[int], list[int], list[int]]:
    """Return a map's tensor, the bytes of an element, sizes, strides in bytes, and a box's sizes.

    Of Hopper's, the driver also fills bytes 64 to 75, or another map follows after 64; their bytes
    12 to 15 are a stride. Of the emulator's, boxes begin at 88, and a size's upper half at 12.
    """
    if any(raw[88:]) and not any(raw[12:16]):
        tensor, *words = _EMULATED.unpack_from(raw)
        return tensor, words[15], words[:5], words[5:10], words[10:15]
    tensor, kind, *words = _HOPPER.unpack_from(raw)
    element = _TYPE_BYTES[kind >> 7 & 15]
    strides = [(low | (words[4] >> 4 * i & 15) << 32) << 4 for i, low in enumerate(words[:4])]
    sizes, box = ([n + 1 for n in some] for some in (words[5:10], words[10:]))
    return tensor, element, sizes, [element, *strides], box


def _map_of(tensor: int, element: int, sizes: Sequence[int], box: Sequence[int]) -> bytes:
    """Return Hopper's map of a contiguous tensor; sizes: the innermost last."""
    found = bytearray(MAP_BYTES)
    kind = len(sizes) - 1 << 4 | _TYPE_BYTES.index(element) << 7
    struct.pack_into("<QI", found, 0, tensor, kind)
    stride = element
    for axis, (size, width) in enumerate(zip(sizes[::-1], box[::-1], strict=True)):
        if axis:
            struct.pack_into("<I", found, 8 + 4 * axis, stride >> 4)
        struct.pack_into("<I", found, 0x20 + 4 * axis, size - 1)
        found[0x37 + axis] = width - 1
        stride *= size
    return bytes(found)
