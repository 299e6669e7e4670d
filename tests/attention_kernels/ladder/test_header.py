"""The comment that opens a version file."""

from __future__ import annotations

import pytest

from attention_kernels import ladder
from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.header import HeaderError


def test_every_version_file_has_a_header_that_reads():
    found = header.versions()
    assert [version.number for version in found] == [*range(1, len(found) + 1)]
    for version in found:
        assert version.path.name.startswith(f"{version.name}_")
        assert version.op == version.name
        assert version.title == version.title.strip()
        assert all(flag.startswith("-") for flag in version.flags)


def test_a_header_is_read_field_by_field(csrc):
    version = header.parse_header(csrc / "fp32" / "v01_first.cu", op_prefix="x_")
    assert (version.name, version.number, version.op) == ("v01", 1, "x_v01")
    assert (version.title, version.change) == ("a change", "one thing, told on two lines.")
    assert (version.why, version.cost, version.tile) == ("because.", "none.", "4 x 4")
    assert (version.layout, version.expect) == ("contiguous", "less.")
    assert version.flags == ("-DTHIS", "--use_fast_math")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("v01 - a", "v02 - a", "the first line must be `// v01 - <what changed>`"),
        ("// v01 - a change\n", "", "the first line must be"),
        ("// Why:    because.\n", "", "the header lacks Why"),
        ("because.", "", "the header lacks Why"),
        ("// Tile:", "// Why: again\n// Tile:", "the header has Why twice"),
        ("// Cost:   none.\n", "", "the header lacks Cost"),
        ("Layout: contiguous", "Layout: any", "Layout must be contiguous or strided, not 'any'"),
        ("-DTHIS", "'-DTHIS", "Flags: No closing quotation"),
        ("// v01", "v01", "the first line must be"),
        ("// Flags", "// Takes:  int8\n// Flags", "Takes must look like `float16, head_dim 32 64`"),
        ("// Flags", "// Takes:  float16, bfloat16\n// Flags", "Takes must look like"),
        ("// Flags", "// Takes:  float16, head_dim 0\n// Flags", "Takes must look like"),
        ("// Flags", "// Takes:  float16, head_dim 64 99999\n// Flags", "Takes must look like"),
        (
            "// Flags",
            "// Error:  2\n// Flags",
            "Error must look like `2x: every tile rounds O again`",
        ),
        ("// Flags", "// Error:  0x: none\n// Flags", "at most 4x"),
        ("// Flags", "// Error:  5x: much\n// Flags", "at most 4x"),
        ("// Flags", "// Error:  999999999x: why\n// Flags", "at most 4x"),
        ("// Flags", "// Needs:  8.0\n// Flags", "Needs must look like `sm_80`"),
        ("// Flags", "// Needs:  sm_00\n// Flags", "Needs must look like `sm_80`"),
        ("// Flags", "// Needs:  sm_99999\n// Flags", "Needs must look like `sm_80`"),
        ("// Flags", "// Precision: best\n// Flags", "Precision is for versions of float32 and m"),
        (
            "// Flags",
            "// Takes:  float16\n// Precision: 3xtf32\n// Flags",
            "Precision is for versions of float32 and must be one of ieee-fp32, 3xtf32",
        ),
        (
            "// Flags",
            "// Role:   train\n// Flags",
            "Role must be attention, decode or struct, not 'train'",
        ),
        (
            "// Flags",
            "// Role:   decode\n// Flags",
            "a decode kernel reads the cache in place",
        ),
        (
            "// Expect",
            "// Takes:  float16\n// Expect",
            "the header must be in the order From, Change, Why",
        ),
        (
            "// Change",
            "// From:   version 1\n// Change",
            "From must look like `v12`, not 'version 1'",
        ),
    ],
)
def test_a_broken_header_is_named(csrc, old, new, words):
    file = csrc / "fp32" / "v01_first.cu"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(HeaderError) as caught:
        header.parse_header(file)
    assert "v01_first.cu: " in str(caught.value)
    assert words in str(caught.value)


def test_a_version_says_which_one_it_changes(csrc):
    assert {v.name: v.start for v in header.versions() if v.start} == {"v18": "v12"}
    file = csrc / "fp32" / "v02_second.cu"
    file.write_text(file.read_text().replace("// Change", "// From:   v01\n// Change"))
    assert [version.start for version in header.versions(csrc / "fp32")] == [None, "v01"]
    file.write_text(file.read_text().replace("v01", "v03"))
    with pytest.raises(HeaderError, match=r"v02_second.cu: From names no earlier version: v03"):
        header.versions(csrc / "fp32")


def test_a_version_of_several_dtypes_is_built_for_each(csrc):
    file = csrc / "fp32" / "v01_first.cu"
    takes = "// Takes:  float32 bfloat16, head_dim 64\n// Flags"
    file.write_text(file.read_text().replace("// Flags", takes))
    version = header.parse_header(file)
    assert version.dtypes == ("float32", "bfloat16")
    builds = version.builds()
    assert [(one.op, one.dtype) for one in builds] == [
        ("v01_float32", "float32"),
        ("v01_bfloat16", "bfloat16"),
    ]
    assert "-DATTENTION_DTYPE=bfloat16" in compilers.compile_flags(builds[1], "emulator", "")
    assert builds[1].builds() == [builds[1]]


@pytest.mark.parametrize(
    ("takes", "expected"),
    [
        (None, ("float32", (32, 64, 128), False)),
        ("float64", ("float64", (32, 64, 128), False)),
        ("float16, head_dim 64", ("float16", (64,), False)),
        ("bfloat16, head_dim 32 64", ("bfloat16", (32, 64), False)),
        ("float32, on the CPU", ("float32", (32, 64, 128), True)),
    ],
)
def test_what_a_version_takes(csrc, takes, expected):
    file = csrc / "fp32" / "v01_first.cu"
    if takes:
        file.write_text(file.read_text().replace("// Flags", f"// Takes:  {takes}\n// Flags"))
    version = header.parse_header(file)
    assert (version.dtype, version.head_dims, version.is_host) == expected
    assert f"-DATTENTION_DTYPE={expected[0]}" in compilers.compile_flags(version, "emulator", "")


def test_a_version_says_how_much_error_it_needs(csrc):
    file = csrc / "fp32" / "v01_first.cu"
    assert header.parse_header(file).error_slack == 1
    file.write_text(file.read_text().replace("// Flags", "// Error:  3x: it rounds O\n// Flags"))
    assert header.parse_header(file).error_slack == 3


def test_a_version_says_what_it_needs_and_how_precise_it_is(csrc):
    file = csrc / "fp32" / "v01_first.cu"
    plain = header.parse_header(file)
    assert plain.compiles_for("75")
    assert ladder.backend("TEST_PLAIN", "test", plain).min_compute_capability is None
    fields = "// Needs:  sm_80\n// Precision: 3xtf32\n// Flags"
    file.write_text(file.read_text().replace("// Flags", fields))
    version = header.parse_header(file)
    assert not version.compiles_for("75")
    assert version.compiles_for("120")
    spec = ladder.backend("TEST_SPLIT", "test", version)
    assert spec.min_compute_capability == (8, 0)
    assert dict(spec.precisions) == {"float32": "3xtf32"}


def test_fields_out_of_order_are_named(csrc):
    file = csrc / "fp32" / "v01_first.cu"
    lines = file.read_text().replace("// Why:    because.\n", "")
    file.write_text(lines.replace("// Expect: less.\n", "// Expect: less.\n// Why: because.\n"))
    with pytest.raises(HeaderError, match="the header must be in the order From, Change, Why"):
        header.parse_header(file)


def test_versions_are_found_by_number_and_nothing_else_is(csrc):
    for name in ("v10_tenth.cu", "v9_ninth.cu", "notes.cu", "v11.cu", "vnext_idea.cu"):
        (csrc / "fp32" / name).write_text("")
    names = [path.name for path in header.version_files(csrc / "fp32")]
    assert names == ["v01_first.cu", "v02_second.cu", "v9_ninth.cu", "v10_tenth.cu"]
