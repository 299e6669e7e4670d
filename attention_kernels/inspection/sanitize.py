"""Run backends under a sanitizer, to find the faults that a correct output hides.

On the CPU, emulated kernels run in a build with AddressSanitizer, and again with their blocks and
threads in other orders, which must not change a bit of the output. In the same orders they run in
the build that reports races: what a race between blocks touches may depend on who is ahead. On a
GPU, NVIDIA's compute-sanitizer looks for invalid accesses (memcheck) and races in shared memory
(racecheck).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from attention_kernels import child, ladder, registry
from attention_kernels.errors import KernelError, UnavailableBackendError, UnsupportedError
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.ladder import compilers
from attention_kernels.registry import BackendSpec

TOOLS = ("memcheck", "racecheck")
ASAN_FLAGS = "-fsanitize=address -Og"
_ASAN_OPTIONS = "detect_leaks=0:symbolize=0"  # addr2line finds more than its symbolizer
# seqlen, head_dim, batch, num_heads, is_causal: few and small, because all sanitizers are slow.
SHAPES = (
    (1, 64, 1, 1, True),
    (33, 32, 2, 2, False),
    (65, 64, 1, 2, False),
    (65, 128, 1, 1, True),
    (130, 64, 1, 1, True),
)
ORDER = "the order of its blocks or threads changes the output"
_EXIT = 77  # exit status of compute-sanitizer if it found a fault
# Matches the first fault that it reports. A race has a second line: "and" and the other access.
_FAULT = r"^=+ (?:Error|Invalid|War|Barrier).*(?:\n=+ +and .*)?"
_MAIN = ("-m", "attention_kernels.inspection.sanitize")
_UNAVAILABLE = 78  # exit status of main() if a backend cannot be built; the last line says why


def sanitize(
    whats: Sequence[str], device: str = "", *, schedules: int = 1, timeout_s: float = 600.0
) -> list[str]:
    """Run backends, given by name or version file, under the device's sanitizers.

    device: "cuda", "cpu", or "" for cuda if the first one runs there, else cpu. schedules: the
    number of shuffled orders in the emulator, the same in each run. Returns a sentence per fault. A
    run, which builds the backends and executes all cases under one sanitizer, ends at its first
    fault or after timeout_s seconds. Raises UnavailableBackendError if a sanitizer is missing, and
    UnsupportedError on the CPU for a backend that is not emulated.
    """
    specs = [ladder.resolve(what) for what in whats]
    device = registry.device_for(specs[0], device)
    for spec in specs:
        if reason := spec.unavailable_reason(device):
            raise UnavailableBackendError(spec.name, reason)
        in_ladder = spec.version is not None and device in spec.emulated_on
        if device == "cpu" and not in_ladder:
            raise UnsupportedError(spec.name, ["only emulated kernels have a sanitizer on the CPU"])
    if device == "cpu":
        name, how = specs[0].name, [str(schedules), *whats]
        faults = _emulated(name, ["cpu", *how], _address_sanitizer(name), timeout_s)
        return faults or _emulated(name, ["races", *how], {}, timeout_s)
    if shutil.which("compute-sanitizer") is None:
        raise UnavailableBackendError(specs[0].name, "needs compute-sanitizer on PATH")
    return [
        fault
        for tool in TOOLS
        if (names := [x for x, spec in zip(whats, specs, strict=True) if tool in tools_of(spec)])
        for fault in compute_sanitizer(tool, names, timeout_s)
    ]


def tools_of(spec: BackendSpec) -> tuple[str, ...]:
    """Return the tools of compute-sanitizer that understand a backend's kernels.

    Racecheck does not follow bulk copies, mbarriers and wgmma: it misses races and reports false
    ones (docs/correctness.md).
    """
    needs = spec.version.needs if spec.version else None
    return ("memcheck",) if needs and needs >= (9, 0) else TOOLS


def _address_sanitizer(name: str) -> dict[str, str]:
    """Return the environment in which a backend is built and run with AddressSanitizer."""
    # Preload libstdc++ too: the sanitizer looks for its __cxa_throw at startup, before torch loads
    # it.
    names = ("libasan.so", "libstdc++.so.6")
    gxx = str(compilers.find_gxx())
    libraries = [compilers.execute([gxx, f"-print-file-name={name}"]).out.strip() for name in names]
    if not os.path.isabs(libraries[0]):
        raise UnavailableBackendError(name, "its C++ compiler has no AddressSanitizer")
    found = {"ATTENTION_KERNELS_FLAGS": ASAN_FLAGS, "ASAN_OPTIONS": _ASAN_OPTIONS}
    return found | {"LD_PRELOAD": ":".join(libraries)}


def _emulated(
    name: str, arguments: Sequence[str], environment: dict[str, str], timeout_s: float
) -> list[str]:
    """Run main() with these arguments in the emulator; return the first fault, if any."""
    done = _worker([*_MAIN, *arguments], environment, timeout_s)
    if done.status == 0:
        return []
    if done.status == _UNAVAILABLE:
        raise UnavailableBackendError(name, _last_words(done))
    found = re.search(r"ERROR: (AddressSanitizer: .*?) on (?:unknown )?address", done.err)
    if not found:
        return [_last_words(done)]
    # Only the frames of the access: the frames of an allocation may follow.
    report = re.split(r"\n\n", done.err[found.end() :])[0]
    frames = re.findall(r"#\d+ 0x\w+ +.*?\((/.+)\+(0x\w+)\)", report)
    lines = (compilers.source_line(*frame) for frame in frames)
    return [f"{found[1]} at {next(filter(None, lines), 'an unknown line')}"]


def compute_sanitizer(tool: str, whats: Sequence[str], timeout_s: float = 600.0) -> list[str]:
    """Run backends on the GPU under one of TOOLS; return a sentence per fault."""
    return faults_on_gpu(tool, [*_MAIN, "cuda", "0", *whats], timeout_s)


def faults_on_gpu(tool: str, arguments: Sequence[str], timeout_s: float) -> list[str]:
    """Run Python under compute-sanitizer, which checks our kernels; return a sentence per fault.

    tool: one of TOOLS, or "synccheck". arguments: those of Python.
    """
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_EXIT)]
    command += ["--report-api-errors", "no", "--kernel-name", "kernel_substring=attention"]
    # In torch's memory pool, an access past the end of a tensor can still be in an allocation.
    done = _worker(arguments, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, timeout_s, *command)
    summary = "RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    if done.status == 0 and summary in done.out:
        return []
    fault = re.search(_FAULT, done.out, re.M)
    what = re.sub(r"\n=+ +", " ", fault[0]).lstrip("= ") if fault else _last_words(done)
    return [f"{tool}: {what}"]


def _worker(
    arguments: Sequence[str], environment: dict[str, str], timeout_s: float, *before: str
) -> child.Ended:
    """Run Python in its own process, under the command `before`."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return child.run([*before, sys.executable, *arguments], timeout_s=timeout_s, env=env)


def _last_words(done: child.Ended) -> str:
    lines = done.output.strip().splitlines()
    return lines[-1] if lines else f"it {done.how}"


def _cases(spec: BackendSpec) -> Iterator[Case | DecodeCase]:
    for dtype in (getattr(torch, name) for name in spec.dtypes):
        if not spec.has_attention():
            for head_dim in spec.head_dims or (32, 64, 128):
                yield DecodeCase(head_dim, dtype, lengths=(1, 33, 130), max_seqlen=130)
            continue
        for seqlen, head_dim, batch, num_heads, is_causal in SHAPES:
            if not spec.head_dims or head_dim in spec.head_dims:
                yield Case(seqlen, head_dim, 1.0, batch, num_heads, is_causal, dtype=dtype)


def _run(spec: BackendSpec, device: str, schedules: int = 1) -> None:
    """Run every case once, and in the emulator also in reverse and in some shuffled orders.

    device: "cuda", "cpu" or "races", the build for the CPU that reports races.
    """
    orders = ["", "reverse", *(f"shuffle:{seed}" for seed in range(1, schedules + 1))]
    for case in _cases(spec):
        inputs = case.inputs(device.replace("races", "cpu"))
        expected = None
        for order in orders if device != "cuda" else [""]:
            os.environ["ATTENTION_EMULATOR_ORDER"] = order
            try:
                if isinstance(case, DecodeCase):
                    found = spec.decode(*inputs)
                else:
                    found = spec.attention(*inputs, is_causal=case.is_causal)
            except UnsupportedError:  # too much shared memory for this device
                break
            except KernelError as error:
                sys.exit(f"{spec.name}: {case}, {order}: {error.__cause__}")
            expected = found if expected is None else expected
            if not torch.equal(found, expected):
                sys.exit(f"{spec.name}: {case}, {order}: {ORDER}")
    if device == "cuda":
        torch.cuda.synchronize()


def main(device: str, schedules: str, *whats: str) -> None:
    """Run backends on a device, see _run(): the process that runs under the sanitizer."""
    child.end_with_parent()
    os.environ.pop("LD_PRELOAD", None)  # otherwise the compiler would run under the sanitizer, too
    specs = [ladder.resolve(what) for what in whats]
    if any(spec.family == "triton" for spec in specs):
        import triton.testing

        # Run every tile size once, without timing it.
        triton.testing.do_bench = lambda call, quantiles, **_: (call(), [0.0] * len(quantiles))[1]
    for spec in map(ladder.race_checked, specs) if device == "races" else specs:
        try:
            spec.prepare(device.replace("races", "cpu"))
        except UnavailableBackendError as error:
            print(error.reason, file=sys.stderr)
            sys.exit(_UNAVAILABLE)
        _run(spec, device, int(schedules))


if __name__ == "__main__":
    main(*sys.argv[1:])
