"""Find a kernel in a CUDA source file or a cubin, and lay out its arguments.

Arguments have no types: the cubin says only how many bytes each parameter has.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

from attention_kernels.inspection.sass import decode
from attention_kernels.inspection.sass.decode import BinaryError, Program, find_disassembler
from attention_kernels.inspection.sass.gpus import GpuModel
from attention_kernels.ladder import compilers

_EM_CUDA = 190  # the machine in the ELF header of a cubin
# A buffer in the arguments: the bits of an element, and the number of elements.
_BUFFER = re.compile(r"(?:i|u|f|bf)(8|16|32|64)\[(\d+)\]")
# Buffers start at 8, 9, ... terabytes, so that an address tells which buffer it is in. The launches
# of version files use the terabytes below.
_FIRST_BUFFER, _BUFFER_BITS = 8, 40


def read(
    path: Path, gpu: GpuModel, cubin: Path, kernel: str, arguments: Sequence[str]
) -> tuple[Program, str, bytes, int]:
    """Return a file's machine code, a kernel's symbol and parameters, and the size of its buffers.

    kernel: its mangled name, or a part of it that no other kernel has. Writes the cubin. Raises
    BinaryError for a file without such a kernel for the GPU and for arguments that do not fit it,
    and BuildError if a program fails or is missing.
    """
    if not path.is_file():
        raise BinaryError(path.name, f"there is no file {path}")
    code = path.read_bytes()
    if path.suffix == ".cu":
        flags = [f"-arch=sm_{gpu.arch}", "-O3", "-lineinfo", "-cubin", str(path), "-o", str(cubin)]
        compilers.output_of([*compilers.binding_flags("cuda", path.parent), *flags])
    elif code[:4] == b"\x7fELF" and code[18:20] == _EM_CUDA.to_bytes(2, "little"):
        cubin.write_bytes(code)
    else:
        reason = "it is neither CUDA source, *.cu, nor a cubin; `cuobjdump -xelf all` extracts"
        raise BinaryError(path.name, f"{reason} the cubins of a library")
    program = decode.read_cubin(cubin, path, gpu, kernel=kernel)
    (symbol,) = program.code
    elf = compilers.output_of([find_disassembler("cuobjdump"), "-elf", "-fun", symbol, str(cubin)])
    packed, size = pack(arguments, parameters_of(symbol, elf), path.name)
    return program, symbol, packed, size


def parameters_of(symbol: str, elf: str) -> list[tuple[int, int]]:
    """Return the offset and the size of a kernel's parameters, from `cuobjdump -elf`."""
    (section,) = re.findall(
        rf"^\.nv\.info\.{re.escape(symbol)}\n(.*?)(?:\n\n\n|\Z)", elf, re.S | re.M
    )
    found = re.findall(r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)", section)
    numbers = sorted((int(place, 16), int(at, 16), int(size, 16)) for place, at, size in found)
    return [(offset, size) for _, offset, size in numbers]


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
