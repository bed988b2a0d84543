"""Assemble the pages, build them with Zensical, and check the result."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jinja2
from tools.site import api, commands, errors, kinds, methods
from tools.site.assemble import ROOT, Pages
from tools.site.links import problems
from tools.site.navigation import files, navigation, toml
from tools.site.templates import render

HERE = Path(__file__).parent
Say = Callable[[str], None]


class BuildFailed(Exception):
    """The site is not complete; the message lists what is wrong."""


def build(out: Path, work: Path, say: Say = print, cache: Path | None = None) -> int:
    """Build the site.

    Args:
        out: the folder of the site; replaced.
        work: the folder for pages.
        say: called with a line on what is done.
        cache: where what is computed about methods is kept; ``work/cache`` if None.

    Returns:
        The number of pages.

    Raises:
        BuildFailed: Zensical warns, a page of the navigation is missing, or a link leads nowhere.
    """
    pages = assemble(work, say, cache or work / "cache")
    nav = navigation(pages)
    missing = [page for page in files(nav) if not (pages / page).is_file()]
    if missing:
        raise BuildFailed("pages of the navigation that do not exist:\n" + "\n".join(missing))
    config = work / "zensical.toml"
    theme = os.path.relpath(HERE / "theme", work)
    template = jinja2.Template((HERE / "zensical.toml.j2").read_text(encoding="utf-8"))
    text = template.render(
        nav=toml(nav),
        theme=theme,
        source=(ROOT / "src").as_posix(),
        known=json.dumps(api.known()),
    )
    config.write_text(text, encoding="utf-8")
    say("building")
    html = work / "html"
    shutil.rmtree(html, ignore_errors=True)
    _zensical(config)
    say("checking links")
    found = problems(html)
    if found:
        raise BuildFailed(f"{len(found)} problems in the pages:\n" + "\n".join(found[:50]))
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(html, out)
    return len(list(out.rglob("*.html")))


def assemble(work: Path, say: Say, cache: Path) -> Path:
    """Write all pages as Markdown, and return their folder."""
    pages = Pages(work / "pages")
    pages.copy()
    for name in methods.entries():
        say(f"method {name}")
        pages.write(f"reference/methods/{name}.md", methods.page(name, cache))
    pages.write("reference/methods/index.md", methods.index())
    say("errors")
    pages.write("reference/errors.md", errors.page(cache))
    for kind in kinds.PAGES:
        pages.write(f"reference/{kind.file}.md", kinds.page(kind))
    for command in commands.commands():
        pages.write(f"reference/cli/{command.slug}.md", commands.page(command))
    pages.write("reference/cli/index.md", commands.index())
    pages.write("reference/settings.md", commands.settings_page())
    for one in api.pages():
        pages.write(f"reference/api/{one.file}.md", api.page(one))
    pages.write("reference/api/index.md", api.index())
    pages.write("reference/index.md", render("reference.md.j2", kinds=kinds.PAGES))
    return pages.folder


def _zensical(config: Path) -> None:
    """Run Zensical in a process of its own; any warning is an error."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(config)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "NO_COLOR": "1",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    output = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    noise = r"Build started|Build finished.*|No issues found"
    lines = [line for line in output.splitlines() if line.strip()]
    warnings = [line for line in lines if not re.fullmatch(noise, line.strip())]
    if done.returncode or warnings:
        raise BuildFailed("zensical:\n" + "\n".join(warnings or lines))
