"""What the documents say is tried out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_how_to_add_a_backend_works_as_written(clean_registry):
    from attention_kernels import get_backend
    from attention_kernels.conformance import Case, run_case

    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.split("## How to add a backend")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.strip() and "```" not in line]
    assert len(lines) <= 15
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(code, "CONTRIBUTING.md", "exec"), {})
    assert run_case(get_backend("MY_BACKEND"), Case(33, 32), "cpu").passed


def test_the_readmes_python_works_as_written(capsys):
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, "README.md", "exec"), {})
        assert len(capsys.readouterr().out) > 40


def test_links_in_the_documents_lead_somewhere():
    for document in (*ROOT.glob("*.md"), ROOT / "results" / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_takeaways_quote_the_tables():
    text = (ROOT / "README.md").read_text("utf-8")
    before, takeaways, after = re.split(r"\n## (?:Takeaways|Start)\n", text)
    tables = "\n".join(line for line in (before + after).splitlines() if line.startswith("|"))
    quoted = re.findall(r"\d+\.\d+(?:e[+-]\d+)?", takeaways)
    assert len(quoted) > 20
    assert [number for number in quoted if f" {number} " not in tables] == []
