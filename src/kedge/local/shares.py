"""Shares of a dataset for the members of a federation on one machine.

Each member gets a file of its own with the training rows that a simulated client has, in the same
order, and a share of the test set: its own held-out rows, or every n-th row of a common test set.
So tests of all members together are the test of a simulation, and training is equal bit for bit if
the scaling is that of the dataset. A folder of silos is not copied: each member reads its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kedge.core.task import tasks
from kedge.data.build import federate
from kedge.data.datasets import Dataset, load
from kedge.data.datasets.silos import find_silos
from kedge.errors import DataError, KedgeError
from kedge.federation.coordinator.rules import Scaling
from kedge.federation.member.own_data import read_data
from kedge.files import make_folder, new_file
from kedge.grammar import parse_call
from kedge.runs.build import partition_of


@dataclass(frozen=True)
class DataShare:
    """The data of one member: its name, and what ``kedge.data.datasets.load`` reads."""

    name: str
    data: str


def shares_of(
    data: str, partition: str, nodes: int, split: str, seed: int, folder: Path
) -> tuple[list[DataShare], Scaling | None]:
    """Divide a dataset among members.

    Args:
        data: name or path of the dataset, with options.
        partition: which member gets which samples; ``auto`` keeps silos as they are.
        nodes: number of members; 0: one per silo.
        split: where test data come from.
        seed: of the partition.
        folder: where to write a file per member.

    Returns:
        The shares in the order of the members, and the scaling of the dataset; None for silos,
        whose scaling is agreed.

    Raises:
        KedgeError: the data cannot be divided so.
    """
    own: list[DataShare] = []
    why = ""
    if partition in ("auto", "silos"):
        try:
            own = _silos(data)
        except DataError as error:  # a folder of classes, for instance
            if partition == "silos":
                raise
            why = f"{error}. To divide it as one dataset: "
    if own:
        if nodes and nodes != len(own):
            raise KedgeError(f"--nodes {nodes}: {data} has {len(own)} silos; leave it out")
        for share in own:
            read_data(share.data)  # what cannot be read is told now, not by its member
        return own, None
    if why and nodes < 1:
        raise KedgeError(f"{why}give the number of members, such as --nodes 4")
    dataset = load(data)
    if nodes < 1:
        raise KedgeError("how many members? give their number, such as --nodes 4")
    federation = federate(
        dataset, partition_of(partition, dataset), clients=nodes, split=split, seed=seed
    )
    x, y = federation.x.numpy(), federation.y.numpy()
    width, shares = len(str(nodes - 1)), []
    for k in range(nodes):
        start = federation.offsets[k]
        rows = federation.rows[start : start + federation.sizes[k]].numpy()
        arrays = {"x_train": x[rows], "y_train": y[rows]} | _test(federation, k, nodes)
        name = f"client-{k:0{width}d}"
        path = folder / name / "data.npz"
        _write(path, arrays, dataset)
        shares.append(DataShare(name, f"{path}({_options(dataset)})"))
        _compare(shares[-1].data, arrays)
    return shares, (_numbers(dataset.mean), _numbers(dataset.std))


def _silos(data: str) -> list[DataShare]:
    """The silos of a folder, each with the options of the whole; empty if it is no folder.

    Raises:
        DataError: the folder has no silos.
    """
    ends = [i for i, sign in enumerate(data) if sign == "("]  # a path may have brackets, too
    end = next((i for i in (len(data), *ends) if Path(data[:i]).expanduser().is_dir()), 0)
    if not data[:end].strip():
        return []
    _, paths, names = find_silos(Path(data[:end]).expanduser())
    return [
        DataShare(name, f"{own.resolve()}{data[end:]}")
        for name, own in sorted(zip(names, paths, strict=True))
    ]


def _test(federation: Any, k: int, nodes: int) -> dict[str, Any]:
    if federation.held_out:
        rows = federation.held_out[k].numpy()
        x, y = federation.x.numpy()[rows], federation.y.numpy()[rows]
    elif federation.test_data is not None:
        x, y = (part.numpy()[k::nodes] for part in federation.test_data)
    else:
        return {}
    return {"x_test": x, "y_test": y} if len(x) else {}


def _write(path: Path, arrays: dict[str, Any], dataset: Dataset) -> None:
    names = dataset.classes
    if names is None and tasks[dataset.task].one_class:
        names = tuple(map(str, range(dataset.outputs)))  # a member may lack the last ones
    make_folder(path.parent, private=True)
    if names is not None:
        arrays = arrays | {"classes": np.array(names)}
    with new_file(path) as file:
        np.savez(file, **arrays)


def _options(dataset: Dataset) -> str:
    return f"task={dataset.task}, kind={dataset.kind}"


def _compare(data: str, arrays: dict[str, Any]) -> None:
    """Read a share back: what a member trains on must be what was meant for it."""
    found = read_data(data)
    for name, array in arrays.items():
        other = getattr(found, name)
        if other is None or other.dtype != array.dtype or not np.array_equal(other, array):
            raise DataError(f"{parse_call(data).name}: {name} does not come back as it was written")


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in np.ravel(values))
