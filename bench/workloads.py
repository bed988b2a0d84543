"""The workloads that speed is measured on, each as a plain PyTorch loop and as kedge runs it.

Data are random: speed does not depend on their values. ``eager`` is what a user would write: one
model, one optimiser per client and round, data already on the device, no graph, no compilation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import kedge
from kedge.sim.federation import Federation, LocalWork
from kedge.sim.simulation import Simulation
from kedge.zoo.models import build


@dataclass(frozen=True)
class Workload:
    name: str
    model: str
    shape: tuple[int, ...]
    clients: int  # in the federation
    cohort: int
    samples: int  # per client
    batch: int
    steps: int
    lr: float
    note: str = ""

    def data(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        n = self.clients * self.samples
        x = torch.randint(0, 256, (n, *self.shape), generator=g, dtype=torch.uint8)
        return x.to(device), torch.randint(0, 10, (n,), generator=g).to(device)

    def module(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return build(self.model, self.shape, 10)

    def simulation(
        self, device: str, engine: str, method: str = "fedavg", precision: str = "tf32"
    ) -> Simulation:
        x, y = self.data("cpu")
        rows = torch.arange(len(x)).split(self.samples)
        task = kedge.Classification(10)
        moments = ([0.5] * self.shape[0], [0.25] * self.shape[0]) if len(self.shape) == 3 else None
        if moments is None:
            x = x.float() / 255
        fed = Federation(x, y, rows, task, moments=moments, device=device)
        return Simulation(
            fed,
            kedge.Model(self.module(), precision=precision),
            method,
            optim=kedge.SGD(lr=self.lr),
            work=LocalWork(batch=self.batch, steps=self.steps),
            per_round=self.cohort,
            weighting="uniform",
            engine=engine,
        )

    def eager_round(self, device: str):
        """A function that runs one round as a user would write it."""
        x, y = self.data(device)
        x = (x.float() / 255 - 0.5) / 0.25 if len(self.shape) == 3 else x.float() / 255
        server = self.module().to(device)
        local = copy.deepcopy(server)
        g = torch.Generator().manual_seed(1)

        def run() -> None:
            chosen = torch.randperm(self.clients, generator=g)[: self.cohort].tolist()
            start = {k: v.clone() for k, v in server.state_dict().items()}
            total = {k: torch.zeros_like(v, dtype=torch.float32) for k, v in start.items()}
            for k in chosen:
                local.load_state_dict(start)
                local.train()
                optim = torch.optim.SGD(local.parameters(), lr=self.lr)
                order = []
                while len(order) < self.steps * self.batch:
                    order += torch.randperm(self.samples, generator=g).tolist()
                index = (torch.tensor(order) + k * self.samples).to(device)
                for t in range(self.steps):
                    rows = index[t * self.batch : (t + 1) * self.batch]
                    optim.zero_grad(set_to_none=True)
                    F.cross_entropy(local(x[rows]), y[rows]).backward()
                    optim.step()
                for name, value in local.state_dict().items():
                    total[name] += value.float() / self.cohort
            server.load_state_dict({k: v.to(start[k].dtype) for k, v in total.items()})

        return run


PFL = Workload("pfl", "pfl_cnn", (3, 32, 32), 1000, 50, 50, 10, 5, 0.1, "pfl's CIFAR-10 benchmark")
SMALL10 = Workload("small10", "fedcog_cnn", (3, 32, 32), 10, 10, 640, 64, 100, 0.01)
SMALL100 = Workload("small100", "fedcog_cnn", (3, 32, 32), 100, 100, 640, 64, 20, 0.01)
RESNET_BN = Workload("resnet_bn", "resnet18(norm=bn)", (3, 32, 32), 10, 10, 512, 128, 20, 0.1)
RESNET_GN = Workload("resnet_gn", "resnet18(norm=gn)", (3, 32, 32), 10, 10, 512, 32, 20, 0.1)
DIGITS = Workload("digits", "mlp(hidden=[64])", (64,), 20, 20, 72, 32, 10, 0.1)
WORKLOADS = {w.name: w for w in (PFL, SMALL10, SMALL100, RESNET_BN, RESNET_GN, DIGITS)}
