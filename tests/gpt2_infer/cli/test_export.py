"""What `export` writes: a repository that Hugging Face's tools take, with a test of its own."""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attention_kernels import UnsupportedError
from attention_kernels.judge import suite
from attention_kernels.judge.suite import Failure
from attention_kernels.ladder import build, compilers, header
from gpt2_infer import export
from gpt2_infer.cli import parse
from gpt2_infer.errors import RequestError
from tests.conftest import EXAMPLE, SHORT_SUITE, on_every_device, python
from tests.gpt2_infer.cli.program import run
from tests.gpt2_infer.cli.test_json import report_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Path:
    """A version file with a header of its own next to it, for one head_dim, so that it is quick."""
    folder = tmp_path_factory.mktemp("kernel")
    text = (EXAMPLE / "v01_warp_per_row.cu").read_text()
    text = text.replace(
        "// Flags:  (none)", "// Takes:  float32, head_dim 32\n// Flags:  -DTILE=32"
    )
    text = text.replace('"common.cuh"', '"sizes.cuh"\n\n#include "fp32/three_products.cuh"')
    text = text.replace("constexpr int kBlockN = 32;", "constexpr int kBlockN = kTile;")
    (folder / "sizes.cuh").write_text("#pragma once\nconstexpr int kTile = TILE;\n")
    (folder / "v01_mine.cu").write_text(text)
    return folder / "v01_mine.cu"


def exported(kernel: Path, out: Path) -> Path:
    export.plan(header.of_file(kernel), out).write("The verdict.", "The times.")
    return out


def printed(*words: str | Path, cwd: Path | None = None, **settings: str) -> str:
    """Run Python, and return what it prints."""
    done = python(*words, cwd=cwd, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What kernel-builder puts next to a binding.
REGISTRATION = """
#define STABLE_TORCH_LIBRARY_EXPAND(name, library) STABLE_TORCH_LIBRARY(name, library)
#define REGISTER_EXTENSION(name)
"""
OPS = """
from pathlib import Path
import torch
torch.ops.load_library(Path(__file__).with_name("{id}.so"))
ops = torch.ops.{id}
def add_op_namespace_prefix(name):
    return "{id}::" + name
"""


def build_variant(folder: Path, device: str) -> None:
    """Build what kernel-builder would: for the GPU, or for the CPU with the emulator as CUDA."""
    import torch

    plan = tomllib.loads((folder / "build.toml").read_text())
    name, stable = plan["general"]["name"], plan["torch"]["stable-abi"].replace(".", "")
    (kernel,) = plan["kernel"].values()
    module = name.replace("-", "_")
    identifier = f"_{module}_{device}"
    gxx, nvcc, backend = str(compilers.find_gxx()), str(compilers.find_nvcc()), {"type": device}
    if device == "cuda":
        toolkit = f"cu{torch.version.cuda.replace('.', '')}"
        arch = compilers.architectures().split(",")[0]
        backend["archs"] = ["{}.{}".format(*torch.cuda.get_device_capability())]
        command = [nvcc, "-Xcompiler=-fPIC", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
        command += ["-DUSE_CUDA=1", "-DCUDA_KERNEL", "-cudart=none"]
        link = ["-Xlinker", str(compilers.cuda_runtime(nvcc))]
    else:
        runtime = build.object_file("emulator", header.CSRC, *build.RUNTIME)
        toolkit, link = "cpu", ["-pthread", build.EMULATOR_WRAPS, "-xnone", str(runtime)]
        command = [gxx, "-fPIC", "-O1", "-xc++", "-DATTENTION_EMULATOR"]
        command += [f"-I{header.CSRC}", f"-I{header.CSRC / 'emulator'}"]
    system = f"{platform.machine()}-{platform.system().lower()}"
    variant = folder / "build" / f"torch-stable-abi{stable}-{toolkit}-{system}"
    shutil.copytree(folder / "torch-ext" / module, variant)
    (variant / "_ops.py").write_text(OPS.format(id=identifier))
    (variant / "registration.h").write_text(REGISTRATION)
    metadata = {"id": identifier, "name": name, "version": 1, "license": "mit"}
    metadata |= {"python-depends": [], "backend": backend}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    root = Path(torch.__file__).parent
    command += [f"-DTORCH_EXTENSION_NAME={identifier}", *kernel["cuda-flags"], f"-I{variant}"]
    command += [f"-I{folder / name}" for name in {*plan["torch"]["include"], *kernel["include"]}]
    command += [f"-DTORCH_TARGET_VERSION={2 << 56 | 10 << 48}", "-isystem", str(root / "include")]
    command += [str(folder / name) for name in kernel["src"] if name.endswith(".cu")]
    command += [str(folder / "torch-ext" / "torch_binding.cpp"), "-std=c++20", "-shared"]
    command += ["-Xlinker", "--no-as-needed", f"-L{root / 'lib'}", "-ltorch", *link]
    subprocess.run([*command, "-o", str(variant / f"{identifier}.so")], check=True)


# What `kernels benchmark` does, with a shorter text.
BENCHMARK = """
import sys
from pathlib import Path
from kernels.cli import benchmark
folder = Path(sys.argv[1])
(script,) = benchmark.discover_benchmark_scripts("fast-rows", folder)
(attention,) = benchmark.discover_benchmark_classes(script, folder)
attention.seqlen = 33
found, _ = benchmark.run_benchmark_class(attention, 1, 0, str(folder), True, "local")
assert found["causal"].verified
"""


@pytest.mark.slow
@on_every_device
def test_get_local_kernel_loads_a_build_which_passes_its_test_and_is_benchmarked(
    device, kernel, tmp_path
):
    """The build is by the test, with kernel-builder's rules; on the CPU the emulator is CUDA."""
    pytest.importorskip("kernels")
    if reason := compilers.missing_compiler("cuda" if device == "cuda" else "emulator"):
        pytest.skip(reason)
    folder = exported(kernel, tmp_path / "fast-rows")
    build_variant(folder, device)
    shown = printed("-m", "pytest", "-v", "-p", "no:cacheprovider", "tests", cwd=folder)
    assert "8 passed" in shown
    pytest.importorskip("kernels.cli.benchmark", exc_type=ImportError)  # needs more packages
    printed("-c", BENCHMARK, folder)


def test_kernel_builder_can_read_the_repository_of_a_version_with_any_name(kernel, tmp_path):
    shutil.copytree(kernel.parent, tmp_path / "other")
    text = kernel.read_text().replace("Layout: strided", "Layout: contiguous")
    other = tmp_path / "other" / "a (1).cu"
    other.write_text(text.replace("// Flags:", "// Needs:  sm_80\n// Flags:"))
    folder = exported(other, tmp_path / "fast_rows")
    build = tomllib.loads((folder / "build.toml").read_text())
    assert (build["general"]["name"], build["general"]["edition"]) == ("fast-rows", 5)
    built = build["kernel"]["fast_rows"]
    sources = [file for file in folder.rglob("*.*") if file.suffix in (".cpp", ".cu", ".cuh", ".h")]
    named = {*build["torch"]["src"], *built["src"]}
    assert {"csrc/a_1_.cu"} < named == {str(file.relative_to(folder)) for file in sources}
    assert {"-DTILE=32", "-DATTENTION_CONTIGUOUS"} <= {*built["cuda-flags"]}
    assert built["cuda-capabilities"][:2] == ["8.0", "8.6"]
    assert (folder / "CARD.md").read_text() == (folder / "README.md").read_text()
    rust = pytest.importorskip("kernels._rust")
    assert rust.Build.open(folder).general.backends == [rust.Backend.CUDA]


def test_a_wrong_kernel_is_not_exported(kernel, capsys, monkeypatch, tmp_path):
    why = Failure("seqlen 8", "the output is not finite")
    monkeypatch.setattr(suite, "verify", report_of(failures=[why]))
    out = tmp_path / "fast-rows"
    status, shown, _ = run(capsys, "export", str(kernel), "--out", str(out))
    assert status == 1
    assert why.why in shown
    assert shown.endswith("FAILED: nothing was written\n")
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("// Role:   decode", "role decode"),
        ("// Takes:  float16 bfloat16, head_dim 32", "2 dtypes"),
        ("// Takes:  float32, on the CPU", "host code"),
    ],
)
def test_what_the_hub_does_not_take_is_refused_with_the_reason(change, reason, kernel, tmp_path):
    file = tmp_path / "v01_other.cu"
    file.write_text(kernel.read_text().replace("// Takes:  float32, head_dim 32", change))
    with pytest.raises(UnsupportedError, match=reason):
        export.plan(header.of_file(file), tmp_path / "fast-rows")


def test_a_kernel_that_changes_meanwhile_is_not_exported(kernel, tmp_path):
    file = shutil.copytree(kernel.parent, tmp_path / "other") / kernel.name
    planned = export.plan(header.of_file(file), tmp_path / "fast-rows")
    (file.parent / "sizes.cuh").write_text("constexpr int kTile = 16;\n")
    with pytest.raises(RequestError, match="changed while it was verified"):
        planned.write("", "")
    assert not (tmp_path / "fast-rows").exists()


def test_an_environment_next_to_the_kernel_is_not_exported(kernel, monkeypatch, tmp_path):
    csrc = shutil.copytree(header.CSRC, tmp_path / "environment" / "csrc")
    for file in kernel.parent.iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(header, "CSRC", csrc)
    planned = export.plan(header.of_file(tmp_path / kernel.name), tmp_path / "fast-rows")
    assert {*planned.own} == {"v01_mine.cu", "sizes.cuh"}
    assert {"common.cuh", "fp32/three_products.cuh"} < {*planned.shared}


# Other tests use the same GPU.
BUSY = """
from attention_kernels.judge import clock
clock.OUTSIDE["cuda"] = clock.REPEATED["cuda"] = float("inf")
"""


@pytest.mark.slow
@on_every_device
def test_the_whole_command(device, tmp_path):
    """On a CPU it runs without nvcc, so that no time is predicted."""
    target, settings = "cuda", {}
    if device == "cpu":
        target = "emulator"
        settings = {"CUDACXX": "/nowhere/nvcc", "CUDA_VISIBLE_DEVICES": ""}
    if reason := compilers.missing_compiler(target):
        pytest.skip(reason)
    file = EXAMPLE / "v01_warp_per_row.cu"  # whose builds stay in the cache
    words = ["export", str(file), "--out", str(tmp_path / "fast-rows")]
    printed("-c", f"import sys\n{SHORT_SUITE}\n{BUSY}\nsys.exit(main({words}))", **settings)
    text = (tmp_path / "fast-rows" / "README.md").read_text()
    assert "It passed 12 checks" in text
    for command in re.findall(r"^\$ gpt2-infer (.+)$", text, re.MULTILINE):
        parse(shlex.split(command))
    if device == "cpu":
        assert "Not measured, because there was no GPU" in text
        assert "No time is predicted: CUDACXX asks for /nowhere/nvcc" in text
    else:
        assert "12 checks against float64 on NVIDIA" in text
        assert re.search(r"V01_WARP_PER_ROW +[\d.]+ us", text)
        assert "v01_warp_per_row.cu on H200 SXM: B=1 H=12" in text
