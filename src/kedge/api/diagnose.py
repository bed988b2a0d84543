"""``diagnose``: how heterogeneous the data are, and what training made of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kedge.api.clients import read_clients, with_outputs
from kedge.core.task import make_task
from kedge.data.datasets import Dataset, load
from kedge.data.federation import Federation
from kedge.diagnostics.data.sheet import SAMPLES, diagnose_data
from kedge.diagnostics.run import chosen, diagnose_run
from kedge.errors import DataError, FieldError
from kedge.history.experiment import kind_of
from kedge.history.folder import CONFIG
from kedge.history.sheet import Sheet
from kedge.loading import load_options
from kedge.runs.build import federation_of, partition_of
from kedge.runs.result import Result
from kedge.saved.run import Run
from kedge.settings import load_config

OF_DATA = ("partition", "clients", "split", "samples")  # options that do not concern a run
OF_RUNS = ("rounds", "client")
OF_CLIENTS = ("label", "task", "test", "missing", "drop", "id")


def diagnose(
    subject: Any,
    what: str | Sequence[str] | None = None,
    *,
    partition: str | None = None,
    clients: int | None = None,
    split: str | None = None,
    seed: int | None = None,
    samples: int | None = None,
    rounds: Sequence[int] | None = None,
    client: int | str | None = None,
    label: Any = None,
    task: str | None = None,
    test: Any = None,
    missing: str | None = None,
    drop: Any = None,
    id: str | None = None,
    report: Callable[[str], None] | None = None,
) -> list[Sheet]:
    """Diagnose data before training, or a run in its folder.

    Args:
        subject: data: a name or path as in :func:`run`, a :class:`Federation`, or clients as in
            :func:`fit`. Or a run: its folder, a :class:`Run`, or a :class:`Result` with a folder.
        what: ``data``, ``training`` or ``privacy``, or several. Data have ``data`` only, which is
            their default; that of a run is data and training.
        partition: of data by name or path, as in :func:`run`.
        clients: the same: the number of clients.
        split: the same: where test data come from.
        seed: seed of the partition; of a run one of its seeds, None for the first.
        samples: number of samples whose features are compared, at most; 20,000 by default.
        rounds: of a run: rounds that are done when its training is diagnosed; None for the last
            one, whose checkpoint is there. For others it is replayed.
        client: of a run: the client whose privacy is diagnosed, by its number or name; None for the
            largest.
        label: of clients, as in :func:`fit`, like those that follow. All of their samples are
            diagnosed, none is held out. Whole numbers are taken as numbers; for token ids give a
            ``Federation(..., tokens=True)``.
        task: of clients: the task, as in :func:`fit`.
        test: of clients: a test set.
        missing: of clients: what to do about missing values.
        drop: of clients: columns to leave out.
        id: of clients: the column that names the rows.
        report: called with lines about the work and its cost.

    Returns:
        A sheet for each diagnosis: ``sheet.findings`` are sentences, the verdict first;
        ``sheet.tables``, ``sheet.charts`` and ``sheet.values`` hold the numbers. The sheets of a
        run are also written to ``diagnosis/`` in its folder.

    Raises:
        DataError: the data cannot be read, or do not suit the partition.
        FieldError: an option is wrong, or does not apply to the subject.
        KedgeError: the folder holds no run that can be diagnosed.

    >>> import kedge
    >>> [sheet] = kedge.diagnose("digits", partition="dirichlet(0.1)", clients=10)
    >>> sheet.findings[0].split(";")[:2]
    ['Strong label skew: 2.7 of 10 classes per client', ' features agree']
    >>> sheet.values["labels"]["level"], sheet.values["features"]["level"]
    ('strong', 'none')
    """
    options = {
        "partition": partition, "clients": clients, "split": split, "samples": samples,
        "rounds": rounds, "client": client, "label": label, "task": task, "test": test,
        "missing": missing, "drop": drop, "id": id,
    }  # fmt: skip
    given = {key: value for key, value in options.items() if value is not None}
    if isinstance(subject, Result) and subject.folder is None:
        raise DataError("the run was not saved; give it a folder: out=")
    folder = subject.folder if isinstance(subject, (Run, Result)) else subject
    if isinstance(folder, (str, Path)) and is_run(folder):
        _check_options(given, (*OF_DATA, *OF_CLIENTS), "a run, which has its own data")
        if isinstance(subject, Run) and seed is None:
            seed = subject.seed
        return diagnose_run(folder, what, rounds, seed, report, client)
    _check_options(given, OF_RUNS, "data before training")
    if chosen(what, ("data",)) != ("data",):
        named = subject if isinstance(subject, (str, Path)) else "this"
        raise FieldError(
            f"{named} is data, of which only the data can be diagnosed; train first "
            "(kedge run --out FOLDER), then diagnose the folder"
        )
    most, seed = given.pop("samples", SAMPLES), seed or 0
    if most < 1:
        raise FieldError(f"samples = {most} must be at least 1", field="samples")
    federation, name, command = _federation(subject, given, seed)
    sheet = diagnose_data(
        federation, name=name, samples=most, seed=seed, command=command, report=report
    )
    return [sheet]


def _federation(subject: Any, given: dict[str, Any], seed: int) -> tuple[Federation, str, str]:
    """The federation of data, its name, and the command that diagnoses it again."""
    if isinstance(subject, Federation):
        _check_options(given, (*OF_DATA, *OF_CLIENTS), "a Federation")
        return subject, "", ""
    if isinstance(subject, (str, Path)):
        _check_options(given, OF_CLIENTS, "data by name; write tab.csv(label=sick)")
        config = load_config(flags={"data": str(subject), "seeds": (seed,), **given})
        dataset = load(config.data)
        federation = federation_of(config, dataset, seed)
        settings = {"partition": partition_of(config.partition, dataset)} | given
        return federation, config.data, _command(config.data, settings, seed)
    _check_options(given, OF_DATA, "your own clients")
    return _own(read_clients(subject, **given)), "", ""


def _own(dataset: Dataset) -> Federation:
    """Clients as they are: all of their samples, none held out."""
    if dataset.encoding is None:
        dataset = with_outputs(dataset, dataset.outputs, tokens=False)
    assert dataset.groups is not None
    assert dataset.group_names is not None
    test = dataset.x_test, dataset.y_test
    federation = Federation(
        dataset.x_train,
        dataset.y_train,
        [np.flatnonzero(dataset.groups == g) for g in range(len(dataset.group_names))],
        make_task(dataset.task, dataset.outputs),
        None if dataset.x_test is None else test,
        moments=(dataset.mean, dataset.std),
        client_names=dataset.group_names,
    )
    federation.encoding, federation.classes = dataset.encoding, dataset.classes
    return federation


def is_run(path: str | Path) -> bool:
    """Whether a path is the folder of a run, or of several ones."""
    folder = Path(path)
    try:
        return folder.is_dir() and (
            bool(kind_of(folder)) or (folder / CONFIG).is_file() or any(folder.glob(f"*/{CONFIG}"))
        )
    except OSError:  # e.g. a name that is too long: data with options
        return False


def _check_options(given: dict[str, Any], others: Sequence[str], what: str) -> None:
    wrong = [name for name in others if name in given]
    if wrong:
        raise FieldError(f"{wrong[0]} is not for {what}", field=wrong[0])


def _command(name: str, settings: dict[str, Any], seed: int) -> str:
    """What to type for the same diagnosis."""
    words = ["kedge", "diagnose", name]
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    if seed:
        words += ["--seed", str(seed)]
    return shlex.join(words) + load_options()
