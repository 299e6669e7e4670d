"""gpt2-infer, or gpt2-infer generate."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_infer.cli.console import EXIT_INTERRUPTED, show
from gpt2_infer.cli.options import DEFAULT_PROMPT, add_model_options
from gpt2_infer.errors import RequestError

if TYPE_CHECKING:
    from attention_kernels import BackendSpec
    from gpt2_infer.generation import Generation
    from gpt2_infer.model import GPT2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    model = parser.add_argument_group("model")
    add_model_options(model)
    model.add_argument(
        "--backend",
        metavar="NAME",
        help="attention backend; see `gpt2-infer backends` (default: "
        "PYTORCH_SDPA_EFFICIENT_ATTENTION on cuda, PYTORCH_SDPA_FLASH_ATTENTION on cpu)",
    )
    model.add_argument(
        "--decode-backend",
        metavar="NAME",
        help="attention backend for decoding with --kv-cache (default: a named --backend if it has "
        "a decode kernel, else NAIVE_PYTORCH on cuda and PYTORCH_SDPA_FLASH_ATTENTION on cpu)",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be repeated; an empty one stands for GPT-2's <|endoftext|>, the start of a "
        f"document (default: {DEFAULT_PROMPT!r})",
    )
    text.add_argument(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="UTF-8, one prompt a line, empty lines skipped; may be repeated; - is standard input",
    )
    text.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="default: %(default)s"
    )
    text.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    text.add_argument(
        "--ignore-eos", action="store_true", help="continue past the end-of-text token"
    )
    sampling = parser.add_argument_group("sampling (greedy without --temperature)")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    sampling.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="keep the K most likely; 0 is off (default)",
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the most likely that hold P of the probability; 1 is off (default)",
    )
    sampling.add_argument(
        "--seed",
        type=int,
        help="of random weights; prompt i is sampled from SEED + i (default: 0)",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--kv-cache",
        action="store_true",
        help="keep keys and values; without it every token runs the whole prefix again "
        "(recompute, the case study's workload)",
    )
    how.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="launch every kernel from Python, at exact lengths",
    )
    how.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text and report"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from gpt2_infer.sampling import Sampling

    # Fail before torch is imported if possible, and before any weight is read otherwise.
    if arguments.max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens must be 1 or more, not {arguments.max_new_tokens}")
    prompts = _read_prompts(arguments)
    seed = 0 if arguments.seed is None else arguments.seed
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, seed)
    if arguments.seed is not None and sampling.is_greedy and not arguments.random_weights:
        raise RequestError("--seed needs a temperature above 0: greedy text has no chance in it")
    if arguments.decode_backend and not arguments.kv_cache:
        raise RequestError("--decode-backend is for --kv-cache: without a cache nothing is decoded")

    from attention_kernels import get_backend
    from gpt2_infer.generation import generate

    for name in (arguments.backend, arguments.decode_backend):
        if name is not None:
            get_backend(name)
    started = time.perf_counter()
    model, rows = load(
        arguments,
        prompts,
        arguments.stop,
        attention=arguments.backend,
        decode_attention=arguments.decode_backend,
        seed=sampling.seed,
    )
    load_s = time.perf_counter() - started

    streams = not arguments.json and len(prompts) == 1
    if streams:
        show(prompts[0], end="")
    result = generate(
        model,
        rows,
        max_new_tokens=arguments.max_new_tokens,
        mode="kv-cache" if arguments.kv_cache else "recompute",
        sampling=sampling,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        on_text=(lambda _row, piece: show(piece, end="")) if streams else None,
        progress=not streams and sys.stderr.isatty(),
        cuda_graphs=not arguments.no_cuda_graphs,
    )
    name = arguments.model + (f"@{arguments.revision}" if arguments.revision else "")
    report = make_report(
        model, result, load_s=load_s, name=name, random_weights=arguments.random_weights
    )
    if arguments.json:
        texts = [
            {"prompt": prompt, "text": text, "finish_reason": reason, "tokens": tokens}
            for prompt, text, reason, tokens in zip(
                prompts, result.texts, result.finish_reasons, result.tokens, strict=True
            )
        ]
        show(json.dumps({"report": report, "results": texts}, indent=2))
    else:
        if streams:
            show()
        for i, (prompt, text) in enumerate(zip(prompts, result.texts, strict=True)):
            if not streams:
                show(f"--- prompt {i + 1} of {len(prompts)}\n{prompt}{text}\n")
        sys.stdout.flush()
        print(format_report(report), file=sys.stderr)
    return EXIT_INTERRUPTED if "interrupted" in result.finish_reasons else 0


def load(
    arguments: argparse.Namespace,
    prompts: list[str],
    stop: Sequence[str] = (),
    specs: Sequence[BackendSpec] = (),
    **options: Any,
) -> tuple[GPT2, list[list[int]]]:
    """The model and the prompts' ids; what its configuration refuses, before any weight is read.

    specs: backends that must take it. options: further ones of load_model().
    """
    import torch

    from gpt2_infer import weights
    from gpt2_infer.generation import check_request, encode_prompts
    from gpt2_infer.model import check_backend
    from gpt2_infer.tokenizer import Tokenizer

    device, dtype = weights.resolve_device(arguments.device), getattr(torch, arguments.dtype)
    random_weights = arguments.random_weights
    source = weights.find(
        arguments.model, revision=arguments.revision, random_weights=random_weights
    )
    config, tokenizer = source.config(), Tokenizer.load(source.folder)
    rows = encode_prompts(tokenizer, prompts)
    check_request(config, rows, arguments.max_new_tokens, stop)
    for spec in specs:
        check_backend(spec, config, dtype, device.type)
    options |= {"device": device, "dtype": dtype, "random_weights": random_weights}
    return weights.load_model(source, tokenizer=tokenizer, **options), rows


def _read_prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt or [])
    for name in arguments.prompt_file or []:
        try:
            if name == "-" and sys.stdin is None:
                raise RequestError("--prompt-file -: standard input is closed")
            raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
            text = raw.decode("utf-8-sig")
        except OSError as error:
            raise RequestError(
                f"--prompt-file {name} cannot be read: {error.strerror or error}"
            ) from error
        except UnicodeDecodeError as error:
            raise RequestError(
                f"--prompt-file {name} is not UTF-8: byte {error.start} is not valid"
            ) from error
        lines = [line for line in re.split(r"\r\n|\n|\r", text) if line.strip()]
        if not lines:
            raise RequestError(f"--prompt-file {name} holds no prompt")
        prompts += lines
    return prompts or [DEFAULT_PROMPT]


def make_report(
    model: GPT2, result: Generation, *, load_s: float, name: str, random_weights: bool
) -> dict[str, Any]:
    """What ran and how long it took, in the order in which it is printed."""
    import torch

    from attention_kernels.contract import dtype_name

    if model.device.type == "cuda":
        device = f"cuda ({torch.cuda.get_device_name(model.device)})"
        memory = torch.cuda.max_memory_allocated(model.device)
    else:
        import resource

        device = f"cpu ({torch.get_num_threads()} threads)"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    emulated = model.device.type in model.attention.emulated_on
    report: dict[str, Any] = {
        "model": name + (" (random weights: the text means nothing)" if random_weights else ""),
        "attention": result.attention,
        "decode_attention": result.decode_attention,
        "device": device,
        "dtype": dtype_name(model.dtype),
        "mode": result.mode,
        "cuda_graphs": result.cuda_graphs,
        "length_step": result.length_step,
        "prompt_tokens": [len(row) for row in result.prompts],
        "new_tokens": [len(row) for row in result.tokens],
        "finish_reasons": result.finish_reasons,
        "load_s": round(load_s, 4),
        "emulated": emulated,
    }
    if not emulated:
        report |= {
            "warm_up_s": round(result.warm_up_s, 4),
            "prefill_s": round(result.prefill_s, 4),
            "generation_s": round(result.generation_s, 4),
            "tokens_per_second": round(result.tokens_per_second, 1),
        }
    return report | {"peak_memory_bytes": memory}


def format_report(report: dict[str, Any]) -> str:
    """The report for people."""

    def counts(values: list[int]) -> str:
        return (
            str(values[0]) if len(values) == 1 else f"{sum(values)} ({', '.join(map(str, values))})"
        )

    decode = report["decode_attention"]
    how = report["mode"]
    if report["cuda_graphs"]:
        how += ", CUDA graphs"
    if report["length_step"] > 1:
        how += f", lengths rounded up to multiples of {report['length_step']}"
    emulated = " (emulated on the CPU)" if report["emulated"] else ""
    ends = ", ".join(dict.fromkeys(report["finish_reasons"]))
    lines = {"model": report["model"], "attention": report["attention"] + emulated}
    if decode is not None:
        lines["decode attention"] = decode
    lines |= {
        "device": report["device"],
        "dtype": report["dtype"],
        "mode": how,
        "prompt tokens": counts(report["prompt_tokens"]),
        "new tokens": f"{counts(report['new_tokens'])}, ended by {ends}",
        "load": f"{report['load_s']:.2f} s",
    }
    if emulated:
        lines["timing"] = (
            "none: the kernel's source runs in the CPU emulator, which says nothing about its speed"
        )
    else:
        lines |= {
            "warm-up": f"{report['warm_up_s']:.3f} s",
            "prefill": f"{report['prefill_s']:.3f} s to the first token",
            "generation": f"{report['generation_s']:.3f} s, prefill included",
            "speed": f"{report['tokens_per_second']:.1f} tokens/s",
        }
    lines["peak memory"] = f"{report['peak_memory_bytes'] / 2**20:.0f} MiB"
    return "\n" + "\n".join(f"{label:>16}  {value}" for label, value in lines.items())
