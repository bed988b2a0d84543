"""A run on disk: its configuration and environment; partition, metrics and checkpoint of each seed.

::

    runs/digits-scaffold-1/
        config.toml            every setting
        environment.json       versions, device, threads, precision, execution, loaded files, data
        log.txt                events with times
        bundle.json            the model but for its weights, see kedge.runs.bundle
        run.json               task, metrics and headline, see kedge.runs.header
        result.json            the summary, once the run is complete
        federation.json        terms and members, of a run with remote members
        seats.json             what members show when they come back; for the owner alone
        notes.json             tags and a note of the user, see kedge.runs.notes
        stop                   asks the training to stop after its round, see kedge.runs.stopping
        log-NAME/              what a logger wrote
        seed-0/partition.json
        seed-0/clients.json    names, sizes and class counts of the clients
        seed-0/metrics.jsonl   one line per round
        seed-0/checkpoint.safetensors
        seed-0/model.safetensors     weights of the global model, once the seed is complete
        seed-0/best.safetensors      those of the best round on the validation data, if there are
        seed-0/personal.safetensors  those of all clients, if they have personal models
        seed-0/best_personal.safetensors  the same of the best round
        seed-0/scores.json           its metrics: global, per client, per class; confusion matrix

A folder is claimed once data, model and method are in order, and given back if a new run ends
before its first checkpoint. Files are written atomically: under a temporary name, then renamed. The
metrics of a round are written before its checkpoint, so a killed run has all metrics up to its
checkpoint; later ones are dropped on resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge._version import __version__
from kedge.errors import DataError, KedgeError
from kedge.files import (
    append_file,
    check_links,
    create_file,
    make_folder,
    remove_file,
    write_file,
)
from kedge.runs.config import Config
from kedge.runs.environment import CONFIG, ENVIRONMENT, read_environment, stored_config
from kedge.runs.header import HEADER
from kedge.runs.lock import Lock
from kedge.runs.resuming import FEDERATION, SEATS, check_remote, check_settings
from kedge.runs.saved import NUMBERS, read_records
from kedge.runs.stopping import clear_stop
from kedge.runs.tensors import open_tensors, safetensors_of

CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"
BEST_MODEL, PERSONAL = "best.safetensors", "personal.safetensors"
BEST_PERSONAL = "best_personal.safetensors"
#: Files of a run that exist before its first checkpoint.
OWN_FILES = (
    CONFIG, ENVIRONMENT, "log.txt", HEADER, "result.json", "bundle.json", FEDERATION, SEATS
)  # fmt: skip
#: Folders of runs that this process has claimed, in order; the log of an error goes to the last.
opened: list[Path] = []
#: Format of checkpoints, in the metadata of the file; a file without a number has format 1.
#: Increase it with every change that an older kedge would misread. Since format 2 a checkpoint is
#: from before the surveys after the last round, and may hold the best weights.
FORMAT, FORMAT_KEY = 2, "kedge.format"
METRICS, PARTITION, SCORES = "metrics.jsonl", "partition.json", "scores.json"
CLIENTS = "clients.json"


class Folder:
    """The folder of a run. Nothing is written before :meth:`claim`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._pending: Config | None = None  # written by `claim`
        self._numbered = False
        self._created: list[Path] = []  # folders made by `claim`
        self._is_new = self._is_resumed = self.is_claimed = False
        self.lock = Lock()

    @classmethod
    def create(cls, path: str | Path, config: Config, numbered: bool = False) -> Folder:
        """The folder of a new run, to be claimed.

        Args:
            path: the folder.
            config: the settings of the run.
            numbered: whether ``path`` is from :func:`new_path`, so that the next number will do if
                another process claims it first.

        Raises:
            KedgeError: the folder holds a run already.
            DataError: the folder cannot be created.
        """
        folder = cls(path)
        folder._pending, folder._numbered = config, numbered
        folder._check_free()
        nearest = next(p for p in (folder.path, *folder.path.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise DataError(f"{path} cannot be created: {nearest} is a file")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise DataError(f"{path} cannot be created: {nearest} is not writable")
        return folder

    @classmethod
    def resume(
        cls, path: str | Path, config: Config | None, remote: bool | None = False
    ) -> tuple[Folder, Config]:
        """Open the folder of a run, and return it with its configuration.

        Args:
            path: the folder.
            config: the settings of the run, if they are given again. They may have more rounds than
                the run was started with: the run is extended.
            remote: whether the run goes on with remote members; None: either will do.

        Raises:
            KedgeError: the folder has links, or holds no run, a simulated one in place of a
                federation or the other way round, or one with other settings.
        """
        folder = cls(path)
        check_links(folder.path)
        if not (folder.path / CONFIG).is_file():
            raise KedgeError(
                f"{path} holds no run to resume; leave out --resume to start one there"
            )
        check_remote(folder.path, remote, any(folder.path.glob(f"seed-*/{CHECKPOINT}")))
        stored, folder._is_resumed = stored_config(folder.path), True
        if config is None or config == stored:
            return folder, stored
        check_settings(folder.path, stored, config)
        folder._pending = config
        return folder, config

    def claim(self) -> None:
        """Make the folder that of the run: write its configuration.

        Raises:
            KedgeError: another process has just claimed it, or trains in it.
            DataError: it cannot be written.
        """
        config, self._pending = self._pending, None
        if not self._is_resumed and config is not None:
            self._take(config)
        self.lock.take(self.path)
        if self._is_resumed and config is not None and self._is_extension(config):
            for seed in config.seeds:
                self.load(seed)  # raises if it is damaged: then the results must stay
            for name in (
                "result.json",
                *(f"seed-*/{n}" for n in (MODEL, BEST_MODEL, PERSONAL, BEST_PERSONAL, SCORES)),
            ):
                for path in self.path.glob(name):  # those of fewer rounds
                    remove_file(path, inside=self.path)
            self.write(CONFIG, config.to_toml().encode())
            self.log(f"extended to {config.rounds} rounds")
        for path in self.path.glob("seed-*/.*.part"):  # of a process that was killed
            remove_file(path, inside=self.path)
        opened.append(self.path)
        clear_stop(self.path)
        self.is_claimed = True

    def _is_extension(self, config: Config) -> bool:
        return stored_config(self.path).rounds < config.rounds

    def _take(self, config: Config) -> None:
        while True:
            made = [p for p in (self.path, *self.path.parents) if not p.exists()]
            try:
                make_folder(self.path)
                self._created = made
                create_file(self.path / CONFIG)  # fails if another process was faster
                break
            except FileExistsError:
                if not self._numbered:
                    self._check_free()
                    raise DataError(f"{self.path} cannot be created: it is a file") from None
                self.path = new_path(config, self.path.parent)
            except OSError as error:
                raise DataError(f"{self.path} cannot be created: {error.strerror}") from None
        self._is_new = True
        self.write(CONFIG, config.to_toml().encode())

    def _check_free(self) -> None:
        if (self.path / CONFIG).exists():
            raise KedgeError(
                f"{self.path} holds a run already. Continue it with --resume, or choose another "
                "--out"
            )

    def release(self) -> None:
        """Delete what this process wrote if the run is new and has no checkpoint yet."""
        if not self._is_new or any(self.path.glob(f"seed-*/{CHECKPOINT}")):
            return
        self.lock.give_back()
        early = (PARTITION, CLIENTS, METRICS)
        for pattern in (*OWN_FILES, *(f"seed-*/{n}" for n in early), "**/.*.part"):
            for path in self.path.glob(pattern):
                with contextlib.suppress(OSError):  # a folder that is a link is not entered
                    remove_file(path, inside=self.path)
        with contextlib.suppress(OSError):  # other files stay
            for path in self.path.glob("seed-*"):
                path.rmdir()
            for path in self._created:
                path.rmdir()

    def seed(self, seed: int) -> Path:
        """The folder of a seed; it is created if needed."""
        path = self.path / f"seed-{seed}"
        try:
            make_folder(path, inside=self.path)
        except OSError as error:
            raise DataError(f"{path} cannot be made: {error.strerror}") from None
        return path

    def write(
        self, name: str, content: bytes | Iterable[bytes | memoryview], private: bool = False
    ) -> None:
        """Write a file atomically; ``content`` may be an iterator over its parts.

        Raises:
            DataError: the file cannot be written, e.g. since the disk is full.
        """
        target = self.path / name
        try:
            write_file(target, content, private=private, inside=self.path)
        except OSError as error:
            raise DataError(
                f"{target} cannot be written: {error.strerror}. Earlier files are intact; "
                "free some disk space and continue with --resume"
            ) from None

    def append(self, name: str, line: str) -> None:
        """Append a line to a file."""
        try:
            append_file(self.path / name, line + "\n", inside=self.path)
        except OSError as error:
            raise DataError(
                f"{self.path / name} cannot be written: {error.strerror}. "
                "Free some disk space and continue with --resume"
            ) from None

    @property
    def has_environment(self) -> bool:
        return (self.path / ENVIRONMENT).exists()

    def environment(self) -> dict[str, Any]:
        """The environment in which the run was started; a DataError if the file is damaged."""
        return read_environment(self.path / ENVIRONMENT)

    def save_environment(self, environment: dict[str, Any]) -> None:
        self.write(ENVIRONMENT, json.dumps(environment).encode())

    def log(self, text: str) -> None:
        self.append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}")

    # -- checkpoints --------------------------------------------------------------------------

    def save(self, seed: int, state: dict[str, torch.Tensor]) -> None:
        """Write a checkpoint: the state of a simulation after a round."""
        self.seed(seed)
        self.write(f"seed-{seed}/{CHECKPOINT}", safetensors_of(state, {FORMAT_KEY: str(FORMAT)}))

    def save_model(
        self,
        seed: int,
        module: nn.Module,
        metadata: dict[str, str] | None = None,
        name: str = MODEL,
    ) -> None:
        """Write the weights of a global model: the last one, or the best one."""
        state = {n: v.detach() for n, v in module.state_dict().items()}
        self.write(f"seed-{seed}/{name}", safetensors_of(state, metadata or {}))

    def load(self, seed: int) -> dict[str, torch.Tensor] | None:
        """Read the checkpoint of a seed; None if there is none.

        Raises:
            DataError: the file is damaged, or a newer kedge wrote it in another format.
        """
        path = self.path / f"seed-{seed}" / CHECKPOINT
        if not path.exists():
            return None
        with open_tensors(path, f"delete it to run seed {seed} from the start") as file:
            found = (file.metadata() or {}).get(FORMAT_KEY, "1")
            if found not in map(str, range(1, FORMAT + 1)):
                raise DataError(
                    f"{path} has checkpoint format {found}; kedge {__version__} reads "
                    f"formats up to {FORMAT}. Resume with the kedge that wrote it, or delete it to "
                    f"run seed {seed} from the start"
                )
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def record(self, seed: int, record: dict[str, Any]) -> None:
        """Append the record of a round to the metrics of a seed."""
        self.append(f"seed-{seed}/{METRICS}", json.dumps(record))

    def records(self, seed: int, rounds: int) -> list[dict[str, Any]]:
        """Read the metrics of the first ``rounds`` rounds, and drop later ones from the file.

        Raises:
            DataError: the file is damaged. A last line that is incomplete is dropped.
        """
        path = self.path / f"seed-{seed}" / METRICS
        known = read_records(path)
        found = [r for r in known if r["round"] <= rounds and r.keys() >= set(NUMBERS)]
        if [r["round"] for r in found] != list(range(1, rounds + 1)):
            raise DataError(
                f"{path} is damaged: it has {len(found)} of the first {rounds} rounds; restore it, "
                f"or delete the folder {path.parent} to run seed {seed} from the start"
            )
        self.rewrite_records(seed, found)
        return found

    def rewrite_records(self, seed: int, records: list[dict[str, Any]]) -> None:
        """Replace the metrics of a seed."""
        text = "".join(json.dumps(r) + "\n" for r in records)
        self.write(f"seed-{seed}/{METRICS}", text.encode())


def new_path(config: Config, root: str | Path = "runs", kind: str = "") -> Path:
    """An unused folder for a run, named by its data and method: ``runs/digits-scaffold-1``.

    ``kind`` takes the place of the method, such as ``compare``.
    """
    data = config.data if Path(config.data).exists() else config.data.split("(")[0]
    words = f"{Path(data.rstrip('/')).name}-{kind or config.method}"
    slug = "".join(c if c.isalnum() else "-" for c in words.lower())
    slug = "-".join(piece for piece in slug.split("-") if piece)[:60]
    number = 1
    while (Path(root) / f"{slug}-{number}").exists():
        number += 1
    return Path(root) / f"{slug}-{number}"
