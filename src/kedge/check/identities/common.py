"""The standard pair of quadratics and its optimum, shared by many identities.

Most identities run on quadratic clients :math:`f_k(w) = h_k(w - a_k)^2/2`, where :math:`\\tau`
gradient steps from w give :math:`a_k + r_k(w - a_k)` with :math:`r_k = (1 - \\eta h_k)^\\tau`, so
that fixed points are known in closed form. The standard pair is h = (1, 10), a = (0, 1),
:math:`\\eta` = 0.05, :math:`\\tau` = 10.
"""

from __future__ import annotations

from kedge.check.problems import optimum, quadratics
from kedge.core.method import Method
from kedge.core.part import Part
from kedge.sim.simulation import Simulation

H, A, LR, STEPS = (1.0, 10.0), (0.0, 1.0), 0.05, 10
BEST = optimum(H, A)  # 10/11


def run_quadratics(method: Part | Method | str, rounds: int = 60) -> Simulation:
    """A simulation of the standard pair of quadratics, after ``rounds`` rounds."""
    run = quadratics(H, A, LR, STEPS).simulate(method)
    for _ in range(rounds):
        run.run_round()
    return run
