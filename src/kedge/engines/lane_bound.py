"""Several simulations as lanes of one computation: what differs between them, seen by one lane.

Simulations of one structure that differ in their seeds, or in numbers such as a learning rate or
``fedprox(mu=0.1)``, can train side by side. The mapped functions are then given one
:class:`LaneBound` for all of them, and in ``Job.fields`` the values of their own lane.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.core.bound import Bound
from kedge.core.optim import Optimizer
from kedge.core.part import HOOKS, Part
from kedge.core.tree import Params
from kedge.core.view import Data, Fields
from kedge.errors import HookError

# owners of fields beside the parts; no part can be called so
SPEC, OPTIM = "(spec)", "(optimiser)"


class Number:
    """A field that has another value in every lane, where a part expects a plain number.

    Arithmetic gives tensors. What has the same answer in all lanes may be asked (``if self.mu``,
    ``self.mu > 0``); all else that needs one number for all of them raises.
    """

    def __init__(self, value: Tensor, every: Sequence[float]) -> None:
        self.value, self.every = value, every

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_values(args), **_values(kwargs or {}))

    def _all(self, test: Callable[[float], bool]) -> bool:
        answers = {test(value) for value in self.every}
        if len(answers) > 1:
            raise TypeError("a Python branch depends on a field that differs between lanes")
        return answers.pop()

    def __bool__(self) -> bool:
        return self._all(bool)

    def __float__(self) -> float:
        raise TypeError("one plain number is wanted of a field that differs between lanes")

    def __hash__(self) -> int:
        return id(self)


def _values(value: Any) -> Any:
    """Arguments of a torch function with every :class:`Number` as its tensor."""
    if isinstance(value, Number):
        return value.value
    if isinstance(value, dict):
        return {key: _values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_values(item) for item in value)
    return value


def _arithmetic(name: str) -> Callable[..., Tensor]:
    def method(self: Number, *others: Any) -> Tensor:
        plain = (other.value if isinstance(other, Number) else other for other in others)
        return getattr(self.value, name)(*plain)

    return method


def _comparison(name: str) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        if isinstance(other, (Tensor, Number)):
            return _arithmetic(name)(self, other)
        return self._all(lambda value: getattr(float(value), name)(other))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _side in (f"__{_name}__", f"__r{_name}__"):
        setattr(Number, _side, _arithmetic(_side))
for _name in ("__neg__", "__abs__"):
    setattr(Number, _name, _arithmetic(_name))
for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(Number, _name, _comparison(_name))


class _Names(dict[str, Tensor]):
    """The names of the first weights; their values belong to each simulation by itself."""

    def __getitem__(self, name: str) -> Tensor:
        raise HookError("v.spec.params holds other values in every lane; only names may be read")

    def values(self) -> Any:
        return self[""]

    def items(self) -> Any:
        return self[""]

    def get(self, *_: Any) -> Any:
        return self[""]


class LaneBound(Bound):
    """The bindings of several simulations as one; :meth:`lane` gives that of a single lane."""

    def __init__(self, bounds: Sequence[Bound], data: Data) -> None:
        vars(self).update(vars(bounds[0]))
        self._by_phases = {}
        self.data = data
        self.every = _differing(bounds)
        names: tuple[Params, Params] = _Names(self.spec.params), _Names(self.spec.buffers)
        self.spec = dataclasses.replace(self.spec, params=names[0], buffers=names[1])

    def fields(self, bounds: Sequence[Bound]) -> Fields:
        """What differs, one row per simulation: ``Job.fields`` before lanes are formed."""
        like = next(iter(self.initial.params.values()))
        found: Fields = {SPEC: {"key": torch.stack([b.spec.key for b in bounds])}}
        for owner, fields in self.every.items():
            found[owner] = {
                name: torch.tensor(values, dtype=like.dtype, device=like.device)
                for name, values in fields.items()
            }
        return found

    def lane(self, fields: Fields) -> Bound:
        """The binding of the lane that has these fields; for mapped functions."""
        own = copy.copy(self)
        own.spec = dataclasses.replace(self.spec, key=fields[SPEC]["key"])
        own.optim = self._set(self.optim, OPTIM, fields)
        parts = {part.name: self._set(part, part.name, fields) for part in self.parts}
        own.parts = tuple(parts.values())
        own._hooked = {hook: tuple(parts[p.name] for p in self._hooked[hook]) for hook in HOOKS}
        return own

    def _set(self, thing: Any, owner: str, fields: Fields) -> Any:
        """A copy with the lane's values, past the checks that want plain numbers."""
        if owner not in self.every:
            return thing
        thing = copy.copy(thing)
        for name, values in self.every[owner].items():
            object.__setattr__(thing, name, Number(fields[owner][name], values))
        return thing


def difference(first: Bound, other: Bound) -> str:
    """What keeps two bindings from being lanes of one computation; empty if nothing does."""
    mine, its = _structure(first), _structure(other)
    return next((what for what in mine if mine[what] != its[what]), "")


def floats(thing: Part | Optimizer) -> Iterator[str]:
    """Names of the fields that can differ between lanes."""
    for field in dataclasses.fields(thing):
        if type(getattr(thing, field.name)) is float:
            yield field.name


def _structure(bound: Bound) -> dict[str, Any]:
    spec, model = bound.spec, bound.model
    leaves = [*bound.initial.params.items(), *bound.initial.buffers.items()]
    return {
        "their methods": [(type(part), static(part)) for part in bound.parts],
        "their optimisers": (type(bound.optim), static(bound.optim)),
        "their models": (repr(model.template), model.head_name, model.batchnorm, model.precision),
        "their weights": [(name, x.shape, x.dtype, x.device) for name, x in leaves],
        "their tasks": spec.task,
        "their numbers of clients": spec.num_clients,
        "their inputs": spec.input_shape,
    }


def static(thing: Part | Optimizer) -> dict[str, Any]:
    """The fields that must be equal; a schedule is in the learning rate of each lane."""
    lanes = {*floats(thing), "schedule"}
    names = [f.name for f in dataclasses.fields(thing)]
    return {name: getattr(thing, name) for name in names if name not in lanes}


def _differing(bounds: Sequence[Bound]) -> dict[str, dict[str, list[float]]]:
    """The values of every field that is not the same in all simulations, by owner and name."""
    rows = [[(OPTIM, b.optim), *((p.name, p) for p in b.parts)] for b in bounds]
    found: dict[str, dict[str, list[float]]] = {}
    for things in zip(*rows, strict=True):
        owner, first = things[0]
        for name in floats(first):
            values = [getattr(thing, name) for _, thing in things]
            if len(set(values)) > 1 and (owner, name) != (OPTIM, "lr"):
                found.setdefault(owner, {})[name] = values
    return found
