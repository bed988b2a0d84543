"""Start a run on a federation of this machine, follow it to its end, and read its logs.

The ServerApp writes a journal; it tells how the run goes and how it ended. If its process ends
without an end in the journal, it crashed, or the SuperLink did: the run can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import Interrupted, KedgeError, Paused, UnknownName
from kedge.federation.coordinator.rules import PAUSED, Rules
from kedge.files import create_file, make_folder
from kedge.flower.apps import STOP, flower_words, read_journal
from kedge.flower.project import write_app
from kedge.local.federation import (
    CONNECTION,
    SUPERLINK,
    FederationSpec,
    environment,
    flower,
    option,
    with_names,
)
from kedge.local.processes import is_open, is_running, read_processes
from kedge.settings import Config

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
    names = [node.name for node in FederationSpec.load(folder).nodes]
    logs = folder / "logs"
    if not name:
        yield from _newest_run(folder, count)
        return
    if name not in (*names, SUPERLINK, "supervisor"):
        raise UnknownName("log", name, [*names, SUPERLINK, "supervisor"])
    files = [
        logs / f"{name}.txt",
        logs / f"member-{name}.txt",
        folder / f"nodes/{name}/state/log.txt",
    ]
    for path in [folder / "supervisor.txt"] if name == "supervisor" else files:
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


POLL_S = 0.25
ENDS = {"paused": Paused, "stopped": Interrupted, "failed": KedgeError}
ROUND = re.compile(r"round \d+ of \d+:")
SHOWN = re.compile(rf"{ROUND.pattern}|{PAUSED} ")  # by `watch`, or by the error that follows
START_S = 120.0  # until the ServerApp must have started
SUBMIT_S = 120.0  # until a SuperLink that restarts must be there


@dataclass
class Submitted:
    """A run that was handed to the SuperLink.

    Attributes:
        number: Flower's number of it.
        journal: path of its journal.
        place: how much of the journal was read.
        pid: the process of its server; 0 before it has started.
    """

    number: str
    journal: Path
    place: int = 0
    pid: int = 0

    def stop(self) -> None:
        """Ask the server to stop after its round, or before it starts."""
        with contextlib.suppress(FileExistsError):
            create_file(Path(f"{self.journal}{STOP}"))


def submit(
    folder: Path,
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    rules: Rules | None = None,
    own: Sequence[str] = (),
    hint: str = "",
) -> Submitted:
    """Hand a run to the SuperLink of a federation.

    Args:
        folder: of the federation, see :mod:`kedge.local.federation`.
        config: settings of the run.
        out: folder of the run.
        resume: continue the run in ``out``.
        rules: patience and distrust.
        own: files with parts of one's own.
        hint: what to type to resume the run.

    Raises:
        KedgeError: the federation does not run, or Flower refuses the app.
    """
    spec = FederationSpec.load(folder)
    if not read_processes(folder)[0]:
        again = f"kedge flower up{option(folder)}"
        raise KedgeError(f"the federation in {folder} does not run; start it: {again}")
    scaling: Any = spec.scaling or None
    app = write_app(folder / "app", config, rules, scaling, "kedge", replace=True, own=own)
    journal = folder / "journals" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    make_folder(journal.parent, inside=folder)
    _wait_for_superlink(folder, spec.port)
    hint = hint or f"kedge flower run --out {out} --resume"
    told = {"out": str(out.resolve()), "journal": str(journal), "resume": resume, "hint": hint}
    run = Submitted("", journal)
    try:
        words = ("run", str(app), CONNECTION, "--run-config", flower_words(told))
        run.number = str(call(folder, *words).get("run-id", ""))
    except KeyboardInterrupt:
        run.stop()  # Flower may have taken the run
        raise
    return run


def call(folder: Path, *words: str) -> dict[str, Any]:
    """Run a command of Flower that answers in JSON.

    Raises:
        KedgeError: it failed, with what it said.
    """
    done = subprocess.run(
        [flower("flwr"), *words, "--format", "json"],
        env=os.environ | environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    start = done.stdout.find("{")
    try:
        found = json.loads(done.stdout[start:]) if start >= 0 else {}
    except ValueError:
        found = {}
    if done.returncode or not found or found.get("success") is False:
        said = found.get("error-message") or done.stderr.strip() or done.stdout.strip()
        raise KedgeError(f"flwr {words[0]} failed: {said}")
    return dict(found)


def follow(
    folder: Path,
    run: Submitted,
    hint: str,
    report: Callable[[str], None] | None = None,
    watch: Callable[[int, dict[str, Any]], Any] | None = None,
) -> None:
    """Wait until a run has ended.

    Args:
        folder: of the federation.
        run: what :func:`submit` returned.
        hint: what to type to resume.
        report: called with each line of the log.
        watch: called as ``watch(seed, record)`` after every round.

    Raises:
        Paused: too few members replied.
        Interrupted: someone asked for a stop.
        KedgeError: the run failed or crashed.
    """
    for entry in entries(folder, run, hint):
        for key in entry.keys() & {"line", "text"}:
            entry[key] = with_names(folder, str(entry[key]))
        if "line" in entry and report is not None:
            if not SHOWN.match(entry["line"]):
                report(entry["line"])
        elif "record" in entry and watch is not None:
            watch(int(entry["seed"]), entry["record"])
        elif entry.get("end") in ENDS:
            raise ENDS[entry["end"]](entry["text"])
        elif entry.get("end") == "crashed":
            raise KedgeError(f"the server of the run ended ({entry['text']}). {hint}")


def entries(folder: Path, run: Submitted, hint: str) -> Iterator[dict[str, Any]]:
    """The entries of a journal that were not read before, as they come, up to the end of the
    run."""
    start = time.time()
    while True:
        alive = not run.pid or is_running(run.pid)
        content = run.journal.read_bytes() if run.journal.exists() else b""
        for line in content[run.place :].splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            run.place += len(line)
            entry = json.loads(line)
            run.pid = int(entry.get("pid", run.pid))
            yield entry
            if "end" in entry:
                return
        if not alive:
            raise KedgeError(f"the server of the run has died. {hint}")
        if not run.pid and time.time() - start > START_S:
            raise KedgeError(
                f"Flower has not started the run; see {folder / 'logs' / SUPERLINK}.txt. {hint}"
            )
        time.sleep(POLL_S)


def runs(folder: Path) -> list[dict[str, Any]]:
    """The runs that the SuperLink knows, newest first, with ``folder`` and ``end`` of those that
    have a journal: Flower calls a run that was stopped or paused a failed one."""
    found = list(call(folder, "list", CONNECTION).get("runs", []))
    journals: dict[str, dict[str, Any]] = {}
    for path in (folder / "journals").glob("*.jsonl"):
        known = read_journal(path)
        first, last = (known[0], known[-1]) if known else ({}, {})
        journals[str(first.get("run"))] = {"folder": first.get("out"), "end": last.get("end")}
    return [dict(one) | journals.get(str(one.get("run-id")), {}) for one in found]


def _wait_for_superlink(folder: Path, port: int) -> None:
    end = time.time() + SUBMIT_S
    while not is_open(port):
        if time.time() > end:
            log = f"kedge flower log superlink{option(folder)}"
            raise KedgeError(f"the SuperLink does not answer; see: {log}")
        time.sleep(POLL_S)
