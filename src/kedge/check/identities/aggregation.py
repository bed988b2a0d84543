"""Identities of the methods in parts/aggregation.py."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.check.identities.common import LR, H, after_steps, run_quadratics
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import position, quadratics
from kedge.core.optim import SGD
from kedge.parts.aggregation import FedAvgM, FedNova
from kedge.parts.proximal import FedProx


@oracle(FedNova)
def equal_steps_equal_fedavg(cls: type[FedNova]) -> Iterator[Claim]:
    plain, own = (position(run_quadratics(method)) for method in ("fedavg", cls()))
    yield Claim("fixed point of FedAvg", plain, own)


@oracle(FedNova)
def unequal_steps_by_hand(cls: type[FedNova]) -> Iterator[Claim]:
    """h = (1, 10), a = (1, 1), 1 and 3 steps, p = (1/4, 3/4), from w = 0: the updates are 0.05 and
    1 - 0.5^3 = 0.875, so w = (1/4 + 3 * 3/4) (0.05/4 + 0.875/3 * 3/4) = 2.5 * 0.23125 =
    0.578125."""
    run = quadratics(H, (1.0, 1.0), LR, steps=None, copies=(1, 3)).trained(cls())
    yield Claim("w after one round", 0.578125, position(run))


@oracle(FedNova)
def proximal_steps_by_hand(cls: type[FedNova]) -> Iterator[Claim]:
    """As above beside FedProx at mu = 2: client 1 steps v <- 0.4 v + 0.5, to 0.78, and a = (1, 1 +
    0.9 + 0.9^2), as the pull takes lr mu = 0.1 of every step. Detects a = tau."""
    run = quadratics(H, (1.0, 1.0), LR, steps=None, copies=(1, 3)).trained(cls() + FedProx(mu=2.0))
    a = (1.0, 2.71)
    expected = (a[0] / 4 + a[1] * 3 / 4) * (0.05 / a[0] / 4 + 0.78 / a[1] * 3 / 4)
    yield Claim("w after one round", expected, position(run))


@oracle(FedNova)
def flat_losses_move_by_their_gradients(cls: type[FedNova]) -> Iterator[Claim]:
    """Clients with h = 1e-9 and a = (1e9, -3e9) have the gradients -1 and 3 anywhere near 0. For
    any mu, momentum and numbers of steps, normalised updates are then the gradients: w = -lr
    (sum p_k a_k)(3/4 * 3 - 1/4), and sum p_k a_k is FedProx's update at equal gradients 1."""
    for momentum, nesterov in ((0.0, False), (0.5, False), (0.5, True)):
        optim = SGD(lr=LR, momentum=momentum, nesterov=nesterov)
        moved = []
        for optima in ((1e9, -3e9), (-1e9, -1e9)):
            problem = quadratics((1e-9, 1e-9), optima, LR, None, (1, 3), optim)
            moved.append(position(problem.trained(cls() + FedProx(mu=2.0))))
        what = f"w for momentum {momentum:g}{', Nesterov' * nesterov}"
        yield Claim(what, moved[1] * (3 / 4 * 3 - 1 / 4), moved[0], 1e-7)


@oracle(FedAvgM)
def momentum_by_hand(cls: type[FedAvgM]) -> Iterator[Claim]:
    """FedAvg's update is d(w) = mean_k (1 - r_k)(a_k - w); momentum iterates u = beta u + d, w +=
    lr (d + beta u) with Nesterov's variant, the default, or w += lr u. Detects Nesterov with the
    old u, and a learning rate that is ignored or enters u."""
    beta, lr = 0.5, 0.8
    for options in ({}, {"nesterov": True}, {"nesterov": False}):
        w, u = 0.0, 0.0
        for _ in range(4):
            d = sum(after_steps(k, w) - w for k in range(2)) / 2
            u = beta * u + d
            w += lr * (d + beta * u if options.get("nesterov", True) else u)
        got = position(run_quadratics(cls(beta=beta, lr=lr, **options), 4))
        yield Claim(f"w after four rounds at beta = 0.5 with {options}", w, got)
