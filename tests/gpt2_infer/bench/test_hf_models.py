"""Models with grouped queries, which transformers runs, in the studies of whole models."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attention_kernels.judge.truth import naive_attention
from gpt2_infer.bench import hf_models, worth
from gpt2_infer.bench.record import FREE_ATTENTION
from gpt2_infer.bench.show.figures import main_rows
from gpt2_infer.bench.study import GenerationStudy, run
from gpt2_infer.checkpoint import DEMO_MODEL, open_checkpoint
from gpt2_infer.errors import RequestError, WeightsError
from tests.conftest import on_every_device
from tests.gpt2_infer.bench.common import TWO, add, by_name

TINY = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 8192,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**TINY, tie_word_embeddings=False),
    "qwen3": transformers.Qwen3Config(**TINY),
}
PROMPT = [7, 1, 5, 3, 2, 9]


@pytest.fixture(params=["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def folder(request, tmp_path):
    """A folder with a random model whose text is not one repeated token, and its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.generation_config.repetition_penalty = 9.0  # the study's text is greedy nonetheless
    model.save_pretrained(tmp_path)
    demo = open_checkpoint(DEMO_MODEL).folder
    for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(demo / file, tmp_path)
    return tmp_path


def compare(folder, *names, **settings):
    settings = {"max_tokens": [14], "prompt": PROMPT, "rounds": 2, "examine": True} | settings
    return run(GenerationStudy(model=str(folder), backends=[*names], **settings))


@on_every_device
@pytest.mark.parametrize("mode", ["recompute", "kv-cache"])
def test_texts_are_those_of_transformers_own_attention(folder, mode, device):
    results = compare(folder, *TWO, modes=[mode], batch_sizes=[2], device=device)
    rows = main_rows(results)
    assert [row.contender for row in rows] == [*TWO, FREE_ATTENTION]
    assert all(len(row.samples) == 2 for row in rows)
    naive, math, free = rows
    assert naive.extra["token_digest"] == math.extra["token_digest"] != free.extra["token_digest"]
    assert math.extra["diverges"] == "equal"
    assert 0 < math.extra["logits_difference"] < 1e-4
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    options = {"device": device, "dtype": "float32", "attention": TWO[0]}
    model = hf_models.load(str(folder), random_weights=False, **options)
    ours = model.generate([PROMPT], 8, mode).tokens[0]
    assert len({*ours}) > 4
    with torch.no_grad():
        logits = eager(torch.tensor([PROMPT + ours[:-1]])).logits[0, len(PROMPT) - 1 :]
    assert ours == logits.argmax(-1).tolist()


def test_a_kernel_that_confuses_grouped_heads_is_caught(folder, clean_registry):
    def confused(q, k, v, softmax_scale, is_causal):
        k, v = (x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v))
        return naive_attention(q, k, v, softmax_scale, is_causal)

    add("CONFUSED", confused, supports_gqa=True)
    add("WITHOUT_GROUPS", naive_attention)
    found = by_name(compare(folder, "CONFUSED", "WITHOUT_GROUPS", device="cpu"))
    assert found["CONFUSED"].reason.startswith("bug in B: the first layer over its budget: layer 0")
    assert found["WITHOUT_GROUPS"].extra["diverges"] == "equal"


@pytest.mark.slow
@pytest.mark.usefixtures("busy_machine")
def test_what_a_kernel_is_worth_in_every_mode(folder):
    options = {"device": "cpu", "max_tokens": 12, "quick": True, "model": str(folder)}
    file = worth.answer(worth.Question("PYTORCH_SDPA_MATH", **options))
    assert {row.cell["num_heads"] for row in file.of("time")} == {4}
    texts = file.of("generation")
    assert [*dict.fromkeys(row.cell["mode"] for row in texts)] == [*worth.MODES]
    for row in texts:
        assert len(row.samples) == 2
        assert row.extra.get("diverges", "equal") in ("equal", "tie")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_a_named_size_has_the_parameters_of_the_published_model(name, parameters):
    found = hf_models.find(name, random_weights=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(found.settings)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    with pytest.raises(RequestError, match="needs --random-weights, or the folder of its weights"):
        hf_models.find(name)


def test_gpt2_is_left_to_gpt2_and_other_folders_are_loaded_whole_or_not_at_all(
    save_checkpoint, tmp_path
):
    folder, _ = save_checkpoint()
    for model in (str(folder), DEMO_MODEL, "gpt2-xl", "no/such-model"):
        assert hf_models.find(model, random_weights=True) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(WeightsError, match="cannot be loaded: ValueError: Unrecognized model"):
        hf_models.find(str(tmp_path))
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"].to_dict()))
    with pytest.raises(WeightsError, match="cannot be loaded: LookupError: no lm_head"):
        hf_models.find(str(folder)).load("cpu", "float32", TWO[0])
