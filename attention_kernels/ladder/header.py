"""The comment that opens a version file: what a rung of a ladder says of itself."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from attention_kernels.errors import AttentionError

CSRC = Path(__file__).resolve().parents[1] / "csrc"
FIELDS = ("Change", "Why", "Cost", "Tile", "Layout", "Flags", "Expect")
LAYOUTS = ("contiguous", "strided")
HEAD_DIMS = (32, 64, 128)
# What a version takes, where that is not float32 with every one of HEAD_DIMS.
TAKES = re.compile(
    r"(float16|bfloat16|float32|float64)(?:, head_dim (\d+(?: \d+)*))?(, on the CPU)?"
)


class HeaderError(AttentionError, ValueError):
    """A version file's name or header is not what parse_header() reads."""


@dataclass(frozen=True)
class VersionHeader:
    """What a version file says of itself.

    name: the version's namespace, e.g. "v07"; op: its op in torch.ops.attention_kernels.
    layout: "contiguous", or "strided" where the kernel reads strided q, k and v.
    flags: compiler flags of this version on; the rest is prose, one line each.
    dtype, head_dims, is_host: from the line that may follow Layout, `Takes:  float16, head_dim 32
    64`, or `float32, on the CPU` for host code, which is neither emulated nor built for a GPU.
    """

    path: Path
    number: int
    name: str
    op: str
    title: str
    change: str
    why: str
    cost: str
    tile: str
    layout: str
    flags: tuple[str, ...]
    expect: str
    dtype: str = "float32"
    head_dims: tuple[int, ...] = HEAD_DIMS
    is_host: bool = False


def version_files(folder: Path) -> list[Path]:
    """The folder's version files, v<number>_<what>.cu, by number: the one list of versions."""
    found = [path for path in folder.glob("v*_*.cu") if re.match(r"v\d+_", path.name)]
    return sorted(found, key=lambda path: (version_number(path), path.name))


def version_number(path: Path) -> int:
    """The number in the name of a version file."""
    return int(path.name[1:].split("_")[0])


def versions(folder: Path = CSRC / "fp32", op_prefix: str = "") -> list[VersionHeader]:
    """The parsed headers of the folder's version files, by number; raises HeaderError."""
    return [parse_header(path, op_prefix) for path in version_files(folder)]


def parse_header(path: Path, op_prefix: str = "") -> VersionHeader:
    """Read the comment that opens a version file.

    Its first line is `// v07 - what changed`; the fields of FIELDS follow in order, each on one or
    more lines. Raises HeaderError naming the file and what is wrong with it.
    """

    def wrong(what: str) -> HeaderError:
        return HeaderError(f"{path.name}: {what}")

    named = re.fullmatch(r"(v\d+)_\w+\.cu", path.name)
    if not named:
        new = path.with_name(f"v01_{re.sub(r'[^A-Za-z0-9]+', '_', path.stem)}.cu")
        rename = shlex.join(["mv", str(path), str(new)])
        raise wrong(f"a version file is named v<number>_<what>.cu: {rename}")
    text = path.read_text(encoding="utf-8", errors="replace")
    comment = itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
    first, *lines = [line[2:].strip() for line in comment] or [""]
    title = re.fullmatch(rf"{named[1]} - (\S.*)", first)
    if not title:
        raise wrong(f"the first line must be `// {named[1]} - <what changed>`")
    values: dict[str, str] = {}
    field = None
    for line in lines:
        if start := re.match(rf"({'|'.join(FIELDS)}|Takes):\s*(.*)", line):
            field = start[1]
            if field in values:
                raise wrong(f"the header has {field} twice")
            values[field] = start[2]
        elif field:
            values[field] = f"{values[field]} {line}".strip()
    if missing := [name for name in FIELDS if not values.get(name)]:
        raise wrong(f"the header lacks {', '.join(missing)}")
    order, takes = list(values), TAKES.fullmatch(values.pop("Takes", "float32"))
    if takes is None:
        raise wrong("Takes is like `float16, head_dim 32 64`")
    if order not in (list(FIELDS), [*FIELDS[:5], "Takes", *FIELDS[5:]]):
        raise wrong(f"the header's order is {', '.join(FIELDS)}")
    if values["Layout"] not in LAYOUTS:
        raise wrong(f"Layout is {' or '.join(LAYOUTS)}, not {values['Layout']!r}")
    flags = values.pop("Flags")
    try:
        split = () if flags == "(none)" else tuple(shlex.split(flags))
    except ValueError as error:
        raise wrong(f"Flags: {error}") from error
    prose = {name.lower(): value for name, value in values.items()}
    names = {"name": named[1], "op": op_prefix + named[1], "title": title[1]}
    return VersionHeader(
        path.absolute(),
        version_number(path),
        flags=split,
        dtype=takes[1],
        head_dims=tuple(map(int, takes[2].split())) if takes[2] else HEAD_DIMS,
        is_host=takes[3] is not None,
        **names,
        **prose,
    )


def csrc_of(version: VersionHeader) -> Path:
    """The csrc that a version file lies in, else this package's."""
    return root if ((root := version.path.parent.parent) / "attention.h").exists() else CSRC
