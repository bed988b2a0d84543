"""Who the clients of a seed are: names, sizes, and how many samples of each class they train on.

``seed-0/clients.json`` is written when a seed starts, so that reports can draw the partition
without the data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

from kedge.core.task import Classification, MultiLabel
from kedge.data.federation import Federation
from kedge.errors import DataError
from kedge.runs.folder import CLIENTS, Folder
from kedge.runs.saved import read_json

FORMAT = 1
MAX_COUNTS = 2_000_000  # of clients times classes; beyond it only sizes are kept


class KnownClients(NamedTuple):
    """The clients of a seed. ``counts`` is ``[clients][classes]``; None without classes."""

    names: list[str]
    sizes: list[int]
    classes: list[str] | None = None
    counts: list[list[int]] | None = None


def clients_of(federation: Federation) -> KnownClients:
    """The clients of a federation; counts where the task has classes or labels."""
    names, sizes = list(federation.client_names), [int(size) for size in federation.sizes]
    counts = _counts(federation)
    classes = None
    if counts is not None:
        classes = [str(name) for name in federation.classes or range(len(counts[0]))]
    return KnownClients(names, sizes, classes, counts)


def _counts(federation: Federation) -> list[list[int]] | None:
    """Training samples of each class on each client; none of a one-hot tensor is made."""
    task, sizes = federation.task, federation.sizes
    if not isinstance(task, (Classification, MultiLabel)):
        return None
    if task.outputs * len(sizes) > MAX_COUNTS:
        return None
    y = federation.y[federation.rows].cpu()
    owner = torch.repeat_interleave(torch.tensor(sizes))
    if isinstance(task, Classification):
        flat = torch.bincount(owner * task.outputs + y, minlength=len(sizes) * task.outputs)
        return flat.reshape(len(sizes), task.outputs).tolist()
    counts = torch.zeros(len(sizes), task.outputs, dtype=torch.int64)
    return counts.index_add(0, owner, (y > 0.5).long()).tolist()


def save_clients(folder: Folder, seed: int, federation: Federation) -> None:
    """Write the clients of a seed; not those of pooled data, which are one client of all."""
    if len(federation.client_names) != len(federation.sizes):
        return
    save_known_clients(folder, seed, clients_of(federation))


def save_known_clients(folder: Folder, seed: int, clients: KnownClients) -> None:
    """Write the clients of a seed, of which perhaps only names and sizes are known."""
    content = {"format": FORMAT} | clients._asdict()
    folder.seed(seed)
    folder.write(f"seed-{seed}/{CLIENTS}", json.dumps(content).encode())


def read_clients(path: Path) -> KnownClients | None:
    """The clients in the folder of a seed; None if there is no such file.

    Raises:
        DataError: the file is damaged, or a newer kedge wrote it.
    """
    file = path / CLIENTS
    if not file.is_file():
        return None
    advice = "delete it: reports then go without the picture of the partition"
    found: Any = read_json(file, advice)
    if not isinstance(found, dict) or found.get("format") != FORMAT or not _fits(found):
        raise DataError(f"{file} is damaged: it does not describe clients; {advice}")
    return KnownClients(*(found.get(key) for key in KnownClients._fields))  # type: ignore[arg-type]


def _fits(found: dict[str, Any]) -> bool:
    names, sizes, classes, counts = (found.get(key) for key in KnownClients._fields)
    if not _are(names, str) or not _are(sizes, int) or len(names) != len(sizes):
        return False
    if counts is None:
        return classes is None or _are(classes, str)
    return (
        _are(classes, str)
        and isinstance(counts, list)
        and len(counts) == len(names)
        and all(_are(row, int) and len(row) == len(classes) for row in counts)
    )


def _are(values: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(values, list) and all(type(value) is kind for value in values)
