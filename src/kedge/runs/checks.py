"""What a run refuses, though its simulation would be well defined."""

from __future__ import annotations

from kedge.core.method import parse
from kedge.core.model import Model
from kedge.errors import ModelError


def check_batchnorm(method: str, model: Model) -> None:
    """Raise a ModelError for a part that is about BatchNorm if the model has none."""
    has_norm = any(name.split(".")[-1] == "running_mean" for name in model.weights().buffers)
    for part in parse(method).parts:
        if part.needs_batchnorm and not has_norm:
            raise ModelError(
                f"{part.name} keeps BatchNorm on the clients, but the model has none, so it would "
                "be FedAvg; choose a model with BatchNorm, e.g. --model "
                '"mlp(norm=bn)", or another method'
            )
