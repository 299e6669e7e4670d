from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attention_kernels import ladder, list_backends
from attention_kernels.inspection import resources
from attention_kernels.ladder import build, compilers, header
from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import HeaderError

ROOT = Path(__file__).parents[3]
KNOWN = {spec.name for spec in list_backends()}
VERSIONS = [v for name, v in ladder.versions().items() if name in KNOWN and not v.is_host]
HEADER = """\
// {name} - {title}
//
// Change: one thing,
//         told on two lines.
// Why:    because.
// Cost:   none.
// Tile:   4 x 4
// Layout: contiguous
// Flags:  -DTHIS --use_fast_math
// Expect: less.

#include "common.cuh"
"""
# Notes each call, sleeps, fails on demand, and makes what -o names.
COMPILER = """\
#!/bin/sh
case "$*" in *--version*) echo "fake compiler"; exit 0;; esac
echo "$*" >> "$FAKE_LOG"
sleep "${FAKE_SLEEP:-0}"
if [ -n "$FAKE_FAIL" ]; then
  case "$*" in *$FAKE_FAIL*) echo "In a file:"; echo "x.cu:3:1: error: no such thing"; exit 1;; esac
fi
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then echo made > "$2"; fi
  shift
done
"""


@pytest.fixture
def csrc(tmp_path):
    """A tree like csrc, with versions 1 and 2."""
    folder = tmp_path / "csrc"
    for name in ("attention.h", "common.cuh", "binding.cpp", "emulator/cuda_emulator.h"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"// {name}\n")
    (folder / "fp32").mkdir()
    for name, stem in (("v01", "v01_first"), ("v02", "v02_second")):
        (folder / "fp32" / f"{stem}.cu").write_text(HEADER.format(name=name, title="a change"))
    return folder


@pytest.fixture
def first(csrc):
    return header.versions(csrc / "fp32")[0]


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """An empty cache and a compiler that notes its calls: calls() are the calls since the last."""
    compiler, log, told = tmp_path / "compiler", tmp_path / "calls", 0
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTENTION_KERNELS_FLAGS", raising=False)
    monkeypatch.setattr(build, "_private", {})

    def calls():
        # The log is only read: a compiler may be writing its line just now.
        nonlocal told
        lines = log.read_text().splitlines() if log.exists() else []
        new, told = lines[told:], len(lines)
        return new

    return calls


# The header


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
        ("Layout: contiguous", "Layout: any", "Layout is contiguous or strided, not 'any'"),
        ("-DTHIS", "'-DTHIS", "Flags: No closing quotation"),
        ("// v01", "v01", "the first line must be"),
        ("// Flags", "// Takes:  int8\n// Flags", "Takes is like `float16, head_dim 32 64`"),
        ("// Expect", "// Takes:  float16\n// Expect", "the header's order is Change, Why"),
    ],
)
def test_a_broken_header_is_named(csrc, old, new, words):
    file = csrc / "fp32" / "v01_first.cu"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(HeaderError) as caught:
        header.parse_header(file)
    assert "v01_first.cu: " in str(caught.value)
    assert words in str(caught.value)


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


def test_host_flags_reach_the_host_compiler(csrc):
    file = csrc / "fp32" / "v01_first.cu"
    file.write_text(file.read_text().replace("-DTHIS", "-Xcompiler=-fopenmp,-mavx2"))
    plan = build.plan(header.parse_header(file), "emulator")
    assert all({"-fopenmp", "-mavx2"} <= {*command} for command in plan.compile)
    assert "-fopenmp" in plan.link
    assert "--use_fast_math" not in plan.compile[0]


def test_fields_out_of_order_are_named(csrc):
    file = csrc / "fp32" / "v01_first.cu"
    lines = file.read_text().replace("// Why:    because.\n", "")
    file.write_text(lines.replace("// Expect: less.\n", "// Expect: less.\n// Why: because.\n"))
    with pytest.raises(HeaderError, match="the header's order is Change, Why"):
        header.parse_header(file)


def test_versions_are_found_by_number_and_nothing_else_is(csrc):
    for name in ("v10_tenth.cu", "v9_ninth.cu", "notes.cu", "v11.cu", "vnext_idea.cu"):
        (csrc / "fp32" / name).write_text("")
    names = [path.name for path in header.version_files(csrc / "fp32")]
    assert names == ["v01_first.cu", "v02_second.cu", "v9_ninth.cu", "v10_tenth.cu"]


# The cache


def test_a_second_build_is_a_hit(first, calls, capsys):
    library = build.build(first, "emulator", label="CUSTOM")
    assert library.read_text() == "made\n"
    assert len(calls()) == 3
    assert capsys.readouterr().err == "building CUSTOM for the CPU emulator ...\n"
    assert build.build(first, "emulator") == library
    assert not calls()
    assert not capsys.readouterr().err
    assert not [path for path in library.parent.iterdir() if "tmp" in path.name]


@pytest.mark.parametrize(
    "name",
    ["attention.h", "common.cuh", "binding.cpp", "emulator/cuda_emulator.h", "fp32/v01_first.cu"],
)
def test_a_changed_file_is_built_again(csrc, first, calls, name):
    before = build.build(first, "emulator")
    text = (csrc / name).read_text()
    (csrc / name).write_text(text + "// more\n")
    after = build.build(first, "emulator")
    assert after != before
    assert len(calls()) == 6
    (csrc / name).write_text(text)
    assert build.build(first, "emulator") == before
    assert not calls()


def test_changed_flags_are_built_again(csrc, first, calls, monkeypatch):
    libraries = {build.build(first, "emulator")}
    assert all("-DTHIS" in call for call in calls() if "-c" in call.split())
    first.path.write_text(first.path.read_text().replace("-DTHIS", "-DTHAT"))
    libraries.add(build.build(header.parse_header(first.path), "emulator"))
    assert all("-DTHAT" in call for call in calls() if "-c" in call.split())
    monkeypatch.setenv("ATTENTION_KERNELS_FLAGS", "-DATTENTION_POISON -O1")
    libraries.add(build.build(header.parse_header(first.path), "emulator"))
    assert all("-DATTENTION_POISON -O1" in call for call in calls())
    first.path.write_text(first.path.read_text().replace("contiguous", "strided"))
    libraries.add(build.build(header.parse_header(first.path), "emulator"))
    assert not any("-DATTENTION_CONTIGUOUS" in call for call in calls())
    assert len(libraries) == 4


def test_another_compiler_or_torch_is_built_again(first, calls, monkeypatch):
    libraries = {build.build(first, "emulator")}
    monkeypatch.setattr("torch.__version__", "9.9.9")
    libraries.add(build.build(first, "emulator"))
    compiler = Path(os.environ["CXX"])
    compiler.write_text(compiler.read_text().replace("fake", "faker"))
    os.utime(compiler, (1, 1))
    libraries.add(build.build(first, "emulator"))
    assert len(libraries) == 3


@pytest.mark.parametrize("folder", ["fp32", "."])
def test_what_the_version_includes_is_part_of_it(folder, csrc, first, calls):
    """Also what that includes, and whatever its name; it may include itself again."""
    first.path.write_text(
        first.path.read_text() + '#include "tiles.cuh"\n  # include "no/such.h"\n'
    )
    (csrc / "fp32" / "tiles.cuh").write_text('#include "parts/sizes.h"\n')
    sizes = csrc / folder / "parts" / "sizes.h"
    sizes.parent.mkdir()
    libraries = set()
    for text in ("1", "2"):
        sizes.write_text(f'#include "fp32/tiles.cuh"\nconstexpr int kSize = {text};\n')
        libraries.add(build.build(first, "emulator"))
    (csrc / "fp32" / "other.cuh").write_text("// nobody includes it\n")
    libraries.add(build.build(first, "emulator"))
    assert len(libraries) == 2


@pytest.fixture
def fake_nvcc(calls, tmp_path, monkeypatch):
    """A toolkit whose nvcc is the compiler of calls() under another name."""
    toolkit = tmp_path / "toolkit"
    for folder in ("bin", "lib64"):
        (toolkit / folder).mkdir(parents=True)
    (toolkit / "lib64" / "libcudart.so.13").write_text("")
    shutil.copy(os.environ["CXX"], toolkit / "bin" / "nvcc")
    monkeypatch.setenv("CUDACXX", str(toolkit / "bin" / "nvcc"))


def test_nvcc_gets_the_versions_flags_and_every_architecture(first, calls, fake_nvcc):
    build.build(first, "cuda", "80,90")
    compiled = [call.split() for call in calls() if "-c" in call.split() and "-o" in call.split()]
    assert len(compiled) == 2
    for words in compiled:
        assert {"-DTHIS", "--use_fast_math", "-DATTENTION_CONTIGUOUS"} <= {*words}
        for arch in ("80", "90"):
            assert f"-gencode=arch=compute_{arch},code=sm_{arch}" in words


@pytest.mark.parametrize("name", ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"])
def test_flags_that_nvcc_takes_from_the_environment_are_built_again(
    name, first, fake_nvcc, monkeypatch
):
    libraries = [(build.build(first, "cuda", "90"), build.build(first, "emulator"))]
    monkeypatch.setenv(name, "-DMORE")
    libraries += [(build.build(first, "cuda", "90"), build.build(first, "emulator"))]
    assert libraries[0][0] != libraries[1][0]
    assert libraries[0][1] == libraries[1][1]


def test_another_host_compiler_of_nvcc_is_built_again(first, fake_nvcc):
    before = build.build(first, "cuda", "90")
    compiler = Path(os.environ["CXX"])
    compiler.write_text(compiler.read_text().replace("fake", "faker"))
    os.utime(compiler, (1, 1))
    assert build.build(first, "cuda", "90") != before


def start_build(csrc: Path, **environment: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from attention_kernels.ladder import build, header\n"
        "print(build.build(header.versions(Path(sys.argv[1]))[0], 'emulator'))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(csrc / "fp32")],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_processes_build_once(csrc, calls):
    builders = [start_build(csrc, FAKE_SLEEP="2") for _ in range(2)]
    outputs = [builder.communicate(timeout=240) for builder in builders]
    assert outputs[0][0] == outputs[1][0] != ""
    assert len(calls()) == 3
    errors = sorted(error for _, error in outputs)
    assert errors[0] == "building v01_first.cu for the CPU emulator ...\n"
    assert errors[1] in (
        "",  # it came when all was done
        "waiting for another process that builds v01_first.cu for the CPU emulator ...\n",
    )


def test_a_killed_build_leaves_nothing_in_the_way(csrc, first, calls, tmp_path):
    builder = start_build(csrc, FAKE_SLEEP="600")
    cache = tmp_path / "cache"
    try:
        deadline, running = time.monotonic() + 120, 0
        while running < 2:
            assert time.monotonic() < deadline
            running += len(calls())
            time.sleep(0.01)
        assert list(cache.glob("*.tmp-*"))
        builder.kill()
        builder.wait()  # its compilers run on, as they would
        started = time.monotonic()
        library = build.build(first, "emulator")
        assert time.monotonic() - started < 120
        assert library.read_text() == "made\n"
        assert not list(cache.glob("*.tmp-*"))
    finally:
        os.killpg(builder.pid, signal.SIGKILL)
        builder.communicate()


def test_a_lock_that_nobody_gives_back_only_costs_time(first, calls, monkeypatch, capsys):
    import fcntl

    monkeypatch.setattr(build, "LOCK_TIMEOUT_S", 0.3)
    lock = build.cache_dir() / f"{build.plan(first, 'emulator').stem}.lock"
    running = lock.with_suffix(".tmp-1")  # the folder of the build that has the lock
    running.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert build.build(first, "emulator").exists()
    assert running.exists()
    assert "waiting for another process" in capsys.readouterr().err


def test_a_cache_that_cannot_be_made_costs_one_warning(first, calls, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTENTION_KERNELS_CACHE", str(tmp_path / "file" / "cache"))
    library = build.build(first, "emulator", quiet=True)
    assert build.build(first, "emulator", quiet=True) == library
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert len(calls()) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "file/cache cannot be written (Not a directory)" in lines[0]


def test_a_read_only_cache_is_read(csrc, first, calls, monkeypatch, capsys):
    library = build.build(first, "emulator", quiet=True)

    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    assert build.build(first, "emulator", quiet=True) == library
    assert not capsys.readouterr().err
    second = build.build(header.versions(csrc / "fp32")[1], "emulator", quiet=True)
    assert second.parent != library.parent
    assert "cannot be written (Read-only file system)" in capsys.readouterr().err


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("ATTENTION_KERNELS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "attention_kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / ".cache" / "attention_kernels"


# Failing


def test_a_failed_build_says_why_and_where_the_log_is(first, calls, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "v01_first")
    with pytest.raises(BuildError) as caught:
        build.build(first, "emulator")
    text = str(caught.value)
    assert text.startswith("x.cu:3:1: error: no such thing (log: ")
    log = Path(text.removesuffix(")").split("(log: ")[1])
    assert "In a file:\nx.cu:3:1: error" in log.read_text()
    assert "v01_first.cu" in log.read_text()
    assert {path.suffix for path in log.parent.iterdir()} == {".log", ".lock"}
    monkeypatch.delenv("FAKE_FAIL")
    assert build.build(first, "emulator").exists()


def test_one_failed_version_does_not_stop_the_others(csrc, calls, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_FAIL", "v01_first")
    results = build.build_many(header.versions(csrc / "fp32"), "emulator")
    assert isinstance(results["v01"], BuildError)
    assert isinstance(results["v02"], Path)
    assert "building kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("a.cu(3): error: no\n1 error detected", "a.cu(3): error: no"),
        ("note\nnvcc fatal   : Unsupported gpu architecture", "nvcc fatal   : Unsupported gpu"),
        ("ld: a.o: in f:\nundefined reference to `g'\ncollect2: error", "undefined reference"),
        ("killed\n", "killed"),
    ],
)
def test_the_first_error_line(output, line):
    assert compilers.first_error(output).startswith(line)
    assert compilers.first_error("") is None


# Compilers


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with no compiler; its PATH is tmp_path / "bin"."""
    for name in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    return tmp_path


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_without_compilers_the_reason_says_what_to_do(bare, first):
    assert compilers.find_gxx() is compilers.find_nvcc() is None
    assert "install g++, or name one with CXX" in compilers.missing_compiler("emulator")
    with pytest.raises(BuildError, match="needs a C"):
        build.build(first, "emulator")
    program(bare / "bin" / "g++")
    assert compilers.missing_compiler("emulator") is None
    assert "needs nvcc: install the CUDA toolkit or the extra" in compilers.missing_compiler("cuda")
    with pytest.raises(BuildError, match="needs nvcc"):
        build.build(first, "cuda", "90")


def test_where_compilers_are_looked_for(bare, monkeypatch):
    class Spec:
        submodule_search_locations = (str(bare / "nvidia"),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: Spec)
    old = program(bare / "nvidia" / "cuda_nvcc" / "bin" / "nvcc")
    assert compilers.find_nvcc() == old
    pip = program(bare / "nvidia" / "cu13" / "bin" / "nvcc")
    assert compilers.find_nvcc() == pip
    on_path = program(bare / "bin" / "nvcc")
    assert compilers.find_nvcc() == on_path
    home = program(bare / "home" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    assert compilers.find_nvcc() == home
    named = program(bare / "special-nvcc")
    monkeypatch.setenv("CUDACXX", named)
    assert compilers.find_nvcc() == named
    clang = program(bare / "bin" / "clang++")
    assert compilers.find_gxx() == clang
    gxx = program(bare / "bin" / "g++")
    assert compilers.find_gxx() == gxx
    monkeypatch.setenv("CXX", named)
    assert compilers.find_gxx() == named


# What the kernels take of a GPU


@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.op)
def test_every_version_compiles_for_every_architecture_without_spills(version):
    rows = resources.resource_table([version], ("75", "80", "90", "120"))
    assert {(row.arch, row.head_dim) for row in rows} == {
        (arch, head_dim) for arch in ("75", "80", "90", "120") for head_dim in version.head_dims
    }
    for row in rows:
        assert row.spill_stores <= 64 >= row.spill_loads
        assert row.registers * row.threads <= resources.REGISTERS_PER_SM
        if row.head_dim <= 64:
            assert row.blocks > 0
    assert version.op in resources.format_table(rows)


@pytest.mark.skipif(compilers.find_nvcc() is None, reason="needs nvcc")
def test_an_unknown_architecture_is_the_compilers_error():
    with pytest.raises(BuildError, match="Unsupported gpu architecture 'compute_99'"):
        build.build(header.versions()[0], "cuda", "99", quiet=True)
    with pytest.raises(BuildError, match="no limits known for 99"):
        resources.resource_table([], ("99",))


def test_ptxas_is_read():
    output = (
        "ptxas info    : Compiling entry function '_Zone' for 'sm_90'\n"
        "ptxas info    : Function properties for _Zone\n"
        "    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 400 bytes smem\n"
        "ptxas info    : Compiling entry function '_Ztwo' for 'sm_90'\n"
        "ptxas info    : Function properties for _Ztwo\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 255 registers\n"
    )
    one, two = resources.parse_ptxas(output).values()
    assert (one.registers, one.spill_stores, one.spill_loads, one.static_smem) == (40, 16, 24, 400)
    assert (two.registers, two.static_smem) == (255, 0)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        ("90", 256, 32, 0, (8, "warps")),
        ("90", 32, 32, 0, (32, "blocks")),
        ("90", 256, 128, 0, (2, "registers")),
        ("90", 128, 255, 0, (2, "registers")),
        ("90", 128, 16, 100 * 1024, (2, "shared memory")),
        ("90", 128, 16, 228 * 1024, (0, "shared memory")),
        ("75", 1024, 64, 64 * 1024, (1, "warps")),
        ("86", 128, 16, 49 * 1024, (2, "shared memory")),
        ("86", 128, 16, 50 * 1024, (1, "shared memory")),
        ("80", 128, 16, 81 * 1024, (2, "shared memory")),
        ("80", 128, 16, 82 * 1024, (1, "shared memory")),
        ("89", 32, 32, 0, (24, "blocks")),
        ("90", 128, 33, 0, (12, "registers")),  # as many as with 40
        ("90", 32, 96, 0, (20, "registers")),  # 5 warps in each of four parts
        ("120", 256, 32, 0, (6, "warps")),
        ("120", 128, 16, 100 * 1024, (0, "shared memory")),
    ],
)
def test_occupancy(arch, threads, registers, shared, expected):
    assert resources.resident_blocks(arch, threads, registers, shared) == expected


def test_each_number_is_in_its_column():
    launch = resources._Launch(64, 80, 1024, "_Zone", "kernel<64>")
    compiled = {"_Zone": resources._Compiled(40, 16, 24, 400)}
    head, line = resources.format_table(
        [resources._row("v01", "90", launch, compiled)]
    ).splitlines()
    assert dict(zip(re.split("  +", head), re.split("  +", line), strict=True)) == {
        "version": "v01",
        "arch": "sm_90",
        "head_dim": "64",
        "kernel": "kernel<64>",
        "threads": "80",  # three warps, the last not full
        "registers": "40",
        "spills st/ld": "16/24",
        "static smem": "400",
        "dynamic smem": "1024",
        "blocks/SM": "16",
        "warps/SM": "48/64",
        "occupancy": "75%",
        "limited by": "registers",
    }


def test_shared_memory_of_both_kinds_limits_the_blocks():
    launch = resources._Launch(64, 128, 40 * 1024, "_Zone", "kernel")
    compiled = {"_Zone": resources._Compiled(32, 0, 0, 40 * 1024)}
    row = resources._row("v01", "90", launch, compiled)
    assert (row.blocks, row.limited_by) == (2, "shared memory")
    with pytest.raises(BuildError, match="v01 launches kernel, which ptxas has not compiled"):
        resources._row("v01", "90", launch, {})


# A ladder that somebody edits


def test_a_new_file_is_a_new_backend_and_a_broken_one_breaks_nothing_else(tmp_path):
    package = tmp_path / "attention_kernels"
    shutil.copytree(ROOT / "attention_kernels", package)
    ladder = package / "csrc" / "fp32"
    files = header.version_files(ladder)
    for file in files[1:-1]:
        file.unlink()
    last, number = files[-1], header.version_number(files[-1]) + 1
    text = last.read_text().replace(f"// {last.name[:3]} - ", f"// v{number} - ")
    (ladder / f"v{number}_new.cu").write_text(text)
    (ladder / "v90_no_header.cu").write_text("int x;\n")
    (ladder / "v91_no_code.cu").write_text(HEADER.format(name="v91", title="a typo") + "a typo\n")
    (ladder / "v92_one.cu").write_text("")
    (ladder / "v92_two.cu").write_text("")
    code = f"""
import torch
from attention_kernels import AttentionError, attention, list_backends, get_backend
from attention_kernels.conformance import Case, run_case
print([spec.name for spec in list_backends() if spec.family == "custom-cuda"])
print(run_case(get_backend("CUSTOM_CUDA_VERSION_{number}"), Case(33, 64), "cpu").passed)
q = torch.zeros(1, 1, 1, 32)
for number in (90, 91, 92):
    spec = get_backend(f"CUSTOM_CUDA_VERSION_{{number}}")
    try:
        spec.attention(q, q, q)
    except AttentionError as error:
        print(error)
    print(spec.unavailable_reason("cpu"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "ATTENTION_KERNELS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = [f"CUSTOM_CUDA_VERSION_{n}" for n in (1, number - 1, number, 90, 91, 92)]
    assert lines[:2] == [str(names), "True"]
    no_header = "v90_no_header.cu: the first line must be `// v90 - <what changed>`"
    assert lines[3] == no_header
    assert lines[2].startswith("attention backend CUSTOM_CUDA_VERSION_90 is not available here: ")
    assert lines[2].endswith(no_header)
    assert "v91_no_code.cu:13:1: error: " in lines[4]
    assert f"(log: {tmp_path / 'cache' / 'v91-emulator-'}" in lines[4]
    assert lines[5] in lines[4]
    assert lines[7] == "several files have the number 92: v92_one.cu, v92_two.cu"
