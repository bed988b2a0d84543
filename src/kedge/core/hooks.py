"""Calling a part's hooks, and checking what each of them returns.

:data:`RETURNS` says for every hook what it must return. :func:`call` checks it where the hook is
called, by types, names and shapes alone: no value is read, so it works under ``vmap``, in a trace
and while a graph is captured, and costs next to nothing. A :data:`Watch` may run hooks in place of
``call``, to check more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import FrozenInstanceError
from typing import Any

from torch import Size, Tensor

from kedge.core.differences import (
    at,
    described,
    dtype_name,
    names_gap,
    not_a_tree,
    params_gap,
    tree_gap,
    weights_gap,
)
from kedge.core.part import Mean, Part, Stack, Sum
from kedge.core.task import Batch
from kedge.core.tree import Weights
from kedge.errors import HookError, KedgeError, nearest

#: Runs ``(part, hook, arguments)`` and returns what the hook returns.
Watch = Callable[[Part, str, tuple[Any, ...]], Any]
#: ``(part, returned value, *arguments)`` to what is wrong with the value; empty if nothing is.
Check = Callable[..., str]

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)

TREE = "a tensor, a dict of trees or a named tuple of trees"

KEEP_STATE = (
    "a part is never changed: what it must remember belongs into a slot (server, client or local)"
)


def call(part: Part, hook: str, *args: Any) -> Any:
    """Call one hook and check what it returns.

    Raises a HookError that names the part and the hook where the hook fails or returns something
    else than :data:`RETURNS` says.
    """
    watch = _watch.get()
    try:
        made = getattr(part, hook)(*args) if watch is None else watch(part, hook, args)
        wrong = RETURNS[hook](part, made, *args)
    except KedgeError:
        raise
    except FrozenInstanceError as error:
        raise HookError(f"{part.name}.{hook} sets an attribute ({error}); {KEEP_STATE}") from error
    except Exception as error:
        raise HookError(f"{part.name}.{hook} failed: {type(error).__name__}: {error}") from error
    if wrong:
        raise HookError(f"{part.name}.{hook} returned {wrong}")
    return made


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Let ``watch`` run all hooks within the block."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def _but(wrong: str, right: str) -> str:
    return f"{wrong}; it must return {right}" if wrong else ""


# -- what each hook must return -------------------------------------------------------------------


def _tree(part: Part, made: Any, *_: Any) -> str:
    return _but(not_a_tree(made), f"{TREE}: write torch.as_tensor(x) for a number")


def _extend(part: Part, made: Any, spec: Any) -> str:
    right = "a dict of floating-point tensors, by name"
    if not isinstance(made, dict):
        return _but(described(made), right)
    for name, value in made.items():
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return _but(f"{described(value)} for {name!r}", right)
    return ""


def _private(part: Part, made: Any, spec: Any) -> str:
    if not isinstance(made, (set, frozenset)):
        return _but(described(made), "a set of names of parameters and buffers")
    known = {*spec.params, *spec.buffers}
    unknown = sorted(map(str, made - known))
    if not unknown:
        return ""
    near = nearest(unknown[0], known) or sorted(known)[:3]
    return f"the name {unknown[0]!r}, which the model does not have; there are " + ", ".join(near)


def _phase(part: Part, made: Any, round: int) -> str:
    return "" if isinstance(made, str) else _but(described(made), "a string, such as 'warm'")


def _uploads(part: Part, made: Any, path: str = "") -> str:
    """What is wrong with uploads."""
    if isinstance(made, (Sum, Mean, Stack)):
        if isinstance(made, Stack) and not part.needs_clients:
            return f"a Stack as upload{at(path)}: declare needs_clients = True"
        return _but(not_a_tree(made.value, path), f"uploads whose values are each {TREE}")
    if isinstance(made, dict):
        found = (_uploads(part, item, f"{path}/{key}".strip("/")) for key, item in made.items())
        return next((wrong for wrong in found if wrong), "")
    return f"{described(made)} as upload{at(path)}: wrap it in Sum(...), Mean(...) or Stack(...)"


def _survey(part: Part, made: Any, v: Any) -> str:
    return _uploads(part, made)


def _next_local(part: Part, made: Any, v: Any, *_: Any) -> str:
    before = v.local
    if isinstance(before, dict) and not before:  # nothing was prepared
        return _tree(part, made)
    return _but(tree_gap(made, before), "local with the names and shapes that prepare gave it")


def _transform(part: Part, made: Any, v: Any, batch: Batch) -> str:
    if not isinstance(made, Batch):
        return _but(described(made), "a Batch: batch._replace(x=...)")
    if not (isinstance(made.x, Tensor) and isinstance(made.y, Tensor)):
        return f"a Batch of {described(made.x)} and {described(made.y)}; both must be tensors"
    rows = len(made.x)
    if len(made.y) != rows:
        return f"a Batch of {rows} rows in x and {len(made.y)} in y; they must be as many"
    if made.target is not None:
        shape = (rows, v.task.outputs)
        if not isinstance(made.target, Tensor) or made.target.shape != shape:
            return f"{described(made.target)} as target; it must be None or of shape {list(shape)}"
    return ""


def _inject(part: Part, made: Any, v: Any, batch: Batch) -> str:
    right = "(cut, rows): the name of a cut and a tensor"
    if not (isinstance(made, tuple) and len(made) == 2):
        return _but(described(made), right)
    cut, rows = made
    if not (isinstance(cut, str) and isinstance(rows, Tensor)):
        return _but(f"({described(cut)}, {described(rows)})", right)
    if cut not in part.cuts():
        return f"rows for the cut {cut!r}; name it in cuts()"
    shape = v.spec.shapes.get(cut)
    if shape is not None and (rows.dim() < 1 or rows.shape[1:].numel() != Size(shape).numel()):
        wanted = ", ".join(["rows", *map(str, shape)])
        return f"{described(rows)} for the cut {cut!r}; it must be [{wanted}], or flat per row"
    return ""


def _logits(part: Part, made: Any, v: Any, batch: Batch, logits: Tensor) -> str:
    if isinstance(made, Tensor) and made.shape == logits.shape:
        return ""
    return _but(described(made), f"logits of the same shape, {list(logits.shape)}")


def _weigh(part: Part, made: Any, v: Any, batch: Batch) -> str:
    rows = len(batch.x)
    if isinstance(made, Tensor) and made.dim() == 1 and len(made) == rows:
        return ""
    return _but(described(made), f"one weight for each sample, of shape [{rows}]")


def _term(part: Part, made: Any, *_: Any) -> str:
    if isinstance(made, Tensor):
        if made.dim() == 0 and made.is_floating_point():
            return ""
        return f"{described(made)}; it must be one number: take the mean or the sum"
    if isinstance(made, (int, float)):
        return f"{described(made)}; it must be a tensor: out.logits.new_tensor({made!r})"
    return _but(
        described(made), "one number as a tensor; a term of nothing is 0 * out.logits.sum()"
    )


def _correct(part: Part, made: Any, v: Any, params: Any, grads: Any) -> str:
    right = "what to add to the gradient: a dict with names and shapes of parameters"
    return _but(params_gap(made, params, False), right)


def _trainable(part: Part, made: Any, v: Any, params: Any) -> str:
    right = "a dict from names of parameters to True, False or a tensor of bool of their shape"
    if not isinstance(made, dict):
        return _but(described(made), right)
    for name, flag in made.items():
        if name not in params:
            return _but(f"a dict {names_gap(made, params)}", right)
        if isinstance(flag, bool):
            continue
        if not isinstance(flag, Tensor) or dtype_name(flag) != "bool":
            return _but(f"{described(flag)} for {name!r}", right)
        sizes = zip(reversed(flag.shape), reversed(params[name].shape), strict=False)
        if flag.dim() > params[name].dim() or any(a not in (1, b) for a, b in sizes):
            shape = list(params[name].shape)
            return _but(f"{described(flag)} for {name!r} of shape {shape}", right)
    return ""


def _project(part: Part, made: Any, v: Any, params: Any) -> str:
    right = "all parameters, with the names and shapes that it was given"
    return _but(params_gap(made, params, True), right)


def _reply(part: Part, made: Any, v: Any, weights: Any) -> str:
    if not (type(made) is tuple and len(made) == 2):
        return _but(described(made), "(next client state, uploads); {} stands for none")
    state, uploads = made
    wrong = tree_gap(state, v.client)
    if wrong:
        wrong = f"a client state that is {wrong}"
        if not part.has("client_init"):
            return f"{wrong}; give the part a client_init, which makes the first state"
        return _but(wrong, "the names and shapes that client_init made")
    return _uploads(part, uploads)


def _combine(part: Part, made: Any, r: Any) -> str:
    right = "the update: a dict with names and shapes of parameters"
    wrong = params_gap(made, r.anchor.params, False)
    if not wrong and not made.keys() >= r.mean_delta.keys():
        wrong = f"a dict {names_gap(made, r.mean_delta)}"
    return _but(wrong, right)


def _server(part: Part, made: Any, r: Any, weights: Weights) -> str:
    if not (type(made) is tuple and len(made) == 2):
        return _but(described(made), "(weights, next server state); {} stands for no state")
    wrong = weights_gap(made[0], weights)
    if wrong:
        right = "Weights with the same names and shapes: weights._replace(params=...)"
        return _but(f"{wrong} as weights", right)
    wrong = not_a_tree(made[1])
    return _but(f"{wrong} as server state" if wrong else "", f"a state that is {TREE}")


def _personal(part: Part, made: Any, v: Any, weights: Weights) -> str:
    right = "Weights with the same names and shapes: weights._replace(params=...)"
    return _but(weights_gap(made, weights), right)


#: What each hook must return, as a check of it.
RETURNS: dict[str, Check] = {
    "extend": _extend,
    "private": _private,
    "server_init": _tree,
    "client_init": _tree,
    "phase": _phase,
    "survey": _survey,
    "absorb": _server,
    "send": _tree,
    "prepare": _tree,
    "transform": _transform,
    "inject": _inject,
    "ascend": _next_local,
    "logits": _logits,
    "weigh": _weigh,
    "term": _term,
    "correct": _correct,
    "trainable": _trainable,
    "project": _project,
    "observe": _next_local,
    "reply": _reply,
    "contribute": _tree,
    "combine": _combine,
    "server_step": _server,
    "personal": _personal,
}
