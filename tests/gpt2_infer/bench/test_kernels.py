from __future__ import annotations

import pytest
import torch

from attention_kernels import UnknownBackendError, get_backend, registry
from attention_kernels.judge import timing
from attention_kernels.judge.truth import naive_attention
from gpt2_infer.bench import selection
from gpt2_infer.bench.record import KernelCell, encode
from gpt2_infer.bench.study import KernelStudy, run
from gpt2_infer.errors import RequestError
from tests.conftest import DEVICES
from tests.gpt2_infer.bench.common import TWO, add, by_name, off_by_one

CELL = KernelCell(24, num_heads=2, head_dim=32)


def compare(*names, cells=(CELL,), rounds=2, device="cpu", **settings):
    settings |= {"dtypes": [*dict.fromkeys(cell.dtype for cell in cells)], "device": device}
    return run(KernelStudy(backends=[*names], cells=[*cells], rounds=rounds, **settings))


def test_kernels_are_checked_then_timed(clean_registry, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", "75")  # too little shared memory for version 1
    add("TEST_WRONG", off_by_one)
    cells = [CELL, KernelCell(8, num_heads=1, head_dim=128, dtype="float16")]
    names = (*TWO, "TEST_WRONG", "CUSTOM_CUDA_VERSION_8")
    results = compare(*names, cells=cells, rounds=3)
    assert [row.contender for row in results.rows] == [*names, *TWO]  # one for each dtype
    found = {row.contender: row for row in results.rows[: len(names)]}
    for name in TWO:
        assert found[name].status == "ok"
        assert len(found[name].samples) == 3
        assert all(sample > 0 for sample in found[name].samples)
        assert found[name].check.error <= found[name].check.budget
    wrong = found["TEST_WRONG"]
    assert (wrong.status, wrong.samples) == ("failed", [])
    assert "budget" in wrong.reason
    emulated = found["CUSTOM_CUDA_VERSION_8"]
    assert (emulated.status, emulated.samples) == ("emulated", [])
    assert emulated.check.error <= emulated.check.budget
    assert emulated.extra["flags"] == "--use_fast_math"
    encode(results)
    cell = KernelCell(8, num_heads=1, head_dim=128)
    refused = by_name(compare("CUSTOM_CUDA_VERSION_1", cells=[cell]))["CUSTOM_CUDA_VERSION_1"]
    assert refused.status == "refused"
    assert "shared memory" in refused.reason


def test_decode_kernels_are_checked_then_timed(clean_registry):
    def forgetful(q, k_cache, v_cache, seqlens, scale):
        return naive_attention(q, k_cache, v_cache, scale, False, (seqlens - 1).clamp(min=1))

    add("TEST_FORGETFUL", None, forgetful)
    add("TEST_NO_DECODE", naive_attention)
    names = ("TEST_FORGETFUL", "TEST_NO_DECODE", "DECODE_SPLIT_KV_VERSION_1")
    cell = KernelCell(24, batch=3, num_heads=2, head_dim=32, is_causal=False)
    found = by_name(compare(*names, cells=[cell], decode=True))
    assert {name: row.status for name, row in found.items()} == {
        "NAIVE_PYTORCH": "ok",
        "TEST_FORGETFUL": "failed",
        "TEST_NO_DECODE": "refused",
        "DECODE_SPLIT_KV_VERSION_1": "emulated",
    }
    assert len(found["NAIVE_PYTORCH"].samples) == 2
    assert found["TEST_NO_DECODE"].reason == "it has no decode kernel on cpu"


def test_a_kernel_that_returns_a_cached_answer_is_caught(clean_registry):
    known = {}

    def by_shape(q, k, v, softmax_scale, is_causal):
        if q.shape not in known:
            known[q.shape] = naive_attention(q, k, v, softmax_scale, is_causal)
        return known[q.shape].clone()

    add("TEST_MEMORY", by_shape)
    found = by_name(compare("TEST_MEMORY"))
    assert found["NAIVE_PYTORCH"].status == "ok"
    assert (found["TEST_MEMORY"].status, found["TEST_MEMORY"].samples) == ("failed", [])
    assert "the timed outputs are wrong" in found["TEST_MEMORY"].reason


@pytest.mark.parametrize("after", [0, 4])
def test_a_kernel_that_raises_has_failed_and_stops_no_other(after, clean_registry):
    calls = []

    def fails(q, k, v, softmax_scale, is_causal):
        calls.append(1)
        if len(calls) > after:
            raise AssertionError("not today\nnor tomorrow")
        return naive_attention(q, k, v, softmax_scale, is_causal)

    add("TEST_FAILS", fails)
    found = by_name(compare("TEST_FAILS", "PYTORCH_SDPA_MATH", rounds=5))
    assert found["PYTORCH_SDPA_MATH"].status == "ok"
    assert (found["TEST_FAILS"].status, found["TEST_FAILS"].samples) == ("failed", [])
    assert "raised AssertionError: not today (" in found["TEST_FAILS"].reason
    assert "\n" not in found["TEST_FAILS"].reason
    assert found["TEST_FAILS"].reason.startswith("while it was timed") == bool(after)


BREAKS = """
@register(name="STRANGE", family="plug-in", summary="It breaks.", device_types=("cpu", "cuda"),
          precisions={"float32": "ieee-fp32"})
def load():
    def attention(q, k, v, scale, causal):
        if q.shape[1] == 80 and q.is_cuda:  # an assertion on the device, which breaks its context
            q.new_zeros(2)[torch.full((9,), 9, device="cuda")]
            torch.cuda.synchronize()
        if q.shape[1] == 80:
            os.abort()
        return right(q, k, v, scale, causal)
    return Kernels(attention)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_that_breaks_its_process_costs_its_own_cell(
    device, plugin, clean_registry, monkeypatch
):
    plugin(BREAKS)
    monkeypatch.setattr(registry, "_discovered", False)  # it is looked for in the next listing
    cells = [KernelCell(n) for n in (64, 80, 96)]
    found = compare("STRANGE", cells=cells, device=device).of("time")
    rows = [row for row in found if row.contender == "STRANGE"]
    assert [row.status for row in rows] == ["ok", "failed", "ok"], [row.reason for row in rows]
    words = "device-side assert" if device == "cuda" else "it was killed by SIGABRT"
    assert words in rows[1].reason


def test_every_call_has_the_shape_of_its_cell(clean_registry):
    seen, pointers = set(), set()

    def spy(q, k, v, softmax_scale, is_causal):
        seen.add((q.shape, q.dtype, softmax_scale, is_causal, q.is_contiguous()))
        pointers.add(q.data_ptr())
        return naive_attention(q, k, v, softmax_scale, is_causal)

    spec = add("TEST_SPY", spy, precisions={"float16": "fp16"}, needs_contiguous=True)
    cell = KernelCell(8, batch=2, num_heads=3, head_dim=16, dtype="float16", is_causal=False)
    compare(spec.name, cells=[cell])
    assert seen == {((2, 8, 3, 16), torch.float16, 0.25, False, True)}
    assert len(pointers) >= timing.CPU_CALLS


def select(*backends: str, decode: bool = False, **settings) -> list[str]:
    study = KernelStudy(backends=[*backends], device="cpu", **settings)
    return [spec.name for spec in selection.select(study, decode=decode)[1]]


def test_only_backends_that_run_here_are_selected(capsys):
    names = select()
    assert "NAIVE_PYTORCH" in names
    assert not any(name.startswith("CUSTOM_CUDA") for name in names)  # it would run emulated
    assert select("naive-pytorch", "NAIVE_PYTORCH") == ["NAIVE_PYTORCH"]
    pytorch = select(families=["pytorch"])
    assert {get_backend(name).family for name in pytorch} == {"pytorch"}
    named = select("CUSTOM_CUDA_VERSION_2", families=["pytorch"])
    assert named == [*pytorch, "CUSTOM_CUDA_VERSION_2"]
    assert capsys.readouterr().err == ""
    assert select(families=["pytorch", "fp32"]) == pytorch
    err = capsys.readouterr().err
    assert err.startswith("not measured on cpu: fp32 (its source runs in the CPU ")
    assert err.count("\n") == 1
    with pytest.raises(UnknownBackendError):
        select("no-such")


@pytest.mark.parametrize(
    ("study", "reason"),
    [
        (KernelStudy(families=["nvidia"]), "no family named nvidia, only "),
        (KernelStudy(backends=["PYTORCH_SDPA_CUDNN_ATTENTION"]), "on cpu: runs on cuda only"),
        (KernelStudy(backends=["DECODE_SPLIT_KV_VERSION_1"]), "it has a decode kernel only"),
        (KernelStudy(backends=["CUSTOM_CUDA_VERSION_1"], decode=True), "it has no decode kernel"),
        (KernelStudy(decode=True, full=True), "decode has no mask"),
        (KernelStudy(families=["fp32"]), r"^not measured on cpu: fp32 \("),
        (KernelStudy(families=["numpy"], dtypes=["float16"]), r"numpy \(takes float32, float64, n"),
    ],
)
def test_what_cannot_be_compared_is_refused(study, reason):
    study.device = "cpu"
    with pytest.raises(RequestError, match=reason):
        run(study)
