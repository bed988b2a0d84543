"""Identities of the methods in parts/robust.py.

One step of 1/4 on (w - a)^2 makes an update of exactly a/2, so that hand-made updates, ties
included, come from quadratic clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import torch
from torch import Tensor

from kedge.check.identities.common import close, updating
from kedge.check.oracles import Claim, oracle
from kedge.check.problems import images, position
from kedge.core import tree
from kedge.core.part import Part
from kedge.core.tree import Weights
from kedge.parts.robust import Krum, Median, TrimmedMean


@oracle(Krum)
def update_nearest_to_its_neighbours(cls: type[Krum]) -> Iterator[Claim]:
    """Updates 10, 12, 13, 20 and 1000 with f = 1, so 2 neighbours: the scores are 4 + 9, 4 + 1, 1 +
    9, 49 + 64, huge. Client sizes do not matter."""
    values = (10.0, 12.0, 13.0, 20.0, 1000.0)
    yield Claim("one outlier", 12.0, _after(cls(byzantine=1), values))
    got = _after(cls(byzantine=1), values, copies=(1, 1, 5, 1, 9))
    yield Claim("unequal client sizes", 12.0, got)


@oracle(Krum)
def number_of_neighbours(cls: type[Krum]) -> Iterator[Claim]:
    """Updates 2, 13, 16, 17, 21 and 30. f = 0, 4 neighbours: the scores of the middle four are 210,
    1 + 9 + 25 + 196 = 231, 1 + 16 + 16 + 169 = 202 and 16 + 25 + 64 + 81 = 186, so 21 is chosen. f
    = 1, 3 neighbours: 89, 35, 33 and 105, so 17 is. Two neighbours and five would choose 16.
    Detects n - f - 1 and n - f - 3 neighbours, the update itself counted as one of them, and
    distances that are not squared."""
    values = (2.0, 13.0, 16.0, 17.0, 21.0, 30.0)
    yield Claim("f = 0", 21.0, _after(cls(byzantine=0), values))
    yield Claim("f = 1", 17.0, _after(cls(byzantine=1), values))


@oracle(Krum)
def ties_go_to_the_lowest_client(cls: type[Krum]) -> Iterator[Claim]:
    """Updates 0, 1, 3, 4 and 100 with 2 neighbours: 1 and 3 both have score 5, and 1 belongs to the
    lower client number, in any order of the clients. With three clients, two are each other's
    nearest neighbour and tie."""
    values = (0.0, 1.0, 3.0, 4.0, 100.0)
    for order in ([0, 1, 2, 3, 4], [4, 2, 1, 3, 0], [2, 1, 0, 4, 3]):
        got = _after(cls(byzantine=1), values, order=order)
        yield Claim(f"five clients in the order {order}", 1.0, got)
    for triple in permutations(range(3)):
        got = _after(cls(byzantine=0), (5.0, 8.0, 6.0), order=list(triple))
        yield Claim(f"three clients in the order {list(triple)}", 5.0, got)


@oracle(Krum)
def multi_krum_averages_the_best(cls: type[Krum]) -> Iterator[Claim]:
    """Of 10, 12, 13, 20 and 1000 the best three are 12, 13 and 10; client sizes do not matter.
    Selecting all gives the plain mean."""
    values = (10.0, 12.0, 13.0, 20.0, 1000.0)
    got = _after(cls(byzantine=1, select=3), values, copies=(1, 2, 5, 1, 9))
    yield Claim("mean of the best three", 35 / 3, got)
    yield Claim("mean of all", 211.0, _after(cls(byzantine=1, select=5), values))


@oracle(Krum)
def distances_over_all_parameters(cls: type[Krum]) -> Iterator[Claim]:
    """On a network, by brute force over flat vectors; parameters and BatchNorm statistics are the
    selected client's."""
    clients, flat = _network()
    scores = []
    for i in range(5):
        gaps = sorted(float(((flat[i] - flat[j]) ** 2).sum()) for j in range(5) if j != i)
        scores.append(sum(gaps[:2]))
    best = min(range(5), key=lambda i: scores[i])
    yield from _same(cls(byzantine=1), tree.take(clients, best))


@oracle(TrimmedMean)
def extremes_are_trimmed(cls: type[TrimmedMean]) -> Iterator[Claim]:
    """Of -500, 1, 2, 6 and 1000 the middle three have the mean 3, the middle one is 2; neither
    client sizes nor order matter. Without trimming the result is the plain mean."""
    values, sizes = (1000.0, 1.0, 6.0, 2.0, -500.0), (7, 1, 1, 3, 1)
    one = cls(byzantine=1)
    yield Claim("one trimmed at each end", 3.0, _after(one, values))
    yield Claim("unequal client sizes", 3.0, _after(one, values, copies=sizes))
    yield Claim("another client order", 3.0, _after(one, values, order=[2, 4, 0, 3, 1]))
    yield Claim("two trimmed at each end", 2.0, _after(cls(byzantine=2), values))
    yield Claim("none trimmed", 101.8, _after(cls(byzantine=0), values))


@oracle(TrimmedMean)
def extremes_are_trimmed_per_coordinate(cls: type[TrimmedMean]) -> Iterator[Claim]:
    """On a network: (sum - smallest - largest) / 3 per coordinate, for parameters and BatchNorm
    statistics."""
    clients, _ = _network()
    middle = tree.map(lambda x: (x.sum(0) - x.amin(0) - x.amax(0)) / 3, clients)
    yield from _same(cls(byzantine=1), middle)


@oracle(Median)
def median_of_scalars(cls: type[Median]) -> Iterator[Claim]:
    """2 of 10, 1, 2; for 1, 100, 2, 4 the mean of the middle two, 3; client sizes do not matter."""
    yield Claim("three clients", 2.0, _after(cls(), (10.0, 1.0, 2.0), copies=(4, 1, 1)))
    yield Claim("four clients", 3.0, _after(cls(), (1.0, 100.0, 2.0, 4.0), copies=(1, 5, 1, 1)))
    yield Claim("one client", 7.0, _after(cls(), (7.0,)))


@oracle(Median)
def median_per_coordinate(cls: type[Median]) -> Iterator[Claim]:
    """On a network with five clients, per coordinate, against torch.median."""
    clients, _ = _network()
    yield from _same(cls(), tree.map(lambda x: x.median(0).values, clients))


def _after(
    part: Part,
    updates: tuple[float, ...],
    copies: tuple[int, ...] | None = None,
    order: list[int] | None = None,
) -> float:
    """w after one round from 0 in which the clients send these updates."""
    return position(updating(updates, 2.0, 0.25, copies).trained(part, clients=order))


_SIZES = (5, 9, 5, 14, 7)


def _network() -> tuple[Weights, Tensor]:
    """Stacked models of five clients after a round, and their parameters as rows."""
    models = []
    for k in range(len(_SIZES)):
        run = images(norm="bn", sizes=_SIZES).trained("fedavg", clients=[k])
        floats = {n: b for n, b in run.weights.buffers.items() if b.is_floating_point()}
        models.append(Weights(run.weights.params, floats))
    clients = tree.stack(models)
    return clients, torch.cat([x.flatten(1) for x in clients.params.values()], 1)


def _same(part: Part, expected: Weights) -> Iterator[Claim]:
    run = images(norm="bn", sizes=_SIZES).trained(part)
    yield close("error of the parameters", run.weights.params, expected.params)
    found = {n: run.weights.buffers[n] for n in expected.buffers}
    yield close("error of BatchNorm statistics", found, expected.buffers)
