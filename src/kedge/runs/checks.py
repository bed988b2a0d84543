"""What a run refuses, though its simulation would be well defined."""

from __future__ import annotations

import torch

from kedge.core.method import parse
from kedge.core.model import Model
from kedge.data.federation import Federation
from kedge.errors import ModelError


def check_batchnorm(method: str, model: Model) -> None:
    """Raise a ModelError for a part that is about BatchNorm if the model has none."""
    has_norm = any(name.split(".")[-1] == "running_mean" for name in model.own_weights().buffers)
    for part in parse(method).parts:
        if part.needs_batchnorm and not has_norm:
            raise ModelError(
                f"{part.name} keeps BatchNorm on the clients, but the model has none, so it would "
                "be FedAvg; choose a model with BatchNorm, e.g. --model "
                '"mlp(norm=bn)", or another method'
            )


def check_tokens(model: Model, federation: Federation) -> None:
    """Raise a ModelError for token ids that an embedding of the model does not have."""
    if not federation.tokens:
        return
    inputs = [federation.x.reshape(len(federation.x), -1)]
    if federation.has_test:
        inputs += [batch.x.reshape(len(batch.x), -1) for batch in federation.test_batches()]
    extremes = [x[i] for x in inputs for i in (x.amax(1).argmax(), x.amin(1).argmin())]
    net, x = model.template, torch.stack(extremes).reshape(-1, *federation.input_shape)
    place = next((p.device for p in net.parameters()), x.device)
    training = net.training
    net.eval()
    try:
        with torch.no_grad():
            net(x.to(place))
    except IndexError as error:
        rows = [m.num_embeddings for m in net.modules() if isinstance(m, torch.nn.Embedding)]
        has = f" (rows of its embeddings: {', '.join(map(str, rows))})" if rows else ""
        raise ModelError(
            f"the model cannot take these token ids, from {int(x.min())} to {int(x.max())}, or so "
            f"many of them: {error}{has}"
        ) from error
    except RuntimeError:
        pass  # it takes no tokens at all: the simulation says so
    finally:
        net.train(training)
