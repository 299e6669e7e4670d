from __future__ import annotations

import dataclasses
import os

import pytest

from attention_kernels import get_backend
from attention_kernels.judge.plugins import Elsewhere
from gpt2_infer.bench import environment


@pytest.mark.parametrize(("status", "dirty"), [(" M x.py", True), ("", False), (None, None)])
def test_provenance_names_machine_software_and_source(status, dirty, monkeypatch):
    answer = lambda *words: status if "status" in words else "abc"  # noqa: E731
    monkeypatch.setattr(environment, "_git", answer)
    out = str(environment._ROOT / "results" / "r.json")
    monkeypatch.setattr("sys.argv", ["/some/where/script.py", "--rounds", "3", "--out", out])
    facts = environment.provenance()
    assert (facts.commit, facts.dirty) == ("abc", dirty)
    assert facts.command == "python script.py --rounds 3 --out results/r.json"
    assert facts.packages["torch"]
    assert facts.precision["matmul_allow_tf32"] is False


@pytest.mark.parametrize("name", ["registry.py", "csrc/fp32/v01_a.cu", "csrc/common.cuh"])
def test_any_changed_source_changes_the_digest(name, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    file = tmp_path / "attention_kernels" / name
    file.parent.mkdir(parents=True)
    digests = set()
    for text in ("one", "two"):
        file.write_text(text)
        digests.add(environment.source_digest())
    file.rename(file.with_name(f"v02_b{file.suffix}"))
    digests.add(environment.source_digest())
    assert len(digests) == 3


def test_a_backends_digest_covers_the_files_of_its_package(tmp_path, monkeypatch):
    first, second = (
        environment.backend_digest(get_backend(f"CUSTOM_CUDA_VERSION_{n}")) for n in (1, 2)
    )
    assert first != second
    package = tmp_path / "test_of_a_plug_in"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "backend.py").write_text("def load():\n    raise NotImplementedError\n")
    monkeypatch.syspath_prepend(tmp_path)
    from test_of_a_plug_in.backend import load

    spec = dataclasses.replace(get_backend("NAIVE_PYTORCH"), loader=load)
    before = environment.backend_digest(spec)
    (package / "helper.py").write_text("WIDTH = 4\n")
    assert before != environment.backend_digest(spec)
    os.mkfifo(package / "endless")  # a plug-in could name it as its source
    elsewhere = dataclasses.replace(spec, loader=Elsewhere("PLUG_IN", (str(package / "endless"),)))
    assert environment.backend_digest(elsewhere) is None
