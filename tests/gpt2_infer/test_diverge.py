"""diverge() finds the step, layer and head of a fault, and recognizes rounding."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
import torch

from attention_kernels import get_backend, ladder, list_backends
from attention_kernels.judge.truth import naive_attention, truth
from gpt2_infer import GPT2, RequestError, generate
from gpt2_infer.cli import DEFAULT_PROMPT
from gpt2_infer.diverge import diverge, examine
from tests.conftest import DEVICES, ROOT, needs_compiler, rewrite, usable
from tests.gpt2_infer.bench.common import add, tie
from tests.gpt2_infer.cli.program import run

PROMPT = "Once upon a time there was a"  # 7 tokens: the first steps run at seqlen 16
PLAIN = "NAIVE_PYTORCH"
DTYPES = {"float32", "float16", "bfloat16"}
LAYERS, TOKENS = 6, 16  # layers of the demo model; enough new tokens for seqlen 32
DEMO = ["--model", "demo", "--device", "cpu", "--max-new-tokens", str(TOKENS), "--prompt", PROMPT]


def changed(change):
    """Return plain attention followed by change(o, number of calls before)."""
    calls = itertools.count()

    def kernel(*arguments):
        o = naive_attention(*arguments)
        change(o, next(calls))
        return o

    return kernel


def compare(model, a, b, **options):
    return diverge(model, a, b, PROMPT, **{"max_new_tokens": TOKENS, **options})


@pytest.mark.parametrize("device", DEVICES)
def test_equal_texts_are_examined_too(device):
    result = compare(GPT2.from_pretrained("demo", device=device), PLAIN, "PYTORCH_SDPA_MATH")
    assert (result.verdict, result.passed, result.step) == ("equal", True, None)
    assert (result.position, result.seqlen) == (7 + TOKENS - 1, 32)
    for side in (result.a, result.b):
        assert (side.faults, side.shortfall) == ([], 0)
        assert 0 < side.logits_error < side.allowed
        assert 0 < side.place.error <= side.place.budget


@pytest.mark.parametrize("device", DEVICES)
def test_step_layer_head_and_row_of_a_wrong_kernel_are_named(device, clean_registry):
    model = GPT2.from_pretrained("demo", device=device)

    def past_a_length(o, _):
        if o.shape[1] > 20:
            o[:, 18:, 1] += 3

    wrong = add("WRONG", changed(past_a_length))
    options = {"max_new_tokens": TOKENS, "ignore_eos": True}
    texts = [generate(model.with_attention(x), PROMPT, **options).tokens[0] for x in (wrong, PLAIN)]
    step = [x == y for x, y in zip(*texts, strict=True)].index(False)
    assert 7 + step >= 19  # row 18 is the newest token's: no earlier one can see it
    result = compare(model, wrong, PLAIN)
    assert (result.verdict, result.passed, result.step) == ("bug in A", False, step)
    assert (result.position, result.seqlen) == (7 + step, 32)
    assert [result.a.token, result.b.token] == [text[step] for text in texts]
    assert (result.a.place.layer, result.a.place.head) == (0, 1)
    assert result.a.place.row >= 18
    assert result.a.place.error == pytest.approx(3, rel=1e-4)
    assert not result.b.faults
    assert compare(model, PLAIN, wrong).verdict == "bug in B"


def test_nan_is_a_bug_of_one_layer_and_the_json_stays_json(capsys, clean_registry):
    def nan(o, call):
        if call % LAYERS == 3:
            o[:, 4, 2, 5] = torch.nan

    add("WRONG", changed(nan))
    status, out, err = run(capsys, "diverge", PLAIN, "wrong", "--json", *DEMO)
    assert (status, err) == (1, "")
    value = json.loads(out, parse_constant=pytest.fail)
    assert value["verdict"] == "bug in B"
    place = value["b"]["place"]
    assert (place["layer"], place["head"], place["row"]) == (3, 2, 4)
    assert place["error"] is place["row_error"] is None
    assert value["b"]["margin"] is value["b"]["logits_error"] is value["logits_difference"] is None
    assert value["b"]["faults"][1] == "its logits are not finite"
    assert value["a"]["faults"] == []


def test_equal_texts_clear_no_backend(demo, clean_registry):
    def slightly(o, _):
        o[:, 5, 3] += 1e-3

    result = compare(demo, add("WRONG", changed(slightly)), PLAIN)
    assert (result.verdict, result.step) == ("bug in A", None)
    assert "attention first exceeds its budget in layer 0, head 3, row 5: error 1.0" in str(result)


def test_a_kernel_that_overwrites_its_inputs_is_the_one_to_blame(demo, clean_registry):
    """The result must be neither a tie, as if both had read the new input, nor the other's bug."""

    def zeroes_v(q, k, v, softmax_scale, is_causal):
        v.zero_()
        return torch.zeros_like(q)

    def rounds_k(q, k, v, softmax_scale, is_causal):
        k.copy_(k.half())
        return naive_attention(q, k, v, softmax_scale, is_causal)

    zeroes, rounds = add("ZEROES", zeroes_v), add("ROUNDS", rounds_k)
    for wrong in (zeroes, rounds):
        for pair, verdict in (((wrong, PLAIN), "bug in A"), ((PLAIN, wrong), "bug in B")):
            result = compare(demo, *pair, max_new_tokens=2)
            assert result.verdict == verdict
            blamed = result.a if verdict == "bug in A" else result.b
            assert "in layer 0 it changed its input" in blamed.faults[0]
    assert str(compare(demo, zeroes, rounds)).endswith("\nbug in both: ZEROES and ROUNDS")


def test_a_wrong_token_is_a_bug_even_where_each_layer_is_right_when_run_again(demo, clean_registry):
    def at_first(o, call):
        if call < 3 * LAYERS:  # during the warm-up and two steps
            o.neg_()

    result = compare(demo, add("WARMING", changed(at_first)), PLAIN, max_new_tokens=4)
    assert (result.verdict, result.step) == ("bug in A", 0)
    assert result.a.place.passed
    assert result.a.logits_error < result.a.allowed < result.a.shortfall
    assert "rounding does not explain its token" in result.a.faults[0]
    assert "state between calls" in result.a.faults[1]


@pytest.mark.parametrize(("precision", "verdict"), [("3xtf32", "equal"), ("ieee-fp32", "bug in A")])
def test_the_budget_is_the_precision_classs(demo, clean_registry, precision, verdict):
    def four_times_as_far_off(q, k, v, softmax_scale, is_causal):
        reference = truth(q, k, v, softmax_scale, is_causal).reference
        naive = naive_attention(q, k, v, softmax_scale, is_causal).double()
        return (reference + 4 * (naive - reference)).float()

    coarse = add("COARSE", four_times_as_far_off, precisions={"float32": precision})
    result = compare(demo, coarse, PLAIN, max_new_tokens=2)
    assert result.verdict == verdict
    assert result.a.allowed > result.b.allowed or precision == "ieee-fp32"


def test_two_logits_that_rounding_puts_in_either_order_are_a_tie(save_checkpoint, clean_registry):
    def two_ulps(o, _):
        o *= 1 + 2**-22  # within every budget: each includes 4 ulps

    other, prompt = add("OTHER_ROUNDING", changed(two_ulps)), list(range(100, 116))
    model = tie(save_checkpoint, PLAIN, other, prompt)
    result = diverge(model, PLAIN, other, prompt, max_new_tokens=3)
    assert (result.verdict, result.passed, result.step) == ("tie", True, 0)
    assert (result.a.token, result.b.token) == (7, 11)
    assert max(result.a.margin, result.b.margin) <= 2 * result.logits_difference < 1e-4
    assert max(result.a.shortfall, result.b.shortfall) < result.a.allowed


def test_the_row_that_diverges_first_is_examined(demo):
    plain = get_backend(PLAIN)
    prompts = [demo.tokenizer.encode(text) for text in ("Once upon a", "The old man")]
    assert len({len(prompt) for prompt in prompts}) == 1
    one, other = (generate(demo, prompts, max_new_tokens=6, ignore_eos=True) for _ in range(2))
    assert one.tokens[0] != one.tokens[1]
    other.tokens = [[*row] for row in one.tokens]
    other.tokens[0][5] = other.tokens[1][3] = 7  # neither text has this token
    found = examine(demo, [plain, plain], [one, other])
    assert (found.step, found.a.token, found.b.token) == (3, one.tokens[1][3], 7)
    assert found.a.shortfall == 0 < found.b.shortfall
    assert found.a.margin == found.b.margin
    alone = diverge(demo, plain, plain, prompts[1], max_new_tokens=4)
    assert found.a.margin == pytest.approx(alone.a.margin, rel=1e-3)


@pytest.mark.parametrize("name", [PLAIN, "eager"])
def test_a_model_without_finite_numbers_gives_no_verdict(name, save_checkpoint):
    folder, _ = save_checkpoint()
    rewrite(folder, lambda tensors: {name: x * math.nan for name, x in tensors.items()})
    with pytest.raises(RequestError, match="NaN, infinity or only zeros in the logits"):
        compare(GPT2.from_pretrained(str(folder), device="cpu"), name, name, max_new_tokens=2)


@pytest.mark.slow
@needs_compiler
def test_the_readmes_example_finds_the_kernel_that_the_readme_breaks(tmp_path, demo):
    readme = (ROOT / "README.md").read_text("utf-8")
    copied = re.search(r"cp (\S+) v01_mine\.cu", readme)[1]
    right, wrong = re.search(r"change\s+`([^`]+)` to `([^`]+)`", readme).groups()
    new_tokens = int(re.search(r"diverge v01_mine\.cu .* --max-new-tokens (\d+)", readme)[1])
    file = tmp_path / "v01_mine.cu"
    file.write_text((ROOT / copied).read_text().replace(right, wrong))
    spec = ladder.resolve(str(file))
    ids = demo.tokenizer.encode(DEFAULT_PROMPT)
    # Only the last step differs; a text that ends within the first tile of keys does not.
    long = generate(demo, [ids], max_new_tokens=new_tokens - 1, ignore_eos=True).tokens[0]
    result = diverge(demo, spec, PLAIN, [*ids, *long], max_new_tokens=1)
    assert result.verdict == "bug in A"
    assert diverge(demo, spec, PLAIN, ids, max_new_tokens=1).verdict == "equal"


@pytest.mark.gpu
@pytest.mark.usefixtures("one_tile")
@pytest.mark.parametrize(
    "name",
    [
        spec.name
        for spec in list_backends()
        if spec.family not in ("pytorch", "decode")
        and "cuda" in spec.device_types
        and DTYPES & {*spec.dtypes}
        and 64 in (spec.head_dims or (64,))
    ],
)
def test_greedy_text_of_every_backend_is_plain_pytorchs(name):
    spec = usable(name, "cuda")
    for dtype in DTYPES & {*spec.dtypes}:
        model = GPT2.from_pretrained("demo", device="cuda", dtype=dtype)
        found = compare(model, PLAIN, spec, max_new_tokens=120)
        assert found.passed, str(found)
        if dtype == "float32" and found.step is not None:
            # The error of two logits on each side turns A's choice into B's.
            margins, allowed = found.a.margin + found.b.margin, found.a.allowed + found.b.allowed
            assert margins <= allowed, str(found)
