"""One client runs other people's parts step by step before the first round, and every hook is
watched.

Under ``vmap``, in a captured graph or in a compiled step a hook that keeps state, changes what it
is given or draws random numbers of its own fails obscurely, or works once and is wrong from then
on. So before any engine starts, one client's round (its start, one step, its end) runs eagerly with
the reference arithmetic, twice. Nothing of it is kept. Kedge's own parts are left out: the laws
prove them.
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

MAX_PHASES = 8  # that are checked: a part may have a phase of its own for every round

_enabled: ContextVar[bool] = ContextVar("enabled", default=True)


@contextmanager
def disabled() -> Iterator[None]:
    """Run without the check, for what checks parts by other means."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def check_client(bound: Bound, job: Job, index: Tensor, who: int = 0, every: bool = False) -> None:
    """Run a client's round with the batch ``index`` ``[B]`` twice and watch the hooks.

    Arguments: the binding with the phases of the round, the client's job, rows of the data, the
    client's number for messages, and whether kedge's own parts are watched, too. Returns nothing
    and changes nothing. Raises a HookError that names the part, the hook and what to write
    instead::

        check_client(sim.bound.at(0), take_jobs(cohort.jobs, 0), cohort.batches[0, 0])
    """
    watch = Watch(every)
    with _same_random_numbers(), watched(watch):
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
    """The same for a client's answer to a part's survey."""
    watch = Watch()
    with _same_random_numbers(), watched(watch), _naming(f"client {who}"):
        for _ in range(2):
            client.survey(bound, job, part)
            watch.again()


def watching(due: bool = True) -> AbstractContextManager[None]:
    """Watch the hooks that run within the block, if that is due."""
    return watched(Watch()) if due and _enabled.get() else nullcontext()


class Checks:
    """The checks of one run: each is due once in every phase, and only if there are other people's
    parts.

    >>> with Checks(()).once("client", {}) as due:
    ...     due
    False
    """

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.foreign = any(map(is_foreign, parts))
        self._done: dict[str, list[dict[str, str]]] = {}

    @contextmanager
    def once(self, what: str, phases: dict[str, str]) -> Iterator[bool]:
        """Whether a check is due, which is then done in the block; if it fails, it is due again."""
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
def _same_random_numbers() -> Iterator[None]:
    """Leave the global generators as they were."""
    held = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(held[0])
        np.random.set_state(held[1])
        torch.set_rng_state(held[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
