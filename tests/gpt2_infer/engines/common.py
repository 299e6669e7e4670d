"""Models, requests and an imitation of CUDA graphs for the engines' tests."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_kernels.backends import pytorch
from gpt2_infer import GPT2, Request, sampling
from gpt2_infer.config import GPT2Config

# With --dist loadgroup, one worker runs all tests of gpt2-xl, which take up to 25 GB of GPU memory.
XL = pytest.param("gpt2-xl", marks=pytest.mark.xdist_group("gpt2-xl"))
SIZES = ["gpt2", "gpt2-medium", "gpt2-large", XL]
SMALL = GPT2Config(vocab_size=101, n_positions=40, n_embd=64, n_layer=2, n_head=2, n_inner=128)


def random_model(config: GPT2Config, dtype: torch.dtype = torch.float32) -> GPT2:
    """Return a model with fixed random weights, large enough that every layer matters."""
    torch.manual_seed(0)
    model = GPT2(config).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return model.to(dtype)


def published(name: str, dtype: torch.dtype = torch.float32) -> GPT2:
    """Return a model of a published size on the GPU, with random weights."""
    return GPT2.from_pretrained(name, random_weights=True, device="cuda", dtype=dtype)


def request_for(model: GPT2, prompts: Any, **fields: Any) -> Request:
    return Request(config=model.config, tokenizer=model.tokenizer, prompts=prompts, **fields)


def imitate_graphs(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[RecordedGraph]:
    """Let modules record graphs on the CPU; return the list of recorded graphs."""
    graphs: list[RecordedGraph] = []

    def capture(body, shared_with=None):
        graphs.append(RecordedGraph(body))
        return graphs[-1]

    def visible(k_cache, seqlens):
        positions = k_cache.shape[1]
        return positions, torch.arange(positions) < seqlens[:, None, None, None]

    for module in modules:
        monkeypatch.setattr(module, "capture", capture)
        monkeypatch.setattr(module, "pool_bytes", lambda graph: 1000)
    # On a CPU these read values, which a graph cannot do.
    monkeypatch.setattr(pytorch, "_visible", visible)
    monkeypatch.setattr(sampling, "_largest", lambda logits: logits.max(-1))
    return graphs


class RecordedGraph(TorchDispatchMode):
    """An imitation of a captured CUDA graph: replay() repeats operations on fixed addresses."""

    def __init__(self, body: Callable[[], None]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self:
            body()
        for tensor, value in reversed(self.before):  # a capture runs nothing
            if not torch.equal(tensor, value):
                tensor.copy_(value)
        del self.before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.before += [(x, x.clone()) for x in tensors]
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
