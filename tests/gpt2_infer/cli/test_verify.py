"""`gpt2-infer verify`: what it prints and its exit status."""

from __future__ import annotations

import re

import pytest

from attention_kernels import ladder, register
from attention_kernels.contract import Kernels
from attention_kernels.judge.suite import Report, verify
from attention_kernels.judge.truth import naive_attention
from attention_kernels.ladder import compilers, header
from gpt2_infer.cli import main
from tests.attention_kernels.judge.test_suite import shorten
from tests.gpt2_infer.cli.program import ROOT


def test_fewer_shapes_are_tried_where_each_is_compiled(capsys, clean_registry, monkeypatch):
    """And the verdict says so."""

    def some(cases):
        return [case for i, case in enumerate(cases) if i < 60 or case.kind == "zero rows"]

    shorten(monkeypatch, some)
    tried = set()

    def attention(q, k, v, softmax_scale, is_causal):
        tried.add((*q.shape, is_causal))
        return naive_attention(q, k, v, softmax_scale, is_causal)

    fields = {"precisions": {"float32": "ieee-fp32"}, "compiles_per_shape_on": ("cpu",)}
    register(name="TUNED", family="test", summary="It is tuned.", head_dims=(32,), **fields)(
        lambda: Kernels(attention)
    )
    seed = "556012288"  # it draws one token for rows of zeros
    assert main(["verify", "TUNED", "--device", "cpu", "--no-timing", "--seed", seed]) == 0
    assert len(tried) < 12
    assert "only 4 shapes of each dtype were tried in the cases" in capsys.readouterr().out


@pytest.fixture
def in_this_process(monkeypatch):
    """No kernel of the test ends its process: one less to start. Takes more options of verify()."""
    more = {}

    def verify_here(what, device, *, timeout_s=None, **options):
        options["seed"] = options["seed"] or 0
        return verify(ladder.resolve(what), device, **options, **more)

    monkeypatch.setattr("attention_kernels.judge.suite.verify", verify_here)
    return more


def everything_passes(monkeypatch, asked=None):
    """Let verify() pass at once, and add what it is asked to verify to a list."""

    def passes(what, device, **_):
        if asked is not None:
            asked.append(what)
        return Report(ladder.resolve(what), device, 0, True, total=1, checks=1, cases=1)

    monkeypatch.setattr("attention_kernels.judge.suite.verify", passes)


@pytest.fixture
def mine(clean_registry):
    """mine(kernel): register it as MINE, in this process alone."""

    def mine(kernel):
        register(
            name="MINE",
            family="test",
            summary="A backend of a test.",
            precisions={"float32": "ieee-fp32"},
            head_dims=(32,),
        )(lambda: Kernels(kernel))

    return mine


@pytest.fixture
def no_nvcc(monkeypatch):
    monkeypatch.setattr(compilers, "find_nvcc", lambda: None)


@pytest.mark.usefixtures("no_nvcc")
def test_a_larger_budget_is_shown(capsys, monkeypatch):
    everything_passes(monkeypatch)
    assert main(["verify", "CUSTOM_CUDA_VERSION_1", "--device", "cpu"]) == 0
    assert "  its budgets are 2 times its precision class's" in capsys.readouterr().out


@pytest.mark.usefixtures("no_nvcc")
def test_an_alias_is_every_backend_that_it_stands_for(capsys, monkeypatch):
    asked = []
    everything_passes(monkeypatch, asked)
    assert main(["verify", "CUSTOM_CUDA_IEEE", "--device", "cpu"]) == 0
    assert asked == ["CUSTOM_CUDA_VERSION_15", "CUSTOM_CUDA_VERSION_17"]
    assert capsys.readouterr().out.count("PASSED") == 1


@pytest.fixture
def short_suite(monkeypatch):
    """The cheapest cases alone: for tests of what is said about them."""
    shorten(monkeypatch, lambda cases: cases[:40])


@pytest.mark.slow
def test_the_command_line(capsys, mine, short_suite, in_this_process):
    mine(naive_attention)
    assert main(["verify", "mine", "--device", "cpu", "--seed", "5", "--no-timing"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"MINE on cpu: \d+ checks, [\d,]+ calls in one process, seed 5\n", out)
    rules = r"(    (error |by row|by column) .*budget.*\n){2,3}"
    rule = r"  a budget is 2 times the distance of plain PyTorch from float64, or "
    assert re.search(rf"  worst: .* seed 5\n{rules}{rule}", out)
    assert out.endswith("PASSED\n")


def test_what_the_command_line_does_not_take():
    assert main(["verify", "naive"]) == 2
    assert main(["verify", "custom-cuda-version-1", "--dtypes", "float64", "--device", "cpu"]) == 2


@pytest.mark.slow
def test_what_its_child_refuses_is_refused(capsys):
    assert main(["verify", "naive-pytorch", "--device", "cpu", "--seed", str(2**62)]) == 2
    assert "seed" in capsys.readouterr().err


NEGATIVE = ROOT / "tests" / "attention_kernels" / "negative"
RIGHT = header.CSRC / "fp32" / "v08_o_in_shared.cu"


def broken(folder, old, new, name="v08_broken.cu"):
    """A copy of a right version with one place in it replaced."""
    text = RIGHT.read_text()
    assert text.count(old) == 1
    (folder / name).write_text(text.replace(old, new))
    return str(folder / name)


DOES_NOT_BUILD = "launch(what ", r"v08_broken\.cu:\d+:\d+: error: "


@pytest.mark.parametrize(
    ("new", "words", "options"),
    [
        (*DOES_NOT_BUILD, []),
        pytest.param(*DOES_NOT_BUILD, ["--sanitize"], marks=pytest.mark.slow),
        (
            "launch_it(",
            r"v08_broken\.cu does not define launch\(\) as csrc/attention.h declares it: a version "
            r"file defines scratch_floats\(\) and launch\(\) in namespace attention::ATT",
            [],
        ),
    ],
)
def test_what_does_not_build_or_load_ends_at_once(new, words, options, tmp_path, capsys):
    file = broken(tmp_path, "cudaError_t launch(", f"cudaError_t {new}")
    assert main(["verify", file, "--device", "cpu", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("gpt2-infer: error: ")]
    assert re.search(words, line)


LAUNCH = "cudaError_t launch(const Params& params, cudaStream_t stream) {\n"


@pytest.mark.slow
def test_a_kernel_that_kills_its_process_leaves_a_verdict(tmp_path, capsys):
    new = f"{LAUNCH}  if (params.seqlen > 30) __builtin_trap();\n"
    assert main(["verify", broken(tmp_path, LAUNCH, new), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert re.search("FAILED: races in shared memory, seqlen 130, head_dim 32, ", out)
    assert "          it was killed by SIGILL (an invalid instruction" in out
    assert "--sanitize shows where" in out
    assert out.endswith("FAILED\n")


def test_failures_that_are_alike_are_told_once(tmp_path, capsys, in_this_process):
    new = f"{LAUNCH}  return cudaErrorLaunchFailure;\n"
    file = broken(tmp_path, LAUNCH, new, name="v08_alike.cu")
    assert main(["verify", file, "--device", "cpu", "--seed", "0"]) == 1
    out = capsys.readouterr().out
    assert re.fullmatch(
        r"  FAILED: races in shared memory, seqlen 130, head_dim 32, .*, float32, seed 0\n"
        r"          cudaErrorLaunchFailure: unspecified launch failure\n"
        r"V08_ALIKE on cpu, emulated: 20 of \d+ checks, [\d,]+ calls in one process, seed 0\n"
        r"  no length above 1,025: it was emulated\n"
        r"  20 of them failed, and the suite stopped there; 19 of them, most like those above, are "
        r"not shown\n"
        r"  none of the \d+ cases that ran passed\n"
        r"FAILED\n",
        out,
    ), out


@pytest.mark.slow
@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("flag", "status", "words"),
    [
        (
            "",
            0,
            r"  nvcc: compiles for sm_90, \d+ (to \d+ )?registers, (no|up to \d+ bytes of) spills",
        ),
        (
            "--no-such-flag ",
            1,
            "  FAILED: nvcc does not compile it for sm_90: nvcc fatal.*no-such",
        ),
    ],
)
def test_what_passes_emulated_must_compile_with_nvcc(
    flag, status, words, tmp_path, capsys, monkeypatch
):
    everything_passes(monkeypatch)
    file = broken(tmp_path, "// Flags:  ", f"// Flags:  {flag}")
    assert main(["verify", file, "--device", "cpu"]) == status
    assert re.search(words, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("stem", "words"),
    [
        ("v01_dropped_barrier", "race: lane "),
        ("v02_off_by_one_mask", "change earlier rows"),
        pytest.param(
            "v05_unscaled_join",
            "decode, head_dim ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_negative_control_fails_with_its_reason(stem, words, capsys, in_this_process):
    """But v03_out_of_bounds_read: its fault is the sanitizer's to find."""
    in_this_process["max_failures"] = 4  # more than there are checks of the future
    file = str(NEGATIVE / f"{stem}.cu")
    assert main(["verify", file, "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert f"\n{stem.upper()} on cpu" in out
    assert " on cpu, emulated" in out
    assert re.search(rf"FAILED: [^\n]*\n? *[^\n]*{re.escape(words)}", out), out
    assert out.endswith("FAILED\n")


def test_what_the_sanitizer_finds_fails_and_the_suite_does_not_run(capsys, monkeypatch):
    """What it finds is in test_cuda.py."""
    asked = []
    monkeypatch.setattr(
        "attention_kernels.inspection.sanitize.sanitize",
        lambda *arguments: asked.append(arguments) or ["AddressSanitizer: a fault"],
    )
    name = "CUSTOM_CUDA_VERSION_1"
    assert main(["verify", name, "--device", "cpu", "--sanitize"]) == 1
    assert asked == [([name], "cpu")]
    assert capsys.readouterr().out == (
        f"{name} on cpu, emulated, sanitized\n"
        "  FAILED: AddressSanitizer: a fault\n"
        "  the suite did not run\n"
        "FAILED\n"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_nvcc")
def test_a_version_file_of_no_ladder_is_verified(tmp_path, capsys, in_this_process, short_suite):
    _, include, code = RIGHT.read_text().partition("#include")  # without its header
    (tmp_path / "mine (1).cu").write_text(include + code)
    assert main(["verify", str(tmp_path / "mine (1).cu"), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert re.match(
        r"MINE \(1\) on cpu, emulated: \d+ checks, [\d,]+ calls in one process, seed 0\n", out
    )
    assert "  nvcc not found: its flags were not tried\n" in out
    assert "no timing: it ran in the CPU emulator" in out
    assert main(["verify", str(tmp_path / "v09_none.cu")]) == 2
    (tmp_path / "half.cu").write_text("// Takes:  half\n")
    assert main(["verify", str(tmp_path / "half.cu")]) == 2
    assert "half.cu: Takes must look like `float16, head_dim 32 64`" in capsys.readouterr().err


@pytest.mark.usefixtures("busy_machine")
def test_what_fails_before_its_timing_has_not_passed(capsys, monkeypatch, mine):
    def attention(q, k, v, softmax_scale, is_causal):
        o = naive_attention(q, k, v, softmax_scale, is_causal)
        return o + 1 if q.shape[1] == 256 else o

    mine(attention)
    everything_passes(monkeypatch)
    assert main(["verify", "MINE", "--device", "cpu", "--no-timing"]) == 0
    capsys.readouterr()
    assert main(["verify", "MINE", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "  FAILED: N=256 H=12 head_dim=32, float32\n" in out
    assert out.endswith("FAILED\n")


@pytest.mark.usefixtures("busy_machine")
def test_a_short_timing_names_the_baseline(capsys, monkeypatch):
    everything_passes(monkeypatch)
    arguments = ["verify", "pytorch-sdpa-math", "--device", "cpu", "--dtypes", "float32"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "time of the kernel alone, N=256 H=12 head_dim=64, float32:" in out
    assert re.search(r"NAIVE_PYTORCH +[\d.]+ us \([\d.]+ \.\. [\d.]+\)", out)
    assert main([*arguments, "--no-timing"]) == 0
    assert "time of the kernel" not in capsys.readouterr().out
