"""Wheels from pip install to their first tokens, with wheels that do nothing else."""

from __future__ import annotations

import platform
import zipfile

import pytest

from gpt2_infer.bench import study
from gpt2_infer.bench.show import tables
from gpt2_infer.bench.study import InstallStudy
from gpt2_infer.errors import RequestError

# In place of this package: it prints tokens and reports that it found no compiler, or two.
PROGRAM = """
import json, os, shutil, sys
assert sys.argv[1:] == ["--model", "demo", "--json"]
assert os.listdir(os.environ["ATTENTION_KERNELS_CACHE"]) == ["site"]
found = [name for name in ("sh", os.environ.get("CXX", "sh")) if shutil.which(name)]
report = {"attention": "A", "engine": "graph", "prebuilt_backends": found}
print(json.dumps({"report": report, "results": [{"tokens": TOKENS}]}))
"""


def make_wheel(folder, version, tag, tokens):
    name = f"gpt2_infer-{version}.dist-info"
    files = {
        "gpt2_infer/__init__.py": "",
        "gpt2_infer/__main__.py": PROGRAM.replace("TOKENS", tokens),
        "gpt2_infer/demo_model/weights": "1234",
        f"{name}/METADATA": f"Metadata-Version: 2.1\nName: gpt2-infer\nVersion: {version}\n",
        f"{name}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{name}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"gpt2_infer-{version}-{tag}.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def test_wheels_for_a_platform_have_no_compiler_and_all_generate_the_same_tokens(tmp_path):
    make_wheel(tmp_path, 1, "py3-none-any", "[1]")
    make_wheel(tmp_path, 1, f"py3-none-linux_{platform.machine()}", "[1]")
    make_wheel(tmp_path, 2, "py3-none-any", "[2]")
    settings = InstallStudy(folder=str(tmp_path), options="--model demo", rounds=1)
    file = study.run(settings)
    pure, prebuilt, different = file.of("time")
    assert [len(row.extra["prebuilt_backends"]) for row in (pure, prebuilt)] == [2, 0]
    assert (pure.extra["model_bytes"], pure.extra["kernels_bytes"]) == (4, 0)
    install, generate = (file.beside(pure, metric) for metric in ("install", "run"))
    assert install.median + generate.median == pytest.approx(pure.median, rel=1e-4)
    assert (prebuilt.status, different.status) == ("ok", "failed")
    assert different.reason == "its tokens differ from the first wheel's"
    assert "| nvcc, g++ " in tables.render("FILE", file)


def test_a_folder_without_wheels_is_refused(tmp_path):
    with pytest.raises(RequestError, match="has no wheels"):
        study.run(InstallStudy(folder=str(tmp_path), options=""))
