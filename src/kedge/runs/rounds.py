"""Rounds of one or several simulations in lockstep: train, test, record, save."""

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
from kedge.runs.divergence import LossGuard
from kedge.runs.folder import Folder
from kedge.runs.measure import measure
from kedge.sim.fleet import Fleet
from kedge.sim.simulation import Simulation

Watch = Callable[[int, dict[str, Any]], None]  # (seed, record of a round)
MAX_SAVE_SHARE = 0.1  # of the time, spent on checkpoints


@dataclass
class Member:
    """One seed of a run: its simulation, its records, and where they are saved."""

    config: Config
    seed: int
    sim: Simulation
    folder: Folder | None = None
    watch: Watch | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""  # the reason, if it ended before its last round

    def __post_init__(self) -> None:
        self.guard = LossGuard(self.sim, self.config)

    @property
    def finished(self) -> bool:
        return bool(self.failed) or self.sim.round == self.config.rounds

    def start(self) -> None:
        """Load the checkpoint, if there is one."""
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

    def record_round(self, totals: Totals, seconds: float) -> None:
        """Test the model after a round that took ``seconds``, and record the round."""
        begin = time.perf_counter()
        if self.sim.round == self.config.rounds:
            self.sim.finish()
        record = round_record(self.sim, self.config, totals)
        self.guard.check(record)
        record["seconds"] = seconds + time.perf_counter() - begin
        self.records.append(record)
        if self.folder:
            self.folder.record(self.seed, record)
        if self.watch:
            self.watch(self.seed, record)

    def fail(self, reason: str) -> None:
        """End this seed before its last round."""
        self.failed = reason
        if self.folder:
            self.folder.log(f"seed {self.seed}: {reason}")


def train(members: Sequence[Member], hint: str, strict: bool = True) -> list[int]:
    """Train all members to their last round, from their checkpoints if there are any.

    Rounds run in lockstep: the recorded ``seconds`` of a round are the training time divided by
    the number of members, plus the time of the member's own test.

    Args:
        members: seeds with simulations of one structure and the same number of rounds.
        hint: printed on interrupt: how to resume.
        strict: raise if a loss is not finite; otherwise only that member ends.

    Returns:
        The number of lanes of each stack; empty if all members were complete before.

    Raises:
        Interrupted: the user pressed Ctrl-C; the checkpoints are saved.
        NotFinite: a loss is not finite, and ``strict`` is set.
    """
    for member in members:
        member.start()
    if all(member.finished for member in members):
        return []
    fleet, saver = Fleet([member.sim for member in members], strict), _Saver(members)
    with _deferred_interrupt() as interrupted:
        while not all(member.finished for member in members):
            begin = time.perf_counter()
            round_totals = fleet.run_round()
            for i, error in fleet.failed.items():
                if not members[i].failed:
                    members[i].fail(str(error))
            pairs = zip(members, round_totals, strict=True)
            trained = [(member, totals) for member, totals in pairs if totals]
            seconds = (time.perf_counter() - begin) / max(1, len(trained))
            for member, totals in trained:
                member.record_round(totals, seconds)
            done = all(member.finished for member in members)
            saver.save(force=done or interrupted.is_set())
            if interrupted.is_set() and not done:
                seeds = sorted({member.seed for member in members})
                names = ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))
                raise Interrupted(f"stopped after round {fleet.round} of {names}. {hint}")
    return fleet.lanes


def round_record(sim: Simulation, config: Config, totals: Totals) -> dict[str, Any]:
    """The record of the last round: training loss, divergence and traffic.

    Every ``eval_every`` rounds, and after the last one, also the metrics on the test data.
    """
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
    return record | measure(sim, config, final=sim.round == config.rounds)


class _Saver:
    """Saves checkpoints of all members after a round, at most ``MAX_SAVE_SHARE`` of the time."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.last, self.cost = float("-inf"), 0.0

    def save(self, force: bool) -> None:
        now = time.perf_counter()
        if not (force or self.cost < MAX_SAVE_SHARE * (now - self.last)):
            return
        for member in self.members:
            if member.folder is not None:
                member.folder.save(member.seed, member.sim.state())
        self.last = time.perf_counter()
        self.cost = self.last - now


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, so that the round is completed; the second interrupts."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
