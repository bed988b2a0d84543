"""Diagnose the training of a federation: how local training takes the clients apart."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kedge.diagnostics.training.measures import Confusions, Measures, Scores, measure
from kedge.diagnostics.training.predictions import (
    classifier_bias,
    per_class_accuracy,
    predicted_on_lacking,
    prediction_skew,
)
from kedge.diagnostics.training.probe import Probe, probe
from kedge.diagnostics.training.weights import Layer, mean_cosine
from kedge.errors import FieldError
from kedge.history.sheet import Cell, Chart, Sheet, SheetTable, heatmap_of, series_of, table_of
from kedge.sim.simulation import Simulation

#: Points of accuracy that local models are below the aggregate or the model before: from here on,
#: drift is moderate or strong, unless their updates agree.
MODERATE, STRONG = 5.0, 20.0
AGREEING = 0.5  # mean cosine of updates
MAX_LINES = 10  # layers in a chart; with more, stages of the model
MAX_CLASSES = 25  # in a heatmap of clients and classes


def diagnose_training(what: Simulation | Probe | Iterable[Probe]) -> Sheet:
    """Measure the drift of local training at one or several rounds.

    Weight divergence by layer, variance of client gradients, cosines between updates, classifier
    bias, similarity of features, forgetting, generalisation and personalisation of local models.
    What has no meaning for the task is left out, and a finding says so.

    Args:
        what: a simulation, whose present round is probed and which does not change; or probes of
            one run in the order of their rounds. An iterator is consumed one probe at a time, so
            the weights of one round at a time are in memory.

    Returns:
        A sheet: findings about the last round, the verdict first; tables, charts, and ``values``
        with the numbers of the last round and, under ``rounds``, of each.

    Raises:
        FieldError: there is no probe.
        NotFinite: the loss of a client is not finite.

    Example::

        sheet = diagnose_training(sim)
        print(sheet.findings[0])
    """
    begin = time.perf_counter()
    if isinstance(what, Simulation):
        what = probe(what)
    probes = [what] if isinstance(what, Probe) else what
    rounds = [measure(one) for one in probes]
    if not rounds:
        raise FieldError("there is no round to diagnose; give a simulation or a probe")
    last = rounds[-1]
    found = findings(rounds), tables(rounds), charts(rounds)
    numbers = values(last) | {"method": last.method, "rounds": [values(m) for m in rounds]}
    seconds = time.perf_counter() - begin
    several = "s" if len(rounds) > 1 else ""
    title = f"Training with {last.method} after round{several} "
    title += ", ".join(str(m.round) for m in rounds)
    return Sheet("training", title, *found, numbers, seconds, _cost(rounds, seconds))


def _cost(rounds: Sequence[Measures], seconds: float) -> str:
    probing = sum(m.probe_seconds for m in rounds)
    measuring = sum(m.seconds for m in rounds)
    points = f" at {len(rounds)} points of the run" if len(rounds) > 1 else ""
    return (
        f"{seconds:.1f} s: one more round of {rounds[-1].cohort} clients{points}, which is not "
        f"part of the run, {probing:.1f} s; measures {measuring:.1f} s; the rest are replays."
    )


# -- findings -------------------------------------------------------------------------------------


def findings(rounds: Sequence[Measures]) -> list[str]:
    """Sentences about the last of the measured rounds, the verdict first, and the course so far."""
    last = rounds[-1]
    if not last.update:
        return [_still(last)]
    found = [verdict(last), *_course(rounds), _layers(last), _agreement(last)]
    found += [*_bias(last), *_forgetting(last), *_personal(last), *_features(last)]
    found += [_gradients(last), *last.left_out, *_subset(last)]
    return [text for text in found if text]


def verdict(m: Measures) -> str:
    """How far local training takes the clients apart, in one sentence."""
    general, most = m.general, drifting(m.layers)
    several = most is not None and len(m.layers) > 1
    where = f"; they drift most in {_named(most)}" if most is not None and several else ""
    if m.classes is None and not m.layers:
        return f"No weight travels: {_general(general)}."
    if m.classes is None:
        return (
            f"{_share(m.cancelled)} of what clients learn in a round cancels in their mean{where}. "
            f"{_general(general)}."
        )
    if general.after < min(general.mean_local, general.mean_before) - MODERATE:
        return f"The aggregate fails: {_general(general)}{where}."
    best = max(general.after, general.mean_before)
    guess = 100 * float((m.classes.after[0].sum(1) / m.classes.after[0].sum()).max())
    if best < guess + MODERATE:
        return (
            f"Too early for a verdict: {_general(general)}; to name the largest class alone gives "
            f"{guess:.1f} %{where}."
        )
    gap = best - general.mean_local
    size = "Strong" if gap >= STRONG else "Moderate" if gap >= MODERATE else "Little"
    agreement = mean_cosine(m.cosines)
    is_shared = size != "Little" and agreement >= AGREEING
    lead = f"{size} drift"
    if is_shared:
        lead = f"Little drift, since the clients' updates agree (mean cosine {agreement:.2f})"
    bias = mean_bias(m)
    lacks = ""
    if bias is not None:
        lacks = f", and recognise {_share(bias[0])} of the samples of classes that they lack"
    return f"{lead}: {_general(general)}{where}{lacks}."


def drifting(layers: Sequence[Layer]) -> Layer | None:
    """The layer that drifts most, relative to its own norm."""
    known = [layer for layer in layers if math.isfinite(layer.relative)]
    return max(known, key=lambda layer: layer.relative) if known else None


def mean_bias(m: Measures) -> tuple[float, float, int] | None:
    """Means over the clients that lack classes of the shares of samples of these classes that are
    recognised, and that are assigned to own classes; and the number of these clients."""
    if m.classes is None:
        return None
    found = [b for b in m.classes.biases if b is not None]
    if not found:
        return None
    count = len(found)
    return sum(b.recognised for b in found) / count, sum(b.own for b in found) / count, count


def mean(values: Sequence[float]) -> float:
    """The mean of the values that are not NaN; NaN without any."""
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def _still(m: Measures) -> str:
    rate = f"the learning rate of round {m.round + 1} is {m.lr:g}"
    return (
        f"Nothing moves: {rate}, so that local training changes no weight. Diagnose an earlier "
        "round (--rounds)."
    )


def _named(layer: Layer) -> str:
    return "the head" if layer.name == "head" else layer.name


def _general(s: Scores) -> str:
    return (
        f"local models reach {_value(s, s.mean_local)} on the common test data, their aggregate "
        f"{_value(s, s.after)}, the model they start from {_value(s, s.mean_before)}"
    )


def _course(rounds: Sequence[Measures]) -> list[str]:
    """The course over rounds: of the drift, and of low against high layers (FedImpro, Fig. 3)."""
    if len(rounds) < 2:
        return []
    first, last = rounds[0], rounds[-1]
    if not first.divergence:
        return []
    text = (
        f"From round {first.round} to round {last.round} the distance of local models to their "
        f"mean goes from {first.divergence:.3g} to {last.divergence:.3g}"
    )
    pairs = [(a, b) for a, b in zip(first.layers, last.layers, strict=True) if a.divergence]
    if len(pairs) > 1:
        (a0, a1), (b0, b1) = pairs[0], pairs[-1]
        low, high = a1.divergence / a0.divergence, b1.divergence / b0.divergence
        text += f": that of {a0.name} to {_times(low)} its first value"
        text += f", that of {b0.name} to {_times(high)} its own"
    text += f"; the mean cosine of updates goes from {mean_cosine(first.cosines):.2f}"
    return [f"{text} to {mean_cosine(last.cosines):.2f}."]


def _layers(m: Measures) -> str:
    most = drifting(m.layers)
    if most is None or len(m.layers) < 2:
        return ""
    first = m.layers[0] if m.layers[0] is not most else m.layers[-1]
    text = (
        f"Weights: local models are {m.divergence:.3g} from their mean on average, after updates "
        f"of norm {m.update:.3g}. Relative to its own weights, {_named(most)} drifts most: "
        f"{_share(most.relative)}"
    )
    if first.relative and math.isfinite(first.relative):
        ratio = most.relative / first.relative
        place = "first" if first is m.layers[0] else "last"
        text += f", {ratio:.1f} times the {place} layer ({first.name}, {_share(first.relative)})"
    return text + "."


def _agreement(m: Measures) -> str:
    count = len(m.names)
    if not m.layers:
        return ""
    if count < 2:
        return "One client trains: there is nothing to compare between clients."
    matrix = m.cosines.clone()
    matrix.fill_diagonal_(math.inf)
    i, j = divmod(int(matrix.argmin()), count)
    pairs = count * (count - 1) // 2
    return (
        f"Updates: the mean cosine between two clients is {mean_cosine(m.cosines):.2f} "
        f"({pairs} pairs; least: {m.names[i]} and {m.names[j]}, {float(matrix[i, j]):.2f}). "
        f"{_share(m.cancelled)} of the clients' movement cancels in their mean; of orthogonal "
        f"updates it would be {_share(1 - 1 / count)}."
    )


def _bias(m: Measures) -> list[str]:
    if m.classes is None:
        return []
    skew, before = mean(m.classes.skews), mean([prediction_skew(b) for b in m.classes.before])
    lean = (
        f"{_share(skew)} of a local model's predictions would have to change to match the "
        f"true number of samples of each class, {_share(before)} of those of the model before"
    )
    bias = mean_bias(m)
    if bias is None:
        return [f"Classifier: no client lacks a class that is tested; {lean}."]
    pairs = zip(m.classes.before, m.classes.counts, strict=True)
    start = mean([b.recognised for b in (classifier_bias(*p) for p in pairs) if b is not None])
    recognised, own, count = bias
    return [
        f"Classifier: local models assign {_share(own)} of the samples of classes that they lack "
        f"to classes that they have, and recognise {_share(recognised)} of them, the model before "
        f"{_share(start)} ({count} of {len(m.names)} clients lack classes); {lean}."
    ]


def _forgetting(m: Measures) -> list[str]:
    if m.classes is None:
        return []
    changes = m.classes.changes
    own, lacking = mean([x.own for x in changes]), mean([x.lacking for x in changes])
    text = (
        f"Forgetting: local training changes the accuracy on own classes by {_points(own)} points"
    )
    if not math.isnan(lacking):
        text += f", on lacking ones by {_points(lacking)}"
    return [text + " (mean over clients and classes)."]


def _personal(m: Measures) -> list[str]:
    if m.personal is None:
        return []
    s = m.personal
    return [
        f"Own data: on {m.personal_on}, local models reach {_value(s, s.mean_local)}, the model "
        f"before {_value(s, s.mean_before)}, the aggregate {_value(s, s.after)}."
    ]


def _features(m: Measures) -> list[str]:
    f = m.features
    if f is None or not f.cka:
        return []
    text = (
        f"Features: those of local models have a linear CKA of {mean(f.cka[-1][1]):.3f} with those "
        "of the model before on the same samples"
    )
    if len(f.cka) > 1:
        text += f" ({', '.join(f'{name} {mean(v):.3f}' for name, v in f.cka[:-1])} below)"
    if f.lacking_local:
        text += (
            f"; between samples of own and of lacking classes the mean cosine goes from "
            f"{mean(f.lacking_before):.2f} to {mean(f.lacking_local):.2f}"
        )
    elif f.across_local:
        text += (
            f"; between samples of different classes the mean cosine goes from "
            f"{f.across_before:.2f} to {mean(f.across_local):.2f}"
        )
    return [text + "."]


def _gradients(m: Measures) -> str:
    v = m.variance
    if not v.total:
        return ""
    ratio = v.total / v.squared_mean if v.squared_mean else math.inf
    text = (
        f"Gradients: at the global model their variance between clients is {v.total:.3g}, "
        f"{ratio:.3g} times the squared norm of their mean"
    )
    if not v.high:  # the upper leaves stay on the clients
        return text + "."
    left = v.with_shared_features() / v.total
    return (
        f"{text}; {_share(v.high_share)} of it is {m.high}. One shared feature for each sample "
        f"there would leave {_share(left)} of the variance (Theorem 4.2 of FedImpro)."
    )


def _subset(m: Measures) -> list[str]:
    if len(m.names) == m.cohort:
        return []
    return [f"Measured on {len(m.names)} of the {m.cohort} clients of the round."]


def _value(s: Scores, value: float) -> str:
    return f"{value:.1f} %" if s.unit == "%" else f"{s.metric} {value:.4g} {s.unit}".rstrip()


def _points(value: float) -> str:
    """Points with a sign, but for 0.

    >>> _points(-3.14), _points(-0.01)
    ('-3.1', '0.0')
    """
    return f"{value:+.1f}" if abs(value) >= 0.05 else "0.0"


def _times(ratio: float) -> str:
    return f"{_share(ratio)} of" if ratio < 2 else f"{ratio:.3g} times"


def _share(value: float) -> str:
    """A share in percent: a whole number from 10 % on, else with one decimal."""
    percent = 100 * value
    if not math.isfinite(percent):
        return "unknown"
    return f"{percent:.0f} %" if abs(percent) >= 10 else f"{percent:.1f} %"


# -- tables ---------------------------------------------------------------------------------------


def tables(rounds: Sequence[Measures]) -> list[SheetTable]:
    last = rounds[-1]
    found = [_rounds_table(rounds)] if len(rounds) > 1 else []
    found += [_layers_table(last)] if last.layers else []
    found += [_clients_table(last), _updates_table(last)]
    return found if last.classes is None else [*found, _classes_table(last, last.classes)]


def _rounds_table(rounds: Sequence[Measures]) -> SheetTable:
    biases = [mean_bias(m) for m in rounds]
    last = rounds[-1]
    note = (
        "Divergence of weights; mean cosine of updates; variance of gradients, and its share "
        f"{last.high}; {last.general.label} of local models and of the aggregate on the common "
        "test data; lacking: % of the samples of lacking classes that local models recognise."
    )
    columns: dict[str, list[Cell] | None] = {
        "round": [m.round for m in rounds],
        "divergence": [m.divergence for m in rounds],
        "cosine": [mean_cosine(m.cosines) for m in rounds],
        "variance": [m.variance.total for m in rounds],
        "% high": [100 * m.variance.high_share for m in rounds],
        "local": [m.general.mean_local for m in rounds],
        "aggregate": [m.general.after for m in rounds],
        "lacking": [b and 100 * b[0] for b in biases] if any(biases) else None,
    }
    return table_of("Over rounds", columns, note, decimals=2)


def _layers_table(m: Measures) -> SheetTable:
    note = (
        "Divergence: mean distance of the clients' weights to their mean (FedImpro, section 5.1); "
        "relative to the norm of the mean's weights in percent."
    )
    columns: dict[str, list[Cell] | None] = {
        "layer": [layer.name for layer in m.layers],
        "parameters": [layer.parameters for layer in m.layers],
        "divergence": [layer.divergence for layer in m.layers],
        "relative %": [100 * layer.relative for layer in m.layers],
    }
    return table_of(f"Layers after round {m.round}", columns, note)


def _clients_table(m: Measures) -> SheetTable:
    """What local models predict."""
    c = m.classes
    biases = c.biases if c else []
    note = f"{m.general.label.capitalize()} of local models on all data"
    note += f" and on {m.personal_on}" if m.personal else ""
    note += ". " if c else ""
    if any(biases):
        note += "Of samples of lacking classes: % recognised, and % assigned to own classes. "
    if c:
        note += (
            "Lean: % of the predictions that would have to change to match the true number of "
            "samples of each class. Forgets: points of accuracy lost, mean over classes"
        )
    columns: dict[str, Sequence[Cell] | None] = {
        "client": m.names,
        "classes": [int((counts > 0).sum()) for counts in c.counts] if c else None,
        "all data": m.general.local,
        "own data": m.personal.local if m.personal else None,
        "lacking": [b and 100 * b.recognised for b in biases] if any(biases) else None,
        "to own": [b and 100 * b.own for b in biases] if any(biases) else None,
        "lean": [100 * skew for skew in c.skews] if c else None,
        "forgets": c.forgotten if c else None,
    }
    return table_of("Clients", columns, f"{note}.", decimals=1)


def _updates_table(m: Measures) -> SheetTable:
    """How updates and features of local models are placed."""
    count = len(m.names)
    others = (m.cosines.sum(1) - m.cosines.diagonal()) / max(1, count - 1)
    note = "Mean cosine with the updates of the others"
    note += "; linear CKA of features with those of the model before" if m.features else ""
    columns: dict[str, Sequence[Cell] | None] = {
        "client": m.names,
        "cosine": [float(v) if count > 1 else None for v in others],
        "CKA": m.features.cka[-1][1] if m.features else None,
    }
    return table_of("Updates and features", columns, f"{note}.")


def _classes_table(m: Measures, c: Confusions) -> SheetTable:
    before = torch.stack([per_class_accuracy(x) for x in c.before]).nanmean(0)
    after = torch.stack([per_class_accuracy(x) for x in c.after]).nanmean(0)
    local = torch.stack([per_class_accuracy(x) for x in c.local])  # [K, C]
    has = c.counts > 0
    note = (
        f"Accuracy in percent on {m.tested_on}: of the model before, of local models of clients "
        "with and without the class, and of the aggregate."
    )
    each = range(len(c.names))
    columns: dict[str, Sequence[Cell] | None] = {
        "class": c.names,
        "clients": [int(has[:, i].sum()) for i in each],
        "before": before.tolist(),
        "with it": [_mean(local[has[:, i], i]) for i in each],
        "without": [_mean(local[~has[:, i], i]) for i in each],
        "after": after.tolist(),
    }
    return table_of("Classes", columns, note, decimals=1)


def _mean(values: torch.Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


# -- charts ---------------------------------------------------------------------------------------


def charts(rounds: Sequence[Measures]) -> list[Chart]:
    last = rounds[-1]
    numbers, scores = [m.round for m in rounds], [m.general for m in rounds]
    found = [_layers_chart(rounds)] if last.layers else []
    if len(rounds) > 1:
        models = {
            "before": [s.mean_before for s in scores],
            "local models": [s.mean_local for s in scores],
            "aggregate": [s.after for s in scores],
        }
        title = "Models on the common test data"
        found.append(series_of(title, "lines", numbers, models, "round", last.general.label))
        parts = {
            "low": [m.variance.low for m in rounds],
            "high": [m.variance.high for m in rounds],
        }
        title = "Variance of client gradients"
        note = f"High: the part {last.high} (FedImpro, Definition 4.2 and equation 3)."
        found.append(series_of(title, "lines", numbers, parts, "round", "variance", note=note))
    if len(last.names) > 1 and last.layers:
        values = [[round(float(v), 2) for v in row] for row in last.cosines]
        title = "Cosines between client updates"
        found.append(heatmap_of(title, last.names, last.names, values, "", "", "cosine"))
    if last.classes is not None and len(last.classes.names) <= MAX_CLASSES:
        found += _class_charts(last.names, last.classes)
    local = {
        "all data": last.general.local,
        "own data": last.personal.local if last.personal else None,
    }
    title = "Local models on all and on own data"
    note = "Generalisation and personalisation, as in Figure 2 of FedCOG."
    axes = "client", last.general.label
    return [*found, series_of(title, "bars", last.names, local, *axes, note=note)]


def _layers_chart(rounds: Sequence[Measures]) -> Chart:
    if len(rounds) == 1:
        [m] = rounds
        title = f"Weight divergence by layer after round {m.round}"
        layers, relative = [x.name for x in m.layers], [100 * x.relative for x in m.layers]
        return series_of(title, "bars", layers, {"": relative}, "layer", "% of the layer's norm")
    stages = [_stages(m.layers) for m in rounds]
    tops = {name: max(each[name] for each in stages) for name in stages[-1]}
    courses = {
        name: [each[name] / top if top else 0.0 for each in stages] for name, top in tops.items()
    }
    axes = "round", "share of its maximum"
    note = "Each line is divided by its maximum, as in Figure 3 of FedImpro."
    numbers = [m.round for m in rounds]
    return series_of("Weight divergence by layer", "lines", numbers, courses, *axes, note=note)


def _stages(layers: Sequence[Layer]) -> dict[str, float]:
    """Divergence by layer, or by stage (the first part of a layer's name) if there are many."""
    if len(layers) <= MAX_LINES:
        return {layer.name: layer.divergence for layer in layers}
    squares: dict[str, float] = {}
    for layer in layers:
        stage = layer.name.split(".")[0]
        squares[stage] = squares.get(stage, 0.0) + layer.divergence**2
    return {stage: math.sqrt(value) for stage, value in squares.items()}


def _class_charts(names: Sequence[str], c: Confusions) -> list[Chart]:
    def chart(title: str, values: dict[str, torch.Tensor], x: str, value: str, note: str) -> Chart:
        """By class and client; values have one decimal, as cells of a heatmap show them."""
        table = torch.stack(list(values.values())).T  # [C, clients]
        rows = [[round(v, 1) for v in row] for row in table.tolist()]
        return heatmap_of(title, c.names, list(values), rows, x, "", value, note=note)

    each = list(enumerate(names))
    moved = {k: per_class_accuracy(c.local[i]) - per_class_accuracy(c.before[i]) for i, k in each}
    lacking = [(i, k) for (i, k), bias in zip(each, c.biases, strict=True) if bias]
    shares = {k: 100 * predicted_on_lacking(c.local[i], c.counts[i]) for i, k in lacking}
    note = "Local model against the model it starts from; negative: forgotten."
    found = [chart("Change of accuracy by local training", moved, "class", "points", note)]
    if shares:
        title, axis = "Predictions on samples of lacking classes", "predicted class"
        found.append(chart(title, shares, axis, "% of these samples", "FedBR, Figure 3b."))
    return found


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
        found["prediction_skew"] = mean(c.skews)
        found["change_own"] = mean([x.own for x in c.changes])
        found["change_lacking"] = mean([x.lacking for x in c.changes])
        found["forgetting"] = mean(c.forgotten)
    if (f := m.features) is not None:
        found["cka"] = {name: mean(v) for name, v in f.cka}
        found["across_classes_before"] = f.across_before
        found["across_classes"] = mean(f.across_local)
        found["lacking_cosine"] = mean(f.lacking_local)
    return found
