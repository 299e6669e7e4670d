"""Triton's backends are compiled without a GPU, and the fastest of their tiles is predicted."""

from __future__ import annotations

import pytest

from attention_kernels.inspection import binary
from attention_kernels.inspection.binary import BinaryError, Request
from attention_kernels.inspection.gpus import gpus
from attention_kernels.inspection.predict import Case
from tests.attention_kernels.inspection.test_predict import needs_cuda_programs

pytest.importorskip("triton")
from attention_kernels.backends.triton import flash_attention
from attention_kernels.inspection import triton_kernel

H200 = gpus()["h200"]


@pytest.mark.slow
@needs_cuda_programs
def test_the_tile_with_the_shortest_prediction_counts(monkeypatch):
    every = flash_attention.candidates

    def two(q, **options):
        return [c for c in every(q, **options) if c.tile.kwargs["block_n"] in (16, 32)][-2:]

    monkeypatch.setattr(flash_attention, "candidates", two)
    case = Case(1, 64, 1, 64, is_causal=True)
    explained = triton_kernel.explain_backend("TRITON_FLASH_ATTENTION", H200, case, "float32")
    found = explained.prediction
    assert found.choice == "block_m=16 block_n=16 num_warps=4 num_stages=2"
    assert (found.version, found.seqlen, found.assumed) == ("TRITON_FLASH_ATTENTION", 64, ())
    # Every product of both is a fused multiply-add: of 64 x 64 scores, 10 of 16 tiles are visible.
    products = 2 * 10 * 16 * 16 * 64
    fma = found.needs_us["float32 arithmetic"] * 1e3 * H200.clock_ghz * H200.multiprocessors
    assert products < fma * H200.fp32_lanes < 1.5 * products
    assert any("tl.dot(" in line.source for line in explained.lines)


FILE = """
import triton
import triton.language as tl

@triton.autotune([triton.Config({"tile": 512})], key=[])
@triton.jit
def scale(x, y, count, factor, tile: tl.constexpr):
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    tl.store(y + i, tl.load(x + i, mask=i < count) * factor, mask=i < count)
"""
LAUNCH = {"kernel": "scale", "grid": (4096, 1, 1), "block": (128, 1, 1)}
ARGUMENTS = ("f32[4194304]", "f32[4194304]", "4194304", "0.5", "1024")


@needs_cuda_programs
def test_a_kernel_of_any_python_file_is_compiled_with_its_constants_and_predicted(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    launch = Request(path, **LAUNCH, arguments=ARGUMENTS)
    program, _, size = triton_kernel.read(launch, H200, tmp_path)
    (instructions,) = program.code.values()
    stores = [one for one in instructions if one.base == "STG"]
    assert len(stores) == 1024 // 128 // 4  # of 16 bytes
    assert size == 2 * 4 * 2**22
    explained = binary.explain_kernel(launch, H200, triton_kernel.read)
    found = explained.prediction
    assert (found.bound, found.assumed) == ("memory", ())
    assert found.needs_us["memory"] == pytest.approx(size / H200.memory_gb_s / 1e3, rel=0.05)
    assert max(explained.lines, key=lambda line: line.share).source.startswith("tl.store(y + i")


@pytest.mark.parametrize(
    ("text", "change", "reason"),
    [
        (FILE, {"kernel": "shift"}, r"no kernel named shift \(of Triton: scale\)"),
        (FILE, {"block": (96, 1, 1)}, "--block of a Triton kernel is one of 32, 64, 128"),
        (FILE, {"block": (32, 2, 1)}, "--block of a Triton kernel is one of 32, 64, 128"),
        (FILE, {"dynamic_smem": 0}, "leave out --shared"),
        (FILE, {"arguments": ("1",)}, "1 arguments for 5 parameters, x, y, count, factor, tile"),
        (FILE, {"arguments": ("ptr", *ARGUMENTS[1:])}, "argument 'ptr' is not a number, or a"),
        (FILE, {"arguments": (*ARGUMENTS[:4], "3")}, "cannot compile scale: .*power of 2"),
        ("import no_such", {}, "cannot be imported: ModuleNotFoundError: No module named"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(text, change, reason, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    launch = Request(path, **{**LAUNCH, "arguments": ARGUMENTS, **change})
    with pytest.raises(BinaryError, match=f"(?s)^mine.py: .*{reason}"):
        triton_kernel.read(launch, H200, tmp_path)
