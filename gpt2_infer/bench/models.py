"""Our models, transformers' as a peer, and a clock, for the studies of whole models."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpt2_infer.model import GPT2

Result = TypeVar("Result")


def loader(load: Callable[..., Result], **options: Any) -> Callable[..., Result]:
    """Return load() with these options, which keeps the last model."""
    return functools.lru_cache(maxsize=1)(functools.partial(load, **options))


def reference_of(model: GPT2) -> Any:
    """Return transformers' model with a copy of our weights."""
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(**vars(model.config) | {"bos_token_id": None, "eos_token_id": None})
    reference = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    reference.load_state_dict(
        {f"transformer.{name}": value for name, value in model.state_dict().items()}
        | {"lm_head.weight": model.wte.weight}
    )
    return reference.to(model.device).eval()


def generated(
    reference: Any, ids: Tensor, new_tokens: int, *, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the greedy new tokens of a model of transformers, (batch, new_tokens).

    ids: the prompts, (batch, seqlen). mask: False for padding. options: those of generate().
    """
    tokens: Tensor = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return tokens[:, ids.shape[1] :]


def timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of call(), and the seconds until the device has finished."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - started
