"""Partitions: the samples of each client, with a name, a seed and a content hash.

::

    from kedge.data.partition import draw

    partition = draw("dirichlet(0.1)", labels, clients=10, seed=0)
    partition.clients[3]                     # the sorted samples of client 3
    partition.hash                           # '0f5c...'; equal partitions have equal hashes
    partition.save("cifar10.json")           # and Partition.load("cifar10.json")

A partition is written as a name with options; feature shifts are added to it:
``client_dirichlet_sequential(alpha=0.1)+rotation(step=15)``. Several procedures of the literature
are called "Dirichlet(alpha)". Here each has its own name, since their alphas are not comparable.
"""

from kedge.data.partition import draws  # registers the partitions and shifts
from kedge.data.partition.grammar import draw, partitions, shifts
from kedge.data.partition.partition import Partition, holdout, resplit

__all__ = ["Partition", "draw", "draws", "holdout", "partitions", "resplit", "shifts"]
