"""Write the README's tables from results/; --check only says whether they are current.

    python scripts/update_readme.py [--check]

`<!-- table TASK -->` ... `<!-- end -->` holds the table of the newest results file of that task.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path

from gpt2_infer.results import SCHEMA_FILE, Results, read

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def newest(folder: Path) -> dict[str, tuple[Path, Results]]:
    """The newest results file of each task, by the date in its provenance."""
    found: dict[str, tuple[Path, Results]] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name == SCHEMA_FILE.name:
            continue
        results = read(path)
        if (
            results.task not in found
            or results.provenance["date"] > found[results.task][1].provenance["date"]
        ):
            found[results.task] = (path, results)
    return found


def generation_table(path: Path, results: Results) -> str:
    """Generation end to end beside transformers.

    A ratio is of whole calls, warm-up included, and only within a mode and precision class.
    """
    settings, provenance = results.settings, results.provenance
    new_tokens = settings["new_tokens"]
    gpu = provenance["gpu"]
    where = gpu["name"] if gpu else f"{provenance['cpu']}, {provenance['cpu_threads']} threads"
    lines = [
        f"{settings['model']}, {settings['dtype']}, {settings['prompt_tokens']} + {new_tokens} "
        f"tokens, {where}, torch {provenance['packages']['torch']}, "
        f"transformers {provenance['packages']['transformers']}; medians of {settings['rounds']} "
        f"interleaved rounds ([{path.name}](results/{path.name})):",
        "",
        "| program, mode | attention | precision | call, s (min .. max) | vs transformers "
        "| after warm-up, s | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for series in results.series:
        labels = series.labels
        program = f"{labels['program']}, {labels['mode']}"
        attention = labels["decode_attention"] or labels["attention"]
        start = f"| {program} | `{attention}` | {labels['precision']} |"
        if series.status == "failed":
            lines.append(f"{start} failed: {series.reason} | | | |")
            continue
        ratio = ""
        for other in results.series:
            same = all(other.labels[key] == labels[key] for key in ("mode", "precision"))
            if same and other.labels["program"] == "transformers" and other.status == "ok":
                ratio = f"{other.median / series.median:.2f}"
        low, high = series.spread
        generation = statistics.median(series.facts.get("generation_s", series.samples))
        lines.append(
            f"{start} {series.median:.3f} ({low:.3f} .. {high:.3f}) | {ratio} "
            f"| {generation:.3f} | {new_tokens / generation:.0f} |"
        )
    return "\n".join(lines) + "\n"


TABLES = {"generation-cpu": generation_table, "generation-cuda": generation_table}


def render(text: str, folder: Path) -> str:
    """`text` with every marked table replaced; a task without results says so."""
    results = newest(folder)

    def table(match: re.Match[str]) -> str:
        task = match[2]
        body = "Not measured yet.\n"
        if task in results:
            body = TABLES[task](*results[task])
        return f"{match[1]}\n{body}\n{match[3]}"

    return MARKED.sub(table, text)


def main() -> int:
    """Rewrite README.md, or say that it is stale."""
    parser = argparse.ArgumentParser(description="Write the README's tables from results/.")
    parser.add_argument("--check", action="store_true", help="exit 1 where a table is stale")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text("utf-8")
    after = render(before, ROOT / "results")
    if arguments.check:
        if before != after:
            print("README.md is stale: run python scripts/update_readme.py", file=sys.stderr)
        return int(before != after)
    readme.write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
