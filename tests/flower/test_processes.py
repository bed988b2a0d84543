"""The supervisor with small programs: started in order, started again, ended without a rest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.local import processes
from kedge.local.processes import (
    Process,
    ProcessSpec,
    end_all,
    free_ports,
    is_open,
    is_running,
    processes_of,
    read_processes,
    start_supervisor,
    stop,
    write_programs,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

SLEEP = "import time; time.sleep(600)"
#: A program that starts another one in a session of its own, as SuperLinks do.
PARENT = (
    "import subprocess, sys; "
    f"subprocess.run([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
)
SERVER = (
    "import socket, sys, time; time.sleep(0.3); s = socket.socket(); "
    "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
    "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); time.sleep(600)"
)


def program(name: str, code: str, *words: str, **options: Any) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-c", code, *words], **options)


@pytest.fixture
def supervise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., dict[str, Process]]]:
    token = f"test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("PYTHONPATH", str(Path(kedge.__file__).parents[1]))

    def run(*programs: ProcessSpec, owner: int = 0) -> dict[str, Process]:
        write_programs(tmp_path, token, list(programs))
        run.supervisor = start_supervisor(tmp_path, token, owner)  # type: ignore[attr-defined]
        wait(lambda: len(read_processes(tmp_path)[1]) == len(programs))
        return read_processes(tmp_path)[1]

    run.token, run.folder = token, tmp_path  # type: ignore[attr-defined]
    try:
        yield run
    finally:
        end_all(token)


def wait(look: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.time() + seconds
    while not look():
        assert time.time() < end, "what a test waits for did not happen"
        time.sleep(0.02)


def test_programs_start_in_order_and_end_together(supervise: Any) -> None:
    [port] = free_ports(1)
    mark = supervise.folder / "mark"
    check = f"import pathlib, socket; socket.create_connection(('127.0.0.1', {port})); "
    found = supervise(
        program("server", SERVER, str(port), port=port),
        program("check", check + f"pathlib.Path({str(mark)!r}).touch()", once=True),
        program("parent", PARENT),
    )
    assert is_open(port)
    assert mark.exists()
    assert found["check"].exit == 0
    wait(lambda: len(processes_of(supervise.token)) == 4)  # the supervisor and a grandchild, too
    stop(supervise.folder, supervise.token)
    assert not processes_of(supervise.token)
    assert not is_open(port)
    assert read_processes(supervise.folder) == (0, {})
    assert not is_running(supervise.supervisor)


def test_who_is_killed_is_started_again_after_a_pause(supervise: Any) -> None:
    before = supervise(program("one", SLEEP), program("two", SLEEP))
    os.kill(before["one"].pid, signal.SIGKILL)

    def now() -> dict[str, Process]:
        return read_processes(supervise.folder)[1]

    wait(lambda: not now()["one"].running)
    wait(lambda: now()["one"].running)
    after = now()
    assert after["one"].starts == 2
    assert after["one"].exit == -signal.SIGKILL
    assert after["one"].pid != before["one"].pid
    assert after["two"] == before["two"]


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_programs(tmp_path, "none", [program("one", "")])
    supervisor = processes.Supervisor(tmp_path)
    clock = [1000.0]
    monkeypatch.setattr(processes.time, "time", lambda: clock[0])

    class Dead:
        pid = 1 << 30  # nobody's

        def poll(self) -> int:
            return 1

    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: Dead())
    supervisor._start(supervisor.programs[0])
    starts = []
    for _ in range(600):
        before = supervisor.processes["one"].starts
        supervisor._tend()
        if supervisor.processes["one"].starts > before:
            starts.append(clock[0] - 1000)
        clock[0] += 0.1
    pauses = [round(b - a) for a, b in zip([0.0, *starts], starts, strict=False)]
    assert pauses == [1, 2, 4, 8, 10, 10, 10, 10]


def test_it_ends_with_its_owner_and_with_its_folder(supervise: Any) -> None:
    owner = subprocess.Popen([sys.executable, "-c", SLEEP])
    supervise(program("one", SLEEP), owner=owner.pid)
    owner.kill()
    owner.wait()
    wait(lambda: not processes_of(supervise.token))
    supervise(program("one", SLEEP))
    (supervise.folder / processes.PROGRAMS).unlink()
    wait(lambda: not processes_of(supervise.token))


def test_what_a_killed_supervisor_leaves_behind_is_ended(supervise: Any) -> None:
    supervise(program("one", PARENT))
    wait(lambda: len(processes_of(supervise.token)) == 3)
    os.kill(supervise.supervisor, signal.SIGKILL)
    wait(lambda: not is_running(supervise.supervisor))
    assert len(processes_of(supervise.token)) == 2
    assert read_processes(supervise.folder)[0] == 0
    stop(supervise.folder, supervise.token)
    assert not processes_of(supervise.token)


def test_another_process_with_the_same_id_is_left_alone(tmp_path: Path) -> None:
    """The id of a supervisor that has ended may belong to anybody."""
    with contextlib.closing(open(tmp_path / processes.PROCESSES, "w")) as file:
        file.write(f'{{"supervisor": {os.getpid()}, "token": "none", "processes": {{}}}}')
    assert read_processes(tmp_path) == (0, {})
    stop(tmp_path, "none")
