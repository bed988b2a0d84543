"""Limits on fine-tuning on the server, for samples of doubtful quality.

Pure functions of tensors: no branch depends on a value, so that steps can be captured.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.tree import Weights


def limit_move(
    tuned: Weights, aggregated: Weights, anchor: Weights, names: Iterable[str], bound: Tensor
) -> Weights:
    """Move the tuned model back towards the aggregated one until it is within the bound.

    The bound is |tuned - aggregated| <= bound |aggregated - anchor|, with norms over the parameters
    in ``names``. Running statistics are moved back by the same factor.
    """
    base = {n: aggregated.params[n] for n in names}
    moved = tree.sq_dist(base, tuned.params).sqrt()
    limit = bound * tree.sq_dist(base, anchor.params).sqrt()
    factor = torch.where(moved > limit, limit / moved, torch.ones_like(moved))

    def shrink(start: Tensor, end: Tensor) -> Tensor:
        return start + factor * (end - start) if start.is_floating_point() else end

    params = tuned.params | tree.map(shrink, base, tuned.params)
    return Weights(params, tree.map(shrink, aggregated.buffers, tuned.buffers))


def trust(targets: Tensor, y: Tensor, share: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
    """Drop samples of whose label the clients are not confident.

    A sample is trusted if the clients' weighted probability of its label is at least
    ``confidence``.

    Args:
        targets: the clients' logits, ``[K, B, C]``.
        y: the labels, ``[B]``.
        share: the clients' weights for each sample, ``[K, B]``.
        confidence: a scalar.

    Returns:
        ``(share [K, B], found [])``: shares with which a mean over the batch is one over trusted
        samples, and whether there are any.
    """
    own = targets.softmax(-1).gather(-1, y.expand(len(targets), -1)[..., None])[..., 0]  # [K, B]
    mask = ((share * own).sum(0) >= confidence).to(share.dtype)  # [B]
    kept = mask.sum()
    return share * (mask * len(mask) / kept.clamp_min(1)), kept > 0


def stay_unless(condition: Tensor, new: Weights, old: Weights) -> Weights:
    """``new`` where the scalar ``condition`` holds, otherwise ``old``."""
    return tree.map(lambda a, b: torch.where(condition, a, b), new, old)
