"""Made-up results, and kernels that are wrong in their own ways."""

from __future__ import annotations

import torch

from attention_kernels import BackendSpec, get_backend, register
from attention_kernels.contract import Kernels
from attention_kernels.reference import naive_attention
from gpt2_infer import GPT2
from gpt2_infer.bench.results import (
    Check,
    GenerationCell,
    GenerationSeries,
    GenerationTiming,
    Gpu,
    Inspected,
    Inspection,
    KernelCell,
    KernelSeries,
    KernelTiming,
    Profile,
    Profiled,
    Provenance,
    Shape,
)
from tests.conftest import rewrite

PROMPT = "Once upon a time"
TWO = ("NAIVE_PYTORCH", "PYTORCH_SDPA_MATH")


def add(name: str, kernel, decode=None, **fields) -> BackendSpec:
    defaults = {"precisions": {"float32": "ieee-fp32"}, "family": "test", "summary": "A test's."}
    register(name=name, **(defaults | fields))(lambda: Kernels(kernel, decode))
    return get_backend(name)


def off_by_one(q, k, v, softmax_scale, is_causal):
    o = naive_attention(q, k, v, softmax_scale, is_causal)
    return torch.cat([o[:, :1], o[:, :-1]], 1)


def tie(save_checkpoint, one: str, other: str, prompt: list[int], batch: int = 1) -> GPT2:
    """A model in which tokens 7 and 11 lead by a distance that the backends' rounding turns."""
    folder, _ = save_checkpoint(tie_word_embeddings=False)
    states = []
    for name in (one, other):
        model = GPT2.from_pretrained(str(folder), device="cpu", attention=name)
        model.ln_f.register_forward_hook(lambda _module, _x, y: states.append(y[0].double()))
        model(torch.tensor([prompt] * batch))
    middle, apart = (states[0] + states[1]) / 2, states[0] - states[1]
    # The sum of the two rows makes both tokens likely, at logits small enough to show a change of
    # 1e-6; their difference is the direction in which the two backends' states differ.
    middle /= middle.norm()
    apart -= (apart @ middle) * middle
    apart /= apart.norm()

    def change(tensors):
        tensors["lm_head.weight"] *= 0.01
        tensors["lm_head.weight"][7] = (middle / 5 + apart / 2).float()
        tensors["lm_head.weight"][11] = (middle / 5 - apart / 2).float()
        return tensors

    rewrite(folder, change)
    return GPT2.from_pretrained(str(folder), device="cpu")


def specs_of(*names: str) -> list[BackendSpec]:
    return [get_backend(name) for name in names]


def by_name(results) -> dict:
    return {series.name: series for series in results.series}


def provenance(**changes) -> Provenance:
    fields = {
        "date": "2026-01-01T00:00:00+00:00",
        "command": "python test.py",
        "commit": "abc",
        "dirty": False,
        "source_digest": "123",
        "python": "3.12",
        "platform": "Linux x86_64",
        "cpu": "A processor",
        "cpu_threads": 2,
        "gpu": Gpu(
            name="A card",
            compute_capability="9.0",
            multiprocessors=132,
            memory_bytes=2**37,
            cuda="13.0",
        ),
        "packages": {"torch": "2.11.0", "transformers": "5.17.0"},
        "limits": {"copy_gbps": 4000.0, "matmul_float32_tflops": 50.0},
    }
    return Provenance(**(fields | changes))


def kernel(name: str, samples: list[float], seqlen: int = 1024, **fields) -> KernelSeries:
    error = fields.pop("error", 1e-6)
    defaults = {
        "cell": KernelCell(seqlen),
        "family": "fp32" if name.startswith("CUSTOM") else "pytorch",
        "precision": "ieee-fp32",
        "check": Check(error=error, budget=2e-6, naive_error=9e-7, relative_error=0.01),
        "workspace_bytes": 2048,
        "samples": samples,
    }
    return KernelSeries(name=name, **(defaults | fields))


def kernels(**changes) -> KernelTiming:
    """Two lengths of plain PyTorch, of another precision class, and of three versions."""
    series = []
    for seqlen, scale in ((1024, 1.0), (256, 0.25)):
        for name, middle, fields in (
            ("NAIVE_PYTORCH", 100.0, {}),
            ("PYTORCH_SDPA_EFFICIENT_ATTENTION", 80.0, {"precision": "3xtf32"}),
            ("CUSTOM_CUDA_VERSION_1", 400.0, {"change": "the first"}),
            ("CUSTOM_CUDA_VERSION_2", 50.0, {"change": "the second", "error": 4e-7}),
            ("CUSTOM_CUDA_VERSION_3", 50.5, {"change": "the third"}),
        ):
            samples = [scale * (middle + d) for d in (-1, 0, 1)]
            series.append(kernel(name, samples, seqlen, **fields))
    refused = {"status": "refused", "reason": "not in float32", "check": None}
    series.append(kernel("PYTORCH_SDPA_FLASH_ATTENTION", [], **refused))
    fields = {
        "task": "kernel-test",
        "provenance": provenance(),
        "device": "cuda",
        "baseline": "NAIVE_PYTORCH",
        "rounds": 3,
        "backends": list(dict.fromkeys(one.name for one in series)),
        "cells": [KernelCell(1024), KernelCell(256)],
        "series": series,
    }
    return KernelTiming(**(fields | changes))


def shapes() -> KernelTiming:
    """Two shapes at lengths of their own; a backend takes one of them."""
    narrow, wide = KernelCell(64, head_dim=32), KernelCell(128)
    refused = {"status": "refused", "reason": "not in 32", "check": None}
    return kernels(
        cells=[narrow, wide],
        series=[
            kernel("NAIVE_PYTORCH", [10.0, 10.0], cell=narrow, precision="3xtf32"),
            kernel("FAST", [], cell=narrow, precision="3xfp16", **refused),
            kernel("NAIVE_PYTORCH", [100.0, 100.0], cell=wide, precision="3xtf32"),
            kernel("FAST", [50.0, 50.0], cell=wide, precision="3xfp16"),
        ],
    )


def generation(**changes) -> GenerationTiming:
    series = []
    for tokens, scale in ((128, 0.25), (512, 1.0)):
        for name, middle in (
            ("NAIVE_PYTORCH", 2.0),
            ("CUSTOM_CUDA_VERSION_1", 4.0),
            ("CUSTOM_CUDA_VERSION_2", 1.5),
            ("FREE_ATTENTION", 1.0),
        ):
            series.append(
                GenerationSeries(
                    name=name,
                    cell=GenerationCell(tokens),
                    family="fp32" if name.startswith("CUSTOM") else "pytorch",
                    precision="none" if name == "FREE_ATTENTION" else "ieee-fp32",
                    samples=[scale * middle * f for f in (0.99, 1.0, 1.01)],
                    peak_memory_bytes=int(middle * 2**30),
                    text_compared=name != "CUSTOM_CUDA_VERSION_1",
                )
            )
    fields = {
        "task": "generation-test",
        "provenance": provenance(),
        "device": "cuda",
        "baseline": "NAIVE_PYTORCH",
        "rounds": 3,
        "backends": list(dict.fromkeys(one.name for one in series)),
        "cells": [GenerationCell(128), GenerationCell(512)],
        "model": "gpt2",
        "prompt_tokens": 8,
        "series": series,
    }
    return GenerationTiming(**(fields | changes))


SHAPE = Shape(batch=3, heads=2, seqlen=64, head_dim=32, full=True)


def inspection() -> Inspection:
    taken = {
        "spill_bytes": 0,
        "shared_bytes": 2048,
        "warps": 16,
        "occupancy_percent": 25,
    }
    counted = {
        "shared_load_requests": 1000,
        "shared_store_requests": 0,
        "shared_store_conflicts": 0,
        "shared_store_ways": 1,
        "global_load_sectors": 0,
        "global_load_fewest_sectors": 0,
        "global_store_sectors": 80,
    }
    conflicts = {"shared_load_conflicts": 31000, "shared_load_ways": 32}
    none = {"shared_load_conflicts": 0, "shared_load_ways": 1}
    rows = [
        (taken | counted | conflicts | {"registers": 40, "global_store_fewest_sectors": 10}, ""),
        (taken | counted | none | {"registers": 39, "global_store_fewest_sectors": 80}, ""),
        (taken | {"registers": 40}, "not this one; nor that"),
    ]
    return Inspection(
        task="inspect-test",
        provenance=provenance(gpu=None),
        family="fp32",
        shape=SHAPE,
        arch="80",
        nvcc="13.0",
        versions=[
            Inspected(
                name=f"CUSTOM_CUDA_VERSION_{n}", change=f"step {n}", metrics=metrics, refused=why
            )
            for n, (metrics, why) in enumerate(rows, 1)
        ],
    )


def profile() -> Profile:
    metrics = {
        "shared_load_wavefronts": 1e6,
        "global_async_load_sectors": 1000.0,
        "issue_active_percent": 50.0,
        "duration_us": 100.0,
    }
    return Profile(
        task="profile-test",
        provenance=provenance(),
        shape=SHAPE,
        counters={name: name for name in metrics},
        not_on_this_gpu=["tensor_pipe_percent"],
        versions=[
            Profiled(name="CUSTOM_CUDA_VERSION_1", kernels=1, metrics=metrics),
            Profiled(
                name="CUSTOM_CUDA_VERSION_2", kernels=1, metrics=metrics | {"duration_us": 50.0}
            ),
        ],
    )
