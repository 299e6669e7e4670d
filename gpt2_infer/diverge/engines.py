"""Find the first step, layer and stage where two engines diverge beyond rounding.

Both engines run the same request, and after every step both get the token that A chose, so that one
difference does not spread. The logits of each step and, with a cache, the keys and values of each
layer are compared with those of the same model in float64, run once over the whole text. A layer's
output is the input of the next, so keys over their budget mean that the fault is in the layer
before or in the projection that made them.

The budget of a stage is the rule of `judge.reference` with more slack (LUCK):
8 max|naive - ref| + 4 ulp(max|ref|), over all positions. naive is the model in its own dtype, run
once over the whole text. A token must be the most likely one by the engine's own logits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.contract import dtype_name
from attention_kernels.judge.reference import Verdict, error_budget, naive_attention
from attention_kernels.precision import PLAIN_PRECISIONS
from gpt2_infer.diverge import report
from gpt2_infer.engines import make_engine
from gpt2_infer.engines.cached import Cached
from gpt2_infer.errors import RequestError
from gpt2_infer.model import GPT2, KVCache
from gpt2_infer.request import EngineName, Mode, Request
from gpt2_infer.sampling import Sampling

# naive's error is a single draw, accumulated over all earlier layers: a correct engine's was up
# to 3.2 times as large in short texts of the demo model.
LUCK = 4.0
Key = tuple[int | None, str]
"""A layer and the name of its output; the layer is None for logits."""


@dataclass(frozen=True, kw_only=True)
class Stage(Verdict):
    """A stage's verdict and place; indices start at 0."""

    step: int
    position: int
    layer: int | None
    """Index of the layer; None for logits."""
    name: str

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}, "
        where = f"step {self.step}, {layer}{self.name} at position {self.position}"
        return f"{where}: error {self.error:.2e}, budget {self.budget:.2e}"


@dataclass(frozen=True, kw_only=True)
class EngineSide(report.Side):
    """One of the two engines at the examined step."""

    engine: EngineName
    stage: Stage
    """The first stage over its budget, else the stage closest to it."""
    wrong_choice: int | None
    """The first step whose token is not the most likely one by its own logits."""

    @property
    def name(self) -> str:
        """The engine."""
        return self.engine

    @property
    def findings(self) -> list[str]:
        """Where the engine comes closest to its budget, or first exceeds it."""
        where = "closest to its budget" if self.stage.passed else "first over its budget"
        return [f"{where}: {self.stage}"]

    @property
    def faults(self) -> list[str]:
        """One sentence per fault; empty if rounding explains everything."""
        found = [] if self.stage.passed else [f"the first stage over its budget: {self.stage}"]
        if self.wrong_choice is not None:
            found.append(
                f"in step {self.wrong_choice} its token is not the most likely by its own logits"
            )
        return found


def diverge_engines(
    model: GPT2,
    a: EngineName,
    b: EngineName,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 64,
    mode: Mode = "kv-cache",
) -> report.Divergence[EngineSide]:
    """Compare two engines on one prompt, step by step; both get the tokens that `a` chooses.

    The first suspect step is examined, else the last. Raises RequestError if an engine does not
    support the request, or without an error budget.
    """
    if model.dtype == torch.float64:
        raise RequestError("a float64 model has no finer reference to be held to")
    runs: list[_Run] = []
    for engine in (a, b):
        request = Request(
            config=model.config,
            tokenizer=None,
            prompts=[[*prompt]],
            max_new_tokens=max_new_tokens,
            mode=mode,
            ignore_eos=True,
            engine=engine,
        )
        runs.append(_Run(model, request, runs[0].fed if runs else None))
    tokens = [*prompt, *runs[0].fed[:-1]]
    judge = _Judge(model, tokens, len(prompt))
    pairs = zip(*(run.chosen for run in runs), strict=True)
    step = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    stages = [judge.stage(run) for run in runs]
    suspect = [stage.step for stage in stages if not stage.passed]
    suspect += [run.wrong_choice for run in runs if run.wrong_choice is not None]
    suspect += [step] if step is not None else []
    examined = min(suspect, default=max_new_tokens - 1)

    def side(run: _Run, stage: Stage) -> EngineSide:
        chosen = report.choice(model, run.chosen[examined], run.logits[examined])
        return EngineSide(engine=run.engine, stage=stage, wrong_choice=run.wrong_choice, **chosen)

    return report.Divergence(
        device=model.device.type,
        dtype=dtype_name(model.dtype),
        mode=mode,
        prompt_tokens=len(prompt),
        new_tokens=max_new_tokens,
        step=step,
        position=len(prompt) + examined,
        a=side(runs[0], stages[0]),
        b=side(runs[1], stages[1]),
    )


@dataclass(frozen=True, kw_only=True)
class _Recorder(Sampling):
    """A greedy sampler that records the logits, also inside a captured graph."""

    logits: Tensor

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        self.logits.copy_(logits)
        return super().choose(logits, uniform)


class _Run:
    """An engine's run; `fed` holds the tokens it gets as inputs, None if those it chooses."""

    def __init__(self, model: GPT2, request: Request, fed: list[int] | None) -> None:
        with torch.inference_mode(), model.on_device():
            self._run(model, request, fed)

    def _run(self, model: GPT2, request: Request, fed: list[int] | None) -> None:
        engine = make_engine(model, request)
        (prompt,), steps = request.rows, request.max_new_tokens
        recorder = _Recorder(logits=torch.zeros(1, model.config.vocab_size, device=model.device))
        engine.sampling = recorder
        engine.warm_up()
        self.engine = engine.name
        self.logits = recorder.logits.new_empty(steps, model.config.vocab_size)
        self.chosen: list[int] = []
        self.fed: list[int] = []
        self.wrong_choice: int | None = None
        for step in range(steps):
            engine.step(step)
            own = engine.own_logits(step)
            logits = recorder.logits if own is None else own
            self.logits[step] = logits[0]
            token = int(engine.newest[0])
            if self.wrong_choice is None and logits[0, token] < logits.max():
                self.wrong_choice = step
            self.chosen.append(token)
            self.fed.append(fed[step] if fed else max(token, 0))
            engine.newest[0] = engine.tokens[0, len(prompt) + step] = self.fed[-1]
        cache = engine.cache if isinstance(engine, Cached) else None
        self.stages = _stages(cache, len(prompt) + steps - 1, self.logits)


class _Judge:
    """The float64 model's results for a whole text, and the error budgets around them."""

    def __init__(self, model: GPT2, tokens: list[int], prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        finer = copy.deepcopy(model).double()
        for block in finer.blocks():
            block.attn.upcast = False  # no upcast to float32
        steps = len(tokens) - prompt_tokens + 1
        self.truth, naive = _whole(finer, tokens, steps), _whole(model, tokens, steps)
        precision = PLAIN_PRECISIONS[dtype_name(model.dtype)]
        self.naive_errors, self.budgets = {}, {}
        for key, right in self.truth.items():
            error, largest = float(_errors(naive[key], right).max()), float(right.abs().max())
            if not 0 < error < math.inf:
                raise RequestError(report.no_budget(f"the {key[1]}", model.dtype))
            self.naive_errors[key] = error
            self.budgets[key] = error_budget(precision, model.dtype, LUCK * error, largest)

    def stage(self, run: _Run) -> Stage:
        """Return the run's first stage over its budget, else the stage closest to it."""
        found = []
        for key, values in run.stages.items():
            errors, budget = _errors(values, self.truth[key]), self.budgets[key]
            over = (errors > budget).nonzero()
            at = int(over[0]) if len(over) else int(errors.argmax())
            layer, name = key
            position = at if layer is not None else at + self.prompt_tokens - 1
            found.append(
                Stage(
                    error=float(errors[at]),
                    budget=budget,
                    naive_error=self.naive_errors[key],
                    step=max(0, position - self.prompt_tokens + 1),
                    position=position,
                    layer=layer,
                    name=name,
                )
            )
        failed = [stage for stage in found if not stage.passed]
        if failed:
            return min(failed, key=lambda stage: stage.step)  # the first computed of equals
        return max(found, key=lambda stage: stage.nearness)


def _stages(cache: KVCache | None, length: int, logits: Tensor) -> dict[Key, Tensor]:
    """Return the output of each stage, (positions, ...), in computation order."""
    stages: dict[Key, Tensor] = {}
    for layer, (keys, values, _) in enumerate(cache.layers if cache else []):
        stages[layer, "keys"], stages[layer, "values"] = keys[0, :length], values[0, :length]
    return stages | {(None, "logits"): logits}


def _whole(model: GPT2, tokens: list[int], steps: int) -> dict[Key, Tensor]:
    """Run the model once over a whole text, with logits for the last `steps` positions."""
    model = model.with_attention(report.unregistered(naive_attention))
    cache = KVCache.allocate(model, 1, len(tokens))
    ids = torch.tensor([tokens], device=model.device)
    logits = model(ids, cache=cache, logits_to_keep=steps)[0]
    return _stages(cache, len(tokens), logits)


def _errors(values: Tensor, right: Tensor) -> Tensor:
    """Return max|values - right| of each position, or infinity if it is not finite."""
    errors = (values.double() - right.double()).abs().flatten(1).amax(1)
    return errors.nan_to_num(nan=math.inf)
