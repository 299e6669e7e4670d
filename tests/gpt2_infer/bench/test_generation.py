from __future__ import annotations

from collections import Counter

import pytest
import torch

from attention_kernels import ArgumentError, UnknownBackendError, get_backend
from attention_kernels.judge.truth import naive_attention
from attention_kernels.judge.worker import open_runner
from gpt2_infer import GPT2
from gpt2_infer.bench import generation as module
from gpt2_infer.bench import selection
from gpt2_infer.bench.record import FREE_ATTENTION
from gpt2_infer.bench.show.figures import group_by, main_rows
from gpt2_infer.bench.study import GenerationStudy, run
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import generate
from tests.gpt2_infer.bench.common import PROMPT, TWO, add, by_name, off_by_one, tie


@pytest.fixture
def tiny(save_checkpoint) -> str:
    folder, _ = save_checkpoint()
    return str(folder)


def compare(model, names, *, out=None, **settings):
    settings = {"prompt": PROMPT, "rounds": 2} | settings
    study = GenerationStudy(model=model, backends=[*names], device="cpu", **settings)
    return run(study, "generation", out)


def test_a_sample_has_the_cells_settings_and_excludes_warm_up(tiny, monkeypatch):
    seen = set()

    def told(model, prompts, **options):
        done = generate(model, prompts, **options)
        seen.add((done.attention, done.decode_attention, done.mode, len(prompts)))
        assert {len(prompts[0]) + len(tokens) for tokens in done.tokens} == {10}
        assert options["ignore_eos"]
        done.warm_up_s, done.prefill_s, done.generation_s = 1.0, 2.0, 3.0
        return done

    monkeypatch.setattr(module, "generate", told)
    results = compare(tiny, TWO, max_tokens=[10], batch_sizes=[2], modes=["kv-cache"])
    assert seen == {(name, name, "kv-cache", 2) for name in (*TWO, FREE_ATTENTION)}
    assert [row.samples for row in main_rows(results)] == [[3.0, 3.0]] * 3


def test_generation_is_compared_with_the_baselines_text(tiny, clean_registry):
    add("TEST_WRONG", off_by_one)
    names = ("NAIVE_PYTORCH", "TEST_WRONG", "PYTORCH_SDPA_MATH")
    modes = ["recompute", "kv-cache"]
    results = compare(tiny, names, max_tokens=[12], batch_sizes=[1, 2], modes=modes)
    model = GPT2.from_pretrained(tiny, device="cpu")
    assert results.study["prompt_tokens"] == len(model.tokenizer.encode(PROMPT))
    cells = group_by(main_rows(results), lambda row: tuple(row.cell.items()))
    assert len(cells) == 4
    for rows in cells.values():
        found = {row.contender: row for row in rows}
        naive, math = found["NAIVE_PYTORCH"], found["PYTORCH_SDPA_MATH"]
        assert naive.extra["token_digest"] == math.extra["token_digest"]
        for row in (naive, math, found[FREE_ATTENTION]):
            assert (row.status, len(row.samples)) == ("ok", 2)
            calls = results.beside(row, "call").samples
            assert all(a >= b for a, b in zip(calls, row.samples, strict=True))
        is_cached = naive.cell["mode"] == "kv-cache"
        untimed = "refused" if is_cached else "failed"  # refused: it has no decode kernel
        assert found["TEST_WRONG"].status in (untimed, "failed")
        assert found["TEST_WRONG"].samples == []
    with pytest.raises(UnknownBackendError):
        get_backend(FREE_ATTENTION)


def test_at_most_three_processes_run_and_the_baselines_stays(tiny, clean_registry, monkeypatch):
    running, most = set(), []

    def opened(spec, device):
        runner = open_runner(spec, device)
        end = runner.close
        runner.close = lambda: (running.remove(spec.name), end())
        running.add(spec.name)
        most.append({*running})
        return runner

    monkeypatch.setattr(selection, "open_runner", opened)
    add("OTHER", naive_attention)
    base, *others = "NAIVE_PYTORCH", "PYTORCH_SDPA_MATH", "PYTORCH_SDPA_FLASH_ATTENTION", "OTHER"
    compare(tiny, others, max_tokens=[10])
    compare(tiny, others[:2], max_tokens=[10, 11])
    assert [*map(len, most)] == [1, 2, 3, 3, 1, 2, 3]
    assert most[3] == {base, *others[1:]}
    assert not running


@pytest.mark.slow
def test_a_text_that_is_wrong_in_a_batch_once_or_later_is_caught(clean_registry):
    """The judge's own cases pass: the kernels are wrong only at a length between them."""
    layers, calls = 6, Counter()

    def add_wrong(name, is_wrong):
        def kernel(q, k, v, softmax_scale, is_causal):
            calls[name] += q.shape[1] == 32
            wrong = q.shape[1] == 32 and is_wrong(len(q), calls[name])
            return (off_by_one if wrong else naive_attention)(q, k, v, softmax_scale, is_causal)

        add(name, kernel)

    text = 7 * layers  # calls at length 32
    add_wrong("IN_A_BATCH", lambda batch, _: batch == 2)
    add_wrong("AT_FIRST", lambda _, call: call <= text)
    add_wrong("LATER", lambda _, call: call > 2 * text)
    names = ("IN_A_BATCH", "AT_FIRST", "LATER")
    found = by_name(compare("demo", names, max_tokens=[24], batch_sizes=[2], rounds=3))
    assert found["NAIVE_PYTORCH"].status == "ok"  # the baseline, though nobody named it
    batch, first, later = (found[name] for name in names)
    assert {(row.status, len(row.samples)) for row in (batch, first, later)} == {("failed", 0)}
    assert batch.reason.startswith("bug in B: the first layer over its budget: layer 0, ")
    assert batch.extra["diverges"] == "bug in B"
    # The text is judged as it was first generated, not as it would be now.
    assert first.reason.startswith("bug in B: rounding does not explain its token, ")
    assert "state between calls" in first.reason
    assert later.reason == "its text changes from run to run"


def test_a_tie_that_shows_only_in_a_batch_is_a_tie(clean_registry, save_checkpoint, monkeypatch):
    def other_in_a_batch(q, k, v, softmax_scale, is_causal):
        o = naive_attention(q, k, v, softmax_scale, is_causal)
        return o if len(q) == 1 else o * (1 + 2**-22)  # within any budget: 4 ulps are a part of it

    spec = add("TEST_OTHER_IN_A_BATCH", other_in_a_batch)
    prompt = list(range(100, 116))
    model = tie(save_checkpoint, "NAIVE_PYTORCH", spec.name, prompt, batch=2)
    monkeypatch.setattr(GPT2, "from_pretrained", lambda *_, **__: model)
    settings = {"max_tokens": [18], "batch_sizes": [2], "prompt": prompt}
    found = by_name(compare("tie", [spec.name], **settings))
    ours, plain = found[spec.name], found["NAIVE_PYTORCH"]
    assert ours.extra["token_digest"] != plain.extra["token_digest"]
    assert (ours.status, ours.reason, ours.extra["diverges"]) == ("ok", "", "tie")
    assert len(ours.samples) == 2


def test_what_cannot_be_compared_is_refused(monkeypatch):
    for tokens in (3, 1025):
        with pytest.raises(RequestError, match=f"max_tokens {tokens} must exceed the prompt"):
            compare("demo", ["NAIVE_PYTORCH"], max_tokens=[tokens])
    with pytest.raises(RequestError, match="not in float64"):
        compare("demo", ["NAIVE_PYTORCH"], max_tokens=[10], dtypes=["float64"])
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with pytest.raises(ArgumentError, match="set to compute float32 products in TF32"):
        compare("demo", ["NAIVE_PYTORCH"], max_tokens=[10])


@pytest.mark.slow
def test_a_decode_kernel_that_is_wrong_is_caught(clean_registry):
    """Its own check catches it or, at longer lengths, the text that it writes with a cache."""

    def wrong(q, k_cache, v_cache, seqlens, softmax_scale):
        return v_cache[:, :1].contiguous()

    def wrong_for_four_heads(q, k_cache, v_cache, seqlens, softmax_scale):
        kernel = wrong if q.shape[2] == 4 else get_backend("NAIVE_PYTORCH").load().decode
        return kernel(q, k_cache, v_cache, seqlens, softmax_scale)

    names = {
        "TEST_WRONG": (wrong, "decode, head_dim 64"),
        "TEST_WRONG_FOR_FOUR": (wrong_for_four_heads, "bug in B: rounding does not explain"),
    }
    for name, (kernel, _) in names.items():
        add(name, naive_attention, kernel)
    found = by_name(compare("demo", names, max_tokens=[24], modes=["kv-cache"]))
    for name, (_, reason) in names.items():
        assert found[name].status == "failed"
        assert found[name].reason.startswith(reason)


def test_an_interrupted_text_is_not_a_sample(tiny, monkeypatch, tmp_path):
    """generate() returns the text so far; a benchmark must not count that as a sample."""
    calls = []

    def cut_short(*arguments, **options):
        calls.append(1)
        done = generate(*arguments, **options)
        if len(calls) == 6:  # this call is in a timed round
            done.finish_reasons = ["interrupted"]
        return done

    monkeypatch.setattr(module, "generate", cut_short)
    with pytest.raises(KeyboardInterrupt):
        compare(tiny, TWO, max_tokens=[10], out=tmp_path / "r.json")
    results = compare(tiny, TWO, max_tokens=[10], out=tmp_path / "r.json")
    assert {len(row.samples) for row in main_rows(results)} == {2}
