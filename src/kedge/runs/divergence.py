"""Notice a loss that explodes without being NaN.

A loss counts as exploded if it is more than ``FACTOR`` times both the loss of a constant prediction
(all outputs 0) and that of the untrained model: no model that has learnt anything is there, on any
scale of the targets. A run has diverged if it ends so; a warning comes after some rounds in a row.
The training loss is judged and, unless the method is personal, the global model's test loss.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from kedge.errors import NotFinite
from kedge.runs.build import is_personal
from kedge.runs.result import Result
from kedge.settings import Config
from kedge.sim.simulation import Simulation

FACTOR = 100.0
WARN_AFTER = 3  # rounds in a row
LARGE_TARGETS = 30.0  # root of the mean square
ROWS = 2048  # training samples that the reference is computed on, at most


class LossGuard:
    """Watches the records of one seed."""

    def __init__(self, sim: Simulation, config: Config) -> None:
        self.sim, self.config, self.in_a_row = sim, config, 0
        self.test = not is_personal(config)

    def check(self, record: dict[str, Any]) -> None:
        """Note the reference loss under ``diverged`` in a record whose loss has exploded."""
        loss = exploding_loss(record, self.test)
        reference = self._reference(loss)
        if reference is None:
            self.in_a_row = 0
            return
        record["diverged"] = reference
        self.in_a_row += 1
        if self.in_a_row == WARN_AFTER:  # the same text for all seeds, so that it is printed once
            method, text = self.config.method, advice(self.config)
            warnings.warn(
                f"the loss of {method} is more than {FACTOR:g} times what it is without training. "
                f"{text}",
                stacklevel=2,
            )

    def _reference(self, loss: float) -> float | None:
        """The reference loss if this one is ``FACTOR`` times as high, else None."""
        if not loss > FACTOR * self._constant or self._constant <= 0:
            return None
        reference = max(self._constant, self._untrained)
        return reference if loss > FACTOR * reference else None

    @cached_property
    def _rows(self) -> torch.Tensor:
        rows = self.sim.federation.rows
        return rows[:: math.ceil(len(rows) / ROWS)]

    @cached_property
    def _constant(self) -> float:
        """The loss of outputs that are all 0."""
        batch = self.sim.federation.clean(self._rows)
        fed = self.sim.federation
        zeros = torch.zeros(len(self._rows), fed.task.outputs, dtype=fed.dtype, device=fed.device)
        return abs(float(self.sim.task.loss(zeros, batch).mean()))

    @cached_property
    def _untrained(self) -> float:
        """The loss of the initial model; computed only once a loss looks exploded."""
        report = self.sim.evaluate_rows(self.sim.bound.initial, self._rows, detailed=False)
        found = abs(report.get("loss", 0.0))
        return found if math.isfinite(found) else 0.0


def exploding_loss(record: Mapping[str, Any], test: bool = True) -> float:
    """The larger of the training loss and, with ``test``, the test loss of a round."""
    losses = [record["train_loss"], *([record["loss"]] if test and "loss" in record else [])]
    return max((loss for loss in losses if not math.isnan(loss)), default=math.nan)


def describe(loss: float, reference: float) -> str:
    """What has happened, in words."""
    return (
        f"the loss is {_number(loss)}, more than {FACTOR:g} times {_number(reference)}, "
        "what it is without training"
    )


def explained(error: NotFinite, sim: Simulation) -> NotFinite:
    """The error, with a remark where targets are so large that the usual learning rates fail."""
    if sim.task.name != "regression":
        return error
    y = sim.federation.clean(sim.federation.rows[:ROWS]).y
    size = float(y.double().square().mean().sqrt())
    if size < LARGE_TARGETS:
        return error
    return NotFinite(f"{error}. {_large(size)}")


def advice(config: Config) -> str:
    """What to type next."""
    return f"Lower the learning rate: --lr {min(0.1, config.lr / 10):g} (now {config.lr:g})"


def message(result: Result) -> str:
    """The sentence about a result that has diverged; empty if it has not."""
    for seed, run in zip(result.config.seeds, result.records, strict=True):
        if "diverged" in run[-1]:
            loss = exploding_loss(run[-1], not is_personal(result.config))
            where = f"seed {seed} of " if len(result.config.seeds) > 1 else ""
            text = describe(loss, run[-1]["diverged"])
            text = f"{where}{result.config.method} has diverged: {text}. {advice(result.config)}"
            size = math.sqrt(run[-1]["diverged"])  # a squared error without training
            is_large = "rmse" in run[-1] and size > LARGE_TARGETS
            return f"{text}. {_large(size)}" if is_large else text
    return ""


def _large(size: float) -> str:
    return f"The targets are large, about {size:,.0f}: scale them, so that they are about 1"


def _number(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < 1e6 else f"{value:.3g}"
