"""Machine code is executed as the hardware would, and computes what g++ makes of its source.

The code is in files here, so that neither nvcc nor cuobjdump is needed.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_kernels.inspection.sass import decode
from attention_kernels.inspection.sass.execute.instructions import assumed, run
from attention_kernels.inspection.sass.execute.state import Blocks, Mbarrier
from attention_kernels.ladder import build, compilers
from attention_kernels.ladder.header import CSRC
from tests.attention_kernels.inspection.sass.common import CODE, executed

FOLDER = Path(__file__).parent
PARAMETERS = {"75": 0x160, "90": 0x210}  # where they begin in bank 0
KEY, COUNT = 0xD1B54A32D192ED03, 3
OUT = 1 << 40
WORD = 2**32 - 1


def test_machine_code_is_run_as_the_hardware_would():
    done = executed()
    times = Counter(dict.fromkeys(range(len(done.code)), 0))
    for issue in done.issued:
        times[issue.index] += int(issue.warps.sum())
    # Both warps run until the second ends; then the first runs three iterations.
    assert [times[index] for index in range(10)] == [2, 2, 2, 1, 1, 3, 3, 3, 3, 1]
    loads = [issue.request for issue in done.issued if issue.request is not None]
    assert [found[0].tolist() for found in loads] == [[32, 0]] * 3  # a 32-way conflict


def test_the_compilers_stalls_and_scoreboards_are_read():
    text = """
        Function : kernel
        /*0050*/  @P0 LDS R4, [R1+UR4+0x10] ;  /* 0x0000000000007984 */
                                               /* 0x000e240000000800 */
        /*0060*/  IADD3 R2, R4, R5, R7 ;       /* 0x0000000000007810 */
                                               /* 0x001fe20000000000 */
    """
    load, use = decode.parse(text)["kernel"]
    assert (load.name, load.guard, load.stall, load.writes, load.waits) == ("LDS", "P0", 2, 0, ())
    assert (use.operands, use.waits, use.registers) == (("R2", "R4", "R5", "R7"), (0,), (1, 2))


# nvcc compiles some loops this way for sm_80.
CALL = CODE.replace("@!P1 BRA 0x50\nEXIT", "@P1 CALL.REL.NOINC 0xa0\nBRA 0x50\nEXIT")
POLL = CODE.replace("LDS R4, [R1+UR4+0x10]", "LDG.E.STRONG.GPU R2, [R6.64]")
POLL = POLL.replace("R2, R2, 0x1", "R5, R2, 0x1")


@pytest.mark.parametrize(
    ("code", "words", "times"),
    [
        (CALL, {}, 3),
        (CODE.replace("MOV R2, RZ", "LDG.E R2, [UR6]"), {}, 3),
        (CODE.replace("MOV R2, RZ", "LDG.E R2, [UR6]"), {0: 2}, 1),  # as decode kernels do
        (CODE.replace("MOV R2, RZ", "TELEPORT.FAR R2, R0"), {}, 3),  # unknown, so it writes 0
        (POLL, {}, 2),  # it would repeat for ever
    ],
)
def test_a_loop_is_run_as_often_as_its_counter_says(code, words, times):
    done = executed(code, words)
    assert [issue.index for issue in done.issued].count(5) == times
    assert ["TELEPORT.FAR" in x for x in assumed(done.code)] == [True] * ("TELEPORT" in code)


def test_an_unknown_branch_is_refused():
    with pytest.raises(decode.SassError, match="cannot follow the branch BRX"):
        executed(CODE.replace("MOV R2, RZ", "BRX R2 -0x10"))


class Stores(Blocks):
    """Blocks that record what they store in global memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory: dict[int, int] = {}

    def request_global(self, addresses, one) -> None:
        super().request_global(addresses, one)
        values = self.read64(one.operands[-1])
        for lane in np.flatnonzero(self.mask).tolist():
            self.memory[int(addresses[lane])] = int(values[lane]) % 2**64


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The words that operations.cu stores, in their order, as g++ and the emulator compute them."""
    program, source = tmp_path_factory.mktemp("host") / "main", FOLDER / "operations_on_host.cu"
    command = [*compilers.binding_flags("emulator", CSRC), "-DATTENTION_DTYPE=float32"]
    runtime = build.object_file("emulator", CSRC, *build.RUNTIME)
    files = [str(runtime), "-x", "c++", str(source), "-o", str(program), "-pthread", "-ldl"]
    compilers.output_of([*command, "-DATTENTION_VERSION=v01", *files])
    return [*map(int, compilers.output_of([str(program), str(KEY), str(COUNT)]).split())]


@pytest.mark.parametrize("arch", PARAMETERS)
def test_an_operation_computes_what_the_source_says(arch, expected):
    code = decode.parse((FOLDER / f"operations_sm_{arch}.sass").read_text())["kernel"]
    given = struct.pack("<QQI", OUT, KEY, COUNT)
    constants = struct.pack("<III", 64, 1, 1).ljust(PARAMETERS[arch], b"\0") + given
    done = Stores(code, constants, (64, 1, 1), [(0, 0, 0)])
    run(done, 20_000)
    source = (FOLDER / "operations.cu").read_text().splitlines()
    operations = [line.strip() for line in source if line.startswith("  keep(")]
    assert len(expected) == 64 * len(operations)
    for at, word in enumerate(expected):
        assert done.memory[OUT + 8 * at] == word, (operations[at // 64], at % 64)


def ran(*lines: str, constants: bytes = b"", **more: Any) -> Blocks:
    """Run instructions of two warps, such as "S2R R4, SR_TID.X"."""
    return executed("\n".join([*lines, "EXIT"]), constants=constants, **more)


def test_spilled_registers_are_restored():
    """Each thread reads its own value; an address that is not relative to R1 reads as 0."""
    stored = ("S2R R4, SR_TID.X", "MOV R5, 0x7", "STL.64 [R1+0x8], R4", "STL [R1], R5")
    loaded = ("LDL.64 R6, [R1+0x8]", "LDL R8, [R1+0xc]", "LDL R9, [R1]", "LDL R10, [R2]")
    blocks = ran(*stored, "MOV R4, RZ", *loaded)
    for row, value in ((6, np.arange(64)), (7, 7), (8, 7), (9, 7), (10, 0), (4, 0)):
        assert (blocks.values[row] == value).all(), row
    accesses = [issue for issue in blocks.issued if blocks.code[issue.index].memory]
    lines = [issue.request[1].tolist() for issue in accesses]
    assert lines == [[2, 2], [1, 1], [2, 2], [1, 1], [1, 1], [1, 1]]  # 32 words each


def test_a_tensor_map_that_a_kernel_makes_is_copied_from_shared_memory():
    made = ("S2R R4, SR_TID.X", "IMAD.WIDE R8, R4, 0x4, RZ", "STS [R8], R4", "LDS R6, [R8]")
    blocks = ran(*made, "ATOMG.E.EXCH.STRONG.GPU PT, RZ, [R8], R6", "UTMACCTL.IV [UR4]")
    assert blocks.stored == {4 * t: t for t in range(64)}
    assert (blocks.values[6] == np.arange(64)).all()


def test_blocks_or_clusters_take_the_parts_of_a_queue_in_turn():
    """The first of 4 blocks asks twice, each time by the last lane of a warp."""
    take = [f"@P1 ATOMG.E.ADD.STRONG.GPU PT, R{to}, [R8.64], R5" for to in (6, 7)]
    code = "S2R R4, SR_LTMASK", "FLO.U32 R5, R4", "ISETP.EQ.AND P1, PT, R5, 0x1e, PT"
    for size in (1, 2):
        sizes = struct.pack("<6I", 64, 1, 1, 4, 1, 1)
        blocks = ran(*code, *take, constants=sizes, cluster=(size, 1, 1))
        assert blocks.values[[6, 7]][:, [30, 31]].tolist() == [[0, 0], [0, 4 // size]]
    assert assumed(blocks.code) == ["ATOMG.E.ADD.STRONG.GPU returns the next block's number"]


def test_a_load_waits_for_the_words_that_its_block_stores_there():
    """Other blocks are as far. The second warp loads what the first one stores, the second time."""
    store, load = "STG.E.STRONG.GPU [R4], R5", "LDG.E.STRONG.GPU R6, [R8]"
    at = "S2R R4, SR_TID.X", "IMAD R8, R4, 0x1000, RZ", "LOP3.LUT R4, R4, 0x1f, RZ, 0xc0, !PT"
    blocks = ran(*at, "IMAD R4, R4, 0x1000, RZ", load, store, "MOV R8, R4", load)
    first, stored, last = (x.events for x in blocks.issued if x.request is not None)
    events = {warp: event for warp, (event, _) in stored.items()}
    assert first == {0: (None, None), 1: (None, None)}
    assert events[0] == events[1] is not None
    assert last == {0: (None, events[0]), 1: (None, events[0])}


def test_a_barrier_may_begin_with_a_phase_complete():
    """A thread arrives there, and at the barrier of another block, for which it has words."""
    word = "MOV R6, 0x1ffffe", "MOV R7, 0xfffff800", "SYNCS.EXCH.64 URZ, [UR4], R6"
    test = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], RZ", "MOV R8, 0x1000000"
    come = "SYNCS.ARRIVE.TRANS64 RZ, [UR4], RZ", "SYNCS.ARRIVE.TRANS64 RZ, [R8], R6"
    leave = "S2R R4, SR_TID.X", "ISETP.NE.AND P1, PT, R4, RZ, PT", "@P1 EXIT"
    blocks = ran(*leave, *word, *test, *come)
    assert blocks.mbarriers == {(0, 0): Mbarrier(1, 1, phase=2)}


def test_predicates_are_packed_into_a_register_and_back():
    code = """S2R R4, SR_TID.X
    R2P PR, R4, 0x5
    ISETP.GT.AND P1, PT, R4, 0x1f, PT
    MOV R5, 0xff80
    P2R R6, PR, R5, 0x7
    FSEL R7, R4, RZ, !P2
    VOTEU.ANY UR8, UP0, P1
    UP2UR UR10, UPR, URZ, 0x1
    R2UR UR9, R4
    UIADD3.64 UR12, UR8, -0x1, URZ"""
    # P0 and P2 are bits 0 and 2 of the thread; UR9 that of the warp's first lane
    blocks = ran(*code.split("\n"))
    t = np.arange(64)
    expected = {6: 0xFF80 + (t & 1) + 2 * (t > 31) + (t & 4), 7: np.where(t & 4, 0, t)}
    expected |= {264: np.where(t > 31, WORD, 0), 265: t // 32 * 32, 266: t > 31}
    expected |= {268: WORD - (t > 31), 269: np.where(t > 31, 32, WORD)}
    for row, values in expected.items():
        assert (blocks.values[row] == values).all(), row


@pytest.mark.parametrize(
    ("instruction", "stride", "wavefronts"),
    [
        ("LDS R8, [R5]", 4, 1),
        ("LDS R8, [R5]", 128, 32),
        ("LDS.128 R8, [R5]", 16, 4),
        ("LDS.128 R8, [R5]", 32, 8),
        ("STS.128 [R5], R8", 144, 4),
        ("ATOMS.ADD RZ, [R5], R8", 8, 2),
        ("LDSM.16.M88.4 R8, [R5]", 128, 32),
        ("LDGSTS.E.BYPASS.128 [R5], [R6.64]", 16, 4),
    ],
)
def test_a_request_to_shared_memory_costs_its_wavefronts(instruction, stride, wavefronts):
    blocks = ran("S2R R4, SR_LANEID", f"IMAD R5, R4, {stride:#x}, RZ", instruction)
    assert blocks.issued[2].request[0].tolist() == [wavefronts] * 2


@pytest.mark.parametrize(
    ("instruction", "stride", "lines", "misses"),
    [
        ("LDG.E R8, [R6.64]", 4, 1, [4, 0]),  # the second warp finds the sectors of the first
        ("LDG.E.128.CONSTANT R8, [R6.64]", 16, 4, [16, 0]),
        ("STG.E [R6.64], R8", 4, 1, [4, 4]),
        ("STG.E.128 [R6.64], R8", 512, 32, [32, 32]),
        ("RED.E.ADD [R6.64], R8", 4, 1, [4, 4]),
        ("LDGSTS.E.BYPASS.128 [R5], [R6.64]", 16, 4, [16, 0]),
    ],
)
def test_a_request_to_global_memory_costs_its_lines_and_sectors(instruction, stride, lines, misses):
    blocks = ran("S2R R4, SR_LANEID", f"IMAD.WIDE R6, R4, {stride:#x}, RZ", instruction)
    inputs = [0, 0] if instruction.startswith(("ST", "RED")) else misses
    assert blocks.issued[2].request[1:].tolist() == [[lines] * 2, misses, inputs]
