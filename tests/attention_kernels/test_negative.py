"""Negative controls: each file's parameters choose a fault, which the emulator must report.

On a GPU most of these faults are races or hang. The kernels: attention with TMA and wgmma, blocks
of a cluster that load tiles for each other, and words that blocks and clusters send each other.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.attention_kernels.conftest import BUILDS, faulty_op
from tests.conftest import needs_compiler

NEGATIVE = Path(__file__).parent / "negative"
WRONG = "the output is wrong"  # instead of a message
PLACE = r"; block \(0, 0, 0\), thread \(\d+, 0, 0\)"
NOT_RUNNING = "that block of the cluster has not begun, or has ended"
EARLY_COPY = r"race: another block writes byte|the destination is still read by multiply\(\)"
EARLY = (  # a slot that is written too early
    r"the destination is still read by multiply\(\) at v08_hopper|"
    r"an operand is still written by load_tile\(\) at v08_hopper|race: lane 0 of warp 0 writes"
)

pytestmark = needs_compiler


def hopper_attention() -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the pointers' tensors in the order of the parameters, the output and its values."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(128, 64, generator=g).half() / 8
    k, v = (torch.randn(320, 64, generator=g).half() for _ in range(2))
    o = torch.zeros(128, 64)
    return [q, k, v, o], o, (q.float() @ k.float().T).half().float() @ v.float()


def products_of_a_cluster() -> tuple[list[Tensor], Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(rows, 64, generator=g).half() for rows in (128, 320))
    o = torch.zeros(128, 64)
    return [q, k, o], o, (q.float() @ k.float().T).view(128, 5, 64).sum(1)


def exchange_of_words() -> tuple[list[Tensor], Tensor, Tensor]:
    o, words = torch.zeros(4), torch.full((2,), 5 << 32)  # an earlier exchange's words
    return [o, words], o, torch.full((4,), 10.0)


@dataclass(frozen=True)
class Control:
    """A version file with faults."""

    operands: Callable[[], tuple[list[Tensor], Tensor, Tensor]]
    tolerance: float
    messages: dict[int, str]
    """What is reported of each fault, a regular expression."""
    only_races: frozenset[int] = frozenset()
    """Faults that only the build that checks for races reports every time."""
    may_pass: frozenset[int] = frozenset()
    """Faults that luck may hide in any build."""
    orders: tuple[str, ...] = ("",)

    def run(self, op: Callable[..., None], fault: int) -> str:
        """Return the message of a fault, WRONG if the output is wrong, otherwise ""."""
        tensors, o, expected = self.operands()
        params = struct.pack(f"{len(tensors)}Pi4x", *(x.data_ptr() for x in tensors), fault)
        try:
            op(o, torch.frombuffer(bytearray(params), dtype=torch.uint8))
        except RuntimeError as error:
            return str(error)
        return "" if (o - expected).abs().max() < self.tolerance else WRONG


CONTROLS = {
    "v08_hopper": Control(
        hopper_attention,
        0.01,
        {
            1: "never passes: its phase of parity 0 has 0 of 1 arrivals",
            2: "has 1 of 1 arrivals and copies brought 4096 bytes more than it expects",
            3: "has 1 of 1 arrivals and waits for 16 bytes that no copy brings",
            6: "threads have written .*, without a proxy_fence",
            7: "128 of 256 threads have arrived in named_barrier_sync",
            11: "the tile does not start at a multiple of 1024 bytes",
            12: "the descriptor does not say that the tile has the 128-byte swizzle",
            13: "the sums have been accessed, and no multiply_fence",
            17: "the registers of A have been accessed, and no multiply_fence",
            19: "were written before they were complete",
            24: "are complete, and it does not take them",
            25: r"the thread ends before multiply\(\) at v08_hopper.cu:\d+ is complete",
            26: r"store_tile\(\) .* threads have written .*, without a proxy_fence",
            27: r"the thread ends while store_tile\(\) at v08_hopper.cu:\d+ is not in a group",
            28: "the tile was changed before it had been read",
            29: r"the thread ends while store_tile\(\) at v08_hopper.cu:\d+ reads its tile",
            30: "never passes: its phase of parity 1",
            32: "was initialized without a barrier_init_fence",
            33: "was initialized by another thread, and nothing orders that before",
            34: "never ends: no warp gives up registers",
            35: "the warp has 168 registers per thread",
            37: "has 1 of 1 arrivals and waits for 4096 bytes that no copy brings",
            38: "threads have written .*, without a proxy_fence",
            40: "the warps of the warpgroup multiply different operands",
            **dict.fromkeys(
                (41, 42), r"race: lane 0 of warp 0 writes .* has read, .*, without a proxy_fence"
            ),
            **dict.fromkeys((4, 8, 9, 10, 16, 20, 21, 31), EARLY),
            **dict.fromkeys((15, 22, 23), "are not complete: a product of them is in"),
            **dict.fromkeys((5, 14, 18, 36, 39), WRONG),
        },
        only_races=frozenset({33, 38, 41, 42}),
        orders=("", "reverse"),
    ),
    "v09_cluster": Control(
        products_of_a_cluster,
        1e-3,
        {
            1: "race: |has all of its 1 arrivals|is still (written|read) by",
            # The thread that reports is of the block that is stuck, a consumer or the producer.
            2: "copies brought 4096 bytes more than it expects|is still (written|read) by|race: "
            "|never passes: its phase of parity . has [04] of 8 arrivals",
            3: "the mask 7 is not of blocks of a cluster of 2",
            4: r"waits for 4096 bytes that no copy brings.*block \(1, 0, 0\)",
            5: "the mask 0 is not of blocks of a cluster of 2",
            # Without the check for races, a copy may have landed before the other one begins.
            6: rf"race: |{WRONG}|the destination is still written by load_tile_to_blocks\(\)",
            7: EARLY_COPY,
            8: "never passes: its phase of parity (1 has 0 of 1|0 has 4 of 8) arrivals",
            9: NOT_RUNNING,
            10: "has not been initialized",
            11: "was initialized without a barrier_init_fence",
            12: f"{NOT_RUNNING}|has not been initialized|nothing orders that before",
            13: rf"{NOT_RUNNING}|the block ends before load_tile_to_blocks\(\) at .* is complete",
            14: r"cluster_wait\(\) at .* never passes: 160 threads of the cluster do not arrive",
            15: "without a proxy_fence",
        },
        only_races=frozenset({7, 12, 15}),  # or chance: which block is first
    ),
    "v10_words": Control(
        exchange_of_words,
        1e-9,
        {
            1: "waits for 4 bytes that no copy brings",
            2: "of the cluster has not begun|has not been initialized|nothing orders that",
            3: "that block of the cluster has not begun, or has ended",
            4: "the address is not aligned",
            5: f"{WRONG}|race: |the block ends before",
            6: r"at v10_words.cu:\d+ is repeated for ever: .* by none of the 4 running blocks",
            7: WRONG,
        },
        only_races=frozenset({2}),  # or chance: whether the other block has begun
        may_pass=frozenset({7}),  # the other cluster may be ahead
    ),
}


def faults() -> Iterator[tuple[str, int, str]]:
    for name, control in CONTROLS.items():
        for order in ("", "reverse", "shuffle:1", "shuffle:2"):
            yield name, 0, order
        for fault in control.messages:
            for order in control.orders:
                yield name, fault, order


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("name", "fault", "order"), [*faults()])
def test_only_a_fault_is_reported_or_changes_the_output(name, fault, order, build, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    control = CONTROLS[name]
    message = control.run(faulty_op(NEGATIVE / f"{name}.cu", build), fault)
    if not build and fault in control.only_races:
        return
    expected = control.messages.get(fault, "^$")
    assert re.search(expected, message) or (fault in control.may_pass and not message), message
    if name == "v08_hopper" and message not in ("", WRONG):
        assert re.search(PLACE, message), message


@pytest.mark.parametrize("name", CONTROLS)
def test_every_fault_is_tried(name):
    text = (NEGATIVE / f"{name}.cu").read_text("utf-8")
    marked = {*map(int, re.findall(r"// (\d+)(?=[:,]|$)", text, re.M))}
    assert marked | ({38} if name == "v08_hopper" else set()) == {*CONTROLS[name].messages}
