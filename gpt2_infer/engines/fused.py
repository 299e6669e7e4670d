"""The fused engine: a decode step is one kernel of our own, csrc/v01_persistent_step.cu.

The kernel is compiled for a model's shape, a batch size and a grid, on first use. It reads weights
in the order in which it needs them, so the engine keeps a second, packed copy of them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attention_kernels.contract import dtype_name
from attention_kernels.ladder import header
from attention_kernels.ladder.op import load_struct_op
from gpt2_infer.config import GPT2Config
from gpt2_infer.engines.base import device_reasons
from gpt2_infer.engines.cached import Cached
from gpt2_infer.errors import EngineError
from gpt2_infer.model import GPT2, KVCache

if TYPE_CHECKING:
    from gpt2_infer.generation import Request

DECODE_ATTENTION = "FUSED"
SOURCE = Path(__file__).parent / "csrc" / "v01_persistent_step.cu"
DTYPES = ("float32", "float16", "bfloat16")  # as in the kernel's header
MAX_BATCH = 8
SPLIT = 128  # keys of a row and head for one block
# The more blocks, the more poll: on an H200, for batch 1, 96 blocks are faster than 64, 128 or all
# 132; for larger batches, all.
MAX_BLOCKS = 96
MAX_BLOCKS_UP_TO_BATCH = 2
MAX_WARPS = 31  # and one that fills the ring


def unsupported_reasons(model: GPT2, request: Request) -> list[str]:
    """Return what speaks against decoding this model and request in the fused engine."""
    config, reasons = model.config, device_reasons(model.device)
    dtype = dtype_name(model.dtype)
    if dtype not in DTYPES:
        reasons.append(f"dtype {dtype} (it takes {', '.join(DTYPES)})")
    if len(request.rows) > MAX_BATCH:
        reasons.append(f"a batch of {len(request.rows)} (it takes up to {MAX_BATCH})")
    if config.n_embd % 64 or config.n_embd > 64 * MAX_WARPS or config.inner_dim % 64:
        reasons.append(
            f"widths {config.n_embd} and {config.inner_dim} (it takes multiples of 64, n_embd up "
            f"to {64 * MAX_WARPS})"
        )
    if config.head_dim not in (32, 64, 128):
        reasons.append(f"head_dim {config.head_dim} (it takes 32, 64, 128)")
    if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
        reasons.append(f"activation_function {config.activation_function} (it takes gelu_new)")
    if not request.check_finite:
        reasons.append("logits that are not checked to be finite")
    if model.decodes_with_named_backend:
        reasons.append(f"the named backend {model.decode_attention.name} is to decode")
    if not reasons and not shape_on(model, power_of_two(len(request.rows))).fits:
        reasons.append("the shared memory of a block has no room for the ring of weights")
    return reasons


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the least power of two that is n or more."""
    return 1 << (n - 1).bit_length()


class Fused(Cached):
    """Decodes in one kernel per step; a graph adds the sampler if the text is not greedy."""

    fused_step: Step | None = None

    @property
    def decode_attention(self) -> str:
        """The step's own attention, which is no backend."""
        return DECODE_ATTENTION

    def padded_rows(self, request: Request) -> list[list[int]]:
        """Return a power of two of rows: the first prompt again where there are fewer."""
        rows = request.rows
        return rows + [rows[0]] * (power_of_two(len(rows)) - len(rows))

    def prepare_decode(self) -> None:
        """Build the kernel and pack the weights."""
        self.fused_step = Step(
            self.model, self.cache, self.newest, self.tokens, self.lengths, self.sampling.is_greedy
        )

    def decode(self) -> None:
        """Run the newest token of each row and accept the next."""
        step = self.fused_step
        assert step is not None, "prepare_decode() was first"
        step()
        if not self.sampling.is_greedy:
            self.accept(step.logits)

    def check(self) -> None:
        """Raise EngineError if the blocks of a step waited for each other in vain."""
        if self.fused_step is not None:
            self.fused_step.check()


# ---- The kernel's view of a model ----------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """How the rows of a matrix (rows, columns) are spread over blocks, warps and lanes.

    It is the Stage of the kernel, which says more.
    """

    rows: int
    columns: int
    per_chunk: int
    warps: int
    blocks: int
    batch: int
    max_tile: int

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes in a row."""
        return self.columns // self.per_chunk

    @property
    def passes(self) -> int:
        """Chunks of a row for one lane."""
        return ceil_div(self.chunks, 32 * self.warps)

    @property
    def group_warps(self) -> int:
        """Warps that share a row."""
        return ceil_div(ceil_div(self.chunks, self.passes), 32)

    @property
    def groups(self) -> int:
        """Rows of a block that are multiplied at the same time."""
        return self.warps // self.group_warps

    @property
    def unit(self) -> int:
        """Rows are given out in pairs, if there is an even number of them."""
        return 2 if self.rows % 2 == 0 else 1

    @property
    def first_rows(self) -> list[int]:
        """The first row of each block, and the end."""
        unit = self.unit
        return [self.rows // unit * b // self.blocks * unit for b in range(self.blocks + 1)]

    @property
    def thread_rows(self) -> int:
        """Rows per thread."""
        return ceil_div(ceil_div(self.rows // self.unit, self.blocks) * self.unit, self.groups)

    @property
    def steps(self) -> int:
        """Chunks per thread."""
        return self.thread_rows * self.passes

    def tiles(self) -> Iterator[range]:
        """Yield the rows per thread that are in registers at the same time."""
        most = min(self.max_tile, 32 // self.batch)
        size = ceil_div(self.thread_rows, ceil_div(self.steps, most))
        for first in range(0, self.thread_rows, size):
            yield range(first, min(first + size, self.thread_rows))

    def pack(self, weight: Tensor, out: Tensor) -> None:
        """Write weight (rows, columns) in the order of use to out (blocks, steps, threads, ...)."""
        device = weight.device
        padded = nn.functional.pad(weight, (0, 1, 0, 1))  # row and column of zeros
        first = torch.tensor(self.first_rows, device=device)
        lanes = 32 * self.group_warps
        group = torch.arange(self.groups, device=device)
        step = 0
        for tile in self.tiles():
            for part in range(self.passes):
                chunk = part * lanes + torch.arange(lanes, device=device)
                column = chunk[:, None] * self.per_chunk + torch.arange(
                    self.per_chunk, device=device
                )
                column = column.where(chunk[:, None] < self.chunks, self.columns)
                for row_of_thread in tile:
                    row = first[:-1, None] + row_of_thread * self.groups + group
                    row = row.where(row < first[1:, None], self.rows)
                    values = padded[row][:, :, column]  # (blocks, groups, lanes, per_chunk)
                    out[:, step, : self.groups * lanes] = values.flatten(1, 2)
                    step += 1


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    config: GPT2Config
    dtype: torch.dtype
    batch: int
    blocks: int
    shared_bytes: int

    @property
    def per_chunk(self) -> int:
        """Weights in 16 bytes."""
        return 16 // self.dtype.itemsize

    @functools.cached_property
    def warps(self) -> int:
        """Warps of a block that compute: as many as read the fewest bytes, padding included."""
        widest = max(3 * self.config.n_embd, self.config.inner_dim)
        # Each row of a block is one thread's in the end. The same number for every batch, so that
        # a row's result does not depend on the others.
        rows = 2 * ceil_div(widest, 2 * self.blocks) * MAX_BATCH
        fewest = max(self.config.n_embd // 64, ceil_div(rows, 32))
        return min(
            range(fewest, min(fewest + 4, MAX_WARPS + 1)),
            key=lambda warps: warps * sum(stage.steps for stage in self._layer(warps)),
        )

    @property
    def tile(self) -> int:
        """Chunks that a thread has in registers at once."""
        return 12 if self.warps <= 15 else 6 if self.warps <= 19 else 4

    def _stage(self, rows: int, columns: int, warps: int, max_tile: int) -> Stage:
        return Stage(
            rows, columns, self.per_chunk, warps, self.blocks, self.batch, min(max_tile, 12)
        )

    def _layer(self, warps: int, tile: int = 12) -> list[Stage]:
        width, inner = self.config.n_embd, self.config.inner_dim
        sizes = ((3 * width, width), (width, width), (inner, width), (width, inner))
        return [self._stage(rows, columns, warps, tile) for rows, columns in sizes]

    @property
    def layer(self) -> list[Stage]:
        """The four products of a layer."""
        return self._layer(self.warps, self.tile)

    @property
    def head(self) -> Stage:
        """The product with the embedding."""
        tile = min(self.tile, 8)
        return self._stage(self.config.vocab_size, self.config.n_embd, self.warps, tile)

    @property
    def fits(self) -> bool:
        """Whether the ring has room for a tile beside the kernel's Shared."""
        config, batch, warps = self.config, self.batch, self.warps
        stages = [*self.layer, self.head]
        largest = max(len(tile) * stage.passes for stage in stages for tile in stage.tiles())
        rows = max(*(stage.thread_rows for stage in self.layer), len(next(self.head.tiles())))
        floats = 2 * batch * (config.n_embd + rows * warps + warps)
        floats += warps * (config.head_dim + 2)
        barriers_and_padding = 2 * 64 * 8 + 64
        room = self.shared_bytes - 4 * floats - barriers_and_padding
        return room >= largest * 16 * 32 * warps

    @property
    def max_splits(self) -> int:
        """Splits of the keys of the longest row."""
        return ceil_div(self.config.n_positions, SPLIT)

    @property
    def exchange_words(self) -> int:
        """64-bit words that the blocks exchange; the kernel's Exchange."""
        config, batch = self.config, self.batch
        packed = 2 if self.dtype.itemsize == 2 else 1
        partial = config.n_head * self.max_splits * (config.head_dim + 2)
        layer = 5 * config.n_embd + partial + config.inner_dim // packed
        return batch * (2 * layer + 2 * self.blocks)

    def version(self) -> header.VersionHeader:
        """Return the kernel's header, with the shape as macros and an op of its own."""
        config = self.config
        macros = {
            "EMBD": config.n_embd,
            "INNER": config.inner_dim,
            "HEADS": config.n_head,
            "VOCAB": config.vocab_size,
            "BATCH": self.batch,
            "BLOCKS": self.blocks,
            "WARPS": self.warps,
            "TILE": self.tile,
            "MAX_SPLITS": self.max_splits,
            "SMEM": self.shared_bytes,
        }
        parsed = header.parse_header(SOURCE, "fused_step_")
        flags = (*parsed.flags, *(f"-DSTEP_{name}={value}" for name, value in macros.items()))
        dtypes = (dtype_name(self.dtype),)
        digest = hashlib.sha256(repr((dtypes, flags)).encode()).hexdigest()[:12]
        return replace(parsed, flags=flags, dtypes=dtypes, op=f"{parsed.op}_{digest}")


class Params(ctypes.Structure):
    """The kernel's StructParams."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "weights",
                "vectors",
                "ln_f",
                "wte",
                "wpe",
                "kv",
                "seqlens",
                "newest",
                "tokens",
                "lengths",
                "logits",
                "exchange",
                "state",
            )
        ),
        ("capacity", ctypes.c_int64),
        ("layers", ctypes.c_int),
        ("max_seqlen", ctypes.c_int),
        ("is_greedy", ctypes.c_int),
        ("softmax_scale", ctypes.c_float),
        ("scales_by_layer", ctypes.c_int),
        ("epsilon", ctypes.c_float),
    )


@dataclass(frozen=True)
class Packed:
    """A model's weights as the kernel reads them."""

    weights: Tensor
    """(blocks, steps, threads, weights in 16 bytes)."""
    vectors: Tensor
    """float32: LayerNorms and biases of each layer, in the order of the kernel's LayerVectors."""
    ln_f: Tensor
    """float32: the last LayerNorm's weight and bias."""


_packed: weakref.WeakKeyDictionary[nn.Module, dict[object, Packed]] = weakref.WeakKeyDictionary()


def pack(model: GPT2, shape: Shape) -> Packed:
    """Return the packed weights; a model that shares them with another shares these too."""
    key = (shape.blocks, shape.warps, shape.tile, min(32 // shape.batch, shape.tile))
    known = _packed.setdefault(model.wte, {})
    if key not in known:
        known.clear()
        known[key] = _pack(model, shape)
    return known[key]


def _pack(model: GPT2, shape: Shape) -> Packed:
    head = model.wte if model.lm_head is None else model.lm_head
    stages = [*(shape.layer * model.config.n_layer), shape.head]
    matrices = [
        linear.weight.t()
        for block in model.blocks()
        for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
    ]
    steps = sum(stage.steps for stage in stages)
    weights = model.wte.weight.new_zeros(shape.blocks, steps, 32 * shape.warps, shape.per_chunk)
    first = 0
    for stage, matrix in zip(stages, [*matrices, head.weight], strict=True):
        stage.pack(matrix, weights[:, first : first + stage.steps])
        first += stage.steps
    vectors = [
        vector.float()
        for block in model.blocks()
        for part, linear in (
            (block.ln_1, block.attn.c_attn),
            (None, block.attn.c_proj),
            (block.ln_2, block.mlp.c_fc),
            (None, block.mlp.c_proj),
        )
        for vector in ([part.weight, part.bias] if part else []) + [linear.bias]
    ]
    ln_f = torch.cat([model.ln_f.weight.float(), model.ln_f.bias.float()])
    return Packed(weights, torch.cat(vectors), ln_f)


def shape_on(model: GPT2, batch: int) -> Shape:
    """Return what the kernel is compiled for on a model's GPU."""
    properties = torch.cuda.get_device_properties(model.device)
    blocks = properties.multi_processor_count
    if batch <= MAX_BLOCKS_UP_TO_BATCH:
        blocks = min(blocks, MAX_BLOCKS)
    # torch's stubs lack this field.
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Shape(model.config, model.dtype, batch, blocks, shared)


class Step:
    """A decode step of one model over one cache; called, it enqueues the kernel.

    newest, int64 (batch,): the tokens to read. If is_greedy, the step replaces them by the most
    likely next ones (-1 where logits are not finite), writes these to tokens (batch, capacity) at
    `lengths` (batch,) and adds 1 to lengths. It adds 1 to cache.seqlens. logits: float32 (batch,
    vocab_size). shape: of another grid; on a CPU, where the emulator runs the step, it is needed.
    """

    def __init__(
        self,
        model: GPT2,
        cache: KVCache,
        newest: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        is_greedy: bool,
        *,
        shape: Shape | None = None,
    ) -> None:
        config, device = model.config, model.device
        batch = newest.shape[0]
        shape = shape or shape_on(model, batch)
        self.packed = pack(model, shape)
        self.logits = torch.zeros(batch, config.vocab_size, device=device)
        self.exchange = torch.zeros(shape.exchange_words, dtype=torch.int64, device=device)
        self.state = torch.tensor([1, 0], dtype=torch.int32, device=device)
        # The kernel has pointers to these.
        self._kept = (model, cache, newest, tokens, lengths)
        self._params = Params(
            *(
                tensor.data_ptr()
                for tensor in (
                    self.packed.weights,
                    self.packed.vectors,
                    self.packed.ln_f,
                    model.wte.weight,
                    model.wpe.weight,
                    cache.kv,
                    cache.seqlens,
                    newest,
                    tokens,
                    lengths,
                    self.logits,
                    self.exchange,
                    self.state,
                )
            ),
            tokens.shape[1],
            config.n_layer,
            cache.kv.shape[4],
            is_greedy,
            config.softmax_scale(0),
            config.scale_attn_by_inverse_layer_idx,
            config.layer_norm_epsilon,
        )
        self._bytes = torch.frombuffer(self._params, dtype=torch.uint8)
        self._op = load_struct_op(shape.version(), device.type, "the fused decode step")

    def __call__(self) -> None:
        """Enqueue the step on the current stream."""
        self._op(self.state, self._bytes)

    def check(self) -> None:
        """Raise EngineError if the blocks of a step waited for each other in vain."""
        if int(self.state[1]):
            raise EngineError(
                "the fused decode step gave up: its blocks waited for each other too long, as they "
                "do where something else holds a part of the GPU; --engine graph does not wait"
            )
