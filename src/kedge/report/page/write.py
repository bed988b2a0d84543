"""Write a page: the template with the facts, the vendored library and the page's own script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kedge._version import __version__
from kedge.diagnostics.sheet import Sheet
from kedge.errors import KedgeError
from kedge.files import make_folder
from kedge.report.page.diagnoses import sheet_facts
from kedge.report.page.facts import FORMAT, as_json, facts_of
from kedge.report.page.folders import read
from kedge.report.page.wording import CLOSE, OPEN
from kedge.runs.result import Result
from kedge.runs.targets import write_target

HERE = Path(__file__).parent
VENDOR = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
SCRIPTS = ("base.js", "curves.js", "views.js", "sheets.js")
What = str | Path | Result | Iterable[str | Path | Result]
#: Keys of a group that its charts read.
CHARTED = (
    "metric", "runs", "base", "columns", "curves", "classes", "clients", "partition", "objective",
    "target", "gains",
)  # fmt: skip


def write_page(facts: Mapping[str, Any], path: str | Path) -> Path:
    """Write a page of facts.

    Raises:
        KedgeError: the file cannot be written.
    """
    target = Path(path)
    content = render(facts).encode()
    try:
        make_folder(target.parent)
    except OSError as error:
        raise KedgeError(f"{target} cannot be written: {error.strerror or error}") from None
    write_target(target, content)
    return target


def report(what: What, path: str | Path, title: str = "") -> Path:
    """Read runs and write their page; see :func:`kedge.write_report`."""
    return write_page(facts_of(read(what), title), path)


def write_sheets(sheets: Sequence[Sheet], path: str | Path, title: str = "Diagnosis") -> Path:
    """Write a page of diagnoses alone, as ``kedge diagnose -o FILE.html`` does."""
    facts = {
        "kind": "diagnosis",
        "title": title,
        "sheets": sheet_facts([("", sheet) for sheet in sheets]),
        "commands": list(dict.fromkeys(sheet.command for sheet in sheets if sheet.command)),
        "date": next((sheet.date[:10] for sheet in sheets if sheet.date), ""),
    }
    return write_page(empty() | facts, path)


def empty() -> dict[str, Any]:
    """The facts of a page with nothing on it."""
    lists = ("about", "notes", "groups", "sheets", "parts", "sends", "environments", "commands")
    return {
        "format": FORMAT, "kind": "", "title": "", "date": "", "kedge": __version__, "symbols": "",
        "resume": "",
        "settings": {"differing": [], "rows": [], "shared": []}, "paper": [],
    } | {key: [] for key in lists}  # fmt: skip


def render(facts: Mapping[str, Any]) -> str:
    """The page as text."""
    facts = empty() | dict(facts)
    own = "(() => {\n'use strict';\n" + "\n".join(map(_text, SCRIPTS)) + "\n})();"
    scripts = [*map(_text, VENDOR), own]
    return str(
        _environment()
        .get_template("page.html.j2")
        .render(
            **facts,
            style=_text("page.css"),
            scripts=scripts,
            hashes=[_hash(one) for one in scripts],
            data=embedded(payload(facts)),
        )
    )


def payload(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the charts of a page read."""
    groups = []
    for group in [*facts["groups"], *(table["group"] for table in facts["paper"])]:
        gains = [s["gain"] for s in group["standings"]]
        groups.append({key: (group | {"gains": gains}).get(key) for key in CHARTED})
    sheets = []
    for sheet in facts["sheets"]:  # images stand in the page itself
        charts = [c | {"rows": []} if c["kind"] == "images" else c for c in sheet["charts"]]
        sheets.append({"charts": charts})
    return as_json({"groups": groups, "sheets": sheets})


def embedded(value: Any) -> str:
    r"""JSON that may stand in a script element: no ``<`` in it, so that none can end the element.

    >>> embedded({"name": "</script>"})
    '{"name":"\\u003c/script>"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for sign in "<\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "template"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["marked"] = _marked
    environment.filters["breakable"] = _breakable
    environment.filters["is_png"] = lambda uri: str(uri).startswith("data:image/png;base64,")
    return environment


def _marked(text: str) -> str:
    """A sentence with its names in bold; everything in it is escaped."""
    pieces = re.split(f"{OPEN}(.*?){CLOSE}", text, flags=re.DOTALL)
    return "".join(
        f"<b>{_breakable(piece)}</b>" if i % 2 else escape(piece).replace(" %", "&nbsp;%")
        for i, piece in enumerate(pieces)
    )


def _breakable(text: str) -> str:
    """A name that may be broken after ``+`` and ``,``, escaped."""
    return escape(text).replace("+", "+<wbr>").replace(",", ",<wbr>")


@cache
def _text(name: str) -> str:
    folder = HERE if name.startswith("vendor/") else HERE / "template"
    return (folder / name).read_text(encoding="utf-8")


@cache
def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")
