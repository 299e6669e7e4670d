"""Base of all engines: the state of a generation on the device, and accepting a token."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention_kernels import BackendSpec
from gpt2_infer import product
from gpt2_infer.config import GPT2Config
from gpt2_infer.model import GPT2
from gpt2_infer.request import EngineName, Request

# Share of a GPU's memory that a model's idle engines may hold.
KEPT_SHARE = 1 / 8
# Recompute runs at lengths rounded up to a multiple of these: under the causal mask, padding on the
# right cannot change an earlier position. CUDA: one captured graph per multiple. CPU: oneDNN caches
# about 2 MB of code and buffers per length.
GRAPH_LENGTH_STEP = 32
CPU_LENGTH_STEP = 16


class Engine:
    """Device-side state of a generation; step(i) appends token i to every row.

    Captured graphs and compiled kernels hold the addresses of its tensors, so begin() refills these
    for the next request. A token of -1 means that the logits were not finite. The model reads it as
    token 0, and the host raises an error when it sees it.
    """

    def __init__(self, model: GPT2, request: Request, name: EngineName) -> None:
        self.name, self.device = name, model.device
        self.length_step = length_step(name, model.device)
        rows, self.capacity = len(self.padded_rows(request)), self.needed(model, request, name)
        # The last token needs no position.
        self.tokens = torch.zeros(rows, self.capacity + 1, dtype=torch.long, device=self.device)
        self.prompt_lengths = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.lengths = torch.zeros_like(self.prompt_lengths)
        self.rows = torch.arange(rows, device=self.device)
        self.newest = torch.zeros_like(self.prompt_lengths)
        self.uniforms = torch.zeros(rows, self.capacity, device=self.device)
        self._newest_graph: torch.cuda.CUDAGraph | None = None
        self._nbytes: int | None = None
        self.begin(model, request)

    @classmethod
    def refusals(cls, model: GPT2, request: Request, name: EngineName) -> list[str]:
        """Return all reasons why the engine cannot run a request; only fused may build code."""
        if name == "eager":
            return []
        reasons = [] if model.device.type == "cuda" else ["it needs a CUDA device"]
        decoders = [model.decode_attention] if request.mode == "kv-cache" else []
        return reasons + uncaptured(model.attention, *decoders)

    @classmethod
    def needed(cls, model: GPT2, request: Request, name: EngineName) -> int:
        """Return the capacity of a row in positions."""
        last = max(map(len, request.rows)) + request.max_new_tokens
        return padded_length(last, length_step(name, model.device), model.config)

    def begin(self, model: GPT2, request: Request) -> None:
        """Start a request of the engine's shape; the engine must be new or cleared."""
        prompts, new_tokens = self.padded_rows(request), request.max_new_tokens
        lengths = [len(row) for row in prompts]
        self.model, self.sampling = model, request.sampling
        self.batch = len(request.rows)
        self.longest, self.same_length = max(lengths), len({*lengths}) == 1
        self.last_length = self.longest + new_tokens - 1  # of the longest forward pass
        padded = [row + [0] * (self.longest - len(row)) for row in prompts]
        self.tokens[:, : self.longest] = torch.tensor(padded, device=self.device)
        self.prompt_lengths.copy_(torch.tensor(lengths, device=self.device))
        self.reset()
        if not self.sampling.is_greedy:
            uniforms = self.sampling.uniforms(len(prompts), new_tokens, self.device)
            self.uniforms[:, :new_tokens] = uniforms

    def rest(self) -> None:
        """Forget the model, so that the idle engine does not keep it alive."""
        del self.model

    def clear(self) -> None:
        """Clear the last request from the tensors, on the current stream."""
        self.tokens.zero_()
        self.newest.zero_()

    @property
    def nbytes(self) -> int:
        """The device memory that the engine holds in bytes, without weights."""
        if self._nbytes is None:
            self._nbytes = sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))
            if self._newest_graph is not None:
                self._nbytes += pool_bytes(self._newest_graph)
        return self._nbytes

    def record(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture body() in a graph that shares memory with the engine's other graphs."""
        self._newest_graph = capture(body, shared_with=self._newest_graph)
        self._nbytes = None
        return self._newest_graph

    @staticmethod
    def padded_rows(request: Request) -> list[list[int]]:
        """Return the prompts, followed by unused rows if the engine needs more."""
        return request.rows

    def warm_up(self) -> None:
        """Build missing kernels, capture missing graphs, and return to the state before step 0.

        An eager engine runs no pass here, because the first token would then take two.
        """
        raise NotImplementedError

    def step(self, index: int) -> None:
        """Enqueue a step without waiting for the device."""
        raise NotImplementedError

    def own_logits(self, step: int) -> Tensor | None:
        """Return the logits that a kernel of the step has computed, (batch, vocab_size), if any.

        A greedy step then chooses its tokens without the sampler. The next step overwrites them.
        """
        return None

    def backend(self, step: int) -> str:
        """Return the name of the attention that a step uses."""
        return self.model.attention.name

    def new_tokens(self, count: int) -> list[list[int]]:
        """Return the first `count` new tokens of each row, on the host."""
        index = self.prompt_lengths[:, None] + torch.arange(count, device=self.device)
        ids: list[list[int]] = self.tokens.gather(1, index)[: self.batch].tolist()
        return ids

    def accept(self, logits: Tensor) -> None:
        """Choose a token per row from (batch, vocab_size) logits and append it."""
        uniform = self.newest  # a placeholder that greedy ignores
        if not self.sampling.is_greedy:
            uniform = self.uniforms.gather(1, (self.lengths - self.prompt_lengths)[:, None])[:, 0]
        self.newest.copy_(self.sampling.choose(logits, uniform))
        self.tokens.index_put_((self.rows, self.lengths), self.newest)
        self.lengths += 1

    def reset(self) -> None:
        """Discard all new tokens."""
        self.lengths.copy_(self.prompt_lengths)


def key_of(model: GPT2, request: Request) -> tuple[Hashable, ...]:
    """Return what calls must have in common, besides their sizes, to use the same engine."""
    sampling = replace(request.sampling, seed=0)
    kernels = model.products, model.attention, model.decode_attention
    return sampling, request.guesses, model.config, *kernels


def length_step(name: EngineName, device: torch.device) -> int:
    """Return the multiple that recompute's lengths are rounded up to."""
    if name != "eager":
        return GRAPH_LENGTH_STEP
    return CPU_LENGTH_STEP if device.type == "cpu" else 1


def padded_length(length: int, step: int, config: GPT2Config) -> int:
    """Return the length rounded up to a multiple of step, or n_positions if that is less."""
    return min(-(-length // step) * step, config.n_positions)


def weights_by_rows(model: GPT2) -> tuple[Tensor, Tensor]:
    """Return the embeddings of tokens and the weights of the logits, contiguous.

    Those that were laid out on a CPU and moved to a GPU are copied.
    """
    wte = model.wte.weight.contiguous()
    return wte, wte if model.lm_head is None else model.lm_head.weight.contiguous()


def uncaptured(*specs: BackendSpec) -> list[str]:
    """Return a reason for each backend that a CUDA graph cannot hold."""
    return [
        f"{spec.name} cannot be captured in a CUDA graph" for spec in specs if not spec.cuda_graphs
    ]


def kernel_refusals(model: GPT2, dtypes: Sequence[str]) -> list[str]:
    """Return the reasons why our own kernels, which take these dtypes, cannot run a model."""
    config = model.config
    reasons = product.refusals(model.device, model.dtype, config, dtypes)
    if not config.is_gelu_tanh:
        reasons.append(f"activation_function {config.activation_function} (it takes gelu_new)")
    return reasons


def capture(
    body: Callable[[], None], shared_with: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """Capture body(), which must have run before: capture can neither load nor compile.

    Unlike torch.cuda.graph(), it does not wait for the device if memory is shared. Other threads
    may use the device during capture.
    """
    graph = torch.cuda.CUDAGraph()
    with _capturing, torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        if shared_with is None:
            torch.cuda.empty_cache()  # free the memory of deleted graphs
        pool = shared_with.pool() if shared_with else None
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
    return graph


def room(device: torch.device) -> int:
    """Return how many bytes a model's idle engines may hold; on a CPU, none."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory * KEPT_SHARE)


_capturing = threading.Lock()


def pool_bytes(graph: torch.cuda.CUDAGraph) -> int:
    """Return the bytes held by a graph and all graphs that share its memory."""
    pool = tuple(graph.pool())
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == pool)


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream for all captures: graphs share memory only within one stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
