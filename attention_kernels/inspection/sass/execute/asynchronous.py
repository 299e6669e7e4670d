"""Execute what warps do at their own pace: mbarriers, copies by TMA, products of warpgroups.

Copies complete at once. A thread that tests a phase waits until the phase is complete, so each test
is executed only once. The arrivals, copies and products that complete an event are recorded;
time.py times them.
"""

from __future__ import annotations

import itertools
import math
import operator

import numpy as np

from attention_kernels.inspection.resources import WARP
from attention_kernels.inspection.sass import decode
from attention_kernels.inspection.sass.decode import MAP_BYTES, Instruction, SassError, consecutive
from attention_kernels.inspection.sass.execute.state import LOW, STORED, WARPGROUP, Blocks, Mbarrier

# Code addresses constant bank 0 like memory, to find tensor maps. Here that address is far from all
# tensors.
BANK_ADDRESS = 64 << 40
_OF_BLOCK = 0xFFFFFF  # an address in shared memory without the number of a block in its cluster


def is_numbered(one: Instruction) -> bool:
    """Return whether a barrier has a number of threads, and so need not be the whole block's."""
    return one.base == "BAR" and one.modifiers[0] in ("SYNC", "ARV") and len(one.operands) == 2


def hold(blocks: Blocks, one: Instruction) -> bool:
    """Make lanes wait that test a phase which is not complete; return whether any do."""
    found = False
    for warp, lane in _warps(blocks) if "PHASECHK" in one.modifiers else ():
        place = _place(blocks, one, lane)
        barrier = _at(blocks, one, place)
        parity = int(blocks.read(one.operands[-1])[lane]) >> 31
        if barrier.phase % 2 == parity:
            blocks.testing[_lanes(warp)] |= blocks.mask[_lanes(warp)]
            blocks.tested.add(place)
            found = True
    return found


def mbarrier(blocks: Blocks, one: Instruction) -> None:
    """Execute SYNCS: initialize an mbarrier, arrive at it or pass a test."""
    events = blocks.issued[-1].events
    is_test = "PHASECHK" in one.modifiers
    for warp, lane in _warps(blocks) if "CCTL" not in one.modifiers else ():
        place = _place(blocks, one, lane)
        if "EXCH" in one.modifiers:
            # The word counts arrivals up to 2^20, from bit 1 on; bit 63 is the phase's parity.
            word = int(blocks.read64(one.operands[-1])[lane])
            arrivals = (1 << 20) - (word >> 1 & LOW >> 1)
            # One that is used again gets new phases.
            last = blocks.mbarriers[place].phase | 1 if place in blocks.mbarriers else -3
            phase = last + 3 + (word >> 63 & 1)
            blocks.mbarriers[place] = Mbarrier(arrivals, arrivals, phase=phase)
            continue
        barrier = _at(blocks, one, place)
        if is_test:
            if barrier.phase:
                events[warp] = None, ("phase", *place, barrier.phase - 1)
            continue
        arriving = blocks.mask[_lanes(warp)]
        announced = int(blocks.read(one.operands[-1])[_lanes(warp)][arriving].sum())
        if announced and blocks.address(one.memory[0], wide=False)[lane] > _OF_BLOCK:
            continue  # words that go to another block, and are not followed
        events[warp] = ("phase", *place, barrier.phase), None
        barrier.left -= int(arriving.sum())
        barrier.bytes += announced
        _complete(blocks, place)
    if is_test:
        blocks.write(one.operands[0], True)


def copy_tile(blocks: Blocks, one: Instruction) -> None:
    """Execute copies between global and shared memory: a box of a tensor, or contiguous bytes.

    The first operand of a box is the shared memory's address, a load's mbarrier, and where the box
    begins; the second its tensor map.
    """
    wavefronts, _, misses, inputs = blocks.request
    is_load = one.base == "UTMALDG" or one.modifiers[0] == "S"
    registers = consecutive(one.operands[0].strip("[]"), 7)
    for warp, lane in _warps(blocks):
        if one.base == "UBLKCP":
            size = 16 * int(blocks.read(one.operands[2])[lane])
            other = one.operands[1 if is_load else 0].strip("[]")
            rows = [(int(blocks.read64(other)[lane]), size)]
        else:
            pointer = int(blocks.read64(one.operands[1].strip("[]"))[lane])
            dimensions = int(one.modifiers[0].rstrip("D"))
            first = [int(blocks.read(name)[lane]) for name in registers[1 + is_load :][:dimensions]]
            size, rows = _box(blocks, pointer, first)
        if "MULTICAST" in one.modifiers:  # to several blocks of the cluster, which send theirs here
            size *= int(blocks.read(one.operands[2])[lane] >> 16).bit_count()
        wavefronts[warp] = -(-size // 128)
        for address, count in rows:
            sectors = range(address >> 5, address + count + 31 >> 5)
            blocks.seen[warp // blocks.warps] |= dict.fromkeys(sectors, len(blocks.issued))
            misses[warp] += len(sectors)
            inputs[warp] += len(sectors) * (is_load and address >> 40 not in STORED)
        if is_load:
            place = warp // blocks.warps, int(blocks.read(registers[1])[lane])
            barrier = _at(blocks, one, place)
            blocks.issued[-1].events[warp] = ("phase", *place, barrier.phase), None
            barrier.bytes -= size
            _complete(blocks, place)


def store_remote(blocks: Blocks, one: Instruction) -> None:
    """Execute STAS, which stores in a block of the cluster and counts at a barrier there.

    All blocks take themselves for the first; what they store in others is not followed.
    """
    register = consecutive(one.operands[0].lstrip("[").partition(".")[0], 2)[1]
    for warp, _ in _warps(blocks):
        for at in blocks.read(register)[_lanes(warp)][blocks.mask[_lanes(warp)]].tolist():
            place = warp // blocks.warps, at
            if place in blocks.mbarriers:
                barrier = blocks.mbarriers[place]
                blocks.issued[-1].events[warp] = ("phase", *place, barrier.phase), None
                barrier.bytes -= one.size
                _complete(blocks, place)


def _box(blocks: Blocks, pointer: int, first: list[int]) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes of a box, and the address and length of its rows within bounds."""
    begin = pointer - BANK_ADDRESS
    raw = blocks.constants[begin : begin + MAP_BYTES] if begin >= 0 else b""
    if pointer in blocks.stored:
        words = (blocks.stored.get(pointer + at, 0) for at in range(0, MAP_BYTES, 4))
        raw = b"".join(word.to_bytes(4, "little") for word in words)
    if len(raw) < MAP_BYTES // 2:  # cuDNN's have 64 bytes
        raise SassError("a tensor map is neither a parameter of the kernel nor made by it")
    tensor, element, sizes, strides, box = decode.read_map(raw.ljust(MAP_BYTES, b"\0"))
    at = [(x ^ 1 << 31) - (1 << 31) for x in first] + [0] * (5 - len(first))
    begin, end = (min(max(x, 0), sizes[0]) for x in (at[0], at[0] + box[0]))
    inside = (range(max(at[d], 0), min(at[d] + box[d], sizes[d])) for d in range(4, 0, -1))
    rows = [
        tensor + begin * element + sum(map(operator.mul, place, strides[:0:-1]))
        for place in itertools.product(*inside)
    ]
    total = math.prod(box) * element
    return total, [(row, (end - begin) * element) for row in rows if end > begin]


def barrier(blocks: Blocks, one: Instruction) -> None:
    """Execute BAR and UCGABAR_WAIT: wait for the block, or for as many threads as it has."""
    if not is_numbered(one):
        blocks.waiting |= blocks.mask
        return
    for warp, lane in _warps(blocks):
        number, threads = (int(blocks.read(x)[lane]) for x in one.operands[:2])
        place, waits = (warp // blocks.warps, number), "SYNC" in one.modifiers
        event = "numbered", *place, blocks.generations[place]
        blocks.issued[-1].events[warp] = event, event if waits else None
        arrived = blocks.arrived[place]
        arrived.append(warp if waits else -1)
        if waits:
            blocks.parked[_lanes(warp)] |= blocks.mask[_lanes(warp)]
        if len(arrived) * WARP >= threads:
            for other in arrived:
                if other >= 0:
                    blocks.parked[_lanes(other)] = False
            arrived.clear()
            blocks.generations[place] += 1


def product(blocks: Blocks, one: Instruction) -> int:
    """Execute wgmma, a product that four warps issue; the last of a group has a scoreboard."""
    for warp, _ in _warps(blocks):
        block, of_block = divmod(warp, blocks.warps)
        event = "product", block, of_block // WARPGROUP, blocks.products[warp]
        blocks.issued[-1].events[warp] = event, None
        blocks.products[warp] += 1
        if "gsb0" in one.operands:
            blocks.groups[warp].append(event)
    return 0


def await_products(blocks: Blocks, one: Instruction) -> None:
    """Execute WARPGROUP.DEPBAR: wait until at most N groups of products are left, N its operand."""
    for warp, _ in _warps(blocks) if "DEPBAR" in one.modifiers else ():
        if others := blocks.groups[warp][: -int(one.operands[1], 16) or None]:
            blocks.issued[-1].events[warp] = None, others[-1]


def open_barriers(blocks: Blocks) -> None:
    """Let the threads of blocks go on in which none waits for anything but the block's barrier."""
    ready = (blocks.done | blocks.waiting).reshape(-1, blocks.warps * WARP).all(1)
    opened = blocks.waiting & np.repeat(ready, blocks.warps * WARP)
    blocks.waiting &= ~opened
    if opened.any():
        return
    if not blocks.has_cluster or not blocks.tested:
        raise SassError("the threads of a block wait for each other")
    blocks.waits = True
    tested = {place: blocks.mbarriers[place] for place in blocks.tested}
    begun = {place: one for place, one in tested.items() if one.left < one.arrivals}
    for place, one in (begun or tested).items():  # of other blocks of the cluster
        one.left = one.bytes = 0
        _complete(blocks, place)


def end(blocks: Blocks, _: Instruction) -> None:
    """Execute EXIT."""
    blocks.done |= blocks.mask


def move_registers(blocks: Blocks, one: Instruction) -> None:
    """Execute USETMAXREG: registers that warps give up are there for those that ask for more."""
    for warp, _ in _warps(blocks):
        event = "registers", warp // blocks.warps, blocks.moves[warp], 0
        blocks.moves[warp] += 1
        found = (event, None) if "DEALLOC" in one.modifiers else (None, event)
        blocks.issued[-1].events[warp] = found
    if "TRY_ALLOC" in one.modifiers:
        blocks.write(one.operands[0], True)


def elect(blocks: Blocks, one: Instruction) -> None:
    """Execute ELECT: the predicate holds in the first active lane of each warp."""
    chosen = np.zeros_like(blocks.mask)
    chosen[[lane for _, lane in _warps(blocks)]] = True
    blocks.write(one.operands[0], chosen)


def _lanes(warp: int) -> slice:
    return slice(warp * WARP, (warp + 1) * WARP)


def _warps(blocks: Blocks) -> list[tuple[int, int]]:
    """Return the warps that have active lanes, each with the first of these."""
    active = blocks.mask.reshape(-1, WARP)
    warps = np.flatnonzero(active.any(1))
    lanes = warps * WARP + active[warps].argmax(1)
    return [*zip(warps.tolist(), lanes.tolist(), strict=True)]


def _place(blocks: Blocks, one: Instruction, lane: int) -> tuple[int, int]:
    """Return the block of a lane, and the address of its mbarrier."""
    address = int(blocks.address(one.memory[0], wide=False)[lane]) & _OF_BLOCK
    return lane // (blocks.warps * WARP), address


def _at(blocks: Blocks, one: Instruction, place: tuple[int, int]) -> Mbarrier:
    if place not in blocks.mbarriers:
        raise SassError(f"{one.name} uses an mbarrier that nobody initialized")
    return blocks.mbarriers[place]


def _complete(blocks: Blocks, place: tuple[int, int]) -> None:
    """Start the next phase if the current one is complete."""
    barrier = blocks.mbarriers[place]
    if barrier.left == 0 and barrier.bytes == 0:
        barrier.left = barrier.arrivals
        barrier.phase += 1
        blocks.tested.discard(place)
        lanes = slice(place[0] * blocks.warps * WARP, (place[0] + 1) * blocks.warps * WARP)
        blocks.testing[lanes] = False
