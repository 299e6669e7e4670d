"""Time wheels from pip install to their first tokens."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attention_kernels import child
from gpt2_infer.bench.record import Row
from gpt2_infer.bench.study import Contender, InstallStudy, RejectedError, Subject
from gpt2_infer.errors import RequestError

_SECONDS = 900.0  # limit of pip, and of the command, which may compile
PARTS = {"kernels_bytes": "/prebuilt/", "model_bytes": "/demo_model/"}


class Command(msgspec.Struct, frozen=True):
    """The options of the command that an installed wheel runs."""

    options: str

    def __str__(self) -> str:
        return self.options


class Installs(Subject[Command]):
    """Installs wheels, each into a new folder with an empty cache, and runs the command.

    The dependencies are those of this process. So are the compilers of a pure wheel; a wheel for a
    platform brings its kernels, and runs where no compiler can be found. All must generate the same
    tokens.
    """

    warm_up = 0

    def __init__(self, study: InstallStudy) -> None:
        self.rounds = study.rounds
        self.cells = [Command(study.options)]
        self.wheels = sorted(Path(study.folder).absolute().glob("*.whl"))
        if not self.wheels:
            raise RequestError(f"{study.folder} has no wheels: build one with `make wheel`")

    def contenders(self, cell: Command) -> Iterator[Contender]:
        """Yield each wheel."""
        first: list[Any] = []
        for wheel in self.wheels:
            row = Row(contender=wheel.name, metric="time", unit="s", extra=_sizes(wheel))
            yield Contender(row, functools.partial(self._sample, wheel, row, cell, first))

    def _sample(self, wheel: Path, row: Row, cell: Command, first: list[Any]) -> dict[str, float]:
        has_compilers = wheel.stem.endswith("-any")
        pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-cache-dir"]
        with tempfile.TemporaryDirectory() as folder:
            site, nothing = f"{folder}/site", f"{folder}/nothing"
            paths = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
            settings = {"PYTHONPATH": os.pathsep.join(paths), "ATTENTION_KERNELS_CACHE": folder}
            if not has_compilers:
                settings |= {"PATH": nothing, "CUDACXX": nothing, "CXX": nothing}
            started = time.perf_counter()
            _python([*pip, "--target", site, str(wheel)], {}, folder)
            installed = time.perf_counter()
            words = ["-m", "gpt2_infer", *cell.options.split(), "--json"]
            done = json.loads(_python(words, settings, folder))
            finished = time.perf_counter()
        report, tokens = done["report"], [one["tokens"] for one in done["results"]]
        row.extra["has_compilers"] = has_compilers
        row.extra |= {name: report[name] for name in ("attention", "engine", "prebuilt_backends")}
        first.append(tokens)
        if tokens != first[0]:
            raise RejectedError("its tokens differ from the first wheel's")
        return {
            "time": finished - started,
            "install": installed - started,
            "run": finished - installed,
        }


def _sizes(wheel: Path) -> dict[str, int]:
    """Return the bytes of a wheel, and those of its parts."""
    with zipfile.ZipFile(wheel) as archive:
        files = archive.infolist()
    parts = {
        name: sum(file.compress_size for file in files if folder in file.filename)
        for name, folder in PARTS.items()
    }
    return {"bytes": wheel.stat().st_size, **parts}


def _python(words: Sequence[str], settings: Mapping[str, str], folder: str) -> str:
    """Run Python in a folder with these variables; return its output or raise RequestError."""
    command, environment = [sys.executable, *words], {**os.environ, **settings}
    done = child.run(command, timeout_s=_SECONDS, env=environment, folder=folder)
    if done.status:
        raise RequestError(f"python {' '.join(words)} {done.how}: {done.err[-1000:]}")
    return done.out
