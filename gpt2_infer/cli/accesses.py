"""The command `gpt2-infer accesses`."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

from gpt2_infer.cli.options import BACKEND, TIMEOUT, Count, Seconds
from gpt2_infer.cli.versions import adapted, call_shape, describe, version_of

if TYPE_CHECKING:
    from attention_kernels.inspection.accesses import Access


def accesses(
    name: Annotated[str, BACKEND],
    /,
    *,
    entry: str | None = None,
    seqlen: Count = 128,
    head_dim: Count | None = None,
    batch: Count = 1,
    heads: Count = 1,
    full: bool = False,
    timeout_s: Annotated[Seconds, TIMEOUT] = 600.0,
) -> list[Access]:
    """Count the bank conflicts and memory sectors of each source line, in the CPU emulator.

    The counts are exact for this shape, and need no GPU; caches are not modelled. Raises the errors
    of version_of() and count_accesses().

    Args:
        name: backend name or version file, *.cu
        entry: how to call a file that is not a version file, in C++: 'attn(q, k, v, o, B, N, H, D,
            scale)'; header fields may follow, as in 'attn<<<N, 128>>>(q, k, v, o) | Tensors: BHND'
        seqlen: sequence length in tokens
        head_dim: head dimension (default: 64, or the first supported)
        batch: batch size
        heads: number of heads
        full: omit the causal mask
        timeout_s: time limit in seconds
    """
    from attention_kernels.inspection.accesses import count_accesses

    version = version_of(*adapted([name], entry))
    shape = call_shape(version, head_dim, batch, heads, full)
    return count_accesses(version, seqlen=seqlen, **shape, timeout_s=timeout_s)


def text(rows: list[Access], name: str, seqlen: int, **given: Any) -> str:
    """Return the shape, a table of the accesses, and what its line numbers mean."""
    from attention_kernels.inspection.accesses import format_table

    version = version_of(*adapted([name], given["entry"]))
    shape = call_shape(version, *(given[size] for size in ("head_dim", "batch", "heads", "full")))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    title = f"{version.path.name}, emulated: N={seqlen} {describe(shape)}"
    lines = [title, "", format_table(rows, width)]
    if any(len(access.lines) > 1 for access in rows):
        legend = "Line a>b: line a of the kernel calls a function, which accesses memory in line b."
        lines += ["", legend]
    return "\n".join(lines)
