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

from attention_kernels import list_backends, registry
from attention_kernels.errors import UnavailableBackendError
from attention_kernels.judge.calls import Reply
from attention_kernels.judge.process import LOADING_TIMEOUT_S, EndedError, Process
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

    Does nothing if this process has imported them already.
    """
    if registry.is_discovered() or not registry.plugins():
        return
    process = Process(_list_plugins, [])
    try:
        described = msgspec.json.decode(
            process.answer(LOADING_TIMEOUT_S).text, type=list[Described]
        )
        found = [each.spec() for each in described]
    except (EndedError, msgspec.DecodeError, ValueError) as error:
        reason = f"importing the plug-ins: {error}"
        found = [registry.unavailable("PLUGINS", "plug-in", reason)]
    finally:
        process.close()
    registry.adopt(found)


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
    answer: Callable[[Reply], None], _: Callable[[], bytes], enclose: Callable[[Path], None]
) -> None:
    """Import the plug-ins, and describe their backends; runs in another process."""
    enclose(caches("PLUGINS"))
    shipped = {spec.name for spec in registry.shipped()}
    found = [describe_spec(spec) for spec in list_backends() if spec.name not in shipped]
    answer(Reply(text=msgspec.json.encode(found).decode()))
