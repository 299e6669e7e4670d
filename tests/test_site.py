"""The site builds, and a real browser reads it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from filelock import FileLock

from tests.conftest import ROOT

pytest.importorskip("material", reason="needs the extra [site]")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, which the workers of xdist share; a broken link fails the build."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "site.lock"):
        if not (folder / "site").exists():
            script = [sys.executable, "scripts/make_site.py", "--out", folder / "site"]
            subprocess.run(script, cwd=ROOT, check=True)
    return folder / "site"


def test_every_document_has_a_page(site):
    navigation = (ROOT / "docs" / "site" / "mkdocs.yml").read_text("utf-8")
    for file in [*ROOT.glob("docs/*.md"), ROOT / "results" / "README.md"]:
        name = file.relative_to(ROOT)
        assert f" {name}\n" in navigation
        page = name.with_suffix(".html").as_posix()
        assert (site / page.replace("README", "index")).is_file()


def test_the_search_finds_a_page_and_a_click_on_a_head_sorts_a_table(browser, site):
    page = browser.new_context().new_page()
    page.set_default_timeout(60_000)  # the machine may be busy
    page.goto((site / "index.html").as_uri())
    table = page.locator("table", has_text="512 tokens, s")
    table.get_by_role("button", name="backend").click()
    names = table.locator("tbody td:first-child").all_inner_texts()
    assert names.index("CUSTOM_CUDA_VERSION_2") < names.index("CUSTOM_CUDA_VERSION_10")
    page.get_by_role("textbox", name="Search").press_sequentially("swizzle")
    page.locator(".md-search-result__link", has_text="Hopper").first.wait_for()
    page.context.close()
