"""Words that blocks send within a cluster, and between clusters that all run at once."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.op import load_op
from tests.attention_kernels.conftest import BUILDS, faulty_op

FAULTY = Path(__file__).parent / "negative" / "v10_words.cu"
WRONG = "wrong"  # instead of a message
MESSAGES = {
    1: "waits for 4 bytes that no copy brings",
    2: "that block of the cluster has not begun|has not been initialized|nothing orders that",
    3: "that block of the cluster has not begun, or has ended",
    4: "the address is not aligned",
    5: f"{WRONG}|race: |the block ends before",
    6: "did not end in 2 s",
    7: WRONG,
}
NEED_LUCK = {7}  # the other cluster may be ahead

pytestmark = pytest.mark.skipif(
    compilers.missing_compiler("emulator") is not None, reason="needs a C++ compiler"
)


class Params(ctypes.Structure):
    _fields_ = (("o", ctypes.c_void_p), ("words", ctypes.c_void_p), ("fault", ctypes.c_int))


def run(op, device: str, fault: int) -> str:
    """Return the message of a fault, WRONG if the sums are, otherwise ""."""
    o = torch.zeros(4, device=device)
    words = torch.full((2,), 5 << 32, device=device)  # an earlier exchange's
    params = Params(o.data_ptr(), words.data_ptr(), fault)
    try:
        op(o, torch.frombuffer(bytearray(params), dtype=torch.uint8))
    except RuntimeError as error:
        return str(error)
    return "" if o.tolist() == [10.0] * 4 else WRONG


@pytest.fixture(scope="module", params=BUILDS)
def words(request):
    """Run the kernel with a fault; return its message."""
    op = faulty_op(FAULTY, request.param)
    return lambda fault: run(op, "cpu", fault)


@pytest.mark.parametrize("order", ["", "reverse", "shuffle:1", "shuffle:2"])
def test_blocks_exchange_words(words, order, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    assert words(0) == ""


@pytest.mark.parametrize("fault", MESSAGES)
def test_a_fault_is_reported(words, fault, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_TIMEOUT", "2")
    message = words(fault)
    assert re.search(MESSAGES[fault], message) or (fault in NEED_LUCK and not message), message


@pytest.mark.gpu
def test_the_hardware_does_the_same(hopper):
    op = load_op(header.parse_header(FAULTY, "negative_"), hopper, "the words")
    assert run(op, hopper, 0) == ""


def test_every_fault_is_tried():
    marked = re.findall(r"// (\d+)(?=[:,]|$)", FAULTY.read_text("utf-8"), re.M)
    assert {*map(int, marked)} == {*MESSAGES}
