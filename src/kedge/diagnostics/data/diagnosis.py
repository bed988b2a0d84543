"""Diagnose the data of a federation before training: label skew, quantity skew, feature shift,
duplicates, clients that stand apart; and a verdict in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kedge.data.datasets.tables.encoding import TableEncoding
from kedge.data.federation import Federation
from kedge.diagnostics.data.apart import shifted_columns, stand_apart
from kedge.diagnostics.data.duplicates import MAX_NEAR, equal_samples, hashes, near_samples
from kedge.diagnostics.data.feature_shift import Cells, conditional_distances, feature_shift
from kedge.diagnostics.data.features import features_of
from kedge.diagnostics.data.label_skew import label_skew
from kedge.diagnostics.data.quantity import gini, largest_to_smallest
from kedge.diagnostics.data.sample import (
    class_shares,
    draw_sample,
    given_labels,
    groups_of,
    name_of,
)
from kedge.diagnostics.data.verdict import NAMED, Measured, advice, count_of, remarks, verdict
from kedge.diagnostics.data.views import View, charts, tables, values
from kedge.history.sheet import Sheet

SAMPLES = 20_000  # whose features are compared


def diagnose_data(
    federation: Federation,
    *,
    name: str = "",
    samples: int = SAMPLES,
    seed: int = 0,
    command: str = "",
    report: Callable[[str], None] | None = None,
) -> Sheet:
    """Measure how heterogeneous the training data of a federation are.

    Labels, sizes and equal samples are measured on all samples; features on a sub-sample. What
    chance explains is taken off: labels are permuted, and clients are drawn again within classes.

    Args:
        federation: the data.
        name: what the data are called in the title.
        samples: number of samples whose features are compared, at most.
        seed: of the sub-sample, the permutations and the draws.
        command: what repeats the diagnosis.
        report: called with a line on what is about to be done.

    Returns:
        The sheet ``data``: the verdict first among its findings, tables of measures, clients,
        classes and columns, charts, and all numbers in ``values``.

    >>> from kedge.data.build import federate
    >>> from kedge.data.datasets import load
    >>> sheet = diagnose_data(federate(load("digits"), "dirichlet(0.1)", clients=10))
    >>> sheet.findings[0].split(";")[0]
    'Strong label skew: 2.7 of 10 classes per client'
    """
    start = time.perf_counter()
    count = len(federation.rows)
    sample = draw_sample(federation, samples, seed)
    if report is not None and len(sample.positions) < count:
        report(f"features of {len(sample.positions):,} of {count:,} samples are compared")
    owner = np.repeat(np.arange(federation.num_clients), federation.sizes)
    labels = label_skew(federation, seed)
    codes = hashes(federation.x, federation.rows)
    y = federation.y[federation.rows].cpu().numpy()
    features = features_of(federation, sample.rows)
    groups, group_word = groups_of(federation, sample)
    given = given_labels(federation, sample, features.values)
    cells = Cells(given, sample.owner, groups, federation.num_clients, seed)
    shift = feature_shift(cells)
    conditional = conditional_distances(cells, class_shares(federation, sample, groups))
    near_rows = np.arange(len(sample.positions))
    if len(near_rows) > MAX_NEAR:
        drawn = np.random.default_rng(seed).choice(len(near_rows), MAX_NEAR, replace=False)
        near_rows = np.sort(drawn)
    near = near_samples(
        features.values[near_rows], sample.owner[near_rows], codes[sample.positions[near_rows]]
    )
    columns, column_names = [], _column_names(federation)
    if column_names and federation.num_clients > 1:
        table = federation.x[sample.rows].cpu().numpy()
        table = given_labels(federation, sample, table - table.mean(0)) + table.mean(0)
        columns = shifted_columns(table, sample.owner, groups)
    sizes = np.asarray(federation.sizes)
    measured = Measured(
        names=_names(federation),
        task=federation.task,
        labels=labels,
        shift=shift,
        gini=gini(sizes),
        ratio=largest_to_smallest(sizes),
        apart=stand_apart(labels, shift),
        equal=equal_samples(codes, owner, y),
        near=near,
        leaked=_leaked(federation, codes),
        columns=columns,
        column_names=column_names,
        largest_share=float(sizes.max() / sizes.sum()),
    )
    view = View(federation, measured, conditional, sample, groups, group_word)
    seconds = time.perf_counter() - start
    return Sheet(
        "data",
        f"Data{f' of {name}' if name else ''}: {count_of(federation.num_clients, 'client')}, "
        f"{count_of(count, 'training sample')}",
        findings=[
            verdict(measured),
            *_lacking(view),
            *remarks(measured),
            *advice(measured),
            *_limits(view),
        ],
        tables=tables(view),
        charts=charts(view),
        values=values(view),
        seconds=seconds,
        cost=f"features by {features.words}; {seconds:.1f} s",
        command=command,
        date=time.strftime("%Y-%m-%d"),
    )


def _names(federation: Federation) -> list[str]:
    """Names of the clients; one that pools the data of others has none."""
    names = list(federation.client_names)
    return names if len(names) == federation.num_clients else ["all clients"]


EXPECTED = 7.0  # samples of a class: a client lacks it by chance with probability exp(-7)


def _lacking(view: View) -> list[str]:
    """Which clients have no sample of a class, where they are few and it is no chance."""
    counts, federation = view.measured.labels.counts, view.federation
    if counts is None:
        return []
    expected = np.outer(federation.sizes, counts.sum(0) / sum(federation.sizes))
    pairs = np.argwhere((counts == 0) & (expected >= EXPECTED)).tolist()
    words = [f"{view.measured.names[k]} has no {name_of(federation.classes, c)}" for k, c in pairs]
    return [f"Classes are missing: {', '.join(words)}."] if 0 < len(words) <= NAMED else []


def _limits(view: View) -> list[str]:
    """What was sub-sampled or could not be measured."""
    federation, sample = view.federation, view.sample
    lines, count = [], len(federation.rows)
    if len(sample.positions) < count:
        clients = ""
        if sample.clients < federation.num_clients:
            clients = f" of {sample.clients} of {federation.num_clients} clients"
        lines.append(
            f"Features were compared on {len(sample.positions):,} of {count:,} samples{clients}, "
            "drawn with a fixed seed; labels, sizes and equal samples on all."
        )
    if not federation.task.has_classes:
        lines.append(
            "Targets are real numbers: there are no classes to count, and features are compared "
            "within fifths of the targets."
        )
    elif not federation.task.one_class:
        lines.append(
            "Samples have several labels: features are compared among those with the same rarest "
            "label, without what a linear model of the labels explains."
        )
    if federation.tokens:
        lines.append("Token ids are compared by how often they occur, not by their order.")
    return lines


def _column_names(federation: Federation) -> list[str]:
    """Names of the columns of a table; empty for other inputs."""
    if federation.tokens or len(federation.input_shape) != 1:
        return []
    encoding: Any = federation.encoding
    if isinstance(encoding, TableEncoding):
        return list(encoding.names)
    return [f"column {j}" for j in range(federation.input_shape[0])]


def _leaked(federation: Federation, codes: Any) -> int:
    """Number of test samples whose input is also trained on."""
    test = federation.test_data
    return 0 if test is None else int(np.isin(hashes(test[0]), codes).sum())
