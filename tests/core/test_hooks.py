"""What hooks must return, and the message that each mistake gets; misspelt hooks and arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kedge.parts  # noqa: F401  (registers the built-in parts)
from kedge.check.problems import images
from kedge.core import rng
from kedge.core.hooks import RETURNS, call
from kedge.core.part import HOOKS, Mean, Part, Stack, Sum, check_overrides, parts
from kedge.core.task import Batch
from kedge.core.tree import Weights
from kedge.core.update import Summed
from kedge.engines import Execution
from kedge.errors import HookError
from kedge.session.purity import disabled


class Pair(NamedTuple):
    first: Tensor
    second: Any


def part_with(**methods: Any) -> Part:
    """A part named ``ridge`` that has these hooks."""
    return type("Ridge", (Part,), {"name": "ridge", **methods})()


def local(x: Any) -> Callable[..., Any]:
    return lambda self, v, params, batch, out: x


def first_state(self: Part, spec: Any) -> Any:
    return {"c": torch.zeros(3, dtype=spec.dtype)}


ONE = torch.ones((), dtype=torch.float64)
#: The hook at fault, the part's methods, and what the message must say after ``ridge.HOOK``.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "term",
        {"term": lambda self, v, params, batch, out: out.logits.sum(1)},
        "returned a tensor of shape [5]; it must be one number: take the mean or the sum",
    ),
    ("term", {"term": local(0.5)}, "returned a float; it must be a tensor: out.logits.new_tensor"),
    ("term", {"term": local(None)}, "returned None; it must return one number as a tensor"),
    ("term", {"term": local(torch.ones((), dtype=torch.int64))}, "a tensor of int64 of shape []"),
    (
        "weigh",
        {"weigh": lambda self, v, batch: torch.ones(len(batch.x), 1)},
        "returned a tensor of shape [5, 1]; it must return one weight for each sample, of shape "
        "[5]",
    ),
    (
        "logits",
        {"logits": lambda self, v, batch, logits: logits[:, :2]},
        "returned a tensor of shape [5, 2]; it must return logits of the same shape, [5, 3]",
    ),
    (
        "transform",
        {"transform": lambda self, v, batch: (batch.x, batch.y)},
        "returned a tuple of 2; it must return a Batch: batch._replace(x=...)",
    ),
    (
        "transform",
        {"transform": lambda self, v, batch: batch._replace(x=batch.x[:3])},
        "returned a Batch of 3 rows in x and 5 in y; they must be as many",
    ),
    (
        "transform",
        {"transform": lambda self, v, batch: batch._replace(target=batch.x.new_zeros(5))},
        "returned a tensor of shape [5] as target; it must be None or of shape [5, 3]",
    ),
    (
        "transform",
        {"transform": lambda self, v, batch: Batch(batch.x, None)},  # type: ignore[arg-type]
        "returned a Batch of a tensor of shape [5, 1, 8, 8] and None; both must be tensors",
    ),
    (
        "inject",
        {"inject": lambda self, v, batch: batch.x},
        "returned a tensor of shape [5, 1, 8, 8]; it must return (cut, rows)",
    ),
    (
        "inject",
        {"inject": lambda self, v, batch: (0, batch.x)},
        "returned (an int, a tensor of shape [5, 1, 8, 8]); it must return (cut, rows)",
    ),
    (
        "inject",
        {"inject": lambda self, v, batch: ("stage1", batch.x)},
        "returned rows for the cut 'stage1'; name it in cuts()",
    ),
    (
        "inject",
        {
            "cuts": lambda self: ("stage1",),
            "inject": lambda self, v, batch: ("stage1", batch.x),
        },
        "returned a tensor of shape [5, 1, 8, 8] for the cut 'stage1'; it must be [rows, 4, 2, 2]",
    ),
    (
        "correct",
        {"correct": lambda self, v, params, grads: list(grads.values())},
        "returned a list; it must return what to add to the gradient: a dict with names and",
    ),
    (
        "correct",
        {"correct": lambda self, v, params, grads: {"head.wieght": grads["head.weight"]}},
        "returned a dict with the unknown name 'head.wieght' (like 'head.weight')",
    ),
    (
        "correct",
        {"correct": lambda self, v, params, grads: {"head.weight": grads["head.bias"]}},
        "returned a tensor of shape [3] for 'head.weight' of shape [3, 6]",
    ),
    (
        "trainable",
        {"trainable": lambda self, v, params: {"head"}},
        "returned a set; it must return a dict from names of parameters to True, False or",
    ),
    (
        "trainable",
        {"trainable": lambda self, v, params: {"head": False}},
        "returned a dict with the unknown name 'head'",
    ),
    (
        "trainable",
        {"trainable": lambda self, v, params: {"head.bias": params["head.bias"]}},
        "returned a tensor of shape [3] for 'head.bias'; it must return a dict from names",
    ),
    (
        "trainable",
        {"trainable": lambda self, v, params: {"head.bias": torch.ones(2).bool()}},
        "returned a tensor of bool of shape [2] for 'head.bias' of shape [3]",
    ),
    (
        "project",
        {"project": lambda self, v, params: {"head.bias": params["head.bias"]}},
        "returned a dict without 'stage1.0.weight', 'stage1.0.bias', 'stage2.1.weight'; it must "
        "return all parameters",
    ),
    ("prepare", {"prepare": lambda self, v: [1]}, "returned a list; it must return a tensor, a"),
    (
        "prepare",
        {"prepare": lambda self, v: {"rate": 0.1}},
        "returned a float at 'rate'; it must return a tensor, a dict of trees or a named tuple of "
        "trees: write torch.as_tensor(x) for a number",
    ),
    (
        "prepare",
        {"prepare": lambda self, v: {"a": Pair(ONE, (ONE,))}},
        "a tuple of 1 at 'a/second'",
    ),
    ("prepare", {"prepare": lambda self, v: {0: ONE}}, "returned a dict whose key 0 is no string"),
    (
        "observe",
        {"prepare": lambda self, v: {"m": ONE}, "observe": local({"m": ONE, "n": ONE})},
        "returned a dict with the unknown name 'n'; it must return local with the names and shapes",
    ),
    (
        "ascend",
        {"prepare": lambda self, v: {"m": ONE}, "ascend": local({"m": ONE.expand(2)})},
        "returned a tensor of shape [2] at 'm' in place of shape []; it must return local with",
    ),
    ("observe", {"observe": local(None)}, "returned None; it must return a tensor"),
    (
        "reply",
        {"reply": lambda self, v, weights: {}},
        "returned a dict; it must return (next client state, uploads)",
    ),
    (
        "reply",
        {"client_init": first_state, "reply": lambda self, v, weights: ({}, {})},
        "returned a client state that is a dict without 'c'; it must return the names and shapes "
        "that client_init made",
    ),
    (
        "reply",
        {"reply": lambda self, v, weights: ({"c": ONE}, {})},
        "'c'; give the part a client_init, which makes the first state",
    ),
    (
        "reply",
        {"reply": lambda self, v, weights: ({}, {"a": weights.params})},
        "as upload at 'a/stage1.0.weight': wrap it in Sum(...), Mean(...) or Stack(...)",
    ),
    (
        "reply",
        {"reply": lambda self, v, weights: ({}, Stack(ONE))},
        "returned a Stack as upload: declare needs_clients = True",
    ),
    (
        "reply",
        {"reply": lambda self, v, weights: ({}, {"n": Mean(3)})},
        "returned an int at 'n'; it must return uploads whose values are each a tensor",
    ),
    ("contribute", {"contribute": lambda self, v, delta: 1.0}, "returned a float; it must return"),
    (
        "combine",
        {"combine": lambda self, r: r.anchor},
        "returned a Weights; it must return the update: a dict with names and shapes",
    ),
    (
        "combine",
        {"combine": lambda self, r: {"head.bias": r.mean_delta["head.bias"]}},
        "returned a dict without 'stage1.0.weight'",
    ),
    (
        "server_step",
        {"server_step": lambda self, r, weights: weights},
        "returned a Weights; it must return (weights, next server state)",
    ),
    (
        "server_step",
        {"server_step": lambda self, r, weights: (weights.params, {})},
        "returned a dict as weights; it must return Weights with the same names and shapes",
    ),
    (
        "server_step",
        {"server_step": lambda self, r, weights: (Weights({}, {}), {})},
        "returned a dict without 'stage1.0.weight'",
    ),
    (
        "server_step",
        {"server_step": lambda self, r, weights: (weights, 3)},
        "returned an int as server state; it must return a state that is a tensor",
    ),
    ("survey", {"survey": lambda self, v: v.info.weight}, "as upload: wrap it in Sum(...)"),
    (
        "absorb",
        {"survey": lambda self, v: Sum(v.info.weight), "absorb": lambda self, r, weights: None},
        "returned None; it must return (weights, next server state)",
    ),
    (
        "release",
        {"release": lambda self, v, update: update},
        "returned an Update; it must return (update, next client state); {} stands for no state",
    ),
    (
        "release",
        {"release": lambda self, v, update: (update.delta, {})},
        "returned a Weights in place of an Update as update; it must return an Update with the "
        "same names and shapes",
    ),
    (
        "release",
        {"release": lambda self, v, update: (update._replace(delta=Weights({}, {})), {})},
        "returned a dict without 'stage1.0.weight', 'stage1.0.bias', 'stage2.1.weight' at "
        "'delta/params' as update",
    ),
    (
        "release",
        {"client_init": first_state, "release": lambda self, v, update: (update, {})},
        "returned a client state that is a dict without 'c'; it must return what client_init made",
    ),
    (
        "receive",
        {"receive": lambda self, r, totals: totals},
        "returned a Totals; it must return (totals, next server state); {} stands for no state",
    ),
    (
        "receive",
        {"receive": lambda self, r, totals: (totals.summed, {})},
        "returned a Summed as totals; it must return Totals with the same names and shapes",
    ),
    (
        "receive",
        {"receive": lambda self, r, totals: (totals._replace(summed=Summed()), {})},
        "returned a dict without 'stage1.0.weight', 'stage1.0.bias', 'stage2.1.weight' at "
        "'delta/params' as totals",
    ),
    (
        "receive",
        {"receive": lambda self, r, totals: (totals, 3)},
        "returned an int as server state; it must return a state that is a tensor",
    ),
    ("send", {"send": lambda self, server: 1}, "returned an int; it must return a tensor"),
    ("phase", {"phase": lambda self, round: round}, "returned an int; it must return a string"),
    ("extend", {"extend": lambda self, spec: []}, "returned a list; it must return a dict of"),
    (
        "extend",
        {"extend": lambda self, spec: {"u": torch.zeros(2, dtype=torch.int64)}},
        "returned a tensor of int64 of shape [2] for 'u'; it must return a dict of floating",
    ),
    (
        "private",
        {"private": lambda self, spec: ["head.bias"]},
        "returned a list; it must return a set of names of parameters and buffers",
    ),
    (
        "private",
        {"private": lambda self, spec: {"head.bais"}},
        "returned the name 'head.bais', which the model does not have; there are head.bias",
    ),
    ("server_init", {"server_init": lambda self, spec: 0}, "returned an int; it must return"),
    ("client_init", {"client_init": lambda self, spec: None}, "returned None; it must return"),
]


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize(("hook", "methods", "message"), WRONG)
def test_a_wrong_return_names_part_hook_and_remedy(
    hook: str, methods: dict[str, Any], message: str, engine: str
) -> None:
    with (
        disabled(),  # by the engine itself, without the check client
        pytest.raises(
            HookError,
            match=rf"^ridge\.{hook} returned .*{re.escape(message.removeprefix('returned '))}",
        ),
    ):
        images().simulate(part_with(**methods), engine).run_round()


@pytest.mark.parametrize(
    ("hook", "result", "message"),
    [
        ("term", torch.ones(5), "a tensor of shape [5]; it must be one number: take the mean"),
        ("term", torch.ones(1), "a tensor of shape [1]; it must be one number: take the mean"),
        ("term", torch.ones((), dtype=torch.int64), "a tensor of int64 of shape []; it must be"),
        ("trainable", ["head.bias"], "a list; it must return a dict from names of parameters"),
        ("trainable", {"head.bais": True}, "a dict with the unknown name 'head.bais' (like 'head"),
        ("project", {"head.bias": torch.ones(3)}, "a dict without 'body.weight'; it must return"),
    ],
)
def test_the_check_alone_gives_the_same_message(hook: str, result: Any, message: str) -> None:
    params = {"body.weight": torch.ones(3, 2), "head.bias": torch.ones(3)}
    args = {"term": (None, params, None, None)}.get(hook, (None, params))
    part = part_with(**{hook: lambda self, *args: result})
    with pytest.raises(HookError, match=re.escape(f"ridge.{hook} returned {message}")):
        call(part, hook, *args)


def test_a_private_name_like_no_other_is_answered_with_three_that_exist() -> None:
    part = part_with(private=lambda self, spec: {"zzz"})
    message = (
        "ridge.private returned the name 'zzz', which the model does not have; there are "
        "head.bias, head.weight, stage1.0.bias"
    )
    with pytest.raises(HookError) as error:
        images().simulate(part)
    assert str(error.value) == message


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_personal_weights_are_checked(engine: str) -> None:
    sim = images().simulate(part_with(personal=lambda self, v, weights: weights.params), engine)
    with (
        disabled(),
        pytest.raises(HookError, match=r"ridge.personal returned a dict; it must return Weights"),
    ):
        sim.personal()


def test_weights_to_evaluate_are_checked() -> None:
    sim = images().simulate(part_with(output=lambda self, server, weights: weights.params))
    with (
        disabled(),
        pytest.raises(HookError, match=r"ridge.output returned a dict; it must return Weights"),
    ):
        sim.evaluate()


def test_every_hook_has_a_check_and_a_wrong_return() -> None:
    assert set(RETURNS) == set(HOOKS)  # a new one may go without: it must return a tree
    assert {hook for hook, _, _ in WRONG} | {"output", "personal"} == set(HOOKS)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_the_whole_range_of_right_returns_passes(engine: str) -> None:
    right = part_with(
        tasks=("classification",),
        cuts=lambda self: ("stage1",),
        client_init=lambda self, spec: Pair(torch.zeros(3), {"d": torch.zeros(())}),
        prepare=lambda self, v: Pair(v.spec.key, {}),
        inject=lambda self, v, batch: ("stage1", rng.normal(v.key, (2, 16), batch.x.dtype)),
        transform=lambda self, v, batch: batch._replace(
            target=torch.nn.functional.one_hot(batch.y, 3).to(batch.x.dtype)
        ),
        correct=lambda self, v, params, grads: {"head.bias": -grads["head.bias"]},
        trainable=lambda self, v, params: {
            "head.bias": False,
            "head.weight": torch.ones(3, 1).bool(),
        },
        observe=lambda self, v, params, batch, out: v.local._replace(first=v.local.first + 1),
        reply=lambda self, v, weights: (v.client, {"a": {"b": Sum(Pair(v.info.weight, {}))}}),
        private=lambda self, spec: frozenset(),
        server_step=lambda self, r, weights: (weights, ()),
    )
    sim = images().simulate(right, engine)
    for _ in range(2):
        sim.run_round()


def test_an_attribute_that_is_set_says_where_state_belongs() -> None:
    def term(self: Any, v: Any, params: Any, batch: Any, out: Any) -> Tensor:
        self.calls = 1
        return out.logits.sum()

    frozen = dataclass(frozen=True)(type(part_with(term=term)))
    with pytest.raises(HookError, match=r"ridge.term sets an attribute \(.*'calls'\); .* a slot"):
        images().simulate(frozen()).run_round()


@pytest.mark.parametrize("execution", [Execution("vector"), Execution("vector", compile=True)])
def test_a_failure_under_vmap_and_in_a_compiled_step_names_part_and_hook(
    execution: Execution,
) -> None:
    def term(self: Part, v: Any, params: Any, batch: Any, out: Any) -> Tensor:
        return out.logits.sum() if v.step == 0 else -out.logits.sum()  # cannot be read there

    with pytest.raises(HookError, match=r"^ridge\.term failed: .*engine=loop names the client"):
        images().simulate(part_with(term=term), execution).run_round()


# -- names and arguments --------------------------------------------------------------------------

MISSPELT = {
    "terms": "term",
    "Term": "term",
    "corrects": "correct",
    "server_init_": "server_init",
    "client_int": "client_init",
    "server_steps": "server_step",
    "tranform": "transform",
    "survey_": "survey",
    "logit": "logits",
    "cut": "cuts",
}


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items())
def test_a_misspelt_hook_is_refused(name: str, meant: str) -> None:
    message = rf"^Ridge\.{name} is no hook and is never called. Did you mean '{meant}'\?.*'_{name}'"
    with pytest.raises(HookError, match=message):
        part_with(**{name: lambda self, *args: None})


def test_a_misspelt_hook_of_a_mixin_is_refused() -> None:
    class Mixin:
        @staticmethod
        def terms() -> None: ...

    with pytest.raises(HookError, match=r"Mixed\.terms is no hook"):
        type("Mixed", (Mixin, Part), {})


def test_only_public_methods_of_the_base_are_hooks() -> None:
    class Base:
        def _terms(self) -> None: ...
        def x_ray(self, v: Any) -> None: ...

    check_overrides(type("Ridge", (Base,), {"terms": lambda self: None}), Base)
    with pytest.raises(HookError, match=r"Ridge\.x_rays is no hook .*Did you mean 'x_ray'"):
        check_overrides(type("Ridge", (Base,), {"x_rays": lambda self, v: None}), Base)


def test_other_methods_are_allowed() -> None:
    helpers = {n: lambda self: 1 for n in ("_terms", "_contrast", "loss", "generate", "distance")}
    part = part_with(**helpers, Nested=type("Nested", (), {}), weights=property(lambda self: 1))
    assert part.hooks() == []


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"term": lambda self, v, params, out: None},
            r"Ridge\.term takes \(self, v, params, out\), but .* term takes "
            r"\(self, v, params, batch, out\)",
        ),
        ({"prepare": lambda self: None}, r"prepare takes \(self, v\)"),
        ({"cuts": lambda self, spec: ()}, r"cuts takes \(self\)"),
        ({"send": staticmethod(lambda self, server: ())}, r"send takes \(self, server\)"),
        (
            {"weigh": lambda self, v, batch, *, power: None},
            r"Ridge\.weigh takes \(self, v, batch, \*, power\)",
        ),
    ],
)
def test_a_hook_with_other_arguments_is_refused(methods: dict[str, Any], message: str) -> None:
    with pytest.raises(HookError, match=message):
        part_with(**methods)


def test_arguments_may_have_other_names_and_more_defaults() -> None:
    part_with(
        term=lambda self, *args: None,
        weigh=lambda self, view, data, power=2: None,
        send=staticmethod(lambda server: server),
        cuts=classmethod(lambda cls: ()),
    )


@pytest.mark.parametrize("name", list(parts))
def test_hooks_of_built_in_parts_are_written_right(name: str) -> None:
    check_overrides(parts[name], Part)
