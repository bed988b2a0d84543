"""Plans of small runs, for the tests of planning."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kedge.data.datasets import load
from kedge.engines.loop import Loop
from kedge.engines.vector import Vector
from kedge.engines.workers import Workers, can_start_workers
from kedge.runs.build import simulation
from kedge.runs.planning import Make, SeedJob, choose
from kedge.settings import Config
from kedge.tuning import plan

CPU = torch.device("cpu")
FORKS = pytest.mark.skipif(
    not can_start_workers() or torch.accelerator.is_available(),
    reason="forks after gradients were taken, which needs Linux without a GPU",
)
TRAIN = {engine: engine.train for engine in (Loop, Vector, Workers)}


def make(config: Config) -> Make:
    dataset = load(config.data)
    return lambda seed, execution: simulation(config, dataset, seed, CPU, execution)


def planned(**settings: Any) -> plan.Plan:
    config = Config(**{"clients": 6, "rounds": 3, "seeds": (0, 1), "steps": 4} | settings)
    return choose([SeedJob(config, seed, make(config)) for seed in config.seeds])


def slow(monkeypatch: pytest.MonkeyPatch, engine: type, seconds: float = 0.02) -> None:
    """So much longer for every client-step."""
    train = TRAIN[engine]

    def slowly(self: Any, cohort: Any) -> Any:
        time.sleep(seconds * sum(cohort.steps))
        return train(self, cohort)

    monkeypatch.setattr(engine, "train", slowly)
    if engine is Loop and "train" not in vars(Workers):  # which would inherit it
        monkeypatch.setattr(Workers, "train", TRAIN[Workers], raising=False)
