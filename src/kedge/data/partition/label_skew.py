"""Label skew: the shares of the classes differ between clients.

The first four are all "Dirichlet(alpha)" in their papers; a smaller alpha is always more skewed,
but equal alphas are not equally skewed. Classes are the labels that occur, in ascending order.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from kedge.data.partition.registries import IntArray, partitions
from kedge.data.partition.sampling import (
    arrivals,
    block_sizes,
    capped_counts,
    class_codes,
    deal,
    draw_classes,
    equal_sizes,
    lognormal_sizes,
    samples_by_client,
)
from kedge.errors import PartitionError
from kedge.schema import Count, Doc, NotNegative, Positive

Labels = npt.NDArray[np.generic]
Alpha = Annotated[Positive, Doc("concentration of the Dirichlet draw; smaller is more skewed")]


@partitions.register("class_dirichlet_capped")
def class_dirichlet_capped(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Alpha = 0.1,
    minimum: Annotated[
        Count | Literal["classes"], Doc("fewest samples of a client; classes: one per class")
    ] = 10,
) -> list[IntArray]:
    """Each class is cut among the clients by shares from Dir(alpha); sizes are very unequal.

    A client that already holds N/M samples gets no more, and the whole is drawn again until the
    smallest client holds ``minimum`` samples (``classes``: as many as there are classes).

    Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022, arXiv:2102.02079. Used with
    minimum 10 by MOON and FedCOG (NIID-1), with ``classes`` by FedImpro.
    """
    codes = class_codes(labels)
    class_sizes = np.bincount(codes)
    min_size = len(class_sizes) if minimum == "classes" else minimum
    if min_size * clients > len(codes):
        fewer = f"at most {len(codes) // min_size} clients or " if len(codes) >= min_size else ""
        raise PartitionError(
            f"minimum={min_size} for each client needs {min_size * clients} samples; "
            f"use {fewer}minimum={len(codes) // clients}"
        )
    counts, best, draws = _redraw(rng, class_sizes, clients, alpha, min_size)
    if counts is None:
        raise PartitionError(
            f"none of {draws} draws gave every client {min_size} samples; the best gave its "
            f"smallest client {best}. Use a larger alpha or fewer clients"
            + (f", or minimum={best}" if best else "")
        )
    return deal(rng, codes, counts)


@partitions.register("client_dirichlet_balanced")
def client_dirichlet_balanced(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Alpha = 0.3,
    sigma: Annotated[NotNegative, Doc("spread of the log-normal sizes; 0: equal sizes")] = 0.0,
) -> list[IntArray]:
    """Each client has its own class prior from Dir(alpha); sizes are equal, or log-normal (sigma).

    One sample at a time goes to a client drawn from those not yet full, its class from the client's
    prior, drawn again if that class is used up. A client whose prior has no mass on the classes
    that are left draws from them uniformly.

    Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, arXiv:2111.04263.
    Used by FedDyn, FedDC, FedSpeed and FLBoost. *Deviations*: samples that do not divide evenly are
    dealt out (sizes differ by at most one) instead of dropped.
    """
    codes = class_codes(labels)
    class_sizes = np.bincount(codes)
    if sigma > 0:
        sizes = lognormal_sizes(rng, len(codes), clients, sigma)
    else:
        sizes = equal_sizes(len(codes), clients)
    priors = rng.dirichlet(np.full(len(class_sizes), alpha), size=clients)  # [M, C]
    turns = arrivals(rng, sizes)
    drawn = draw_classes(rng, priors, turns, class_sizes)
    counts = np.bincount(turns * len(class_sizes) + drawn, minlength=clients * len(class_sizes))
    return deal(rng, codes, counts.reshape(clients, len(class_sizes)))


@partitions.register("client_dirichlet_sequential")
def client_dirichlet_sequential(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Alpha = 0.1,
    prior: Annotated[
        Literal["proportions", "ones"], Doc("what alpha multiplies: shares of the classes, or ones")
    ] = "proportions",
) -> list[IntArray]:
    """Clients are filled one after the other, each from its own class prior q; sizes are equal.

    q ~ Dir(alpha p), where p are the proportions of the classes among the samples that are left, or
    ones. A class that runs out is zeroed in q and q renormalised. Proportions add up to one, so at
    the same alpha they skew more: C classes have alpha/C each instead of alpha.

    Guo et al., FedBR, ICML 2023, arXiv:2205.13462: proportions for MNIST and CIFAR-10, ones for
    CIFAR-100. *Deviations*: samples that do not divide evenly are dealt out, sizes differ by one.
    """
    codes = class_codes(labels)
    remaining = np.bincount(codes)  # samples of each class, [C]
    classes = len(remaining)
    counts = np.zeros((clients, classes), dtype=np.int64)
    for k, size in enumerate(equal_sizes(len(codes), clients)):
        left = remaining > 0
        shares = prior == "proportions"
        p = remaining[left] / remaining.sum() if shares else np.ones(left.sum())
        q = np.zeros((1, classes))
        q[0, left] = rng.dirichlet(np.maximum(alpha * p, 1e-300))
        drawn = draw_classes(rng, q, np.zeros(size, dtype=np.int64), remaining)
        counts[k] = np.bincount(drawn, minlength=classes)
        remaining = remaining - counts[k]
    return deal(rng, codes, counts)


@partitions.register("paired_class_dirichlet")
def paired_class_dirichlet(
    labels: Labels, clients: int, rng: np.random.Generator, *, alpha: Alpha = 0.1
) -> list[IntArray]:
    """The shuffled samples are cut into blocks, and each block among two clients; sizes near equal.

    Inside a block as class_dirichlet_capped, drawn again until the smaller of the two clients holds
    half of its fair share or more.

    As in the PersonalizedFL code (github.com/microsoft/PersonalizedFL). Used by FedTR.
    """
    codes = class_codes(labels)
    if clients % 2:
        raise PartitionError(f"it pairs the clients; use an even number, such as {clients + 1}")
    pair_sizes = equal_sizes(len(codes), clients).reshape(-1, 2).sum(axis=1)
    order = rng.permutation(len(codes))
    parts: list[IntArray] = []
    for block in np.split(order, np.cumsum(pair_sizes)[:-1]):
        inside = class_codes(codes[block])
        min_size = max(1, math.ceil(len(block) / 4))
        counts, best, draws = _redraw(rng, np.bincount(inside), 2, alpha, min_size)
        if counts is None:
            raise PartitionError(
                f"none of {draws} draws gave both clients of a pair half of their fair share "
                f"({min_size} of {len(block) // 2}); the best gave {best}. "
                "Use a larger alpha or fewer clients"
            )
        parts += [np.sort(block[part]) for part in deal(rng, inside, counts)]
    return parts


@partitions.register("label_shards")
def label_shards(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    shards: Annotated[Count, Doc("classes that a client holds")] = 2,
) -> list[IntArray]:
    """Each client holds ``shards`` classes, the same as every (C/shards)-th client; no randomness.

    Client i holds the classes shards * (i mod C/shards) and following. The clients that hold a
    class cut it evenly, in the order of the data. With fewer clients than C/shards, the classes of
    the missing clients are not used.

    Ye et al., FedCOG, ICLR 2024 (NIID-2): 2 of 10 classes, or 10 of 100.
    """
    codes = class_codes(labels)
    class_sizes = np.bincount(codes)
    classes = len(class_sizes)
    divisors = [s for s in range(1, classes + 1) if classes % s == 0]
    if classes % shards:
        what = "more than there are" if shards > classes else "which does not divide them evenly"
        raise PartitionError(
            f"it needs groups of {shards} classes, {what}: the labels have {classes} classes. "
            f"Use shards={' or '.join(map(str, divisors))}"
        )
    groups = classes // shards
    owner = np.full(len(codes), -1, dtype=np.int64)
    for c in range(min(groups, clients) * shards):
        members = np.arange(c // shards, clients, groups)
        owner[codes == c] = members[np.arange(class_sizes[c]) * len(members) // class_sizes[c]]
    parts = samples_by_client(owner, clients)
    for i, part in enumerate(parts):
        if not len(part):
            raise PartitionError(
                f"client {i} would hold no sample: its {shards} classes have fewer samples than "
                "clients. Use fewer clients"
            )
    return parts


def _redraw(
    rng: np.random.Generator, class_sizes: IntArray, clients: int, alpha: float, min_size: int
) -> tuple[IntArray | None, int, int]:
    """Draw until every client has ``min_size`` samples.

    Returns the counts ``[clients, classes]`` (None if no draw succeeds), the largest minimum client
    size found, and the number of failed draws.
    """
    best = draws = 0
    for block in block_sizes(clients * len(class_sizes)):
        shares = rng.dirichlet(np.full(clients, alpha), size=(block, len(class_sizes)))
        counts = capped_counts(shares, class_sizes)
        smallest = counts.sum(axis=2).min(axis=1)
        if (smallest >= min_size).any():
            return counts[np.argmax(smallest >= min_size)], min_size, draws
        best, draws = max(best, int(smallest.max())), draws + block
    return None, best, draws
