"""Diagnose the data of a federation before training: label skew, quantity skew, feature shift,
duplicates, clients that stand apart; and a verdict in words, with what it suggests for a choice of
methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kedge.core.part import parts
from kedge.core.task import Task
from kedge.data.datasets.tables.encoding import TableEncoding
from kedge.data.federation import Federation
from kedge.diagnostics.data.features import (
    Cells,
    ConditionalDistances,
    Shift,
    conditional_distances,
    feature_shift,
    features_of,
)
from kedge.diagnostics.data.labels import (
    LabelSkew,
    effective_clients,
    gini,
    label_skew,
    largest_to_smallest,
)
from kedge.diagnostics.data.outliers import (
    MAX_NEAR,
    Apart,
    ColumnShift,
    Equal,
    Near,
    equal_samples,
    hashes,
    near_samples,
    shifted_columns,
    stand_apart,
)
from kedge.diagnostics.data.sample import (
    SIGNIFICANT,
    FeatureGroup,
    Sample,
    class_shares,
    draw_sample,
    given_labels,
    groups_of,
    name_of,
)
from kedge.history.sheet import Cell, Chart, Sheet, SheetTable, heatmap_of, series_of, table_of

SAMPLES = 20_000  # whose features are compared
#: From which value on a corrected measure is called mild, moderate or strong. Dirichlet(10) has an
#: index of about 0.12, Dirichlet(1) of 0.4, Dirichlet(0.3) of 0.63 and Dirichlet(0.1) of 0.85.
LABELS = (0.1, 0.3, 0.6)
#: In standard deviations, for features and for real targets: images rotated by up to 20 degrees
#: are at about 0.5.
SHIFTS = (0.15, 0.35, 0.7)
SIZES = (0.15, 0.3, 0.5)  # Gini coefficient
WORDS = ("none", "mild", "moderate", "strong")
NAMED = 3  # clients that a sentence names
MAX_CELLS = 5000  # of a heatmap
MAX_BARS = 200
MAX_COLUMNS = 10  # shifted columns in the table


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
    data = Measured(
        federation=federation,
        labels=labels,
        shift=shift,
        conditional=conditional_distances(cells, class_shares(federation, sample, groups)),
        apart=stand_apart(labels, shift),
        equal=equal_samples(codes, owner, y),
        near=near,
        leaked=_leaked(federation, codes),
        columns=columns,
        column_names=column_names,
        sample=sample,
        groups=groups,
        group_word=group_word,
    )
    seconds = time.perf_counter() - start
    return Sheet(
        "data",
        f"Data{f' of {name}' if name else ''}: {count_of(federation.num_clients, 'client')}, "
        f"{count_of(count, 'training sample')}",
        findings=[verdict(data), *_lacking(data), *remarks(data), *advice(data), *_limits(data)],
        tables=tables(data),
        charts=charts(data),
        values=values(data),
        seconds=seconds,
        cost=f"features by {features.words}; {seconds:.1f} s",
        command=command,
        date=time.strftime("%Y-%m-%d"),
    )


EXPECTED = 7.0  # samples of a class: a client lacks it by chance with probability exp(-7)


def _lacking(data: Measured) -> list[str]:
    """Which clients have no sample of a class, where they are few and it is no chance."""
    counts, federation = data.labels.counts, data.federation
    if counts is None:
        return []
    expected = np.outer(federation.sizes, counts.sum(0) / sum(federation.sizes))
    pairs = np.argwhere((counts == 0) & (expected >= EXPECTED)).tolist()
    words = [f"{data.names[k]} has no {name_of(federation.classes, c)}" for k, c in pairs]
    return [f"Classes are missing: {', '.join(words)}."] if 0 < len(words) <= NAMED else []


def _limits(data: Measured) -> list[str]:
    """What was sub-sampled or could not be measured."""
    federation, sample = data.federation, data.sample
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


# -- the verdict ----------------------------------------------------------------------------------


class Measured(NamedTuple):
    """All measures of a federation."""

    federation: Federation
    labels: LabelSkew
    shift: Shift
    conditional: ConditionalDistances
    apart: Apart
    equal: Equal
    near: Near | None
    leaked: int  # test samples that are equal to training samples
    columns: Sequence[ColumnShift]
    column_names: Sequence[str]
    sample: Sample  # whose features are compared
    groups: list[FeatureGroup]
    group_word: str

    @property
    def names(self) -> list[str]:
        """Of the clients; one that pools the data of others has none."""
        names = list(self.federation.client_names)
        return names if len(names) == self.federation.num_clients else ["all clients"]

    @property
    def gini(self) -> float:
        return gini(self.federation.sizes)

    @property
    def ratio(self) -> float:
        """The largest client's size over that of the smallest."""
        return largest_to_smallest(self.federation.sizes)


def level(value: float, limits: Sequence[float], p: float = 0.0) -> int:
    """0 to 3: none, mild, moderate or strong; what may be chance is 0.

    >>> WORDS[level(0.4, LABELS)], WORDS[level(0.4, LABELS, p=0.3)]
    ('moderate', 'none')
    """
    return 0 if p > SIGNIFICANT else int(np.searchsorted(limits, value, "right"))


class Levels(NamedTuple):
    """How strong each kind of heterogeneity is, 0 to 3."""

    labels: int
    features: int
    sizes: int


def levels_of(data: Measured) -> Levels:
    """The levels of a federation; one client has none."""
    if len(data.names) < 2:
        return Levels(0, 0, 0)
    limits = SHIFTS if data.labels.kind == "targets" else LABELS
    return Levels(
        level(data.labels.index, limits, data.labels.p),
        level(data.shift.overall, SHIFTS, data.shift.p),
        level(data.gini, SIZES),
    )


def verdict(data: Measured) -> str:
    """One sentence: labels, features, sizes, clients that stand apart."""
    if len(data.names) < 2:
        return "One client holds all samples: there is nothing to compare."
    levels = levels_of(data)
    words = [_labels(data, levels.labels), _features(data, levels.features)]
    if levels.sizes:
        ratio = f"{data.ratio:.0f}" if data.ratio >= 3 else f"{data.ratio:.1f}"
        words.append(
            f"{WORDS[levels.sizes]} quantity skew (Gini {data.gini:.2f}, largest to smallest "
            f"{ratio} to 1)"
        )
    else:
        words.append("sizes are similar")
    words.append(_apart(data))
    text = "; ".join(word for word in words if word)
    return text[0].upper() + text[1:] + "."


def _labels(data: Measured, strength: int) -> str:
    labels, classes = data.labels, data.federation.task.outputs
    if labels.kind == "targets":
        if not strength:
            return "targets agree"
        distance = f"{labels.index:.2f} standard deviations from the pooled ones"
        return f"{WORDS[strength]} shift of the targets: {distance} on average"
    per_client = f"{labels.effective.mean():.1f} of {classes} {labels.kind} per client"
    if not strength:
        chance = "as many as by chance" if labels.effective.mean() < 0.8 * classes else ""
        return f"labels agree ({per_client}, {chance})" if chance else "labels agree"
    return f"{WORDS[strength]} label skew: {per_client}"


def _features(data: Measured, strength: int) -> str:
    if np.isnan(data.shift.client).all():
        return "features cannot be compared, since no class is on two clients"
    if not strength:
        return "features agree"
    return f"{WORDS[strength]} feature shift: {data.shift.overall:.2f} standard deviations"


def _apart(data: Measured) -> str:
    apart = data.apart.found
    if not apart:
        return ""
    names = [f"{data.names[k]} (by its {reason})" for k, reason in apart[:NAMED]]
    more = f" and {len(apart) - NAMED} more" if len(apart) > NAMED else ""
    verb = "stands" if len(apart) == 1 else "stand"
    listed = (
        ", ".join(names) if more or len(names) < 2 else f"{', '.join(names[:-1])} and {names[-1]}"
    )
    return f"{listed}{more} {verb} apart"


# -- further findings -------------------------------------------------------------------------


def remarks(data: Measured) -> list[str]:
    """Sentences on duplicates, columns and leaks; none where there is nothing to say."""
    lines = []
    equal = data.equal
    if equal.across:
        shared = "; ".join(
            f"{data.names[a]} and {data.names[b]} share {n}" for a, b, n in equal.clients[:NAMED]
        )
        text = f"{equal.across:,} samples occur on more than one client ({shared})"
        if equal.conflicts:
            text += f", {equal.conflicts} of them with different labels"
        lines.append(f"{text}.")
    if data.near is not None and data.near.number:
        near = data.near
        lines.append(
            f"Near-duplicates of samples on other clients: {near.number:,} of {near.samples:,}, at "
            f"least {near.ratio:.1f} times closer than their tenth neighbour."
        )
    if data.leaked:
        lines.append(
            f"{count_of(data.leaked, 'test sample')} also in the training data: tests are too "
            "optimistic."
        )
    if data.columns:
        pieces = [
            f"{data.column_names[c.column]} on {data.names[c.client]} ({c.shift:+.1f} sd)"
            for c in data.columns[:NAMED]
        ]
        lines.append(f"Columns that shift most, given the label: {', '.join(pieces)}.")
    return lines


def count_of(number: int, what: str) -> str:
    """A number with its noun: ``1 client``, ``1,438 samples``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# -- the choice of a method -------------------------------------------------------------------


def made_for(kind: str, level: int, task: Task) -> list[str]:
    """Names of the parts that were made for a kind of heterogeneity of this level."""
    wanted = WORDS[1:2] if level == 1 else WORDS[2 : level + 1]
    fitting = (name for name in sorted(parts) if task.like in parts[name].tasks)
    return [name for name in fitting if parts[name].made_for.get(kind) in wanted]


def methods_for(data: Measured) -> list[str]:
    """Methods that are worth a comparison, FedAvg first."""
    levels, task = levels_of(data)._asdict(), data.federation.task
    names = {n for kind, level in levels.items() if level >= 2 for n in made_for(kind, level, task)}
    names -= {name for name in names if parts[name].needs_batchnorm}  # not every model has it
    return ["fedavg", *sorted(names or {n for kind in levels for n in made_for(kind, 1, task)})]


def advice(data: Measured) -> list[str]:
    """What the measures suggest, each with what it is based on."""
    levels = levels_of(data)
    if len(data.names) < 2:
        return []
    task, sizes, lines = data.federation.task, data.federation.sizes, []
    own = {kind: made_for(kind, level, task) for kind, level in levels._asdict().items()}
    if levels.labels >= 2 and own["labels"]:
        lines.append(
            f"Parts made for label skew: {_listed(own['labels'])}. What they gain depends on the "
            "data and the network, so compare before you choose (kedge compare)."
        )
    if levels.features >= 2:
        lines.append(
            "Clients differ in their inputs, so one model may not suit all: test every client "
            f"(--personal), and compare parts made for feature shift: {_listed(own['features'])}."
        )
    if levels.sizes >= 2:
        lines.append(
            f"One client holds {100 * max(sizes) / sum(sizes):.0f} % of the samples, and clients "
            "take unequal numbers of steps per epoch: give all the same number (--steps), or "
            "normalise "
            f"({_listed(own['sizes'])}); --weighting uniform counts every client once."
        )
    if data.apart.found:
        lines.append(
            "Before training, find out why a client stands apart (another device, unit or coding); "
            "then compare runs with and without it."
        )
    if max(levels) < 2 and not data.apart.found:
        like = "Differences are mild" if any(levels) else "The data look as if dealt out at random"
        lines.append(
            f"{like}: FedAvg is the natural choice, since methods against drift have little to "
            "correct."
        )
    return lines


def _listed(names: Sequence[str]) -> str:
    """Names in a row; of those that need BatchNorm, it is said."""
    return ", ".join(f"{n} (needs BatchNorm)" if parts[n].needs_batchnorm else n for n in names)


# -- tables, charts and bare numbers --------------------------------------------------------------


def tables(data: Measured) -> list[SheetTable]:
    """Measures, clients, classes, and shifted columns."""
    found = [_measures(data), _clients(data), _groups(data)]
    shown, left = data.columns[:MAX_COLUMNS], len(data.columns) - MAX_COLUMNS
    if shown:
        columns: dict[str, Sequence[Cell] | None] = {
            "column": [data.column_names[c.column] for c in shown],
            "client": [data.names[c.client] for c in shown],
            "shift (sd)": [c.shift for c in shown],
            "its mean": [c.own for c in shown],
            "mean of others": [c.others for c in shown],
        }
        more = f"{left} more" if left > 0 else ""
        found.append(table_of("Columns that shift", columns, more, decimals=2))
    return found


def _measures(data: Measured) -> SheetTable:
    labels, conditional = data.labels, data.conditional
    shift, near = data.shift, data.near
    sizes = np.asarray(data.federation.sizes)
    unit = "sd" if labels.kind == "targets" else "0 to 1"
    rows: list[list[Cell]] = []

    def row(name: str, value: Any, chance: Any = None, beyond: Any = None, p: Any = None) -> None:
        rows.append([name, value, chance, beyond, p])

    if labels.kind != "targets":
        chance = _mean(labels.chance_effective)
        row(f"effective {labels.kind}", _mean(labels.effective), chance)
    distance, chance = _mean(labels.distance), _mean(labels.chance)
    row(f"label EMD ({unit})", distance, chance, labels.index, labels.p)
    divergence, chance = _mean(labels.divergence), _mean(labels.chance_divergence)
    row("label Jensen-Shannon (bits)", divergence, chance)
    row("Gini of sizes", data.gini)
    row("largest to smallest", data.ratio)
    row("effective clients", effective_clients(sizes))
    value, chance = _mean_square(shift.raw), _mean_square(shift.chance)
    row("feature shift (class sd)", value, chance, shift.overall, shift.p)
    value, chance = _mean(conditional.value), _mean(conditional.chance)
    row("conditional Wasserstein C_d", value, chance, max(value - chance, 0.0))
    row("samples on several clients", data.equal.across)
    if near is not None:
        row("near-duplicates", near.number)
    row("test samples in training", data.leaked)
    heads = ["measure", "value", "by chance", "beyond chance", "p"]
    note = "Means over clients. Beyond chance: 0 for data dealt out at random."
    return SheetTable("Measures", heads, rows, note)


def _clients(data: Measured) -> SheetTable:
    labels = data.labels
    apart, has_classes = dict(data.apart.found), labels.kind != "targets"
    columns: dict[str, Sequence[Cell] | None] = {
        "client": data.names,
        "samples": data.federation.sizes,
        f"eff. {labels.kind}": labels.effective.tolist() if has_classes else None,
        "EMD": labels.distance.tolist(),
        "JS": labels.divergence.tolist(),
        "shift": data.shift.client.tolist(),
        "C_d": data.conditional.value.tolist(),
        "score": np.maximum(data.apart.labels, data.apart.features).tolist(),
        "apart": [apart.get(k, "") for k in range(len(data.names))],
    }
    note = (
        "Eff.: effective number, as many equally frequent ones would be as diverse. "
        * has_classes
        + "EMD and JS: labels against the pooled labels. Shift: features against the other clients "
        "within classes, beyond chance. C_d: conditional Wasserstein distance to the other "
        "clients, chance included."
    )
    return table_of("Clients", columns, note, decimals=2)


def _groups(data: Measured) -> SheetTable:
    shift, owner, groups = data.shift, data.sample.owner, data.groups
    columns: dict[str, Sequence[Cell] | None] = {
        data.group_word: [group.name for group in groups],
        "samples": [len(group.members) for group in groups],
        "clients": [len(np.unique(owner[group.members])) for group in groups],
        "shift": shift.group.tolist(),
        "furthest": [data.names[k] if k >= 0 else "" for k in shift.apart],
    }
    title = "Classes" if data.group_word == "class" else f"By {data.group_word}"
    note = "Among the samples whose features were compared."
    return table_of(title, columns, note, decimals=2)


def charts(data: Measured) -> list[Chart]:
    """Who holds what, sizes, distances of clients, and the shift of each class on each client."""
    federation, names, found = data.federation, data.names, []
    labels, shift = data.labels, data.shift
    if labels.counts is not None and labels.counts.size <= MAX_CELLS:
        classes = federation.classes or [str(c) for c in range(labels.counts.shape[1])]
        title, counts = "Samples of each class", labels.counts.astype(int).tolist()
        found.append(heatmap_of(title, names, classes, counts, "client", "class", "samples"))
    if len(names) <= MAX_BARS:
        title, sizes = "Samples of each client", {"": federation.sizes}
        found.append(series_of(title, "bars", names, sizes, "client", "samples"))
    points = [
        {"x": float(labels.excess[k]), "y": float(shift.client[k]), "label": name}
        for k, name in enumerate(names)
        if np.isfinite(shift.client[k])
    ]
    axes, note = ("label distance", "feature shift"), "Clients far from the others stand apart."
    title, note = "Labels and features", f"{note} Distances beyond chance."
    found.append(Chart(title, "points", points, *axes, note=note))
    if shift.cells.size <= MAX_CELLS:
        title, word = f"Feature shift within each {data.group_word}", data.group_word
        note = "Beyond chance, of at least 5 samples."
        rows = [
            {"x": names[k], "y": data.groups[g].name, "value": float(shift.cells[k, g])}
            for k, g in np.argwhere(np.isfinite(shift.cells))
        ]
        found.append(Chart(title, "heatmap", rows, "client", word, "standard deviations", note))
    return found


def values(data: Measured) -> dict[str, Any]:
    """The bare numbers, by name; those of clients in the order of ``clients``."""
    labels, shift = data.labels, data.shift
    near, equal, levels = data.near, data.equal, levels_of(data)
    apart = [{"client": data.names[k], "by": reason} for k, reason in data.apart.found]
    return {
        "clients": list(data.names),
        "sizes": list(data.federation.sizes),
        "labels": {
            "kind": labels.kind,
            "level": WORDS[levels.labels],
            "index": labels.index,
            "p": labels.p,
            "effective_classes": labels.effective.tolist(),
            "earth_movers": labels.distance.tolist(),
            "earth_movers_by_chance": labels.chance.tolist(),
            "jensen_shannon": labels.divergence.tolist(),
        },
        "quantity": {
            "level": WORDS[levels.sizes],
            "gini": data.gini,
            "largest_to_smallest": data.ratio,
            "effective_clients": effective_clients(data.federation.sizes),
        },
        "features": {
            "level": WORDS[levels.features],
            "shift": shift.overall,
            "p": shift.p,
            "shift_of_clients": shift.client.tolist(),
            "shift_by_chance": shift.chance.tolist(),
            "conditional_wasserstein": data.conditional.value.tolist(),
            "conditional_wasserstein_by_chance": data.conditional.chance.tolist(),
            "conditional_covered": data.conditional.covered.tolist(),
            "samples": len(data.sample.positions),
        },
        "duplicates": {
            "equal_across": equal.across,
            "equal_within": equal.within,
            "conflicting_labels": equal.conflicts,
            "near_across": None if near is None else near.number,
            "near_compared": None if near is None else near.samples,
            "test_in_training": data.leaked,
        },
        "columns": [
            {"column": data.column_names[c.column], "client": data.names[c.client]}
            | {"shift": c.shift}
            for c in data.columns
        ],
        "apart": apart,
        "methods": methods_for(data),
    }


def _mean(values: Any) -> float:
    """Of the values that are known."""
    return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")


def _mean_square(values: Any) -> float:
    """The root of the mean square of the values that are known."""
    return float(np.sqrt(_mean(values**2)))
