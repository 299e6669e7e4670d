"""The page in a real browser."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("pygments")

from attention_kernels import get_backend, ladder, list_backends
from attention_kernels.inspection.accesses import Access, count_accesses
from attention_kernels.judge.suite import Failure, Report
from attention_kernels.ladder.header import parse_header
from gpt2_infer.bench import environment
from gpt2_infer.bench.record import Shape
from gpt2_infer.bench.report import make_page
from gpt2_infer.bench.show.page import Measured, measured
from tests.gpt2_infer.bench.common import kernel, kernels, stalls

pytestmark = pytest.mark.slow  # versions are compiled for the emulator

HOSTILE = "</script><img src=x onerror=alert(1)>"
HOST_CODE = f"""\
// v03 - {HOSTILE}
//
// Change: {HOSTILE}
// Why:    a page shows any source.
// Cost:   none.
// Tile:   none
// Layout: contiguous
// Takes:  float32, on the CPU
// Flags:  (none)
// Expect: nothing.

const char* text = "{HOSTILE}";
"""
V1, V2 = "custom-cuda-version-1", "custom-cuda-version-2"
NAMES = {V1: "CUSTOM_CUDA_VERSION_1", V2: "CUSTOM_CUDA_VERSION_2"}
PRODUCT, BARRIER = "s += sQ[", "    __syncthreads();"
SHARES = {V1: {PRODUCT: 0.6, BARRIER: 0.4}, V2: {PRODUCT: 0.1, BARRIER: 0.9}}
"""Shares of the stalls, by the text of the line."""


def line_of(slug: str, text: str) -> int:
    """The number of the first line that has a text."""
    lines = ladder.versions()[NAMES[slug]].source.split("\n")
    return next(number for number, line in enumerate(lines, 1) if text in line)


SHAPE = {"num_heads": 1, "seqlen": 33, "head_dim": 32}
RACE = "race: lane 0 of warp 1 reads, at v02_padded_k.cu:{}, what is written at v02_padded_k.cu:{}"


def failed() -> Report:
    """The judge's report on version 2: the same race in two cases, and another failure."""
    race = RACE.format(line_of(V2, PRODUCT), line_of(V2, BARRIER))
    found = [("seqlen 81", "the output is not finite"), ("a", race), ("b", race)]
    spec = get_backend(NAMES[V2])
    return Report(spec, "cpu", 7, checks=35, failures=[Failure(*one) for one in found])


def make(folder: Path) -> str:
    """The page of two rungs with stalls, of a file that is not counted, and of results."""
    list_backends()
    rungs = ladder.versions()
    versions = {name: rungs[name] for name in NAMES.values()}
    stalled = {
        name: (
            environment.version_digest(rungs[name].source),
            [(line_of(slug, text), share) for text, share in SHARES[slug].items()],
        )
        for slug, name in NAMES.items()
    }
    stalls(stalled).write(folder / "stalls.json")
    versions[HOSTILE] = parse_header(folder / "v03_hostile.cu")
    shape = Shape(**SHAPE)
    files = [measured(folder / name) for name in ("results.json", "stalls.json")]
    verdicts = {NAMES[V2]: failed(), HOSTILE: "it needs a GPU"}
    return make_page(versions, files, shape, gpu="h200", predict=[NAMES[V1]], verdicts=verdicts)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "v03_hostile.cu").write_text(HOST_CODE)
    kernels().write(folder / "results.json")
    file = folder / "page.html"
    file.write_text(make(folder), "utf-8")
    return file


def test_a_second_page_is_identical(file):
    assert make(file.parent) == file.read_text("utf-8")
    assert "Not verified: it needs a GPU." in file.read_text("utf-8")


@functools.cache
def accesses(name: str) -> list[Access]:
    return count_accesses(ladder.versions()[name], **SHAPE)


def test_the_figures_are_those_of_the_recorder_and_of_the_results(file):
    page = file.read_text("utf-8")
    results = json.loads(file.with_name("results.json").read_text("utf-8"))
    for slug, name in NAMES.items():
        found = accesses(name)
        shares = {line_of(slug, text): share for text, share in SHARES[slug].items()}
        lines = {access.lines[0] for access in found} | {*shares}
        view = page.partition(f'<section class="view" id="{slug}">')[2].partition("</section>")[0]
        heated = re.findall(r"<li value=(\d+)[^>]*><details><summary>(.*?)</summary>", view)
        assert {int(line) for line, _ in heated} == lines
        for line, row in heated:
            shown = re.findall(r"<span[^>]*>([^<]*)</span>", row)
            share = f"{shares[int(line)]:.1%}" if int(line) in shares else ""
            assert shown.pop(0) == share.replace("%", "\xa0%")
            mine = [access for access in found if access.lines[0] == int(line)]
            counters = ("requests", "wavefronts", "conflicts", "sectors")
            sums = [sum(getattr(access, counter) for access in mine) for counter in counters]
            assert [int(text.replace(",", "") or 0) for text in shown] == sums
    for row in results["rows"]:
        if row["metric"] == "time" and (samples := sorted(row.get("samples", []))):
            rows = re.findall(rf"<code>{row['contender']}</code>.*", page)
            assert any(f">{samples[len(samples) // 2]:.1f}" in row for row in rows)


def test_a_sample_faster_than_the_gpu_allows_is_flagged():
    assert [*Measured(Path("results.json"), kernels()).warnings] == []
    # 2 * 12 * 1024 ** 2 * 64 operations at 50 TFLOP/s take 32.2 us.
    fast = [kernel("A", [32.0, 33.0, 34.0]), kernel("B", [33.0, 33.0, 34.0])]
    (flag,) = Measured(Path("results.json"), kernels(fast)).warnings
    assert "A, N=1024: 1 of 3 samples are below 32.21 us" in flag


def test_the_source_is_escaped(file):
    page = file.read_text("utf-8")
    assert page.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;") >= 4
    assert "<img src" not in page
    assert page.count("</script>") == 1


@pytest.fixture
def open_page(browser, file):
    """open(hash): load the page; it must request only its file and log no error."""
    asked, said = [], []

    def open_page(fragment: str = "", **options):
        page = browser.new_context(**options).new_page()
        page.set_default_timeout(60_000)  # the machine may be busy
        page.on("request", lambda request: asked.append(request.url.partition("#")[0]))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{file.as_uri()}{fragment}")
        return page

    yield open_page
    assert {*asked} == {file.as_uri()}
    assert said == []


def test_a_click_on_a_heated_line_opens_its_map_and_the_address_keeps_it(open_page):
    (conflict,) = (a for a in accesses("CUSTOM_CUDA_VERSION_1") if a.conflicts)
    line = conflict.lines[0]
    page = open_page()
    assert page.locator(".view:visible").count() == 1
    heated = page.locator(f"#{V1} li[value='{line}'] details")
    assert not heated.locator("svg").first.is_visible()
    heated.locator("summary").click()
    assert heated.locator("svg").first.is_visible()
    assert "(32-way)" in heated.inner_text()
    page.wait_for_url(f"**/page.html#{V1}:{line}")
    again = open_page(page.url.partition("page.html")[2])
    assert again.locator(f"#{V1} li[value='{line}'] svg").first.is_visible()
    page.get_by_role("link", name="v01", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator(f"#{V2}").wait_for(state="visible")
    assert not heated.is_visible()


def test_a_link_to_a_line_shows_its_stalls_and_its_machine_instructions(open_page):
    product, barrier = line_of(V1, PRODUCT), line_of(V1, BARRIER)
    page = open_page(f"#{V1}:{barrier}")
    view = page.locator(f"#{V1}")
    opened = view.locator(f"li[value='{barrier}'] .sass")
    assert opened.is_visible()
    assert not view.locator(f"li[value='{barrier}'] svg").count()
    view.get_by_role("region", name="that stall").get_by_role("link").first.click()
    line = view.locator(f"li[value='{product}']")
    line.locator(".sass").wait_for()
    assert not opened.is_visible()
    assert line.locator("summary span").first.get_attribute("title") == (
        "75\xa0% short scoreboard, 25\xa0% wait"
    )
    shown = line.locator(".sass").inner_text()
    assert "60.0\xa0% of the stalls, 48.0 us: 75\xa0% short scoreboard, 25\xa0% wait." in shown
    assert "Waits for line 1 (50\xa0%)." in shown
    rows = [row.split("\t") for row in line.locator(".sass tr").all_inner_texts()]
    assert rows == [
        ["attention<32>"],
        ["04a0", "LDS.128 R4, [R12]", "30.0\xa0%", "short scoreboard"],
        ["combine<32>"],
        ["0010", "FFMA R1, R2, R3, R1", "15.0\xa0%", "wait"],
        ["", "3 other instructions below 0.1\xa0%"],
    ]


def test_without_javascript_every_view_is_there_and_every_line_of_a_source(open_page, file):
    page = open_page(java_script_enabled=False)
    assert page.locator(".view:visible").count() == file.read_text("utf-8").count('class="view"')
    for slug, name in NAMES.items():
        lines = page.locator(f"#{slug} .source > li").evaluate_all(
            "all => all.map(li => (li.querySelector('summary code') ?? li).textContent.trimEnd())"
        )
        text = ladder.versions()[name].path.read_text("utf-8").rstrip()
        assert lines == text.split("\n")[-len(lines) :]
        numbers = page.locator(f"#{slug} .source > li").evaluate_all(
            "all => all.map(li => li.value)"
        )
        assert numbers == [*range(text.count("\n") + 2 - len(lines), text.count("\n") + 2)]


def test_the_verdict_is_on_top_and_the_race_at_its_lines(open_page):
    product, barrier = line_of(V2, PRODUCT), line_of(V2, BARRIER)
    page = open_page(f"#{V2}")
    verdict = page.get_by_role("region", name="verdict on CUSTOM_CUDA_VERSION_2")
    first, race, *others = verdict.locator("p").all_inner_texts()
    assert first == "FAILED verify --quick on cpu: 3 of 35 checks failed, seed 7"
    assert race.endswith(RACE.format(product, barrier))  # before what names no line, and once
    assert others == ["seqlen 81: the output is not finite"]
    for number in (product, barrier):
        line = page.locator(f"#{V2} li[value='{number}']")
        assert line.locator("> p").inner_text() == RACE.format(product, barrier)
    page.locator(f"#{V1}").wait_for(state="hidden")
    verdict.get_by_role("link", name=f":{product}").click()
    page.locator(f"#{V2} li[value='{product}'] .maps").wait_for(state="visible")
    assert not page.locator(f"#{V1}").get_by_text("verify").count()


@pytest.mark.parametrize(
    ("scheme", "options"), [("light", {}), ("dark", {"runOnly": ["color-contrast"]})]
)
def test_the_page_is_accessible(open_page, violations, scheme, options):
    """Check all views at once, as they are without the script, with some of the maps open."""
    page = open_page(color_scheme=scheme)
    page.evaluate(
        """() => {
          document.querySelectorAll('.view').forEach(view => view.hidden = false);
          document.querySelectorAll('details').forEach((one, i) => one.open = i % 5 == 0);
        }"""
    )
    assert violations(page, options) == []


@pytest.mark.parametrize("width", [400, 1000])
def test_only_a_chart_that_could_not_be_read_scrolls_sideways(open_page, width):
    page = open_page(viewport={"width": width, "height": 800}, java_script_enabled=False)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    charts = page.locator(".chart").evaluate_all("all => all.map(it => it.clientWidth)")
    assert len(charts) == 3
    assert all(width == 1000 or shown == 600 for shown in charts)
    assert max(charts) <= max(width, 600)
    bars = page.locator(".bars").evaluate_all("all => all.map(it => it.scrollWidth)")
    assert len(bars) == 2
    assert max(bars) < width
    cut = page.locator(".scroll").evaluate_all(
        """all => all.filter(it => it.checkVisibility() && it.scrollWidth > it.clientWidth)
            .map(it => getComputedStyle(it).maskImage)"""
    )
    assert cut
    assert "none" not in cut  # the edge fades
    # The figures of a line stand next to it, and no heading runs into the next.
    line = page.locator(f"#{V1} li[value='{line_of(V1, PRODUCT)}'] summary")
    assert line.bounding_box()["height"] < 25
    heads = page.locator(f"#{V1} .top > span").evaluate_all(
        "all => all.filter(it => it.offsetWidth).map(it => [it.scrollWidth, it.clientWidth])"
    )
    assert [text for text, room in heads if text > room] == []
    assert len(heads) == (1 if width == 400 else 5)
