"""All that a page shows, as plain data: what ``--json`` writes, and what the template draws."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kedge._version import __version__
from kedge.data.partition.grammar import aliases
from kedge.report.page import commands, curves, methods, views
from kedge.report.page.diagnoses import shared_sheets
from kedge.report.page.folders import EXECUTION, Found
from kedge.report.page.groups import Group, grouped, what_differs
from kedge.report.page.source import DEFAULTS, Source
from kedge.report.page.standings import Standing, leader, ranked, standings
from kedge.report.page.table import marks, table
from kedge.report.page.verdict import Verdict, verdict
from kedge.report.page.wording import name, plain

FORMAT = 1
COLOURS = 8  # of the palette, see page.css
SHOWN = 8  # curves that are switched on at first


def facts_of(found: Found, title: str = "") -> dict[str, Any]:
    """The facts of a report on runs."""
    groups = grouped(found.sources)
    runs = sum(len(group.sources) for group in groups)
    is_sweep = found.kind == "sweep"
    drawn = [_group(group, len(groups), runs, is_sweep) for group in groups]
    standing = [s for group in groups for s in standings(group)[0]]
    every = [source for group in groups for source in group.sources]
    notes = list(found.notes)
    notes += [f"{name(s.name)}: {note}" for s in every for note in s.notes]
    if len(groups) > 1:
        notes.insert(
            0,
            f"These {runs} runs fall into {len(groups)} groups that cannot be compared with each "
            f"other, since they differ in {what_differs(groups)}. Each group has its own table.",
        )
    names = list(dict.fromkeys(s.method for s in every))
    return {
        "format": FORMAT,
        "kind": found.kind,
        "title": title or _title(found, groups),
        "about": _about(every),
        "date": time.strftime("%Y-%m-%d"),
        "kedge": __version__,
        "notes": notes,
        "groups": drawn,
        "sheets": shared_sheets(every),
        "parts": methods.parts_of(names),
        "sends": methods.sends(standing),
        "symbols": methods.SYMBOLS,
        "settings": _settings(every),
        "environments": _environments(every),
        "commands": commands.commands(every, found.kind),
        "resume": commands.resume(every, found.kind, any("not started" in n for n in found.notes)),
    }


def _group(group: Group, count: int, runs: int, is_sweep: bool) -> dict[str, Any]:
    found, base = standings(group, is_sweep)
    sources, first = group.sources, group.first
    clients = views.by_client(found, base)
    classes = views.by_class(found)
    said = verdict(found, clients["summary"] if clients else None, is_sweep, classes)
    columns = curves.columns_of(sources)
    metric = first.metric
    return {
        "title": _group_title(group) if count > 1 else "",
        "verdict": said,
        "metric": {
            "name": metric.title,
            "unit": metric.unit,
            "decimals": metric.decimals,
            "higher": metric.higher_is_better,
        },
        "runs": _runs(found, base),
        "base": base,
        "table": table(found, base),
        "note": _note(found, base),
        "columns": columns,
        "curves": curves.curves_of(sources, columns, len(sources) / runs),
        "classes": classes,
        "clients": clients,
        "partition": views.partition(sources),
        "objective": views.objective(found),
        "target": float(first.settings.get("target") or 0.0),
        "standings": [_plain_standing(s) for s in found],
    }


def _runs(found: Sequence[Standing], base: int) -> list[dict[str, Any]]:
    """Names, colours and dashes. The first and the best runs have the plain colours, and are shown
    at first."""
    words, best = marks(found, base), leader(found)
    shown = {id(s) for s in ranked(found)[: SHOWN - 1]} | {id(found[base])}
    shown |= {id(s) for s in found if s.source.yardstick}
    shown = shown if len(found) > SHOWN + 2 else {id(s) for s in found}
    order = [s for s in found if id(s) in shown] + [s for s in found if id(s) not in shown]
    place = {id(s): i for i, s in enumerate(order)}
    return [
        {
            "name": s.source.name,
            "mark": word,
            "colour": place[id(s)] % COLOURS,
            "dash": place[id(s)] // COLOURS % 3,
            "on": id(s) in shown,
            "yardstick": bool(s.source.yardstick),
            "best": s is best and len(found) > 1,
            "status": s.status,
        }
        for s, word in zip(found, words, strict=True)
    ]


def _plain_standing(s: Standing) -> dict[str, Any]:
    """The numbers of a run, for ``--json``."""

    def stat(value: Any) -> Any:
        return None if value is None else asdict(value)

    return {
        "name": s.source.name,
        "method": s.source.method,
        "status": s.status,
        "round": s.round,
        "seeds": [seed.number for seed in s.seeds],
        "partition_hash": [seed.partition_hash for seed in s.seeds],
        "headline": s.source.headline,
        "last": stat(s.last),
        "best": stat(s.best),
        "validation": stat(s.validation),
        "chosen": stat(s.chosen),
        "global": stat(s.globally),
        "unseen": stat(s.unseen),
        "beside": {key: stat(value) for key, value in s.beside.items()},
        "rounds_to": list(s.to_target),
        "gain": s.gain._asdict() if s.gain else None,
        "p_holm": s.p,
        "mb_up": s.mb_up,
        "mb_down": s.mb_down,
        "seconds": s.source.seconds,
        "yardstick": s.source.yardstick,
        "folder": str(s.source.folder) if s.source.folder else None,
    }


def _title(found: Found, groups: Sequence[Group]) -> str:
    data = list(dict.fromkeys(_data(s) for s in found.sources))
    where = data[0] if len(data) == 1 else f"{len(data)} datasets"
    if found.kind == "comparison":
        n = sum(not s.yardstick for s in found.sources)
        return f"{n} methods on {where}" if n > 1 else f"{found.sources[0].name} on {where}"
    if found.kind == "sweep":
        keys = list(found.sources[0].values)
        return f"Sweep of {' and '.join(keys)} on {where}"
    if len(found.sources) == 1:
        return f"{found.sources[0].name} on {where}"
    same = all(s.name == s.method for s in found.sources)
    return f"{len(found.sources)} {'methods' if same else 'runs'} on {where}"


def _data(source: Source) -> str:
    text = str(source.settings["data"])
    if text == "own":
        return "own data"
    return text.split("(")[0].rstrip("/").rsplit("/", 1)[-1] or text


def _about(sources: Sequence[Source]) -> list[str]:
    """What all runs have in common, in a few words."""
    found = []
    clients = {len(s.clients.names) for one in sources for s in one.seeds if s.clients}
    if len(clients) == 1:
        found.append(f"{clients.pop()} clients")
    drawn = {_drawn(source) for source in sources}
    if len(drawn) == 1 and drawn != {""}:
        found.append(f"partition {drawn.pop()}")
    for key, one, many in (("rounds", "round", "rounds"), ("seeds", "seed", "seeds")):
        values = {repr(s.settings[key]) for s in sources}
        if len(values) == 1:
            value = sources[0].settings[key]
            n = value if key == "rounds" else len(value)
            found.append(f"{n} {one if n == 1 else many}")
    devices = {str(s.environment.get("device", "")) for s in sources} - {""}
    if len(devices) == 1:
        found.append(devices.pop())
    return found


def _drawn(source: Source) -> str:
    """What the partition was drawn from; ``auto`` is told by its file."""
    text = str(source.settings["partition"])
    if text != "auto":
        return text
    name = next((seed.partition for seed in source.seeds if seed.partition), "")
    for short, long in aliases.items():
        name = f"{short}{name[len(long) :]}" if name.startswith(f"{long}(") else name
    return name


def _group_title(group: Group) -> str:
    s = group.first.settings
    words = [_data(group.first), f"partition {_drawn(group.first)}"]
    words += [f"{s['clients']} clients"] if s["clients"] else []
    words += [f"split {s['split']}"] if s["split"] != "auto" else []
    return ", ".join([*words, group.first.metric.title])


def _note(found: Sequence[Standing], base: int) -> list[str]:
    """What the numbers of the table are of."""
    lines = []
    first = found[base].source
    if any(s.source.headline != "global" for s in found):
        lines.append(
            "Of clients: the model that each client would use, its own or the global one, on its "
            "held-out samples, mean over clients."
        )
    lines += views.test_sizes(found[base]) + views.without_value(found[base])
    if len(found) > 1:
        lines.append(
            f"Gains over {first.name} are paired by seed: both have the same partitions, cohorts "
            "and initial weights."
        )
    if any(s.p is not None for s in found):
        lines.append("Green and red are gains and losses with p below 0.05.")
    if any(s.last.n == 1 for s in found):
        lines.append("One seed has no spread, no interval and no p-value.")
    return lines


def _settings(sources: Sequence[Source]) -> dict[str, Any]:
    """Settings in which the runs differ, then all; those that are not defaults are marked."""
    keys = [key for key in DEFAULTS if key in sources[0].settings]
    differing = [key for key in keys if len({repr(s.settings.get(key)) for s in sources}) > 1]
    same = [key for key in keys if key not in differing]
    if all(s.name == s.method or s.yardstick for s in sources):
        differing = [key for key in differing if key != "method"]  # the names say it
    shared = [
        {
            "key": key,
            "value": _written(sources[0].settings[key]),
            "changed": sources[0].settings[key] != _default(key),
            "how": key in EXECUTION,
        }
        for key in same
    ]
    return {
        "differing": differing,
        "rows": [
            {"name": s.name, "values": [_written(s.settings.get(k)) for k in differing]}
            for s in sources
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


def _environments(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Versions, device and execution; runs with the same ones are named together."""
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        how = source.environment.get("how")
        rows = {k: v for k, v in source.environment.items() if k not in ("how", "loaded")}
        rows |= {f"how: {k}": v for k, v in how.items() if v} if isinstance(how, dict) else {}
        text = {key: _written(value) for key, value in rows.items()}
        found.setdefault(repr(text), {"runs": [], "rows": text})["runs"].append(source.name)
    return [one for one in found.values() if one["rows"]]


def as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as plain JSON; numbers that are not finite are null, sentences without marks."""

    def clean(value: Any) -> Any:
        if isinstance(value, Verdict):
            return clean({"lead": value.lead, "more": value.more, "warnings": value.warnings})
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return clean(value._asdict())
        if isinstance(value, Mapping):
            return {str(key): clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        if isinstance(value, str):
            return plain(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return dict(clean(facts))
