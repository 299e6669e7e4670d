"""Cheats that are version files, in C++ and in CUDA: no judge may pass one or time it as right.

Every row is v01_honest.cu with a few places changed: code before launch(), the body of launch(), or
replaced text. A row says what must catch it, a regular expression, and which of two judges is
asked: verify(), or the clock. The clock's rows are right when nobody times them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

# It sums in double, so that no verdict depends on rounding.
HONEST = Path(__file__).with_name("v01_honest.cu").read_text("utf-8")


@dataclasses.dataclass(frozen=True)
class Cheat:
    name: str
    caught: str
    """A regular expression found in the first failure, or in the clock's objection."""
    by: str = "verify"
    """"verify" or "clock"."""
    on: str = "cuda"
    """Where it is tried: "cpu", "cuda" or "both"."""
    code: str = ""
    """What stands before launch()."""
    launch: str = "  return honest(params, stream);"
    """The body of launch()."""
    changes: dict[str, str] = dataclasses.field(default_factory=dict)
    """What else is replaced."""
    timeout_s: float = 60.0
    """The limit of a request."""

    def source(self) -> str:
        launch = "cudaError_t launch(const Params& params, cudaStream_t stream) { "
        body = f"{self.code.strip()}\n\n{launch}\n{self.launch.strip(chr(10))}\n}}"
        text = HONEST
        changes = {f"{launch}return honest(params, stream); }}": body} | self.changes
        for before, after in changes.items():
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        return text


ERROR = r"error \d|not finite"  # over the budget
