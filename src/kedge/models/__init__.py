"""The models of the papers, each a sequence of named stages that ends in a ``head``.

Every boundary between two children is a cut. The input of the head is the features ``[B, F]``. A
user's own model is a function of input shape and number of outputs, registered by name::

    @models.register("tiny")
    def tiny(shape, outputs, *, width: Annotated[int, Doc("channels"), Range(1)] = 8):
        return nn.Sequential(OrderedDict(stage1=..., head=nn.Linear(width, outputs)))
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from kedge.errors import GrammarError, ModelError
from kedge.grammar import parse_call
from kedge.models.hf import hf, hf_config, hf_from_config
from kedge.models.networks import (
    cct7,
    fedcog_cnn,
    fedcog_cnn100,
    feddc_lenet,
    lenet5,
    linear,
    mlp,
    mnist_cnn,
    norm_layer,
    pamap2_cnn,
    pfl_cnn,
    resnet18,
    resnet34,
    resnet50,
    vgg9,
    vgg11,
)
from kedge.registry import Registry
from kedge.schema import BoundCall, Schema, schema_of

__all__ = ["build", "build_again", "hf_config", "models", "norm_layer", "read", "schema"]

models = Registry[Callable[..., nn.Sequential]](
    "model", see="kedge list models", group="kedge.models"
)

HF = "hf:"  # how the names of Hugging Face's models start
OWN = "own"  # a module that is given as such, in place of a name

_builders = (
    linear, mlp, lenet5, fedcog_cnn, fedcog_cnn100, feddc_lenet, mnist_cnn, pfl_cnn, pamap2_cnn,
    vgg9, vgg11, resnet18, resnet34, resnet50, cct7,
)  # fmt: skip
for _builder in _builders:
    models.add(_builder.__name__, _builder)


def schema(name: str) -> Schema:
    """The options of a model: types, defaults, ranges and help.

    >>> list(schema("lenet5").options)
    ['norm']
    """
    return schema_of(models[name], name)


def read(text: str) -> BoundCall:
    """Parse a model and bind its options, without building it.

    ``hf:NAME`` is a model of Hugging Face, see :func:`kedge.models.hf.hf`.

    Raises:
        UnknownName: there is no such model or option.
        FieldError: the value of an option is wrong.
        GrammarError: the text cannot be parsed, or an option has no name.
    """
    if text.startswith(HF):
        return _read_hf(text)
    call = parse_call(text)
    return BoundCall(call.name, models[call.name], schema(call.name).bind(call, by_name=True))


def name_of(text: str) -> str:
    """The name of a model without its options; a GrammarError if it has none.

    >>> name_of("mlp(hidden=[64, 32])"), name_of("hf:folder (old)/net(lora=8)")
    ('mlp', 'hf:folder (old)/net')
    """
    return HF + _halves(text)[0] if text.startswith(HF) else parse_call(text).name


def _halves(text: str) -> tuple[str, str]:
    """Name and options of ``hf:NAME_OR_FOLDER(option=value)``; a folder may have any characters."""
    found = re.fullmatch(r"hf:(.*?)(\([^()]*\))?\s*", text, re.DOTALL)
    assert found is not None
    return found[1].strip(), found[2] or ""


def _read_hf(text: str) -> BoundCall:
    name, options = _halves(text)
    if not name:
        raise GrammarError(f"{text!r} names no model; write hf:NAME or hf:FOLDER")
    call = parse_call(f"hf{options}")
    values = schema_of(hf, "hf").bind(call, by_name=True)
    return BoundCall(text, partial(hf, name=name), values)


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


def build_again(
    text: str, shape: tuple[int, ...], outputs: int, config: dict[str, Any] | None = None
) -> nn.Module:
    """As :func:`build`, for weights that are loaded next: a Hugging Face model needs its ``config``
    (:func:`hf_config`), but neither its folder nor the Hub.

    Raises:
        ModelError: the config is missing.
    """
    if config is None and text.startswith(HF):
        raise ModelError(f"the configuration of {text} is missing, and kedge fetches none here")
    if config is None:
        return build(text, shape, outputs)
    return hf_from_config(tuple(shape), config, **read(text).options)
