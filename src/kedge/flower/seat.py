"""A member's place in a run: its silo, and what it keeps on disk about the run."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import hmac
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from kedge.core import tree
from kedge.core.model import Model
from kedge.core.tree import Tree, Weights
from kedge.data.datasets import Dataset
from kedge.errors import KedgeError, TermsError, WireError
from kedge.files import write_file
from kedge.flower.messages import PIECE, RUN_ID, Refused
from kedge.flower.names import plain
from kedge.flower.own_data import own_federation
from kedge.flower.releases import Releases
from kedge.flower.states import States
from kedge.models import build
from kedge.session import wire
from kedge.session.session import NEVER, read_state
from kedge.session.terms import Terms
from kedge.silo import Silo

Own = nn.Module | Callable[[], nn.Module] | None
TOKEN = re.compile(r"[0-9a-f]{0,64}")


class Place(NamedTuple):
    """Who a member is in a run."""

    terms: Terms
    client: int
    token: str  # what the member shows when it joins the run again
    initial: Weights


class Seat:
    """A member's silo in a run, and its states on disk."""

    def __init__(self, run: str, terms: Terms, silo: Silo, states: States) -> None:
        self.run, self.terms, self.silo, self.states = run, terms, silo, states
        first = silo.bound.client()
        #: Methods without client state never lose it.
        self.is_stateless = not any(True for _ in tree.leaves(first))

    def load(self, round: int, accepted: int) -> None:
        """Put the state after the accepted round into the silo, and commit that round.

        Raises:
            Refused: the state is lost (``NO_STATE``), or the request is older than one that was
                answered (``STALE``).
            WireError: the round is not after the accepted one.
        """
        if accepted >= round:
            raise WireError(f"round {round} does not follow the accepted round {accepted}")
        if self.is_stateless:
            self.silo.states = {} if accepted == NEVER else {accepted: self.silo.bound.client()}
            return
        committed = self.states.committed
        if accepted < committed:
            text = f"the request names round {accepted} as accepted, one before named {committed}"
            raise Refused("STALE", text)
        if accepted == NEVER:
            self.silo.states = {}
            return
        if accepted not in self.silo.states:
            self.silo.states = {accepted: self._read(accepted)}
        self.states.commit(accepted)

    def _read(self, round: int) -> Tree:
        flat = self.states.load(round)
        try:
            if flat is not None:
                return read_state(flat, self.silo.bound.client())
            reason = (
                f"the state after round {round} is lost; there are those of {self.states.rounds}"
            )
        except KedgeError as error:
            reason = str(error)
        raise Refused("NO_STATE", reason)

    def save(self, round: int, accepted: int) -> None:
        """Write the state after an attempt."""
        if not self.is_stateless:
            self.states.save(round, tree.to_wire(self.silo.states[round]), accepted)

    def by_class(self) -> dict[str, int] | None:
        """Training samples of each class, if the method counts or averages samples by class."""
        bound = self.silo.bound
        if not (bound.needs("labels") or bound.parts_with("survey")) or not bound.task.one_class:
            return None
        counts = self.silo.data.label_counts()[0].tolist()
        names = self.terms.data.classes or tuple(map(str, range(len(counts))))
        return {name: int(n) for name, n in zip(names, counts, strict=True)}

    def tested(self, found: Tree) -> int:
        """The number of samples behind the sums of a test; 0 if there are none."""
        return len(self.silo.data.held_out[0]) if found else 0


def make_silo(
    dataset: Dataset, name: str, place: Place, own: Own, device: torch.device | str
) -> Silo:
    """The silo of a member.

    Raises:
        TermsError: the data or the model do not fit the terms.
    """
    terms, client, _, initial = place
    module = make_module(terms, own)
    state, sent = module.state_dict(), initial.params | initial.buffers
    if any(n not in state or state[n].shape != value.shape for n, value in sent.items()):
        raise TermsError("the initial weights are not those of the model of the terms")
    module.load_state_dict(sent, strict=False)
    model = Model(module, batchnorm=terms.batchnorm, precision=terms.precision)
    if wire.template_of(model.own_weights()) != wire.template_of(initial):
        raise TermsError("the initial weights are not those of the model of the terms")
    return Silo(terms, model, own_federation(dataset, terms, name, device), client)


def make_module(terms: Terms, own: Own) -> nn.Module:
    """The module of the terms, with the weights that the seed of the terms draws."""
    if terms.model == "own":
        if own is None:
            raise TermsError("the terms name a model of one's own; give model=... here, too")
        return copy.deepcopy(own) if isinstance(own, nn.Module) else own()
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(terms.seed)
        return build(terms.model, terms.data.shape, terms.data.outputs)


class MemberFolder:
    """The folder of a member; nobody else reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def log(self, text: str) -> None:
        """Append a line to the log; further lines of a text are indented. What a full disk does not
        take is lost: an answer does not depend on it."""
        body = "\n    ".join(map(plain, text.strip().split("\n")))
        with (
            contextlib.suppress(OSError),
            (self.path / "log.txt").open("a", encoding="utf-8") as file,
        ):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {body}\n")

    @cached_property
    def releases(self) -> Releases:
        """The answers that have left this member."""
        return Releases(self.path / "released.txt")

    def key_of(self, digest: str) -> bytes:
        """The key of the noise on one answer: it depends on this member's secret, and on all that
        the answer depends on."""
        return hmac.new(self.secret, digest.encode(), hashlib.sha256).digest()

    @cached_property
    def secret(self) -> bytes:
        """The key of this member's noise; drawn once."""
        path = self.path / "secret"
        if not path.exists():
            handle = os.open(path.with_name(".secret.part"), os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(os.urandom(32))
                file.flush()
                os.fsync(file.fileno())
            path.with_name(".secret.part").replace(path)
        return path.read_bytes()

    # -- places in runs -----------------------------------------------------------------------

    def run(self, run: str) -> Path:
        assert RUN_ID.fullmatch(run)  # it becomes a path
        return self.path / "runs" / run

    def token(self, run: str) -> str:
        """What shows that this member has a place in a run; empty if it has none."""
        path = self.run(run) / "seat.json"
        return str(json.loads(path.read_bytes())["token"]) if path.exists() else ""

    def agreed(self, run: str, place: Place, fingerprint: str) -> Place:
        """The place that this member takes in a run: one that it has already may get more rounds,
        and nothing else. Its initial weights are those that came first.

        Raises:
            TermsError: this member has another place in the run.
        """
        before = self.place(run, fingerprint)
        if before is None:
            return place
        same = replace(before.terms, rounds=0) == replace(place.terms, rounds=0)
        if not same or before.client != place.client:
            raise TermsError(f"this member has agreed to other terms for run {run}")
        return place._replace(initial=before.initial)

    def save_place(self, run: str, place: Place, fingerprint: str) -> None:
        """Keep a place that was :meth:`agreed`."""
        folder = self.run(run)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "seat.json").exists():
            write_file(folder / "initial.safetensors", wire.pieces("initial", place.initial, PIECE))
        values = {
            "terms": place.terms.to_json(),
            "client": place.client,
            "token": place.token,
            "data": fingerprint,
        }
        write_file(folder / "seat.json", json.dumps(values).encode())

    def place(self, run: str, fingerprint: str) -> Place | None:
        """This member's place in a run; None if it has none.

        Raises:
            TermsError: the data are not those with which it joined.
        """
        folder = self.run(run)
        if not (folder / "seat.json").exists():
            return None
        values = json.loads((folder / "seat.json").read_bytes())
        if values["data"] != fingerprint:
            raise TermsError("the data have changed since this member joined the run; restore them")
        with (folder / "initial.safetensors").open("rb") as file:
            initial = wire.unpack(file, "initial")
        terms = Terms.from_json(values["terms"])
        return Place(terms, int(values["client"]), str(values["token"]), initial)


def read_agreement(text: str) -> tuple[Terms, str]:
    """Terms and token in a request ``agree``; a WireError or TermsError for anything else."""
    try:
        values = json.loads(text)
        terms, token = values["terms"], values["token"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise WireError("the request lacks terms or token") from None
    if not isinstance(token, str) or not TOKEN.fullmatch(token) or not isinstance(terms, str):
        raise WireError("the request lacks terms or token")
    return Terms.from_json(terms), token


def agreement_text(terms: Terms, token: str) -> str:
    """The text of a request ``agree``."""
    return json.dumps({"terms": terms.to_json(), "token": token})
