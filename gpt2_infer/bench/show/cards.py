"""What to expect of the fused step on other cards: computed, not measured."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpt2_infer.bench.record import File
from gpt2_infer.bench.show.figures import reading_us, step_us
from gpt2_infer.bench.show.pivot import markdown

if TYPE_CHECKING:
    from gpt2_infer.engines.fused import BlockedMatrix, StepShape

KERNELS = 63  # of a step of GPT-2 small: five per layer, and three
RESERVED = 1024  # bytes of shared memory that a GPU reserves in each block


@dataclass(frozen=True)
class Card:
    """A GPU, and our estimate of its read bandwidth."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_kb: int
    """Shared memory available to a block."""
    read_gbps: int


# The read bandwidth is 86 to 92 % of the data sheet's, the H200's share.
CARDS = (
    Card("A100 80GB", (8, 0), 108, 163, 1_750),
    Card("RTX 3090", (8, 6), 82, 99, 860),
    Card("RTX 4090", (8, 9), 128, 99, 930),
    Card("RTX 5090", (12, 0), 170, 99, 1_650),
)


def expected(file: File, contender: str) -> str:
    """Return the table of computed times; file: a contender's measured times at batch 1."""
    lines: list[list[str]] = []
    for card, row in itertools.product(CARDS, file.of("time")):
        if row.contender != contender:
            continue
        reading = int(row.extra["weight_bytes"]) / card.read_gbps / 1e3
        kernels = step_us(row) - reading_us(row, file)
        total = reading + kernels
        cells = [card.name, str(row.cell["dtype"]), f"{card.read_gbps / 1e3:.2f}"]
        cells += [f"{kernels / KERNELS:.1f}", f"{reading:.0f} + {kernels:.0f} = {total:.0f}"]
        lines.append([*cells, f"{1e6 / total:,.0f}"])
    head = ["GPU", "dtype", "TB/s", "us per kernel", "us per step", "tokens/s"]
    return markdown(head, lines)


def blocks() -> str:
    """Return the table of the products' blocks in GPT-2 small at batch 1."""
    import torch

    from gpt2_infer.config import GPT2Config
    from gpt2_infer.engines.fused import EARLY, StepShape

    lines: list[list[str]] = []
    for card in CARDS:
        for dtype in (torch.float32, torch.bfloat16):
            shared = card.shared_kb * 1024
            shape = StepShape(GPT2Config(), dtype, 1, card.multiprocessors, shared)
            if card.capability < EARLY or not shape.fits:
                shape = replace(shape, is_portable=True)
            cells = [_cell(shape, name, product) for name, product in shape.products.items()]
            step = "portable" if shape.is_portable else "early launches"
            lines.append([card.name, str(dtype).removeprefix("torch."), step, *cells])
    names = ["q, k and v", "projection", "hidden units", "their projection"]
    return markdown(["GPU", "dtype", "step", *names], lines)


def _cell(shape: StepShape, name: str, product: BlockedMatrix) -> str:
    """Return a product's blocks, their kilobytes, and how many fit on a multiprocessor."""
    used, has_x = shape.needed[name], name != "FC2"
    if shape.is_portable:
        stages, stage_bytes = product.stages(shape.dtype)
        other = product.other_bytes(shape.dtype, shape.batch, has_x=has_x)
        used = other + min(stages, (shape.shared_bytes - other) // stage_bytes) * stage_bytes
    resident = (shape.shared_bytes + RESERVED) // (used + RESERVED)
    return f"{product.columns // product.block_columns} x {used / 1024:.0f} KB, {resident}"
