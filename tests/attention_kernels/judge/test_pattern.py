"""What failed cases have in common is told, unless it may be chance."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.pattern import pattern


def drawn(count: int) -> list[Case | DecodeCase]:
    draw = random.Random(0)
    return [
        Case(
            draw.choice((1, 31, 32, 33, 64, 100, 128, 129, 256, 300)),
            draw.choice((32, 64, 128)),
            batch=draw.choice((1, 1, 2, 5)),
            num_heads=draw.choice((1, 2, 12)),
            is_causal=draw.random() < 0.5,
            layout=draw.choice(("fused", "contiguous", "gaps")),
        )
        for _ in range(count)
    ] + [DecodeCase(draw.choice((32, 64, 128))) for _ in range(count // 4)]


@pytest.mark.parametrize(
    ("is_wrong", "words"),
    [
        (lambda c: "causal" in str(c) and "decode" not in str(c), "causal; "),
        (lambda c: c.batch >= 2 and isinstance(c, Case), "batch > 1"),
        (lambda c: c.seqlen > 128, "seqlen > 128; "),
        (lambda c: c.seqlen % 32, "seqlen not a multiple of 32; "),
        (lambda c: c.head_dim == 128, "head_dim 128; "),
        (lambda c: c.layout in ("fused", "gaps"), "not contiguous layout, "),
        (lambda c: isinstance(c, DecodeCase), "decode; "),
        (lambda c: isinstance(c, Case) and c.is_causal and c.seqlen == 300, "seqlen 300, causal; "),
    ],
)
def test_what_failed_cases_have_in_common_is_told(
    is_wrong: Callable[[Case | DecodeCase], bool], words: str
):
    tried = [(case, not is_wrong(case)) for case in drawn(200)]
    failed = [passed for _, passed in tried].count(False)
    found = pattern(tried)
    assert found.startswith(f"all {failed} failed cases: ")
    assert words in found
    assert found.endswith(f"; {len(tried) - failed} other cases passed")


def test_cases_like_the_failed_ones_that_passed_are_counted():
    tried = [(Case(n, 64), n % 2 > 0 or n == 10) for n in range(1, 61)]
    words = "seqlen a multiple of 2"
    assert (
        pattern(tried) == f"all 29 failed cases: {words}; 30 other cases passed, and 1 like these"
    )


def test_chance_is_not_a_pattern():
    draw = random.Random(1)
    cases = drawn(200)
    assert pattern([(case, draw.random() < 0.9) for case in cases]) == ""
    assert pattern([(case, case is not cases[7]) for case in cases]) == ""
    assert pattern([(case, True) for case in cases]) == ""
    assert pattern([]) == ""
    assert pattern([(case, False) for case in cases[:3]]) == "none of the 3 cases that ran passed"
    assert pattern([(Case(5, 64, dtype=torch.float16), False)]) == ""
