"""Run the command line in this process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpt2_infer.cli import main

DEMO = ["--model", "demo", "--device", "cpu", "--max-new-tokens", "8"]


def unless(given: Sequence[str], options: Sequence[str] = DEMO) -> list[str]:
    """Return the options, each with one value, that are not given: none may be given twice."""
    pairs = zip(options[::2], options[1::2], strict=True)
    return [word for name, value in pairs if name not in given for word in (name, value)]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the status, standard output and standard error."""
    status = main(list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err
