"""The models of the papers, each a sequence of named stages that ends in a ``head``.

Every boundary between two children is a cut. The input of the head is the features ``[B, F]``. A
user's own model is a function of input shape and number of outputs, registered by name::

    @models.register("tiny")
    def tiny(shape, outputs, *, width: Annotated[int, Doc("channels"), Range(1)] = 8):
        return nn.Sequential(OrderedDict(stage1=..., head=nn.Linear(width, outputs)))
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from kedge.grammar import parse_call
from kedge.models.basic import linear, mlp
from kedge.models.cct import cct7
from kedge.models.cnn import (
    fedcog_cnn,
    fedcog_cnn100,
    feddc_lenet,
    lenet5,
    mnist_cnn,
    pamap2_cnn,
    pfl_cnn,
)
from kedge.models.layers import norm_layer
from kedge.models.resnet import resnet18, resnet34, resnet50
from kedge.models.vgg import vgg9, vgg11
from kedge.registry import Registry
from kedge.schema import BoundCall, Schema, schema_of

__all__ = ["build", "models", "norm_layer", "read", "schema"]

models = Registry[Callable[..., nn.Sequential]](
    "model", see="kedge list models", group="kedge.models"
)

_small = (
    linear,
    mlp,
    lenet5,
    fedcog_cnn,
    fedcog_cnn100,
    feddc_lenet,
    mnist_cnn,
    pfl_cnn,
    pamap2_cnn,
)
_large = (vgg9, vgg11, resnet18, resnet34, resnet50, cct7)
for _builder in _small + _large:
    models.add(_builder.__name__, _builder)


def schema(name: str) -> Schema:
    """The options of a model: types, defaults, ranges and help.

    >>> list(schema("lenet5").options)
    ['norm']
    """
    return schema_of(models[name], name)


def read(text: str) -> BoundCall:
    """Parse a model and bind its options, without building it.

    Raises:
        UnknownName: there is no such model or option.
        FieldError: the value of an option is wrong.
        GrammarError: the text cannot be parsed, or an option has no name.
    """
    call = parse_call(text)
    return BoundCall(call.name, models[call.name], schema(call.name).bind(call, by_name=True))


def build(text: str, shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Build a model.

    Args:
        text: a model with options, such as ``resnet18(norm=gn)``.
        shape: input shape without the batch dimension, ``(C, H, W)`` for images.
        outputs: number of outputs, such as classes.

    Returns:
        A module that maps ``[B, *shape]`` to ``[B, outputs]``.

    Raises:
        UnknownName: there is no such model or option.
        FieldError: the value of an option is wrong.
        GrammarError: the text cannot be parsed, or an option has no name.
        ModelError: the model does not take inputs of this shape.

    >>> import torch
    >>> build("lenet5", (1, 28, 28), 10)(torch.rand(4, 1, 28, 28)).shape
    torch.Size([4, 10])
    >>> [name for name, _ in build("mlp(hidden=[64, 32])", (10,), 2).named_children()]
    ['stage1', 'stage2', 'head']
    """
    model: nn.Sequential = read(text)(tuple(shape), outputs)
    model.built_from = text  # type: ignore[assignment]  # a saved model says how it is built again
    return model
