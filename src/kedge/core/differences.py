"""Describe in words how a value differs from an expected tree, parameters or weights.

Each function returns an empty string if there is no difference. It compares types, names and
shapes, never values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kedge.core.tree import Weights
from kedge.errors import nearest


def described(value: Any) -> str:
    """A returned value in a few words: ``a tensor of shape [5]``."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        kind = "a tensor" if value.is_floating_point() else f"a tensor of {dtype_name(value)}"
        return f"{kind} of shape {list(value.shape)}"
    if type(value) is tuple:
        return f"a tuple of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def at(path: str) -> str:
    return f" at {path!r}" if path else ""


def not_a_tree(value: Any, path: str = "") -> str:
    """The first item of a value that is not a tree; empty if the value is a tree."""
    if isinstance(value, Tensor):
        return ""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, tuple) and (hasattr(value, "_fields") or not value):
        items = zip(getattr(value, "_fields", ()), value, strict=True)
    else:
        return f"{described(value)}{at(path)}"
    for key, item in items:
        if not isinstance(key, str):
            return f"a dict whose key {key!r} is no string{at(path)}"
        wrong = not_a_tree(item, f"{path}/{key}" if path else key)
        if wrong:
            return wrong
    return ""


def tree_gap(value: Any, like: Any, path: str = "") -> str:
    """The first difference of two trees in structure or shapes."""
    if isinstance(like, Tensor):
        if isinstance(value, Tensor) and value.shape == like.shape:
            return ""
        return f"{described(value)}{at(path)} in place of shape {list(like.shape)}"
    if isinstance(like, dict):
        if not isinstance(value, dict):
            return f"{described(value)}{at(path)} in place of a dict"
        if value.keys() != like.keys():
            return f"a dict {names_gap(value, like)}{at(path)}"
        pairs: Any = ((key, value[key], like[key]) for key in like)
    else:
        if type(value) is not type(like):
            return f"{described(value)}{at(path)} in place of {described(like)}"
        pairs = zip(getattr(like, "_fields", ()), value, like, strict=False)
    for key, item, other in pairs:
        wrong = tree_gap(item, other, f"{path}/{key}" if path else key)
        if wrong:
            return wrong
    return ""


def names_gap(value: Mapping[str, Any], like: Mapping[str, Any]) -> str:
    """How the names of a dict differ from those of another: ``without 'a'`` or ``with 'b'``."""
    for name in value:
        if name not in like:
            near = nearest(str(name), like)
            return f"with the unknown name {name!r}" + (f" (like {near[0]!r})" if near else "")
    missing = [name for name in like if name not in value]
    return "without " + ", ".join(repr(name) for name in missing[:3])


def params_gap(made: Any, params: Mapping[str, Tensor], whole: bool) -> str:
    """The first name or shape of a dict that is not a parameter's; with ``whole``, also missing
    names."""
    if not isinstance(made, dict):
        return described(made)
    for name, value in made.items():
        if name not in params:
            return f"a dict {names_gap(made, params)}"
        if not isinstance(value, Tensor) or value.shape != params[name].shape:
            return f"{described(value)} for {name!r} of shape {list(params[name].shape)}"
    if whole and len(made) != len(params):
        return f"a dict {names_gap(made, params)}"
    return ""


def weights_gap(made: Any, weights: Weights) -> str:
    if not isinstance(made, Weights):
        return described(made)
    return params_gap(made.params, weights.params, True) or params_gap(
        made.buffers, weights.buffers, True
    )
