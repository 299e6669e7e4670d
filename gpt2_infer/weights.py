"""From a hub id, a local folder or a seed to a model on a device.

Safetensors only, memory-mapped, tensor by tensor straight to the device. What a checkpoint holds is
compared with what the configuration needs before the first tensor is read, and what does not
fit is told at once: the first five of it, and how many more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from attention_kernels import default_backend, get_backend
from attention_kernels.registry import PLAIN_PRECISIONS
from gpt2_infer.config import GPT2Config, named_config
from gpt2_infer.errors import ConfigError, RequestError, UnavailableDeviceError, WeightsError
from gpt2_infer.model import GPT2, check_backend
from gpt2_infer.tokenizer import Tokenizer

DEFAULT_MODEL = "openai-community/gpt2"
DEMO_MODEL = "demo"
_PACKAGE = Path(__file__).parent
_SMALL_FILES = ["*.json", "merges.txt", "vocab.txt", "*.model"]
_WEIGHT_FILES = ["*.safetensors"]
_LEGACY_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
SHOWN = 5  # of the tensors that do not fit
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Source:
    """A model's origin: what the user named, the folder of its small files, its hub id if any.

    size: the configuration of a published size that is built without its files.
    """

    name: str
    folder: Path
    hub_id: str | None = None
    revision: str | None = None
    size: GPT2Config | None = None

    def config(self) -> GPT2Config:
        """Read config.json, and generation_config.json's end-of-text ids where there are any."""
        if self.size is not None:
            return self.size
        raw = _read_json(self.folder / "config.json")
        generation = self.folder / "generation_config.json"
        if generation.is_file():
            eos = _read_json(generation).get("eos_token_id")
            raw = raw if eos is None else {**raw, "eos_token_id": eos}
        try:
            return GPT2Config.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None
        except TypeError as error:
            raise ConfigError(f"{self.folder / 'config.json'}: {error}") from None

    def weights_folder(self) -> Path:
        """The folder of the safetensors files, downloaded now if they are on the hub."""
        return (
            self.folder
            if self.hub_id is None
            else _download(self.hub_id, self.revision, _WEIGHT_FILES)
        )


def find(model: str, *, revision: str | None = None, random_weights: bool = False) -> Source:
    """Resolve `model`: "demo", a local folder, or a hub id (whose small files are downloaded).

    With random_weights a published size's name needs no download. Raises WeightsError.
    """
    if model == DEMO_MODEL:
        folder = _PACKAGE / "demo_model"
    else:
        try:
            folder = Path(model).expanduser()
            if folder.is_file():
                raise WeightsError(f"{model} is a file: name the folder it is in")
        except (OSError, RuntimeError) as error:  # a name too long, a user unknown, no permission
            raise WeightsError(f"{model!r} cannot be a model: {error}") from error
    if model and folder.is_dir():
        if revision is not None:
            raise WeightsError(
                f"--revision {revision} is for models on the hub, and {model} is a local folder"
            )
        return Source(model, folder)
    if random_weights and revision is None and (size := named_config(model)) is not None:
        return Source(model, _PACKAGE / "gpt2_tokenizer", size=size)
    if (
        model == DEMO_MODEL
        or model.startswith((".", "/", "~"))
        or model.count("/") > 1
        or not model
    ):
        raise WeightsError(f"there is no folder {model!r}, and it cannot be a hub id")
    return Source(model, _download(model, revision, _SMALL_FILES), model, revision)


def load_model(
    model: str | Source = DEFAULT_MODEL,
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = torch.float32,
    attention: str | None = None,
    decode_attention: str | None = None,
    random_weights: bool = False,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
) -> GPT2:
    """A GPT2 with its tokenizer, ready to generate.

    model: "demo", a folder, a hub id (with revision), or what find() made of one of them. device:
    None for cuda where there is one, else cpu. dtype: torch's, or its name.
    attention, decode_attention: backend names. random_weights: build the size named by `model` from
    `seed`, for timing.
    Raises RequestError, WeightsError, ConfigError, UnknownBackendError, UnavailableBackendError or
    UnsupportedError, each before any weight is read where it can be.
    """
    target, dtype = resolve_device(device), resolve_dtype(dtype)
    # Names before anything is downloaded, backends before any weight is read.
    spec = default_backend(target.type) if attention is None else get_backend(attention)
    decode_spec = None if decode_attention is None else get_backend(decode_attention)
    if isinstance(model, Source):
        source = model
    else:
        source = find(model, revision=revision, random_weights=random_weights)
    config = source.config()
    check_backend(spec, config, dtype, target.type)
    if decode_spec is not None:
        check_backend(decode_spec, config, dtype, target.type, decode=True)
    with torch.device("meta"):
        network = GPT2(config, attention=attention, decode_attention=decode_attention)
    if random_weights:
        network = _fill(network, target, dtype, seed)
    else:
        _load(network, source.weights_folder(), target, dtype)
    network.tokenizer = tokenizer or Tokenizer.load(source.folder)
    return network.requires_grad_(False).eval()


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device named; without a name cuda where there is one, else cpu.

    Raises UnavailableDeviceError for a CUDA device where there is none.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UnavailableDeviceError(
            f"{device}: this machine has no CUDA device that torch can use"
        )
    return torch.device(device)


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype itself, or that of a name; raises RequestError for one that weights cannot have."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        names = ", ".join(PLAIN_PRECISIONS)
        raise RequestError(f"dtype must be one of {names}, not {dtype!r}")
    return found


def _load(model: GPT2, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model that has no storage yet the folder's weights."""
    config = model.config
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {}
    problems = []
    for file, key, shape, dtype_name in _headers(_weight_files(folder)):
        name = key.removeprefix("transformer.")
        if _LEGACY_BUFFER.fullmatch(name):
            continue
        if name in found:
            problems.append(f"{name} is there twice")
        found[name] = (file, key, shape, dtype_name)
    # A tied checkpoint may hold the output projection a second time, or it alone.
    second_head = found.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    if second_head is not None and "wte.weight" not in found:
        found["wte.weight"], second_head = second_head, None
    if second_head is not None and second_head[2] != expected["wte.weight"]:
        problems.append(
            f"lm_head.weight is {second_head[2]} and should be {expected['wte.weight']}"
        )
    problems += [f"missing {name} {shape}" for name, shape in expected.items() if name not in found]
    problems += [f"surplus {name}" for name in found if name not in expected]
    for name, (_, _, shape, dtype_name) in found.items():
        if name in expected and shape != expected[name]:
            problems.append(f"{name} is {shape} and should be {expected[name]}")
        if dtype_name not in _FLOAT_DTYPES:
            problems.append(f"{name} is {dtype_name}, not one of {', '.join(_FLOAT_DTYPES)}")
    if problems:
        if len(problems) > SHOWN:
            problems[SHOWN:] = [f"and {len(problems) - SHOWN} more"]
        raise WeightsError(f"{folder} does not fit its configuration: {'; '.join(problems)}")

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({entry[0] for entry in found.values()}):
        with safe_open(file, framework="pt", device=str(device)) as opened:
            for name, (where, key, _, _) in found.items():
                if where == file:
                    tensors[name] = opened.get_tensor(key).to(dtype)
    if second_head is not None:
        with safe_open(second_head[0], framework="pt", device=str(device)) as opened:
            if not torch.equal(opened.get_tensor(second_head[1]).to(dtype), tensors["wte.weight"]):
                raise WeightsError(
                    f"{folder}: tie_word_embeddings is true and lm_head.weight differs from "
                    "wte.weight; one of the two is wrong"
                )
    model.load_state_dict(tensors, assign=True)


@torch.no_grad()
def _fill(model: GPT2, device: torch.device, dtype: torch.dtype, seed: int) -> GPT2:
    """GPT-2's own initialisation; a seed gives the same weights on the same type of device."""
    model = model.to_empty(device=device)
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
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index} has no weight_map")
        names = sorted({str(value) for value in weight_map.values()})
        if outside := [name for name in names if Path(name).name != name]:
            raise WeightsError(f"{index} names files of other folders: {', '.join(outside)}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    patterns = ("*.bin", "*.pt", "*.pth", "*.ckpt")
    raise _no_weights(folder, sorted(f.name for pattern in patterns for f in folder.glob(pattern)))


def _headers(files: list[Path]) -> Iterator[tuple[Path, str, tuple[int, ...], str]]:
    """(file, key, shape, dtype) of every tensor; no data is read."""
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise WeightsError(
            f"{files[0].parent}: its index names files that are not there: {', '.join(missing)}"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (not a dict)
                    view = opened.get_slice(key)
                    yield file, key, tuple(view.get_shape()), view.get_dtype()
        except SafetensorError as error:
            raise WeightsError(f"{file} is truncated or corrupt: {error}") from error
        except OSError as error:
            raise WeightsError(f"{file} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path.parent} has no {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return value


def _download(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot folder of a hub id with the files of `patterns`, all of them.

    Offline, huggingface_hub gives what its cache has, which may be less: then the hub is asked, so
    that "not downloaded" is not told as "not there".
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
    except Exception as error:  # whatever its HTTP client raises: the hub cannot be used
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
