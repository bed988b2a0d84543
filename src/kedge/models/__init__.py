"""The models of the papers, each a sequence of named stages that ends in a ``head``.

Every boundary between two children is a cut; what enters the head are flat features [B, F]. A
model of your own is a function of an input shape and a number of outputs, registered by name::

    @models.register("tiny")
    def tiny(shape, outputs, *, width=8):
        return nn.Sequential(OrderedDict(stage1=..., head=nn.Linear(width, outputs)))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from kedge.errors import FieldError, GrammarError, UnknownName
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

__all__ = ["build", "models", "norm_layer", "options"]

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


def options(name: str) -> list[str]:
    """The options that a model takes.

    >>> options("lenet5")
    ['norm']
    """
    parameters = inspect.signature(models[name]).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def build(text: str, shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """The model that a string names, for one input shape (without batch) and number of outputs.

    >>> [name for name, _ in build("mlp(hidden=[64, 32])", (10,), 2).named_children()]
    ['stage1', 'stage2', 'head']
    """
    name, preset, args, given = parse_call(text)
    builder, known = models[name], options(name)
    if preset is not None or args:
        example = f"{name}({known[0]}=...)" if known else name
        raise GrammarError(f"{text!r}: options of a model are written by name, as in {example}")
    for key in given:
        if key not in known:
            raise UnknownName(f"option of {name}", key, known)
    try:
        return builder(tuple(shape), outputs, **given)
    except FieldError as error:
        raise FieldError(f"{name}.{error}") from None
