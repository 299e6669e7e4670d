"""The comment that opens a version file."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from attention_kernels import ladder
from attention_kernels.ladder import compilers, header
from attention_kernels.ladder.header import HeaderError
from tests.attention_kernels.ladder.conftest import HEADER

ROOT = Path(__file__).parents[3]


def test_every_version_file_has_a_valid_header():
    found = header.versions()
    assert sorted(version.number for version in found) == [*range(1, len(found) + 1)]
    for version in found:
        assert version.path.name.startswith(f"{version.name}_")
        assert version.op == version.name
        assert all(flag.startswith("-") for flag in version.flags)


SHIPPED = sorted(
    path
    for package in ("attention_kernels", "gpt2_infer", "examples")
    for path in (ROOT / package).rglob("v*_*.cu")
)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_shipped_file_says_everything_in_order(file):
    """Nothing of this is asked of a user's file: see test_a_file_needs_no_header()."""
    first, *lines = itertools.takewhile(lambda x: x[:2] == "//", file.read_text().splitlines())
    assert re.fullmatch(rf"// {file.name.split('_')[0]} - \S.*", first)
    said = [found[1] for line in lines if (found := re.match(r"// ([A-Z]\w+):", line))]
    assert said == [name for name in header.FIELDS if name in said]
    assert {"Change", "Why", "Cost", "Tile", "Layout", "Flags", "Expect"} <= {*said}
    version = header.parse_header(file)
    assert all((version.change, version.why, version.cost, version.tile, version.expect))


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("kernel.cu", "int x;\n", "kernel"),
        ("Kernel (1).cu", "", "Kernel (1)"),
        ("v02_copied.cu", "// v01 - the title of v01\n", "the title of v01"),
        ("x.cu", "\ufeff\n// How fast?\n//\n// Cost: little\n// Cost: none\n", "How fast?"),
        ("y.cu", "// Takes: float16\n", "y"),
    ],
)
def test_a_file_needs_no_header(tmp_path, name, text, title):
    (tmp_path / name).write_text(text)
    version = header.of_file(tmp_path / name)
    assert (version.title, version.label) == (title, name.removesuffix(".cu"))
    assert (version.layout, version.head_dims) == ("contiguous", (32, 64, 128))
    assert version.dtype == ("float16" if "float16" in text else "float32")
    assert re.fullmatch(r"file_[0-9a-f]{8}_\w+", version.op)


def test_a_decode_kernel_without_a_layout_reads_the_cache_in_place(tmp_path):
    (tmp_path / "decode.cu").write_text("// Role: decode\n")
    assert header.of_file(tmp_path / "decode.cu").layout == "strided"


def test_prose_after_a_field_is_not_part_of_it(tmp_path):
    (tmp_path / "x.cu").write_text(
        "// Takes:  float16,\n//   head_dim 64\n// From here on: prose.\n"
    )
    version = header.of_file(tmp_path / "x.cu")
    assert (version.dtype, version.head_dims) == ("float16", (64,))


@pytest.mark.parametrize("name", ["$(ls).cu", "a,b.cu", 'a"b.cu', "a`b.cu", "a\nb.cu"])
def test_a_name_that_nvcc_does_not_take_is_refused(tmp_path, name):
    """It would pass $(ls) to a shell."""
    (tmp_path / name).write_text("")
    with pytest.raises(HeaderError, match=r"nvcc does not take its name: mv "):
        header.of_file(tmp_path / name)


def test_a_header_is_read_field_by_field(csrc):
    version = header.parse_header(csrc / "fp32" / "v01_first.cu", op_prefix="x_")
    assert (version.name, version.number, version.op) == ("v01", 1, "x_v01")
    assert (version.title, version.change) == ("a change", "one thing, told on two lines.")
    assert (version.why, version.cost, version.tile) == ("because.", "none.", "4 x 4")
    assert (version.layout, version.expect) == ("contiguous", "less.")
    assert version.flags == ("-DTHIS", "--use_fast_math")


@pytest.fixture
def read(csrc):
    """read(added, old, new): the header of a file after adding lines below Layout or a change."""
    file = csrc / "fp32" / "v01_first.cu"
    text = file.read_text()

    def read(added: str = "", old: str = "", new: str = "") -> header.VersionHeader:
        lines = f"// {added}\n// Flags" if added else "// Flags"
        file.write_text(text.replace(old, new).replace("// Flags", lines))
        return header.parse_header(file)

    return read


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Layout: contiguous", "Layout: any", "Layout must be contiguous or strided, not 'any'"),
        ("-DTHIS", "'-DTHIS", "Flags: No closing quotation"),
        ("// Cost:", "// Layout: strided\n// Cost:", "not 'strided contiguous'"),
    ],
)
def test_a_broken_header_is_named(read, old, new, words):
    with pytest.raises(HeaderError) as caught:
        read("", old, new)
    assert str(caught.value).startswith("v01_first.cu: ")
    assert words in str(caught.value)


PRECISION = "Precision is for versions of float32 and must be one of ieee-fp32, 3xtf32"


@pytest.mark.parametrize(
    ("added", "words"),
    [
        *[
            (f"Takes:  {takes}", "Takes must look like `float16, head_dim 32 64`")
            for takes in (
                "int8",
                "float16, bfloat16",
                "float16, head_dim 0",
                "float16, head_dim 64 99999",
            )
        ],
        *[
            (f"Error:  {error}", "Error must look like `2x: rounds O in every tile`, at most 4x")
            for error in ("2", "0x: none", "5x: much", "999999999x: why")
        ],
        *[
            (f"Needs:  {needs}", "Needs must look like `sm_80`")
            for needs in ("8.0", "sm_00", "sm_99999")
        ],
        ("Precision: best", PRECISION),
        ("Takes:  float16\n// Precision: 3xtf32", PRECISION),
        ("Role:   train", "Role must be attention, decode or struct, not 'train'"),
        ("Role:   decode", "a decode kernel reads the cache in place"),
    ],
)
def test_a_broken_optional_field_is_named(read, added, words):
    with pytest.raises(HeaderError) as caught:
        read(added)
    assert words in str(caught.value)


@pytest.fixture
def starting(csrc):
    """starting(v01="v03", ...): the names of versions that start there, in the ladder's order."""

    def starting(**starts: str | None) -> list[str]:
        for name, start in starts.items():
            text = HEADER.format(name=name, title="a change")
            line = f"// From:   {start}\n// Change" if start else "// Change"
            stem = {"v01": "v01_first", "v02": "v02_second"}.get(name, f"{name}_inserted")
            (csrc / "fp32" / f"{stem}.cu").write_text(text.replace("// Change", line))
        return [version.name for version in header.versions(csrc / "fp32")]

    return starting


def test_a_version_follows_the_one_that_it_changes(starting):
    assert starting(v02=None, v03="v01") == ["v01", "v02", "v03"]
    assert starting(v02="v03") == ["v01", "v03", "v02"]
    assert starting(v02="v04", v04="v03") == ["v01", "v03", "v04", "v02"]
    names = [version.name for version in header.versions()]
    assert names[14:18] == ["v15", "v31", "v33", "v16"]


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ({"v02": "v03"}, "v02_second.cu: From names no version of this ladder: v03"),
        ({"v02": "v02"}, "v02_second.cu: From leads back to v02"),
        ({"v02": "v03", "v03": "v02"}, "v02_second.cu: From leads back to v02"),
    ],
)
def test_a_version_that_starts_nowhere_is_named(starting, starts, words):
    with pytest.raises(HeaderError) as caught:
        starting(**starts)
    assert str(caught.value) == words


def test_a_version_of_several_dtypes_is_built_for_each(read):
    version = read("Takes:  float32 bfloat16, head_dim 64")
    assert version.dtypes == ("float32", "bfloat16")
    builds = version.builds()
    assert [(one.op, one.dtype) for one in builds] == [
        ("v01_float32", "float32"),
        ("v01_bfloat16", "bfloat16"),
    ]
    assert "-DATTENTION_DTYPE=bfloat16" in compilers.compile_flags(builds[1], "emulator", "")
    assert builds[1].builds() == [builds[1]]


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("", ("float32", (32, 64, 128), False)),
        ("Takes:  float64", ("float64", (32, 64, 128), False)),
        ("Takes:  float16, head_dim 64", ("float16", (64,), False)),
        ("Takes:  bfloat16, head_dim 32 64", ("bfloat16", (32, 64), False)),
        ("Takes:  float32, on the CPU", ("float32", (32, 64, 128), True)),
    ],
)
def test_what_a_version_takes(read, added, expected):
    version = read(added)
    assert (version.dtype, version.head_dims, version.is_host) == expected
    assert f"-DATTENTION_DTYPE={expected[0]}" in compilers.compile_flags(version, "emulator", "")


def test_optional_fields_are_read(read):
    plain = read()
    assert (plain.needs, plain.precision, plain.error_slack) == (None, None, 1)
    assert plain.compiles_for("75")
    assert ladder.backend("TEST_PLAIN", "test", plain).min_compute_capability is None
    version = read("Needs:  sm_80\n// Precision: 3xtf32\n// Error:  3x: it rounds O")
    assert version.error_slack == 3
    assert not version.compiles_for("75")
    assert version.compiles_for("120")
    spec = ladder.backend("TEST_SPLIT", "test", version)
    assert spec.min_compute_capability == (8, 0)
    assert spec.precisions == {"float32": "3xtf32"}


def test_instructions_that_only_one_architecture_has(read):
    version = read("Needs:  sm_90a")
    assert (version.needs, version.needs_exactly) == ((9, 0), True)
    compiled_for = [arch for arch in ("75", "89", "90", "100", "120") if version.compiles_for(arch)]
    assert compiled_for == ["90"]
    spec = ladder.backend("TEST_ONLY", "test", version)
    assert (spec.min_compute_capability, spec.version.needs_exactly) == ((9, 0), True)


def test_versions_are_sorted_by_number_and_other_files_ignored(csrc):
    for name in ("v10_tenth.cu", "v9_ninth.cu", "notes.cu", "v11.cu", "vnext_idea.cu"):
        (csrc / "fp32" / name).write_text("")
    names = [path.name for path in header.version_files(csrc / "fp32")]
    assert names == ["v01_first.cu", "v02_second.cu", "v9_ninth.cu", "v10_tenth.cu"]
