"""Proximal terms beside leaves that stay on the client."""

from __future__ import annotations

import pytest

from kedge.check.problems import images, step_view
from kedge.core.method import parse
from kedge.core.tree import Params


@pytest.mark.parametrize("name", ["fedprox(mu=0.5)", "feddyn(alpha=0.5)"])
def test_leaves_that_stay_on_the_client_are_not_pulled(name: str) -> None:
    """All leaves are moved by 1, so the squared distance is the number of values that travel."""
    part = parse(name).parts[0]
    run = images().simulate(f"fedper + {name}")
    v, batch = step_view(run, 0, part)
    moved: Params = {n: w + 1 for n, w in v.anchor.params.items()}
    body = sum(w.numel() for n, w in moved.items() if not n.startswith("head."))
    assert 0 < body < sum(w.numel() for w in moved.values())
    out = v.forward(moved, batch.x)
    assert float(part.term(v, moved, batch, out)) == pytest.approx(0.25 * body, rel=1e-12)
