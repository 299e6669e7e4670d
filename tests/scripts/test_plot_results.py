from __future__ import annotations

import re

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.lines import Line2D

from gpt2_infer.bench import environment, tables
from gpt2_infer.bench.compare import FREE_ATTENTION
from gpt2_infer.bench.results import Results, Series
from scripts import plot_results, update_readme

BACKENDS = {
    "NAIVE_PYTORCH": ("pytorch", "ieee-fp32"),
    "PYTORCH_SDPA_EFFICIENT_ATTENTION": ("pytorch", "3xtf32"),
    "CUSTOM_CUDA_VERSION_1": ("custom-cuda", "ieee-fp32"),
    "CUSTOM_CUDA_VERSION_2": ("custom-cuda", "ieee-fp32"),
}
PLOTS = ("time", "bars", "error")
SHAPE = {"batch": 1, "num_heads": 12, "head_dim": 64, "dtype": "float32", "is_causal": True}


def kernels() -> Results:
    series = []
    for seqlen in (512, 1024):
        for place, (name, (family, precision)) in enumerate(BACKENDS.items()):
            labels = {"seqlen": seqlen, **SHAPE, "family": family, "precision": precision}
            facts = {
                "error": 3e-7,
                "budget": 1e-6,
                "naive_error": 4e-7,
                "workspace_bytes": 2048,
                "relative_error": 0.01,
            }
            samples = [(1 + place) * seqlen / 10 + i for i in range(3)]
            series.append(Series(name, labels, "us", samples, facts=facts))
    settings = {"measures": "kernel", "baseline": "NAIVE_PYTORCH", "rounds": 3}
    settings["cells"] = [{"seqlen": 512, **SHAPE}, {"seqlen": 1024, **SHAPE}]
    provenance = environment.provenance() | {
        "limits": {"matmul_float32_tflops": 51.0, "copy_gbps": 4260.0}
    }
    return Results("kernel-test", provenance, settings, series)


def generation() -> Results:
    series = []
    for tokens in (64, 128):
        for place, name in enumerate([*BACKENDS, FREE_ATTENTION]):
            family, precision = BACKENDS.get(name, ("bound", "ieee-fp32"))
            labels = {"max_tokens": tokens, "batch": 1, "dtype": "float32", "mode": "recompute"}
            labels |= {"family": family, "precision": precision}
            samples = [tokens / 100 * (1 + (place + 1) % 5) + i / 100 for i in range(3)]
            facts = {"peak_memory_bytes": 2**20 * (500 + tokens)}
            series.append(Series(name, labels, "s", samples, facts=facts))
    settings = {"measures": "generation", "baseline": "NAIVE_PYTORCH", "rounds": 3}
    settings |= {"model": "gpt2", "prompt_tokens": 8}
    settings["cells"] = [
        {"max_tokens": t, "batch": 1, "dtype": "float32", "mode": "recompute"} for t in (64, 128)
    ]
    return Results("generation-test", environment.provenance(), settings, series)


@pytest.mark.parametrize(
    ("results", "plots"),
    [(kernels(), PLOTS), (generation(), ("time", "bars", "memory"))],
)
def test_every_plot_is_drawn_twice_the_same_and_names_every_backend(results, plots):
    files = dict(plot_results.render(results))
    assert {*files} == {f"{results.task}_{p}.{k}" for p in plots for k in ("svg", "png")}
    assert files == dict(plot_results.render(results))
    for name, content in files.items():
        if name.endswith(".svg"):
            text = content.decode()
            assert all(backend in text for backend in BACKENDS), name
            assert "Matplotlib v" not in text


@pytest.fixture
def drawn():
    """drawn(plot, results): the figure, which is closed after the test."""
    figures = []

    def draw(plot, results):
        figures.append(plot(results))
        return figures[-1]

    yield draw
    for figure in figures:
        plt.close(figure)


def lines_of(axes) -> dict[str, Line2D]:
    """The lines by backend; its precision follows in the label."""
    return {line.get_label().split(" (")[0]: line for line in axes.lines}


@pytest.mark.parametrize(
    ("plot", "results", "place", "label", "points"),
    [
        # NAIVE_PYTORCH takes 1.29 and 2.57 s, 52.2 and 103.4 us.
        ("generation_time", generation(), 0, "seconds", {64: 1.29, 128: 2.57}),
        ("peak_memory", generation(), 0, "MiB", {64: 564, 128: 628}),
        ("kernel_time", kernels(), 0, "microseconds", {512: 52.2, 1024: 103.4}),
        ("kernel_time", kernels(), 1, "TFLOP/s", {512: 7.714, 1024: 15.576}),
    ],
)
def test_a_line_is_its_backends_medians(plot, results, place, label, points, drawn):
    figure = drawn(getattr(plot_results, plot), results)
    axes = figure.axes[place]
    assert axes.get_ylabel() == label
    assert axes.get_xscale() == "log"
    assert axes.get_yscale() == ("linear" if label == "MiB" else "log")
    lines = lines_of(axes)
    naive = lines["NAIVE_PYTORCH"]
    assert dict(zip(*naive.get_data(), strict=True)) == pytest.approx(points, rel=1e-3)
    for name, line in lines.items():
        if name in plot_results.COLOURS:
            assert line.get_color() == plot_results.COLOURS[name]
    assert len({line.get_color() for line in lines.values()}) == len(lines)
    (legend,) = figure.legends
    for handle, text in zip(legend.get_lines(), legend.get_texts(), strict=True):
        name = text.get_text().split(" (")[0]
        assert handle.get_color() == lines[name].get_color()
    assert len(legend.get_texts()) >= len(BACKENDS)


def test_memory_is_of_one_call_and_not_of_the_rounds(drawn):
    told = [
        {text.get_text().split("; ")[-1] for text in drawn(plot, generation()).axes[0].texts}
        for plot in (plot_results.peak_memory, plot_results.generation_time)
    ]
    assert told == [{"one call each"}, {"medians of 3 interleaved rounds"}]


def test_only_one_shape_is_in_a_plot(drawn):
    """That of the first cell: a point of another would be taken for one of its line."""
    results = generation()
    for series in results.series[5:]:
        series.labels["batch"] = 4
    assert plot_results.generation_time(results) is None
    kinds = {name.removeprefix("generation-test_") for name, _ in plot_results.render(results)}
    assert kinds == {"bars.svg", "bars.png"}
    figure = drawn(plot_results.generation_bars, results)
    assert "recompute, float32, batch 1: 64 tokens" in figure.axes[0].get_title("left")


def test_a_bar_is_a_median_with_its_own_whiskers(drawn):
    results = generation()
    assert results.series[5].name == "NAIVE_PYTORCH"
    results.series[5].samples = [2.0, 2.5, 4.5]
    (axes,) = drawn(plot_results.generation_bars, results).axes
    bars, whiskers = (
        next(c for c in axes.containers if isinstance(c, kind))
        for kind in (BarContainer, ErrorbarContainer)
    )
    assert axes.get_yticklabels()[0].get_text() == "NAIVE_PYTORCH"
    assert bars[0].get_width() == 2.5
    (segments,) = whiskers.lines[2]
    assert segments.get_segments()[0][:, 0].tolist() == [2.0, 4.5]
    assert axes.texts[0].get_text() == "2.500  ieee-fp32"


def test_the_error_is_drawn_against_the_time(drawn):
    results = kernels()
    for place, series in enumerate(results.series):
        series.facts["error"] = (1 + place) * 1e-7
    lines = lines_of(drawn(plot_results.error_and_speed, results).axes[0])
    (time,), (error,) = lines["CUSTOM_CUDA_VERSION_1"].get_data()
    assert (time, error) == (308.2, pytest.approx(7e-7))


def test_a_backend_without_samples_has_no_line():
    results = kernels()
    results.series[3].samples, results.series[3].status = [], "failed"
    results.series[7].samples, results.series[7].status = [], "failed"
    for name, content in plot_results.render(results):
        if name.endswith(".svg"):
            assert b"CUSTOM_CUDA_VERSION_1" in content
            assert b"CUSTOM_CUDA_VERSION_2" not in content


def test_the_command_writes_and_checks(tmp_path, monkeypatch, capsys):
    results = kernels()
    results.write(tmp_path / "2026-01-01_x_kernel-test.json")
    plots = tmp_path / "plots"
    command = ["plot_results.py", "--results", str(tmp_path), "--out", str(plots)]

    def checked() -> str:
        monkeypatch.setattr("sys.argv", [*command, "--check"])
        status, err = plot_results.main(), capsys.readouterr().err
        assert status == bool(err)
        return err

    names = [f"kernel-test_{plot}.{kind}" for plot in PLOTS for kind in ("svg", "png")]
    assert checked().startswith(f"missing: {', '.join(names)} (")
    assert not plots.exists()
    monkeypatch.setattr("sys.argv", command)
    assert plot_results.main() == 0
    capsys.readouterr()
    time, error, bars = (plots / f"kernel-test_{plot}.png" for plot in ("time", "error", "bars"))
    pixels = plt.imread(time)
    plt.imsave(time, pixels, pil_kwargs={"compress_level": 1})  # the same, in other bytes
    assert checked() == ""
    pixels = pixels.copy()
    pixels[5, 7, :3] = 0
    plt.imsave(time, pixels)
    error.write_bytes(error.read_bytes()[:5000])
    bars.unlink()
    (plots / "kernel-test_bars.svg").unlink()
    for name in ("gone_bars.png", "gone_bars.svg", "notes.txt"):
        (plots / name).write_text("")
    stale, missing, orphaned = checked().split("; ")
    assert stale == "stale: kernel-test_time.png, kernel-test_error.png"
    assert missing == "missing: kernel-test_bars.svg, kernel-test_bars.png"
    assert orphaned.startswith("of no results: gone_bars.png, gone_bars.svg (")
    assert orphaned.count("\n") == 1
    monkeypatch.setattr("sys.argv", command)
    assert plot_results.main() == 0
    results.series[0].samples[1] += 1.0
    results.write(tmp_path / "2026-01-01_x_kernel-test.json")
    assert "stale: kernel-test_time.svg, kernel-test_time.png; of no" in checked()


def test_a_picture_beside_a_file_that_it_no_longer_has_is_told(tmp_path, monkeypatch, capsys):
    results = kernels()
    results.series = results.series[4:]
    results.write(tmp_path / "mine.json")
    command = ["plot_results.py", str(tmp_path / "mine.json")]
    monkeypatch.setattr("sys.argv", command)
    assert plot_results.main() == 0
    for name in ("mine_time.png", "mine_other.png", "other_time.png"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr("sys.argv", [*command, "--check"])
    assert plot_results.main() == 1
    assert capsys.readouterr().err.startswith("of no results: mine_time.png (")


def test_files_are_drawn_beside_themselves_or_into_a_folder(tmp_path, monkeypatch, capsys):
    files = [tmp_path / "mine.json", tmp_path / "yours.json"]
    for file in files:
        kernels().write(file)
    for out, options in ((tmp_path, []), (tmp_path / "drawn", ["--out", str(tmp_path / "drawn")])):
        monkeypatch.setattr("sys.argv", ["plot_results.py", *map(str, files), *options])
        assert plot_results.main() == 0
        names = {f"{f.stem}_{p}.{k}" for f in files for p in PLOTS for k in ("svg", "png")}
        assert {*capsys.readouterr().out.splitlines()} == {f"wrote {out / name}" for name in names}
        assert all((out / name).stat().st_size for name in names)
    for words, complaint in (
        ([str(files[0]), "--results", str(tmp_path)], "--results is a folder in place of FILE"),
        ([str(tmp_path / "none.json")], "none.json cannot be read: No such file"),
        ([str(files[0]), "--out", str(files[1])], "--out is a folder, and {1} is none"),
        ([str(files[0]), "--out", str(files[1]), "--check"], "--out is a folder, and {1} is none"),
        ([str(files[0]), "--out", "/proc/x"], "/proc/x/mine_time.svg cannot be written: No such"),
    ):
        before = files[1].read_bytes()
        monkeypatch.setattr("sys.argv", ["plot_results.py", *words])
        with pytest.raises(SystemExit) as caught:
            plot_results.main()
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert complaint.format(*files) in err
        assert err.count("\n") == 1
        assert files[1].read_bytes() == before


def test_what_is_not_finished_is_not_drawn(tmp_path, monkeypatch, capsys):
    """Its medians would be of fewer rounds than the title says."""
    results = kernels()
    for series in results.series[5:]:
        del series.samples[2]
    results.series[3].samples, results.series[3].status = [], "failed"  # it will have none
    file = tmp_path / "r.json.partial"
    results.write(file)
    monkeypatch.setattr("sys.argv", ["plot_results.py", str(file)])
    with pytest.raises(SystemExit) as caught:
        plot_results.main()
    assert caught.value.code == 2
    complaint = "3 of its 8 series have fewer samples than its 3 rounds"
    assert f"{file} is of a run that is not finished: {complaint}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("script", [plot_results, update_readme])
def test_a_folder_with_a_file_of_no_series_is_one_line(script, tmp_path, monkeypatch, capsys):
    results = kernels()
    results.series = []
    results.write(tmp_path / "2026-01-01_x_kernel-test.json")
    (tmp_path / "results").symlink_to(tmp_path)
    (tmp_path / "README.md").write_text("<!-- table kernel-test -->\n<!-- end -->\n")
    monkeypatch.setattr(script, "ROOT" if script is update_readme else "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py", "--check"])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "kernel-test.json is of a run that is not finished: it has no series" in err
    assert err.count("\n") == 1


def test_the_committed_plots_are_current(monkeypatch):
    if mpl.__version__ != "3.11.2":
        pytest.skip("drawn with the matplotlib of constraints.txt")
    monkeypatch.setattr("sys.argv", ["plot_results.py", "--check"])
    assert plot_results.main() == 0


def test_a_picture_is_compared_by_its_text_and_not_by_the_last_digit_of_a_coordinate(tmp_path):
    (name, content), *_ = plot_results.render(kernels())
    file = tmp_path / name
    text = content.decode()
    at = re.search(r"\d+\.\d{3,}", text)
    places = ((at[0][:-1] + str(9 - int(at[0][-1])), True), (f"1{at[0]}", False))
    for place, same in places:
        file.write_text(text.replace(at[0], place, 1))
        assert plot_results._is_same(file, content) is same
    file.write_text(re.sub(r'"([pm])[0-9a-f]{10}"', r'"\g<1>0123456789"', text))
    assert plot_results._is_same(file, content) is True
    file.write_text(text.replace("microseconds", "seconds"))
    assert plot_results._is_same(file, content) is False


# The README's tables of the same files


def test_the_readme_gets_tables_and_a_section_for_each_version(tmp_path):
    kernels().write(tmp_path / "2026-01-01_x_kernel-test.json")
    generation().write(tmp_path / "2026-01-01_x_generation-test.json")
    marked = (
        "<!-- table kernel-test -->\n<!-- end -->\n<!-- table generation-test -->\n<!-- end -->\n"
        "<!-- ladder custom-cuda kernel-test generation-test -->\n<!-- end -->\n"
    )
    text = update_readme.render(marked, tmp_path)
    assert update_readme.render(text, tmp_path) == text
    # NAIVE_PYTORCH takes 103.4 us at 1,024: the other class gets no ratio to it.
    assert "| `PYTORCH_SDPA_EFFICIENT_ATTENTION` | 3xtf32 | 103.4 | 205.8 | 1.9 % |  |" in text
    assert "| `CUSTOM_CUDA_VERSION_1` | ieee-fp32 | 154.6 | 308.2 | 1.3 % | 0.34 | 5.23 |" in text
    # 120 new tokens; FREE_ATTENTION takes 1.290 s.
    assert "_VERSION_1` | ieee-fp32 | 2.570 | 5.130 | 0.8 % | 0.50 | 23 | 74.9% | 628 |" in text
    assert "| `FREE_ATTENTION` | ieee-fp32 | 0.650 | 1.290 | 3.1 % | 1.99 | 93 |  | 628 |" in text
    first, second = text.split("#### `CUSTOM_CUDA_VERSION_")[1:3]
    assert first.startswith("1`: Naive Flash Attention V1\n")
    assert "the kernel alone at N=1024 takes 308.2 us (307.2 .. 309.2);" in first
    faster = "as fast as `CUSTOM_CUDA_VERSION_1`"
    assert f"at N=1024 takes 410.6 us (409.6 .. 411.6), 0.75 times {faster}" in second
    assert f"128 tokens take 6.410 s (6.400 .. 6.420), 0.80 times {faster}" in second
    assert "attention is 80% of that." in second
    assert "Measured" not in text.split("#### `CUSTOM_CUDA_VERSION_3`")[1]


def test_a_version_within_the_spread_of_the_one_before_is_not_faster(tmp_path):
    found = (kernels(), generation())
    for results in found:
        for one in results.series:
            one.samples = [300.0, 301.0, 302.0]
    text = tables.ladder_sections("custom-cuda", found)
    second = text.split("#### `CUSTOM_CUDA_VERSION_")[2]
    same = "the same as `CUSTOM_CUDA_VERSION_1` within the spread"
    assert f"takes 301.0 us (300.0 .. 302.0), {same}; 128 tokens take" in second
    assert f"s (300.000 .. 302.000), {same}; attention is within the spread." in second
    assert "times as fast" not in text


def test_the_overview_of_a_ladder_is_its_headers(tmp_path):
    text = update_readme.render("<!-- versions custom-cuda -->\n<!-- end -->\n", tmp_path)
    rows = [line for line in text.splitlines() if line.startswith("| `CUSTOM_CUDA_VERSION_")]
    assert len(rows) >= 12
    assert rows[3].startswith(
        "| `CUSTOM_CUDA_VERSION_4` | compile with --use_fast_math (`--use_fast_math`) | kBlockM"
    )


def test_a_file_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "2026-01-01_x_kernel-test.json").write_text("{")
    for folder, complaint in ((tmp_path, "truncated or not JSON"), ("/none", "there is no folder")):
        monkeypatch.setattr("sys.argv", ["plot_results.py", "--results", str(folder)])
        with pytest.raises(SystemExit) as caught:
            plot_results.main()
        assert caught.value.code == 2
        assert complaint in capsys.readouterr().err
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bad.json").write_text("{")
    monkeypatch.setattr("sys.argv", ["update_readme.py"])
    with pytest.raises(SystemExit):
        update_readme.main()
    assert "truncated or not JSON" in capsys.readouterr().err


def test_the_spread_is_the_widest_and_a_text_that_nobody_compared_is_told(tmp_path):
    results = generation()
    results.series[5].samples = [2.0, 2.5, 4.5]
    results.series[6].facts["text_compared"] = False
    results.write(tmp_path / "2026-01-01_x_generation-test.json")
    text = update_readme.render("<!-- table generation-test -->\n<!-- end -->\n", tmp_path)
    assert "| `NAIVE_PYTORCH` | ieee-fp32 | 1.290 | 2.500 | 100.0 % | 1.00 |" in text
    note = "its text was compared with nothing: the baseline wrote none"
    assert text.count(note) == text.count(f"`PYTORCH_SDPA_EFFICIENT_ATTENTION`: {note}") == 1


def test_a_version_that_was_not_timed_says_why(tmp_path):
    results = kernels()
    for series in results.series:
        if series.name == "CUSTOM_CUDA_VERSION_2":
            series.samples, series.status, series.reason = [], "failed", "it was wrong"
    results.write(tmp_path / "2026-01-01_x_kernel-test.json")
    marked = "<!-- ladder custom-cuda kernel-test -->\n<!-- end -->\n"
    text = update_readme.render(marked, tmp_path)
    assert "**Measured:** the kernel alone at N=1024: failed, it was wrong." in text


def test_a_version_is_compared_with_the_one_that_it_starts_from(tmp_path):
    results = kernels()
    names = ("BASELINE", "REGISTER_TILED", "WARP_REDUCTION", "TENSOR_CORE")
    for place, name in enumerate(names):
        for series in results.series[place::4]:
            series.name = f"FLASH_ATTENTION_1_{name}"
            series.labels["precision"] = "fp16"
    results.write(tmp_path / "2026-01-01_x_kernel-test.json")
    marked = "<!-- ladder flash-attention-1 kernel-test -->\n<!-- end -->\n"
    text = update_readme.render(marked, tmp_path)
    assert text.count("times as fast as `FLASH_ATTENTION_1_BASELINE`") == 3
    assert text.count("times as fast as `") == 3
