"""Several simulations as lanes of one computation: the fields that differ between them.

Simulations of equal structure that differ in their seeds, or in numbers such as a learning rate or
``fedprox(mu=0.1)``, can train side by side. The mapped functions then share one
:class:`LaneBound`, and ``Job.fields`` holds the values of each lane.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.optim import Optimizer
from kedge.core.part import HOOKS, Part
from kedge.core.tree import Params
from kedge.core.view import Data, Fields
from kedge.errors import HookError

# owners of fields that are not parts; no part can have such a name
SPEC, OPTIM = "(spec)", "(optimiser)"


class Number:
    """A field with a different value in every lane, where a part expects a plain number.

    Arithmetic gives tensors. A comparison gives a bool if all lanes agree (``if self.mu``,
    ``self.mu > 0``). Anything else that needs one number for all lanes raises a TypeError.
    """

    def __init__(self, value: Tensor, values: Sequence[float]) -> None:
        self.value, self.values = value, values  # of this lane, of all lanes

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_values(args), **_values(kwargs or {}))

    def _all(self, test: Callable[[float], bool]) -> bool:
        answers = {test(value) for value in self.values}
        if len(answers) > 1:
            raise TypeError("a Python branch depends on a field that differs between lanes")
        return answers.pop()

    def __bool__(self) -> bool:
        return self._all(bool)

    def __float__(self) -> float:
        raise TypeError("a field that differs between lanes cannot be converted to a plain number")

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
    """The names of the initial weights; their values differ between simulations."""

    def __getitem__(self, name: str) -> Tensor:
        raise HookError("v.spec.params differs between lanes; only its names can be read")

    def values(self) -> Any:
        return self[""]

    def items(self) -> Any:
        return self[""]

    def get(self, *_: Any) -> Any:
        return self[""]


class LaneBound(Bound):
    """The bindings of several simulations as one; :meth:`lane` returns that of a single lane."""

    def __init__(self, bounds: Sequence[Bound], data: Data) -> None:
        vars(self).update(vars(bounds[0]))
        self._by_phases = {}
        self.data = data
        self.differing = _differing_fields(bounds)
        names: tuple[Params, Params] = _Names(self.spec.params), _Names(self.spec.buffers)
        self.spec = dataclasses.replace(self.spec, params=names[0], buffers=names[1])

    def fields(self, bounds: Sequence[Bound]) -> Fields:
        """The differing fields, stacked by simulation."""
        like = next(iter(self.initial.params.values()))
        found: Fields = {SPEC: {"key": torch.stack([b.spec.key for b in bounds])}}
        for owner, fields in self.differing.items():
            found[owner] = {
                name: torch.tensor(values, dtype=like.dtype, device=like.device)
                for name, values in fields.items()
            }
        return found

    def lane(self, fields: Fields) -> Bound:
        """The binding of the lane with these fields; for mapped functions."""
        bound = copy.copy(self)
        bound.spec = dataclasses.replace(self.spec, key=fields[SPEC]["key"])
        bound.optim = self._with_fields(self.optim, OPTIM, fields)
        parts = {part.name: self._with_fields(part, part.name, fields) for part in self.parts}
        bound.parts = tuple(parts.values())
        bound._hooked = {hook: tuple(parts[p.name] for p in self._hooked[hook]) for hook in HOOKS}
        return bound

    def _with_fields(self, target: Any, owner: str, fields: Fields) -> Any:
        """A copy of a part or optimizer with the lane's values, without validation."""
        if owner not in self.differing:
            return target
        target = copy.copy(target)
        for name, values in self.differing[owner].items():
            object.__setattr__(target, name, Number(fields[owner][name], values))
        return target


def difference(first: Bound, other: Bound) -> str:
    """The first structural difference that keeps two bindings from sharing a computation; empty if
    there is none."""
    a, b = _structure(first), _structure(other)
    found = next((name for name in a if a[name] != b[name]), "")
    same = found or tree.equal(first.model.constants, other.model.constants)
    return found if same else "their frozen weights"


def floats(target: Part | Optimizer) -> Iterator[str]:
    """Names of the float fields, which can differ between lanes."""
    for field in dataclasses.fields(target):
        if type(getattr(target, field.name)) is float:
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


def static(target: Part | Optimizer) -> dict[str, Any]:
    """The fields that must be equal in all lanes. A schedule may differ: it acts on the learning
    rate of each lane."""
    per_lane = {*floats(target), "schedule"}
    names = [f.name for f in dataclasses.fields(target)]
    return {name: getattr(target, name) for name in names if name not in per_lane}


def _differing_fields(bounds: Sequence[Bound]) -> dict[str, dict[str, list[float]]]:
    """The values of every field that differs between simulations, by owner and name."""
    rows = [[(OPTIM, b.optim), *((p.name, p) for p in b.parts)] for b in bounds]
    found: dict[str, dict[str, list[float]]] = {}
    for column in zip(*rows, strict=True):
        owner, first = column[0]
        for name in floats(first):
            values = [getattr(target, name) for _, target in column]
            if len(set(values)) > 1 and (owner, name) != (OPTIM, "lr"):
                found.setdefault(owner, {})[name] = values
    return found
