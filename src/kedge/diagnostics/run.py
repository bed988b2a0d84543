"""Diagnose a run in its folder: rebuild its simulation, take it to the wanted rounds, write sheets.

The sheets are in ``diagnosis/data.json``, ``diagnosis/training.json`` and
``diagnosis/privacy.json`` in the folder of the run.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kedge.data.datasets import load
from kedge.data.partition import Partition
from kedge.diagnostics.data.sheet import diagnose_data
from kedge.diagnostics.privacy.sheet import diagnose_privacy
from kedge.diagnostics.training.probe import Probe, probe
from kedge.diagnostics.training.sheet import diagnose_training
from kedge.engines import Execution
from kedge.engines.device import device_name, precise, resolve_device, restored_threads, use_threads
from kedge.errors import DataError, FieldError, KedgeError, NotFinite
from kedge.files import make_folder
from kedge.history.experiment import Experiment, kind_of
from kedge.history.find import no_run
from kedge.history.folder import CONFIG, METRICS, PARTITION, read_records, stored_config
from kedge.history.sheet import Sheet
from kedge.loading import files, load_options
from kedge.runs.build import simulation
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.rounds import BEST, train_record
from kedge.runs.train import memory_errors
from kedge.sim.simulation import Simulation

Client = int | str | None  # number or name; None: the largest
DIAGNOSES = ("data", "training", "privacy")
FOLDER = "diagnosis"
MAX_GAP = 1e-3  # relative difference of training losses up to which a replay is the same run

Report = Callable[[str], None]  # prints a line for the user


def diagnose_run(
    path: str | Path,
    what: str | Sequence[str] | None = None,
    rounds: Sequence[int] | None = None,
    seed: int | None = None,
    report: Report | None = None,
    client: Client = None,
) -> list[Sheet]:
    """Diagnose the run in a folder, and write a sheet for each diagnosis into it.

    The present state is that of the checkpoint: after the last round, before its last surveys. For
    other rounds the run is replayed from its seed, which is deterministic. If several seeds were
    trained as one computation, the replay of one of them may differ in the last digits.

    Args:
        path: the folder of a run; or that of a comparison, whose runs are diagnosed one by one.
        what: of ``data``, ``training`` and ``privacy``; data and training for None.
        rounds: numbers of rounds that are done when the training is diagnosed, from 0 to that of
            the checkpoint, which is the default. Privacy is diagnosed at the last of them.
        seed: one of the run's seeds; the first for None.
        report: called with lines about the work and its cost before it starts.
        client: the client whose privacy is diagnosed, by its number or name; the largest for None.

    Returns:
        The sheets in the order of ``what``; of a comparison, run by run.

    Raises:
        KedgeError: there is no such run, seed or round; its data are gone or have changed; a file
            is damaged; the run has diverged.
    """
    path = Path(path)
    what = chosen(what, ("data", "training"))
    say = report or (lambda line: None)
    if (path / CONFIG).is_file():
        return _Run(path, seed, say, _yardstick(path), client).diagnose(what, rounds)
    if kind_of(path) != "compare":
        raise KedgeError(no_run(path))
    sheets = []
    for row in Experiment(path, "compare").read():
        inside = path / row["folder"]
        if inside.is_symlink():
            say(f"{inside} is left out: it is a link")
        elif row["yardstick"]:
            say(f"{inside} is left out: it trains on pooled data, without clients")
        elif not (inside / CONFIG).is_file():
            say(f"{inside} is left out: it has not started")
        else:
            say(f"{row['name']}:")
            sheets += _Run(inside, seed, say, client=client).diagnose(what, rounds)
    return sheets


class _Run:
    """A run in its folder, with the means to rebuild it."""

    def __init__(
        self, path: Path, seed: int | None, say: Report, yardstick: str = "", client: Client = None
    ) -> None:
        self.path, self.folder, self.say = path, TrainingFolder(path), say
        self.config = stored_config(path)
        self.seed = self.config.seeds[0] if seed is None else seed
        self.yardstick, self.client = yardstick, client
        if self.seed not in self.config.seeds:
            known = ", ".join(map(str, self.config.seeds))
            raise KedgeError(f"{path} has no seed {seed}; it has: {known}")
        self.found: dict[str, Any] = {}
        if self.folder.has_environment:
            self.found = self.folder.environment()
        self.records = read_records(path / f"seed-{self.seed}" / METRICS)

    def diagnose(self, what: Sequence[str], rounds: Sequence[int] | None) -> list[Sheet]:
        if self.yardstick and set(what) != {"data"}:
            raise KedgeError(
                f"{self.path} trains on pooled data: it has one client, and no drift to diagnose"
            )
        trains = set(what) - {"data"}
        state = self._checkpoint() if trains else None
        wanted = self._rounds(rounds, state) if trains else []
        is_kept = self._make_folder()
        with restored_threads(), self._explained(), memory_errors(self.config):
            sim = self._simulation()
            with precise(self.config.precision, sim.federation.device):
                made = {name: self._made(name, sim, wanted, state) for name in _ordered(what)}
        sheets = [self._signed(made[name], rounds) for name in what]
        for sheet in sheets if is_kept else ():
            self.folder.write(f"{FOLDER}/{sheet.name}.json", sheet.to_json().encode())
        return sheets

    def _made(
        self, name: str, sim: Simulation, rounds: list[int], state: dict[str, torch.Tensor] | None
    ) -> Sheet:
        if name == "data":
            return diagnose_data(sim.federation, name=self.config.data, report=self.say)
        if name == "training":
            return diagnose_training(self._probes(sim, rounds, state))
        if sim.round != rounds[-1]:
            for _ in self._states(sim, rounds[-1:], state):
                pass
        return diagnose_privacy(sim, report=self.say, client=self.client)

    # -- states of the run ---------------------------------------------------------------------

    def _checkpoint(self) -> dict[str, torch.Tensor] | None:
        state = self.folder.load(self.seed)
        if state is None:
            return None
        return {name: value for name, value in state.items() if not name.startswith(BEST)}

    def _rounds(
        self, rounds: Sequence[int] | None, state: dict[str, torch.Tensor] | None
    ) -> list[int]:
        """The wanted numbers of rounds, in ascending order."""
        done = int(state["round"]) if state is not None and "round" in state else len(self.records)
        if rounds is None and not done:
            raise KedgeError(
                f"{self.path} has no finished round of seed {self.seed} yet. Continue it with: "
                f"kedge run --out {self.path} --resume, or diagnose its start with --rounds 0"
            )
        wanted = sorted(set(rounds)) if rounds is not None else [done]
        beyond = [r for r in wanted if not 0 <= r <= done]
        if beyond or not wanted:
            what = f"not {', '.join(map(str, beyond))}" if beyond else "at least one"
            raise KedgeError(
                f"{self.path} has {done} rounds of seed {self.seed}; choose rounds from 0 to "
                f"{done}, {what}"
            )
        return wanted

    def _probes(
        self, sim: Simulation, rounds: list[int], state: dict[str, torch.Tensor] | None
    ) -> Iterator[Probe]:
        for _ in self._states(sim, rounds, state):
            yield probe(sim)

    def _states(
        self, sim: Simulation, rounds: list[int], state: dict[str, torch.Tensor] | None
    ) -> Iterator[int]:
        """Take the simulation to every wanted round: by its checkpoint, or by a replay."""
        stored = int(state["round"]) if state is not None and "round" in state else -1
        replayed = max((r for r in rounds if r != stored), default=0)
        if replayed > sim.round:
            self.say(self._cost(replayed - sim.round))
        gaps = []
        for target in rounds:
            if target == stored and state is not None:
                try:
                    sim.load_state(state)
                except KedgeError as error:
                    where = self.path / f"seed-{self.seed}"
                    raise DataError(f"the checkpoint in {where} does not fit: {error}") from None
            while sim.round < target:
                done = sim.run_round()
                gaps.append(self._gap(train_record(sim.round, done)))
            yield target
        if max(gaps, default=0.0) > MAX_GAP:
            self.say(
                f"the replay differs from the run: its training loss by {max(gaps):.2%} at most. "
                "Another device, number of threads or version of torch may be the reason"
            )

    def _gap(self, record: dict[str, Any]) -> float:
        """The relative difference of a replayed round's training loss to that of the run."""
        now, known = record["train_loss"], {r["round"]: r["train_loss"] for r in self.records}
        before = known.get(record["round"], now)
        return abs(now - before) / max(abs(before), 1e-12)

    def _cost(self, rounds: int) -> str:
        text = f"replaying {rounds} round{'s' if rounds > 1 else ''} of seed {self.seed}"
        seconds = [r["seconds"] for r in self.records[:rounds] if "seconds" in r]
        return f"{text}: about {_duration(sum(seconds))}, as the run took" if seconds else text

    # -- the simulation ------------------------------------------------------------------------

    def _simulation(self) -> Simulation:
        """The simulation of the run, before its first round, on the data that it was trained on."""
        config, path = self.config, self.path
        if config.data == "own":
            raise KedgeError(
                f"{path} was trained on data in memory (kedge.fit), which cannot be read again. "
                "Diagnose a Simulation of them: kedge.diagnostics.training.diagnose_training"
            )
        try:
            dataset = load(config.data)
        except KedgeError as error:
            raise DataError(f"the data of the run in {path} cannot be read: {error}") from None
        self._check_same(dataset.fingerprint)
        absent = config.device.startswith("cuda") and not torch.cuda.is_available()
        device = resolve_device("cpu" if absent else config.device)
        execution = self._execution(device)
        pooled = bool(self.yardstick)
        sim = simulation(config, dataset, self.seed, device, execution, pooled=pooled)
        self._check_partition(sim.federation.partition)
        return sim

    def _execution(self, device: torch.device) -> Execution:
        """How the run was computed; one client after the other where that is not known."""
        name = device_name(device)
        if self.found.get("device") == name:
            use_threads(self.found["threads"])
            return dataclasses.replace(Execution(**self.found["how"]), folder="")
        if self.found:
            self.say(
                f"{self.path} was trained on {self.found['device']!r}, this is {name!r}: numbers "
                "may differ in the last digits, and more after a replay"
            )
        return Execution("loop")

    def _check_same(self, fingerprint: str) -> None:
        before = self.found.get("data", "")
        if before and fingerprint and before != fingerprint:
            raise DataError(
                f"the data have changed since {self.path} was trained (fingerprint {before}, now "
                f"{fingerprint}): its models would be measured on other samples. Restore the data"
            )
        for file in self.found.get("loaded", []):
            known = files.get(Path(file["path"]))
            if known is not None and known.sha256 != file["sha256"]:
                raise KedgeError(
                    f"{file['path']} has changed since {self.path} was trained with it; restore it"
                )

    def _check_partition(self, partition: Partition | None) -> None:
        path = self.path / f"seed-{self.seed}" / PARTITION
        if partition is None or not path.is_file():
            return
        before = Partition.load(path).hash
        if before != partition.hash:
            raise DataError(
                f"the partition of seed {self.seed} has changed since {self.path} was trained "
                f"(hash {before}, now {partition.hash}); restore the data and the partition's file"
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except NotFinite as error:
            text = f"{self.path} has diverged: {error}. Earlier rounds can be diagnosed: --rounds"
            raise NotFinite(text) from None

    # -- sheets --------------------------------------------------------------------------------

    def _make_folder(self) -> bool:
        """Make the folder of the sheets; whether it can be written, as that of others may not."""
        folder = self.path / FOLDER
        if not os.access(folder if folder.is_dir() else self.path, os.W_OK):
            self.say(f"{self.path} cannot be written, so that the diagnosis is not kept there")
            return False
        try:
            make_folder(folder, inside=self.path)
        except OSError as error:
            raise DataError(f"{folder} cannot be made: {error.strerror}") from None
        return True

    def _signed(self, sheet: Sheet, rounds: Sequence[int] | None) -> Sheet:
        command = f"kedge diagnose {shlex.quote(str(self.path))} --what {sheet.name}"
        if rounds is not None and sheet.name != "data":
            command += f" --rounds {','.join(map(str, sorted(set(rounds))))}"
        if self.seed != self.config.seeds[0]:
            command += f" --seed {self.seed}"
        if self.client is not None and sheet.name == "privacy":
            command += f" --client {shlex.quote(str(self.client))}"
        date = time.strftime("%Y-%m-%d %H:%M")
        return dataclasses.replace(sheet, command=command + load_options(), date=date)


def chosen(what: str | Sequence[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """The names of diagnoses, once each; a FieldError if one does not exist."""
    names = tuple(n.strip() for n in what.split(",")) if isinstance(what, str) else what
    names = default if names is None else tuple(dict.fromkeys(names))
    wrong = next((name for name in names or ("",) if name not in DIAGNOSES), None)
    if wrong is not None:
        raise FieldError(f"what = {wrong!r} is not one of: {', '.join(DIAGNOSES)}", field="what")
    return names


def _ordered(what: Sequence[str]) -> list[str]:
    """What to diagnose, once each; privacy after training, which takes the run further."""
    return [name for name in DIAGNOSES if name in what]


def _yardstick(path: Path) -> str:
    """The yardstick that a run of a comparison is; empty for all others."""
    listing = Experiment(path.resolve().parent, "compare")
    rows = listing.read() if listing.path.is_file() else []
    return next((row["yardstick"] for row in rows if row["folder"] == path.resolve().name), "")


def _duration(seconds: float) -> str:
    """A duration in words: ``8 s``, ``3 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
