"""Rounds of one or several simulations in lockstep: train, test, record, save."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kedge.core.bound import Server
from kedge.errors import Interrupted, NotFinite
from kedge.history.folder import is_stop_requested
from kedge.history.run import UNTESTED
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.divergence import LossGuard, explained
from kedge.runs.measure import measure
from kedge.runs.validation import RoundChoice, choice_of, further_tests
from kedge.saved.bundle import personal_state
from kedge.session.session import Done
from kedge.settings import Config
from kedge.sim.fleet import Fleet
from kedge.sim.simulation import Simulation

#: (seed, record of a round); if it returns True, the training stops after this round, saved.
SeedWatch = Callable[[int, dict[str, Any]], bool | None]
Tensors = dict[str, torch.Tensor]
MAX_SAVE_SHARE = 0.1  # of the time, spent on checkpoints
BEST = "best:"  # prefix of the best weights' names in a checkpoint
OWN = "personal:"  # prefix of personal weights among the best ones


@dataclass
class SeedRun:
    """One seed of a run: its simulation, its records, and where they are saved."""

    config: Config
    seed: int
    sim: Simulation
    folder: TrainingFolder | None = None
    watch: SeedWatch | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""  # the reason, if it ended before its last round
    stopped: bool = False  # early, by validation data
    stop_requested: bool = False  # by ``watch``
    choice: RoundChoice | None = None  # None without validation data
    #: Weights of the best round so far: of the global model and, stacked, the personal ones.
    best: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        #: Server and best weights before the surveys and the test after the last round: what a
        #: checkpoint holds, so that a run can be extended.
        self._before_end: tuple[Server, Tensors] | None = None
        self.choice = choice_of(self.config, self.sim)
        self.guard = LossGuard(self.sim, self.config)

    @property
    def finished(self) -> bool:
        return bool(self.failed) or self.stopped or self.sim.round == self.config.rounds

    @property
    def is_asked_to_stop(self) -> bool:
        """By ``watch``, or by a file in the folder."""
        return self.stop_requested or (
            self.folder is not None and is_stop_requested(self.folder.path)
        )

    def start(self) -> None:
        """Load the checkpoint, if there is one."""
        if self.folder is None:
            return
        state = self.folder.load(self.seed)
        if state:
            self.best = {n.removeprefix(BEST): state.pop(n) for n in [*state] if n.startswith(BEST)}
            self.sim.load_state(state)
            self.records = self.folder.records(self.seed, self.sim.round)
            self._resume()
            self.folder.log(f"seed {self.seed}: resumed after round {self.sim.round}")
            if not self.finished:
                self.folder.save_state(self.seed, "training")
        else:
            self.folder.seed(self.seed)
            self.folder.records(self.seed, 0)
            self.folder.log(f"seed {self.seed}: started")
            self.folder.save_state(self.seed, "training")

    def _resume(self) -> None:
        """Be as after the last record: of a complete run, or of one that was cut or is extended."""
        if self.records:
            self.stopped = bool(self.records[-1].get("stopped"))
        *earlier, last = self.records or [{}]
        for record in earlier:
            if self.choice:
                self.choice.see(record)
        if self.finished:
            self._end()
        elif last:  # it may have been tested as the last round of a shorter run
            last = {key: last[key] for key in UNTESTED if key in last}
            last |= self._tests() if due(self.sim, self.config) else {}
            self.guard.check(last)
            self.records = [*earlier, last]
            if self.folder:
                self.folder.rewrite_records(self.seed, self.records)
        if last:
            self._choose(last)

    def record_round(self, done: Done, seconds: float) -> None:
        """Test the model after a round that took ``seconds``, and record the round."""
        begin = time.perf_counter()
        if self.sim.round == self.config.rounds:
            self._end()
        record = train_record(self.sim.round, done)
        if due(self.sim, self.config):
            tested = self._tests()
            if self.choice and self.choice.would_end(record | tested):
                if self._before_end is None:
                    self._end()
                    tested = self._tests(final=True)
                if self.sim.round < self.config.rounds:
                    self.stopped = True
                    record["stopped"] = True
            record |= tested
        self._choose(record)
        self.guard.check(record)
        record["seconds"] = seconds + time.perf_counter() - begin
        self.records.append(record)
        if self.folder:
            self.folder.record(self.seed, record)
            if self.stopped and self.choice:
                self.folder.log(
                    f"seed {self.seed}: stopped after round {self.sim.round}; "
                    f"round {self.choice.round} was best on validation data"
                )
        if self.watch:
            self.stop_requested = bool(self.watch(self.seed, record))

    def state(self) -> Tensors:
        """What a checkpoint holds: see :meth:`Simulation.state`; and the best weights so far."""
        server, best = self._before_end or (self.sim.server, self.best)
        return self.sim.state(server) | {BEST + name: value for name, value in best.items()}

    def fail(self, reason: str) -> None:
        """End this seed before its last round."""
        self.failed = reason
        if self.folder:
            self.folder.log(f"failed: seed {self.seed}: {reason}")
            self.folder.save_state(self.seed, "diverged", reason)

    def _end(self) -> None:
        """Run the surveys after the last round."""
        if self._before_end is None:
            self._before_end = self.sim.server, self.best
            self.sim.finish()

    def _tests(self, final: bool = False) -> dict[str, Any]:
        """Metrics after the present round; the final ones are more detailed."""
        final = final or self.sim.round == self.config.rounds
        return measure(self.sim, self.config, final) | further_tests(self.sim, self.config)

    def _choose(self, record: dict[str, Any]) -> None:
        """Keep the weights of the present round if it is the best on validation data."""
        if not (self.choice and self.choice.see(record)):
            return
        weights = self.sim.module().state_dict()
        if self.choice.key == "personal_validation" and self.sim.has_personal_models:
            own = personal_state(self.sim.personal(), self.sim)
            weights = weights | {OWN + name: value for name, value in own.items()}
        self.best = {n: v.detach().cpu().clone().contiguous() for n, v in weights.items()}


def train_rounds(
    members: Sequence[SeedRun], hint: str, strict: bool = True, save_share: float = MAX_SAVE_SHARE
) -> list[int]:
    """Train all members to their last round, from their checkpoints if there are any.

    Rounds run in lockstep: the recorded ``seconds`` of a round are the training time divided by
    the number of members, plus the time of the member's own test.

    Args:
        members: seeds with simulations of one structure and the same number of rounds.
        hint: printed on interrupt: how to resume.
        strict: raise if a loss is not finite; otherwise only that member ends.
        save_share: of the time, spent on checkpoints at most.

    Returns:
        The number of lanes of each stack; empty if all members were complete before.

    Raises:
        Interrupted: the user pressed Ctrl-C, or ``watch`` or a file in a folder requested a stop;
            the checkpoints are saved.
        NotFinite: a loss is not finite, and ``strict`` is set.
    """
    for member in members:
        member.start()
    if all(member.finished for member in members):
        return []
    fleet, saver = Fleet([member.sim for member in members], strict), _Saver(members, save_share)
    for i, member in enumerate(members):
        if member.stopped:
            fleet.end(i)
    with _deferred_interrupt() as interrupted:
        while not all(member.finished for member in members):
            begin = time.perf_counter()
            try:
                rounds = fleet.run_round()
            except NotFinite as failure:
                raise explained(failure, members[0].sim) from None
            for i, error in fleet.failed.items():
                if not members[i].failed:
                    members[i].fail(str(error))
            pairs = zip(members, rounds, strict=True)
            trained = [(i, member, done) for i, (member, done) in enumerate(pairs) if done]
            seconds = (time.perf_counter() - begin) / max(1, len(trained))
            for i, member, done in trained:
                member.record_round(done, seconds)
                if member.stopped:
                    fleet.end(i)
            finished = all(member.finished for member in members)
            stop = interrupted.is_set() or any(member.is_asked_to_stop for member in members)
            saver.save(force=finished or stop)
            if stop and not finished:
                seeds = sorted({member.seed for member in members})
                names = ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))
                raise Interrupted(f"stopped after round {fleet.round} of {names}. {hint}")
    return fleet.lanes


def due(sim: Simulation, config: Config) -> bool:
    """Whether the last round is tested: every ``eval_every`` rounds, and after the last one."""
    return sim.round % config.eval_every == 0 or sim.round == config.rounds


def train_record(round: int, done: Done) -> dict[str, Any]:
    """Training loss (of no client: 0), divergence and traffic of a round.

    Args:
        round: its number, from 1.
        done: what it came to.
    """
    summed, losses = done.totals.summed, done.losses
    norms = [_sq_norm_of_mean(d, summed.weight) for d in summed.delta.params.values()]
    spread = float(summed.sq_norm / summed.weight - sum(norms[1:], norms[0])) if norms else 0.0
    return {
        "round": round,
        "train_loss": float(losses["task"].mean()) if losses else 0.0,
        "divergence": max(0.0, spread) ** 0.5,
        "mb_up": done.up_bytes / 1e6,
        "mb_down": done.down_bytes / 1e6,
    }


def _sq_norm_of_mean(weighted: Tensor, weight: Tensor) -> Tensor:
    """The squared norm of a leaf of the mean update, with one temporary copy of it."""
    mean = weighted / weight
    return mean.mul_(mean).sum()


class _Saver:
    """Saves checkpoints of all members after a round, at most ``share`` of the time."""

    def __init__(self, members: Sequence[SeedRun], share: float) -> None:
        self.members, self.share = members, share
        self.last, self.cost = float("-inf"), 0.0

    def save(self, force: bool) -> None:
        now = time.perf_counter()
        if not (force or self.cost < self.share * (now - self.last)):
            return
        for member in self.members:
            if member.folder is not None:
                member.folder.save(member.seed, member.state())
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
