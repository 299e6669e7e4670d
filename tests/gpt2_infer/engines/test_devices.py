"""Models on the second GPU, while the first one is current and busy."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from gpt2_infer import GPT2, Sampling, generate
from gpt2_infer.engines.continuous import Continuous
from gpt2_infer.request import MODES
from tests.gpt2_infer.engines.test_continuous import SAMPLING, make_requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
DTYPES = ["float32", "float16", "bfloat16"]
PROMPTS = [[5, 300, 90], [7, 8, 9, 10, 11, 12]]


@pytest.fixture(autouse=True)
def busy():
    """Keep the first GPU busy; it must stay the current one."""
    ended = threading.Event()

    def work():
        x = torch.randn(2048, 2048, device="cuda:0")
        while not ended.is_set():
            x = torch.mm(x, x).clamp_(-1, 1)
            torch.cuda.current_stream(0).synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    ended.set()
    thread.join()
    assert torch.cuda.current_device() == 0


def models(dtype: str = "float32", **options) -> list[GPT2]:
    """Return the same model on the first and on the second GPU."""
    return [
        GPT2.from_pretrained("demo", device=f"cuda:{i}", dtype=dtype, **options) for i in range(2)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["eager", "graph", "fused"])
def test_every_engine(engine, mode, dtype):
    if (engine, mode) == ("fused", "recompute") and dtype != "float32":
        pytest.skip("fused recomputes in float32 only")
    here, there = models(dtype)
    for sampling in (Sampling(), SAMPLING):
        fields = {"max_new_tokens": 70, "ignore_eos": True, "sampling": sampling}
        fields |= {"mode": mode, "engine": engine}
        expected = generate(here, PROMPTS, **fields).tokens
        for on_text in (None, lambda row, text: None):  # tokens read at the end, and each
            done = generate(there, PROMPTS, on_text=on_text, **fields)
            assert done.tokens == expected
            assert 0 < done.prefill_s < done.generation_s


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.parametrize("batch", [8, 256])
def test_continuous_batches(batch, engine, dtype):
    here, there = models(dtype)
    requests = make_requests(here, 40)
    expected = dict(Continuous(here, batch=batch, engine=engine).run(requests))
    done = {}
    for key, completion in Continuous(there, batch=batch, engine=engine).run(requests):
        assert torch.cuda.current_device() == 0
        done[key] = completion
    assert done == expected


@pytest.mark.parametrize(
    "arguments",
    [["--kv-cache", "--max-new-tokens", "20"], ["verify", "CUSTOM_CUDA_VERSION_36", "--quick"]],
)
def test_the_command_line(arguments):
    if arguments[0] != "verify":
        arguments = [*arguments, "--model", "demo"]
    command = [sys.executable, "-m", "gpt2_infer", *arguments, "--device", "cuda:1"]
    subprocess.run(command, check=True, timeout=300)
