from __future__ import annotations

import pytest

from attention_kernels import UnsupportedError
from attention_kernels.inspection.accesses import Access
from attention_kernels.inspection.resources import Resources
from gpt2_infer.bench import results
from scripts import inspect_kernels, plot_results, update_readme


def access(memory: str, is_store: bool, **numbers: int) -> Access:
    counts = {"requests": 1, "conflicts": 0, "ways": 1, "sectors": 0, "fewest_sectors": 0}
    return Access((1,), "x", memory, is_store, 4, **{**counts, **numbers})


def test_totals_are_sums_and_of_the_ways_the_most():
    found = inspect_kernels.totals(
        [
            access("shared", False, requests=10, conflicts=31, ways=32),
            access("shared", False, requests=5, conflicts=1, ways=2),
            access("shared", True, requests=3),
            access("global", False, requests=2, sectors=64, fewest_sectors=8),
        ]
    )
    assert {name: value for name, value in found.items() if value} == {
        "shared_load_requests": 15,
        "shared_load_conflicts": 32,
        "shared_load_ways": 32,
        "shared_store_requests": 3,
        "shared_store_ways": 1,
        "global_load_requests": 2,
        "global_load_sectors": 64,
        "global_load_fewest_sectors": 8,
    }


def test_the_worst_of_several_kernels_is_told():
    def row(registers: int, warps: int, spills: int) -> Resources:
        numbers = {"threads": 32, "head_dim": 64, "blocks": 1, "max_warps": 64}
        names = {"version": "v01", "arch": "90", "kernel": "k", "limited_by": "registers"}
        smem = {"static_smem": 1000 * spills, "dynamic_smem": 24}
        spilled = {"spill_stores": spills, "spill_loads": 2 * spills}
        return Resources(registers=registers, warps=warps, **numbers, **names, **smem, **spilled)

    assert inspect_kernels.resources([]) == {}
    assert inspect_kernels.resources([row(40, 48, 0), row(32, 16, 4), row(64, 32, 1)]) == {
        "registers": 64,
        "spill_bytes": 12,
        "shared_bytes": 4024,
        "warps": 16,
        "occupancy_percent": 25,
    }


@pytest.fixture
def inspected(tmp_path, monkeypatch, capsys):
    """A results file of the script, of numbers that are made up."""
    seen = []

    def count(version, **shape):
        seen.append(shape)
        if version.number == 3:
            raise UnsupportedError("v03", ["not this one", "nor that"])
        first = version.number == 1
        return [
            access("shared", False, requests=1000, conflicts=31000 * first, ways=1 + 31 * first),
            access("global", True, sectors=80, fewest_sectors=80 - 70 * first),
        ]

    def table(versions, archs, head_dims):
        assert (archs, head_dims) == (["80"], [32])
        numbers = dict.fromkeys(("spill_stores", "spill_loads", "static_smem", "head_dim"), 0)
        smem = {"dynamic_smem": 2048, "blocks": 1, "threads": 32}
        names = {"arch": "80", "kernel": "k", "limited_by": "warps"}
        return [
            Resources(
                v.op,
                registers=40 - (v.number == 2),
                warps=16,
                max_warps=64,
                **numbers,
                **names,
                **smem,
            )
            for v in versions
        ]

    monkeypatch.setattr(inspect_kernels, "count_accesses", count)
    monkeypatch.setattr(inspect_kernels, "resource_table", table)
    monkeypatch.setattr(inspect_kernels.build, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(inspect_kernels.build, "output_of", lambda _: "nvcc, release 13.0, V13.0")
    file = tmp_path / "2026-01-01_cpu_inspect-test.json"
    shape = ["--seqlen", "64", "--head-dim", "32", "--heads", "2", "--batch", "3", "--full"]
    arguments = ["inspect_kernels.py", "--out", str(file), "--name", "inspect-test", "--arch", "80"]
    monkeypatch.setattr("sys.argv", [*arguments, *shape])
    inspect_kernels.main()
    (asked,) = {tuple(shape.items()) for shape in seen}
    wanted = {"seqlen": 64, "head_dim": 32, "batch": 3, "num_heads": 2, "is_causal": False}
    assert dict(asked) == wanted
    return file, capsys.readouterr().out


def test_the_table_tells_conflicts_and_waste_and_names_what_was_refused(inspected):
    _, out = inspected
    head, _, _, first, second, third, *_ = [line for line in out.splitlines() if line]
    assert head.startswith("B=3 H=2 N=64 head_dim=32, full; nvcc 13.0 for sm_80, accesses counted")
    taken = "40 | 0 | 2 | 16, 25 %"
    counts = "1,000 + 31,000 (32-way) | 0 | 0 | 80 (10 would do) |"
    assert first == f"| `CUSTOM_CUDA_VERSION_1` | {taken} | {counts}"
    assert second == "| `CUSTOM_CUDA_VERSION_2` | 39 | 0 | 2 | 16, 25 % | 1,000 | 0 | 0 | 80 |"
    assert third == f"| `CUSTOM_CUDA_VERSION_3` | {taken} |  |  |  |  |"
    assert "`CUSTOM_CUDA_VERSION_3`: refused: not this one; nor that" in out


def test_a_version_tells_what_it_changed(inspected):
    file, _ = inspected
    marked = "<!-- ladder custom-cuda inspect-test -->\n<!-- end -->\n"
    told = [
        line.removeprefix("**Measured:** by inspection at N=64, ")
        for line in update_readme.render(marked, file.parent).splitlines()
        if line.startswith("**Measured")
    ]
    assert told[0].startswith("registers 40, bytes spilled 0, bytes of shared memory 2,048, ")
    assert told[1] == "registers 39 after 40, bank conflicts on shared loads 0 after 31,000."
    assert told[2] == "registers 40 after 39."
    assert told[4] == "nothing differs from `CUSTOM_CUDA_VERSION_4`."


def test_the_picture_names_every_version_and_its_change(inspected):
    file, _ = inspected
    drawn = dict(plot_results.render(results.read(file)))
    assert drawn == dict(plot_results.render(results.read(file)))
    assert {*drawn} == {"inspect-test_bars.svg", "inspect-test_bars.png"}
    svg = drawn["inspect-test_bars.svg"].decode()
    for words in ("CUSTOM_CUDA_VERSION_12", "1,000 + 31,000", "pad the rows of K in shared memory"):
        assert words in svg
    assert "CUSTOM_CUDA_VERSION_3<" not in svg


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--head-dim", "48"], "no version of custom-cuda takes head_dim 48: there are 32, 64, 12"),
        (["--family", "flash-attention-1", "--head-dim", "7"], "no version of flash-attention-1 t"),
        (["--family", "nope"], "no ladder is of the family nope: there are custom-cuda"),
    ],
)
def test_what_no_version_takes_is_refused_before_anything_is_compiled(
    words, complaint, tmp_path, monkeypatch
):
    monkeypatch.setattr(inspect_kernels, "resource_table", None)
    file = tmp_path / "r.json"
    monkeypatch.setattr("sys.argv", ["inspect_kernels.py", "--out", str(file), *words])
    with pytest.raises(SystemExit, match=f"^{complaint}"):
        inspect_kernels.main()
    assert not file.exists()
