"""``load``: a run from its folder, with a model that predicts from raw inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import DataError, KedgeError, ModelError, UnknownName
from kedge.files import parse_json
from kedge.history.find import no_run
from kedge.history.folder import (
    BUNDLE,
    CONFIG,
    METRICS,
    RESULT,
    read_own_json,
    read_records,
    stored_config,
)
from kedge.history.read import read_run
from kedge.history.run import frame_of
from kedge.saved.architecture import Bounded, rebuild
from kedge.saved.bundle import (
    CLIENTS_KEY,
    FILES,
    PROBE_KEY,
    differs,
    read_bundle,
    read_metadata,
    read_weights,
)
from kedge.saved.predictor import Predictor
from kedge.settings import Config

Given = nn.Module | Callable[[], nn.Module]  # a user's own module, or what makes it


def load(
    folder: str | Path,
    seed: int | None = None,
    which: str = "last",
    model: Given | None = None,
) -> Run:
    """Open the folder of a run: its trained model, its settings and its records.

    The data of the run are not needed.

    Args:
        folder: the folder of a run (``kedge run``, :func:`kedge.run` or :func:`kedge.fit` with
            ``out=``), or the folder of one method in that of a comparison.
        seed: the seed whose model is taken; None takes the first one.
        which: ``last``, or ``best``: the best round on the validation data.
        model: your own module, or a function that makes it, where a run by :func:`kedge.fit`
            cannot build it again; the weights of the run are loaded into it.

    Returns:
        The run; ``run.model`` predicts from raw inputs.

    Raises:
        KedgeError: the folder holds no run, or there is no such seed or model in it.
        DataError: the run is not complete, or its files are damaged.

    >>> import kedge, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = kedge.run("fedavg", rounds=1, seeds=[0], out=folder)
    >>> import numpy as np
    >>> kedge.load(folder).model.predict_proba(np.zeros((3, 8, 8), "uint8")).shape
    (3, 10)
    """
    if which not in FILES:
        raise KedgeError(f"which = {which!r} is not one of: {', '.join(FILES)}")
    path = Path(folder)
    if not (path / BUNDLE).is_file() and not (path / CONFIG).is_file():
        raise KedgeError(no_run(path))
    return Run(path, seed, which, model)


class Run:
    """A run in its folder, as :func:`kedge.load` returns it.

    Attributes:
        folder: its path.
        bundle: task, classes, architecture, preprocessing and provenance of its model.
        seed: the seed whose model is taken.
    """

    def __init__(
        self, folder: Path, seed: int | None = None, which: str = "last", model: Given | None = None
    ) -> None:
        self.folder, self.bundle, self.which = folder, read_bundle(folder), which
        self._given = model
        self.seed = self.seeds[0] if seed is None else seed
        if self.seed not in self.seeds:
            raise KedgeError(
                f"{folder} has no seed {seed}; it has: {', '.join(map(str, self.seeds))}"
            )

    def __repr__(self) -> str:
        head = f"<Run {self.folder}: {self.bundle.method} on {self.bundle.provenance['data']}"
        return f"{head}, {self._progress()}>"

    def __str__(self) -> str:
        return self.summary

    # -- the model ----------------------------------------------------------------------------

    @cached_property
    def model(self) -> Predictor:
        """The trained global model; it predicts from raw inputs.

        Raises:
            DataError: the run of this seed is not complete, or a file is damaged.
            ModelError: the model cannot be built here; the message says what to give.
        """
        file = self._files[0]
        if file.is_file():
            return self._predictor(file)
        if self.which == "best" and file.with_name(FILES["last"][0]).is_file():
            raise DataError(
                f"{self.folder} has no best model: only runs with validation data choose one "
                "(--validation 0.1)"
            )
        raise DataError(
            f"there is no {file}: the run of seed {self.seed} is not complete. Continue it with: "
            f"kedge run --out {self.folder} --resume"
        )

    def personal(self, client: str | int) -> Predictor:
        """The personal model of a client, by name or number.

        Raises:
            KedgeError: there are no personal models, or no such client.
        """
        names = self.clients
        if isinstance(client, str) and client not in names and client.isdecimal():
            client = int(client)
        if isinstance(client, str) and client not in names:
            raise UnknownName("client", client, names)
        number = names.index(client) if isinstance(client, str) else client
        if not 0 <= number < len(names):
            raise KedgeError(
                f"there is no client {number}; they are numbered 0 to {len(names) - 1}"
            )
        return self._predictor(self._files[1], number)

    @property
    def _files(self) -> tuple[Path, Path]:
        """The weights of the global model, and those of the personal models."""
        folder, (name, own) = self.folder / f"seed-{self.seed}", FILES[self.which]
        return folder / name, folder / own

    @property
    def has_personal(self) -> bool:
        """Whether there are personal models of this seed."""
        return self._files[1].is_file()

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients that have personal models.

        Raises:
            KedgeError: there are no personal models.
        """
        if not self.has_personal:
            raise KedgeError(
                f"{self.folder} has no personal models of seed {self.seed}; personal methods make "
                "them, such as fedper and ditto, and save them once the run is complete"
            )
        file = self._files[1]
        try:
            names = parse_json(read_metadata(file).get(CLIENTS_KEY, "[]"))
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f"{file} is damaged: it does not name clients; copy it again")
        return tuple(names)

    def _predictor(self, path: Path, client: int | None = None) -> Predictor:
        state, metadata = read_weights(path, client)
        if client is not None:  # what no client trains is in the global model alone
            state = read_weights(self._files[0])[0] | state
        bundle = self.bundle
        try:
            # a new module draws its weights
            with torch.random.fork_rng(devices=()), self._bounded(path.stat().st_size):
                module = rebuild(bundle.model, bundle.shape, bundle.outputs, self._given)
        except UnknownName as error:
            raise bundle.explained(error) from None
        except KedgeError:
            raise
        except Exception as error:  # layers and a user's class may raise anything
            raise ModelError(
                f"the model in {self.folder / BUNDLE} cannot be built ({error!r}); copy it again, "
                "or give the module: kedge.load(FOLDER, model=...)"
            ) from error
        _load_into(module, state, path)
        expected = metadata.get(PROBE_KEY)
        try:
            with self._bounded():
                changed = expected is not None and differs(module, bundle.shape, expected)
        except (LookupError, TypeError, ValueError):
            raise DataError(f"{path} is damaged: its outputs are none; copy it again") from None
        if changed:
            raise ModelError(
                f"the model that is built here gives other outputs than the one in {path}; its "
                "class or its arguments have changed. Give it: kedge.load(FOLDER, model=...)"
            )
        return Predictor(bundle, module)

    def _bounded(self, size: int = sys.maxsize) -> AbstractContextManager[Any]:
        """Bounds on the memory of a model that comes from the folder, with ``size`` bytes of
        weights."""
        if self._given is not None:
            return nullcontext()
        return Bounded(size, f"the model in {self.folder / BUNDLE}")

    # -- settings and records -----------------------------------------------------------------

    @cached_property
    def config(self) -> Config:
        """The settings of the run.

        Raises:
            KedgeError: they are not valid here, e.g. since a file of the user is not loaded.
        """
        return stored_config(self.folder)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the run."""
        return tuple(self.bundle.provenance["config"]["seeds"])

    @cached_property
    def records(self) -> list[list[dict[str, Any]]]:
        """One list per seed, with one dictionary per round that is done.

        Raises:
            DataError: a file of records is damaged.
        """
        return [read_records(self.folder / f"seed-{seed}" / METRICS) for seed in self.seeds]

    def frame(self) -> Any:
        """All records as a pandas DataFrame, one row per seed and round."""
        return frame_of(self.seeds, self.records)

    @property
    def result(self) -> dict[str, Any] | None:
        """The summary in ``result.json``; None if the run is not complete."""
        path = self.folder / RESULT
        if not path.exists():
            return None
        found = read_own_json(path, "copy it again")
        if not isinstance(found, dict):
            raise DataError(f"{path} is damaged: it is no table; copy it again")
        return found

    @property
    def summary(self) -> str:
        """A few lines of text about the run."""
        bundle, architecture = self.bundle, self.bundle.model
        model = architecture.get("text") or architecture.get("path") or "layers of torch.nn"
        inputs = "x".join(map(str, bundle.shape))
        outputs = ", ".join(bundle.classes or ()) or str(bundle.outputs)
        rows = {
            "run": f"{self.folder}, {self._progress()}",
            "method": bundle.method,
            "data": bundle.provenance["data"],
            "model": f"{model}, {inputs} -> {outputs}",
            "made": f"{bundle.provenance['date']} with kedge "
            f"{bundle.provenance['versions']['kedge']}",
        }
        return "\n".join(f"{key:7} {value}" for key, value in rows.items())

    def _progress(self) -> str:
        run, rounds = read_run(self.folder), self.bundle.provenance["config"]["rounds"]
        seeds = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
        if run is None or not run.is_complete:
            return f"{min(map(len, self.records))} of {rounds} rounds done, {seeds}"
        if run.stopped_early:
            ends = sorted({min(run.last_rounds), max(run.last_rounds)})
            rounds = f"{' to '.join(map(str, ends))} of {rounds}"
        return f"{rounds} rounds, {seeds}, {run.measure.name} {run.last}"


def _load_into(module: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    try:
        missing, unknown = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        line = str(error).splitlines()[-1].strip()
        raise ModelError(
            f"the weights in {path} do not fit the model: {line}. "
            "Give the model as it was trained: kedge.load(FOLDER, model=...)"
        ) from None
    if missing or unknown:
        names = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is not part of it"
        raise ModelError(f"the weights in {path} do not fit the model: {names}")
