"""The page in a real browser."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("pygments")

from attention_kernels import get_backend, ladder, list_backends
from attention_kernels.inspection.accesses import Access, count_accesses
from attention_kernels.inspection.sass.explain import StalledLine, Stalls
from attention_kernels.inspection.sass.predict import Prediction
from attention_kernels.judge.suite import Failure, Report
from attention_kernels.ladder.header import VersionHeader, parse_header
from gpt2_infer.bench import report
from gpt2_infer.bench.prediction import find_gpu
from gpt2_infer.bench.record import Shape
from gpt2_infer.bench.report import make_page
from gpt2_infer.bench.show.page import bars
from tests.gpt2_infer.cli.test_predict import FOUND

pytestmark = pytest.mark.slow  # versions are compiled for the emulator

HOSTILE = "</script><img src=x onerror=alert(1)>"
HOST_CODE = f"""\
// v03 - {HOSTILE}
//
// Change: {HOSTILE}
// Takes:  float32, on the CPU

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


def predicted(version: VersionHeader, *_, **__) -> Prediction:
    """The prediction of a version, in which each line waits for line 1."""
    slug = V1 if version.number == 1 else V2
    reasons = {"short scoreboard": 0.75, "wait": 0.25}
    lines = []
    for text, share in SHARES[slug].items():
        where = line_of(slug, text), share, reasons, [2], {1: 0.5}
        lines.append(StalledLine(*where, text))
    stalls = Stalls("H200 SXM", 100.0, 0.2, reasons, lines)
    return dataclasses.replace(FOUND, time_us=100.0, stalls=stalls)


def make(folder: Path) -> str:
    """The page of two rungs with stalls, and of a file that is not counted."""
    list_backends()
    versions = {name: ladder.versions()[name] for name in NAMES.values()}
    versions[HOSTILE] = parse_header(folder / "v03_hostile.cu")
    verdicts = {NAMES[V2]: failed(), HOSTILE: "it needs a GPU"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "predict", predicted)
        names = [*NAMES.values()]
        return make_page(
            versions, Shape(**SHAPE), gpu=find_gpu("h200"), predicted=names, verdicts=verdicts
        )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "v03_hostile.cu").write_text(HOST_CODE)
    file = folder / "page.html"
    file.write_text(make(folder), "utf-8")
    return file


def test_a_second_page_is_identical_and_the_source_is_escaped(file):
    page = file.read_text("utf-8")
    assert make(file.parent) == page
    assert page.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;") >= 4
    assert "<img src" not in page
    assert page.count("</script>") == 1


def test_verdicts_and_stalls_are_shown_at_their_lines(file):
    page = file.read_text("utf-8").replace("\xa0", " ")
    assert "Not verified: it needs a GPU." in page
    views = dict(re.findall(r'<section class="view" id="([\w-]+)">(.*?)</section>', page, re.S))
    assert "verify --quick</code> on cpu: 3 of 35 checks failed, seed 7" in views[V2]
    assert "verify" not in views[V1]
    product, barrier = line_of(V2, PRODUCT), line_of(V2, BARRIER)
    first, other = re.findall(r"<p>(seqlen 81|a): ", views[V2])
    assert (first, other) == ("a", "seqlen 81")  # what names a line comes first, and once
    for number in (product, barrier):
        (line,) = re.findall(rf"<li value={number} .*?(?=<li value=)", views[V2], re.S)
        assert f"<p class=failed>{RACE.format(product, barrier)}</p>" in line
    (line,) = re.findall(rf"<li value={line_of(V1, PRODUCT)} .*?(?=<li value=)", views[V1], re.S)
    assert "60.0 % of the stalls</b>, 48.0 us: 75 % short scoreboard, 25 % wait." in line


def test_a_prediction_is_drawn_with_its_parts():
    shown = bars(FOUND)
    names = ["shared memory", "issue slots", "uneven blocks", "latency", "launch", "predicted"]
    assert [bar.name for bar in shown] == names
    assert [bar.us for bar in shown] == [42.0, 30.0, 40.7, 6.0, 1.3, 90.0]


@functools.cache
def accesses(name: str) -> list[Access]:
    return count_accesses(ladder.versions()[name], **SHAPE)


def test_the_figures_are_those_of_the_recorder(file):
    page = file.read_text("utf-8")
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


@pytest.mark.parametrize(
    ("scheme", "options"), [("light", {}), ("dark", {"runOnly": ["color-contrast"]})]
)
def test_the_page_is_accessible(open_page, scheme, options):
    """Check all views at once, as they are without the script, with some of the maps open."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(color_scheme=scheme)
    page.evaluate(
        """() => {
          document.querySelectorAll('.view').forEach(view => view.hidden = false);
          document.querySelectorAll('details').forEach((one, i) => one.open = i % 5 == 0);
        }"""
    )
    found = axe.run(page, options=options).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert [node["failureSummary"] for one in serious for node in one["nodes"]] == []
