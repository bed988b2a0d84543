"""Splits: which samples are trained on and which are tested on.

A split is a function ``(dataset, draw_partition, seed) -> SplitData``, registered by name. Its
keyword-only parameters are its options. ``draw_partition(labels)`` draws the partition of samples
with these labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from kedge.data.datasets import Dataset
from kedge.data.datasets.dataset import join
from kedge.data.partition import Partition, draw, holdout, resplit
from kedge.errors import DataError, FieldError
from kedge.grammar import parse_call
from kedge.registry import Registry
from kedge.schema import BoundCall, Doc, Range, schema_of


class SplitData(NamedTuple):
    """All samples in one array, and the rows that each client trains and tests on."""

    x: Any
    y: Any
    train: Partition
    held_out: Sequence[Any]  # rows of each client, or empty
    test: tuple[Any, Any] | None  # inputs and labels of a common test set
    partition: Partition  # as drawn, before rows were held out
    validation: Sequence[Any] = ()  # rows of each client to choose by, or empty
    unseen: Any = None  # rows of all clients that never train, or None
    seen: Sequence[int] = ()  # numbers of the clients that train, if some never do


DrawPartition = Callable[[Any], Partition]
Share = Annotated[float, Range(0, 1, open=True, open_high=True)]

splits = Registry[Callable[..., SplitData]]("split", see="kedge list splits")


@splits.register("auto")
def auto(dataset: Dataset, draw_partition: DrawPartition, seed: int) -> SplitData:
    """The split ``given`` if the dataset has a test set, else ``holdout(0.2)``."""
    if dataset.x_test is not None:
        return given(dataset, draw_partition, seed)
    return hold_out(dataset, draw_partition, seed)


@splits.register("given")
def given(dataset: Dataset, draw_partition: DrawPartition, seed: int) -> SplitData:
    """The dataset's own test set, per silo where the silos have their own."""
    test = dataset.test
    if test is None:
        raise DataError(f"{dataset.name} has no test set; use split = holdout(0.2)")
    x, y, groups = dataset.x_train, dataset.y_train, dataset.groups
    partition = draw_partition(y)
    if dataset.groups_test is None or groups is None:
        return SplitData(x, y, partition, (), test, partition)
    rows = [np.flatnonzero(dataset.groups_test == g) + len(x) for g in _silo_ids(partition, groups)]
    return SplitData(*join([(x, y), test]), partition, rows, test, partition)


@splits.register("holdout")
def hold_out(
    dataset: Dataset,
    draw_partition: DrawPartition,
    seed: int,
    *,
    fraction: Annotated[Share, Doc("share of every client's samples")] = 0.2,
) -> SplitData:
    """Hold out a stratified share of every client, besides any given test set."""
    partition = draw_partition(dataset.y_train)
    train, held_out = holdout(partition, _flat(dataset.y_train), fraction, seed)
    test = dataset.test
    return SplitData(dataset.x_train, dataset.y_train, train, held_out.clients, test, partition)


@splits.register("pooled")
def pooled(
    dataset: Dataset,
    draw_partition: DrawPartition,
    seed: int,
    *,
    train: Annotated[Share, Doc("share to train on")] = 0.4,
    test: Annotated[Share, Doc("share to test on; the rest is to validate on")] = 0.3,
) -> SplitData:
    """Pool all data, partition them, and split every client into train, test and validation.

    ``--validation`` takes the rows that are neither trained nor tested on, whatever its share;
    where the two shares add up to 1, it takes training rows.
    """
    if dataset.groups is not None:
        raise DataError("silos are not pooled; use split = holdout(0.2)")
    if train + test > 1 + 1e-9:
        raise FieldError(
            f"pooled.train + pooled.test = {train + test:g} is above 1; "
            "write for example pooled(0.4, 0.3)"
        )
    pairs = [(dataset.x_train, dataset.y_train), dataset.val, dataset.test]
    x, y = join([pair for pair in pairs if pair is not None])
    partition = draw_partition(y)
    if train + test > 1 - 1e-9:
        train_part, test_part = holdout(partition, _flat(y), test, seed)
        return SplitData(x, y, train_part, test_part.clients, None, partition)
    shares = (train, test, 1 - train - test)
    train_part, test_part, rest = resplit(partition, _flat(y), shares, seed)
    return SplitData(x, y, train_part, test_part.clients, None, partition, rest.clients)


def read_split(text: str) -> BoundCall:
    """Parse a split and bind its options.

    Raises:
        UnknownName: there is no such split or option.
        FieldError: the value of an option is wrong.

    >>> read_split("holdout(0.25)").options
    {'fraction': 0.25}
    """
    call = parse_call(text)
    function = splits[call.name]
    return BoundCall(call.name, function, schema_of(function, call.name).bind(call))


def split_data(
    dataset: Dataset,
    partition: str | Partition,
    clients: int,
    split: str,
    seed: int,
    validation: float = 0.0,
    unseen: float = 0.0,
) -> SplitData:
    """Partition a dataset among clients and split off the test data.

    Args:
        dataset: the dataset.
        partition: a partition, or the text of one that is drawn with ``clients`` and ``seed``.
        clients: number of clients.
        split: the text of a split, such as ``holdout(0.2)``.
        seed: seed of the partition and the split.
        validation: share of every client's training rows to choose by, stratified by class. The
            split ``pooled`` brings its own. A validation set of the dataset is not at the clients
            and is left out.
        unseen: share of the clients that never train, at least one.

    Raises:
        KedgeError: the partition or the split cannot be parsed, drawn, or used with this dataset.
    """

    def draw_partition(y: Any) -> Partition:
        if isinstance(partition, Partition):
            return partition.check(len(y))
        return draw(partition, _flat(y), clients, seed, dataset.groups)

    data: SplitData = read_split(split)(dataset, draw_partition, seed)
    if unseen:
        data = _without_unseen(data, dataset, unseen, seed)
    return _with_validation(data, validation, seed)


def _with_validation(data: SplitData, share: float, seed: int) -> SplitData:
    """Hold out a share of every client's training rows, or drop the split's own rows for 0."""
    if not share:
        return data._replace(validation=())
    if not len(data.validation):
        labels = _flat(data.y)[: data.train.num_samples]  # those of test sets of silos follow
        train, held_out = holdout(data.train, labels, share, seed, purpose="validation")
        data = data._replace(train=train, validation=held_out.clients)
    if not any(len(rows) for rows in data.validation):
        raise DataError(
            f"validation = {share:g} holds nothing out, since the clients have too few samples; "
            "use fewer clients or a larger share"
        )
    return data


def _without_unseen(data: SplitData, dataset: Dataset, share: float, seed: int) -> SplitData:
    """Take a share of the clients out; all their rows are in ``unseen``."""
    partition, count = data.train, len(data.train.clients)
    take = max(1, round(share * count))
    if take >= count:
        raise DataError(
            f"unseen = {share:g} of {count} client{'s' if count > 1 else ''} leaves none to train; "
            "use more clients or a smaller share"
        )
    # named by silo, so that the order of files has no effect
    names = silo_names(dataset, partition) or [str(k) for k in range(count)]
    digests = [hashlib.sha256(f"{seed}/unseen/{name}".encode()).digest() for name in names]
    order = sorted(range(count), key=digests.__getitem__)
    left_out, seen = sorted(order[:take]), sorted(order[take:])
    pieces = [data.train.clients, data.held_out, data.validation]
    rows = [piece[k] for piece in pieces if len(piece) for k in left_out]
    kept = replace(
        partition,
        clients=tuple(partition.clients[k] for k in seen),
        angles=partition.angles and tuple(partition.angles[k] for k in seen),
        rotation=None if partition.rotation is None else partition.rotation[seen],
        noise=None if partition.noise is None else partition.noise[seen],
    )
    own_tests = dataset.groups_test is not None and len(data.held_out) > 0
    return data._replace(
        train=kept,
        held_out=[data.held_out[k] for k in seen] if len(data.held_out) else (),
        validation=[data.validation[k] for k in seen] if len(data.validation) else (),
        unseen=np.concatenate(rows),
        seen=seen,
        # the common test set of silos is the sum of their own: leave out those of unseen ones
        test=None if own_tests else data.test,
    )


def silo_names(dataset: Dataset, partition: Partition) -> list[str] | None:
    """The names of the silos if each client of a partition is one of them, else None."""
    if dataset.groups is None or dataset.group_names is None:
        return None
    silos = [np.unique(dataset.groups[rows]) for rows in partition.clients]
    if any(len(own) != 1 for own in silos) or len({int(own[0]) for own in silos}) < len(silos):
        return None
    return [dataset.group_names[int(own[0])] for own in silos]


def _flat(y: Any) -> Any:
    """Labels ``[n, 1]`` as ``[n]``; others unchanged."""
    return y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y


def _silo_ids(partition: Partition, groups: Any) -> list[int]:
    """The silo of each client of a partition by silos."""
    ids = [np.unique(groups[rows]) for rows in partition.clients]
    if any(len(i) != 1 for i in ids):
        raise DataError(
            "the silos have test sets of their own, so the partition must be silos; "
            "or hold out a part of every client: split = holdout(0.2)"
        )
    return [int(i[0]) for i in ids]
