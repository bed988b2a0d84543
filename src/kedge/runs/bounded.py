"""Build a module from a stranger's description within the memory that its weights call for.

A description of 1 kB can ask for a layer of any size. Every function of torch is first called on
the device ``meta``, which has shapes and no numbers: a tensor is refused before it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kedge.errors import ModelError
from kedge.limits import host_available

#: Bytes that any model may take to build, and bytes per byte of its file of weights.
BASE_BYTES, BYTES_PER_BYTE = 2**28, 4
#: What a new tensor counts as at least: its Python objects, and the time to make them.
TENSOR_BYTES = 2**15


class Bounded(TorchFunctionMode):
    """A context in which the memory of tensors is bounded: that of each of them, and that of all
    that are new or cloned together.

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
