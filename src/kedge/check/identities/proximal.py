"""Identities of FedAvg and of the methods in parts/proximal.py."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.check.identities.common import BEST, LR, STEPS, A, H, pair, run_quadratics
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import fedavg_point, minimum, position, quadratics
from kedge.parts.proximal import FedDyn, FedProx, FedSAM


@oracle(None)
def fixed_point_on_two_quadratics(cls: None) -> Iterator[Claim]:
    """w = mean_k [a_k + r_k (w - a_k)] gives w = sum (1-r_k) a_k / sum (1-r_k) = 0.71344, not
    10/11."""
    expected = fedavg_point(H, A, LR, STEPS)
    yield Claim("w, away from the optimum 0.90909", expected, position(run_quadratics("fedavg")))


@oracle(FedProx)
def fixed_point_with_the_proximal_term(cls: type[FedProx]) -> Iterator[Claim]:
    """A step is v - lr [h (v - a) + mu (v - w)], with its own fixed point c = (h a + mu w)/(h +
    mu), so v_tau = c + (w - c)(1 - lr (h + mu))^tau, and mean v_tau = w gives w = sum s_k a_k / sum
    s_k with s_k = (1 - (1 - lr (h_k + mu))^tau) h_k/(h_k + mu). A wrong sign, a missing 1/2 or an
    unsquared norm give another point."""
    mu = 1.0
    s = [(1 - (1 - LR * (h + mu)) ** STEPS) * h / (h + mu) for h in H]
    yield Claim("w at mu = 1", minimum(s, A), position(run_quadratics(cls(mu=mu), 200)))


@oracle(FedDyn)
def converges_to_the_optimum(cls: type[FedDyn]) -> Iterator[Claim]:
    yield Claim("w at the fixed point", BEST, position(run_quadratics(cls(alpha=1.0))), 1e-6)


@oracle(FedDyn)
def first_order_condition(cls: type[FedDyn]) -> Iterator[Claim]:
    """At a local minimum grad f_k(w_k) - g_k + alpha (w_k - w) = 0, hence g_k+ = grad f_k(w_k)."""
    alpha = 1.0
    run = pair(300).trained(cls(alpha=alpha))
    local = H[1] * A[1] / (H[1] + alpha)  # argmin of h (v - a)^2/2 + alpha v^2/2
    got = float(run.store.rows[cls.name]["head.weight"][1])
    yield Claim("g_k = gradient at the local minimum", H[1] * (local - A[1]), got)


@oracle(FedSAM)
def one_step_by_hand(cls: type[FedSAM]) -> Iterator[Claim]:
    """f = 10 (w - 1)^2/2 at w = 0: g = -10, the worst point is -rho, its gradient -10 (1 + rho), so
    one step of 0.05 leads to 0.5 (1 + rho)."""
    run = quadratics((10.0,), (1.0,), LR, steps=1).trained(cls(rho=0.2))
    yield Claim("w after one step at rho = 0.2", 0.6, position(run))
