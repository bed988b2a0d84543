"""FedImpro in plain PyTorch, in one file and without kedge.

Zhenheng Tang, Yonggang Zhang, Shaohuai Shi, Xinmei Tian, Tongliang Liu, Bo Han and Xiaowen Chu,
FedImpro: Measuring and Improving Client Update in Federated Learning, ICLR 2024, arXiv:2402.07011.

A network is cut into lower and upper layers. For every class the server keeps the mean and the
scale of each activation at the cut. A client draws features from these normals and trains its upper
layers on them besides its own samples; the lower layers see real samples only. Meanwhile it keeps
the statistics up to date with its own activations and returns them with its weights.

The settings below are those of the authors' code, but for the weight of the drawn features, whose
growth ends at 1, and for beta_m. ``OFFICIAL`` has both as in the code; ``PAPER`` is the method as
printed.

Nothing in :func:`train` is random: batches, first means and normal draws are arguments, so that
another implementation can be given the same ones. Run a small example on random data:

    python examples/reference/fedimpro.py
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Settings:
    """The names are those of the paper where it has one."""

    cut: str = "stage2"  # the upper layers begin after this child of the model
    lr: float = 0.1
    weight: float = 1.0  # of the drawn features' loss
    ramp: int = 500  # rounds in which that weight grows from 0 (0: none)
    cap: bool = True  # end the growth
    labels: Literal["balanced", "batch"] = "balanced"
    draws_from: Literal["local", "shared"] = "local"
    spread: Literal["std", "variance"] = "std"
    s_max: float = 0.1  # largest standard deviation (0: no bound)
    beta_m: float | Literal["by_dimension"] = 0.0  # or as in the code, see OFFICIAL
    beta_g: float = 0.0


# The code takes beta_m = max(0, 1 - D/5000), D the number of activations at the cut.
OFFICIAL = {"cap": False, "beta_m": "by_dimension"}
PAPER = {
    "ramp": 0,
    "labels": "batch",
    "draws_from": "shared",
    "spread": "variance",
    "s_max": 0.0,
    "beta_m": 0.9,
}


class Work(NamedTuple):
    """What one client does in one round."""

    size: int  # samples that it holds, its weight in the mean
    batches: list[tuple[Tensor, Tensor]]
    normals: list[Tensor]  # one per batch, [drawn rows, activations at the cut]
    noise: tuple[Tensor, Tensor]  # added to the uploaded means and scales, [classes, activations]


def train(
    model: nn.Sequential, first_mean: Tensor, rounds: list[list[Work]], s: Settings
) -> tuple[nn.Sequential, Tensor, Tensor, list[float]]:
    """The trained model, the server's means and scales, and the mean loss of every round.

    ``rounds[t]`` is the work of the clients of round t; ``first_mean`` is [classes, activations].
    """
    model = copy.deepcopy(model)
    mean = first_mean.clone()
    scale = bounded(torch.full_like(mean, 0.1**2 if s.spread == "variance" else 0.1), s)
    beta_m = max(0.0, 1 - mean.shape[1] / 5000) if s.beta_m == "by_dimension" else s.beta_m
    history = []

    for t, cohort in enumerate(rounds):
        weight = s.weight * (t / s.ramp if s.ramp else 1.0)
        if s.cap:
            weight = min(weight, s.weight)
        models, means, scales, losses = [], [], [], []

        for client in cohort:
            local = copy.deepcopy(model).train()
            low, high = split(local, s.cut)
            optimizer = torch.optim.SGD(local.parameters(), lr=s.lr)
            mean_m, scale_m = mean.clone(), scale.clone()

            for (x, y), eps in zip(client.batches, client.normals, strict=True):
                # features drawn from the class-wise normals: constants without a graph
                y_hat = y if s.labels == "batch" else balanced(len(y), len(mean))
                mu, sigma = (mean_m, scale_m) if s.draws_from == "local" else (mean, scale)
                if s.spread == "variance":
                    sigma = sigma.sqrt()
                h_hat = mu[y_hat] + sigma[y_hat] * eps

                # real and drawn features go through the upper layers in one pass
                h = low(x)
                logits = high(torch.cat([h, h_hat.reshape(-1, *h.shape[1:])]))
                loss = F.cross_entropy(logits[: len(x)], y)
                loss = loss + weight * F.cross_entropy(logits[len(x) :], y_hat)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

                # statistics of the real features of this pass (eq. 6)
                h = h.detach().flatten(1)
                for c in y.unique().tolist():
                    own = h[y == c]
                    mean_m[c] = beta_m * mean_m[c] + (1 - beta_m) * own.mean(0)
                    if len(own) > 1:  # one sample has no spread
                        new = own.var(0) if s.spread == "variance" else own.std(0)
                        scale_m[c] = bounded(beta_m * scale_m[c] + (1 - beta_m) * new, s)

            models.append(local.state_dict())
            means.append(mean_m + client.noise[0])
            scales.append((scale_m + client.noise[1]).clamp_min(0))

        # weights by size, statistics by a plain mean over the cohort (eq. 7)
        model.load_state_dict(average(models, [client.size for client in cohort]))
        mean = s.beta_g * mean + (1 - s.beta_g) * torch.stack(means).mean(0)
        scale = s.beta_g * scale + (1 - s.beta_g) * torch.stack(scales).mean(0)
        history.append(sum(losses) / len(losses))

    return model, mean, scale, history


def split(model: nn.Sequential, cut: str) -> tuple[nn.Module, nn.Module]:
    """The layers up to the cut and those after it, sharing the model's weights."""
    names = list(model._modules)
    at = names.index(cut) + 1
    return model[:at], model[at:]


def balanced(batch: int, classes: int) -> Tensor:
    """Every class floor(B/C) + 1 times."""
    return torch.arange(classes).repeat(batch // classes + 1)


def bounded(spread: Tensor, s: Settings) -> Tensor:
    if s.s_max == 0:
        return spread
    return spread.clamp(max=s.s_max**2 if s.spread == "variance" else s.s_max)


def average(states: list[dict[str, Tensor]], sizes: list[int]) -> dict[str, Tensor]:
    """Mean by size of everything, BatchNorm's statistics included; counters are rounded."""
    share = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    mean = {}
    for name, first in states[0].items():
        value = torch.tensordot(share, torch.stack([state[name].double() for state in states]), 1)
        mean[name] = (value if first.is_floating_point() else value.round()).to(first.dtype)
    return mean


def main() -> None:
    """Four clients with two of four classes each, on points in the plane."""
    torch.manual_seed(0)
    classes, clients, batch = 4, 4, 16
    model = nn.Sequential()
    model.add_module("stage1", nn.Sequential(nn.Linear(2, 32), nn.ReLU()))
    model.add_module("stage2", nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()))
    model.add_module("head", nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, classes)))
    centres = 2 * torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])

    def work(k: int) -> Work:
        labels = [
            torch.tensor([k, (k + 1) % classes])[torch.randint(2, (batch,))] for _ in range(5)
        ]
        drawn = len(balanced(batch, classes))
        return Work(
            size=5 * batch,
            batches=[(centres[y] + torch.randn(batch, 2), y) for y in labels],
            normals=[torch.randn(drawn, 32) for _ in labels],
            noise=(torch.zeros(classes, 32), torch.zeros(classes, 32)),
        )

    rounds = [[work(k) for k in range(clients)] for _ in range(20)]
    first_mean = torch.rand(classes, 32)
    model, _, _, history = train(model, first_mean, rounds, Settings(lr=0.1, ramp=10))
    for t, loss in enumerate(history):
        print(f"round {t:2d}  loss {loss:.4f}")
    y = torch.arange(classes).repeat(250)
    said = model.eval()(centres[y] + torch.randn(len(y), 2)).argmax(1)
    print(f"accuracy over all classes {100 * (said == y).float().mean().item():.1f} %")


if __name__ == "__main__":
    main()
