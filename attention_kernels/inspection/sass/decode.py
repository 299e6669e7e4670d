"""Parse a kernel's machine code (SASS), as cuobjdump prints it.

execute.py executes the instructions, multiprocessor.py times them. NVIDIA publishes their names
but not their exact meaning (CUDA Binary Utilities, "Instruction Set Reference").
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from attention_kernels.errors import AttentionError

IS_PREDICATE = re.compile(r"!?U?P(\d|T)")
_LINE = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w)\s+)?(?P<name>[A-Z][\w.]*)"
    r"(?P<operands>[^;]*);\s*/\* 0x\w{16} \*/\s*/\* 0x(?P<high>\w{16}) \*/"
)
_WRITES_NO_REGISTER = re.compile(r"ST|RED|BRA|BAR|EXIT|[IF]SETP|R2P|LDGSTS")
_SIZES = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}


class SassError(AttentionError, RuntimeError):
    """A kernel's machine code has an unknown instruction or operand."""


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
            code.append(_instruction(found, (len(read) - odd, odd)))
        kernels[part.split("\n", 1)[0].strip()] = code
    return kernels


def _instruction(found: re.Match[str], registers: tuple[int, int]) -> Instruction:
    # Bits 105 to 121: stall (4), yield (1), write and read scoreboard (3 each), wait mask (6).
    control = int(found["high"], 16) >> 41
    operands = re.sub(r"\.reuse\b", "", found["operands"])
    return Instruction(
        name=found["name"],
        operands=tuple(part.strip() for part in operands.split(",") if part.strip()),
        guard=found["guard"] or "",
        stall=control & 15,
        writes=control >> 5 & 7,
        reads=control >> 8 & 7,
        waits=tuple(bit for bit in range(6) if control >> 11 + bit & 1),
        registers=registers,
    )
