"""One server round: from the totals of the clients to the next global model.

Parts receive the totals first, left to right; then updates are combined, and each part takes its
step. All functions here are pure: the state that is passed in stays as it is.
"""

from __future__ import annotations

from torch import Tensor

from kedge.core import rng, tree
from kedge.core.bound import Bound, Server
from kedge.core.hooks import call
from kedge.core.part import Mean, Part
from kedge.core.round import Round
from kedge.core.steps import REFERENCE, Steps
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import Totals, moved


def server_round(
    bound: Bound,
    server: Server,
    totals: Totals,
    round: int,
    key: Tensor,
    steps: Steps = REFERENCE,
) -> Server:
    """The next server state: aggregate the totals, then run each part's server step in order."""
    server, totals = receive(bound, server, totals, round, key)
    mean = _mean(totals)
    delta: Params = mean.params
    for part in bound.parts_with("combine"):
        delta = call(part, "combine", _round(bound, server, part, totals, mean, round, key))
    old = server.weights
    weights = Weights(
        old.params | tree.map(lambda d, w: w + d, delta, old.params),
        old.buffers | tree.map(moved, mean.buffers, old.buffers),
    )
    slots = dict(server.slots)
    for part in bound.parts_with("server_step"):
        r = _round(bound, server, part, totals, mean, round, key, steps)
        weights, slots[part.name] = call(part, "server_step", r, weights)
    return Server(weights, slots)


def absorb(
    bound: Bound, server: Server, part: Part, answers: Totals, round: int, key: Tensor
) -> Server:
    """The server state after a part has absorbed the reduced answers to its survey."""
    key = rng.fold(key, "survey")
    server, answers = receive(bound, server, answers, round, key)
    r = _round(bound, server, part, answers, _mean(answers), round, key)
    weights, slot = call(part, "absorb", r, server.weights)
    return Server(weights, server.slots | {part.name: slot})


def receive(
    bound: Bound, server: Server, totals: Totals, round: int, key: Tensor
) -> tuple[Server, Totals]:
    """The totals as the parts that change them leave them, and the server state after it."""
    slots = dict(server.slots)
    for part in bound.parts_with("receive"):
        r = _round(bound, server, part, totals, _mean(totals), round, rng.fold(key, "receive"))
        totals, slots[part.name] = call(part, "receive", r, totals)
    return Server(server.weights, slots), totals


def output(bound: Bound, server: Server) -> Weights:
    """The weights to evaluate and to keep as the model; training starts from the others."""
    weights = server.weights
    for part in bound.parts_with("output"):
        weights = call(part, "output", server.slots.get(part.name, {}), weights)
    return weights


def _mean(totals: Totals) -> Weights:
    """The weighted mean of the updates."""
    mean: Weights = _divided(totals.summed.delta, totals.summed.weight)
    return mean


def _divided(value: Tree, by: Tensor) -> Tree:
    return tree.map(lambda x: x / by.to(x.dtype), value)


def _round(
    bound: Bound,
    server: Server,
    part: Part,
    totals: Totals,
    mean: Weights,
    round: int,
    key: Tensor,
    steps: Steps = REFERENCE,
) -> Round:
    """The round as one part sees it."""
    return Round(
        part=part,
        model=bound.model,
        spec=bound.spec,
        round=round,
        lr=bound.lr(round),
        key=key,
        phase=bound.at(round).phases.get(part.name, ""),
        anchor=server.weights,
        server=server.slots.get(part.name, {}),
        uploads=_uploads_of_part(totals, part.name),
        totals=totals,
        mean=mean,
        noise=bound.noise,
        steps=steps,
    )


def _uploads_of_part(totals: Totals, name: str) -> Tree:
    """One part's uploads, nested as the part returned them; sums of Mean become means."""
    uploads: dict[str, Tree] = {}
    for path, upload in totals.uploads.items():
        if path[0] != name:
            continue
        value = upload.value
        if isinstance(upload, Mean):
            value = _divided(value, totals.summed.weight)
        if path == (name,):
            return value
        node = uploads
        for key in path[1:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return uploads
