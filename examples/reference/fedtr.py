"""FedTR in plain PyTorch, in one file and without kedge.

Silong Chen, Yuchuan Luo, Liang Gao, Shaojing Fu, Ming Xu and Yawei Zhao, Making Local Models Learn
Autonomously With Global Feature Tracking and Client Drift Releasing for Federated Learning. Its
drift variable is that of FedDC (Liang Gao et al., CVPR 2022, arXiv:2203.11751).

A client minimises its loss plus two terms: its features are pulled to global class centroids, and
w_i + d_i is held near the global model w, where the drift variable d_i takes up what is local to
the client. The paper has two usable rules for d_i:

* ``accumulate`` (appendix A.1): d_i <- d_i + w_i - w, once a round. The server adds the mean of d
  over all clients, whether they take part in this round or not.
* ``descent`` (algorithm 1): d_i <- d_i - eta_g alpha (d_i + w_i - w) after every step, starting
  from 0 in every round, or from the last d_i (``persistent``, as printed). The server averages
  w_i + d_i over the cohort.

``none`` leaves d and its term away. ``PAPER`` is the method as printed.

Nothing in :func:`train` is random: the batches are an argument, so that another implementation can
be given the same ones. Run a small example on random data:

    python examples/reference/fedtr.py
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Settings:
    """The names are those of the paper where it has one."""

    lr: float = 0.01
    drift_rule: Literal["accumulate", "descent", "none"] = "accumulate"
    alpha: float = 0.1  # of the term alpha/2 ||w_i + d_i - w||^2
    lambda_R: float = 1.0  # noqa: N815, of the pull to the centroids
    reduction: Literal["mean", "sum"] = "mean"  # of that pull, over batch and features
    eta_g: float = 0.01  # step size of d in descent
    persistent: bool = False  # descent goes on from the last round's d


PAPER = {"drift_rule": "descent", "alpha": 2.0, "reduction": "sum", "persistent": True}


def train(
    model: nn.Sequential,
    data: list[tuple[Tensor, Tensor]],
    classes: int,
    rounds: list[dict[int, Batches]],
    s: Settings,
) -> tuple[nn.Sequential, Tensor, list[float]]:
    """The trained model, the global centroids, and the mean loss of every round.

    ``data[k]`` is all that client k has; ``rounds[t][k]`` are the batches that it trains on in
    round t, for the clients of that round. The model's last child is its head.
    """
    model = copy.deepcopy(model)
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    drift = [dict(zero) for _ in data]  # d_k, kept by the clients
    sizes = [len(y) for _, y in data]
    centroids: Tensor | None = None
    known = torch.zeros(classes, dtype=torch.bool)
    history = []

    for cohort in rounds:
        w = {name: p.detach().clone() for name, p in model.named_parameters()}
        models, losses = {}, []
        sums: Tensor | float = 0.0
        counts = torch.zeros(classes, dtype=torch.long)

        for k, batches in cohort.items():
            local = copy.deepcopy(model).train()
            body, head = local[:-1], local[-1]
            optimizer = torch.optim.SGD(local.parameters(), lr=s.lr)
            if s.drift_rule == "descent" and not s.persistent:
                drift[k] = dict(zero)

            for x, y in batches:
                features = body(x).flatten(1)
                loss = F.cross_entropy(head(features), y)
                if centroids is not None:  # there are none in the first round
                    away = (features - centroids[y]) ** 2 * known[y][:, None]
                    loss = loss + s.lambda_R * (
                        away.mean() if s.reduction == "mean" else away.sum()
                    )
                if s.drift_rule != "none":
                    for name, p in local.named_parameters():
                        loss = loss + s.alpha / 2 * ((p + drift[k][name] - w[name]) ** 2).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if s.drift_rule == "descent":
                    for name, p in local.named_parameters():
                        d = drift[k][name]
                        drift[k][name] = d - s.eta_g * s.alpha * (d + p.detach() - w[name])

            if s.drift_rule == "accumulate":
                for name, p in local.named_parameters():
                    drift[k][name] = drift[k][name] + p.detach() - w[name]
            models[k] = local.state_dict()

            # class sums of the trained features, in evaluation mode (eq. 7)
            x, y = data[k]
            with torch.no_grad():
                features = body.eval()(x).flatten(1)
            own = F.one_hot(y, classes)
            sums = sums + own.to(features.dtype).T @ features
            counts = counts + own.sum(0)

        # weights by size (eq. 8)
        new = average([models[k] for k in cohort], [sizes[k] for k in cohort])
        if s.drift_rule == "accumulate":
            # over all clients; those that did not take part yet have d = 0
            for name in w:
                total_drift = sum(n * d[name] for n, d in zip(sizes, drift, strict=True))
                new[name] = new[name] + total_drift / sum(sizes)
        if s.drift_rule == "descent":
            total = sum(sizes[k] for k in cohort)
            for name in w:
                new[name] = new[name] + sum(sizes[k] * drift[k][name] for k in cohort) / total
        model.load_state_dict(new)

        # centroids by counts (eq. 9); a class that nobody had keeps its old one
        assert isinstance(sums, Tensor)
        fresh = sums / counts.clamp_min(1)[:, None]
        old = torch.zeros_like(fresh) if centroids is None else centroids
        centroids = torch.where(counts[:, None] > 0, fresh, old)
        known = known | (counts > 0)
        history.append(sum(losses) / len(losses))

    assert centroids is not None
    return model, centroids, history


def average(states: list[dict[str, Tensor]], sizes: list[int]) -> dict[str, Tensor]:
    """Mean by size of everything, BatchNorm's statistics included; counters are rounded."""
    share = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    mean = {}
    for name, first in states[0].items():
        value = torch.tensordot(share, torch.stack([state[name].double() for state in states]), 1)
        mean[name] = (value if first.is_floating_point() else value.round()).to(first.dtype)
    return mean


def main() -> None:
    """Four clients with two of four classes each, on points in the plane; two train per round."""
    torch.manual_seed(0)
    classes, batch = 4, 16
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    model.append(nn.Linear(16, classes))
    centres = 2 * torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    data = []
    for k in range(4):
        y = torch.tensor([k, (k + 1) % classes])[torch.randint(2, (40 + 20 * k,))]
        data.append((centres[y] + torch.randn(len(y), 2), y))

    def batches(k: int) -> Batches:
        x, y = data[k]
        rows = [torch.randint(len(y), (batch,)) for _ in range(5)]
        return [(x[i], y[i]) for i in rows]

    rounds = [{k: batches(k) for k in torch.randperm(4)[:2].tolist()} for _ in range(30)]
    model, _, history = train(model, data, classes, rounds, Settings(lr=0.1, alpha=1.0))
    for t, loss in enumerate(history):
        print(f"round {t:2d}  loss {loss:.4f}")
    y = torch.arange(classes).repeat(250)
    said = model.eval()(centres[y] + torch.randn(len(y), 2)).argmax(1)
    print(f"accuracy over all classes {100 * (said == y).float().mean().item():.1f} %")


if __name__ == "__main__":
    main()
