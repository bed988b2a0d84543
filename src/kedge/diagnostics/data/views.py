"""Tables, charts and bare numbers of a diagnosis of data."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kedge.data.federation import Federation
from kedge.diagnostics.data.feature_shift import ConditionalDistances, Group
from kedge.diagnostics.data.quantity import effective_clients
from kedge.diagnostics.data.sample import Sample
from kedge.diagnostics.data.verdict import WORDS, Measured, levels_of, methods_for
from kedge.history.sheet import Cell, Chart, Table

MAX_CELLS = 5000  # of a heatmap
MAX_BARS = 200
MAX_COLUMNS = 10  # shifted columns in the table


class View(NamedTuple):
    """What is shown of a diagnosis."""

    federation: Federation
    measured: Measured
    conditional: ConditionalDistances
    sample: Sample
    groups: list[Group]
    group_word: str


def tables(view: View) -> list[Table]:
    """Measures, clients, classes, and shifted columns."""
    found = [_measures(view), _clients(view), _groups(view)]
    columns = view.measured.columns
    if columns:
        names, clients = view.measured.column_names, view.measured.names
        rows: list[list[Cell]] = [
            [names[c.column], clients[c.client], c.shift, c.own, c.others]
            for c in columns[:MAX_COLUMNS]
        ]
        more = f"{len(columns) - MAX_COLUMNS} more" if len(columns) > MAX_COLUMNS else ""
        heads = ["column", "client", "shift (sd)", "its mean", "mean of others"]
        found.append(Table("Columns that shift", heads, rows, more, decimals=2))
    return found


def _measures(view: View) -> Table:
    measured, labels = view.measured, view.measured.labels
    sizes = np.asarray(view.federation.sizes)
    unit = "sd" if labels.kind == "targets" else "0 to 1"
    rows: list[list[Cell]] = []
    if labels.kind != "targets":
        word = "classes" if labels.kind == "classes" else "labels"
        chance = float(labels.chance_effective.mean())
        rows.append([f"effective {word}", float(labels.effective.mean()), chance, None, None])
    rows += [
        [
            f"label EMD ({unit})",
            float(labels.distance.mean()),
            float(labels.chance.mean()),
            labels.index,
            labels.p,
        ],
        [
            "label Jensen-Shannon (bits)",
            float(labels.divergence.mean()),
            float(labels.chance_divergence.mean()),
            None,
            None,
        ],
        ["Gini of sizes", measured.gini, None, None, None],
        ["largest to smallest", _number(measured.ratio), None, None, None],
        ["effective clients", effective_clients(sizes), None, None, None],
        [
            "feature shift (class sd)",
            _mean_square(measured.shift.raw),
            _mean_square(measured.shift.chance),
            measured.shift.overall,
            measured.shift.p,
        ],
        ["conditional Wasserstein C_d", *_conditional(view), None],
        ["samples on several clients", measured.equal.across, None, None, None],
    ]
    if measured.near is not None:
        rows.append(["near-duplicates", measured.near.number, None, None, None])
    rows.append(["test samples in training", measured.leaked, None, None, None])
    heads = ["measure", "value", "by chance", "beyond chance", "p"]
    note = "Means over clients. Beyond chance: 0 for data dealt out at random."
    return Table("Measures", heads, rows, note)


def _conditional(view: View) -> list[Cell]:
    found = view.conditional
    if np.isnan(found.value).all():
        return [None, None, None]
    value, chance = float(np.nanmean(found.value)), float(np.nanmean(found.chance))
    return [value, chance, max(value - chance, 0.0)]


def _clients(view: View) -> Table:
    measured, labels = view.measured, view.measured.labels
    score = np.maximum(measured.apart.labels, measured.apart.features)
    apart = dict(measured.apart.found)
    heads = ["client", "samples", "EMD", "JS", "shift", "C_d", "score", "apart"]
    has_classes = labels.kind != "targets"
    if has_classes:
        heads.insert(2, f"eff. {labels.kind}")
    rows = []
    for k, name in enumerate(measured.names):
        row: list[Cell] = [name, view.federation.sizes[k], float(labels.distance[k])]
        row += [float(labels.divergence[k]), _number(measured.shift.client[k])]
        row += [_number(view.conditional.value[k]), _number(score[k]), apart.get(k, "")]
        if has_classes:
            row.insert(2, float(labels.effective[k]))
        rows.append(row)
    note = (
        "Eff.: effective number, as many equally frequent ones would be as diverse. "
        * has_classes
        + "EMD and JS: labels against the pooled labels. Shift: features against the other clients "
        "within classes, beyond chance. C_d: conditional Wasserstein distance to the other "
        "clients, chance included."
    )
    return Table("Clients", heads, rows, note, decimals=2)


def _groups(view: View) -> Table:
    shift, owner = view.measured.shift, view.sample.owner
    rows: list[list[Cell]] = []
    for g, group in enumerate(view.groups):
        furthest = view.measured.names[shift.apart[g]] if shift.apart[g] >= 0 else ""
        clients = len(np.unique(owner[group.members]))
        rows.append([group.name, len(group.members), clients, float(shift.group[g]), furthest])
    heads = [view.group_word, "samples", "clients", "shift", "furthest"]
    title = "Classes" if view.group_word == "class" else f"By {view.group_word}"
    return Table(title, heads, rows, "Among the samples whose features were compared.", 2)


def charts(view: View) -> list[Chart]:
    """Who holds what, sizes, distances of clients, and the shift of each class on each client."""
    measured, federation = view.measured, view.federation
    names, labels, found = measured.names, measured.labels, []
    if labels.counts is not None and labels.counts.size <= MAX_CELLS:
        classes = federation.classes or [str(c) for c in range(labels.counts.shape[1])]
        rows = [
            {"x": names[k], "y": classes[c], "value": int(labels.counts[k, c])}
            for k, c in np.ndindex(labels.counts.shape)
        ]
        found.append(
            Chart("Samples of each class", "heatmap", rows, "client", "class", value="samples")
        )
    if len(names) <= MAX_BARS:
        rows = [{"x": name, "y": n} for name, n in zip(names, federation.sizes, strict=True)]
        found.append(Chart("Samples of each client", "bars", rows, "client", "samples"))
    points = [
        {"x": float(labels.excess[k]), "y": _number(measured.shift.client[k]), "label": name}
        for k, name in enumerate(names)
    ]
    note = "Clients far from the others stand apart. Distances beyond chance."
    points = [point for point in points if point["y"] is not None]
    found.append(
        Chart("Labels and features", "points", points, "label distance", "feature shift", note=note)
    )
    cells = measured.shift.cells
    if cells.size <= MAX_CELLS:
        rows = [
            {"x": names[k], "y": view.groups[g].name, "value": float(cells[k, g])}
            for k, g in np.ndindex(cells.shape)
            if np.isfinite(cells[k, g])
        ]
        title = f"Feature shift within each {view.group_word}"
        found.append(
            Chart(
                title,
                "heatmap",
                rows,
                "client",
                view.group_word,
                "standard deviations",
                "Beyond chance, of at least 5 samples.",
            )
        )
    return found


def values(view: View) -> dict[str, Any]:
    """The bare numbers, by name; those of clients in the order of ``clients``."""
    measured, labels, shift = view.measured, view.measured.labels, view.measured.shift
    near, equal, levels = measured.near, measured.equal, levels_of(measured)
    apart = [{"client": measured.names[k], "by": reason} for k, reason in measured.apart.found]
    return {
        "clients": list(measured.names),
        "sizes": list(view.federation.sizes),
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
            "gini": measured.gini,
            "largest_to_smallest": measured.ratio,
            "effective_clients": effective_clients(view.federation.sizes),
        },
        "features": {
            "level": WORDS[levels.features],
            "shift": shift.overall,
            "p": shift.p,
            "shift_of_clients": shift.client.tolist(),
            "shift_by_chance": shift.chance.tolist(),
            "conditional_wasserstein": view.conditional.value.tolist(),
            "conditional_wasserstein_by_chance": view.conditional.chance.tolist(),
            "conditional_covered": view.conditional.covered.tolist(),
            "samples": len(view.sample.positions),
        },
        "duplicates": {
            "equal_across": equal.across,
            "equal_within": equal.within,
            "conflicting_labels": equal.conflicts,
            "near_across": None if near is None else near.number,
            "near_compared": None if near is None else near.samples,
            "test_in_training": measured.leaked,
        },
        "columns": [
            {"column": measured.column_names[c.column], "client": measured.names[c.client]}
            | {"shift": c.shift}
            for c in measured.columns
        ],
        "apart": apart,
        "methods": methods_for(measured),
    }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _mean_square(values: Any) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.sqrt((known**2).mean())) if len(known) else None
