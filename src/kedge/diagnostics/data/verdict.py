"""What the measures of the data mean, in words, and what they suggest for a choice of methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kedge.core.part import parts
from kedge.core.task import Task
from kedge.diagnostics.data.apart import Apart, ColumnShift
from kedge.diagnostics.data.chance import SIGNIFICANT
from kedge.diagnostics.data.duplicates import Equal, Near
from kedge.diagnostics.data.feature_shift import Shift
from kedge.diagnostics.data.label_skew import LabelSkew

#: From which value on a corrected measure is called mild, moderate or strong. Dirichlet(10) has an
#: index of about 0.12, Dirichlet(1) of 0.4, Dirichlet(0.3) of 0.63 and Dirichlet(0.1) of 0.85.
LABELS = (0.1, 0.3, 0.6)
#: In standard deviations, for features and for real targets: images rotated by up to 20 degrees
#: are at about 0.5.
SHIFTS = (0.15, 0.35, 0.7)
SIZES = (0.15, 0.3, 0.5)  # Gini coefficient
WORDS = ("none", "mild", "moderate", "strong")
NAMED = 3  # clients that a sentence names


class Evidence(NamedTuple):
    """A gain over FedAvg that was measured with kedge; see docs/results.md."""

    method: str
    gain: str  # points, with its interval if there is one
    where: str
    table: str


EVIDENCE = {
    "fedcog": Evidence(
        "fedcog",
        "+7.7 (+0.1 to +15.4)",
        "Fashion-MNIST, two classes a client, 3 seeds",
        "fedcog/table1_fmnist_niid2",
    ),
    "fedtr": Evidence(
        "fedtr",
        "+6.5 (+5.8 to +7.2)",
        "OrganAMNIST, dirichlet(0.1), 3 seeds, in part a matter of the learning rate; it diverged "
        "on clients of some 20 X-rays",
        "fedtr/table1_organa",
    ),
    "fedimpro": Evidence(
        "fedimpro", "+6.1", "CIFAR-10, dirichlet(0.1), one seed", "fedimpro/table1"
    ),
    "scaffold": Evidence(
        "scaffold",
        "+3.1",
        "CIFAR-10, dirichlet(0.3), 10 of 100 clients, one seed",
        "flboost/table1_a03",
    ),
}


#: The same under a skew that is called moderate.
MODERATE = Evidence(
    "scaffold",
    "+3.7",
    "CIFAR-10, dirichlet(0.6), 10 of 100 clients, one seed",
    "flboost/table1_a06",
)


class Measured(NamedTuple):
    """All measures of a federation."""

    names: Sequence[str]  # of the clients
    task: Task
    labels: LabelSkew
    shift: Shift
    gini: float
    ratio: float  # largest to smallest client
    apart: Apart
    equal: Equal
    near: Near | None
    leaked: int  # test samples that are equal to training samples
    columns: Sequence[ColumnShift]
    column_names: Sequence[str]
    largest_share: float  # of the samples, on one client


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


def levels_of(found: Measured) -> Levels:
    """The levels of a federation; one client has none."""
    if len(found.names) < 2:
        return Levels(0, 0, 0)
    limits = SHIFTS if found.labels.kind == "targets" else LABELS
    return Levels(
        level(found.labels.index, limits, found.labels.p),
        level(found.shift.overall, SHIFTS, found.shift.p),
        level(found.gini, SIZES),
    )


def verdict(found: Measured) -> str:
    """One sentence: labels, features, sizes, clients that stand apart."""
    if len(found.names) < 2:
        return "One client holds all samples: there is nothing to compare."
    levels = levels_of(found)
    words = [_labels(found, levels.labels), _features(found, levels.features)]
    if levels.sizes:
        ratio = f"{found.ratio:.0f}" if found.ratio >= 3 else f"{found.ratio:.1f}"
        words.append(
            f"{WORDS[levels.sizes]} quantity skew (Gini {found.gini:.2f}, largest to smallest "
            f"{ratio} to 1)"
        )
    else:
        words.append("sizes are similar")
    words.append(_apart(found))
    text = "; ".join(word for word in words if word)
    return text[0].upper() + text[1:] + "."


def _labels(found: Measured, strength: int) -> str:
    labels, classes = found.labels, found.task.outputs
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


def _features(found: Measured, strength: int) -> str:
    if np.isnan(found.shift.client).all():
        return "features cannot be compared, since no class is on two clients"
    if not strength:
        return "features agree"
    return f"{WORDS[strength]} feature shift: {found.shift.overall:.2f} standard deviations"


def _apart(found: Measured) -> str:
    apart = found.apart.found
    if not apart:
        return ""
    names = [f"{found.names[k]} (by its {reason})" for k, reason in apart[:NAMED]]
    more = f" and {len(apart) - NAMED} more" if len(apart) > NAMED else ""
    verb = "stands" if len(apart) == 1 else "stand"
    listed = (
        ", ".join(names) if more or len(names) < 2 else f"{', '.join(names[:-1])} and {names[-1]}"
    )
    return f"{listed}{more} {verb} apart"


# -- further findings -------------------------------------------------------------------------


def remarks(found: Measured) -> list[str]:
    """Sentences on duplicates, columns and leaks; none where there is nothing to say."""
    lines = []
    equal = found.equal
    if equal.across:
        shared = "; ".join(
            f"{found.names[a]} and {found.names[b]} share {n}" for a, b, n in equal.clients[:NAMED]
        )
        text = f"{equal.across:,} samples occur on more than one client ({shared})"
        if equal.conflicts:
            text += f", {equal.conflicts} of them with different labels"
        lines.append(f"{text}.")
    if found.near is not None and found.near.number:
        near = found.near
        lines.append(
            f"Near-duplicates of samples on other clients: {near.number:,} of {near.samples:,}, at "
            f"least {near.ratio:.1f} times closer than their tenth neighbour."
        )
    if found.leaked:
        lines.append(
            f"{count_of(found.leaked, 'test sample')} also in the training data: tests are too "
            "optimistic."
        )
    if found.columns:
        pieces = [
            f"{found.column_names[c.column]} on {found.names[c.client]} ({c.shift:+.1f} sd)"
            for c in found.columns[:NAMED]
        ]
        lines.append(f"Columns that shift most, given the label: {', '.join(pieces)}.")
    return lines


def count_of(number: int, what: str) -> str:
    """A number with its noun: ``1 client``, ``1,438 samples``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# -- the choice of a method -------------------------------------------------------------------


def suits(method: str, task: Task) -> bool:
    """Whether a part has a meaning for a task."""
    return task.like in parts[method].tasks


def methods_for(found: Measured) -> list[str]:
    """Methods that are worth a comparison, FedAvg first."""
    levels = levels_of(found)
    names = ["fedavg"]
    if levels.labels == 3:
        names += ["scaffold", "fedtr", "fedcog", "fedimpro"]
    elif levels.labels == 2:
        names += ["scaffold", "fedtr"]
    if levels.features >= 2:
        names += ["scaffold", "fedper", "ditto"]
    if levels.sizes >= 2:
        names.append("fednova")
    known = [name for name in dict.fromkeys(names) if name == "fedavg" or suits(name, found.task)]
    return known if len(known) > 1 else [*known, "fedprox"]


def advice(found: Measured) -> list[str]:
    """What the measures suggest, each with what it is based on."""
    levels = levels_of(found)
    if len(found.names) < 2:
        return []
    lines = []
    if levels.labels == 3:
        lines.append(_gains(found.task, list(EVIDENCE.values()), "strong"))
    elif levels.labels == 2:
        lines.append(_gains(found.task, [MODERATE], "moderate"))
    if levels.features >= 2:
        lines.append(
            "Clients differ in their inputs, so one model may not suit all: test every client "
            "(--personal), and try parts with private layers or models (fedper, fedrep, ditto; "
            "fedbn for networks with BatchNorm). kedge has not measured their gain under such "
            "shift."
        )
    if levels.sizes >= 2:
        lines.append(
            f"One client holds {100 * found.largest_share:.0f} % of the samples, and clients take "
            "unequal numbers of steps per epoch: give all the same number (--steps), or normalise "
            "(fednova); --weighting uniform counts every client once."
        )
    if found.apart.found:
        lines.append(
            "Before training, find out why a client stands apart (another device, unit or coding); "
            "then compare runs with and without it."
        )
    if max(levels) < 2 and not found.apart.found:
        like = "Differences are mild" if any(levels) else "The data look as if dealt out at random"
        lines.append(
            f"{like}: FedAvg is the natural choice, since methods against drift have little to "
            "correct."
        )
    return [line for line in lines if line]


def _gains(task: Task, known: Sequence[Evidence], skew: str) -> str:
    """What was gained over FedAvg under label skew."""
    if task.like == "regression":
        return (
            "kedge has measured no gains for real targets; control variates (scaffold) and a "
            "proximal term (fedprox) apply to them."
        )
    gains = "; ".join(
        f"{e.method} {e.gain} points ({e.where})" for e in known if suits(e.method, task)
    )
    return (
        f"Under {skew} label skew, kedge's own runs gained over FedAvg: {gains}. Those are other "
        "data and networks, so compare before you choose."
    )
