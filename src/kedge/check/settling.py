"""Where a method settles on two quadratics, beside the point where FedAvg settles."""

from __future__ import annotations

import math

from kedge.check.problems import optimum, position, quadratics
from kedge.core.part import Part
from kedge.errors import KedgeError

CURVATURES, OPTIMA, LR, STEPS = (1.0, 10.0), (0.0, 1.0), 0.08, 5
ROUNDS, LAST = 120, 30  # a method settles at its mean position of the last rounds
SLACK = 1e-4  # in w: what is left of the first rounds


def fedavg_point() -> float:
    r"""Where FedAvg settles: :math:`\sum_k (1 - (1 - \eta h_k)^T)(w - a_k) = 0`.

    >>> round(fedavg_point(), 6)
    0.745697
    """
    pull = [1 - (1 - LR * h) ** STEPS for h in CURVATURES]
    return sum(p * a for p, a in zip(pull, OPTIMA, strict=True)) / sum(pull)


def quadratics_fault(part: Part) -> str:
    """Why the method is not stable on two quadratics; empty if it is.

    A mean over clients and steps of any attraction to the clients' optima lies between these. A
    correction, a penalty or a server optimizer with the right sign settles no farther from the
    optimum of the mean than FedAvg, but for what the part declares as ``strays``. A leaf that stays
    on the clients does not move on the server.
    """
    run, path = quadratics(CURVATURES, OPTIMA, LR, STEPS).simulate(part), []
    for round in range(ROUNDS):
        try:
            run.run_round()
        except KedgeError as error:
            return f"round {round} on two quadratics: {error}"
        path.append(position(run))
    settled, best, fedavg = sum(path[-LAST:]) / LAST, optimum(CURVATURES, OPTIMA), fedavg_point()
    if "head.weight" in run.bound.private_params:
        return f"a private leaf moves on the server, to {settled:.3g}" if any(path) else ""
    is_between = min(OPTIMA) <= settled <= max(OPTIMA)
    if is_between and abs(settled - best) <= abs(fedavg - best) + part.strays + SLACK:
        return ""
    advice = "A sign is likely to be wrong"
    if is_between:
        beyond = abs(settled - best) - abs(fedavg - best)
        advice += (
            "; if the objective is another one, declare how much farther it settles: "
            f"strays = {_rounded_up(beyond)}"
        )
    return (
        f"on two quadratics with optima at {OPTIMA[0]:g} and {OPTIMA[1]:g}, w settles at "
        f"{settled:.6g}; FedAvg settles at {fedavg:.6g}, and the optimum of the mean is "
        f"{best:.6g}. {advice}"
    )


def _rounded_up(value: float) -> str:
    """A number of one digit that is at least as large.

    >>> _rounded_up(0.00345), _rounded_up(0.3)
    ('0.004', '0.3')
    """
    unit = 10.0 ** math.floor(math.log10(max(value, SLACK)))
    return f"{unit * math.ceil(round(value / unit, 6)):.1g}"
