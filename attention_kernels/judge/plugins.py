"""Plug-ins, which the judge never imports: another process does, and describes their backends."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attention_kernels import ladder, list_backends, registry
from attention_kernels.errors import UnavailableBackendError
from attention_kernels.judge.calls import Reply
from attention_kernels.judge.process import LOADING_TIMEOUT_S, EndedError, Process, decoded
from attention_kernels.ladder import build
from attention_kernels.registry import BackendSpec, Description


class Described(msgspec.Struct, frozen=True):
    """A backend as a process that has loaded its module describes it."""

    description: Description
    reasons: dict[str, str | None]
    """Why it cannot run on a device type, or None."""
    files: tuple[str, ...]
    """Its source files."""
    has: tuple[bool, bool]
    """Whether it has an attention and a decode kernel, if it is loaded."""

    def spec(self) -> BackendSpec:
        """Return a spec that says the same, whose kernels are in another process."""
        loader = Elsewhere(self.description.name, self.files)
        return BackendSpec(
            loader=loader, probe=self.reasons.get, **dataclasses.asdict(self.description)
        )


@dataclass(frozen=True)
class Elsewhere:
    """The loader of a backend that only its own process loads."""

    name: str
    files: tuple[str, ...]

    def __call__(self) -> Any:
        """Raise UnavailableBackendError."""
        raise UnavailableBackendError(self.name, "its plug-in is loaded in its own process only")


def keep_plugins_out() -> None:
    """Let another process import the plug-ins, and register the backends that it describes.

    Each is imported in a process of its own. Does nothing if this process has imported them.
    """
    registry.adopt(lambda: [x for each in registry.plugins() for x in _described(each.value)])


def find(what: str) -> BackendSpec:
    """Return ladder.resolve(what), but import no plug-in in this process to find it."""
    if spec := ladder.known(what):
        return spec
    keep_plugins_out()
    return ladder.resolve(what)


def _described(module: str) -> list[BackendSpec]:
    """Return what a process that imports a module of plug-ins says of their backends."""
    process, found = Process(_list_plugins, [], module), list[BackendSpec]()
    try:
        while len(found) < 1000 and (text := process.answer(LOADING_TIMEOUT_S).text):
            found.append(decoded(text, Described).spec())
    except (EndedError, msgspec.DecodeError, RecursionError) as error:
        reason = f"importing it: {error}"
        found = [registry.unavailable(f"PLUGIN_{module.upper()}", "plug-in", reason)]
    finally:
        process.close()
    return found


def describe_spec(spec: BackendSpec, has: tuple[bool, bool] = (False, False)) -> Described:
    """Describe a backend for a process that does not import it."""
    fields = [each.name for each in dataclasses.fields(Description)]
    return Described(
        Description(**{name: getattr(spec, name) for name in fields}),
        reasons={device: spec.unavailable_reason(device) for device in spec.device_types},
        files=tuple(sorted({str(path) for path in source_files(spec)})),
        has=has,
    )


def source_files(spec: BackendSpec) -> Iterator[Path]:
    """Yield the sources of a version's library, or a Python loader's file and package."""
    if spec.version:
        yield from build.sources(spec.version)
        return
    if isinstance(spec.loader, Elsewhere):
        yield from (path for path in map(Path, spec.loader.files) if path.is_file())
        return
    loader = inspect.unwrap(spec.loader)
    try:
        file = Path(inspect.getsourcefile(loader) or "")
    except TypeError:  # not a function: a partial, or another callable object
        return
    if not file.is_file():  # <stdin>, <string>
        return
    yield file
    package = loader.__module__.partition(".")[0]
    for folder in getattr(sys.modules.get(package), "__path__", ()):
        yield from (path for path in Path(folder).rglob("*.py") if path.is_file())


def caches(what: str) -> Path:
    """Return the folder in which the process of a backend keeps what it compiles.

    No other may write there. A plug-in's version files are built there, too. Raises OSError.
    """
    folder = build.cache_dir() / build.digest_name("worker", what)
    for each in folder.parent, folder:
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["ATTENTION_KERNELS_CACHE"] = str(folder)
    return folder


def _list_plugins(
    answer: Callable[[Reply], None], _: object, enclose: Callable[[Path], None], module: str
) -> None:
    """Import a module of plug-ins, and describe its backends; runs in another process."""
    enclose(caches(f"plug-in {module}"))
    shipped = {spec.name for spec in registry.shipped()}
    registry.discover(module)
    for spec in list_backends():
        if spec.name not in shipped:
            answer(Reply(text=msgspec.json.encode(describe_spec(spec)).decode()))
    answer(Reply())
