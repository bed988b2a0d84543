"""Agree on one data schema: members state what they have, the coordinator finds what all share.

Each member numbers its own classes and columns. Here they are united by name: the classes of (cat,
dog) and (dog, horse) are cat, dog, horse on both, and the one-hot columns of a table have the words
of all members. Mean and standard deviation follow from the members' sums. Nothing is guessed by a
member alone. Who cannot be united with the others (another task, shape, type or column, or a name
that only looks like theirs) is refused with a sentence that names the difference. The reference is
the member that fits most of the others, so that one odd member does not shut out the rest. Who
deviates absurdly from most is refused, too; the rules say how far.

A federation is as large as what its members state: the model has an output for every class and an
input for every word, all inputs are scaled by pooled moments, and updates are weighted by samples.
No member alone may raise these beyond bounds. What most members have is the lower median, so one of
two members is no majority.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from kedge._version import __version__
from kedge.core.task import tasks
from kedge.data.datasets.tables.encoding import DATE_FORMATS
from kedge.data.encoding import Encoding, encodings
from kedge.errors import TermsError
from kedge.federation.coordinator.rules import Rules, Scaling
from kedge.federation.member.own_data import Moments
from kedge.federation.member.profile import MemberProfile, magnitude
from kedge.federation.names import look
from kedge.session.terms import DataSchema

_TINY = 2.0**-126  # the smallest normal float32


def pooled_scaling(members: Sequence[MemberProfile], columns: tuple[str, ...] | None) -> Scaling:
    """Mean and standard deviation of the training inputs of all members together.

    A one-hot column that a member lacks is 0 there. The sums are exact (``math.fsum``), so they do
    not depend on the order of members. The standard deviation of a constant column is 1.
    """
    first = members[0].schema
    if first.dtype == "int64":
        return (0.0,), (1.0,)
    if first.dtype == "uint8":
        return _of_bytes([s.moments for s in members], first.shape[0])
    aligned = [_aligned(s, columns) for s in members]
    means, stds = [], []
    for c in range(len(aligned[0].mean)):
        total = sum(m.count for m in aligned)
        mean = math.fsum(m.count * m.mean[c] for m in aligned) / total
        around = (m.squares[c] + m.count * (m.mean[c] - mean) ** 2 for m in aligned)
        varies = any(m.squares[c] for m in aligned) or len({m.mean[c] for m in aligned}) > 1
        std = math.sqrt(math.fsum(around) / total)
        means.append(mean if varies else aligned[0].mean[c])
        stds.append(std if varies and std > _TINY else 1.0)
    return tuple(means), tuple(stds)


def _of_bytes(moments: Sequence[Moments], channels: int) -> Scaling:
    means, stds = [], []
    for c in range(channels):
        counts = [sum(m.bytes[c][value] for m in moments) for value in range(256)]
        total = max(1, sum(counts))
        mean = math.fsum(n * value / 255 for value, n in enumerate(counts)) / total
        around = math.fsum(n * (value / 255 - mean) ** 2 for value, n in enumerate(counts))
        means.append(mean)
        stds.append(math.sqrt(around / total) if sum(n > 0 for n in counts) > 1 else 1.0)
    return tuple(means), tuple(stds)


def _aligned(member: MemberProfile, columns: tuple[str, ...] | None) -> Moments:
    """The moments of a member for the agreed columns."""
    moments, names = member.moments, member.schema.columns
    if columns is None or names is None:
        return moments
    at = {name: i for i, name in enumerate(names)}
    mean = tuple(moments.mean[at[c]] if c in at else 0.0 for c in columns)
    squares = tuple(moments.squares[at[c]] if c in at else 0.0 for c in columns)
    return replace(moments, mean=mean, squares=squares)


FEW_CLASSES, FEW_COLUMNS = 100, 1000  # that any member may have, however few most have

Refusals = dict[str, str]  # sentences by the name of the member


def too_large(members: Sequence[MemberProfile], rules: Rules) -> Refusals:
    """Members with more classes or columns than the rules allow."""
    return _wide(members, rules.max_classes, rules.max_columns)


def outliers(members: Sequence[MemberProfile], rules: Rules) -> Refusals:
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


def crowding(members: Sequence[MemberProfile], rules: Rules) -> Refusals:
    """Members without whom the classes and columns of all are as few as the rules allow."""
    found: Refusals = {}
    for names, most in ((_class_names, rules.max_classes), (_column_names, rules.max_columns)):
        left = [s for s in members if s.name not in found]
        while len(counts := Counter(name for s in left for name in names(s))) > most:
            worst = max(left, key=lambda s: sum(counts[name] == 1 for name in names(s)))
            left.remove(worst)
            found |= _wide([worst], 0, 0)
    return found


def far_off(members: Sequence[MemberProfile], rules: Rules) -> Refusals:
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


def _class_names(member: MemberProfile) -> Collection[object]:
    return member.schema.classes or range(member.schema.outputs)


def _column_names(member: MemberProfile) -> Collection[object]:
    return member.schema.columns or ()


def _wide(members: Sequence[MemberProfile], classes: int, columns: int) -> Refusals:
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


@dataclass(frozen=True)
class Agreement:
    """What the members share.

    Attributes:
        members: those that take part, sorted by name; their numbers are their places.
        refusals: a sentence for each of the others, by name.
        schema: the data schema of all.
        encoding: how raw inputs become arrays, with the words of all members.
        counts: training samples of each class over all members; empty if not asked for.
    """

    members: tuple[MemberProfile, ...]
    refusals: Mapping[str, str]
    schema: DataSchema
    encoding: Encoding
    counts: tuple[int, ...] = ()


def agree(
    profiles: Sequence[MemberProfile], scaling: Scaling | None = None, rules: Rules | None = None
) -> Agreement:
    """Unite the profiles of members with different names.

    Args:
        profiles: what members said, in any order.
        scaling: mean and standard deviation to use in place of those of the members' data, such as
            published constants.
        rules: how far members may deviate from each other; the defaults for None.

    Raises:
        TermsError: there is no member, or none that the rules allow.
    """
    rules = rules or Rules()
    ordered = sorted(profiles, key=lambda s: s.name)
    refusals = too_large(ordered, rules)
    members = _without(ordered, refusals)
    if not members:
        raise TermsError("; ".join(refusals.values()) or "no member has joined")
    reference = max(members, key=lambda r: (sum(not difference(r, s) for s in members), -_size(r)))
    refusals |= {s.name: text for s in members if (text := difference(reference, s))}
    for find in (outliers, crowding, far_off):
        members = _without(ordered, refusals)
        refusals |= find(members, rules)
    members = _without(ordered, refusals)
    if not members:
        raise TermsError("; ".join(refusals.values()))
    classes = _classes(members)
    columns = None if reference.schema.columns is None else _columns(members)
    shape = reference.schema.shape if columns is None else (len(columns),)
    mean, std = scaling or pooled_scaling(members, columns)
    if not len(mean) == len(std) == (1 if reference.schema.dtype == "int64" else shape[0]):
        raise TermsError(f"{len(mean)} means for {shape[0]} channels or columns of the inputs")
    outputs = len(classes) if classes else max(s.schema.outputs for s in members)
    schema = DataSchema(
        shape, reference.schema.task, outputs, classes, columns, mean, std, reference.schema.dtype
    )
    encoding, counts = _encoding(members, columns), _counts(members, schema)
    return Agreement(members, refusals, schema, encoding, counts)


def _without(
    members: Sequence[MemberProfile], refusals: Mapping[str, str]
) -> tuple[MemberProfile, ...]:
    return tuple(s for s in members if s.name not in refusals)


def _size(member: MemberProfile) -> int:
    """Numbers of one input, if they must be as many for all: of two members, the smaller one."""
    return 0 if member.schema.columns is not None else math.prod(member.schema.shape)


def other_release(member: MemberProfile) -> str:
    """Why a member with another release of kedge cannot take part; empty if it is the same."""
    found = str(member.versions.get("kedge", ""))
    if found == __version__:
        return ""
    releases = f"kedge {found:.20}, the server {__version__}"
    return f"{member.name} has {releases}; install the same release"


def difference(reference: MemberProfile, member: MemberProfile) -> str:
    """Why two members cannot take part in one federation, as a sentence; empty if they can."""
    finders = (_task, _inputs, _labels, _encodings)
    return next((text for find in finders for text in find(reference, member)), "")


def _task(a: MemberProfile, b: MemberProfile) -> Iterator[str]:
    if a.schema.task != b.schema.task:
        yield f"{b.name} has labels for {b.schema.task}, {a.name} for {a.schema.task}"
    if a.schema.dtype != b.schema.dtype:
        yield (
            f"{b.name} has inputs of type {b.schema.dtype}, {a.name} of {a.schema.dtype}; save "
            "them in the same type, since whole bytes are scaled and other numbers are not"
        )


def _inputs(a: MemberProfile, b: MemberProfile) -> Iterator[str]:
    one, other = a.schema.columns, b.schema.columns
    if one is None or other is None:
        if (one is None) != (other is None):
            has, lacks = (a, b) if other is None else (b, a)
            yield f"{has.name} has named columns and {lacks.name} has not; name them on both"
        elif a.schema.shape != b.schema.shape:
            yield (
                f"{b.name} has inputs of shape {list(b.schema.shape)}, {a.name} of "
                f"{list(a.schema.shape)}; make them alike, for images with the option size"
            )
        return
    kinds, others = _kinds(one), _kinds(other)
    for name, like in _alike(kinds, others):
        which = f"the column {like!a} of {b.name} looks like {name!a} of {a.name}"
        yield f"{which}; write it alike on both"
    for name in (n for n in kinds if n not in others):
        yield f"{b.name} has no column {name!r}, which {a.name} has; add it, or drop it on both"
    for name in (n for n in others if n not in kinds):
        yield f"{b.name} has a column {name!r}, which {a.name} has not; drop it"
    for name in (n for n in kinds if kinds[n] != others[n]):
        yield (
            f"column {name!r} holds {others[name]} at {b.name} and {kinds[name]} at {a.name}; "
            "correct it, or drop it on both"
        )


def _alike(names: Collection[str], others: Collection[str]) -> Iterator[tuple[str, str]]:
    """Names that the others write in another way; who has both means two."""
    strange = {look(name): name for name in others if name not in names}
    for name in names if strange else ():
        if look(name) in strange and name not in others:
            yield name, strange[look(name)]


def _kinds(columns: Sequence[str]) -> dict[str, str]:
    """Whether each column of the raw table holds numbers, or words that became one-hot."""
    found = {name.partition("=")[0]: "words" for name in columns}
    return found | {name: "numbers" for name in columns if "=" not in name}


def _labels(a: MemberProfile, b: MemberProfile) -> Iterator[str]:
    one, other = a.schema.classes, b.schema.classes
    if (one is None) != (other is None):
        named, plain = (a, b) if other is None else (b, a)
        yield (
            f"{named.name} names its classes and {plain.name} only numbers them, so nobody knows "
            "which is which; name them on both"
        )
    for name, like in _alike(one or (), other or ()):
        which = f"the class {like!a} of {b.name} looks like {name!a} of {a.name}"
        yield f"{which}; write it alike in all files"
    if not tasks[a.schema.task].one_class:
        if a.schema.outputs != b.schema.outputs:
            yield f"{b.name} has {b.schema.outputs} labels, {a.name} {a.schema.outputs}"
        elif set(one or ()) != set(other or ()):
            strange = sorted(set(one or ()) ^ set(other or ()))[0]
            yield f"{b.name} and {a.name} have different labels; one of them is {strange!r}"


def _encodings(a: MemberProfile, b: MemberProfile) -> Iterator[str]:
    one, other = a.encoding, b.encoding
    is_table = one.get("kind") == other.get("kind") == "table"
    keys = (one.keys() | other.keys()) - {"columns", "shape"}  # compared above
    for key in ("labels", "classes", "missing") if is_table else keys:
        if one.get(key) != other.get(key):
            what, most = ("table", 60) if is_table else ("inputs", 40)
            yield (
                f"{b.name} reads its {what} with {key} = {repr(other.get(key))[:most]}, {a.name} "
                f"with {repr(one.get(key))[:most]}; give both the same options"
            )
    if is_table:
        yield from _table_columns(a, b)


def _table_columns(a: MemberProfile, b: MemberProfile) -> Iterator[str]:
    first = {c["name"]: c for c in a.encoding["columns"]}
    second = {c["name"]: c for c in b.encoding["columns"]}
    for name in sorted(first.keys() ^ second.keys()):  # though the encoded columns are alike
        yield f"{b.name} and {a.name} encode the column {name!r} in different ways"
    for name, column in second.items():
        known = first[name]
        if known["kind"] != column["kind"]:
            yield (
                f"column {name!r} is a {column['kind']} at {b.name} and a "
                f"{known['kind']} at {a.name}; correct it, or drop it on both"
            )
        elif known["fill"] != column["fill"]:
            yield (
                f"{b.name} and {a.name} would fill missing values of {name!r} with "
                "different numbers; fill them in the files, or leave such rows out with "
                "missing=drop"
            )
        elif "missing" in {*known["words"], *column["words"]} and (
            known["indicator"] or column["indicator"]
        ):
            yield (
                f"in the column {name!r} of {b.name} or {a.name} the word 'missing' would be the "
                "mark of missing values; write another word"
            )


# -- unions -----------------------------------------------------------------------------------


def _classes(members: Sequence[MemberProfile]) -> tuple[str, ...] | None:
    """Class names in the order that a reader of all data gives them: numbers by size, words by
    name. Labels of other tasks stay in the order of the first member."""
    first = members[0].schema
    if first.classes is None:
        return None
    if not tasks[first.task].one_class:
        return first.classes
    names = {name for s in members for name in s.schema.classes or ()}
    return tuple(sorted(names, key=_in_order(names)))


def _in_order(names: set[str]) -> Callable[[str], Any]:
    try:
        numbers = {name: float(name) for name in names}
    except ValueError:
        return str
    is_finite = all(map(math.isfinite, numbers.values()))
    return (lambda name: (numbers[name], name)) if is_finite else str


def _columns(members: Sequence[MemberProfile]) -> tuple[str, ...]:
    """Columns in the order of the first member, the words of each sorted, marks of missing values
    last."""
    words: dict[str, set[str]] = {}
    for member in members:
        for name in member.schema.columns or ():
            words.setdefault(name.partition("=")[0], set()).add(name)
    found: list[str] = []
    for base, names in words.items():
        mark = f"{base}=missing"
        found += sorted(names, key=lambda name: (name == mark, name != base, name))
    return tuple(found)


def _encoding(members: Sequence[MemberProfile], columns: tuple[str, ...] | None) -> Encoding:
    values: dict[str, Any] = dict(members[0].encoding)
    try:
        if values.get("kind") == "table":
            tables = [{c["name"]: c for c in s.encoding["columns"]} for s in members]
            values["columns"] = [_united(name, tables) for name in tables[0]]
        elif columns is not None and "columns" in values:
            values |= {"columns": list(columns), "shape": [len(columns)]}
        kind = values.pop("kind")
        return encodings[kind].from_dict(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"a member stated an encoding that cannot be read: {error!r:.80}"
        raise TermsError(text) from None


def _united(name: str, tables: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One column of a table with the words and date formats of all members."""
    found = [table[name] for table in tables]
    formats = {form for column in found for form in column["format"].split("|") if form}
    return dict(found[0]) | {
        "words": sorted({word for column in found for word in column["words"]}),
        "format": "|".join(form for form in DATE_FORMATS if form in formats),
        "indicator": any(column["indicator"] for column in found),
    }


def _counts(members: Sequence[MemberProfile], schema: DataSchema) -> tuple[int, ...]:
    if not all(s.counts for s in members):
        return ()
    total = [0] * schema.outputs
    for member in members:
        names = member.schema.classes
        for i, count in enumerate(member.counts):
            at = i if names is None or schema.classes is None else schema.classes.index(names[i])
            total[at] += count
    return tuple(total)
