"""Stalls: every cycle of every warp has one reason, and each reason is the right one."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from attention_kernels.inspection.sass import multiprocessor, stalls
from attention_kernels.inspection.sass.decode import Instruction
from attention_kernels.inspection.sass.gpus import gpus
from attention_kernels.inspection.sass.multiprocessor import Work
from attention_kernels.inspection.sass.stalls import Watch

H200 = gpus()["h200"]
LOAD = Instruction("LDG.E", ("R2", "[R4.64]"), writes=0)
SHARED = Instruction("LDS", ("R2", "[R4]"), writes=0)
USE = Instruction("FADD", ("R3", "R2", "R2"), waits=(0,))
ADD = Instruction("FADD", ("R3", "R5", "R5"))
BARRIER = Instruction("BAR.SYNC", ("0x0",))
EXIT = Instruction("EXIT", ())


def watched(code, warps, blocks=1):
    """Return the cycles, and the warp-cycles by stall, of blocks of the given warps."""
    count = sum(map(len, warps))
    parts = [[len(warp) * i // 8 for warp in warps] for i in range(8)]
    works = [Work(warps, parts, Counter(issue=count))] * blocks
    watch = Watch()
    cycles, issued = multiprocessor.cycles_of(H200, code, works, 500.0, watch=watch)
    assert (cycles, issued) == multiprocessor.cycles_of(H200, code, works, 500.0)
    return cycles, watch.cycles


def in_order(code, **requests):
    """Return a warp that executes the code once; requests: its wavefronts or misses."""
    lines, misses = requests.get("lines", 0), requests.get("misses", 0)
    return [(at, requests.get("wavefronts", 0), lines, misses) for at in range(len(code))]


def by_reason(found):
    total = Counter()
    for stall, cycles in found.items():
        total[stall.reason] += cycles
    return total


def test_every_cycle_of_every_warp_is_accounted_for():
    code = [LOAD, SHARED, USE, ADD, BARRIER, Instruction("MUFU.EX2", ("R1", "R1"), writes=1)]
    code += [Instruction("BRA", ("0x0",), stall=5), dataclasses.replace(ADD, waits=(1,)), EXIT]
    chance = random.Random(1)
    warps = [
        [
            (at, chance.choice([1, 4]), chance.choice([0, 8]), chance.choice([0, 16]))
            for _ in range(20)
            for at in range(8)
        ]
        + [(8, 0, 0, 0)]
        for _ in range(9)
    ]
    cycles, found = watched(code, warps, blocks=3)
    assert sum(found.values()) == pytest.approx(3 * 9 * cycles)
    assert min(found.values()) >= 0
    issued = sum(map(len, warps)) * 3
    assert by_reason(found)[stalls.SELECTED] == pytest.approx(issued)


def test_a_load_from_memory_is_a_long_scoreboard_and_one_from_shared_memory_a_short_one():
    code = [LOAD, SHARED, dataclasses.replace(USE, waits=(0,)), EXIT]
    code[1] = dataclasses.replace(SHARED, writes=1)
    _, found = watched(code, [in_order(code, misses=4)])
    assert found[stalls.Stall(2, stalls.LONG, 0)] > 490
    code[2] = dataclasses.replace(USE, waits=(1,))
    _, found = watched(code, [in_order(code, wavefronts=1)])
    assert found[stalls.Stall(2, stalls.SHORT, 1)] == pytest.approx(H200.shared_latency - 1)


def test_waiting_for_other_warps_belongs_to_what_comes_after_the_barrier():
    code = [*[ADD] * 100, BARRIER, ADD, EXIT]
    slow, fast = in_order(code), in_order(code)[99:]
    _, found = watched(code, [slow, fast])
    assert found[stalls.Stall(101, stalls.BARRIER, 100)] > 90


def test_a_fixed_latency_is_a_wait_and_after_a_branch_it_resolves():
    code = [dataclasses.replace(ADD, stall=6), Instruction("BRA", ("0x0",), stall=8), ADD, EXIT]
    _, found = watched(code, [in_order(code)])
    assert found[stalls.Stall(1, stalls.WAIT, 1)] == 5
    assert found[stalls.Stall(2, stalls.BRANCH, 2)] == 7


@pytest.mark.parametrize(
    ("one", "requests", "warps", "reason"),
    [
        (Instruction("MUFU.EX2", ("R1", "R1")), {}, 16, stalls.MIO),
        (Instruction("IADD3", ("R1", "R1")), {}, 16, stalls.MATH),
        (Instruction("LDS", ("R1", "[R1]")), {"wavefronts": 32}, 16, stalls.MIO),
        (Instruction("LDG", ("R1", "[R1]")), {"lines": 32}, 16, stalls.LG),
        (Instruction("FADD", ("R1", "R2"), registers=(4, 0)), {}, 4, stalls.DISPATCH),
        (Instruction("FADD", ("R1", "R2"), registers=(4, 0)), {}, 16, stalls.NOT_SELECTED),
        (ADD, {}, 16, stalls.NOT_SELECTED),
    ],
)
def test_a_warp_that_could_issue_is_held_back_by_what_is_busy(one, requests, warps, reason):
    """Registers hold back one warp of each scheduler, the one that would be selected."""
    code = [*[one] * 50, EXIT]
    _, found = watched(code, [in_order(code, **requests)] * warps)
    total = by_reason(found)
    del total[stalls.EXITED]
    assert max(total, key=total.__getitem__) == reason, total


def test_asynchronous_copies_are_awaited_behind_the_instruction_that_says_so():
    code = [Instruction("LDGSTS.E", ("[R1]", "[R2.64]")), Instruction("DEPBAR.LE", ()), ADD, EXIT]
    _, found = watched(code, [in_order(code, misses=4)])
    assert found[stalls.Stall(2, stalls.LONG, 0)] > 490
