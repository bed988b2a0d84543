"""The release policy of a member: an allow-list of what may leave it.

A policy is a TOML file that the owner of the data writes::

    kinds = ["join", "train", "survey", "evaluate"]  # requests that are answered
    parts = ["fedprox"]    # parts of methods; fedavg is always allowed
    models = ["mlp"]       # models that are built; "*": all but hf:NAME
    uploads = ["update", "loss", "test"]  # what may leave, see `declared`
    max_mb = 50.0          # size of one reply
    max_joins = 10         # distinct profiles of the data, over all runs
    max_updates = 500      # likewise answers to train
    max_surveys = 10       # likewise to surveys
    max_tests = 50         # likewise tests of a model; a personal model is a second one
    min_samples = 50       # training samples, of the member and in every update; default 2
    min_batch = 16         # of them in every batch; default 2
    min_steps = 1          # batches in a round
    min_test_samples = 20  # samples of a test
    min_test_cell = 10     # samples that a number of a test counts, see the module testing
    min_per_class = 10     # of every class that is present, where samples are counted by class
    min_per_word = 10      # rows with a word or value of a column, see the module own_data
    clip = 1.0             # bound on the norm of all that leaves in an answer
    noise = 0.5            # standard deviation of the noise on it, in units of clip

What is left out of the file is not restricted, but for ``min_samples``, ``min_batch``, and
``max_joins``, ``max_tests``, ``min_test_cell`` and ``min_per_word``, which are as above; an unknown
key is an error. Without any policy everything may leave (``OPEN``). Model and parts of the terms
are checked by name before anything is built, then the method against what its parts declare
(``kedge show PART``), and every reply is checked once more, array by array, before it leaves. A
refusal is a code at the server; the reason is in the member's own log. Joining tells the number of
samples and, unless ``join`` is not among the kinds, names of classes and columns and summed
moments. Which models are tested, and what of a test leaves, is in
:mod:`kedge.federation.member.testing`.

``min_samples`` counts the distinct rows that an update is computed from, as far as they can be
counted: :mod:`kedge.federation.member.silo` tells how. They are counted when the terms are agreed,
and in every round; with class weights in rounds alone, since a refusal tells of labels and so is
counted as an update. A server that chooses the weights can read single rows out of full batches,
too: only ``clip`` and ``noise`` are against that.

Answers are distinct if anything differs that they depend on: the run, the round, the weights and
slots that came with the request, the weights to test. A request that is repeated gets the same
answer and is not counted again, see :mod:`kedge.federation.member.releases`. An answer that is not
finite does not leave and is counted. A member that has no update or survey left refuses; one that
has no test left trains without tests.

With ``clip`` and ``noise`` the method of the member ends with the parts ``clip(norm=clip)`` and
``gauss(std=noise * clip)``, which act on all that leaves: updates, statistics, uploads and answers
to surveys. Nothing is added to a method that ends with at least as much. So
``METHOD+clip(1)+gauss(1)`` simulates what a policy with both does. A loss that may not leave is
replaced by zeros, and so is every loss with ``clip``. Tests have no such noise; they are rounded,
see :mod:`kedge.federation.member.testing`. The noise is drawn from a secret key of the member and
from all that the answer depends on: a request that is repeated gets the same noise, and one that
differs in anything is another answer, with noise of its own, of which ``max_updates`` bounds the
number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.part import Method, Part
from kedge.core.tree import Tree
from kedge.core.update import Update
from kedge.core.view import Noise
from kedge.errors import FieldError, KedgeError
from kedge.federation.member.releases import JOIN, SURVEY, TEST, UPDATE, Release, Releases
from kedge.federation.member.silo import Silo
from kedge.federation.messages import KINDS, Refused
from kedge.files import read_toml
from kedge.grammar import parse_calls
from kedge.models import HF, OWN, name_of
from kedge.parts.release import Clip, Gauss
from kedge.schema import Choice, NotNegative, Range, Size, read_fields, schema_of
from kedge.session.terms import Terms

BUFFERS, LOSS, OUTPUT = "statistics", "loss", "output"  # besides UPDATE and TEST


def survey_name(part: str) -> str:
    """How the answer to a part's survey is called in a policy."""
    return f"survey:{part}"


def declared(bound: Bound) -> dict[str, str]:
    """What leaves a member in a run, by the name in a policy, in words.

    ``update`` is the change of the weights, ``statistics`` that of BatchNorm's, ``loss`` the mean
    training loss, ``test`` the sums of metrics. A part that declares uploads adds its own name, one
    with a survey adds ``survey:NAME``.
    """
    public = bound.only_public(bound.initial)
    found = {
        UPDATE: f"the update of {tree.numel(public.params)} numbers",
        LOSS: "the training loss",
    }
    if public.buffers:
        found[BUFFERS] = f"{tree.numel(public.buffers)} running statistics"
    for part in bound.parts:
        if part.uploads != "0" or part.has("contribute"):
            found[part.name] = f"uploads of {part.name}: {part.uploads} numbers"
        if part.has("survey"):
            found[survey_name(part.name)] = f"the survey of {part.name}"
    return found | {TEST: "sums of metrics on held-out samples"}


def contents(update: Update, bound: Bound) -> dict[str, Tree]:
    """The arrays of an update by the name in a policy."""
    named: dict[str, Tree] = {UPDATE: update.delta.params, BUFFERS: update.delta.buffers}
    named |= {name: {"uploads": value} for name, value in update.uploads.items()}
    for part in bound.parts_with("contribute"):
        named[part.name] = {"sum": update.contribution} | named.get(part.name, {})
    return named | {LOSS: update.losses}


ANY = ("*",)
Kind = Annotated[str, Choice(lambda: (*KINDS, *ANY))]
#: The bound on each kind of answers.
BOUNDS = {kind: f"max_{kind}s" for kind in (JOIN, UPDATE, SURVEY, TEST)}


class PolicyRefusal(Refused):
    """What a policy forbids; the text is for the member's own log."""

    def __init__(self, reason: str) -> None:
        super().__init__("POLICY", reason)


@dataclass(frozen=True)
class Policy:
    """What may leave a member; see the module. ``("*",)`` allows everything of a kind."""

    kinds: tuple[Kind, ...] = ANY
    parts: tuple[str, ...] = ANY
    models: tuple[str, ...] = ANY
    uploads: tuple[str, ...] = ANY
    max_mb: Annotated[float, Range(0, infinite=True)] = math.inf
    max_joins: Size = 10
    max_updates: Size = 0
    max_surveys: Size = 0
    max_tests: Size = 50
    min_samples: Size = 2
    min_batch: Size = 2
    min_steps: Size = 1
    min_test_samples: Size = 1
    min_test_cell: Size = 10
    min_per_class: Size = 0
    min_per_word: Size = 10
    clip: NotNegative = 0.0
    noise: NotNegative = 0.0

    def __post_init__(self) -> None:
        schema_of(Policy, "").check(vars(self))
        if self.noise and not self.clip:
            raise FieldError("noise is in units of clip; set clip, the bound on the norm", "noise")

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read a policy.

        Raises:
            FieldError: the file cannot be read, or has an unknown key or a wrong value.
        """
        try:
            return cls.of(read_toml(Path(path))[0])
        except (OSError, ValueError) as error:
            raise FieldError(f"{path}: cannot be read as a policy ({error})") from None
        except KedgeError as error:
            raise FieldError(f"{path}: {error}", getattr(error, "field", "")) from None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Policy:
        """A policy from the values of a TOML file."""
        return read_fields(cls, values)

    # -- requests -----------------------------------------------------------------------------

    def check_kind(self, kind: str) -> None:
        """Raise a PolicyRefusal for a kind of request that is not answered."""
        if kind in ("join", "train", "survey", "evaluate") and not _allows(self.kinds, kind):
            raise PolicyRefusal(f"requests of kind {kind!r} are not answered")

    def check_names(self, terms: Terms) -> None:
        """Raise a PolicyRefusal for a part or a model that is not allowed; none is built."""
        for call in parse_calls(terms.method):
            if call.name != "fedavg" and not _allows(self.parts, call.name):
                raise PolicyRefusal(f"the method has the part {call.name!r}, which is not allowed")
        name = name_of(terms.model)
        named = self.models if name.startswith(HF) else (*self.models, OWN)
        if name not in named and (name.startswith(HF) or "*" not in named):
            raise PolicyRefusal(f"{name!r} is not built here; to allow it: models = [{name!r}]")

    def check_terms(self, terms: Terms, bound: Bound) -> None:
        """Raise a PolicyRefusal for a method that declares what may not leave."""
        for name, what in declared(bound).items():
            if name != TEST:
                self._check_upload(name, what)
        every = [part.surveys() == "every" for part in bound.parts_with("survey")]
        surveys = sum(terms.rounds if each else 1 for each in every)
        for kind, count in ((UPDATE, terms.rounds), (SURVEY, surveys)):
            if 0 < self.most(kind) < count:
                raise PolicyRefusal(f"{count} {kind}s are more than {self.bound(kind)}")
        megabytes = tree.nbytes(bound.only_public(bound.initial)) / 1e6
        if megabytes > self.max_mb:
            raise PolicyRefusal(f"an update has {megabytes:.1f} MB, more than max_mb={self.max_mb}")

    def most(self, kind: str) -> int:
        """How many distinct answers of a kind may leave, over all runs; 0: any number."""
        return int(getattr(self, BOUNDS[kind]))

    def bound(self, kind: str) -> str:
        """The bound on a kind of answers as it stands in the file."""
        return f"{BOUNDS[kind]}={self.most(kind)}"

    def count(self, before: Releases, release: Release, *others: Release) -> None:
        """Note releases of one kind; a PolicyRefusal if they would be too many."""
        if not before.note(release, *others, most=self.most(release.kind)):
            raise PolicyRefusal(f"{self.bound(release.kind)}, and as many have left already")

    def check_samples(self, train: int, by_class: Mapping[str, int] | None = None) -> None:
        """Raise a PolicyRefusal for too few training samples, in all or of a class."""
        if train < self.min_samples:
            raise PolicyRefusal(f"{train} training samples are fewer than {self.min_samples}")
        few = [c for c, n in (by_class or {}).items() if 0 < n < self.min_per_class]
        if few:
            raise PolicyRefusal(f"class {few[0]!r} has fewer than {self.min_per_class} samples")

    def check_usage(self, silo: Silo, round: int) -> None:
        """Raise a PolicyRefusal if the update of a round is computed from too little."""
        if max(self.min_samples, self.min_batch, self.min_steps) <= 1:
            return
        used = silo.usage(round)
        for what, count, name in (
            ("rows", used.rows, "min_samples"),
            ("rows in a batch", used.batch, "min_batch"),
            ("steps", used.steps, "min_steps"),
        ):
            if count < getattr(self, name):
                raise PolicyRefusal(
                    f"the update of round {round + 1} is computed from {count} {what}, fewer than "
                    f"{name}={getattr(self, name)}; docs: kedge.federation.member.silo"
                )

    def allows_test(self, samples: int) -> bool:
        """Whether the sums of a test on so many samples may leave."""
        allowed = _allows(self.uploads, TEST) and _allows(self.kinds, "evaluate")
        return allowed and samples >= max(1, self.min_test_samples, self.min_test_cell)

    def names(self, upload: str) -> bool:
        """Whether the uploads name this one, or all of its kind; ``*`` alone does not."""
        return upload in self.uploads or f"{upload.partition(':')[0]}:*" in self.uploads

    # -- replies ------------------------------------------------------------------------------

    def releases(self, method: Method) -> tuple[Part, ...]:
        """The parts that a method lacks at its end, for all that leaves to be clipped and noisy."""
        wanted: list[Part] = [Clip(self.clip)] if self.clip else []
        if self.noise:
            wanted.append(Gauss(self.noise * self.clip))
        last = [part for part in method.parts if part.has("release")]
        pairs = list(zip(reversed(last), reversed(wanted), strict=False))
        enough = len(pairs) == len(wanted) and all(_at_least(*pair) for pair in pairs)
        return () if enough else tuple(wanted)

    def checked(self, update: Update, bound: Bound) -> Update:
        """An update without losses that may not leave; a PolicyRefusal if it contains anything else
        that may not."""
        for name, value in contents(update, bound).items():
            if tree.numel(value):
                self._check_upload(name, name)
        if self.clip or not _allows(self.uploads, LOSS):
            update = update._replace(losses=tree.zeros_like(update.losses))
        return update

    def check_survey(self, part: str) -> None:
        """Raise a PolicyRefusal if the answer to a part's survey may not leave."""
        self._check_upload(survey_name(part), f"the survey of {part}")

    def check_size(self, message: bytes) -> None:
        """Raise a PolicyRefusal for a message that is too large."""
        if len(message) > self.max_mb * 1e6:
            raise PolicyRefusal(f"{len(message) / 1e6:.1f} MB are more than max_mb={self.max_mb}")

    def _check_upload(self, name: str, what: str) -> None:
        if name == LOSS:
            return  # zeros leave in its place
        if not _allows(self.uploads, name):
            raise PolicyRefusal(f"{what} ({name!r}) is not among the uploads that may leave")


#: What holds for a member without a policy.
OPEN = Policy(
    uploads=("*", OUTPUT, f"{TEST}:*"), max_joins=0, max_tests=0, min_samples=1, min_batch=1,
    min_test_cell=0, min_per_word=0,
)  # fmt: skip


def _at_least(part: Part, wanted: Part) -> bool:
    """Whether a part of a method does as much to what leaves as one that the policy wants."""
    if type(part) is Clip and type(wanted) is Clip:
        return part.norm <= wanted.norm
    return type(part) is Gauss and type(wanted) is Gauss and part.std >= wanted.std


def _allows(allowed: tuple[str, ...], name: str) -> bool:
    return "*" in allowed or name in allowed


def noise_of(key: bytes) -> Noise:
    """The source of the noise on one answer, from its secret key; it draws other numbers for every
    public key, as a simulation does."""

    def draw(public: Tensor, like: Tree) -> Tree:
        seed = hashlib.sha256(key + repr(public.tolist()).encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed[:16], "little")))

        def drawn(x: Tensor) -> Tensor:
            return torch.from_numpy(generator.standard_normal(tuple(x.shape))).to(x.device, x.dtype)

        return tree.map(drawn, like)

    return draw


def written(policy: Policy) -> str:
    """The policy in words, for the log."""
    values = dataclasses.asdict(policy).items()
    defaults = dataclasses.asdict(OPEN)
    return ", ".join(f"{k} = {v}" for k, v in values if v != defaults[k]) or "everything may leave"
