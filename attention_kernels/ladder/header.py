"""Read the header of a version file: the comment at its top that describes the version."""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attention_kernels.errors import AttentionError
from attention_kernels.precision import MOST_ERROR_SLACK, PLAIN_PRECISIONS, PRECISIONS

CSRC = Path(__file__).resolve().parents[1] / "csrc"
# The fields in the order of our files, with their defaults: all are optional.
FIELDS = {
    **dict.fromkeys(("From", "Change", "Why", "Cost", "Tile"), ""),
    "Layout": "contiguous",
    "Role": "attention",
    "Takes": "float32",
    **{"Entry": "", "Tensors": "BNHD", "Only": "", "Shared": ""},
    **dict.fromkeys(("Needs", "Precision"), ""),
    "Error": "1x: as its precision class",
    "Flags": "(none)",
    "Expect": "",
}
LAYOUTS = ("contiguous", "strided")
FIELD = re.compile(rf"//\s*({'|'.join(FIELDS)}):(.*)")
ROLES = ("attention", "decode", "struct")
HEAD_DIMS = (32, 64, 128)
RACES = "-Xcompiler=-fsanitize=thread"  # see csrc/emulator/races.h
_DTYPE = "(?:float16|bfloat16|float32|float64)"
_HEAD_DIM = "[1-9][0-9]{0,3}"
# The inputs that a version takes, unless they are float32 with all of HEAD_DIMS.
TAKES = re.compile(
    rf"({_DTYPE}(?: {_DTYPE})*)(?:, head_dim ({_HEAD_DIM}(?: {_HEAD_DIM})*))?(, on the CPU)?"
)
# The lowest architecture that a version runs on; with the suffix a, the only one.
NEEDS = re.compile(r"(?:sm_([1-9][0-9]?)([0-9])(a?))?")
# The multiple of its precision class's budget that a version needs, and why.
ERROR = re.compile(rf"([1-{MOST_ERROR_SLACK:.0f}])x: \S.*")

STRING = re.compile(r'R"(\w*)\((?s:(.*?))\)\1"|("(?:\\.|[^"\\])*")')
TOKEN = re.compile(STRING.pattern + r"|'(?:\\.|[^'\\])*'|&&|\|\||[][(){}:,;]")

# What an Only consists of that the judge can evaluate, which has the same meaning in C++.
_FORMULA = (
    *(ast.Expression, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.BinOp, ast.Name, ast.Load),
    *(ast.boolop, ast.unaryop, ast.cmpop, ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.BitAnd),
    ast.Constant,
)


class HeaderError(AttentionError, ValueError):
    """The header of a version file cannot be read."""


@dataclass(frozen=True)
class VersionHeader:
    """The header of a version file; the fields without a description are one line of prose."""

    path: Path
    number: int
    name: str
    """The part of the file's name before the first "_", e.g. "v07"; "kernel" without a number."""
    op: str
    """The op in torch.ops.attention_kernels; for several dtypes, the common prefix of their ops."""
    label: str
    """The name in tables: the op, or the file's name if the file belongs to no ladder."""
    title: str
    change: str
    why: str
    cost: str
    tile: str
    layout: str
    """"contiguous", or "strided" if the kernel reads strided q, k and v."""
    flags: tuple[str, ...]
    """Compiler flags for this version only."""
    expect: str
    start: str | None = None
    """The name of the version that this one changes, if not the one before it in the ladder."""
    role: str = "attention"
    """The computation: "attention", "decode", or "struct" for a kernel with its own parameters."""
    dtypes: tuple[str, ...] = ("float32",)
    """The dtypes that it takes; the file is built separately for each."""
    head_dims: tuple[int, ...] = HEAD_DIMS
    is_host: bool = False
    """Whether it is host code, which is neither emulated nor built for a GPU."""
    needs: tuple[int, int] | None = None
    """The compute capability that its instructions need."""
    needs_exactly: bool = False
    """Whether its instructions exist at that compute capability only."""
    precision: str | None = None
    """The precision class of its float32 computations, if it is not the plain one."""
    error_slack: float = 1.0
    """The multiple of its precision class's budget that its algorithm needs."""
    entry: str = ""
    """The calls that compute attention, in C++, if the file does not define launch() itself."""
    tensors: str = "BNHD"
    """The dimensions of the tensors that an entry takes; with 3, those of one tensor of q, k, v."""
    only: str = ""
    """The condition in C++ for the calls that an entry takes."""
    shared: str = ""
    """The formula of a slot's shared memory in bytes, given the head_dim D."""
    slot: Path | None = None
    """The file, *.cuh, of the fused step's attention that this decode kernel calls."""

    @property
    def listing(self) -> Path:
        """The file with the kernel's lines: this one, a slot's, or an entry's first *.cu."""
        if self.slot:
            return self.slot
        text = self.path.read_text("utf-8", "replace") if self.entry else ""
        found = re.search(r'^\s*#\s*include\s*"([^"\n]+\.cu)"', text, re.M)
        return self.path.parent / found[1] if found else self.path

    @property
    def uses_torch(self) -> bool:
        """Whether an entry's file includes PyTorch's headers."""
        pattern = r"^\s*#\s*include\s*[<\"](?:torch|ATen|c10)/"
        return bool(self.entry and re.search(pattern, self.source, re.M))

    @property
    def source(self) -> str:
        """The text of the listing, with bytes that are not UTF-8 replaced."""
        return self.listing.read_text("utf-8", "replace")

    @property
    def dtype(self) -> str:
        """The dtype of a version that takes only one, such as each of builds()."""
        (dtype,) = self.dtypes
        return dtype

    @property
    def precisions(self) -> dict[str, str]:
        """The precision class of each dtype."""
        return {dtype: self.precision or PLAIN_PRECISIONS[dtype] for dtype in self.dtypes}

    def takes(self, **names: float) -> bool:
        """Return whether Only holds, given B, N, H, D, causal and default_scale.

        A condition in it that is not a formula of these names counts as true.
        """
        parts = (split(part, "&&")[0] for part in split(self.only, "||")[0])
        return any(all(_value(one, names, True) for one in part) for part in parts)

    def shared_bytes(self, head_dim: int) -> int:
        """Return the shared memory of a slot; raises HeaderError."""
        found = _value(self.shared or "?", {"D": head_dim}, None)
        if type(found) is not int or found < 1:
            must = "must be bytes, a formula of the head_dim D such as `32 * (D + 2)`"
            raise HeaderError(f"{self.path.name}: Shared {must}, not {self.shared!r}")
        return found

    def compiles_for(self, arch: str) -> bool:
        """Return whether a compute capability, e.g. "75", has the instructions it needs."""
        if self.needs is None:
            return True
        capability = divmod(int(arch), 10)
        return capability == self.needs if self.needs_exactly else capability >= self.needs

    def builds(self) -> list[VersionHeader]:
        """Return the versions to build: this one, or one per dtype if it takes several."""
        if len(self.dtypes) == 1:
            return [self]
        return [replace(self, op=f"{self.op}_{dtype}", dtypes=(dtype,)) for dtype in self.dtypes]


def _value(formula: str, names: Mapping[str, float], other: Any) -> Any:
    """Return the value of a formula in C++, or `other` if it has more in it than _FORMULA."""
    words = {"&&": " and ", "||": " or ", "!": " not "}
    text = re.sub(r"&&|\|\||!(?!=)", lambda found: words[found[0]], formula or "1").strip()
    try:
        tree = ast.parse(text, mode="eval")
        # The file is a stranger's, and this process may be the judge's.
        nodes = [*ast.walk(tree)]
        numbers = {type(node.value) for node in nodes if isinstance(node, ast.Constant)}
        if numbers <= {int, float} and all(isinstance(node, _FORMULA) for node in nodes):
            return eval(compile(tree, "header", "eval"), {"__builtins__": {}}, {**names})
    except (SyntaxError, NameError, ArithmeticError, ValueError):
        pass
    return other


def version_files(folder: Path) -> list[Path]:
    """Return a folder's version files, v<number>_<what>.cu, sorted by number."""
    found = [path for path in folder.glob("v*_*.cu") if re.match(r"v\d+_", path.name)]
    return sorted(found, key=lambda path: (version_number(path), path.name))


def version_number(path: Path) -> int:
    """Return the number in the name of a version file."""
    return int(path.name[1:].split("_")[0])


def in_order(found: Iterable[VersionHeader]) -> list[VersionHeader]:
    """Return the versions of a ladder by number, except that each follows the one it starts from.

    A step that was inserted later has a higher number, and its successor starts from it.
    """
    by_name = {version.name: version for version in found}
    ordered: dict[str, VersionHeader] = {}
    for version in by_name.values():
        for one in reversed(_chain(version, by_name)):
            ordered.setdefault(one.name, one)
    return [*ordered.values()]


def check_start(version: VersionHeader, found: Iterable[VersionHeader]) -> None:
    """Raise HeaderError if a version starts from one that is missing or that starts from it."""
    by_name = {one.name: one for one in found}
    *_, last = _chain(version, by_name)
    if last.start in by_name:
        raise HeaderError(f"{version.path.name}: From leads back to {last.start}")
    if version.start and version.start not in by_name:
        raise HeaderError(
            f"{version.path.name}: From names no version of this ladder: {version.start}"
        )


def _chain(version: VersionHeader, by_name: Mapping[str, VersionHeader]) -> list[VersionHeader]:
    """Return a version, the one that its header names, and so on; it ends before a repetition."""
    chain = [version]
    while (start := by_name.get(chain[-1].start or "")) and start not in chain:
        chain.append(start)
    return chain


def parse_header(path: Path, op_prefix: str = "") -> VersionHeader:
    """Read the header of a version file; missing fields have the defaults of FIELDS.

    Its first line is `// v07 - what changed`. The fields follow, such as `Needs:  sm_80`,
    `Needs:  sm_90a`, `Takes:  float16, head_dim 32 64`, `Takes:  float32 bfloat16`,
    `Takes:  float32, on the CPU` or `Error:  2x: why`; the further lines of a field are indented.
    Raises HeaderError, which names the file and the fault.
    """
    try:
        return _parse(path, op_prefix)
    except HeaderError as error:
        raise HeaderError(f"{path.name}: {error}") from error


def _parse(path: Path, op_prefix: str) -> VersionHeader:
    numbered = re.match(r"v(\d+)_", path.name)
    name = f"v{numbered[1]}" if numbered else "kernel"
    text = path.read_text(encoding="utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    lines = [*itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())]
    values = _fields(lines)
    first = lines[0] if lines and not FIELD.match(lines[0]) else ""
    title = re.sub(r"^//\s*(v\d+ - )?", "", first).strip() or path.stem

    def match(field: str, pattern: re.Pattern[str], example: str) -> re.Match[str]:
        if found := pattern.fullmatch(values.pop(field)):
            return found
        raise HeaderError(f"{field} must look like {example}")

    takes = match("Takes", TAKES, "`float16, head_dim 32 64`")
    if sorted(values["Tensors"].replace("3", "", 1)) != sorted("BNHD"):
        raise HeaderError("Tensors must be B, N, H, D in any order, and 3 if q, k, v are in one")
    needs = match("Needs", NEEDS, "`sm_80`")
    slack = match("Error", ERROR, f"`2x: rounds O in every tile`, at most {MOST_ERROR_SLACK:.0f}x")
    precision = values.pop("Precision")
    if precision and (precision not in PRECISIONS["float32"] or takes[1] != "float32"):
        classes = ", ".join(PRECISIONS["float32"])
        raise HeaderError(f"Precision is for versions of float32 and must be one of {classes}")
    flags = values.pop("Flags")
    try:
        split = () if flags == "(none)" else tuple(shlex.split(flags))
    except ValueError as error:
        raise HeaderError(f"Flags: {error}") from error
    start = values.pop("From") or None
    if values["Entry"]:
        calls_of(values["Entry"])
    prose = {name.lower(): value for name, value in values.items()}
    op = op_prefix + name
    return VersionHeader(
        path.absolute(),
        int(numbered[1]) if numbered else 1,
        name,
        op,
        label=op,
        title=title,
        flags=split,
        start=start,
        dtypes=tuple(dict.fromkeys(takes[1].split())),
        head_dims=tuple(map(int, takes[2].split())) if takes[2] else HEAD_DIMS,
        is_host=takes[3] is not None,
        needs=(int(needs[1]), int(needs[2])) if needs[0] else None,
        needs_exactly=needs[3] == "a",
        precision=precision or None,
        error_slack=float(slack[1]),
        slot=None,
        **prose,
    )


def calls_of(entry: str) -> list[tuple[str, list[str], str]]:
    """Return the function, the settings between <<< and >>>, and the arguments of each call.

    Raises HeaderError.
    """
    calls = []
    pieces, end = split(entry, ";")
    pieces[-1] += entry[end:]  # a bracket too many, which the compiler will name
    for call in filter(None, map(str.strip, pieces)):
        found = re.fullmatch(
            r"([\w:]+\s*(?:<(?!<<).*?>)?)\s*(?:<<<(.*?)>>>)?\s*\((.*)\)", call, re.S
        )
        settings = split(found[2] or "", ",")[0] if found else []
        if not found or (found[2] is not None and not 2 <= len(settings) <= 4):
            raise HeaderError(
                "Entry must be calls such as `attn(q, k, v, o, N)` or `attn<D><<<dim3(N, B * H), "
                f"128, bytes>>>(q, k, v, o, N)`, separated by `;`, not `{call}`"
            )
        calls.append((found[1], settings if found[2] else [], found[3]))
    return calls


def split(text: str, separator: str, at: int = 0) -> tuple[list[str], int]:
    """Split C++ at a separator that is in no brackets and no string.

    It begins at a place in the text and ends before a closing bracket that has no opening one.
    Returns the pieces and the place where the last one ends.
    """
    pieces: list[str] = []
    depth, begin = 0, at
    for token in TOKEN.finditer(text, at):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth < 0:
            return [*pieces, text[begin : token.start()]], token.start()
        if token[0] == separator and depth == 0:
            pieces.append(text[begin : token.start()])
            begin = token.end()
    return [*pieces, text[begin:]], len(text)


def _fields(lines: Iterable[str]) -> dict[str, str]:
    """Return the fields of a header, given its lines; raises HeaderError if one is wrong."""
    said: dict[str, str] = {}
    field = None
    for line in lines:
        if start := FIELD.match(line):
            field, text = start.groups()
        elif not (text := line[2:]).startswith(("  ", "\t")):
            field = None  # prose
        if field:
            said[field] = f"{said.get(field, '')} {text.strip()}".strip()
    values = FIELDS | {field: text for field, text in said.items() if text}
    if (role := values["Role"]) not in ROLES:
        raise HeaderError(f"Role must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {role!r}")
    if (role == "decode" or values["Tensors"] != "BNHD") and not said.get("Layout"):
        values["Layout"] = "strided"
    if not values["Entry"] and (values["Only"] or values["Tensors"] != "BNHD"):
        raise HeaderError("Only and Tensors are about an Entry, which is missing")
    if values["Entry"] and not re.search(r"\bcausal\b", values["Entry"] + values["Only"]):
        values["Only"] = " && ".join(["causal", *filter(None, [values["Only"]])])
    if values["Layout"] not in LAYOUTS:
        raise HeaderError(f"Layout must be {' or '.join(LAYOUTS)}, not {values['Layout']!r}")
    if role == "decode" and values["Layout"] != "strided":
        raise HeaderError("a decode kernel reads the cache in place: Layout must be strided")
    return values


def of_file(file: Path) -> VersionHeader:
    """Return the header of a version file of no ladder; raises HeaderError."""
    if not file.is_file():
        raise HeaderError(f"there is no file {file}")
    place = hashlib.sha256(str(file.absolute()).encode()).hexdigest()[:8]
    return replace(parse_header(file, f"file_{place}_"), label=file.stem)


def race_checked(version: VersionHeader) -> VersionHeader:
    """Return the version with a flag that makes the emulator report races."""
    return replace(version, op=f"{version.op}_races", flags=(*version.flags, RACES))


def csrc_of(version: VersionHeader) -> Path:
    """Return the csrc folder that contains a version file, else this package's."""
    return root if ((root := version.path.parent.parent) / "attention.h").exists() else CSRC
