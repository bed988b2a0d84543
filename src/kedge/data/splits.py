"""Splits: where test data come from.

A split is a function of a dataset, of a function that draws the partition of some samples, and of
a seed, that says who trains and who tests on what. A new one is such a function, registered by
name; its keyword-only parameters are its options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from kedge.data.datasets import Dataset
from kedge.data.partition import Partition, draw, holdout, resplit
from kedge.errors import DataError, FieldError
from kedge.grammar import parse_call
from kedge.registry import Registry
from kedge.schema import BoundCall, Doc, Range, schema_of


class Pieces(NamedTuple):
    """All samples in one array, and who trains and tests on which."""

    x: Any
    y: Any
    train: Partition
    held_out: Sequence[Any]
    test: tuple[Any, Any] | None
    whole: Partition  # as it was drawn, before anything was held out


Draw = Callable[[Any], Partition]  # the partition of samples with these labels
Share = Annotated[float, Range(0, 1, open=True, open_high=True)]

splits = Registry[Callable[..., Pieces]]("split", see="kedge list splits")


@splits.register("auto")
def auto(dataset: Dataset, drawn: Draw, seed: int) -> Pieces:
    """As given where the dataset has a test set, else holdout(0.2)."""
    if dataset.x_test is not None:
        return given(dataset, drawn, seed)
    return hold_out(dataset, drawn, seed)


@splits.register("given")
def given(dataset: Dataset, drawn: Draw, seed: int) -> Pieces:
    """The dataset's own test set, per silo where the silos have their own."""
    test = _test_set(dataset)
    if test is None:
        raise DataError(f"{dataset.name} has no test set; use split = holdout(0.2)")
    x, y, groups = dataset.x_train, dataset.y_train, dataset.groups
    whole = drawn(y)
    if dataset.groups_test is None or groups is None:
        return Pieces(x, y, whole, (), test, whole)
    rows = [np.flatnonzero(dataset.groups_test == g) + len(x) for g in _silos(whole, groups)]
    joined = np.concatenate([x, test[0]]), np.concatenate([y, test[1]])
    return Pieces(*joined, whole, rows, test, whole)


@splits.register("holdout")
def hold_out(
    dataset: Dataset,
    drawn: Draw,
    seed: int,
    *,
    fraction: Annotated[Share, Doc("share of every client's samples")] = 0.2,
) -> Pieces:
    """Every client keeps a stratified part of its data for testing, besides any given test set."""
    whole = drawn(dataset.y_train)
    train, held_out = holdout(whole, _flat(dataset.y_train), fraction, seed)
    test = _test_set(dataset)
    return Pieces(dataset.x_train, dataset.y_train, train, held_out.clients, test, whole)


@splits.register("pooled")
def pooled(
    dataset: Dataset,
    drawn: Draw,
    seed: int,
    *,
    train: Annotated[Share, Doc("share to train on")] = 0.4,
    test: Annotated[Share, Doc("share to test on; the rest is to validate on")] = 0.3,
) -> Pieces:
    """All data are pooled, partitioned, and split per client: to train on, to test on, the rest."""
    if dataset.groups is not None:
        raise DataError("silos are not pooled; use split = holdout(0.2)")
    if train + test > 1 + 1e-9:
        raise FieldError(
            f"pooled.train + pooled.test = {train + test:g} is above 1; "
            "write for example pooled(0.4, 0.3)"
        )
    xs = [dataset.x_train, dataset.x_val, dataset.x_test]
    ys = [dataset.y_train, dataset.y_val, dataset.y_test]
    keep = [i for i in range(3) if xs[i] is not None]
    x, y = np.concatenate([xs[i] for i in keep]), np.concatenate([ys[i] for i in keep])
    whole = drawn(y)
    shares = (train, test, max(0.0, 1 - train - test))
    train_part, test_part, _ = resplit(whole, _flat(y), shares, seed)
    return Pieces(x, y, train_part, test_part.clients, None, whole)


def read_split(text: str) -> BoundCall:
    """The split that a string names, with its options.

    Raises:
        UnknownName: there is no such split or option.
        FieldError: the value of an option is wrong.

    >>> read_split("holdout(0.25)").options
    {'fraction': 0.25}
    """
    call = parse_call(text)
    function = splits[call.name]
    return BoundCall(call.name, function, schema_of(function, call.name).bind(call))


def deal(
    dataset: Dataset, partition: str | Partition, clients: int, split: str, seed: int
) -> Pieces:
    """Who gets what, as rows of one array. A partition given as text is drawn with ``seed``."""

    def draw_labels(y: Any) -> Partition:
        if isinstance(partition, Partition):
            return partition.check(len(y))
        return draw(partition, _flat(y), clients, seed, dataset.groups)

    pieces: Pieces = read_split(split)(dataset, draw_labels, seed)
    return pieces


def _test_set(dataset: Dataset) -> tuple[Any, Any] | None:
    if dataset.x_test is None or dataset.y_test is None:
        return None
    return dataset.x_test, dataset.y_test


def _flat(y: Any) -> Any:
    """Labels ``[n]`` where there is one column of them."""
    return y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y


def _silos(whole: Partition, groups: Any) -> list[int]:
    """The silo of each client of a partition by silos."""
    found = [np.unique(groups[rows]) for rows in whole.clients]
    if any(len(f) != 1 for f in found):
        raise DataError(
            "the silos have test sets of their own, so the partition must be silos; "
            "or hold out a part of every client: split = holdout(0.2)"
        )
    return [int(f[0]) for f in found]
