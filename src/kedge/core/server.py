"""One server round: reduce what the clients returned, then make the next global model of it.

Replies come stacked along a first axis, from any number of clients. :func:`totals` turns them into
sums, :func:`add_totals` joins the sums of two groups of clients, and :func:`server_round` does the
rest. Single clients are kept only if a part declares that it needs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.bound import Bound, Server
from kedge.core.client import Reply
from kedge.core.hooks import call
from kedge.core.ops import REFERENCE, Ops
from kedge.core.part import Mean, Part, Stack, Sum
from kedge.core.round import Round
from kedge.core.tree import Params, Tree, Weights
from kedge.errors import HookError

Totals = dict[str, Any]
Path = tuple[str, ...]  # where an upload stands: the part's name, then the keys of its dicts


def totals(bound: Bound, replies: Reply, anchor: Weights, ops: Ops = REFERENCE) -> Totals:
    """Sums over clients, weighted where a mean is wanted in the end."""
    w = replies.weight  # [K]
    found: Totals = {
        "count": len(w),
        "weight": w.sum(),
        "weighted_delta": tree.map(lambda x: ops.weighted_sum(x, w), replies.delta),
        "sq_norm": ops.weighted_sum(ops.sq_norms(replies.delta.params, w), w),
        "contribution": tree.map(lambda x: x.sum(0), replies.contribution),
        "uploads": _reduced(replies.uploads, w, ops),
        "terms": replies.terms,  # [K] each: small, and a NaN must be traced to its client
        "up_bytes": _up_bytes(replies),
    }
    if bound.needs("sum"):
        found["sum_delta"] = tree.map(lambda x: x.sum(0), replies.delta)
    if bound.needs("clients"):
        every = tree.map(
            lambda x: x.expand(len(w), *x.shape), anchor
        )  # private leaves: the server's
        found["client_weights"] = w
        found["clients"] = Weights(
            every.params | tree.add(replies.delta.params, every.params),
            every.buffers | tree.map(_moved, replies.delta.buffers, every.buffers),
        )
    return found


def survey_totals(part: Part, answers: Tree, weight: Tensor, ops: Ops = REFERENCE) -> Totals:
    """The same for the answers to a survey."""
    uploads = _reduced({part.name: answers}, weight, ops)
    sent = sum(tree.nbytes(u.value) for _, u in uploads_of(answers))
    return {
        "count": len(weight), "weight": weight.sum(), "uploads": uploads, "up_bytes": sent,
    }  # fmt: skip


def add_totals(a: Totals, b: Totals, in_place: bool = False) -> Totals:
    """Totals of two groups of clients as those of their union; ``in_place`` writes over ``a``."""
    plain, add = ("count", "up_bytes"), Tensor.add_ if in_place else torch.add
    out: Totals = {name: a[name] + b[name] for name in plain}
    for name in a.keys() - {*plain, "uploads"}:
        join = _cat if name in ("terms", "clients", "client_weights") else add
        out[name] = tree.map(join, a[name], b[name])
    out["uploads"] = {
        path: type(one)(
            tree.map(_cat if isinstance(one, Stack) else add, one.value, b["uploads"][path].value)
        )
        for path, one in a["uploads"].items()
    }
    return out


def server_round(bound: Bound, server: Server, found: Totals, round: int, key: Tensor) -> Server:
    """Aggregate, then let every part take its server step, left to right."""
    found = _means(found)
    mean = found["mean_delta"]
    delta: Params = mean.params
    for part in bound.parts_with("combine"):
        delta = call(part, "combine", _round(bound, server, part, found, round, key))
    old = server.weights
    weights = Weights(
        old.params | tree.map(lambda d, w: w + d, delta, old.params),
        old.buffers | tree.map(_moved, mean.buffers, old.buffers),
    )
    slots = dict(server.slots)
    for part in bound.parts_with("server_step"):
        r = _round(bound, server, part, found, round, key)
        weights, slots[part.name] = call(part, "server_step", r, weights)
    return Server(weights, slots)


def absorb(
    bound: Bound, server: Server, part: Part, answers: Totals, round: int, key: Tensor
) -> Server:
    """Give a part the reduced answers to its survey."""
    r = _round(bound, server, part, _means(answers), round, rng.fold(key, "survey"))
    weights, slot = call(part, "absorb", r, server.weights)
    return Server(weights, server.slots | {part.name: slot})


def uploads_of(node: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Every upload in a nested dict of them, with its path."""
    if isinstance(node, (Sum, Mean, Stack)):
        return [(path, node)]
    if not isinstance(node, dict):
        raise HookError(
            f"{path[0] if path else 'a part'} uploads a bare {type(node).__name__}; "
            "wrap it in Sum(...), Mean(...) or Stack(...)"
        )
    return [found for key, value in node.items() for found in uploads_of(value, (*path, key))]


def _up_bytes(replies: Reply) -> int:
    """What all clients send: their update with its buffers, their contribution and uploads."""
    extra = sum(tree.nbytes(u.value) for _, u in uploads_of(replies.uploads))
    return tree.nbytes(replies.delta) + tree.nbytes(replies.contribution) + extra


def _reduced(uploads: Tree, w: Tensor, ops: Ops) -> dict[Path, Any]:
    reduce = {Sum: lambda x: x.sum(0), Mean: lambda x: ops.weighted_sum(x, w), Stack: torch.clone}
    return {
        path: type(upload)(tree.map(reduce[type(upload)], upload.value))
        for path, upload in uploads_of(uploads)
    }


def _means(found: Totals) -> Totals:
    """Weighted sums divided by the sum of the weights."""
    total, out = found["weight"], dict(found)
    if "weighted_delta" in found:
        out["mean_delta"] = tree.map(lambda x: x / total.to(x.dtype), out.pop("weighted_delta"))
    out["uploads"] = {
        path: Mean(tree.map(lambda x: x / total.to(x.dtype), up.value)) if type(up) is Mean else up
        for path, up in found["uploads"].items()
    }
    return out


def _round(
    bound: Bound, server: Server, part: Part, found: Totals, round: int, key: Tensor
) -> Round:
    """What one part sees of the round."""
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
        uploads=_own(found["uploads"], part.name),
        totals=found,
    )


def _own(reduced: dict[Path, Any], name: str) -> Tree:
    """A part's uploads in the nesting in which it returned them."""
    own: dict[str, Any] = {}
    for path, upload in reduced.items():
        if path == (name,):
            return upload.value
        if path[0] == name:
            node = own
            for key in path[1:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = upload.value
    return own


def _moved(delta: Tensor, value: Tensor) -> Tensor:
    """A buffer after its averaged change; integer buffers (counters) are rounded."""
    moved = value.to(delta.dtype) + delta
    return moved if value.is_floating_point() else moved.round().to(value.dtype)


def _cat(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b])
