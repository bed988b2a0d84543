"""Curves of a table's rows: the mean over seeds, thin lines for single seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.results.facts import Facts

from kedge.report.figures import COLOURS

WINDOW = 0.05  # of the tests of a run, smoothed over


def draw_curves(of: Facts, path: Path, rows: list[str] | None = None) -> None:
    """Write an SVG that is the same, byte for byte, for the same records."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings: Any = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "kedge"}
    with plt.rc_context(settings):
        fig, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
        names = [name for name in rows or of.records if of.records.get(name)]
        for i, name in enumerate(names):
            colour, style = COLOURS[i % len(COLOURS)], "-" if i < len(COLOURS) else "--"
            sums: dict[int, list[float]] = {}
            counted = of.counted(name)
            for seed, record in of.records[name].items():
                points = [(r, v) for r, v, _ in record.curve if v is not None]
                axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.5, alpha=0.25)
                if seed not in counted:
                    continue
                for r, v in points:
                    sums.setdefault(r, []).append(v)
            seeds = max(map(len, sums.values()))
            mean = [(r, sum(v) / len(v)) for r, v in sorted(sums.items()) if len(v) == seeds]
            width = max(1, round(WINDOW * len(mean)))
            smooth = [
                (r, sum(v for _, v in mean[max(0, j + 1 - width) : j + 1]) / min(j + 1, width))
                for j, (r, _) in enumerate(mean)
            ]
            axes.plot(*zip(*smooth, strict=True), style, color=colour, linewidth=1.7, label=name)
        axes.set_xlabel("round")
        axes.set_ylabel(f"test {of.runs[0].metric} (%)")
        axes.grid(alpha=0.25, linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        fig.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(fig)
