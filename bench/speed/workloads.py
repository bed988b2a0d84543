"""The workloads of ``python -m bench``, with random data, since speed does not depend on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.task import Classification
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.engines import Execution
from kedge.models import build, models
from kedge.sim.simulation import Simulation

CLASSES, MEAN, STD = 10, 0.5, 0.25


@dataclass(frozen=True)
class Workload:
    """A round: ``cohort`` of ``clients`` clients take ``steps`` steps each."""

    name: str
    model: str
    shape: tuple[int, ...]
    clients: int  # in the federation
    cohort: int
    samples: int  # per client
    batch: int
    steps: int
    lr: float
    note: str
    idle: bool = False  # a framework that can call clients without training does so
    methods: tuple[str, ...] = ("fedavg",)  # that it is about
    weight_decay: float = 0.0

    @property
    def client_steps(self) -> int:
        """Local steps of all clients in one round."""
        return self.cohort * self.steps

    def module(self) -> nn.Module:
        """The network, always with the same initial weights."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return build(self.model, self.shape, CLASSES)

    def data(self) -> tuple[Tensor, Tensor]:
        """Bytes and labels; rows ``k * samples`` to ``(k + 1) * samples`` belong to client k."""
        g = torch.Generator().manual_seed(0)
        n = self.clients * self.samples
        x = torch.randint(0, 256, (n, *self.shape), generator=g, dtype=torch.uint8)
        return x, torch.randint(0, CLASSES, (n,), generator=g)

    def normalised(self, device: str) -> tuple[Tensor, Tensor]:
        """The data on the device as normalised floats, as rivals train on them."""
        x, y = self.data()
        inputs = x.to(device).float().div_(255)
        return inputs.sub_(MEAN).div_(STD) if self._is_image else inputs, y.to(device)

    def federation(self, device: str) -> Federation:
        """The data on the device as kedge stores them: images stay bytes."""
        x, y = self.data()
        moments = ([MEAN] * self.shape[0], [STD] * self.shape[0]) if self._is_image else None
        rows = torch.arange(len(x)).split(self.samples)
        inputs = x if self._is_image else x.float() / 255
        return Federation(inputs, y, rows, Classification(CLASSES), moments=moments, device=device)

    def simulation(
        self,
        federation: Federation,
        execution: Execution,
        method: str = "fedavg",
        precision: str = "fp32",
    ) -> Simulation:
        """A simulation of this workload."""
        return Simulation(
            federation,
            Model(self.module(), precision=precision),
            method,
            optim=SGD(lr=self.lr, weight_decay=self.weight_decay),
            work=LocalWork(batch=self.batch, steps=self.steps),
            per_round=self.cohort,
            weighting="uniform",
            engine=execution,
        )

    @property
    def _is_image(self) -> bool:
        return len(self.shape) == 3


CIFAR, MNIST = (3, 32, 32), (1, 28, 28)
WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "pfl", "pfl_cnn", CIFAR, 1000, 50, 50, 10, 5, 0.1,
            "pfl-research's CIFAR-10 benchmark: 50 of 1000 clients, CNN with dropout, batch 10",
        ),
        Workload(
            "small10", "fedcog_cnn", CIFAR, 10, 10, 640, 64, 100, 0.01,
            "the small CNN of FedCOG and MOON: 10 clients, batch 64, 100 steps",
        ),
        Workload(
            "small100", "fedcog_cnn", CIFAR, 100, 100, 640, 64, 20, 0.01,
            "the same CNN: 100 clients, batch 64, 20 steps",
        ),
        Workload(
            "resnet_bn", "resnet18(norm=bn)", CIFAR, 10, 10, 512, 128, 20, 0.1,
            "ResNet-18 with BatchNorm: 10 clients, batch 128, 20 steps",
        ),
        Workload(
            "resnet_gn", "resnet18(norm=gn)", CIFAR, 10, 10, 512, 32, 20, 0.1,
            "ResNet-18 with GroupNorm: 10 clients, batch 32, 20 steps",
        ),
        Workload(
            "digits", "mlp(hidden=[64])", (64,), 20, 20, 72, 32, 10, 0.1,
            "an MLP on data of the size of digits: 20 clients, batch 32, 10 steps",
        ),
        Workload(
            "fedimpro_resnet18", "resnet18(norm=bn, stem=cifar)", CIFAR, 10, 5, 4992, 128, 39, 0.1,
            "FedImpro's CIFAR-10 setting: 5 of 10 clients, ResNet-18, batch 128, one epoch",
            methods=("fedavg", "fedimpro(cut=stage2)"), weight_decay=1e-4,
        ),
        Workload(
            "flboost_resnet18", "resnet18(norm=bn, stem=imagenet)", CIFAR, 100, 10, 500, 50, 50,
            0.1,
            "FLBoost's CIFAR-10 setting: 10 of 100 clients, torchvision's ResNet-18, batch 50, "
            "five epochs",
            methods=("fedavg", "scaffold", "scaffold+flboost:official"), weight_decay=1e-3,
        ),
        Workload(
            "fedbr_vgg11", "vgg11", CIFAR, 10, 10, 5000, 32, 50, 0.01,
            "FedBR's CIFAR-10 setting: 10 clients, VGG-11 without norm, batch 32, 50 steps",
            methods=("fedavg", "fedbr:cifar10"),
        ),
        Workload(
            "fedbr_mnist", "mnist_cnn(norm=gn)", MNIST, 10, 10, 6000, 64, 50, 0.001,
            "FedBR's RotatedMNIST setting: 10 clients, DomainBed's CNN, batch 64, 50 steps",
            methods=("fedavg", "fedbr:mnist"),
        ),
        *(
            Workload(
                f"overhead{n}", "linear", (64,), n, n, 1, 1, 1, 0.1,
                f"overhead of a client: {n} clients, logistic regression, one step on one sample "
                "(Flower: none)",
                idle=True,
            )
            for n in (10, 100, 1000)
        ),
    )
}  # fmt: skip
GROUPS = {"all": list(WORKLOADS), "overhead": [n for n in WORKLOADS if n.startswith("overhead")]}
GROUPS["papers"] = ["fedimpro_resnet18", "flboost_resnet18", "fedbr_vgg11", "fedbr_mnist"]

LARGE = ("resnet", "vgg", "cct")
SHAPES = {"linear": (64,), "mlp": (64,), "pamap2_cnn": (52, 200)}
SHAPES |= dict.fromkeys(("lenet5", "mnist_cnn"), MNIST)


def _of_zoo(model: str) -> Workload:
    """A small workload for a model of :mod:`kedge.models`."""
    batch, steps = (16, 2) if model.startswith(LARGE) else (32, 5)
    note = f"{model} of the zoo: 4 clients, batch {batch}, {steps} steps"
    shape, name = SHAPES.get(model, CIFAR), f"zoo_{model}"
    return Workload(name, model, shape, 4, 4, batch * steps, batch, steps, 0.01, note)


GROUPS["zoo"] = [f"zoo_{model}" for model in models]
WORKLOADS |= {f"zoo_{model}": _of_zoo(model) for model in models}
