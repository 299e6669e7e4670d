"""The fused engine on a CPU: a decode step is one call of our own code, csrc/v03_cpu_step.cu.

It reads the weights where the model keeps them, so there is no copy that could become stale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor, nn

from attention_kernels.contract import dtype_name
from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.op import c_struct, load_op
from gpt2_infer.engines.fused import Fused, State, request_refusals, shape_on
from gpt2_infer.linear import Linear
from gpt2_infer.model import GPT2, Block
from gpt2_infer.request import EngineName, Request

SOURCE = Path(__file__).parent / "csrc" / "v03_cpu_step.cu"


@functools.cache
def _op() -> Callable[..., None] | str:
    """Build and load the code; return its op, or why it cannot be built."""
    try:
        return load_op(header.parse_header(SOURCE, "fused_step_"), "cpu", "the fused decode step")
    except BuildError as error:
        return str(error)


class FusedOnCPU(Fused):
    """Runs the prompts eagerly and decodes in our own code."""

    @classmethod
    def refusals(cls, model: GPT2, request: Request, name: EngineName) -> list[str]:
        """Return all reasons why the engine cannot run a request; without any, build the code."""
        config, dtype = model.config, dtype_name(model.dtype)
        reasons = request_refusals(model, request)
        if dtype != "float32":
            reasons.append(f"dtype {dtype} (on a CPU it takes float32)")
        if not config.is_gelu_tanh:
            reasons.append(f"activation_function {config.activation_function} (it takes gelu_new)")
        if missing := compilers.missing_compiler("emulator"):
            reasons.append(missing)
        if not reasons and isinstance(failure := _op(), str):
            reasons.append(failure)
        return reasons

    @staticmethod
    def padded_rows(request: Request) -> list[list[int]]:
        """Return the prompts; no other rows are needed."""
        return request.rows

    def warm_up(self) -> None:
        """Build the prompts' backend and prepare the step."""
        self.model.attention.prepare(self.device.type)
        self.prepare_decode()

    def prepare_decode(self) -> None:
        """Collect the addresses of the weights."""
        state = State(self.cache, self.newest, self.tokens, self.lengths)
        self.fused_step = CPUStep(self.model, state, self.sampling.is_greedy)


class Emulated(FusedOnCPU):
    """Decodes in the kernels for a GPU, in the emulator: so a slot's file is judged in the step."""

    padded_rows = staticmethod(Fused.padded_rows)
    prepare_decode = Fused.prepare_decode

    @classmethod
    def refusals(cls, model: GPT2, request: Request, name: EngineName) -> list[str]:
        """Return all reasons why the engine cannot run a request."""
        if request.engine != name:
            return ["it is emulated"]
        reasons = super(FusedOnCPU, cls).refusals(model, request, name)
        _, *others = reasons  # it needs a CUDA device
        return others or shape_on(model, cls.most_rows(request)).refusals


# ---- The code's view of a model -----------------------------------------------------------------


# The structs Matrix, Norm, Layer and StructParams.
MatrixParams = c_struct((c_void_p, "data bias"), (c_int64, "rows columns is_transposed"))
NormParams = c_struct((c_void_p, "weight bias"))
LayerParams = c_struct(
    (NormParams, "ln_1 ln_2"), (MatrixParams, "qkv proj fc fc2"), (c_double, "softmax_scale")
)
StepParams = c_struct(
    (POINTER(LayerParams), "layers"),
    (NormParams, "ln_f"),
    (MatrixParams, "head"),
    (c_void_p, "wte wpe kv seqlens newest tokens lengths logits shared own"),
    (c_int64 * 2, "wte_strides"),
    (c_int64, "capacity batch layer_count num_heads max_seqlen threads is_greedy"),
    (c_double, "epsilon"),
)


class CPUStep:
    """A decode step of one model over one cache, on as many threads as torch uses.

    logits: float32 (batch, vocab_size). Raises BuildError.
    """

    def __init__(self, model: GPT2, state: State, is_greedy: bool) -> None:
        op = _op()
        if isinstance(op, str):
            raise BuildError(op)
        cache, rows = state.cache, (state.newest, state.tokens, state.lengths)
        config, batch, max_seqlen = model.config, len(state.newest), cache.kv.shape[4]
        threads = torch.get_num_threads()
        wte = model.wte.weight
        self.logits = wte.new_zeros(batch, config.vocab_size)
        shared = wte.new_empty(batch, 6 * config.n_embd + config.inner_dim)
        own = wte.new_empty(threads, batch * config.n_embd + max_seqlen)
        head = model.head_weight
        self._kept: list[Tensor] = []  # the code holds their addresses
        embeddings = (wte, model.wpe.weight.contiguous())
        others = (cache.kv, cache.seqlens, *rows, self.logits, shared, own)
        self._params = StepParams(
            (LayerParams * config.n_layer)(*map(self._layer, model.blocks())),
            self._norm(model.ln_f),
            self._matrix(head.t(), None),
            *map(self._address, embeddings + others),
            wte.stride(),
            state.tokens.shape[1],
            batch,
            config.n_layer,
            config.n_head,
            max_seqlen,
            threads,
            is_greedy,
            config.layer_norm_epsilon,
        )
        self._bytes, self._op = torch.frombuffer(self._params, dtype=torch.uint8), op

    def __call__(self) -> None:
        """Run the step."""
        self._op(self.logits, self._bytes)

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> Structure:
        """Describe a weight (rows, columns), stored in either order."""
        if not weight.is_contiguous() and not weight.t().is_contiguous():
            weight = weight.contiguous()
        address = 0 if bias is None else self._address(bias)
        return MatrixParams(
            self._address(weight), address, *weight.shape, not weight.is_contiguous()
        )

    def _norm(self, norm: nn.LayerNorm) -> Structure:
        return NormParams(self._address(norm.weight), self._address(norm.bias))

    def _layer(self, block: Block) -> Structure:
        attn, mlp = block.attn, block.mlp
        linears: tuple[Linear, ...] = (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj)
        matrices = (self._matrix(linear.weight, linear.bias) for linear in linears)
        norms = (self._norm(norm) for norm in (block.ln_1, block.ln_2))
        return LayerParams(*norms, *matrices, attn.softmax_scale)
