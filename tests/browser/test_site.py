"""The documentation site, built as `make docs` builds it: complete, offline, readable.

The build is strict: Zensical's warnings, missing pages of the navigation, broken links and anchors,
raw markup and requests that leave the site are errors of their own (`tools/site/build.py`).
"""

from __future__ import annotations

import fcntl
import functools
import re
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zensical", reason="the extra docs is not installed")

from tools.site import methods
from tools.site.assemble import ROOT
from tools.site.build import BuildFailed, build
from tools.site.links import Page, problems
from tools.site.navigation import files, navigation

pytestmark = pytest.mark.long
SECTIONS = [
    "How it works", "Where it acts", "Paper", "Fields", "Cost", "What leaves a client",
    "Neutral setting", "Identities", "Deviations from paper and code", "Measured results", "Try it",
]  # fmt: skip
VISITED = [
    "index.html", "learn/quickstart.html", "understand/drift.html", "results.html", "deploy.html",
    "architecture.html", "glossary.html", "reference/methods/index.html",
    "reference/methods/flboost.html", "reference/methods/fedtr.html",
    "reference/methods/fedreg.html", "reference/partitions.html", "reference/settings.html",
    "reference/cli/run.html", "reference/api/part.html", "reference/api/running.html",
    "reference/errors.html", "community/changelog.html",
]  # fmt: skip
FORMULAS = [page for page in VISITED if "methods/f" in page] + ["understand/drift.html"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, once for all workers; it shares results on methods with `make docs`."""
    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site").exists():
            build(shared / "site", shared / "work", lambda _: None, cache=ROOT / ".site" / "cache")
    return shared / "site"


@pytest.fixture
def server(site: Path) -> Iterator[str]:
    """The address of the site on a plain web server."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_address[1]}/"
        one.shutdown()


# -- without a browser -------------------------------------------------------------------------


def test_every_page_of_the_navigation_is_built(site: Path) -> None:
    pages = files(navigation(site.parent / "work" / "pages"))
    assert len(pages) == len(set(pages)) > 100
    for page in pages:
        assert (site / page).with_suffix(".html").is_file(), page
    assert problems(site) == []


@pytest.mark.parametrize("name", methods.entries())
def test_the_page_of_a_method_is_complete(name: str, site: Path) -> None:
    html = (site / "reference" / "methods" / f"{name}.html").read_text(encoding="utf-8")
    found = [re.sub("<.*?>", "", h).rstrip("¶").strip() for h in re.findall(r"<h2.*?</h2>", html)]
    assert [h.replace("&para;", "") for h in found] == SECTIONS
    page = Page(html)
    assert not re.search(r":(math|class|func|meth):", page.text)
    assert "``" not in page.text
    assert html.count('class="arithmatex"') > 0
    assert "katex.min.js" in html


def test_katex_is_loaded_only_where_there_are_formulas(site: Path) -> None:
    for path in site.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        assert ("katex.min.js" in html) == ('class="arithmatex"' in html), path.name
    assert "katex" not in (site / "index.html").read_text(encoding="utf-8")


def test_only_links_leave_the_site(site: Path) -> None:
    """The library of the theme names further servers for features that are off."""
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        for address in re.findall(r"(?:src|srcset|url)\s*[=(]\s*[\"']?(https?:[^\"')\s]+)",
                                  path.read_text(encoding="utf-8")):  # fmt: skip
            pytest.fail(f"{path.name}: {address}")


def test_a_broken_page_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a missing page and one to a missing anchor: Zensical is strict about both."""
    from tools.site import build as module

    def two_pages(work: Path, *_: Any) -> Path:
        pages = work / "pages"
        pages.mkdir(parents=True)
        (pages / "index.md").write_text("# A\n\n[b](gone.md) and [c](b.md#gone)\n")
        (pages / "b.md").write_text("# B\n")
        return pages

    monkeypatch.setattr(module, "assemble", two_pages)
    monkeypatch.setattr(module, "navigation", lambda _: [("A", "index.md"), ("B", "b.md")])
    with pytest.raises(BuildFailed, match="(?s)page does not exist.*anchor does not exist"):
        build(tmp_path / "site", tmp_path / "work", lambda _: None)
    monkeypatch.setattr(module, "navigation", lambda _: [("A", "index.md"), ("C", "c.md")])
    with pytest.raises(BuildFailed, match=r"do not exist:\nc\.md"):
        build(tmp_path / "site", tmp_path / "other", lambda _: None)
    assert not (tmp_path / "site").exists()


# -- in a browser ------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)]
)
def test_pages_are_quiet_and_fit(
    width: int, dark: bool, site: Path, server: str, open_page: Callable[..., Any]
) -> None:
    """No request leaves the site, no error, no horizontal overflow, in both schemes."""
    backgrounds = set()
    for name in VISITED:
        page = open_page(server + name, width=width, dark=dark, allowed=(server,))
        page.wait_for_load_state("networkidle")
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, f"{name} is {wide} pixels too wide"
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        if name in FORMULAS:
            drawn = page.locator(".arithmatex .katex").count()
            assert drawn == page.locator(".arithmatex").count() > 0
        fonts = page.evaluate("getComputedStyle(document.querySelector('article p')).fontFamily")
        assert fonts.startswith("system-ui")
        page.close()
    assert backgrounds == {"rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)"}


@pytest.mark.browser
def test_a_wide_table_scrolls_in_its_own_box(site: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(site / "results.html", width=390, allowed=(site.as_uri(),))
    box = page.locator(".md-typeset__scrollwrap").first
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.browser
@pytest.mark.parametrize("plain", [True, False], ids=["file", "http"])
def test_search_works_offline(
    plain: bool, site: Path, server: str, open_page: Callable[..., Any]
) -> None:
    base = site.as_uri() + "/" if plain else server
    page = open_page(base + "index.html", allowed=(base,))
    page.wait_for_load_state("networkidle")
    page.keyboard.press("Control+k")
    page.keyboard.type("control variates", delay=20)
    link = page.locator("a:visible[href*='scaffold']").first
    link.wait_for(state="visible")
    assert "reference/methods/scaffold.html" in link.get_attribute("href")


@pytest.mark.browser
def test_the_table_of_methods_filters_and_sorts(site: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(site / "reference" / "methods" / "index.html", allowed=(site.as_uri(),))
    rows = page.locator(".methods tbody tr:visible")
    total = len(methods.entries())
    assert rows.count() == total
    page.fill("#filter", "control variates")
    assert {row.split()[0] for row in rows.all_inner_texts()} == {"feddc", "fedpvr", "scaffold"}
    assert page.locator("#count").inner_text() == f"3 of {total}"
    assert not page.locator("#server").is_visible()
    page.fill("#filter", "personal")
    assert {"fedper", "fedbn", "ditto"} <= {r.split()[0] for r in rows.all_inner_texts()}
    page.fill("#filter", "")
    assert rows.count() == total
    table = page.locator(".methods[data-side=server]")
    names = table.locator("tbody td:first-child")
    before = names.all_inner_texts()
    button = table.locator("th button").first
    button.click()
    assert names.all_inner_texts() == sorted(before)
    button.click()
    assert names.all_inner_texts() == sorted(before, reverse=True)
    assert table.locator("th").first.get_attribute("aria-sort") == "descending"


@pytest.mark.browser
def test_code_can_be_copied(site: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(site / "learn" / "quickstart.html", allowed=(site.as_uri(),))
    assert page.locator("pre").first.locator("xpath=..").locator("button").count() > 0
