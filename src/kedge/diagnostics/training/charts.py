"""Tables and charts of measures of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kedge.diagnostics.training.bias import classifier_bias, predicted_on_lacking, prediction_skew
from kedge.diagnostics.training.divergence_by_layer import Layer, mean_cosine
from kedge.diagnostics.training.embedding import embed
from kedge.diagnostics.training.findings import mean, mean_bias, mean_skew
from kedge.diagnostics.training.forgetting import change, forgetting, per_class_accuracy
from kedge.diagnostics.training.results import Measures
from kedge.history.sheet import Cell, Chart, Table

MAX_LINES = 10  # layers in a chart; with more, stages of the model
MAX_CLASSES = 25  # in a heatmap of clients and classes


# -- tables -----------------------------------------------------------------------------------


def tables(rounds: Sequence[Measures]) -> list[Table]:
    last = rounds[-1]
    found = [_rounds_table(rounds)] if len(rounds) > 1 else []
    found += [_layers_table(last)] if last.layers else []
    found += _clients_tables(last)
    if last.classes is not None:
        found.append(_classes_table(last))
    return found


def _rounds_table(rounds: Sequence[Measures]) -> Table:
    columns = ["round", "divergence", "cosine", "variance", "% high", "local", "aggregate"]
    biases = [mean_bias(m) for m in rounds]
    rows: list[list[Cell]] = []
    for m in rounds:
        v, general = m.variance, m.general
        found = [m.divergence, mean_cosine(m.cosines), v.total, 100 * v.high_share]
        rows.append([m.round, *found, general.mean_local, general.after])
    if any(bias is not None for bias in biases):
        columns.append("lacking")
        for row, bias in zip(rows, biases, strict=True):
            row.append(None if bias is None else 100 * bias[0])
    s = rounds[-1].general
    note = (
        "Divergence of weights; mean cosine of updates; variance of gradients, and its share "
        f"{rounds[-1].high}; {_axis(s)} of local models and of the aggregate on the common test "
        "data; lacking: % of the samples of lacking classes that local models recognise."
    )
    return Table("Over rounds", columns, rows, note, decimals=2)


def _layers_table(m: Measures) -> Table:
    rows = [
        (layer.name, layer.parameters, layer.divergence, 100 * layer.relative) for layer in m.layers
    ]
    note = (
        "Divergence: mean distance of the clients' weights to their mean (FedImpro, section 5.1); "
        "relative to the norm of the mean's weights in percent."
    )
    return Table(
        f"Layers after round {m.round}", ("layer", "parameters", "divergence", "relative %"),
        rows, note,
    )  # fmt: skip


def _clients_tables(m: Measures) -> list[Table]:
    """What local models predict, and how their updates and features are placed."""
    count = len(m.names)
    columns: dict[str, list[Cell]] = {"client": list(m.names)}
    note = f"{_axis(m.general).capitalize()} of local models on all data"
    if (c := m.classes) is not None:
        columns["classes"] = [int((counts > 0).sum()) for counts in c.counts]
    columns["all data"] = list(m.general.local)
    if m.personal is not None:
        columns["own data"] = list(m.personal.local)
        note += f" and on {m.personal_on}"
    if c is not None:
        biases = [classifier_bias(*pair) for pair in zip(c.local, c.counts, strict=True)]
        note += ". "
        if any(biases):
            columns["lacking"] = [b and 100 * b.recognised for b in biases]
            columns["to own"] = [b and 100 * b.own for b in biases]
            note += "Of samples of lacking classes: % recognised, and % assigned to own classes. "
        columns["lean"] = [100 * prediction_skew(matrix) for matrix in c.local]
        columns["forgets"] = [forgetting(*pair) for pair in zip(c.before, c.local, strict=True)]
        note += (
            "Lean: % of the predictions that would have to change to match the true number of "
            "samples of each class. Forgets: points of accuracy lost, mean over classes"
        )
    rows = list(zip(*columns.values(), strict=True))
    found = [Table("Clients", tuple(columns), rows, f"{note}.", decimals=1)]
    others = (m.cosines.sum(1) - m.cosines.diagonal()) / max(1, count - 1)
    columns = {
        "client": list(m.names),
        "cosine": [float(v) if count > 1 else None for v in others],
    }
    note = "Mean cosine with the updates of the others"
    if m.features is not None:
        columns["CKA"] = list(m.features.cka[-1][1])
        note += "; linear CKA of features with those of the model before"
    if m.margins is not None:
        margins: list[Cell] = [None] * count
        for place, value in zip(m.margins.clients, m.margins.local, strict=True):
            margins[place] = value
        columns["margin"] = margins
        note += "; worst-case margin on data of the others (FedImpro, equation 2)"
    rows = list(zip(*columns.values(), strict=True))
    return [*found, Table("Updates, features and margins", tuple(columns), rows, f"{note}.")]


def _classes_table(m: Measures) -> Table:
    assert m.classes is not None
    c = m.classes
    before = torch.stack([per_class_accuracy(x) for x in c.before]).nanmean(0)
    after = torch.stack([per_class_accuracy(x) for x in c.after]).nanmean(0)
    local = torch.stack([per_class_accuracy(x) for x in c.local])  # [K, C]
    rows: list[list[Cell]] = []
    for i, name in enumerate(c.names):
        has = c.counts[:, i] > 0
        rows.append(
            [name, int(has.sum()), float(before[i]), _mean(local[has, i]), _mean(local[~has, i]),
             float(after[i])]
        )  # fmt: skip
    columns = ("class", "clients", "before", "with it", "without", "after")
    note = (
        f"Accuracy in percent on {m.tested_on}: of the model before, of local models of clients "
        "with and without the class, and of the aggregate."
    )
    return Table("Classes", columns, rows, note, decimals=1)


def _mean(values: torch.Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


# -- charts -----------------------------------------------------------------------------------


def charts(rounds: Sequence[Measures]) -> list[Chart]:
    last = rounds[-1]
    found = [_layers_chart(rounds)] if last.layers else []
    if len(rounds) > 1:
        found.append(_scores_lines(rounds))
        found.append(_variance_chart(rounds))
    if len(last.names) > 1 and last.layers:
        found.append(_cosines_chart(last))
    if last.classes is not None and len(last.classes.names) <= MAX_CLASSES:
        found += _class_charts(last)
    found.append(_scores_chart(last))
    if last.map is not None and len(last.map.features) >= 4:
        found.append(_map_chart(last))
    return found


def _layers_chart(rounds: Sequence[Measures]) -> Chart:
    if len(rounds) == 1:
        rows = [{"x": layer.name, "y": _finite(100 * layer.relative)} for layer in rounds[0].layers]
        return Chart(
            f"Weight divergence by layer after round {rounds[0].round}", "bars", rows,
            x="layer", y="% of the layer's norm",
        )  # fmt: skip
    courses: dict[str, list[float]] = {}
    for m in rounds:
        for name, value in _stages(m.layers).items():
            courses.setdefault(name, []).append(value)
    rows = []
    for name, values in courses.items():
        top = max(values)
        for m, value in zip(rounds, values, strict=True):
            rows.append({"x": m.round, "y": value / top if top else 0.0, "series": name})
    return Chart(
        "Weight divergence by layer", "lines", rows, x="round", y="share of its maximum",
        note="Each line is divided by its maximum, as in Figure 3 of FedImpro.",
    )  # fmt: skip


def _stages(layers: Sequence[Layer]) -> dict[str, float]:
    """Divergence by layer, or by stage (the first part of a layer's name) if there are many."""
    if len(layers) <= MAX_LINES:
        return {layer.name: layer.divergence for layer in layers}
    squares: dict[str, float] = {}
    for layer in layers:
        stage = layer.name.split(".")[0]
        squares[stage] = squares.get(stage, 0.0) + layer.divergence**2
    return {stage: math.sqrt(value) for stage, value in squares.items()}


def _scores_lines(rounds: Sequence[Measures]) -> Chart:
    rows: list[dict[str, Any]] = []
    for m in rounds:
        rows.append({"x": m.round, "y": _finite(m.general.mean_before), "series": "before"})
        rows.append({"x": m.round, "y": _finite(m.general.mean_local), "series": "local models"})
        rows.append({"x": m.round, "y": _finite(m.general.after), "series": "aggregate"})
    s = rounds[-1].general
    return Chart("Models on the common test data", "lines", rows, x="round", y=_axis(s))


def _variance_chart(rounds: Sequence[Measures]) -> Chart:
    rows: list[dict[str, Any]] = []
    for m in rounds:
        rows.append({"x": m.round, "y": m.variance.low, "series": "low"})
        rows.append({"x": m.round, "y": m.variance.high, "series": "high"})
    return Chart(
        "Variance of client gradients", "lines", rows, x="round", y="variance",
        note=f"High: the part {rounds[-1].high} (FedImpro, Definition 4.2 and equation 3).",
    )  # fmt: skip


def _cosines_chart(m: Measures) -> Chart:
    rows = [
        {"x": m.names[i], "y": m.names[j], "value": round(float(m.cosines[i, j]), 2)}
        for i in range(len(m.names))
        for j in range(len(m.names))
    ]
    return Chart("Cosines between client updates", "heatmap", rows, value="cosine")


def _class_charts(m: Measures) -> list[Chart]:
    c = m.classes
    assert c is not None
    lost, predicted = [], []
    for k, name in enumerate(m.names):
        points = per_class_accuracy(c.local[k]) - per_class_accuracy(c.before[k])
        shares = predicted_on_lacking(c.local[k], c.counts[k])
        lacks = classifier_bias(c.local[k], c.counts[k]) is not None
        for i, label in enumerate(c.names):
            lost.append({"x": label, "y": name, "value": _rounded(float(points[i]))})
            if lacks:
                predicted.append({"x": label, "y": name, "value": _rounded(100 * float(shares[i]))})
    note = "Local model against the model it starts from; negative: forgotten."
    title = "Change of accuracy by local training"
    found = [Chart(title, "heatmap", lost, x="class", value="points", note=note)]
    if predicted:
        title, axis = "Predictions on samples of lacking classes", "predicted class"
        unit, note = "% of these samples", "FedBR, Figure 3b."
        found.append(Chart(title, "heatmap", predicted, x=axis, value=unit, note=note))
    return found


def _scores_chart(m: Measures) -> Chart:
    """Generalisation and personalisation of local models, client by client (FedCOG, Fig. 2)."""
    rows: list[dict[str, Any]] = []
    for k, name in enumerate(m.names):
        rows.append({"x": name, "y": _finite(m.general.local[k]), "series": "all data"})
        if m.personal is not None:
            rows.append({"x": name, "y": _finite(m.personal.local[k]), "series": "own data"})
    return Chart(
        "Local models on all and on own data", "bars", rows, x="client", y=_axis(m.general),
        note="Generalisation and personalisation, as in Figure 2 of FedCOG.",
    )  # fmt: skip


def _map_chart(m: Measures) -> Chart:
    assert m.map is not None
    places = embed(m.map.features)
    half, rows = len(m.map.labels), []
    for i, (x, y) in enumerate(places.tolist()):
        local, sample = i >= half, i % half
        kind = "lacking classes" if m.map.lacking[sample] else "own classes"
        series = f"{'local' if local else 'global'}, {kind}"
        rows.append({"x": x, "y": y, "series": series, "label": m.map.labels[sample]})
    return Chart(
        f"Features of {m.map.client} by t-SNE", "points", rows,
        note="The client with the least effective number of classes; global and local features of "
        "the same samples, as in Figure 2 of FedBR. Axes have no meaning.",
    )  # fmt: skip


def _axis(scores: Any) -> str:
    return f"{scores.metric} {scores.unit}".rstrip()


def _rounded(value: float) -> float | None:
    """With one decimal, as cells of a heatmap show it."""
    return round(value, 1) if math.isfinite(value) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- values -----------------------------------------------------------------------------------


def values(m: Measures) -> dict[str, Any]:
    """The numbers of one round by name."""
    found: dict[str, Any] = {
        "round": m.round,
        "clients": len(m.names),
        "weight_divergence": m.divergence,
        "weight_divergence_by_layer": {layer.name: layer.divergence for layer in m.layers},
        "relative_divergence_by_layer": {layer.name: layer.relative for layer in m.layers},
        "mean_cosine": mean_cosine(m.cosines),
        "cancelled": m.cancelled,
        "gradient_variance_low": m.variance.low,
        "gradient_variance_high": m.variance.high,
        "gradient_squared_mean": m.variance.squared_mean,
        "generalisation": m.general.mean_local,
        "before": m.general.mean_before,
        "aggregate": m.general.after,
    }
    if m.personal is not None:
        found["personalisation"] = m.personal.mean_local
    if (bias := mean_bias(m)) is not None:
        found |= {"lacking_recognised": bias[0], "lacking_to_own": bias[1]}
    if (c := m.classes) is not None:
        found["prediction_skew"] = mean_skew(m)
        changes = [change(*three) for three in zip(c.before, c.local, c.counts, strict=True)]
        found["change_own"] = mean([x.own for x in changes])
        found["change_lacking"] = mean([x.lacking for x in changes])
        pairs = zip(c.before, c.local, strict=True)
        found["forgetting"] = mean([forgetting(*pair) for pair in pairs])
    if (f := m.features) is not None:
        found["cka"] = {name: mean(v) for name, v in f.cka}
        found["across_classes_before"] = f.across_before
        found["across_classes"] = mean(f.across_local)
        found["lacking_cosine"] = mean(f.lacking_local)
    if (g := m.margins) is not None:
        found |= {"margin": mean(g.local), "margin_before": mean(g.before)}
    return found
