"""Labels to partition, and partitions that use all samples."""

from __future__ import annotations

import numpy as np

from kedge.data.partition import Partition

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 300))
COMPLETE = [
    "iid",
    "dirichlet(0.1)",
    "class_dirichlet_capped(alpha=5, minimum=classes)",
    "client_dirichlet_balanced(0.3)",
    "client_dirichlet_balanced(0.01)",
    "client_dirichlet_balanced(0.3, sigma=0.5)",
    "client_dirichlet_sequential(0.1)",
    "client_dirichlet_sequential(0.1, prior=ones)",
    "paired_class_dirichlet(0.1)",
    "label_shards(2)",
    "quantity_lognormal(sigma=1.0)",
    "quantity_powerlaw(exponent=1.5)",
]


def shares(partition: Partition, labels: np.ndarray) -> np.ndarray:
    """Share of each class in each client's samples, ``[clients, classes]``."""
    counts = partition.label_counts(labels)
    return counts / counts.sum(axis=1, keepdims=True)
