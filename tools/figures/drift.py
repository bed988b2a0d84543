"""Client drift on two quadratic clients in the plane: where local steps go, and where a run ends.

A part records the path. It has four hooks and no effect: ``prepare`` makes an empty list of
positions, ``observe`` writes the position after every step into it, ``reply`` uploads the list, and
``server_step`` keeps the uploads of the round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.figures.style import CLIENTS, GLOBAL, axes_style, settings
from torch import Tensor, nn

import kedge
from kedge.core.task import make_task

STEPS, LR, ROUNDS = 12, 0.08, 40
#: Curvatures along the axes of each client's loss, rotation of these axes, and its optimum.
CURVATURES = ((8.0, 1.0), (1.0, 4.0))
ANGLES = (math.radians(20), math.radians(-10))
OPTIMA = ((-1.2, 0.9), (1.3, -0.4))


@dataclass(frozen=True)
class Trace(kedge.Part):
    """Upload the position after every local step."""

    name = "path"
    needs_clients = True

    def server_init(self, spec: kedge.Spec) -> Tensor:
        return torch.zeros(spec.num_clients, STEPS, 2, dtype=spec.dtype)

    def prepare(self, v: kedge.View) -> Tensor:
        return torch.zeros(STEPS, 2, dtype=v.spec.dtype)

    def observe(self, v: kedge.View, params: Any, batch: Any, out: Any) -> Tensor:
        here = (torch.arange(STEPS) == v.step)[:, None]
        return torch.where(here, params["head.weight"], v.local)

    def reply(self, v: kedge.View, weights: kedge.Weights) -> tuple[Any, kedge.Stack]:
        return {}, kedge.Stack(v.local)

    def server_step(self, r: kedge.Round, weights: kedge.Weights) -> tuple[Any, Tensor]:
        return weights, r.uploads


def hessian(client: int) -> np.ndarray:
    turn = ANGLES[client]
    axes = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    return axes @ np.diag(CURVATURES[client]) @ axes.T


def federation() -> kedge.Federation:
    """Clients with the losses (w - a)' H (w - a) / 2, as linear regression on two samples each."""
    rows, targets = [], []
    for client, optimum in enumerate(OPTIMA):
        root = np.linalg.cholesky(hessian(client)).T  # H = root' root
        rows.append(root)
        targets.append(root @ np.array(optimum))
    x, y = torch.tensor(np.concatenate(rows)), torch.tensor(np.concatenate(targets))
    clients = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    return kedge.Federation(x, y, clients, make_task("regression", 1), dtype=torch.float64)


def trace(method: str) -> tuple[np.ndarray, np.ndarray]:
    """Global positions ``[ROUNDS + 1, 2]`` and local ones ``[ROUNDS, clients, STEPS, 2]``."""
    net = nn.Sequential()
    net.add_module("head", nn.Linear(2, 1, bias=False))
    nn.init.constant_(net.get_submodule("head").weight, 0.0)  # type: ignore[arg-type]
    with torch.no_grad():
        net.get_submodule("head").weight.copy_(torch.tensor([[-0.4, -1.3]]))  # type: ignore[operator]
    simulation = kedge.Simulation(
        federation(), kedge.Model(net), kedge.parse(method) + Trace(), optim=kedge.SGD(lr=LR),
        work=kedge.LocalWork(batch=2, steps=STEPS), engine="loop",
    )  # fmt: skip
    positions = [simulation.weights.params["head.weight"][0].numpy().copy()]
    local = []
    for _ in range(ROUNDS):
        simulation.run_round()
        local.append(simulation.session.server.slots["path"].numpy().copy())
        positions.append(simulation.weights.params["head.weight"][0].numpy().copy())
    return np.array(positions), np.array(local)


def optimum() -> np.ndarray:
    total = hessian(0) + hessian(1)
    pulled = hessian(0) @ np.array(OPTIMA[0]) + hessian(1) @ np.array(OPTIMA[1])
    return np.linalg.solve(total, pulled)


def draw(folder: Path) -> None:
    """Write ``drift.svg``."""
    from matplotlib import pyplot as plt

    with plt.rc_context(settings()):
        figure, panels = plt.subplots(1, 2, figsize=(8.2, 3.9), layout="constrained", sharey=True)
        for panel, method, title in zip(
            panels, ("fedavg", "scaffold"), ("FedAvg", "SCAFFOLD"), strict=True
        ):
            _panel(panel, method, title)
        figure.savefig(folder / "drift.svg", transparent=True)
        plt.close(figure)


def _panel(panel: Any, method: str, title: str) -> None:
    grid = np.stack(np.meshgrid(np.linspace(-2, 2.1, 160), np.linspace(-1.7, 1.6, 160)), -1)
    for client, (target, colour) in enumerate(zip(OPTIMA, CLIENTS, strict=True)):
        away = grid - np.array(target)
        loss = np.einsum("...i,ij,...j->...", away, hessian(client), away) / 2
        panel.contour(
            grid[..., 0], grid[..., 1], loss, levels=[0.1, 0.4, 0.9, 1.6, 2.5],
            colors=colour, linewidths=0.6, alpha=0.35,
        )  # fmt: skip
        panel.plot(
            *target, "x", color=colour, markersize=6, label=f"optimum of client {client + 1}"
        )
    positions, local = trace(method)
    for round in (0, 1, 2, ROUNDS - 1):
        for client, colour in enumerate(CLIENTS):
            path = np.concatenate([positions[round][None], local[round, client]])
            panel.plot(path[:, 0], path[:, 1], "-", color=colour, linewidth=1.2)
            panel.plot(path[1:, 0], path[1:, 1], ".", color=colour, markersize=2.5)
    panel.plot(positions[:, 0], positions[:, 1], "o-", color=GLOBAL, markersize=3, linewidth=1,
               label="global model")  # fmt: skip
    panel.plot(*optimum(), "*", color="#009E73", markersize=13, label="optimum of all", zorder=5)
    gap = float(np.linalg.norm(positions[-1] - optimum()))
    panel.set_title(f"{title}: ends {gap:.2f} from the optimum", loc="left")
    panel.set_aspect("equal")
    axes_style(panel)
    if method == "fedavg":
        panel.legend(frameon=False, loc="lower right", fontsize=7)
