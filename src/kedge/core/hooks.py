"""Call a part's hooks and check their return values.

:data:`RETURNS` has one check per hook; a hook that is not listed must return a tree. :func:`call`
applies the check to types, names and shapes. No tensor value is read, so the checks work under
``vmap``, in a trace and during graph capture, at negligible cost. A :data:`Watch` may run the hooks
instead, to check more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Size, Tensor

from kedge.core.part import HOOKS, Mean, Part, Stack, Sum
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import Totals, Update
from kedge.errors import HookError, KedgeError, nearest

if TYPE_CHECKING:
    from kedge.core.round import Round
    from kedge.core.view import Spec, View

#: Runs ``(part, hook, arguments)`` and returns what the hook returns.
Watch = Callable[[Part, str, tuple[Any, ...]], Any]
#: ``(part, returned value, *arguments)`` to a description of the fault; empty if there is none.
Check = Callable[..., str]

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)

TREE = "a tensor, a dict of trees or a named tuple of trees"

WEIGHTS = "Weights with the same names and shapes: weights._replace(params=...)"

KEEP_STATE = (
    "a part is never changed: what it must remember belongs into a slot (server, client or local)"
)


def call(part: Part, hook: str, *args: Any) -> Any:
    """Call one hook and check what it returns.

    Raises:
        HookError: the hook fails, or its return value does not pass the check in :data:`RETURNS`;
            the message names the part and the hook.
    """
    watch = _watch.get()
    try:
        result = getattr(part, hook)(*args) if watch is None else watch(part, hook, args)
        wrong = RETURNS[hook](part, result, *args)
    except KedgeError:
        raise
    except FrozenInstanceError as error:
        raise HookError(f"{part.name}.{hook} sets an attribute ({error}); {KEEP_STATE}") from error
    except Exception as error:
        raise HookError(f"{part.name}.{hook} failed: {type(error).__name__}: {error}") from error
    if wrong:
        raise HookError(f"{part.name}.{hook} returned {wrong}")
    return result


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Within the block, ``watch`` runs all hooks."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def _but(wrong: str, right: str) -> str:
    return f"{wrong}; it must return {right}" if wrong else ""


# -- how a value differs from a tree, parameters or weights: types, names and shapes in words ------


def described(value: object) -> str:
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


def not_a_tree(value: object, path: str = "") -> str:
    """The first item of a value that is not a tree; empty if the value is a tree."""
    if isinstance(value, Tensor):
        return ""
    if isinstance(value, dict):
        items: Iterable[tuple[object, object]] = value.items()
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


def tree_gap(value: object, like: Tree, path: str = "") -> str:
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
        pairs: Iterable[tuple[str, object, Tree]] = ((key, value[key], like[key]) for key in like)
    else:
        if not (isinstance(value, tuple) and type(value) is type(like)):
            return f"{described(value)}{at(path)} in place of {described(like)}"
        pairs = zip(getattr(like, "_fields", ()), value, like, strict=False)
    for key, item, other in pairs:
        wrong = tree_gap(item, other, f"{path}/{key}" if path else key)
        if wrong:
            return wrong
    return ""


def names_gap(value: Mapping[str, object], like: Mapping[str, object]) -> str:
    """How the names of a dict differ from those of another: ``without 'a'`` or ``with 'b'``."""
    for name in value:
        if name not in like:
            near = nearest(str(name), like)
            return f"with the unknown name {name!r}" + (f" (like {near[0]!r})" if near else "")
    missing = [name for name in like if name not in value]
    return "without " + ", ".join(repr(name) for name in missing[:3])


def params_gap(made: object, params: Params, whole: bool) -> str:
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


def weights_gap(made: object, weights: Weights) -> str:
    if not isinstance(made, Weights):
        return described(made)
    return params_gap(made.params, weights.params, True) or params_gap(
        made.buffers, weights.buffers, True
    )


# -- what each hook must return -------------------------------------------------------------------


def _tree(part: Part, result: object, *_: object) -> str:
    return _but(not_a_tree(result), f"{TREE}: write torch.as_tensor(x) for a number")


def _extend(part: Part, result: object, spec: Spec) -> str:
    right = "a dict of floating-point tensors, by name"
    if not isinstance(result, dict):
        return _but(described(result), right)
    for name, value in result.items():
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return _but(f"{described(value)} for {name!r}", right)
    return ""


def _private(part: Part, result: object, spec: Spec) -> str:
    if not isinstance(result, (set, frozenset)):
        return _but(described(result), "a set of names of parameters and buffers")
    known = {*spec.params, *spec.buffers}
    unknown = sorted(map(str, result - known))
    if not unknown:
        return ""
    near = nearest(unknown[0], known) or sorted(known)[:3]
    return f"the name {unknown[0]!r}, which the model does not have; there are " + ", ".join(near)


def _phase(part: Part, result: object, round: int) -> str:
    return "" if isinstance(result, str) else _but(described(result), "a string, such as 'warm'")


def _uploads(part: Part, result: object, path: str = "") -> str:
    """The first fault of uploads."""
    if isinstance(result, (Sum, Mean, Stack)):
        if isinstance(result, Stack) and not part.needs_clients:
            return f"a Stack as upload{at(path)}: declare needs_clients = True"
        return _but(not_a_tree(result.value, path), f"uploads whose values are each {TREE}")
    if isinstance(result, dict):
        faults = (_uploads(part, item, f"{path}/{key}".strip("/")) for key, item in result.items())
        return next((fault for fault in faults if fault), "")
    return f"{described(result)} as upload{at(path)}: wrap it in Sum(...), Mean(...) or Stack(...)"


def _next_local(part: Part, result: object, v: View, *_: object) -> str:
    before = v.local
    if isinstance(before, dict) and not before:  # nothing was prepared
        return _tree(part, result)
    return _but(tree_gap(result, before), "local with the names and shapes that prepare gave it")


def _transform(part: Part, result: object, v: View, batch: Batch) -> str:
    if not isinstance(result, Batch):
        return _but(described(result), "a Batch: batch._replace(x=...)")
    if not (isinstance(result.x, Tensor) and isinstance(result.y, Tensor)):
        return f"a Batch of {described(result.x)} and {described(result.y)}; both must be tensors"
    rows = len(result.x)
    if len(result.y) != rows:
        return f"a Batch of {rows} rows in x and {len(result.y)} in y; they must be as many"
    if result.target is not None:
        shape = (rows, v.task.outputs)
        if not isinstance(result.target, Tensor) or result.target.shape != shape:
            return (
                f"{described(result.target)} as target; it must be None or of shape {list(shape)}"
            )
    return ""


def _inject(part: Part, result: object, v: View, batch: Batch) -> str:
    right = "(cut, rows): the name of a cut and a tensor"
    if not (isinstance(result, tuple) and len(result) == 2):
        return _but(described(result), right)
    cut, rows = result
    if not (isinstance(cut, str) and isinstance(rows, Tensor)):
        return _but(f"({described(cut)}, {described(rows)})", right)
    if cut not in part.cuts():
        return f"rows for the cut {cut!r}; name it in cuts()"
    shape = v.spec.shapes.get(cut)
    if shape is not None and (rows.dim() < 1 or rows.shape[1:].numel() != Size(shape).numel()):
        wanted = ", ".join(["rows", *map(str, shape)])
        return f"{described(rows)} for the cut {cut!r}; it must be [{wanted}], or flat per row"
    return ""


def _logits(part: Part, result: object, v: View, batch: Batch, logits: Tensor) -> str:
    if isinstance(result, Tensor) and result.shape == logits.shape:
        return ""
    return _but(described(result), f"logits of the same shape, {list(logits.shape)}")


def _weigh(part: Part, result: object, v: View, batch: Batch) -> str:
    rows = len(batch.x)
    if isinstance(result, Tensor) and result.dim() == 1 and len(result) == rows:
        return ""
    return _but(described(result), f"one weight for each sample, of shape [{rows}]")


def _term(part: Part, result: object, *_: object) -> str:
    if isinstance(result, Tensor):
        if result.dim() == 0 and result.is_floating_point():
            return ""
        return f"{described(result)}; it must be one number: take the mean or the sum"
    if isinstance(result, (int, float)):
        return f"{described(result)}; it must be a tensor: out.logits.new_tensor({result!r})"
    return _but(
        described(result), "one number as a tensor; a term of nothing is 0 * out.logits.sum()"
    )


def _correct(part: Part, result: object, v: View, params: Params, grads: Params) -> str:
    right = "what to add to the gradient: a dict with names and shapes of parameters"
    return _but(params_gap(result, params, False), right)


def _trainable(part: Part, result: object, v: View, params: Params) -> str:
    right = "a dict from names of parameters to True, False or a tensor of bool of their shape"
    if not isinstance(result, dict):
        return _but(described(result), right)
    for name, flag in result.items():
        if name not in params:
            return _but(f"a dict {names_gap(result, params)}", right)
        if isinstance(flag, bool):
            continue
        if not isinstance(flag, Tensor) or dtype_name(flag) != "bool":
            return _but(f"{described(flag)} for {name!r}", right)
        sizes = zip(reversed(flag.shape), reversed(params[name].shape), strict=False)
        if flag.dim() > params[name].dim() or any(a not in (1, b) for a, b in sizes):
            shape = list(params[name].shape)
            return _but(f"{described(flag)} for {name!r} of shape {shape}", right)
    return ""


def _project(part: Part, result: object, v: View, params: Params) -> str:
    right = "all parameters, with the names and shapes that it was given"
    return _but(params_gap(result, params, True), right)


def _is_pair(result: object) -> TypeGuard[tuple[object, object]]:
    return type(result) is tuple and len(result) == 2


def _reply(part: Part, result: object, v: View, weights: Weights) -> str:
    if not _is_pair(result):
        return _but(described(result), "(next client state, uploads); {} stands for none")
    state, uploads = result
    wrong = tree_gap(state, v.client)
    if wrong:
        wrong = f"a client state that is {wrong}"
        if not part.has("client_init"):
            return f"{wrong}; give the part a client_init, which makes the first state"
        return _but(wrong, "the names and shapes that client_init made")
    return _uploads(part, uploads)


def _release(part: Part, result: object, v: View, update: Update) -> str:
    if not _is_pair(result):
        return _but(described(result), "(update, next client state); {} stands for no state")
    wrong = tree_gap(result[0], update)
    if wrong:
        right = "an Update with the same names and shapes: update._replace(delta=...)"
        return _but(f"{wrong} as update", right)
    wrong = tree_gap(result[1], v.client)
    return _but(f"a client state that is {wrong}" if wrong else "", "what client_init made")


def _receive(part: Part, result: object, r: Round, totals: Totals) -> str:
    if not _is_pair(result):
        return _but(described(result), "(totals, next server state); {} stands for no state")
    made = result[0]
    if isinstance(made, Totals):
        wrong = tree_gap(made.summed, totals.summed) or tree_gap(made.stacked, totals.stacked)
    else:
        wrong = described(made)
    if wrong:
        right = "Totals with the same names and shapes: totals._replace(summed=...)"
        return _but(f"{wrong} as totals", right)
    return _server_state(result[1])


def _server_state(state: object) -> str:
    wrong = not_a_tree(state)
    return _but(f"{wrong} as server state" if wrong else "", f"a state that is {TREE}")


def _combine(part: Part, result: object, r: Round) -> str:
    right = "the update: a dict with names and shapes of parameters"
    wrong = params_gap(result, r.anchor.params, False)
    if isinstance(result, dict) and not wrong and not result.keys() >= r.mean_delta.keys():
        wrong = f"a dict {names_gap(result, r.mean_delta)}"
    return _but(wrong, right)


def _server(part: Part, result: object, r: Round, weights: Weights) -> str:
    if not _is_pair(result):
        return _but(described(result), "(weights, next server state); {} stands for no state")
    wrong = weights_gap(result[0], weights)
    return _but(f"{wrong} as weights", WEIGHTS) if wrong else _server_state(result[1])


def _weights(part: Part, result: object, source: View | Tree, weights: Weights) -> str:
    return _but(weights_gap(result, weights), WEIGHTS)


#: The check of each hook's return value; a hook that is not listed must return a tree.
RETURNS: dict[str, Check] = dict.fromkeys(HOOKS, _tree) | {
    "extend": _extend,
    "private": _private,
    "phase": _phase,
    "survey": lambda part, result, v: _uploads(part, result),
    "absorb": _server,
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
    "release": _release,
    "receive": _receive,
    "combine": _combine,
    "server_step": _server,
    "output": _weights,
    "personal": _weights,
}
