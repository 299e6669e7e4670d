"""Files for the slot of the fused step, *.cuh: judged alone, in the step, and refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from attention_kernels import ladder
from attention_kernels.errors import KernelError, UnsupportedError
from attention_kernels.judge import verify
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import CSRC, HeaderError
from gpt2_infer import GPT2
from gpt2_infer.config import GPT2Config
from gpt2_infer.diverge import diverge
from gpt2_infer.engines.fused import SLOT, StepShape
from tests.conftest import needs_compiler, version_file
from tests.gpt2_infer.engines import test_fused
from tests.gpt2_infer.engines.common import published, random_model

FILES = sorted((CSRC / "slot").glob("v*.cuh"))
MORE = [pytest.param(x, marks=pytest.mark.gpu) for x in FILES[:-1]]  # where there are more cores
PLAIN = FILES[0].read_text("utf-8")
# It forgets the key that this step adds.
WRONG = PLAIN.replace("n <= cache.newest ? softmax_scale", "n < cache.newest ? softmax_scale")
# It reads that key before the step has computed it; alone, it is there.
EARLY = SLOT.read_text("utf-8").replace("n < cache.newest ?", "n <= cache.newest ?")

pytestmark = needs_compiler


def in_the_step(demo: GPT2, file: Path, new_tokens: int = 2) -> str:
    """Return the verdict on a file in the chain of kernels."""
    model = demo.with_attention(None, str(file))
    options = {"max_new_tokens": new_tokens, "mode": "kv-cache"}
    return diverge(model, "fused", "fused", [449, 1973, 355], **options).verdict


@pytest.mark.slow
def test_the_plainest_file_writes_the_same_text(demo):
    assert in_the_step(demo, FILES[0], 3) == "equal"


@pytest.mark.parametrize("file", [FILES[-1], *MORE])
@pytest.mark.slow
def test_a_file_is_right_alone(file):
    assert verify(str(file), "cpu", quick=True).passed


def test_a_wrong_file_is_caught_alone_and_in_the_step(demo):
    file = version_file("v04_wrong.cuh", WRONG)
    options = {"quick": True, "max_failures": 1, "dtypes": ("float32",)}
    assert not verify(str(file), "cpu", **options).passed
    assert in_the_step(demo, file) == "bug in both"


def test_a_file_that_reads_too_early_is_caught_in_the_step(demo):
    message = r"at v05_early.cuh:\d+ .*; a wait_for_previous\(\) before it would order them"
    with pytest.raises(KernelError, match=message):
        in_the_step(demo, version_file("v05_early.cuh", EARLY))


@pytest.mark.slow
@pytest.mark.usefixtures("race_checked")
@pytest.mark.parametrize("file", FILES[1:2])
@pytest.mark.parametrize(
    ("config", "dtype", "how"),
    [
        (test_fused.LONG, torch.float32, {}),
        (test_fused.CONFIG, torch.float16, {"portable": True}),
        (test_fused.ONE_KERNEL, torch.float32, {}),
    ],
)
def test_each_form_of_the_step_takes_a_file(file, config, dtype, how):
    slot, tolerance = ladder.resolve(str(file)).version, 2e-4 if dtype == torch.float32 else 0.1
    test_fused.check_steps(random_model(config, dtype), [127], 2, tolerance, slot=slot, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES[:2])
@pytest.mark.parametrize("how", [{}, {"portable": True}])
def test_a_file_is_right_on_a_gpu(file, how):
    assert verify(str(file), "cuda", quick=True).passed
    slot, model = ladder.resolve(str(file)).version, published("gpt2", torch.bfloat16)
    for batch in (1, 2, 8):
        test_fused.check_steps(model, [1000] * batch, 8, 0.1, slot=slot, **how)


def test_what_a_file_needs_decides_which_form_takes_it():
    slot = ladder.resolve(str(SLOT)).version
    shape = StepShape(GPT2Config(), torch.float32, 1, 132, 227 * 1024, slot=slot)
    assert shape.is_one_kernel

    def needing(number: int) -> StepShape:
        return dataclasses.replace(shape, slot=dataclasses.replace(slot, shared=f"{number} * D"))

    assert not needing(64).is_one_kernel
    assert not needing(64).refusals
    (reason,) = needing(768).refusals
    assert reason == "a context of 1024 tokens and 49152 bytes of shared memory for attention"


def test_a_file_that_says_too_little_or_does_not_fit_the_model_is_refused(demo):
    for said in ("//", "// Shared: 0 *", "// Shared: 1024 <"):
        silent = version_file("v06_silent.cuh", PLAIN.replace("// Shared:", said))
        with pytest.raises(HeaderError, match="Shared must be bytes, a formula"):
            ladder.resolve(str(silent))
    halves = version_file("v07_halves.cuh", PLAIN.replace("float32 float16", "float16"))
    with pytest.raises(UnsupportedError, match="float32"):
        in_the_step(demo, halves)
    less = version_file("v08_less.cuh", PLAIN.replace("4 * (D + 2 + 128)", "4 * (D + 2)"))
    with pytest.raises(BuildError, match="the field Shared of attention says less"):
        test_fused.check_steps(
            random_model(test_fused.CONFIG), [3], 1, 1.0, slot=ladder.resolve(str(less)).version
        )
