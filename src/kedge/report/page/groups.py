"""Which runs may be compared: the same data, tests and metric, and the same partitions by seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.report.page.source import Source, setting_name
from kedge.runs.headline import like_with_like

#: Settings that decide which samples a model is tested on.
TESTS = ("split", "unseen", "angles")
#: What groups may differ in, and its name in a sentence.
REASONS = {"metric": "metric", "data": "data", "split": "test data", "partition": "partition"}


@dataclass
class Group:
    """Runs that may be compared with each other, in their order; the first is the baseline."""

    sources: list[Source]
    hashes: dict[int, str] = field(default_factory=dict)  # of partitions, by seed

    @property
    def first(self) -> Source:
        return self.sources[0]


def grouped(sources: Sequence[Source]) -> list[Group]:
    """The runs in groups; within a group, if one run is personal, all are means over clients."""
    groups: list[Group] = []
    for source in sources:
        own = {s.number: s.partition_hash for s in source.seeds if s.partition_hash}
        home = next((g for g in groups if _fits(source, own, g)), None)
        if home is None:
            home = Group([])
            groups.append(home)
        home.sources.append(source)
        home.hashes |= own
    for group in groups:
        group.sources = like_with_like(group.sources)
        if len(groups) > 1:
            group.sources = _named(group.sources)
    return groups


def _named(sources: Sequence[Source]) -> list[Source]:
    """Settings of a sweep that are the same in a group stand in its heading, not in every name."""
    keys = list(sources[0].values)
    differ = [key for key in keys if len({repr(s.values.get(key)) for s in sources}) > 1]
    if not differ or len(differ) == len(keys):
        return list(sources)
    return [
        dataclasses.replace(s, name=setting_name({key: s.values.get(key) for key in differ}))
        for s in sources
    ]


def _fits(source: Source, own: dict[int, str], group: Group) -> bool:
    if why_not(source, group.first):
        return False
    shared = own.keys() & group.hashes.keys()
    if shared:
        return all(own[seed] == group.hashes[seed] for seed in shared)
    return _partition(source) == _partition(group.first)


def why_not(one: Source, other: Source) -> str:
    """What two runs differ in so that they cannot be compared, but for the partition; or empty."""
    if (one.metric.name, one.metric.higher_is_better) != (
        other.metric.name,
        other.metric.higher_is_better,
    ):
        return "metric"
    if _data(one) != _data(other):
        return "data"
    if one.yardstick or other.yardstick:  # made for the comparison that they stand in
        return ""
    return "" if _tests(one) == _tests(other) else "split"


def what_differs(groups: Sequence[Group]) -> str:
    """In what the groups differ, in words: ``"data and partition"``."""
    first = groups[0].first
    found = {why_not(group.first, first) or "partition" for group in groups[1:]}
    names = [name for key, name in REASONS.items() if key in found]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _data(source: Source) -> str:
    """The fingerprint of the data, or their name where it was not kept."""
    return str(source.environment.get("data") or source.settings["data"])


def _tests(source: Source) -> tuple[Any, ...]:
    found = dict(source.settings)
    if found["split"] == "auto" and found["personal"]:
        found["split"] = "holdout(0.2)"
    return tuple(repr(found[key]) for key in TESTS)


def _partition(source: Source) -> tuple[Any, ...]:
    return (source.settings["partition"], source.settings["clients"])
