"""The fused engine: its kernel, emulated on the CPU, against the modules that it replaces."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.cuda import green_contexts

from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer import GPT2
from gpt2_infer.engines import fused
from gpt2_infer.engines.fused import State, Step, StepShape
from gpt2_infer.model import KVCache
from tests import removal
from tests.conftest import needs_flash_attention, python
from tests.gpt2_infer.engines.common import SIZES, SMALL, published, random_model

# An odd vocabulary, of which some warps compute two groups of rows, and a context of two splits.
SIZE = {"vocab_size": 1301, "n_positions": 160, "n_layer": 3, "n_inner": 192}
CONFIG = dataclasses.replace(SMALL, **SIZE, scale_attn_by_inverse_layer_idx=True)
# One kernel runs all layers of a single row.
ONE_KERNEL = dataclasses.replace(CONFIG, n_embd=128, n_inner=512)
# A cache of three splits: four blocks attend for a single row, two per row in a batch.
LONG = dataclasses.replace(CONFIG, n_positions=300)
TWO_SPLITS = dataclasses.replace(CONFIG, n_positions=256)
# The shared memory in which ONE_KERNEL's last product goes through a ring, if it is portable.
RING = {"shared_kb": 15}
# That in which ONE_KERNEL's weights arrive in two regions.
TWO_REGIONS = {"shared_kb": 56}
# In this CONFIG's layer does not fit, so attention lets the next kernel start before it waits.
EARLY = {"shared_kb": 20}
HEAD_BLOCKS = 8


def row_of(state: State, index: int) -> State:
    """Return a copy of one row, from -1 to the number of rows - 1."""
    cache = KVCache(state.cache.kv[:, :, [index]], state.cache.seqlens[[index]])
    return State(cache, *(x[[index]] for x in (state.newest, state.tokens, state.lengths)))


@torch.inference_mode()
def state_after(model: GPT2, lengths: list[int], capacity: int | None = None) -> State:
    """Return the state after random prompts of these lengths.

    capacity: the cache's; by default the model's positions.
    """
    device, config = model.device, model.config
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(
        0, config.vocab_size, (len(lengths), config.n_positions), generator=generator
    )
    counts, positions = torch.tensor(lengths), torch.arange(config.n_positions)
    tokens = prompts.where(positions < counts[:, None], 0).to(device)
    counts = counts.to(device)
    cache = KVCache.allocate(model, len(lengths), capacity or config.n_positions)
    logits = model(tokens[:, : max(lengths)], seqlens=counts, cache=cache)[:, 0]
    newest = logits.argmax(-1)
    tokens[torch.arange(len(lengths), device=device), counts] = newest
    return State(cache, newest, tokens, counts + 1)


def step_of(
    model: GPT2,
    state: State,
    shared_kb: int = 227,
    *,
    columns_kb: int | None = None,
    portable: bool = False,
    has_guesses: bool = False,
    slot: VersionHeader | None = None,
) -> Step:
    """Return the step; a GPU compiles the portable one from the PTX of compute_80.

    columns_kb: the shared memory for which columns are divided among blocks, by default shared_kb.
    """
    batch, arch = len(state.newest), None
    if model.device.type == "cpu":
        shape = StepShape(model.config, model.dtype, batch, HEAD_BLOCKS, shared_kb * 1024)
    else:
        shape = fused.shape_on(model, batch)
        shape = dataclasses.replace(shape, shared_bytes=min(shape.shared_bytes, shared_kb * 1024))
        arch = "compute_80" if portable else None
    shape = dataclasses.replace(shape, is_portable=portable, has_guesses=has_guesses, slot=slot)
    if columns_kb:
        divided = dataclasses.replace(shape, shared_bytes=columns_kb * 1024)
        vars(shape)["products"] = divided.products
    return Step(model, state, is_greedy=True, shape=shape, arch=arch)


@torch.inference_mode()
def check_steps(
    model: GPT2,
    lengths: list[int],
    steps: int,
    tolerance: float,
    make=step_of,
    capacity: int | None = None,
    exact: GPT2 | None = None,
    **how,
) -> torch.Tensor:
    """Compare each step with model.decode(), or exact.decode(); return the last step's logits."""
    exact = exact or model
    expected, state = (state_after(one, lengths, capacity) for one in (exact, model))
    step = make(model, state, **how)
    rows = torch.arange(len(lengths), device=model.device)
    for _ in range(steps):
        logits = exact.decode(expected.newest, expected.cache).float()
        step()
        torch.testing.assert_close(step.logits, logits, rtol=0, atol=tolerance)
        chosen = step.logits.argmax(-1)
        assert torch.equal(state.newest, chosen)
        assert torch.equal(state.tokens[rows, state.lengths - 1], chosen)
        assert torch.equal(state.cache.seqlens, expected.cache.seqlens)
        expected.newest.copy_(chosen)
    return step.logits


@torch.inference_mode()
def check_portable(model: GPT2, lengths: list[int], steps: int, *, shared_kb: int) -> None:
    """Compare each step's bits and text with those of the portable step in shared_kb.

    A block's columns decide the order of its sums, so they are the same.
    """
    expected, state = state_after(model, lengths), state_after(model, lengths)
    early = step_of(model, expected, columns_kb=shared_kb)
    portable = step_of(model, state, shared_kb, portable=True)
    for _ in range(steps):
        early()
        portable()
        assert torch.equal(portable.logits, early.logits)
        assert torch.equal(state.newest, expected.newest)
    assert torch.equal(state.tokens, expected.tokens)
    assert torch.equal(state.cache.kv, expected.cache.kv)


@pytest.mark.slow
@pytest.mark.usefixtures("race_checked")
@pytest.mark.parametrize(
    ("config", "dtype", "lengths", "tolerance", "how"),
    [
        (LONG, torch.float32, [3, 255], 2e-4, {}),
        (CONFIG, torch.float32, [3, 127], 2e-4, EARLY),
        (CONFIG, torch.float32, [3, 127], 2e-4, {"portable": True}),
        # Up to 4 rows, tensor cores multiply in a different way. One block attends to two splits.
        (TWO_SPLITS, torch.float16, [1, 3, 9, 20, 60, 100, 200, 127], 0.05, {}),
        (ONE_KERNEL, torch.float32, [3, 127], 2e-4, {"portable": True, **RING}),
        pytest.param(ONE_KERNEL, torch.float32, [3, 127], 2e-4, {}, marks=pytest.mark.gpu),
        (ONE_KERNEL, torch.float16, [3, 127], 0.1, {}),
    ],
)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others_and_nothing_races(
    config, dtype, lengths, tolerance, how
):
    model = random_model(config, dtype)
    alone = step_of(model, row_of(state_after(model, lengths), -1), **how)
    for _ in range(2):
        alone()
    logits = check_steps(model, lengths, 2, tolerance, **how)
    assert torch.equal(logits[-1], alone.logits[0])


# Of these, one build of each shape serves all tests; the others are in tests/test_removal.py.
WAITS = [
    "product: ptx::wait_for_previous()",
    "attend: ptx::wait_for_previous()",
    "head: ptx::wait_for_previous()",
    "choose: ptx::wait_for_previous()",
    "await: !ptx::barrier_test(&arrived, 0)",
    "attend: ptx::cluster_wait()",
    "await: __pipeline_wait_prior(kIsRing ? kStages - 1 : 0)",
    # In layers_at_once.cuh
    "await_proj: ptx::barrier_wait(&shared.proj_arrived, layer % 2)",
    "await: ptx::barrier_wait(&shared.arrived[tile % kRegions], tile / kRegions % 2)",
    "await: ptx::barrier_wait(&shared.exchanges[exchange], layer % 2)",
    "begin: ptx::cluster_wait()",
    "sum_parts: y == y",
]
FIRST_OF_LAYERS = 7


@pytest.fixture
def droppable(monkeypatch):
    """Run kernels of which a wait can be removed. All quick tests do: a shape is compiled once."""
    removal.use_droppable_step(monkeypatch)


@pytest.mark.parametrize(
    ("config", "length", "portable"),
    [(CONFIG, 127, False), (LONG, 255, False), (CONFIG, 127, True), (ONE_KERNEL, 127, False)],
)
def test_a_step_is_what_the_modules_compute(config, length, portable, droppable):
    """The second of two steps begins a split."""
    check_steps(random_model(config), [length], 2, 2e-4, portable=portable)


@pytest.mark.parametrize("config", [pytest.param(CONFIG, marks=pytest.mark.slow), ONE_KERNEL])
def test_a_step_in_16_bits_is_what_the_modules_compute(config, droppable):
    needs_flash_attention(torch.bfloat16)
    check_steps(random_model(config, torch.bfloat16), [127], 2, 0.25)


def test_the_portable_step_gives_the_same_bits_in_float32(droppable):
    check_portable(random_model(CONFIG), [127], 2, shared_kb=227)


@pytest.mark.parametrize("wait", range(len(WAITS)))
def test_a_missing_wait_is_caught(wait, droppable, monkeypatch):
    """A kernel without a wait reads data that has not been written yet."""
    in_cluster = "attend: ptx::cluster" in WAITS[wait]
    config = LONG if in_cluster else CONFIG if wait < FIRST_OF_LAYERS else ONE_KERNEL
    portable = "__pipeline" in WAITS[wait]
    names = [site.name for site in removal.sites(removal.STEP)]
    monkeypatch.setenv(removal.VARIABLE, str(names.index(WAITS[wait])))
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        check_steps(random_model(config), [260 if in_cluster else 5], 2, 2e-4, portable=portable)
    assert not isinstance(caught.value, BuildError)


@pytest.mark.usefixtures("droppable")
def test_logits_that_are_not_finite_give_no_token():
    model = random_model(CONFIG)
    model.ln_f.bias.fill_(torch.nan)
    state = state_after(random_model(CONFIG), [4])
    step = step_of(model, state)
    step()
    assert state.newest.tolist() == [-1]


@pytest.mark.parametrize(
    ("dtype", "outlier", "mean"),
    [
        (torch.float32, 3000.0, 0.0),
        (torch.float32, 0.0, 100.0),
        pytest.param(torch.float16, 0.0, 100.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("droppable")
@torch.inference_mode()
def test_a_layer_norm_before_a_product_is_as_accurate_as_one_apart(dtype, outlier, mean):
    """GPT-2's residual stream has channels with hundreds of times the values of the others."""
    model = random_model(CONFIG, dtype)
    model.wte.weight += mean
    model.wte.weight[:, 7] += outlier
    block = model.h[0]
    block.ln_1.weight[7] = 0.01  # GPT-2's are small there, too
    state = state_after(model, [5])
    token = state.newest.clone()
    step_of(model, state)()
    found = state.cache.kv[0, :, 0, :, 5].flatten()  # k and v

    x = model.wte.weight[token].float() + model.wpe.weight[5].float()
    linear = block.attn.c_attn

    def product(rounded: torch.dtype, wide: torch.dtype) -> torch.Tensor:
        weight, bias = block.ln_1.weight.to(wide), block.ln_1.bias.to(wide)
        normed = F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, CONFIG.layer_norm_epsilon)
        y = normed.to(rounded).to(wide) @ linear.weight.to(wide) + linear.bias.to(wide)
        return y[0, CONFIG.n_embd :].to(rounded).double()

    exact = product(torch.float64, torch.float64)
    apart = (product(dtype, torch.float32) - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 2 * apart


@pytest.mark.gpu
@pytest.mark.skipif(not green_contexts.SUPPORTED, reason="torch has no green contexts")
def test_the_chain_runs_in_a_part_of_a_gpu():
    model, steps = published("gpt2", torch.bfloat16), []

    def make(*arguments) -> Step:
        steps.append(step_of(*arguments))
        return steps[0]

    if not fused.shape_on(model, 1).is_one_kernel:
        pytest.skip("one kernel does not run all layers here")
    part = green_contexts.GreenContext.create(num_sms=32, device_id=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(part.Stream()):
        check_steps(model, [100], 4, 0.1, make)
    torch.cuda.synchronize()
    assert not steps[0]._shape.is_one_kernel


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
)
def test_every_size_and_batch_on_a_gpu(name, dtype, tolerance):
    model = published(name, dtype)
    for batch in (1, 8) if name != "gpt2" else (1, 2, 4, 8):
        for length in (1, 1000):
            check_steps(model, [length] * batch, 16, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("shared_kb", [227, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_portable_step_gives_the_same_bits_on_a_gpu(dtype, shared_kb):
    """From compute_80's PTX, with the shared memory of this GPU and of an RTX."""
    model = published("gpt2", dtype)
    for batch in (1, 2, 8):
        for length in (1, 127, 1000):
            check_portable(model, [length] * batch, 16, shared_kb=shared_kb)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "shared_kb"),
    [
        ("gpt2-medium", torch.float32, 99),
        ("gpt2-xl", torch.bfloat16, 99),
        ("gpt2-xl", torch.float32, 163),
    ],
)
def test_weights_go_through_a_ring_on_a_gpu(name, dtype, shared_kb):
    check_portable(published(name, dtype), [300], 16, shared_kb=shared_kb)


@torch.inference_mode()
def repeat_steps(dtype: torch.dtype, streams: list[torch.cuda.Stream], count: int) -> None:
    """Repeat the same step on each stream; a race shows only in some of the repetitions."""
    model, runs = published("gpt2", dtype), []
    for stream in streams:
        cache = KVCache.allocate(model, 1, 64)
        tokens = torch.zeros(1, 64, dtype=torch.long, device="cuda")
        newest = model(tokens[:, :40], cache=cache)[:, 0].argmax(-1)
        lengths = torch.tensor([41], device="cuda")
        step = Step(model, State(cache, newest, tokens, lengths), is_greedy=False)
        step()
        expected, same = step.logits.clone(), torch.ones((), dtype=torch.bool, device="cuda")
        runs.append((stream, cache.seqlens, step, expected, same))
    torch.cuda.synchronize()
    for _ in range(count):
        for stream, seqlens, step, expected, same in runs:
            with torch.cuda.stream(stream):
                seqlens.fill_(40)
                step()
                same.logical_and_((step.logits == expected).all())
    torch.cuda.synchronize()
    assert all(same for *_, same in runs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_repeated_step_gives_the_same_bits(dtype):
    repeat_steps(dtype, [torch.cuda.current_stream()], 1000)


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_steps_on_two_streams_do_not_wait_for_each_other():
    """The blocks of each wait for words without a limit, and both have no room at once."""
    program = f"""
import torch
from {__name__} import repeat_steps
repeat_steps(torch.bfloat16, [torch.cuda.Stream() for _ in range(2)], 10_000)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
