"""The result of a run: a run with its records and its trained models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from torch import nn

from kedge.core.task import Task
from kedge.files import finite
from kedge.history.metric import MetricInfo
from kedge.history.read import plain_settings
from kedge.history.run import Columns, Run, Seed, frame_of
from kedge.settings import Config


@dataclass(frozen=True, eq=False)
class Result(Run):
    """The result of one configuration over all its seeds.

    ``records[i]`` holds one dictionary per round of the i-th seed, ``models[i]`` is its trained
    global model, and ``personal[i]`` are the clients' personal models if ``config.personal`` is
    set. With validation data, ``best_models[i]`` is the global model of the round that was best on
    them. A seed that stopped early has fewer records; in arrays its last values go on.

    >>> result = kedge.run("fedavg", clients=3, rounds=2, seeds=(0, 1))
    >>> result.last.n, len(result.records[0]), result.records[0][-1]["round"]
    (2, 2, 2)
    """

    config: Config = field(default_factory=Config)
    records: list[list[dict[str, Any]]] = field(repr=False, default_factory=list)
    engine: str = ""
    device: str = ""
    models: list[nn.Module] = field(repr=False, default_factory=list)
    personal: list[list[nn.Module]] = field(repr=False, default_factory=list)
    best_models: list[nn.Module] = field(repr=False, default_factory=list)

    @classmethod
    def of(
        cls,
        config: Config,
        records: list[list[dict[str, Any]]],
        task: Task,
        headline: str,
        hashes: Sequence[str] = (),
        failed: Sequence[str] = (),
        **more: Any,
    ) -> Self:
        """The result of a configuration.

        Args:
            config: the settings.
            records: of each seed.
            task: what says which metric counts.
            headline: of which models.
            hashes: of the partitions.
            failed: why seeds ended before their last round; empty texts for the others.
            **more: other fields.
        """
        missing = [""] * len(records)
        seeds = zip(config.seeds, records, [*hashes, *missing], [*failed, *missing], strict=False)
        metrics = {metric.name: MetricInfo.of(metric) for metric in task.metrics}
        seconds = sum(one.get("seconds", 0.0) for run in records for one in run)
        return cls(
            settings=plain_settings(asdict(config)),
            seeds=tuple(Seed(n, Columns(r), digest, failed=why) for n, r, digest, why in seeds),
            measure=metrics[task.metric],
            headline=headline,
            metrics=metrics,
            config=config,
            records=records,
            **{"name": config.method, "seconds": seconds} | more,
        )

    def __repr__(self) -> str:
        seeds = f"{len(self.records)} seed{'s' if len(self.records) > 1 else ''}"
        whose = "" if self.headline == "global" else " of clients"
        value = f"{self.metric}{whose} {self.written(self.last)} {self.unit}".rstrip()
        return (
            f"<Result {self.name} on {self.config.data}: {value}, "
            f"{len(self.records[0])} rounds, {seeds}>"
        )

    @property
    def metric(self) -> str:
        """The name of the metric that the run is judged by."""
        return self.measure.name

    @property
    def higher_is_better(self) -> bool:
        return bool(self.measure.higher_is_better)

    def frame(self) -> Any:
        """All records as a pandas DataFrame, one row per seed and round.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame_of(self.config.seeds, self.records)

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data, as ``--json`` prints it."""
        target = self.config.target
        reached = {"target": target, "values": self.rounds_to(target)} if target else None
        found = {
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
        }
        if self.validation is not None and self.chosen is not None:
            found |= {
                "chosen_on": "validation data",
                "best_round": self.best_rounds,
                "last_round": self.last_rounds,
                "stopped_early": self.stopped_early,
                "validation": asdict(self.validation),
                "chosen": asdict(self.chosen),
            }
        found |= {"unseen": asdict(self.unseen)} if self.unseen else {}
        return found | ({"yardstick": self.yardstick} if self.yardstick else {})

    def to_json(self) -> str:
        """The summary as JSON; numbers that are not finite are null."""
        return json.dumps(finite(self.to_dict()), allow_nan=False)
