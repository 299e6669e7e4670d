"""Made-up results, and kernels with various faults."""

from __future__ import annotations

import msgspec
import torch

from attention_kernels import BackendSpec, get_backend, register
from attention_kernels.contract import Kernels
from attention_kernels.judge.truth import naive_attention
from gpt2_infer import GPT2
from gpt2_infer.bench.record import Check, File, GenerationCell, Gpu, KernelCell, Provenance, Row
from gpt2_infer.bench.show.figures import main_rows
from tests.conftest import rewrite

PROMPT = "Once upon a time"
CARD = {"name": "A card", "compute_capability": "9.0", "multiprocessors": 132}
TWO = ("NAIVE_PYTORCH", "PYTORCH_SDPA_MATH")


def add(name: str, kernel, decode=None, **fields) -> BackendSpec:
    defaults = {"precisions": {"float32": "ieee-fp32"}, "family": "test", "summary": "A test's."}
    register(name=name, **(defaults | fields))(lambda: Kernels(kernel, decode))
    return get_backend(name)


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


def off_by_one(q, k, v, softmax_scale, is_causal):
    o = naive_attention(q, k, v, softmax_scale, is_causal)
    return torch.cat([o[:, :1], o[:, :-1]], 1)


def tie(save_checkpoint, one: str, other: str, prompt: list[int], batch: int = 1) -> GPT2:
    """Return a model in which the backends' rounding decides between tokens 7 and 11."""
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


def by_name(file: File) -> dict[str, Row]:
    """Return the rows of a study's main metric, by contender."""
    return {row.contender: row for row in main_rows(file)}


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
        "gpu": Gpu(**CARD, memory_bytes=2**37, cuda="13.0"),
        "packages": {"torch": "2.11.0", "transformers": "5.17.0"},
        "limits": {"copy_gbps": 4000.0, "matmul_float32_tflops": 50.0},
    }
    return Provenance(**(fields | changes))


def file_of(kind: str, rows: list[Row], *, settings=(), **fields) -> File:
    study = {"kind": kind, "baseline": "NAIVE_PYTORCH", "rounds": 3, **dict(settings)}
    defaults = {"task": f"{kind}-test", "provenance": provenance()}
    return File(study=study, rows=rows, **(defaults | fields))


def kernel(name: str, samples: list[float], seqlen: int = 1024, **fields) -> Row:
    error, cell = fields.pop("error", 1e-6), fields.pop("cell", KernelCell(seqlen))
    row = {name: fields.pop(name) for name in ("status", "reason", "check") if name in fields}
    check = Check(error=error, budget=2e-6, naive_error=9e-7, relative_error=0.01)
    family = "fp32" if name.startswith("CUSTOM") else "pytorch"
    return Row(
        contender=name,
        cell=msgspec.to_builtins(cell),
        metric="time",
        unit="us",
        samples=samples,
        extra={"family": family, "precision": "ieee-fp32", **fields},
        **({"check": check} | row),
    )


def kernels(rows: list[Row] | None = None, **changes) -> File:
    """Return plain PyTorch, another precision class and three versions at two lengths."""
    if rows is not None:
        return file_of("kernel", rows, **changes)
    rows = []
    for seqlen, scale in ((1024, 1.0), (256, 0.25)):
        for name, middle, fields in (
            ("NAIVE_PYTORCH", 100.0, {}),
            ("PYTORCH_SDPA_EFFICIENT_ATTENTION", 80.0, {"precision": "3xtf32"}),
            ("CUSTOM_CUDA_VERSION_1", 400.0, {"change": "the first"}),
            ("CUSTOM_CUDA_VERSION_2", 50.0, {"change": "the second", "error": 4e-7}),
            ("CUSTOM_CUDA_VERSION_3", 50.5, {"change": "the third"}),
        ):
            samples = [scale * (middle + d) for d in (-1, 0, 1)]
            rows.append(kernel(name, samples, seqlen, **fields))
    refused = {"status": "refused", "reason": "not in float32", "check": None}
    rows.append(kernel("PYTORCH_SDPA_FLASH_ATTENTION", [], **refused))
    return file_of("kernel", rows, **changes)


def generation(**changes) -> File:
    rows = []
    for tokens, scale in ((128, 0.25), (512, 1.0)):
        for name, middle in (
            ("NAIVE_PYTORCH", 2.0),
            ("CUSTOM_CUDA_VERSION_1", 4.0),
            ("CUSTOM_CUDA_VERSION_2", 1.5),
            ("FREE_ATTENTION", 1.0),
        ):
            row = Row(
                contender=name,
                cell=msgspec.to_builtins(GenerationCell(tokens)),
                metric="generation",
                unit="s",
                samples=[scale * middle * f for f in (0.99, 1.0, 1.01)],
                extra={
                    "family": "fp32" if name.startswith("CUSTOM") else "pytorch",
                    "precision": "none" if name == "FREE_ATTENTION" else "ieee-fp32",
                    "text_compared": name != "CUSTOM_CUDA_VERSION_1",
                },
            )
            rows.append(row)
    settings = {"model": "gpt2", "prompt_tokens": 8}
    return file_of("generation", rows, settings=settings, **changes)
