"""Build the site from README.md and every file that it leads to.

    python scripts/make_site.py [--out FOLDER]

README.md is the home page; docs/site/mkdocs.yml has the navigation. Pages have the paths of their
documents, so that links work unchanged. A linked source becomes a page, too, and a linked
folder a list of its files; results and pictures are copied. A broken link fails the build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#\s]+)")
COPIED = {".json", ".svg", ".gz"}
# Sources take the whole width, and the search leaves them out.
SOURCE = "---\nhide: [navigation, toc]\nsearch: {{exclude: true}}\n---\n# {name}\n\n{body}\n"


def shown(path: Path) -> Path:
    """Return the path of the page or copy that shows a file or a folder."""
    if path.is_dir():
        return path / "index.md"
    return path if path.suffix in {".md", *COPIED} else path.with_name(f"{path.name}.md")


def markdown(path: Path) -> str:
    """Return the Markdown of a page."""
    if path.suffix == ".md":
        return path.read_text("utf-8")
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.name != "__pycache__")
        return SOURCE.format(name=f"{name}/", body="\n".join(f"- [{it}]({it})" for it in files))
    language = {".cu": "cuda", ".cuh": "cuda", ".h": "cpp"}.get(path.suffix, path.suffix[1:])
    body = f"~~~~~~ {language}\n{path.read_text('utf-8').rstrip()}\n~~~~~~"
    return SOURCE.format(name=name, body=body)


def stage(folder: Path) -> None:
    """Write the pages' Markdown, and copy results and pictures, into a folder."""
    waiting = [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        page = shown(path)
        target = folder / page.relative_to(ROOT)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in COPIED:
            shutil.copy(path, target)
            continue

        def follow(link: re.Match[str], parent: Path = page.parent) -> str:
            linked = (parent / link[0]).resolve()
            if not linked.exists() or not linked.is_relative_to(ROOT):
                return link[0]
            waiting.append(linked)
            return os.path.relpath(shown(linked), parent)

        text = markdown(path)
        has_links = path.suffix == ".md" or path.is_dir()
        target.write_text(LINK.sub(follow, text) if has_links else text, "utf-8")


def main() -> int:
    """Stage the pages and build the site."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="output folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        pages = Path(name, "pages")
        stage(pages)
        for file in (ROOT / "docs" / "site").iterdir():
            shutil.copy(file, pages)
        configuration = (pages / "mkdocs.yml").rename(Path(name, "mkdocs.yml"))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        options = ["--config-file", str(configuration), "--site-dir", str(arguments.out.resolve())]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        return subprocess.run([*command, *options], env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
