"""The commands that repeat or resume a run, to be copied."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from kedge.board.entry import ENVIRONMENT, FEDERATION, Entry
from kedge.board.files import Reader

OWN_DATA = "own"  # of kedge.fit: no command has them
LOGGERS = ("csv", "tensorboard", "mlflow", "wandb")


def commands(entry: Entry, title: str, reader: Reader) -> dict[str, str]:
    """``repeat`` and, where it is not finished, ``resume``.

    Args:
        entry: the run.
        title: the folder of the board, as it was typed.
        reader: reads the files that the run had loaded.
    """
    path = Path(title) / entry.relative
    loaded = _loaded(reader.json(entry.path / ENVIRONMENT).get("loaded"))
    if entry.config["data"] == OWN_DATA:
        again = f"kedge.fit(model, clients, out={str(path)!r}, resume=True)"
        return {"resume": again} if entry.state != "finished" else {}
    if entry.kind == "reproduce":
        command = _reproduce(entry, title)
        return {"repeat": command} if command else {}
    kind = "flower run" if FEDERATION in entry.names else entry.kind
    command = kind if kind == "flower run" else "run"
    found = {"repeat": f"kedge {command} {shlex.quote(str(path / 'config.toml'))}{loaded}"}
    if entry.state != "finished" and not entry.is_live:
        several = entry.kind in ("compare", "sweep")
        folder = shlex.quote(str(path.parent if several else path))
        log = ",".join(name for name in LOGGERS if f"log-{name}" in entry.names)
        again = f" --log {log}" if log else ""
        found["resume"] = f"kedge {kind} --out {folder} --resume{again}{loaded}"
    return found


def _loaded(files: Any) -> str:
    paths = [file.get("path") for file in files or () if isinstance(file, dict)]
    return "".join(f" --load {shlex.quote(p)}" for p in paths if isinstance(p, str))


def _reproduce(entry: Entry, title: str) -> str:
    """``RESULTS/.runs/PAPER/TABLE/ROW.seed0.full`` is made by one row of a table."""
    pattern = r"(?:(?P<results>.*)/)?\.runs/(?P<home>.+)/(?P<row>[^/]+)\.seed(\d+)\.(\w+)$"
    found = re.fullmatch(pattern, (Path(title).absolute() / entry.relative).as_posix())
    if found is None:
        return ""
    results, home, row, seed, scale = found.groups()
    words = ["kedge", "reproduce", home, "--rows", row, "--seeds", seed]
    words += [] if scale == "full" else ["--scale", scale]
    return shlex.join([*words, "--results", results or "."])
