"""The emulator notices what is removed from the newest kernels; every_removal.py tries all."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter

import pytest
import torch

from tests import removal
from tests.conftest import ROOT, needs_compiler
from tests.gpt2_infer.engines import test_fused
from tests.gpt2_infer.engines.common import random_model
from tests.gpt2_infer.engines.test_speculative import check_guesses

# The step's shapes: a chain of kernels for one row, for two and for eight; without early launches;
# through a ring; one kernel, also with few regions for weights. And a pass with guesses.
SHAPES = [
    (test_fused.CONFIG, torch.float32, [127], test_fused.EARLY),
    (test_fused.LONG, torch.float32, [3, 255], {}),
    (test_fused.TWO_SPLITS, torch.float16, [1, 3, 9, 20, 60, 100, 200, 127], {}),
    (test_fused.CONFIG, torch.float32, [127], {"portable": True}),
    (test_fused.ONE_KERNEL, torch.float32, [127], {"portable": True, **test_fused.RING}),
    (test_fused.ONE_KERNEL, torch.float32, [127], {}),
    (test_fused.ONE_KERNEL, torch.float32, [127], test_fused.TWO_REGIONS),
]
NOTICED = removal.rows("noticed") + removal.rows("noticed_by_the_race_check")
# One of each message, if possible of the last version.
SAMPLE = {
    row[2]: row
    for row in sorted(NOTICED, key=lambda row: ("v36" in row[0], row[0] != removal.LAYERS))
}
slot_runs = functools.cache(removal.slot_runs)
attention_runs = functools.cache(removal.attention_runs)


@functools.cache
def step_run(shape: int) -> removal.Run:
    """Return a comparison of two steps with float64, or of a pass with guesses and plain steps."""
    if shape == len(SHAPES):
        model = random_model(dataclasses.replace(test_fused.LONG, tie_word_embeddings=False))
        return functools.partial(check_guesses, model, 254, guesses=3, right=2)
    config, dtype, lengths, how = SHAPES[shape]
    model = random_model(config, dtype)
    exact, budget = copy.deepcopy(model).double(), 2e-4 if dtype == torch.float32 else 0.1
    return functools.partial(test_fused.check_steps, model, lengths, 2, budget, exact=exact, **how)


@pytest.fixture
def notice(monkeypatch, request):
    """notice(file, name, build, orders): return what is noticed without a site."""

    def notice(file: str, name: str, build: str, orders: tuple[str, ...] = ("",)) -> str:
        if file in removal.VERSIONS:
            sources, runs = removal.VERSIONS[file], attention_runs(file, build)
        elif file in removal.SLOT:
            sources, runs = removal.SLOT, slot_runs(build)
        else:
            removal.use_droppable_step(monkeypatch)
            if build:
                request.getfixturevalue("race_checked")
            shapes = [5, 6] if file == removal.LAYERS else [0, 1, 2, 3, 4, len(SHAPES)]
            sources, runs = removal.STEP, [step_run(shape) for shape in shapes]
        names = [(site.file, site.name) for site in removal.sites(sources)]
        return removal.notice(names.index((file, name)), runs, orders)

    return notice


def test_the_table_has_every_wait_fence_and_barrier():
    """Try a new one as every_removal.py does, and enter what is noticed or why it is needless."""
    sources = (*removal.VERSIONS.values(), removal.STEP, removal.SLOT)
    found = Counter((site.file, site.name) for each in sources for site in removal.sites(each))
    entered = Counter((file, name) for key in removal.TABLE for file, name, _ in removal.rows(key))
    assert found == entered
    only_races = len(removal.rows("noticed_by_the_race_check"))
    text = (ROOT / "docs" / "emulator.md").read_text("utf-8")
    assert f"have {len(entered)} waits, fences and barriers" in text
    assert f"removal of each of {len(NOTICED)}, {only_races} of them" in text


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("file", "name", "message"), SAMPLE.values())
def test_a_removal_is_noticed(file, name, message, notice):
    assert message in notice(file, name, "races")
