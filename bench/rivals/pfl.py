"""FedAvg, SCAFFOLD (option II) and FedProx of ``pfl`` on two quadratic clients."""

from __future__ import annotations

import json
import sys
from typing import Any

CURVATURES, OPTIMA, LR, STEPS, ROUNDS, MU = (1.0, 10.0), (0.0, 1.0), 0.05, 10, 60, 1.0


SIZES = (1, 3)  # samples of the clients, all alike, for the objective


def positions() -> dict[str, float | str]:
    """Final w of each algorithm with equal sizes, and as ``objective of ...`` with ``SIZES``."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.algorithm.fedprox import FedProx, FedProxParams
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.user_state import InMemoryUserStateStorage
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Scalar(torch.nn.Module):
        """One weight; (w x - y)^2 with x = sqrt(h/2), y = a x is h (w - a)^2 / 2."""

        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            return ((self.w * x - y) ** 2).mean()

        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, Any]:
            return {}

    def run(algorithm: Any, kind: Any, sizes: Any = (1, 1), **own: Any) -> float | str:
        def client(user: str) -> Any:
            h, a = CURVATURES[int(user)], OPTIMA[int(user)]
            x = torch.full((sizes[int(user)],), (h / 2) ** 0.5)
            return Dataset([x, a * x], user_id=user)

        users = [str(k) for k in range(len(CURVATURES))]
        calls = iter(users * (ROUNDS + 1))  # both clients in turn: full participation
        data = FederatedDataset(client, lambda: next(calls))
        line = Scalar()
        central = torch.optim.SGD(line.parameters(), lr=1.0)
        model = PyTorchModel(line, torch.optim.SGD, central)
        settings = kind(
            central_num_iterations=ROUNDS,
            evaluation_frequency=10 * ROUNDS,
            train_cohort_size=len(users),
            val_cohort_size=0,
            **own,
        )
        train = NNTrainHyperParams(
            local_num_epochs=STEPS, local_learning_rate=LR, local_batch_size=None
        )
        algorithm().run(
            algorithm_params=settings,
            backend=SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
            model=model,
            model_train_params=train,
            model_eval_params=NNEvalHyperParams(local_batch_size=None),
            send_metrics_to_platform=False,
        )
        return number(float(line.w.detach()))

    def all_runs(sizes: tuple[int, ...]) -> dict[str, float | str]:
        variates = {
            "population": len(CURVATURES),
            "use_gradient_as_control_variate": False,
            "user_state_storage": InMemoryUserStateStorage(),
        }
        return {
            "fedavg": run(FederatedAveraging, NNAlgorithmParams, sizes),
            "scaffold": run(SCAFFOLD, SCAFFOLDParams, sizes, **variates),
            "fedprox": run(FedProx, FedProxParams, sizes, mu=MU),
        }

    unequal = {f"objective of {name}": w for name, w in all_runs(SIZES).items()}
    return all_runs((1, 1)) | unequal


def number(w: float) -> float | str:
    """A finite number, or its name: JSON has no inf and nan."""
    return w if w - w == 0 else str(w)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose files would shadow the libraries
    sys.stdout.write(json.dumps(positions()) + "\n")
