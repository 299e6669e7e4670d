"""Calls of a backend as data.

The judge lays out the inputs of some calls in one block of memory, and says in a Calls message what
to do with them. The outputs come back in a second block. The judge owns both, and keeps the
originals of the inputs, so nothing that a kernel does to its inputs reaches the reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from attention_kernels.errors import (
    AttentionError,
    KernelError,
    OutputError,
    UnavailableBackendError,
    UnsupportedError,
)
from attention_kernels.judge.blocks import GUARD, View, aligned, bits, multiply, pack, split, unpack
from attention_kernels.judge.reference import extent

NAMES = {"attention": ("q", "k", "v"), "decode": ("q", "k_cache", "v_cache", "seqlens")}
Op: TypeAlias = Literal["attention", "decode"]
# An op's name and, in the emulator, the error that every failed launch begins with.
_OP = re.compile(
    r"attention_kernels::\w+: (cudaErrorLaunchFailure: unspecified launch failure: (?=.))?"
)


class Calls(msgspec.Struct, frozen=True):
    """Which calls to make on which inputs."""

    op: Op
    storages: list[tuple[int, int]]
    """The first byte and the size of each storage in the block."""
    sets: list[list[View]]
    """The tensors of each set of inputs, q first."""
    order: list[int]
    """The set that each call uses."""
    softmax_scale: float | None = None
    is_causal: bool = True
    again: int = 0
    """How many of the first outputs come back once more as they are after the last call."""
    threads: int = 0
    """The number of torch's threads; 0: the default."""
    races: bool = False
    """Whether to call the build that reports races in shared memory; emulated kernels only."""
    clock: bool = False
    """Whether the calls are timed: on CUDA as a graph, if the backend allows it."""

    @property
    def given_bytes(self) -> int:
        """The size of the block of inputs."""
        start, size = self.storages[-1]
        return start + aligned(size) + GUARD

    @property
    def numbers_bytes(self) -> int:
        """The size of the part of the block of inputs before the first integers."""
        views = (view for one in self.sets for view in one)
        integers = (view.storage for view in views if not view.torch_dtype.is_floating_point)
        return min((self.storages[x][0] for x in integers), default=self.given_bytes)

    @property
    def taken_bytes(self) -> int:
        """The size of the block of outputs."""
        return sum(aligned(q.bytes) for q in self._outputs)

    @property
    def _outputs(self) -> list[View]:
        """The q of each output, which has its shape and dtype."""
        return [self.sets[place][0] for place in (*self.order, *self.order[: self.again])]

    def outputs(self, block: Tensor) -> list[Tensor]:
        """Return the outputs in a block of uint8: one per call, then the first of them again."""
        found, at = [], 0
        for q in self._outputs:
            found.append(block[at : at + q.bytes].view(q.torch_dtype).view(q.shape))
            at += aligned(q.bytes)
        return found


class Reply(msgspec.Struct, frozen=True):
    """The answer to a message; tensors are in the blocks."""

    status: Literal["done", "refused", "failed", "unavailable", "unknown"] = "done"
    text: str = ""
    """What went wrong, or what was asked for."""
    reasons: list[str] = []
    """For a refusal: every reason. For an unknown backend: similar names."""
    seconds: float = 0.0
    """For timed calls: their time by the worker's clock."""
    checksum: int = 0
    """For timed calls: the checksum of their outputs."""
    workspace: int = 0
    """For timed calls on CUDA: the peak memory of a call in bytes, inputs and output apart."""

    def check(self, name: str) -> None:
        """Raise the error that the reply reports, if any."""
        if self.status == "refused":
            raise UnsupportedError(name, [*map(_plain, self.reasons)])
        if self.status == "unavailable":
            raise UnavailableBackendError(name, _plain(self.text))
        if self.status == "failed":
            raise CallError(_plain(self.text))


def _plain(text: str) -> str:
    """Replace control characters: on a terminal they could hide that a kernel failed."""
    return "".join(x if x.isprintable() or x == "\n" else "\N{REPLACEMENT CHARACTER}" for x in text)


class CallError(AttentionError, RuntimeError):
    """A kernel failed in its own process; the text says how."""


@dataclass(frozen=True)
class Outputs:
    """What came back from a request."""

    o: list[Tensor]
    """The output of each call, on the CPU."""
    again: list[Tensor]
    """The first outputs as they were after the last call."""
    fault: str = ""
    """Which input the calls changed, if any."""


class Request:
    """Calls and their inputs, of which this is the judge's own copy."""

    def __init__(self, op: Op, sets: Sequence[Sequence[Tensor]], **options: Any) -> None:
        """Lay out sets of tensors on the CPU. options: the other fields of Calls."""
        self.sets = sets
        self.block, storages, views = pack(sets)
        self.calls = Calls(op, storages, views, **{"order": [0], **options})

    def outputs(self, block: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Copy the outputs, and the first of them again, from a block that a kernel can change."""
        found = self.calls.outputs(block[: self.calls.taken_bytes].clone())
        count = len(self.calls.order)
        return found[:count], found[count:]

    def multiplied(self, seed: int) -> list[list[Tensor]]:
        """Return the sets as they are when the clock has started; see multiply()."""
        block = self.block.clone()
        multiply(block[: self.calls.numbers_bytes], self.sets[0][0].dtype, seed)
        return unpack(split(block, self.calls.storages), self.calls.sets)

    def fault(self, block: Tensor) -> str:
        """Return which input the calls changed, given the block of inputs after them; else ''."""
        after = block[: len(self.block)].clone()
        if torch.equal(after, self.block):
            return ""
        names, storages = NAMES[self.calls.op], self.calls.storages
        blocks = (unpack(split(x, storages), self.calls.sets) for x in (self.block, after))
        for one, other in zip(*blocks, strict=True):
            for name, x, y in zip(names, one, other, strict=True):
                differs = bits(x) != bits(y)
                if differs.any():
                    where = f": {extent(differs)}" if differs.dim() == 4 else ""
                    return f"it changed its input {name}{where}"
        byte = int((after != self.block).nonzero()[0])
        near = max(n for n, (start, _) in enumerate(storages) if n == 0 or start - GUARD <= byte)
        views = (view for one in self.calls.sets for view in zip(names, one, strict=True))
        name = next(name for name, view in views if view.storage == near)
        return f"it wrote outside its input {name}, between rows or around them"


def describe_error(error: BaseException) -> str:
    """Return a kernel's exception in one line, without the backend's name."""
    cause = error.__cause__
    if isinstance(error, KernelError) and cause and _OP.search(str(cause)):
        error = cause  # the emulator's or CUDA's own message, which names the place
    line = " ".join(str(error).splitlines()[:1])
    words = _OP.sub("", line, count=1)
    if isinstance(error, KernelError | OutputError):
        words = re.sub(r"^attention backend \w+ ", "it ", words)
    kind = "" if isinstance(error, AttentionError) or words != line else f"{type(error).__name__}: "
    return kind + words
