"""Check third-party parts on one client, eagerly, before the first round.

A hook must not keep state, change its arguments in place or use a global random generator. Under
``vmap``, in a captured graph or in a compiled step such a hook fails with an obscure error, or
gives wrong results from the second call on. So before the engine starts, one client's round (begin,
one step, end) runs twice in eager mode with the reference arithmetic, and every hook is watched.
The results are discarded. Kedge's own parts are skipped: tests cover them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from kedge.core import client
from kedge.core.bound import Bound
from kedge.core.hooks import watched
from kedge.core.part import Part
from kedge.core.view import Job
from kedge.errors import HookError
from kedge.session.watch import Watch, is_foreign

MAX_PHASES = 8  # checked per run: a part may have a different phase in every round

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
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
