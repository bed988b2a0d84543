"""Yardsticks beside methods: training on the pooled data of all clients."""

from __future__ import annotations

import dataclasses

from kedge.data.federation import Federation
from kedge.runs.config import Config


def pooled_config(config: Config, federation: Federation) -> Config:
    """The settings of training on pooled data: FedAvg with one client.

    It takes as many samples a round as the clients of a round take together.
    """
    cohort = config.per_round or federation.num_clients
    return dataclasses.replace(
        config,
        method="fedavg",
        per_round=0,
        sampler="uniform",
        steps=config.steps * cohort,
        epochs=config.epochs * cohort / federation.num_clients,
    )
