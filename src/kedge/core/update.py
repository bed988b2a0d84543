"""What leaves clients: the :class:`Update` of one, and the :class:`Totals` of any number of them.

Updates are stacked along a leading client axis. :func:`total` reduces them, and :func:`add` adds
the totals of two groups of clients. Updates of single clients are retained only if a part declares
``needs_clients``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.ops import REFERENCE, Ops
from kedge.core.tree import Params, Tree, Weights
from kedge.core.uploads import Mean, Stack, Sum
from kedge.errors import HookError

if TYPE_CHECKING:
    from kedge.core.bound import Bound

Path = tuple[str, ...]  # address of an upload: the part's name, then the keys of its dicts
NO_WEIGHTS = Weights({}, {})
NOTHING = torch.zeros(())


class Update(NamedTuple):
    """All that leaves a client, after training or as its answer to a survey (uploads alone)."""

    delta: Weights = NO_WEIGHTS  # local - anchor: the leaves that travel, buffers included
    contribution: Tree = {}  # to a custom aggregation
    uploads: dict[str, Tree] = {}  # by part
    losses: Params = {}  # mean over the steps of each term of the objective
    weight: Tensor = NOTHING  # p_k before normalisation
    share: Tensor = NOTHING  # r_k, see Workload.share_of


class Summed(NamedTuple):
    """What adds up over clients; of a survey, ``weight`` and ``uploads`` alone are not empty."""

    weight: Tensor = NOTHING  # sum of the client weights
    delta: Weights = NO_WEIGHTS  # weighted sum of the updates
    sq_norm: Tensor = NOTHING  # weighted sum of the squared norms of the updates
    contribution: Tree = {}
    uploads: dict[Path, Sum | Mean] = {}  # values of Mean are weighted sums
    plain_delta: Params = {}  # sum of the updates, if a part needs it
    share_delta: Params = {}  # sum of the updates, each times its share, if a part needs it


class Stacked(NamedTuple):
    """What is known client by client: leaves ``[K, ...]`` in the order of ``Totals.clients``."""

    weight: Tensor = NOTHING  # client weights
    losses: Params = {}  # small, and a NaN must be traced to its client
    uploads: dict[Path, Stack] = {}
    weights: Weights = NO_WEIGHTS  # trained weights, if a part needs them


class Totals(NamedTuple):
    """All that a server sees of some clients."""

    clients: dict[int, int] = {}  # the round in which each was asked, in the order of ``stacked``
    summed: Summed = Summed()
    stacked: Stacked = Stacked()
    up_bytes: int = 0  # that they sent

    @property
    def uploads(self) -> dict[Path, Sum | Mean | Stack]:
        """The uploads by path."""
        return {**self.summed.uploads, **self.stacked.uploads}

    def of(self, clients: list[int], round: int) -> Totals:
        """These totals with the clients who are in them."""
        return self._replace(clients=dict.fromkeys(clients, round))


ZERO = Totals()
#: Adds the second list of tensors to the first one, in place.
AddInto = Callable[[list[Tensor], list[Tensor]], None]


def total(bound: Bound, updates: Update, anchor: Weights, ops: Ops = REFERENCE) -> Totals:
    """Reduce updates to sums over clients, weighted for what becomes a mean.

    Args:
        bound: the binding with the phases of the round.
        updates: of K clients, leaves ``[K, ...]``.
        anchor: the weights that the clients received.
        ops: the engine's arithmetic.

    Returns:
        Totals without the numbers of their clients, see :meth:`Totals.of`.
    """
    w, delta = updates.weight, updates.delta  # [K]
    reduced = {
        path: type(upload)(tree.map(_reduction(upload, w, ops), upload.value))
        for path, upload in uploads_of(updates.uploads)
    }
    added = {path: upload for path, upload in reduced.items() if not isinstance(upload, Stack)}
    listed = {path: upload for path, upload in reduced.items() if isinstance(upload, Stack)}
    summed = Summed(
        weight=w.sum(),
        delta=tree.map(lambda x: ops.weighted_sum(x, w), delta),
        sq_norm=ops.weighted_sum(ops.sq_norms(delta.params, w), w),
        contribution=tree.map(lambda x: x.sum(0), updates.contribution),
        uploads=added,
    )
    if bound.needs("sum"):
        summed = summed._replace(plain_delta=tree.map(lambda x: x.sum(0), delta.params))
    if bound.needs("share_sum"):
        share = updates.share  # [K]
        shared = tree.map(lambda x: ops.weighted_sum(x, share), delta.params)
        summed = summed._replace(share_delta=shared)
    stacked = Stacked(w, updates.losses, listed)
    if bound.needs("clients") and updates.losses:  # not of a survey
        # private leaves have the server's values
        anchors = tree.map(lambda x: x.expand(len(w), *x.shape), anchor)
        weights = Weights(
            anchors.params | tree.add(delta.params, anchors.params),
            anchors.buffers | tree.map(moved, delta.buffers, anchors.buffers),
        )
        stacked = stacked._replace(weights=weights)
    uploads = {" ".join(path): upload.value for path, upload in uploads_of(updates.uploads)}
    sent = tree.nbytes({"delta": delta, "contribution": updates.contribution, "uploads": uploads})
    return Totals({}, summed, stacked, sent)


def add(a: Totals, b: Totals, into: AddInto | None = None) -> Totals:
    """Totals of two disjoint groups of clients; ``ZERO`` is neutral bit for bit.

    Args:
        a: of the first group.
        b: of the second group.
        into: adds the sums of ``b`` to those of ``a`` in place; None leaves both as they are.
    """
    if not (a.clients and b.clients):
        return a if a.clients else b
    if into is None:
        summed = tree.map(torch.add, a.summed, b.summed)
    else:
        into(list(tree.leaves(a.summed)), list(tree.leaves(b.summed)))
        summed = a.summed
    stacked = tree.map(lambda x, y: torch.cat([x, y]), a.stacked, b.stacked)
    return Totals(a.clients | b.clients, summed, stacked, a.up_bytes + b.up_bytes)


def total_of(
    bound: Bound,
    updates: Iterable[tuple[int, Update]],
    round: int,
    anchor: Weights,
    ops: Ops = REFERENCE,
) -> Totals:
    """Totals of single updates by client, in their order; each is freed after it is added."""
    found = ZERO
    for client, update in updates:
        alone = tree.map(lambda x: x.unsqueeze(0), update)
        del update
        added = total(bound, alone, anchor, ops).of([client], round)
        del alone  # its memory is needed: updates may be as large as the model
        found = add(found, added, _add_into)
        del added
    return found


def uploads_of(node: Tree, path: Path = ()) -> list[tuple[Path, Sum | Mean | Stack]]:
    """All uploads in a nested dict, with their paths."""
    if isinstance(node, (Sum, Mean, Stack)):
        return [(path, node)]
    if not isinstance(node, dict):
        raise HookError(
            f"{path[0] if path else 'a part'} uploads a bare {type(node).__name__}; "
            "wrap it in Sum(...), Mean(...) or Stack(...)"
        )
    return [item for key, value in node.items() for item in uploads_of(value, (*path, key))]


def moved(delta: Tensor, value: Tensor) -> Tensor:
    """A buffer after its averaged change; integer buffers (counters) are rounded."""
    new = value.to(delta.dtype) + delta
    return new if value.is_floating_point() else new.round().to(value.dtype)


def _reduction(upload: Sum | Mean | Stack, w: Tensor, ops: Ops) -> Callable[[Tensor], Tensor]:
    if isinstance(upload, Sum):
        return lambda x: x.sum(0)
    return torch.clone if isinstance(upload, Stack) else lambda x: ops.weighted_sum(x, w)


def _add_into(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        x.add_(y)
