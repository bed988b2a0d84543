"""A part is one paper: a frozen dataclass of hyper-parameters with pure, optional hooks.

A method is a sum of parts. A part sees only its own state, which lives in five slots:

=========  =======================================================================================
``server`` kept by the server from round to round
``sent``   what the server broadcasts this round, made by ``send``
``client`` kept by each client from round to round, never leaves it
``local``  kept by a client from step to step within one round
*uploads*  what a client returns besides its update, each wrapped in ``Sum``, ``Mean`` or ``Stack``
=========  =======================================================================================

Hooks are called in the order in which they stand in :class:`Part`, and only those that a part
overrides. They must be pure: no attribute is set, no argument is changed in place, every random
number comes from ``v.key``, and no Python branch depends on a tensor's value, since the same code
runs for one client in a loop and for all clients at once under ``vmap``.

The rules are checked. A class with a method whose name is close to a hook's (``terms``), or with a
hook of other arguments, is rejected when it is defined. Return values are checked at every call
(:mod:`kedge.core.hooks`). Before the first round, third-party parts run eagerly on one client. An
argument changed in place, state on ``self``, a draw from a global random generator, or a result
that differs in a second call is an error (:mod:`kedge.session.purity`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from kedge.core.declarations import Declarations
from kedge.core.out import Out as Out
from kedge.core.overrides import check_overrides
from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.uploads import Mean as Mean
from kedge.core.uploads import Stack as Stack
from kedge.core.uploads import Sum as Sum
from kedge.errors import FieldError, IncompatibleError, TwoAggregators, UnknownName, nearest
from kedge.grammar import Call, parse_calls
from kedge.registry import Registry
from kedge.schema import Doc as Doc
from kedge.schema import ErrorCollector, Schema, schema_of
from kedge.schema import Range as Range
from kedge.schema.formula import evaluate

if TYPE_CHECKING:
    from kedge.core.model import Model
    from kedge.core.round import Round
    from kedge.core.update import Totals, Update
    from kedge.core.view import Spec, View

parts: Registry[type[Part]] = Registry(
    "part", see="kedge list", module="kedge.parts", group="kedge.parts"
)


@dataclasses.dataclass(frozen=True)
class Part(Declarations):
    """Base class of all parts. See the module's docstring for the rules."""

    # -- once ---------------------------------------------------------------------------------

    def extend(self, spec: Spec) -> Params:
        """Extra trainable leaves; they appear in ``params`` as ``name/leaf``, see ``v.own``."""
        raise NotImplementedError

    def private(self, spec: Spec) -> set[str]:
        """Names of parameters and buffers that stay on the client and are neither sent nor
        averaged."""
        raise NotImplementedError

    def server_init(self, spec: Spec) -> Tree:
        """First value of ``server``."""
        raise NotImplementedError

    def client_init(self, spec: Spec) -> Tree:
        """First value of ``client``, the same for every client."""
        raise NotImplementedError

    # -- start of a round ---------------------------------------------------------------------

    def phase(self, round: int) -> str:
        """A choice that is fixed for a round, read as ``v.phase``; hooks may branch on it."""
        raise NotImplementedError

    def survey(self, v: View) -> Tree:
        """Uploads without training, asked for before the rounds that :meth:`surveys` names."""
        raise NotImplementedError

    def surveys(self) -> Literal["first", "every", "last"]:
        """``first`` and ``last`` ask all clients once, ``every`` asks each round's cohort."""
        return "first"

    def absorb(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        """``(weights, next server)`` from the reduced answers to a survey."""
        raise NotImplementedError

    def send(self, server: Tree) -> Tree:
        """What clients receive as ``v.sent``."""
        raise NotImplementedError

    def prepare(self, v: View) -> Tree:
        """First value of ``local``, before the first step."""
        raise NotImplementedError

    # -- one local step -----------------------------------------------------------------------

    def transform(self, v: View, batch: Batch) -> Batch:
        """Change the batch; parts act one after the other, left to right."""
        raise NotImplementedError

    def inject(self, v: View, batch: Batch) -> tuple[str, Tensor]:
        """``(cut, rows)``: rows that join the batch after a cut; they come back as ``out.mine``."""
        raise NotImplementedError

    def cuts(self) -> tuple[str, ...]:
        """Cuts that the part reads (``out.at``) or injects at."""
        return ()

    def ascend(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        """Next ``local`` from the detached pass, before the objective sees it (a max step)."""
        raise NotImplementedError

    def logits(self, v: View, batch: Batch, logits: Tensor) -> Tensor:
        """Change the logits on their way into the task's loss; left to right."""
        raise NotImplementedError

    def weigh(self, v: View, batch: Batch) -> Tensor:
        """Weight of each sample in the task's loss, ``[B]``; parts' weights are multiplied."""
        raise NotImplementedError

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        """A scalar added to the objective."""
        raise NotImplementedError

    def correct(self, v: View, params: Params, grads: Params) -> Params:
        """What to *add* to the gradient. ``grads`` is the objective's; parts' changes are
        summed."""
        raise NotImplementedError

    def trainable(self, v: View, params: Params) -> dict[str, Tensor | bool]:
        """Leaves that this step may change (True where not named): freezing that also stops
        weight decay and momentum, which :meth:`correct` cannot."""
        raise NotImplementedError

    def project(self, v: View, params: Params) -> Params:
        """Change the parameters after the step; left to right."""
        raise NotImplementedError

    def observe(self, v: View, params: Params, batch: Batch, out: Out) -> Tree:
        """Next ``local``, after the step; ``params`` are the new ones, ``out`` the detached
        pass."""
        raise NotImplementedError

    # -- end of a round -----------------------------------------------------------------------

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        """``(next client, uploads)`` from the trained weights."""
        raise NotImplementedError

    def contribute(self, v: View, delta: Params) -> Tree:
        """The client's side of a custom aggregation: a tree that is summed over the cohort."""
        raise NotImplementedError

    def release(self, v: View, update: Update) -> tuple[Update, Tree]:
        """``(update, next client)``: change what leaves the client, in training and in surveys
        (whose next state is dropped); left to right, after all other hooks of the client."""
        raise NotImplementedError

    def receive(self, r: Round, totals: Totals) -> tuple[Totals, Tree]:
        """``(totals, next server)``: change what the server sees of the clients, before anything
        else reads it, in training and in surveys; left to right."""
        raise NotImplementedError

    def combine(self, r: Round) -> Params:
        """The server's side: the update, from ``r.sums`` (or ``r.clients``). One part at most."""
        raise NotImplementedError

    def server_step(self, r: Round, weights: Weights) -> tuple[Weights, Tree]:
        """``(weights, next server)`` after aggregation; left to right."""
        raise NotImplementedError

    def output(self, server: Tree, weights: Weights) -> Weights:
        """The weights to evaluate and to keep as the model, not to train on; left to right."""
        raise NotImplementedError

    def personal(self, v: View, weights: Weights) -> Weights:
        """The personal weights of this client; left to right."""
        raise NotImplementedError

    # -- what every part can do ---------------------------------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name") or cls.__name__.lower()
        check_overrides(cls, Part)

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for field, value in self.schema().check(given).items():
            object.__setattr__(self, field, value)

    def for_model(self, model: Model) -> Part:
        """The part with the options filled in that its defaults leave to the model, such as a
        cut; its hooks run on this one."""
        return self

    def makes_inputs(self) -> bool:
        """Whether it generates, mixes or moves inputs, which whole numbers do not allow."""
        return False

    def advice(self, rounds: int) -> str:
        """A warning about a run of ``rounds`` rounds; empty if there is none."""
        return ""

    def anchor_pull(self) -> float | None:
        """The mu of a pull mu (w - anchor) in its gradient, with which it shrinks every step; None
        for a pull towards a model that drifts from round to round."""
        return 0.0

    def refuses(self, other: Part) -> str:
        """Why the two have no meaning in one method; empty if they have."""
        return ""

    def has(self, hook: str) -> bool:
        """Whether the part overrides a hook."""
        return getattr(type(self), hook) is not getattr(Part, hook)

    def hooks(self) -> list[str]:
        return [h for h in HOOKS if self.has(h)]

    def __add__(self, other: Part | Method | str) -> Method:
        return Method((self,)) + other

    def __str__(self) -> str:
        """The part in the method grammar, with the fields that differ from their defaults."""
        return self.schema().write(
            {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        )

    @classmethod
    def schema(cls) -> Schema:
        """The part's fields: types, ranges, defaults, help and presets."""
        return schema_of(cls, cls.name or cls.__name__, presets=True)

    def count(self, formula: str, symbols: dict[str, int]) -> int:
        """Value of ``sends``, ``uploads`` or ``keeps`` for given sizes of the model."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return round(evaluate(formula, fields | symbols))


OTHERS = {"has", "hooks", "count", "cuts", "surveys", "advice", "schema"}
OTHERS |= {"anchor_pull", "for_model", "makes_inputs", "refuses"}
HOOKS = [n for n, f in vars(Part).items() if callable(f) and n[0] != "_" and n not in OTHERS]


def register(cls: type[Part]) -> type[Part]:
    """Class decorator: make a part known under its class name in lower case.

    >>> @register
    ... @dataclasses.dataclass(frozen=True)
    ... class Shrink(Part):
    ...     rate: float = 0.01
    ...     def term(self, v, params, batch, out):
    ...         return self.rate * sum((leaf**2).sum() for leaf in params.values())
    >>> kedge.parse("scaffold+shrink(rate=0.1)")
    scaffold+shrink(rate=0.1)
    """
    for field in dataclasses.fields(cls):
        if hasattr(Part, field.name):
            raise FieldError(
                f"{cls.__name__} has a field {field.name!r}, which hides what every part has under "
                "that name; choose another"
            )
    cls.schema()  # its annotations can be evaluated
    return parts.add(cls.name, cls)


def make_part(name: str, preset: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Part:
    """Make a part from its name, a preset and fields; UnknownName or FieldError if one is wrong."""
    cls = parts[name]
    return cls(**cls.schema().bind(Call(name, preset, args, kwargs)))


@dataclasses.dataclass(frozen=True, repr=False)
class Method:
    """An ordered sum of parts; the empty sum is FedAvg."""

    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        names = [p.name for p in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise IncompatibleError(f"{name} is in the method twice; a part may appear once")
        owners = [p.name for p in self.parts if p.has("combine") or p.has("contribute")]
        if len(owners) > 1:
            raise TwoAggregators(
                f"{' and '.join(owners)} both define how updates are combined; "
                "a method may have one such part"
            )
        for part, other in itertools.permutations(self.parts, 2):
            if reason := part.refuses(other):
                raise IncompatibleError(reason)

    @property
    def personal_model(self) -> bool:
        """Whether the clients' own models are the product of the method."""
        return any(part.personal_model for part in self.parts)

    def __add__(self, other: Part | Method | str) -> Method:
        return Method(self.parts + parse(other).parts)

    def __repr__(self) -> str:
        return "+".join(str(p) for p in self.parts) or "fedavg"

    __str__ = __repr__


def parse(text: str | Method | Part) -> Method:
    """Read a method string; UnknownName or FieldError if a part or a field is wrong.

    >>> parse("scaffold + fedprox(mu=0.5)")
    scaffold+fedprox(mu=0.5)
    >>> parse("fedavg")
    fedavg
    """
    if isinstance(text, Method):
        return text
    if isinstance(text, Part):
        return Method((text,))
    errors, summands = ErrorCollector(), []
    for call in parse_calls(text):
        with errors.collect():
            if call.name == "fedavg":
                _check_fedavg(call)
            elif call.name not in parts:
                raise _unknown_part(call.name)
            else:
                summands.append(make_part(*call))
    errors.raise_all()
    return Method(tuple(summands))


def _unknown_part(name: str) -> UnknownName:
    known = ["fedavg", *parts]
    own = "" if nearest(name, known) else "; a part of your own needs --load FILE.py"
    return UnknownName("part", name, known, see=f"kedge list{own}")


def _check_fedavg(call: Call) -> None:
    if call.args or call.kwargs or call.preset:
        raise FieldError("fedavg has no fields and no presets; write just: fedavg")
