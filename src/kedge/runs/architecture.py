"""The architecture of a model as plain data, from which it is built again.

A model is described in one of three ways: by the text of the model zoo, as layers of ``torch.nn``
in sequence, or by the import path of a class. No code is stored, and none is imported for a path: a
stranger wrote it. A class that needs arguments cannot be built again; the user gives the module.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from kedge.core.layers.adapting import add_hooks, hooks_of
from kedge.errors import KedgeError, ModelError, UnknownName
from kedge.models import build_again, hf_config

#: Arguments that say where and in which type a layer is created, or that are values to start from.
_SKIPPED = ("device", "dtype", "_weight", "_freeze")
_RECURRENT = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional",
)  # fmt: skip
_PLAIN = (bool, int, float, str, type(None))


def describe(module: nn.Module) -> dict[str, Any]:
    """The architecture of a module as plain data; ``outputs`` says how its outputs are converted,
    see :mod:`kedge.core.layers.adapting`."""
    hooks = hooks_of(module)
    return _described(module) | ({"outputs": hooks} if hooks else {})


def _described(module: nn.Module) -> dict[str, Any]:
    text = getattr(module, "built_from", None)
    if isinstance(text, str):
        config = hf_config(module)
        return {"kind": "zoo", "text": text} | ({"config": config} if config else {})
    with torch.random.fork_rng(devices=()):  # layers are built, which draws their weights
        layers = _layers(module)
    if layers is not None:
        return {"kind": "layers", "layers": layers}
    cls = type(module)
    required = [
        p.name
        for p in inspect.signature(cls).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return {"kind": "class", "path": f"{cls.__module__}:{cls.__qualname__}", "needs": required}


def rebuild(
    architecture: Mapping[str, Any],
    shape: tuple[int, ...],
    outputs: int,
    given: nn.Module | Callable[[], nn.Module] | None = None,
) -> nn.Module:
    """Build a module, with arbitrary weights. A given module is copied.

    Args:
        architecture: what :func:`describe` returned.
        shape: input shape without the batch dimension.
        outputs: number of outputs.
        given: the user's own module, or a class or function that makes it; it is taken instead.

    Raises:
        ModelError: the architecture cannot be built here; the message says what to give.
    """
    module = _rebuilt(architecture, shape, outputs, given)
    hooks = architecture.get("outputs", {})
    try:
        add_hooks(module, hooks)
    except AttributeError as error:
        raise ModelError(f"the model is not as it was trained: {error}") from None
    return module


def _rebuilt(
    architecture: Mapping[str, Any],
    shape: tuple[int, ...],
    outputs: int,
    given: nn.Module | Callable[[], nn.Module] | None,
) -> nn.Module:
    if given is not None:
        module = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
        if not isinstance(module, nn.Module):
            raise ModelError(f"model = {given!r} is neither a module nor a function that makes one")
        return module
    kind = architecture.get("kind")
    if kind == "zoo":
        return build_again(architecture["text"], shape, outputs, architecture.get("config"))
    if kind == "layers":
        return _from_layers(architecture["layers"])
    if kind == "class":
        return _from_class(architecture)
    raise ModelError(f"an architecture of kind {kind!r} is unknown to this kedge")


def _from_class(architecture: Mapping[str, Any]) -> nn.Module:
    path = str(architecture["path"])
    name, _, qualname = path.partition(":")
    advice = "give the module: kedge.load(FOLDER, model=...)"
    options = f"load the file of the class: --load FILE.py. In Python, import it first, or {advice}"
    if architecture["needs"]:
        words = ", ".join(architecture["needs"])
        raise ModelError(f"the model is of your class {path}, made with {words}; {advice}")
    if name == "__main__" or "<" in qualname:
        raise ModelError(
            f"the model is of your class {qualname}, which is not in an importable file; {advice}"
        )
    file = f"kedge_file_{name.rpartition('.')[2]}"  # of --load
    found: Any = sys.modules.get(name) or sys.modules.get(file)
    for piece in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(piece)  # a module may import what one asks for
    if found is None:
        raise ModelError(
            f"the model is of your class {path}, which is not imported, as a bundle imports no "
            f"code; {options}"
        )
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ModelError(f"{path} is not a class of modules; {advice}")
    module: nn.Module = found()
    return module


# -- layers of torch.nn -----------------------------------------------------------------------


def _layers(module: nn.Module) -> dict[str, Any] | None:
    """Type and arguments of a layer of ``torch.nn``, or a sequence of them; None for others."""
    cls = type(module)
    if getattr(nn, cls.__name__, None) is not cls:
        return None
    if cls is nn.Sequential:
        pairs = module._modules.items()  # a layer that occurs twice is there under both names
        children = {name: _layers(child) for name, child in pairs if child is not None}
        if any(child is None for child in children.values()):
            return None
        return {"type": "Sequential", "children": children}
    if list(module.children()):
        return None  # its arguments are not among its attributes
    arguments = _arguments(module)
    if arguments is None:
        return None
    description = {"type": cls.__name__, "arguments": arguments}
    try:
        again = _from_layers(description)
        shapes = [{n: v.shape for n, v in m.state_dict().items()} for m in (module, again)]
    except (KedgeError, TypeError, ValueError, RuntimeError):
        return None
    same = shapes[0] == shapes[1] and repr(again) == repr(module)
    return description if same else None


def _arguments(module: nn.Module) -> dict[str, Any] | None:
    names = list(inspect.signature(type(module)).parameters)
    if isinstance(module, nn.RNNBase):
        names = [*_RECURRENT, *(["proj_size"] if isinstance(module, nn.LSTM) else [])]
        names += ["nonlinearity"] if isinstance(module, nn.RNN) else []
    found: dict[str, Any] = {}
    for name in names:
        if name in _SKIPPED:
            continue
        if not hasattr(module, name):
            return None
        value = getattr(module, name)
        if name == "bias" and not isinstance(value, bool):
            value = value is not None
        value = list(value) if isinstance(value, tuple) else value
        if not isinstance(value, (*_PLAIN, list)):
            return None
        found[name] = value
    return found


def _from_layers(description: Mapping[str, Any]) -> nn.Module:
    name = str(description.get("type"))
    cls = getattr(nn, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UnknownName("layer of torch.nn", name, ())
    if cls is nn.Sequential:
        module = nn.Sequential()
        for child, inner in description["children"].items():
            module.add_module(child, _from_layers(inner))
        return module
    arguments = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in description["arguments"].items()
    }
    layer: nn.Module = cls(**arguments)
    return layer
