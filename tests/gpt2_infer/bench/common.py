"""Made-up results, and kernels with various faults."""

from __future__ import annotations

import msgspec
import torch

from attention_kernels import BackendSpec, get_backend, register
from attention_kernels.contract import Kernels
from attention_kernels.judge.truth import naive_attention
from gpt2_infer import GPT2
from gpt2_infer.bench.record import (
    Check,
    File,
    GenerationCell,
    Gpu,
    KernelCell,
    Provenance,
    Row,
    Shape,
)
from gpt2_infer.bench.show.figures import main_rows
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
            row = kernel(name, samples, seqlen, **fields)
            rows += [row, beside(row, "workspace", "bytes", 2048)]
    rows.append(
        kernel(
            "PYTORCH_SDPA_FLASH_ATTENTION",
            [],
            status="refused",
            reason="not in float32",
            check=None,
        )
    )
    return file_of("kernel", rows, **changes)


def beside(row: Row, metric: str, unit: str, value: float) -> Row:
    name = row.contender
    return Row(contender=name, cell=row.cell, metric=metric, unit=unit, samples=[value])


def shapes() -> File:
    """Return two shapes with different lengths; one backend takes only one of them."""
    narrow, wide = KernelCell(64, head_dim=32), KernelCell(128)
    refused = {"status": "refused", "reason": "not in 32", "check": None}
    return kernels(
        [
            kernel("NAIVE_PYTORCH", [10.0, 10.0], cell=narrow, precision="3xtf32"),
            kernel("FAST", [], cell=narrow, precision="3xfp16", **refused),
            kernel("NAIVE_PYTORCH", [100.0, 100.0], cell=wide, precision="3xtf32"),
            kernel("FAST", [50.0, 50.0], cell=wide, precision="3xfp16"),
        ]
    )


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
            rows += [row, beside(row, "peak memory", "bytes", int(middle * 2**30))]
    settings = {"model": "gpt2", "prompt_tokens": 8}
    return file_of("generation", rows, settings=settings, **changes)


SHAPE = Shape(batch=3, num_heads=2, seqlen=64, head_dim=32, is_causal=False)


def counts(number: int, metrics: dict[str, float], **fields) -> list[Row]:
    """Return the rows of a version; `fields` make a first row without a count."""
    base = {"contender": f"CUSTOM_CUDA_VERSION_{number}", "cell": msgspec.to_builtins(SHAPE)}
    rows = [Row(**base, metric=m, unit="count", samples=[n]) for m, n in metrics.items()]
    if fields:
        samples = [] if "status" in fields else [1.0]
        rows.insert(0, Row(**base, metric="accesses", unit="count", samples=samples, **fields))
    return rows


def inspection() -> File:
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
    refused = {"status": "refused", "reason": "not this one; nor that"}
    rows = [
        (taken | counted | conflicts | {"registers": 40, "global_store_fewest_sectors": 10}, {}),
        (taken | counted | none | {"registers": 39, "global_store_fewest_sectors": 80}, {}),
        (taken | {"registers": 40}, refused),
    ]
    return file_of(
        "inspection",
        [
            row
            for n, (metrics, fields) in enumerate(rows, 1)
            for row in counts(n, metrics, extra={"change": f"step {n}"}, **fields)
        ],
        settings={"arch": "80", "nvcc": "13.0"},
        provenance=provenance(gpu=None),
    )


def stalls(rows: dict[str, tuple[str, list[tuple[int, float]]]]) -> File:
    """Return stalls: by version, its file's digest and the shares of its stalls by line.

    A call takes 100 us, and its warps issue in a fifth of their cycles. Each line waits for line 1
    and has instructions of two kernels.
    """
    found = []
    for name, (digest, shares) in rows.items():
        reasons = {"short scoreboard": 0.75, "wait": 0.25}
        lines = [
            {
                "line": line,
                "share": share,
                "reasons": reasons,
                "through": [2],
                "waits_for": {"1": 0.5},
                "instructions": [
                    [0, 0x4A0, "LDS.128 R4, [R12]", share / 2, "short scoreboard"],
                    [1, 0x10, "FFMA R1, R2, R3, R1", share / 4, "wait"],
                ],
                "others": 3,
            }
            for line, share in shares
        ]
        found.append(
            Row(
                contender=name,
                cell=msgspec.to_builtins(KernelCell(1024, head_dim=32)),
                metric="predicted time",
                unit="us",
                samples=[100.0],
                extra={
                    "version_digest": digest,
                    "bound": "latency",
                    "needs_us": {"shared memory": 30.0},
                    "stalls": {
                        "gpu": "H200 SXM",
                        "time_us": 100.0,
                        "issuing": 0.2,
                        "reasons": reasons,
                        "kernels": ["attention<32>", "combine<32>"],
                        "lines": lines,
                    },
                },
            )
        )
    return file_of("stalls", found, settings={"gpu": "H200 SXM"})


def profile() -> File:
    metrics = {
        "shared_load_wavefronts": 1e6,
        "global_async_load_sectors": 1000.0,
        "issue_active_percent": 50.0,
        "duration_us": 100.0,
    }
    second = counts(2, metrics | {"duration_us": 50.0})
    return file_of("profile", counts(1, metrics) + second)
