"""What folders hold: a run, a comparison, a sweep, or several of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kedge.errors import DataError, KedgeError
from kedge.report.page.source import Source, of_result, read_run, setting_name, why_untested
from kedge.runs.compare import LISTING as COMPARISON
from kedge.runs.compare import TYPES
from kedge.runs.environment import CONFIG
from kedge.runs.listing import Listing
from kedge.runs.result import Result
from kedge.runs.sweep import LISTING as SWEEP


class Found(NamedTuple):
    """The runs to report on, what they are together, and what could not be read."""

    sources: list[Source]
    kind: str  # run, runs, comparison, sweep
    notes: list[str]


def read(what: str | Path | Result | Iterable[str | Path | Result]) -> Found:
    """The runs of folders and results.

    Raises:
        KedgeError: there is nothing to report on, or a folder holds no run.
    """
    items = [what] if isinstance(what, (str, Path, Result)) else list(what)
    found: list[Found] = []
    for item in items:
        if isinstance(item, Result):
            found.append(Found([of_result(item)], "run", []))
        else:
            found.append(_folder(Path(item)))
    sources = [source for one in found for source in one.sources]
    notes = [note for one in found for note in one.notes]
    if not sources:
        raise KedgeError(
            f"there is nothing to report yet: no run has a tested round. {' '.join(notes)}".strip()
        )
    if len(found) == 1:
        return Found(sources, found[0].kind, notes)
    return Found(_labelled(sources), "run" if len(sources) == 1 else "runs", notes)


def _folder(path: Path) -> Found:
    if (path / COMPARISON).is_file():
        return _listed(path, COMPARISON, "comparison")
    if (path / SWEEP).is_file():
        return _listed(path, SWEEP, "sweep")
    if (path / CONFIG).is_file():
        source = read_run(path)
        if source is None:
            return Found([], "run", [f"{path} {why_untested(path)}."])
        return Found([source], "run", [])
    if not path.is_dir():
        raise KedgeError(f"{path}: there is no such folder; give the folder of a run")
    if (path.parent / CONFIG).is_file():
        raise KedgeError(f"{path} is part of a run; give {path.parent}")
    markers = (CONFIG, COMPARISON, SWEEP)
    inside = sorted(
        {p.parent for marker in markers for p in path.glob(f"*/{marker}")}, key=_natural
    )
    if not inside:
        raise KedgeError(f"{path} holds no run; give the folder of a run, such as runs/digits-1")
    sources: list[Source] = []
    notes: list[str] = []
    for folder in inside:
        try:
            one = _folder(folder)
        except KedgeError as error:  # of many runs, one may be damaged
            notes.append(f"{error}. It is left out.")
            continue
        sources += one.sources
        notes += one.notes
    return Found(_labelled(sources), "runs", notes)


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key that sorts ``run-2`` before ``run-10``."""
    return [
        (int(piece), "") if piece.isdigit() else (0, piece)
        for piece in re.split(r"(\d+)", path.name)
    ]


def _listed(path: Path, name: str, kind: str) -> Found:
    types: dict[str, type] = TYPES if kind == "comparison" else {"values": dict}
    sources, notes = [], []
    for row in Listing(path, name, kind).read(types):
        label = row.get("name") or setting_name(row["values"])
        folder = path / row["folder"]
        if not folder.resolve().is_relative_to(path.resolve()):
            raise DataError(f"{path / name} is damaged: {row['folder']!r} is outside of {path}")
        if not (folder / CONFIG).is_file():
            notes.append(f"{label} has not started.")
            continue
        source = read_run(folder, label, row.get("yardstick", ""))
        if source is None:
            notes.append(f"{label} {why_untested(folder)}.")
            continue
        sources.append(dataclasses.replace(source, values=row.get("values", {})))
    return Found(sources, kind, notes)


#: Settings that say how a run is computed, not what.
EXECUTION = ("engine", "device", "workers", "threads", "chunk", "compile", "state")


def _distinct(settings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    """How many of the settings differ in some keys."""
    return len({repr([one.get(key) for key in keys]) for one in settings})


def _labelled(sources: Sequence[Source]) -> list[Source]:
    """Names that differ: the method, then as many settings as it takes to tell equal methods
    apart, then the folder."""
    found = list(sources)
    names = [source.name for source in found]
    for name in {n for n in names if names.count(n) > 1}:
        same = [i for i, n in enumerate(names) if n == name]
        settings = [found[i].settings for i in same]
        keys: list[str] = []
        for key in (key for key in settings[0] if key not in EXECUTION):
            if _distinct(settings, [*keys, key]) > _distinct(settings, keys):
                keys.append(key)
        for i in same:
            more = [f"{k}={_written(found[i].settings.get(k))}" for k in keys if k != "method"]
            names[i] = f"{name} ({', '.join(more)})" if more else name
    for i, name in enumerate(names):
        folder = found[i].folder
        if names.count(name) > 1 and folder is not None:
            names[i] = f"{name} [{folder.name}]"
    before = list(names)
    for i, name in enumerate(before):
        if before.count(name) > 1:
            names[i] = f"{name} #{before[: i + 1].count(name)}"
    return [dataclasses.replace(s, name=n) for s, n in zip(found, names, strict=True)]


def _written(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(_written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
