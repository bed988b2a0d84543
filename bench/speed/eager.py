"""The plain PyTorch loop that a user would write.

It has one model, a new optimiser per client and round, and the data on the device; it uses neither
CUDA graphs nor compilation. BatchNorm statistics are averaged, too.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.speed.workloads import Workload


def train(
    net: nn.Module, x: Tensor, y: Tensor, batches: Tensor, work: Workload, precision: str = "fp32"
) -> None:
    """Train one client; ``batches`` holds the rows of each step, ``[steps, batch]``."""
    bf16 = precision == "bf16"
    context = torch.autocast(x.device.type, torch.bfloat16) if bf16 else nullcontext()
    net.train()
    optim = torch.optim.SGD(net.parameters(), lr=work.lr, weight_decay=work.weight_decay)
    for rows in batches:
        optim.zero_grad(set_to_none=True)
        with context:
            loss = F.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        optim.step()


def draw_batches(work: Workload, client: int, g: torch.Generator) -> Tensor:
    """Batch indices of a client, ``[steps, batch]``: one permutation of its samples per epoch."""
    count = work.steps * work.batch
    epochs = -(-count // work.samples)
    order = torch.cat([torch.randperm(work.samples, generator=g) for _ in range(epochs)])
    return (order[:count] + client * work.samples).view(work.steps, work.batch)


class EagerRounds:
    """Rounds of federated averaging. A call runs one round."""

    def __init__(
        self, work: Workload, data: tuple[Tensor, Tensor], precision: str = "fp32"
    ) -> None:
        self.work, self.precision = work, precision
        self.x, self.y = data
        self.server = work.module().to(self.x.device)
        self._local = copy.deepcopy(self.server)
        self._g = torch.Generator().manual_seed(1)

    def __call__(self, clients: list[int] | None = None, batches: Tensor | None = None) -> None:
        """Train a random cohort, or given clients on ``batches`` ``[clients, steps, batch]``."""
        work, g = self.work, self._g
        if clients is None:
            clients = torch.randperm(work.clients, generator=g)[: work.cohort].tolist()
        start = {k: v.clone() for k, v in self.server.state_dict().items()}
        total = {k: torch.zeros_like(v, dtype=torch.float32) for k, v in start.items()}
        for i, client in enumerate(clients):
            rows = draw_batches(work, client, g) if batches is None else batches[i]
            self._local.load_state_dict(start)
            train(self._local, self.x, self.y, rows.to(self.x.device), work, self.precision)
            for name, value in self._local.state_dict().items():
                total[name].add_(value, alpha=1 / len(clients))
        self.server.load_state_dict(total)
