"""Every part with its defaults on the default model of every built-in dataset.

Images of datasets that are files are replaced by noise of their shape and number of classes.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kedge.parts  # noqa: F401  (registers the built-in parts)
from kedge.core.model import Model
from kedge.core.part import Part, parts
from kedge.data.datasets import Dataset
from kedge.data.datasets.dataset import ReadResult, assemble
from kedge.data.datasets.known import KnownDataset as Known
from kedge.data.datasets.known import datasets
from kedge.engines.execution import Execution
from kedge.errors import IncompatibleError, ModelError
from kedge.models import build
from kedge.parts.fedimpro import FedImpro
from kedge.runs.build import simulation
from kedge.settings import Config
from kedge.sim.simulation import Simulation

OWN = [name for name in parts if parts[name].__module__.startswith("kedge.parts.")]
DATA = [*datasets, "a table"]
REFUSED = {
    ("spherefed", "cifar100"): "at least as many features as classes, 100; the model has 84",
    ("feddf", "a table"): r"not \(6,\); .* feddf\(level=feature\)",
    ("flboost", "a table"): r"not \(6,\); .* flboost\(level=feature\)",
} | {("fedbn", data): "BatchNorm on the clients, but the model has none" for data in DATA}
"""What a part says where its defaults cannot fit."""


@cache
def small(name: str) -> Dataset:
    """A dataset with two training samples and one test sample of each class."""
    shape, outputs, kind = (6,), 2, np.float32
    if name in datasets:
        entry = datasets[name]
        like = entry if isinstance(entry, Known) else entry()
        outputs = like.count if isinstance(like, Known) else like.outputs
        shape, kind = like.shape, np.uint8
    y = np.arange(3 * outputs) % outputs
    x = np.random.default_rng(0).integers(0, 256, (len(y), *shape)).astype(kind)
    splits = {"train": (x[outputs:], y[outputs:]), "test": (x[:outputs], y[:outputs])}
    return assemble(name, [name], ReadResult([splits], "classification", outputs))


def bind(data: str, part: Part) -> Simulation:
    config = Config(
        method=str(part), data=data, clients=2, partition="iid", batch=50, epochs=1, rounds=1
    )
    return simulation(config, small(data), 0, torch.device("cpu"), Execution("loop"))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", OWN)
def test_one_round_and_a_test(name: str, data: str) -> None:
    """Counts, such as steps of a generator, are those of the part's quick setting."""
    part = parts[name]
    counts = {field: value for field, value in part.tiny.items() if type(value) is int}
    if (name, data) in REFUSED:
        with pytest.raises((ModelError, IncompatibleError), match=REFUSED[name, data]):
            bind(data, part())
        return
    run = bind(data, part(**counts))
    run.run_round()
    run.finish()
    assert all(np.isfinite(v) for v in run.evaluate().values())


def cut_of(module: nn.Module, head: str | None = None) -> str:
    part = FedImpro().for_model(Model(module, head=head))
    assert isinstance(part, FedImpro)
    assert part == FedImpro(cut=part.cut)
    return part.cut


@pytest.mark.parametrize(
    ("model", "shape", "cut"),
    [
        ("resnet18", (3, 32, 32), "stage2"),
        ("fedcog_cnn", (1, 28, 28), "stage2"),
        ("vgg9", (3, 32, 32), "stage2"),
        ("mlp(hidden=[8, 8, 8])", (5,), "stage2"),
        ("mlp", (5,), "stage1"),
    ],
)
def test_default_cut_of_fedimpro(model: str, shape: tuple[int, ...], cut: str) -> None:
    """Stage 2 wherever there is one, as in the paper."""
    assert cut_of(build(model, shape, 3)) == cut


def test_default_cut_of_a_model_without_stages() -> None:
    """The middle of the layers before the head, from the first with parameters on."""
    layers = [nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    assert cut_of(nn.Sequential(*layers)) == "2"
    assert cut_of(nn.Sequential(*layers[:2], layers[5])) == "1"
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    assert cut_of(nested, head="1.1") == "0"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.left(x) + self.right(x))


def test_models_whose_lower_layers_are_unknown_or_missing() -> None:
    with pytest.raises(IncompatibleError, match=r"lower ones; .* fedimpro\(cut=left\)"):
        cut_of(Branches())
    assert FedImpro(cut="left").for_model(Model(Branches())) == FedImpro(cut="left")
    with pytest.raises(IncompatibleError, match="no layer below its head"):
        cut_of(build("linear", (4,), 2))
