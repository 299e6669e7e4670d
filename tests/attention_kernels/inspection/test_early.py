"""Chains of kernels that are launched early."""

from __future__ import annotations

import dataclasses

import pytest

from attention_kernels.inspection.early import Link, _share_of, chain_of
from attention_kernels.inspection.gpus import gpus

GPU = dataclasses.replace(
    gpus()["h200"],
    copy_latency=690,
    early_start_us=0.5,
    early_room_us=0.5,
    early_wait_us=0.7,
    graph_us=1.0,
)
LINK = Link(
    "k",
    is_early=True,
    allows_first=True,
    share=0.25,
    reading_us=0.0,
    asking_us=0.0,
    work_us=0.0,
    last_us=0.0,
)
FIRST = dataclasses.replace(LINK, is_early=False)


def period(**changes):
    """Return the microseconds that one more link takes in a long chain."""
    link = dataclasses.replace(LINK, **changes)
    return (chain_of(GPU, [FIRST] + [link] * 40).time_us - chain_of(GPU, [FIRST]).time_us) / 40


def test_a_link_takes_its_work_and_the_end_of_the_previous_one():
    assert chain_of(GPU, [FIRST]).time_us == pytest.approx(1.0)
    assert period() == pytest.approx(0.7, abs=0.01)
    assert period(work_us=2.0) == pytest.approx(2.7, abs=0.01)


def test_as_many_kernels_wait_for_memory_at_once_as_have_room():
    """The study probe-h100 measured 0.84 us with four, 6,000 cycles and a wait."""
    assert period(asking_us=3.0) == pytest.approx((0.5 + 3.0) / 4, abs=0.06)
    assert period(asking_us=3.0, share=0.5) == pytest.approx((0.5 + 3.0) / 2, abs=0.1)
    assert period(asking_us=3.0, share=1.0) == pytest.approx(0.5 + 3.0, abs=0.1)
    assert period(asking_us=3.0, last_us=1.0) == pytest.approx((0.5 + 4.0) / 4, abs=0.06)
    assert period(asking_us=1.0, work_us=2.0) == pytest.approx(2.7, abs=0.01)


def test_all_kernels_share_the_bandwidth_of_memory():
    assert period(reading_us=1.5) == pytest.approx(1.5, abs=0.05)
    assert period(reading_us=1.5, work_us=2.0) == pytest.approx(2.7, abs=0.01)


def test_work_takes_longer_while_memory_is_read():
    assert period(work_us=2.0, slowed_us=1.0) == pytest.approx(2.7, abs=0.01)
    # Half of its work is done when its weights have been read.
    assert _share_of([(0.0, 1.0), (2.0, 4.0)], 0.5, 2.0) == pytest.approx(0.5)
    assert period(reading_us=2.8, work_us=2.0, slowed_us=0.5) == pytest.approx(3.2, abs=0.1)


def test_a_kernel_that_allows_the_next_one_after_its_wait_delays_it():
    early, late = (period(asking_us=3.0, allows_first=first) for first in (True, False))
    assert late == pytest.approx((0.7 + 0.5 + 3.0) / 2, abs=0.05)
    assert late > 2 * early


def test_the_parts_add_up():
    found = chain_of(GPU, [FIRST, *[dataclasses.replace(LINK, asking_us=4.0, work_us=1.0)] * 9])
    assert found.work_us == pytest.approx(9.0)
    assert found.launch_us == pytest.approx(1.0 + 9 * 0.7)
    assert found.reading_us > 0
