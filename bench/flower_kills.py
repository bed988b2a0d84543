"""Kill processes of a real federation at random moments, and compare its end with a simulation.

    python bench/flower_kills.py --trials 20 --out bench/results/flower_kills.json

Needs the extra ``flower``. All trials share one federation on loopback (SuperLink, three SuperNodes
with keys, TLS, resident nodes). A trial is one run of SCAFFOLD, started by ``kedge flower run``.
While it trains, one or two processes are killed with SIGKILL:

=================  =============================================================================
``supernode``      the process that connects a member to the SuperLink
``client``         the process that Flower starts for one message (``flwr-clientapp``)
``resident``       the resident node, which holds data and state
``superlink``      the server's process; the supervisor then kills what it has started
``serverapp``      the process of the run itself (``flwr-serverapp``)
=================  =============================================================================

A moment is a number of finished rounds and some seconds after them, drawn from the trial's seed. If
the command ends with an error, it is typed again with ``--resume``, as its message says. A run that
does not end after ``MAX_RESUMES`` is lost. Odd trials wait for all members in every round
(``all``). In even ones a member that does not reply within the deadline misses the round
(``half``), and its state must not move.

At the end a simulation with the recorded cohorts runs in this process. Weights, server state, the
states on the members' disks, training losses and accuracies must be equal to it bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kedge.core import tree
from kedge.data.datasets import load
from kedge.engines import Execution
from kedge.local import federation as local
from kedge.local.federation import FederationSpec
from kedge.local.processes import processes_of, read_processes
from kedge.runs.build import simulation
from kedge.runs.measure import measure
from kedge.runs.rounds import train_record
from kedge.settings import Config
from kedge.sim.simulation import Simulation

METHOD, DATA, PARTITION, NODES = "scaffold", "digits", "dirichlet(0.5)", 3
KINDS = ("supernode", "client", "resident", "superlink", "serverapp")
MAX_RESUMES = 6
LONGEST_WAIT_S = 15.0  # after a round, which takes 6 s on two quiet cores
PATIENCE_S = 120.0  # for a process that is to be killed
#: Of the coordinator, by who must reply in a round.
RULES = {
    "all": ("minimum=1.0", "deadline_s=150", "join_s=150"),
    "half": ("minimum=0.5", "deadline_s=40", "attempts=4", "wait_s=5", "join_s=150"),
}


@dataclass
class Kill:
    """One SIGKILL: whom, and when.

    Attributes:
        kind: one of ``KINDS``.
        member: number of the member, for the first three kinds.
        rounds: rounds that are finished then, at least.
        wait_s: seconds after that.
        pid: the process; 0 until it is killed.
        seconds: since the start of the trial.
        done: finished rounds at that moment.
    """

    kind: str
    member: int
    rounds: int
    wait_s: float
    pid: int = 0
    seconds: float = 0.0
    done: int = -1


def plan(seed: int, rounds: int) -> list[Kill]:
    """The kills of a trial. The first kind goes through all of them, trial by trial."""
    draw = random.Random(seed)
    kinds = [KINDS[seed % len(KINDS)]]
    if draw.random() < 0.5:
        kinds.append(draw.choice(KINDS))
    kills = [
        Kill(
            kind,
            draw.randrange(NODES),
            draw.randrange(rounds),
            round(draw.uniform(0, LONGEST_WAIT_S), 2),
        )
        for kind in kinds
    ]
    return sorted(kills, key=lambda kill: (kill.rounds, kill.wait_s))


# -- processes ------------------------------------------------------------------------------------


def find(folder: Path, spec: FederationSpec, kill: Kill) -> int:
    """The process to kill now; 0 if there is none."""
    name = spec.nodes[kill.member].name
    supervised = {"supernode": name, "resident": f"member-{name}", "superlink": "superlink"}
    if kill.kind in supervised:
        process = read_processes(folder)[1].get(supervised[kill.kind])
        return process.pid if process is not None and process.running else 0
    word = b"flwr-clientapp" if kill.kind == "client" else b"flwr-serverapp"
    home = folder / ("nodes/" + name if kill.kind == "client" else "") / "flower"
    for pid in processes_of(spec.token):
        with contextlib.suppress(OSError):
            own = f"FLWR_HOME={home}".encode() in _content(pid, "environ").split(b"\0")
            if own and word in _content(pid, "cmdline"):
                return pid
    return 0


def _content(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def finished_rounds(out: Path) -> int:
    path = out / "seed-0" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Killer(threading.Thread):
    """Kills processes at their moments, one after the other, until it is told to stop."""

    def __init__(
        self, folder: Path, spec: FederationSpec, out: Path, kills: Sequence[Kill]
    ) -> None:
        super().__init__(daemon=True)
        self.folder, self.spec, self.out, self.kills = folder, spec, out, kills
        self.start_s, self.over = time.time(), threading.Event()

    def run(self) -> None:
        for kill in self.kills:
            if self._until(lambda kill=kill: finished_rounds(self.out) >= kill.rounds):
                self.over.wait(kill.wait_s)
                self._kill(kill)

    def _kill(self, kill: Kill) -> None:
        end = time.time() + PATIENCE_S

        def look() -> bool:
            kill.pid = find(self.folder, self.spec, kill)
            return bool(kill.pid) or time.time() > end

        if self._until(look) and kill.pid:
            kill.seconds = round(time.time() - self.start_s, 1)
            kill.done = finished_rounds(self.out)
            os.kill(kill.pid, signal.SIGKILL)

    def _until(self, look: Callable[[], bool]) -> bool:
        while not self.over.is_set():
            if look():
                return True
            time.sleep(0.02)
        return False


def is_whole(folder: Path, spec: FederationSpec) -> bool:
    """Whether all processes of the federation run, and have done so for a moment."""
    processes = read_processes(folder)[1]
    names = {"superlink", *(n.name for n in spec.nodes), *(f"member-{n.name}" for n in spec.nodes)}
    return all(
        name in processes and processes[name].running and time.time() - processes[name].since > 8
        for name in names
    )


# -- one trial ------------------------------------------------------------------------------------


def settings(rounds: int) -> Config:
    return Config(
        method=METHOD, data=DATA, partition=PARTITION, clients=NODES, rounds=rounds, seeds=(0,),
        engine="loop", device="cpu", threads=1, workers=0,
    )  # fmt: skip


def type_command(folder: Path, out: Path, rounds: int, rules: str) -> tuple[int, str]:
    """What a user types: ``--resume`` if there is a run already."""
    words = ["--out", str(out), "--at", str(folder), "--json"]
    if (out / "config.toml").exists():
        words.append("--resume")
    else:
        words += ["--method", METHOD, "--rounds", str(rounds)]
    for rule in RULES[rules]:
        words += ["--rule", rule]
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "flower", "run", *words],
        capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    return done.returncode, (done.stderr or done.stdout).strip()[-500:]


def trial(folder: Path, spec: FederationSpec, runs: Path, seed: int, rounds: int) -> dict[str, Any]:
    """Run one trial, and compare its end."""
    out, kills = runs / f"trial-{seed}", plan(seed, rounds)
    rules = "half" if seed % 2 == 0 else "all"
    begin, said = time.time(), []
    killer = Killer(folder, spec, out, kills)
    killer.start()
    try:
        for _ in range(MAX_RESUMES + 1):
            code, text = type_command(folder, out, rounds, rules)
            said.append(text.splitlines()[-1] if code and text else "")
            if code == 0:
                break
            print(f"    {said[-1]}", flush=True)
    finally:
        killer.over.set()
        killer.join()
    lost = code != 0
    differences = [] if lost else compare(folder, spec, out, settings(rounds))
    missed = [asdict(kill) for kill in kills if not kill.pid]
    cohorts = [] if lost else [record["cohort"] for record in records_of(out)]
    return {
        "seed": seed, "replies": rules, "kills": [asdict(k) for k in kills],
        "missed_kills": len(missed), "seconds": round(time.time() - begin, 1),
        "resumed": len(said) - 1, "said": [text for text in said if text],
        "short_rounds": sum(len(cohort) < NODES for cohort in cohorts),
        "lost": lost, "equal": not lost and not differences, "differences": differences,
    }  # fmt: skip


# -- comparison -----------------------------------------------------------------------------------


def records_of(out: Path) -> list[dict[str, Any]]:
    text = (out / "seed-0" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def compare(folder: Path, spec: FederationSpec, out: Path, config: Config) -> list[str]:
    """What differs from a simulation with the same cohorts; nothing if all is equal."""
    torch.set_num_threads(1)
    sim = simulation(config, load(DATA), 0, torch.device("cpu"), Execution("loop"))
    records, found = records_of(out), []
    if [record["round"] for record in records] != list(range(1, config.rounds + 1)):
        found.append(f"rounds {[record['round'] for record in records]}")
    for record in records:
        known: dict[str, Any] = train_record(sim, sim.run_round(record["cohort"]))
        known |= measure(sim, config, final=False)
        names = ["train_loss"]
        if record.get("tested") == NODES:  # the tests of all members are the common test
            names.append("accuracy")
        for name in names:
            if record[name] != known[name]:
                found.append(f"{name} of round {record['round']}")
    found += _server(sim, out)
    return found + _members(sim, folder, spec, out)


def _server(sim: Simulation, out: Path) -> list[str]:
    expected = {name: value for name, value in sim.state().items() if not name.startswith("client")}
    saved = load_file(out / "seed-0" / "checkpoint.safetensors")
    found = [f"checkpoint lacks {name}" for name in expected if name not in saved]
    model = load_file(out / "seed-0" / "model.safetensors")
    pairs = {f"checkpoint {n}": (saved.get(n), v) for n, v in expected.items()}
    pairs |= {f"model {n}": (model.get(n), v) for n, v in sim.module().state_dict().items()}
    return found + [name for name, (one, other) in pairs.items() if not _same(one, other)]


def _members(sim: Simulation, folder: Path, spec: FederationSpec, out: Path) -> list[str]:
    """The state that a member would load after its last accepted round."""
    run = json.loads((out / "federation.json").read_bytes())["run"]
    cohorts = [record["cohort"] for record in records_of(out)]
    found = []
    for k, node in enumerate(spec.nodes):
        accepted = max((r for r, cohort in enumerate(cohorts) if k in cohort), default=-1)
        if accepted < 0:
            continue
        home = folder / "nodes" / node.name / "state" / "runs" / run
        path = home / f"state-{accepted:09d}.safetensors"
        if not path.exists():
            found.append(f"{node.name} has no state of round {accepted + 1}")
            continue
        expected = tree.to_wire(tree.take(sim.store.rows, k))
        if not tree.equal(load_file(path), expected):
            found.append(f"state of {node.name}")
    return found


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


# -- all trials -----------------------------------------------------------------------------------


def summary(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kills = [kill for one in trials for kill in one["kills"] if kill["pid"]]
    return {
        "trials": len(trials),
        "kills": {kind: sum(k["kind"] == kind for k in kills) for kind in KINDS},
        "resumed": sum(one["resumed"] for one in trials),
        "short_rounds": sum(one["short_rounds"] for one in trials),
        "equal": sum(one["equal"] for one in trials),
        "lost": sum(one["lost"] for one in trials),
    }


def record(rounds: int, trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ``--out`` holds."""
    versions = {name: version(name) for name in ("kedge", "flwr", "torch")}
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "load": round(os.getloadavg()[0], 2),
        "versions": versions | {"python": platform.python_version()},
        "setting": f"{METHOD}, {DATA}, {PARTITION}, {NODES} members, {rounds} rounds",
        "rules": RULES,
        "summary": summary(trials),
        "rows": list(trials),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="JSON file for the record")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the federation")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="kedge-kills-"))
    folder, trials = base / "f", list[dict[str, Any]]()
    spec = local.create(folder, DATA, PARTITION, NODES)
    spec = local.up(folder, spec, owner=os.getpid())
    print(f"federation in {folder}", flush=True)
    try:
        for seed in range(args.first, args.first + args.trials):
            end = time.time() + 300
            while not is_whole(folder, spec) and time.time() < end:
                time.sleep(1)
            trials.append(trial(folder, spec, base / "runs", seed, args.rounds))
            one = trials[-1]
            kinds = ", ".join(f"{k['kind']} after round {k['done']}" for k in one["kills"])
            verdict = "lost" if one["lost"] else "equal" if one["equal"] else one["differences"]
            line = f"{kinds}; resumed {one['resumed']}; {one['seconds']} s; {verdict}"
            print(f"trial {seed}: {line}", flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(record(args.rounds, trials), indent=1) + "\n")
    finally:
        local.down(folder)
    print(json.dumps(summary(trials)))
    good = all(one["equal"] for one in trials)
    if good and not args.keep:
        shutil.rmtree(base)
    else:
        print(f"kept: {base}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
