"""Shared by the tests of jobs."""

from __future__ import annotations

import json
from pathlib import Path

from gpt2_infer import Sampling, batch


def make_settings(folder: Path) -> batch.Settings:
    """Return settings that give 4 parts for 40 rows."""
    return batch.Settings(
        model=str(folder),
        max_new_tokens=5,
        ignore_eos=True,
        sampling=Sampling(1.0, seed=11),
        part_rows=10,
        batch_size=4,
    )


def write_input(path: Path, count: int = 40) -> Path:
    rows = [{"id": f"row-{i}", "prompt": "a b c " * (i % 7), "tag": i} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def contents(out: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(out)): file.read_bytes()
        for file in out.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }
