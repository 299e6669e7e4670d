from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gpt2_infer import RequestError, Sampling

logit_rows = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40)


@settings(max_examples=300, deadline=None)
@given(
    row=logit_rows,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 50),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
)
def test_the_distribution_equals_transformers(row, temperature, top_k, top_p):
    logits = torch.tensor([row])
    ours = Sampling(temperature, top_k, top_p).log_weights(logits).softmax(-1)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    theirs = scores.softmax(-1)
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.equal(ours > 0, theirs > 0)


@settings(max_examples=100, deadline=None)
@given(row=logit_rows, top_k=st.integers(0, 10), top_p=st.floats(0.1, 1))
def test_evenly_spread_uniforms_draw_the_distribution(row, top_k, top_p):
    """On an even grid of uniforms, a token's share is its probability, to within one cell."""
    sampling = Sampling(0.9, top_k, top_p)
    grid = 2000
    logits = torch.tensor([row]).expand(grid, -1)
    uniform = (torch.arange(grid) + 0.5) / grid
    drawn = torch.bincount(sampling.choose(logits, uniform), minlength=len(row)) / grid
    expected = sampling.log_weights(logits[:1]).softmax(-1)[0]
    assert (drawn - expected).abs().max() <= 1.5 / grid
    assert not drawn[expected == 0].any()


def test_the_ends_of_the_unit_interval():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    sampling = Sampling(1.0)
    assert sampling.choose(logits, torch.tensor([0.0])).item() == 1
    assert sampling.choose(logits, torch.tensor([1 - 2**-24])).item() == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 1.0, "top_p": 0.0}, "top-p must be"),
        ({"seed": -1}, "the seed must be an integer from 0 to 9223372036854775807, not -1"),
        ({"temperature": 1.0, "top_k": 2.5}, "top-k must be an integer of 0 or more, not 2.5"),
        ({"top_k": 5}, "need a temperature above 0"),
    ],
)
def test_invalid_values_are_refused(fields, words):
    with pytest.raises(RequestError, match=words):
        Sampling(**fields)
