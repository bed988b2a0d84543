"""Stop a run from outside: a request in its folder, and what the log and the lock say after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.errors import Interrupted, KedgeError, NotFinite
from kedge.history.folder import (
    STOP,
    is_stop_requested,
    read_records,
    request_stop,
)
from kedge.history.lock import Lock, is_locked

SETTINGS: dict[str, Any] = {"clients": 4, "rounds": 6, "seeds": [0], "engine": "loop"}


def last_line(folder: Path) -> str:
    return (folder / "log.txt").read_text().splitlines()[-1].split("  ", 1)[1]


def test_a_request_stops_after_the_round_and_the_run_goes_on_as_if_it_had_not(
    tmp_path: Path,
) -> None:
    whole = kedge.run(**SETTINGS)
    run = tmp_path / "run"

    def ask(seed: int, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            request_stop(run)

    with pytest.raises(Interrupted, match="stopped after round 2"):
        kedge.run(out=run, watch=ask, **SETTINGS)
    assert not is_stop_requested(run)
    assert last_line(run) == "interrupted: stopped after round 2 of seed 0"
    assert len(read_records(run / "seed-0/metrics.jsonl")) == 2
    resumed = kedge.run(out=run, resume=True, **SETTINGS)
    assert resumed.array().tolist() == whole.array().tolist()


def test_a_request_during_the_last_round_of_a_seed_stops_the_next_seed(tmp_path: Path) -> None:
    def ask(seed: int, record: dict[str, Any]) -> None:
        if (seed, record["round"]) == (0, 2):
            request_stop(tmp_path)

    with pytest.raises(Interrupted, match="round 1 of seed 1"):
        kedge.run(out=tmp_path, watch=ask, **SETTINGS | {"rounds": 2, "seeds": [0, 1]})


def test_an_old_request_does_not_stop_a_run_that_is_resumed(tmp_path: Path) -> None:
    kedge.run(out=tmp_path, **SETTINGS | {"rounds": 1})
    request_stop(tmp_path)
    assert len(kedge.run(out=tmp_path, resume=True, **SETTINGS).records[0]) == 6
    assert not is_stop_requested(tmp_path)


def test_a_request_ends_a_whole_sweep(tmp_path: Path) -> None:
    def ask(config: Any, seed: int, record: dict[str, Any], name: str) -> None:
        if record["round"] == 2:
            request_stop(tmp_path / "lr_0.1")

    with pytest.raises(Interrupted):
        kedge.sweep(grid={"lr": [0.01, 0.1]}, out=tmp_path, watch=ask, **SETTINGS)
    assert not list(tmp_path.rglob(STOP))


def test_the_log_says_why_a_run_failed(tmp_path: Path) -> None:
    def fail(seed: int, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise NotFinite("the loss is nan\nin round 2")

    with pytest.raises(NotFinite):
        kedge.run(out=tmp_path, watch=fail, **SETTINGS)
    assert last_line(tmp_path) == "failed: the loss is nan"
    kedge.sweep(grid={"lr": [1e30]}, out=tmp_path / "sweep", **SETTINGS)
    assert last_line(tmp_path / "sweep" / "lr_1e_30").startswith("failed: seed 0")


def test_a_request_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / STOP).symlink_to(tmp_path / "elsewhere")
    request_stop(tmp_path)
    assert is_stop_requested(tmp_path)  # the link itself is the request
    assert not (tmp_path / "elsewhere").exists()


HOLD = """
import sys, time
from pathlib import Path
from kedge.history.lock import Lock
lock = Lock()
lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_is_seen_from_outside_and_asking_does_not_take_it(tmp_path: Path) -> None:
    assert is_locked(tmp_path) is False
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "held\n"
    assert is_locked(tmp_path) is True
    process.kill()
    process.wait()
    assert (tmp_path / ".lock").exists()
    assert is_locked(tmp_path) is False
    Lock().take(tmp_path)


def test_whoever_trains_waits_for_the_instant_in_which_somebody_asks(tmp_path: Path) -> None:
    import threading

    asking, lock = Lock(), Lock()
    asking.take(tmp_path)
    threading.Timer(0.2, asking.give_back).start()
    lock.take(tmp_path)
    assert is_locked(tmp_path) is True
    with pytest.raises(KedgeError, match="is in use"):
        Lock().take(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = Lock()
    lock.take(tmp_path)
    read, write = os.pipe()
    if not (child := os.fork()):
        lock.give_back()  # a copy: it gives nothing back
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    assert is_locked(tmp_path) is True
    lock.give_back()
    assert not (tmp_path / ".lock").exists()
    Lock().take(tmp_path)
    os.close(write)
    os.waitpid(child, 0)


def test_the_lock_of_a_folder_that_was_made_anew_stays(tmp_path: Path) -> None:
    old, new = Lock(), Lock()
    old.take(tmp_path)
    (tmp_path / ".lock").unlink()
    new.take(tmp_path)
    old.give_back()
    assert is_locked(tmp_path) is True
