"""Loading of checkpoints: from the hub, a local folder or a seed, onto a device.

Only safetensors files are read, memory-mapped, each tensor straight to the device. Headers are
checked against the configuration before any tensor is read. A checkpoint's own code is never run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from attention_kernels.contract import PLAIN_PRECISIONS
from gpt2_infer.checks import check_type
from gpt2_infer.config import GPT2Config, named_config
from gpt2_infer.errors import ConfigError, RequestError, UnavailableDeviceError, WeightsError
from gpt2_infer.files import read_json_object
from gpt2_infer.linear import lay_out
from gpt2_infer.tokenizer import Tokenizer

DEFAULT_MODEL = "openai-community/gpt2"
DEMO_MODEL = "demo"
_PACKAGE = Path(__file__).parent
_SMALL_FILES = ["*.json", "merges.txt", "vocab.txt", "*.model"]
_WEIGHT_FILES = ["*.safetensors"]
_LEGACY_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
SHOWN = 5  # problems listed in an error message
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"h\.(\d+)\.")
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Checkpoint:
    """A model whose configuration and tokenizer have been read, but not its weights."""

    name: str
    """The name that the user gave."""
    folder: Path
    """The folder of the configuration and tokenizer files."""
    config: GPT2Config
    tokenizer: Tokenizer
    hub_id: str | None = None
    revision: str | None = None
    random_weights: bool = False

    def load(self, make: Callable[[], M], device: torch.device, dtype: torch.dtype, seed: int) -> M:
        """Call make() on the meta device, then load the weights, or draw random ones from `seed`.

        Raises WeightsError if the files do not fit the configuration; the number of layers is
        checked before make() is called.
        """
        if self.random_weights:
            with torch.device("meta"):
                model = make()
            return _fill(model, device, dtype, seed)
        folder = self.folder
        if self.hub_id is not None:
            folder = _download(self.hub_id, self.revision, _WEIGHT_FILES)
        stored = _stored_tensors(folder, self.config)
        with torch.device("meta"):
            model = make()
        _load(model, stored, folder, self.config, device, dtype)
        return model


def open_checkpoint(
    model: str | Path,
    *,
    revision: str | None = None,
    random_weights: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Checkpoint:
    """Read the configuration and tokenizer of "demo", a local folder or a hub id.

    For a hub id these files are downloaded. With random_weights, the name of a published size needs
    no download. Raises WeightsError, or ConfigError for an invalid or unsupported configuration.
    """
    if not isinstance(model, str | Path):
        raise RequestError(f"model must be a name or a folder, not {model!r}")
    model = str(model)
    if tokenizer is not None:
        check_type("tokenizer", tokenizer, Tokenizer)
    folder = _local_folder(model)
    hub_id, config = None, None
    if folder is not None:
        if revision is not None:
            raise WeightsError(
                f"--revision {revision} is for models on the hub, and {model} is a local folder"
            )
    elif random_weights and revision is None and (config := named_config(model)) is not None:
        folder = _PACKAGE / "gpt2_tokenizer"
    else:
        hub_id, folder = model, _download(model, revision, _SMALL_FILES)
    config = config or _read_config(model, folder)
    tokenizer = tokenizer or Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise WeightsError(
            f"{model}: the tokenizer has {tokenizer.vocab_size} tokens, but the model's "
            f"vocabulary has {config.vocab_size}: they do not belong together"
        )
    return Checkpoint(model, folder, config, tokenizer, hub_id, revision, random_weights)


def _local_folder(model: str) -> Path | None:
    """Return the folder that `model` names, or None if it can only be a hub id."""
    if model == DEMO_MODEL:
        return _PACKAGE / "demo_model"
    try:
        folder = Path(model).expanduser()
        if folder.is_file():
            raise WeightsError(f"{model} is a file: name the folder it is in")
    except (OSError, RuntimeError) as error:  # a name too long, an unknown user, no permission
        raise WeightsError(f"{model!r} cannot be a model: {error}") from error
    if model and folder.is_dir():
        return folder
    if not model or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise WeightsError(f"there is no folder {model!r}, and it cannot be a hub id")
    return None


def _read_config(name: str, folder: Path) -> GPT2Config:
    """Read config.json, with generation_config.json's end-of-text ids if it has any."""
    raw = read_json_object(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_json_object(generation).get("eos_token_id")
        raw = raw if eos is None else {**raw, "eos_token_id": eos}
    try:
        return GPT2Config.from_dict(raw)
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
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise RequestError(f"device must be cuda or cpu, not {device!r}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableDeviceError(
            f"{device}: this machine has no CUDA device that torch can use"
        )
    return found


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype; raises RequestError unless it is a floating-point one."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        names = ", ".join(PLAIN_PRECISIONS)
        raise RequestError(f"dtype must be one of {names}, not {dtype!r}")
    return found


class _Stored(NamedTuple):
    """A tensor in a file, as its header describes it."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def _stored_tensors(folder: Path, config: GPT2Config) -> dict[str, list[_Stored]]:
    """Return the tensors listed in the folder's headers, by the model's names; reads no data.

    Raises WeightsError if the number of layers differs from the configuration's.
    """
    found: dict[str, list[_Stored]] = {}
    for stored in _headers(_weight_files(folder)):
        name = stored.key.removeprefix("transformer.")
        if not _LEGACY_BUFFER.fullmatch(name):
            found.setdefault(name, []).append(stored)
    layers = len({match[1] for name in found if (match := _LAYER.match(name))})
    if layers != config.n_layer:
        raise WeightsError(
            f"{folder} does not fit its configuration: n_layer is {config.n_layer}, but its "
            f"weights have {layers} layers"
        )
    return found


def _load(
    model: nn.Module,
    stored: dict[str, list[_Stored]],
    folder: Path,
    config: GPT2Config,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Load the folder's weights into a model on the meta device."""
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    problems = [f"{name} is stored twice" for name, places in stored.items() if len(places) > 1]
    found = {name: places[0] for name, places in stored.items()}
    # A tied checkpoint may store the output projection as well, or instead of wte.
    second_head = found.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    if second_head is not None and "wte.weight" not in found:
        found["wte.weight"], second_head = second_head, None
    if second_head is not None and second_head.shape != expected["wte.weight"]:
        problems.append(
            f"lm_head.weight is {second_head.shape} and should be {expected['wte.weight']}"
        )
    problems += [f"missing {name} {shape}" for name, shape in expected.items() if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    for name, tensor in found.items():
        if name in expected and tensor.shape != expected[name]:
            problems.append(f"{name} is {tensor.shape} and should be {expected[name]}")
        if tensor.dtype not in _FLOAT_DTYPES:
            problems.append(f"{name} is {tensor.dtype}, not one of {', '.join(_FLOAT_DTYPES)}")
    if problems:
        if len(problems) > SHOWN:
            problems[SHOWN:] = [f"and {len(problems) - SHOWN} more"]
        raise WeightsError(f"{folder} does not fit its configuration: {'; '.join(problems)}")

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({tensor.file for tensor in found.values()}):
        with safe_open(file, framework="pt", device=str(device)) as opened:
            for name, tensor in found.items():
                if tensor.file == file:
                    tensors[name] = _converted(name, opened.get_tensor(tensor.key), dtype)
    if second_head is not None:
        with safe_open(second_head.file, framework="pt", device=str(device)) as opened:
            if not torch.equal(opened.get_tensor(second_head.key).to(dtype), tensors["wte.weight"]):
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
def _fill(model: M, device: torch.device, dtype: torch.dtype, seed: int) -> M:
    """Initialize as GPT-2 does; on one type of device, a seed always gives the same weights."""
    try:
        model = model.to_empty(device=device)
    except RuntimeError as error:
        count = sum(parameter.numel() for parameter in model.parameters())
        raise WeightsError(f"{device} has no memory for {count:,} float32 parameters") from error
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    return model.to(dtype)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index} has no weight_map")
        names = sorted({str(value) for value in weight_map.values()})
        if outside := [name for name in names if Path(name).name != name]:
            raise WeightsError(f"{index} names files in other folders: {', '.join(outside)}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    patterns = ("*.bin", "*.pt", "*.pth", "*.ckpt")
    raise _no_weights(folder, sorted(f.name for pattern in patterns for f in folder.glob(pattern)))


def _headers(files: list[Path]) -> Iterator[_Stored]:
    """Yield every tensor listed in the files' headers."""
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise WeightsError(
            f"{files[0].parent}: its index names missing files: {', '.join(missing)}"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (not a dict)
                    view = opened.get_slice(key)
                    yield _Stored(file, key, tuple(view.get_shape()), view.get_dtype())
        except SafetensorError as error:
            raise WeightsError(f"{file} is truncated or corrupt: {error}") from error
        except OSError as error:
            raise WeightsError(f"{file} cannot be read: {error}") from error


def _download(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the snapshot folder of a hub id, with all files that match `patterns`.

    Offline, huggingface_hub returns what is cached, which may be incomplete. In that case the hub
    is asked, so that "not downloaded" is not reported as "does not exist".
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import model_info, snapshot_download

    wanted = "*.safetensors" if patterns == _WEIGHT_FILES else "config.json"
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
        if any(folder.glob(wanted)):
            return folder
        files = [entry.rfilename for entry in model_info(hub_id, revision=revision).siblings or []]
    except hub.RevisionNotFoundError:
        raise WeightsError(
            f"{hub_id} has no revision {revision!r} on the Hugging Face hub"
        ) from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        reason = f"{hub_id!r} is neither a local folder nor a model on the Hugging Face hub"
        raise WeightsError(f"{reason} (try --model demo)") from error
    except Exception as error:  # whatever its HTTP client raises if the hub is unreachable
        raise WeightsError(
            f"{hub_id} could not be fetched from the Hugging Face hub ({type(error).__name__}); "
            "use --model demo, which is bundled, --model FOLDER for a local checkpoint, "
            "or --random-weights with the name of a published size"
        ) from error
    pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    raise (
        _no_weights(hub_id, pickles)
        if wanted == "*.safetensors"
        else WeightsError(f"{hub_id} has no config.json on the Hugging Face hub")
    )


def _no_weights(where: str | Path, pickles: list[str]) -> WeightsError:
    holds = f"only {', '.join(pickles)}" if pickles else "no weights"
    return WeightsError(
        f"{where} holds {holds}: weights are read from model.safetensors or its shards, never from "
        "a pickle, which can run code; convert one with transformers: "
        "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
    )
