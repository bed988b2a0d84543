"""All unordered pairs of parts, sketches included: two rounds, finite, loop = vector."""

from itertools import combinations

import pytest
import torch

from kedge.check.problems import images
from kedge.core import tree
from kedge.core.method import Method
from kedge.core.part import Part
from kedge.errors import IncompatibleError, TwoAggregators
from tests.parts.test_laws import ALL

pytestmark = pytest.mark.long

PAIRS = list(combinations(ALL, 2))
# nothing is shared, so there is nothing to distil into
REFUSED = [{"flboost", "local"}, {"feddf", "local"}]
# client numbers, which are neither clipped nor made noisy
NUMBERING = ("krum", "fedbr", "fedmix", "naivemix")
REFUSED += [{release, other} for release in ("clip", "gauss") for other in NUMBERING]
# the pull of the second cannot be divided out of its update
PULLING = [{"fednova", other} for other in ("feddyn", "feddc", "fedspeed", "fedtr")]


def head_is_missing(pair: tuple[Part, Part]) -> bool:
    """One works on the head on the server, the other keeps it on the clients."""
    keeps = {p.name for p in pair} & {"fedrep", "fedper", "local"}
    return bool(keeps) and any(p.needs_shared_head for p in pair)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0].name}+{p[1].name}")
def test_pair(pair: tuple[Part, Part]) -> None:
    if all(p.has("combine") for p in pair):
        with pytest.raises(TwoAggregators):
            Method(pair)
        return
    if any(a.refuses(b) for a, b in (pair, pair[::-1])):
        names = {p.name for p in pair}
        assert names in PULLING or "centralgauss" in names
        with pytest.raises(IncompatibleError, match="shrinks a step|sees single clients"):
            Method(pair)
        return
    method = Method(pair)
    problem = images(norm="bn", sizes=(5, 9, 14))
    if {p.name for p in pair} in REFUSED or head_is_missing(pair):
        with pytest.raises(IncompatibleError):
            problem.simulate(method).run_round()
        return
    runs = [problem.simulate(method, e) for e in ("loop", "vector")]
    for run in runs:
        for _ in range(2):
            run.run_round()
        assert all(bool(torch.isfinite(x).all()) for x in tree.leaves(run.weights))
    assert tree.gap(runs[0].state(), runs[1].state()) < 1e-10


def test_all_sketches_at_once() -> None:
    from tests.parts.sketches import SKETCHES

    runs = [images(norm="bn").simulate(Method(SKETCHES), e) for e in ("loop", "vector")]
    for run in runs:
        for _ in range(3):
            run.run_round()
    assert tree.gap(runs[0].state(), runs[1].state()) < 1e-10
