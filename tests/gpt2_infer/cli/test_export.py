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
    monkeypatch.setattr(predict, "predict", lambda *_, **__: [FOUND])
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")  # or verify test-compiles it


def evidence() -> export.Evidence:
    return export.Evidence("The verdict.", "The times.")


def exported(kernel: Path, out: Path) -> Path:
    export.plan(header.of_file(kernel), out).write(evidence())
    return out


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """The Python of a new environment, with this package and what this Python has installed."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shared = [str(ROOT), *(path for path in sys.path if Path(path).is_dir())]
    (site / "dependencies.pth").write_text("\n".join(shared) + "\n")
    return folder / "bin" / "python"


def run_its_test(folder: Path, python: Path | str) -> str:
    command = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests"]
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=alone, capture_output=True, text=True, check=False
    )
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
    """Build what kernel-builder would: by its rules for cuda, or for the emulator on the CPU."""
    import torch

    build = tomllib.loads((folder / "build.toml").read_text())
    name, stable = build["general"]["name"], build["torch"]["stable-abi"].replace(".", "")
    module = name.replace("-", "_")
    identifier = f"_{module}_{device}_1234567"
    backend = f"cu{torch.version.cuda.replace('.', '')}" if device == "cuda" else "cpu"
    archs = {}
    if device == "cuda":
        archs = {"archs": ["{}.{}".format(*torch.cuda.get_device_capability())]}
    system = f"{platform.machine()}-{platform.system().lower()}"
    variant = folder / "build" / f"torch-stable-abi{stable}-{backend}-{system}"
    shutil.copytree(folder / "torch-ext" / module, variant)
    (variant / "_ops.py").write_text(OPS.format(id=identifier))
    compile_variant(folder, build, variant / f"{identifier}.so", device)
    files = {file.name: hashlib.sha256(file.read_bytes()).digest() for file in variant.iterdir()}
    digests = {name: base64.b64encode(digest).decode() for name, digest in files.items()}
    metadata = {
        **{"id": identifier, "name": name, "version": 1, "license": "mit", "python-depends": []},
        "backend": {"type": device, **archs},
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
    extension = [f"-DTORCH_EXTENSION_NAME={library.stem}"]
    extension += [f"-DTORCH_TARGET_VERSION={2 << 56 | 10 << 48:#x}"]
    common = ["-std=c++20", "-fPIC", "-c"]
    if device == "cuda":
        arch = compilers.architectures().split(",")[0]
        toolkit = f"-isystem{compilers.cuda_root(nvcc) / 'include'}"
        bind = [gxx, *common, "-DUSE_CUDA=1", "-DCUDA_KERNEL", toolkit, *include, *extension]
        run_kernel = [
            nvcc,
            "-std=c++20",
            "-Xcompiler=-fPIC",
            "-c",
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
        ]
        link = [str(compilers.cuda_runtime(nvcc))]
    else:
        emulator = ["-DATTENTION_EMULATOR", f"-I{header.CSRC}", f"-I{header.CSRC / 'emulator'}"]
        bind = [gxx, *common, *emulator, *include, *extension]
        run_kernel = [gxx, *common, *emulator, "-O1", "-xc++"]
        link = ["-pthread", "-ldl", EMULATOR_WRAPS]
    run_kernel += [
        *include,
        *kernel["cuda-flags"],
        str(folder / source),
        "-o",
        str(work / "kernel.o"),
    ]
    bind += [str(folder / "torch-ext/torch_binding.cpp"), "-o", str(work / "binding.o")]
    for process in [subprocess.Popen(command) for command in (bind, run_kernel)]:
        assert process.wait() == 0
    objects = [str(work / "kernel.o"), str(work / "binding.o")]
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
    device, kernel, environment, tmp_path
):
    """The build is by the test, with kernel-builder's rules; on the CPU the emulator is CUDA."""
    pytest.importorskip("kernels")
    if reason := compilers.missing_compiler("cuda" if device == "cuda" else "emulator"):
        pytest.skip(reason)
    folder = exported(kernel, tmp_path / "fast-rows")
    build_variant(folder, device)
    assert "8 passed" in run_its_test(folder, environment)
    pytest.importorskip("kernels.cli.benchmark", exc_type=ImportError)  # needs more packages
    subprocess.run([environment, "-c", BENCHMARK, folder], check=True)


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
    (folder / "build.toml").write_text((folder / "build.toml").read_text() + "wrong = 1\n")
    with pytest.raises(Exception, match="wrong"):
        rust.Build.open(folder)


def test_a_file_of_any_name_without_a_header_is_exported(kernel, tmp_path):
    text = kernel.read_text().replace(
        "constexpr int kBlockN = kTile;", "constexpr int kBlockN = 32;"
    )
    (tmp_path / "a (1).cu").write_text(text.partition('#include "sizes.cuh"')[2])
    folder = exported(tmp_path / "a (1).cu", tmp_path / "fast_rows")
    (file,) = folder.rglob("*.cu")
    assert file == folder / "csrc" / "a_1_.cu"
    built = tomllib.loads((folder / "build.toml").read_text())["kernel"]["fast_rows"]
    assert "csrc/a_1_.cu" in built["src"]


def test_the_needs_and_the_layout_of_a_version_reach_the_build(kernel, tmp_path):
    other = shutil.copytree(kernel.parent, tmp_path / "other") / kernel.name
    text = other.read_text().replace("Layout: strided", "Layout: contiguous")
    other.write_text(text.replace("// Flags:", "// Needs:  sm_80\n// Flags:"))
    folder = exported(other, tmp_path / "fast_rows")
    built = tomllib.loads((folder / "build.toml").read_text())["kernel"]["fast_rows"]
    assert built["cuda-capabilities"][:2] == ["8.0", "8.6"]
    assert "-DATTENTION_CONTIGUOUS" in built["cuda-flags"]
    wrapper = (folder / "torch-ext" / "fast_rows" / "__init__.py").read_text()
    assert "_NEEDS_CONTIGUOUS = True" in wrapper


@pytest.mark.usefixtures("found")
def test_the_readme_has_verdict_budget_times_and_their_commands(kernel, capsys, tmp_path):
    out = tmp_path / "fast-rows"
    words = ["export", str(kernel), "--as", "hub", "--out", str(out), "--json"]
    status, shown, err = run(capsys, *words)
    assert status == 0, err
    value = parsed(shown)
    assert (value["name"], value["out"]) == ("fast-rows", str(out))
    assert value["predicted"]["time_us"] == FOUND.time_us
    written = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert {*value["files"]} == written - {"CARD.md"}
    text = (out / "README.md").read_text()
    for part in (
        "It passed 2 checks against float64 in the CPU emulator",
        "gpt2-infer verify csrc/v01_mine.cu --device cpu --quick --seed 7",
        "    error     3.00e-06, budget 4.00e-06, plain PyTorch's 2.00e-06",
        "a budget is 2 times the distance of plain PyTorch from float64",
        "Not measured, because there was no GPU.",
        "v01_mine.cu on H200 SXM: B=1 H=12 head_dim=32 causal; microseconds",
        "gpt2-infer predict csrc/v01_mine.cu --gpu h200",
    ):
        assert part in text
    for command in re.findall(r"^\$ gpt2-infer (.+)$", text, re.MULTILINE):
        parse(shlex.split(command))
    assert (out / "csrc" / "v01_mine.cu").read_text() == kernel.read_text()


@pytest.mark.usefixtures("found")
def test_the_readme_has_the_measured_times(kernel, capsys, monkeypatch, tmp_path):
    verify = report_of(worst=WORST, has_attention=True)
    monkeypatch.setattr(suite, "verify", lambda what, *_, **__: verify(what, "cuda"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    rows = [bench_row("NAIVE_PYTORCH", [9.0, 8.0]), bench_row("V01_MINE", [3.0, 2.0, 4.0])]
    monkeypatch.setattr("gpt2_infer.bench.study.run", lambda _: file_of("kernel", rows))
    words = ["--as", "hub", "--out", str(tmp_path / "fast-rows")]
    status, _, err = run(capsys, "export", str(kernel), *words)
    assert status == 0, err
    text = (tmp_path / "fast-rows" / "README.md").read_text()
    assert "checks against float64 on NVIDIA H200" in text
    assert "  time of the kernel alone, N=" in text
    assert re.search(r"V01_MINE +3\.0 us \(2\.0 \.\. 4\.0\)", text)


@pytest.mark.usefixtures("found")
def test_a_wrong_kernel_is_not_exported(kernel, capsys, monkeypatch, tmp_path):
    why = Failure("seqlen 8", "the output is not finite")
    monkeypatch.setattr(suite, "verify", report_of(failures=[why]))
    words = ["--as", "hub", "--out", str(tmp_path / "fast-rows")]
    status, out, err = run(capsys, "export", str(kernel), *words)
    assert (status, out) == (1, "")
    assert "V01_MINE is not exported, because it failed: seqlen 8: the output is not finite" in err
    assert not (tmp_path / "fast-rows").exists()


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("here", "exists, and nothing is overwritten"),
        ("Fast", "must be lower-case words"),
        ("1st", "must be lower-case words"),
        ("torch", "Python has a module torch already"),
        ("file/fast-rows", "a folder cannot be made in"),
        ("/proc/fast-rows", "a folder cannot be made in /proc"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_the_work(
    out, reason, kernel, capsys, monkeypatch, tmp_path
):
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(suite, "verify", None)
    words = ["--as", "hub", "--out", str(tmp_path / out)]
    status, _, err = run(capsys, "export", str(kernel), *words)
    assert status == 2
    assert reason in err


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
        planned.write(evidence())
    assert not (tmp_path / "fast-rows").exists()


def test_an_environment_next_to_the_kernel_is_not_exported(kernel, monkeypatch, tmp_path):
    csrc = shutil.copytree(header.CSRC, tmp_path / "environment" / "csrc")
    file = shutil.copytree(kernel.parent, tmp_path / "other") / kernel.name
    file = file.rename(tmp_path / file.name)
    (tmp_path / "other" / "sizes.cuh").rename(tmp_path / "sizes.cuh")
    monkeypatch.setattr(header, "CSRC", csrc)
    planned = export.plan(header.of_file(file), tmp_path / "fast-rows")
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
    words = ["export", str(file), "--as", "hub", "--out", str(tmp_path / "fast-rows")]
    program = f"import sys\n{SHORT_SUITE}\n{BUSY}\nsys.exit(main({words}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **settings}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    text = (tmp_path / "fast-rows" / "README.md").read_text()
    assert "It passed 12 checks" in text
    if device == "cpu":
        assert "No time is predicted: CUDACXX asks for /nowhere/nvcc" in text
    else:
        assert "12 checks against float64 on NVIDIA" in text
        assert re.search(r"V01_WARP_PER_ROW +[\d.]+ us", text)
        assert "v01_warp_per_row.cu on H200 SXM: B=1 H=12" in text
