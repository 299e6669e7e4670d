"""The report on a run of generate(): what ran and how long it took, as fields and as text."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from attention_kernels.contract import dtype_name
from gpt2_infer.generation import Generation
from gpt2_infer.model import GPT2


def make_report(model: GPT2, result: Generation, *, name: str, load_s: float) -> dict[str, Any]:
    """Return what ran and how long it took, for the model `name`, loaded in load_s seconds."""
    on_cuda = model.device.type == "cuda"
    device = f"cpu ({torch.get_num_threads()} threads)"
    if on_cuda:
        device = f"{model.device} ({torch.cuda.get_device_name(model.device)})"
    specs = {result.attention: model.attention, result.decode_attention: model.decode_attention}
    emulated = [n for n, spec in specs.items() if n and model.device.type in spec.emulated_on]
    same = ("attention", "decode_attention", "mode", "engine", "length_step", "finish_reasons")
    report = {"model": name} | {each: getattr(result, each) for each in same}
    report |= {
        "device": device,
        "dtype": dtype_name(model.dtype),
        "products": model.products,
        "prompt_tokens": [len(row) for row in result.prompts],
        "new_tokens": [len(row) for row in result.tokens],
        "load_s": round(load_s, 4),
        "emulated_backends": emulated,
    }
    if result.passes is not None:
        report["passes"] = result.passes
    if on_cuda:
        report["peak_memory_bytes"] = torch.cuda.max_memory_allocated(model.device)
    if not emulated:
        times = ("warm_up_s", "prefill_s", "generation_s")
        report |= {each: round(getattr(result, each), 4) for each in times}
        report["tokens_per_second"] = round(result.tokens_per_second, 1)
        if len(result.intervals_s) > 1:
            at = statistics.quantiles(result.intervals_s, n=100, method="inclusive")
            report |= {"interval_p50_s": round(at[49], 6), "interval_p99_s": round(at[98], 6)}
            if result.mode == "kv-cache":
                report["step_bytes"] = model.step_bytes
                report["weights_gb_s"] = round(model.step_bytes / at[49] / 1e9, 1)
    return report


def format_report(report: dict[str, Any]) -> str:
    """Return the report as aligned lines of text."""

    def counts(values: list[int]) -> str:
        each = f" ({', '.join(map(str, values))})" if len(values) > 1 else ""
        return f"{sum(values)}{each}"

    def backend(name: str) -> str:
        return f"{name} (emulated on the CPU)" if name in report["emulated_backends"] else name

    ends = ", ".join(dict.fromkeys(report["finish_reasons"]))
    lines = {"model": report["model"], "attention": backend(report["attention"])}
    if report["decode_attention"] is not None:
        lines["decode attention"] = backend(report["decode_attention"])
    lines |= {each: report[each] for each in ("device", "dtype", "products")}
    lines |= {
        "mode": f"{report['mode']}, {report['engine']} engine",
        "prompt tokens": counts(report["prompt_tokens"]),
        "new tokens": f"{counts(report['new_tokens'])}, ended by {ends}",
        "load": f"{report['load_s']:.2f} s",
    }
    if report["emulated_backends"]:
        lines["timing"] = "none: the CPU emulator's speed says nothing about the kernel's"
    else:
        lines |= {
            "warm-up": f"{report['warm_up_s']:.3f} s",
            "prefill": f"{report['prefill_s']:.3f} s to the first token",
            "generation": f"{report['generation_s']:.3f} s, prefill included",
            "speed": f"{report['tokens_per_second']:.1f} tokens/s",
        }
    if passes := report.get("passes"):
        each = (sum(report["new_tokens"]) - 1) / passes
        lines["speculation"] = f"{passes} passes after the prompt, {each:.2f} tokens each"
    if "interval_p50_s" in report:
        p50, p99 = (1e3 * report[f"interval_{p}_s"] for p in ("p50", "p99"))
        lines["between tokens"] = f"{p50:.3f} ms (median), {p99:.3f} ms (99th percentile)"
    if "weights_gb_s" in report:
        size, speed = report["step_bytes"] / 1e6, report["weights_gb_s"]
        lines["weights"] = f"{size:.1f} MB per step, read at {speed:.0f} GB/s"
    if "peak_memory_bytes" in report:
        lines["peak memory"] = f"{report['peak_memory_bytes'] / 2**20:.0f} MiB"
    return "\n" + "\n".join(f"{label:>16}  {value}" for label, value in lines.items())
