"""The tools that `gpt2-infer mcp` serves; each calls the same function as its command.

Calls run one after the other, each in a thread, so that no call disturbs what another one times.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import anyio
from anyio import from_thread, to_thread
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase
from pydantic import BaseModel, Field

from attention_kernels.child import ending
from attention_kernels.inspection.accesses import Access
from attention_kernels.inspection.resources import Resources
from gpt2_infer import __version__
from gpt2_infer.cli import accesses as accesses_command
from gpt2_infer.cli import backends as backends_command
from gpt2_infer.cli import compare as compare_command
from gpt2_infer.cli import kernels as kernels_command
from gpt2_infer.cli import predict as predict_command
from gpt2_infer.cli.console import EXIT_BAD_INPUT, EXIT_FAILED, message_of
from gpt2_infer.cli.options import DEFAULT_PROMPT
from gpt2_infer.cli.verdict import Verdicts, verdicts

ArgModelBase.model_config["extra"] = "forbid"  # of every tool: an unknown argument is an error

T = TypeVar("T")
Device: TypeAlias = Literal["cuda", "cpu"]
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16", "float64"]
Name: TypeAlias = Annotated[
    str, Field(description="name of a backend, or path of a version file, *.cu")
]
Count: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]
Axes: TypeAlias = tuple[Count, Count, Count]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=threading.TIMEOUT_MAX)]
INSTRUCTIONS = (
    "Write an attention kernel as a version file, *.cu; verify it; look at its memory accesses, "
    "registers and predicted time; compare it with other backends. A wrong kernel is a result "
    "with passed false. An error means that there is no verdict, and says why."
)
server = MCPServer(
    "gpt2-infer", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING"
)
_turn = anyio.Lock()


class Side(BaseModel, extra="allow"):
    """A backend or an engine at the step that was examined."""

    token: int
    text: str | None
    margin: float | None
    """The difference between the two largest logits."""
    faults: list[str]
    """Empty if rounding explains everything."""


class Divergence(BaseModel, extra="allow"):
    """Where two greedy texts part, and why."""

    verdict: Literal["equal", "tie", "bug in A", "bug in B", "bug in both"]
    device: str
    dtype: str
    mode: str
    prompt_tokens: int
    new_tokens: int
    step: int | None
    """The first new token that differs, from 0; None if the texts are equal."""
    position: int
    a: Side
    b: Side
    untried: str
    """What the texts did not exercise."""


class Prediction(BaseModel, extra="allow"):
    """The predicted time of one call, in microseconds, and its parts."""

    version: str
    gpu: str
    seqlen: int
    time_us: float
    needs_us: dict[str, float]
    """For each resource, the time for which it is needed."""
    bound: str
    """The largest part of the time."""


@server.tool()
async def backends() -> list[backends_command.Backend]:
    """List the attention backends, what each takes, and why it does not run here, if it does not.

    Nothing is built: a listed backend may still fail to compile.
    """
    return await _run(backends_command.find)


@server.tool()
async def verify(
    name: Name,
    context: Context,
    device: Device | None = None,
    dtypes: list[Dtype] | None = None,
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None,
    timeout_s: Seconds = 300.0,
    quick: bool = False,
    sanitize: bool = False,
    timing: bool = True,
) -> Verdicts:
    """Check a backend against float64 references, and time it if it passes.

    Passed means that no check of a suite, with inputs drawn from `seed`, found an error over its
    budget, a dependence on later keys, a race or state shared between calls. It is no proof. The
    kernel runs in a process of its own; timeout_s limits each check. Without a seed, one is drawn
    and reported, to repeat the run. quick: leave out the cases that find the least in their time,
    and do not time. Emulated kernels are not timed. Progress is the number of checks. Cancelling
    ends the kernel's process.
    """

    def on_check(done: int, total: int) -> None:
        from_thread.check_cancelled()
        from_thread.run(context.report_progress, done, total)

    def work() -> Verdicts:
        return verdicts(
            name,
            device=device,
            dtypes=dtypes or (),
            seed=seed,
            timeout_s=timeout_s,
            quick=quick,
            sanitize=sanitize,
            timing=timing and not quick,
            on_check=on_check,
        )

    return await _run(work)


@server.tool()
async def accesses(
    name: Name,
    seqlen: Count = 128,
    head_dim: Count | None = None,
    batch: Count = 1,
    heads: Count = 1,
    full: bool = False,
    timeout_s: Seconds = 600.0,
) -> list[Access]:
    """Count the bank conflicts and memory sectors of each source line, in the CPU emulator.

    The counts are exact for this shape, and need no GPU; caches are not modelled.
    full: without the causal mask.
    """
    options = Namespace(
        name=name,
        seqlen=seqlen,
        head_dim=head_dim,
        batch=batch,
        heads=heads,
        full=full,
        timeout=timeout_s,
    )
    return await _run(lambda: accesses_command.find(options))


@server.tool()
async def predict(
    name: Name,
    gpu: str = "h200",
    seqlens: Annotated[list[Count], Field(min_length=1)] = [1024],  # noqa: B006 (only read)
    head_dim: Count | None = None,
    batch: Count = 1,
    heads: Count = 12,
    full: bool = False,
    dtype: Dtype | None = None,
    kernel: str | None = None,
    grid: Axes | None = None,
    block: Axes | None = None,
    shared: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None,
    args: list[str] | None = None,
) -> list[Prediction]:
    """Predict a kernel's time on a GPU in microseconds, and what limits it, without that GPU.

    A model of machine code and memory accesses: rarely off by more than 35 %, but no measurement;
    `assumed` says what it did not know. name: a version file or its backend. Or, with
    `kernel`, any *.cu, cubin or library; then grid, block, shared (bytes) and args replace the
    shape. args: "f32[COUNT]" for a buffer, "ptr", a number, "hex:BYTES" or "@FILE". Needs nvcc for
    *.cu. gpu: h200, h100, a100, t4 or rtx4090.
    """
    options = Namespace(
        name=name,
        gpu=gpu,
        seqlen=seqlens,
        head_dim=head_dim,
        batch=batch,
        heads=heads,
        full=full,
        dtype=dtype,
        kernel=kernel,
        grid=grid,
        block=block,
        shared=shared,
        args=args,
        lines=False,
    )
    found = await _run(lambda: predict_command.find(options))
    return [Prediction.model_validate(predict_command.to_json(one)) for one in found]


@server.tool()
async def kernels(
    names: Annotated[list[Name], Field(min_length=1)],
    archs: list[Annotated[str, Field(pattern=r"^\d{2,3}$")]] | None = None,
    head_dims: list[Count] | None = None,
) -> list[Resources]:
    """Show registers, spills, shared memory and occupancy of versions, as nvcc compiles them.

    archs: compute capabilities, such as "90"; default: 75, 80, 90 and 120. Needs nvcc, no GPU.
    """
    options = Namespace(names=names, family=None, arch=archs, head_dim=head_dims)
    return await _run(lambda: kernels_command.find(options))


@server.tool()
async def compare(
    names: Annotated[list[Name], Field(min_length=1)],
    baseline: str | None = None,
    device: Device | None = None,
    dtypes: list[Dtype] | None = None,
    batch_sizes: list[Count] | None = None,
    heads: Count | None = None,
    seqlens: list[Count] | None = None,
    head_dims: list[Count] | None = None,
    full: bool = False,
    rounds: Annotated[int, Field(ge=2)] | None = None,
    out: Annotated[
        Path | None, Field(description="new file for all samples and the floors of the times")
    ] = None,
) -> list[compare_command.Timing]:
    """Check and time kernels alone, in every combination of the lists, in interleaved rounds.

    A time counts only if the outputs of the timed calls are right and two clocks agree; otherwise
    the status says so. Emulated kernels have no time. Cancelling ends the kernels' processes.
    """
    given = {
        "backends": names,
        "baseline": baseline,
        "device": device,
        "dtypes": dtypes,
        "batch_sizes": batch_sizes,
        "heads": heads,
        "seqlens": seqlens,
        "head_dims": head_dims,
        "full": full or None,
        "rounds": rounds,
    }
    options = {name: value for name, value in given.items() if value is not None}
    arguments = Namespace(task="kernel", out=out, **options)
    return await _run(lambda: compare_command.timings(compare_command.find(arguments)))


@server.tool()
async def diverge(
    a: str,
    b: str,
    model: str = "demo",
    prompt: str = DEFAULT_PROMPT,
    max_new_tokens: Count = 64,
    kv_cache: bool = False,
    device: Device | None = None,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
) -> Divergence:
    """Find the first step in which the texts of two backends or engines differ: a tie or a bug.

    A tie means that rounding explains the difference. Equal texts rule out no bug; `untried` says
    what they did not exercise. Model and kernels run in a process of their own. model: a hub id, a
    folder, or demo, which is bundled.
    """
    command = [sys.executable, "-m", "gpt2_infer", "diverge", "--json", "--model", model]
    command += ["--prompt", prompt, "--max-new-tokens", str(max_new_tokens), "--dtype", dtype]
    command += ["--kv-cache"] * kv_cache + (["--device", device] if device else [])
    async with _turn:
        done = await anyio.run_process([*command, "--", a, b], check=False)
    if done.returncode not in (0, EXIT_FAILED):
        error = done.stderr.decode().rpartition("error: ")[2].strip()
        raise ToolError(error if done.returncode == EXIT_BAD_INPUT else ending(done.returncode))
    return Divergence.model_validate_json(done.stdout)


async def _run(work: Callable[[], T]) -> T:
    """Call in a thread when it is this call's turn; a cancelled call ends the kernels' processes.

    Raises ToolError for an expected error.
    """
    ended = threading.Event()

    def thread() -> T:
        try:
            return work()
        finally:
            ended.set()

    async with _turn:
        try:
            return await to_thread.run_sync(thread, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                while not ended.is_set():  # a comparison starts further processes
                    for process in multiprocessing.active_children():
                        process.kill()
                    await anyio.sleep(0.05)
            raise
        except Exception as error:
            if message := message_of(error):
                raise ToolError(message) from error
            raise
