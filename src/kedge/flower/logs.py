"""Logs of a federation on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kedge.errors import KedgeError, UnknownName
from kedge.flower.apps import read_journal
from kedge.flower.local import with_names
from kedge.flower.spec import SUPERLINK, Spec, option

BLOCK = 1 << 16


def log_lines(folder: Path, name: str, count: int) -> Iterator[str]:
    """The last lines of a log.

    Args:
        folder: of the federation.
        name: a member (its own log and that of its SuperNode), ``superlink``, ``supervisor``, or
            empty: the newest run.
        count: lines of each file, at most.

    Raises:
        KedgeError: there is no such log.
    """
    names = [node.name for node in Spec.load(folder).nodes]
    logs = folder / "logs"
    if not name:
        yield from _newest_run(folder, count)
        return
    if name not in (*names, SUPERLINK, "supervisor"):
        raise UnknownName("log", name, [*names, SUPERLINK, "supervisor"])
    files = {SUPERLINK: [logs / f"{SUPERLINK}.txt"], "supervisor": [folder / "supervisor.txt"]}
    own = [
        logs / f"{name}.txt",
        logs / f"member-{name}.txt",
        folder / "nodes" / name / "state/log.txt",
    ]
    for path in files.get(name, own):
        if path.exists() and path.stat().st_size:
            yield f"== {path}"
            yield from tail(path, count)


def tail(path: Path, count: int) -> list[str]:
    """The last lines of a file, without reading all of it."""
    with path.open("rb") as file:
        place = file.seek(0, 2)
        content = b""
        while place and content.count(b"\n") <= count:
            step = min(BLOCK, place)
            place -= step
            file.seek(place)
            content = file.read(step) + content
    return content.decode("utf-8", errors="replace").splitlines()[-count:]


def _newest_run(folder: Path, count: int) -> Iterator[str]:
    journals = sorted((folder / "journals").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not journals:
        raise KedgeError(f"there is no run yet; start one with: kedge flower run{option(folder)}")
    lines = []
    for entry in read_journal(journals[-1]):
        if "line" in entry:
            lines.append(str(entry["line"]))
        elif "end" in entry:
            lines.append(f"{entry['end']}{': ' if 'text' in entry else ''}{entry.get('text', '')}")
    yield from (with_names(folder, line) for line in lines[-count:])
