"""The kinds of named entries, e.g. parts and models: their registries and options.

``kedge list``, ``kedge show`` and the site read this table alone; a new kind is one more row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kedge.core.method import FedAvg
from kedge.core.optim import optimizers
from kedge.core.part import parts
from kedge.core.schedules import schedules
from kedge.core.task import Metric, tasks
from kedge.core.task_custom import own_metrics
from kedge.data.augment import augmentations
from kedge.data.datasets import datasets
from kedge.data.datasets.known import KnownDataset as Known
from kedge.data.datasets.load import FORMATS
from kedge.data.datasets.load import schema as format_schema
from kedge.data.partition import partitions, shifts
from kedge.data.partition.grammar import aliases
from kedge.data.partition.grammar import schema as partition_schema
from kedge.data.splits import splits
from kedge.errors import KedgeError, UnknownName, nearest
from kedge.models import models
from kedge.models import schema as model_schema
from kedge.models.hf import hf
from kedge.schema import Schema, schema_of


class Kind(NamedTuple):
    """One kind of named entries."""

    name: str
    plural: str
    use: str  # on the command line; {} is the signature of an entry
    entries: Callable[[], dict[str, Any]]
    schema: Callable[[str], Schema]
    words: tuple[str, ...] = ()  # synonyms of the kind

    @property
    def word(self) -> str:
        """The prefix in ``kind:name``."""
        return "data" if self.name == "dataset" else self.name

    @property
    def see(self) -> str:
        return "kedge list" if self.name == "part" else f"kedge list {self.plural}"


def _entries(registry: Iterable[str]) -> Callable[[], dict[str, Any]]:
    return lambda: {name: registry[name] for name in registry}  # type: ignore[index]


def _of(registry: Any) -> Callable[[str], Schema]:
    return lambda name: schema_of(registry[name], name)


def _parts() -> dict[str, Any]:
    return {"fedavg": FedAvg, **_entries(parts)()}


def _part_schema(name: str) -> Schema:
    return Schema(name, {}, "field") if name == "fedavg" else parts[name].schema()


def _models() -> dict[str, Any]:
    return {**_entries(models)(), "hf": hf}  # written hf:NAME


def _model_schema(name: str) -> Schema:
    return schema_of(hf, "hf") if name == "hf" else model_schema(name)


def _partitions() -> dict[str, Any]:
    short = {alias: partitions[name] for alias, name in aliases.items()}
    return {**_entries(partitions)(), **short}


def _data() -> dict[str, Any]:
    return {**_entries(datasets)(), **FORMATS}


def _data_schema(name: str) -> Schema:
    if name in FORMATS:
        return format_schema(name)
    empty = Schema(name, {})
    return empty if isinstance(datasets[name], Known) else schema_of(datasets[name], name)


def _metrics() -> dict[str, Any]:
    """The metrics of all tasks; one that several tasks have is described for each."""
    found: dict[str, dict[str, Metric]] = {}
    for task in tasks:
        for metric in tasks[task].metrics:
            found.setdefault(metric.name, {})[task] = metric
    entries = {name: _for_tasks(by_task) for name, by_task in found.items()}
    return {**entries, **_entries(own_metrics)()}


def _for_tasks(by_task: dict[str, Metric]) -> Metric:
    first = next(iter(by_task.values()))
    texts = {task: metric.doc for task, metric in by_task.items() if metric.doc != first.doc}
    others = "".join(f"\n\nFor {task}: {text}" for task, text in texts.items() if text)
    better = "higher" if first.higher_is_better else "lower"
    doc = f"{first.doc}{others}\n\nTasks: {', '.join(by_task)}; {better} is better."
    return dataclasses.replace(first, doc=doc if first.doc else f"{first.name}.{doc}")


KINDS = (
    Kind("part", "parts", '--method "{}"', _parts, _part_schema, ("method", "methods")),
    Kind("model", "models", '--model "{}"', _models, _model_schema),
    Kind(
        "partition", "partitions", '--partition "{}"', _partitions,
        lambda name: partition_schema(aliases.get(name, name)),
    ),
    Kind("shift", "shifts", '--partition "iid+{}"', _entries(shifts), partition_schema),
    Kind("dataset", "data", '--data "{}"', _data, _data_schema, ("datasets", "format", "formats")),
    Kind("split", "splits", '--split "{}"', _entries(splits), _of(splits)),
    Kind(
        "augmentation", "augmentations", '--augment "{}"', _entries(augmentations),
        _of(augmentations), ("augment",),
    ),
    Kind(
        "optimizer", "optimizers", '--optimizer "{}"', _entries(optimizers),
        lambda name: optimizers[name].schema(), ("optimiser", "optimisers"),
    ),
    Kind("metric", "metrics", "--metric {}", _metrics, lambda name: Schema(name, {})),
    Kind("schedule", "schedules", '--schedule "{}"', _entries(schedules), _of(schedules)),
)  # fmt: skip
BY_WORD = {word: kind for kind in KINDS for word in (kind.name, kind.plural, *kind.words)}


def find(text: str) -> tuple[Kind, str]:
    """The kind and the name of an entry: ``scaffold``, ``data:csv``, ``moon:fedcog``.

    Raises:
        UnknownName: no entry has that name.
        KedgeError: entries of several kinds have it.

    >>> kind, name = find("schedule:cosine")
    >>> kind.name, name
    ('schedule', 'cosine')
    """
    text = text.split("(")[0].strip()
    word, colon, rest = text.partition(":")
    if colon and word in BY_WORD:
        kind = BY_WORD[word]
        rest = "hf" if rest.startswith("hf:") else rest
        if rest not in kind.entries():
            raise UnknownName(kind.name, rest, kind.entries(), kind.see)
        return kind, rest
    for name in (text, word):  # the second: without the preset of a part
        found = [kind for kind in KINDS if name in kind.entries()]
        if len(found) > 1:
            owners = " and ".join(f"a {kind.name}" for kind in found)
            commands = " or ".join(f"kedge show {kind.word}:{name}" for kind in found)
            raise KedgeError(f"{name!r} is the name of {owners}; write {commands}")
        if found:
            return found[0], name
    raise unknown(text)


def unknown(text: str) -> KedgeError:
    """The error for an unknown name, with the nearest names of all kinds."""
    owners = {name: kind for kind in reversed(KINDS) for name in kind.entries()}
    near = nearest(text, owners)
    if near:
        kind = owners[near[0]]
        return UnknownName(kind.name, text, kind.entries(), kind.see)
    kinds = ", ".join(kind.plural for kind in KINDS)
    return KedgeError(f"nothing is called {text!r}. See: kedge list KIND, for KIND in: {kinds}")
