"""The emulator tells right patterns of exchange from racy ones, and names what can never end."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch

from attention_kernels.ladder.op import _with_line
from tests.attention_kernels.conftest import BUILDS, faulty_op
from tests.conftest import needs_compiler

FILE = Path(__file__).parent / "negative" / "v11_orders.cu"
LINES = FILE.read_text("utf-8").splitlines()
# What would order a race, by pattern; of other patterns any of these.
ANY = (
    "a __syncwarp|a __syncthreads|a __threadfence|atomic operations of the device's|an atomic or a "
    "flag with|a barrier of the cluster|a wait_for_previous|a proxy fence|with no barrier between"
)
ORDERED_BY = {
    1: r"a __syncthreads\(\) between them would",
    2: r"a __syncwarp\(\) between them would",
    13: "an atomic or a flag with",
    42: r"the kernel before may still write; a wait_for_previous\(\) before it would",
    **dict.fromkeys(
        (15, 56, 64, 70), "atomic operations of the device's scope, not the block's, would"
    ),
    **dict.fromkeys(
        (18, 19, 22, 24, 54, 59, 61, 62),
        r"a __threadfence\(\) after the first of them, before the atomic",
    ),
    **dict.fromkeys((23, 57, 60), r"a __threadfence\(\) after the load of the flag would"),
    **dict.fromkeys((36, 68), "a barrier of the cluster between them would"),
    **dict.fromkeys((39, 69), r"a wait_for_previous\(\) there would order them"),
    **dict.fromkeys((44, 65, 66), "a proxy fence for global memory"),
}
ONLY_RIGHT = {43}
RACES = {*range(1, 48), *range(54, 74)} - ONLY_RIGHT
# Whether these show depends on which block is ahead, which the order decides.
SCHEDULED = {28, 32}
ENDLESS = {
    49: r"a load, at v11_orders\.cu:\d+ .*is repeated for ever: .* none of the 4 running blocks",
    50: r"a load, at v11_orders\.cu:\d+ .*is repeated for ever: .* none of the 4 running blocks",
    51: r"atomicCAS\(\) at v11_orders\.cu:\d+ is repeated for ever: .* none of the 3 running",
    52: "for ever: all 128 running blocks wait, and the other 72 of the grid cannot start",
    53: "200 blocks do not run at once on a device of 8 multiprocessors",
}
MORE = ("reverse", "shuffle:2", "shuffle:3")
ORDERS = ["", "shuffle:1", *(pytest.param(order, marks=pytest.mark.slow) for order in MORE)]

pytestmark = needs_compiler


def message_of(pattern: int, is_racy: bool, build: str = "races") -> str:
    """Return what the emulator says of a pattern, with source lines; "" if nothing."""
    x, y = torch.ones(1024), torch.zeros(1024)
    words, pairs = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
    pointers = (tensor.data_ptr() for tensor in (x, y, words, pairs))
    params = struct.pack("4P2i", *pointers, pattern, is_racy)
    try:
        faulty_op(FILE, build)(y, torch.frombuffer(bytearray(params), dtype=torch.uint8))
    except RuntimeError as error:
        return _with_line(str(error))
    return ""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pattern", sorted(RACES | ONLY_RIGHT | {*ENDLESS}))
def test_a_right_pattern_is_not_reported(pattern, order, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    assert message_of(pattern, False) == ""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pattern", sorted(RACES))
def test_a_racy_pattern_is_reported_with_both_places_and_what_would_order_them(
    pattern, order, monkeypatch
):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    message = message_of(pattern, True)
    if pattern in SCHEDULED and order and not message:
        return
    assert re.search(r"race: lane \d+ of warp \d+ ", message)
    assert re.search(ORDERED_BY.get(pattern, ANY), message)
    assert message.count(", at v11_orders.cu:") == (1 if pattern == 42 else 2)


def test_what_a_schedule_shows_it_shows_again(monkeypatch):
    found = set()
    for seed in range(8):
        monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", f"shuffle:{seed}")
        messages = {re.sub("0x[0-9a-f]+", "", message_of(28, True)) for _ in range(3)}
        assert len(messages) == 1
        found |= messages
    assert len(found) > 1


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("pattern", ENDLESS)
def test_what_never_ends_is_named_at_once(pattern, build, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", "8")
    assert re.search(ENDLESS[pattern], message_of(pattern, True, build))
