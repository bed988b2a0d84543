"""The commands that repeat runs, from their settings."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.history.read import DEFAULTS
from kedge.history.run import Run
from kedge.settings import format_value


def repeat(runs: Sequence[Run], kind: str) -> list[str]:
    """One command that repeats all runs where there is one, otherwise one per run; none for runs
    from Python with data of their own."""
    runs = [s for s in runs if s.settings["data"] != "own"]
    if not runs:
        return []
    is_remote = any(s.is_remote for s in runs)
    if kind in ("comparison", "runs") and len(runs) > 1 and not is_remote:
        methods = [s for s in runs if not s.yardstick]
        same = [_given(s.settings, ("method", "split", "personal")) for s in methods]
        distinct = len({s.method for s in methods}) == len(methods)
        if methods and distinct and all(one == same[0] for one in same):
            words = [shlex.quote(s.method) for s in methods]
            pooled = ["--pooled"] if len(methods) < len(runs) else []
            own = _given(methods[0].settings, ("method",))
            if own.get("personal") and not _asked_personal(methods):
                own.pop("personal")
            return [_joined("kedge compare", *words, *pooled, *_flags(own), *_load(methods[0]))]
    if kind == "sweep" and (line := _sweep(runs)):
        return [line]
    return list(dict.fromkeys(_run(run) for run in runs if not run.yardstick))


def resume(runs: Sequence[Run], kind: str, is_partial: bool) -> str:
    """The command that goes on with what is not finished; empty if there is nothing.

    ``is_partial``: whether runs of a comparison or a sweep have not started.
    """
    unfinished = [s for s in runs if s.folder is not None and not s.is_complete]
    unfinished = [s for s in unfinished if not s.diverged]
    first = runs[0]
    if first.folder is None or first.settings["data"] == "own" or not (unfinished or is_partial):
        return ""
    command = {"comparison": "compare", "sweep": "sweep"}.get(kind)
    if command is None:
        if len(unfinished) != 1:
            return ""
        words = "kedge flower run --out" if unfinished[0].is_remote else "kedge run --out"
        return _joined(words, _quoted(unfinished[0].folder), "--resume", *_load(first))
    root = _quoted(first.folder.parent)
    return _joined(f"kedge {command} --out", root, "--resume", *_load(first))


def _quoted(path: Path | None) -> str:
    return shlex.quote(str(path))


def _run(run: Run) -> str:
    if run.is_remote:  # its members have the data
        own = _given(run.settings, ("data", "partition", "split", "clients"))
        return _joined("kedge flower run", *_flags(own), *_load(run))
    return _joined("kedge run", *_flags(_given(run.settings)), *_load(run))


def _asked_personal(runs: Sequence[Run]) -> bool:
    """Whether ``--personal`` was asked for: a comparison sets it if one method is personal."""
    return all(s.headline != "personal" for s in runs)


def _sweep(runs: Sequence[Run]) -> str:
    """The command of a sweep whose settings are a full grid."""
    keys = list(runs[0].values)
    if not keys or any(list(s.values) != keys for s in runs):
        return ""
    axes = {key: list(dict.fromkeys(format_value(s.values[key]) for s in runs)) for key in keys}
    grid = {tuple(format_value(s.values[key]) for key in keys) for s in runs}
    if grid != set(itertools.product(*axes.values())):
        return ""
    swept = {key for key in keys if key in DEFAULTS}
    fields = {key.split(".")[0] for key in keys if "." in key}
    own = _given(runs[0].settings, tuple(swept))
    if fields and "method" in own:  # the swept fields are in the words
        methods = {_without_fields(s.method) for s in runs}
        if len(methods) != 1:
            return ""
        own["method"] = methods.pop()
    words = [shlex.quote(f"{key}={','.join(values)}") for key, values in axes.items()]
    return _joined("kedge sweep", *words, *_flags(own), *_load(runs[0]))


def _without_fields(method: str) -> str:
    """The parts of a method without their fields; only sums of plain calls are read."""
    depth, found = 0, []
    for sign in method:
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth == 0 and sign != ")":
            found.append(sign)
    return "".join(found)


def _given(settings: Mapping[str, Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings that differ from their defaults."""
    found = {}
    for key, value in settings.items():
        default = DEFAULTS.get(key)
        default = list(default) if isinstance(default, tuple) else default
        if key in DEFAULTS and key not in but and value != default:
            found[key] = value
    return found


def _flags(settings: Mapping[str, Any]) -> list[str]:
    words = []
    for key, value in settings.items():
        option = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{key.replace('_', '-')}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{option} {shlex.quote(text)}")
    return words


def _load(run: Run) -> list[str]:
    loaded = run.environment.get("loaded", [])
    paths = [one.get("path") for one in loaded if isinstance(one, dict)]
    return [f"--load {shlex.quote(str(path))}" for path in paths if path]


def _joined(*words: str) -> str:
    return " ".join(words)
