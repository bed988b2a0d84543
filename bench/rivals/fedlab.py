"""FedAvg, SCAFFOLD and FedProx of ``fedlab`` on two quadratic clients."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

CURVATURES, OPTIMA, LR, STEPS, ROUNDS, MU = (1.0, 10.0), (0.0, 1.0), 0.05, 10, 60, 1.0


SIZES = (1, 3)  # samples of the clients, all alike, for the objective


def positions() -> dict[str, float | str]:
    """Final w of each algorithm with equal sizes, and as ``objective of ...`` with ``SIZES``."""
    import torch

    _mock_torchvision()
    from fedlab.contrib.algorithm import fedavg, fedprox, scaffold

    class Clients:
        """Equal samples; (w x - y)^2 with x = sqrt(h/2), y = a x is h (w - a)^2 / 2."""

        def __init__(self, sizes: tuple[int, ...]) -> None:
            self.sizes = sizes

        def get_dataloader(self, k: int, batch_size: int) -> Any:
            x = torch.full((self.sizes[k], 1), (CURVATURES[k] / 2) ** 0.5)
            pairs = torch.utils.data.TensorDataset(x, OPTIMA[k] * x)
            return torch.utils.data.DataLoader(pairs, batch_size=batch_size)

    def run(server: Any, trainer: Any, sizes: Any = (1, 1), **own: Any) -> float | str:
        line = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(line.weight)
        n = len(CURVATURES)
        handler = server(line, global_round=ROUNDS, sample_ratio=1.0)
        clients = trainer(line, num_clients=n)
        handler.num_clients = n
        if server is scaffold.ScaffoldServerHandler:
            handler.setup_optim(lr=1.0)
        clients.setup_dataset(Clients(sizes))
        # one batch per epoch: epochs are steps
        clients.setup_optim(STEPS, max(sizes), LR, **own)
        clients.criterion = torch.nn.MSELoss()
        while not handler.if_stop:
            chosen = handler.sample_clients()
            clients.local_process(handler.downlink_package, chosen)
            for upload in clients.uplink_package:
                handler.load(upload)
        return number(float(handler.model_parameters))

    algorithms: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "fedavg": (fedavg.FedAvgServerHandler, fedavg.FedAvgSerialClientTrainer, {}),
        "scaffold": (scaffold.ScaffoldServerHandler, scaffold.ScaffoldSerialClientTrainer, {}),
        "fedprox": (fedprox.FedProxServerHandler, fedprox.FedProxSerialClientTrainer, {"mu": MU}),
    }
    equal = {n: run(server, trainer, **own) for n, (server, trainer, own) in algorithms.items()}
    unequal = {
        f"objective of {n}": run(server, trainer, SIZES, **own)
        for n, (server, trainer, own) in algorithms.items()
    }
    return equal | unequal


def _mock_torchvision() -> None:
    """Mock torchvision if it is missing or incompatible: fedlab imports it for unused datasets."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in ("", ".transforms", ".datasets", ".models"):
            sys.modules[f"torchvision{name}"] = mock.MagicMock()


def number(w: float) -> float | str:
    """A finite number, or its name: JSON has no inf and nan."""
    return w if w - w == 0 else str(w)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose files would shadow the libraries
    sys.stdout.write(json.dumps(positions()) + "\n")
