from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch

from attention_kernels import BackendSpec, get_backend
from attention_kernels.contract import Kernels
from attention_kernels.judge.plugins import Elsewhere
from attention_kernels.judge.truth import naive_attention
from gpt2_infer.bench import environment


def test_provenance_names_machine_software_and_source():
    facts = environment.provenance()
    assert len(facts.source_digest) == 64
    assert facts.packages["torch"]
    assert facts.precision["matmul_allow_tf32"] is False


def test_the_gpu_that_the_process_uses_is_asked_for_by_its_uuid(monkeypatch):
    properties = SimpleNamespace(
        name="A card", major=9, minor=0, multi_processor_count=132, total_memory=2**37, uuid="12-34"
    )
    asked = []

    def run(*words):
        asked.extend(words)
        return ", ".join(["580.1", "1980 MHz", "3201 MHz", "345 MHz", "3200 MHz", "700.00 W"])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(environment, "_run", run)
    gpu = environment._gpu()
    assert {"nvidia-smi", "--id=GPU-12-34"} <= {*asked}
    assert (gpu.name, gpu.clocks_max_sm, gpu.power_limit) == ("A card", "1980 MHz", "700.00 W")


@pytest.mark.parametrize(("status", "dirty"), [(" M x.py", True), ("", False), (None, None)])
def test_uncommitted_changes_are_recorded(status, dirty, monkeypatch):
    answer = lambda *words: status if "status" in words else "abc"  # noqa: E731
    monkeypatch.setattr(environment, "_git", answer)
    facts = environment.provenance()
    assert (facts.commit, facts.dirty) == ("abc", dirty)


def test_the_command_names_no_private_folder(monkeypatch):
    out = str(environment._ROOT / "results" / "r.json")
    monkeypatch.setattr("sys.argv", ["/some/where/script.py", "--rounds", "3", "--out", out])
    expected = "python script.py --rounds 3 --out results/r.json"
    assert environment.provenance().command == expected


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

    spec = BackendSpec(
        name="PLUG_IN",
        family="test",
        summary="A test's.",
        loader=load,
        precisions={"float32": "ieee-fp32"},
    )
    before = environment.backend_digest(spec)
    (package / "helper.py").write_text("WIDTH = 4\n")
    assert before != environment.backend_digest(spec)
    os.mkfifo(package / "endless")  # a plug-in could name it as its source
    elsewhere = dataclasses.replace(spec, loader=Elsewhere("PLUG_IN", (str(package / "endless"),)))
    assert environment.backend_digest(elsewhere) is None
    namespace: dict = {"Kernels": Kernels, "naive": naive_attention}
    exec("def load():\n    return Kernels(naive)\n", namespace)
    in_no_file = dataclasses.replace(spec, loader=namespace["load"])
    assert environment.backend_digest(in_no_file) is None
