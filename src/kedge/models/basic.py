"""Models for inputs of any shape: logistic regression and the multilayer perceptron."""

from __future__ import annotations

from typing import Annotated

from torch import nn

from kedge.models.layers import Norm, Shape, flat_size, head, named, norm_layer, stack
from kedge.schema import Count, Doc, Length


def linear(shape: Shape, outputs: int) -> nn.Sequential:
    """Logistic regression: the flattened input and a head, F·C + C parameters for F inputs.

    The convex model of federated benchmarks (McMahan et al., AISTATS 2017 and after); 7 850
    parameters for (1, 28, 28) and ten classes. Its features are the inputs.
    """
    return named(flatten=nn.Flatten(), head=head(flat_size("linear", shape), outputs))


def mlp(
    shape: Shape,
    outputs: int,
    *,
    hidden: Annotated[Count | tuple[Count, ...], Doc("sizes of the layers"), Length(1)] = (64,),
    norm: Norm = "none",
) -> nn.Sequential:
    """Fully connected layers with ReLU; each of the ``hidden`` sizes is a stage.

    ``mlp(hidden=[200, 200])`` is the 2NN of FedAvg (McMahan et al., AISTATS 2017): 199 210
    parameters for (1, 28, 28) and ten classes; 50 890 with the default ``hidden=[64]``. A norm
    goes between layer and ReLU; GroupNorm has one group.
    """
    sizes = hidden if isinstance(hidden, tuple) else (hidden,)
    inputs = flat_size("mlp", shape)
    stages = []
    for i, size in enumerate(sizes):
        layer = named(
            fc=nn.Linear(inputs, size), norm=norm_layer(norm, size, dims=0), relu=nn.ReLU()
        )
        stages.append(layer if i else named(flatten=nn.Flatten(), **dict(layer.named_children())))
        inputs = size
    return stack(*stages, head=head(inputs, outputs))
