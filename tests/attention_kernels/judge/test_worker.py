"""A kernel that hangs or ends its process leaves a verdict, and one of a plug-in is found."""

from __future__ import annotations

import contextlib
import sys

import msgspec
import pytest

from attention_kernels import register
from attention_kernels.contract import Kernels
from attention_kernels.judge import process, suite
from attention_kernels.judge.calls import Request
from attention_kernels.judge.inputs import Case
from attention_kernels.judge.suite import judged, run_check, verify
from attention_kernels.judge.worker import Worker
from gpt2_infer.cli import main
from tests.conftest import SHORT_SUITE, python

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
TELLS = """
    import socket
    def tell(text):
        for x in gc.get_objects():
            if type(x) is socket.socket and x.fileno() > 0:
                x.send(text)
        time.sleep(1e6)
"""
VERIFIES = f'{SHORT_SUITE}raise SystemExit(main(["verify", "strange", "--device", "cpu"]))'


@pytest.fixture
def strange(plugin):
    """strange(calls=..., loads=...): install a plug-in that does so when called or loaded."""

    def strange(calls="pass", loads=""):
        plugin(PLUGIN.replace("WHAT", calls).replace("LOADS", loads))

    return strange


@pytest.fixture
def short_cases(monkeypatch):
    """Only cases of fewer than 8 tokens are tried."""
    cases = suite.cases_for
    monkeypatch.setattr(
        suite, "cases_for", lambda *a, **o: [case for case in cases(*a, **o) if case.seqlen < 8]
    )


@pytest.mark.parametrize(
    ("calls", "loads", "reported"),
    [
        ("raise RuntimeError(f'{sys.argv}')", "", "RuntimeError: ['']"),  # not told of "verify"
        ("tell(b'{')", TELLS, "it broke off the connection to the judge"),
        ("tell(b'[' * 2**17)", TELLS, "it broke off the connection to the judge"),
        pytest.param("time.sleep(1e6)", "", "it did not end within 4 s", marks=pytest.mark.slow),
        pytest.param("raise KeyboardInterrupt", "", "it raised Key", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("short_cases")
def test_a_plug_in_that_does_not_return(calls, loads, reported, strange, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpt2-infer", "verify", "strange"])
    monkeypatch.setattr(process, "ENDING_TIMEOUT_S", 0.1)
    strange(calls, loads)
    report = verify("strange", "cpu", timeout_s=4 if "sleep" in calls else 60, max_failures=1)
    (failure,) = report.failures
    assert failure.what.startswith("seqlen 2, head_dim 32")
    assert reported in failure.why
    assert 0 < report.checks < report.total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loads", "words"),
    [
        ("os.abort()", "FAILED: loading it\n          it was killed by SIGABRT"),
        ("print('PASSED', flush=True); os._exit(0)", "it ended with exit status 0"),
        ("print('PASSED'); atexit.register(lambda: os._exit(0))", "error "),
    ],
)
@pytest.mark.usefixtures("short_cases")
def test_a_loader_hides_no_failure(loads, words, strange, capfd):
    strange("return q * 2", loads)
    assert main(["verify", "strange", "--device", "cpu", "--no-timing", "--quick"]) == 1
    out = capfd.readouterr().out
    assert words in out
    assert "PASSED" not in out
    assert out.endswith("FAILED\n")


@pytest.mark.slow
def test_neither_a_script_nor_the_current_folder_is_imported_by_a_worker(tmp_path):
    folder, script = tmp_path / "folder", tmp_path / "script.py"
    folder.mkdir()
    for module in ("http", "multiprocessing"):  # imported by torch, and before anything else
        (folder / f"{module}.py").write_text("open('imported', 'w')\nraise SystemExit(9)\n")
    verifies = VERIFIES.replace('strange"', 'NUMPY_BASIC", "--quick"')
    script.write_text(f"print('once')\n{verifies}")
    done = python(script, cwd=folder)
    assert not (folder / "imported").exists()
    assert "12 checks" in done.stdout, done.stderr
    assert done.stdout.count("once") == 1


@pytest.mark.slow
def test_a_backend_of_this_process_alone_is_verified_in_it(clean_registry):
    fields = {"family": "test", "summary": "Wrong.", "precisions": {"float32": "ieee-fp32"}}
    register(name="MINE", **fields)(lambda: Kernels(lambda q, *_: (q + 1).contiguous()))
    report = verify("MINE", "cpu", max_failures=1)
    assert report.failures[0].why.startswith("error ")


@pytest.mark.parametrize("name", ["NAIVE_PYTORCH", "CUSTOM_CUDA", "STRANGE"])
def test_a_plug_in_is_not_imported_beside_another_backend(name, strange, plugin, capfd):
    """There it could slow a rival, or spoil its outputs."""
    strange(loads="print('loaded')")
    plugin(
        "print('imported with', sorted(x for x in sys.modules if x.endswith('_plugin')))",
        name="other",
    )
    with contextlib.closing(Worker(name, "cpu")) as runner:
        assert run_check(runner, judged(runner, Case(8, 32))).passed
    lines = capfd.readouterr().err.splitlines()
    assert [x for x in lines if "load" in x or "with" in x] == [
        *["imported with ['other_plugin']", "loaded"] * (name == "STRANGE")
    ]


@pytest.mark.slow
def test_the_judge_imports_no_plug_in(plugin, tmp_path):
    """Neither to verify one of its backends nor to time it; nor a module that it leaves behind."""
    note = "import os, sys; print(f'imported by {os.getpid()}.', file=sys.stderr)\n"
    left = "with contextlib.suppress(OSError):\n"  # not all systems allow it
    left += "    open('statistics.py', 'w').write(open(real.__file__).read() + NOTE)\n"
    plugin(
        f"NOTE = {note!r}\n{note}import statistics as real\n{left}"
        + PLUGIN.replace("WHAT", "pass").replace("LOADS", "")
    )
    done = python("-c", f"import os; print('judge', os.getpid())\n{VERIFIES}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "STRANGE" in done.stdout
    assert " us (" in done.stdout
    assert "imported by " in done.stderr
    assert f"imported by {done.stdout.split()[1]}." not in done.stderr


def test_what_a_plug_in_prints_does_nothing_to_a_terminal(strange, capfd):
    """It arrives, and so does the last line, although the process is killed."""
    strange(loads="print('a\\x1b[8m\\rb\\tc'); os.write(1, b'end')")
    Worker("STRANGE", "cpu").close()
    assert capfd.readouterr().err == "a\N{REPLACEMENT CHARACTER}[8m\nb       c\nend\n"


@pytest.mark.usefixtures("short_cases")
def test_a_message_of_a_plug_in_is_one_line(strange):
    strange(
        "raise UnsupportedError('', ['no\\n  PASSED\\x1b[8m'])",
        "from attention_kernels import UnsupportedError",
    )
    report = verify("strange", "cpu")
    assert "no PASSED [8m" in str(report.refusals)


def test_a_message_of_any_length_arrives():
    case = Case(1, 32)
    request = Request.of(case, [case.inputs("cpu")] * 1100)
    assert len(msgspec.json.encode(request.calls)) > 2 * process.RECORD
    with contextlib.closing(Worker("NAIVE_PYTORCH", "cpu")) as runner:
        assert len(runner.call(request).o) == 1
