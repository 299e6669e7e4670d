"""The commands, the code, the links and the figures of the documents are right."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attention_kernels.ladder import compilers, header
from gpt2_infer.cli import COMMANDS, parse
from tests.conftest import ROOT, needs_compiler

DOCUMENTS = [
    file.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "results/*.md")
    for file in sorted(ROOT.glob(pattern))
]


def test_how_to_add_a_backend_works_as_written(clean_registry):
    from attention_kernels import get_backend
    from attention_kernels.judge.suite import Case, run_case

    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.split("## How to add a backend")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.strip() and "```" not in line]
    assert len(lines) <= 15
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(code, "CONTRIBUTING.md", "exec"), {})
    assert run_case(get_backend("MY_BACKEND"), Case(33, 32), "cpu").passed


@pytest.mark.slow
@needs_compiler
def test_how_to_add_a_version_works_as_written(tmp_path):
    """Runs in a copy of the repository, without the commands that need a GPU or minutes."""
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = section.split("## How to add a version")[1].split("\n## ")[0]
    assert len([line for line in section.splitlines() if line.strip()]) <= 15
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
    shutil.copytree(ROOT, tmp_path, ignore=ignored, dirs_exist_ok=True)
    folder = tmp_path / "attention_kernels" / "csrc" / "fp32"
    first, *_, last = header.version_files(folder)  # the first compiles the fastest
    number = header.version_number(last)
    text = first.read_text().replace("// v01 - ", f"// v{number + 1} - ", 1)
    (folder / f"v{number + 1}_what_changed.cu").write_text(text)
    section = section.replace("VERSION_NN", f"VERSION_{number + 1}")
    left_out = {"verify", "compare"}
    if not compilers.find_nvcc():
        left_out.add("kernels")
    commands = [line.split("#")[0].split() for line in re.findall(r"^ {4}(.+)", section, re.M)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for program, *words in commands:
        if words[0] not in left_out:
            module = ["-m", "gpt2_infer"] if program == "gpt2-infer" else []
            command = [sys.executable, *module, *words]
            subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    page = (tmp_path / "docs" / "ladder-cuda-cores.md").read_text("utf-8")
    assert f"#### `CUSTOM_CUDA_VERSION_{number + 1}`" in page


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documented_commands_and_options_are_real(document):
    text = (ROOT / document).read_text("utf-8")
    for line in re.findall(r"^ *(?:\$ )?gpt2-infer (.*)", text.replace("\\\n", " "), re.MULTILINE):
        parse(shlex.split(line.replace(" && ", " #"), comments=True))
    for word in re.findall(r"`gpt2-infer ([a-z]+)", text):
        assert word in COMMANDS, word


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command):
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    documented = {"--help", *re.findall(r"--[a-z-]+", text)}
    assert {*re.findall(r"--[a-z-]+", str(parse([command, "--help"])))} <= documented


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_the_python_of_the_documents_works_as_written(document, capsys):
    text = (ROOT / document).read_text("utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if document.name != "CONTRIBUTING.md":  # a backend, registered in a test of its own
            exec(compile(code, str(document), "exec"), {})
            assert len(capsys.readouterr().out) > 40


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_in_the_documents_lead_somewhere(document):
    file = ROOT / document
    for target in re.findall(r"\]\(([^)]+)\)", file.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        to = (file.parent / path).resolve() if path else file
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target


def test_the_takeaways_quote_the_tables():
    text = (ROOT / "README.md").read_text("utf-8")
    takeaways = re.split(r"\n## (?:Takeaways|Where to read on)\n", text)[1]
    pages = "\n".join(file.read_text("utf-8") for file in (ROOT / "docs").glob("*.md"))
    tables = "\n".join(line for line in pages.splitlines() if line.startswith("|"))
    quoted = re.findall(r"\d+\.\d+(?:e[+-]\d+)?", takeaways)
    assert len(quoted) > 15
    assert [number for number in quoted if f" {number} " not in tables] == []


def test_the_architecture_names_what_exists():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    folders = ("attention_kernels", "docs", "gpt2_infer", "results", "scripts", "tests")
    paths = [path for name in folders for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    for name in re.findall(r"[\w/]+(?:\.(?:py|cpp|toml|md)\b|/(?=[\s`]))", text):
        assert any(path.as_posix().endswith(f"/{name.rstrip('/')}") for path in paths), name
    code = "\n".join(file.read_text("utf-8") for file in paths if file.suffix == ".py")
    for name in re.findall(r"`(?:\w+\.)?(\w+)\(", text):
        assert name == "launch" or re.search(rf"def {name}\(", code), name
    for name in re.findall(r"`(_?[A-Z]\w*[a-z]\w*)[`.]", text):
        assert re.search(rf"\b(class {name}\b|{name}(: TypeAlias)? = )", code), name
