"""Every measurement behind the README, by name: one command each, or all of them in one call.

    python scripts/measure.py --list
    python scripts/measure.py --prefix results/2026-11-20_h200_ [NAME ...]

Writes <prefix><name>.json; what is there already is not measured again. Needs a GPU, and ncu on
PATH for the profiles. A run that fails does not stop the others; the exit status tells.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from gpt2_infer.cli import Parser

SCRIPTS = Path(__file__).resolve().parent
KERNEL = "compare_backends.py --task kernel"
GENERATION = "compare_backends.py --task generation --model gpt2 --random-weights"
EFFICIENT = "--baseline PYTORCH_SDPA_EFFICIENT_ATTENTION"

LENGTHS = "--seqlens 64 128 256 512 1024 2048"
FA1_CASE = "--batch-sizes 32 --heads 8 --head-dims 32 --seqlens 1024 --full"
TRITON_CASE = (
    "--families pytorch triton --dtypes float16 float32 --heads 1 --seqlens 16384 --rounds 20"
)
WMMA = (
    f"{KERNEL} --families pytorch wmma-fa2 --dtypes float16 --heads 1 --full {LENGTHS} --rounds 7"
    f" {EFFICIENT}"
)
HALF = "--families pytorch wmma-fa2 triton flash-attention-1 --dtypes float16"

# In the order of what matters most, should the time with the GPU run out.
RUNS = {
    # Document 4: the float32 ladder.
    "kernel-fp32": f"{KERNEL} --families pytorch custom-cuda {LENGTHS} 4096 --rounds 7",
    "generation-fp32": f"{GENERATION} --families pytorch custom-cuda --rounds 3",
    "profile-fp32": "profile_kernels.py --family custom-cuda",
    # At the shape of inspect-fp32, to be held against it.
    "profile-fp32-128": "profile_kernels.py --family custom-cuda --heads 1 --seqlen 128",
    "inspect-fp32": "inspect_kernels.py --family custom-cuda",
    "generation-cuda": "bench_generation.py cuda --rounds 4",
    "generation-cpu": "bench_generation.py cpu --rounds 7",
    "build": "bench_build.py",
    # Document 1: tensor cores through WMMA, at its shape, against the same precision.
    "kernel-wmma": WMMA,
    # The same again, to see how far a second run is from the first.
    "kernel-wmma-again": WMMA,
    "inspect-wmma": "inspect_kernels.py --family wmma-fa2 --full",
    # Document 2: FlashAttention-1, at its case.
    "kernel-fa1": f"{KERNEL} --families pytorch flash-attention-1 --dtypes float16 float64"
    f" {FA1_CASE} --rounds 7 --baseline FLASH_ATTENTION_1_BASELINE",
    "inspect-fa1": "inspect_kernels.py --family flash-attention-1 --head-dim 32 --full",
    "kernel-fa1-cpu": f"{KERNEL} --device cpu {FA1_CASE} --rounds 3"
    " --backends FLASH_ATTENTION_1_CPU NAIVE_PYTORCH PYTORCH_SDPA_FLASH_ATTENTION",
    "kernel-cpu": f"{KERNEL} --device cpu --families pytorch numpy --backends FLASH_ATTENTION_1_CPU"
    " --heads 8 --head-dims 32 --full --seqlens 64 128 256 512 --rounds 7",
    # Document 3: the ablation.
    "kernel-ablation": f"{KERNEL} --families pytorch ablation --batch-sizes 4 --heads 4"
    " --backends attention_kernels/csrc/ablation/no_maximum/v09_no_maximum.cu"
    " --seqlens 1024 --full --rounds 5 --baseline ABLATION_STEP_2",
    "inspect-ablation": "inspect_kernels.py --family ablation --full",
    "profile-ablation": "profile_kernels.py --family ablation --heads 1 --seqlen 512 --full",
    # Document 5: Triton, at its shape.
    "kernel-triton": f"{KERNEL} {TRITON_CASE}",
    "kernel-triton-full": f"{KERNEL} {TRITON_CASE} --full",
    # Half precision in one run, at GPT-2's shape.
    "kernel-fp16": f"{KERNEL} {HALF} {LENGTHS} 4096 --rounds 7",
    # Without the score matrices of NAIVE_PYTORCH and PYTORCH_SDPA_MATH, which are 13 GB and more.
    "kernel-fp16-long": f"{KERNEL} --families triton --dtypes float16 --seqlens 16384 --rounds 7"
    " --backends PYTORCH_SDPA_FLASH_ATTENTION PYTORCH_SDPA_CUDNN_ATTENTION"
    f" WMMA_FLASH_ATTENTION_2_VERSION_3 {EFFICIENT}",
    "generation-fp16": f"{GENERATION} {HALF} --max-tokens 128 512 --rounds 3",
    # What the case study left open: other batch sizes, and a cache.
    "generation-batch": f"{GENERATION} --backends NAIVE_PYTORCH PYTORCH_SDPA_EFFICIENT_ATTENTION"
    " CUSTOM_CUDA_VERSION_12 --batch-sizes 4 16 --max-tokens 256 --rounds 3",
    "generation-kv": f"{GENERATION} --families pytorch --modes kv-cache --max-tokens 512"
    " --rounds 3",
    "profile-wmma": "profile_kernels.py --family wmma-fa2 --heads 1 --seqlen 2048 --full",
    "profile-fa1": "profile_kernels.py --family flash-attention-1 --batch 32 --heads 8"
    " --head-dim 32 --full",
}


def command(name: str, out: str) -> list[str]:
    """The whole command of a run."""
    script, *arguments = RUNS[name].split()
    named = script in ("compare_backends.py", "profile_kernels.py", "inspect_kernels.py")
    arguments += ["--name", name] if named else []
    return ["python", f"scripts/{script}", *arguments, "--out", out]


def main() -> int:
    """Run what is wanted and not there."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--prefix", default="results/", help="of the files written")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*RUNS}:
        parser.error(f"no run is named {', '.join(sorted(unknown))}: there are {', '.join(RUNS)}")
    failed = []
    for name in arguments.names or RUNS:
        # The scripts run in the root; where there is nothing to resolve, the name stays short.
        out = f"{arguments.prefix}{name}.json"
        if Path.cwd() != SCRIPTS.parent:
            out = str(Path(out).absolute())
        words = command(name, out)
        if arguments.list:
            print(" ".join(words))
            continue
        if Path(out).exists():
            print(f"{out} is there already", flush=True)
            continue
        print(f"\n=== {name}", flush=True)
        started = time.monotonic()
        child = subprocess.Popen([sys.executable, *words[1:]], cwd=SCRIPTS.parent)
        try:
            status = child.wait()
        except KeyboardInterrupt:  # the child has it, too, and saves what it has
            child.wait()
            print(f"interrupted at {name}: the same command goes on from there", file=sys.stderr)
            return 130
        print(f"=== {name}: {time.monotonic() - started:.0f} s", flush=True)
        if status:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
