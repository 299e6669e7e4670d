"""The process that a kernel runs in, and nothing else does.

A Worker loads a backend in a process of its own, gives it inputs and takes outputs. The judge makes
the inputs, holds the reference and the budgets, and loads nothing of the backend's. Replies are
small messages of a fixed form; tensors are in memory that the judge owns and copies once, so what a
kernel writes later changes nothing. Workers are forked from a server that has torch imported.

A process of the same user could read the judge's memory or trace it; or the server's, from which
all workers come; or another worker's, and take its outputs. So on Linux all of them are "not
dumpable", which denies this to every process but root's.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from attention_kernels import ladder, list_backends, registry
from attention_kernels.child import check_time_limit
from attention_kernels.errors import (
    AttentionError,
    UnavailableBackendError,
    UnknownBackendError,
)
from attention_kernels.judge.blocks import Block
from attention_kernels.judge.caller import Caller, failure, poison_freed_memory
from attention_kernels.judge.calls import Calls, Outputs, Reply, Request
from attention_kernels.judge.process import EndedError, Process, shared_memory
from attention_kernels.ladder import build
from attention_kernels.registry import BackendSpec, Description

TIMEOUT_S = 300.0  # for one request
LOADING_TIMEOUT_S = 1800.0  # for imports and a build with nvcc
# Timed calls are repeated for this long, as often as this at most, for the judge's own clock.
PASSES_S, MOST_PASSES = 0.02, 1000


class Described(msgspec.Struct, frozen=True):
    """A backend as a process that has loaded its module describes it."""

    description: Description
    reasons: dict[str, str | None]
    """Why it cannot run on a device type, or None."""
    files: tuple[str, ...]
    """Its source files."""

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


class Facts(msgspec.Struct, frozen=True):
    """What a worker says of its backend."""

    has_attention: bool
    has_decode: bool
    described: Described


@dataclass(frozen=True)
class Timing:
    """The outputs of timed calls, and their seconds."""

    seed: int
    """The seed of the factors by which the inputs were multiplied when the clock had started."""
    checksum: int
    """The checksum of the outputs that came when the clock stopped."""
    outputs: list[Tensor]
    workspace: int
    """The peak memory of a call on CUDA in bytes, inputs and output apart."""
    once: float
    """By the worker's clock, with numbers that it saw for the first time."""
    once_outside: float
    """The same by the judge's clock, which also runs while the inputs are multiplied."""
    often: float
    """By the worker's clock, a mean over several passes."""
    often_outside: float
    """By the judge's clock, a mean over the same passes."""
    passes: int


class Runner:
    """A backend that answers requests, one at a time, in this process.

    Nothing keeps its kernel from the judge. So it serves backends that only this process knows, in
    a test or a notebook; all others have a Worker.
    """

    calls = 0
    """The number of calls that requests have asked for."""

    def __init__(self, spec: BackendSpec, device: str) -> None:
        self.spec, self.device = spec, device
        self._given, self._taken = Block(), Block()

    @functools.cached_property
    def _caller(self) -> Caller:
        return Caller(self.spec, self.device, self._given, self._taken)

    @property
    def is_emulated(self) -> bool:
        """Whether its kernels run in the CPU emulator."""
        return self.device in self.spec.emulated_on

    @property
    def has_attention(self) -> bool:
        """Whether it has an attention kernel."""
        return self.spec.has_attention()

    @property
    def has_decode(self) -> bool:
        """Whether it has a decode kernel."""
        return self.spec.has_decode(self.device)

    def send(self, request: Request) -> None:
        """Start on a request."""
        self._request = request
        self.calls += len(request.calls.order)
        self._given.grow(request.calls.given_bytes)
        self._taken.grow(request.calls.taken_bytes)
        self._given.tensor[: len(request.block)] = request.block

    def receive(self) -> Outputs:
        """Return the outputs of the request that was sent.

        Raises UnsupportedError, UnavailableBackendError, CallError or EndedError.
        """
        self._reply().check(self.spec.name)
        return Outputs(
            *self._request.outputs(self._taken.tensor), self._request.fault(self._given.tensor)
        )

    def has_answered(self) -> bool:
        """Return whether receive() would return at once."""
        return True

    def call(self, request: Request) -> Outputs:
        """Send a request and receive its outputs."""
        self.send(request)
        return self.receive()

    def time(self, request: Request) -> Timing:
        """Time the calls of a request once and then several times, by two clocks.

        Only the word to start tells the worker by what to multiply the inputs, so that it cannot
        compute an output earlier. Raises the errors of receive().
        """
        self.send(request)
        replies: list[Reply] = []
        seconds: list[float] = []
        outputs: list[Tensor] = []
        seed, passes = secrets.randbelow(2**62), 0
        started = time.perf_counter()

        def between(reply: Reply) -> bytes:
            """Stop the judge's clock, take the worker's reply to a step, and start the clock."""
            nonlocal passes, started
            seconds.append(time.perf_counter() - started)
            reply.check(self.spec.name)
            replies.append(reply)
            if len(replies) == 3:
                outputs.extend(request.outputs(self._taken.tensor)[0])
                wanted = PASSES_S / max(replies[1].seconds, PASSES_S / MOST_PASSES)
                passes = math.ceil(wanted)
            started = time.perf_counter()
            return str(passes or seed).encode()

        between(self._take_steps(between))
        ready, once, _, often = replies
        return Timing(
            seed=seed,
            checksum=once.checksum,
            outputs=outputs,
            workspace=ready.workspace,
            once=once.seconds,
            once_outside=seconds[1],
            often=often.seconds / passes,
            often_outside=seconds[3] / passes,
            passes=passes,
        )

    def close(self) -> None:
        """End its process, if it has one."""

    def _take_steps(self, between: Callable[[Reply], bytes]) -> Reply:
        self._caller.wait = between
        return self._reply()

    def _reply(self) -> Reply:
        return self._caller.call(self._request.calls)


class Worker(Runner):
    """A backend in a process of its own: a name, or a version file of no ladder.

    device: "cuda", the current CUDA device, "cpu", or "" for cuda if the backend runs there, else
    cpu. timeout_s: the limit of a request in seconds. races: build what finds races at once, for
    an emulated version, and not when it is first called. meanwhile: called with this Worker while
    the process loads a version file, until has_answered(). Raises UnavailableBackendError if the
    backend cannot be built or loaded, EndedError if loading it ends the process,
    UnknownBackendError, HeaderError or ArgumentError.
    """

    def __init__(
        self,
        what: str,
        device: str = "",
        *,
        timeout_s: float = TIMEOUT_S,
        races: bool = False,
        meanwhile: Callable[[Runner], object] = lambda _: None,
    ) -> None:
        check_time_limit(timeout_s)
        self.timeout_s = timeout_s
        known = _known(what)
        memory = shared_memory(), shared_memory()
        self._given, self._taken = map(Block, memory)
        has_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_device() if has_started else 0
        self._process = Process(_serve, memory, what, device, current, races)
        try:
            if known and known.version:
                self.spec, self.device = known, device or registry.preferred_device(known)
                decodes = known.version.role == "decode"
                self._has = not decodes, decodes
                meanwhile(self)
            reply = self._process.answer(max(timeout_s, LOADING_TIMEOUT_S))
            if reply.status == "unknown":
                raise UnknownBackendError(what, reply.reasons)
            if reply.status == "failed":
                raise EndedError(reply.text)
            reply.check(known.name if known else what)
            if not (known and known.version):
                facts = msgspec.json.decode(reply.text, type=Facts)
                self.spec = known or facts.described.spec()
                self.device = device or registry.preferred_device(self.spec)
                self._has = facts.has_attention, facts.has_decode
        except (msgspec.DecodeError, ValueError) as error:
            self.close()
            if isinstance(error, AttentionError):
                raise
            raise EndedError(f"it describes itself wrongly: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def has_attention(self) -> bool:
        """Whether it has an attention kernel."""
        return self._has[0]

    @property
    def has_decode(self) -> bool:
        """Whether it has a decode kernel."""
        return self._has[1]

    def send(self, request: Request) -> None:
        """Start on a request."""
        super().send(request)
        self._process.say(msgspec.json.encode(request.calls))

    def has_answered(self) -> bool:
        """Return whether receive() would return at once."""
        return self._process.has_answered()

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._given.close()
        self._taken.close()

    def _take_steps(self, between: Callable[[Reply], bytes]) -> Reply:
        for _ in range(3):
            self._process.say(between(self._reply()))
        return self._reply()

    def _reply(self) -> Reply:
        return self._process.answer(self.timeout_s)


def open_runner(
    what: str | BackendSpec,
    device: str = "",
    *,
    timeout_s: float = TIMEOUT_S,
    races: bool = False,
    meanwhile: Callable[[Runner], object] = lambda _: None,
) -> Runner:
    """Return a Worker, or a Runner for a backend that only this process knows.

    The arguments are those of Worker, whose errors it raises.
    """
    spec, name = (_known(what), what) if isinstance(what, str) else (what, _name(what))
    try:
        if name or spec is None:
            return Worker(name, device, timeout_s=timeout_s, races=races, meanwhile=meanwhile)
    except UnknownBackendError:
        if spec is None:
            raise
    assert spec is not None
    device = device or registry.preferred_device(spec)
    if reason := spec.unavailable_reason(device):
        raise UnavailableBackendError(spec.name, reason)
    return Runner(spec, device)


def _name(spec: BackendSpec) -> str:
    """Return what another process loads a backend by; "" if it cannot."""
    if spec.version and spec.family == "file":
        return str(spec.version.path)
    return spec.name if registry.registered(spec.name) is spec else ""


def _known(what: str) -> BackendSpec | None:
    """Return the backend without importing any plug-in; None if only a plug-in can have it."""
    return ladder.resolve(what) if what.endswith(".cu") else registry.registered(what)


def keep_plugins_out() -> None:
    """Let another process import the plug-ins, and register here what it says of their backends.

    Does nothing if this process has imported them already.
    """
    if registry.is_discovered() or not registry.plugins():
        return
    process = Process(_list_plugins, [])
    try:
        described = msgspec.json.decode(
            process.answer(LOADING_TIMEOUT_S).text, type=list[Described]
        )
        found = [one.spec() for one in described]
    except (EndedError, msgspec.DecodeError, ValueError) as error:
        reason = f"importing the plug-ins: {error}"
        found = [registry.unavailable("PLUGINS", "plug-in", reason)]
    finally:
        process.close()
    registry.adopt(found)


# ---- In the worker's process ---------------------------------------------------------------------


def _list_plugins(answer: Callable[[Reply], None], _: Callable[[], bytes]) -> None:
    """Import the plug-ins, and describe their backends."""
    shipped = {spec.name for spec in registry.shipped()}
    found = [describe_spec(spec) for spec in list_backends() if spec.name not in shipped]
    answer(Reply(text=msgspec.json.encode(found).decode()))


def _serve(
    answer: Callable[[Reply], None],
    wait: Callable[[], bytes],
    given: int,
    taken: int,
    what: str,
    device: str,
    current: int,
    races: bool,
) -> None:
    """Load a backend and answer requests until the judge ends this process."""

    def tell(reply: Reply) -> bytes:
        answer(reply)
        return wait()

    try:
        # A plug-in is imported to find its own backends only, not where it could slow others.
        spec = _known(what) or ladder.resolve(what)
        device = device or registry.preferred_device(spec)
        if device == "cuda" and torch.cuda.is_available():
            torch.cuda.set_device(current)
        if reason := spec.unavailable_reason(device):
            raise UnavailableBackendError(spec.name, reason)
        caller = Caller(spec, device, Block(given), Block(taken), tell)
        if device in spec.emulated_on:
            torch.set_num_threads(1)  # it only copies; the emulator has threads of its own
        if device == "cuda":
            poison_freed_memory(torch.empty(1, device=device))  # starts CUDA
        if races and spec.version and device in spec.emulated_on:
            ladder.build_all(device, [spec, caller.race_checked])
        spec.prepare(device)
        facts = Facts(spec.has_attention(), spec.has_decode(device), describe_spec(spec))
        answer(Reply(text=msgspec.json.encode(facts).decode()))
    except UnknownBackendError as error:
        return answer(Reply("unknown", reasons=error.nearest))
    except BaseException as error:
        return answer(failure(error))
    while True:
        answer(caller.call(msgspec.json.decode(wait(), type=Calls)))


def describe_spec(spec: BackendSpec) -> Described:
    """Describe a backend for a process that does not import it."""
    fields = [each.name for each in dataclasses.fields(Description)]
    return Described(
        Description(**{name: getattr(spec, name) for name in fields}),
        reasons={device: spec.unavailable_reason(device) for device in spec.device_types},
        files=tuple(sorted({str(path) for path in source_files(spec)})),
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
