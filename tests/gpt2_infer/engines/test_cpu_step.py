"""The fused engine on a CPU, against the modules that it replaces."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.compilers import BuildError
from gpt2_infer import GPT2, NotFiniteError, RequestError, Sampling, generate
from gpt2_infer.config import GPT2Config
from gpt2_infer.engines import cpu_step
from gpt2_infer.engines.cpu_step import CPUStep
from gpt2_infer.linear import lay_out
from gpt2_infer.model import KVCache
from tests.gpt2_infer.engines.common import random_model
from tests.gpt2_infer.engines.test_fused import State, check_steps, state_after

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


@pytest.fixture(autouse=True)
def compiler():
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)


@pytest.fixture
def threads():
    """Set the number of threads; the old one is restored."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def step_of(model: GPT2, state: State) -> CPUStep:
    return CPUStep(model, state.cache, state.newest, state.tokens, state.lengths, is_greedy=True)


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
def test_neither_the_batch_nor_the_threads_change_a_bit_of_a_row(name, threads):
    model = random_model(CONFIGS[name])
    threads(1)
    all_rows = check_steps(model, LENGTHS, 2, 2e-4, step_of)
    for count in (2, 3, 16):
        threads(count)
        assert torch.equal(check_steps(model, LENGTHS, 2, 2e-4, step_of), all_rows)
    state = state_after(model, LENGTHS)
    for row in range(len(LENGTHS)):
        only = slice(row, row + 1)
        alone = State(
            KVCache(state.cache.kv[:, :, only].clone(), state.cache.seqlens[only].clone()),
            *(x[only].clone() for x in (state.newest, state.tokens, state.lengths)),
        )
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("path", ["h.1.mlp.c_fc.bias", "h.0.attn.c_attn.weight", "ln_f.bias"])
def test_logits_that_are_not_finite_are_noticed(path, value):
    model = random_model(ODD)
    prompts = state_after(model, [3]).tokens[:, :3].tolist()
    state = state_after(model, [3])
    model.get_parameter(path).data.view(-1)[5] = value
    step_of(model, state)()
    assert state.newest.tolist() == [-1]
    with pytest.raises(NotFiniteError):
        write(model, prompts)
    assert write(model, prompts, check_finite=False).tokens[0][1:] == [0] * 7


def test_weights_changed_through_data_are_used():
    model = random_model(ODD)
    before = write(model).tokens
    model.h[1].mlp.c_fc.weight.data.mul_(-1)
    after = write(model)
    assert after.tokens == write(model, engine="eager").tokens != before
    model.h[1].mlp.c_fc.weight.data = -model.h[1].mlp.c_fc.weight.data
    assert write(model).tokens == before


def test_a_call_after_an_interrupted_one(demo):
    pieces = []

    def stop(row, piece):
        pieces.append(piece)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    assert write(demo, "Once", on_text=stop).finish_reasons == ["interrupted"]
    assert write(demo, "Once").tokens == write(demo, "Once", engine="eager").tokens


def test_what_it_cannot_do_is_left_to_the_eager_engine():
    model = random_model(ODD)
    named = model.with_attention(None, "NAIVE_PYTORCH")
    other = random_model(dataclasses.replace(ODD, activation_function="relu"))
    cases = (
        (model.with_attention("NAIVE_PYTORCH"), PROMPTS, "decoding with the named backend NAIVE"),
        (named, PROMPTS, "decoding with the named backend NAIVE_PYTORCH"),
        (other, PROMPTS, "activation_function relu"),
        (model, [[1]] * 9, r"a batch of 9 \(it takes up to 8\)"),
        (random_model(ODD, torch.bfloat16), PROMPTS, r"dtype bfloat16 \(on a CPU it takes float32"),
    )
    for which, prompts, reason in cases:
        assert write(which, prompts).engine == "eager"
        with pytest.raises(RequestError, match=f"the fused engine does not support this: {reason}"):
            write(which, prompts, engine="fused")
    assert write(named).decode_attention == "NAIVE_PYTORCH"


def test_another_engine_does_not_build_the_step(monkeypatch):
    monkeypatch.setattr(cpu_step, "_op", lambda: pytest.fail("it was built"))
    model = random_model(ODD)
    assert write(model, engine="eager").engine == "eager"
    with pytest.raises(RequestError, match="the graph engine does not support this: it needs a"):
        write(model, engine="graph")


def test_without_a_compiler_the_eager_engine_runs(monkeypatch):
    model = random_model(ODD)

    def fail(*_):
        raise BuildError("error: no OpenMP")

    cpu_step._op.cache_clear()
    monkeypatch.setattr(cpu_step, "load_op", fail)
    try:
        assert write(model).engine == "eager"
        with pytest.raises(RequestError, match="does not support this: error: no OpenMP"):
            write(model, engine="fused")
    finally:
        cpu_step._op.cache_clear()
    monkeypatch.setenv("CXX", "no-compiler")
    assert write(model).engine == "eager"
    sentence = "the fused engine does not support this: CXX asks for no-compiler, which is not an"
    with pytest.raises(RequestError, match=sentence):
        write(model, engine="fused")


def test_machines_with_different_cpus_can_share_the_cache(monkeypatch):
    version = header.parse_header(cpu_step.SOURCE, "fused_step_")
    monkeypatch.setattr(build, "_find", lambda file: file)  # nothing is built
    names = set()
    for macros in ("#define __AVX__ 1", "#define __AVX512F__ 1"):
        monkeypatch.setattr(compilers, "native_macros", lambda _, macros=macros: macros)
        names.add(build.build(version, "emulator").name)
    assert len(names) == 2
