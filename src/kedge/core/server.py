"""One server round: reduce the clients' replies, then compute the next global model.

Replies are stacked along a leading client axis. :func:`totals` reduces them to sums,
:func:`add_totals` adds the sums of two groups of clients, and :func:`server_round` aggregates.
Updates of single clients are retained only if a part declares ``needs_clients``.
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
from kedge.core.steps import REFERENCE as PLAIN_STEPS
from kedge.core.steps import Steps
from kedge.core.tree import Params, Tree, Weights
from kedge.errors import HookError

Totals = dict[str, Any]
Path = tuple[str, ...]  # address of an upload: the part's name, then the keys of its dicts


def totals(bound: Bound, replies: Reply, anchor: Weights, ops: Ops = REFERENCE) -> Totals:
    """Reduce replies to sums over clients, weighted for what becomes a mean.

    Args:
        bound: the binding with the phases of the round.
        replies: replies of K clients, leaves ``[K, ...]``.
        anchor: the weights that the clients received.
        ops: the engine's arithmetic.
    """
    w = replies.weight  # [K]
    sums: Totals = {
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
        sums["sum_delta"] = tree.map(lambda x: x.sum(0), replies.delta.params)
    if bound.needs("share_sum"):
        share = replies.share  # [K]
        sums["share_delta"] = tree.map(lambda x: ops.weighted_sum(x, share), replies.delta.params)
    if bound.needs("clients"):
        # private leaves have the server's values
        anchors = tree.map(lambda x: x.expand(len(w), *x.shape), anchor)
        sums["client_weights"] = w
        sums["clients"] = Weights(
            anchors.params | tree.add(replies.delta.params, anchors.params),
            anchors.buffers | tree.map(_add_delta, replies.delta.buffers, anchors.buffers),
        )
    return sums


def survey_totals(part: Part, answers: Tree, weight: Tensor, ops: Ops = REFERENCE) -> Totals:
    """Reduce answers to a survey: leaves ``[K, ...]``, client weights ``[K]``."""
    uploads = _reduced({part.name: answers}, weight, ops)
    sent = sum(tree.nbytes(u.value) for _, u in uploads_of(answers))
    return {
        "count": len(weight), "weight": weight.sum(), "uploads": uploads, "up_bytes": sent,
    }  # fmt: skip


def add_totals(a: Totals, b: Totals, in_place: bool = False) -> Totals:
    """Totals of the union of two groups of clients; ``in_place`` overwrites ``a``."""
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


def server_round(
    bound: Bound,
    server: Server,
    totals: Totals,
    round: int,
    key: Tensor,
    steps: Steps = PLAIN_STEPS,
) -> Server:
    """The next server state: aggregate the totals, then run each part's server step in order."""
    means = _means(totals)
    mean = means["mean_delta"]
    delta: Params = mean.params
    for part in bound.parts_with("combine"):
        delta = call(part, "combine", _round(bound, server, part, means, round, key))
    old = server.weights
    weights = Weights(
        old.params | tree.map(lambda d, w: w + d, delta, old.params),
        old.buffers | tree.map(_add_delta, mean.buffers, old.buffers),
    )
    slots = dict(server.slots)
    for part in bound.parts_with("server_step"):
        r = _round(bound, server, part, means, round, key, steps)
        weights, slots[part.name] = call(part, "server_step", r, weights)
    return Server(weights, slots)


def absorb(
    bound: Bound, server: Server, part: Part, answers: Totals, round: int, key: Tensor
) -> Server:
    """The server state after a part has absorbed the reduced answers to its survey."""
    r = _round(bound, server, part, _means(answers), round, rng.fold(key, "survey"))
    weights, slot = call(part, "absorb", r, server.weights)
    return Server(weights, server.slots | {part.name: slot})


def output(bound: Bound, server: Server) -> Weights:
    """The weights to evaluate and to keep as the model; training starts from the others."""
    weights = server.weights
    for part in bound.parts_with("output"):
        weights = call(part, "output", server.slots.get(part.name, {}), weights)
    return weights


def uploads_of(node: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """All uploads in a nested dict, with their paths."""
    if isinstance(node, (Sum, Mean, Stack)):
        return [(path, node)]
    if not isinstance(node, dict):
        raise HookError(
            f"{path[0] if path else 'a part'} uploads a bare {type(node).__name__}; "
            "wrap it in Sum(...), Mean(...) or Stack(...)"
        )
    return [item for key, value in node.items() for item in uploads_of(value, (*path, key))]


def _up_bytes(replies: Reply) -> int:
    """Bytes that all clients send: updates with buffers, contributions and uploads."""
    extra = sum(tree.nbytes(u.value) for _, u in uploads_of(replies.uploads))
    return tree.nbytes(replies.delta) + tree.nbytes(replies.contribution) + extra


def _reduced(uploads: Tree, w: Tensor, ops: Ops) -> dict[Path, Any]:
    reduce = {Sum: lambda x: x.sum(0), Mean: lambda x: ops.weighted_sum(x, w), Stack: torch.clone}
    return {
        path: type(upload)(tree.map(reduce[type(upload)], upload.value))
        for path, upload in uploads_of(uploads)
    }


def _means(totals: Totals) -> Totals:
    """Totals with weighted sums divided by the sum of the client weights."""
    total, out = totals["weight"], dict(totals)
    if "weighted_delta" in totals:
        out["mean_delta"] = tree.map(lambda x: x / total.to(x.dtype), out.pop("weighted_delta"))
    out["uploads"] = {
        path: Mean(tree.map(lambda x: x / total.to(x.dtype), up.value)) if type(up) is Mean else up
        for path, up in totals["uploads"].items()
    }
    return out


def _round(
    bound: Bound,
    server: Server,
    part: Part,
    means: Totals,
    round: int,
    key: Tensor,
    steps: Steps = PLAIN_STEPS,
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
        uploads=_uploads_of_part(means["uploads"], part.name),
        totals=means,
        steps=steps,
    )


def _uploads_of_part(reduced: dict[Path, Any], name: str) -> Tree:
    """One part's uploads, nested as the part returned them."""
    uploads: dict[str, Any] = {}
    for path, upload in reduced.items():
        if path == (name,):
            return upload.value
        if path[0] == name:
            node = uploads
            for key in path[1:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = upload.value
    return uploads


def _add_delta(delta: Tensor, value: Tensor) -> Tensor:
    """A buffer after its averaged change; integer buffers (counters) are rounded."""
    moved = value.to(delta.dtype) + delta
    return moved if value.is_floating_point() else moved.round().to(value.dtype)


def _cat(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b])
