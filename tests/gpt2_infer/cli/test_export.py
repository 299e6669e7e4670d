"""What `export` writes: a repository that Hugging Face's tools take, with a test of its own."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attention_kernels import UnsupportedError
from attention_kernels.inspection.sass import predict
from attention_kernels.judge import suite
from attention_kernels.judge.suite import Case, Failure
from attention_kernels.judge.truth import Verdict
from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.build import EMULATOR_WRAPS
from gpt2_infer import export
from gpt2_infer.cli import parse
from gpt2_infer.errors import RequestError
from tests.conftest import SHORT_SUITE, on_every_device
from tests.gpt2_infer.bench.common import file_of
from tests.gpt2_infer.bench.common import kernel as bench_row
from tests.gpt2_infer.cli.program import ROOT, run
from tests.gpt2_infer.cli.test_json import parsed, report_of
from tests.gpt2_infer.cli.test_predict import FOUND

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCE = ROOT / "examples" / "my_backend" / "src" / "my_backend"
WORST = (Case(8, 32), Verdict(3e-6, 4e-6, 2e-6))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Path:
    """A version file with a header of its own next to it, for one head_dim, so that it is quick."""
    folder = tmp_path_factory.mktemp("kernel")
    text = (SOURCE / "v01_warp_per_row.cu").read_text()
    text = text.replace(
        "// Flags:  (none)", "// Takes:  float32, head_dim 32\n// Flags:  -DTILE=32"
    )
    text = text.replace('#include "common.cuh"', '#include "sizes.cuh"\n\n#include "common.cuh"')
    text = text.replace("constexpr int kBlockN = 32;", "constexpr int kBlockN = kTile;")
    (folder / "sizes.cuh").write_text("#pragma once\nconstexpr int kTile = TILE;\n")
    (folder / "v01_mine.cu").write_text(text)
    return folder / "v01_mine.cu"


@pytest.fixture
def found(monkeypatch):
    """Replace what takes long by what it could have found."""
    monkeypatch.setattr(suite, "verify", report_of(worst=WORST, has_attention=True))
    monkeypatch.setattr(predict, "predict", lambda *_, **__: FOUND)
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")  # or verify test-compiles it


def exported(kernel: Path, out: Path) -> Path:
    export.plan(header.of_file(kernel), out).write("The verdict.", "The times.")
    return out


def python(*words: str | Path, folder: Path | None = None, **settings: str) -> str:
    """Run Python with this package, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **settings}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
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
    """Build what kernel-builder would: by its rules for cuda, or for the emulator on the CPU."""
    import torch

    build = tomllib.loads((folder / "build.toml").read_text())
    name, stable = build["general"]["name"], build["torch"]["stable-abi"].replace(".", "")
    module = name.replace("-", "_")
    identifier = f"_{module}_{device}_1234567"
    toolkit, backend = "cpu", {"type": device}
    if device == "cuda":
        toolkit = f"cu{torch.version.cuda.replace('.', '')}"
        backend["archs"] = ["{}.{}".format(*torch.cuda.get_device_capability())]
    system = f"{platform.machine()}-{platform.system().lower()}"
    variant = folder / "build" / f"torch-stable-abi{stable}-{toolkit}-{system}"
    shutil.copytree(folder / "torch-ext" / module, variant)
    (variant / "_ops.py").write_text(OPS.format(id=identifier))
    compile_variant(folder, build, variant / f"{identifier}.so", device)
    digests = {
        file.name: base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in variant.iterdir()
    }
    metadata = {
        **{"id": identifier, "name": name, "version": 1, "license": "mit", "python-depends": []},
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": digests},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata))


def compile_variant(folder: Path, build: dict, library: Path, device: str) -> None:
    import torch

    root = Path(torch.__file__).parent
    (kernel,) = build["kernel"].values()
    (source,) = (name for name in kernel["src"] if name.endswith(".cu"))
    work = library.with_suffix("")
    work.mkdir()
    (work / "registration.h").write_text(REGISTRATION)
    gxx, nvcc = str(compilers.find_gxx()), str(compilers.find_nvcc())
    include = [f"-I{folder / name}" for name in {*build["torch"]["include"], *kernel["include"]}]
    include += [f"-I{work}", "-isystem", str(root / "include")]
    if device == "cuda":
        arch = compilers.architectures().split(",")[0]
        gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        toolkit = f"-isystem{compilers.cuda_root(nvcc) / 'include'}"
        bind = [gxx, "-fPIC", "-DUSE_CUDA=1", "-DCUDA_KERNEL", toolkit]
        run_kernel = [nvcc, "-Xcompiler=-fPIC", gencode]
        link = [str(compilers.cuda_runtime(nvcc))]
    else:
        emulator = ["-DATTENTION_EMULATOR", f"-I{header.CSRC}", f"-I{header.CSRC / 'emulator'}"]
        bind = [gxx, "-fPIC", *emulator]
        run_kernel = [gxx, "-fPIC", *emulator, "-O1", "-xc++"]
        link = ["-pthread", "-ldl", EMULATOR_WRAPS]
    run_kernel += [*kernel["cuda-flags"], str(folder / source)]
    bind += [f"-DTORCH_EXTENSION_NAME={library.stem}", str(folder / "torch-ext/torch_binding.cpp")]
    bind += [f"-DTORCH_TARGET_VERSION={2 << 56 | 10 << 48:#x}"]
    objects = [str(work / "kernel.o"), str(work / "binding.o")]
    for command, to in zip((run_kernel, bind), objects, strict=True):
        subprocess.run([*command, "-std=c++20", *include, "-c", "-o", to], check=True)
    torch_libraries = [f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-ltorch"]
    subprocess.run([gxx, "-shared", *objects, "-o", library, *torch_libraries, *link], check=True)
    shutil.rmtree(work)


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
    shown = python("-m", "pytest", "-v", "-p", "no:cacheprovider", "tests", folder=folder)
    assert "8 passed" in shown
    pytest.importorskip("kernels.cli.benchmark", exc_type=ImportError)  # needs more packages
    python("-c", BENCHMARK, folder)


def test_kernel_builder_can_read_the_repository_and_finds_every_file(kernel, tmp_path):
    rust = pytest.importorskip("kernels._rust")
    folder = exported(kernel, tmp_path / "fast_rows")
    assert rust.Build.open(folder).general.backends == [rust.Backend.CUDA]
    build = tomllib.loads((folder / "build.toml").read_text())
    assert (build["general"]["name"], build["general"]["edition"]) == ("fast-rows", 5)
    named = {*build["torch"]["src"], *build["kernel"]["fast_rows"]["src"]}
    sources = [file for file in folder.rglob("*.*") if file.suffix in (".cpp", ".cu", ".cuh", ".h")]
    assert named == {str(file.relative_to(folder)) for file in sources}
    assert "-DTILE=32" in build["kernel"]["fast_rows"]["cuda-flags"]
    assert "cuda-capabilities" not in build["kernel"]["fast_rows"]
    assert (folder / "CARD.md").read_text() == (folder / "README.md").read_text()


def test_the_needs_the_layout_and_any_name_of_a_version_reach_the_build(kernel, tmp_path):
    shutil.copytree(kernel.parent, tmp_path / "other")
    text = kernel.read_text().replace("Layout: strided", "Layout: contiguous")
    other = tmp_path / "other" / "a (1).cu"
    other.write_text(text.replace("// Flags:", "// Needs:  sm_80\n// Flags:"))
    folder = exported(other, tmp_path / "fast_rows")
    built = tomllib.loads((folder / "build.toml").read_text())["kernel"]["fast_rows"]
    assert built["cuda-capabilities"][:2] == ["8.0", "8.6"]
    assert "-DATTENTION_CONTIGUOUS" in built["cuda-flags"]
    assert "csrc/a_1_.cu" in built["src"]
    assert (folder / "csrc" / "a_1_.cu").is_file()


@pytest.mark.usefixtures("found")
def test_the_readme_has_verdict_times_and_their_commands(kernel, capsys, monkeypatch, tmp_path):
    out = tmp_path / "fast-rows"
    report = report_of(worst=WORST, has_attention=True)
    monkeypatch.setattr(suite, "verify", lambda what, *_, **__: report(what, "cuda"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    rows = [bench_row("NAIVE_PYTORCH", [9.0, 8.0]), bench_row("V01_MINE", [3.0, 2.0, 4.0])]
    monkeypatch.setattr("gpt2_infer.bench.verdict.run", lambda _: file_of("kernel", rows))
    status, shown, err = run(capsys, "export", str(kernel), "--out", str(out), "--json")
    assert status == 0, err
    written = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert {*parsed(shown)["files"]} == written - {"CARD.md"}
    text = (out / "README.md").read_text()
    for part in (
        "It passed 2 checks against float64 on NVIDIA H200",
        "gpt2-infer verify csrc/v01_mine.cu --device cuda --seed 7",
        "    error     3.00e-06, budget 4.00e-06, plain PyTorch's 2.00e-06",
        "v01_mine.cu on H200 SXM: B=1 H=12 head_dim=32 causal; microseconds",
    ):
        assert part in text
    assert re.search(r"V01_MINE +3\.0 us \(2\.0 \.\. 4\.0\)", text)
    for command in re.findall(r"^\$ gpt2-infer (.+)$", text, re.MULTILINE):
        parse(shlex.split(command))


@pytest.mark.usefixtures("found")
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
    ("out", "reason"),
    [
        (".", "exists, and nothing is overwritten"),
        ("none/fast-rows", "there is no folder"),
        ("Fast", "must be lower-case words"),
        ("1st", "must be lower-case words"),
        ("torch", "Python has a module torch already"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_the_work(
    out, reason, kernel, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(suite, "verify", None)
    status, _, err = run(capsys, "export", str(kernel), "--out", str(tmp_path / out))
    assert (status, reason in err) == (2, True), err


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
    assert {*planned.shared} == {"attention.h", "common.cuh"}


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
    file = SOURCE / "v01_warp_per_row.cu"  # whose builds stay in the cache
    words = ["export", str(file), "--out", str(tmp_path / "fast-rows")]
    python("-c", f"import sys\n{SHORT_SUITE}\n{BUSY}\nsys.exit(main({words}))", **settings)
    text = (tmp_path / "fast-rows" / "README.md").read_text()
    assert "It passed 12 checks" in text
    if device == "cpu":
        assert "Not measured, because there was no GPU" in text
        assert "No time is predicted: CUDACXX asks for /nowhere/nvcc" in text
    else:
        assert "12 checks against float64 on NVIDIA" in text
        assert re.search(r"V01_WARP_PER_ROW +[\d.]+ us", text)
        assert "v01_warp_per_row.cu on H200 SXM: B=1 H=12" in text
