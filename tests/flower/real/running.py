"""Federations of real processes for tests, and simulations to compare with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from kedge.core import tree
from kedge.federation.coordinator.rules import Rules
from kedge.local import federation as local
from kedge.local.processes import processes_of, read_processes
from kedge.local.runs import Submitted, follow, submit
from kedge.runs import train
from kedge.settings import Config

PATIENCE_S = 900.0  # on a busy machine; a fault costs a minute on a quiet one
DATA, PARTITION, NODES = "digits", "dirichlet(0.5)", 3
#: All members in every round, so that a simulation has the same cohorts.
STRICT = Rules(minimum=1.0, deadline_s=300.0, attempts=6, wait_s=20.0, join_s=300.0)


class Running:
    """A federation that runs, with its folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.spec = local.create(folder, DATA, PARTITION, NODES, **options)
        self.up()

    def up(self) -> None:
        self.spec = local.up(self.folder, self.spec, owner=os.getpid())

    def end(self) -> None:
        local.down(self.folder)
        assert not processes_of(self.spec.token)

    def submit(
        self, config: Config, out: Path, resume: bool = False, rules: Rules = STRICT, own: str = ""
    ) -> Submitted:
        files = [own] if own else []
        return submit(self.folder, config, out, resume=resume, rules=rules, own=files)

    def train(self, config: Config, out: Path, **options: Any) -> None:
        """Run to the end."""
        follow(self.folder, self.submit(config, out, **options), "")

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``kedge flower ...`` as a process."""
        return subprocess.run(
            [sys.executable, "-m", "kedge", "flower", *words, "--at", str(self.folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def pid(self, name: str) -> int:
        process = read_processes(self.folder)[1][name]
        assert process.running
        return process.pid

    def client_process(self, name: str) -> int:
        """The next process in which a client app of a node runs."""
        before = self._client_processes(name)  # they have answered, and are about to end
        found: set[int] = wait(lambda: self._client_processes(name) - before)
        return found.pop()

    def _client_processes(self, name: str) -> set[int]:
        return self._processes(b"flwr-clientapp", f"nodes/{name}/flower")

    def server_process(self) -> int:
        """The process in which the server of a run is."""
        found: set[int] = wait(lambda: self._processes(b"flwr-serverapp", "flower"))
        return found.pop()

    def _processes(self, program: bytes, home: str) -> set[int]:
        """Processes that Flower itself has started, by their program and Flower's folder."""
        found, wanted = set(), f"FLWR_HOME={self.folder}/{home}".encode()
        for pid in processes_of(self.spec.token):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                own = wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if own and program in words:
                    found.add(pid)
        return found


def wait(look: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    end = time.time() + seconds
    while time.time() < end:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("what a test waits for did not happen")


def rounds_of(out: Path) -> int:
    """Rounds of a run that are recorded."""
    path = out / "seed-0" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def settings(method: str, rounds: int, **changes: Any) -> Config:
    return Config(
        method=method, data=DATA, partition=PARTITION, clients=NODES, rounds=rounds, seeds=(0,),
        engine="loop", device="cpu", threads=1, workers=0, **changes,
    )  # fmt: skip


def simulate(config: Config, out: Path) -> Path:
    train.run(config, out)
    return out


def assert_same(run: Path, simulated: Path) -> None:
    """Model, server state and records are those of a simulation, bit for bit."""
    for name in ("model", "checkpoint"):
        found, expected = (
            load_file(folder / "seed-0" / f"{name}.safetensors") for folder in (run, simulated)
        )
        shared = found.keys() & expected.keys()
        assert shared >= {key for key in expected if not key.startswith("client")}
        assert tree.equal({k: found[k] for k in shared}, {k: expected[k] for k in shared})
    ours, theirs = (
        [
            json.loads(line)
            for line in (folder / "seed-0" / "metrics.jsonl").read_text().splitlines()
        ]
        for folder in (run, simulated)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one["train_loss"] == other["train_loss"]
        assert one["accuracy"] == other["accuracy"]  # tests of all members are the common test


def records(run: Path) -> list[dict[str, Any]]:
    text = (run / "seed-0" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
