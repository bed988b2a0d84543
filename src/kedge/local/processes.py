"""Processes of a federation on this machine: started, supervised, found and ended.

A supervisor (``python -m kedge.local.processes FOLDER``) starts what ``programs.json`` lists, in
this order, and starts again what ends, after a pause that grows: a SuperLink refuses a node that
was killed for about a minute, until it counts the old one as gone. ``processes.json`` tells who
runs. All processes have the token of the federation in their environment, also those that Flower's
programs start on their own, so that ``end_all`` finds every one of them.

This module and what it imports need the standard library alone: the supervisor is small.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from kedge.files import make_folder, open_append, write_file

PROGRAMS, PROCESSES = "programs.json", "processes.json"
TOKEN = "KEDGE_FEDERATION"  # in the environment of all processes of a federation
TICK_S = 0.25
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 10.0
STEADY_S = 30.0  # a process that lived so long starts again without a longer pause
GRACE_S = 5.0  # from SIGTERM to SIGKILL


@dataclass
class ProcessSpec:
    """A program to run.

    Attributes:
        name: its name, and that of its log.
        command: program and arguments.
        environment: variables besides those of the supervisor.
        port: a port on loopback; the next program waits until it can be reached.
        once: whether it ends by itself, and the next program waits for that.
    """

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    once: bool = False


@dataclass
class Process:
    """A program that was started."""

    pid: int
    since: float
    starts: int = 1
    exit: int | None = None  # of the last one that ended
    running: bool = True


class Supervisor:
    """Runs the programs of a folder until it is told to stop.

    It also stops if the folder, or the process ``owner``, is gone.
    """

    def __init__(self, folder: Path, owner: int = 0) -> None:
        self.folder, self.owner = folder, owner
        values = json.loads((folder / PROGRAMS).read_text(encoding="utf-8"))
        self.token: str = values["token"]
        self.programs = [ProcessSpec(**value) for value in values["programs"]]
        self.processes: dict[str, Process] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._pause: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._stopping = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            for program in self.programs:
                if self._over():
                    break
                self._start(program)
                self._wait_for(program)
            while not self._over():
                self._tend()
                time.sleep(TICK_S)
        finally:
            self._end()

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _over(self) -> bool:
        gone = bool(self.owner) and not is_running(self.owner)
        return self._stopping or gone or not (self.folder / PROGRAMS).exists()

    def _start(self, program: ProcessSpec) -> None:
        with self._log(program.name) as file:
            child = subprocess.Popen(
                program.command, env=os.environ | program.environment | {TOKEN: self.token},
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        before = self.processes.get(program.name, Process(0, 0.0, 0))
        self._children[program.name] = child
        started = Process(child.pid, time.time(), before.starts + 1, before.exit)
        self.processes[program.name] = started
        self._save()

    def _log(self, name: str) -> IO[bytes]:
        try:
            make_folder(self.folder / "logs", inside=self.folder)
            log = self.folder / "logs" / f"{name}.txt"
            return os.fdopen(open_append(log, inside=self.folder), "ab")
        except OSError:  # a disk without space is no reason to end what runs
            return open(os.devnull, "ab")

    def _wait_for(self, program: ProcessSpec) -> None:
        """Wait until a port is open or a program has ended, tending to the others."""
        while not self._over():
            self._tend()
            if program.once and not self.processes[program.name].running:
                return
            if not program.once and (not program.port or is_open(program.port)):
                return
            time.sleep(TICK_S)

    def _tend(self) -> None:
        """Note who has ended, and start those again whose pause is over."""
        now = time.time()
        started = [program for program in self.programs if program.name in self.processes]
        for program in started:
            name, process = program.name, self.processes[program.name]
            if process.running:
                code = self._children[name].poll()
                if code is None:
                    continue
                process.running, process.exit = False, code
                with contextlib.suppress(OSError):  # what it started itself
                    os.killpg(process.pid, signal.SIGKILL)
                if now - process.since > STEADY_S:
                    self._pause.pop(name, None)
                pause = self._pause.get(name, FIRST_PAUSE_S)
                self._pause[name] = min(MAX_PAUSE_S, 2 * pause)
                self._due[name] = now + pause
                self._save()
            elif now >= self._due[name] and not (program.once and process.exit == 0):
                self._start(program)

    def _end(self) -> None:
        every = list(self._children.values())
        waves = [every[1:], every[:1]]  # nodes take their leave
        for children in waves:
            for child in children:
                _send(child.pid, signal.SIGTERM)
            end = time.time() + GRACE_S
            while time.time() < end and any(child.poll() is None for child in children):
                time.sleep(0.1)
            for child in children:
                if child.poll() is None:
                    _send(child.pid, signal.SIGKILL)
                    child.wait()
        end_all(self.token, spare=(os.getpid(),))
        (self.folder / PROCESSES).unlink(missing_ok=True)

    def _save(self) -> None:
        found = {name: asdict(process) for name, process in self.processes.items()}
        values = {"supervisor": os.getpid(), "token": self.token, "processes": found}
        with contextlib.suppress(OSError):  # as above; it is written again with the next change
            write_file(self.folder / PROCESSES, json.dumps(values).encode(), private=True)


def write_programs(folder: Path, token: str, programs: list[ProcessSpec]) -> None:
    """Write what a supervisor runs."""
    values = {"token": token, "programs": [asdict(program) for program in programs]}
    write_file(folder / PROGRAMS, json.dumps(values, indent=1).encode(), private=True)


def read_token(folder: Path) -> str:
    """The token of the programs in a folder; empty if there are none."""
    try:
        return str(json.loads((folder / PROGRAMS).read_text(encoding="utf-8"))["token"])
    except (OSError, ValueError, KeyError):
        return ""


def start_supervisor(folder: Path, token: str, owner: int = 0) -> int:
    """Start a supervisor that outlives this process, and return its id.

    Args:
        folder: the folder of the federation.
        token: of the federation.
        owner: a process with whose end the federation ends, too; 0: none.
    """
    command = [sys.executable, "-m", "kedge.local.processes", str(folder), str(owner)]
    environment = os.environ | {TOKEN: token}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return int(done.stdout)


def _main(folder: Path, owner: int) -> None:
    """Run the supervisor in a process that nobody waits for; print its id."""
    log = open_append(folder / "supervisor.txt", private=True)
    child = os.fork()
    if child:
        os.write(1, str(child).encode())
        os._exit(0)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    Supervisor(folder, owner).run()


# -- what runs ----------------------------------------------------------------------------------


def read_processes(folder: Path) -> tuple[int, dict[str, Process]]:
    """The supervisor's id, 0 if there is none, and the processes that it has started."""
    try:
        values = json.loads((folder / PROCESSES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0, {}
    found = {name: Process(**value) for name, value in values["processes"].items()}
    supervisor = int(values["supervisor"])
    return (supervisor if is_running(supervisor, values["token"]) else 0), found


def is_running(pid: int, token: str = "") -> bool:
    """Whether a process runs; with a token, whether it is one of that federation."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return not token
    with contextlib.suppress(OSError, IndexError):
        content = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        if content.rpartition(")")[2].split()[0] == "Z":
            return False
    return not token or not Path("/proc").exists() or pid in processes_of(token)


def processes_of(token: str) -> list[int]:
    """All processes with a token in their environment, on systems that tell (Linux)."""
    found, wanted = [], f"{TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end_all(token: str, spare: tuple[int, ...] = ()) -> None:
    """Kill all processes with a token, also those that are started meanwhile."""
    for _ in range(50):
        left = [pid for pid in processes_of(token) if pid not in spare and is_running(pid)]
        if not left:
            return
        for pid in left:
            _send(pid, signal.SIGKILL)
        time.sleep(0.1)


def stop(folder: Path, token: str) -> None:
    """End a federation: ask its supervisor, then kill what is left."""
    supervisor, processes = read_processes(folder)
    if supervisor:
        _send(supervisor, signal.SIGTERM)
        end = time.time() + 3 * GRACE_S
        while time.time() < end and is_running(supervisor):
            time.sleep(0.1)
    end_all(token)
    if not Path("/proc").exists():  # the processes that are known, and their groups
        for process in processes.values():
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    (folder / PROCESSES).unlink(missing_ok=True)


def is_open(port: int) -> bool:
    """Whether something listens at a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
