"""What users get: the wheel, built and installed into an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import make_wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel, and everything else from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    library = folder / "v01-0123456789abcdef.so"
    library.touch()
    wheel = make_wheel.pack([library], folder, tag="any")
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


PROGRAM = """
from pathlib import Path
import gpt2_infer
from attention_kernels.judge import clock
from attention_kernels.ladder import header, prebuilt
from gpt2_infer import export
from gpt2_infer.bench import study
from gpt2_infer.bench.record import SCHEMA, read
from gpt2_infer.bench.show import charts
from gpt2_infer.cli import main
clock.OUTSIDE["cpu"] = clock.REPEATED["cpu"] = float("inf")  # other tests run, too
for line in Path("commands").read_text().splitlines():
    assert main(line.split()) == 0
assert SCHEMA.is_file()
export.plan(header.versions()[0], Path("exported")).write("", "")
assert [file.name for file in prebuilt.FOLDER.iterdir()] == ["v01-0123456789abcdef.so"]
print(gpt2_infer.__file__, *charts.render(read(Path("r.json"))), len(study.load()), sep="\\n")
"""
COMMANDS = """\
--model demo --device cpu --max-new-tokens 4
backends
compare --out r.json --task kernel --device cpu --seqlens 8 --heads 1 --head-dims 32 --rounds 2 \
--backends NAIVE_PYTORCH PYTORCH_SDPA_MATH
report r.json
"""


@pytest.mark.slow
def test_an_installed_copy_generates_lists_measures_and_draws(installed, tmp_path):
    pytest.importorskip("matplotlib")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"

    def run(*words):
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "Usage: gpt2-infer COMMAND" in run(installed / "gpt2-infer", "--help")
    (tmp_path / "commands").write_text(COMMANDS)
    text = run(installed / "python", "-c", PROGRAM)
    assert "  CUSTOM_CUDA_VERSION_1 " in text
    assert "`NAIVE_PYTORCH`" in text
    *_, file, bars, roofline, count = text.splitlines()
    assert file.startswith(str(installed.parent))
    assert (bars, roofline, int(count) > 20) == ("bars", "roofline", True)
