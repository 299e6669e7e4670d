"""The provenance of a result: machine, software, source and settings of this process."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import torch

from attention_kernels import BackendSpec
from attention_kernels.judge.plugins import source_files
from attention_kernels.ladder import compilers
from gpt2_infer.bench.record import Gpu, Provenance

_ROOT = Path(__file__).parents[2]
_SOURCES = (".py", ".cu", ".cuh", ".h", ".cpp")
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")
_NVIDIA_SMI = [field.encode_name for field in msgspec.structs.fields(Gpu) if not field.required]
"""The fields that nvidia-smi knows, by its names."""


def provenance() -> Provenance:
    """Describe this process for a results file; other results do not make the checkout dirty."""
    matmul = torch.backends.cuda.matmul
    status = _git("status", "--porcelain", "--", ".", ":(exclude)results")
    installed = {one.name: one.version for one in importlib.metadata.distributions()}
    return Provenance(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["python", *map(_without_folder, sys.argv)]),
        # A copy of the source without .git, as on a rented machine, gets the commit this way.
        commit=_git("rev-parse", "HEAD") or os.environ.get("SOURCE_COMMIT"),
        dirty=None if status is None else bool(status),
        source_digest=source_digest(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        cpu_threads=torch.get_num_threads(),
        gpu=_gpu(),
        build_flags={name: os.environ[name] for name in compilers.FLAGS if name in os.environ},
        packages={name: installed[name] for name in _PACKAGES if name in installed},
        precision={
            "matmul_allow_tf32": matmul.allow_tf32,
            "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
    )


def source_digest() -> str:
    """Return a SHA-256 over both packages' source, to identify the code without git."""
    digest = hashlib.sha256()
    for package in ("attention_kernels", "gpt2_infer"):
        for path in sorted((_ROOT / package).rglob("*")):
            if path.suffix in _SOURCES:
                digest.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def backend_digest(spec: BackendSpec) -> str | None:
    """Return a SHA-256 over a backend's source files; None if they are unknown."""
    digest = hashlib.sha256()
    for path in (files := sorted(set(source_files(spec)))):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest() if files else None


def version_digest(source: str) -> str:
    """Return a SHA-256 of a version file's code, without comments and so without the header."""
    code = re.sub(r"//[^\n]*", "", source)
    return hashlib.sha256(" ".join(code.split()).encode()).hexdigest()


def token_digest(tokens: list[list[int]]) -> str:
    """Return a SHA-256 of generated tokens; equal digests mean equal texts."""
    return hashlib.sha256(repr(tokens).encode()).hexdigest()


def _gpu() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda or "",
    }
    query = [f"--id=GPU-{properties.uuid}", f"--query-gpu={','.join(_NVIDIA_SMI)}"]
    if answer := _run("nvidia-smi", *query, "--format=csv,noheader"):
        values = [value.strip() for value in answer.split(",")]
        facts |= dict(zip(_NVIDIA_SMI, values, strict=True))
    return msgspec.convert(facts, Gpu)


def _without_folder(word: str) -> str:
    """Shorten an absolute path: its folder is private and says nothing about the run."""
    if not word.startswith("/"):
        return word
    path = Path(word)
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else path.name


def _git(*arguments: str) -> str | None:
    """Run git if this package is its own checkout, not part of another project's."""
    return _run("git", "-C", str(_ROOT), *arguments) if (_ROOT / ".git").exists() else None


def _run(*command: str) -> str | None:
    """Return a command's output; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text("utf-8") if cpuinfo.is_file() else ""
    found = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return found[1] if found else platform.processor() or "unknown"
