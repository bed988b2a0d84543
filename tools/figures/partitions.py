"""The five procedures that papers call Dirichlet(0.1), side by side, and a table of their skew."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tools.figures.style import CLIENTS, TEXT, settings

from kedge.data.partition import Partition, draw
from kedge.diagnostics.data.labels import earth_movers, effective_classes

ALPHA, CLIENT_COUNT, SEEDS = 0.1, 10, range(5)
LABELS = np.repeat(np.arange(10), 5000)  # as many samples of each class as CIFAR-10 has


class Procedure(NamedTuple):
    text: str
    used_by: str


PROCEDURES = (
    Procedure("class_dirichlet_capped", "MOON, FedCOG, FedImpro"),
    Procedure("client_dirichlet_balanced", "FedDyn, FedDC, FLBoost"),
    Procedure("client_dirichlet_sequential", "FedBR, MNIST and CIFAR-10"),
    Procedure("client_dirichlet_sequential(prior=ones)", "FedBR, CIFAR-100"),
    Procedure("paired_class_dirichlet", "FedTR"),
)


def text_of(procedure: Procedure) -> str:
    """The partition with its alpha."""
    name, _, options = procedure.text.rstrip(")").partition("(")
    return f"{name}({', '.join(filter(None, [f'alpha={ALPHA}', options]))})"


def drawn(procedure: Procedure, seed: int = 0) -> Partition:
    return draw(text_of(procedure), LABELS, CLIENT_COUNT, seed)


def table() -> str:
    """A table in Markdown: sizes, effective classes and label EMD, means over seeds."""
    rows = [
        "| partition | used by | smallest and largest client | effective classes | label EMD |",
        "|---|---|---|---|---|",
    ]
    for procedure in PROCEDURES:
        sizes, classes, distance = [], [], []
        for seed in SEEDS:
            partition = drawn(procedure, seed)
            sizes.append(partition.sizes)
            counts = partition.label_counts(LABELS)
            classes.append(effective_classes(counts).mean())
            distance.append(earth_movers(counts, counts.sum(0)).mean())
        smallest, largest = (round(float(f(sizes, axis=1).mean())) for f in (np.min, np.max))
        rows.append(
            f"| `{text_of(procedure)}` | {procedure.used_by} | {smallest:,} and {largest:,} | "
            f"{np.mean(classes):.1f} | {np.mean(distance):.2f} |"
        )
    return "\n".join(rows)


def draw_figure(folder: Path) -> None:
    """Write ``partitions.svg``."""
    from matplotlib import pyplot as plt

    with plt.rc_context(settings()):
        figure, panels = plt.subplots(1, 5, figsize=(9.6, 2.9), layout="constrained", sharey=True)
        for panel, procedure in zip(panels, PROCEDURES, strict=True):
            _panel(panel, procedure)
        panels[0].set_ylabel("class")
        figure.savefig(folder / "partitions.svg", transparent=True)
        plt.close(figure)


def _panel(panel: Any, procedure: Procedure) -> None:
    counts = drawn(procedure).label_counts(LABELS)  # [clients, classes]
    client, label = np.nonzero(counts)
    area = counts[client, label] / counts.max() * 60 + 0.5
    panel.scatter(client, label, s=area, color=CLIENTS[0], linewidths=0)
    name = procedure.text.replace("_dirichlet", "\n_dirichlet", 1).replace("(prior", "\n(prior")
    panel.set_title(name, fontsize=7.5, loc="left")
    panel.set_xlabel("client")
    panel.set_xticks([0, 5, 9])
    panel.set_yticks(range(10))
    panel.set_xlim(-0.8, 9.8)
    panel.set_ylim(-0.8, 9.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(width=0.5, length=2, colors=TEXT)
