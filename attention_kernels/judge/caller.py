"""The kernel's end: makes and times calls in a worker's process.

A Caller reads its inputs from one block of memory and copies the outputs to another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from attention_kernels import errors, ladder, registry
from attention_kernels.judge import calls, isolation, plugins
from attention_kernels.judge.calls import Block, Calls, Message, Reply
from attention_kernels.judge.inputs import Context
from attention_kernels.registry import BackendSpec

Kernel: TypeAlias = Callable[..., Tensor]
Result = TypeVar("Result")
# Two words fill, in turn, memory that nobody has written: a NaN in every dtype, which fmaxf() and
# comparisons ignore, and a word that is large and finite in every dtype.
POISONS = "7ff47ff4", "70e070e0"


def serve(
    answer: Callable[[Reply], None],
    wait: Callable[[], bytes],
    enclose: Callable[..., None],
    given: int,
    taken: int,
    what: str,
    device: str,
    current: int,
    races: bool,
    plugin: str,
) -> None:
    """Load a backend and answer messages until the judge ends this process."""
    try:
        spec = ladder.known(what)
        if spec and (spec.version or spec.chooses):
            registry.discover("")  # an alias asks the registry
            # What is built goes into the cache of all backends, but does not run there yet.
            if error := isolation.apart(functools.partial(_build, spec, device, races)):
                raise errors.UnavailableBackendError(spec.name, error)
            enclose()
        else:
            enclose(plugins.caches(what))
        # A plug-in is imported to find its own backends only, not where it could slow others.
        registry.discover(plugin)
        spec = spec or ladder.resolve(what)
        device = registry.device_for(spec, device)
        if device == "cuda" and torch.cuda.is_available():
            torch.cuda.set_device(current)
        if reason := spec.unavailable_reason(device):
            raise errors.UnavailableBackendError(spec.name, reason)
        caller = Caller(spec, device, Block(given), Block(taken))
        if spec.is_emulated(device):
            torch.set_num_threads(1)  # it only copies; the emulator has threads of its own
        if device == "cuda":
            poison_freed_memory(torch.empty(1, device=device))  # starts CUDA
        spec.prepare(device)
        has = spec.has_attention(), spec.has_decode(device)
        answer(Reply(text=msgspec.json.encode(plugins.describe_spec(spec, has)).decode()))
    except errors.UnknownBackendError as error:
        return answer(Reply("unknown", reasons=error.nearest))
    except BaseException as error:
        return answer(failure(error))
    while True:
        answer(caller.answer(msgspec.json.decode(wait(), type=Message)))


def _build(spec: BackendSpec, device: str, races: bool) -> None:
    """Build a version, or all that an alias may choose; raises BuildError."""
    device = registry.device_for(spec, device)
    if spec.unavailable_reason(device):
        return
    found = [spec]
    if spec.chooses:
        for dtype, head_dim, power in itertools.product(spec.dtypes, spec.head_dims, range(13)):
            on = getattr(torch, dtype), head_dim, torch.device(device)
            found.append(spec.chooses(*on, 2**power))
    elif races and spec.is_emulated(device):
        found.append(ladder.race_checked(spec))
    if failed := ladder.build_all(device, found):
        raise failed[0]


class Caller:
    """Makes calls of a backend on a device, on inputs and for outputs in two blocks."""

    def __init__(self, spec: BackendSpec, device: str, given: Block, taken: Block) -> None:
        self.spec, self.device, self.given, self.taken = spec, device, given, taken
        self._timed: Timed | None = None
        self._poisons = itertools.cycle(POISONS)

    def answer(self, message: Message) -> Reply:
        """Carry out a message; report exceptions and changed settings of torch."""
        try:
            with threads(message.threads if isinstance(message, Calls) else 0):
                before = _settings()
                reply = self._do(message)
                for name, value in _settings().items():
                    if value != before[name]:
                        text = f"it changed torch's {name} from {before[name]} to {value}"
                        return Reply("failed", text)
            return reply
        except BaseException as error:  # also a KeyboardInterrupt: the user's ends the process
            return failure(error)

    def _do(self, message: Message) -> Reply:
        timed = self._timed
        if isinstance(message, Calls):
            self._grow(self.given, message.given_bytes)
            self._grow(self.taken, message.taken_bytes)
            return self._prepare(message) if message.clock else self._call(message)
        assert timed is not None
        if isinstance(message, calls.HandOver):
            timed.hand_over(self.taken.tensor, message.calls)
            return Reply()
        if isinstance(message, calls.Again):
            o = timed.again(message.call, message.total)
            timed.calls.outputs(self.taken.tensor)[message.call].copy_(o)
            return Reply()
        if isinstance(message, calls.Repeat) and message.chained:
            seconds, totals = timed.repeat(message.passes)
            timed.calls.sums(self.taken.tensor, len(totals)).copy_(totals)
            return Reply(seconds=seconds)
        if isinstance(message, calls.Start):
            timed.multiply(message.seed)
            seconds = timed.run()
        else:
            seconds = timed.run(message.passes, chained=False)
        timed.calls.sums(self.taken.tensor).copy_(calls.row_sums(timed.outputs))
        return Reply(seconds=seconds)

    def _prepare(self, message: Calls) -> Reply:
        """Copy the inputs of calls to time to their places on the device."""
        on_host = self.given.tensor[message.place : message.given_bytes]
        if self._timed is None or self._timed.calls != message:
            self._timed = None  # frees its memory first
            block = on_host.to(self.device, copy=True)
            self._timed = Timed(self._kernel(message), block, message, graph=self.spec.cuda_graphs)
        self._timed.renew(on_host)
        return Reply()

    def _call(self, message: Calls) -> Reply:
        """Make the calls; copy the outputs, and the inputs as they are now, to the blocks."""
        self._timed = None
        on_host = [self.given.storage(message.place + at, size) for at, size in message.storages]
        # On a GPU, where the allocator decides, this moves those after it.
        before = torch.empty(message.place, dtype=torch.uint8, device=self.device)
        on_device = [storage.to(self.device, non_blocking=True) for storage in on_host]
        sets = calls.unpack(on_device, message.sets)
        outputs = message.outputs(self.taken.tensor)
        kernel = self._kernel(message)
        first: list[Tensor] = []
        with _context(message.context):
            for call, inputs in enumerate(sets[place] for place in message.order):
                with _poisoned(inputs[0], next(self._poisons)):
                    o = kernel(*inputs)
                    if message.context == "graph":
                        o = _graph(functools.partial(kernel, *inputs))()
                if o.untyped_storage().data_ptr() in {x.data_ptr() for x in on_device}:
                    return Reply("failed", "its output shares the memory of an input")
                outputs[call].copy_(o, non_blocking=True)
                if call < message.again:
                    first.append(o)
            for call, o in enumerate(first, len(message.order)):
                outputs[call].copy_(o, non_blocking=True)
            for host, device in zip(on_host, on_device, strict=True):
                if host is not device:
                    host.copy_(device, non_blocking=True)
        if self.device == "cuda":
            torch.cuda.synchronize()
        del before
        return Reply()

    def _grow(self, block: Block, size: int) -> None:
        """Make room in a block. CUDA copies to and from memory that it knows in the background."""
        moves = self.device == "cuda" and len(block.tensor) < size
        cudart = torch.cuda.cudart() if moves else None  # type: ignore[no-untyped-call]
        if cudart and len(block.tensor):
            torch.cuda.check_error(int(cudart.cudaHostUnregister(block.tensor.data_ptr())))
        block.grow(size)
        if cudart:
            at, count = block.tensor.data_ptr(), len(block.tensor)
            torch.cuda.check_error(int(cudart.cudaHostRegister(at, count, 0)))

    def _kernel(self, message: Calls) -> Kernel:
        spec = self.race_checked if message.races else self.spec
        scale = message.softmax_scale
        if message.op == "decode":
            return functools.partial(spec.decode, softmax_scale=scale)
        return functools.partial(spec.attention, softmax_scale=scale, is_causal=message.is_causal)

    @functools.cached_property
    def race_checked(self) -> BackendSpec:
        """The version, built to report races."""
        return ladder.race_checked(self.spec)


class Timed:
    """Calls to time; their inputs stay where they are and get new numbers.

    Each call's inputs depend on the output of the call before, those of the first call on the last
    output of the pass before, so that calls cannot run at the same time or be left out. On CUDA a
    pass is a graph, if the backend allows it.
    """

    def __init__(self, kernel: Kernel, block: Tensor, message: Calls, *, graph: bool) -> None:
        self.calls, self._block, self._graph = message, block, graph and block.is_cuda
        unpacked = message.tensors(self._block)
        self._kernel, self._sets = kernel, [unpacked[place] for place in message.order]
        self._weights = calls.chain_weights(self._sets[0][1])
        self._dtype = self._sets[0][0].dtype
        self.outputs: list[Tensor] = []
        """Those of the last pass that was not repeated."""
        self._ready: dict[str, Callable[[], Any]] = {}
        if block.is_cuda:  # a first call may compile or allocate, which no graph can capture
            calls.chain(kernel(*self._sets[0]), self._sets[0][1], self._weights)
            torch.cuda.synchronize()
            self.run()

    def renew(self, on_host: Tensor) -> None:
        """Copy new numbers to the inputs; a GPU makes an untimed run before, to raise its clock."""
        on_device = on_host.to(self._block.device)
        if self._block.is_cuda:
            self.run()
            calls.clear_persisting_l2()
        self._block.copy_(on_device)

    def multiply(self, seed: int) -> None:
        """Multiply all inputs but lengths by factors that the judge has drawn."""
        calls.multiply(self._block[: self.calls.numbers_bytes], self._dtype, seed)

    def run(self, passes: int = 1, *, chained: bool = True) -> float:
        """Make all calls, `passes` times; return the seconds, and keep the last pass's outputs."""
        self.outputs = []
        one_pass = self._captured(f"chained {chained}", lambda: self.one_pass(chained=chained))
        seconds, self.outputs = clocked(one_pass, passes, on_gpu=self._block.is_cuda)
        return seconds

    def repeat(self, passes: int) -> tuple[float, Tensor]:
        """Make all calls several times; return the seconds, and the total_of() each output.

        With a graph, all calls are one, in which each has a place for its total.
        """
        count, device = len(self._sets), self._block.device
        totals = torch.zeros(passes * count, dtype=torch.int64, device=device)

        def all_passes() -> Tensor:
            for first in range(0, passes * count, count):
                self.one_pass(totals[first : first + count])
            return totals

        captured = self._captured(f"{passes} passes", all_passes)
        return clocked(captured, on_gpu=self._block.is_cuda)

    def again(self, call: int, total: int) -> Tensor:
        """Make one call, as after a call with this total_of() its output; return its output."""
        q, k, *more = self._sets[call]
        calls.set_signs(k, self._weights, total)
        return self._kernel(q, k, *more)

    def one_pass(self, totals: Tensor | None = None, *, chained: bool = True) -> list[Tensor]:
        """Make all calls; return the outputs, or [] if `totals` takes the total_of() each."""
        outputs = []
        for n, inputs in enumerate(self._sets):
            o = self._kernel(*inputs)
            if chained:
                _, k, *_ = self._sets[(n + 1) % len(self._sets)]
                calls.chain(o, k, self._weights, None if totals is None else totals[n])
            if totals is None:
                outputs.append(o)
        return outputs

    def _captured(self, what: str, work: Callable[[], Any]) -> Callable[[], Any]:
        """Return a graph of calls if there is one; else the calls. what: a name for them."""
        if not self._graph:
            return work
        if what not in self._ready:
            self._ready[what] = _graph(work)
            self._ready[what]()  # the first replay takes longer
        return self._ready[what]

    def hand_over(self, block: Tensor, which: Sequence[int]) -> None:
        """Copy outputs of the last pass to the judge's memory."""
        if self._block.is_cuda:
            calls.clear_persisting_l2()
        places = self.calls.outputs(block)
        for call in which:
            places[call].copy_(self.outputs[call])


def clocked(work: Callable[[], Result], times: int = 1, *, on_gpu: bool) -> tuple[float, Result]:
    """Do work several times; return the seconds, by events on a GPU, and what it returned last."""
    if not on_gpu:
        started = time.perf_counter()
        for _ in range(times):
            found = work()
        return time.perf_counter() - started, found
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        found = work()
    end.record()
    torch.cuda.synchronize()  # all streams
    return float(start.elapsed_time(end) / 1e3), found


def _graph(work: Callable[[], Any]) -> Callable[[], Any]:
    """Capture calls in a CUDA graph; return a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


def _context(name: Context) -> contextlib.AbstractContextManager[object]:
    """Return what a call is made in; for a graph, nothing."""
    if name == "no_grad":
        return torch.no_grad()
    if name == "inference_mode":
        return torch.inference_mode()
    if name != "stream":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def failure(error: BaseException) -> Reply:
    """Return the reply that reports an exception."""
    if isinstance(error, errors.UnsupportedError):
        return Reply("refused", reasons=error.reasons)
    if isinstance(error, errors.UnavailableBackendError):
        return Reply("unavailable", error.reason)
    if isinstance(error, errors.AttentionError | RuntimeError):
        return Reply("failed", calls.describe_error(error))
    return Reply("failed", f"it raised {errors.describe(error)}")


def poison_freed_memory(like: Tensor, word: str = POISONS[0]) -> None:
    """Allocate and free several blocks of an output's size, filled with a word.

    An allocator that reuses one of them for the output or for scratch, as CUDA's does, exposes
    elements that the kernel does not write.
    """
    blocks = [torch.empty_like(like, memory_format=torch.contiguous_format) for _ in range(7)]
    value = torch.frombuffer(bytearray.fromhex(word)[::-1] * 2, dtype=like.dtype)[0].item()
    torch._foreach_zero_(blocks)
    torch._foreach_add_(blocks, value)


@contextlib.contextmanager
def _poisoned(like: Tensor, word: str) -> Iterator[None]:
    """Poison freed memory, and memory that the emulator allocates meanwhile, with a word."""
    poison_freed_memory(like, word)
    name = "ATTENTION_EMULATOR_POISON"
    before = os.environ.get(name, "")
    os.environ[name] = before or word
    try:
        yield
    finally:
        os.environ[name] = before


def _settings() -> dict[str, object]:
    """Return the torch settings that a kernel must not change for the rest of a model."""
    return {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
    }


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads for a while; 0 leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
