"""The command line: a thin layer over the Python API, which imports torch only to do work."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from attention_kernels import BackendSpec
    from attention_kernels.conformance import Failure, Report
    from attention_kernels.ladder.header import VersionHeader
    from gpt2_infer.generation import Generation
    from gpt2_infer.model import GPT2

DEFAULT_PROMPT = "Hello, I'm a language model,"  # the case study's
DEFAULT_NEW_TOKENS = 512
DTYPES = ("float32", "float16", "bfloat16")
SHOWN_FAILURES = 5  # of verify
NVCC_ARCH = "90"  # what an emulated version is compiled for, to see whether it compiles
EXIT_FAILED = 1  # verify, diverge
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """argparse, with an error of one line; the scripts' parser, too."""

    def error(self, message: str) -> NoReturn:
        """End the program with the message and where to read on."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Every option and subcommand."""
    parser = Parser(
        prog="gpt2-infer",
        description="Generate text with GPT-2, its attention computed by the backend you name.",
        epilog=f"Without --prompt or --prompt-file, the case study's: {DEFAULT_PROMPT!r}.",
    )
    parser.set_defaults(run=_generate, model="openai-community/gpt2", dtype="float32")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    model = parser.add_argument_group("model")
    _add_model_options(model)
    model.add_argument(
        "--backend",
        metavar="NAME",
        help="attention backend; see `gpt2-infer backends` (default: "
        "PYTORCH_SDPA_EFFICIENT_ATTENTION on cuda, PYTORCH_SDPA_FLASH_ATTENTION on cpu; in half "
        "precision on cuda too)",
    )
    model.add_argument(
        "--decode-backend",
        metavar="NAME",
        help="attention backend for decoding with --kv-cache (default: a named --backend where it "
        "has a decode kernel, else NAIVE_PYTORCH on cuda and PYTORCH_SDPA_FLASH_ATTENTION on cpu)",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be repeated; an empty one stands for "
        "GPT-2's <|endoftext|>, the start of a document",
    )
    text.add_argument(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="UTF-8, one prompt a line, empty lines skipped; may be repeated; - is standard input",
    )
    text.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"default: {DEFAULT_NEW_TOKENS}"
    )
    text.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    text.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    sampling = parser.add_argument_group("sampling (greedy without --temperature)")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    sampling.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="only the K most likely; 0 is off (default)",
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the most likely that hold P of the probability; 1 is off (default)",
    )
    sampling.add_argument(
        "--seed",
        type=int,
        help="of random weights; prompt i is sampled from SEED + i (default: 0)",
    )
    work = parser.add_argument_group("how")
    work.add_argument(
        "--kv-cache",
        action="store_true",
        help="keep keys and values; without it every token runs the "
        "whole prefix again (recompute, the case study's workload)",
    )
    work.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="launch every kernel from Python, at exact lengths",
    )
    work.add_argument(
        "--json", action="store_true", help="one JSON object instead of text and report"
    )
    commands = parser.add_subparsers(
        title="subcommands (without one, text is generated)", dest="command", metavar="COMMAND"
    )
    # Shared with the program itself: not given here, what was given there stands.
    debug = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    debug.add_argument("--debug", action="store_true", help="show the traceback of an error")
    listing = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    listing.add_argument("--json", action="store_true", help="a JSON list")

    def add(name: str, what: str, **options: Any) -> argparse.ArgumentParser:
        sentence = f"{what[0].upper()}{what[1:]}."
        return commands.add_parser(name, help=what, description=sentence, **options)

    backends = add(
        "backends",
        "list the attention backends and whether they run here",
        parents=[debug, listing],
    )
    backends.set_defaults(run=_backends)
    verify = add(
        "verify",
        "hold one backend to the float64 reference and tell its worst case",
        parents=[debug],
    )
    verify.add_argument(
        "name", metavar="BACKEND", help="or a version file, *.cu, that is in no ladder"
    )
    verify.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default=argparse.SUPPRESS,
        help="default: cuda where it runs there",
    )
    verify.add_argument("--dtypes", nargs="+", choices=(*DTYPES, "float64"), help="default: all")
    verify.add_argument(
        "--seed", type=int, default=argparse.SUPPRESS, help="of the inputs (default: 0)"
    )
    verify.add_argument(
        "--sanitize",
        action="store_true",
        help="look for bad accesses and races, too: emulated with AddressSanitizer, on a GPU with "
        "compute-sanitizer",
    )
    verify.add_argument(
        "--no-timing",
        action="store_true",
        help="only check; that nvcc, where it is here, compiles what ran emulated is a check, too",
    )
    verify.set_defaults(run=_verify)
    diverge = add(
        "diverge",
        "find the step, layer and head where two backends' greedy texts part, and tell a tie from "
        "a bug",
        parents=[debug],
        argument_default=argparse.SUPPRESS,
    )
    diverge.add_argument("a", metavar="A", help="attention backend, or a version file, *.cu")
    diverge.add_argument("b", metavar="B", help="attention backend, or the same again")
    _add_model_options(diverge)
    diverge.add_argument("--prompt", action="append", metavar="TEXT", help="one only")
    diverge.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 64")
    diverge.add_argument("--kv-cache", action="store_true", help="compare texts with a cache")
    diverge.add_argument("--json", action="store_true", help="one JSON object")
    diverge.set_defaults(run=_diverge)
    kernels = add(
        "kernels",
        "registers, spills, shared memory and occupancy of a ladder's versions; no GPU needed",
        parents=[debug, listing],
    )
    kernels.add_argument(
        "names", nargs="*", metavar="BACKEND", help="only these, or version files, *.cu"
    )
    kernels.add_argument(
        "--arch", nargs="+", metavar="SM", help="compute capabilities (default: 75 80 90 120)"
    )
    kernels.add_argument(
        "--head-dim", nargs="+", type=int, metavar="D", help="default: all that a version takes"
    )
    kernels.add_argument(
        "--family",
        help="the ladder, as `gpt2-infer backends` names it, or all (default: custom-cuda)",
    )
    kernels.set_defaults(run=_kernels)
    accesses = add(
        "accesses",
        "bank conflicts and memory sectors of each source line of a kernel; no GPU needed",
        parents=[debug, listing],
    )
    accesses.add_argument("name", metavar="BACKEND", help="or a version file, *.cu")
    accesses.add_argument("--seqlen", type=int, default=128, help="default: %(default)s")
    accesses.add_argument("--head-dim", type=int, metavar="D", help="default: 64, or what it takes")
    accesses.add_argument("--batch", type=int, default=1, help="default: %(default)s")
    accesses.add_argument("--heads", type=int, default=1, help="default: %(default)s")
    accesses.add_argument("--full", action="store_true", help="without the causal mask")
    accesses.set_defaults(run=_accesses)
    for command in commands.choices.values():
        command.set_defaults(own={action.dest for action in command._actions})
    return parser


def _add_model_options(to: argparse._ActionsContainer) -> None:
    """The options without defaults of their own: those of a program are not a subcommand's."""
    to.add_argument(
        "--model",
        metavar="NAME",
        help='hub id, local folder, or "demo" for the bundled model '
        "(default: openai-community/gpt2)",
    )
    to.add_argument("--revision", help="branch, tag or commit of a hub id")
    to.add_argument(
        "--random-weights",
        action="store_true",
        help="build the size that --model names (gpt2, gpt2-medium, gpt2-large, gpt2-xl, "
        "distilgpt2, demo or a folder's) from a seed, without a download: for timing, as the "
        "text means nothing",
    )
    to.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one, else cpu"
    )
    to.add_argument("--dtype", choices=DTYPES, help="default: float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0, 1 where verify fails or diverge finds a bug, 2 for bad input, 130 after Ctrl-C.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the program
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for the rest of the process)
        elif hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character must not end the run.
            stream.reconfigure(errors="replace")
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        _check_options(parser, arguments)
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        print("gpt2-infer: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone: there is nobody to tell, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if arguments.debug or not _is_expected(error):
            raise
        words = " ".join(str(error).split())
        if isinstance(error, OSError) and _is_of_print(error):
            words = f"standard output cannot be written: {error.strerror}"
        print(f"gpt2-infer: error: {words}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse options of generation in front of a subcommand, which would not look at them."""
    from gpt2_infer.errors import RequestError

    if arguments.command is None:
        return
    own = {"command", *arguments.own}
    for action in (action for action in parser._actions if action.dest not in own):
        if getattr(arguments, action.dest, action.default) != action.default:
            name = action.option_strings[0]
            raise RequestError(f"{name} is for generating text, not for {arguments.command}")


def _is_of_print(error: OSError) -> bool:
    """Whether a print() of this module raised it: errors of files and of others come through."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return error.filename is None and frame.f_code.co_filename == __file__


def _is_expected(error: Exception) -> bool:
    from attention_kernels import AttentionError
    from gpt2_infer.errors import GPT2InferError

    return isinstance(error, (GPT2InferError, AttentionError, OSError))


def _generate(arguments: argparse.Namespace) -> int:
    from gpt2_infer.errors import RequestError
    from gpt2_infer.sampling import Sampling

    # What can be told without torch is told before it is imported; what needs the configuration,
    # before any weight.
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = DEFAULT_NEW_TOKENS
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
    model, rows = _load(
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
        print(prompts[0], end="", flush=True)
    result = generate(
        model,
        rows,
        max_new_tokens=arguments.max_new_tokens,
        mode="kv-cache" if arguments.kv_cache else "recompute",
        sampling=sampling,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        on_text=(lambda _row, piece: print(piece, end="", flush=True)) if streams else None,
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
        print(json.dumps({"report": report, "results": texts}, indent=2))
    else:
        if streams:
            print()
        for i, (prompt, text) in enumerate(zip(prompts, result.texts, strict=True)):
            if not streams:
                print(f"--- prompt {i + 1} of {len(prompts)}\n{prompt}{text}\n")
        sys.stdout.flush()
        print(format_report(report), file=sys.stderr)
    return EXIT_INTERRUPTED if "interrupted" in result.finish_reasons else 0


def _load(
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
    from gpt2_infer.errors import RequestError

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


def _backends(arguments: argparse.Namespace) -> int:
    from attention_kernels import list_backends

    rows = [_describe(spec) for spec in list_backends()]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(row["name"]) for row in rows)
    indent = " " * (width + 31)
    family = None
    for row in rows:
        if row["family"] != family:
            print(row["family"] if family is None else f"\n{row['family']}")
            family = row["family"]
        here = [
            f"{device} (emulated)" if device in row["emulated_on"] else device
            for device, reason in row["unavailable"].items()
            if reason is None
        ]
        state = f"on {' and '.join(here)}" if here else "not here"
        print(f"  {row['name']:<{width}}  {state:<26} {row['summary']}")
        takes = ", ".join(f"{dtype} ({kind})" for dtype, kind in row["precisions"].items())
        dims = ", ".join(map(str, row["head_dims"])) or "any"
        print(f"{indent}takes {takes}; head_dim {dims}")
        if not here:
            reasons = [row["unavailable"][device] for device in row["devices"]]
            print(f"{indent}{'; '.join(dict.fromkeys(reasons))}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from attention_kernels import UnsupportedError, conformance, ladder
    from attention_kernels.inspection.sanitize import sanitize

    spec = ladder.resolve(arguments.name)
    device = arguments.device or ("cpu" if spec.unavailable_reason("cuda") else "cuda")
    dtypes = tuple(arguments.dtypes or ())
    if unknown := [name for name in dtypes if name not in spec.dtypes]:
        raise UnsupportedError(
            spec.name, [f"dtype {', '.join(unknown)} (it takes {', '.join(spec.dtypes)})"]
        )
    is_emulated = device in spec.emulated_on
    on_cpu = device == "cpu" and spec.name in ladder.versions()
    if on_cpu:
        ladder.load_op(spec.name, device)  # what does not build is told before anything runs
    where = f"{spec.name} on {device}{', emulated' if is_emulated else ''}"
    if arguments.sanitize:
        print(f"{where}: looking for bad accesses and races ...", file=sys.stderr, flush=True)
        if faults := sanitize([arguments.name], device):
            print(f"{where}, sanitized")
            for fault in faults:
                print(f"  FAILED: {fault}")
            print("  the suite did not run")
            print("FAILED")
            return EXIT_FAILED
    options: dict[str, Any] = {"dtypes": dtypes, "seed": arguments.seed or 0, "progress": True}
    if on_cpu:
        report = conformance.verify_in_child(arguments.name, device, **options)
    else:
        report = conformance.verify(spec, device, **options)
    print(f"{where}: {report.cases} cases{', sanitized' if arguments.sanitize else ''}")
    _print_findings(report)
    if report.killed and is_emulated and not arguments.sanitize:
        print("  probably by an access out of bounds: with --sanitize, verify tells where")
    passed = report.passed
    if passed and is_emulated and on_cpu:
        passed = _nvcc_compiles(ladder.versions()[spec.name])
    if passed and is_emulated:
        print("  no timing: its source runs emulated, which says nothing about its speed")
    elif passed and not arguments.no_timing:
        passed = _short_timing(spec, device, dtypes or spec.dtypes)
    print("PASSED" if passed else "FAILED")
    return 0 if passed else EXIT_FAILED


def _print_findings(report: Report) -> None:
    """Refusals, and the failures: those alike as one, and of the others the first few."""
    for refusal in report.refusals:
        print(f"  not taken: {refusal}")
    if report.stopped:
        print(f"  {report.failed} of them failed, and the suite of {report.total} stopped there")
    elif report.failed:
        print(f"  {report.failed} of them failed")
    alike: dict[str, list[Failure]] = {}
    for failure in report.failures:
        numberless = re.sub(r"-?\d[\d.]*(e[+-]\d+)?", "#", failure.why)
        alike.setdefault(numberless, []).append(failure)
    groups = list(alike.values())
    for first, *others in groups[:SHOWN_FAILURES]:
        print(f"  FAILED: {first.what}\n          {first.why}")
        if others:
            print(f"          and {len(others)} more like it")
    if more := sum(map(len, groups[SHOWN_FAILURES:])):
        print(f"  and {more} more failures")
    if report.passed and report.worst:
        case, verdict = report.worst
        print(f"  worst: {case}")
        print(f"         {verdict}, plain PyTorch's error {verdict.naive_error:.2e}")


def _nvcc_compiles(version: VersionHeader) -> bool:
    """Whether nvcc takes what the emulator ran, in a line; true where there is no nvcc to ask."""
    from attention_kernels.inspection import resources
    from attention_kernels.ladder import compilers

    if compilers.find_nvcc() is None:
        print("  nvcc is not here: its flags were not tried")
        return True
    try:
        summary = resources.compile_summary(version, NVCC_ARCH)
    except compilers.BuildError as error:
        print(f"  FAILED: nvcc does not compile it for sm_{NVCC_ARCH}: {error}")
        return False
    print(f"  nvcc: compiles for sm_{NVCC_ARCH}, {summary}")
    return True


def _short_timing(spec: BackendSpec, device: str, dtypes: Sequence[str]) -> bool:
    """Print the time beside plain PyTorch's; whether it passed the check before it, too."""
    from gpt2_infer import compare

    head_dim = _usual_head_dim(spec)
    seqlen = 1024 if device == "cuda" else 256
    cells = [compare.KernelCell(seqlen, 1, 12, head_dim, dtype) for dtype in dtypes]
    found = compare.compare_kernels([spec], cells, device=device, rounds=5).series
    for dtype in dtypes:
        print(f"  time of the kernel alone, N={seqlen} H=12 head_dim={head_dim}, {dtype}:")
        for series in found:
            if series.samples and series.labels["dtype"] == dtype:
                low, high = series.spread
                print(f"    {series.name:<34} {series.median:9.1f} us ({low:.1f} .. {high:.1f})")
    failed = [series for series in found if series.name == spec.name and series.status == "failed"]
    for series in failed:
        print(f"  FAILED: N={seqlen} H=12 head_dim={head_dim}, {series.labels['dtype']}")
        print(f"          {series.reason}")
    return not failed


def _diverge(arguments: argparse.Namespace) -> int:
    from gpt2_infer.errors import RequestError

    prompts = arguments.prompt or [DEFAULT_PROMPT]
    if len(prompts) > 1:
        raise RequestError(f"diverge takes one --prompt, not {len(prompts)}")

    from attention_kernels import ladder
    from gpt2_infer.diverge import diverge

    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = 64
    a, b = ladder.resolve(arguments.a), ladder.resolve(arguments.b)
    model, (row,) = _load(arguments, prompts, specs=(a, b))
    result = diverge(
        model,
        a,
        b,
        row,
        max_new_tokens=arguments.max_new_tokens,
        mode="kv-cache" if arguments.kv_cache else "recompute",
        progress=sys.stderr.isatty(),
    )
    print(json.dumps(result.to_json(), indent=2) if arguments.json else result)
    return 0 if result.passed else EXIT_FAILED


def _kernels(arguments: argparse.Namespace) -> int:
    import dataclasses

    from attention_kernels import UnsupportedError, ladder
    from attention_kernels.inspection import resources
    from gpt2_infer.errors import RequestError

    family = arguments.family or "custom-cuda"
    if arguments.names:
        if arguments.family:
            raise RequestError("--family is for all of a ladder: name it, or backends")
        versions = dict(map(_version, arguments.names))
        if host := [name for name, version in versions.items() if version.is_host]:
            raise UnsupportedError(host[0], ["it is host code, and no kernel of a GPU"])
    else:
        versions = ladder.versions(None if family == "all" else family)
        versions = {name: version for name, version in versions.items() if not version.is_host}
    if not versions:
        families = ", ".join(ladder.families())
        raise RequestError(f"there is no ladder {family}: there are {families}")
    taken = {head_dim for version in versions.values() for head_dim in version.head_dims}
    if unknown := {*(arguments.head_dim or ())} - taken:
        of = ", ".join(arguments.names) or family
        raise RequestError(f"no version of {of} takes head_dim {', '.join(map(str, unknown))}")
    rows = resources.resource_table(
        list(versions.values()),
        arguments.arch or resources.ARCHS,
        arguments.head_dim or sorted(taken),
    )
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        print(resources.format_table(rows))
    return 0


def _version(what: str) -> tuple[str, VersionHeader]:
    """The name and the header of a backend of a version file, or of a file that is in no ladder."""
    from attention_kernels import UnsupportedError, ladder

    name = ladder.resolve(what).name
    try:
        return name, ladder.versions()[name]
    except KeyError:
        raise UnsupportedError(name, ["it has no version file, *.cu"]) from None


def _accesses(arguments: argparse.Namespace) -> int:
    import dataclasses

    from attention_kernels.inspection import accesses

    _, version = _version(arguments.name)
    head_dim = arguments.head_dim or _usual_head_dim(version)
    found = accesses.count_accesses(
        version,
        seqlen=arguments.seqlen,
        head_dim=head_dim,
        batch=arguments.batch,
        num_heads=arguments.heads,
        is_causal=not arguments.full,
    )
    if arguments.json:
        print(json.dumps([dataclasses.asdict(access) for access in found], indent=2))
        return 0
    print(
        f"{version.path.name}, emulated: B={arguments.batch} H={arguments.heads} "
        f"N={arguments.seqlen} head_dim={head_dim} {'full' if arguments.full else 'causal'}\n"
    )
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(accesses.format_table(found, width))
    return 0


def _usual_head_dim(takes: BackendSpec | VersionHeader) -> int:
    """GPT-2's, or where it is not taken the first that is."""
    return 64 if 64 in (takes.head_dims or (64,)) else takes.head_dims[0]


def _describe(spec: BackendSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "family": spec.family,
        "summary": spec.summary,
        "precisions": dict(spec.precisions),
        "head_dims": list(spec.head_dims),
        "devices": list(spec.device_types),
        "emulated_on": list(spec.emulated_on),
        "unavailable": {device: spec.unavailable_reason(device) for device in ("cuda", "cpu")},
    }
