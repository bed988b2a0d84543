"""All metrics of a trained model on labelled data: raw data, or the test data of its own run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kedge.core.task import Batch
from kedge.data.datasets import Dataset, load
from kedge.data.datasets.formats import SPLIT_NAMES, detect, entries
from kedge.data.datasets.silos import find_silos
from kedge.data.encoding import Array, Encoding, Samples
from kedge.data.federation import Federation
from kedge.errors import DataError, KedgeError
from kedge.saved.bundle import Bundle
from kedge.saved.predictor import Predictor
from kedge.saved.scores import of_clients, score
from kedge.settings import Config
from kedge.sim.simulation import own_metric

#: What loads the personal model of a client, by its name; there may be many.
Personal = Mapping[str, Callable[[], Predictor]]


class Group(NamedTuple):
    """Samples of one client; of nobody in particular if ``client`` is empty."""

    client: str
    samples: Samples


def read_groups(encoding: Encoding, data: str) -> list[Group]:
    """Encode raw data: a file, a folder, or a folder with one of those per client.

    Raises:
        DataError: the data cannot be read or encoded.
    """
    path = Path(data).expanduser()
    if path.is_dir() and _is_silos(path):
        _, paths, names = find_silos(path)
        pairs = zip(names, paths, strict=True)
        return [Group(name, encoding.encode(_table(encoding, p))) for name, p in pairs]
    return [Group("", encoding.encode(_table(encoding, path) if path.is_dir() else data))]


def _table(encoding: Encoding, path: Path) -> Path:
    """The test table in a folder of tables, else its training table; other paths unchanged."""
    if encoding.kind != "table" or not path.is_dir():
        return path
    tables = {SPLIT_NAMES.get(f.name.split(".")[0].lower()): f for f in entries(path)}
    found = tables.get("test") or tables.get("train")
    if found is None:
        raise DataError(f"{path}: neither test.csv nor train.csv in this folder; give a file")
    return found


def _is_silos(path: Path) -> bool:
    try:
        return detect(path) == "silos"
    except DataError:
        return False


def holds_training_data(own: str, data: str) -> bool:
    """Whether data to evaluate on are, or are part of, the data of the run itself.

    A test set of its own in the folder does not count: that is what is read then.
    """
    path = Path(data).expanduser()
    places = [own[:i] for i, sign in enumerate(f"{own}(") if sign == "("]
    folder = next(
        (Path(p).expanduser() for p in places if p and Path(p).expanduser().exists()), None
    )
    if folder is None or not path.exists():
        return False
    inside = [path, *_entries(path)]
    has_tests = any(_is_test(p) for one in inside for p in (one, *_entries(one)))
    return not has_tests and path.resolve().is_relative_to(folder.resolve())


def _is_test(path: Path) -> bool:
    return SPLIT_NAMES.get(path.name.split(".")[0].lower()) == "test"


def _entries(path: Path) -> list[Path]:
    return entries(path) if path.is_dir() else []


def labels_of(predictor: Predictor, samples: Samples) -> Array:
    """The labels of samples in the form of the task: class numbers, or ``[n, outputs]``.

    Raises:
        DataError: there are none, or they are not those of the training.
    """
    y, bundle = samples.labels, predictor.bundle
    if y is None:
        named = ", ".join(map(repr, getattr(bundle.encoding, "labels", ())))
        lacks = f" (no column {named})" if named else ""
        raise DataError(
            f"the data have no labels{lacks}, so there is nothing to compare predictions with; "
            "kedge predict needs none"
        )
    y = np.asarray(y)
    if not predictor.task.one_class:
        numbers: Array = y.astype(float).reshape(len(y), -1)
        if numbers.shape[1] != bundle.outputs:
            raise DataError(
                f"labels of shape {list(y.shape)}; the model predicts {bundle.outputs} "
                f"{predictor.task.outputs_are}"
            )
        _check(~np.isfinite(numbers).all(1), samples, "has no label")
        return numbers
    if y.dtype.kind in "OUS":
        known = {
            name: i for i, name in enumerate(bundle.classes or map(str, range(bundle.outputs)))
        }
        numbers = np.array([known.get(str(v), -1) for v in y.tolist()])
        _check(np.array([v is None for v in y.tolist()]), samples, "has no label")
        unknown = np.flatnonzero(numbers < 0)
        if len(unknown):
            raise DataError(
                f"sample {samples.ids[unknown[0]]} is of class {str(y[unknown[0]])!r}, which the "
                f"training data do not have; they have: {', '.join(known)}"
            )
        return numbers
    if y.ndim == 2 and y.shape[1] == bundle.outputs:
        return y.argmax(1)  # one-hot
    numbers = y.reshape(-1).astype(float)
    inside = (numbers == np.round(numbers)) & (numbers >= 0) & (numbers < bundle.outputs)
    _check(~inside, samples, f"has a label that is not a class from 0 to {bundle.outputs - 1}")
    return numbers.astype(np.int64)


def _check(wrong: Array, samples: Samples, text: str) -> None:
    if wrong.any():
        raise DataError(f"sample {samples.ids[int(np.flatnonzero(wrong)[0])]} {text}")


def evaluate_groups(
    predictor: Predictor, groups: Sequence[Group], personal: Personal | None = None
) -> dict[str, Any]:
    """All metrics on groups of samples; per client if the groups have names.

    Args:
        predictor: the global model.
        groups: the samples, with labels.
        personal: personal models; their metrics are added if every group has one.

    Returns:
        As :func:`kedge.saved.scores.score`, and ``personal`` likewise.
    """
    y = [labels_of(predictor, group.samples) for group in groups]
    logits = [predictor.logits(group.samples.x) for group in groups]
    names = [group.client for group in groups]
    if len(names) == 1 and not names[0]:
        return _scored(predictor, y, logits)
    found = _scored(predictor, y, logits, names)
    if personal and set(names) <= set(personal):
        own = [personal[group.client]().logits(group.samples.x) for group in groups]
        found["personal"] = _scored(predictor, y, own, names)
    return found


def own_dataset(bundle: Bundle, config: Config) -> Dataset:
    """The data of a run.

    Raises:
        KedgeError: they are not at hand, or have changed since.
    """
    if config.data == "own":
        raise KedgeError("kedge does not keep the data of a run by kedge.fit; give DATA, too")
    try:
        dataset = load(config.data)
    except DataError as error:
        raise DataError(
            f"{error}. The run was started where {config.data} is; go there, or give the data: "
            "kedge evaluate RUN DATA"
        ) from None
    expected = bundle.provenance.get("fingerprint")
    if expected and dataset.fingerprint != expected:
        raise DataError(
            f"{config.data} is not what the run was made with: the data have changed since. "
            "Give the data to evaluate on: kedge evaluate RUN DATA"
        )
    return dataset


def evaluate_own(
    predictor: Predictor, federation: Federation, personal: Personal | None = None
) -> dict[str, Any]:
    """All metrics on the test data of a federation, and on the held-out samples of its clients."""
    tests = [_over(predictor, federation.test_batches(angle)) for angle in federation.angles]
    found = _scored(predictor, [y for y, _ in tests], [logits for _, logits in tests])
    if federation.held_out:
        found |= _of_held_out(predictor, federation, None)
        if personal and set(federation.client_names) <= set(personal):
            found["personal"] = _of_held_out(predictor, federation, personal)
    return found


def _of_held_out(
    predictor: Predictor, federation: Federation, personal: Personal | None
) -> dict[str, Any]:
    clients = {}
    for k, name in enumerate(federation.client_names):
        if len(federation.held_out[k]):
            own = personal[name]() if personal else predictor
            y, logits = _over(own, federation.held_out_batches(k))
            clients[name] = _scored(own, [y], [logits])["global"]
    return of_clients(clients, predictor.task)


def _over(predictor: Predictor, batches: Any) -> tuple[Array, Tensor]:
    """Labels and outputs over batches that are prepared already."""
    pairs = [(batch.y.cpu().numpy(), predictor.outputs(batch.x)) for batch in batches]
    return np.concatenate([y for y, _ in pairs]), torch.cat([logits for _, logits in pairs])


def _scored(
    predictor: Predictor,
    y: Sequence[Array],
    logits: Sequence[Tensor],
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    task, outputs = predictor.task, torch.cat(list(logits))
    labels, values = np.concatenate(list(y)), predictor.values(outputs)
    owners = None if names is None else np.repeat(list(names), [len(one) for one in y]).tolist()
    found = score(task, predictor.bundle.classes, labels, values, owners)
    if len(found["global"]) == 1:  # a task of one's own: its metrics are functions of sums
        found["global"] |= _report(predictor, labels, outputs)
        if names is not None:
            each = zip(names, y, logits, strict=True)
            found |= of_clients(
                {n: {"samples": len(own)} | _report(predictor, own, out) for n, own, out in each},
                task,
            )
    if task.headline.function is None:
        return found
    found["global"] |= own_metric(task, labels, values)
    if names is not None:
        for name, own in found["clients"].items():
            rows = np.asarray(owners) == name
            own |= own_metric(task, labels[rows], values[rows])
        found |= of_clients(found["clients"], task)
    return found


def _report(predictor: Predictor, y: Array, logits: Tensor) -> dict[str, float]:
    task = predictor.task
    labels = task.labels(torch.as_tensor(y), logits.dtype)
    return task.report(task.sums(logits, Batch(logits, labels), torch.ones(len(logits))))
