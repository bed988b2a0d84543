"""The architecture of a model as plain data, from which it is built again.

A model is described in one of three ways: by the text of the model zoo, as layers of ``torch.nn``
in sequence, or by the import path of a class. No code is stored, and none is imported for a path: a
stranger wrote it. A class that needs arguments cannot be built again; the user gives the module.

A description of 1 kB can ask for a layer of any size: :class:`Bounded` builds within the memory
that the weights call for.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kedge.core.layers.adapting import add_hooks, hooks_of
from kedge.errors import KedgeError, ModelError, UnknownName
from kedge.limits import host_available
from kedge.models import build_again, hf_config

#: Arguments that say where and in which type a layer is created, or that are values to start from.
_SKIPPED = ("device", "dtype", "_weight", "_freeze")
_RECURRENT = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional",
)  # fmt: skip
_PLAIN = (bool, int, float, str, type(None))
#: Bytes that any model may take to build, and bytes per byte of its file of weights.
BASE_BYTES, BYTES_PER_BYTE = 2**28, 4
#: What a new tensor counts as at least: its Python objects, and the time to make them.
TENSOR_BYTES = 2**15


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


# -- memory ----------------------------------------------------------------------------------


class Bounded(TorchFunctionMode):
    """A context in which the memory of tensors is bounded: that of each of them, and that of all
    that are new or cloned together.

    Every function of torch is first called on the device ``meta``, which has shapes and no numbers:
    a tensor is refused before it is there.

    Args:
        size: bytes of the file of weights.
        what: what is built, for messages.

    Raises:
        ModelError: a function would take more.
    """

    def __init__(self, size: int, what: str) -> None:
        super().__init__()
        self.most = self.left = min(BASE_BYTES + BYTES_PER_BYTE * size, host_available())
        self.what = what

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check the size of the result of a function, and call it."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not name.endswith("_"):  # in place, or an attribute
            size = _size(func, args, kwargs)
            is_new = name == "clone" or next(_tensors((args, kwargs)), None) is None
            if is_new and size is not None:
                self.left -= max(size, TENSOR_BYTES)
            if (size or 0) > self.most or self.left < 0:
                raise ModelError(
                    f"{self.what} takes over {max(size or 0, self.most - self.left) / 1e9:.1f} GB; "
                    f"by the size of its weights and the free memory, {self.most / 1e9:.1f} GB "
                    "are its bound"
                )
        return func(*args, **kwargs)


def _size(func: Callable[..., Any], args: Any, kwargs: Any) -> int | None:
    """The bytes of a function's tensors; None without any, or if they depend on numbers."""
    try:
        with torch.device("meta"):
            found = func(*_as_meta(args), **_as_meta(kwargs))
    except Exception:  # noqa: BLE001  the function itself will say what is wrong
        return None
    sizes = [x.untyped_storage().nbytes() for x in _tensors(found)]
    return sum(sizes) if sizes else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _as_meta(value: Any) -> Any:
    """Tensors and devices in arguments, on the device ``meta``."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {
            key: torch.device("meta") if key == "device" else _as_meta(item)
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(map(_as_meta, value))
    return value
