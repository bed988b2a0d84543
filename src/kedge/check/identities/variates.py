"""Identities of the methods in parts/variates.py."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.check.identities.common import BEST, A, H, head, pair, run_quadratics
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import position
from kedge.parts.variates import SCAFFOLD


@oracle(SCAFFOLD)
def control_variates_at_the_optimum(cls: type[SCAFFOLD]) -> Iterator[Claim]:
    """At the optimum c_k is the local gradient and c is zero, so no client moves."""
    run = run_quadratics(cls())
    yield Claim("w at the fixed point", BEST, position(run))
    yield Claim("c at the optimum", 0.0, head(run.server.slots[cls.name]))
    for k in range(2):
        got = float(run.store.rows[cls.name]["head.weight"][k])
        yield Claim(f"c_{k} is the gradient", H[k] * (BEST - A[k]), got)


@oracle(SCAFFOLD)
def one_full_batch_step(cls: type[SCAFFOLD]) -> Iterator[Claim]:
    """From c = c_k = 0, y = x - lr g gives c_k+ = (x - y)/lr = g = h (0 - a): 0 and -10; c = -10/2.
    With a flipped sign of x - y, c_1 is +10."""
    run = pair().trained(cls())
    c_k = run.store.rows[cls.name]["head.weight"].flatten()
    yield Claim("c_0 is the gradient", 0.0, float(c_k[0]))
    yield Claim("c_1 is the gradient", -10.0, float(c_k[1]))
    yield Claim("c is their mean", -5.0, head(run.server.slots[cls.name]))


@oracle(SCAFFOLD)
def partial_participation(cls: type[SCAFFOLD]) -> Iterator[Claim]:
    """With one client of two, c changes by 1/N of the client's change: only client 1 takes part, so
    c = -10/2."""
    run = pair().trained(cls(), clients=[1])
    yield Claim("c changes by 1/N, not 1/|S|", -5.0, head(run.server.slots[cls.name]))
