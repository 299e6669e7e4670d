"""The command `gpt2-infer worth`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from attention_kernels import child
from gpt2_infer.cli import options
from gpt2_infer.cli.verify import text as verdict_text
from gpt2_infer.cli.verify import verify
from gpt2_infer.cli.versions import adapted
from gpt2_infer.errors import RequestError
from gpt2_infer.files import check_writable

if TYPE_CHECKING:
    from gpt2_infer.bench.worth import Worth

WIDTH, MOST_LINES = 100, 25


def worth(
    name: Annotated[str, options.BACKEND],
    /,
    *,
    entry: str | None = None,
    model: str | None = None,
    random_weights: bool = False,
    device: options.Device | None = None,
    dtype: options.Dtype = "float32",
    max_tokens: options.Count | None = None,
    gpu: str = "h200",
    quick: bool = False,
    out: Path | None = None,
) -> Worth:
    """Verify a kernel, then time it alone and in a model, beside others: what does it buy?

    A kernel that fails is not timed. One that would run emulated is predicted for `gpu`, alone and
    in GPT-2 small without a cache. Raises the errors of verify(), Question and answer().

    Args:
        name: backend name or version file, *.cu
        entry: how to call a file that is not a version file, in C++: 'attn(q, k, v, o, B, N, H, D,
            scale)'; header fields may follow, as in 'attn<<<N, 128>>>(q, k, v, o) | Tensors: BHND'
        model: hub id, local folder, demo, or a size such as qwen3-0.6b (default: demo; for
            predictions, GPT-2 small)
        random_weights: random weights in the size of --model
        device: cuda, cuda:1 or the like, or cpu (default: cuda if it runs there, else
            cpu)
        dtype: dtype of the model and the kernel
        max_tokens: length of texts, of the long prompt and of the kernel alone, in tokens
            (default: 512, and the model's positions; on a CPU, 64 and 512)
        gpu: GPU to predict for, if the kernel would run emulated: h200, h100, a100, t4 or rtx4090
        quick: verify with fewer checks, and measure no energy
        out: HTML file for the table and two pictures
    """
    asked = {k: v for k, v in locals().items() if k not in ("name", "entry", "out")}
    child.start_server()  # it imports torch while this process does
    from gpt2_infer.bench import worth as bench

    if out:
        check_writable(out)
        try:
            from gpt2_infer.bench.show import charts, worth_page
        except ModuleNotFoundError as error:
            raise RequestError(f"{error.name} is missing: install gpt2-infer[plot]") from error
    (name,) = adapted([name], entry)
    question = bench.Question(name, **asked)
    threads = bench.begin(question)
    on = cast("options.Device", question.device)
    findings = verify(name, device=on, dtypes=(dtype,), quick=quick, no_timing=True)
    found = bench.Worth(findings)
    if findings.passed:
        for thread in threads:  # nothing else runs while a kernel is timed
            thread.join()
        found.results = bench.answer(question)
        if out:
            page = worth_page.render(found.results, charts.render(found.results))
            out.write_text(page, "utf-8")
            print(f"wrote {out}", file=sys.stderr)
    return found


def text(found: Worth, **_: object) -> str:
    """Return the verdict on a kernel that failed, else a table of MOST_LINES lines or fewer."""
    from gpt2_infer.bench.show import tables
    from gpt2_infer.bench.show.worth_page import remarks

    verdict = verdict_text(found.findings)
    if found.results is None:
        return verdict
    (shown,) = tables.tables("", found.results)
    first = verdict.partition("\n")[0].replace(" in one process", "")
    lines = [first, shown.title, *shown.plain(WIDTH).splitlines(), *remarks(found.results, shown)]
    cut = [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]
    return "\n".join(cut[:MOST_LINES])
