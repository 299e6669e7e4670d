from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")

import matplotlib.pyplot as plt
from matplotlib.container import BarContainer

from gpt2_infer.bench.record import KernelCell
from gpt2_infer.bench.show import charts
from gpt2_infer.bench.show.figures import main_rows
from tests.gpt2_infer.bench.common import generation, inspection, kernel, kernels


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def test_every_picture_names_every_backend_of_the_first_shape():
    results = kernels()
    for seqlen in (1024, 256):
        results.rows.append(kernel("OTHER", [1.0, 2.0], cell=KernelCell(seqlen, batch=8)))
    for file, names in ((results, {"time", "bars"}), (generation(), {"bars"}), (inspection(), {})):
        drawn = charts.render(file)
        assert {*drawn} == {*names}
        wanted = {row.contender for row in main_rows(file) if row.samples} - {"OTHER"}
        for svg in drawn.values():
            assert all(backend in svg.decode() for backend in wanted)
            assert "OTHER" not in svg.decode()
    results.rows = [row for row in results.rows if row.kernel.seqlen == 1024]
    assert {*charts.render(results)} == {"bars"}  # a single length has no line


def test_pictures_are_compared_by_text_and_not_by_the_last_digit_of_a_coordinate():
    text = charts.render(kernels())["bars"].decode()
    at = re.search(r"\d+\.\d{3,}", text)[0]
    assert charts.is_same(text, text.replace(at, at[:-1] + str(9 - int(at[-1])), 1))
    assert charts.is_same(text, re.sub(r'"([pm])[0-9a-f]{10}"', r'"\g<1>0123456789"', text))
    assert not charts.is_same(text, text.replace(at, f"1{at}", 1))
    assert not charts.is_same(text, text.replace(">400.0<", ">401.0<"))


def test_a_line_is_its_backends_medians_with_their_whiskers():
    left, right = charts.time_lines(kernels()).axes
    lines = {line.get_label().split(" (")[0]: line for line in left.get_lines()}
    assert [*map(tuple, lines["CUSTOM_CUDA_VERSION_1"].get_xydata())] == [(256, 100), (1024, 400)]
    whiskers = [segment.tolist() for one in left.collections for segment in one.get_segments()]
    assert [[1024, 399], [1024, 401]] in whiskers
    assert "PYTORCH_SDPA_FLASH_ATTENTION" not in lines  # it has no samples
    tflops = next(line for line in right.get_lines() if "VERSION_1 " in line.get_label())
    assert tflops.get_xydata()[1][1] == pytest.approx(KernelCell(1024).flops / 400 / 1e6)


def test_bars_are_medians_with_their_whiskers():
    (axes,) = charts.median_bars(generation()).axes
    (bars,) = (one for one in axes.containers if isinstance(one, BarContainer))
    assert [bar.get_width() for bar in bars] == [2.0, 4.0, 1.5, 1.0]
    (whisker,) = (one.get_segments()[1] for one in bars.errorbar.lines[2])
    assert [x for x, _ in whisker] == pytest.approx([3.96, 4.04])
