"""diverge() of two engines names the step in which one goes wrong."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from gpt2_infer import GPT2
from gpt2_infer import diverge as module
from gpt2_infer.diverge import diverge
from gpt2_infer.engines import base, make_engine
from gpt2_infer.engines.cached import Cached
from gpt2_infer.engines.cpu_step import FusedOnCPU
from gpt2_infer.engines.recompute import Forward, Recompute
from gpt2_infer.request import MODES
from tests.gpt2_infer.engines.common import random_model
from tests.gpt2_infer.engines.test_fused import CONFIG

PROMPT = [449, 1973, 355, 751, 258]


class BrokenLater(Cached):
    """Another model's weights from step 3 on, and another token at a step."""

    other: GPT2
    chooses_at: int | None = None

    def step(self, index: int) -> None:
        if index >= 3:
            self.model = self.other
        super().step(index)
        if index == self.chooses_at:
            self.newest.add_(1)


@pytest.fixture
def break_second(monkeypatch):
    """break_second(change): the second engine decodes with a model that went through `change`."""

    def break_second(change, engine=BrokenLater, name="eager"):
        calls = iter(range(2))

        def make(model, request):
            if next(calls) == 0:
                return make_engine(model, request)
            broken = engine(model, request, name)
            broken.other = copy.deepcopy(model)
            change(broken.other)
            return broken

        monkeypatch.setattr(module, "make_engine", make)

    return break_second


def compare(model, **options):
    return diverge(
        model, "eager", "eager", PROMPT, **{"max_new_tokens": 6, "mode": "kv-cache", **options}
    )


@pytest.mark.parametrize("path", ["h.2.attn.c_attn.bias", "h.5.mlp.c_proj.bias", "ln_f.bias"])
def test_the_step_of_a_wrong_weight_is_named(demo, break_second, path):
    break_second(lambda model: model.get_parameter(path)[::3].add_(0.1))
    result = compare(demo)
    assert result.position == len(PROMPT) + 3
    assert result.b.logits_error > result.b.logits_budget
    assert "its logits exceed their budget" in result.b.faults
    assert not result.a.faults
    assert str(result).endswith("\nbug in B: eager")


def test_a_bug_after_a_tie_is_found(demo, break_second, monkeypatch):
    """Both are fed one text, so that the steps after a tie are compared, too."""
    monkeypatch.setattr(BrokenLater, "chooses_at", 1)
    break_second(lambda model: model.ln_f.bias[::3].add_(0.1))
    choice = module._choice

    def choose(model, token, logits, reference):
        return choice(model, token, logits, reference) | {"shortfall": 0.0}

    monkeypatch.setattr(module, "_choice", choose)
    result = compare(demo)
    assert (result.step, result.position) == (1, len(PROMPT) + 3)
    assert result.verdict == "bug in B"


def test_a_token_that_is_not_the_most_likely_is_a_fault(demo, break_second, monkeypatch):
    monkeypatch.setattr(BrokenLater, "chooses_at", 2)
    break_second(lambda model: None)
    result = compare(demo)
    assert (result.step, result.position) == (2, len(PROMPT) + 2)
    assert "rounding does not explain its token" in result.b.faults[0]
    assert result.verdict == "bug in B"


def test_the_reference_of_a_model_that_upcasts_is_float64(save_checkpoint):
    folder, _ = save_checkpoint(reorder_and_upcast_attn=True, n_layer=3)
    model = GPT2.from_pretrained(str(folder), device="cpu")
    result = diverge(model, "eager", "eager", [1, 2, 3], max_new_tokens=4, mode="kv-cache")
    assert result.passed
    assert 0 < result.a.logits_budget < 1e-3


class WrongStep(FusedOnCPU):
    def prepare_decode(self):
        right, self.model = self.model, self.other
        super().prepare_decode()
        self.model = right


class WrongPass(Recompute):
    def warm_up(self):
        self.forward = Forward(self.other)
        super().warm_up()


@pytest.mark.parametrize("path", [None, "h.1.attn.c_attn.bias", "ln_f.bias"])
@pytest.mark.parametrize(("engine", "mode"), [(WrongStep, "kv-cache"), (WrongPass, "recompute")])
def test_the_logits_of_a_fused_engine_are_compared(engine, mode, path, break_second, monkeypatch):
    def change(model):
        if path:
            model.get_parameter(path)[::3].add_(0.1)

    monkeypatch.setattr(base, "capture", lambda body, **_: SimpleNamespace(replay=body))
    break_second(change, engine, "fused")
    model = random_model(CONFIG)
    result = diverge(model, "eager", "eager", [1, 2, 3], max_new_tokens=3, mode=mode)
    assert result.passed == (path is None), str(result)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["graph", "fused"])
def test_engines_on_a_gpu_differ_by_rounding_alone(engine, mode, dtype):
    if (engine, mode, dtype) == ("fused", "recompute", torch.bfloat16):
        pytest.skip("fused recomputes in float32 only")
    model = GPT2.from_pretrained("demo", device="cuda", dtype=dtype)
    result = diverge(model, "eager", engine, PROMPT, max_new_tokens=100, mode=mode)
    assert result.passed, str(result)
