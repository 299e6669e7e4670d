"""What each version of a ladder should take on a GPU, from its code alone."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tqdm import tqdm

from attention_kernels import AttentionError
from attention_kernels.inspection import predict
from attention_kernels.ladder.header import VersionHeader
from gpt2_infer.bench import environment, selection
from gpt2_infer.bench.results import KernelCell, KernelTiming, Predicted, Predictions, Results, read
from gpt2_infer.errors import RequestError

RESULTS = Path("results")


def find_gpu(key: str) -> predict.Gpu:
    """Return the numbers of a GPU by the name that `--gpu` takes; raises RequestError."""
    known = predict.gpus()
    if key not in known:
        raise RequestError(f"there are no numbers of {key}: there are {', '.join(known)}")
    return known[key]


def timed_on(gpu: predict.Gpu, files: Iterable[Results]) -> list[KernelTiming]:
    """Return the timings of kernels that were taken on such a GPU."""
    return [
        file
        for file in files
        if isinstance(file, KernelTiming)
        and file.provenance.gpu
        and file.provenance.gpu.name in gpu.devices
    ]


def predict_ladder(
    family: str, gpu: str, cells: Sequence[KernelCell], *, task: str, out: Path | None
) -> Predictions:
    """Predict every version of a ladder in each cell; what is refused says why.

    Raises RequestError.
    """
    card = find_gpu(gpu)
    versions = {
        name: version
        for name, version in selection.versions_of(family).items()
        if not version.is_host
    }
    timed = [found for path in sorted(RESULTS.glob("*.json")) if (found := _timing(path))]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        work = [
            pool.submit(predict_version, name, version, cells, gpu=gpu, timed=timed)
            for name, version in versions.items()
        ]
        for future in tqdm(work, "predicting", unit="", disable=None):
            future.exception()
    series = [one for future in work for one in future.result()]
    results = Predictions(
        task=task,
        provenance=environment.provenance(),
        gpu=card.name,
        series=series,
    )
    if out:
        results.write(out)
    return results


def predict_version(
    name: str,
    version: VersionHeader,
    cells: Sequence[KernelCell],
    *,
    gpu: str,
    timed: Sequence[KernelTiming] = (),
) -> list[Predicted]:
    """Predict a version in cells that differ in their length.

    timed: earlier results; git tells whether the version file is still the one of their commit.
    """
    digest = environment.version_digest(version.source)
    (head_dim, batch, num_heads, is_causal) = (
        cells[0].head_dim,
        cells[0].batch,
        cells[0].num_heads,
        cells[0].is_causal,
    )
    try:
        found = predict.predict(
            version,
            predict.gpus()[gpu],
            [cell.seqlen for cell in cells],
            head_dim=head_dim,
            batch=batch,
            num_heads=num_heads,
            is_causal=is_causal,
        )
    except AttentionError as error:
        return [
            Predicted(name=name, cell=cell, version_digest=digest, refused=str(error))
            for cell in cells
        ]
    digests = {
        series.source_digest
        for timing in timed
        if _has_code(version, timing)
        for series in timing.series
        if series.name == name and series.source_digest
    }
    return [
        Predicted(
            name=name,
            cell=cell,
            version_digest=digest,
            measured_digests=sorted(digests),
            time_us=round(one.time_us, 3),
            bound=one.bound,
            needs_us={key: round(value, 3) for key, value in one.needs_us.items() if value},
            waiting_us=round(one.waiting_us, 3),
            uneven_us=round(one.uneven_us, 3),
            launch_us=round(one.launch_us, 3),
            load_wavefronts=one.load_wavefronts,
            store_wavefronts=one.store_wavefronts,
        )
        for cell, one in zip(cells, found, strict=True)
    ]


def _timing(path: Path) -> KernelTiming | None:
    results = read(path)
    return results if isinstance(results, KernelTiming) else None


def _has_code(version: VersionHeader, timing: KernelTiming) -> bool:
    """Return whether some version file had the same code at the commit that results are of."""
    return environment.version_digest(version.source) in _codes(
        str(version.path.parent), timing.provenance.commit or ""
    )


@functools.cache
def _codes(folder: str, commit: str) -> set[str]:
    """Return the digests of a folder's version files at a commit; none where git has it not."""

    def git(*words: str) -> str:
        command = ["git", "-C", folder, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    names = [name for name in git("ls-tree", "--name-only", commit, "./").split() if ".cu" in name]
    return {environment.version_digest(git("show", f"{commit}:./{name}")) for name in names}
