"""The result of a run: records as plain arrays, a summary, and the trained models."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from kedge.core.method import parse
from kedge.runs.config import Config

#: Column of the records that each headline is: the global model on the test set, the same model
#: client by client, the clients' own models.
COLUMNS = {"global": "", "client": "client_mean", "personal": "personal_mean"}


@dataclass(frozen=True)
class Stat:
    """A number over seeds: mean and standard deviation (``None`` for a single seed).

    >>> stat = Stat.of([97.1, 97.9])
    >>> str(stat), stat.n
    ('97.50±0.57', 2)
    """

    mean: float
    sd: float | None
    n: int
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Any) -> Stat:
        """The statistics of some numbers, one per seed."""
        values = tuple(float(v) for v in values)
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), sd, len(values), values)

    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean, by Student's t; None for a single value."""
        if self.sd is None:
            return None
        from scipy.special import stdtrit  # importing kedge must not import scipy

        half = float(stdtrit(self.n - 1, 0.975)) * self.sd / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    def written(self, decimals: int) -> str:
        """Mean and standard deviation as text: ``"97.50±0.41"``."""
        spread = f"±{self.sd:.{decimals}f}" if self.sd is not None else ""
        return f"{self.mean:.{decimals}f}{spread}"

    def __str__(self) -> str:
        return self.written(2)


@dataclass(frozen=True)
class Result:
    """The result of one configuration over all its seeds.

    ``records[i]`` holds one dictionary per round of the i-th seed, ``models[i]`` is its trained
    global model, and ``personal[i]`` are the clients' personal models if ``config.personal`` is
    set. With validation data, ``best_models[i]`` is the global model of the round that was best on
    them. A seed that stopped early has fewer records; in arrays its last values go on.

    ``headline`` says of which models ``last``, ``best``, gains and curves are: ``global``, the
    global model on the test set; ``personal``, each client's own model on its held-out samples,
    mean over clients; ``client``, the global model in the same way.

    >>> result = kedge.run("fedavg", clients=3, rounds=2, seeds=(0, 1))
    >>> result.last.n, len(result.records[0]), result.records[0][-1]["round"]
    (2, 2, 2)
    """

    config: Config
    records: list[list[dict[str, Any]]]
    metric: str
    higher_is_better: bool
    partition_hash: list[str]
    engine: str
    device: str
    seconds: float
    models: list[nn.Module] = field(repr=False, default_factory=list)
    personal: list[list[nn.Module]] = field(repr=False, default_factory=list)
    folder: Path | None = None
    unit: str = ""  # of the metric
    decimals: int = 2  # of the metric in text
    headline: str = "global"
    best_models: list[nn.Module] = field(repr=False, default_factory=list)
    yardstick: str = ""  # the name of a yardstick, which is shown beside methods

    def __repr__(self) -> str:
        seeds = f"{len(self.records)} seed{'s' if len(self.records) > 1 else ''}"
        whose = "" if self.headline == "global" else " of clients"
        value = f"{self.metric}{whose} {self.written(self.last)} {self.unit}".rstrip()
        return (
            f"<Result {self.title} on {self.config.data}: {value}, "
            f"{len(self.records[0])} rounds, {seeds}>"
        )

    @property
    def title(self) -> str:
        """What it is called in tables and figures: the method, or the yardstick."""
        return self.yardstick or self.config.method

    @property
    def label(self) -> str:
        """The metric and its unit: ``"accuracy %"``."""
        return f"{self.metric} {self.unit}".rstrip()

    def written(self, value: Stat | float) -> str:
        """A value of the metric as text, with the decimals that the task declares."""
        if isinstance(value, Stat):
            return value.written(self.decimals)
        return f"{value:.{self.decimals}f}"

    def array(self, name: str | None = None) -> np.ndarray[Any, Any]:
        """A column of the records, ``[seeds, tested rounds]``; the headline by default."""
        name = name or self.column
        runs = [[r[name] for r in run if name in r] for run in self.records]
        longest = max(map(len, runs))
        return np.array([run + run[-1:] * (longest - len(run)) for run in runs], dtype=float)

    @property
    def column(self) -> str:
        """The key of the records that the headline is in."""
        return COLUMNS[self.headline] or self.metric

    @cached_property
    def rounds(self) -> np.ndarray[Any, Any]:
        """The numbers of the tested rounds, from 1."""
        runs = [[r["round"] for r in run if self.metric in r] for run in self.records]
        return np.array(max(runs, key=len))

    def has(self, name: str) -> bool:
        """Whether all tested rounds have a column."""
        return all(name in r for run in self.records for r in run if self.metric in r)

    @property
    def last(self) -> Stat:
        """The headline after the last round."""
        return Stat.of(self.array()[:, -1])

    @property
    def global_last(self) -> Stat:
        """The metric of the global model on the test set after the last round."""
        return Stat.of(self.array(self.metric)[:, -1])

    def beside(self) -> dict[str, Stat]:
        """Metrics that must stand beside the accuracy, by name, after the last round: balanced
        accuracy and AUROC where classes are imbalanced."""
        ends = [run[-1] for run in self.records]
        if self.metric != "accuracy" or not all("imbalanced" in end for end in ends):
            return {}
        prefix = "" if self.headline == "global" else f"{self.headline}_"
        names = ("balanced_accuracy", "auroc")
        return {n: Stat.of([end.get(prefix + n, math.nan) for end in ends]) for n in names}

    @property
    def last_rounds(self) -> list[int]:
        """The number of the last round of each seed."""
        return [run[-1]["round"] for run in self.records]

    @property
    def stopped_early(self) -> bool:
        """Whether a seed was stopped by validation data before its last round."""
        return any(run[-1].get("stopped") for run in self.records)

    @property
    def diverged(self) -> bool:
        """Whether a seed ended with a loss that has exploded, or that is not a number."""
        ends = [run[-1] for run in self.records]
        return any("diverged" in end or math.isnan(end["train_loss"]) for end in ends)

    @property
    def best(self) -> Stat:
        """The best value of the headline in any tested round: chosen on the test data."""
        return Stat.of(self.array().max(1) if self.higher_is_better else self.array().min(1))

    @property
    def top5_mean(self) -> Stat:
        """Mean of the five best tested rounds."""
        means = []
        for run in self.records:  # seeds that stopped early have fewer tests
            tested = sorted(r[self.column] for r in run if self.column in r)
            means.append(np.mean(tested[-5:] if self.higher_is_better else tested[:5]))
        return Stat.of(means)

    @cached_property
    def best_rounds(self) -> list[int] | None:
        """The round of each seed that was best on validation data; None without such data."""
        sign, key = (1.0 if self.higher_is_better else -1.0), chosen_by(self.config)
        rounds = []
        for run in self.records:
            scored = [(sign * r[key][self.metric], r["round"]) for r in run if key in r]
            finite = [pair for pair in scored if not math.isnan(pair[0])]
            if not finite:
                return None
            rounds.append(max(finite, key=lambda pair: pair[0])[1])  # of equal ones, the first
        return rounds

    @property
    def validation(self) -> Stat | None:
        """The metric on validation data in the best rounds; None without such data."""
        records, key = self._best_records(), chosen_by(self.config)
        return Stat.of([r[key][self.metric] for r in records]) if records else None

    @property
    def chosen(self) -> Stat | None:
        """The headline on test data in the rounds that were best on validation data."""
        records = self._best_records()
        return Stat.of([r[self.column] for r in records]) if records else None

    @property
    def unseen(self) -> Stat | None:
        """The last metric on clients that never trained; None without such clients."""
        last = [[r["unseen"] for r in run if "unseen" in r][-1:] for run in self.records]
        return Stat.of([r[0][self.metric] for r in last]) if all(last) else None

    def _best_records(self) -> list[dict[str, Any]]:
        if self.best_rounds is None:
            return []
        pairs = zip(self.records, self.best_rounds, strict=True)
        return [next(r for r in run if r["round"] == best) for run, best in pairs]

    def rounds_to(self, target: float) -> list[int | None]:
        """The first round of each seed that reaches the target; None if none does."""
        values = self.array()
        reached = values >= target if self.higher_is_better else values <= target
        return [int(self.rounds[row.argmax()]) if row.any() else None for row in reached]

    @property
    def mb_up(self) -> float:
        """Megabytes that all clients sent in a run, mean over seeds."""
        return float(np.mean([sum(r["mb_up"] for r in run) for run in self.records]))

    @property
    def mb_down(self) -> float:
        """Megabytes that all clients received in a run, mean over seeds."""
        return float(np.mean([sum(r["mb_down"] for r in run) for run in self.records]))

    def frame(self) -> Any:
        """All records as a pandas DataFrame, one row per seed and round.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("frame() needs pandas: pip install pandas") from None
        pairs = zip(self.config.seeds, self.records, strict=True)
        return pandas.DataFrame([{"seed": s} | r for s, run in pairs for r in run])

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data, as ``--json`` prints it."""
        target = self.config.target
        reached = {"target": target, "values": self.rounds_to(target)} if target else None
        return {
            "method": self.config.method,
            "config": asdict(self.config),
            "partition_hash": self.partition_hash,
            "seeds": list(self.config.seeds),
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "headline": self.headline,
            "last": asdict(self.last),
            "best": asdict(self.best),
            "best_on": "test data",
            "top5_mean": asdict(self.top5_mean),
            "rounds_to": reached,
            "global_last": asdict(self.global_last),
            "beside": {name: asdict(stat) for name, stat in self.beside().items()},
            "diverged": self.diverged,
            "mb_up": self.mb_up,
            "mb_down": self.mb_down,
            "seconds": self.seconds,
            "engine": self.engine,
            "device": self.device,
            **self._choice(),
            **({"unseen": asdict(self.unseen)} if self.unseen else {}),
            **({"yardstick": self.yardstick} if self.yardstick else {}),
        }

    def _choice(self) -> dict[str, Any]:
        """What was chosen on validation data, for the summary; empty without such data."""
        if self.validation is None or self.chosen is None:
            return {}
        return {
            "chosen_on": "validation data",
            "best_round": self.best_rounds,
            "last_round": self.last_rounds,
            "stopped_early": self.stopped_early,
            "validation": asdict(self.validation),
            "chosen": asdict(self.chosen),
        }

    def to_json(self) -> str:
        """The summary as JSON; numbers that are not finite are null."""
        return json.dumps(plain(self.to_dict()), allow_nan=False)


def paired_gain(result: Result, first: Result) -> Stat:
    """Gain of the last value over that of another method, seed by seed; positive is better."""
    sign = 1.0 if result.higher_is_better else -1.0
    pairs = zip(result.last.values, first.last.values, strict=True)
    return Stat.of([sign * (a - b) for a, b in pairs])


def chosen_by(config: Config) -> str:
    """The key of the records that rounds and settings are chosen by."""
    personal = config.personal and parse(config.method).personal_model
    return "personal_validation" if personal else "validation"


def plain(value: Any) -> Any:
    """Replace numbers that are not finite by None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
