"""Tensors in a block of memory: their layout, and arithmetic on all of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from attention_kernels.contract import dtype_name

# Bytes around every storage in a block of inputs, and their value, which is NaN in every dtype.
GUARD, GUARD_BYTE = 4096, 0xFF
ALIGNMENT = 256  # of a storage, as of an allocation on a GPU
MULTIPLIED = 16  # numbers in a row that multiply() gives factors of their own
LEAST_BYTES = 2**26  # of a block
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Block:
    """A block of memory that grows: shared through a descriptor, or private."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = fd
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        """Make room for `size` bytes; the contents may be lost.

        The least is so large that a block rarely moves: it is no memory until it is written.
        """
        if len(self.tensor) >= size:
            return
        size = max(size, LEAST_BYTES)
        if self.fd is None:
            self._mapped = mmap.mmap(-1, size)
        else:
            if os.fstat(self.fd).st_size < size:
                os.ftruncate(self.fd, size)
            # Not all of it: another process can make it as large as it likes.
            self._mapped = mmap.mmap(self.fd, size)
        self.tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def storage(self, start: int, size: int) -> Tensor:
        """Return part of the block as a tensor of its own storage."""
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=size, offset=start)

    def close(self) -> None:
        """Close the descriptor, if it has one."""
        if self.fd is not None:
            os.close(self.fd)


class View(msgspec.Struct, array_like=True, frozen=True):
    """A tensor in a block: in which storage, and where in it, in elements."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def bytes(self) -> int:
        """The size of a contiguous tensor of its shape."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


def pack(
    sets: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, list[tuple[int, int]], list[list[View]]]:
    """Copy sets of tensors into one block of uint8; return it, its storages and the views.

    Strides and the memory between rows are kept. Tensors that share a storage still do. Integers
    come last, so that multiply() can leave them out.
    """
    contents: dict[int, Tensor] = {}
    tensors = [x for one in sets for x in one]
    for x in sorted(tensors, key=lambda x: not x.is_floating_point()):
        storage = x.untyped_storage()
        if storage.data_ptr() not in contents:
            contents[storage.data_ptr()] = x.new_empty(0, dtype=torch.uint8).set_(storage)
    storages, at = [], GUARD
    for content in contents.values():
        storages.append((at, content.numel()))
        at += aligned(content.numel()) + GUARD
    block = torch.full((at,), GUARD_BYTE, dtype=torch.uint8)
    for part, content in zip(split(block, storages), contents.values(), strict=True):
        part.copy_(content)
    numbers = {pointer: number for number, pointer in enumerate(contents)}

    def view(x: Tensor) -> View:
        storage, offset = numbers[x.untyped_storage().data_ptr()], int(x.storage_offset())
        return View(storage, dtype_name(x.dtype), tuple(x.shape), tuple(x.stride()), offset)

    return block, storages, [[view(x) for x in one] for one in sets]


def multiply(block: Tensor, dtype: torch.dtype, seed: int) -> None:
    """Multiply all numbers in a block by factors from 0.5 to 1 that the seed determines.

    There are MULTIPLIED factors, which take turns. They are exact in every dtype, so a product has
    the same bits on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randint(128, 257, (MULTIPLIED,), generator=generator) / 256
    block.view(dtype).view(-1, MULTIPLIED).mul_(factors.to(block.device, dtype))


def checksum(outputs: Sequence[Tensor]) -> int:
    """Return the sum of the outputs' bits, computed on their device.

    A worker that gives it before it has the outputs can no longer choose them.
    """
    return int(bits(torch.cat([o.flatten() for o in outputs])).sum(dtype=torch.int64))


def split(block: Tensor, storages: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the storages in a block of uint8."""
    return [block[start : start + size] for start, size in storages]


def unpack(storages: Sequence[Tensor], sets: Sequence[Sequence[View]]) -> list[list[Tensor]]:
    """Return the tensors of each set, given their storages as tensors of uint8."""

    def tensor(view: View) -> Tensor:
        whole = storages[view.storage].view(view.torch_dtype)
        offset = whole.storage_offset() + view.offset
        return whole.as_strided(view.shape, view.strides, offset)

    return [[*map(tensor, one)] for one in sets]


def aligned(size: int) -> int:
    """Return a size in bytes, rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def bits(x: Tensor) -> Tensor:
    """Return a tensor's bits as integers of the same size."""
    return x.view(_BITS[x.element_size()])
