"""Predictions: machine code is read correctly, and each part of the model works."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from attention_kernels import UnsupportedError, ladder, list_backends
from attention_kernels.inspection.launches import Launch
from attention_kernels.inspection.sass import decode, execute, multiprocessor, predict, timing
from attention_kernels.inspection.sass.gpus import GpuModel, gpus
from attention_kernels.inspection.sass.grid import Line, axes_of, line_of
from attention_kernels.inspection.sass.predict import Case
from attention_kernels.inspection.sass.program import Program, find_disassembler
from attention_kernels.inspection.sass.state import Blocks
from attention_kernels.ladder import compilers
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import parse_header

ROOT = Path(__file__).parents[4]
H200 = gpus()["h200"]
CASE = Case(1, 128, 12, 64, is_causal=True)


def missing_program():
    """Return why nothing can be predicted here, or an empty string."""
    try:
        find_disassembler()
    except BuildError as error:
        return str(error)
    return compilers.missing_compiler("cuda") or ""


needs_cuda_programs = pytest.mark.skipif(bool(missing_program()), reason=missing_program())

# A loop of three iterations over a load of a column of shared memory, for threads of two warps;
# those of the second, and odd ones, leave.
CODE = """
		Function : kernel
        /*0000*/                   S2R R0, SR_TID.X ;                     /* 0x0000000000007919 */
                                                                          /* 0x000e220000002100 */
        /*0010*/                   ISETP.GT.U32.AND P0, PT, R0, 0x1f, PT ; /* 0x0000000000007919 */
                                                                          /* 0x000fe40000002100 */
        /*0020*/               @P0 EXIT ;                                 /* 0x000000000000794d */
                                                                          /* 0x000fea0003800000 */
        /*0030*/                   IMAD.SHL.U32 R1, R0, 0x80, RZ ;        /* 0x0000000000007919 */
                                                                          /* 0x000fe20000002100 */
        /*0040*/                   MOV R2, RZ ;                           /* 0x0000000000007919 */
                                                                          /* 0x000fe20000002100 */
        /*0050*/                   LDS R4, [R1+UR4+0x10] ;                /* 0x0000000000007984 */
                                                                          /* 0x000e240000000800 */
        /*0060*/                   IADD3 R2, R2, 0x1, RZ ;                /* 0x0000000000007810 */
                                                                          /* 0x000fe20000000000 */
        /*0070*/                   ISETP.GE.AND P1, PT, R2, c[0x0][0x18], PT ; /* 0x000000000000780c */
                                                                          /* 0x001fe20000000000 */
        /*0080*/              @!P1 BRA 0x50 ;                             /* 0x0000000000007947 */
                                                                          /* 0x000fea0000000000 */
        /*0090*/                   EXIT ;                                 /* 0x000000000000794d */
                                                                          /* 0x000fea0003800000 */
"""  # fmt: skip  # noqa: E501


def block(code=CODE):
    constants = b"\0" * 0x18 + (3).to_bytes(4, "little")
    found = Blocks(decode.parse(code)["kernel"], constants, (64, 1, 1), [(0, 0, 0)])
    execute.run(found, 1000)
    return found


def launch_of(grid):
    return Launch(64, "kernel", "kernel", grid, (64, 1, 1), 0, b"")


def test_machine_code_is_run_as_the_hardware_would():
    done = block()
    times = Counter(dict.fromkeys(range(len(done.code)), 0))
    for issue in done.issued:
        times[issue.index] += int(issue.warps.sum())
    # Both warps run until the second ends; then the first runs three iterations.
    assert [times[index] for index in range(10)] == [2, 2, 2, 1, 1, 3, 3, 3, 3, 1]
    loads = [issue.wavefronts for issue in done.issued if issue.wavefronts is not None]
    assert [found.tolist() for found in loads] == [[32, 0]] * 3  # a 32-way conflict


def test_a_call_that_leaves_a_loop_is_followed():
    """nvcc compiles some loops this way for sm_80."""
    head, end = CODE.split("        /*0090*/")
    loop = head.replace("@!P1 BRA 0x50", "@P1 CALL.REL.NOINC 0xa0")
    back = "        /*0090*/" + end.replace("EXIT ;", "BRA 0x50 ;")
    done = block(f"{loop}{back}        /*00a0*/{end}")
    assert [issue.index for issue in done.issued].count(5) == 3


def test_the_compilers_stalls_and_scoreboards_are_read():
    load, use = (block().code[index] for index in (5, 7))
    assert (load.name, load.stall, load.writes, load.waits) == ("LDS", 2, 0, ())
    assert use.waits == (0,)


def test_a_loop_takes_its_trip_count_from_memory():
    """As decode kernels do, whose rows have lengths of their own."""
    load = CODE.replace("MOV R2, RZ", "LDG.E R2, [UR6]")
    for words, times in (({}, 3), ({0: 2}, 1)):
        constants = b"\0" * 0x18 + (3).to_bytes(4, "little")
        code = decode.parse(load)["kernel"]
        done = Blocks(code, constants, (64, 1, 1), [(0, 0, 0)], words)
        execute.run(done, 1000)
        assert [issue.index for issue in done.issued].count(5) == times


def test_an_unknown_instruction_writes_zero_and_is_named():
    done = block(CODE.replace("MOV R2, RZ", "TELEPORT.FAR R2, R0"))
    assert execute.assumed(done.code) == ["TELEPORT.FAR"]
    assert execute.assumed(block().code) == []
    assert [issue.index for issue in done.issued].count(5) == 3  # the loop starts at 0


def test_an_unknown_branch_is_refused():
    with pytest.raises(decode.SassError, match="cannot follow the branch BRX"):
        block(CODE.replace("MOV R2, RZ", "BRX R2 -0x10"))


def arithmetic(count, warps):
    one = decode.Instruction("FFMA", ("R0", "R1", "R2", "R3"))
    streams = [[(0, 0, 0, 0)] * count for _ in range(warps)]
    return [one], multiprocessor.Work(streams, [], Counter(issue=count * warps))


def test_arithmetic_takes_the_cycles_that_its_lanes_need():
    code, work = arithmetic(1000, 8)
    cycles, issued = multiprocessor.cycles_of(H200, code, [work], 0.0)
    assert issued == [8000]
    assert cycles == pytest.approx(2000, rel=0.01)
    half = dataclasses.replace(H200, fp32_lanes=64)
    assert multiprocessor.cycles_of(half, code, [work], 0.0)[0] == pytest.approx(4000, rel=0.01)


@pytest.mark.parametrize(("warps", "each"), [(1, 8.2), (4, 16.3), (16, 64.4)])
def test_a_warp_alone_takes_two_cycles_per_wavefront(warps, each):
    """The probe's loads with a 4-way conflict; it has 8.2 cycles per load and warp alone."""
    one = decode.Instruction("LDS", ("R0", "[R1]"))
    work = multiprocessor.Work([[(0, 4, 0, 0)] * 500] * warps, [], Counter(issue=500 * warps))
    cycles, _ = multiprocessor.cycles_of(H200, [one], [work], 0.0)
    assert cycles / 500 == pytest.approx(each, rel=0.03)


@pytest.mark.parametrize(("size", "each"), [(2048, 1.0), (2080, 1.094), (4096, 2.22)])
def test_a_loop_of_more_than_32_kb_waits_for_its_instructions(size, each):
    """The study `probe` measured 1.04 cycles per instruction within 32 KB, 1.14 and 2.22 beyond."""
    code = [decode.Instruction("FFMA", ("R0", "R1", "R2", "R3"))] * size

    def cycles(passes):
        stream = [(at, 0, 0, 0) for _ in range(passes) for at in range(size)]
        work = multiprocessor.Work([stream], [], Counter(issue=len(stream)))
        return multiprocessor.cycles_of(H200, code, [work], 0.0)[0]

    assert (cycles(4) - cycles(2)) / (2 * size) == pytest.approx(each, rel=0.02)


@pytest.mark.parametrize(
    ("busy", "ghz"), [(0, 1.98), (0.15, 1.92), (0.3, 1.86), (0.69, 1.83), (1, 1.48)]
)
def test_products_of_warpgroups_slow_the_clock_at_the_power_limit(busy, ghz):
    assert H200.clock_at(busy) == pytest.approx(ghz)


def test_registers_of_one_bank_are_read_one_after_the_other():
    code, work = arithmetic(1000, 8)
    even = [dataclasses.replace(code[0], registers=(3, 0))]
    mixed = [dataclasses.replace(code[0], registers=(1, 1))]
    assert multiprocessor.cycles_of(H200, even, [work], 0.0)[0] == pytest.approx(6000, rel=0.01)
    assert multiprocessor.cycles_of(H200, mixed, [work], 0.0)[0] == pytest.approx(2000, rel=0.01)


def test_a_bank_conflict_costs_its_wavefronts():
    code, work = arithmetic(1000, 4)
    load = [dataclasses.replace(code[0], name="LDS")]
    single, double = (
        multiprocessor.Work([[(0, n, 0, 0)] * 1000 for _ in range(4)], [], work.counts)
        for n in (1, 2)
    )
    once, twice = (multiprocessor.cycles_of(H200, load, [one], 0.0)[0] for one in (single, double))
    assert twice == pytest.approx(2 * once, rel=0.02)


@pytest.mark.parametrize(("blocks", "waves"), [(132, 1), (133, 2), (264, 2), (265, 3)])
def test_a_last_wave_takes_as_long_as_the_others(blocks, waves):
    _, work = arithmetic(10, 4)
    line = Line(1, {0: work.counts}, [work], alike=blocks)
    end, equal = timing._finish(line, H200, 2.0, [2.0], 0.0)
    assert end == pytest.approx(waves * 40 * 2.0)
    assert equal == pytest.approx(blocks / 132 * 40 * 2.0)


def test_blocks_that_are_alike_in_pairs_are_counted_exactly():
    """Pairs of blocks are alike with 32 queries per block and 64 keys per tile."""
    issued = [100 * (1 + at // 2) for at in range(32)]
    samples = {at: Counter(issue=issued[at]) for at in (0, 1, 6, 7)}
    line = Line(32, samples, [])
    assert [line.value(at, "issue") for at in range(32)] == issued


@pytest.mark.parametrize(("address", "inputs"), [("0x100", 1.0), ("0x500", 0.0)])
def test_blocks_along_every_axis_are_counted(address, inputs):
    """Blocks with z > 0 end at once; the others load from q or from scratch three times."""
    code = CODE.replace("SR_TID.X", "SR_CTAID.Z").replace("0x1f", "0x0")
    code = code.replace("MOV R2, RZ", f"MOV R3, {address}")
    code = code.replace("LDS R4, [R1+UR4+0x10]", "LDG.E R4, [R2.64]")
    code = code.replace("c[0x0][0x18]", "c[0x0][0x10]")  # gridDim.y
    version = ladder.versions()["CUSTOM_CUDA_VERSION_1"]
    program = Program(version.path, "v01", H200, decode.parse(code), {}, heads_first=True)
    launch = launch_of((2, 3, 4))
    line = line_of(program, launch)
    warps = 2 * 3 * 2
    assert line.total("global") == 3 * warps
    assert line.total("issue") == (6 + 3 * 4) * warps + 3 * 3 * warps
    assert line.inputs == inputs


@pytest.mark.parametrize(
    ("axis", "grid", "axes"),
    [("X", (16, 3, 2), [0]), ("Y", (3, 16, 2), [1]), ("Z", (16, 3, 12), [2])],
)
def test_of_other_kernels_the_axes_along_which_blocks_differ_are_found(axis, grid, axes):
    """A block with index i along the axis runs max(i, 1) iterations."""
    code = CODE.replace("IMAD.SHL.U32 R1, R0, 0x80, RZ", f"S2R R5, SR_CTAID.{axis}")
    code = code.replace("LDS R4, [R1+UR4+0x10]", "LDG.E R4, [R2.64+0x100]")
    code = code.replace("c[0x0][0x18]", "R5")
    program = Program(ROOT, "any", H200, decode.parse(code), {})
    launch = launch_of(grid)
    assert axes_of(program, launch)[0] == axes
    line = line_of(program, launch)
    length = grid[axes[0]]
    loads = sum(max(i, 1) for i in range(length))
    assert line.total("global") == loads * grid[0] * grid[1] * grid[2] / length
    assert line.length == length
    assert line.alike * line.repeats * length == grid[0] * grid[1] * grid[2]
    assert line.alike == {"X": 1, "Y": 3, "Z": 48}[axis]


def test_few_blocks_with_work_are_found_among_many_without():
    """Blocks with z > 0 end at once; the first few blocks that are run are such."""
    code = CODE.replace("SR_TID.X", "SR_CTAID.Z").replace("0x1f", "0x0")
    code = code.replace("LDS R4, [R1+UR4+0x10]", "LDG.E R4, [R2.64+0x100]")
    code = code.replace("c[0x0][0x18]", "c[0x0][0x10]")  # gridDim.y
    program = Program(ROOT, "v01", H200, decode.parse(code), {}, heads_first=True)
    line = line_of(program, launch_of((1, 4, 70)))
    of_block = 2 * 4  # both warps load four times
    assert 4 * of_block <= line.total("global") <= 5 * of_block  # every second block is run
    assert line.works


def test_neighbours_that_are_alike_do_not_make_all_blocks_alike():
    """Pairs of blocks do the same work, as with 32 queries per block and 64 keys per tile."""
    code = CODE.replace("S2R R0, SR_TID.X", "S2R R5, SR_CTAID.Y")
    code = code.replace("@P0 EXIT", "    SHF.R.U32.HI R5, RZ, 0x1, R5")
    code = code.replace("MOV R2, RZ", "MOV R2, 0xffffffff")
    code = code.replace("LDS R4, [R1+UR4+0x10]", "LDG.E R4, [R2.64+0x100]")
    code = code.replace("c[0x0][0x18]", "R5")
    program = Program(ROOT, "any", H200, decode.parse(code), {}, heads_first=True)
    line = line_of(program, launch_of((4, 32, 1)))
    assert line.total("global") == 2 * 4 * sum(i // 2 + 1 for i in range(32))


def test_every_number_of_a_gpu_has_its_source():
    text = (ROOT / "attention_kernels/inspection/sass/gpus.toml").read_text("utf-8")
    fields = {field.name for field in dataclasses.fields(GpuModel)}
    found = msgspec.toml.decode(text)
    assert {*found} == {"h200", "h100", "a100", "t4", "rtx4090"}
    for numbers in found.values():
        assert fields == {*numbers}
        for name in fields - {"name", "arch"}:
            value, source = numbers[name]
            assert all(value) if isinstance(value, list) else value > 0
            assert len(source) > 10


@needs_cuda_programs
@pytest.mark.slow
def test_wavefronts_are_the_profilers_and_the_parts_add_up():
    """Counts are of nvcc's code, which keeps some of the source's loads in registers."""
    list_backends()
    file = ROOT / "results" / "2026-11-22_h200_profile-fp32-128.json"
    rows = json.loads(file.read_text("utf-8"))["rows"]
    mine = (row for row in rows if row["contender"] == "CUSTOM_CUDA_VERSION_2")
    metrics = {row["metric"]: row["samples"][0] for row in mine}
    version = ladder.versions()["CUSTOM_CUDA_VERSION_2"]
    (found,) = predict.predict(version, H200, [CASE._replace(num_heads=1)])
    assert found.load_wavefronts == metrics["shared_load_wavefronts"]
    assert found.store_wavefronts == metrics["shared_store_wavefronts"]
    # From L2: Q once, and K and V once by each of three blocks of 48 rows.
    rows = 128 + 2 * (48 + 96 + 128)
    l2_bytes = found.needs_us["L2"] * H200.l2_bytes_per_cycle * H200.clock_ghz * 1e3
    assert l2_bytes == pytest.approx(rows * 64 * 4 + metrics["global_store_bytes"])
    parts = found.waiting_us + found.uneven_us + found.launch_us
    assert found.time_us == pytest.approx(parts + max(found.needs_us.values()))


@pytest.mark.slow
@needs_cuda_programs
def test_a_kernel_that_starts_early_is_predicted_as_well():
    """Block 0 of v17's second kernel joins nothing, so blocks along the first axis differ."""
    version = ladder.versions()["CUSTOM_CUDA_VERSION_17"]
    (found,) = predict.predict(version, H200, [CASE._replace(seqlen=192)])
    assert found.launches == 2


@pytest.mark.slow
@needs_cuda_programs
def test_a_hopper_version_needs_its_products_and_its_tiles():
    """The second block multiplies 192 queries, of which 64 exist and are copied."""
    list_backends()
    version = ladder.versions()["HOPPER_VERSION_5"]
    case = CASE._replace(seqlen=256, num_heads=2, is_causal=False)
    (found,) = predict.predict(version, H200, [case])
    products = 2 * 2 * (2 * 192 * 256 * 64) * 2  # heads, blocks, FLOP of a product, products
    rate = 4096 * 132 * H200.clock_ghz * 1e3
    assert found.needs_us["tensor cores"] * rate == pytest.approx(
        products, rel=0.01
    )  # the clock falls
    # Q once, K and V in each of two blocks, and O in stores of half sectors.
    l2_bytes = found.needs_us["L2"] * H200.l2_bytes_per_cycle * H200.clock_ghz * 1e3
    assert l2_bytes == pytest.approx(2 * 256 * 64 * 2 * (1 + 2 * 2 + 2), rel=0.01)


@pytest.mark.slow
@needs_cuda_programs
def test_a_decode_kernel_reads_the_whole_cache_of_every_row():
    list_backends()
    version = ladder.versions("decode")["DECODE_SPLIT_KV_VERSION_2"]
    (found,) = predict.predict(version, H200, [CASE._replace(batch=2, seqlen=512)])
    l2_bytes = found.needs_us["L2"] * H200.l2_bytes_per_cycle * H200.clock_ghz * 1e3
    cache, row = 2 * 2 * 512 * 12 * 64 * 4, 2 * 12 * 64 * 4
    assert cache + 2 * row <= l2_bytes <= 1.01 * cache + 2 * row
    assert found.needs_us["memory"] == pytest.approx((cache + 2 * row) / H200.memory_gb_s / 1e3)


def test_what_cannot_be_predicted_is_refused_with_every_reason():
    list_backends()
    version = dataclasses.replace(ladder.versions()["CUSTOM_CUDA_VERSION_1"], needs=(8, 0))
    with pytest.raises(UnsupportedError, match=r"head_dim 48.*sm_80.*T4 is sm_75"):
        predict.predict(version, gpus()["t4"], [CASE._replace(head_dim=48)])
    version = ladder.versions()["HOPPER_VERSION_2"]
    with pytest.raises(UnsupportedError, match=r"head_dim 32.*sm_90a, and A100 SXM is sm_80"):
        predict.predict(version, gpus()["a100"], [CASE._replace(head_dim=32)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seqlen": 0}, "seqlen 0 (1 or more)"),
        ({"seqlen": 10**12}, "seqlen 1000000000000 (1048560 or less)"),
        ({"num_heads": -1}, "num_heads -1 (1 or more)"),
        ({"batch": 10**11}, "batch * num_heads 1200000000000 (2147483647 or less)"),
    ],
)
def test_a_shape_that_no_launch_takes_is_refused(change, words):
    version = ladder.versions()["CUSTOM_CUDA_VERSION_1"]
    with pytest.raises(UnsupportedError, match=re.escape(words)):
        predict.predict(version, H200, [CASE._replace(**change), CASE])


def test_a_grid_with_too_many_blocks_is_refused():
    version = ladder.versions()["CUSTOM_CUDA_VERSION_1"]
    program = Program(version.path, "v01", H200, decode.parse(CODE), {})
    launch = launch_of((2**20, 2, 1))
    with pytest.raises(UnsupportedError, match="a grid of 2097152 blocks"):
        line_of(program, launch)


@pytest.mark.parametrize(
    ("shared", "lines", "shuffles", "bound"),
    [
        (9.0, 0.0, 0.0, "shared memory"),
        (6.0, 3.0, 1.0, "shared memory"),
        (0.0, 8.0, 1.0, "L1"),
        (0.0, 1.0, 8.0, "load-store unit"),
        (4.0, 4.0, 1.0, "load-store unit"),
        (1.0, 1.0, 1.0, "issue slots"),
    ],
)
def test_the_load_store_unit_is_named_after_its_work(shared, lines, shuffles, bound):
    total = shared + lines + shuffles
    needs = {"issue slots": 5.0, "load-store unit": total, "shared memory": shared, "L1": lines}
    parts = {"waiting_us": 1.0, "uneven_us": 1.0, "launch_us": 1.0}
    counts = dict.fromkeys(("launches", "instructions", "load_wavefronts", "store_wavefronts"), 1)
    assert timing.Prediction("v01", "G", 8, 9.0, needs, **parts, **counts).bound == bound


@needs_cuda_programs
@pytest.mark.slow
def test_a_version_without_shared_memory_needs_no_time_for_it():
    folder = ROOT / "examples" / "my_backend" / "src" / "my_backend"
    version = parse_header(folder / "v01_warp_per_row.cu")
    (found,) = predict.predict(version, H200, [CASE._replace(seqlen=64, head_dim=32)])
    assert found.needs_us["shared memory"] == 0
    assert found.needs_us["load-store unit"] > found.needs_us["L1"] > 0
    assert found.bound != "shared memory"


@needs_cuda_programs
@pytest.mark.slow
def test_a_version_that_launches_nothing_is_refused(tmp_path):
    text = ladder.versions()["CUSTOM_CUDA_VERSION_1"].path.read_text("utf-8")
    start = text.index("{", text.index("cudaError_t launch(")) + 1
    (tmp_path / "v01_idle.cu").write_text(f"{text[:start]}\n  return cudaSuccess;\n{text[start:]}")
    version = parse_header(tmp_path / "v01_idle.cu")
    with pytest.raises(UnsupportedError, match=r"launch\(\) launches no kernel"):
        predict.predict(version, H200, [CASE])
