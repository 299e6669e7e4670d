"""Draw results as SVG, without measuring anything.

    python scripts/plot_results.py [FILE ...]

Draws every plot of the results files next to them. Without FILE, draws the pictures that README.md
and docs/ show, from the newest results of each task, as results/plots/<task>_<plot>.svg, and
deletes pictures that no document shows.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from gpt2_infer.bench.record import ResultsError, newest, read
from gpt2_infer.bench.show import charts

ROOT = Path(__file__).parents[1]
PLOTS = ROOT / "results" / "plots"


def draw_documents() -> dict[Path, bytes]:
    """Draw the pictures that the documents show; raises ResultsError for one without results."""
    drawn = {}
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = document.read_text("utf-8")
        for task, plot in re.findall(r"results/plots/([\w-]+)_(\w+)\.svg", text):
            pictures = charts.render(read(newest(ROOT / "results", task)), {plot})
            if plot not in pictures:
                raise ResultsError(f"{document.name} shows {task}_{plot}, which cannot be drawn")
            drawn[PLOTS / f"{task}_{plot}.svg"] = pictures[plot]
    return drawn


def main() -> int:
    """Draw pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results files")
    arguments = parser.parse_args()
    try:
        drawn = {
            file.with_name(f"{file.stem}_{plot}.svg"): svg
            for file in arguments.files
            for plot, svg in charts.render(read(file)).items()
        }
        if not arguments.files:
            drawn = draw_documents()
            for file in {*PLOTS.iterdir()} - drawn.keys():
                file.unlink()
    except ResultsError as error:
        parser.error(str(error))
    for file, svg in drawn.items():
        if not file.exists() or not charts.is_same(file.read_text("utf-8"), svg.decode()):
            file.write_bytes(svg)
            print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
