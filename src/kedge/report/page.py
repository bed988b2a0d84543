"""The page of a report: all that it shows as plain data, and the page itself.

``--json`` writes the data, the template draws them with the vendored library and own scripts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kedge._version import __version__
from kedge.data.partition.grammar import aliases
from kedge.errors import KedgeError
from kedge.files import encoded, make_folder, write_target
from kedge.history import commands
from kedge.history.compare import ComparableRuns, Comparison, Row, compare, grouped, what_differs
from kedge.history.find import EXECUTION, Found, What, find
from kedge.history.read import DEFAULTS, PartInfo, describe_parts
from kedge.history.run import Run, Stat
from kedge.history.sheet import Sheet
from kedge.report import charts, tables
from kedge.report.mathtext import UnknownFormula, mathml, plain_doc, plain_formula
from kedge.report.text import CLOSE, OPEN, digits, name, size, unmarked
from kedge.report.verdict import Verdict, verdict

FORMAT = 1
COLOURS = 8  # of the palette, see shared.css
SHOWN = 8  # curves that are switched on at first
WEB = Path(__file__).parent / "web"
VENDOR = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
STYLES = ("shared.css", "page.css")
SCRIPTS = ("shared.js", "base.js", "curves.js", "views.js", "sheets.js")
#: Keys of a group that its charts read.
CHARTED = (
    "metric", "runs", "base", "columns", "curves", "classes", "clients", "partition", "objective",
    "target", "gains",
)  # fmt: skip


def facts_of(found: Found, title: str = "") -> dict[str, Any]:
    """The facts of a report on runs."""
    groups = grouped(found.runs)
    is_sweep = found.kind == "sweep"
    compared = [compare(group.runs, is_sweep) for group in groups]
    every = [run for group in groups for run in group.runs]
    notes = [*found.notes, *(f"{name(run.name)}: {note}" for run in every for note in run.notes)]
    if len(groups) > 1:
        notes.insert(
            0,
            f"These {len(every)} runs fall into {len(groups)} groups that cannot be compared with "
            f"each other, since they differ in {what_differs(groups)}. Each group has its own "
            "table.",
        )
    has_waiting = any("not started" in note for note in found.notes)
    return {
        "format": FORMAT,
        "kedge": __version__,
        "kind": found.kind,
        "title": title or _title(found),
        "about": _about(every),
        "date": time.strftime("%Y-%m-%d"),
        "notes": notes,
        "groups": [
            _group(group, rows, len(groups), len(every), is_sweep)
            for group, rows in zip(groups, compared, strict=True)
        ],
        "sheets": charts.shared_sheets(every),
        "parts": parts_of(every),
        "sends": sends(every),
        "symbols": SYMBOLS,
        "settings": _settings(every),
        "environments": _environments(every),
        "commands": commands.repeat(every, found.kind),
        "resume": commands.resume(every, found.kind, has_waiting),
    }


def _group(
    group: ComparableRuns, found: Comparison, count: int, runs: int, is_sweep: bool
) -> dict[str, Any]:
    clients, classes = charts.by_client(found.rows, found.base), charts.by_class(found.rows)
    columns = charts.columns_of(group.runs)
    metric = group.first.measure
    return {
        "title": _group_title(group) if count > 1 else "",
        "verdict": verdict(found, clients["summary"] if clients else None, is_sweep, classes),
        "metric": {
            "name": metric.title,
            "unit": metric.unit,
            "decimals": metric.decimals,
            "higher": metric.higher_is_better,
        },
        "runs": _runs(found),
        "base": found.base,
        "table": tables.columns_of(found),
        "note": charts.test_sizes(found.first) + tables.notes_of(found) + _colours(found),
        "columns": columns,
        "curves": charts.curves_of(group.runs, columns, len(group.runs) / runs),
        "classes": classes,
        "clients": clients,
        "partition": charts.partition(group.runs),
        "objective": charts.objective(found.rows),
        "target": float(group.first.settings.get("target") or 0.0),
        "standings": [_numbers(row) for row in found.rows],
    }


def _colours(found: Comparison) -> list[str]:
    coloured = any(row.p is not None for row in found.rows)
    return ["Green and red are gains and losses with p below 0.05."] if coloured else []


def _runs(found: Comparison) -> list[dict[str, Any]]:
    """Names, colours and dashes. The first and the best runs have the plain colours, and are shown
    at first."""
    rows, words = found.rows, tables.marks_of(found)
    shown = {id(row) for row in found.ranked[: SHOWN - 1]} | {id(found.first)}
    shown |= {id(row) for row in rows if row.run.yardstick}
    shown = shown if len(rows) > SHOWN + 2 else {id(row) for row in rows}
    order = sorted(rows, key=lambda row: id(row) not in shown)
    place = {id(row): i for i, row in enumerate(order)}
    return [
        {
            "name": row.run.name,
            "mark": word,
            "colour": place[id(row)] % COLOURS,
            "dash": place[id(row)] // COLOURS % 3,
            "on": id(row) in shown,
            "yardstick": bool(row.run.yardstick),
            "best": row is found.leader and len(rows) > 1,
            "status": row.run.status,
        }
        for row, word in zip(rows, words, strict=True)
    ]


def _numbers(row: Row) -> dict[str, Any]:
    """The numbers of a run, for ``--json``."""

    def stat(value: Stat | None) -> Any:
        return None if value is None else asdict(value)

    run = row.run
    return {
        "name": run.name,
        "method": run.method,
        "status": run.status,
        "round": run.tested_round,
        "seeds": [seed.number for seed in run.counting],
        "partition_hash": [seed.partition_hash for seed in run.counting],
        "headline": run.headline,
        "last": stat(run.last),
        "best": stat(run.best),
        "validation": stat(run.validation),
        "chosen": stat(run.chosen),
        "global": stat(run.global_last if run.headline != "global" else None),
        "unseen": stat(run.unseen),
        "beside": {key: stat(value) for key, value in run.beside().items()},
        "rounds_to": run.to_target,
        "gain": row.gain._asdict() if row.gain else None,
        "p_holm": row.p,
        "mb_up": run.mb_up,
        "mb_down": run.mb_down,
        "seconds": run.seconds,
        "yardstick": run.yardstick,
        "folder": str(run.folder) if run.folder else None,
    }


def _title(found: Found) -> str:
    data = list(dict.fromkeys(_data(s) for s in found.runs))
    where = data[0] if len(data) == 1 else f"{len(data)} datasets"
    if found.kind == "comparison":
        n = sum(not s.yardstick for s in found.runs)
        return f"{n} methods on {where}" if n > 1 else f"{found.runs[0].name} on {where}"
    if found.kind == "sweep":
        keys = list(found.runs[0].values)
        return f"Sweep of {' and '.join(keys)} on {where}"
    if len(found.runs) == 1:
        return f"{found.runs[0].name} on {where}"
    same = all(s.name == s.method for s in found.runs)
    return f"{len(found.runs)} {'methods' if same else 'runs'} on {where}"


def _data(run: Run) -> str:
    text = str(run.settings["data"])
    if text == "own":
        return "own data"
    return text.split("(")[0].rstrip("/").rsplit("/", 1)[-1] or text


def _about(runs: Sequence[Run]) -> list[str]:
    """What all runs have in common, in a few words."""
    found = []
    clients = {len(s.clients.names) for run in runs for s in run.seeds if s.clients}
    if len(clients) == 1:
        found.append(f"{clients.pop()} clients")
    drawn = {_drawn(run) for run in runs}
    if len(drawn) == 1 and drawn != {""}:
        found.append(f"partition {drawn.pop()}")
    for key, one, many in (("rounds", "round", "rounds"), ("seeds", "seed", "seeds")):
        values = {repr(s.settings[key]) for s in runs}
        if len(values) == 1:
            value = runs[0].settings[key]
            n = value if key == "rounds" else len(value)
            found.append(f"{n} {one if n == 1 else many}")
    devices = {str(s.environment.get("device", "")) for s in runs} - {""}
    if len(devices) == 1:
        found.append(devices.pop())
    return found


def _drawn(run: Run) -> str:
    """What the partition was drawn from; ``auto`` is told by its file."""
    text = str(run.settings["partition"])
    if text != "auto":
        return text
    name = next((seed.partition for seed in run.seeds if seed.partition), "")
    for short, long in aliases.items():
        name = f"{short}{name[len(long) :]}" if name.startswith(f"{long}(") else name
    return name


def _group_title(group: ComparableRuns) -> str:
    s = group.first.settings
    words = [_data(group.first), f"partition {_drawn(group.first)}"]
    words += [f"{s['clients']} clients"] if s["clients"] else []
    words += [f"split {s['split']}"] if s["split"] != "auto" else []
    return ", ".join([*words, group.first.measure.title])


def _settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Settings in which the runs differ, then all; those that are not defaults are marked."""
    keys = [key for key in DEFAULTS if key in runs[0].settings]
    differing = [key for key in keys if len({repr(s.settings.get(key)) for s in runs}) > 1]
    same = [key for key in keys if key not in differing]
    if all(s.name == s.method or s.yardstick for s in runs):
        differing = [key for key in differing if key != "method"]  # the names say it
    shared = [
        {
            "key": key,
            "value": _written(runs[0].settings[key]),
            "changed": runs[0].settings[key] != _default(key),
            "how": key in EXECUTION,
        }
        for key in same
    ]
    return {
        "differing": differing,
        "rows": [
            {"name": s.name, "values": [_written(s.settings.get(k)) for k in differing]}
            for s in runs
        ]
        if differing
        else [],
        "shared": shared,
    }


def _default(key: str) -> Any:
    value = DEFAULTS[key]
    return list(value) if isinstance(value, tuple) else value


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_written, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _environments(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Versions, device and execution; runs with the same ones are named together."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        how = run.environment.get("how")
        rows = {k: v for k, v in run.environment.items() if k not in ("how", "loaded")}
        rows |= {f"how: {k}": v for k, v in how.items() if v} if isinstance(how, dict) else {}
        text = {key: _written(value) for key, value in rows.items()}
        found.setdefault(repr(text), {"runs": [], "rows": text})["runs"].append(run.name)
    return [one for one in found.values() if one["rows"]]


def as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as plain JSON; numbers that are not finite are null, sentences without marks."""

    def clean(value: Any) -> Any:
        if isinstance(value, Verdict):
            return clean({"lead": value.lead, "more": value.more, "warnings": value.warnings})
        if isinstance(value, tables.Column):
            return clean({k: v for k, v in value._asdict().items() if k != "rank"})
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return clean(value._asdict())
        if isinstance(value, Mapping):
            return {str(key): clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        if isinstance(value, str):
            return unmarked(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return dict(clean(facts))


# -- methods ---------------------------------------------------------------------------------------

#: Symbols of the formulas of what parts send.
SYMBOLS = (
    "P: parameters that travel, W and B: all parameters and buffers, H: those of the head, E: the "
    "part's own, F: features, C: outputs, X: inputs, N: clients, R: rows of a batch"
)


def parts_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The parts of some runs, each once: what it does, its docstring as HTML."""
    return _shown({run.method: parts_in(run) for run in runs})


def parts_of_methods(methods: Iterable[str]) -> list[dict[str, Any]]:
    """The same for methods by their text."""
    return _shown({method: _known_parts(method) for method in methods})


def _shown(parts: Mapping[str, Sequence[PartInfo] | None]) -> list[dict[str, Any]]:
    known: dict[str, PartInfo] = {}
    for part in (part for own in parts.values() for part in own or ()):
        known.setdefault(part.name, part)
    found = [
        {"name": part.name, "title": _title_of(part.doc), "html": html_doc(_body(part.doc))}
        for part in known.values()
    ]
    unknown = [method for method, own in parts.items() if own is None]
    return found + [
        {"name": method, "title": "its parts are not known here", "html": ""} for method in unknown
    ]


def parts_in(run: Run) -> Sequence[PartInfo] | None:
    """The parts of a run, as its folder describes them, else as they are known here; None where
    they are not."""
    return run.parts or _known_parts(run.method)


def _known_parts(method: str) -> Sequence[PartInfo] | None:
    from kedge.core.method import parse  # imports torch

    try:
        return describe_parts(parse(method))
    except KedgeError:  # a part of a file that is not loaded here
        return None


def _title_of(doc: str) -> str:
    """The first paragraph of a docstring, without its full stop."""
    return plain_doc(doc.partition("\n\n")[0]).rstrip(".")


def _body(doc: str) -> str:
    """A docstring without its first paragraph, the title."""
    return doc.partition("\n\n")[2] or doc


def sends(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What each method sends: the declared formulas of its parts, and the bytes of a round."""
    rows, base = [], None
    seen: set[tuple[str, float, float]] = set()
    for run in runs:
        if run.yardstick:
            continue
        lengths = [len(seed.columns) for seed in run.counting]
        rounds = max(1, round(sum(lengths) / max(1, len(lengths))))
        up, down = run.mb_up / rounds, run.mb_down / rounds
        base = base or (up + down)
        key = (run.method.split("(")[0], round(up, 9), round(down, 9))
        if run.values and key in seen:  # settings of a sweep that send the same
            continue
        seen.add(key)
        rows.append(
            {
                "method": run.method if run.values else run.name,
                "up": size(1e6 * up),
                "down": size(1e6 * down),
                "ratio": f"{digits((up + down) / base)}×" if base else "",
                "up_mb": up,
                "down_mb": down,
                **_declared(run),
            }
        )
    return rows


def _declared(run: Run) -> dict[str, Any]:
    parts = parts_in(run)
    if parts is None:
        return {"extra_up": "unknown", "extra_down": "unknown", "keeps": "unknown", "sums": None}
    return {
        "extra_up": _formula([(p.name, p.uploads) for p in parts]),
        "extra_down": _formula([(p.name, p.sends) for p in parts]),
        "keeps": _formula([(p.name, p.keeps) for p in parts]),
        "sums": all(p.sums_only for p in parts),
    }


def _formula(pairs: Sequence[tuple[str, str]]) -> str:
    some = [(name, text) for name, text in pairs if text != "0"]
    if not some:
        return "nothing"
    return some[0][1] if len(some) == 1 else ", ".join(f"{name}: {text}" for name, text in some)


def html_doc(doc: str) -> str:
    """A docstring as HTML: paragraphs, formulas as MathML, code and emphasis."""
    paragraphs = [" ".join(p.split()) for p in doc.split("\n\n")]
    return "".join(f"<p>{_inline(p)}</p>" for p in paragraphs if p)


def _inline(text: str) -> str:
    pieces = re.split(r"(:math:`[^`]*`|``[^`]*``)", text)
    return "".join(_piece(piece) for piece in pieces)


def _piece(text: str) -> str:
    if text.startswith(":math:`"):
        tex = text[len(":math:`") : -1]
        try:
            return mathml(tex)
        except UnknownFormula:
            return f'<span class="formula">{escape(plain_formula(tex))}</span>'
    if text.startswith("``"):
        return f"<code>{escape(text.strip('`'))}</code>"
    linked = re.sub(
        r"arXiv:(\d{4}\.\d{4,5})",
        r'<a href="https://arxiv.org/abs/\1" rel="noreferrer">arXiv:\1</a>',
        escape(text, quote=False),
    )
    return re.sub(r"\*(\w[\w /]*)\*", r"<em>\1</em>", linked)


# -- the page --------------------------------------------------------------------------------------


def write_page(facts: Mapping[str, Any], path: str | Path) -> Path:
    """Write a page of facts.

    Raises:
        KedgeError: the file cannot be written.
    """
    target = Path(path)
    content = encoded(render(facts))
    try:
        make_folder(target.parent)
    except OSError as error:
        raise KedgeError(f"{target} cannot be written: {error.strerror or error}") from None
    write_target(target, content)
    return target


def report(what: What, path: str | Path, title: str = "") -> Path:
    """Read runs and write their page; see :func:`kedge.write_report`."""
    return write_page(facts_of(find(what), title), path)


def write_sheets(sheets: Sequence[Sheet], path: str | Path, title: str = "Diagnosis") -> Path:
    """Write a page of diagnoses alone, as ``kedge diagnose -o FILE.html`` does."""
    facts = {
        "kind": "diagnosis",
        "title": title,
        "sheets": charts.sheet_facts([("", sheet) for sheet in sheets]),
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
    page = str(
        _environment()
        .get_template("page.html.j2")
        .render(
            **facts,
            style="".join(map(_text, STYLES)),
            scripts=scripts,
            hashes=[_hash(one) for one in scripts],
            data=embedded(payload(facts)),
        )
    )
    return encoded(page).decode()


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
        loader=FileSystemLoader(WEB),
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
    return (WEB / name).read_text(encoding="utf-8")


@cache
def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")
