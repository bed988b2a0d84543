"""What a page draws, as plain data: curves, classes, clients, partitions, sweeps, diagnoses.

Rounds are thinned by largest triangles (LTTB, Steinarsson 2013) on the mean over seeds, which keeps
peaks and dips; all seeds of a run keep the same rounds, so that mean and spread stay exact there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kedge.history.compare import Row
from kedge.history.metric import HEADLINES, title_of
from kedge.history.run import Run, Seed, SeedClients
from kedge.history.sheet import Sheet
from kedge.settings import format_value

BUDGET = 120_000  # numbers of all curves of a page
MAX_POINTS, MIN_POINTS = 240, 24  # of one curve
#: Columns of tested rounds beside the headline, in the order of the switch.
TESTED = (
    "balanced_accuracy", "auroc", "f1_macro", "client_mean", "client_worst", "client_spread",
    "personal_mean", "personal_worst", "loss",
)  # fmt: skip
TRAINED = ("train_loss", "divergence")  # of every round
NAMES = {
    "client_mean": "global model, mean over clients",
    "client_worst": "global model, worst client",
    "client_spread": "global model, spread over clients",
    "personal_mean": "personal models, mean over clients",
    "personal_worst": "personal models, worst client",
}


def lttb(x: Sequence[float], y: Sequence[float], keep: int) -> list[int]:
    """Indices of ``keep`` points of a curve: its ends, and those of the largest triangles.

    >>> lttb(range(9), [0, 0, 0, 0, 9, 0, 0, 0, 0], 4)
    [0, 3, 4, 8]
    """
    n = len(x)
    if keep >= n or keep < 3:
        return list(range(n)) if keep >= n else [0, n - 1][: min(n, 2)]
    values = [v if math.isfinite(v) else 0.0 for v in y]
    width = (n - 2) / (keep - 2)
    found, at = [0], 0
    for i in range(keep - 2):
        start, end = math.floor(i * width) + 1, math.floor((i + 1) * width) + 1
        after = range(end, min(math.floor((i + 2) * width) + 1, n))
        next_x = sum(x[j] for j in after) / len(after)
        next_y = sum(values[j] for j in after) / len(after)
        areas = [
            abs(
                (x[at] - next_x) * (values[j] - values[at]) - (x[at] - x[j]) * (next_y - values[at])
            )
            for j in range(start, end)
        ]
        at = start + max(range(len(areas)), key=areas.__getitem__)
        found.append(at)
    return [*found, n - 1]


def columns_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The columns that every run has, the headline first, for the switch of the curves."""
    first = runs[0]
    keys = [first.column if len({s.column for s in runs}) == 1 else "headline"]
    for key in (first.measure.name, *TESTED):
        if key not in keys and all(run.has(key) for run in runs):
            keys.append(key)
    found = []
    for key in keys:
        metric = first.metrics.get(key, first.measure)  # others are of the headline metric
        found.append(
            {
                "key": key,
                "label": _label(key, runs, is_first=key == keys[0]),
                "unit": metric.unit,
                "decimals": metric.decimals,
                "higher": metric.higher_is_better and key != "client_spread",
                "kind": "test",
            }
        )
    for key in TRAINED:
        found.append(
            {"key": key, "label": title_of(key), "unit": "", "decimals": 3, "higher": False,
             "kind": "train"}
        )  # fmt: skip
    return found


def _label(key: str, runs: Sequence[Run], is_first: bool) -> str:
    name = runs[0].measure.title
    if is_first and any(run.headline != "global" for run in runs):
        return f"{name} of clients"
    if key.startswith(("client_", "personal_")):
        return f"{name}, {NAMES[key]}" if key in NAMES else key
    return name if is_first and key == "headline" else title_of(key)


def curves_of(runs: Sequence[Run], columns: Sequence[dict[str, Any]], share: float) -> Any:
    """The curves of some runs; ``share`` is their part of the page's numbers."""
    total = sum(len(run.seeds) for run in runs) or 1
    points = int(BUDGET * share / (total * (len(columns) + 3)))
    points = max(MIN_POINTS, min(MAX_POINTS, points))
    tested = [c["key"] for c in columns if c["kind"] == "test"]
    return [
        {
            "seeds": [s.number for s in run.seeds],
            "test": _block(run, tested, points, run.column),
            "train": _block(run, list(TRAINED), points, "train_loss"),
        }
        for run in runs
    ]


def _block(run: Run, keys: Sequence[str], points: int, main: str) -> dict[str, Any]:
    """Columns at thinned rounds: ``y[key][seed][i]``, with ``mb`` and ``s`` up to each round."""
    seeds = [seed.columns for seed in run.seeds]
    mains = [columns.by_round(main) for columns in seeds]
    rounds = sorted({number for own in mains for number in own})
    means = [mean_of([own[r] for own in mains if r in own]) for r in rounds]
    kept = [rounds[i] for i in lttb(rounds, means, points)]

    def rows(numbers: Iterable[Mapping[int, float]]) -> list[list[float | None]]:
        picked = zip(mains, numbers, strict=True)
        return [
            [short(own.get(r)) if r in of_main else None for r in kept] for of_main, own in picked
        ]

    columns = {key: run.column if key == "headline" else key for key in keys}
    return {
        "rounds": kept,
        "mb": rows(dict(zip(seed.rounds, seed.mb, strict=True)) for seed in seeds),
        "s": rows(dict(zip(seed.rounds, seed.seconds, strict=True)) for seed in seeds),
        "y": {k: rows(seed.by_round(name) for seed in seeds) for k, name in columns.items()},
    }


def mean_of(values: Sequence[Any]) -> float:
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


def short(value: Any, digits: int = 5) -> float | int | None:
    """A number with few digits, for the page; None where there is none.

    >>> short(87.123456), short(12.0), short(float("nan"))
    (87.123, 12, None)
    """
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


# -- by class, by client, the partition, a sweep --------------------------------------------------

MAX_DOTS = 20_000  # clients times seeds times runs in the page
MAX_CELLS = 20_000  # of the partition's picture
MAX_CLASS_CELLS = 12_000
FEW_SAMPLES, FEW_AT_A_CLIENT = 100, 30  # test samples below which the page says that they are few


def by_class(found: Sequence[Row]) -> dict[str, Any] | None:
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


def _class_metric(found: Sequence[Row]) -> str:
    """The name of what ``per_class`` is, in percent: the first metric of the task."""
    run = found[0].run
    for name in HEADLINES:
        if run.metrics[name].unit == "%" and any(s.columns.named.get(name) for s in run.counting):
            return run.metrics[name].title
    return run.measure.title


def _class_values(standing: Row) -> list[float]:
    last: list[list[Any]] = [s.columns.last_list("per_class") for s in standing.run.counting]
    if not last or not all(last) or len({len(row) for row in last}) > 1:
        return []
    return [mean_of(column) for column in zip(*last, strict=True)]


def _classes(found: Sequence[Row], width: int) -> list[str]:
    for seed in (seed for s in found for seed in s.run.counting):
        if seed.clients and seed.clients.classes and len(seed.clients.classes) == width:
            return seed.clients.classes
        scored = (seed.scores or {}).get("per_class")
        if isinstance(scored, dict) and len(scored) == width:
            return [str(name) for name in scored]
    return [str(i) for i in range(width)]


def by_client(found: Sequence[Row], base: int = 0) -> dict[str, Any] | None:
    """The headline metric of the model that each client would use, in the last test.

    A drawn partition gives other clients for every seed, so a dot is a client of a seed. Clients
    that are the same for all seeds, such as silos, have the mean over seeds.
    """
    if not found:
        return None
    key = "per_personal" if any(s.run.headline == "personal" for s in found) else "per_client"
    rows = [{seed.number: _last(seed, key) for seed in s.run.counting} for s in found]
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
            values = [mean_of([_at(row.get(n), k) for n in seeds]) for row in rows]
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


def test_sizes(standing: Row) -> list[str]:
    """On how many samples the run is tested, in all and at a client; empty if not known."""
    scores = [seed.scores for seed in standing.run.counting if isinstance(seed.scores, dict)]
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


def _summary(dots: Sequence[dict[str, Any]], i: int, base: int, standing: Row) -> dict[str, Any]:
    """How many clients gain and lose against a run, over all clients and seeds."""
    higher = standing.run.measure.higher_is_better
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
    return seed.columns.last_list(key) or seed.columns.last_list("per_client")


def _at(values: Sequence[Any] | None, k: int) -> Any:
    return values[k] if values and k < len(values) else None


def _clients(found: Sequence[Row], number: int) -> SeedClients | None:
    for s in found:
        for seed in s.run.counting:
            if seed.number == number and seed.clients is not None:
                return seed.clients
    return None


def _name(found: Sequence[Row], number: int, k: int) -> str:
    clients = _clients(found, number)
    return clients.names[k] if clients and k < len(clients.names) else f"client {k}"


def _same_clients(found: Sequence[Row], seeds: Sequence[int]) -> bool:
    hashes = {s.partition_hash for one in found for s in one.run.counting if s.number in seeds}
    return len(hashes) == 1 and "" not in hashes


def partition(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The clients of each seed: sizes, and samples of each class where they are known."""
    found: dict[int, dict[str, Any]] = {}
    cells = 0
    for seed in (seed for run in runs for seed in run.seeds):
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


def objective(found: Sequence[Row]) -> dict[str, Any] | None:
    """The settings of a sweep with what they reach: on validation data where there are."""
    swept = [s for s in found if s.run.values]
    if len(swept) < 2 or len(swept) < len(found):
        return None
    if swept[0].run.measure.higher_is_better is None:
        return None
    keys = [k for k in swept[0].run.values if len({repr(s.run.values.get(k)) for s in swept}) > 1]
    if not keys:
        return None
    validated = all(s.run.validation is not None for s in swept)
    stats = [s.run.validation if validated else s.run.last for s in swept]
    return {
        "keys": keys,
        "on": "validation data" if validated else "test data",
        "rows": [
            {
                "run": i,
                "values": [s.run.values.get(key) for key in keys],
                "texts": [format_value(s.run.values.get(key)) for key in keys],
                "mean": short(stat.mean) if stat else None,
                "sd": short(stat.sd) if stat else None,
            }
            for i, (s, stat) in enumerate(zip(swept, stats, strict=True))
        ],
    }


# -- diagnoses -------------------------------------------------------------------------------------

MAX_CHART_BYTES = 1_200_000  # of the rows and images of all diagnoses
BY_RUN = ("command", "date", "seconds", "cost")  # fields that differ between equal sheets


def shared_sheets(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The sheets of all runs. Equal ones, such as those on the data of a comparison, are shown
    once; one that all runs have needs no name of a run."""
    found: dict[str, tuple[Sheet, list[str]]] = {}
    for run in runs:
        for sheet in run.sheets:
            told = {k: v for k, v in sheet.to_dict().items() if k not in BY_RUN}
            found.setdefault(json.dumps(told), (sheet, []))[1].append(run.name)
    every = len(runs)
    return sheet_facts(
        [("" if len(runs) == every else ", ".join(runs), sheet) for sheet, runs in found.values()]
    )


def sheet_facts(pairs: Sequence[tuple[str, Sheet]]) -> list[dict[str, Any]]:
    """Diagnoses as plain data, with the name of their run, without their bare numbers.

    Charts are thinned, and images left out, where they would make the page too large.
    """
    found, left = [], MAX_CHART_BYTES
    for run, sheet in pairs:
        plain_sheet = sheet.to_dict()
        del plain_sheet["values"]
        for chart in plain_sheet["charts"]:
            rows = chart["rows"]
            size = len(json.dumps(rows))
            keep = len(rows) if size <= left else int(len(rows) * left / size)
            if keep < len(rows):
                step = math.ceil(len(rows) / max(1, keep))
                chart["rows"] = rows[::step] if keep else []
                text = f"{len(chart['rows'])} of {len(rows)} are shown."
                chart["note"] = f"{chart['note']} {text}".strip()
            left -= min(left, size)
        found.append({"run": run, **plain_sheet})
    return found
