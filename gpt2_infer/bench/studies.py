"""What can be measured, as data: the studies behind the documents (studies.toml) and one's own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from gpt2_infer.bench import tables
from gpt2_infer.bench.results import (
    BASELINE,
    AtLeastOne,
    GenerationCell,
    KernelCell,
    Results,
    Shape,
    TaskName,
    check_output,
)
from gpt2_infer.errors import RequestError

STUDIES = Path(__file__).with_name("studies.toml")
DEFAULT_PROMPT = "Hello, I'm a language model,"  # the case study's
# A comparison on a CPU takes minutes at these lengths, and hours at those of a GPU.
LENGTHS = {
    "cpu": {"max_tokens": [32, 64], "seqlens": [64, 128, 256, 512]},
    "cuda": {
        "max_tokens": [32, 64, 128, 256, 512],
        "seqlens": [64, 128, 256, 512, 1024, 2048, 4096],
    },
}
Rounds: TypeAlias = Annotated[int, msgspec.Meta(ge=2)]


class _Study(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="study"
):
    def run(self, task: str, out: Path) -> Results:
        """Measure, and write `out`; raises RequestError, ResultsError or an AttentionError."""
        raise NotImplementedError


class _Comparison(_Study, kw_only=True):
    backends: list[str] = []
    """Names, or version files, *.cu. Without these and families: every backend that runs."""
    families: list[str] = []
    baseline: str = BASELINE
    device: Literal["cpu", "cuda"] | None = None
    """None: cuda if there is one."""
    dtypes: list[str] = msgspec.field(default_factory=lambda: ["float32"])
    batch_sizes: list[AtLeastOne] = msgspec.field(default_factory=lambda: [1])

    def _selected(
        self, *, cpu_families: tuple[str, ...] = (), emulated: bool = False
    ) -> dict[str, Any]:
        """Return the device, the backends and the baseline that the study names."""
        from gpt2_infer.bench.selection import select
        from gpt2_infer.checkpoint import resolve_device

        device = str(resolve_device(self.device))
        families = self.families
        if device == "cpu" and not (families or self.backends):
            families = [*cpu_families]
        specs = select(
            self.backends, device, families=families, dtypes=self.dtypes, emulated=emulated
        )
        (baseline,) = select([self.baseline], device, dtypes=self.dtypes)
        return {"device": device, "specs": specs, "baseline": baseline}


class KernelStudy(_Comparison, kw_only=True, tag="kernel"):
    """Kernels alone: the cells, or else every combination of the lists."""

    cells: list[KernelCell] = []
    seqlens: list[AtLeastOne] = []
    """Empty: what LENGTHS says for the device."""
    heads: AtLeastOne = 12
    head_dims: list[AtLeastOne] = msgspec.field(default_factory=lambda: [64])
    full: bool = False
    """Without the causal mask."""
    rounds: Rounds = 5

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench.kernel import compare_kernels

        chosen = self._selected()
        seqlens = self.seqlens or LENGTHS[chosen["device"]]["seqlens"]
        cells = self.cells or [
            KernelCell(n, batch, self.heads, head_dim, dtype, not self.full)
            for dtype, batch, head_dim, n in itertools.product(
                self.dtypes, self.batch_sizes, self.head_dims, seqlens
            )
        ]
        return compare_kernels(cells=cells, rounds=self.rounds, task=task, out=out, **chosen)


class GenerationStudy(_Comparison, kw_only=True, tag="generation"):
    """Generation end to end, in every combination of the lists."""

    model: str = "demo"
    random_weights: bool = False
    prompt: str = DEFAULT_PROMPT
    modes: list[Literal["recompute", "kv-cache"]] = msgspec.field(
        default_factory=lambda: ["recompute"]
    )
    max_tokens: list[AtLeastOne] = []
    """The prompt included. Empty: what LENGTHS says for the device."""
    rounds: Rounds = 5

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        import torch

        from gpt2_infer.bench.generation import compare_generation
        from gpt2_infer.model import GPT2

        chosen = self._selected(cpu_families=("pytorch",))
        device = chosen.pop("device")

        def load(dtype: torch.dtype) -> GPT2:
            return GPT2.from_pretrained(
                self.model,
                random_weights=self.random_weights,
                device=device,
                dtype=dtype,
                attention=BASELINE,  # never run as such, and there in every dtype
            )

        cells = [
            GenerationCell(n, batch, dtype, mode)
            for dtype, batch, mode, n in itertools.product(
                self.dtypes,
                self.batch_sizes,
                self.modes,
                self.max_tokens or LENGTHS[device]["max_tokens"],
            )
        ]
        name = self.model + (", random weights, seed 0" if self.random_weights else "")
        return compare_generation(
            load,
            cells=cells,
            prompt=self.prompt,
            name=name,
            rounds=self.rounds,
            task=task,
            out=out,
            **chosen,
        )


class TransformersStudy(_Study, kw_only=True, tag="transformers"):
    """Our program beside transformers, with the same weights, with and without a cache."""

    device: Literal["cpu", "cuda"]
    """cpu: the demo model. cuda: GPT-2 small with random weights."""
    new_tokens: AtLeastOne | None = None
    """None: 256 on a CPU, 504 on a GPU."""
    rounds: Rounds = 5

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench import transformers

        new_tokens = self.new_tokens or {"cpu": 256, "cuda": 504}[self.device]
        return transformers.compare(
            self.device, new_tokens=new_tokens, rounds=self.rounds, task=task, out=out
        )


class _LadderStudy(_Study, kw_only=True):
    family: str = "fp32"
    batch: AtLeastOne = 1
    head_dim: AtLeastOne = 64
    full: bool = False

    def _shape(self, heads: int, seqlen: int) -> Shape:
        return Shape(
            batch=self.batch, heads=heads, seqlen=seqlen, head_dim=self.head_dim, full=self.full
        )


class ProfileStudy(_LadderStudy, kw_only=True, tag="profile"):
    """A ladder under Nsight Compute."""

    heads: AtLeastOne = 12
    seqlen: AtLeastOne = 1024

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench import profile

        shape = self._shape(self.heads, self.seqlen)
        return profile.profile(self.family, shape, task=task, out=out)


class InspectionStudy(_LadderStudy, kw_only=True, tag="inspection"):
    """What the compiler and the emulator say of a ladder; no GPU is needed."""

    heads: AtLeastOne = 1
    seqlen: AtLeastOne = 128
    arch: str = "90"

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench import inspection

        shape = self._shape(self.heads, self.seqlen)
        return inspection.inspect_ladder(self.family, shape, self.arch, task=task, out=out)


class PredictionStudy(_LadderStudy, kw_only=True, tag="prediction"):
    """What a ladder should take on a GPU; no GPU is needed."""

    gpu: str = "h200"
    seqlens: list[AtLeastOne] = msgspec.field(default_factory=lambda: [*LENGTHS["cuda"]["seqlens"]])
    batch: AtLeastOne = 1
    heads: AtLeastOne = 12

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench import prediction

        cells = [
            KernelCell(n, self.batch, self.heads, self.head_dim, "float32", is_causal=not self.full)
            for n in self.seqlens
        ]
        return prediction.predict_ladder(self.family, self.gpu, cells, task=task, out=out)


class BuildStudy(_Study, kw_only=True, tag="build"):
    """Cold builds of the float32 ladder; no GPU is needed."""

    arch: str = "90"
    rounds: Rounds = 3

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench import builds

        return builds.time_builds(self.arch, rounds=self.rounds, task=task, out=out)


class DecodeStudy(_Study, kw_only=True, tag="decode"):
    """Our engines writing a text, and peers beside them; needs a GPU."""

    models: list[str] = msgspec.field(default_factory=lambda: ["gpt2"])
    dtypes: list[str] = msgspec.field(default_factory=lambda: ["float32", "bfloat16"])
    batch_sizes: list[AtLeastOne] = msgspec.field(default_factory=lambda: [1])
    new_tokens: list[AtLeastOne] = msgspec.field(default_factory=lambda: [504])
    engines: list[Literal["eager", "graph", "fused"]] = msgspec.field(
        default_factory=lambda: ["eager", "graph", "fused"]
    )
    """The first one's text is what the others' are compared with."""
    mode: Literal["kv-cache", "recompute"] = "kv-cache"
    backends: list[str] = msgspec.field(default_factory=list)
    """Of attention; none: the default."""
    peers: bool = False
    """transformers runs, too, and with a cache the gpt-fast recipe."""
    rounds: Rounds = 5

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench.decoding import compare_decoding

        return compare_decoding(
            self.models,
            self.dtypes,
            self.batch_sizes,
            new_tokens=self.new_tokens,
            engines=self.engines,
            mode=self.mode,
            backends=self.backends,
            peers=self.peers,
            rounds=self.rounds,
            task=task,
            out=out,
        )


class BatchStudy(_Study, kw_only=True, tag="batch"):
    """Continuous batching by batch size, and transformers beside it."""

    model: str = "gpt2"
    device: str = "cuda"
    dtypes: list[str] = msgspec.field(default_factory=lambda: ["float32", "bfloat16"])
    batch_sizes: list[AtLeastOne] = msgspec.field(
        default_factory=lambda: [8, 32, 64, 128, 256, 512]
    )
    prompts: AtLeastOne = 4096
    new_tokens: AtLeastOne = 64
    peer_batch_sizes: list[AtLeastOne] = []
    rounds: Rounds = 2

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench.batches import compare_batches

        return compare_batches(
            self.model,
            self.dtypes,
            self.batch_sizes,
            device=self.device,
            prompts=self.prompts,
            new_tokens=self.new_tokens,
            peer_batch_sizes=self.peer_batch_sizes,
            rounds=self.rounds,
            task=task,
            out=out,
        )


class JobStudy(_Study, kw_only=True, tag="job"):
    """`gpt2-infer batch` by the clock, with each of some options."""

    model: str
    options: list[str]
    prompts: AtLeastOne
    new_tokens: AtLeastOne
    batch_size: AtLeastOne | None = None
    rounds: Rounds = 2

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench.batches import compare_jobs

        return compare_jobs(
            self.model,
            self.options,
            prompts=self.prompts,
            new_tokens=self.new_tokens,
            batch_size=self.batch_size,
            rounds=self.rounds,
            task=task,
            out=out,
        )


class PerplexityStudy(_Comparison, kw_only=True, tag="perplexity"):
    """The score of each backend on the bundled model's held-out books."""

    max_tokens: AtLeastOne = 30000
    window: AtLeastOne = 1024

    def run(self, task: str, out: Path) -> Results:
        """See _Study."""
        from gpt2_infer.bench.perplexities import score

        chosen = self._selected(emulated=True)
        return score(
            "demo",
            chosen["specs"],
            self.dtypes,
            device=chosen["device"],
            max_tokens=self.max_tokens,
            window=self.window,
            task=task,
            out=out,
        )


Study: TypeAlias = (
    KernelStudy
    | GenerationStudy
    | TransformersStudy
    | ProfileStudy
    | InspectionStudy
    | PredictionStudy
    | BuildStudy
    | DecodeStudy
    | BatchStudy
    | JobStudy
    | PerplexityStudy
)


def load() -> dict[str, Study]:
    """Read studies.toml: the study behind each table and picture, in the order of importance."""
    return msgspec.toml.decode(STUDIES.read_bytes(), type=dict[str, Study])


def make(kind: type[Study], options: dict[str, Any]) -> Study:
    """Return a study of one's own; raises RequestError for a value that it cannot have."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from error


def run(study: Study, task: str, out: Path) -> str:
    """Measure, write `out`, and return its table.

    Raises RequestError, ResultsError or an AttentionError.
    """
    try:
        msgspec.convert(task, TaskName)
    except msgspec.ValidationError as error:
        raise RequestError(f"the name {task!r} cannot be a task's: {error}") from error
    check_output(out)
    return tables.render(str(out), study.run(task, out))
