"""What folders hold: a run, a comparison, a sweep, or several of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kedge.errors import DataError, KedgeError
from kedge.history.compare import setting_name
from kedge.history.experiment import EXPERIMENT, KINDS, Experiment, kind_of
from kedge.history.folder import CONFIG
from kedge.history.read import read_run, why_untested
from kedge.history.run import Run

What = str | Path | Run | Iterable[str | Path | Run]
#: Settings that say how a run is computed, not what.
EXECUTION = ("engine", "device", "workers", "threads", "chunk", "compile", "state")


class Found(NamedTuple):
    """The runs in some places, what they are together, and what could not be read."""

    runs: list[Run]
    kind: str  # run, runs, comparison, sweep
    notes: list[str]


def find(what: What) -> Found:
    """The runs of folders; runs themselves are read from their folder, if they have one.

    Raises:
        KedgeError: there is no run with a tested round, or a folder holds no run.
    """
    items = [what] if isinstance(what, (str, Path, Run)) else list(what)
    found = [_of_run(i) if isinstance(i, Run) else _in_folder(Path(i)) for i in items]
    runs = [run for one in found for run in one.runs]
    notes = [note for one in found for note in one.notes]
    if not runs:
        raise KedgeError(
            f"there is nothing to report yet: no run has a tested round. {' '.join(notes)}".strip()
        )
    if len(found) == 1:
        return Found(runs, found[0].kind, notes)
    return Found(_labelled(runs), "run" if len(runs) == 1 else "runs", notes)


def _of_run(run: Run) -> Found:
    saved = None
    if run.folder is not None and (run.folder / CONFIG).is_file():
        saved = read_run(run.folder, run.name, run.yardstick)
    return Found([saved or run], "run", [])


def _in_folder(path: Path) -> Found:
    if kind := kind_of(path):
        return _listed(path, kind)
    if (path / CONFIG).is_file():
        run = read_run(path)
        return Found([run] if run else [], "run", [] if run else [f"{path} {why_untested(path)}."])
    markers = (CONFIG, EXPERIMENT, *(f"{kind}.json" for kind in KINDS))
    inside = sorted(
        {p.parent for marker in markers for p in path.glob(f"*/{marker}")}, key=_natural
    )
    if not inside:
        raise KedgeError(no_run(path))
    runs: list[Run] = []
    notes: list[str] = []
    for folder in inside:
        try:
            one = _in_folder(folder)
        except KedgeError as error:  # of many runs, one may be damaged
            notes.append(f"{error}. It is left out.")
            continue
        runs += one.runs
        notes += one.notes
    return Found(_labelled(runs), "runs", notes)


def no_run(path: Path) -> str:
    """Why a folder is not that of a run, and what to give instead."""
    if not path.is_dir():
        return f"{path}: there is no such folder; give the folder of a run, such as runs/digits-1"
    if (path.parent / CONFIG).is_file():
        return f"{path} is part of a run; give {path.parent}"
    if inside := sorted(p.parent.name for p in path.glob(f"*/{CONFIG}")):
        return f"{path} holds several runs; give one of them: {', '.join(inside)}"
    return f"{path} holds no run; give the folder of a run, such as runs/digits-1"


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key that sorts ``run-2`` before ``run-10``."""
    return [
        (int(piece), "") if piece.isdigit() else (0, piece)
        for piece in re.split(r"(\d+)", path.name)
    ]


def _listed(path: Path, kind: str) -> Found:
    runs, notes, experiment = list[Run](), list[str](), Experiment(path, kind)
    for row in experiment.read():
        label, folder = row.get("name") or setting_name(row["values"]), path / row["folder"]
        if not folder.resolve().is_relative_to(path.resolve()):
            raise DataError(f"{experiment.path} is damaged: {row['folder']!r} is outside of {path}")
        if not (folder / CONFIG).is_file():
            notes.append(f"{label} has not started.")
            continue
        run = read_run(folder, label, row.get("yardstick", ""), row.get("values"))
        if run is None:
            notes.append(f"{label} {why_untested(folder)}.")
        else:
            runs.append(run)
    return Found(runs, KINDS[kind], notes)


def _distinct(settings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    """How many of the settings differ in some keys."""
    return len({repr([one.get(key) for key in keys]) for one in settings})


def _labelled(runs: Sequence[Run]) -> list[Run]:
    """Names that differ: the method, then as many settings as it takes to tell equal methods
    apart, then the folder."""
    found = list(runs)
    names = [run.name for run in found]
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
