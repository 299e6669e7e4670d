from __future__ import annotations

import pytest

from attention_kernels.accesses import Access
from gpt2_infer import results
from scripts import count_accesses, plot_results, update_readme


def access(memory: str, is_store: bool, **numbers: int) -> Access:
    counts = {"requests": 1, "conflicts": 0, "ways": 1, "sectors": 0, "fewest_sectors": 0}
    return Access((1,), "x", memory, is_store, 4, **{**counts, **numbers})


def test_totals_are_sums_and_of_the_ways_the_most():
    found = count_accesses.totals(
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


@pytest.fixture
def counted(tmp_path, monkeypatch, capsys):
    """A results file of the script, of counts that are made up."""
    seen = []

    def count(version, **shape):
        seen.append(shape)
        if version.number == 3:
            raise count_accesses.AttentionError("not this one")
        first = version.number == 1
        return [
            access("shared", False, requests=1000, conflicts=31000 * first, ways=1 + 31 * first),
            access("global", True, sectors=80, fewest_sectors=80 - 70 * first),
        ]

    monkeypatch.setattr(count_accesses, "count_accesses", count)
    file = tmp_path / "2026-01-01_cpu_accesses-test.json"
    shape = ["--seqlen", "64", "--head-dim", "32", "--heads", "2", "--batch", "3", "--full"]
    arguments = ["count_accesses.py", "--out", str(file), "--name", "accesses-test", *shape]
    monkeypatch.setattr("sys.argv", arguments)
    count_accesses.main()
    (asked,) = {tuple(shape.items()) for shape in seen}
    wanted = {"seqlen": 64, "head_dim": 32, "batch": 3, "num_heads": 2, "is_causal": False}
    assert dict(asked) == wanted
    return file, capsys.readouterr().out


def test_the_table_tells_conflicts_and_waste_and_names_what_was_refused(counted):
    file, out = counted
    head, _, _, first, second, third, *_ = [line for line in out.splitlines() if line]
    assert head.startswith("B=3 H=2 N=64 head_dim=32, full; counted in the source")
    conflicts = "| 31,000 (32-way) | 0 | 0 | 0 | 80 (10 would do) |"
    assert first == f"| `CUSTOM_CUDA_VERSION_1` | 1,000 {conflicts}"
    assert second == "| `CUSTOM_CUDA_VERSION_2` | 1,000 | 0 | 0 | 0 | 0 | 80 |"
    assert third.startswith("| `CUSTOM_CUDA_VERSION_4`")
    assert "`CUSTOM_CUDA_VERSION_3`: refused: not this one" in out
    assert {s.status for s in results.read(file).series} == {"ok", "refused"}


def test_a_version_tells_what_it_changed(counted):
    file, _ = counted
    marked = "<!-- ladder custom-cuda accesses-test -->\n<!-- end -->\n"
    told = [
        line
        for line in update_readme.render(marked, file.parent).splitlines()
        if line.startswith(("**Measured", "Not measured"))
    ]
    assert told[0].startswith("**Measured:** in the source, at N=64: shared loads 1,000, bank")
    assert told[1] == (
        "**Measured:** in the source, at N=64: bank conflicts on shared loads 0 after 31,000."
    )
    assert told[2] == "Not measured yet."
    assert told[4].endswith("no other access than in `CUSTOM_CUDA_VERSION_4`.")


def test_the_picture_names_every_version_and_its_change(counted):
    file, _ = counted
    drawn = dict(plot_results.render(results.read(file)))
    assert drawn == dict(plot_results.render(results.read(file)))
    assert {*drawn} == {"accesses-test_bars.svg", "accesses-test_bars.png"}
    svg = drawn["accesses-test_bars.svg"].decode()
    for words in ("CUSTOM_CUDA_VERSION_12", "1,000 + 31,000", "pad the rows of K in shared memory"):
        assert words in svg
    assert "CUSTOM_CUDA_VERSION_3<" not in svg
