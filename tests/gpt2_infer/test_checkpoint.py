from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt2_infer import GPT2, RequestError, WeightsError, generate
from gpt2_infer.checkpoint import open_checkpoint
from gpt2_infer.config import named_config
from tests.conftest import rewrite

TOKENS = torch.arange(10)[None]
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def logits(model) -> torch.Tensor:
    return model(TOKENS, logits_to_keep=0)


def load(folder, **options) -> GPT2:
    return GPT2.from_pretrained(str(folder), device="cpu", **options)


def test_sharded_equals_single(save_checkpoint, tmp_path):
    folder, model = save_checkpoint()
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="50KB")
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(folder / file, sharded)
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 2
    assert torch.equal(logits(load(sharded)), logits(load(folder)))
    shards[-1].unlink()
    with pytest.raises(WeightsError, match=rf"names {shards[-1].name}, which is not there"):
        load(sharded)


@pytest.mark.parametrize("newest", ["a-fix.safetensors", "model.safetensors"])
def test_the_index_says_which_file_a_tensor_is_in(newest, save_checkpoint):
    folder, model = save_checkpoint(vocab_size=50)
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    stale = {name: tensor + 1 for name, tensor in tensors.items()}
    wte = "transformer.wte.weight"
    save_file({**tensors, wte: stale[wte]}, folder / "most.safetensors")
    save_file({wte: tensors[wte]}, folder / newest)
    save_file(stale, folder / "model-00001-of-00002.safetensors")  # no longer in use
    weight_map = {**dict.fromkeys(tensors, "most.safetensors"), wte: newest}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.allclose(logits(load(folder)), model(TOKENS).logits, atol=1e-5)
    # As in transformers, an index of other files, which may be older, gives way to a whole file.
    save_file(tensors, whole)
    (folder / INDEX).write_text('{"weight_map": {"wte.weight": "model-1-of-2.safetensors"}}')
    assert torch.allclose(logits(load(folder)), model(TOKENS).logits, atol=1e-5)


def test_keys_without_the_prefix_and_legacy_buffers(save_checkpoint):
    folder, _ = save_checkpoint()
    expected = logits(load(folder))

    def as_published(tensors):
        bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
        bare["h.1.attn.masked_bias"] = torch.tensor(-1e4)
        return bare

    rewrite(folder, as_published)
    assert torch.equal(logits(load(folder)), expected)


def test_a_tied_checkpoint_may_hold_the_head_as_well_or_alone(save_checkpoint):
    folder, _ = save_checkpoint()
    expected, wte, head = logits(load(folder)), "transformer.wte.weight", "lm_head.weight"
    rewrite(folder, lambda tensors: tensors | {head: tensors[wte].clone()})
    assert torch.equal(logits(load(folder)), expected)
    rewrite(folder, lambda tensors: tensors | {head: tensors.pop(wte)})
    assert torch.equal(logits(load(folder)), expected)
    rewrite(folder, lambda tensors: tensors | {wte: tensors[head] + 1})
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from wte\.weight"):
        load(folder)


def test_all_mismatches_are_listed_at_once(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)

    def spoil(tensors):
        del tensors["transformer.ln_f.bias"]
        tensors["transformer.h.1.attn.c_attn.weight"] = torch.zeros(32, 95)
        tensors["transformer.h.0.mlp.c_fc.bias"] = torch.zeros(128, dtype=torch.int8)
        return tensors | {"score.weight": torch.zeros(2, 32)}

    rewrite(folder, spoil)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    for words in (
        "missing ln_f.bias [32]",
        "unexpected score.weight",
        "h.1.attn.c_attn.weight is [32, 95] and should be [32, 96]",
        "h.0.mlp.c_fc.bias is I8",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "cannot be read as JSON"),
        ("config.json", b"[]", "Expected `object`, got `array`"),
        ("vocab.json", b"{", "holds no readable tokenizer"),
        (WHOLE, None, "has neither model.safetensors nor its shards"),
        (WHOLE, b"\xff" * 100, "model.safetensors is truncated or corrupt"),
    ],
)
def test_a_damaged_folder_is_refused(file, content, words, save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    (folder / file).write_bytes(content) if content else (folder / file).unlink()
    with pytest.raises(WeightsError, match=words):
        load(folder)


def test_weights_that_are_stored_twice_or_pickled_are_refused(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    data = (folder / WHOLE).read_bytes()
    (folder / WHOLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"never read from a pickle.*save_pretrained"):
        load(folder)
    for i in (1, 2):
        (folder / f"model-{i}-of-2.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match=r"stores h\.0\..* twice"):
        load(folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=8191, tokenizer=False)
    demo = open_checkpoint("demo").folder
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(demo / file, folder)
    with pytest.raises(WeightsError, match="8192 tokens, but the model's vocabulary has 8191"):
        load(folder)


def test_generation_config_decides_as_in_transformers(save_checkpoint):
    from transformers import AutoModelForCausalLM

    folder, model = save_checkpoint(vocab_size=50)
    files = [folder / "config.json", folder / "generation_config.json"]
    config, prompt = json.loads(files[0].read_text()), torch.tensor([[1, 2, 3]])
    end = int(model.generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, -1])
    for fields, generation in (
        ({"eos_token_id": end}, None),
        ({"eos_token_id": None}, None),
        ({"eos_token_id": end}, {"eos_token_id": [60, 61]}),
        ({"eos_token_id": end}, {"eos_token_id": None}),
        ({"eos_token_id": end}, {}),
        ({"eos_token_id": 60}, {"eos_token_id": [end, 61]}),
        ({"eos_token_id": end, "repetition_penalty": 9.0}, {"num_beams": 1}),
    ):
        for file, content in zip(files, (config | fields, generation), strict=True):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_text(json.dumps(content))
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        expected = theirs.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        got = generate(load(folder), prompt, max_new_tokens=8)
        ended = [end] if got.finish_reasons == ["end-of-text"] else []
        assert got.tokens[0] + ended == expected[0, 3:].tolist(), (fields, generation)


def test_settings_of_generation_that_are_not_supported_are_refused_by_name(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    settings = {"num_beams": 3, "repetition_penalty": 1.3, "suppress_tokens": [4], "top_k": 5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(RequestError, match="sets num_beams, repetition_penalty, suppress_tokens"):
        generate(load(folder), [[1]])


def test_hub_ids_resolve_through_the_hubs_own_cache(save_checkpoint, tmp_path, monkeypatch):
    """Run the real huggingface_hub, offline, on a cache folder made by the test."""
    from huggingface_hub import constants

    folder, _ = save_checkpoint()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--someone--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    for name in ("main", "v2"):
        (repository / "refs" / name).write_text("a" * 40)
    expected = logits(load(folder))
    assert torch.equal(logits(load("someone/tiny")), expected)
    assert torch.equal(logits(load("someone/tiny", revision="v2")), expected)
    (snapshot / WHOLE).unlink()
    with pytest.raises(WeightsError, match=r"could not be fetched.*--model demo"):
        load("someone/tiny")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nor/this", "~nobody/x", "a/b/c", "x" * 300])
def test_a_name_that_is_neither_a_folder_nor_a_hub_id(name, tmp_path):
    with pytest.raises(WeightsError, match="is neither a local folder nor a model on the"):
        load(name)
    with pytest.raises(WeightsError, match="is a local folder"):
        load(tmp_path, revision="main")


def test_invalid_arguments_are_refused_by_name():
    for name, value in (("device", "gpu"), ("dtype", "fp16"), ("seed", "x")):
        with pytest.raises(RequestError, match=f"^(the )?{name} must be "):
            GPT2.from_pretrained("demo", **{"device": "cpu", name: value})
    for ignored in ({"revision": "main"}, {"random_weights": True}):
        with pytest.raises(RequestError, match=r"revision and random_weights to open_checkpoint\("):
            GPT2.from_pretrained(open_checkpoint("demo"), **ignored)


def test_named_sizes_are_the_published_ones():
    for name, parameters in (
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("distilgpt2", 81_912_576),
    ):
        with torch.device("meta"):
            model = GPT2(named_config(f"openai-community/{name}"))
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
