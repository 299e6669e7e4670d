"""A kernel that hangs or ends its process leaves a verdict, and one of a plug-in is found."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from attention_kernels import ArgumentError, register
from attention_kernels.contract import Kernels
from attention_kernels.judge import process, suite
from attention_kernels.judge.cases import Case
from attention_kernels.judge.suite import judged, run_check, verify
from attention_kernels.judge.truth import naive_attention
from attention_kernels.judge.worker import Worker
from gpt2_infer.cli import main
from tests.conftest import SHORT_SUITE

PLUGIN = """
@register(
    name="STRANGE", family="plug-in", summary="A plug-in of a test.",
    precisions={"float32": "ieee-fp32"}, head_dims=(32,), device_types=("cpu",),
)
def load():
    LOADS
    def attention(q, k, v, scale, causal):
        if q.shape[1] == 2:
            WHAT
        return right(q, k, v, scale, causal)
    return Kernels(attention)
"""

TELLS_HALF = """
    from multiprocessing.connection import Connection
    def tell_half():
        for x in gc.get_objects():
            if type(x) is Connection:
                os.write(x.fileno(), bytes([0, 0, 0, 100]))
        time.sleep(1e6)
"""


VERIFIES = f'{SHORT_SUITE}raise SystemExit(main(["verify", "strange", "--device", "cpu"]))'


@pytest.fixture
def strange(plugin):
    """strange(calls=..., loads=...): install a plug-in that does so when called or loaded."""

    def strange(calls="pass", loads=""):
        plugin(PLUGIN.replace("WHAT", calls).replace("LOADS", loads))

    return strange


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "reported"),
    [
        ("time.sleep(1e6)", "it did not end within 4 s"),
        ("raise KeyboardInterrupt", "it raised KeyboardInterrupt: no message"),
    ],
)
def test_a_plug_in_that_does_not_return(does, reported, strange):
    strange(calls=does)
    report = verify("strange", "cpu", timeout_s=4, max_failures=1)
    (failure,) = report.failures
    assert failure.what.startswith("seqlen 2, head_dim 32")
    assert failure.why.startswith(reported)
    assert not report.passed
    assert 0 < report.checks < report.total


def test_half_a_message_is_no_answer(strange, monkeypatch):
    monkeypatch.setattr(process, "MESSAGE_S", 1)
    monkeypatch.setattr(process, "ENDING_TIMEOUT_S", 0.1)
    strange(calls="tell_half()", loads=TELLS_HALF)
    report = verify("strange", "cpu", timeout_s=5, max_failures=1)
    (failure,) = report.failures
    assert failure.why == "it broke off the connection to the judge"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("os.abort()", "it was killed by SIGABRT"),
        ("print('PASSED', flush=True); os._exit(0)", "it ended with exit status 0"),
        ("raise KeyboardInterrupt", "it raised KeyboardInterrupt"),
    ],
)
def test_a_loader_that_ends_its_process_has_failed(does, words, strange, capfd):
    strange(loads=does)
    assert main(["verify", "strange", "--device", "cpu", "--no-timing"]) == 1
    out = capfd.readouterr().out
    assert "  FAILED: loading it\n" in out
    assert words in out
    assert "PASSED" not in out
    assert out.endswith("FAILED\n")


@pytest.mark.slow
def test_a_loader_hides_no_failure(strange, capfd, monkeypatch):
    whole = suite.cases_for
    monkeypatch.setattr(
        suite, "cases_for", lambda *a, **o: [c for c in whole(*a, **o) if c.seqlen < 8]
    )
    strange(
        calls="return q * 2",
        loads="import atexit; print('PASSED'); atexit.register(lambda: os._exit(0))",
    )
    assert main(["verify", "strange", "--device", "cpu", "--no-timing", "--quick"]) == 1
    out = capfd.readouterr().out
    assert "PASSED" not in out
    assert out.endswith("FAILED\n")


@pytest.mark.slow
def test_a_worker_does_not_run_the_script_that_starts_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from attention_kernels.judge.worker import Worker\n"
        "print('once')\n"
        "Worker('NAIVE_PYTORCH', 'cpu').close()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")


@pytest.mark.slow
def test_the_server_of_workers_imports_nothing_of_the_current_folder(tmp_path):
    folder, script = tmp_path / "folder", tmp_path / "script.py"
    folder.mkdir()
    for module in ("http", "multiprocessing"):  # imported by torch, and before anything else
        (folder / f"{module}.py").write_text("open('imported', 'w')\nraise SystemExit(9)\n")
    script.write_text(VERIFIES.replace('strange"', 'NUMPY_BASIC", "--quick"'))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (folder / "imported").exists()
    assert "12 checks" in done.stdout, done.stderr


def test_a_kernel_is_not_told_that_it_is_verified(strange, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpt2-infer", "verify", "strange"])
    strange(calls="raise RuntimeError(f'{sys.argv}')")
    report = verify("strange", "cpu", max_failures=1)
    assert "RuntimeError: ['']" in report.failures[0].why


@pytest.mark.slow
def test_a_backend_of_this_process_alone_is_verified_in_it(clean_registry):
    def wrong(q, k, v, softmax_scale, is_causal):
        return naive_attention(q, k, v, softmax_scale, is_causal) + 1

    register(name="MINE", family="test", summary="Wrong.", precisions={"float32": "ieee-fp32"})(
        lambda: Kernels(wrong)
    )
    report = verify("MINE", "cpu", max_failures=1)
    assert report.failures[0].why.startswith("error ")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_is_a_number_of_seconds(seconds):
    with pytest.raises(ArgumentError, match="the time limit must be a positive number of seconds"):
        verify("NAIVE_PYTORCH", "cpu", timeout_s=seconds)


def test_a_plug_in_is_not_imported_beside_another_backend(plugin, tmp_path):
    """There it could slow a rival, or spoil its outputs."""
    mark = tmp_path / "imported"
    plugin(f"open({str(mark)!r}, 'w')")
    with contextlib.closing(Worker("NAIVE_PYTORCH", "cpu")) as runner:
        assert run_check(runner, judged(runner, Case(8, 32))).passed
    assert not mark.exists()


@pytest.mark.slow
def test_the_judge_imports_no_plug_in(plugin, tmp_path):
    """Neither to verify one of its backends nor to time it; nor a module that it leaves behind."""
    pids = tmp_path / "pids"
    note = f"import os; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\n"
    left = "open('statistics.py', 'w').write(open(real.__file__).read() + NOTE)\n"
    plugin(
        f"NOTE = {note!r}\n{note}import statistics as real\n{left}"
        + PLUGIN.replace("WHAT", "pass").replace("LOADS", "")
    )
    judge = subprocess.Popen(
        [sys.executable, "-c", VERIFIES],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = judge.communicate()
    assert judge.returncode == 0, out
    assert "STRANGE" in out
    assert " us (" in out
    assert (tmp_path / "statistics.py").exists()
    assert str(judge.pid) not in pids.read_text().split()
