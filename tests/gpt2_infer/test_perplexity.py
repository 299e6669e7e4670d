from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpt2_infer import GPT2, RequestError
from gpt2_infer.checkpoint import open_checkpoint
from gpt2_infer.perplexity import HELD_OUT, Text, compare, read_text, token_nats
from tests.conftest import DEVICES
from tests.gpt2_infer.bench.common import add, off_by_one

BACKENDS = ("PYTORCH_SDPA_MATH", "PYTORCH_SDPA_FLASH_ATTENTION")


def transformers_nats(ids, window, stride):
    """Return transformers' sum over all tokens but the first, window by window."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(open_checkpoint("demo").folder).float().eval()
    total, done = 0.0, 0
    for begin in range(0, len(ids) - window + stride - 1, stride):
        labels = torch.tensor([ids[begin : begin + window + 1]])
        logits = model(labels[:, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="none")
        total += losses[done - begin :].sum().item()
        done = begin + len(losses)
    return total


@pytest.mark.parametrize(
    ("window", "stride", "windows"), [(128, 48, 4), (64, 64, 4), (4, 3, 20), (1, 1, 20)]
)
def test_perplexity_equals_transformers(window, stride, windows, demo):
    tokens = window + (windows - 1) * stride
    text = read_text(HELD_OUT, demo, max_tokens=tokens)
    expected = transformers_nats(text.ids, window, stride) / tokens
    scores = compare(demo, BACKENDS, text, window=window, stride=stride)
    assert [score.backend for score in scores] == ["NAIVE_PYTORCH", *BACKENDS]
    for score in scores:
        assert score.nats / score.tokens == pytest.approx(expected, abs=1e-5)
        assert abs(score.difference) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_backend_costs_bits(device, clean_registry):
    add("OFF_BY_ONE", off_by_one)
    model = GPT2.from_pretrained("demo", device=device)
    text = read_text(HELD_OUT, model, max_tokens=500)
    baseline, score = compare(model, ["OFF_BY_ONE"], text, window=256, stride=256)
    assert score.bits_per_byte > baseline.bits_per_byte + 0.01
    assert score.difference == pytest.approx((score.nats - baseline.nats) / 500)
    assert score.standard_errors > 2


def test_documents_and_their_bytes(demo, tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("The king.\n<|endoftext|>\nThe queen é\n<|endoftext|>\n", "utf-8")
    end, encode = demo.tokenizer.end_of_text, demo.tokenizer.encode
    king, queen = encode("The king."), encode("The queen é")
    text = read_text(file, demo)
    assert text == Text([end, *king, end, *queen], 9 + 12)
    short = read_text(file, demo, max_tokens=len(king) + 2)
    assert short == Text([end, *king, end, queen[0]], 9 + 3)


def test_files_that_are_not_text_are_refused(demo, tmp_path: Path):
    file = tmp_path / "a.txt.xz"
    for data in (b"not xz", b""):
        file.write_bytes(data)
        with pytest.raises(RequestError, match=r"a\.txt\.xz cannot be read as UTF-8 text"):
            read_text(file, demo)
    with pytest.raises(RequestError, match=r"nowhere\.txt cannot be read"):
        read_text(tmp_path / "nowhere.txt", demo)
    with pytest.raises(RequestError, match="stride 9 and window 8"):
        token_nats(demo, [1, 2], window=8, stride=9)
