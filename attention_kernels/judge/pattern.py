"""What the failed cases of a suite have in common."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from attention_kernels.contract import dtype_name
from attention_kernels.judge.inputs import Case, DecodeCase

# The probability that failed cases drawn by lot would have as much in common, up to which it is
# told. About a hundred properties are looked at.
CHANCE = 1e-4
MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
SIZES = ("seqlen", "batch", "num_heads", "head_dim", "group")
_Facts: TypeAlias = Mapping[str, Any]
_Property: TypeAlias = tuple[str, str, Callable[[Any, Any], object], Any]
"""A property in words, the name of its fact, and the comparison of the fact with a value."""


def pattern(tried: Sequence[tuple[Case | DecodeCase, bool]]) -> str:
    """Describe the properties that all failed cases share and few others have.

    Returns "" if that may be chance. tried: the cases that ran, and whether each passed. Properties
    are added, the rarest first, as long as each rules out enough of the cases that passed.
    """
    failed = [_facts(case) for case, passed in tried if not passed]
    passed = [_facts(case) for case, passed in tried if passed]
    count, alike = len(failed), passed
    words: list[str] = []
    if count > 1 and not passed:
        return f"none of the {count} cases that ran passed"
    while alike:
        found = (
            (text, [facts for facts in alike if has(facts[name], value)])
            for text, name, has, value in _properties(failed, alike)
        )
        text, left = min(found, key=lambda pair: len(pair[1]), default=("", alike))
        ways = math.comb(count + len(alike), count)
        if math.comb(count + len(left), count) > CHANCE * ways:
            break
        words.append(text)
        alike = left
    if not words:
        return ""
    others = f"{len(passed) - len(alike)} other cases passed"
    also = f", and {len(alike)} like these" if alike else ""
    return f"all {count} failed cases: {', '.join(words)}; {others}{also}"


def _properties(failed: Sequence[_Facts], passed: Sequence[_Facts]) -> Iterator[_Property]:
    """Yield properties that all failed cases have; of those that say the same, the widest first."""
    for name in failed[0] if failed else ():
        values, others = ({facts[name] for facts in some} for some in (failed, passed))
        text = f"{name} " if name in (*SIZES, "softmax_scale") else ""
        if len(values) == 1:
            (value,) = values
            yield f"{text}{value}", name, operator.eq, value
        if name not in SIZES:
            yield from ((f"not {text}{x}", name, operator.ne, x) for x in sorted(others - values))
            continue
        if below := [x for x in others if x < min(values)]:
            yield f"{text}> {max(below)}", name, operator.gt, max(below)
        if above := [x for x in others if x > max(values)]:
            yield f"{text}< {min(above)}", name, operator.lt, min(above)
        for m in reversed(MULTIPLES):
            if all(x % m for x in values):
                yield f"{text}not a multiple of {m}", name, operator.mod, m
        for m in MULTIPLES:
            if not any(x % m for x in values):
                yield f"{text}a multiple of {m}", name, lambda x, m: x % m == 0, m


def _facts(case: Case | DecodeCase) -> _Facts:
    return {
        "mask": ("full", "causal")[case.is_causal] if isinstance(case, Case) else "decode",
        **{name: getattr(case, name) for name in SIZES},
        "dtype": dtype_name(case.dtype),
        "layout": f"{case.layout} layout",
        "kind": f"{case.kind} values",
        "context": f"context {case.context}",
        "scale": f"scale {case.scale}",
        "softmax_scale": "default" if case.softmax_scale is None else str(case.softmax_scale),
    }
