from __future__ import annotations

import itertools
import math
import re

import msgspec
import pytest

from attention_kernels import ladder
from gpt2_infer.bench.record import DecodeCell, File, KernelCell, ResultsError, Row
from gpt2_infer.bench.show import ladders, tables
from gpt2_infer.bench.show.figures import ratio
from gpt2_infer.bench.show.pivot import Table
from tests.gpt2_infer.bench.common import (
    file_of,
    generation,
    inspection,
    kernel,
    kernels,
    provenance,
    shapes,
)


def lines_of(text: str) -> list[dict[str, str]]:
    """The cells of a text's only table, by heading."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in body]


def rows(text: str) -> dict[str, dict[str, str]]:
    """The same by backend, the first cell."""
    return {next(iter(row.values())).strip("`"): row for row in lines_of(text)}


def test_there_is_no_ratio_to_another_precision_class_or_within_the_spread():
    text = tables.render("FILE", kernels())
    found = rows(text)
    heading = "x NAIVE_PYTORCH, N=1024"
    assert [row[heading] for row in found.values()] == ["1.00", "", "0.25", "2.00", "1.98"]
    assert "PYTORCH_SDPA_FLASH_ATTENTION" not in found
    assert "`PYTORCH_SDPA_FLASH_ATTENTION`: refused: not in float32" in text
    assert found["NAIVE_PYTORCH"]["N=256, us"] == "25.0"
    assert found["CUSTOM_CUDA_VERSION_2"]["spread"] == "4.0 %"
    assert found["CUSTOM_CUDA_VERSION_2"]["error"] == "4.0e-07"
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


def test_prompts_are_compared_with_the_first_contender():
    cell = msgspec.to_builtins(DecodeCell("gpt2", "float32", 2, 1000, 1))
    seconds = {"graph": 0.008, "fused, 3xfp16": 0.002}
    results = [
        Row(contender=name, cell=cell, metric="time", unit="s", samples=[s, s, 2 * s])
        for name, s in seconds.items()
    ]
    results[1].extra["same_text"] = False
    text = tables.render("FILE", file_of("decode", results, settings={"new_tokens": [1]}))
    assert "its text differs in gpt2" in text
    assert "1000 tokens" in text
    assert re.search(r"fused, 3xfp16 \| +2.00 \| +2.00 .. 4.00 \| +1,000,000 \| +4.00", text)


def test_shapes_at_lengths_of_their_own_share_a_table():
    text = tables.render("FILE", shapes())
    found = rows(text)
    assert [*found] == ["B=1 H=12 head_dim=32, float32, causal, N=64", str(KernelCell(128))]
    speed = KernelCell(128).flops / 50 / 1e6
    assert found[str(KernelCell(128))]["`FAST`, 3xfp16"] == f"{speed:.3g} (2.00 x)"
    assert next(iter(found.values()))["`FAST`, 3xfp16"] == "refused"
    assert "`FAST`: refused: not in 32" in text


def test_a_single_length_has_a_relative_error():
    results = kernels()
    results.rows = [row for row in results.rows if row.kernel.seqlen == 1024]
    found = rows(tables.render("FILE", results))["NAIVE_PYTORCH"]
    assert found["spread"] == "2.0 %"
    assert found["relative error"] == "1.0%"


def test_a_decode_kernel_has_bytes_per_second_and_no_tflops():
    found = rows(tables.render("FILE", kernels(settings={"decode": True})))["NAIVE_PYTORCH"]
    assert found["GB/s"] == f"{KernelCell(1024).min_bytes / 2 / 100 / 1e3:.3g}"
    assert "TFLOP/s" not in found


def test_generation_shows_the_share_of_attention_and_what_was_not_compared():
    text = tables.render("FILE", generation())
    found = rows(text)
    assert found["NAIVE_PYTORCH"]["attention's share"] == "50.0%"
    assert found["FREE_ATTENTION"]["attention's share"] == ""
    second = [*found["CUSTOM_CUDA_VERSION_2"].values()]
    assert second[1:] == ["ieee-fp32", "0.375", "1.500", "2.0 %", "1.33", "336", "33.3%"]
    assert text.count("its text was not compared: the baseline has none") == 1


def decoding(mode: str, whole: float | None, **settings) -> File:
    """Ours, 64 tokens in 0.5 s, and a peer; `whole`: the seconds of a call."""
    cell = msgspec.to_builtins(DecodeCell("gpt2", "float32", 2, 8, 32, mode))

    def row(contender: str, metric: str, *samples: float, program: str = "gpt2-infer") -> Row:
        extra = {"program": program, "weight_bytes": 10**9}
        return Row(
            contender=contender, cell=cell, metric=metric, unit="s", samples=[*samples], extra=extra
        )

    main, other = ("time", "call") if mode == "kv-cache" else ("generation", "time")
    found = [row("ours", main, 0.4, 0.5, 0.5)]
    found += [row("ours", other, whole)] if whole else []
    found += [row("peer", "time", 2.0, program="transformers")]
    limits = {"read_gbps": 4000.0}
    return file_of("decode", found, provenance=provenance(limits=limits), settings=settings)


def test_a_decoding_shows_steps_and_whole_calls():
    file = decoding("kv-cache", 0.8, baseline="peer", peers=True)
    (table,) = tables.tables("FILE", file)
    assert "transformers 5.17.0" in table.title
    assert table.title.endswith("(FILE); model gpt2, dtype float32, batch 2")  # what all share
    ours, peer = lines_of(str(table))
    assert (ours["tokens/s"], ours["least .. most"]) == ("128", "128 .. 160")
    assert (ours["tokens/s, whole calls"], ours["vs transformers"]) == ("80", "2.50")
    assert ours["of the bandwidth"] == "2%"
    assert (peer["tokens/s"], peer["tokens/s, whole calls"]) == ("32", "32")


def test_older_decodings_show_what_they_have():
    ours, _ = lines_of(tables.render("FILE", decoding("kv-cache", None)))
    assert (ours["tokens/s"], ours["tokens/s, whole calls"]) == ("128", "")
    assert "vs transformers" not in ours
    file = decoding("recompute", 0.8)
    ours, _ = lines_of(tables.render("FILE", file))
    assert (ours["tokens/s"], ours["seconds"]) == ("128", "0.800 (0.800 .. 0.800)")
    assert ours["tokens/s, whole calls"] == "80"
    file.rows = file.of("time")
    ours, _ = lines_of(tables.render("FILE", file))
    assert "tokens/s" not in ours
    assert ours["tokens/s, whole calls"] == "80"


def test_batches_show_steps_and_whole_calls():
    cell = {"model": "gpt2", "dtype": "float32", "new_tokens": 8}
    extra = {"program": "gpt2-infer", "prompts": 50, "tokens": 400}
    row = Row(contender="A", cell=cell, metric="time", unit="s", samples=[4.0, 6.0], extra=extra)
    steps = Row(contender="A", cell=cell, metric="generation", unit="s", samples=[2.0])
    (found,) = lines_of(tables.render("FILE", file_of("batch", [row, steps])))
    assert (found["tokens/s, whole calls"], found["tokens/s"]) == ("80", "200")
    (found,) = lines_of(tables.render("FILE", file_of("batch", [row])))
    assert (found["tokens/s, whole calls"], found.get("tokens/s")) == ("80", None)


def test_an_inspection_shows_conflicts_and_waste_and_names_what_was_refused():
    text = tables.render("FILE", inspection())
    first, second, third = rows(text).values()
    assert first["shared loads"] == "1,000 + 31,000 (32-way)"
    assert first["sectors stored"] == "80 (10 would do)"
    assert first["warps/SM, occupancy"] == "16, 25 %"
    assert (second["shared loads"], second["sectors stored"]) == ("1,000", "80")
    assert (third["registers"], third["shared loads"]) == ("40", "")
    assert "`CUSTOM_CUDA_VERSION_3`: refused: not this one; nor that" in text


def test_an_unknown_kind_of_study_is_one_line():
    with pytest.raises(ResultsError, match=r"^FILE: unknown kind of study, other$"):
        tables.render("FILE", file_of("other", []))


def test_a_version_is_compared_with_the_one_before_it():
    text = ladders.sections("fp32", [kernels(), generation()])
    sections = dict(re.findall(r"#### `CUSTOM_CUDA_VERSION_(\d+)`(.*?)(?=####|\Z)", text, re.S))
    assert len(sections) >= 12
    told = {
        number: section.split("**Measured:** ")[1].strip()
        for number, section in sections.items()
        if "**Measured:**" in section
    }
    assert told["1"].startswith("the kernel alone at N=1024 takes 400.0 us (399.0 .. 401.0); 512 t")
    assert "50.0 us (49.0 .. 51.0), 8.00 times as fast as `CUSTOM_CUDA_VERSION_1`" in told["2"]
    assert "the same as `CUSTOM_CUDA_VERSION_2` within the spread" in told["3"]
    assert "512 tokens take 1.500 s (1.485 .. 1.515), 2.67 times as fast" in told["2"]
    assert "attention is 33% of that" in told["2"]
    assert {*told} == {"1", "2", "3"}


def test_a_file_that_has_the_predecessor_comes_first():
    later = kernels([kernel(f"CUSTOM_CUDA_VERSION_{n}", [float(n)]) for n in (12, 18)])
    first = kernels([kernel("CUSTOM_CUDA_VERSION_18", [7.0])])
    text = ladders.sections("fp32", [first, later])
    section = text.partition("#### `CUSTOM_CUDA_VERSION_18`")[2]
    assert "takes 18.0 us" in section
    assert "0.67 times as fast as `CUSTOM_CUDA_VERSION_12`" in section


def test_every_version_is_in_one_chapter():
    parts = [[*ladders.chapter("fp32", name)] for name in ladders.CHAPTERS]
    assert [*itertools.chain(*parts)] == [*ladder.versions("fp32")]
    assert len(parts[0]) == 12
    assert (parts[1][-1], parts[2][0]) == ("CUSTOM_CUDA_VERSION_17", "CUSTOM_CUDA_VERSION_18")


def test_a_kernel_has_the_share_of_its_own_roof_at_the_longest_length():
    flops = kernel("", [1.0], 1024).kernel.flops
    limits = {"ffma_tflops": 50.0, "mma_float16_tflops": 600.0}
    timed = [
        kernel(name, [us], seqlen, precision=precision)
        for name, precision in (("NAIVE_PYTORCH", "ieee-fp32"), ("A", "3xfp16"), ("B", "tf32"))
        for seqlen, us in ((512, 1.0), (1024, flops / 24e6))
    ]
    file = kernels(timed, provenance=provenance(limits=limits))
    found = rows(tables.render("FILE", file))
    shares = [row["of its roof, longest N"] for row in found.values()]
    assert shares == ["48%", "12%", ""]


def test_the_overview_has_each_time_from_the_first_file_that_has_it():
    limits = {"ffma_tflops": 50.0}
    first = kernels(provenance=provenance(limits=limits))
    flops = kernel("", [1.0], 1024).kernel.flops
    later = kernels(
        [
            kernel("CUSTOM_CUDA_VERSION_1", [7.0]),
            kernel("CUSTOM_CUDA_VERSION_4", [flops / 25e6]),
            kernel("CUSTOM_CUDA_VERSION_5", [9.0], cell=KernelCell(1024, batch=4)),
        ],
        provenance=provenance(limits=limits),
    )
    text = ladders.overview("fp32", [first, later], generation())
    assert [*rows(text)] == [*ladder.versions("fp32")]
    found = [[*row.values()][2:] for row in rows(text).values()]
    assert [row[0] for row in found[:5]] == ["400.0", "50.0", "50.5", f"{flops / 25e6:.1f}", ""]
    assert found[3][2:] == ["50%", ""]
    assert found[1][3] == "1.500"


def test_a_version_that_was_not_timed_says_why():
    refused = {"status": "refused", "reason": "not here", "samples": []}
    results = kernels([kernel("CUSTOM_CUDA_VERSION_1", **refused)])
    text = ladders.sections("fp32", [results])
    assert "**Measured:** the kernel alone at N=1024: refused, not here." in text


def test_a_page_shows_the_chosen_part_of_a_table_and_refuses_a_large_one():
    (table,) = tables.tables("FILE", kernels())
    part = table.chosen("VERSION_[12]`", "backend|us$")
    assert part.head == ["backend", "N=256, us", "N=1024, us"]
    assert part.rows[1] == ("`CUSTOM_CUDA_VERSION_2`", "12.5", "50.0")
    assert part.title.endswith("; the file has 3 more rows")
    assert not part.notes
    with pytest.raises(ResultsError, match="5 x 8, more than 12 x 7; choose rows and columns"):
        table.chosen("", "")


def test_backends_with_the_same_note_share_it():
    table = Table("T", ["a"], [("1",)], {"A": "refused: no", "B": "refused: no", "C": "x"})
    assert str(table).endswith("\n`A`, `B`: refused: no\n\n`C`: x\n")
