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
import difflib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from kedge.core.task import Batch
from kedge.core.tree import Params, Tree, Weights
from kedge.core.uploads import ClassMeans as ClassMeans
from kedge.core.uploads import Drawn as Drawn
from kedge.core.uploads import Mean as Mean
from kedge.core.uploads import Stack as Stack
from kedge.core.uploads import Sum as Sum
from kedge.errors import (
    FieldError,
    HookError,
    IncompatibleError,
    TwoAggregators,
    UnknownName,
    nearest,
)
from kedge.grammar import Call, parse_calls
from kedge.registry import Registry
from kedge.schema import Configured, ErrorCollector
from kedge.schema import Doc as Doc
from kedge.schema import Range as Range
from kedge.schema.formula import evaluate

if TYPE_CHECKING:
    from kedge.core.model import Model
    from kedge.core.round import Round
    from kedge.core.update import Totals, Update
    from kedge.core.view import Spec, View


Options = dict[str, Any]  # values of a part's fields, by name


@dataclasses.dataclass(frozen=True)
class Present:
    """A round that is about to begin, for :meth:`Part.draw_samples`."""

    spec: Spec
    round: int  # from 0
    client: str  # a name
    server: Tree  # the part's state on the server, after its survey
    prepare: Callable[[], Tree]  # the part's ``local`` on this client, before its first step
    key: Tensor  # of what is drawn
    count: int  # samples that are wanted; of a given set, all may be returned


class Out(NamedTuple):
    """The network's outputs for a batch: the real rows, and the rows that this part injected."""

    logits: Tensor  # [B, C]
    features: Tensor  # [B, F], input of the head
    at: dict[str, Tensor]  # activations at the part's cuts
    mine: Any = ()  # an Out of the rows that this part injected


class Declarations:
    """The class attributes of a part; the laws check them."""

    name: ClassVar[str] = ""
    #: Which side it acts on, for the tables: client, server, data, personal, privacy.
    side: ClassVar[str] = "client"
    #: What it computes beyond FedAvg's one gradient a step, in a few words for the tables.
    compute: ClassVar[str] = ""
    #: Needs single clients' updates on the server, not sums: no chunking, no secure aggregation.
    needs_clients: ClassVar[bool] = False
    #: Needs the plain sum of updates over the cohort (``r.sum_delta``) besides their weighted mean.
    needs_sum: ClassVar[bool] = False
    #: Needs the sum of updates times shares (``r.share_delta``), for means over all clients.
    needs_share_sum: ClassVar[bool] = False
    #: Reads the features before the head, so the model must have one.
    needs_features: ClassVar[bool] = False
    #: Works on the head on the server, so the head may not stay on the clients.
    needs_shared_head: ClassVar[bool] = False
    #: Is about BatchNorm, so that a run refuses a model without it.
    needs_batchnorm: ClassVar[bool] = False
    #: Reads how many samples of each class the client has (``v.label_counts``).
    needs_labels: ClassVar[bool] = False
    #: Calls ``v.sweep``.
    needs_sweep: ClassVar[bool] = False
    #: Assumes that the local update is a sum of gradients (control variates): warns with momentum.
    needs_plain_sgd: ClassVar[bool] = False
    #: Reads ``info.pulled_steps``, so every part beside it must tell its ``anchor_pull``.
    needs_pull: ClassVar[bool] = False
    #: Its clients' own models are its product, so results show theirs before the global model's.
    personal_model: ClassVar[bool] = False
    #: Tasks for which it has a meaning.
    tasks: ClassVar[tuple[str, ...]] = ("classification", "multilabel", "regression")
    #: Named settings: ``moon:fedcog`` in a method string.
    presets: ClassVar[dict[str, Options]] = {}
    #: A setting under which the method equals FedAvg bit for bit; None where there is none.
    neutral: ClassVar[Options | None] = None
    #: A setting under which the fixed point minimises the run's objective, the mean of the clients'
    #: losses with the run's client weights (law *objective*); None where the part claims no such
    #: thing. ``solves_for`` restricts the claim to the head.
    solves: ClassVar[Options | None] = None
    solves_for: ClassVar[Literal["all", "head"]] = "all"
    #: How much farther from the optimum of two quadratics than FedAvg it may settle (law *stable*).
    strays: ClassVar[float] = 0.0
    #: A setting that is quick on a tiny problem, for the tests of all pairs.
    tiny: ClassVar[Options] = {}
    #: How many numbers the server sends to a client in a round, beyond FedAvg's: a formula in P
    #: (parameters that travel), W and B (all of the network's parameters and buffers), H (the
    #: head's), E (the part's own, from ``extend``), F (features), C (outputs), X (inputs), N
    #: (clients), R (rows of a batch), ``D_cut`` and ``K_cut`` (activations and channels at a cut)
    #: and the part's fields.
    sends: ClassVar[str] = "0"
    #: How many numbers a client uploads in a round, beyond FedAvg's: such a formula.
    uploads: ClassVar[str] = "0"
    #: Names of uploads that count samples, which clipping measures in the client's samples.
    counted: ClassVar[tuple[str, ...]] = ()
    #: Names of uploads that tell how many samples of each class a client has, or a mean of labels.
    tells_labels: ClassVar[tuple[str, ...]] = ()
    #: How many numbers a client stores from round to round: such a formula.
    keeps: ClassVar[str] = "0"
    #: Kinds of heterogeneity for which it was made (labels, features, sizes), each with the level
    #: from which on a diagnosis of data suggests it: mild (if no other part is), moderate, strong.
    made_for: ClassVar[dict[str, str]] = {}


MIN_SIMILARITY = 0.75  # difflib's ratio from which a name counts as misspelt


def check_overrides(cls: type, base: type) -> None:
    """Raise a HookError if a class has a misspelt hook, or one whose arguments differ from those in
    ``base``.

    >>> class Base:
    ...     def term(self, v): ...
    >>> check_overrides(type("Ridge", (Base,), {"terms": lambda self, v: 0}), Base)
    Traceback (most recent call last):
    kedge.errors.HookError: Ridge.terms is no hook and is never called. Did you mean 'term'? ...
    """
    known = {n: f for n, f in vars(base).items() if inspect.isfunction(f) and n[0] != "_"}
    for name, method in _methods(cls, base):
        if name in known:
            _check_arguments(cls, name, method, known[name])
        elif not hasattr(base, name):
            near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=MIN_SIMILARITY)
            if near:
                raise HookError(
                    f"{cls.__name__}.{name} is no hook and is never called. Did you mean "
                    f"{near[0]!r}? A helper must have another name: '_{name}'"
                )


def _methods(cls: type, base: type) -> Iterator[tuple[str, Any]]:
    """Public methods of a class and of its bases other than ``base``."""
    for owner in cls.__mro__:
        if owner in base.__mro__:
            continue
        for name, value in vars(owner).items():
            if name[0] != "_" and (
                inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod))
            ):
                yield name, value


def _check_arguments(cls: type, name: str, method: Any, wanted: Any) -> None:
    """Raise a HookError if a method does not accept the arguments of the base's method."""
    names = list(inspect.signature(wanted).parameters)
    given = names[1:] if isinstance(method, staticmethod) else names
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    signature = inspect.signature(function)
    try:
        signature.bind(*given)
    except TypeError:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        actual = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise HookError(
            f"{cls.__name__}.{name} takes {actual}, but the hook {name} takes ({', '.join(names)})"
        ) from None


parts: Registry[type[Part]] = Registry(
    "part", see="kedge list", module="kedge.parts", group="kedge.parts"
)


@dataclasses.dataclass(frozen=True)
class Part(Declarations, Configured):
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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_overrides(cls, Part)

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

    def describe_uploads(self, spec: Spec) -> str:
        """What it makes a client share beyond the model, as a sentence after its name, such as
        "sends its update divided by its number of steps"; empty: its messages are listed."""
        return ""

    def class_means(self, spec: Spec, uploads: Tree, sent: Tree) -> ClassMeans | None:
        """The class means of features that can be read from the uploads of one client, which
        received ``sent``; None if there are none. The diagnosis of privacy inverts them."""
        return None

    def draw_samples(self, present: Present) -> Drawn | str:
        """Samples that it generates, mixes or averages, or why it has none to show. The diagnosis
        of privacy compares them with the training samples."""
        raise NotImplementedError

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

    def count(self, formula: str, symbols: dict[str, int]) -> int:
        """Value of ``sends``, ``uploads`` or ``keeps`` for given sizes of the model."""
        return round(evaluate(formula, self._given() | symbols))


OTHERS = {"has", "hooks", "count", "cuts", "surveys", "advice"}
OTHERS |= {"anchor_pull", "for_model", "makes_inputs", "refuses"}
OTHERS |= {"describe_uploads", "class_means", "draw_samples"}
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
