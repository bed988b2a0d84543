"""A member's place in a run: its silo, and what it keeps on disk about the run.

States are files, one per run and round, written atomically.
The member keeps the state after the last *accepted* round and the one after its last attempt, which
the server may accept or not. Which one counts is known with the next request, which names the
accepted round: the ledger of the server is committed by it. So a reply that was lost, late or
dropped leaves no trace, and a member that restarts goes on. A request that names an older accepted
round than one before is *stale* (a replay, or a server that went back): it changes nothing, since
obeying it would delete the state that counts.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import hmac
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.part import Part
from kedge.core.tree import Tree, Weights
from kedge.data.datasets import Dataset
from kedge.errors import DataError, KedgeError, ModelError, TermsError, WireError
from kedge.federation.member.own_data import own_federation
from kedge.federation.member.releases import Releases
from kedge.federation.member.silo import Silo, bind, model_of
from kedge.federation.messages import PIECE, RUN_ID, Refused
from kedge.federation.names import plain
from kedge.files import append_file, check_owned, make_folder, write_file
from kedge.models import HF, OWN, build, models, name_of
from kedge.session import wire
from kedge.session.session import NEVER, read_state
from kedge.session.terms import NoData, Terms

Own = nn.Module | Callable[[], nn.Module] | None
#: What the terms may need: so many times what the member has or got, and so many bytes more.
MAX_FACTOR, MAX_MORE_BYTES = 16, 1 << 28
#: Rows of a batch: as many times those of the member, or so many. Memory for each row of a round.
MAX_BATCH, ROW_BYTES = 4096, 64
TOKEN = re.compile(r"[0-9a-f]{0,64}")


class Membership(NamedTuple):
    """Who a member is in a run."""

    terms: Terms
    client: int
    token: str  # what the member shows when it joins the run again
    initial: Weights


STATE = re.compile(r"state-(\d{9})\.safetensors")


class MemberRun:
    """A member's silo in a run, and its states on disk.

    Args:
        run: id of the run.
        terms: those that the member has agreed to.
        silo: what answers requests.
        folder: where the states are; it is created if needed.
    """

    def __init__(self, run: str, terms: Terms, silo: Silo, folder: Path) -> None:
        self.run, self.terms, self.silo, self.folder = run, terms, silo, folder
        #: Methods without client state never lose it.
        self.is_stateless = not any(True for _ in tree.leaves(silo.bound.client()))
        make_folder(folder, private=True)
        for leftover in folder.glob(".*.part"):  # of a process that was killed
            leftover.unlink(missing_ok=True)

    def load(self, round: int, accepted: int) -> None:
        """Put the state after the accepted round into the silo, and commit that round: states
        before it are deleted.

        The mark is written before anything is deleted, so a crash in between loses nothing.

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
        committed = self.committed
        if accepted < committed:
            text = f"the request names round {accepted} as accepted, one before named {committed}"
            raise Refused("STALE", text)
        if accepted == NEVER:
            self.silo.states = {}
            return
        if accepted not in self.silo.states:
            self.silo.states = {accepted: self._read(accepted)}
        if accepted != committed:
            mark = json.dumps(accepted).encode()
            write_file(self.folder / "committed.json", mark, private=True)
        self._keep(lambda round: round >= accepted)

    @property
    def committed(self) -> int:
        """The newest round that the server has named as accepted."""
        path = self.folder / "committed.json"
        try:
            return int(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return NEVER
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None

    @property
    def rounds(self) -> list[int]:
        """Rounds of which there is a state on disk, in ascending order."""
        found = (STATE.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _read(self, round: int) -> Tree:
        try:
            return read_state(load(self._path(round).read_bytes()), self.silo.bound.client())
        except (OSError, SafetensorError, ValueError):  # it is missing, or damaged
            reason = f"the state after round {round} is lost; there are those of {self.rounds}"
        except KedgeError as error:
            reason = str(error)
        raise Refused("NO_STATE", reason)

    def save(self, round: int, accepted: int) -> None:
        """Write the state after an attempt; of other attempts since ``accepted`` none is kept."""
        if self.is_stateless:
            return
        arrays = {
            name: value.detach().cpu().contiguous()
            for name, value in tree.to_wire(self.silo.states[round]).items()
        }
        write_file(self._path(round), save(arrays), private=True)
        self._keep(lambda other: other in (accepted, round))

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        for round in self.rounds:
            if not wanted(round):
                self._path(round).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"state-{round:09d}.safetensors"

    def by_class(self) -> dict[str, int] | None:
        """Training samples of each class, if the method counts or averages samples by class."""
        bound = self.silo.bound
        if not (bound.needs("labels") or bound.parts_with("survey")) or not bound.task.one_class:
            return None
        counts = self.silo.data.label_counts()[0].tolist()
        names = self.terms.data.classes or tuple(map(str, range(len(counts))))
        return {name: int(n) for name, n in zip(names, counts, strict=True)}


def make_silo(
    dataset: Dataset,
    name: str,
    place: Membership,
    own: Own,
    device: torch.device | str,
    check: Callable[[Bound], None] = lambda bound: None,
    releases: tuple[Part, ...] = (),
) -> Silo:
    """The silo of a member.

    The server names model, method and sizes, so they are tried on the device ``meta`` first, where
    nothing is allocated.

    Args:
        dataset: the member's data.
        name: the member's name.
        place: terms, number and initial weights.
        own: the module of terms with the model ``own``.
        device: where to compute.
        check: called with the method of the terms on ``meta``; it raises an exception to refuse.
        releases: parts that act last on what leaves, besides those of the terms.

    Raises:
        TermsError: the data, the model or the method do not fit the terms, or need too much memory.
    """
    terms, client, _, initial = place
    with refusing("these terms cannot be kept"):
        width = math.prod(terms.data.shape) + terms.data.outputs
        _check_bytes("the data", 4 * width * sum(dataset.sizes.values()), dataset.x_train.nbytes)
        data = own_federation(dataset, terms, name, device)
        _check_round(terms, data.sizes[0], dataset.x_train.nbytes)
        blank = model_of(terms, make_module(terms, own, "meta"))
        if wire.template_of(blank.own_weights()) != wire.template_of(initial):
            raise TermsError("the initial weights are not those of the model of the terms")
        tried = False
        try:
            bound = bind(terms, blank, NoData(data.tokens), device=torch.device("meta"))
            check(bound)
            states = bound.initial, bound.client(), bound.server().slots
            _check_bytes("model and states", sum(map(tree.nbytes, states)), tree.nbytes(initial))
            tried = True
        except (ModelError, RuntimeError):
            if not _is_own(terms.model):
                raise  # the member's own code, which is trusted, may not run on meta
        module = make_module(terms, own)
        module.load_state_dict(initial.params | initial.buffers, strict=False)
        silo = Silo(terms, model_of(terms, module), data, client, releases=releases)
        if not tried:
            check(silo.bound)
        return silo


def _check_round(terms: Terms, rows: int, own: int) -> None:
    """Raise a TermsError for batches and rounds of far more rows than the member has."""
    most = max(MAX_FACTOR * rows, MAX_BATCH)
    if terms.batch > most:
        raise TermsError(f"batch: {terms.batch} rows are too many for {rows}, at most {most}")
    drawn = terms.workload.work.steps_for(rows) * terms.batch
    _check_bytes(f"the {drawn} rows of a round", ROW_BYTES * drawn, own)


def _check_bytes(what: str, needed: int, own: int) -> None:
    most = MAX_FACTOR * own + MAX_MORE_BYTES
    if needed > most:
        raise TermsError(f"{what} would take {needed / 1e6:.0f} MB, of {most / 1e6:.0f} MB at most")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """What a server asks for, and cannot be done, is refused with one sentence."""
    try:
        yield
    except (TermsError, WireError):
        raise
    except (KedgeError, RuntimeError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TermsError(f"{what}: {lines[0]:.300}") from error


def _is_own(model: str) -> bool:
    """Whether a model is the member's own code, or one of Hugging Face that its policy allows."""
    name = name_of(model)
    is_known = name != OWN and not name.startswith(HF)
    return not (is_known and models[name].__module__.startswith("kedge."))


def make_module(terms: Terms, own: Own, device: str = "cpu") -> nn.Module:
    """The module of the terms, with the weights that the seed of the terms draws."""
    if terms.model == OWN:
        if own is None:
            raise TermsError("the terms name a model of one's own; give model=... here, too")
        return (copy.deepcopy(own) if isinstance(own, nn.Module) else own()).to(device)
    place = nullcontext() if _is_own(terms.model) else torch.device(device)
    with torch.random.fork_rng(devices=()), place:
        torch.default_generator.manual_seed(terms.seed)
        return build(terms.model, terms.data.shape, terms.data.outputs).to(device)


class MemberFolder:
    """The folder of a member; nobody else reads what is secret in it, or writes there.

    Raises:
        KedgeError: others can write there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path, private=True)
        check_owned(path)
        make_folder(path / "runs", private=True)
        for name, mode in (("runs", 0o700), ("secret", 0o600)):
            with contextlib.suppress(FileNotFoundError):  # an older kedge let others read
                (path / name).chmod(mode)

    def log(self, text: str) -> None:
        """Append a line to the log; further lines of a text are indented. What a full disk does not
        take is lost: an answer does not depend on it."""
        body = "\n    ".join(map(plain, text.strip().split("\n")))
        with contextlib.suppress(OSError):
            append_file(self.path / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {body}\n")

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
            write_file(path, os.urandom(32), private=True)
        return path.read_bytes()

    # -- places in runs -----------------------------------------------------------------------

    def run(self, run: str) -> Path:
        assert RUN_ID.fullmatch(run)  # it becomes a path
        return self.path / "runs" / run

    def token(self, run: str) -> str:
        """What shows that this member has a place in a run; empty if it has none."""
        path = self.run(run) / "seat.json"
        return str(json.loads(path.read_bytes())["token"]) if path.exists() else ""

    def agreed(self, run: str, place: Membership, fingerprint: str) -> Membership:
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

    def save_place(self, run: str, place: Membership, fingerprint: str) -> None:
        """Keep a place that was :meth:`agreed`."""
        folder = self.run(run)
        make_folder(folder, private=True)
        if not (folder / "seat.json").exists():
            pieces = wire.pieces("initial", place.initial, PIECE)
            write_file(folder / "initial.safetensors", pieces, private=True)
        values = {
            "terms": place.terms.to_json(),
            "client": place.client,
            "token": place.token,
            "data": fingerprint,
        }
        write_file(folder / "seat.json", json.dumps(values).encode(), private=True)

    def place(self, run: str, fingerprint: str) -> Membership | None:
        """This member's place in a run; None if it has none.

        Raises:
            TermsError: the data are not those with which it joined, or another release of kedge
                has written its files.
        """
        folder = self.run(run)
        if not (folder / "seat.json").exists():
            return None
        values = json.loads((folder / "seat.json").read_bytes())
        if values["data"] != fingerprint:
            raise TermsError("the data have changed since this member joined the run; restore them")
        try:
            with (folder / "initial.safetensors").open("rb") as file:
                initial = wire.unpack(file, "initial")
        except WireError as error:
            raise TermsError(
                f"what this member keeps of run {run} cannot be read ({error}); go on with the "
                "kedge that began the run, or start a new one"
            ) from None
        terms = Terms.from_json(values["terms"])
        return Membership(terms, int(values["client"]), str(values["token"]), initial)


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
