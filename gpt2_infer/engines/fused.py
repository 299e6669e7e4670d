"""The fused engine: a decode step is a chain of our own kernels, csrc/v02_early_launches.cu.

For a single row, one kernel can run all layers. The kernels are compiled for a model's shape and a
batch size, on first use. A block reads its part of a matrix in one piece, so the engine keeps a
second, packed copy of the layers' weights.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from attention_kernels.contract import dtype_name
from attention_kernels.ladder import build, entry, header
from attention_kernels.ladder.header import VersionHeader
from attention_kernels.ladder.op import c_struct, fault, load_op
from gpt2_infer.config import GPT2Config
from gpt2_infer.engines.base import kernel_refusals, weights_by_rows
from gpt2_infer.engines.cached import Cached
from gpt2_infer.engines.recompute import Forward
from gpt2_infer.model import GPT2, KVCache
from gpt2_infer.product import count_multiprocessors
from gpt2_infer.request import EngineName, Request

DECODE_ATTENTION = "FUSED"
SOURCE = Path(__file__).parent / "csrc" / "v02_early_launches.cu"
SLOT = header.CSRC / "slot" / "v03_early_loads.cuh"  # attention, unless another is named
DTYPES = ("float32", "float16", "bfloat16")  # those that v02_early_launches.cu takes
MAX_BATCH = 8
SPLIT = 128  # keys per split of attention
# Limits on the bytes of weights per block where the columns are free; found by trial on an H200.
QKV_BYTES = 64 * 1024
FC_BYTES = 104 * 1024
RANKS = 8  # blocks of a head's cluster, if one kernel runs all layers
MAX_HEADS = 12  # more were not measured, and may not run at once
TOO_LARGE = "cudaErrorCooperativeLaunchTooLarge"  # not all clusters run at once
MUCH_BYTES = 200 * 1024  # shared memory of a block on an H200; cards with less were not measured
HEAD_STATIC_BYTES = 4096  # reserved in the kernel of the logits, by struct Ring
MAX_STATIC_BYTES = 48 * 1024  # limit on a kernel's static shared memory
EARLY = (9, 0)  # from this compute capability on: early launches, bulk copies and clusters
PORTABLE = (8, 0)  # the step without them


def x_bytes(width: int, dtype: torch.dtype, batch: int) -> int:
    """Return the shared memory of a step's input x; its rows are padded for tensor cores."""
    padding = 0 if dtype == torch.float32 else 32
    return dtype.itemsize * (width + padding) * batch


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def request_refusals(model: GPT2, request: Request) -> list[str]:
    """Return the reasons why no fused engine of any device can decode a request."""
    reasons = []
    if len(request.rows) > MAX_BATCH:
        reasons.append(f"a batch of {len(request.rows)} (it takes up to {MAX_BATCH})")
    if model.decodes_with_named_backend and not slot_of(model):
        reasons.append(f"decoding with the named backend {model.decode_attention.name}")
    return reasons


def slot_of(model: GPT2) -> VersionHeader | None:
    """Return the backend that decodes if the user named a slot's file, *.cuh."""
    version = model.decode_attention.version
    return version if version and version.slot else None


@dataclass(frozen=True)
class State:
    """What a decode step reads and changes."""

    cache: KVCache
    """To its seqlens, the step adds 1."""
    newest: Tensor
    """The tokens to read, int64 (batch,); one below 0 is read as 0.

    A greedy step replaces them by the most likely next ones, or by -1 where logits are not finite.
    """
    tokens: Tensor
    """int64 (batch, capacity), to which a greedy step writes these at `lengths`."""
    lengths: Tensor
    """int64 (batch,), to which a greedy step adds 1."""


class FusedStep(Protocol):
    """A decode step: calling it enqueues it."""

    logits: Tensor

    def __call__(self) -> None:
        """Enqueue the step."""


class Fused(Cached):
    """Decodes in our own kernels; a graph holds a step's kernels, and the sampler if not greedy."""

    fused_step: FusedStep | None = None
    forward: Forward | None = None

    @classmethod
    def refusals(cls, model: GPT2, request: Request, name: EngineName) -> list[str]:
        """Return all reasons why the engine cannot run a request."""
        reasons = kernel_refusals(model, DTYPES)
        reasons += request_refusals(model, request)
        if (head_dim := model.config.head_dim) not in (32, 64, 128):
            reasons.append(f"head_dim {head_dim} (it takes 32, 64, 128)")
        return reasons or shape_on(model, cls.most_rows(request)).refusals

    @staticmethod
    def most_rows(request: Request) -> int:
        """Return the most rows of a pass."""
        return power_of_two(len(request.rows))

    def backend(self, step: int) -> str:
        """Return the name of the attention that a step uses: after the prompt, a slot's or none."""
        return DECODE_ATTENTION if step and not slot_of(self.model) else super().backend(step)

    @staticmethod
    def padded_rows(request: Request) -> list[list[int]]:
        """Return the prompts, padded with copies of the first one to a power of two."""
        rows = request.rows
        return rows + [rows[0]] * (power_of_two(len(rows)) - len(rows))

    def prefill(self) -> None:
        """Run the prompts in our own kernels, if they can, and accept their first token."""
        tokens = self.tokens[:, : self.longest]
        if Forward.refusals(self.model, tokens.numel()):
            super().prefill()
            return
        if self.forward is None:
            self.forward = Forward(self.model)
        self.accept(self.forward(self.model, tokens, self.lengths, self.cache))

    def prepare_decode(self) -> None:
        """Build the kernels and pack the weights."""
        state = State(self.cache, self.newest, self.tokens, self.lengths)
        self.fused_step = Step(self.model, state, self.sampling.is_greedy)

    def own_logits(self, step: int) -> Tensor | None:
        """Return the logits of a step after the prompt."""
        return self.fused_step.logits if self.fused_step is not None and step > 0 else None

    def decode(self) -> None:
        """Run the newest token of each row and accept the next."""
        step = self.fused_step
        assert step is not None, "call prepare_decode() first"
        step()
        if not self.sampling.is_greedy:
            self.accept(step.logits)


# ---- The kernels' view of a model ---------------------------------------------------------------


@dataclass(frozen=True)
class BlockedMatrix:
    """A matrix (rows, columns) whose columns are divided among blocks."""

    rows: int
    columns: int
    block_columns: int
    warps: int

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a block's columns."""
        return self.rows * self.block_columns * dtype.itemsize

    def stages(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return how many stages the portable step divides a block's columns into, and their bytes.

        In a stage, each thread multiplies one or, in 16 bits, two or four pieces of 16 bytes.
        """
        pieces = 1 if dtype == torch.float32 else 2 * -(-self.block_columns // 16)
        stage_bytes = 16 * pieces * 32 * self.warps
        return -(-self.block_bytes(dtype) // stage_bytes), stage_bytes

    def shared_bytes(self, dtype: torch.dtype, batch: int, *, has_x: bool) -> int:
        """Return the shared memory of a block; has_x: it computes all of the input x first."""
        return self.block_bytes(dtype) + self.other_bytes(dtype, batch, has_x=has_x)

    def other_bytes(self, dtype: torch.dtype, batch: int, *, has_x: bool) -> int:
        """Return the shared memory of a block without its columns."""
        sums = 4 * self.warps * self.block_columns * batch
        moments = 8 * self.warps * 2 * batch
        x = x_bytes(self.rows, dtype, batch) + moments if has_x else 0
        return x + sums + 128  # for the barrier and its alignment

    def pack(self, weight: Tensor) -> Tensor:
        """Return weight (rows, columns) in the order in which the kernels read it."""
        blocks = self.columns // self.block_columns
        if weight.dtype == torch.float32:
            return weight.reshape(self.rows, blocks, self.block_columns).transpose(0, 1).reshape(-1)
        if self.block_columns == 8:
            tiles = weight.t().reshape(blocks, 8, self.rows // 64, 2, 4, 2, 2, 2)
            return tiles.permute(0, 2, 5, 1, 4, 6, 3, 7).reshape(-1)
        tiles = weight.t().reshape(
            blocks, self.block_columns // 16, 2, 8, self.rows // 32, 4, 2, 2, 2
        )
        return tiles.permute(0, 4, 1, 6, 3, 5, 7, 2, 8).reshape(-1)


@dataclass(frozen=True)
class StepShape:
    """The shape that the kernels are compiled for."""

    config: GPT2Config
    dtype: torch.dtype
    batch: int
    head_blocks: int
    """Blocks of the product with the embedding: one per multiprocessor."""
    shared_bytes: int
    is_portable: bool = False
    """Whether the step does without early launches, bulk copies and clusters."""
    clusters: int = MAX_HEADS
    """Clusters of RANKS blocks for which the GPU has enough multiprocessors."""
    has_guesses: bool = False
    """Whether all rows of the batch but the first are guesses of its next tokens."""
    slot: VersionHeader | None = None
    """The decode kernel of the slot's file that computes attention, instead of SLOT."""

    @functools.cached_property
    def products(self) -> Mapping[str, BlockedMatrix]:
        """The four products of a layer."""
        width, inner = self.config.n_embd, self.config.inner_dim
        # The blocks of q, k and v are narrower than those of the hidden units, unless 32 columns
        # per block still give every multiprocessor a block.
        qkv_bytes = FC_BYTES if 3 * width >= 32 * self.head_blocks else QKV_BYTES
        warps = 10 if width % 320 == 0 and width % 256 else 8  # the rows divide evenly
        return {
            "QKV": self._widest(width, 3 * width, warps, qkv_bytes),
            "PROJ": BlockedMatrix(width, width, 8, self._parts or warps),
            "FC": self._widest(width, inner, warps, FC_BYTES),
            "FC2": BlockedMatrix(inner, width, 8, self._parts or 2 * warps),
        }

    @property
    def _parts(self) -> int:
        """The number of parts of a sum over heads or hidden units; 0 if it has no parts.

        If one kernel runs all layers, each head's cluster computes a part. Batches and the portable
        step divide sums in the same way, so that all give the same bits.
        """
        config = self.config
        divides = config.n_embd % (8 * RANKS) == 0 and config.inner_dim % (64 * config.n_head) == 0
        if not divides or config.head_dim % 64 or not 1 < config.n_head <= MAX_HEADS:
            return 0
        return config.n_head

    @functools.cached_property
    def is_one_kernel(self) -> bool:
        """Whether one kernel runs all layers."""
        width, head_dim, heads = self.config.n_embd, self.config.head_dim, self.config.n_head
        if self.is_portable or self.batch > 1 or not self._parts or self.max_splits > RANKS:
            return False
        hidden = self.config.inner_dim // heads  # of a cluster
        qkv, fc = self.products["QKV"], self.products["FC"]
        fits_head = head_dim % qkv.block_columns == 0 and (hidden // RANKS) % fc.block_columns == 0
        if not fits_head or qkv.warps != 8 or heads > self.clusters:
            return False
        # Two regions for weights, that of the heads' projection, and struct LayersShared
        size = self.dtype.itemsize
        units = -(-3 * head_dim // qkv.block_columns // RANKS)  # of q, k and v per block
        region = max(units * qkv.block_bytes(self.dtype), size * hidden * width // RANKS)
        partials = self.slot_bytes + 4 * (head_dim + 2) * RANKS
        vectors = 4 * (width + head_dim) + size * (3 * head_dim + hidden)
        sums = 4 * 8 * max(units * qkv.block_columns, hidden // RANKS)
        other = max(x_bytes(width, self.dtype, 1), partials) + vectors + sums + 512
        return 2 * region + size * head_dim * width // RANKS + other <= self.shared_bytes

    def _widest(self, rows: int, columns: int, warps: int, most_bytes: int) -> BlockedMatrix:
        """Return a product after a LayerNorm, with as many columns per block as fit.

        They fit at any batch size if possible, because the weights are packed once for all. On a
        GPU with little shared memory, all blocks should run at once.
        """
        products = [BlockedMatrix(rows, columns, each, warps) for each in (32, 16, 8)]
        fitting = [
            product
            for product in products
            if product.block_bytes(self.dtype) <= most_bytes
            and product.shared_bytes(self.dtype, MAX_BATCH, has_x=True) <= self.shared_bytes
        ]
        at_once = [product for product in fitting if self._runs_at_once(product)]
        if self.shared_bytes >= MUCH_BYTES:
            at_once = []
        return [*at_once, *fitting, products[-1]][0]

    def _runs_at_once(self, product: BlockedMatrix) -> bool:
        """Return whether the GPU has shared memory for all blocks of a product at batch 1."""
        reserved = 1024  # in each block
        needed = product.shared_bytes(self.dtype, 1, has_x=True) + reserved
        resident = (self.shared_bytes + reserved) // needed  # per multiprocessor
        return product.columns // product.block_columns <= self.head_blocks * resident

    @property
    def needed(self) -> Mapping[str, int]:
        """The shared memory that each kernel needs, in bytes per block."""
        needed = {name: self._needed(name) for name in self.products}
        # Pieces of 16 bytes that a lane has per stage of the embedding: its share of a row in
        # float32, 4 in 16 bits.
        chunks = -(-self.config.n_embd // (4 * 32)) if self.dtype == torch.float32 else 4
        two_stages = 2 * chunks * 16 * 256
        batch = self.batch if self.is_portable else MAX_BATCH
        x = x_bytes(self.config.n_embd, self.dtype, batch)
        return needed | {"LOGITS": HEAD_STATIC_BYTES + x + two_stages}

    def _needed(self, name: str) -> int:
        product = self.products[name]
        # The portable step joins attention's splits where it projects the heads.
        has_x = name in ("QKV", "FC") or (self.is_portable and name == "PROJ")
        columns = product.block_bytes(self.dtype)
        if self.is_portable:
            stages, stage_bytes = product.stages(self.dtype)
            columns = min(stages, 2) * stage_bytes  # the ring needs two
        return columns + product.other_bytes(self.dtype, self.batch, has_x=has_x)

    @property
    def refusals(self) -> list[str]:
        """The reasons why a block does not fit in its shared memory."""
        name, most = max(self.needed.items(), key=lambda item: item[1])
        reasons = []
        if most > self.shared_bytes:
            reasons.append(
                f"a block of {name} needs {-(-most // 1024)} KB of shared memory, and this device "
                f"has {self.shared_bytes // 1024} KB"
            )
        partials = 4 * (self.config.head_dim + 2) * self.max_splits
        if self.slot_bytes + partials > MAX_STATIC_BYTES:
            context = f"a context of {self.config.n_positions} tokens"
            reasons.append(f"{context} and {self.slot_bytes} bytes of shared memory for attention")
        return reasons

    @functools.cached_property
    def slot_bytes(self) -> int:
        """The shared memory of attention in a block, without the splits' partials."""
        return (self.slot or header.of_file(SLOT)).shared_bytes(self.config.head_dim)

    @property
    def max_splits(self) -> int:
        """The number of splits of the longest row's keys."""
        return -(-self.config.n_positions // SPLIT)

    @property
    def scratch_floats(self) -> int:
        """The size of the kernels' Scratch, in floats."""
        width, heads = self.config.n_embd, self.config.n_head
        splits = self.max_splits * (width + 2 * heads)
        row = 3 * width + self.config.inner_dim + 2 * self.head_blocks + splits
        words = width * (4 * self.config.n_layer * heads if self.is_one_kernel else 1)
        return self.batch * row + words + 3 * 4  # padding to 16 bytes, and the epoch

    def version(self) -> VersionHeader:
        """Return the kernels' header, with the shape as macros and its own op name."""
        config = self.config
        macros = {
            "EMBD": config.n_embd,
            "INNER": config.inner_dim,
            "HEADS": config.n_head,
            "LAYERS": config.n_layer,
            "VOCAB": config.vocab_size,
            "BATCH": self.batch,
            "BLOCKS": self.head_blocks,
            "MAX_SPLITS": self.max_splits,
            "SMEM": self.shared_bytes,
            "PORTABLE": int(self.is_portable),
            "ONE_KERNEL": int(self.is_one_kernel),
            "GUESSES": int(self.has_guesses),
            "SLOT_BYTES": self.slot_bytes,
        }
        for name, product in self.products.items():
            macros |= {f"{name}_COLUMNS": product.block_columns, f"{name}_WARPS": product.warps}
        parsed = header.parse_header(SOURCE, "fused_step_")
        needs = PORTABLE if self.is_portable else EARLY
        if slot := self.slot:
            path = entry.including([slot.listing, parsed.path], build.cache_dir())
            own = (f"-DSTEP_SLOT={slot.op}", *slot.flags)
            parsed = replace(parsed, path=path, flags=own, needs_exactly=slot.needs_exactly)
            needs = max(needs, slot.needs or needs)
        flags = (*parsed.flags, *(f"-DSTEP_{name}={value}" for name, value in macros.items()))
        dtypes = (dtype_name(self.dtype),)
        digest = hashlib.sha256(repr((dtypes, flags)).encode()).hexdigest()[:12]
        return replace(parsed, flags=flags, dtypes=dtypes, op=f"{parsed.op}_{digest}", needs=needs)


StepParams = c_struct(
    (c_void_p, "weights vectors ln_f wte wpe head kv seqlens newest tokens lengths logits scratch"),
    (c_int64, "capacity"),
    (c_int, "layers max_seqlen is_greedy"),
    (c_float, "softmax_scale"),
    (c_int, "scales_by_layer"),
    (c_float, "epsilon"),
)
"""The C struct StructParams of the kernels."""


def _pack(model: GPT2, shape: StepShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed products, (layers, weights of a layer), and float32 vectors.

    Vectors: the LayerNorms and biases of each layer, in the order of the kernels' LayerVectors, and
    the last LayerNorm's weight and bias.
    """
    products = shape.products.values()
    sizes = [product.rows * product.columns for product in products]
    weights = model.wte.weight.new_empty(model.config.n_layer, sum(sizes))
    vectors: list[Tensor] = []
    for layer, block in zip(weights, model.blocks(), strict=True):
        attn, mlp = block.attn, block.mlp
        linears = (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj)
        for part, product, linear in zip(layer.split(sizes), products, linears, strict=True):
            part.copy_(product.pack(linear.weight))
        vectors += [block.ln_1.weight, block.ln_1.bias, attn.c_attn.bias, attn.c_proj.bias]
        vectors += [block.ln_2.weight, block.ln_2.bias, mlp.c_fc.bias, mlp.c_proj.bias]
    ln_f = torch.cat([model.ln_f.weight, model.ln_f.bias])
    return weights, torch.cat(vectors).float(), ln_f.float()


def shape_on(model: GPT2, batch: int) -> StepShape:
    """Return the shape that the kernels are compiled for on a model's GPU.

    It is the portable shape where the other does not run or does not fit. On a CPU it is the
    chain's, and the emulator, which runs it with a slot's file, looks for races.
    """
    slot, of = slot_of(model), (model.config, model.dtype, batch)
    if model.device.type == "cpu":
        blocks = count_multiprocessors(model.device)
        slot = slot and header.race_checked(slot)
        return StepShape(*of, blocks, 227 * 1024, clusters=0, slot=slot)
    properties = torch.cuda.get_device_properties(model.device)
    # torch's stubs lack this field.
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    blocks = properties.multi_processor_count
    clusters = blocks // RANKS
    shape = StepShape(*of, blocks, shared, clusters=clusters, slot=slot)
    is_early = torch.cuda.get_device_capability(model.device) >= EARLY
    return shape if is_early and not shape.refusals else replace(shape, is_portable=True)


class Step:
    """A decode step of one model over one cache; calling it enqueues its kernels.

    logits: float32 (batch, vocab_size). shape: for a CPU, where the emulator runs the step. arch:
    replaces the machine's.
    """

    def __init__(
        self,
        model: GPT2,
        state: State,
        is_greedy: bool,
        *,
        shape: StepShape | None = None,
        arch: str | None = None,
    ) -> None:
        config, device, batch = model.config, model.device, len(state.newest)
        shape = shape or shape_on(model, batch)
        # All of a model's engines share the packed weights.
        key = tuple(shape.products.values())
        packed = model.prepared.share(key, lambda: _pack(model, shape))
        self.logits = torch.zeros(batch, config.vocab_size, dtype=torch.float32, device=device)
        scratch = torch.zeros(shape.scratch_floats, dtype=torch.float32, device=device)
        (wte, head), wpe = weights_by_rows(model), model.wpe.weight.contiguous()
        weights = (*packed, wte, wpe, head)
        cache, rows = state.cache, (state.newest, state.tokens, state.lengths)
        # Kept alive: the kernels hold these pointers.
        self._kept = (*weights, cache.kv, cache.seqlens, *rows, self.logits, scratch)
        self._params = StepParams(
            *(tensor.data_ptr() for tensor in self._kept),
            state.tokens.shape[1],
            config.n_layer,
            cache.kv.shape[4],
            is_greedy,
            config.softmax_scale(0),
            config.scale_attn_by_inverse_layer_idx,
            config.layer_norm_epsilon,
        )
        self._bytes = torch.frombuffer(self._params, dtype=torch.uint8)
        self._arch = arch
        self._build(shape)

    def _build(self, shape: StepShape) -> None:
        self._shape, device_type = shape, self.logits.device.type
        self._op = load_op(shape.version(), device_type, "the fused decode step", self._arch)

    def __call__(self) -> None:
        """Enqueue the step on the current stream; the first call may have to build the chain."""
        try:
            self._op(self.logits, self._bytes)
        except RuntimeError as error:
            if not self._shape.is_one_kernel or TOO_LARGE not in str(error):
                slot = self._shape.slot
                raise fault(slot.label.upper() if slot else DECODE_ATTENTION, error) from error
            self._build(replace(self._shape, clusters=0))
            self()
