"""A rival in a child process, with the Python of its own environment.

The process is ``python -m bench.speed.child SETTINGS``. It prints one line of JSON when it is
ready. For every line of its input it runs a round and prints its seconds; it exits at the end of
its input. kedge and this package are copied into its path, so its environment needs only the
rival, torch, numpy, safetensors and pillow.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import kedge
from bench.speed.workloads import Workload

ANSWER_TIMEOUT_S = 900
EXIT_TIMEOUT_S = 20
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
QUIET |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class RivalFailed(Exception):
    """A rival could not be timed; ``missing`` if it is not installed."""

    def __init__(self, reason: str, missing: bool = False) -> None:
        super().__init__(reason)
        self.missing = missing


class Child:
    """Rounds in a child process. A call runs one round and returns its seconds.

    Raises:
        RivalFailed: the process exits, reports an error or does not answer in time.
    """

    def __init__(
        self, python: str, rival: str, work: Workload, device: str, precision: str, threads: int
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kedge-bench-")
        home = Path(self._folder.name)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(kedge.__file__).parent, home / "kedge", ignore=ignored)
        shutil.copytree(Path(__file__).parent, home / "bench" / "speed", ignore=ignored)
        settings = {
            "rival": rival, "work": dataclasses.asdict(work), "device": device,
            "precision": precision, "threads": threads,
        }  # fmt: skip
        inherited = os.environ.get("PYTHONPATH") if python == sys.executable else None
        path = os.pathsep.join(filter(None, [inherited, str(home)]))
        env = os.environ | QUIET | {"FLWR_HOME": str(home / "flwr"), "PYTHONPATH": path}
        self._log = home / "log.txt"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "bench.speed.child", json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env,
                start_new_session=True,  # Ctrl-C goes to the parent process only
            )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        self.last: dict[str, Any] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.versions: dict[str, str] = self._answer().get("versions", {})
        except BaseException:
            self.close()
            raise

    def __call__(self) -> float:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("round\n")
            self._process.stdin.flush()
        except OSError:
            raise RivalFailed(*self._exit_reason()) from None
        self.last = self._answer()
        return float(self.last["seconds"])

    def close(self) -> None:
        """End the process; kill it if it does not exit in time."""
        process = self._process
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(timeout=EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._listener.join()
        if process.stdout is not None:
            process.stdout.close()
        self._folder.cleanup()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise RivalFailed(f"no answer within {ANSWER_TIMEOUT_S} seconds") from None
        if not line:
            raise RivalFailed(*self._exit_reason())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RivalFailed(answer["error"])
        return answer

    def _exit_reason(self) -> tuple[str, bool]:
        """The last line of the log, and whether a library is missing."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=EXIT_TIMEOUT_S)
        lines = [line for line in self._log.read_text().splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit code {self._process.returncode}"
        kind, _, text = last.partition(": ")
        missing = kind == "ModuleNotFoundError"
        return text if missing else last, missing


def main(text: str, requests: TextIO) -> None:
    """The child process: build the rival, then run a round for every line of ``requests``."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to the log

    def send(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    settings = json.loads(text)
    fields = settings["work"]
    work = Workload(**fields | {name: tuple(fields[name]) for name in ("shape", "methods")})
    device, precision = settings["device"], settings["precision"]
    lines: Iterator[str] = iter(requests.readline, "")
    if settings["rival"] == "flower":
        from bench.speed.flower_rival import serve

        serve(work, device, precision, lines, send)
        return
    from bench.speed.rounds import InProcess, rival_rounds, versions_of

    rounds = rival_rounds(settings["rival"], work, work.normalised(device), precision)
    timed: Callable[[], float] = InProcess(rounds, device, precision, settings["threads"])
    send({"ready": True, "versions": versions_of(settings["rival"])})
    for _ in lines:
        send({"seconds": timed()})


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin)
