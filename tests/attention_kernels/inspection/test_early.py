"""Chains of kernels that are launched early."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from attention_kernels.inspection.early import Link, _readers, chain_of
from attention_kernels.inspection.gpus import gpus

GPU = dataclasses.replace(
    gpus()["h200"],
    copy_latency=990,  # 0.5 us
    early_start_us=0.5,
    early_room_us=0.3,
    early_wait_us=0.7,
    graph_us=1.0,
)
LINK = Link(
    "k",
    is_early=True,
    allows_first=True,
    share=0.25,
    reading_us=0.0,
    delay_us=0.0,
    asking_us=0.0,
    work_us=0.0,
)
FIRST = dataclasses.replace(LINK, is_early=False)


def period(**changes):
    """Return the microseconds that one more link takes in a long chain."""
    link = dataclasses.replace(LINK, **changes)
    short, long = (chain_of(GPU, [FIRST] + [link] * count).time_us for count in (20, 60))
    return (long - short) / 40


def test_a_link_takes_its_work_and_the_end_of_the_previous_one():
    assert chain_of(GPU, [FIRST]).time_us == pytest.approx(1.0)
    assert period() == pytest.approx(0.7, abs=0.01)
    assert period(work_us=2.0) == pytest.approx(2.7, abs=0.01)


def test_as_many_kernels_wait_at_once_as_have_room():
    """The study probe-h100 measured 0.85 us with four, 6,000 cycles and a wait."""
    asks = {"reading_us": 1e-6, "asking_us": 3.0}  # of memory
    assert period(**asks) == pytest.approx((0.3 + 3.0) / 4, abs=0.06)
    assert period(**asks, share=0.5) == pytest.approx((0.3 + 3.0) / 2, abs=0.1)
    assert period(**asks, share=1.0) == pytest.approx(0.3 + 3.0, abs=0.1)
    assert period(reading_us=1e-6, asking_us=1.0, work_us=2.0) == pytest.approx(2.7, abs=0.01)


def test_all_kernels_share_the_bandwidth_of_memory():
    assert period(reading_us=1.5) == pytest.approx(1.5, abs=0.05)
    assert period(reading_us=1.5, work_us=2.0) == pytest.approx(2.7, abs=0.01)


def test_a_wait_ends_when_what_the_kernel_asked_for_has_arrived():
    """The study probe-h100 measured 1.93, 2.55 and 3.76 us with weights of 0.80, 1.59 and 3.19."""
    late = {"allows_first": False, "work_us": 1.0}
    # The next one starts 0.5 us after the wait, asks after 0.1, and waits for 2.0 and 0.5 more.
    assert period(reading_us=2.0, delay_us=0.1, **late) == pytest.approx(3.1 + 1.0 - 1.0, abs=0.01)
    assert period(reading_us=0.4, **late) == pytest.approx(1.7, abs=0.01)  # its work is longer
    # A ring works while the rest arrives: only its end waits for that.
    ring = chain_of(GPU, [FIRST, dataclasses.replace(LINK, reading_us=9.0, is_ring=True)])
    assert ring.time_us == pytest.approx(1.0 + 0.5 + 9.0 + 0.5)


def test_blocks_that_have_room_ask_before_the_others():
    """A kernel of 0.75 leaves room for half of the next one's blocks, of 0.5 in all."""
    large = dataclasses.replace(LINK, share=0.75, work_us=5.0)
    small = dataclasses.replace(LINK, share=0.5, reading_us=4.0, work_us=1.0)
    # The large one ends at 1.0 + 0.7 + 5.0; 0.3 us later the others ask for 2.0.
    found = chain_of(GPU, [FIRST, large, small])
    assert found.time_us == pytest.approx(6.7 + 0.3 + 2.0 + 0.5 + 1.0)
    # With room for all, it waits only for the end: its weights arrive at 1.5 + 0.5 + 4.0 + 0.5.
    found = chain_of(GPU, [FIRST, large, dataclasses.replace(small, share=0.25)])
    assert found.time_us == pytest.approx(6.7 + 0.7 + 1.0)


def test_requests_for_the_same_sector_are_counted():
    """Three blocks load sectors 1 and 2, two load 3; one stores 9; place 1 is left out."""
    there = 1 << 35
    seen = [{1, 2, 3, there}, {1, 2, 3, there}, {1, 2, 9, there}]
    assert _readers(SimpleNamespace(seen=seen), [1]) == pytest.approx((9 + 9 + 4) / (3 + 3 + 2))


def test_a_kernel_that_allows_the_next_one_after_its_wait_delays_it():
    asks = {"reading_us": 1e-6, "asking_us": 3.0}
    early, late = (period(**asks, allows_first=first) for first in (True, False))
    assert late == pytest.approx(0.5 + 3.0, abs=0.05)
    assert late > 2 * early


def test_the_parts_add_up():
    found = chain_of(GPU, [FIRST, *[dataclasses.replace(LINK, reading_us=4.0, work_us=1.0)] * 9])
    assert found.work_us == pytest.approx(9.0)
    assert found.launch_us == pytest.approx(1.0 + 9 * 0.7)
    assert found.reading_us > 0
