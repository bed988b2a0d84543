"""Feature shift: rotation or noise of each client's inputs, added to any partition."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from kedge.data.partition.registries import IntArray, shifts
from kedge.schema import Doc, NotNegative, Positive

ANGLES = np.arange(0.0, 136.0, 15.0)  # 0, 15, ..., 135 degrees


@shifts.register("rotation")
def rotation(
    sizes: IntArray,
    rng: np.random.Generator,
    *,
    step: Annotated[float, Doc("degrees between one client and the next")] = 15.0,
) -> dict[str, Any]:
    """Client i's images are rotated by ``step`` * i degrees (FedBR's RotatedMNIST)."""
    return {"rotation": step * np.arange(len(sizes))}


@shifts.register("rotation_dirichlet")
def rotation_dirichlet(
    sizes: IntArray,
    rng: np.random.Generator,
    *,
    alpha: Annotated[Positive, Doc("concentration of a client's angles; smaller: fewer")] = 0.1,
) -> dict[str, Any]:
    """Each image has an angle of 0, 15, ..., 135 degrees, drawn from the prior of its client.

    The priors are drawn from Dir(alpha). FedBR's CIFAR-10: the paper has alpha 1.0, its code 0.1.
    """
    # the sum of all concentrations must be finite
    priors = rng.dirichlet(np.full(len(ANGLES), min(alpha, 1e300)), size=len(sizes))
    return {
        "angles": tuple(rng.choice(ANGLES, size=n, p=q) for n, q in zip(sizes, priors, strict=True))
    }


@shifts.register("noise")
def noise(
    sizes: IntArray,
    rng: np.random.Generator,
    *,
    sigma: Annotated[NotNegative, Doc("standard deviation of the last client's noise")] = 0.1,
) -> dict[str, Any]:
    """Client i of M gets Gaussian noise of standard deviation ``sigma`` * (i + 1) / M.

    Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022, arXiv:2102.02079. *Deviations*:
    the paper calls this the variance; here, as in its code, it is the standard deviation, but the
    last client is not left clean.
    """
    return {"noise": sigma * np.arange(1, len(sizes) + 1) / len(sizes)}
