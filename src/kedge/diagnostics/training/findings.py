"""What measures of training say, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kedge.diagnostics.training.bias import classifier_bias, prediction_skew
from kedge.diagnostics.training.divergence_by_layer import Layer, mean_cosine
from kedge.diagnostics.training.forgetting import change
from kedge.diagnostics.training.results import Measures, Scores

#: Points of accuracy that local models are below the aggregate or the model before: from here on,
#: drift is moderate or strong, unless their updates agree.
MODERATE, STRONG = 5.0, 20.0
AGREEING = 0.5  # mean cosine of updates


def findings(rounds: Sequence[Measures]) -> list[str]:
    """Sentences about the last of the measured rounds, the verdict first, and the course so far."""
    last = rounds[-1]
    if not last.update:
        return [_still(last)]
    found = [verdict(last), *_course(rounds), _layers(last), _agreement(last)]
    found += [*_bias(last), *_forgetting(last), *_personal(last), *_features(last)]
    found += [_gradients(last), *_margins(last), *last.left_out, *_subset(last)]
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
    pairs = zip(m.classes.local, m.classes.counts, strict=True)
    found = [b for b in (classifier_bias(*pair) for pair in pairs) if b is not None]
    if not found:
        return None
    count = len(found)
    return sum(b.recognised for b in found) / count, sum(b.own for b in found) / count, count


def mean_skew(m: Measures) -> float | None:
    """The mean over clients of how far their predictions lean to some classes."""
    if m.classes is None:
        return None
    values = [prediction_skew(matrix) for matrix in m.classes.local]
    return sum(values) / len(values)


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
    skew, before = mean_skew(m), mean([prediction_skew(b) for b in m.classes.before])
    lean = (
        f"{_share(skew or 0.0)} of a local model's predictions would have to change to match the "
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
    c = m.classes
    changes = [change(*three) for three in zip(c.before, c.local, c.counts, strict=True)]
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


def _margins(m: Measures) -> list[str]:
    if m.margins is None or not m.margins.local or math.isnan(mean(m.margins.local)):
        return []
    g = m.margins
    places = [i for i, value in enumerate(g.local) if not math.isnan(value)]
    least = min(places, key=lambda i: g.local[i])
    return [
        f"Margin: on data of the other clients, the worst-case margin of local models is "
        f"{mean(g.local):.3g} on average, that of the model before {mean(g.before):.3g}; "
        f"{m.names[g.clients[least]]} contributes least ({g.local[least]:.3g})."
    ]


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
