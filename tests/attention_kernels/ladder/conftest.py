"""A small tree like csrc, and a script that logs its calls and runs the real compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from attention_kernels.ladder import compilers, header

HEADER = """\
// {name} - {title}
//
// Change: one thing,
//         told on two lines.
// Why:    because.
// Cost:   none.
// Tile:   4 x 4
// Layout: contiguous
// Flags:  -DTHIS --use_fast_math
// Expect: less.

#include "common.cuh"
"""
# Logs each call to $NOTED and runs $FIRST before the compiler.
COMPILER = """\
#!/bin/sh
case "$*" in *--version*) echo "compiler $VERSION"; exit;; esac
echo "$*" >> "$NOTED"
eval "$FIRST"
exec {gxx} "$@"
"""


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    """A tree like csrc, with versions 1 and 2."""
    folder = tmp_path / "csrc"
    for name in ("attention.h", "common.cuh", "emulator/cuda_emulator.h", "emulator/runtime.cpp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("#pragma once\n")
    (folder / "common.cuh").write_text('#include "emulator/cuda_emulator.h"\n')
    (folder / "binding.cpp").write_text('#include "attention.h"\n')
    (folder / "fp32").mkdir()
    for name, stem in (("v01", "v01_first"), ("v02", "v02_second")):
        (folder / "fp32" / f"{stem}.cu").write_text(HEADER.format(name=name, title="a change"))
    return folder


@pytest.fixture
def first(csrc: Path) -> header.VersionHeader:
    return header.parse_header(csrc / "fp32/v01_first.cu")


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """An empty cache and a compiler that logs its calls; calls() returns those since the last."""
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    compiler, noted = tmp_path / "compiler", tmp_path / "noted"
    compiler.write_text(COMPILER.format(gxx=shutil.which(str(compilers.find_gxx()))))
    compiler.chmod(0o755)
    noted.touch()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("NOTED", str(noted))
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTENTION_KERNELS_FLAGS", raising=False)
    compilers.asked.cache_clear()

    def calls() -> list[str]:
        lines = noted.read_text().splitlines()
        noted.write_text("")
        return lines

    return calls
