"""The process that a kernel runs in, and nothing else does.

A Worker loads a backend in a process of its own, gives it inputs and takes outputs. The judge makes
the inputs, holds the reference and the budgets, and loads nothing of the backend's. Replies are
small messages of a fixed form; tensors are in memory that the judge owns and copies once, so what a
kernel writes later changes nothing. Workers are forked from a server that has torch imported.

A process of the same user could read the judge's memory or trace it; or the server's, from which
all workers come; or another worker's, and take its outputs. So on Linux all of them are "not
dumpable", which denies this to every process but root's. Isolation denies a worker the rest.
"""

from __future__ import annotations

import functools
import math
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from attention_kernels import errors, ladder, registry
from attention_kernels.child import check_time_limit
from attention_kernels.errors import RejectedTimeError, UnavailableBackendError, UnknownBackendError
from attention_kernels.judge import caller, calls, isolation, plugins, process
from attention_kernels.judge.process import LOADING_TIMEOUT_S, EndedError, Process, shared_memory
from attention_kernels.registry import BackendSpec

TIMEOUT_S = 300.0  # for one request
# Timed calls are repeated for this long by the judge's own clock: more than ten times
# clock.ANSWER_S.
REPEATED_S = {"cuda": 0.02, "cpu": 0.5}
# How many of the repeated calls are made again in a sample; how many times, if the output differs.
CHECKED, ALIKE = 4, 4
_WRONG_FACTS = msgspec.DecodeError, ValueError, RecursionError


@dataclass(frozen=True)
class Again:
    """One of the repeated calls, made once more."""

    call: int
    """Its set of inputs."""
    before: int
    """The total_of() the output before it, as the worker told it when the clock had stopped."""
    output: Tensor


@dataclass(frozen=True)
class Timing:
    """The outputs of timed calls, and their seconds."""

    seed: int
    """The seed of the factors by which the inputs were multiplied when the clock had started."""
    outputs: list[Tensor]
    """The outputs of the calls with new numbers."""
    unchained: dict[int, Tensor]
    """Some outputs of calls without the chain."""
    again: list[Again]
    """Some of the repeated calls."""
    is_reproducible: bool
    """Whether those had the same output each time."""
    fault: str
    """In what they differ from before, in words."""
    once: float
    """By the worker's clock, with numbers that it saw for the first time."""
    once_outside: float
    """The same by the judge's clock, which also runs while the inputs are multiplied."""
    often: float
    """By the worker's clock, a mean over several passes."""
    often_outside: float
    """By the judge's clock, a mean over the same passes."""
    unchained_outside: float
    """The same for passes whose calls do not depend on each other; on a CPU, often_outside."""
    passes: int


class Runner:
    """A backend that answers requests, one at a time, in this process.

    Its kernel could tamper with the judge, so it serves only backends that no other process can
    load, those of a test or a notebook; all others have a Worker.
    """

    def __init__(
        self,
        spec: BackendSpec,
        device: str = "",
        memory: tuple[calls.Block, calls.Block] | None = None,
        has: tuple[bool, bool] | None = None,
    ) -> None:
        """Load a backend; `has` says whether it has attention and decode kernels, if known."""
        self.spec, self.device = spec, registry.device_for(spec, device)
        self._given, self._taken = memory or (calls.Block(), calls.Block())
        has = has or (spec.has_attention(), spec.has_decode(self.device))
        self.has_attention, self.has_decode = has
        self.calls = 0
        """The number of calls that requests have asked for."""
        self.not_isolated = ["it runs in the judge's own process"]
        """What keeps its kernel from being isolated, in sentences."""
        self._timed_calls: calls.Calls | None = None
        self._captured = set[int]()

    @property
    def is_emulated(self) -> bool:
        """Whether its kernels run in the CPU emulator."""
        return self.spec.is_emulated(self.device)

    def load(self) -> None:
        """Wait until the backend is built and loaded.

        Raises UnavailableBackendError, or EndedError if that ends its process.
        """

    def _send(self, request: calls.Request) -> None:
        """Send a request, and wait until its calls have been made, or prepared to be timed."""
        self._request = request
        self.calls += len(request.calls.order)
        self._given.grow(request.calls.given_bytes)
        self._taken.grow(request.calls.taken_bytes)
        given = slice(request.calls.place, request.calls.given_bytes)
        self._given.tensor[given] = request.block
        if request.calls != self._timed_calls:  # the worker drops its graphs
            self._captured.clear()
        self._timed_calls = request.calls if request.calls.clock else None
        self._say(request.calls)
        self._reply()

    def call(self, request: calls.Request) -> calls.Outputs:
        """Make the calls of a request, and return their outputs.

        Raises UnsupportedError, UnavailableBackendError, CallError or EndedError.
        """
        self._send(request)
        asked, count = request.calls, len(request.calls.order)
        # Copies: a kernel can change the blocks.
        outputs = asked.outputs(self._taken.tensor[: asked.taken_bytes].clone())
        after = self._given.tensor[asked.place : asked.given_bytes].clone()
        return calls.Outputs(outputs[:count], outputs[count:], request, after)

    def time(self, request: calls.Request, passes: int = 1) -> Timing:
        """Time the calls of a request once and then several times, by two clocks.

        The factors by which the inputs are multiplied come with the word to start, so the worker
        cannot compute an output earlier. With the word that they have ended come sums that bind all
        outputs: of the repeated calls, which each follow from the one before, some are made again.
        passes: a guess of how many last REPEATED_S. Raises RejectedTimeError if the outputs that
        count are not as promised, and the errors of call().
        """
        self._send(request)
        seed, count = secrets.randbelow(2**62), len(request.calls.order)
        once, once_outside = self._timed(calls.Start(seed))
        outputs = self._handed_over(range(count))
        unchained, unchained_s = dict[int, Tensor](), 0.0
        if self.device == "cuda":
            _, _, unchained_s = self._often(calls.Repeat(passes, chained=False), count)
            drawn = random.sample(range(count), min(CHECKED, count))
            unchained = dict(zip(drawn, self._handed_over(drawn), strict=True))
        passes, often, often_s = self._often(calls.Repeat(passes), count)
        again, is_reproducible, fault = self._again(passes)
        return Timing(
            seed=seed,
            outputs=outputs,
            unchained=unchained,
            again=again,
            is_reproducible=is_reproducible,
            fault=fault,
            once=once,
            once_outside=once_outside,
            often=often,
            often_outside=often_s,
            unchained_outside=unchained_s or often_s,
            passes=passes,
        )

    def _often(self, message: calls.Repeat, count: int) -> tuple[int, float, float]:
        """Repeat timed calls for REPEATED_S.

        Returns the number of passes, the worker's seconds of a pass, and the judge's.
        """
        least, passes = REPEATED_S[self.device], message.passes
        most = calls.MOST_REPEATED // count
        while True:
            graph = passes if message.chained else 0  # one for any number of unchained passes
            if self.device == "cuda" and graph not in self._captured:
                self._timed(message)  # may capture it
                self._captured.add(graph)
            often, outside = self._timed(message)
            if outside >= least or passes >= most:
                return passes, often / passes, outside / passes
            passes = min(math.ceil(passes * 1.1 * least / outside), most)
            message = calls.Repeat(passes, message.chained)

    def _handed_over(self, which: Sequence[int]) -> list[Tensor]:
        """Return outputs of timed calls, whose row_sums() came when the clock stopped."""
        request, taken = self._request, self._taken.tensor
        promised = torch.split(request.calls.sums(taken).clone(), request.calls.rows)
        self._timed(calls.HandOver([*which]))
        outputs = request.some_outputs(taken, which)
        for call, o in zip(which, outputs, strict=True):
            if not torch.equal(calls.row_sums([o]), promised[call]):
                raise RejectedTimeError("the timed outputs changed after the clock had stopped")
        return outputs

    def _again(self, passes: int) -> tuple[list[Again], bool, str]:
        """Make some of the repeated calls again, whose totals came when the clock stopped.

        Returns them, whether each had the same output each time, and what is wrong if it then was
        another than before.
        """
        request, taken = self._request, self._taken.tensor
        count = len(request.calls.order)
        totals = request.calls.sums(taken, passes * count).tolist()
        found: list[Again] = []
        drawn = [1 + secrets.randbelow(len(totals) - 1) for _ in range(CHECKED)]
        if passes > 1:  # a pass that repeats another goes wrong in its first calls
            first = count * (1 + secrets.randbelow(passes - 1))
            drawn[:2] = first, first + 1
        for n in drawn:
            call, seen = n % count, set[int]()
            for _ in range(ALIKE):
                self._timed(calls.Again(call, totals[n - 1]))
                (o,) = request.some_outputs(taken, [call])
                seen.add(int(calls.total_of(o)))
                if totals[n] in seen:
                    break
            found.append(Again(call, totals[n - 1], o))
            if totals[n] not in seen:
                fault = (
                    f"repeated call {n} of {len(totals)} has another output when it is made again"
                )
                return found, len(seen) == 1, fault if len(seen) == 1 else ""
        return found, True, ""

    def rest(self) -> None:
        """Stop its process, if it has one, until the next request."""

    def close(self) -> None:
        """End its process, if it has one."""

    def _timed(self, message: calls.Message) -> tuple[float, float]:
        """Send a message; return the worker's seconds, and the seconds until its reply."""
        started = time.perf_counter()
        self._say(message)
        reply = self._reply()
        return reply.seconds, time.perf_counter() - started

    def _reply(self) -> calls.Reply:
        """Return the reply to the last message; raises the error that it reports."""
        reply = self._answer()
        reply.check(self.spec.name)
        return reply

    @functools.cached_property
    def _caller(self) -> caller.Caller:
        return caller.Caller(self.spec, self.device, self._given, self._taken)

    def _say(self, message: calls.Message) -> None:
        self._message = message

    def _answer(self) -> calls.Reply:
        return self._caller.answer(self._message)


class Worker(Runner):
    """A backend in a process of its own: a name, or a version file of no ladder.

    device: "cuda", the current CUDA device, "cpu", or "" for cuda if the backend runs there, else
    cpu. timeout_s: the limit of a request in seconds. races: for an emulated version, also build
    the library that reports races at once, and not at the first call that needs it. load: whether
    to wait until a version is built and loaded; other backends always are, because only then it is
    known which kernels they have. Raises the errors of load(), UnknownBackendError, HeaderError or
    ArgumentError.
    """

    def __init__(
        self,
        what: str,
        device: str = "",
        *,
        timeout_s: float = TIMEOUT_S,
        races: bool = False,
        load: bool = True,
    ) -> None:
        check_time_limit(timeout_s)
        self.timeout_s = timeout_s
        known = plugins.find(what)
        fds = shared_memory(), shared_memory()
        memory = calls.Block(fds[0]), calls.Block(fds[1])
        has_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_device() if has_started else 0
        self._process = Process(caller.serve, fds, what, device, current, races, known.plugin)
        self._is_loading = known.version is not None
        try:
            if known.version:
                decodes = known.version.role == "decode"
                has = not decodes, decodes
            else:
                has = process.decoded(self._loaded(what), plugins.Described).has
            super().__init__(known, device, memory, has)
            self.not_isolated = isolation.missing()
            if load:
                self.load()
        except BaseException as error:
            self._process.close()
            for block in memory:
                block.close()
            if isinstance(error, errors.AttentionError) or not isinstance(error, _WRONG_FACTS):
                raise
            raise EndedError(f"it describes itself wrongly: {error}") from error

    def load(self) -> None:
        """Wait until the backend is built and loaded.

        Raises UnavailableBackendError, or EndedError if that ends its process.
        """
        if self._is_loading:
            self._is_loading = False
            self._loaded(self.spec.name)

    def rest(self) -> None:
        """Stop the process, its threads and its children until the next request."""
        self._process.stop()

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._given.close()
        self._taken.close()

    def _loaded(self, name: str) -> str:
        """Wait until the backend is loaded; return its process's description of it."""
        reply = self._process.answer(max(self.timeout_s, LOADING_TIMEOUT_S))
        if reply.status == "unknown":
            raise UnknownBackendError(name, reply.reasons)
        if reply.status == "failed":
            raise EndedError(reply.text)
        reply.check(name)
        return reply.text

    def _say(self, message: calls.Message) -> None:
        self._process.say(msgspec.json.encode(message))

    def _answer(self) -> calls.Reply:
        return self._process.answer(self.timeout_s)


def open_runner(
    what: str | BackendSpec,
    device: str = "",
    *,
    timeout_s: float = TIMEOUT_S,
    races: bool = False,
    load: bool = True,
) -> Runner:
    """Return a Worker, or a Runner for a backend that only this process knows.

    The arguments are those of Worker, whose errors it raises.
    """
    spec, name = (ladder.known(what), what) if isinstance(what, str) else (what, _name(what))
    try:
        if name or spec is None:
            return Worker(name, device, timeout_s=timeout_s, races=races, load=load)
    except UnknownBackendError:
        if spec is None:
            raise
    assert spec is not None
    device = registry.device_for(spec, device)
    if reason := spec.unavailable_reason(device):
        raise UnavailableBackendError(spec.name, reason)
    return Runner(spec, device)


def _name(spec: BackendSpec) -> str:
    """Return the name or path by which another process can load a backend; "" if it cannot."""
    if spec.version and spec.family == "file":
        return str(spec.version.slot or spec.version.path)
    return spec.name if registry.registered(spec.name) is spec else ""
