"""Models of other architectures, which run in transformers, for the studies of whole models.

A backend computes the attention of every layer through attention_kernels.hf: of the prompt and,
without a cache, of every step. For one that takes no grouped queries, keys and values are copied
once per query head in every call; that is part of its time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_kernels import BackendSpec, get_backend
from attention_kernels.contract import AttentionFunction
from attention_kernels.errors import describe
from gpt2_infer.bench import models
from gpt2_infer.checkpoint import DEMO_MODEL, SHOWN, Checkpoint
from gpt2_infer.config import GPT2Config
from gpt2_infer.errors import RequestError, WeightsError
from gpt2_infer.files import read_json_object
from gpt2_infer.generation import Generation
from gpt2_infer.model import GPT2, function_backend
from gpt2_infer.request import Mode
from gpt2_infer.tokenizer import Tokenizer

# Sizes that --random-weights can build by name. What has no column does not change the time.
_COLUMNS = """
model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
head_dim vocab_size max_position_embeddings tie_word_embeddings
"""
_SIZES = {
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, True),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, True),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, True),
}


@dataclasses.dataclass(frozen=True)
class HFCheckpoint(Checkpoint):
    """A model of another architecture, whose weights have not been read.

    config: its sizes, in GPT-2's terms; n_embd is the width of all query heads.
    """

    settings: Any = None
    """transformers' configuration."""

    def load(self, device: str, dtype: str, attention: str) -> HFModel:
        """Read the weights, or draw random ones from seed 0; raises WeightsError."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        kind = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
        with _told(self.folder), torch.random.fork_rng():
            torch.manual_seed(0)
            if self.random_weights:
                with torch.device(device):  # from_pretrained() would want accelerate there
                    network = AutoModelForCausalLM.from_config(self.settings, **kind)
            else:
                kind |= {"config": self.settings, "local_files_only": True, "use_safetensors": True}
                kind["output_loading_info"] = True
                network, told = AutoModelForCausalLM.from_pretrained(self.folder, **kind)
                if missing := sorted(told["missing_keys"]):  # they would be random
                    raise LookupError(f"no {', '.join(missing[:SHOWN])}")
        network.generation_config = GenerationConfig()  # greedy, whatever the folder says
        network, spec = network.to(device).eval(), get_backend(attention)
        return HFModel(network, self.config, self.tokenizer, network.device, network.dtype, spec)


@dataclasses.dataclass(frozen=True)
class HFModel:
    """A model of transformers, with those methods of GPT2 that studies and examine() call."""

    network: Any
    config: GPT2Config
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    attention: BackendSpec
    decoder: BackendSpec | None = None
    """The backend that decodes with a cache; None selects `attention`, if it can."""

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the model's GPU, if it has one, is the current one."""
        return torch.cuda.device_of(self.network.get_output_embeddings().weight)  # type: ignore[no-untyped-call]

    def with_attention(
        self, attention: BackendSpec | AttentionFunction, decoder: BackendSpec | None = None
    ) -> HFModel:
        """Return the model with other backends and shared weights."""
        spec = attention if isinstance(attention, BackendSpec) else function_backend(attention)
        return dataclasses.replace(self, attention=spec, decoder=decoder)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, *, seqlens: Tensor) -> Tensor:
        """Return the logits after the last token of each row, (batch, 1, vocab_size).

        tokens: (batch, seqlen), right-padded with any id. seqlens: (batch,), all of them equal.
        """
        last = self._ready()(tokens, use_cache=False, logits_to_keep=seqlens[:1] - 1)
        return last.logits  # type: ignore[no-any-return]

    def generate(self, prompts: list[list[int]], new_tokens: int, mode: Mode) -> Generation:
        """Write greedy texts with transformers' own loop, of which the whole call is timed."""
        network, ids = self._ready(), torch.tensor(prompts, device=self.device)

        is_cached = mode == "kv-cache"
        call = functools.partial(models.generated, network, ids, new_tokens, use_cache=is_cached)
        found, seconds = models.timed(self.device, call)
        ran: dict[str, Any] = {"mode": mode, "engine": "eager", "length_step": 1}
        ran |= {"attention": self.attention.name, "decode_attention": None}
        ran |= {"warm_up_s": 0.0, "prefill_s": math.nan, "generation_s": seconds}
        return Generation(prompts, found.tolist(), ["length"] * len(prompts), **ran)

    def _ready(self) -> Any:
        """Return the network, in which all copies of this model take turns."""
        from attention_kernels import hf

        hf.register_one(self.attention, self.decoder)
        self.network.set_attn_implementation(self.attention.name)
        return self.network


def find(model: str, *, random_weights: bool = False) -> HFCheckpoint | None:
    """Read the configuration and tokenizer of a model that is not a GPT-2; None for any other.

    model: a local folder or, with random_weights, a size of _SIZES, which gets GPT-2's tokenizer.
    Nothing is downloaded. Raises WeightsError, and RequestError for a size without random_weights.
    """
    fields = dict[str, Any]()
    name, folder = model.rpartition("/")[2].lower(), Path(os.path.expanduser(model))
    if model != DEMO_MODEL and (folder / "config.json").is_file():
        fields = read_json_object(folder / "config.json")
    elif name in _SIZES:
        if not random_weights:
            raise RequestError(f"{model} needs --random-weights, or the folder of its weights")
        fields = dict(zip(_COLUMNS.split(), _SIZES[name], strict=True))
        folder = Path(__file__).parents[1] / "gpt2_tokenizer"
    if fields.get("model_type", "gpt2") == "gpt2":
        return None
    from transformers import AutoConfig

    with _told(model):
        settings = AutoConfig.for_model(**fields)
        heads, vocab_size = settings.num_attention_heads, settings.vocab_size
        head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        positions, layers = settings.max_position_embeddings, settings.num_hidden_layers
    config = GPT2Config(vocab_size, positions, heads * head_dim, layers, heads)
    tokenizer = Tokenizer.load(folder)
    return HFCheckpoint(folder, config, tokenizer, random_weights=random_weights, settings=settings)


def load(model: str, *, random_weights: bool, **options: Any) -> GPT2 | HFModel:
    """Load a model of any architecture; options: device, dtype and attention."""
    if other := find(model, random_weights=random_weights):
        return other.load(**options)
    return GPT2.from_pretrained(model, random_weights=random_weights, **options)


@contextlib.contextmanager
def _told(model: object) -> Iterator[None]:
    """Turn the errors of transformers, which are of many kinds, into a WeightsError."""
    try:
        yield
    except Exception as error:
        raise WeightsError(f"{model} cannot be loaded: {describe(error)[:200]}") from error
