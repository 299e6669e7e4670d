from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")


from gpt2_infer.bench.record import KernelCell
from gpt2_infer.bench.show import charts
from gpt2_infer.bench.show.figures import main_rows
from tests.gpt2_infer.bench.common import generation, kernel, kernels


def test_every_picture_names_every_backend_of_the_first_shape():
    results = kernels()
    for seqlen in (1024, 256):
        results.rows.append(kernel("OTHER", [1.0, 2.0], cell=KernelCell(seqlen, batch=8)))
    for file, names in ((results, {"time", "bars"}), (generation(), {"bars"})):
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
