"""pfl's own simulation of federated averaging on a workload. Needs ``pfl`` (0.6.0).

It is set up as in pfl's CIFAR-10 benchmark: one process, the data on the device, a slice of them
per client. pfl does not shuffle, and BatchNorm statistics pass from client to client without
averaging.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.speed.workloads import Workload


class Net(nn.Module):
    """A network with the two methods that pfl calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.train()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Called once, before the first round, which is not timed."""
        from pfl.metrics import Weighted

        return {"samples": Weighted(len(x), 1)}


class PflRounds:
    """Rounds of ``FederatedAveraging`` on a ``SimulatedBackend``. A call runs one round."""

    def __init__(
        self, work: Workload, data: tuple[Tensor, Tensor], precision: str = "fp32"
    ) -> None:
        # pfl reads this variable on import; by default it uses a GPU if there is one
        os.environ["PFL_PYTORCH_DEVICE"] = str(data[0].device)
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel

        logging.getLogger("pfl").setLevel(logging.WARNING)
        self.net = Net(work.module()).to(data[0].device)
        # round-robin, so that the clients of a round differ
        sampler = get_user_sampler("minimize_reuse", range(work.clients))
        users = FederatedDataset(_clients(work, data), sampler)
        self._algorithm = FederatedAveraging()
        self._settings = NNAlgorithmParams(
            central_num_iterations=0,
            evaluation_frequency=10**9,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        )
        self._run: dict[str, Any] = {
            "backend": SimulatedBackend(training_data=users, val_data=users),
            "model": PyTorchModel(
                self.net,
                partial(torch.optim.SGD, weight_decay=work.weight_decay),
                torch.optim.SGD(self.net.parameters(), lr=1.0),
                amp_dtype=torch.bfloat16 if precision == "bf16" else None,
            ),
            "model_train_params": NNTrainHyperParams(
                local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch
            ),
            "model_eval_params": NNEvalHyperParams(local_batch_size=None),
            "send_metrics_to_platform": False,
        }

    def __call__(self) -> None:
        # an algorithm continues where it stopped: one more iteration runs one round
        done = self._settings.central_num_iterations
        self._settings = replace(self._settings, central_num_iterations=done + 1)
        self._algorithm.run(algorithm_params=self._settings, **self._run)


def _clients(work: Workload, data: tuple[Tensor, Tensor]) -> Any:
    """A function from the number of a client to its pfl dataset."""
    from pfl.data.dataset import Dataset

    class Rows(Dataset):
        """The samples of a client in order, repeated for the number of steps of the workload."""

        def iter(self, batch_size: int | None) -> Iterator[Any]:
            if batch_size is None:
                yield self.raw_data
                return
            for t in range(work.steps):
                first = t * batch_size % work.samples
                last = first + batch_size
                if last <= work.samples:
                    yield [tensor[first:last] for tensor in self.raw_data]
                else:
                    index = torch.arange(first, last, device=data[0].device) % work.samples
                    yield [tensor[index] for tensor in self.raw_data]

    def make(client: int) -> Any:
        rows = slice(client * work.samples, (client + 1) * work.samples)
        return Rows([tensor[rows] for tensor in data], user_id=str(client))

    return make
