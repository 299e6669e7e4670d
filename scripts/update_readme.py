"""Write the generated parts of README.md and docs/ from results/.

    python scripts/update_readme.py [--check]

`<!-- table TASK -->` ... `<!-- end -->` holds the table of the newest results file of that task;
`<!-- ladder FAMILY TASK ... -->` a section for each version of a ladder, from its header and these
tasks; `<!-- versions FAMILY -->` a table of its versions; `<!-- plot TASK PLOT -->` a picture.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gpt2_infer.bench import tables
from gpt2_infer.bench.results import ResultsError, newest
from gpt2_infer.cli import Parser

ROOT = Path(__file__).parents[1]
MARKED = re.compile(
    r"(<!-- (table|ladder|versions|plot) ([a-z0-9 -]+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def documents() -> list[Path]:
    """Return the documents that may have generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def render(text: str, folder: Path, up: str = "") -> str:
    """Replace every marked part of `text`; a task without results says so.

    up: the way from the document's folder to the repository's root, "../" or "".
    """
    if not MARKED.search(text):
        return text
    results = newest(folder)

    def replace(match: re.Match[str]) -> str:
        first, *tasks = match[3].split()
        if match[2] == "ladder":
            body = tables.ladder_sections(first, [results[t][1] for t in tasks if t in results])
        elif match[2] == "plot":
            picture = f"results/plots/{first}_{tasks[0]}.png"
            drawn = (folder / "plots" / f"{first}_{tasks[0]}.png").exists()
            body = f"![{first}, {tasks[0]}]({picture})\n" if drawn else ""
        elif match[2] == "versions":
            body = tables.versions_table(first)
        else:
            body = "Not measured yet.\n"
            if first in results:
                body = tables.render(*results[first], linked=True)
        body = body.replace("](results/", f"]({up}results/")
        return f"{match[1]}\n{body}\n{match[4]}" if body else f"{match[1]}{match[4]}"

    return MARKED.sub(replace, text)


def main() -> int:
    """Rewrite the documents, or name those that are stale."""
    parser = Parser(description="Write the generated parts of README.md and docs/ from results/.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a document is stale")
    arguments = parser.parse_args()
    stale = []
    try:
        for document in documents():
            before = document.read_text("utf-8")
            up = "../" * (len(document.relative_to(ROOT).parts) - 1)
            after = render(before, ROOT / "results", up)
            if before != after:
                stale.append(str(document.relative_to(ROOT)))
                if not arguments.check:
                    document.write_text(after, "utf-8")
    except OSError as error:
        parser.error(f"{error.filename} cannot be used: {error.strerror}")
    except ResultsError as error:
        parser.error(str(error))
    if not arguments.check or not stale:
        return 0
    print(f"{', '.join(stale)} is stale: run python scripts/update_readme.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
