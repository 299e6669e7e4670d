"""Print the lines of code of each room, and fail if one exceeds its limit in pyproject.toml.

A line counts unless it is blank, a comment or part of a docstring. A limit is raised only in a
commit that says why.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
KERNELS = ("attention_kernels/backends/numpy/", "attention_kernels/backends/triton/")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def code_lines(source: str) -> int:
    """Return the number of lines of code of a module."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str()), lineno=first, end_lineno=int(last)):
                lines.difference_update(range(first, last + 1))
    return len(lines)


def room(name: str) -> str:
    """Return the room of a file: its package, or the tests."""
    if name.startswith(KERNELS):
        return "kernels in Python"
    first, second, *rest = [*name.split("/"), ""]
    return f"{first}/{second}" if first != "tests" and any(rest) else first


def main() -> int:
    """Print the table; return 1 if a room is over its limit or has none."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    files = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    sizes = collections.Counter[str]()
    for name in files:
        lines = code_lines((ROOT / name).read_text("utf-8"))
        sizes[room(name)] += lines
        if room(name) not in ("tests", "kernels in Python"):
            sizes["all but tests and kernels"] += lines
    limits = msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())["tool"]["size"]
    too_large = [name for name, size in sizes.items() if size > limits.get(name, 0)]
    for name, size in sizes.most_common():
        print(f"{size:7,} of {limits.get(name, 0):7,}  {name}{'  TOO LARGE' * (name in too_large)}")
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(main())
