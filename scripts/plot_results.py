"""Draw results as SVG, without measuring anything.

    python scripts/plot_results.py [--check]
    python scripts/plot_results.py FILE ... [--out FOLDER]

Without FILE, draws the pictures that README.md and docs/ show, from the newest results of each
task, as results/plots/<task>_<plot>.svg, and deletes pictures that no document shows. --check draws
nothing and exits with 1 if a picture is stale, missing or not shown. With FILE, draws every plot of
those results, in FOLDER or next to FILE.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from gpt2_infer.bench.record import ResultsError, newest, read
from gpt2_infer.bench.show import charts, drawing

ROOT = Path(__file__).parents[1]


def shown(root: Path) -> set[str]:
    """Return the names of the pictures that the documents show."""
    documents = [root / "README.md", *(root / "docs").glob("*.md")]
    found = (re.findall(r"results/plots/([\w-]+)\.svg", d.read_text("utf-8")) for d in documents)
    return {name for names in found for name in names}


def draw_documents(root: Path) -> dict[Path, bytes]:
    """Draw the pictures that the documents show; raises ResultsError for one without results."""
    wanted, drawn = shown(root), dict[str, bytes]()
    for task in sorted({name.rpartition("_")[0] for name in wanted}):
        plots = {name.removeprefix(f"{task}_") for name in wanted}
        pictures = charts.render(read(newest(root / "results", task)), plots)
        drawn |= {f"{task}_{plot}": svg for plot, svg in pictures.items()}
    if missing := wanted - drawn.keys():
        raise ResultsError(
            f"these pictures of the documents cannot be drawn: {', '.join(sorted(missing))}"
        )
    return {root / "results" / "plots" / f"{name}.svg": drawn[name] for name in sorted(wanted)}


def complaints(drawn: dict[Path, bytes], there: set[Path]) -> list[str]:
    """List the pictures that are stale, missing or not shown."""
    found = {
        "stale": [
            path
            for path, svg in drawn.items()
            if path in there and not drawing.is_same(path.read_text("utf-8"), svg.decode())
        ],
        "missing": drawn.keys() - there,
        "not shown": there - drawn.keys(),
    }
    return [
        f"{what}: {', '.join(sorted(path.name for path in paths))}"
        for what, paths in found.items()
        if paths
    ]


def main() -> int:
    """Draw pictures, or check that those of the documents are current."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results files")
    parser.add_argument("--out", type=Path, help="output folder (default: that of FILE)")
    parser.add_argument("--check", action="store_true", help="list stale pictures, drawing nothing")
    arguments = parser.parse_args()
    if arguments.files and arguments.check:
        parser.error("--check takes no FILE: it checks the pictures of the documents")
    if arguments.out and not arguments.files:
        parser.error("--out needs a FILE")
    there: set[Path] = set()
    try:
        if arguments.files:
            drawn = {
                (arguments.out or file.parent) / f"{file.stem}_{plot}.svg": svg
                for file in arguments.files
                for plot, svg in charts.render(read(file)).items()
            }
        else:
            drawn = draw_documents(ROOT)
            there = {*(ROOT / "results" / "plots").iterdir()}
    except ResultsError as error:
        parser.error(str(error))
    if arguments.check:
        if wrong := complaints(drawn, there):
            print(f"{'; '.join(wrong)} (run python scripts/plot_results.py)", file=sys.stderr)
        return int(bool(wrong))
    for file in there - drawn.keys():
        file.unlink()
    for file, svg in drawn.items():
        if file in there and drawing.is_same(file.read_text("utf-8"), svg.decode()):
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(svg)
        print(f"wrote {file}")
    if not drawn:
        print("nothing to draw")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
