"""What every engine has: the state of a generation on the device, and how a token is accepted."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from attention_kernels.ladder import compilers
from gpt2_infer.model import GPT2
from gpt2_infer.request import EngineName, Request

# Recompute runs at lengths rounded up to a multiple of these: under the causal mask, padding on the
# right cannot change an earlier position. CUDA: a captured graph for each multiple. CPU: oneDNN
# keeps about 2 MB of code and buffers for each length that it has multiplied.
GRAPH_LENGTH_STEP = 32
CPU_LENGTH_STEP = 16


class Engine:
    """Device-side state of a generation; step(i) appends token i to every row.

    A token of -1 says that the logits were not finite. The model reads it as token 0, and the host
    raises an error when it sees it.
    """

    def __init__(self, model: GPT2, request: Request, name: EngineName) -> None:
        prompts, new_tokens = self.padded_rows(request), request.max_new_tokens
        self.name = name
        self.model, self.sampling = model, request.sampling
        self.check_finite = request.check_finite
        self.device = model.device
        self.batch = len(request.rows)
        self.longest = max(map(len, prompts))
        self.last_length = self.longest + new_tokens - 1  # the longest sequence that is ever run
        step = CPU_LENGTH_STEP if name == "eager" else GRAPH_LENGTH_STEP
        self.length_step = 1 if name == "eager" and self.device.type == "cuda" else step
        self.capacity = min(self.rounded(self.last_length + 1), model.config.n_positions)
        padded = [row + [0] * (self.capacity - len(row)) for row in prompts]
        self.tokens = torch.tensor(padded, dtype=torch.long, device=self.device)
        self.prompt_lengths = torch.tensor([len(row) for row in prompts], device=self.device)
        self.lengths = self.prompt_lengths.clone()
        self.same_length = len({len(row) for row in prompts}) == 1
        self.rows = torch.arange(len(prompts), device=self.device)
        self.newest = torch.zeros_like(self.prompt_lengths)
        self.uniforms = self.sampling.uniforms(len(prompts), new_tokens, self.device)

    def padded_rows(self, request: Request) -> list[list[int]]:
        """Return the prompts, and rows after them that nobody reads if the engine needs more."""
        return request.rows

    def warm_up(self) -> None:
        """Do what is done once: build kernels, capture graphs; then be as before the first step.

        An eager engine runs no pass here: the first token would take two.
        """
        raise NotImplementedError

    def step(self, index: int) -> None:
        """Enqueue a step; it waits for nothing."""
        raise NotImplementedError

    def backend(self, step: int) -> str:
        """Return the name of what computes a step's attention."""
        return self.model.attention.name

    def position(self, row: int, step: int) -> int:
        """Return the position whose logits choose the row's token of that step."""
        return int(self.prompt_lengths[row]) + step - 1

    def steps_done(self) -> int:
        """Return how many tokens every row has; waits for the device."""
        return int((self.lengths - self.prompt_lengths).min())

    def new_tokens(self, count: int) -> list[list[int]]:
        """Return the first `count` new tokens of each row, on the host."""
        index = self.prompt_lengths[:, None] + torch.arange(count, device=self.device)
        ids: list[list[int]] = self.tokens.gather(1, index)[: self.batch].tolist()
        return ids

    def accept(self, logits: Tensor) -> None:
        """Choose a token per row from (batch, vocab_size) logits and append it."""
        uniform = self.newest  # greedy: not looked at
        if not self.sampling.is_greedy:
            uniform = self.uniforms.gather(1, (self.lengths - self.prompt_lengths)[:, None])[:, 0]
        token = self.sampling.choose(logits, uniform)
        self.newest.copy_(token if self.check_finite else token.clamp_(min=0))
        self.tokens.index_put_((self.rows, self.lengths), self.newest)
        self.lengths += 1

    def rounded(self, length: int) -> int:
        """Return the length rounded up to a multiple of length_step."""
        return -(-length // self.length_step) * self.length_step

    def reset(self) -> None:
        """Forget all new tokens."""
        self.lengths.copy_(self.prompt_lengths)


def device_reasons(device: torch.device) -> list[str]:
    """Return what speaks against kernels of our own on a device."""
    if device.type != "cuda":
        return ["it needs a CUDA device"]
    if torch.cuda.get_device_capability(device) < (9, 0):
        return ["it needs compute capability 9.0 or higher"]
    missing = compilers.missing_compiler("cuda")
    return [missing] if missing else []


def capture(
    body: Callable[[], None], shared_with: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """Capture body(), which has run before: nothing is loaded or compiled during capture.

    It does not wait for the device, as torch.cuda.graph() does, if memory is shared.
    """
    graph = torch.cuda.CUDAGraph()
    if shared_with is None:
        torch.cuda.empty_cache()  # the memory of graphs that are gone
    with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        graph.capture_begin(shared_with.pool() if shared_with else None)
        try:
            body()
        finally:
            graph.capture_end()
    return graph


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures: graphs share memory only if theirs is the same."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
