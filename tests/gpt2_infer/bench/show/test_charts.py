from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")

import matplotlib.pyplot as plt
import msgspec
from matplotlib.container import BarContainer

from gpt2_infer.bench.record import DecodeCell, KernelCell, Row
from gpt2_infer.bench.show import charts, drawing
from gpt2_infer.bench.show.figures import main_rows
from tests.gpt2_infer.bench.common import (
    file_of,
    generation,
    inspection,
    kernel,
    kernels,
)


@pytest.mark.parametrize(
    ("results", "names"),
    [
        (kernels(), {"time", "bars", "roofline"}),
        (generation(), {"bars"}),
        (inspection(), set()),
    ],
)
def test_every_picture_names_every_backend(results, names):
    drawn = charts.render(results)
    assert {*drawn} == names
    wanted = {row.contender for row in main_rows(results) if row.samples}
    for svg in drawn.values():
        assert all(backend in svg.decode() for backend in wanted)


def test_pictures_are_compared_by_text_and_not_by_the_last_digit_of_a_coordinate():
    text = charts.render(kernels())["bars"].decode()
    assert text == charts.render(kernels())["bars"].decode()
    at = re.search(r"\d+\.\d{3,}", text)[0]
    assert drawing.is_same(text, text.replace(at, at[:-1] + str(9 - int(at[-1])), 1))
    assert drawing.is_same(text, re.sub(r'"([pm])[0-9a-f]{10}"', r'"\g<1>0123456789"', text))
    assert not drawing.is_same(text, text.replace(at, f"1{at}", 1))
    assert not drawing.is_same(text, text.replace(">400.0<", ">401.0<"))


@pytest.fixture
def close():
    yield
    plt.close("all")


def test_a_line_is_its_backends_medians_with_their_whiskers(close):
    left, right = charts.kernel_time(kernels()).axes
    lines = {line.get_label().split(" (")[0]: line for line in left.get_lines()}
    assert [*map(tuple, lines["CUSTOM_CUDA_VERSION_1"].get_xydata())] == [(256, 100), (1024, 400)]
    whiskers = [segment.tolist() for one in left.collections for segment in one.get_segments()]
    assert [[1024, 399], [1024, 401]] in whiskers
    assert lines["NAIVE_PYTORCH"].get_color() == charts.COLOURS["NAIVE_PYTORCH"]
    assert "PYTORCH_SDPA_FLASH_ATTENTION" not in lines  # it has no samples
    tflops = next(line for line in right.get_lines() if "VERSION_1 " in line.get_label())
    assert tflops.get_xydata()[1][1] == pytest.approx(KernelCell(1024).flops / 400 / 1e6)


def test_bars_are_medians_with_their_whiskers_and_use_the_width(close):
    (axes,) = charts.median_bars(generation()).axes
    (bars,) = (one for one in axes.containers if isinstance(one, BarContainer))
    widths = [bar.get_width() for bar in bars]
    assert widths == [2.0, 4.0, 1.5, 1.0]
    (whisker,) = (one.get_segments()[1] for one in bars.errorbar.lines[2])
    assert [x for x, _ in whisker] == pytest.approx([3.96, 4.04])
    assert axes.get_xlim()[1] < 1.2 * max(widths)


def test_a_picture_shows_one_shape_and_a_single_length_has_no_line(close):
    results = kernels()
    for seqlen in (1024, 256):
        results.rows.append(kernel("OTHER", [1.0, 2.0], cell=KernelCell(seqlen, batch=8)))
    assert "OTHER" not in "".join(svg.decode() for svg in charts.render(results).values())
    results.rows = [row for row in results.rows if row.kernel.seqlen == 1024]
    assert {*charts.render(results)} == {"bars", "roofline"}


def test_a_roofline_shows_speeds_limits_and_errors(close):
    results = kernels()
    results.provenance.limits |= {"ffma_tflops": 64.0, "mma_tf32_tflops": 305.0}
    left, right = charts.roofline(results).axes
    (bars,) = left.containers
    names = [label.get_text() for label in left.get_yticklabels()]
    speeds = dict(zip(names, (bar.get_width() for bar in bars), strict=True))
    assert speeds["CUSTOM_CUDA_VERSION_2"] == pytest.approx(KernelCell(1024).flops / 50 / 1e6)
    roofs = [line.get_xdata()[0] for line in left.get_lines()]
    assert roofs == pytest.approx([64.0, 305 / 3])
    assert left.get_xlim()[1] > max(roofs)
    at = names.index("CUSTOM_CUDA_VERSION_2")
    points = [line.get_xydata().tolist() for line in right.get_lines()]
    assert [[4e-7, at]] in points
    assert [[2e-6, at]] in points
    for row in results.rows:  # the errors of rows, if all are known
        if row.check:
            row.check.row_error, row.check.row_budget = 3e-6, 5e-6
    _, right = charts.roofline(results).axes
    assert {line.get_xdata()[0] for line in right.get_lines()} == {3e-6, 5e-6}


def test_a_prompt_alone_is_not_drawn_as_decoding():
    cell = msgspec.to_builtins(DecodeCell("gpt2", "float32", 1, 1000, 1))
    rows = [
        Row(contender=name, cell=cell, metric="time", unit="s", samples=[0.01, 0.02])
        for name in ("graph", "fused")
    ]
    file = file_of("decode", rows, settings={"new_tokens": [1]})
    file.provenance.limits["read_gbps"] = 4000.0
    assert charts.decode_bars(file) is None
