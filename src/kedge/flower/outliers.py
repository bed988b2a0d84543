"""Members whose statements deviate absurdly from those of most members; the rules say how far.

A federation is as large as what its members state: the model has an output for every class and an
input for every word, all inputs are scaled by pooled moments, and updates are weighted by samples.
No member alone may raise these beyond bounds. What most members have is the lower median, so one of
two members is no majority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from statistics import median_low

from kedge.flower.rules import Rules
from kedge.flower.statement import Statement, magnitude

FEW_CLASSES, FEW_COLUMNS = 100, 1000  # that any member may have, however few most have

Refusals = dict[str, str]  # sentences by the name of the member


def too_large(members: Sequence[Statement], rules: Rules) -> Refusals:
    """Members with more classes or columns than the rules allow."""
    return _wide(members, rules.max_classes, rules.max_columns)


def outliers(members: Sequence[Statement], rules: Rules) -> Refusals:
    """Members that state far more classes, columns or samples than most."""
    classes, columns = (
        int(rules.max_variety * median_low(len(names(s)) for s in members))
        for names in (_class_names, _column_names)
    )
    found = _wide(members, max(FEW_CLASSES, classes), max(FEW_COLUMNS, columns))
    typical = median_low(s.train for s in members)
    return found | {
        s.name: f"{s.name} states {s.train} samples to train on and {s.test} to test on, most "
        f"members {typical} or fewer; correct it, or raise max_ratio in the rules"
        for s in members
        if max(s.train, s.test) > rules.max_ratio * typical
    }


def crowding(members: Sequence[Statement], rules: Rules) -> Refusals:
    """Members without whom the classes and columns of all are as few as the rules allow."""
    found: Refusals = {}
    for names, most in ((_class_names, rules.max_classes), (_column_names, rules.max_columns)):
        left = [s for s in members if s.name not in found]
        while len(counts := Counter(name for s in left for name in names(s))) > most:
            worst = max(left, key=lambda s: sum(counts[name] == 1 for name in names(s)))
            left.remove(worst)
            found |= _wide([worst], 0, 0)
    return found


def far_off(members: Sequence[Statement], rules: Rules) -> Refusals:
    """Members whose inputs are far larger than those of most; a column that they lack is 0."""
    sizes: dict[str, dict[str, float]] = {}
    for s in members:
        for i in range(len(s.moments.mean)):
            name = s.schema.columns[i] if s.schema.columns else f"channel {i}"
            sizes.setdefault(name, {})[s.name] = magnitude(s.moments, i)
    found: Refusals = {}
    for column, by_member in sizes.items():
        typical = median_low([*by_member.values()] + [0.0] * (len(members) - len(by_member)))
        for name, size in by_member.items():
            if size > rules.max_ratio * max(1.0, typical):
                found[name] = (
                    f"{name} states inputs of size {size:.3g} in {column!r}, those of most members "
                    f"are {typical:.3g} or less; correct its data, or raise max_ratio in the rules"
                )
    return found


def _class_names(member: Statement) -> Collection[object]:
    return member.schema.classes or range(member.schema.outputs)


def _column_names(member: Statement) -> Collection[object]:
    return member.schema.columns or ()


def _wide(members: Sequence[Statement], classes: int, columns: int) -> Refusals:
    """Members with more classes or columns than these."""
    return {
        s.name: f"{s.name} has {len(names(s))} {what}, far more than most members or than the "
        f"rules allow; correct its data, or raise {rule} or max_variety in the rules"
        for names, most, what, rule in (
            (_class_names, classes, "classes", "max_classes"),
            (_column_names, columns, "columns", "max_columns"),
        )
        for s in members
        if len(names(s)) > most
    }
