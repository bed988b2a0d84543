"""Figures of the documentation show what kedge has and computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tools.figures import drift, partitions
from tools.figures import round as one_round

from kedge.core.part import HOOKS

DOCS = Path(__file__).parents[2] / "docs" / "understand"


def test_every_hook_is_in_the_diagram(tmp_path: Path) -> None:
    assert sorted(one_round.drawn_hooks()) == sorted(HOOKS)
    one_round.draw(tmp_path)
    expected = (tmp_path / "round.svg").read_text(encoding="utf-8")
    assert (DOCS / "round.svg").read_text(encoding="utf-8") == expected, "python -m tools.figures"


def test_every_hook_is_in_the_table() -> None:
    rows = [line for line in (DOCS / "round.md").read_text().splitlines() if line.startswith("| `")]
    named = [word for row in rows for word in row.split("|")[1].split("`")[1::2]]
    assert sorted(named) == sorted(HOOKS)


def test_the_table_of_partitions_is_computed() -> None:
    assert partitions.table() in (DOCS / "partitions.md").read_text(), "python -m tools.figures"


def test_paths_of_the_figure_end_where_their_methods_settle() -> None:
    """SCAFFOLD at the optimum; FedAvg where the mean of the clients' local solutions is its start.

    K exact steps of a quadratic from w end at a + (I - lr H)^K (w - a).
    """
    positions, local = drift.trace("scaffold")
    assert np.linalg.norm(positions[-1] - drift.optimum()) < 1e-3
    positions, local = drift.trace("fedavg")
    shrink = [
        np.linalg.matrix_power(np.eye(2) - drift.LR * drift.hessian(k), drift.STEPS) for k in (0, 1)
    ]
    settled = sum((np.eye(2) - m) @ np.array(a) for m, a in zip(shrink, drift.OPTIMA, strict=True))
    settled = np.linalg.solve(sum(np.eye(2) - m for m in shrink), settled)
    assert np.allclose(positions[-1], settled, atol=1e-3)
    assert np.allclose(local[-1].mean(0)[-1], positions[-1], atol=1e-12)
