"""Shared fixtures: nothing here downloads, and every checkpoint is made in a temporary folder.

torch is imported where it is used, so that the xdist controller, which does not need it, starts its
workers seconds sooner.
"""

from __future__ import annotations

import collections
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attention_kernels.ladder import compilers

if TYPE_CHECKING:
    import torch

    from attention_kernels import BackendSpec

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: nothing may be downloaded
# Also for every process that a test starts: the workers of xdist already use every core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Otherwise each of those processes, and each worker of xdist, compiles all modules and tests again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ["GPT2_INFER_SERVER"] = "0"  # no process of a test outlives it

gc.disable()  # while torch and transformers are imported: their objects live to the end

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "my_backend" / "src" / "my_backend"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_every_device = pytest.mark.parametrize("device", DEVICES)
needs_compiler = pytest.mark.skipif(
    compilers.missing_compiler("emulator") is not None, reason="needs a C++ compiler"
)


def needs_flash_attention(dtype: Any, device: str = "cpu") -> None:
    """Skip the test if torch's own kernel for a CPU fails in a dtype.

    In bfloat16 it does on a processor with AMX, if ATEN_CPU_CAPABILITY leaves out AVX-512.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device != "cpu" or dtype != torch.bfloat16:
        return
    q = torch.zeros(1, 1, 64, 8, dtype=dtype)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    except RuntimeError as error:
        if "pack_vnni2 is only supported" not in str(error):
            raise
        pytest.skip(f"torch: {error}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, deselect its tests: skipping a thousand one by one takes seconds."""
    import torch

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
        items[:] = [item for item in items if "gpu" not in item.keywords]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


_cpu_seconds: collections.Counter[str] = collections.Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Count the CPU seconds of an item, its fixtures and its child processes."""
    begin = sum(os.times()[:4])
    result = yield
    _cpu_seconds[item.nodeid.split("::")[0]] += sum(os.times()[:4]) - begin
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # a worker of xdist
        output["cpu_seconds"] = {"(import and collect)": sum(os.times()[:4]), **_cpu_seconds}
        output["cpu_seconds"]["(import and collect)"] -= sum(_cpu_seconds.values())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _cpu_seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """On CI, show where the time goes: the wall clock depends on what else the machine does."""
    if os.environ.get("CI") == "true":
        terminalreporter.section(f"CPU seconds by file, of {sum(_cpu_seconds.values()):.0f}")
        for file, seconds in _cpu_seconds.most_common(30):
            terminalreporter.write_line(f"{seconds:8.1f} {file}")


@pytest.fixture(autouse=True)
def shared_memory_of_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free the GPU's memory: otherwise each worker keeps as much as its largest test needed."""
    yield
    if "gpu" in request.keywords:
        import torch

        from gpt2_infer import prepared

        if torch.cuda.memory_reserved() > 2**30:
            prepared.clear_all()
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture
def one_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the tile of Triton's kernels, a different one for each test, because tuning is slow."""
    if "TRITON" not in request.node.name or "gpu" not in request.keywords:
        return
    import torch

    triton = pytest.importorskip("triton", exc_type=ImportError)
    from attention_kernels.backends.triton import flash_attention

    if torch.cuda.get_device_capability()[0] != 9:  # elsewhere some tiles need too much memory
        return
    number = zlib.crc32(request.node.name.encode())
    for tuner in vars(flash_attention).values():
        if isinstance(tuner, triton.runtime.Autotuner):
            config = tuner.configs[number % len(tuner.configs)]
            monkeypatch.setattr(tuner, "configs", [config])


# A program that begins so runs the first checks of a suite alone, and repeats timed calls briefly.
SHORT_SUITE = """
from attention_kernels.judge import suite, worker
from gpt2_infer.cli import main
worker.REPEATED_S["cpu"] = 0.02
everything = suite.checks_of
suite.checks_of = lambda *arguments, **options: everything(*arguments, **options)[:12]
"""


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the judge's clocks differ by any factor: other tests use the same cores and GPU."""
    from attention_kernels.judge import clock

    for limits in (clock.OUTSIDE, clock.REPEATED):
        for device in limits:
            monkeypatch.setitem(limits, device, float("inf"))


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat timed calls for a shorter time: no test needs a precise one."""
    from attention_kernels.judge import worker

    monkeypatch.setitem(worker.REPEATED_S, "cpu", 0.02)


def version_file(name: str, text: str, everything: str = "") -> Path:
    """Write a version file to a path that depends on its text alone: the next run has its build.

    everything: the texts of this file and of others, to be next to each other.
    """
    digest = hashlib.sha256((everything or text).encode()).hexdigest()[:12]
    file = ROOT / ".pytest_cache" / "kernels" / digest / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        scratch = file.with_suffix(f".{os.getpid()}")  # other workers may read it
        scratch.write_text(text, "utf-8")
        scratch.replace(file)
    return file


def python(
    *words: str | Path, cwd: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with this process's path, and with environment variables."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **settings}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def usable(name: str, device: str) -> BackendSpec:
    """Return the backend, or skip the test where it cannot run."""
    from attention_kernels import get_backend

    spec = get_backend(name)
    if reason := spec.unavailable_reason(device):
        pytest.skip(reason)
    return spec


@pytest.fixture(scope="session")
def demo() -> Any:
    """Return the bundled model on the CPU, with the CPU's default backend."""
    from gpt2_infer import GPT2

    return GPT2.from_pretrained("demo", device="cpu")


@pytest.fixture
def save_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Return save(**config), which saves a random transformers GPT-2: (folder, model)."""

    def save(*, tokenizer: bool = True, **fields: Any) -> tuple[Path, Any]:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 8192}
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(**{**sizes, **tokens, "attn_implementation": "eager", **fields})
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
        with torch.no_grad():  # biases and norms start at 0 and 1, where a mistake would not show
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder)
        if tokenizer:
            demo = ROOT / "gpt2_infer" / "demo_model"
            for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
                (folder / file).write_bytes((demo / file).read_bytes())
            if config.vocab_size < 8192:  # single characters, and the token for all others
                vocabulary = json.loads((demo / "vocab.json").read_text("utf-8"))
                kept = [t for t in vocabulary if len(t) == 1][: config.vocab_size - 1]
                vocabulary = {t: i for i, t in enumerate([*kept, "<|endoftext|>"])}
                (folder / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
                (folder / "merges.txt").write_text("#version: 0.2\n", "utf-8")
        return folder, model

    return save


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, after the test, the backends that it registers."""
    from attention_kernels import list_backends, registry

    list_backends()  # discover first, or the backends would be registered in the copy only
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Replace a folder's model.safetensors by `change` of its tensors."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


IMPORTS = """
import atexit, contextlib, ctypes, functools, gc, inspect, json, os, sys, threading, time
import torch
from attention_kernels import register
from attention_kernels.contract import Kernels
from attention_kernels.judge.truth import naive_attention as right
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """plugin(source): install it as a plug-in for the workers that this process starts."""
    from attention_kernels import registry

    def plugin(source: str, name: str = "strange") -> None:
        (tmp_path / f"{name}_plugin.py").write_text(IMPORTS + source)
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        entry_point = f"[attention_kernels.backends]\n{name} = {name}_plugin\n"
        (folder / "entry_points.txt").write_text(entry_point)
        monkeypatch.delitem(sys.modules, f"{name}_plugin", raising=False)  # another test's
        monkeypatch.syspath_prepend(str(tmp_path))  # a worker gets this process's path
        registry.shipped()
        monkeypatch.setattr(registry, "_specs", {**registry._specs})
        monkeypatch.setattr(registry, "_discovered", False)

    return plugin


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    programs = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, programs)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(programs)} is on PATH")
    with sync_api.sync_playwright() as playwright:
        start = playwright.chromium.launch
        browser = start(executable_path=program, args=["--no-sandbox"], timeout=120_000)
        yield browser
        browser.close()
