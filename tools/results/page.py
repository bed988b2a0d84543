"""Fill the template of the page: tables, figures, and the numbers in its sentences."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from tools.results.facts import Facts, signed
from tools.results.figure import draw_curves
from tools.results.grand import grand_table, hold_in_all, leading, with_verdict

from kedge.reproduction import recipes
from kedge.reproduction.summary import Summary

TEMPLATE = "page.md.j2"
#: Pages below docs, and the templates beside the records that they are written from.
PAGES = {"results.md": TEMPLATE, "learn/choosing.md": "choosing.md.j2"}
METRICS = {"last": "last test", "best": "best test", "top5": "mean of the 5 best tests"}


def render(results: Path, draw: bool = True, template: str = TEMPLATE) -> str:
    """A page as Markdown; with ``draw`` its figures are written beside the records."""

    @cache
    def facts(name: str) -> Facts:
        return Facts(name, results)

    def figure(name: str, rows: list[str] | None = None) -> str:
        of = facts(name)
        if not of.has_runs:
            return ""
        path = results / f"{name}.svg"
        if draw:
            draw_curves(of, path, rows)
        return f"![{of.table.title}: test accuracy over rounds](results/{name}.svg)"

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(results),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )

    def evidence(name: str) -> Any:
        """A measurement that is no row of a table."""
        return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))

    def waiting() -> str:
        names = [name for name in recipes.all_names() if not facts(name).has_runs]
        return ", ".join(f"`{name}`" for name in names)

    environment.globals |= {
        "evidence": evidence,
        "at_best_rate": lambda name, method: at_best_rate(
            evidence("learning_rates_cpu")["runs"], name, method
        ),
        "rates": lambda: rates(evidence("learning_rates_cpu")["runs"]),
        "facts_quick": lambda name: Facts(name, results, "quick"),
        "quick": lambda name: quick_row(Facts(name, results, "quick")),
        "waiting": waiting,
        "facts": facts,
        "table": lambda name: markdown(facts(name)),
        "figure": figure,
        "grand_table": lambda name: grand_table(facts(name)),
        "leading": lambda name: leading(facts(name)),
        "with_verdict": lambda name, verdict: with_verdict(facts(name), verdict),
        "hold_in_all": lambda *names: hold_in_all([facts(name) for name in names]),
        "ahead_in_all": lambda *names: hold_in_all(
            [facts(name) for name in names], ("holds", "ahead in every seed")
        ),
        "source": lambda name: source(facts(name)),
        "seeds": lambda name, row: seeds(facts(name), row),
        "signed": signed,
        "number": lambda value: f"{value:.1f}",
    }
    return re.sub(r"\n{3,}", "\n\n", environment.get_template(template).render())


def markdown(of: Facts) -> str:
    """One row per row of the table that has runs."""
    shown = [s for s in of.summaries.values() if s.n]
    if not shown:
        return "*Not run yet.*"
    metric = METRICS[of.table.metric]
    heads = [
        "row", "paper", f"ours, {metric}", "difference", f"mean of last {of.table.tail}",
        "gain over base", "paper's gain", "gain, last tests", "tests ahead", "n", "rounds",
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cells(of, s)) + " |" for s in shown]
    if any(s.beside for s in shown):
        heads = "row", "mean of last tests on the common test set", "gain there"
        lines += ["", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        lines += [
            f"| `{s.row.name}` | {s.beside.written(1)} | {_gain(of, s, 'beside_gain')} |"
            for s in shown
            if s.beside
        ]
    missing = [s.row.name for s in of.summaries.values() if not s.n]
    if missing:
        lines += ["", "Not run yet: " + ", ".join(f"`{name}`" for name in missing) + "."]
    return "\n".join(lines)


def _cells(of: Facts, s: Summary) -> list[str]:
    paper = "" if s.row.paper is None else f"{s.row.paper:.1f}"
    paper += "" if s.row.paper_sd is None else f"±{s.row.paper_sd:.1f}"
    ahead, tests = of.ahead(s.row.name) if s.gain else (0, 0)
    return [
        f"`{s.row.name}`",
        paper,
        s.ours.written(1) if s.ours else "",
        "" if s.difference is None else f"{s.difference:+.1f}",
        s.tail.written(1) if s.tail else "",
        _gain(of, s, "gain"),
        "" if s.paper_gain is None else f"{s.paper_gain:+.1f}",
        _gain(of, s, "tail_gain"),
        f"{ahead} of {tests}" if tests else "",
        str(s.n),
        f"{s.rounds}" + ("" if s.rounds == s.total else f" of {s.total}"),
    ]


def _gain(of: Facts, s: Summary, what: str) -> str:
    return of.stat(s.row.name, what) if getattr(s, what) else ""


def seeds(of: Facts, row: str) -> str:
    """How many seeds a row has, in words; empty if it was not run."""
    n = of.summaries[row].n
    return "" if not n else "one seed" if n == 1 else f"{n} seeds"


def quick_row(of: Facts) -> str:
    """A quick form as one row of a table: its base, its method and the gain."""
    if not of.has_runs:
        return ""
    name = of.table.expect[0]
    ours, base = of.summaries[name], of.summaries[of.table.row(name).base]
    if ours.tail is None or base.tail is None:
        return ""
    seconds = sum(run.curve[-1][2] for run in of.runs)
    cells = [
        f"`{of.name}`", f"`{name}`", base.tail.written(1), ours.tail.written(1),
        _gain(of, ours, "tail_gain"), str(ours.n), f"{seconds:.0f}", of.table.note,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def rates(runs: list[dict[str, Any]]) -> str:
    """Quick forms by learning rate: the mean over seeds, and how many there are."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for run in runs:
        of = found.setdefault((run["table"], run["method"]), {})
        of.setdefault(run["lr"], []).append(run["mean_of_last"])
    lines = ["| form of | method | learning rate: mean of the last tests (n) |", "|---|---|---|"]
    for (name, method), by_rate in found.items():
        best = max(by_rate, key=lambda lr: sum(by_rate[lr]) / len(by_rate[lr]))
        cells = []
        for lr, values in sorted(by_rate.items()):
            text = f"{lr:g}: {sum(values) / len(values):.1f} ({len(values)})"
            cells.append(f"**{text}**" if lr == best else text)
        lines.append(f"| `{name}` | `{method}` | {', '.join(cells)} |")
    return "\n".join(lines)


def at_best_rate(runs: list[dict[str, Any]], name: str, method: str) -> float:
    """The mean over seeds at the learning rate that is best for a method."""
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        if (run["table"], run["method"]) == (name, method):
            by_rate.setdefault(run["lr"], []).append(run["mean_of_last"])
    return max(sum(values) / len(values) for values in by_rate.values())


def source(of: Facts) -> str:
    """Setting, seeds, device, date and command of a table, and what its rows note."""
    if not of.has_runs:
        return ""
    runs = of.runs
    devices = sorted({run.device for run in runs})
    torches = sorted({str(run.environment.get("torch", "unknown")) for run in runs})
    dates = sorted({run.date for run in runs if run.date})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "undated"
    names = sorted({run.recipe for run in runs})  # a row may be shared between tables
    folders = " and ".join(f"[results/{name}](results/{name})" for name in names)
    lines = [
        f"{of.table.place}. {', '.join(devices)}, torch {', '.join(torches)}, {span}. "
        f"`kedge reproduce {of.name}`, records in {folders}."
    ]
    notes = [of.table.note] if of.table.note else []
    notes += [f"`{s.row.name}`: {s.row.note}" for s in of.summaries.values() if s.n and s.row.note]
    notes += [
        f"`{s.row.name}`: not counted, since it has fewer rounds: {', '.join(s.shorter)}."
        for s in of.summaries.values() if s.shorter
    ]  # fmt: skip
    notes += [
        f"`{s.row.name}`: the loss is not finite: {', '.join(s.diverged)}. These seeds count with "
        "their last tests; gains are of the seeds that went furthest."
        for s in of.summaries.values() if s.diverged
    ]  # fmt: skip
    same: dict[str, list[str]] = {}
    for run in runs:
        # the page shows no seconds, so it need not say how they were taken
        note = " ".join(t for t in re.split(r"(?<=\.) ", run.note) if "seconds" not in t)
        if note:
            same.setdefault(note, []).append(f"`{run.row}`, seed {run.seed}")
    for note, names in same.items():
        notes.append(f"{'All runs' if len(names) == len(runs) else ', '.join(names)}: {note}")
    lines += [f"- {note}" for note in notes]
    return "\n".join([lines[0], "", *lines[1:]]).rstrip()
