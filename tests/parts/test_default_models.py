"""Every part with its defaults on the default model of every built-in dataset.

Images of datasets that are files are replaced by noise of their shape and number of classes.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import kedge.parts  # noqa: F401  (registers the built-in parts)
from kedge.core.model import Model
from kedge.core.part import Part, parts
from kedge.data.datasets import Dataset
from kedge.data.datasets.dataset import ReadResult, assemble
from kedge.data.datasets.known import Known, datasets
from kedge.engines.execution import Execution
from kedge.errors import IncompatibleError, ModelError
from kedge.parts.fedimpro import FedImpro
from kedge.runs.config import Config
from kedge.runs.runner import simulation
from kedge.sim.simulation import Simulation

OWN = [name for name in parts if parts[name].__module__.startswith("kedge.parts.")]
DATA = [*datasets, "a table"]


@cache
def small(name: str) -> Dataset:
    """A dataset with two training samples and one test sample of each class."""
    entry = datasets[name] if name in datasets else None
    if entry is not None and not isinstance(entry, Known):
        full = entry()
        shape, outputs, kind = full.shape, full.outputs, full.x_train.dtype
    else:
        shape, outputs = (entry.shape, entry.count) if entry is not None else ((6,), 2)
        kind = np.dtype(np.uint8 if entry is not None else np.float32)
    draw = np.random.default_rng(0)
    y = np.arange(3 * outputs) % outputs
    x = draw.integers(0, 256, (len(y), *shape)).astype(kind)
    splits = {"train": (x[outputs:], y[outputs:]), "test": (x[:outputs], y[:outputs])}
    return assemble(name, [name], ReadResult([splits], "classification", outputs))


def bind(data: str, part: Part) -> Simulation:
    config = Config(
        method=str(part), data=data, clients=2, partition="iid", batch=4, epochs=1, rounds=1
    )
    return simulation(config, small(data), 0, torch.device("cpu"), Execution("loop"))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", OWN)
def test_one_round_and_a_test(name: str, data: str) -> None:
    """Counts, such as steps of a generator, are those of the part's quick setting."""
    counts = {field: value for field, value in parts[name].tiny.items() if type(value) is int}
    if parts[name].needs_batchnorm:
        with pytest.raises(ModelError, match="BatchNorm on the clients, but the model has none"):
            bind(data, parts[name]())
        return
    run = bind(data, parts[name](**counts))
    run.run_round()
    run.finish()
    assert all(np.isfinite(v) for v in run.evaluate().values())
