"""A member of a federation: bytes in, bytes out.

:meth:`Member.handle` answers every request with a message, whatever happens: an answer, or a code
of :data:`~kedge.federation.messages.CODES`. No text of an exception, no path and no pickle leaves.
The reason of a refusal is in the member's log.

::

    FOLDER/log.txt                     requests, answers, refusals with their reasons
    FOLDER/secret                      key of the noise, see Policy
    FOLDER/released.txt                the answers that have left, see Releases
    FOLDER/runs/RUN/seat.json          terms, number and seat of this member in a run
    FOLDER/runs/RUN/initial.safetensors
    FOLDER/runs/RUN/state-*.safetensors

All that a member needs after a restart is in the folder and in its data. The initial weights come
from the server, once, and are kept: private leaves and first states depend on them, and they must
be equal everywhere, whatever the machine that draws them.
"""

from __future__ import annotations

import hashlib
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch

from kedge.core.bound import Bound
from kedge.core.method import parse
from kedge.core.tree import Tree, Weights
from kedge.data.datasets import Dataset
from kedge.errors import DataError, IncompatibleError, NotFinite, TermsError, WireError
from kedge.federation.large_messages import Message
from kedge.federation.member.own_data import check_rare, read_data, without_rare_words
from kedge.federation.member.policy import OPEN, Policy, PolicyRefusal, noise_of, written
from kedge.federation.member.profile import Question, state
from kedge.federation.member.releases import JOIN, SURVEY, UPDATE, Release, release_of
from kedge.federation.member.run_state import (
    MemberFolder,
    MemberRun,
    Membership,
    Own,
    make_silo,
    read_agreement,
    refusing,
)
from kedge.federation.member.testing import NOTHING, Tested, make_test
from kedge.federation.messages import MemberRequest, Refused, pack_refusal, pack_reply


class Member:
    """A member with its data, its states and its release policy.

    Args:
        name: name of the member, unique in its federation.
        data: a dataset, or what :func:`kedge.data.datasets.load` reads.
        folder: where state, log and secrets are kept; for this member alone.
        policy: what may leave; everything for None.
        model: a module of one's own, for terms with the model ``own``, or a function that makes it.
        device: where to compute.
        clock: seconds since 1970, for deadlines.

    Example::

        member = Member("north", "hospital.csv", "/var/lib/kedge", Policy.load("policy.toml"))
        reply = member.handle(request)
    """

    def __init__(
        self,
        name: str,
        data: str | Path | Dataset,
        folder: str | Path,
        policy: Policy | None = None,
        *,
        model: Own = None,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.policy = name, policy or OPEN
        self.folder = MemberFolder(Path(folder))
        self._source, self._model, self._device, self._clock = data, model, device, clock
        self._busy = threading.Lock()
        self._member_run: MemberRun | None = None
        self.folder.log(f"{name} is ready; {written(self.policy)}")

    @cached_property
    def dataset(self) -> Dataset:
        """The member's data, with its own numbering; read at the first request."""
        return without_rare_words(read_data(self._source), self.policy.min_per_word)

    # -- requests -----------------------------------------------------------------------------

    def handle(self, message: Message) -> bytes:
        """The answer to a request (bytes, or a file with them), or a code; never raises an
        Exception."""
        request: MemberRequest | None = None
        try:
            request = MemberRequest.unpack(message)
            if not self._busy.acquire(blocking=False):
                raise Refused("BUSY", "another request is being answered")
            try:
                reply = self._answer(request)
            finally:
                self._busy.release()
            self.folder.log(f"{_what(request)}: answered, {len(reply) / 1e6:.2f} MB")
            return reply
        except Refused as refusal:
            return self._refuse(request, refusal.code, str(refusal))
        except TermsError as error:
            return self._refuse(request, "TERMS", str(error))
        except WireError as error:
            return self._refuse(request, "BAD_REQUEST", str(error))
        except NotFinite as error:
            return self._refuse(request, "NOT_FINITE", str(error))
        except Exception:  # noqa: BLE001  whatever it is, its text stays here
            return self._refuse(request, "FAILED", traceback.format_exc())

    def _refuse(self, request: MemberRequest | None, code: str, reason: str) -> bytes:
        self.folder.log(f"{_what(request)}: refused with {code}: {reason}")
        return pack_refusal(request, code)

    def _answer(self, request: MemberRequest) -> bytes:
        self.policy.check_kind(request.kind)
        late = self._clock() - request.deadline if request.deadline else -1.0
        if late > 0 and request.kind in ("train", "survey", "evaluate"):
            raise Refused("LATE", f"the deadline was {late:.0f} s ago")
        answer: Callable[[MemberRequest], bytes] = getattr(self, f"_on_{request.kind}")
        return answer(request)

    # -- joining ------------------------------------------------------------------------------

    def _on_join(self, request: MemberRequest) -> bytes:
        question = Question.from_json(request.text)
        self._check_rare()
        with refusing("this question cannot be answered"):
            profile = state(self.dataset, question, self.name, least=self.policy.min_per_word)
        names = profile.schema.classes or map(str, range(profile.schema.outputs))
        self.policy.check_samples(profile.train, dict(zip(names, profile.counts, strict=False)))
        digest = hashlib.sha256(profile.to_json().encode()).hexdigest()
        release = Release(JOIN, digest, request.run, request.round)
        self.policy.count(self.folder.releases, release)
        profile = replace(profile, token=self.folder.token(request.run))
        return pack_reply(request, {}, text=profile.to_json())

    def _check_rare(self) -> None:
        """Raise a PolicyRefusal for data of which joining would tell single samples. Terms do, too:
        they are refused if they lack a name that is in the data."""
        try:
            check_rare(self.dataset, self.policy.min_per_word)
        except DataError as error:
            raise PolicyRefusal(str(error)) from None

    def _on_agree(self, request: MemberRequest) -> bytes:
        terms, token = read_agreement(request.text)
        if terms.hash != request.terms:
            raise TermsError("the terms do not have the hash of the request")
        with refusing("these terms cannot be read"):
            self.policy.check_names(terms)
        self._check_rare()
        initial = request.value.get("initial")
        if not isinstance(initial, Weights):
            raise WireError("the request lacks the initial weights")
        fingerprint = self.dataset.fingerprint
        offered = Membership(terms, request.client, token, initial)
        place = self.folder.agreed(request.run, offered, fingerprint)
        member_run = self._take(request.run, place, partial(self.policy.check_terms, terms))
        self.policy.check_samples(member_run.silo.data.sizes[0], member_run.by_class())
        if not terms.class_weights:  # with them a refusal tells of labels, and must be counted
            self.policy.check_usage(member_run.silo, 0)
        self.folder.save_place(request.run, place, fingerprint)
        self._member_run = member_run
        return pack_reply(request, {})

    def _on_refuse(self, request: MemberRequest) -> bytes:
        self.folder.log(f"the coordinator refused this member: {request.text[:1000]!r}")
        return pack_reply(request, {})

    # -- rounds -------------------------------------------------------------------------------

    def _on_train(self, request: MemberRequest) -> bytes:
        member_run = self._at_work(request)
        message = self._update(request, member_run, UPDATE)
        member_run.save(request.round, request.accepted)
        return message

    def _on_survey(self, request: MemberRequest) -> bytes:
        member_run = self._at_work(request)
        self.policy.check_survey(request.part)
        if request.part not in [part.name for part in member_run.silo.bound.parts_with("survey")]:
            raise WireError(f"the method has no survey of {request.part!r}")
        return self._update(request, member_run, SURVEY)

    def _update(self, request: MemberRequest, member_run: MemberRun, kind: str) -> bytes:
        """What leaves after training, or in answer to a survey, with a test that rides along."""
        silo, policy = member_run.silo, self.policy
        received = silo.read(request.value.get("down"))
        member_run.load(request.round, request.accepted)
        part = request.part if kind == SURVEY else ""
        facts = [request.round, request.accepted, request.terms, *([part] if part else [])]
        facts += [policy.clip, policy.noise]
        release = release_of(kind, request, facts, received, silo.state(request.accepted))
        policy.count(self.folder.releases, release)
        if not part:
            policy.check_usage(silo, request.round)
        tested = self._test(request, member_run)
        noise = noise_of(self.folder.key_of(release.digest))
        asked = silo.request(request.round, received, part)
        try:
            update = silo.answer(asked, request.accepted, noise)
        except IncompatibleError as error:  # what leaves can be neither clipped nor made noisy
            raise PolicyRefusal(str(error)) from None
        value: Tree = {"update": update if part else policy.checked(update, silo.bound)}
        message = pack_reply(request, value | tested.value, **tested.notes)
        policy.check_size(message)
        return message

    def _on_evaluate(self, request: MemberRequest) -> bytes:
        member_run = self._at_work(request)
        if request.personal:
            member_run.load(request.round, request.accepted)
        tested = self._test(request, member_run)
        message = pack_reply(request, tested.value, **tested.notes)
        self.policy.check_size(message)
        return message

    def _on_finish(self, request: MemberRequest) -> bytes:
        self.folder.log(f"run {request.run} is over")
        self._member_run = None
        return pack_reply(request, {})

    def _test(self, request: MemberRequest, member_run: MemberRun) -> Tested:
        """A test that a request asks for; none if it may not leave, since the training goes on
        without it."""
        if not request.test:
            return NOTHING
        try:
            return make_test(request, member_run, self.policy, self.folder)
        except PolicyRefusal as refusal:
            self.folder.log(f"no test: {refusal}")
            return NOTHING

    def _at_work(self, request: MemberRequest) -> MemberRun:
        """The member_run of this member in the run of a request, from its folder if need be."""
        if self._member_run is None or self._member_run.run != request.run:
            place = self.folder.place(request.run, self.dataset.fingerprint)
            if place is None:
                raise TermsError("this member has not agreed to the terms of this run")
            self._member_run = self._take(request.run, place)
        member_run = self._member_run
        if (member_run.terms.hash, member_run.silo.client) != (request.terms, request.client):
            raise TermsError("the request has other terms, or another client's number")
        if request.round > member_run.terms.rounds - (request.kind == "train"):
            raise TermsError(
                f"round {request.round + 1} is beyond the {member_run.terms.rounds} agreed"
            )
        return member_run

    def _take(
        self, run: str, place: Membership, check: Callable[[Bound], None] = lambda bound: None
    ) -> MemberRun:
        with refusing("these terms cannot be kept"):
            releases = self.policy.releases(parse(place.terms.method))
        silo = make_silo(self.dataset, self.name, place, self._model, self._device, check, releases)
        return MemberRun(run, place.terms, silo, self.folder.run(run))


def _what(request: MemberRequest | None) -> str:
    if request is None:
        return "a request that cannot be read"
    where = f" of round {request.round + 1}" if request.kind in ("train", "survey") else ""
    return f"run {request.run[:8]}, {request.kind}{where}"
