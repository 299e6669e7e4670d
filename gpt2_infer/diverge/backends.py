"""Find where the greedy texts of two backends diverge, and whether rounding or a bug is why.

Both backends write text from one prompt. At the first step where their tokens differ (the last step
if none does) the model is rerun in recompute mode on the tokens before it, padded to the length of
the second backend's run. Each backend is then compared with float64 attention in two ways:

layers: the input of each layer comes from float64 attention in the layers before it, so that no
error is inherited. Each backend's output of the layer must keep the budgets of
`judge.reference`; the bug is in the first layer that exceeds them. Each backend gets
copies of the inputs, and a backend that changes them has a bug.

logits: the same rule bounds how far the logits of a correct backend may be from those of float64
attention: 2 max|naive - ref| + 4 ulp(max|ref|), with the factor of its precision class in place of
2. Two logits may each be that far off, so rounding explains a token whose reference logit is at
most twice that below the largest. (That the smaller top-2 margin is at most max|A - B| explains
nothing: it holds whenever two backends choose different tokens.)

A backend has a bug if one of its layers exceeds its budget, if its logits are not finite, or if
rounding does not explain the token it wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels import BackendSpec
from attention_kernels.contract import dtype_name
from attention_kernels.judge.calls import Request
from attention_kernels.judge.reference import Verdict, error_budget, naive_attention, truth
from attention_kernels.judge.worker import Runner, open_runner
from gpt2_infer.diverge import report
from gpt2_infer.engines.base import CPU_LENGTH_STEP, padded_length
from gpt2_infer.errors import RequestError
from gpt2_infer.generation import Generation, generate
from gpt2_infer.model import GPT2, check_backend
from gpt2_infer.request import Mode, encode_prompts


@dataclass(frozen=True, kw_only=True)
class Place(Verdict):
    """A layer's verdict, and where its error is largest; indices start at 0."""

    layer: int
    head: int
    row: int
    """The query's position in the padded sequence."""

    def __str__(self) -> str:
        return f"{self.position}: {super().__str__()}"

    @property
    def position(self) -> str:
        """The place in words."""
        return f"layer {self.layer}, head {self.head}, row {self.row}"


@dataclass(frozen=True, kw_only=True)
class BackendSide(report.Side):
    """One of the two backends at the examined step."""

    backend: str
    emulated: bool
    logits_error: float
    """The largest error of its logits against float64 attention's; infinite for a NaN."""
    shortfall: float
    """How far the token's logit is below the largest, with float64 attention."""
    allowed: float
    """The shortfall that rounding explains."""
    place: Place
    """The first layer over its budget, else the layer closest to it."""
    key_tile: int | None
    """The number of keys per tile, from its kernel's header; None if not stated there."""

    @property
    def name(self) -> str:
        """The backend, and whether it is emulated."""
        return f"{self.backend}{' (emulated on the CPU)' if self.emulated else ''}"

    @property
    def findings(self) -> list[str]:
        """The differences from float64 attention, in the logits and in the layer."""
        budget = "is closest to its budget" if self.place.passed else "first exceeds its budget"
        return [
            f"logits differ from float64 attention's by up to {self.logits_error:.2e}",
            f"with float64 attention the token's logit is {self.shortfall:.2e} below the largest; "
            f"rounding explains up to {self.allowed:.2e}",
            f"attention {budget} in {self.place}",
        ]

    @property
    def faults(self) -> list[str]:
        """One sentence per fault; empty if rounding explains everything."""
        found = []
        if self.place.fault:
            found.append(f"in layer {self.place.layer} {self.place.fault}")
        elif not self.place.passed:
            found.append(f"the first layer over its budget: {self.place}")
        if not math.isfinite(self.logits_error):
            found.append("its logits are not finite")
        if not self.shortfall <= self.allowed:
            found.append(
                f"rounding does not explain its token, {self.shortfall:.2e} below the most likely"
            )
        if found and self.place.passed:
            found.append(
                "each layer is right when rerun: look for state between calls, a race, or an "
                "effect of graph capture"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class BackendDivergence(report.Divergence[BackendSide]):
    """The result of diverge(); if the texts are equal, the last step is examined."""

    seqlen: int
    """The length of the examined step, padding included."""
    logits_difference: float
    """max|A - B|, infinite for a NaN."""
    apart: Place
    """Where a layer's outputs differ most, relative to the sum of both budgets."""

    @property
    def untried(self) -> str:
        """What the texts did not exercise; a kernel may go wrong only in its second tile."""
        tiles = dict.fromkeys(
            f"the first tile of {side.key_tile} keys of {side.backend}"
            for side in (self.a, self.b)
            if side.key_tile and self.position <= side.key_tile
        )
        beyond = f", that is, anything beyond {' and '.join(tiles)}" if tiles else ""
        return f"not tested: more than {self.position} tokens at once{beyond}"

    @property
    def differences(self) -> list[str]:
        """The largest difference of the logits and of a layer."""
        return [
            f"\nA and B  logits differ by up to {self.logits_difference:.2e}",
            f"   attention at seqlen {self.seqlen} differs most in {self.apart.position}: "
            f"{self.apart.error:.2e}, both budgets {self.apart.budget:.2e}",
        ]


def diverge(
    model: GPT2,
    a: str | BackendSpec,
    b: str | BackendSpec,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 64,
    mode: Mode = "recompute",
    progress: bool = False,
) -> BackendDivergence:
    """Compare the greedy texts of backends `a` and `b` in `model`; its own backend is not used.

    prompt: a text or token ids; generation continues past the end-of-text token. If `a` is `b`, the
    question is whether the backend writes the same text twice. mode: how the texts are generated;
    the layers are always examined in recompute mode, so only a decode kernel's tokens are judged.
    Raises RequestError, UnknownBackendError, UnavailableBackendError or UnsupportedError, and
    KeyboardInterrupt if a text was interrupted.
    """
    if model.dtype == torch.float64:
        raise RequestError("a float64 model has no finer reference to be held to")
    specs = tuple(model.with_attention(x).attention for x in (a, b))
    for spec in specs:
        check_backend(spec, model.config, model.dtype, model.device)
    rows = encode_prompts(model.tokenizer, [prompt] if isinstance(prompt, str) else [[*prompt]])
    runs = [
        generate(
            model.with_attention(spec, spec if mode == "kv-cache" else None),
            rows,
            max_new_tokens=max_new_tokens,
            mode=mode,
            ignore_eos=True,
            progress=progress,
            # The same engine for both, so that both run the same lengths.
            engine="auto" if all(spec.cuda_graphs for spec in specs) else "eager",
            check_finite=False,
        ).whole()
        for spec in specs
    ]
    return examine(model, specs, runs)


def examine(
    model: GPT2, specs: Sequence[BackendSpec], runs: Sequence[Generation]
) -> BackendDivergence:
    """Compare two backends' finished texts as diverge() does.

    runs: one complete run per backend, with the same prompts and mode. Of a batch, the row whose
    texts diverge first is examined.
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

    def logits(spec: BackendSpec) -> Tensor:
        found: Tensor = model.with_attention(spec)(padded, seqlens=seqlens)[row, 0]
        return found.double()

    with contextlib.ExitStack() as runners:
        runners.enter_context(model.on_device())  # workers use the current device
        layers = _Layers(
            [
                runners.enter_context(contextlib.closing(open_runner(spec, model.device.type)))
                for spec in specs
            ]
        )
        reference = logits(report.unregistered(layers.attention))
    naive_error = _distance(logits(report.unregistered(naive_attention)), reference)
    if not math.isfinite(naive_error):
        raise RequestError(report.no_budget("the logits", model.dtype))
    largest = reference.abs().max().item()
    owns = [logits(spec) for spec in specs]
    sides = []
    for spec, own, text, places in zip(specs, owns, texts, layers.places, strict=True):
        token = text[row][examined]
        precision = spec.precisions[layers.dtype]
        over = [place for place in places if not place.passed]
        sides.append(
            BackendSide(
                backend=spec.name,
                emulated=model.device.type in spec.emulated_on,
                **report.choice(model, token, own),
                logits_error=_distance(own, reference),
                shortfall=(reference.max() - reference[token]).item(),
                allowed=2 * error_budget(precision, model.dtype, naive_error, largest),
                place=over[0] if over else max(places, key=lambda place: place.nearness),
                key_tile=_key_tile(spec),
            )
        )
    return BackendDivergence(
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
        apart=max(layers.apart, key=lambda place: place.nearness),
    )


def _key_tile(spec: BackendSpec) -> int | None:
    tile = spec.version.tile if spec.version else ""
    found = re.search(r"kBlockM x kBlockN = \d+ x (\d+)|kBlockN = (\d+) keys", tile)
    return int(found[1] or found[2]) if found else None


class _Layers:
    """An attention kernel that computes in float64 and judges the backends on every call.

    places: per backend, each layer's largest error. apart: each layer's largest difference between
    the two backends.
    """

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.runners = runners
        self.dtype = ""
        self.places: list[list[Place]] = [[] for _ in runners]
        self.apart: list[Place] = []

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool
    ) -> Tensor:
        self.dtype = dtype_name(q.dtype)
        layer = len(self.apart)
        right = truth(q, k, v, softmax_scale, is_causal)
        options = {"softmax_scale": softmax_scale, "is_causal": is_causal}
        request = Request("attention", [(q, k, v)], **options)
        outputs, budget = [], 0.0
        for runner, places in zip(self.runners, self.places, strict=True):
            found, spec = runner.call(request), runner.spec
            o = found.o[0].to(q.device)
            verdict = right.judge(o, spec.precisions[self.dtype], spec.error_slack)
            if not 0 < verdict.budget < math.inf:
                raise RequestError(report.no_budget(f"the attention of layer {layer}", q.dtype))
            verdict = dataclasses.replace(verdict, fault=verdict.fault or found.fault)
            places.append(_place(layer, o, right.reference, verdict))
            outputs.append(o)
            budget += verdict.budget
        a, b = outputs
        apart = Verdict(_distance(a, b), budget, naive_error=0.0)
        self.apart.append(_place(layer, a, b, apart))
        return right.reference.to(q.dtype)


def _place(layer: int, o: Tensor, other: Tensor, verdict: Verdict) -> Place:
    """Find where two outputs of a layer, (batch, seqlen, num_heads, head_dim), differ most.

    A NaN counts as the largest difference. The batch entry is not reported.
    """
    difference = (o.double() - other.double()).abs().amax((0, 3)).nan_to_num(nan=math.inf)
    row, head = divmod(int(difference.argmax()), difference.shape[1])
    return Place(**vars(verdict), layer=layer, head=head, row=row)


def _distance(x: Tensor, y: Tensor) -> float:
    """Return max|x - y|, or infinity if it is not finite."""
    distance = (x.double() - y.double()).abs().max().item()
    return distance if math.isfinite(distance) else math.inf
