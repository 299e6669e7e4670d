"""Loading of checkpoints: from the hub, a local folder or a seed, onto a device.

Only safetensors files are read, memory-mapped, each tensor straight to the device. Headers are
checked against the configuration before any tensor is read. A checkpoint's own code is never run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from attention_kernels.precision import PLAIN_PRECISIONS
from gpt2_infer.config import GPT2Config, named_config
from gpt2_infer.errors import ConfigError, RequestError, UnavailableDeviceError, WeightsError
from gpt2_infer.files import read_json_object
from gpt2_infer.linear import lay_out
from gpt2_infer.tokenizer import Tokenizer

DEFAULT_MODEL = "openai-community/gpt2"
DEMO_MODEL = "demo"
SHOWN = 5  # most problems listed in an error message
_PACKAGE = Path(__file__).parent
_SMALL_FILES = ["*.json", "merges.txt", "vocab.txt", "*.model"]
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LEGACY_BUFFERS = (".attn.bias", ".attn.masked_bias")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Checkpoint:
    """A model whose configuration and tokenizer have been read, but not its weights."""

    folder: Path
    """The folder of the configuration and tokenizer files."""
    config: GPT2Config
    tokenizer: Tokenizer
    hub_id: str | None = None
    revision: str | None = None
    random_weights: bool = False

    def load_into(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        """Load the weights into a model on the meta device, or draw random ones from `seed`.

        Raises WeightsError if the files do not fit the configuration.
        """
        if self.random_weights:
            _fill(model, device, dtype, seed)
            return
        folder = self.folder
        if self.hub_id is not None:
            named = sorted({*_weight_map(folder).values()})
            patterns = [*named, _WHOLE] if named else ["model*.safetensors"]
            folder = _download(self.hub_id, self.revision, patterns)
        _load(model, folder, self.config, device, dtype)


def open_checkpoint(
    model: str | Path, *, revision: str | None = None, random_weights: bool = False
) -> Checkpoint:
    """Read the configuration and tokenizer of "demo", a local folder or a hub id.

    For a hub id these files are downloaded. With random_weights, the name of a published size needs
    no download. Raises WeightsError, or ConfigError for an invalid or unsupported configuration.
    """
    if not isinstance(model, str | Path):
        raise RequestError(f"model must be a name or a folder, not {model!r}")
    model = str(model)
    hub_id, config = None, None
    folder = _PACKAGE / "demo_model" if model == DEMO_MODEL else Path(os.path.expanduser(model))
    if os.path.isdir(folder):
        if revision is not None:
            raise WeightsError(
                f"--revision {revision} is for models on the hub, and {model} is a local folder"
            )
    elif random_weights and revision is None and (config := named_config(model)) is not None:
        folder = _PACKAGE / "gpt2_tokenizer"
    else:
        hub_id, folder = model, _download(model, revision, _SMALL_FILES)
    config = config or _read_config(model, folder)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise WeightsError(
            f"{model}: the tokenizer has {tokenizer.vocab_size} tokens, but the model's "
            f"vocabulary has {config.vocab_size}: they do not belong together"
        )
    return Checkpoint(folder, config, tokenizer, hub_id, revision, random_weights)


def _read_config(name: str, folder: Path) -> GPT2Config:
    raw, file = read_json_object(folder / "config.json"), folder / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else None
    try:
        return GPT2Config.from_dict(raw, generation)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the named device; for None, cuda if available, else cpu.

    Raises UnavailableDeviceError for a CUDA device if torch has none, RequestError for an invalid
    name.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError):
        raise RequestError(f"device must be cuda or cpu, not {device!r}") from None
    if named.type == "cuda" and (named.index or 0) >= torch.cuda.device_count():
        raise UnavailableDeviceError(
            f"{device}: this machine has no such CUDA device that torch can use"
        )
    return named


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype; raises RequestError unless it is a floating-point one."""
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        names = ", ".join(PLAIN_PRECISIONS)
        raise RequestError(f"dtype must be one of {names}, not {dtype!r}")
    return resolved


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each stored tensor by the folder's index; empty if it has none.

    As in transformers, an index that does not name model.safetensors gives way to that file.
    """
    file = folder / _INDEX
    if not file.is_file():
        return {}
    try:
        weight_map = msgspec.convert(read_json_object(file).get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise WeightsError(f"{file} has no valid weight_map: {error}") from None
    is_older = _WHOLE not in weight_map.values() and (folder / _WHOLE).is_file()
    return {} if is_older else weight_map


def _stored(folder: Path, device: torch.device) -> dict[str, tuple[Any, str]]:
    """Return the open file and the key of each stored tensor, by the model's names."""
    stored = {}
    weight_map = _weight_map(folder)
    for file in sorted({*weight_map.values()}) or _weight_files(folder):
        if not (folder / file).is_file():
            raise WeightsError(f"{folder / _INDEX} names {file}, which is not there")
        try:
            opened: Any = safe_open(folder / file, framework="pt", device=str(device))
        except SafetensorError as error:
            raise WeightsError(f"{folder / file} is truncated or corrupt: {error}") from error
        for key in opened.keys():  # noqa: SIM118 (not a dict)
            if weight_map.get(key, file) != file:
                continue  # a stale copy
            name = key.removeprefix("transformer.")
            if name in stored:
                raise WeightsError(f"{folder} stores {name} twice")
            if not name.endswith(_LEGACY_BUFFERS):
                stored[name] = opened, key
    return stored


def _load(
    model: nn.Module, folder: Path, config: GPT2Config, device: torch.device, dtype: torch.dtype
) -> None:
    """Check the headers of the folder's files against the model, then read the weights into it."""
    stored = _stored(folder, device)
    expected = {name: [*parameter.shape] for name, parameter in model.named_parameters()}
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        # A tied checkpoint may store the output projection as well, or instead of wte.
        if "wte.weight" in stored:
            expected["lm_head.weight"] = expected["wte.weight"]
        else:
            stored["wte.weight"] = stored.pop("lm_head.weight")
    problems = [f"missing {name} {shape}" for name, shape in expected.items() if name not in stored]
    problems += [f"unexpected {name}" for name in stored if name not in expected]
    for name, (opened, key) in stored.items():
        header = opened.get_slice(key)
        if header.get_shape() != expected.get(name, header.get_shape()):
            problems.append(f"{name} is {header.get_shape()} and should be {expected[name]}")
        if header.get_dtype() not in _FLOAT_DTYPES:
            problems.append(f"{name} is {header.get_dtype()}, not {', '.join(_FLOAT_DTYPES)}")
    if problems:
        if len(problems) > SHOWN:
            problems[SHOWN:] = [f"and {len(problems) - SHOWN} more"]
        raise WeightsError(f"{folder} does not fit its configuration: {'; '.join(problems)}")

    tensors = {
        name: _converted(name, opened.get_tensor(key), dtype)
        for name, (opened, key) in stored.items()
    }
    if "lm_head.weight" in tensors and config.tie_word_embeddings:
        head = tensors.pop("lm_head.weight")
        if not torch.equal(head, tensors["wte.weight"]):
            raise WeightsError(
                f"{folder}: tie_word_embeddings is true and lm_head.weight differs from "
                "wte.weight; one of the two is wrong"
            )
    model.load_state_dict(tensors, assign=True)


def _converted(name: str, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a stored tensor to a dtype; if that copies it, also lay it out for products."""
    if stored.dtype == dtype:
        return stored
    is_multiplied = stored.dim() == 2 and name != "wpe.weight"
    return lay_out(stored.to(dtype)) if is_multiplied else stored.to(dtype)


@torch.no_grad()
def _fill(model: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Initialize as GPT-2 does; on one type of device, a seed always gives the same weights."""
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    model.to(dtype)


def _weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's weight files without an index."""
    if (folder / _WHOLE).is_file():
        return [_WHOLE]
    files = sorted(file.name for file in folder.glob("model-*-of-*.safetensors"))
    if not files:
        raise WeightsError(
            f"{folder} has neither model.safetensors nor its shards; weights are never read from a "
            "pickle, which can run code: convert one with transformers: "
            "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
        )
    return files


def _download(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the snapshot folder of a hub id, with all files that match `patterns`."""
    from huggingface_hub import errors as hub
    from huggingface_hub import model_info, snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
        if not any(folder.glob(patterns[0])):
            # Offline, the folder holds what happens to be cached: "not downloaded" must not be
            # reported as "does not exist".
            model_info(hub_id, revision=revision)
        return folder
    except hub.RevisionNotFoundError:
        raise WeightsError(
            f"{hub_id} has no revision {revision!r} on the Hugging Face hub"
        ) from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        raise WeightsError(
            f"{hub_id!r} is neither a local folder nor a model on the Hugging Face hub "
            "(try --model demo)"
        ) from error
    except Exception as error:  # whatever its HTTP client raises if the hub is unreachable
        raise WeightsError(
            f"{hub_id} could not be fetched from the Hugging Face hub ({type(error).__name__}); "
            "use --model demo, which is bundled, --model FOLDER for a local checkpoint, "
            "or --random-weights with the name of a published size"
        ) from error
