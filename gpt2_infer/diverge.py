"""Find where the greedy texts of two backends or engines diverge: by rounding or by a bug.

Both write a text from one prompt, step by step; the second is fed the first's tokens, so that one
difference does not spread. If neither has a fault, two different tokens are a tie.

Backends: at the first step where their tokens differ (the last step if none does) the model is
rerun in recompute mode on the tokens before it, padded to the length of the second backend's run.
Each backend is then compared with float64 attention in two ways:

layers: the input of each layer comes from float64 attention in the layers before it, so that no
error is inherited. Each backend's output of the layer must keep the budgets of
`judge.truth`; the bug is in the first layer that exceeds them. Each backend gets
copies of the inputs, and a backend that changes them has a bug.

logits: the same rule bounds how far the logits of a correct backend may be from those of float64
attention: 2 max|naive - ref| + 4 ulp(max|ref|), with the factor of its precision class in place of
2. Two logits may each be that far off, so rounding explains a token whose reference logit is at
most twice that below the largest. (That the smaller top-2 margin is at most max|A - B| explains
nothing: it holds whenever two backends choose different tokens.)

A backend has a bug if one of its layers exceeds its budget, if its logits are not finite, or if
rounding does not explain the token it wrote.

Engines: the logits of every step are compared with those of the same model in float64, run once
over the whole text. They must be within 8 max|naive - ref| + 4 ulp(max|ref|), over all steps, where
naive is the model in its own dtype; and rounding must explain each token, as above. The first step
at fault is examined, else the first whose tokens differ, else the last.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from attention_kernels import BackendSpec
from attention_kernels.contract import dtype_name, per_query_head
from attention_kernels.judge.calls import Request as Call
from attention_kernels.judge.truth import Verdict, error_budget, naive_attention, truth
from attention_kernels.judge.worker import Runner, open_runner
from attention_kernels.precision import PLAIN_PRECISIONS
from gpt2_infer.engines import make_engine
from gpt2_infer.engines.base import CPU_LENGTH_STEP, padded_length
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import Generation
from gpt2_infer.linear import without_autocast
from gpt2_infer.model import GPT2, AttentionChoice, check_backend, function_backend
from gpt2_infer.request import EngineName, Mode, Request
from gpt2_infer.sampling import Sampling

# naive's error is a single draw, accumulated over all layers: a correct engine's was up to 3.2
# times as large in short texts of the demo model.
LUCK = 4.0


@dataclass(frozen=True, kw_only=True)
class Place(Verdict):
    """A layer's verdict, and where its error is largest; indices start at 0."""

    layer: int
    head: int
    row: int
    """The query's position in the padded sequence."""

    def __str__(self) -> str:
        place = f"layer {self.layer}, head {self.head}, row {self.row}"
        return f"{place}: {super().__str__()}"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two backends or engines at the examined step."""

    name: str
    emulated: bool = False
    token: int
    text: str | None
    """The token's text; None without a tokenizer."""
    margin: float
    """The difference between the two largest logits."""
    logits_error: float
    """The largest error of its logits against the reference; infinite for a NaN."""
    logits_budget: float | None = None
    """The error that rounding explains; None for a backend, whose layers have budgets."""
    shortfall: float
    """How far the token's logit is below the largest in the reference."""
    allowed: float
    """The shortfall that rounding explains."""
    place: Place | None = None
    """A backend's first layer over its budget, else the layer closest to it."""

    @property
    def findings(self) -> list[str]:
        """The differences from the reference, in the logits and in the layer."""
        reference = "float64 attention" if self.place else "the float64 model"
        budget = f", budget {self.logits_budget:.2e}" if self.logits_budget else ""
        findings = [
            f"logits differ from {reference}'s by up to {self.logits_error:.2e}{budget}",
            f"with {reference} the token's logit is {self.shortfall:.2e} below the largest; "
            f"rounding explains up to {self.allowed:.2e}",
        ]
        if self.place:
            place = "is closest to its budget" if self.place.passed else "first exceeds its budget"
            findings.append(f"attention {place} in {self.place}")
        return findings

    @property
    def faults(self) -> list[str]:
        """One sentence per fault; empty if rounding explains everything."""
        faults = []
        if self.place and self.place.fault:
            faults.append(f"in layer {self.place.layer} {self.place.fault}")
        elif self.place and not self.place.passed:
            faults.append(f"the first layer over its budget: {self.place}")
        if not math.isfinite(self.logits_error):
            faults.append("its logits are not finite")
        elif self.logits_budget is not None and self.logits_error > self.logits_budget:
            faults.append("its logits exceed their budget")
        if not self.shortfall <= self.allowed:
            faults.append(
                f"rounding does not explain its token, {self.shortfall:.2e} below the most likely"
            )
        if faults and self.place and self.place.passed:
            faults.append(
                "each layer is right when rerun: look for state between calls, a race, or an "
                "effect of graph capture"
            )
        return faults


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The result of diverge(); if the texts are equal, the last step is examined."""

    device: str
    dtype: str
    mode: Mode
    prompt_tokens: int
    new_tokens: int
    step: int | None
    """The index of the first new token that differs, from 0; None if the texts are equal."""
    position: int
    """The number of tokens before the examined one."""
    a: Side
    b: Side
    logits_difference: float
    """max|A - B|, infinite for a NaN."""
    seqlen: int | None = None
    """The length of the examined step, padding included; None for engines."""

    @property
    def verdict(self) -> Literal["equal", "tie", "bug in A", "bug in B", "bug in both"]:
        """The verdict; equal texts do not rule out a bug."""
        if self.a.faults and self.b.faults:
            return "bug in both"
        if self.a.faults or self.b.faults:
            return "bug in A" if self.a.faults else "bug in B"
        return "equal" if self.step is None else "tie"

    @property
    def passed(self) -> bool:
        """Whether neither side has a bug here."""
        return self.verdict in ("equal", "tie")

    @property
    def untried(self) -> str:
        """The lengths that the texts did not try; a kernel may go wrong only in its second tile."""
        tried = self.position if self.seqlen else self.prompt_tokens + self.new_tokens - 1
        return f"not tested: more than {tried} tokens at once"

    def to_json(self) -> dict[str, Any]:
        """Return every field, the verdict and the faults."""
        value = {"verdict": self.verdict, **asdict(self), "untried": self.untried}
        for name, side in (("a", self.a), ("b", self.b)):
            value[name]["faults"] = side.faults
        return value

    def __str__(self) -> str:
        """Return a readable report; the last line is the verdict."""
        sides = {"A": self.a, "B": self.b}
        lines = [
            f"{self.device}, {self.dtype}, {self.mode}, {self.prompt_tokens} prompt tokens and "
            f"{self.new_tokens} new ones",
            "the texts are equal"
            if self.step is None
            else f"the texts diverge in step {self.step}",
            f"step {self.position - self.prompt_tokens} is examined, the token at position "
            f"{self.position}",
        ]
        for letter, side in sides.items():
            chosen = f"token {side.token} {side.text!r}, top-2 margin {side.margin:.2e}"
            emulated = " (emulated on the CPU)" if side.emulated else ""
            lines += ["", f"{letter}  {side.name}{emulated}"]
            lines += [f"   {line}" for line in (chosen, *side.findings)]
        lines += [f"\nA and B  logits differ by up to {self.logits_difference:.2e}"]
        lines += [""]
        lines += [f"{letter}: {fault}" for letter, side in sides.items() for fault in side.faults]
        lines += [self.untried] if self.passed else []
        wrong = dict.fromkeys(side.name for side in sides.values() if side.faults)
        return "\n".join([*lines, self.verdict + (f": {' and '.join(wrong)}" if wrong else "")])


def diverge(
    model: GPT2,
    a: str | BackendSpec,
    b: str | BackendSpec,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 64,
    mode: Mode = "recompute",
    progress: bool = False,
) -> Divergence:
    """Compare the greedy texts of two backends, or of two engines with the model's own backend.

    prompt: a text or token ids; generation continues past the end-of-text token. If `a` is `b`, the
    question is whether it writes the same text twice. mode: how the texts are generated; the layers
    are always examined in recompute mode, so only a decode kernel's tokens are judged. Raises
    RequestError, UnknownBackendError, UnavailableBackendError or UnsupportedError, and
    KeyboardInterrupt if a text was interrupted.
    """
    if model.dtype == torch.float64:
        raise RequestError("a float64 model has no finer reference to be held to")
    specs, engines = list[BackendSpec](), [x for x in (a, b) if x in get_args(EngineName)]
    if len(engines) == 1:
        raise RequestError(f"{engines[0]} is an engine: diverge compares two of a kind")
    models = [model, model]
    if not engines:
        specs = [model.with_attention(x).attention for x in (a, b)]
        for spec in specs:
            check_backend(spec, model.config, model.dtype, model.device)
        models = [model.with_attention(x, x if mode == "kv-cache" else None) for x in specs]
        # The same engine for both, so that both run the same lengths.
        engines = ["auto" if all(spec.cuda_graphs for spec in specs) else "eager"] * 2
    requests = [
        Request(
            config=model.config,
            tokenizer=model.tokenizer,
            prompts=[prompt] if isinstance(prompt, str) else [[*prompt]],
            max_new_tokens=max_new_tokens,
            mode=mode,
            ignore_eos=True,
            engine=cast("EngineName", engine),
        )
        for engine in engines
    ]
    first = _write(models[0], requests[0], progress=progress)
    runs = [first, _write(models[1], requests[1], first.tokens[0], progress=progress)]
    return examine(model, specs, runs) if specs else _examine_engines(model, runs)


@dataclass
class _Written:
    """A text, and the logits of each of its steps, (steps, vocab_size)."""

    prompts: list[list[int]]
    mode: Mode
    engine: EngineName
    length_step: int
    logits: Tensor
    tokens: list[list[int]] = field(default_factory=lambda: [[]])


@dataclass(frozen=True, kw_only=True)
class _Recorder(Sampling):
    """A greedy sampler that records the logits, also inside a captured graph."""

    logits: Tensor

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        self.logits.copy_(logits)
        return super().choose(logits, uniform)


@without_autocast
@torch.inference_mode()
def _write(
    model: GPT2, request: Request, fed: Sequence[int] = (), *, progress: bool = False
) -> _Written:
    """Write a text; its steps get the tokens `fed`, if any, in place of those that they choose."""
    (prompt,), steps = request.rows, request.max_new_tokens
    model = model.up_to(len(prompt) + steps)
    with model.on_device():
        engine = make_engine(model, request)
        recorder = _Recorder(logits=torch.zeros(1, model.config.vocab_size, device=model.device))
        engine.sampling = recorder
        engine.warm_up()
        logits = recorder.logits.new_empty(steps, model.config.vocab_size)
        written = _Written(request.rows, request.mode, engine.name, engine.length_step, logits)
        for step in tqdm(range(steps), unit="tok", disable=None if progress else True):
            engine.step(step)
            own = engine.own_logits(step)
            logits[step] = (recorder.logits if own is None else own)[0]
            written.tokens[0].append(max(0, int(engine.newest[0])))  # -1 is read as 0
            if fed:
                engine.newest[0] = engine.tokens[0, len(prompt) + step] = fed[step]
    return written


def examine(
    model: GPT2,
    specs: Sequence[BackendSpec],
    runs: Sequence[Generation | _Written],
    runners: Sequence[Runner] = (),
) -> Divergence:
    """Compare two backends' finished texts as diverge() does.

    runs: one complete run per backend, with the same prompts and mode. Of a batch, the row whose
    texts diverge first is examined. runners: of the backends; by default, they are opened here.
    """
    texts = [run.tokens for run in runs]
    new_tokens = len(texts[0][0])
    pairs = [*enumerate(zip(*texts, strict=True))]
    step, row = next(
        ((i, row) for i in range(new_tokens) for row, (a, b) in pairs if a[i] != b[i]), (None, 0)
    )
    examined = new_tokens - 1 if step is None else step
    # Up to this token both texts are equal.
    prefixes = [[*p, *t[:examined]] for p, t in zip(runs[0].prompts, texts[0], strict=True)]
    length = len(prefixes[0])
    length_step = runs[1].length_step if runs[1].mode == "recompute" else CPU_LENGTH_STEP
    seqlen = padded_length(length, length_step, model.config)
    padding = [0] * (seqlen - length)
    padded = torch.tensor([prefix + padding for prefix in prefixes], device=model.device)
    seqlens = torch.tensor([length] * len(prefixes), device=model.device)

    def logits(spec: AttentionChoice) -> Tensor:
        last: Tensor = model.with_attention(spec)(padded, seqlens=seqlens)[row, 0]
        return last.double()

    naive = logits(naive_attention)
    if not naive.isfinite().all():
        raise RequestError(_no_budget("the logits", model.dtype))
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.on_device())  # workers use the current device
        if not runners:
            opened = (contextlib.closing(open_runner(spec, model.device.type)) for spec in specs)
            runners = [*map(stack.enter_context, opened)]
        layers = _Layers(runners)
        judge = dataclasses.replace(function_backend(layers.attention), supports_gqa=True)
        reference = logits(judge)
    naive_error = _distance(naive, reference)
    largest = reference.abs().max().item()
    owns = [logits(spec) for spec in specs]
    sides = []
    for spec, own, text, places in zip(specs, owns, texts, layers.places, strict=True):
        token = text[row][examined]
        precision = spec.precisions[layers.dtype]
        over = [place for place in places if not place.passed]
        sides.append(
            Side(
                name=spec.name,
                emulated=model.device.type in spec.emulated_on,
                **_choice(model, token, own, reference),
                allowed=2 * error_budget(precision, model.dtype, naive_error, largest),
                place=over[0] if over else max(places, key=lambda place: place.nearness),
            )
        )
    return Divergence(
        device=model.device.type,
        dtype=dtype_name(model.dtype),
        mode=runs[1].mode,
        prompt_tokens=length - examined,
        new_tokens=new_tokens,
        step=step,
        position=length,
        seqlen=seqlen,
        a=sides[0],
        b=sides[1],
        logits_difference=_distance(*owns),
    )


def _examine_engines(model: GPT2, runs: Sequence[_Written]) -> Divergence:
    """Compare two engines' texts, of which the second was fed the first's tokens."""
    (prompt,), (fed,) = runs[0].prompts, runs[0].tokens
    ids = torch.tensor([[*prompt, *fed[:-1]]], device=model.device)
    finer = copy.deepcopy(model).double()
    for block in finer.blocks():
        block.attn.upcast = False  # no upcast to float32
    reference, naive = (
        each.with_attention(naive_attention)(ids, logits_to_keep=len(fed))[0]
        for each in (finer, model)
    )
    naive_error, largest = _distance(naive, reference), reference.abs().max().item()
    if not 0 < naive_error < math.inf:
        raise RequestError(_no_budget("the logits", model.dtype))
    precision = PLAIN_PRECISIONS[dtype_name(model.dtype)]
    budget = error_budget(precision, model.dtype, LUCK * naive_error, largest)

    def side(run: _Written, step: int) -> Side:
        choice = _choice(model, run.tokens[0][step], run.logits[step], reference[step])
        return Side(name=run.engine, logits_budget=budget, allowed=2 * budget, **choice)

    sides = [[side(run, i) for i in range(len(fed))] for run in runs]
    faulty = [i for i, pair in enumerate(zip(*sides, strict=True)) if any(x.faults for x in pair)]
    differing = [i for i, token in enumerate(runs[1].tokens[0]) if token != fed[i]]
    step = differing[0] if differing else None
    examined = [*faulty, *differing, len(fed) - 1][0]
    a, b = (each[examined] for each in sides)
    return Divergence(
        device=model.device.type,
        dtype=dtype_name(model.dtype),
        mode=runs[0].mode,
        prompt_tokens=len(prompt),
        new_tokens=len(fed),
        step=step,
        position=len(prompt) + examined,
        a=a,
        b=b,
        logits_difference=_distance(*(run.logits[examined] for run in runs)),
    )


def _choice(model: GPT2, token: int, logits: Tensor, reference: Tensor) -> dict[str, Any]:
    """Return the fields of Side for a token, the logits it was chosen from, and the right ones."""
    first, second = logits.topk(2).values.tolist()
    return {
        "token": token,
        "text": model.tokenizer.decode([token]) if model.tokenizer else None,
        "margin": first - second,
        "logits_error": _distance(logits, reference),
        "shortfall": (reference.max() - reference[token]).item(),
    }


def _no_budget(where: str, dtype: torch.dtype) -> str:
    """Return the message for a call that has no usable error budget."""
    return (
        f"in {dtype_name(dtype)} plain PyTorch gives NaN, infinity or only zeros in {where}, so "
        "there is no error budget to judge by: try another --dtype"
    )


class _Layers:
    """An attention kernel that computes in float64 and judges the backends on every call.

    places: per backend, each layer's largest error.
    """

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.runners = runners
        self.dtype = ""
        self.places: list[list[Place]] = [[] for _ in runners]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool
    ) -> Tensor:
        self.dtype = dtype_name(q.dtype)
        right = truth(q, k, v, softmax_scale, is_causal)
        options = {"softmax_scale": softmax_scale, "is_causal": is_causal}
        for runner, places in zip(self.runners, self.places, strict=True):
            spec, layer = runner.spec, len(places)
            heads = (k, v) if spec.supports_gqa else per_query_head(q, k, v)
            called = runner.call(Call("attention", [(q, *heads)], **options))
            o = called.o[0].to(q.device)
            verdict = right.judge(o, spec.precisions[self.dtype], spec.error_slack)
            if not 0 < verdict.budget < math.inf:
                raise RequestError(_no_budget(f"the attention of layer {layer}", q.dtype))
            verdict = dataclasses.replace(verdict, fault=verdict.fault or called.fault)
            # Where the outputs differ most in any batch entry; a NaN is the largest difference.
            apart = (o.double() - right.reference).abs().amax((0, 3)).nan_to_num(nan=math.inf)
            row, head = divmod(int(apart.argmax()), apart.shape[1])
            places.append(Place(**vars(verdict), layer=layer, head=head, row=row))
        return right.reference.to(q.dtype)


def _distance(x: Tensor, y: Tensor) -> float:
    """Return max|x - y|, or infinity if it is not finite."""
    distance = (x.double() - y.double()).abs().max().item()
    return distance if math.isfinite(distance) else math.inf
