"""A command whose process a kernel ends says so."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.conftest import needs_compiler, python
from tests.gpt2_infer.cli.program import DEMO
from tests.gpt2_infer.cli.test_verify import LAUNCH, RIGHT

PROGRAM = """
import os, signal, time
from gpt2_infer.cli.watched import watched
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
def main():
    {}
raise SystemExit(watched(main))
"""


def run(*arguments: str) -> tuple[int, str]:
    """Return the exit status of a Python process, and the last line of standard error."""
    done = python(*arguments)
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("return 3", 3, None),
        ("raise SystemExit(2)", 2, None),
        ("os.kill(os.getppid(), signal.SIGINT); time.sleep(60)", 130, "KeyboardInterrupt"),
        ("os.abort()", 2, "its process was killed by SIGABRT ("),
        ("os._exit(0)", 2, "its process ended with exit status 0 before its work was done; "),
    ],
)
def test_how_a_command_ended_is_its_status_or_one_sentence(body, status, words):
    found, line = run("-c", PROGRAM.format(body))
    assert (found, bool(line)) == (status, words is not None)
    assert (words or "") in line


def test_the_child_ends_with_its_parent():
    command = [sys.executable, "-c", PROGRAM.format("print(flush=True); time.sleep(60)")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        parent.stdout.readline()
        parent.send_signal(signal.SIGTERM)
        assert parent.stdout.read() == ""  # the child, too, has closed it


@pytest.mark.slow
@needs_compiler
def test_a_kernel_that_ends_the_process_is_a_sentence(tmp_path):
    file = tmp_path / "v01_ends.cu"
    text = RIGHT.read_text().replace(LAUNCH, f"{LAUNCH}  if (params.seqlen > 0) quick_exit(0);\n")
    file.write_text(text.replace('#include "', '#include <cstdlib>\n#include "', 1))
    status, line = run("-m", "gpt2_infer", *DEMO, "--backend", str(file))
    assert status == 2
    assert line.startswith("gpt2-infer: error: its process ended with exit status 0 before ")
