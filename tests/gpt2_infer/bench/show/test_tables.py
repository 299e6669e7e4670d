"""What the documents' own tables, which a test keeps current, do not show."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from attention_kernels import ladder
from gpt2_infer.bench.record import DecodeCell, File, ResultsError
from gpt2_infer.bench.show import ladders, tables
from gpt2_infer.bench.show.figures import ratio
from gpt2_infer.bench.show.pivot import Table
from tests.gpt2_infer.bench.common import file_of, generation, kernel, kernels, provenance


def rows(file: File) -> dict[str, dict[str, str]]:
    """The cells of a file's only table, by backend, the first cell, and heading."""
    (table,) = tables.tables("FILE", file)
    return {row[0].strip("`"): dict(zip(table.head, row, strict=True)) for row in table.rows}


def test_guesses_are_compared_with_the_same_engine_without_them_if_that_ran():
    samples = {"fused": [2.0, 2.1], "fused, 3 guesses": [1.0, 1.1], "eager, 1 guess": [1.0]}
    cell = DecodeCell("demo", "float32", 1, 8, 504)
    extra = {"cell": cell, "weight_bytes": 10**6, "tokens_per_pass": 2.0}
    made = [kernel(name, each, **extra) for name, each in samples.items()]
    made.append(kernel("eager", [], cell=cell, status="failed"))
    (table,) = tables.tables("FILE", file_of("decode", made, provenance=provenance(limits={})))
    named, found = (table.head.index(name) for name in ("contender", "x without guesses"))
    shown = {row[named]: row[found] for row in table.rows}
    assert shown == {"fused": "", "fused, 3 guesses": "1.95", "eager, 1 guess": "", "eager": ""}


def test_there_is_no_ratio_to_another_precision_class_or_within_the_spread():
    found = rows(kernels())
    heading = "x NAIVE_PYTORCH, N=1024"
    assert [row[heading] for row in found.values()] == ["1.00", "", "0.25", "2.00", "1.98"]
    assert found["NAIVE_PYTORCH"]["N=256, us"] == "25.0"
    assert found["CUSTOM_CUDA_VERSION_2"]["spread"] == "4.0 %"
    assert found["CUSTOM_CUDA_VERSION_2"]["error"] == "4.0e-07"
    text = tables.render("FILE", kernels())
    assert "`PYTORCH_SDPA_FLASH_ATTENTION`: refused: not in float32" in text
    assert "medians of 3 interleaved rounds (FILE)" in text
    naive, other = kernel("A", [1.0, 3.0]), kernel("B", [2.0, 4.0])
    assert math.isnan(ratio(other, [naive, other], "A"))


def test_a_ratio_is_to_a_baseline_that_is_no_more_precise():
    ieee, split, tf32 = (
        kernel(name, [samples], precision=name)
        for name, samples in (("ieee-fp32", 8.0), ("3xfp16", 4.0), ("tf32", 2.0))
    )
    other = kernel("3xtf32", [5.0], precision="3xtf32")
    assert ratio(split, [other], "3xtf32") == 1.25
    assert ratio(ieee, [split], "3xfp16") == 0.5
    assert ratio(split, [ieee], "ieee-fp32") is None
    assert ratio(tf32, [split], "3xfp16") is None


def test_generation_shows_the_share_of_attention_and_what_was_not_compared():
    found = rows(generation())
    assert found["NAIVE_PYTORCH"]["attention's share"] == "50.0%"
    assert found["FREE_ATTENTION"]["attention's share"] == ""
    second = [*found["CUSTOM_CUDA_VERSION_2"].values()]
    assert second[1:] == ["ieee-fp32", "0.375", "1.500", "2.0 %", "1.33", "336", "33.3%"]
    text = tables.render("FILE", generation())
    assert text.count("its text was not compared: the baseline has none") == 1


def test_an_unknown_kind_of_study_is_one_line():
    with pytest.raises(ResultsError, match=r"^FILE: unknown kind of study, other$"):
        tables.render("FILE", file_of("other", []))


def test_a_version_is_compared_with_the_one_before_it():
    text = ladders.sections("fp32", [kernels(), generation()])
    sections = dict(re.findall(r"#### `CUSTOM_CUDA_VERSION_(\d+)`(.*?)(?=####|\Z)", text, re.S))
    told = {
        number: section.split("**Measured:** ")[1].strip()
        for number, section in sections.items()
        if "**Measured:**" in section
    }
    assert {*told} == {"1", "2", "3"}
    assert told["1"].startswith("the kernel alone at N=1024 takes 400.0 us (399.0 .. 401.0); 512 t")
    assert "50.0 us (49.0 .. 51.0), 8.00 times as fast as `CUSTOM_CUDA_VERSION_1`" in told["2"]
    assert "the same as `CUSTOM_CUDA_VERSION_2` within the spread" in told["3"]
    assert "512 tokens take 1.500 s (1.485 .. 1.515), 2.67 times as fast" in told["2"]
    assert "attention is 33% of that" in told["2"]
    # A file that has the predecessor, too, comes first.
    first = kernels([kernel("CUSTOM_CUDA_VERSION_18", [7.0])])
    later = kernels([kernel(f"CUSTOM_CUDA_VERSION_{n}", [float(n)]) for n in (12, 18)])
    section = ladders.sections("fp32", [first, later]).partition("`CUSTOM_CUDA_VERSION_18`")[2]
    assert "takes 18.0 us (18.0 .. 18.0), 0.67 times as fast as" in section
    refused = {"status": "refused", "reason": "not here", "samples": []}
    text = ladders.sections("fp32", [kernels([kernel("CUSTOM_CUDA_VERSION_1", **refused)])])
    assert "**Measured:** the kernel alone at N=1024: refused, not here." in text


def test_lines_of_code_are_compared_with_the_predecessor():
    text = ladders.changes("fa1", "fp32 study")
    assert re.search(r"\| +1 \+\d+ -0 +\| +1 \+\d+ -0 +\|", text)  # a first version is new
    assert re.search(r"\| +4 \(1\) \+\d\d -\d\d +\| +4 \+0 -0 +\|", text)


def test_every_version_is_in_one_chapter():
    parts = [[*ladders.chapter("fp32", name)] for name in ladders.CHAPTERS]
    assert [*itertools.chain(*parts)] == [*ladder.versions("fp32")]


def test_a_page_shows_the_chosen_part_of_a_table_and_refuses_a_large_one():
    (table,) = tables.tables("FILE", kernels())
    part = table.chosen("VERSION_[12]`", "backend|us$")
    assert part.head == ["backend", "N=256, us", "N=1024, us"]
    assert part.rows[1] == ("`CUSTOM_CUDA_VERSION_2`", "12.5", "50.0")
    assert part.title.endswith("; the file has 3 more rows")
    assert not part.notes
    with pytest.raises(ResultsError, match="5 x 8, more than 12 x 7; choose rows and columns"):
        table.chosen("", "")
    notes = Table("T", ["a"], [("1",)], {"A": "refused: no", "B": "refused: no", "C": "x"})
    assert str(notes).endswith("\n`A`, `B`: refused: no\n\n`C`: x\n")
    assert Table("T", ["`C`"], [], notes.notes).chosen("", "D").notes.keys() == {"A", "B"}
