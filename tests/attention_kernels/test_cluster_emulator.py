"""Blocks of a cluster that load tiles into each other's shared memory, in the emulator."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.op import load_op
from tests.attention_kernels.conftest import BUILDS, faulty_op

FAULTY = Path(__file__).parent / "negative" / "v09_cluster.cu"
EARLY_COPY = r"race: another block writes byte|the destination is still read by multiply\(\)"
NOT_RUNNING = "that block of the cluster has not begun, or has ended"
MESSAGES = {
    1: "race: |has all of its 1 arrivals|is still (written|read) by",
    2: "copies brought 4096 bytes more than it expects|is still (written|read) by|race: ",
    3: "the mask 7 is not of blocks of a cluster of 2",
    4: r"has 1 of 1 arrivals and waits for 4096 bytes that no copy brings.*block \(1, 0, 0\)",
    5: "the mask 0 is not of blocks of a cluster of 2",
    6: r"race: |the destination is still written by load_tile_to_blocks\(\)",
    7: EARLY_COPY,
    8: "never passes: its phase of parity 1 has 0 of 1 arrivals",
    9: NOT_RUNNING,
    10: "has not been initialized",
    11: "was initialized without a barrier_init_fence",
    12: f"{NOT_RUNNING}|has not been initialized|nothing orders that before",
    13: rf"{NOT_RUNNING}|the block ends before load_tile_to_blocks\(\) at .* is complete",
    14: r"cluster_wait\(\) at .* never passes: 160 threads of the cluster do not arrive",
    15: "without a proxy_fence",
}
NEED_LUCK = {7, 12}  # without the build that checks for races, which block is first decides
ONLY_RACES = {15}  # only the build that checks for races reports it


pytestmark = pytest.mark.skipif(
    compilers.missing_compiler("emulator") is not None, reason="needs a C++ compiler"
)


class Params(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in "qko"), ("fault", ctypes.c_int))


def run(op, device, fault):
    """Return the message of two blocks that load tiles for each other, and the largest error."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(rows, 64, generator=g).half() for rows in (128, 320))
    expected = (q.float() @ k.float().T).view(128, 5, 64).sum(1)
    q, k, o = q.to(device), k.to(device), torch.zeros(128, 64, device=device)
    params = Params(*(x.data_ptr() for x in (q, k, o)), fault)
    message = ""
    try:
        op(o, torch.frombuffer(bytearray(params), dtype=torch.uint8))
    except RuntimeError as error:
        message = str(error)
    return message, float((o.cpu() - expected).abs().max())


@pytest.fixture(scope="module", params=BUILDS)
def cluster(request):
    """Run the kernel with a fault; return its message, its largest error and the build."""
    op = faulty_op(FAULTY, request.param)
    return lambda fault: (*run(op, "cpu", fault), request.param)


@pytest.mark.parametrize("order", ["", "reverse", "shuffle:1", "shuffle:2"])
def test_blocks_of_a_cluster_load_tiles_for_each_other(cluster, order, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    message, error, _ = cluster(0)
    assert message == ""
    assert error < 1e-3


@pytest.mark.parametrize("fault", MESSAGES)
def test_a_fault_is_reported(cluster, fault):
    message, _, build = cluster(fault)
    if build or fault not in NEED_LUCK | ONLY_RACES:
        assert re.search(MESSAGES[fault], message), message


@pytest.mark.gpu
def test_the_hardware_does_the_same(hopper):
    op = load_op(header.parse_header(FAULTY, "negative_"), hopper, "the cluster")
    message, error = run(op, hopper, 0)
    assert message == ""
    assert error < 1e-3


def test_every_fault_is_tried():
    marked = re.findall(r"// (\d+)(?=[:,]|$)", FAULTY.read_text("utf-8"), re.M)
    assert {*map(int, marked)} == {*MESSAGES}
