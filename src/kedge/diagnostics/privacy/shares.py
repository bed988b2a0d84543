"""What crosses the wire in a round: measured on a client, beside what the parts declare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from kedge.core import tree
from kedge.core.hooks import call
from kedge.core.part import Part, Stack
from kedge.core.tree import Tree
from kedge.core.update import Totals
from kedge.sim.simulation import Simulation

FEDAVG = "fedavg"
MAX_ENTRIES = 6  # a part's broadcast with more entries is one share
EVERY, FIRST, LAST = "every round", "once, before round 1", "once, after the last round"
WHEN = {"every": EVERY, "first": FIRST, "last": LAST}


class Share(NamedTuple):
    """One message of a client to the server (``up``) or of the server to a client (``down``)."""

    part: str  # of the method; fedavg for what every method shares
    way: str  # up, down
    name: str
    kind: str  # Mean, Sum or Stack for what goes up; empty for what goes down
    shape: str
    numbers: int
    nbytes: int
    when: str = EVERY
    survey: bool = False  # an answer to a survey, not part of the reply after training

    @property
    def seen(self) -> str:
        """What of it the server has to see, or who receives it."""
        if self.way == "down":
            return "every client of the round"
        each = {
            "Sum": "the sum over the round's clients",
            "Mean": "the weighted mean over the round's clients",
        }
        return each.get(self.kind, "each client's own")


class Shared(NamedTuple):
    """What one client shared in a round that was computed for it and then discarded."""

    client: int
    shares: list[Share]
    totals: Totals  # of this client alone
    surveys: dict[str, dict[str, Tree]]  # values by part and name

    def numbers(self, way: str, part: str | None = None) -> int:
        """Numbers in the replies and broadcasts of a round, without surveys."""
        wanted = (s for s in self.shares if s.way == way and not s.survey)
        return sum(s.numbers for s in wanted if part is None or s.part == part)

    def nbytes(self, way: str) -> int:
        """Bytes of a round, with the surveys of every round."""
        return sum(s.nbytes for s in self.shares if s.way == way and s.when == EVERY)

    def upload(self, part: str, name: str) -> Tree:
        """The value that the client uploaded; a Stack without its axis of clients."""
        value = self.totals.uploads[part, name]
        return tree.take(value.value, 0) if isinstance(value, Stack) else value.value


def share_round(sim: Simulation, client: int) -> Shared:
    """Train one client for the present round and list what it receives and sends.

    The simulation does not change. Surveys that are asked before the first round or after the last
    one are listed as well.
    """
    bound, session = sim.bound, sim.session
    totals = sim.clients.answer(session.request("", [client]))
    surveys: dict[str, dict[str, Tree]] = {}
    shares = [*_down(sim), *_up(sim, totals)]
    for part in bound.parts_with("survey"):
        answers = sim.clients.answer(session.request(part.name, [client]))
        surveys[part.name] = {}
        for path, upload in answers.uploads.items():
            value = tree.take(upload.value, 0) if isinstance(upload, Stack) else upload.value
            name = " ".join(path[1:]) or "survey"
            surveys[part.name][name] = value
            kind, when = type(upload).__name__, WHEN[part.surveys()]
            shares.append(_share(part.name, "up", name, kind, value, when, True))
    return Shared(client, [s for s in shares if s.numbers], totals, surveys)


def _down(sim: Simulation) -> Iterable[Share]:
    down = sim.session.request("", []).broadcast
    yield from _weights(sim, "down", "", down.weights.params, down.weights.buffers)
    for part, sent in down.sent.items():
        entries = sent if isinstance(sent, dict) and len(sent) <= MAX_ENTRIES else {"state": sent}
        for name, value in entries.items():
            yield _share(part, "down", name, "", value)


def _up(sim: Simulation, totals: Totals) -> Iterable[Share]:
    delta = totals.summed.delta
    kind = "Stack" if sim.bound.needs("clients") else "Mean"
    yield from _weights(sim, "up", kind, delta.params, delta.buffers)
    for part in sim.bound.parts_with("contribute"):
        yield _share(part.name, "up", "contribution", "Sum", totals.summed.contribution)
    for path, upload in totals.uploads.items():
        value = tree.take(upload.value, 0) if isinstance(upload, Stack) else upload.value
        name = " ".join(path[1:]) or "upload"
        yield _share(path[0], "up", name, type(upload).__name__, value)


def _weights(
    sim: Simulation, way: str, kind: str, params: dict[str, Tensor], buffers: dict[str, Tensor]
) -> Iterable[Share]:
    """The model's own leaves together, and the leaves that each part added."""
    names, update = sim.bound.model.names, " (update)" if way == "up" else ""
    own = {n: v for n, v in params.items() if n in names}
    yield _share(FEDAVG, way, f"parameters{update}", kind, own)
    yield _share(FEDAVG, way, f"buffers{update}", kind, buffers)
    for part in sim.bound.parts_with("extend"):
        leaves = tree.under(params, part.name)
        yield _share(part.name, way, f"own parameters{update}", kind, leaves)


def _share(
    part: str,
    way: str,
    name: str,
    kind: str,
    value: Tree,
    when: str = EVERY,
    survey: bool = False,
) -> Share:
    leaves = list(tree.leaves(value))
    shape = f"{len(leaves)} arrays"
    if len(leaves) == 1:
        shape = " x ".join(map(str, leaves[0].shape)) or "1"
    sizes = tree.numel(value), tree.nbytes(value)
    return Share(part, way, name, kind, shape, *sizes, when, survey)


# -- what the parts declare ----------------------------------------------------------------------


class Declared(NamedTuple):
    """Numbers beyond FedAvg's that a part declares (as ``kedge show`` prints them) and shares."""

    part: str
    down: int
    up: int
    measured_down: int
    measured_up: int

    @property
    def agrees(self) -> bool:
        return (self.down, self.up) == (self.measured_down, self.measured_up)


def declared(sim: Simulation, shared: Shared) -> list[Declared]:
    """The declared and the measured traffic of each part.

    Parameters that a part leaves on the clients count as negative numbers of this part.
    """
    return [_declared(sim, shared, part) for part in sim.bound.method.parts]


def _declared(sim: Simulation, shared: Shared, part: Part) -> Declared:
    bound, spec = sim.bound, sim.bound.spec
    symbols = spec.symbols(part)
    kept = {"params": 0, "buffers": 0}
    if part.has("private"):
        names = call(part, "private", replace(spec, params=bound.initial.params))
        groups: dict[str, Any] = bound.initial._asdict()
        kept = {
            group: sum(v.numel() for n, v in leaves.items() if n in names)
            for group, leaves in groups.items()
        }
    return Declared(
        part.name,
        down=part.count(part.sends, symbols),
        up=part.count(part.uploads, symbols),
        measured_down=shared.numbers("down", part.name) - kept["params"] - kept["buffers"],
        # updates of buffers are left out of what parts declare
        measured_up=shared.numbers("up", part.name) - kept["params"],
    )
