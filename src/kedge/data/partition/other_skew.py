"""Partitions independent of the labels: iid, skewed sizes, and the silos of the data.

They work for classes, for several labels per sample and for real-valued targets.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt

from kedge.data.partition.registries import IntArray, partitions
from kedge.data.partition.sampling import (
    equal_sizes,
    lognormal_sizes,
    proportional_sizes,
    samples_by_client,
)
from kedge.errors import DataError, PartitionError
from kedge.schema import Doc, NotNegative

Labels = npt.NDArray[np.generic]


@partitions.register("central")
def central(labels: Labels, clients: int, rng: np.random.Generator) -> list[IntArray]:
    """All samples are on one client: centralised training, the upper baseline."""
    if clients != 1:
        raise PartitionError("it has one client; write clients = 1")
    return [np.arange(len(labels))]


@partitions.register("iid")
def iid(labels: Labels, clients: int, rng: np.random.Generator) -> list[IntArray]:
    """Samples are dealt at random; sizes differ by at most one."""
    return _shuffled(rng, equal_sizes(len(labels), clients))


@partitions.register("quantity_lognormal")
def quantity_lognormal(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    sigma: Annotated[NotNegative, Doc("spread of the sizes; 0: equal sizes")] = 1.0,
) -> list[IntArray]:
    """Samples are dealt at random; sizes are log-normal, in proportion to exp(N(0, sigma^2))."""
    return _shuffled(rng, lognormal_sizes(rng, len(labels), clients, sigma))


@partitions.register("quantity_powerlaw")
def quantity_powerlaw(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    exponent: Annotated[NotNegative, Doc("of the power law; 0: equal sizes")] = 1.5,
) -> list[IntArray]:
    """Samples are dealt at random; the r-th largest client has a size of about r^-exponent."""
    weights = np.arange(1.0, clients + 1.0) ** -exponent
    return _shuffled(rng, proportional_sizes(rng.permutation(weights), len(labels)))


@partitions.register("silos")
def silos(
    labels: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    groups: npt.NDArray[np.generic] | None = None,
) -> list[IntArray]:
    """Each group of the data (hospital, user, device) is a client, in the order of their ids."""
    if groups is None:
        raise PartitionError("the data have no groups; give the group id of each sample as groups=")
    ids = np.asarray(groups)
    if ids.shape != (len(labels),):
        raise DataError(f"groups has shape {ids.shape}, but there are {len(labels)} samples")
    missing = sum(g is None or g != g for g in ids.tolist())
    if missing:
        raise DataError(f"{missing} samples have no group (none or nan); drop them or name it")
    if ids.dtype.kind == "O":
        ids = ids.astype(str)
    unique, owner = np.unique(ids, return_inverse=True)
    if len(unique) != clients:
        raise PartitionError(f"the data have {len(unique)} groups; set clients to {len(unique)}")
    return samples_by_client(owner, clients)


def _shuffled(rng: np.random.Generator, sizes: IntArray) -> list[IntArray]:
    owner = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return samples_by_client(owner, len(sizes))
