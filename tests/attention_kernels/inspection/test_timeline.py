"""Timelines: the stamps are complete and in order, measured and predicted."""

from __future__ import annotations

import re

import numpy as np
import pytest

from attention_kernels import ladder
from attention_kernels.inspection import resources, timeline
from attention_kernels.inspection.sass import decode
from attention_kernels.ladder import header
from attention_kernels.ladder.op import load_op
from tests.attention_kernels.inspection.sass.common import H200, needs_cuda_programs

EMPTY = "#ifndef STAMP\n#define STAMP(name)\n#endif\n"
CALL, HEAD_DIM = (1, 64, 2, 1), 64


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Version 4, in whose loop a place has a name; and the loop's places, in order."""
    text = ladder.resolve("CUSTOM_CUDA_VERSION_4").version.source
    text = text.replace("namespace attention", f"{EMPTY}namespace attention", 1)
    loop, *others = re.split(r"(?<=__syncthreads\(\);\n)", text)
    path = tmp_path_factory.mktemp("named") / "v04_named.cu"
    path.write_text("".join([loop, 'STAMP("scores");\n', *others]))
    lines = path.read_text().splitlines()
    places = [str(n) for n, line in enumerate(lines, 1) if line.strip() == "__syncthreads();"]
    return header.of_file(path), [places[0], "scores", *places[1:]]


def check(warps, places):
    """Each warp passes the places in turn, to the same end, and its clock never goes back."""
    (count,) = {len(warp.stamps) for warp in warps}
    assert count > len(places)
    for warp in warps:
        times = [time for one in warp.stamps for time in (one.arrived, one.left)]
        assert times == sorted(times)
        assert [one.place for one in warp.stamps] == (places * count)[:count]
    return count


def test_the_first_blocks_stamp_every_wait_in_the_second_call(named, monkeypatch):
    """The first is on other tensors, so that the code is warm and the inputs are not."""
    version, places = named
    calls = []

    def load(version, *others):
        op = load_op(version, *others)
        return lambda q, *rest: calls.append((version.op, q.data_ptr())) or op(q, *rest)

    monkeypatch.setattr(timeline, "load_op", load)
    found, *_ = timeline.measure(version, CALL, HEAD_DIM, "cpu")
    assert [op for op, _ in dict.fromkeys(calls)] == [f"{version.op}_stamps"] * 2
    assert {(one.launch, one.block) for one in found} == {(0, 0), (0, 1)}
    assert check(found, places) == 2 * len(places)  # one call passes each place twice


def test_the_second_call_is_kept(named):
    stamps = np.zeros(timeline._SHAPE, timeline._STAMP)
    # Launches 5 to 8, of which the second call's have overwritten all stamps of one.
    stamps[0, 0, :3] = [(16, 2, 20, 5), (48, 2, 55, 7), (80, 2, 99, 8)]
    found = [one.stamps for one in timeline._read(named[0], stamps)]
    assert found == [[("1", 0, 7)], [("1", 0, 19)]]


@needs_cuda_programs
def test_a_prediction_has_the_stamps_of_the_emulator(named):
    found = timeline.timeline(named[0], H200, CALL, HEAD_DIM)
    measured, *_ = timeline.measure(named[0], CALL, HEAD_DIM, "cpu")
    assert check(found.predicted, named[1]) == check(measured, named[1])
    assert len(found.predicted) == len(measured) / 2
    assert {phase.begin for phase in found.phases} == {*named[1]}


@needs_cuda_programs
@pytest.mark.parametrize(
    "name", ["HOPPER_VERSION_4", pytest.param("CUSTOM_CUDA_VERSION_36", marks=pytest.mark.slow)]
)
def test_stamps_spill_no_registers_and_read_the_clock_on_both_sides_of_a_wait(name, tmp_path):
    version, *_ = ladder.resolve(name).version.builds()
    compiled, code = resources.compile_version(timeline.stamping(version), "90")
    assert {one.spill_stores for one in compiled.values()} == {0}
    (file := tmp_path / "kernel.cubin").write_bytes(code)
    for instructions in decode.read_cubin(file, file, H200).code.values():
        listing = " ".join(f"{one.name} {one.operands}" for one in instructions)
        order = re.findall("CLOCK|BAR.SYNC|PHASECHK", listing)
        assert re.fullmatch("(CWC)*W*", "".join("C" if x == "CLOCK" else "W" for x in order))
