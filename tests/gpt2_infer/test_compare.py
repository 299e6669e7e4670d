from __future__ import annotations

import pytest
import torch

from attention_kernels import BackendSpec, UnknownBackendError, get_backend, register
from attention_kernels.contract import Kernels
from attention_kernels.reference import naive_attention
from gpt2_infer import compare, tables
from gpt2_infer.compare import FREE_ATTENTION, GenerationCell, KernelCell
from gpt2_infer.errors import RequestError
from gpt2_infer.results import ResultsError, Series, read

PROMPT = "Once upon a time"


def add(name: str, kernel, **fields) -> BackendSpec:
    defaults = {"precisions": {"float32": "ieee-fp32"}, "family": "test", "summary": "A test's."}
    register(name=name, **(defaults | fields))(lambda: Kernels(kernel))
    return get_backend(name)


def off_by_one(q, k, v, softmax_scale, is_causal):
    o = naive_attention(q, k, v, softmax_scale, is_causal)
    return torch.cat([o[:, :1], o[:, :-1]], 1)


def specs_of(*names: str) -> list[BackendSpec]:
    return [get_backend(name) for name in names]


def by_name(results) -> dict[str, Series]:
    return {series.name: series for series in results.series}


# The kernel alone


def test_kernels_are_checked_then_timed_in_rounds(clean_registry):
    add("TEST_WRONG", off_by_one)
    specs = specs_of("NAIVE_PYTORCH", "TEST_WRONG", "PYTORCH_SDPA_MATH", "CUSTOM_CUDA_VERSION_8")
    cell = KernelCell(24, num_heads=2, head_dim=32)
    results = compare.compare_kernels(specs, [cell], device="cpu", rounds=3)
    found = by_name(results)
    for name in ("NAIVE_PYTORCH", "PYTORCH_SDPA_MATH"):
        assert found[name].status == "ok"
        assert len(found[name].samples) == 3
        assert all(sample > 0 for sample in found[name].samples)
        assert found[name].facts["error"] <= found[name].facts["budget"]
    wrong = found["TEST_WRONG"]
    assert (wrong.status, wrong.samples) == ("failed", [])
    assert "is over its budget" in wrong.reason
    emulated = found["CUSTOM_CUDA_VERSION_8"]
    assert (emulated.status, emulated.samples) == ("emulated", [])
    assert emulated.facts["error"] <= emulated.facts["budget"]
    assert emulated.labels["flags"] == "--use_fast_math"
    assert len(emulated.labels["source_digest"]) == 64


def test_a_dtype_that_a_backend_does_not_take_is_not_its_cell():
    cells = [KernelCell(8, num_heads=1, head_dim=32, dtype=d) for d in ("float32", "float16")]
    specs = specs_of("NAIVE_PYTORCH", "CUSTOM_CUDA_VERSION_1")
    results = compare.compare_kernels(specs, cells, device="cpu", rounds=1)
    found = [(series.name, series.labels["dtype"]) for series in results.series]
    assert found == [
        ("NAIVE_PYTORCH", "float32"),
        ("CUSTOM_CUDA_VERSION_1", "float32"),
        ("NAIVE_PYTORCH", "float16"),
    ]


def test_what_a_backend_refuses_is_no_failure(monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", "75")
    cell = KernelCell(8, num_heads=1, head_dim=128)
    specs = specs_of("CUSTOM_CUDA_VERSION_1")
    (series,) = compare.compare_kernels(specs, [cell], device="cpu", rounds=1).series
    assert series.status == "refused"
    assert "shared memory" in series.reason


def test_the_arithmetic_of_a_cell():
    cell = KernelCell(1024, batch=2, num_heads=12, head_dim=64)
    assert cell.flops == 2 * 2 * 12 * 1024 * 1024 * 64
    assert KernelCell(1024, 2, 12, 64, is_causal=False).flops == 2 * cell.flops
    assert cell.min_bytes == 4 * 2 * 1024 * 12 * 64 * 4
    assert KernelCell(1024, 2, 12, 64, "float16").min_bytes == cell.min_bytes // 2


def test_only_what_runs_here_is_selected():
    names = [spec.name for spec in compare.select([], "cpu")]
    assert "NAIVE_PYTORCH" in names
    assert not any(name.startswith("CUSTOM_CUDA") for name in names)  # emulated
    assert [s.name for s in compare.select(["naive-pytorch", "NAIVE_PYTORCH"], "cpu")] == [names[0]]
    of_torch = compare.select([], "cpu", families=["pytorch"])
    assert {spec.family for spec in of_torch} == {"pytorch"}
    assert not compare.select([], "cpu", families=["custom-cuda"])
    named = compare.select(["CUSTOM_CUDA_VERSION_2"], "cpu", families=["pytorch"])
    assert named == [*of_torch, get_backend("CUSTOM_CUDA_VERSION_2")]
    with pytest.raises(RequestError, match="no backend is of the family nvidia: there are"):
        compare.select([], "cpu", families=["nvidia"])
    with pytest.raises(UnknownBackendError):
        compare.select(["no-such"], "cpu")
    with pytest.raises(RequestError, match="cannot be compared on cpu: runs on cuda only"):
        compare.select(["PYTORCH_SDPA_CUDNN_ATTENTION"], "cpu")


# Interruption


def interrupted_after(monkeypatch, count: int):
    """Samples are 1, 2, 3, ... and Ctrl-C comes in place of number count + 1."""
    taken: list[float] = []

    def sampler(spec, inputs, **_):
        def sample() -> float:
            if len(taken) == count:
                raise KeyboardInterrupt
            taken.append(len(taken) + 1.0)
            return taken[-1]

        return sample

    monkeypatch.setattr(compare, "kernel_sampler", sampler)
    return taken


CELLS = [KernelCell(8, num_heads=1, head_dim=32), KernelCell(9, num_heads=1, head_dim=32)]
TWO = ("NAIVE_PYTORCH", "PYTORCH_SDPA_MATH")


def run(out, *, rounds=2, cells=CELLS):
    return compare.compare_kernels(specs_of(*TWO), cells, device="cpu", rounds=rounds, out=out)


@pytest.mark.parametrize("count", [1, 3, 5, 6, 9])
def test_an_interrupted_run_goes_on(monkeypatch, tmp_path, count):
    out = tmp_path / "r.json"
    interrupted_after(monkeypatch, count)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    assert not out.exists()
    partial = read(tmp_path / "r.json.partial")
    before = {(s.name, s.labels["seqlen"]): s.samples for s in partial.series}
    taken = interrupted_after(monkeypatch, 1000)
    taken += [0.0] * 100  # so that new samples are told from those before
    results = run(out)
    assert read(out) == results
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert results.provenance["resumed_from"] == [partial.provenance["date"]]
    assert [(s.name, s.labels["seqlen"]) for s in results.series] == [
        (name, cell.seqlen) for cell in CELLS for name in TWO
    ]
    for series in results.series:
        kept = before.get((series.name, series.labels["seqlen"]), [])
        assert series.samples[: len(kept)] == kept
        assert len(series.samples) == 2
        assert all(sample > 100 for sample in series.samples[len(kept) :])


def test_what_is_left_of_another_run_is_refused(monkeypatch, tmp_path):
    out = tmp_path / "r.json"
    interrupted_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    for options, key in (({"rounds": 3}, "rounds"), ({"cells": CELLS[:1]}, "cells")):
        with pytest.raises(ResultsError, match=f"is of another run \\({key} differ\\): delete it"):
            run(out, **options)
    monkeypatch.setattr(compare.bench, "source_digest", lambda: "other")
    with pytest.raises(ResultsError, match=r"another run \(source_digest differ\)"):
        run(out)
    (tmp_path / "r.json.partial").write_text("{")
    with pytest.raises(ResultsError, match="is truncated or not JSON"):
        run(out)


# Generation


def test_generation_is_compared_with_the_baselines_text(demo, clean_registry):
    add("TEST_WRONG", off_by_one)
    names = ("NAIVE_PYTORCH", "TEST_WRONG", "PYTORCH_SDPA_MATH", "CUSTOM_CUDA_VERSION_12")
    cells = [GenerationCell(16), GenerationCell(12, mode="kv-cache"), GenerationCell(12, batch=2)]
    results = compare.compare_generation(
        lambda dtype: demo, specs_of(*names), cells, PROMPT, name="demo", rounds=2
    )
    settings = results.settings
    assert settings["prompt_tokens"] == len(demo.tokenizer.encode(PROMPT))
    assert settings["weights_digest"] == compare.weights_digest(demo)
    for cell in cells:
        found = {
            s.name: s
            for s in results.series
            if (s.labels["max_tokens"], s.labels["batch"], s.labels["mode"])
            == (cell.max_tokens, cell.batch, cell.mode)
        }
        naive, math = found["NAIVE_PYTORCH"], found["PYTORCH_SDPA_MATH"]
        assert naive.facts["token_digest"] == math.facts["token_digest"]
        for series in (naive, math, found[FREE_ATTENTION]):
            assert series.status == "ok"
            assert len(series.samples) == 2
            assert len(series.facts["call_s"]) == 2
            assert all(
                call >= generation
                for call, generation in zip(series.facts["call_s"], series.samples, strict=True)
            )
        assert found["TEST_WRONG"].status == "failed"
        assert found["CUSTOM_CUDA_VERSION_12"].status == "emulated"
        assert not found["CUSTOM_CUDA_VERSION_12"].samples


def test_a_text_that_is_wrong_only_in_the_model_is_caught(demo, clean_registry):
    """Right in every case of the check, wrong at the lengths that generation runs in between."""

    def wrong_at_32(q, k, v, softmax_scale, is_causal):
        kernel = off_by_one if q.shape[1] == 32 else naive_attention
        return kernel(q, k, v, softmax_scale, is_causal)

    add("TEST_WRONG_AT_32", wrong_at_32)
    names = ("NAIVE_PYTORCH", "TEST_WRONG_AT_32")
    results = compare.compare_generation(
        lambda dtype: demo, specs_of(*names), [GenerationCell(40)], PROMPT, name="demo", rounds=1
    )
    wrong = by_name(results)["TEST_WRONG_AT_32"]
    assert wrong.status == "failed"
    assert "bug in B" in wrong.reason
    assert wrong.facts["diverges"] == "bug in B"


def test_lengths_that_the_model_has_not_are_refused(demo):
    for tokens in (3, 1025):
        with pytest.raises(RequestError, match=f"{tokens} tokens in all: the prompt has"):
            compare.compare_generation(
                lambda dtype: demo,
                specs_of("NAIVE_PYTORCH"),
                [GenerationCell(tokens)],
                PROMPT,
                name="demo",
            )


def test_free_attention_is_no_backend():
    with pytest.raises(UnknownBackendError):
        get_backend(FREE_ATTENTION)


# Tables


def series(name: str, precision: str, samples: list[float], **labels) -> Series:
    return Series(name, {"precision": precision, **labels}, "s", samples)


def test_another_precision_class_gets_no_ratio():
    base = series("NAIVE_PYTORCH", "ieee-fp32", [2.0, 2.0, 2.2])
    same = series("A", "ieee-fp32", [1.0])
    other = series("B", "3xtf32", [1.0])
    failed = Series("C", {"precision": "ieee-fp32"}, "s", status="failed", reason="wrong")
    every = [base, same, other, failed]
    assert tables.ratio(same, every, "NAIVE_PYTORCH") == 2.0
    assert tables.ratio(other, every, "NAIVE_PYTORCH") is None
    assert tables.ratio(failed, every, "NAIVE_PYTORCH") is None
    assert tables.ratio(same, [same], "NAIVE_PYTORCH") is None
    assert tables.spread_percent(base.samples) == pytest.approx(10.0)


def test_the_share_of_attention_is_what_a_free_one_saves():
    free = series(FREE_ATTENTION, "ieee-fp32", [3.0])
    assert tables.attention_share(series("A", "3xtf32", [4.0]), [free]) == 0.25
    assert tables.attention_share(series("A", "3xtf32", [4.0]), []) is None


def test_every_results_table_is_a_table(demo, tmp_path):
    kernels = compare.compare_kernels(specs_of(*TWO), CELLS, device="cpu", rounds=2)
    texts = compare.compare_generation(
        lambda dtype: demo, specs_of(*TWO), [GenerationCell(10)], PROMPT, name="demo", rounds=2
    )
    for results in (kernels, texts):
        text = tables.render(tmp_path / "file.json", results)
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) == 1
        for name in TWO:
            assert sum(f"`{name}`" in line for line in rows) == 1


def test_a_decode_kernel_that_is_wrong_is_caught(demo, clean_registry):
    """Its attention is right, so only the text with a cache can tell."""

    def wrong(q, k_cache, v_cache, seqlens, softmax_scale):
        return v_cache[:, :1]

    kernels = Kernels(naive_attention, wrong)
    fields = {"family": "test", "summary": "A test's.", "precisions": {"float32": "ieee-fp32"}}
    register(name="TEST_WRONG_DECODE", **fields)(lambda: kernels)
    cell = GenerationCell(24, mode="kv-cache")
    specs = specs_of("NAIVE_PYTORCH", "TEST_WRONG_DECODE")
    results = compare.compare_generation(
        lambda dtype: demo, specs, [cell], PROMPT, name="demo", rounds=1
    )
    found = by_name(results)["TEST_WRONG_DECODE"]
    assert found.status == "failed"
    assert found.reason.startswith("bug in B: rounding does not explain its token, ")
