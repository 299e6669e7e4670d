"""Calls of a backend as data: the memory and the messages between the judge and a kernel.

The judge lays out the inputs of some calls in one block of memory, and says in a Calls message what
to do with them. The outputs come back in a second block. The judge owns both, and keeps the
originals of the inputs, so nothing that a kernel does to its inputs reaches the reference.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from attention_kernels import errors
from attention_kernels.contract import dtype_name
from attention_kernels.judge.inputs import Case, Context, DecodeCase, Op
from attention_kernels.judge.truth import extent

NAMES = {"attention": ("q", "k", "v"), "decode": ("q", "k_cache", "v_cache", "seqlens")}
# Bytes around every storage in a block of inputs, and their value, which is NaN in every dtype.
GUARD, GUARD_BYTE = 4096, 0xFF
ALIGNMENT = 256  # of a storage, as of an allocation on a GPU
MULTIPLIED = 16  # numbers in a row that multiply() gives factors of their own
LEAST_BYTES = 2**26  # of a block
MOST_REPEATED = 2**17  # timed calls, whose sums are handed over
# CUDA_ERROR_UNSUPPORTED_LIMIT and CUDA_ERROR_NOT_SUPPORTED: a GPU before sm_80, or a part of one.
_HAS_NO_PERSISTING_L2 = 215, 801
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# An op's name and, in the emulator, the error that every failed launch begins with.
_OP = re.compile(
    r"attention_kernels::\w+: (cudaErrorLaunchFailure: unspecified launch failure: (?=.))?"
)


class Block:
    """A block of memory that grows: shared through a descriptor, or private."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = fd
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        """Make room for `size` bytes; the contents may be lost.

        A block has LEAST_BYTES or more, so it rarely moves; unwritten pages take no memory.
        """
        if len(self.tensor) >= size:
            return
        size = max(size, LEAST_BYTES)
        if self.fd is None:
            self._mapped = mmap.mmap(-1, size)
        else:
            if os.fstat(self.fd).st_size < size:
                os.ftruncate(self.fd, size)
            # Map this size, not the whole file: another process can make the file as large as it
            # likes.
            self._mapped = mmap.mmap(self.fd, size)
        self.tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def storage(self, start: int, size: int) -> Tensor:
        """Return part of the block as a tensor with a storage of its own."""
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=size, offset=start)

    def close(self) -> None:
        """Close the descriptor, if it has one."""
        if self.fd is not None:
            os.close(self.fd)


class View(msgspec.Struct, array_like=True, frozen=True):
    """A tensor in a block: the number of its storage, and its place there in elements."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def bytes(self) -> int:
        """The size of a contiguous tensor of this shape."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


class Calls(msgspec.Struct, frozen=True, tag=True):
    """A message: make these calls on these inputs, or prepare to time them."""

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
    """How many of the first outputs are handed over again after the last call."""
    threads: int = 0
    """The number of torch's threads; 0: the default."""
    context: Context = "plain"
    races: bool = False
    """Whether to call the build that reports races; emulated kernels only."""
    place: int = 0
    """Where the block of inputs begins in the memory that is shared."""
    clock: bool = False
    """Whether the calls are timed: on CUDA as a graph, if the backend allows it."""

    @property
    def given_bytes(self) -> int:
        """The size of the memory up to the end of the block of inputs."""
        start, size = self.storages[-1]
        return self.place + start + aligned(size) + GUARD

    @property
    def numbers_bytes(self) -> int:
        """The size of the part of the block of inputs before the first integers."""
        views = (view for tensors in self.sets for view in tensors)
        integers = (view.storage for view in views if not view.torch_dtype.is_floating_point)
        whole = self.given_bytes - self.place
        return min((self.storages[x][0] for x in integers), default=whole)

    @property
    def taken_bytes(self) -> int:
        """The size of the block of outputs and, of timed calls, of what is known of them."""
        return self._sums_at + 8 * self.clock * max(sum(self.rows), MOST_REPEATED)

    @property
    def _sums_at(self) -> int:
        return sum(aligned(q.bytes) for q in self._outputs)

    @property
    def rows(self) -> list[int]:
        """How many rows each output has."""
        return [torch.Size(q.shape[:-1]).numel() for q in self._outputs]

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

    def sums(self, block: Tensor, repeated: int = 0) -> Tensor:
        """Return the row_sums() of timed calls in a block of outputs.

        repeated: the number of repeated calls, whose totals are returned instead; see Repeat.
        """
        count = repeated or sum(self.rows)
        return block[self._sums_at : self._sums_at + 8 * count].view(torch.int64)

    def tensors(self, block: Tensor) -> list[list[Tensor]]:
        """Return the tensors of each set in a block of inputs."""
        return unpack([block[start : start + size] for start, size in self.storages], self.sets)


class Start(msgspec.Struct, frozen=True, tag=True):
    """A message: multiply the inputs of timed calls by factors, and make each call once."""

    seed: int


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """A message: copy outputs of the timed calls, by their number, to the judge's memory."""

    calls: list[int]


class Repeat(msgspec.Struct, frozen=True, tag=True):
    """A message: make all timed calls several times.

    The answer comes with the total_of() each output or, without the chain, with the row_sums() of
    the last pass.
    """

    passes: int
    chained: bool = True
    """Whether the inputs of a call depend on the output of the call before; see chain()."""


class Again(msgspec.Struct, frozen=True, tag=True):
    """A message: make one of the timed calls, and copy its output to the judge's memory."""

    call: int
    total: int
    """The total_of() the output of the call before."""


Message: TypeAlias = Calls | Start | HandOver | Repeat | Again


class Reply(msgspec.Struct, frozen=True):
    """The answer to a message; tensors are in the blocks."""

    status: Literal["done", "refused", "failed", "unavailable", "unknown"] = "done"
    text: str = ""
    """The cause of a failure, or the requested description."""
    reasons: list[str] = []
    """For a refusal: every reason. For an unknown backend: similar names."""
    seconds: float = 0.0
    """For timed calls: their time by the worker's clock."""

    def check(self, name: str) -> None:
        """Raise the error that the reply reports, if any."""
        if self.status == "refused":
            raise errors.UnsupportedError(name, self.reasons)
        if self.status == "unavailable":
            raise errors.UnavailableBackendError(name, self.text)
        if self.status == "failed":
            raise CallError(self.text)


class CallError(errors.AttentionError, RuntimeError):
    """A kernel failed in its own process; the text says how."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a request's calls."""

    o: list[Tensor]
    """The output of each call, on the CPU."""
    again: list[Tensor]
    """The first outputs as they were after the last call."""
    request: Request
    after: Tensor
    """The block of inputs as it was after the last call."""

    @functools.cached_property
    def fault(self) -> str:
        """Which input the calls changed, if any."""
        return self.request.fault(self.after)


class Request:
    """Calls and the judge's own copy of their inputs."""

    def __init__(self, op: Op, sets: Sequence[Sequence[Tensor]], **options: Any) -> None:
        """Lay out sets of tensors on the CPU. options: the other fields of Calls."""
        self.sets = sets
        self.block, storages, views = pack(sets)
        self.calls = Calls(op, storages, views, **{"order": [0], **options})

    @classmethod
    def of(
        cls, case: Case | DecodeCase, sets: Sequence[Sequence[Tensor]], **options: Any
    ) -> Request:
        """Return a request to call a backend as in a case, on sets of inputs."""
        if isinstance(case, Case):
            options["is_causal"] = case.is_causal
        options |= {"softmax_scale": case.softmax_scale, "context": case.context}
        return cls(case.op, sets, **options)

    def some_outputs(self, block: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Copy the outputs of some calls from a block that a kernel can change."""
        outputs = self.calls.outputs(block)
        return [outputs[call].clone() for call in which]

    def multiplied(self, seed: int) -> list[list[Tensor]]:
        """Return a copy of the inputs, multiplied by factors as in timed calls; see multiply()."""
        block = self.block.clone()
        multiply(block[: self.calls.numbers_bytes], self.sets[0][0].dtype, seed)
        return self.calls.tensors(block)

    def fault(self, after: Tensor) -> str:
        """Return which input the calls changed, given the block of inputs after them; else ''."""
        if torch.equal(after.view(torch.int64), self.block.view(torch.int64)):
            return ""
        names, storages = NAMES[self.calls.op], self.calls.storages
        for tensors, others in zip(*map(self.calls.tensors, (self.block, after)), strict=True):
            for name, x, y in zip(names, tensors, others, strict=True):
                differs = bits(x) != bits(y)
                if differs.any():
                    where = f": {extent(differs)}" if differs.dim() == 4 else ""
                    return f"it changed its input {name}{where}"
        byte = int((after != self.block).nonzero()[0])
        near = max(n for n, (start, _) in enumerate(storages) if n == 0 or start - GUARD <= byte)
        views = (view for tensors in self.calls.sets for view in zip(names, tensors, strict=True))
        name = next(name for name, view in views if view.storage == near)
        return f"it wrote outside its input {name}, between rows or around them"


def pack(
    sets: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, list[tuple[int, int]], list[list[View]]]:
    """Copy sets of tensors into one block of uint8; return it, its storages and the views.

    Strides and the memory between rows are kept. Tensors that share a storage still do. Integers
    come last, so that multiply() can leave them out.
    """
    contents: dict[int, Tensor] = {}
    for x in sorted((x for one in sets for x in one), key=lambda x: not x.is_floating_point()):
        storage = x.untyped_storage()
        if storage.data_ptr() not in contents:
            contents[storage.data_ptr()] = x.new_empty(0, dtype=torch.uint8).set_(storage)
    storages, at = [], GUARD
    for content in contents.values():
        storages.append((at, content.numel()))
        at += aligned(content.numel()) + GUARD
    block = torch.full((at,), GUARD_BYTE, dtype=torch.uint8)
    for (start, size), content in zip(storages, contents.values(), strict=True):
        block[start : start + size].copy_(content)
    numbers = {pointer: number for number, pointer in enumerate(contents)}

    def view(x: Tensor) -> View:
        storage, offset = numbers[x.untyped_storage().data_ptr()], int(x.storage_offset())
        return View(storage, dtype_name(x.dtype), tuple(x.shape), tuple(x.stride()), offset)

    return block, storages, [[view(x) for x in one] for one in sets]


def unpack(storages: Sequence[Tensor], sets: Sequence[Sequence[View]]) -> list[list[Tensor]]:
    """Return the tensors of each set, given their storages as tensors of uint8."""

    def tensor(view: View) -> Tensor:
        whole = storages[view.storage].view(view.torch_dtype)
        offset = whole.storage_offset() + view.offset
        return whole.as_strided(view.shape, view.strides, offset)

    return [[*map(tensor, views)] for views in sets]


def multiply(block: Tensor, dtype: torch.dtype, seed: int) -> None:
    """Multiply all numbers in a block by factors from 0.5 to 1 that the seed determines.

    There are MULTIPLIED factors, which take turns. They are exact in every dtype, so a product has
    the same bits on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randint(128, 257, (MULTIPLIED,), generator=generator) / 256
    block.view(dtype).view(-1, MULTIPLIED).mul_(factors.to(block.device, dtype))


def chain_weights(k: Tensor) -> Tensor:
    """Return an odd number for each row of k, a batch entry, position and head, for chain()."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2**62, k.shape[:-1], generator=generator).mul_(2).add_(1).to(k.device)


def chain(o: Tensor, k: Tensor, weights: Tensor, total: Tensor | None = None) -> None:
    """Make the next call's k depend on all of an output, on their device.

    The sum of the output's bits, times the row's weight, both modulo 2^64, decides on the sign of
    the first number of each row of k. So a call whose inputs come from another output than the one
    that the judge gets is wrong in nearly all rows. A sum of integers is exact, so the judge
    computes the same signs. Four kernels, which a graph can hold, read the output and touch one
    sector of a row; the magnitudes stay, so that repeated calls see the same kind of numbers.
    total: int64, (), which gets the sum.
    """
    set_signs(k, weights, total_of(o, total))


def total_of(o: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the sum of an output's bits, in words of int64 where they fill some.

    It is a sum of up to 4,096 others: for one alone, a GPU takes up to 12 us, and 1 us longer after
    a kernel than where the judge measures the chain, since one block loads all.
    """
    words = o.flatten()
    words = words.view(torch.int64) if words.nbytes % 8 == 0 else bits(words)
    parts = words.view(math.gcd(len(words), 4096), -1).sum(1, dtype=torch.int64)
    return torch.sum(parts, 0, out=out)


def set_signs(k: Tensor, weights: Tensor, total: Tensor | int) -> None:
    """Give k the signs that follow from the sum of an output's bits; see chain()."""
    k[..., 0].copysign_(weights * total)


def clear_persisting_l2() -> None:
    """End persisting accesses to L2 in this process's CUDA context, and allow no others.

    Raises RuntimeError if CUDA does not.
    """
    torch.cuda.synchronize()  # also makes the context
    cuda = ctypes.CDLL("libcuda.so.1")
    for status in (cuda.cuCtxResetPersistingL2Cache(), cuda.cuCtxSetLimit(6, ctypes.c_size_t(0))):
        if status not in (0, *_HAS_NO_PERSISTING_L2):
            raise RuntimeError(f"persisting accesses to L2 cannot be ended: CUDA error {status}")


def row_sums(outputs: Sequence[Tensor]) -> Tensor:
    """Return the sum of the bits of each row of the outputs, computed on their device.

    A worker that gives them before it has the outputs can no longer choose any row.
    """
    rows = bits(torch.cat([o.flatten(0, -2) for o in outputs]))
    return rows.sum(1, dtype=torch.int64)


def aligned(size: int) -> int:
    """Return a size in bytes, rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def bits(x: Tensor) -> Tensor:
    """Return a tensor's bits as integers of the same size."""
    return x.view(_BITS[x.element_size()])


def describe_error(error: BaseException) -> str:
    """Return a kernel's exception in one line, without the backend's name."""
    cause = error.__cause__
    if isinstance(error, errors.KernelError) and cause and _OP.search(str(cause)):
        error = cause  # the emulator's or CUDA's own message, which names the place
    line = " ".join(str(error).splitlines()[:1])
    words = _OP.sub("", line, count=1)
    if isinstance(error, errors.KernelError | errors.OutputError):
        words = re.sub(r"^attention backend \w+ ", "it ", words)
    is_clear = isinstance(error, errors.AttentionError) or words != line
    return words if is_clear else f"{type(error).__name__}: {words}"
