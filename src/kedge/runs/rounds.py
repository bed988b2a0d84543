"""Rounds of one or several simulations in lock-step: train, test, record, save."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kedge.core.server import Totals
from kedge.core.tree import sq_norm
from kedge.errors import Interrupted
from kedge.runs.config import Config
from kedge.runs.folder import Folder
from kedge.sim.fleet import Fleet
from kedge.sim.simulation import Simulation

Watch = Callable[[int, dict[str, Any]], None]  # (seed, record of a round)
SAVE_SHARE = 0.1  # at most this share of the time goes into checkpoints


@dataclass
class Member:
    """One seed of a run, and where its records go."""

    config: Config
    seed: int
    sim: Simulation
    folder: Folder | None = None
    watch: Watch | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""  # why it ended before its last round

    @property
    def ended(self) -> bool:
        return bool(self.failed) or self.sim.round == self.config.rounds

    def start(self) -> None:
        """From the checkpoint if there is one."""
        if self.folder is None:
            return
        state = self.folder.load(self.seed)
        if state:
            self.sim.load_state(state)
            self.records = self.folder.records(self.seed, self.sim.round)
            self.folder.log(f"seed {self.seed}: resumed after round {self.sim.round}")
        else:
            self.folder.seed(self.seed)
            self.folder.records(self.seed, 0)
            self.folder.log(f"seed {self.seed}: started")

    def note(self, totals: Totals, seconds: float) -> None:
        """Test and record the round that has just ended and took so long."""
        begin = time.perf_counter()
        if self.sim.round == self.config.rounds:
            self.sim.finish()
        record = measure(self.sim, self.config, totals)
        record["seconds"] = seconds + time.perf_counter() - begin
        self.records.append(record)
        if self.folder:
            self.folder.record(self.seed, record)
        if self.watch:
            self.watch(self.seed, record)

    def stop(self, reason: str) -> None:
        self.failed = reason
        if self.folder:
            self.folder.log(f"seed {self.seed}: {reason}")


def train(members: Sequence[Member], hint: str, strict: bool = True) -> list[int]:
    """Train to the end, from checkpoints where there are some; the lanes of each stack that ran.

    Rounds are run in lock-step, so the ``seconds`` of a round are the time that all members spent
    in it divided by their number, and the time for its own test. ``hint`` is told to who stops it.
    With ``strict=False`` a member whose loss is not finite ends alone.
    """
    for member in members:
        member.start()
    if all(member.ended for member in members):
        return []
    fleet, saver = Fleet([member.sim for member in members], strict), _Saver(members)
    with _patient_interrupt() as interrupted:
        while not all(member.ended for member in members):
            begin = time.perf_counter()
            found = fleet.run_round()
            for i, error in fleet.failed.items():
                if not members[i].failed:
                    members[i].stop(str(error))
            moved = [(m, totals) for m, totals in zip(members, found, strict=True) if totals]
            seconds = (time.perf_counter() - begin) / max(1, len(moved))
            for member, totals in moved:
                member.note(totals, seconds)
            done = all(member.ended for member in members)
            saver.save(force=done or interrupted.is_set())
            if interrupted.is_set() and not done:
                seeds = sorted({member.seed for member in members})
                names = ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))
                raise Interrupted(f"stopped after round {fleet.round} of {names}. {hint}")
    return fleet.lanes


def measure(sim: Simulation, config: Config, totals: Totals) -> dict[str, Any]:
    """What is reported of a round."""
    weight = totals["weight"]
    mean = {n: d / weight for n, d in totals["weighted_delta"].params.items()}
    spread = float(totals["sq_norm"] / weight - sq_norm(mean)) if mean else 0.0
    record: dict[str, Any] = {
        "round": sim.round,
        "train_loss": float(totals["terms"]["task"].mean()),
        "divergence": max(0.0, spread) ** 0.5,
        "mb_up": totals["up_bytes"] / 1e6,
        "mb_down": totals["down_bytes"] / 1e6,
    }
    if sim.round % config.eval_every and sim.round != config.rounds:
        return record
    fed, metric = sim.federation, sim.federation.task.metric
    report, record["per_class"] = sim.evaluate_all()
    record |= report
    if fed.held_out:
        for name in ("client", *(("personal",) if config.personal else ())):
            values = [r.get(metric) for r in sim.evaluate_clients(personal=name == "personal")]
            there = [v for v in values if v is not None]
            worst = min(there) if fed.task.higher_is_better else max(there)
            record |= {
                f"per_{name}": values,
                f"{name}_mean": sum(there) / len(there),
                f"{name}_worst": worst,
            }
    return record


class _Saver:
    """Checkpoints after a round, of all members or none, unless they would take too much of the
    time."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.last, self.cost = float("-inf"), 0.0

    def save(self, force: bool) -> None:
        now = time.perf_counter()
        if not (force or self.cost < SAVE_SHARE * (now - self.last)):
            return
        for member in self.members:
            if member.folder is not None:
                member.folder.save(member.seed, member.sim.state())
        self.last = time.perf_counter()
        self.cost = self.last - now


@contextmanager
def _patient_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C asks to stop after the round, the second stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGINT, ask)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
