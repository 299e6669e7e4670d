from __future__ import annotations

import pytest
import torch

from attention_kernels import get_backend
from gpt2_infer.bench import tables
from gpt2_infer.bench.perplexities import score
from gpt2_infer.bench.results import read
from gpt2_infer.perplexity import HELD_OUT, compare, read_text
from tests.gpt2_infer.bench.common import add


def test_every_backend_is_scored_beside_the_baseline(demo, tmp_path, clean_registry):
    bad = add("NOT_FINITE", lambda q, k, v, **_: torch.full_like(q, torch.nan))
    specs = [get_backend("PYTORCH_SDPA_MATH"), bad]
    out = tmp_path / "r.json"
    score("demo", specs, ["float32"], device="cpu", max_tokens=40, window=16, task="p", out=out)
    math, broken = read(out).series
    text = read_text(HELD_OUT, demo, max_tokens=40)
    _, expected = compare(demo, specs[:1], text, window=16, stride=8)
    assert math.difference == pytest.approx(expected.difference, abs=1e-9)
    assert math.bits_per_byte == pytest.approx(expected.bits_per_byte, abs=1e-9)
    assert "NOT_FINITE" in broken.reason
    assert f"| {math.bits_per_byte:.7f} |" in " ".join(tables.render("r.json", read(out)).split())
