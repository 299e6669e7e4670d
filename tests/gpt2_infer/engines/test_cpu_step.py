"""The fused engine on a CPU, against the modules that it replaces."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attention_kernels.ladder import build, compilers, header
from gpt2_infer import GPT2, NotFiniteError, RequestError, Sampling, generate
from gpt2_infer.config import GPT2Config
from gpt2_infer.engines import cpu_step
from gpt2_infer.engines.cpu_step import CPUStep
from gpt2_infer.engines.fused import State
from gpt2_infer.linear import lay_out
from tests.conftest import needs_compiler
from tests.gpt2_infer.engines.common import random_model
from tests.gpt2_infer.engines.test_fused import check_steps, row_of, state_after

# No size is a multiple of a vector.
ODD = GPT2Config(
    vocab_size=101, n_positions=70, n_embd=39, n_layer=2, n_head=3, n_inner=53, eos_token_id=()
)
CONFIGS = {
    "odd": ODD,
    "scaled": dataclasses.replace(ODD, scale_attn_by_inverse_layer_idx=True),
    "not scaled": dataclasses.replace(ODD, scale_attn_weights=False, reorder_and_upcast_attn=True),
    "wide": dataclasses.replace(ODD, n_embd=256, n_head=2, n_inner=1100, tie_word_embeddings=False),
    "narrow": dataclasses.replace(ODD, n_embd=4, n_head=4, n_inner=1, n_layer=1),
}
LENGTHS = [3, 1, 9, 67, 20, 30, 60, 2]
PROMPTS = [[7, 3], [5, 6, 90, 2], [1]]


pytestmark = needs_compiler


def step_of(model: GPT2, state: State) -> CPUStep:
    return CPUStep(model, state, is_greedy=True)


def write(model, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 8, "mode": "kv-cache", "ignore_eos": True} | options
    return generate(model, prompts, **options)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_step_is_what_the_modules_compute(config, rows):
    check_steps(random_model(config), LENGTHS[:rows], 2, 2e-4, step_of)


def test_weights_may_be_stored_in_either_order():
    model = random_model(CONFIGS["wide"])
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = lay_out(parameter.data)
    assert model.wte.weight.stride(0) == 1 or model.h[0].mlp.c_proj.weight.stride(0) == 1
    check_steps(model, LENGTHS[:2], 2, 2e-4, step_of)
    model.wte.weight.data = torch.cat([model.wte.weight.data] * 2, 1)[:, : model.config.n_embd]
    model.lm_head.weight.data = torch.cat([model.lm_head.weight.data] * 2)[::2]
    check_steps(model, LENGTHS[:2], 2, 2e-4, step_of)


@pytest.mark.parametrize("name", ["odd", "wide"])
@torch.inference_mode()
def test_neither_the_batch_nor_the_threads_change_a_bit_of_a_row(name):
    model, before = random_model(CONFIGS[name]), torch.get_num_threads()
    results = []
    for count in (1, 2, 3, 16):
        torch.set_num_threads(count)
        results.append(check_steps(model, LENGTHS, 2, 2e-4, step_of))
    torch.set_num_threads(before)
    all_rows = results[0]
    assert all(torch.equal(rows, all_rows) for rows in results)
    state = state_after(model, LENGTHS)
    for row in range(len(LENGTHS)):
        alone = row_of(state, row)
        step = step_of(model, alone)
        for _ in range(2):
            step()
        assert torch.equal(step.logits[0], all_rows[row])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 50, 0.95, seed=3)])
def test_the_text_is_the_eager_engines(sampling, demo):
    prompts = ["Once upon a time", "The king"]
    options = {"max_new_tokens": 60, "sampling": sampling}
    ours, eager = (write(demo, prompts, engine=name, **options) for name in ("auto", "eager"))
    assert (ours.engine, ours.decode_attention) == ("fused", "FUSED")
    assert ours.tokens == eager.tokens
    pieces = []
    streamed = write(demo, prompts[:1], on_text=lambda _, text: pieces.append(text), **options)
    assert (streamed.tokens, "".join(pieces)) == (ours.tokens[:1], ours.texts[0])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("h.1.mlp.c_fc.bias", torch.nan),
        ("h.0.attn.c_attn.weight", torch.inf),
        ("ln_f.bias", -torch.inf),
    ],
)
def test_logits_that_are_not_finite_are_noticed(path, value):
    model = random_model(ODD)
    state = state_after(model, [3])
    model.get_parameter(path).data.view(-1)[5] = value
    step_of(model, state)()
    assert state.newest.tolist() == [-1]
    with pytest.raises(NotFiniteError):
        write(model)


def test_weights_changed_through_data_are_used():
    model = random_model(ODD)
    before = write(model).tokens
    model.h[1].mlp.c_fc.weight.data.mul_(-1)
    after = write(model)
    assert after.tokens == write(model, engine="eager").tokens != before
    model.h[1].mlp.c_fc.weight.data = -model.h[1].mlp.c_fc.weight.data
    assert write(model).tokens == before


def test_what_it_cannot_do_is_left_to_the_eager_engine():
    model = random_model(ODD)
    other = random_model(dataclasses.replace(ODD, activation_function="relu"))
    for which, prompts, reason in (
        (model.with_attention("NAIVE_PYTORCH"), PROMPTS, "decoding with the named backend NAIVE"),
        (other, PROMPTS, "activation_function relu"),
        (model, [[1]] * 9, r"a batch of 9 \(it takes up to 8\)"),
        (random_model(ODD, torch.bfloat16), PROMPTS, r"dtype bfloat16 \(on a CPU it takes float32"),
    ):
        assert write(which, prompts).engine == "eager"
        with pytest.raises(RequestError, match=f"the fused engine does not support this: {reason}"):
            write(which, prompts, engine="fused")


def test_without_a_compiler_the_eager_engine_runs(monkeypatch):
    model = random_model(ODD)
    monkeypatch.setattr(cpu_step, "_op", lambda: "error: no OpenMP")
    assert write(model).engine == "eager"
    with pytest.raises(RequestError, match="does not support this: error: no OpenMP"):
        write(model, engine="fused")


def test_machines_with_different_cpus_can_share_the_cache(monkeypatch):
    version = header.parse_header(cpu_step.SOURCE, "fused_step_")
    monkeypatch.setattr(build, "_find", lambda file: file)  # nothing is built
    names = set()
    for macros in ("#define __AVX__ 1", "#define __AVX512F__ 1"):
        monkeypatch.setattr(compilers, "native_macros", lambda _, macros=macros: macros)
        names.add(build.build(version, "emulator").name)
    assert len(names) == 2
