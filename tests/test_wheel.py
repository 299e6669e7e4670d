"""What users get: the wheel, built and installed into an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel, and everything else from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("attention_kernels", "gpt2_infer"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([*pip, *options, source], check=True)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    command = [sys.executable, "-m", "venv", "--without-pip", environment]
    subprocess.run(command, check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    install = ["--python", environment, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    # Everything that the package depends on. A .pth file in these folders is not read, so that an
    # editable installation of this package is not found.
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(shared) + "\n")
    return environment / "bin"


def run(installed: Path, folder: Path, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [installed / words[0], *words[1:]],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_copy_generates_lists_and_measures(installed, tmp_path):
    where = run(
        installed, tmp_path, "python", "-c", "import gpt2_infer; print(gpt2_infer.__file__)"
    )
    assert where.startswith(str(installed.parent))
    generate = ("--model", "demo", "--device", "cpu", "--max-new-tokens", "4")
    assert run(installed, tmp_path, "gpt2-infer", *generate)
    assert "CUSTOM_CUDA_VERSION_1" in run(installed, tmp_path, "gpt2-infer", "backends")
    kernel = (
        "--out r.json --task kernel --device cpu --seqlens 8 --heads 1 --head-dims 32 --rounds 2 "
        "--backends NAIVE_PYTORCH PYTORCH_SDPA_MATH"
    )
    text = run(installed, tmp_path, "gpt2-infer", "compare", *kernel.split())
    assert "`NAIVE_PYTORCH`" in text
    read = "from gpt2_infer.bench import read, studies; from pathlib import Path"
    code = f"{read}; print(type(read(Path('r.json'))).__name__, len(studies.load()))"
    kind, count = run(installed, tmp_path, "python", "-c", code).split()
    assert (kind, int(count) > 20) == ("KernelTiming", True)
    pytest.importorskip("matplotlib")
    shutil.copy(ROOT / "scripts" / "plot_results.py", tmp_path)
    run(installed, tmp_path, "python", "plot_results.py", "r.json")
    assert (tmp_path / "r_bars.svg").exists()
