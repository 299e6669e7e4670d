"""`gpt2-infer verify`: the stages, what is said about them, and the exit status."""

from __future__ import annotations

import re

import pytest

from attention_kernels import ladder
from attention_kernels.judge.suite import RACES, Failure, Report, verify
from attention_kernels.judge.truth import naive_attention
from attention_kernels.ladder import compilers, header
from gpt2_infer.bench.verdict import Findings
from gpt2_infer.cli.verify import text
from tests.attention_kernels.judge.test_suite import shorten
from tests.conftest import ROOT
from tests.gpt2_infer.bench.common import add
from tests.gpt2_infer.cli.program import run

NEGATIVE = ROOT / "tests" / "attention_kernels" / "negative"
RIGHT = header.CSRC / "fp32" / "v08_o_in_shared.cu"
LAUNCH = "cudaError_t launch(const Params& params, cudaStream_t stream) {\n"


def verified(capsys, name, *options):
    return run(capsys, "verify", str(name), "--device", "cpu", *options)


@pytest.fixture
def in_this_process(monkeypatch):
    """No kernel of the test ends its process: one less to start. Takes more options of verify()."""
    more = {}

    def verify_here(what, device, *, timeout_s=None, **options):
        options["seed"] = options["seed"] or 0
        return verify(ladder.resolve(what), device, **options, **more)

    monkeypatch.setattr("attention_kernels.judge.suite.verify", verify_here)
    return more


@pytest.fixture
def everything_passes(monkeypatch):
    """Let the suite pass at once."""

    def passes(what, device, **_):
        return Report(ladder.resolve(what), device, 0, True, total=1, checks=1, cases=1)

    monkeypatch.setattr("attention_kernels.judge.suite.verify", passes)


def broken(folder, old, new):
    """A copy of a right version with one place in it replaced."""
    source = RIGHT.read_text()
    assert source.count(old) == 1
    file = folder / "v08_broken.cu"
    file.write_text(source.replace(old, new))
    return file


def test_the_verdict_says_that_fewer_shapes_were_tried(clean_registry):
    spec = add("TUNED", naive_attention, compiles_per_shape_on=("cpu",), head_dims=(32,))
    report = Report(spec, "cpu", total=1, has_attention=True)
    assert (
        "only 12 shapes of each dtype were tried in the cases: it is compiled for each, as"
        in text(Findings(report, sanitized=False, quick=False, failures=[]))
    )


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("launch(what ", r"v08_broken\.cu:\d+:\d+: error: "),
        (
            "launch_it(",
            r"v08_broken\.cu does not define launch\(\) as csrc/attention.h declares it: a version "
            r"file includes common.cuh, and defines scratch_floats\(\) and launch\(\) in namespace",
        ),
    ],
)
def test_what_does_not_build_or_load_ends_at_once(new, words, tmp_path, capsys):
    file = broken(tmp_path, "cudaError_t launch(", f"cudaError_t {new}")
    status, out, err = verified(capsys, file)
    assert (status, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("gpt2-infer: error: ")]
    assert re.search(words, line)


@pytest.mark.slow
def test_a_kernel_that_kills_its_process_leaves_a_verdict(tmp_path, capsys):
    new = f"{LAUNCH}  if (params.seqlen > 30) __builtin_trap();\n"
    status, out, _ = verified(capsys, broken(tmp_path, LAUNCH, new))
    assert status == 1
    assert re.search(r"FAILED: races, seqlen 1\d\d, head_dim 32, ", out)
    assert "          it was killed by SIGILL (an invalid instruction" in out
    assert "--sanitize shows where" in out
    assert out.endswith("FAILED\n")


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.usefixtures("everything_passes")
@pytest.mark.parametrize(
    ("flag", "status", "words"),
    [
        ("", 0, r"  nvcc: compiles for sm_90, \d+ (to \d+ )?registers, (no|up to \d+ bytes of) sp"),
        ("--no-such-flag ", 1, r"  FAILED: nvcc does not compile it for sm_90\n +nvcc fatal.*no-s"),
    ],
)
def test_what_passes_emulated_must_compile_with_nvcc(flag, status, words, tmp_path, capsys):
    found, out, _ = verified(capsys, broken(tmp_path, "// Flags:  ", f"// Flags:  {flag}"))
    assert found == status
    assert re.search(words, out)


@pytest.mark.parametrize(
    ("stem", "words"),
    [
        ("v01_dropped_barrier", "race: lane "),
        ("v02_off_by_one_mask", "change earlier rows"),
        pytest.param("v05_unscaled_join", "decode, head_dim ", marks=pytest.mark.slow),
    ],
)
def test_every_negative_control_fails_with_its_reason(stem, words, capsys, in_this_process):
    """But v03_out_of_bounds_read: its fault is the sanitizer's to find."""
    in_this_process["max_failures"] = 4  # more than there are checks of the future
    status, out, _ = verified(capsys, NEGATIVE / f"{stem}.cu")
    assert status == 1
    assert out.startswith(f"{stem.upper()} on cpu, emulated")
    assert re.search(rf"FAILED: [^\n]*\n? *[^\n]*{re.escape(words)}", out), out
    assert out.endswith("FAILED\n")


def test_what_the_sanitizer_finds_comes_after_a_race_and_before_the_rest(capsys, monkeypatch):
    """What it finds is in test_sanitize.py. A race explains both other failures."""
    fault, race = "AddressSanitizer: a fault", f"{RACES}, seqlen 130"

    def fails(what, device, **_):
        failures = [Failure(race, "race: two lines"), Failure("seqlen 7", "error 1")]
        return Report(ladder.resolve(what), "cpu", failures=failures, total=9, checks=2)

    monkeypatch.setattr("attention_kernels.judge.suite.verify", fails)
    monkeypatch.setattr("attention_kernels.inspection.sanitize.sanitize", lambda *_, **__: [fault])
    status, out, _ = verified(capsys, "CUSTOM_CUDA_VERSION_1", "--sanitize")
    assert status == 1
    assert re.findall("(?:FAILED: |          )(.*)", out) == [
        *(race, "race: two lines", "bad accesses and races", fault, "seqlen 7", "error 1")
    ]


@pytest.mark.slow
def test_a_version_file_of_no_ladder_is_verified(tmp_path, capsys, in_this_process, monkeypatch):
    shorten(monkeypatch, lambda cases: cases[:40])
    monkeypatch.setattr(compilers, "find_nvcc", lambda: None)
    _, include, code = RIGHT.read_text().partition("#include")  # without its header
    (tmp_path / "mine (1).cu").write_text(include + code)
    status, out, _ = verified(capsys, tmp_path / "mine (1).cu", "--seed", "5")
    assert status == 0
    assert re.match(r"MINE \(1\) on cpu, emulated: \d+ checks, .* in one process, seed 5\n", out)
    rules = r"(    (error |by row|by column) .*budget.*\n){2,3}"
    rule = r"  a budget is 2 times the distance of plain PyTorch from float64, or "
    assert re.search(rf"  worst: .* seed 5\n{rules}{rule}", out)
    assert "  nvcc not found: its flags were not tried\n" in out
    assert "no timing: it ran in the CPU emulator" in out
    assert out.endswith("PASSED\n")


@pytest.mark.usefixtures("busy_machine", "everything_passes")
def test_the_timing_names_the_baseline_and_a_kernel_that_fails_there_has_not_passed(
    capsys, clean_registry
):
    def attention(q, k, v, softmax_scale, is_causal):
        o = naive_attention(q, k, v, softmax_scale, is_causal)
        return o + 1 if q.shape[1] == 256 else o

    add("MINE", attention, head_dims=(32,))
    assert verified(capsys, "MINE", "--no-timing")[0] == 0
    status, out, _ = verified(capsys, "MINE")
    assert status == 1
    assert "time of the kernel alone, N=256 H=12 head_dim=32, float32:" in out
    assert re.search(r"NAIVE_PYTORCH +[\d.]+ us \([\d.]+ \.\. [\d.]+\)", out)
    assert "  FAILED: B=1 H=12 head_dim=32, float32, causal, N=256\n" in out
    assert out.endswith("FAILED\n")
