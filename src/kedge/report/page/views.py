"""Views beside the curves: by class, by client, the partition, and the objective of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kedge.core.task import tasks
from kedge.report.page.curves import short
from kedge.report.page.source import Seed, Source
from kedge.report.page.standings import Standing
from kedge.runs.clients import KnownClients
from kedge.runs.grid import format_value
from kedge.runs.header import title_of

MAX_DOTS = 20_000  # clients times seeds times runs in the page
MAX_CELLS = 20_000  # of the partition's picture
MAX_CLASS_CELLS = 12_000
FEW_SAMPLES, FEW_AT_A_CLIENT = 100, 30  # test samples below which the page says that they are few


def by_class(found: Sequence[Standing]) -> dict[str, Any] | None:
    """The metric of the task for each class in the last test, mean over seeds, of the global model.

    It is that of the task even where runs are compared by another one: the accuracy on the samples
    of a class, or the F1 of a label.
    """
    values = [_class_values(s) for s in found]
    width = max(map(len, values), default=0)
    if width < 2:
        return None
    keep = max(2, MAX_CLASS_CELLS // max(1, len(found)))
    names = _classes(found, width)
    return {
        "metric": _class_metric(found),
        "classes": names[:keep],
        "values": [[short(v) for v in row[:keep]] if row else None for row in values],
        "left_out": max(0, width - keep),
    }


def _class_metric(found: Sequence[Standing]) -> str:
    """The name of what ``per_class`` is, in percent."""
    heads = [tasks[name].metrics[0] for name in tasks if tasks[name].has_classes]
    for seed in (seed for s in found for seed in s.seeds):
        for record in seed.records:
            head = next((m for m in heads if m.name in record), None)
            if record.get("per_class") and head is not None:
                return title_of(head.name)
    return found[0].source.metric.title


def _class_values(standing: Standing) -> list[float]:
    last: list[list[Any]] = [
        next((r["per_class"] for r in reversed(s.records) if r.get("per_class")), [])
        for s in standing.seeds
    ]
    if not last or not all(last) or len({len(row) for row in last}) > 1:
        return []
    return [_mean(column) for column in zip(*last, strict=True)]


def _classes(found: Sequence[Standing], width: int) -> list[str]:
    for seed in (seed for s in found for seed in s.seeds):
        if seed.clients and seed.clients.classes and len(seed.clients.classes) == width:
            return seed.clients.classes
        scored = (seed.scores or {}).get("per_class")
        if isinstance(scored, dict) and len(scored) == width:
            return [str(name) for name in scored]
    return [str(i) for i in range(width)]


def by_client(found: Sequence[Standing], base: int = 0) -> dict[str, Any] | None:
    """The headline metric of the model that each client would use, in the last test.

    A drawn partition gives other clients for every seed, so a dot is a client of a seed. Clients
    that are the same for all seeds, such as silos, have the mean over seeds.
    """
    if not found:
        return None
    key = "per_personal" if any(s.source.headline == "personal" for s in found) else "per_client"
    rows = [{seed.number: _last(seed, key) for seed in s.seeds} for s in found]
    if not any(values for row in rows for values in row.values()):
        return None
    seeds = sorted({number for row in rows for number, values in row.items() if values})
    sizes = {n: max(len(row.get(n) or ()) for row in rows) for n in seeds}
    same = len(seeds) > 1 and _same_clients(found, seeds)
    total = sum(sizes.values()) * len(found)
    left_out = ""
    if not same and total > MAX_DOTS and len(seeds) > 1:
        left_out = f"Seed {seeds[0]} of {len(seeds)} is shown."
        seeds = seeds[:1]
    dots: list[dict[str, Any]] = []
    if same:
        count = max(sizes.values())
        for k in range(count):
            values = [_mean([_at(row.get(n), k) for n in seeds]) for row in rows]
            dots.append({"client": _name(found, seeds[0], k), "seed": None, "values": values})
    else:
        for n in seeds:
            for k in range(sizes[n]):
                values = [_at(row.get(n), k) for row in rows]
                dots.append({"client": _name(found, n, k), "seed": n, "values": values})
    step = math.ceil(len(dots) * len(found) / MAX_DOTS)
    if step > 1:
        left_out = f"{left_out} One of {step} clients is shown.".strip()
    for dot in dots:
        dot["values"] = [short(v) for v in dot["values"]]
    return {
        "dots": dots[::step],
        "whose": key.removeprefix("per_"),
        "note": left_out,
        "averaged": same,
        "summary": [_summary(dots, i, base, s) for i, s in enumerate(found)],
    }


def test_sizes(standing: Standing) -> list[str]:
    """On how many samples the run is tested, in all and at a client; empty if not known."""
    scores = [seed.scores for seed in standing.seeds if isinstance(seed.scores, dict)]
    totals = _samples([s.get("global") for s in scores])
    if not totals:
        return []
    clients = [c for s in scores if isinstance(c := s.get("clients"), dict)]
    own = _samples([one for c in clients for one in c.values()])
    text = f"Tested on {_span(totals)} samples"
    text += f", {_span(own)} at a client." if own else "."
    if min(totals) < FEW_SAMPLES or (own and min(own) < FEW_AT_A_CLIENT):
        text += " Intervals are over seeds; they do not show how few samples these are."
    return [text]


def _samples(scores: Sequence[Any]) -> list[int]:
    """The numbers of samples in scores that have one."""
    found = [one.get("samples") for one in scores if isinstance(one, dict)]
    return [n for n in found if isinstance(n, int) and n > 0]


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def without_value(standing: Standing) -> list[str]:
    """How many clients the means over clients leave out: AUROC needs samples of two classes."""
    key = "per_personal" if standing.source.headline == "personal" else "per_client"
    last = [_last(seed, key) for seed in standing.seeds]
    clients = max(map(len, last), default=0)
    without = [sum(value is None for value in values) for values in last]
    if not any(without) or standing.source.headline == "global":
        return []
    low, high = min(without), max(without)
    number = str(high) if low == high else f"{low} to {high}"
    return [
        f"{number} of {clients} clients have no {standing.source.metric.title}"
        f"{'' if low == high else ', by seed'}, since their held-out samples are of one class "
        "only: they are left out of the means over clients."
    ]


def _summary(
    dots: Sequence[dict[str, Any]], i: int, base: int, standing: Standing
) -> dict[str, Any]:
    """How many clients gain and lose against a run, over all clients and seeds."""
    higher = standing.source.metric.higher_is_better
    sign = 1.0 if higher else -1.0
    pairs = [(d["values"][i], d["values"][base], d["client"]) for d in dots]
    gains = [(sign * (a - b), name) for a, b, name in pairs if a is not None and b is not None]
    known = [a for a, _, _ in pairs if a is not None]
    if not known or higher is None:
        return {"n": len(known), "gain": 0, "lose": 0, "same": 0, "worst": None, "lowest": None}
    worst = min(gains, default=(None, ""))
    return {
        "n": len(known),
        "gain": sum(g > 1e-9 for g, _ in gains),
        "lose": sum(g < -1e-9 for g, _ in gains),
        "same": sum(abs(g) <= 1e-9 for g, _ in gains),
        "worst": short(worst[0]),
        "who": worst[1],
        "lowest": short(min(known) if higher else max(known)),
    }


def _last(seed: Seed, key: str) -> list[Any]:
    for record in reversed(seed.records):
        values = record.get(key) or record.get("per_client")
        if values:
            return list(values)
    return []


def _at(values: Sequence[Any] | None, k: int) -> Any:
    return values[k] if values and k < len(values) else None


def _mean(values: Sequence[Any]) -> float:
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


def _clients(found: Sequence[Standing], number: int) -> KnownClients | None:
    for s in found:
        for seed in s.seeds:
            if seed.number == number and seed.clients is not None:
                return seed.clients
    return None


def _name(found: Sequence[Standing], number: int, k: int) -> str:
    clients = _clients(found, number)
    return clients.names[k] if clients and k < len(clients.names) else f"client {k}"


def _same_clients(found: Sequence[Standing], seeds: Sequence[int]) -> bool:
    hashes = {s.partition_hash for one in found for s in one.seeds if s.number in seeds}
    return len(hashes) == 1 and "" not in hashes


def partition(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The clients of each seed: sizes, and samples of each class where they are known."""
    found: dict[int, dict[str, Any]] = {}
    cells = 0
    for seed in (seed for source in sources for seed in source.seeds):
        if seed.number in found or seed.clients is None:
            continue
        names, sizes, classes, counts = seed.clients
        cells += len(names) * (len(classes) if classes else 1)
        if found and cells > 3 * MAX_CELLS:
            break
        keep = len(names)
        if counts and classes and len(names) * len(classes) > MAX_CELLS:
            keep = max(1, MAX_CELLS // len(classes))
        found[seed.number] = {
            "seed": seed.number,
            "names": names[:keep],
            "sizes": sizes[:keep],
            "classes": classes,
            "counts": counts[:keep] if counts else None,
            "left_out": len(names) - keep,
            "hash": seed.partition_hash,
        }
    return [found[number] for number in sorted(found)]


def objective(found: Sequence[Standing]) -> dict[str, Any] | None:
    """The settings of a sweep with what they reach: on validation data where there are."""
    swept = [s for s in found if s.source.values]
    if len(swept) < 2 or len(swept) < len(found):
        return None
    if swept[0].source.metric.higher_is_better is None:
        return None
    keys = [
        k for k in swept[0].source.values if len({repr(s.source.values.get(k)) for s in swept}) > 1
    ]
    if not keys:
        return None
    validated = all(s.validation is not None for s in swept)
    stats = [s.validation if validated else s.last for s in swept]
    return {
        "keys": keys,
        "on": "validation data" if validated else "test data",
        "rows": [
            {
                "run": i,
                "values": [s.source.values.get(key) for key in keys],
                "texts": [format_value(s.source.values.get(key)) for key in keys],
                "mean": short(stat.mean) if stat else None,
                "sd": short(stat.sd) if stat else None,
            }
            for i, (s, stat) in enumerate(zip(swept, stats, strict=True))
        ],
    }
