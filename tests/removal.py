"""Remove each wait, fence and barrier of a kernel in turn: does the emulator notice?

removals.toml says for each of them what the emulator reports, or why nothing needs it. In a copy of
the source, a variable says which call is left out, so one build serves all of them.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest

from attention_kernels import ladder
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import KERNEL_ERRORS, run_case
from attention_kernels.ladder import header
from attention_kernels.ladder.entry import slot_kernel
from gpt2_infer.engines import fused
from tests.conftest import version_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "ATTENTION_REMOVED_SITE"
KEPT = (
    "#ifndef KEPT\n#define KEPT\n"
    'extern "C" char* getenv(const char*) noexcept; extern "C" int atoi(const char*) noexcept; '
    "inline bool kept_site(int site) { "
    f'const char* removed = getenv("{VARIABLE}"); return !removed || atoi(removed) != site; }}'
    "\n#endif"
)
# Functions of CUDA, ptx.cuh, tma.cuh and wgmma.cuh that order something, the kernels' own that
# do nothing else, and the conditions of loops that wait. A shuffle or a vote is an operation.
CALL = re.compile(
    r"\b(?:\w+(?:::|\.))?(?!__(?:shfl|ballot|any|all|match|reduce|syncthreads_and))"
    r"\w*(?:(?<!a)sync|fence|wait|arrive|commit|expect|allow_next|_turn)\w*(?:<\w+>)?(?=\()"
    r"|!ptx::barrier_test(?=\()|y == y"
)
FUNCTION = re.compile(
    r"(?:__device__|__global__)[\w\s:<>*&,]*?(?:__launch_bounds__\([^{;]*?\)\s+)?\b(\w+)\("
)
SOURCE, LAYERS, PARSE = fused.SOURCE, "layers_at_once.cuh", header.parse_header
INCLUDE = '#include "fp32/three_products.cuh"'  # a version's copy has the text in its place
PRODUCTS = (header.CSRC / "fp32" / "three_products.cuh").read_text("utf-8")
STEP = {file.name: file.read_text("utf-8") for file in sorted(SOURCE.parent.glob("step/*"))}
VERSIONS = {
    file.name: {file.name: file.read_text("utf-8").replace(INCLUDE, PRODUCTS)}
    for file in sorted((header.CSRC / "fp32").glob("v*.cu"))
    if file.name >= "v28"
}
KERNEL = header.CSRC / "slot" / "decode_kernel.cuh"
SLOT = {
    name: KERNEL.with_name(name).read_text("utf-8")
    for name in ("v01_plain.cuh", "v03_early_loads.cuh", "decode_kernel.cuh")
}
TABLE = tomllib.loads((Path(__file__).with_name("removals.toml")).read_text("utf-8"))
Run = Callable[[], object]


@dataclass(frozen=True)
class Site:
    """A call in a source, from `start` up to `end`."""

    file: str
    name: str
    """The function that it is in, and its text; which one of several that are equal, from 2 on."""
    start: int
    end: int


def sites(sources: Mapping[str, str]) -> Iterator[Site]:
    """Find the calls in sources, by file name, in order."""
    for file, source in sources.items():
        text = re.sub("//.*", lambda comment: " " * len(comment[0]), source)
        seen = Counter[str]()
        for found in CALL.finditer(text):
            end, depth = found.end(), 0
            while text[end] == "(" or depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            if text[end : end + 2] == " {":
                continue  # a definition
            function = [*FUNCTION.finditer(text, 0, found.start())][-1][1]
            name = f"{function}: {' '.join(text[found.start() : end].split())}"
            seen[name] += 1
            name += f" ({seen[name]})" if seen[name] > 1 else ""
            yield Site(file, name, found.start(), end)


def droppable(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the sources of one build, in which VARIABLE is the number of the site left out."""
    changed = dict(sources)
    for number, site in reversed([*enumerate(sites(sources))]):
        text = changed[site.file]
        call, kept = text[site.start : site.end], f"kept_site({number})"
        if call.startswith("!"):
            call = f"{kept} && {call}"
        elif call == "y == y":
            call = f"(!{kept} || {call})"
        else:
            call = f"({kept} ? (void)({call}) : (void)0)"
        changed[site.file] = text[: site.start] + call + text[site.end :]
    return {
        file: text.replace("\n\nnamespace", f"\n{KEPT}\nnamespace", 1)
        for file, text in changed.items()
    }


def use_droppable_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine build the droppable copy of its step."""
    texts, text = droppable(STEP), SOURCE.read_text("utf-8")
    everything = text + repr(texts)
    for name, part in texts.items():
        moved = part.replace("../../../csrc", "../../../../gpt2_infer/csrc")
        version_file(f"step/{name}", moved, everything)
    monkeypatch.setattr(fused, "SOURCE", version_file(SOURCE.name, text, everything))
    # A process cannot load the ops of a second copy.
    monkeypatch.setattr(header, "parse_header", lambda path, _: PARSE(path, "droppable_"))


def attention_runs(file: str, build: str) -> list[Run]:
    """Return calls of the droppable copy of a version; together they take all of its roads.

    build: "races" or "". Some tiles are not full, and blocks divide the keys where there are more
    multiprocessors than blocks.
    """
    (text,) = droppable(VERSIONS[file]).values()
    version = PARSE(version_file(file, text), "droppable_")
    version = header.race_checked(version) if build else version
    spec = ladder.backend(f"TEST_{version.op.upper()}", "test", version)
    spec.prepare("cpu")
    seqlen = 330 if version.needs_exactly else 150  # more tiles than there are slots for

    def run(is_causal: bool, multiprocessors: str, seqlen: int, head_dim: int) -> None:
        with mock.patch.dict(os.environ, ATTENTION_EMULATOR_MULTIPROCESSORS=multiprocessors):
            case = Case(seqlen, head_dim, 4.0, num_heads=1, is_causal=is_causal)
            verdict = run_case(spec, case, "cpu")
        assert verdict.passed, verdict

    counts = ("1", "8") if "kDividesKeys" in text else ("1",)
    how = [(*some, seqlen, spec.head_dims[0]) for some in itertools.product((True, False), counts)]
    how += [(False, "1", 1030, other) for other in spec.head_dims[1:]]  # version 39's longer blocks
    return [functools.partial(run, *some) for some in how]


def slot_runs(build: str) -> list[Run]:
    """Return calls of the droppable copies of slots' files, in the kernel that calls them."""
    *files, called = (version_file(name, text) for name, text in droppable(SLOT).items())

    def run(version: header.VersionHeader) -> None:
        text = version.path.read_text("utf-8").replace(str(KERNEL), str(called))
        version = replace(version, path=version_file("slot.cu", text), dtypes=("float32",))
        version = header.race_checked(version) if build else version
        spec = ladder.backend(f"TEST_{version.op.upper()}", "test", version)
        verdict = run_case(spec, DecodeCase(64, lengths=(1, 300), max_seqlen=300), "cpu")
        assert verdict.passed, verdict

    kernels = (slot_kernel(header.of_file(file), file.parent) for file in files)
    return [functools.partial(run, kernel) for kernel in kernels]


def notice(number: int, runs: Sequence[Run], orders: Sequence[str] = ("",)) -> str:
    """Return what is noticed first without a site, in any of some orders; "" if nothing."""
    for order, run in itertools.product(orders, runs):
        environment = {VARIABLE: str(number), "ATTENTION_EMULATOR_ORDER": order}
        try:
            with mock.patch.dict(os.environ, environment):
                run()
        except AssertionError:
            return "wrong output"
        except KERNEL_ERRORS as error:
            return str(error.__cause__ or error)
    return ""


def rows(key: str) -> list[tuple[str, str, str]]:
    """Return a table of removals.toml: the file, the site, and what is said of it."""
    names = {re.split("[_.]", file)[0]: file for file in (*VERSIONS, *STEP, *SLOT)}
    return [
        (names[version], name, said)
        for versions, name, said in TABLE[key]
        for version in versions.split()
    ]
