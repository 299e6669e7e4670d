from __future__ import annotations

import functools
import importlib
import io
import math
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from attention_kernels import (
    ArgumentError,
    BackendSpec,
    UnknownBackendError,
    get_backend,
    ladder,
    register,
)
from attention_kernels.conformance import Case
from attention_kernels.contract import Kernels
from attention_kernels.reference import Verdict, naive_attention
from gpt2_infer import GPT2
from gpt2_infer.bench import compare, tables
from gpt2_infer.bench.compare import FREE_ATTENTION, GenerationCell, KernelCell
from gpt2_infer.bench.results import ResultsError, Series, read
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import generate
from tests.conftest import rewrite

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
    results = compare.compare_kernels(specs, cells, device="cpu", rounds=2)
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
    results = compare.compare_kernels(specs, [cell], device="cpu", rounds=2)
    series = by_name(results)["CUSTOM_CUDA_VERSION_1"]
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
    named = compare.select(["CUSTOM_CUDA_VERSION_2"], "cpu", families=["pytorch"])
    assert named == [*of_torch, get_backend("CUSTOM_CUDA_VERSION_2")]
    with pytest.raises(RequestError, match="no backend is of the family nvidia: there are"):
        compare.select([], "cpu", families=["nvidia"])
    with pytest.raises(UnknownBackendError):
        compare.select(["no-such"], "cpu")
    with pytest.raises(RequestError, match="cannot be compared on cpu: runs on cuda only"):
        compare.select(["PYTORCH_SDPA_CUDNN_ATTENTION"], "cpu")


def test_a_family_that_cannot_be_measured_here_is_told(capsys):
    pytorch = compare.select([], "cpu", families=["pytorch"])
    assert capsys.readouterr().err == ""
    assert compare.select([], "cpu", families=["pytorch", "custom-cuda", "triton"]) == pytorch
    err = capsys.readouterr().err
    assert err.startswith("nothing is measured on cpu of custom-cuda (its source runs in the CPU ")
    assert "would mean nothing), triton (" in err
    assert err.count("\n") == 1
    named = compare.select(["CUSTOM_CUDA_VERSION_2"], "cpu", families=["custom-cuda"])
    assert named == specs_of("CUSTOM_CUDA_VERSION_2")  # it is checked, as whoever names it asks
    with pytest.raises(RequestError, match=r"^nothing is measured on cpu of custom-cuda \("):
        compare.select([], "cpu", families=["custom-cuda"])
    numpy = compare.select([], "cpu", families=["numpy"], dtypes=["float16", "float64"])
    assert {spec.family for spec in numpy} == {"numpy"}
    with pytest.raises(RequestError, match=r"of numpy \(takes float32, float64, not float16\)"):
        compare.select([], "cpu", families=["numpy"], dtypes=["float16"])


def test_the_modules_example_works_as_written(capsys):
    code = textwrap.dedent(compare.__doc__.split("\n\n")[-1])
    assert len(code.splitlines()) == 5
    exec(compile(code, "compare.py", "exec"), {})
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    names = ("NAIVE_PYTORCH", "PYTORCH_SDPA_FLASH_ATTENTION")
    assert lines == [[name, seqlen] for seqlen in ("128", "256") for name in names]


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
    with monkeypatch.context() as patch:
        patch.setattr(compare, "_source_digest", lambda _: "edited")
        with pytest.raises(ResultsError, match=r"NAIVE_PYTORCH has changed since .* was measured"):
            run(out)
    monkeypatch.setattr(compare.bench, "source_digest", lambda: "other")
    with pytest.raises(ResultsError, match=r"another run \(source_digest differ\)"):
        run(out)
    (tmp_path / "r.json.partial").write_text("{")
    with pytest.raises(ResultsError, match="is truncated or not JSON"):
        run(out)


@pytest.mark.parametrize("count", [1, 6])  # in the first cell, and after it
def test_a_plug_in_that_was_edited_is_not_gone_on_with(
    clean_registry, monkeypatch, tmp_path, count
):
    """Its kernel is in another file than its loader."""
    package = tmp_path / "plugged_in"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from attention_kernels.contract import Kernels\n"
        "from plugged_in.kernel import attention\n"
        "def load(): return Kernels(attention)\n"
    )
    kernel = package / "kernel.py"
    kernel.write_text("from attention_kernels.reference import naive_attention as attention\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("plugged_in", "plugged_in.kernel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    loader = importlib.import_module("plugged_in").load
    fields = {"family": "test", "summary": "A test's.", "precisions": {"float32": "ieee-fp32"}}
    register(name="TEST_PLUGGED_IN", **fields)(loader)
    specs = specs_of("NAIVE_PYTORCH", "TEST_PLUGGED_IN")

    def run():
        compare.compare_kernels(specs, CELLS, device="cpu", rounds=2, out=tmp_path / "r.json")

    for calls in (count, 1):  # gone on with as long as it is the same
        interrupted_after(monkeypatch, calls)
        with pytest.raises(KeyboardInterrupt):
            run()
    kernel.write_text(kernel.read_text() + "# another\n")
    with pytest.raises(ResultsError, match=r"TEST_PLUGGED_IN has changed since .* was measured"):
        run()


def test_a_backends_source_is_all_that_its_kernel_is_made_of(tmp_path):
    root = Path(compare.__file__).parents[1] / "attention_kernels"
    for name in ("TRITON_FLASH_ATTENTION", "NUMPY_BASIC"):
        files = compare._source_files(get_backend(name))
        assert {root / "backends/triton/flash_attention.py", root / "backends/numpy/basic.py"} <= {
            *files
        }
        assert {path.suffix for path in files} == {".py"}
    file, included = tmp_path / "v08_mine.cu", tmp_path / "mine.cuh"
    source = (root / "csrc" / "fp32" / "v08_o_in_shared.cu").read_text()
    file.write_text(source + '#include "mine.cuh"\n')
    included.write_text("// mine\n")
    spec = ladder.resolve(str(file))
    files = compare._source_files(spec)
    assert {file, included, *(root / "csrc" / f for f in ("binding.cpp", "common.cuh"))} <= {*files}
    assert not any(path.suffix == ".py" for path in files)
    digests = {compare._source_digest(spec)}
    for path in (file, included):
        path.write_text(path.read_text() + "// edited\n")
        digests.add(compare._source_digest(spec))
    assert len(digests) == 3


def test_a_loader_without_a_file_has_no_known_source(clean_registry, monkeypatch, tmp_path):
    """As one that is typed into `python -`: how far it is the same, nobody can tell."""
    scope = {"Kernels": Kernels, "attention": naive_attention, "__name__": "__main__"}
    exec(compile("def load(): return Kernels(attention)", "<stdin>", "exec"), scope)
    fields = {"family": "test", "summary": "A test's.", "precisions": {"float32": "ieee-fp32"}}
    register(name="TEST_TYPED", **fields)(scope["load"])
    register(name="TEST_PARTIAL", **fields)(functools.partial(Kernels, naive_attention))
    for name in ("TEST_TYPED", "TEST_PARTIAL"):
        out = tmp_path / f"{name}.json"

        def run(name=name, out=out):
            return compare.compare_kernels(specs_of(name), CELLS, device="cpu", rounds=2, out=out)

        with monkeypatch.context() as patch:
            interrupted_after(patch, 3)
            with pytest.raises(KeyboardInterrupt):
                run()
        with pytest.raises(ResultsError, match=f"{name} .* may have changed since .* was measured"):
            run()
        out.with_name(f"{out.name}.partial").unlink()
        series = by_name(run())[name]
        assert (series.status, series.labels["source_digest"]) == ("ok", None)


def test_what_is_left_of_another_prompt_is_refused(demo, monkeypatch, tmp_path):
    def run(prompt):
        cells = [GenerationCell(10)]
        options = {"name": "demo", "rounds": 2, "out": tmp_path / "r.json"}
        return compare.compare_generation(
            lambda dtype: demo, specs_of(*TWO), cells, prompt, **options
        )

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compare, "_generation_sample", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run([5, 6, 7])
    with pytest.raises(ResultsError, match=r"is of another run \(prompt_digest differ\)"):
        run([5, 6, 8])
    assert run([5, 6, 7]).settings["prompt_digest"] == compare.environment.token_digest([[5, 6, 7]])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu", "another"),
        ("cpu_threads", 999),
        ("gpu", {"name": "another"}),
        ("packages", {}),
        ("precision", {}),
    ],
)
def test_samples_of_another_machine_are_not_gone_on_with(key, value, monkeypatch, tmp_path):
    out = tmp_path / "r.json"
    interrupted_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    interrupted_after(monkeypatch, 1000)
    facts = compare.environment.provenance()
    monkeypatch.setattr(compare.bench, "provenance", lambda: facts | {key: value})
    with pytest.raises(ResultsError, match=f"is of another run .*{key} differ"):
        run(out)


def test_an_interruption_does_not_save_the_second_check(monkeypatch, tmp_path):
    out, checked = tmp_path / "r.json", []

    def interrupt(*_):
        raise KeyboardInterrupt

    interrupted_after(monkeypatch, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(compare, "_recheck", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(out)
    assert all(len(series.samples) == 2 for series in read(tmp_path / "r.json.partial").series)
    monkeypatch.setattr(compare, "_recheck", lambda spec, *_: checked.append(spec.name))
    results = run(out)
    assert checked == [*TWO, *TWO]  # both cells
    assert all(series.facts["checked_again"] for series in results.series)


def test_every_call_of_a_cell_is_of_its_shape(clean_registry, monkeypatch):
    seen, timed, sampler = set(), [], compare.kernel_sampler

    def watch(spec, inputs, **options):
        timed.append((spec, inputs))
        return sampler(spec, inputs, **options)

    def spy(q, k, v, softmax_scale, is_causal):
        seen.add((q.shape, q.dtype, softmax_scale, is_causal, q.is_contiguous()))
        return naive_attention(q, k, v, softmax_scale, is_causal)

    monkeypatch.setattr(compare, "kernel_sampler", watch)
    precisions = {"float32": "ieee-fp32", "float16": "fp16"}
    for needs in (True, False):
        spec = add(f"TEST_SPY_{needs}".upper(), spy, precisions=precisions, needs_contiguous=needs)
        cell = KernelCell(8, batch=2, num_heads=3, head_dim=16, dtype="float16", is_causal=False)
        compare.compare_kernels([spec], [cell], device="cpu", rounds=2)
        assert seen == {((2, 8, 3, 16), torch.float16, 0.25, False, needs)}
        seen.clear()
        (inputs,) = (inputs for timed_spec, inputs in timed if timed_spec is spec)
        assert all(x.is_contiguous() == needs for qkv in inputs for x in qkv)  # no copy is timed
        assert len({x.data_ptr() for qkv in inputs for x in qkv}) == 3 * len(inputs)


def test_what_is_recorded_is_the_case_that_is_nearest_to_its_budget(monkeypatch):
    verdicts = [Verdict(error, 1e-6, 2e-7) for error in (1e-7, 5e-7, 2e-7)]
    monkeypatch.setattr(compare, "run_case", lambda *_: verdicts.pop(0))
    found = Series("NAIVE_PYTORCH", {}, "us")
    cases = [Case(n, 32) for n in (7, 8, 9)]
    compare._check(found, get_backend("NAIVE_PYTORCH"), cases, "cpu")
    assert (found.status, found.facts["error"]) == ("ok", 5e-7)


def test_a_kernels_sample_is_the_time_of_one_call(monkeypatch):
    moments = iter((1.0, 1.000006))
    monkeypatch.setattr(compare, "time", types.SimpleNamespace(perf_counter=lambda: next(moments)))
    seen = []

    def attention(*qkv, is_causal):
        seen.append((qkv, is_causal))

    inputs = [Case(4, 8, seed=seed).inputs("cpu") for seed in range(3)]
    spec = types.SimpleNamespace(attention=attention)
    sample = compare.kernel_sampler(spec, inputs, is_causal=False)
    assert sample() == pytest.approx(2.0)  # microseconds: three calls took six
    assert seen == [(qkv, False) for qkv in inputs]


# Generation


def test_a_sample_of_generation_is_the_cells_and_without_its_warm_up(demo, monkeypatch):
    seen = set()

    def told(model, prompts, **options):
        done = generate(model, prompts, **options)
        seen.add((done.attention, done.decode_attention, done.mode, len(prompts)))
        assert {len(prompts[0]) + len(tokens) for tokens in done.tokens} == {10}
        assert options["ignore_eos"]
        done.warm_up_s, done.prefill_s, done.generation_s = 1.0, 2.0, 3.0
        return done

    monkeypatch.setattr(compare, "generate", told)
    cell = GenerationCell(10, batch=2, mode="kv-cache")
    results = compare.compare_generation(
        lambda dtype: demo, specs_of(*TWO), [cell], PROMPT, name="demo", rounds=2
    )
    assert seen == {(name, name, "kv-cache", 2) for name in (*TWO, FREE_ATTENTION)}
    for series in results.series:
        assert series.samples == [3.0, 3.0]
        assert (series.facts["warm_up_s"], series.facts["prefill_s"]) == ([1.0, 1.0], [2.0, 2.0])


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
        untimed = "refused" if cell.mode == "kv-cache" else "emulated"  # it has no decode kernel
        assert found["CUSTOM_CUDA_VERSION_12"].status == untimed
        assert not found["CUSTOM_CUDA_VERSION_12"].samples


def test_a_text_that_is_wrong_only_in_the_model_is_caught(demo, clean_registry):
    """Right in every case of the check, wrong at the lengths that generation runs in between."""

    def wrong_at_32(q, k, v, softmax_scale, is_causal):
        kernel = off_by_one if q.shape[1] == 32 else naive_attention
        return kernel(q, k, v, softmax_scale, is_causal)

    add("TEST_WRONG_AT_32", wrong_at_32)
    names = ("NAIVE_PYTORCH", "TEST_WRONG_AT_32")
    results = compare.compare_generation(
        lambda dtype: demo, specs_of(*names), [GenerationCell(40)], PROMPT, name="demo", rounds=2
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


def test_what_ctrl_c_cuts_short_is_no_sample(demo, monkeypatch, tmp_path):
    """generate() ends with what there is so far; a benchmark must not take that for a time."""
    calls = []

    def cut_short(*arguments, **options):
        calls.append(1)
        done = generate(*arguments, **options)
        if len(calls) == 6:  # in the rounds that are timed
            done.finish_reasons = ["interrupted"]
        return done

    out = tmp_path / "r.json"
    monkeypatch.setattr(compare, "generate", cut_short)
    arguments = (lambda dtype: demo, specs_of(*TWO), [GenerationCell(10)], PROMPT)
    options = {"name": "demo", "rounds": 2, "out": out}
    with pytest.raises(KeyboardInterrupt):
        compare.compare_generation(*arguments, **options)
    kept = {s.name: s.samples for s in read(tmp_path / "r.json.partial").series}
    results = compare.compare_generation(*arguments, **options)
    for name, series in by_name(results).items():
        assert len(series.samples) == 2
        assert series.samples[: len(kept[name])] == kept[name]


def test_a_text_that_is_wrong_in_a_batch_or_now_and_then_is_caught(demo, clean_registry):
    calls = []

    def wrong_in_a_batch(q, k, v, softmax_scale, is_causal):
        wrong = q.shape[:2] == (2, 32)
        return (off_by_one if wrong else naive_attention)(q, k, v, softmax_scale, is_causal)

    def wrong_later(q, k, v, softmax_scale, is_causal):
        calls.append(1)
        wrong = q.shape[1] == 32 and len(calls) > 300
        return (off_by_one if wrong else naive_attention)(q, k, v, softmax_scale, is_causal)

    add("TEST_WRONG_IN_A_BATCH", wrong_in_a_batch)
    add("TEST_WRONG_LATER", wrong_later)
    specs = specs_of("TEST_WRONG_IN_A_BATCH", "TEST_WRONG_LATER")
    cells = [GenerationCell(40, batch=2)]
    results = compare.compare_generation(
        lambda dtype: demo, specs, cells, PROMPT, name="demo", rounds=3
    )
    found = by_name(results)
    assert found["NAIVE_PYTORCH"].status == "ok"  # the baseline, though nobody named it
    batch, later = found["TEST_WRONG_IN_A_BATCH"], found["TEST_WRONG_LATER"]
    assert (batch.status, batch.samples) == ("failed", [])
    assert batch.reason.startswith("bug in B: the first layer over its budget: layer 0, ")
    assert (later.status, later.samples) == ("failed", [])
    assert later.reason == "its text is another from run to run"


def test_a_tie_that_shows_only_in_a_batch_is_a_tie(clean_registry, save_checkpoint):
    """Two tokens lead by a distance that rounding turns, in a batch and not alone."""

    def other_in_a_batch(q, k, v, softmax_scale, is_causal):
        o = naive_attention(q, k, v, softmax_scale, is_causal)
        return o if len(q) == 1 else o * (1 + 2**-22)  # within any budget: 4 ulps are a part of it

    spec = add("TEST_OTHER_IN_A_BATCH", other_in_a_batch)
    folder, _ = save_checkpoint(tie_word_embeddings=False)
    prompt = list(range(100, 116))
    states = []
    for name in ("NAIVE_PYTORCH", spec.name):
        model = GPT2.from_pretrained(str(folder), device="cpu", attention=name)
        model.ln_f.register_forward_hook(lambda _module, _x, y: states.append(y.double()[0, 0]))
        model(torch.tensor([prompt] * 2))
    middle, apart = (states[0] + states[1]) / 2, states[0] - states[1]
    middle /= middle.norm()
    apart -= (apart @ middle) * middle
    apart /= apart.norm()

    def tie(tensors):
        tensors["lm_head.weight"] *= 0.01
        tensors["lm_head.weight"][7] = (middle / 5 + apart / 2).float()
        tensors["lm_head.weight"][11] = (middle / 5 - apart / 2).float()
        return tensors

    rewrite(folder, tie)
    model = GPT2.from_pretrained(str(folder), device="cpu")
    found = by_name(
        compare.compare_generation(
            lambda dtype: model, [spec], [GenerationCell(18, 2)], prompt, name="tie", rounds=2
        )
    )
    ours, plain = found[spec.name], found["NAIVE_PYTORCH"]
    assert ours.facts["token_digest"] != plain.facts["token_digest"]
    assert (ours.status, ours.reason, ours.facts["diverges"]) == ("ok", "", "tie")
    assert len(ours.samples) == 2


def test_a_text_that_is_wrong_once_is_judged_as_it_was_written(demo, clean_registry):
    """And not as it is written again."""
    calls = []

    def wrong_once(q, k, v, softmax_scale, is_causal):
        wrong = q.shape[1] == 32 and calls.count(32) < 16 * 6  # steps of the first text, layers
        calls.append(q.shape[1])
        return (off_by_one if wrong else naive_attention)(q, k, v, softmax_scale, is_causal)

    spec = add("TEST_WRONG_ONCE", wrong_once)
    results = compare.compare_generation(
        lambda dtype: demo, [spec], [GenerationCell(40)], PROMPT, name="demo", rounds=2
    )
    series = by_name(results)["TEST_WRONG_ONCE"]
    assert series.status == "failed"
    assert series.reason.startswith("bug in B: rounding does not explain its token, ")
    assert "state between calls" in series.reason


def test_a_kernel_that_answers_from_memory_is_caught(clean_registry):
    known = {}

    def by_shape(q, k, v, softmax_scale, is_causal):
        if q.shape not in known:
            known[q.shape] = naive_attention(q, k, v, softmax_scale, is_causal)
        return known[q.shape]

    add("TEST_MEMORY", by_shape)
    cell = KernelCell(24, num_heads=2, head_dim=32)
    found = by_name(
        compare.compare_kernels(specs_of("TEST_MEMORY"), [cell], device="cpu", rounds=2)
    )
    assert found["NAIVE_PYTORCH"].status == "ok"
    assert (found["TEST_MEMORY"].status, found["TEST_MEMORY"].samples) == ("failed", [])
    assert "after its samples its output is wrong" in found["TEST_MEMORY"].reason


def test_any_error_of_a_kernel_is_its_own(demo, clean_registry):
    def fails(q, k, v, softmax_scale, is_causal):
        raise ValueError("not today\nnor tomorrow")

    add("TEST_FAILS", fails)
    specs = specs_of("TEST_FAILS", "PYTORCH_SDPA_MATH")
    cell = KernelCell(8, num_heads=1, head_dim=32)
    kernels = compare.compare_kernels(specs, [cell], device="cpu", rounds=2)
    texts = compare.compare_generation(
        lambda dtype: demo, specs, [GenerationCell(10)], PROMPT, name="demo", rounds=2
    )
    for results in (kernels, texts):
        found = by_name(results)
        assert (found["TEST_FAILS"].status, found["PYTORCH_SDPA_MATH"].status) == ("failed", "ok")
        assert found["TEST_FAILS"].reason == "ValueError: not today"


def test_what_would_make_no_comparison_is_refused(demo):
    def run(cells, **options):
        options = {"name": "demo", "rounds": 2} | options
        specs = specs_of("NAIVE_PYTORCH")
        compare.compare_generation(lambda dtype: demo, specs, cells, PROMPT, **options)

    with pytest.raises(RequestError, match="rounds must be 2 or more, not 1"):
        run([GenerationCell(10)], rounds=1)
    with pytest.raises(RequestError, match="not in float64"):
        run([GenerationCell(10, dtype="float64")])
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ArgumentError, match="set to compute float32 products in TF32"):
            run([GenerationCell(10)])
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_baseline_may_be_in_no_registry(demo):
    spec = BackendSpec(
        name="TEST_UNREGISTERED",
        family="test",
        summary="A test's.",
        loader=lambda: Kernels(naive_attention),
        precisions={"float32": "ieee-fp32"},
    )
    options = {"rounds": 2, "baseline": spec}
    cell = KernelCell(8, num_heads=1, head_dim=32)
    kernels = compare.compare_kernels(specs_of(*TWO), [cell], device="cpu", **options)
    texts = compare.compare_generation(
        lambda dtype: demo, specs_of(*TWO), [GenerationCell(10)], PROMPT, name="demo", **options
    )
    for results in (kernels, texts):
        assert results.settings["baseline"] == "TEST_UNREGISTERED"
        found = by_name(results)
        assert {"TEST_UNREGISTERED", *TWO} <= {*found}
        assert {series.status for series in found.values()} == {"ok"}


def test_the_memory_of_states_is_that_of_each_cells_dtype(demo, monkeypatch):
    needed = []
    monkeypatch.setattr(compare, "_check_memory", lambda _, n, device: needed.append(n))
    monkeypatch.setattr(compare.Recorder, "measure", lambda *_: None)
    cells = [GenerationCell(10, dtype=dtype) for dtype in ("float32", "bfloat16")]
    compare.compare_generation(lambda _: demo, specs_of(*TWO), cells, PROMPT, name="demo")
    assert sorted(needed) == [10 * 256 * 2, 10 * 256 * 4]


def test_other_build_flags_are_another_run(tmp_path, monkeypatch):
    def settings_of():
        return compare._identity(compare.Recorder("t", {}, [], None, rounds=2).results)

    before = settings_of()
    for name in ("ATTENTION_KERNELS_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "-DMORE")
        assert settings_of() != before
        monkeypatch.delenv(name)
    assert settings_of() == before


def test_what_no_memory_holds_is_refused_before_anything_runs(demo, monkeypatch):
    monkeypatch.setattr(compare.ladder, "build_all", pytest.fail)
    for cell in (
        KernelCell(64, num_heads=10**12),
        KernelCell(64, batch=10**30),
        KernelCell(64, head_dim=10**12, dtype="float16"),
    ):
        with pytest.raises(RequestError, match=r"would take .* GiB, and cpu has \d"):
            compare.compare_kernels(specs_of(*TWO), [CELLS[0], cell], device="cpu")
    with pytest.raises(RequestError, match=r"batch 10{15}, .* GiB, and cpu has \d"):
        compare.compare_generation(
            lambda dtype: demo, specs_of(*TWO), [GenerationCell(10, 10**15)], PROMPT, name="demo"
        )


def test_inputs_that_there_is_no_memory_for_are_a_failure_of_their_cell(monkeypatch):
    monkeypatch.setattr(compare, "_check", lambda *_, **__: None)

    def no_memory(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(compare.torch, "stack", no_memory)
    results = compare.compare_kernels(specs_of(*TWO), CELLS, device="cpu", rounds=2)
    assert [(series.status, series.reason) for series in results.series] == [
        ("failed", "OutOfMemoryError: no memory")
    ] * 4


# Progress


@pytest.fixture
def bars(monkeypatch):
    """The progress bars of the run, and how far they were at each of its ends."""
    made = []

    def bar(*arguments, **options):
        made.append(tqdm(*arguments, **(options | {"disable": False, "file": io.StringIO()})))
        return made[-1]

    monkeypatch.setattr(compare, "tqdm", bar)
    return made


def test_one_bar_tells_of_all_cells_and_of_the_checks(demo, clean_registry, monkeypatch, bars):
    add("TEST_WRONG", off_by_one)
    add("TEST_HALF", naive_attention, precisions={"float16": "fp16"})
    specs = specs_of(*TWO, "TEST_WRONG", "TEST_HALF")
    at = []
    check = compare._check
    monkeypatch.setattr(
        compare, "_check", lambda *a, **o: (at.append((bars[0].n, bars[0].total)), check(*a, **o))
    )
    compare.compare_kernels(specs, CELLS, device="cpu", rounds=2)
    # Per cell 3 checks and, of those that pass, 1 + 2 runs each.
    assert at == [(0, 24), (1, 24), (2, 24), (9, 21), (10, 21), (11, 21)]
    (bar,) = bars
    assert (bar.n, bar.total) == (18, 18)
    assert bar.disable is True  # closed
    bars.clear()
    compare.compare_generation(
        lambda dtype: demo, specs, [GenerationCell(10)], PROMPT, name="demo", rounds=2
    )
    (bar,) = bars
    assert (bar.n, bar.total) == (4 + 9, 4 + 9)  # FREE_ATTENTION is one more


def test_the_bar_of_a_run_that_goes_on_is_of_what_is_left(monkeypatch, tmp_path, bars):
    interrupted_after(monkeypatch, 8)  # one cell, and two warm-ups
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r.json")
    assert bars[0].disable is True
    assert (bars[0].n, bars[0].total) == (2 * 2 + 8, 2 * 2 + 12)
    interrupted_after(monkeypatch, 3)  # 2 warm-ups again, and 1 sample
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r.json")
    assert (bars[1].n, bars[1].total) == (2 + 3, 2 + 6)
    interrupted_after(monkeypatch, 1000)
    run(tmp_path / "r.json")
    assert (bars[2].n, bars[2].total) == (2 + 5, 2 + 5)


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


def test_a_kernel_is_told_by_the_length_of_the_bars():
    assert tables.detail_seqlen([64, 1024, 4096]) == 1024
    assert tables.detail_seqlen([64, 512]) == 512


def test_what_is_within_the_spread_gets_no_figure():
    base = series("NAIVE_PYTORCH", "ieee-fp32", [2.0, 2.1])
    touching = series("A", "ieee-fp32", [1.8, 2.0])
    clear = series("B", "ieee-fp32", [1.0, 1.99])
    every = [base, touching, clear]
    assert math.isnan(tables.ratio(touching, every, "NAIVE_PYTORCH"))
    assert tables.ratio(clear, every, "NAIVE_PYTORCH") == pytest.approx(2.05 / 1.495)
    assert tables.ratio(base, every, "NAIVE_PYTORCH") == 1.0
    free = series(FREE_ATTENTION, "none", [2.0, 2.05])
    for slow in (base, touching, clear):  # overlapping, touching, and faster than no attention
        assert math.isnan(tables.attention_share(slow, [free]))
    assert tables.attention_share(series("C", "ieee-fp32", [4.0, 4.2]), [free]) > 0.5


def test_a_table_says_what_stands_for_no_figure(demo, tmp_path):
    texts = compare.compare_generation(
        lambda dtype: demo, specs_of(*TWO), [GenerationCell(10)], PROMPT, name="demo", rounds=2
    )
    samples = {"NAIVE_PYTORCH": [2.0, 2.2], "PYTORCH_SDPA_MATH": [2.1, 2.3]}
    for one in texts.series:
        one.samples = samples.get(one.name, [1.0, 1.1])
    note = "`~`: no difference beyond the spread of the samples."
    text = tables.render(tmp_path / "r.json", texts)
    assert "| 2.200 | 9.1 % | ~ |" in text
    assert "| 2.100 | 9.5 % | 1.00 |" in text
    assert text.count(note) == 1
    by_name(texts)["PYTORCH_SDPA_MATH"].samples = [4.0, 4.4]
    text = tables.render(tmp_path / "r.json", texts)
    assert "| 4.200 | 9.5 % | 0.50 |" in text
    assert note not in text
    by_name(texts)[FREE_ATTENTION].samples = [4.2, 4.4]
    text = tables.render(tmp_path / "r.json", texts)
    assert text.count(" | ~ |") == 2  # the shares
    assert "| -" not in text


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
        assert f"rounds ({tmp_path / 'file.json'})" in text
        linked = tables.render(tmp_path / "file.json", results, linked=True)
        assert "rounds ([file.json](results/file.json))" in linked


def test_a_decode_kernel_that_is_wrong_is_caught(demo, clean_registry):
    """By its own check or, where that does not reach, by the text that it writes with a cache."""

    def wrong(q, k_cache, v_cache, seqlens, softmax_scale):
        return v_cache[:, :1]

    def wrong_for_four_heads(q, k_cache, v_cache, seqlens, softmax_scale):
        kernel = wrong if q.shape[2] == 4 else get_backend("NAIVE_PYTORCH").load().decode
        return kernel(q, k_cache, v_cache, seqlens, softmax_scale)

    fields = {"family": "test", "summary": "A test's.", "precisions": {"float32": "ieee-fp32"}}
    for name, kernel in (("TEST_WRONG", wrong), ("TEST_WRONG_FOR_FOUR", wrong_for_four_heads)):
        register(name=name, **fields)(lambda kernel=kernel: Kernels(naive_attention, kernel))
    cell = GenerationCell(24, mode="kv-cache")
    specs = specs_of("TEST_WRONG", "TEST_WRONG_FOR_FOUR")
    found = by_name(
        compare.compare_generation(lambda dtype: demo, specs, [cell], PROMPT, name="demo", rounds=2)
    )
    assert found["TEST_WRONG"].status == found["TEST_WRONG_FOR_FOUR"].status == "failed"
    assert found["TEST_WRONG"].reason.startswith("decode: error ")
    assert found["TEST_WRONG_FOR_FOUR"].reason.startswith(
        "bug in B: rounding does not explain its token, "
    )
