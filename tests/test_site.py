"""The site in a real browser, and its links."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from tests.conftest import shared_by_workers

pytest.importorskip("material", reason="needs the extra [site]")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# The home page, a page with wide tables and charts, and a source.
SOURCE = "examples/my_backend/src/my_backend/decode/v01_warp_per_head.cu.html"
PAGES = ("index.html", "docs/half-precision.html", SOURCE)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site, which the workers of xdist share: it takes half a minute of a core."""
    with shared_by_workers(tmp_path_factory, "site") as folder:
        if not folder.exists():
            script = [sys.executable, "scripts/make_site.py", "--out", folder]
            subprocess.run(script, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def texts(site) -> dict[str, str]:
    """The HTML of each page by its path."""
    files = site.rglob("*.html")
    return {f"/{file.relative_to(site).as_posix()}": file.read_text("utf-8") for file in files}


def test_every_document_has_a_page_and_every_question_leads_to_one(texts):
    for file in [*ROOT.glob("docs/*.md"), ROOT / "results" / "README.md"]:
        page = file.relative_to(ROOT).with_suffix(".html").as_posix()
        assert f"/{page.replace('README', 'index')}" in texts
    navigation = texts["/index.html"].partition('<nav class="md-nav md-nav--primary"')[2]
    led_to = {*re.findall(r'href="([^"#]+)"', navigation.partition("</nav>\n  </div>")[0])}
    documents = {f"docs/{file.stem}.html" for file in ROOT.glob("docs/[a-z]*.md")}
    assert documents | {"results/index.html"} <= led_to


def test_every_link_leads_somewhere(site, texts):
    anchors = {page: {*re.findall(r'\bid="([^"]+)"', text)} for page, text in texts.items()}
    links = {
        urljoin(page, link)
        for page, text in texts.items()
        for link in re.findall(r'\b(?:href|src)="?([^" >]+)', text)
    }
    assert len(links) > 400
    broken = []
    for link in links:
        scheme, _, path, _, anchor = urlsplit(link)
        path = f"{path}index.html" if path.endswith("/") else path
        if not scheme and not (
            (site / path[1:]).is_file() and (not anchor or anchor in anchors[path])
        ):
            broken.append(link)
    assert broken == []


@pytest.fixture(scope="module")
def address(site):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def open_page(browser, address):
    """open_page(path): load a page; it must request only files of the site and log no error."""
    asked, said, contexts = [], [], []

    def open_page(path: str, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)  # the machine may be busy
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{address}{path}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith(address)] == []
    assert said == []


def test_pages_are_accessible_and_no_wider_than_the_window(open_page, violations):
    sizes = [(400, "dark", {"runOnly": ["color-contrast"]}), (1280, "light", {})]
    for path in PAGES:
        page = open_page(path, color_scheme="dark", viewport={"width": 400, "height": 800})
        for width, scheme, options in sizes:
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no transition
            page.wait_for_function(f"getComputedStyle(document.body).colorScheme == '{scheme}'")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert violations(page, options) == []


def test_a_click_on_a_head_sorts_the_table(open_page):
    page = open_page("index.html")
    table = page.locator("table", has_text="512 tokens, s")
    before = table.locator("tbody tr").all_inner_texts()
    for order in ("ascending", "descending"):
        table.get_by_role("button", name="alone").click()
        assert table.locator(f"th[aria-sort={order}]").count() == 1
        shown = [float(it) for it in table.locator("tbody td:nth-child(3)").all_inner_texts() if it]
        assert shown == sorted(shown, reverse=order == "descending")
        assert {*before} == {*table.locator("tbody tr").all_inner_texts()}
    table.get_by_role("button", name="backend").click()
    names = table.locator("tbody td:first-child").all_inner_texts()
    assert names.index("CUSTOM_CUDA_VERSION_2") < names.index("CUSTOM_CUDA_VERSION_10")


def test_the_search_finds_a_page(open_page):
    page = open_page("index.html")
    page.get_by_role("textbox", name="Search").press_sequentially("swizzle")
    page.locator(".md-search-result__link", has_text="Hopper").first.wait_for()


def test_the_search_finds_a_page_from_disk(browser, site):
    page = browser.new_context().new_page()
    page.set_default_timeout(60_000)
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").press_sequentially("swizzle")
    page.locator(".md-search-result__link", has_text="Hopper").first.wait_for()
    page.context.close()


def test_a_chart_is_dark_in_the_dark_and_its_edge_fades_where_it_is_cut(open_page):
    page = open_page("index.html", color_scheme="dark", viewport={"width": 400, "height": 800})
    chart = page.locator("p > img").first
    assert "invert(1)" in chart.evaluate("it => getComputedStyle(it).filter")
    edge = chart.locator("..").evaluate(
        "it => it.scrollWidth > it.clientWidth && getComputedStyle(it).maskImage"
    )
    assert "linear-gradient" in edge
