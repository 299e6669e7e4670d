"""The comment that opens a version file."""

from __future__ import annotations

import re

import pytest

from attention_kernels import ladder
from attention_kernels.ladder import header
from attention_kernels.ladder.header import HeaderError
from tests.attention_kernels.ladder.conftest import HEADER
from tests.conftest import ROOT


def test_a_shipped_file_says_everything():
    """A user's file need not: see test_a_file_needs_no_header()."""
    for package in ("attention_kernels", "gpt2_infer", "examples"):
        for file in (ROOT / package).rglob("v*_*.cu"):
            version = header.parse_header(file)
            assert file.read_text().startswith(f"// {version.name} - {version.title}\n"), file
            fields = (version.change, version.why, version.cost, version.tile, version.expect)
            assert all(fields), file


@pytest.mark.parametrize(
    ("name", "text", "title", "expected"),
    [
        ("kernel.cu", "int x;\n", "kernel", {}),
        ("v02_copied.cu", "// v01 - the title of v01\n", "the title of v01", {}),
        ("x.cu", "\ufeff\n// How?\n//\n// Cost: none\n", "How?", {"cost": "none"}),
        ("decode.cu", "// Role: decode\n", "decode", {"layout": "strided"}),
        # Prose after a field is not part of it.
        ("y.cu", "// Takes:  float16\n// From here on: prose.\n", "y", {"dtype": "float16"}),
    ],
)
def test_a_file_needs_no_header(tmp_path, name, text, title, expected):
    (tmp_path / name).write_text(text)
    version = header.of_file(tmp_path / name)
    assert (version.title, version.label) == (title, name.removesuffix(".cu"))
    assert re.fullmatch(r"file_[0-9a-f]{8}_\w+", version.op)
    fields = {"layout": "contiguous", "dtype": "float32", "head_dims": (32, 64, 128)} | expected
    assert {field: getattr(version, field) for field in fields} == fields


@pytest.fixture
def read(csrc):
    """read(added): the header of a file after adding lines below Layout."""
    file = csrc / "fp32" / "v01_first.cu"
    text = file.read_text()

    def read(added: str = "") -> header.VersionHeader:
        file.write_text(text.replace("// Flags", f"// {added}\n// Flags" if added else "// Flags"))
        return header.parse_header(file, op_prefix="x_")

    return read


def test_a_header_is_read_field_by_field(read):
    version = read()
    assert (version.name, version.number, version.op) == ("v01", 1, "x_v01")
    assert (version.title, version.change) == ("a change", "one thing, told on two lines.")
    assert (version.why, version.cost, version.tile) == ("because.", "none.", "4 x 4")
    assert (version.layout, version.expect) == ("contiguous", "less.")
    assert version.flags == ("-DTHIS", "--use_fast_math")
    assert (version.error_slack, version.compiles_for("75")) == (1, True)
    assert ladder.backend("TEST_PLAIN", "test", version).min_compute_capability is None
    version = read("Needs:  sm_80\n// Precision: 3xtf32\n// Error:  3x: it rounds O")
    assert (version.error_slack, version.precisions) == (3, {"float32": "3xtf32"})
    assert [version.compiles_for(arch) for arch in ("75", "80", "120")] == [False, True, True]
    version = read("Needs:  sm_90a")
    assert [arch for arch in ("75", "89", "90", "100") if version.compiles_for(arch)] == ["90"]
    spec = ladder.backend("TEST_ONLY", "test", version)
    assert (spec.min_compute_capability, spec.version.needs_exactly) == ((9, 0), True)
    version = read("Takes:  float32 bfloat16, head_dim 64, on the CPU")
    assert (version.head_dims, version.is_host) == ((64,), True)
    builds = [("x_v01_float32", "float32"), ("x_v01_bfloat16", "bfloat16")]
    assert [(one.op, one.dtype) for one in version.builds()] == builds


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("Takes:  int8", "Takes must look like"),
        ("Takes:  float16, head_dim 64 99999", "Takes must look like"),
        ("Error:  5x: much", "Error must look like"),
        ("Needs:  sm_99999", "Needs must look like"),
        ("Precision: best", "Precision is for versions of float32"),
        ("Takes:  float16\n// Precision: 3xtf32", "Precision is for versions of float32"),
        ("Role:   train", "Role must be attention, decode or struct, not 'train'"),
        ("Role:   decode", "a decode kernel reads the cache in place"),
        ("Layout: any", "Layout must be contiguous or strided, not 'contiguous any'"),
        ("Flags: '-D", "Flags: No closing quotation"),
    ],
)
def test_a_broken_field_is_named(read, added, words):
    with pytest.raises(HeaderError, match=rf"v01_first\.cu: {re.escape(words)}"):
        read(added)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ({"v10": "v01", "v9": None}, ["v01", "v02", "v9", "v10"]),
        ({"v02": "v04", "v04": "v03", "v03": None}, ["v01", "v03", "v04", "v02"]),
        ({"v02": "v03"}, "v02_x.cu: From names no version of this ladder: v03"),
        ({"v02": "v03", "v03": "v02"}, "v02_x.cu: From leads back to v02"),
    ],
)
def test_versions_are_in_order_and_follow_the_one_that_they_change(tmp_path, starts, expected):
    for name in ("notes.cu", "v11.cu", "vnext_idea.cu"):  # no versions
        (tmp_path / name).touch()
    for name, start in ({"v01": None, "v02": None} | starts).items():
        line = f"// From:   {start}\n// Change" if start else "// Change"
        text = HEADER.format(name=name, title="a change").replace("// Change", line)
        (tmp_path / f"{name}_x.cu").write_text(text)
    try:
        headers = [*map(header.parse_header, header.version_files(tmp_path))]
        for version in headers:
            header.check_start(version, headers)
        found = [version.name for version in header.in_order(headers)]
    except HeaderError as error:
        found = str(error)
    assert found == expected
