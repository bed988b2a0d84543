"""Drift of a real network on digits: how far local models spread, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tools.figures.style import axes_style, settings

import kedge

PARTITIONS = ("iid", "dirichlet(1)", "dirichlet(0.1)")
COLOURS = ("#747c87", "#2f8fd0", "#e0701c")
SETTINGS: dict[str, Any] = {
    "data": "digits", "clients": 10, "rounds": 30, "seeds": (0, 1, 2), "epochs": 5, "lr": 0.05,
    "engine": "vector", "device": "cpu", "threads": 1,
}  # fmt: skip


def run(partition: str) -> tuple[np.ndarray, np.ndarray]:
    """Divergence and accuracy, ``[seeds, rounds]``."""
    result = kedge.run("fedavg", partition=partition, **SETTINGS)
    records = result.records
    return tuple(  # type: ignore[return-value]
        np.array([[record[key] for record in seed] for seed in records])
        for key in ("divergence", "accuracy")
    )


def draw(folder: Path) -> None:
    """Write ``drift-digits.svg``."""
    from matplotlib import pyplot as plt

    with plt.rc_context(settings()):
        figure, panels = plt.subplots(1, 2, figsize=(8.2, 3.0), layout="constrained")
        for partition, colour in zip(PARTITIONS, COLOURS, strict=True):
            for panel, values in zip(panels, run(partition), strict=True):
                rounds, mean, sd = np.arange(1, values.shape[1] + 1), values.mean(0), values.std(0)
                panel.plot(rounds, mean, color=colour, linewidth=1.5, label=partition)
                panel.fill_between(rounds, mean - sd, mean + sd, color=colour, alpha=0.15, lw=0)
        for panel, title in zip(
            panels, ("spread of the clients' updates", "accuracy of the global model in %"),
            strict=True,
        ):  # fmt: skip
            panel.set_title(title, loc="left")
            panel.set_xlabel("round")
            axes_style(panel)
        panels[1].legend(frameon=False, loc="lower right")
        figure.savefig(folder / "drift-digits.svg", transparent=True)
        plt.close(figure)
