"""A federation on one machine that cannot be made or started leaves nothing behind; no Flower."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="needs the extra: pip install 'kedge[flower]'")

import kedge
from kedge.errors import KedgeError, Paused
from kedge.federation.coordinator.rules import PAUSED
from kedge.flower.apps import Journal
from kedge.flower.project import write_app
from kedge.local import federation as local
from kedge.local import runs as submit
from kedge.local.federation import FederationSpec, NodeSpec, shares_of, socket_of
from kedge.local.processes import ProcessSpec, processes_of
from kedge.local.runs import Submitted, entries, log_lines
from kedge.settings import Config

SLEEP = "import time; time.sleep(600)"


def silos(folder: Path, *names: str, label: str = "sick") -> Path:
    folder.mkdir(parents=True)
    rows = "\n".join(f"{i},{i % 2}" for i in range(30))
    for name in names:
        (folder / f"{name}.csv").write_text(f"age,{label}\n{rows}\n")
    return folder


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": "nosuch.csv", "nodes": 2}, "nosuch.csv: there is no such file"),
    "no number": ({"data": "digits"}, "how many members"),
    "a partition": ({"data": "digits", "nodes": 2, "partition": "dirichle(1)"}, "dirichlet"),
    "no label": ({"data": "{silos}"}, "no column is called label"),
    "no policy": ({"data": "digits", "nodes": 2, "policy": "no.toml"}, "no.toml: cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("is_there", [False, True])
def test_nothing_stays_of_a_federation_that_cannot_be_made(
    name: str, is_there: bool, tmp_path: Path
) -> None:
    options, text = WRONG[name]
    found = {k: str(v).format(silos=tmp_path / "silos") for k, v in options.items()}
    silos(tmp_path / "silos", "north", "south")
    folder = tmp_path / "new" / "federation"
    if is_there:
        folder.mkdir(parents=True)
    with pytest.raises(KedgeError, match=text):
        local.create(folder, **found | {"nodes": options.get("nodes", 0)})  # type: ignore[arg-type]
    assert folder.exists() == is_there
    assert (tmp_path / "new").exists() == is_there
    assert not is_there or not list(folder.iterdir())


def test_names_and_paths_that_cannot_be_those_of_processes(tmp_path: Path) -> None:
    for number, names in enumerate((("north", "superlink"), ("north", "member-north"))):
        data = silos(tmp_path / f"silos-{number}", *names)
        with pytest.raises(KedgeError, match="a member cannot be called"):
            local.create(tmp_path / "new", f"{data}(label=sick)")
    deep = tmp_path / ("deep" * 20)
    with pytest.raises(KedgeError, match="too long for the paths of sockets.*shorter one: --at"):
        local.create(deep, "digits", nodes=2)
    assert not deep.exists()
    assert local.create(deep, "digits", nodes=2, resident=False).nodes
    with pytest.raises(KedgeError, match="is not empty"):
        local.create(deep, "digits", nodes=2)
    assert FederationSpec.load(deep).nodes
    (tmp_path / "file").write_text("data")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(KedgeError, match="file is a file; choose another folder"):
            local.create(folder, "digits", nodes=2)
        with pytest.raises(KedgeError, match="file is a file; choose another folder"):
            write_app(folder, Config(method="fedavg", seeds=(0,)))
    assert (tmp_path / "file").read_text() == "data"


def test_silos_below_a_path_with_brackets(tmp_path: Path) -> None:
    data = silos(tmp_path / "my data, (2)", "north", "south")
    shares, _ = shares_of(f"{data}(label=sick)", "auto", 0, "auto", 0, tmp_path / "new")
    assert shares[0].data == f"{data / 'north.csv'}(label=sick)"


def test_why_a_folder_has_no_silos(tmp_path: Path) -> None:
    silos(tmp_path / "one", "north")
    with pytest.raises(KedgeError, match=r"only north.csv in there.*such as --nodes 4"):
        shares_of(str(tmp_path / "one"), "auto", 0, "auto", 0, tmp_path / "new")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("reason", ["ctrl-c", "too slow", "does not start"])
def test_nothing_runs_after_a_start_that_failed(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(kedge.__file__).parents[1]))
    spec = FederationSpec(f"test-{tmp_path.name}", 1, (NodeSpec("north", "digits", 2),))
    spec.save(tmp_path)
    code = "import sys; sys.exit('no key')" if reason == "does not start" else SLEEP
    program = ProcessSpec("superlink", [sys.executable, "-c", code])
    monkeypatch.setattr(local, "programs", lambda *_: [program])
    monkeypatch.setattr("kedge.local.processes.FIRST_PAUSE_S", 0.01)
    error: type[BaseException] = KedgeError
    if reason == "ctrl-c":
        error = KeyboardInterrupt

        def interrupt(*_: Any) -> bool:
            if len(processes_of(spec.token)) > 1:
                raise KeyboardInterrupt
            return False

        monkeypatch.setattr(local, "is_ready", interrupt)
    with pytest.raises(error) as caught:
        local.up(tmp_path, spec, ready_s=1.0 if reason == "too slow" else 60.0)
    assert not processes_of(spec.token)
    assert not local.is_up(tmp_path)
    if reason == "does not start":
        assert "superlink does not start: no key See" in str(caught.value)
    elif reason == "too slow":
        assert "did not get ready within 1 s; missing: north" in str(caught.value)


def test_two_commands_do_not_start_one_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one starts it, the second one touches nothing."""
    spec = FederationSpec(f"test-{tmp_path.name}", 1, (NodeSpec("north", "digits", 2),))
    spec.save(tmp_path)
    monkeypatch.setattr(local, "stop", lambda *_: pytest.fail("the first one's processes ended"))
    code = (
        "import sys; from pathlib import Path; from kedge.history.lock import Lock; lock = Lock()"
    )
    code += "; lock.take(Path(sys.argv[1])); print('starts', flush=True); sys.stdin.read()"
    monkeypatch.setenv("PYTHONPATH", str(Path(kedge.__file__).parents[1]))
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"starts\n"
        with pytest.raises(KedgeError, match="another command starts the federation there"):
            local.up(tmp_path, spec)


def test_a_supervisor_that_ends_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FederationSpec(f"test-{tmp_path.name}", 1, (NodeSpec("north", "digits", 2),))
    spec.save(tmp_path)
    (tmp_path / "supervisor.txt").write_text("Traceback\nOSError: no space left\n\n")
    monkeypatch.setattr(local, "programs", lambda *_: [])
    monkeypatch.setattr(local, "start_supervisor", lambda *_: 2**22 + 1)
    with pytest.raises(KedgeError, match="supervisor has ended: OSError: no space left See"):
        local.up(tmp_path, spec)


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FederationSpec(f"test-{tmp_path.name}", 1, (NodeSpec("north", "digits", 2),))
    spec.save(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(local, "programs", lambda *_: [])
    monkeypatch.setattr(local, "start_supervisor", lambda *_: os.getpid())
    with pytest.raises(KedgeError, match="is full; free some space, then: kedge flower up --at"):
        local.up(tmp_path, spec)


def test_a_socket_of_a_member_that_was_killed_is_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = FederationSpec(f"test-{tmp_path.name}", 1, (NodeSpec("north", "digits", 2),))
    spec.save(tmp_path)
    socket_of(tmp_path, "north").parent.mkdir(parents=True)
    socket_of(tmp_path, "north").touch()
    monkeypatch.setattr(local, "programs", lambda *_: [])
    monkeypatch.setattr(local, "start_supervisor", lambda *_: os.getpid())
    monkeypatch.setattr(local, "node_id", lambda *_: "7")
    with pytest.raises(KedgeError, match="missing: north"):
        local.up(tmp_path, spec, ready_s=0.3)


def test_runs_are_shown_with_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [{"run-id": "8", "status": "running"}, {"run-id": "7", "status": "finished:failed"}]
    monkeypatch.setattr(submit, "call", lambda *_: {"runs": known})
    (tmp_path / "journals").mkdir()
    journal = Journal(str(tmp_path / "journals" / "a.jsonl"))
    journal.write(pid=1, run="7", out="/runs/first")
    journal.write(end="stopped", text="stopped after round 1")
    assert submit.runs(tmp_path) == [
        known[0],
        known[1] | {"folder": "/runs/first", "end": "stopped"},
    ]


def test_the_message_of_a_pause_is_shown_once(tmp_path: Path) -> None:
    FederationSpec("token", 1, (NodeSpec("north", "digits", 2),)).save(tmp_path)
    journal, shown = Journal(str(tmp_path / "a.jsonl")), list[str]()
    text = f"{PAUSED} 2: 1 of 4 members replied, 2 are needed"
    for line in ("started", "round 1 of 3: 4 of 4 replied", text):
        journal.write(line=line)
    journal.write(end="paused", text=text)
    with pytest.raises(Paused, match=text):
        submit.follow(tmp_path, Submitted("7", tmp_path / "a.jsonl"), "", shown.append)
    assert shown == ["started"]


def test_a_journal_is_read_once_and_may_break_off(tmp_path: Path) -> None:
    FederationSpec("token", 1, (NodeSpec("north", "digits", 2),)).save(tmp_path)
    journal = tmp_path / "journals" / "a.jsonl"
    journal.parent.mkdir()
    journal.write_text(json.dumps({"pid": 1}) + "\n" + json.dumps({"line": "started"}) + "\n")
    run = Submitted("7", journal)
    reading = entries(tmp_path, run, "")
    assert [next(reading), next(reading)] == [{"pid": 1}, {"line": "started"}]
    with journal.open("a") as file:
        file.write(json.dumps({"end": "complete"}) + '\n{"line": "half')
    assert list(entries(tmp_path, run, "")) == [{"end": "complete"}]  # from where it was
    assert list(log_lines(tmp_path, "", 10)) == ["started", "complete"]
