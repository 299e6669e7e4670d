from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from gpt2_infer.bench.report.measured import Bars, Chart, File
from gpt2_infer.bench.results import Check
from tests.gpt2_infer.bench.common import generation, kernel, kernels


def charts(**changes) -> dict[str, Chart | Bars]:
    found = File(Path("results.json"), kernels(**changes)).charts
    return {chart.title.split(",")[0]: chart for chart in found}


def test_every_chart_names_every_backend_with_a_time():
    found = charts()
    assert [*found] == [
        "Microseconds of the kernel alone",
        "Error against speed",
        "Time by length",
        "Roofline",
    ]
    for chart in found.values():
        for name in kernels().backends:
            is_bars = isinstance(chart, Bars)
            drawn = (
                [row[0] for row in chart.rows]
                if is_bars
                else re.findall(r">([A-Z_\d]+)<", chart.drawing)
            )
            assert (name in drawn) == (is_bars or name != "PYTORCH_SDPA_FLASH_ATTENTION")
    (why,) = found["Microseconds of the kernel alone"].words
    assert why == "\u2715 PYTORCH_SDPA_FLASH_ATTENTION refused: not in float32."
    assert File(Path("results.json"), generation()).charts == []


def test_a_failure_is_marked_and_its_error_is_over_the_budget():
    check = Check(error=1e-5, budget=2e-6, naive_error=9e-7, relative_error=0.1)
    failed = kernel("CUSTOM_CUDA_VERSION_4", [], status="failed", reason="row 7", check=check)
    chart = charts(series=[*kernels().series, failed])["Error against speed"]
    assert chart.words == ("\u2715 CUSTOM_CUDA_VERSION_4 failed: row 7.",)
    assert chart.table
    assert chart.table.rows[-1] == (
        "`CUSTOM_CUDA_VERSION_4`",
        "ieee-fp32",
        "failed",
        "1.00e-05",
        "2.00e-06",
        "5.00",
    )


def test_a_sample_that_is_faster_than_copy_and_roof_allow_is_flagged():
    assert charts()["Roofline"].words == ("No sample is beneath what copy and roofs allow.",)
    # 2 * 12 * 1024 ** 2 * 64 operations at 50 TFLOP/s take 32.2 us.
    fast = kernel("CUSTOM_CUDA_VERSION_4", [32.0, 33.0, 34.0])
    (flag,) = charts(series=[*kernels().series, fast])["Roofline"].words
    assert "CUSTOM_CUDA_VERSION_4, N=1024: 1 of 3 samples are beneath 32.21 us" in flag
