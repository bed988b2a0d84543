"""A real browser for pages: Chromium without a window, driven by Playwright.

The fixture ``open_page`` opens a page and holds it to three rules until the test ends: no error in
the console, no uncaught exception, no request that leaves the page (``allowed`` names where
requests may go, such as a server of the test's own).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("KEDGE_CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
TIMEOUT_MS = 30_000  # of one step, on a busy machine
INSIDE = ("data:", "blob:", "about:")  # what a page may load from itself
OpenPage = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests; they are skipped where there is none."""
    if not Path(CHROMIUM).is_file():
        pytest.skip(f"no Chromium at {CHROMIUM}; say where it is with KEDGE_CHROMIUM")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """``open_page(path or address, width=, height=, dark=, allowed=)``: a page under watch."""
    contexts, problems = [], []

    def open_one(
        where: Path | str,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        allowed: tuple[str, ...] = (),
    ) -> Any:
        address = where.absolute().as_uri() if isinstance(where, Path) else where
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            accept_downloads=True,
        )
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()

        def request(one: Any) -> None:
            inside = one.url.split("#")[0] == address.split("#")[0] or one.url.startswith(INSIDE)
            if not inside and not one.url.startswith(allowed or ("\0",)):
                problems.append(f"request off the page: {one.url}")

        page.on("request", request)
        page.on("pageerror", lambda error: problems.append(f"uncaught: {error}"))
        page.on(
            "console",
            lambda line: problems.append(f"console: {line.text}") if line.type == "error" else None,
        )
        page.goto(address)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not problems, "\n".join(problems)
