"""Check third-party parts on one client, eagerly, before the first round.

A hook must not keep state, change its arguments in place or use a global random generator. Under
``vmap``, in a captured graph or in a compiled step such a hook fails with an obscure error, or
gives wrong results from the second call on. So before the engine starts, one client's round (begin,
one step, end) runs twice in eager mode with the reference arithmetic, and every hook is watched.
The results are discarded. Kedge's own parts are skipped: tests cover them.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kedge.core import client, tree
from kedge.core.bound import Bound
from kedge.core.hooks import KEEP_STATE, watched
from kedge.core.part import Part
from kedge.core.round import Round
from kedge.core.view import Job, Spec, View
from kedge.errors import HookError

MAX_PHASES = 8  # checked per run: a part may have a different phase in every round
DEPTH = 5  # levels of containers and objects that are compared in an attribute
ROUNDING = 1e-4  # relative difference due to the order of a parallel sum
GENERATORS = {"torch": "torch", "cuda": "torch on the GPU", "numpy": "numpy", "python": "Python"}

_enabled: ContextVar[bool] = ContextVar("enabled", default=True)


@contextmanager
def disabled() -> Iterator[None]:
    """Disable the checks within the block, for code that checks parts by other means."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def check_client(bound: Bound, job: Job, index: Tensor, who: int = 0, every: bool = False) -> None:
    """Run a client's round twice and watch the hooks; nothing is changed.

    Args:
        bound: the binding with the phases of the round.
        job: the client's job.
        index: rows of the batch, ``[B]``.
        who: the client's number, for messages.
        every: whether to watch kedge's own parts, too.

    Raises:
        HookError: a hook breaks a rule; the message names the part, the hook and the remedy.

    Example::

        check_client(sim.bound.at(0), take_jobs(cohort.jobs, 0), cohort.batches[0, 0])
    """
    watch = Watch(every)
    with _preserve_random_state(), watched(watch):
        for _ in range(2):
            with _naming(f"client {who}"):
                carry = client.begin(bound, job)
            with _naming(f"client {who}, step 0"):
                carry = client.step(bound, job, carry, index)
            with _naming(f"client {who}"):
                client.end(bound, job, carry)
                if bound.parts_with("personal"):
                    client.personal(bound, job)
            watch.again()


def check_survey(bound: Bound, job: Job, part: Part, who: int = 0) -> None:
    """Run a part's survey on a client twice and watch the hook, as :func:`check_client` does."""
    watch = Watch()
    with _preserve_random_state(), watched(watch), _naming(f"client {who}"):
        for _ in range(2):
            client.survey(bound, job, part)
            watch.again()


def watching(due: bool = True) -> AbstractContextManager[None]:
    """Watch the hooks that run within the block if a check is due."""
    return watched(Watch()) if due and _enabled.get() else nullcontext()


class Checks:
    """The checks of one run: each is due once per phase, and only with third-party parts.

    >>> with Checks(()).once("client", {}) as due:
    ...     due
    False
    """

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.foreign = any(map(is_foreign, parts))
        self._done: dict[str, list[dict[str, str]]] = {}

    @contextmanager
    def once(self, what: str, phases: dict[str, str]) -> Iterator[bool]:
        """Whether a check is due; the block runs it. A check that raises stays due."""
        done = self._done.setdefault(what, [])
        due = self.foreign and _enabled.get() and phases not in done and len(done) < MAX_PHASES
        yield due
        if due:
            done.append(phases)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except HookError as error:
        raise HookError(f"{error} ({where})") from error


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Restore the state of the global random generators after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


# -- watching one hook ---------------------------------------------------------------------------


class WatchedCall(NamedTuple):
    """One call of a hook: its inputs and its result."""

    part: str
    hook: str
    inputs: list[object]
    result: list[object]


class Watch:
    """Run hooks, and raise a HookError if one of a third-party part is not pure.

    After :meth:`again`, the same calls are expected once more, with the same results.

    Args:
        every: whether to watch kedge's own parts, too.
    """

    def __init__(self, every: bool = False) -> None:
        self._every = every
        self._calls: list[WatchedCall] = []
        self._first: Iterator[WatchedCall] | None = None

    def again(self) -> None:
        """Expect the calls so far once more, in the same order."""
        self._first, self._calls = iter(self._calls), []

    def __call__(self, part: Part, hook: str, args: tuple[Any, ...]) -> Any:
        if not (self._every or is_foreign(part)):
            return getattr(part, hook)(*args)
        inputs, attributes = _inputs(hook, args), _attributes(part)
        versions, generators = _versions(inputs), _generators()
        values = _values(inputs)
        result = getattr(part, hook)(*args)
        where = f"{part.name}.{hook}"
        drawn = _changed(generators, _generators())
        if drawn:
            raise HookError(
                f"{where} draws from the global random numbers of {GENERATORS[drawn[0]]}, so no "
                f"run could be repeated or resumed; {_draw_instead(args)}"
            )
        assigned = _changed(attributes, _attributes(part))
        if assigned:
            raise HookError(f"{where} changed {assigned[0]}; {KEEP_STATE}")
        written = _changed(versions, _versions(_inputs(hook, args)))
        if written:
            raise HookError(
                f"{where} changed its argument {written[0]} in place; return a new tensor or dict "
                "instead (x + y for x.add_(y), d | {name: x} for d[name] = x)"
            )
        self._compare(WatchedCall(part.name, hook, values, _values(list(_nodes(result, "")))))
        return result

    def _compare(self, call: WatchedCall) -> None:
        """Raise a HookError if a repeated call has another result."""
        self._calls.append(call)
        first = next(self._first, None) if self._first is not None else None
        if first is None:
            return
        same_inputs = first[:2] == call[:2] and _same(first.inputs, call.inputs)
        if not same_inputs:  # nondeterminism of a kernel or of the model, not of this hook
            self._first = None
        elif not _same(first.result, call.result, ROUNDING if _may_round() else 0.0):
            raise HookError(
                f"{call.part}.{call.hook} returned something else when it was called again with "
                "the same arguments; it may depend on nothing but these and the part's fields"
            )


def is_foreign(part: Part) -> bool:
    """Whether a part is third-party, that is, defined outside of kedge."""
    return type(part).__module__.partition(".")[0] != "kedge"


# -- inputs of a hook -----------------------------------------------------------------------------

#: What a hook can reach through arguments of these types.
REACH: dict[type, tuple[str, ...]] = {
    View: ("client", "sent", "local", "anchor", "info"),
    Round: ("server", "uploads", "anchor", "mean_delta", "sums"),
    Spec: ("params", "buffers"),
}


def _inputs(hook: str, args: tuple[object, ...]) -> list[tuple[str, object]]:
    """All containers and leaves that a hook can reach through its arguments, with their paths."""
    return [node for name, value in _reachable(hook, args) for node in _nodes(value, name)]


def _reachable(hook: str, args: tuple[object, ...]) -> Iterator[tuple[str, object]]:
    names = list(inspect.signature(getattr(Part, hook)).parameters)[1:]
    pairs = list(zip(names, args, strict=True))
    for name, value in reversed(pairs):  # the view last: it may contain an argument again
        slots = next((slots for kind, slots in REACH.items() if isinstance(value, kind)), None)
        if slots is None:
            yield name, value
        for slot in slots or ():
            try:
                yield f"{name}.{slot}", getattr(value, slot)
            except KeyError:  # a survey has no updates
                continue


def _nodes(value: object, path: str) -> Iterator[tuple[str, object]]:
    """All containers and leaves in a value, with their paths."""
    yield path, value
    if isinstance(value, dict):
        for key, item in dict.items(value):
            yield from _nodes(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from _nodes(item, f"{path}.{names[i]}" if names else f"{path}[{i}]")


def _versions(inputs: list[tuple[str, object]]) -> dict[str, object]:
    """Version of each tensor and keys of each dict, which reveal changes in place."""
    return {
        path: (id(node), node._version) if isinstance(node, Tensor) else list(node)
        for path, node in inputs
        if isinstance(node, (Tensor, dict))
    }


def _values(nodes: list[tuple[str, object]]) -> list[object]:
    """All leaves, tensors detached."""
    return [
        node.detach() if isinstance(node, Tensor) else node
        for _, node in nodes
        if isinstance(node, (Tensor, str, int, float))
    ]


def _same(first: list[object], second: list[object], tolerance: float = 0.0) -> bool:
    """Whether two lists of leaves are equal, bit for bit or up to rounding."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if type(a) is not type(b) or repr(a) != repr(b):
                return False
        elif a is not b and not tree.equal(a, b) and not tree.gap(a, b) <= tolerance:
            return False
    return True


def _may_round() -> bool:
    """Whether the order of a sum may differ between two equal calls."""
    return torch.get_num_threads() > 1 or torch.cuda.is_initialized()


# -- state outside of the arguments ---------------------------------------------------------------


def _attributes(part: Part) -> dict[str, object]:
    """Attributes of a part and of its class, in a form that reveals changes."""
    attributes = {f"self.{name}": _snapshot(value) for name, value in vars(part).items()}
    for owner in type(part).__mro__:
        if owner not in Part.__mro__:
            members = {n: v for n, v in vars(owner).items() if not n.startswith("__")}
            attributes |= {f"{owner.__name__}.{n}": _snapshot(v) for n, v in members.items()}
    return attributes


def _snapshot(value: object, depth: int = DEPTH) -> object:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return id(value), hash(value.tobytes())
    if isinstance(value, (str, bytes, int, float, complex)) or value is None:
        return repr(value)
    if depth == 0 or isinstance(value, type) or inspect.isroutine(value):
        return id(value)
    if isinstance(value, dict):
        return [(_snapshot(k, depth - 1), _snapshot(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_snapshot(v, depth - 1) for v in value]
    return id(value), _snapshot(getattr(value, "__dict__", None), depth - 1)


def _generators() -> dict[str, object]:
    """States of all global random generators."""
    states: dict[str, object] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    _, keys, *rest = np.random.get_state()
    states["numpy"] = hash((np.asarray(keys).tobytes(), *rest))
    if torch.cuda.is_initialized():
        states["cuda"] = torch.stack(torch.cuda.get_rng_state_all())
    return states


def _changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The names whose values differ."""
    return [name for name in {**before, **after} if _differ(before.get(name), after.get(name))]


def _differ(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not torch.equal(a, b)
    return bool(a != b)


def _draw_instead(args: tuple[object, ...]) -> str:
    """Advice: which key a hook with these arguments draws from."""
    keys = {View: "v.key", Round: "r.key", Spec: "spec.key"}
    for kind, key in keys.items():
        if any(isinstance(arg, kind) for arg in args):
            return f"draw from {key}: kedge.core.rng.normal({key}, shape)"
    return "draw where there is a key (v.key, r.key or spec.key) and keep the draw in a slot"
