"""What failed cases have in common is told, unless it may be chance."""

from __future__ import annotations

import random

import pytest

from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.pattern import pattern

draw = random.Random(0)
CASES = [
    Case(
        draw.choice((1, 31, 32, 33, 64, 100, 128, 129, 256, 300)),
        draw.choice((32, 64, 128)),
        batch=draw.choice((1, 1, 2, 5)),
        num_heads=draw.choice((1, 2, 12)),
        is_causal=draw.random() < 0.5,
        layout=draw.choice(("fused", "contiguous", "gaps")),
    )
    for _ in range(200)
] + [DecodeCase(draw.choice((32, 64, 128))) for _ in range(50)]


@pytest.mark.parametrize(
    ("is_wrong", "words"),
    [
        (lambda c: c.op == "attention" and c.is_causal, "causal; "),
        (lambda c: c.batch >= 2 and c.op == "attention", "batch > 1"),
        (lambda c: c.seqlen > 128, "seqlen > 128; "),
        (lambda c: c.seqlen % 32, "seqlen not a multiple of 32; "),
        (lambda c: c.head_dim == 128, "head_dim 128; "),
        (lambda c: c.layout in ("fused", "gaps"), "not contiguous layout, "),
        (lambda c: c.op == "decode", "decode; "),
        (lambda c: c.seqlen == 300 and c.is_causal, "seqlen 300, causal; "),
    ],
)
def test_what_failed_cases_have_in_common_is_told(is_wrong, words):
    tried = [(case, not is_wrong(case)) for case in CASES]
    failed = [passed for _, passed in tried].count(False)
    found = pattern(tried)
    assert found.startswith(f"all {failed} failed cases: ")
    assert words in found
    assert found.endswith(f"; {len(tried) - failed} other cases passed")


def test_cases_like_the_failed_ones_that_passed_are_counted():
    tried = [(Case(n, 64), n % 2 > 0 or n == 10) for n in range(1, 61)]
    words = "all 29 failed cases: seqlen a multiple of 2; 30 other cases passed, and 1 like these"
    assert pattern(tried) == words


def test_chance_is_not_a_pattern():
    draw = random.Random(1)
    assert pattern([(case, draw.random() < 0.9) for case in CASES]) == ""
    assert pattern([(case, case is not CASES[7]) for case in CASES]) == ""
    assert pattern([(case, True) for case in CASES]) == ""
    assert pattern([(case, False) for case in CASES[:3]]) == "none of the 3 cases that ran passed"
