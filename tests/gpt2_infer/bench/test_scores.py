from __future__ import annotations

import pytest
import torch

from attention_kernels import get_backend
from gpt2_infer.bench.record import read
from gpt2_infer.bench.show import tables
from gpt2_infer.bench.study import PerplexityStudy, run
from gpt2_infer.perplexity import HELD_OUT, compare, read_text
from tests.gpt2_infer.bench.common import add


def test_every_backend_is_compared_with_the_baseline(demo, tmp_path, clean_registry):
    add("NOT_FINITE", lambda q, k, v, **_: torch.full_like(q, torch.nan))
    names = ["PYTORCH_SDPA_MATH", "NOT_FINITE"]
    study = PerplexityStudy(backends=names, device="cpu", max_tokens=40, window=16)
    out = tmp_path / "r.json"
    file = run(study, "p", out)
    assert read(out) == file
    math, broken = file.of("bits per byte")
    text = read_text(HELD_OUT, demo, max_tokens=40)
    specs = [get_backend("PYTORCH_SDPA_MATH")]
    _, expected = compare(demo, specs, text, window=16, stride=8)
    assert file.beside(math, "difference").median == pytest.approx(expected.difference, abs=1e-9)
    assert math.median == pytest.approx(expected.bits_per_byte, abs=1e-9)
    assert "NOT_FINITE" in broken.reason
    assert f"| {math.median:.7f} |" in " ".join(tables.render("r.json", file).split())
