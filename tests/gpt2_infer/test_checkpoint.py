from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt2_infer import GPT2, RequestError, WeightsError, generate
from gpt2_infer.checkpoint import open_checkpoint
from gpt2_infer.config import named_config
from tests.conftest import rewrite
from tests.gpt2_infer.test_config import PUBLISHED

TOKENS = torch.arange(10)[None]


def logits(model) -> torch.Tensor:
    return model(TOKENS, logits_to_keep=0)


def load(folder, **options) -> GPT2:
    return GPT2.from_pretrained(str(folder), device="cpu", **options)


def test_sharded_equals_single(save_checkpoint, tmp_path):
    folder, model = save_checkpoint()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    (tmp_path / "sharded" / "vocab.json").write_bytes((folder / "vocab.json").read_bytes())
    (tmp_path / "sharded" / "merges.txt").write_bytes((folder / "merges.txt").read_bytes())
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 2
    assert torch.equal(logits(load(tmp_path / "sharded")), logits(load(folder)))
    shards[-1].unlink()
    with pytest.raises(WeightsError, match=rf"names {shards[-1].name}, which is not there"):
        load(tmp_path / "sharded")


INDEX = "model.safetensors.index.json"


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


def test_an_index_of_other_files_does_not_replace_a_whole_file(save_checkpoint):
    """As in transformers: it may be older."""
    folder, model = save_checkpoint(vocab_size=50)
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
    expected = logits(load(folder))
    rewrite(folder, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"].clone()})
    assert torch.equal(logits(load(folder)), expected)
    rewrite(folder, lambda t: t | {"lm_head.weight": t.pop("transformer.wte.weight")})
    assert torch.equal(logits(load(folder)), expected)
    rewrite(folder, lambda t: t | {"transformer.wte.weight": t["lm_head.weight"] + 1})
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from wte\.weight"):
        load(folder)


def test_a_tensor_that_is_stored_twice_is_refused(save_checkpoint):
    folder, _ = save_checkpoint()
    shutil.copy(folder / "model.safetensors", folder / "model-1-of-2.safetensors")
    (folder / "model.safetensors").rename(folder / "model-2-of-2.safetensors")
    with pytest.raises(WeightsError, match=r"stores h\.0\..* twice"):
        load(folder)


def test_all_mismatches_are_listed_at_once(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)

    def spoil(tensors):
        del tensors["transformer.h.0.ln_1.weight"]
        del tensors["transformer.ln_f.bias"]
        tensors["transformer.h.1.attn.c_attn.weight"] = torch.zeros(32, 95)
        tensors["transformer.h.0.mlp.c_fc.bias"] = torch.zeros(128, dtype=torch.int8)
        return tensors | {"score.weight": torch.zeros(2, 32)}

    rewrite(folder, spoil)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    for words in (
        "missing h.0.ln_1.weight [32]",
        "missing ln_f.bias [32]",
        "unexpected score.weight",
        "h.1.attn.c_attn.weight is [32, 95] and should be [32, 96]",
        "h.0.mlp.c_fc.bias is I8",
    ):
        assert words in str(caught.value)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=8191, tokenizer=False)
    demo = open_checkpoint("demo").folder
    for file in ("vocab.json", "merges.txt"):
        (folder / file).write_bytes((demo / file).read_bytes())
    with pytest.raises(WeightsError, match="8192 tokens, but the model's vocabulary has 8191"):
        load(folder)


def test_a_truncated_file(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated or corrupt"):
        load(folder)


def test_a_pickle_is_refused_with_how_to_convert_it(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"never read from a pickle.*save_pretrained"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[]", "Expected `object`, got `array`"),
        ("config.json", "caf\udce9", "cannot be read as JSON"),
        ("vocab.json", "{", "holds no readable tokenizer"),
        ("model.safetensors", None, "has neither model.safetensors nor its shards"),
        ("model.safetensors", "\xff" * 100, "model.safetensors is truncated or corrupt"),
    ],
)
def test_incomplete_or_damaged_folders(file, content, words, save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert words in str(caught.value)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_stored_dtype_becomes_the_dtype_asked_for(stored, dtype, save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    rewrite(folder, lambda tensors: {name: value.to(stored) for name, value in tensors.items()})
    model = load(folder, dtype=dtype)
    stored_tensors = load_file(folder / "model.safetensors")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored_tensors[f"transformer.{name}"].to(dtype))


def test_float32_weights_on_the_cpu_are_the_files_own_pages(save_checkpoint):
    """The parameters lie in the mapped file, with no second copy in host memory."""
    folder, _ = save_checkpoint(n_embd=256, vocab_size=8192)
    model = load(folder)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    mapped = []
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        if "model.safetensors" in line:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            mapped.append((low, high))
    assert all(any(low <= address < high for low, high in mapped) for address in addresses)


def test_generation_config_decides_as_in_transformers(save_checkpoint):
    from transformers import AutoModelForCausalLM

    folder, model = save_checkpoint(vocab_size=50)
    files = [folder / "config.json", folder / "generation_config.json"]
    config = json.loads(files[0].read_text()) | {"repetition_penalty": 1.0}
    prompt = torch.tensor([[1, 2, 3]])
    end = int(model.generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, -1])
    for fields, generation in (
        ({"eos_token_id": end}, None),
        ({"eos_token_id": None}, None),
        ({}, None),
        ({"eos_token_id": end}, {"eos_token_id": [60, 61]}),
        ({"eos_token_id": end}, {"eos_token_id": None}),
        ({"eos_token_id": end}, {}),
        ({"eos_token_id": 60}, {"eos_token_id": [end, 61]}),
        ({"eos_token_id": end, "repetition_penalty": 9.0}, {"num_beams": 1}),
    ):
        del config["eos_token_id"]
        for file, content in zip(files, (config | fields, generation), strict=True):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_text(json.dumps(content))
        config |= {"eos_token_id": 0}
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        expected = theirs.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        got = generate(load(folder), prompt, max_new_tokens=8)
        ended = [end] if got.finish_reasons == ["end-of-text"] else []
        assert got.tokens[0] + ended == expected[0, 3:].tolist(), (fields, generation)


def test_settings_of_generation_that_are_not_supported_are_refused_by_name(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    settings = {"num_beams": 3, "repetition_penalty": 1.3, "suppress_tokens": [4], "top_k": 5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = load(folder)
    assert torch.isfinite(logits(model)).all()
    with pytest.raises(RequestError, match="sets num_beams, repetition_penalty, suppress_tokens"):
        generate(model, [[1]])


def test_the_published_gpt2_medium_loads(save_checkpoint, caplog):
    folder, model = save_checkpoint(vocab_size=50)
    sizes = {name: getattr(model.config, name) for name in ("n_embd", "n_head", "n_layer")}
    sizes |= {"vocab_size": 50, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps(PUBLISHED | sizes))
    (folder / "generation_config.json").unlink()
    assert torch.allclose(logits(load(folder)), model(TOKENS).logits, atol=1e-5)
    assert not caplog.records


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
    (snapshot / "model.safetensors").rename(snapshot / "a.safetensors")
    weight_map = dict.fromkeys(load_file(snapshot / "a.safetensors"), "a.safetensors")
    (snapshot / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(load("someone/tiny")), expected)
    (snapshot / "a.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"could not be fetched.*--model demo"):
        load("someone/tiny")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nor/this", "~nobody/x", "a/b/c", "x" * 300])
def test_a_name_that_is_neither_a_folder_nor_a_hub_id(name):
    with pytest.raises(WeightsError, match="is neither a local folder nor a model on the"):
        load(name)


@pytest.mark.parametrize(
    "wrong", [{"model": None}, {"device": "gpu"}, {"dtype": 5}, {"tokenizer": 3}, {"seed": "x"}]
)
def test_invalid_arguments_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(RequestError, match=f"^(the )?{name} must be "):
        GPT2.from_pretrained(**({"model": "demo", "device": "cpu"} | wrong))


def test_a_revision_of_a_local_folder_is_refused(save_checkpoint):
    folder, _ = save_checkpoint(vocab_size=50)
    with pytest.raises(WeightsError, match="is a local folder"):
        load(folder, revision="main")


def test_a_named_size_with_random_weights_needs_no_download():
    checkpoint = open_checkpoint("distilbert/distilgpt2", random_weights=True)
    assert (checkpoint.config.n_layer, checkpoint.config.n_embd) == (6, 768)
    assert checkpoint.tokenizer.encode("Hello, I'm") == [15496, 11, 314, 1101]


def test_random_weights_are_those_of_the_seed():
    first, again, other = (load("demo", random_weights=True, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.wte.weight, again.wte.weight)
    assert not torch.equal(first.wte.weight, other.wte.weight)
    assert 0.019 < first.wte.weight.std() < 0.021
    for name, parameter in first.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("distilgpt2", 81_912_576),
    ],
)
def test_named_sizes_are_the_published_ones(name, parameters):
    config = named_config(f"openai-community/{name}")
    with torch.device("meta"):
        model = GPT2(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_a_dtype_may_be_named_as_on_the_command_line():
    assert GPT2.from_pretrained("demo", device="cpu", dtype="float16").dtype == torch.float16
    for wrong in ("fp16", "int8", "Tensor", torch.int8):
        with pytest.raises(RequestError, match="dtype must be one of float32, float16, bfloat16"):
            GPT2.from_pretrained("demo", device="cpu", dtype=wrong)
