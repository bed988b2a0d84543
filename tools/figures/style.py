"""Colours and fonts of the figures; they are readable on light and on dark pages."""

from __future__ import annotations

from typing import Any

TEXT = "#747c87"
CLIENTS = ("#2f8fd0", "#e0701c")
GLOBAL = "#747c87"


def settings() -> dict[str, Any]:
    """Settings of matplotlib for a figure of the documentation."""
    import matplotlib

    matplotlib.use("Agg")
    return {
        "font.size": 8.5, "axes.titlesize": 9, "text.color": TEXT, "axes.labelcolor": TEXT,
        "axes.edgecolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT, "axes.linewidth": 0.6,
        "axes.titlecolor": TEXT, "svg.fonttype": "none", "svg.hashsalt": "kedge",
        "font.family": "sans-serif", "legend.labelcolor": TEXT,
    }  # fmt: skip


def axes_style(axes: Any) -> None:
    """Leave out what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(width=0.5, length=2.5)
