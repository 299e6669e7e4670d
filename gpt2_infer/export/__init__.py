"""Write a version file as a repository of its own: a kernel for Hugging Face's Hub.

Hugging Face's kernel-builder builds the repository, which is made of the templates in hub/ and of
files of csrc, and kernels.get_kernel() loads the result. The folder's name is the kernel's. A
plug-in for pip is a copy of examples/my_backend instead: docs/adding-a-kernel.md.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import TypeAlias

from attention_kernels import UnsupportedError, registry
from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.header import VersionHeader
from attention_kernels.ladder.op import SCHEMAS
from gpt2_infer.errors import RequestError
from gpt2_infer.files import check_writable

Files: TypeAlias = dict[str, bytes]  # by path in a folder
HUB = Path(__file__).parent / "hub"
NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")  # the Hub takes no others
# kernel-builder compiles for these with CUDA 13; a kernel that needs more than the first lists
# those that it runs on.
CAPABILITIES = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "11.0", "12.0+PTX")


@dataclass(frozen=True)
class Export:
    """A kernel's files, read before anything runs them, and the folder to write."""

    version: VersionHeader
    folder: Path
    own: Files
    """The version file, and the files that it includes from its folder."""
    shared: Files
    """The files of csrc that these include."""

    @property
    def name(self) -> str:
        """The name of the kernel on the Hub."""
        return self.folder.name.replace("_", "-")

    @property
    def module(self) -> str:
        """The name of the Python module."""
        return self.folder.name.replace("-", "_")

    @property
    def kernel(self) -> str:
        """The path of the version file in the folder."""
        # CMake takes no other characters.
        return "csrc/" + re.sub(r"[^\w.-]+", "_", self.version.path.name, flags=re.ASCII)

    def write(self, verdict: str, times: str) -> list[str]:
        """Write the folder and return the paths of its files.

        verdict, times: what the README says about the kernel, in Markdown.

        Raises RequestError if a source has changed since it was read, or if the folder exists.
        """
        if sources(self.version) != (self.own, self.shared):
            raise RequestError(f"{self.version.path.name} changed while it was verified: try again")
        check_folder(self.folder)
        files = {f"csrc/{name}": text for name, text in {**self.shared, **self.own}.items()}
        files[self.kernel] = files.pop(f"csrc/{self.version.path.name}")
        binding = (header.csrc_of(self.version) / "binding.cpp").read_text()
        files |= {
            "README.md": self._fill("README.md", verdict=verdict, times=times),
            "build.toml": self._fill("build.toml.in"),
            "flake.nix": self._fill("flake.nix.in"),
            "LICENSE": (HUB / "LICENSE").read_bytes(),
            "torch-ext/torch_binding.cpp": self._fill("torch_binding.cpp.in", binding=binding),
            f"torch-ext/{self.module}/__init__.py": self._fill("__init__.py.in"),
            f"tests/test_{self.module}.py": self._fill("test.py.in"),
            f"benchmarks/benchmark_{self.module}.py": self._fill("benchmark.py.in"),
        }
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        # kernel-builder makes the page on the Hub from it
        (self.folder / "CARD.md").symlink_to("README.md")
        return sorted(files)

    def _fill(self, template: str, **more: str) -> bytes:
        """Return a template with the export's values."""
        version, dtypes = self.version, " ".join(self.version.dtypes)
        needs = [arch for arch in CAPABILITIES if version.compiles_for(re.sub(r"\D", "", arch))]
        macros = compilers.macros(replace(version, op=version.name))
        sources = [f"csrc/{name}" for name in (*self.own, *self.shared)]
        sources[sources.index(f"csrc/{version.path.name}")] = self.kernel
        values = {
            "name": self.name,
            "module": self.module,
            "kernel": self.kernel,
            "title": version.title[0].upper() + version.title[1:].rstrip("."),
            "op": version.name,
            "schema": SCHEMAS[version.role],
            "dtype": dtypes,
            "dtypes": ", ".join(version.dtypes),
            "head_dims": ", ".join(map(str, version.head_dims)),
            "is_contiguous": str(version.layout == "contiguous"),
            "sources": json.dumps(sorted(sources)),
            "flags": json.dumps([*macros, *version.flags]),
            "capabilities": f"\ncuda-capabilities = {json.dumps(needs)}"
            * (version.needs is not None),
        }
        return Template((HUB / template).read_text()).substitute(values | more).encode()


def plan(version: VersionHeader, folder: Path) -> Export:
    """Read a version and the files that it includes, for a folder that does not exist yet.

    Raises RequestError for a folder that cannot be used, UnsupportedError for a version that the
    Hub does not take.
    """
    folder = folder.absolute()
    check_folder(folder)
    if reasons := [*_refusals(version)]:
        raise UnsupportedError(version.path.name, reasons)
    return Export(version, folder, *sources(version))


def _refusals(version: VersionHeader) -> Iterator[str]:
    if version.role != "attention":
        yield f"role {version.role} (export takes attention)"
    if version.entry:
        yield "an Entry (export takes a file that defines launch())"
    if len(version.dtypes) > 1:
        yield f"{len(version.dtypes)} dtypes (export takes one: a repository has one op)"
    if version.is_host:
        yield "host code (export takes kernels for a GPU)"


def check_folder(folder: Path) -> None:
    """Raise RequestError if the folder exists, cannot be made, or has no name for a module."""
    if folder.exists():
        raise RequestError(f"--out: {folder} exists, and nothing is overwritten")
    check_writable(folder)
    if len(folder.name) < 2 or not NAME.fullmatch(folder.name):
        raise RequestError(
            f"--out: the folder's name becomes the kernel's, so it must be lower-case words "
            f"joined by - or _, such as fast-rows, not {folder.name!r}"
        )
    module = folder.name.replace("-", "_")
    plugins = {entry_point.module for entry_point in registry.plugins()}
    if importlib.util.find_spec(module) and module not in plugins:
        raise RequestError(f"--out: Python has a module {module} already: choose another name")


def sources(version: VersionHeader) -> tuple[Files, Files]:
    """Return the files that a version is compiled from: its own, and those of csrc.

    The emulator's are left out. Raises RequestError for a file in neither folder.
    """
    own: Files = {}
    shared: Files = {}
    folder, csrc = version.path.parent, header.csrc_of(version)
    for file in build.sources(version):
        # An environment with this package, csrc included, may be in the version file's folder.
        is_own = file.is_relative_to(folder) and not file.is_relative_to(csrc)
        if is_own or file == version.path:
            own[str(file.relative_to(folder))] = file.read_bytes()
        elif not file.is_relative_to(csrc):
            raise RequestError(f"{version.path.name} includes {file}, from outside its folder")
        elif (name := file.relative_to(csrc)).parts[0] not in ("emulator", "binding.cpp"):
            shared[str(name)] = file.read_bytes()
    return own, shared
