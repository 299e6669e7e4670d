from __future__ import annotations

import torch

from attention_kernels.ladder.compilers import missing_compiler
from gpt2_infer.bench import decoding, models
from gpt2_infer.bench.record import File
from gpt2_infer.bench.show.figures import calls_of, steps_of
from gpt2_infer.bench.study import DecodeStudy, run

FUSED = not missing_compiler("emulator")


def decode(**settings) -> File:
    settings = {"models": ["demo"], "dtypes": ["float32"], "new_tokens": [5]} | settings
    return run(DecodeStudy(device="cpu", rounds=2, peers=True, **settings))


def test_steps_and_whole_calls_are_timed_in_the_same_call():
    file = decode(engines=["eager", "fused", "graph"], prompt_tokens=11, batch_sizes=[2])
    eager, fused, graph, peer = file.of("time")
    assert peer.contender == file.study["baseline"] == "transformers, dynamic cache"
    assert eager.cell["prompt_tokens"] == 11
    assert (fused.status, len(fused.samples)) == (("ok", 2) if FUSED else ("refused", 0))
    for row in (eager, *([fused] if FUSED else [])):
        assert row.extra["same_text"]
        steps, calls = steps_of(file, row), calls_of(file, row)
        assert steps is row
        assert all(a < b for a, b in zip(steps.samples, calls.samples, strict=True))
    assert graph.status == "refused"
    assert "it needs a CUDA device" in graph.reason
    assert calls_of(file, peer) is peer
    assert peer.extra["same_text"]


def test_a_call_without_a_cache_includes_one_time_work():
    file = decode(mode="recompute", engines=["eager"])
    eager, peer = file.of("time")
    steps = steps_of(file, eager)
    assert all(a < b for a, b in zip(steps.samples, eager.samples, strict=True))
    assert calls_of(file, eager) is eager
    assert steps_of(file, peer) is None
    assert peer.extra["same_text"]


def test_another_text_is_noted_and_one_that_changes_fails(monkeypatch):
    reference_of, generate, calls = models.reference_of, decoding.generate, []

    def changed(model):
        reference = reference_of(model)
        with torch.no_grad():
            reference.transformer.ln_f.weight *= -1
        return reference

    def changing(*arguments, **options):
        done = generate(*arguments, **options)
        calls.append(1)
        if len(calls) == 4:
            done.tokens[0][0] += 1
        return done

    monkeypatch.setattr(models, "reference_of", changed)
    monkeypatch.setattr(decoding, "generate", changing)
    ours, peer = decode(engines=["eager"]).of("time")
    assert (ours.status, ours.reason) == ("failed", "its text changes from run to run")
    assert (peer.status, peer.extra["same_text"]) == ("ok", False)


def test_the_pieces_of_a_book_are_prompts():
    file = decode(engines=["eager"], pieces=[1, 3], guesses=[0, 3], prompt_tokens=4)
    rows = [row for row in file.of("time") if row.extra["program"] == "gpt2-infer"]
    assert [(row.contender, row.cell["piece"]) for row in rows] == [
        *(("eager", 1), ("eager, 3 guesses", 1), ("eager", 3), ("eager, 3 guesses", 3))
    ]
    plain, guessing = rows[:2]
    assert plain.samples
    assert "speculation needs the fused engine" in guessing.reason
