"""Identities of the methods in parts/release.py.

One step of 1/20 on 5 (w - a)^2 from w = 0 makes an update of exactly a/2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kedge.check.identities.common import close, head, moved, updating
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import DOUBLE, Problem, images, linear, position, quadratics
from kedge.core import rng, tree
from kedge.core.method import Method, parse
from kedge.core.part import Part, Sum
from kedge.core.round import Round
from kedge.core.tree import Tree, Weights
from kedge.core.view import View
from kedge.parts.release import CentralGauss, Clip, Gauss


class _Four(Part):
    """Uploads 4."""

    name = "four"

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"n": Sum(torch.full_like(v.info.num_examples, 4))}

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        return weights, dict(r.uploads)


class _FourOfEach(_Four):
    """Counts 4 of each sample."""

    name = "four"
    counted = ("n",)

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"n": Sum(4 * v.info.num_examples)}


@oracle(Clip)
def updates_by_hand(cls: type[Clip]) -> Iterator[Claim]:
    """An update of 3 becomes 1, one of -3 becomes -1, one of 1/2 stays; the mean of 3 and 1/2 is
    3/4, where the clipped mean would be 1."""
    cases = (((3.0,), 1.0, 1.0), ((-3.0,), 1.0, -1.0), ((3.0,), 5.0, 3.0), ((3.0, 0.5), 1.0, 0.75))
    for values, norm, expected in cases:
        got = position(_halves(values).trained(cls(norm)))
        yield Claim(f"w for updates {values}, S = {norm:g}", expected, got)


@oracle(Clip)
def all_leaves_are_one_vector(cls: type[Clip]) -> Iterator[Claim]:
    """The error (3/4 w + b - 4)^2 has the gradient (-6, -8) at 0; a step of 1/2 is (3, 4), of norm
    5. Detects a norm per leaf, which would give (1, 1)."""
    run = _two_leaves().trained(cls(1.0))
    yield Claim("weight", 0.6, float(run.weights.params["head.weight"]))
    yield Claim("bias", 0.8, float(run.weights.params["head.bias"]))


@oracle(Clip)
def uploads_belong_to_the_vector(cls: type[Clip]) -> Iterator[Claim]:
    """A gradient of -4 and a step of 3/4 make an update of 3, and SCAFFOLD uploads -4: together 5.
    The client's own c_k does not leave, so it stays. Detects an update that is clipped alone."""
    run = quadratics((1.0,), (4.0,), 0.75, steps=1).trained(_beside("scaffold", cls(1.0)))
    yield Claim("w", 0.6, position(run))
    yield Claim("c", -0.8, head(run.server.slots["scaffold"]))
    yield Claim("c_k", -4.0, head(run.store.rows["scaffold"]))


@oracle(Clip)
def counts_and_contributions_have_units(cls: type[Clip]) -> Iterator[Claim]:
    """An update of 3 beside an upload of 4: of 5 in norm, also if 4 samples are counted for each of
    the client's five. FedNova contributes n times update and a_k = 1: for an update of 2, that is
    (2, 2, 1), of norm 3, and 1/3 of each makes w = (2/3)(1/3)."""
    for n, part in ((1, _Four()), (5, _FourOfEach())):
        run = _halves((3.0,), (n,)).trained(Method((part, cls(1.0))))
        yield Claim(f"w beside an upload of {4 * n}", 0.6, position(run))
        yield Claim(f"an upload of {4 * n}", 0.8 * n, float(run.server.slots["four"]["n"]))
    run = _halves((2.0,), (5,)).trained(_beside("fednova", cls(1.0)))
    yield Claim("w beside a contribution", 2 / 9, position(run))


@oracle(Clip)
def statistics_are_clipped_and_counters_are_not(cls: type[Clip]) -> Iterator[Claim]:
    """On a network with BatchNorm one client's update, its averaged statistics included, is
    FedAvg's times S over its norm. The counter of batches is FedAvg's."""
    problem = images(sizes=(5,), norm="bn")
    moves = [moved(problem.simulate(method)) for method in ("fedavg", cls(0.1))]
    counter, old, new = "stage1.1.num_batches_tracked", *moves
    counts = [float(move.buffers.pop(counter)) for move in moves]
    factor = 0.1 / float(tree.sq_norm(old).sqrt())
    yield Claim("the norm is above S", 1.0, float(factor < 1), 0.0)
    yield close("error of the update", new, tree.scale(old, factor))
    yield Claim("batches", counts[0], counts[1], 0.0)


@oracle(Gauss)
def noise_by_its_keys(cls: type[Gauss]) -> Iterator[Claim]:
    """Noise of 1/10 differs from none by 1/10 of the normals of (seed, round, client, part, hook,
    leaf), weighted as the updates are; after ``clip`` the noise is not clipped."""
    normals = [[_drawn("clients", t, k, "gauss", "release", 0) for k in (0, 1)] for t in (0, 1)]
    noise = [(z[0] + 3 * z[1]) / 4 for z in normals]
    clean, noisy = (_halves((3.0, 1.0), (1, 3)).simulate(cls(std)) for std in (0.0, 0.1))
    for run in (clean, noisy):
        run.run_round()
    yield Claim("noise of the first round", 0.1 * noise[0], position(noisy) - position(clean))
    for run in (clean, noisy):
        run.run_round()
    # a step halves the distance to the optimum
    expected = 0.1 * (noise[0] / 2 + noise[1])
    yield Claim("noise after the second round", expected, position(noisy) - position(clean))
    run = _halves((3.0, 1.0), (1, 3)).trained(_beside("clip(norm=1)", cls(0.1)))
    yield Claim("noise after clip", 1 + 0.1 * noise[0], position(run))


@oracle(Gauss)
def every_leaf_has_noise_of_its_own(cls: type[Gauss]) -> Iterator[Claim]:
    """A weight, a bias and an upload of five samples, which is measured in samples."""
    run = _two_leaves().trained(Method((_FourOfEach(), cls(0.1))))
    z = [_drawn("clients", 0, 0, "gauss", "release", i) for i in range(3)]
    yield Claim("weight", 3 + 0.1 * z[0], float(run.weights.params["head.weight"]))
    yield Claim("bias", 4 + 0.1 * z[1], float(run.weights.params["head.bias"]))
    yield Claim("upload", 20 + 0.5 * z[2], float(run.server.slots["four"]["n"]))


@oracle(CentralGauss)
def noise_on_the_sum(cls: type[CentralGauss]) -> Iterator[Claim]:
    """The sum of 1 * 3 and 3 * 1 with noise 1/10 over W = 4, or over half of it if four clients are
    expected in place of two. Detects noise on the mean, and on every client."""
    z = _drawn("server", 0, "receive", "centralgauss", 1)  # leaf 0 is the sum of the weights
    for clients, weight in ((0.0, 4.0), (2.0, 4.0), (4.0, 8.0)):
        run = _halves((3.0, 1.0), (1, 3)).trained(cls(0.1, clients))
        yield Claim(f"w with {clients:g} expected", (6 + 0.1 * z) / weight, position(run))


@oracle(CentralGauss)
def noise_on_uploads_of_the_round(cls: type[CentralGauss]) -> Iterator[Claim]:
    """An upload of 4 of each of two clients is 8 in sum, with noise once."""
    run = _halves((3.0, 1.0), (1, 3)).trained(Method((_Four(), cls(0.1))))
    z = _drawn("server", 0, "receive", "centralgauss", 3)  # after weight, update and its square
    yield Claim("sum of the uploads", 8 + 0.1 * z, float(run.server.slots["four"]["n"]))


def _halves(updates: tuple[float, ...], copies: tuple[int, ...] | None = None) -> Problem:
    """Clients whose first updates are these; each takes one step."""
    return updating(updates, 10.0, 0.05, copies)


def _two_leaves() -> Problem:
    """One client of five equal samples whose first update is (3, 4)."""
    x, y = torch.full((5, 1), 0.75), torch.full((5,), 4.0, dtype=DOUBLE)
    zero = torch.zeros(1, 1)
    return linear(x, y, [5], zero, zero[0], task="regression", batch=5, lr=0.5)


def _beside(method: str, part: Part) -> Method:
    return Method((*parse(method).parts, part))


def _drawn(*address: str | int) -> float:
    """The normal number of a key of the run with seed 0."""
    key: Tensor = rng.key(0)
    for item in address:
        key = rng.fold(key, item)
    return float(rng.normal(key, (), DOUBLE))
