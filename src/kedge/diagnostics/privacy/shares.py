"""What crosses the wire in a round: measured on a client, beside what the parts declare; and in
words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from kedge.core import tree
from kedge.core.hooks import call
from kedge.core.part import Part, Stack, parts
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

    def uploads(self, part: str) -> dict[str, Tree]:
        """The values that the client uploaded, by name; those of its survey if it has one."""
        own = ((path, value) for path, value in self.totals.uploads.items() if path[0] == part)
        return self.surveys.get(part) or {" ".join(path[1:]): _value(value) for path, value in own}


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
            value = _value(upload)
            name = " ".join(path[1:]) or "survey"
            surveys[part.name][name] = value
            asked = {"when": WHEN[part.surveys()], "survey": True}
            shares.append(_share(part.name, "up", name, value, type(upload).__name__, **asked))
    return Shared(client, [s for s in shares if s.numbers], totals, surveys)


def _down(sim: Simulation) -> Iterable[Share]:
    down = sim.session.request("", []).broadcast
    yield from _weights(sim, "down", "", down.weights.params, down.weights.buffers)
    for part, sent in down.sent.items():
        entries = sent if isinstance(sent, dict) and len(sent) <= MAX_ENTRIES else {"state": sent}
        for name, value in entries.items():
            yield _share(part, "down", name, value)


def _up(sim: Simulation, totals: Totals) -> Iterable[Share]:
    delta = totals.summed.delta
    kind = "Stack" if sim.bound.needs("clients") else "Mean"
    yield from _weights(sim, "up", kind, delta.params, delta.buffers)
    for part in sim.bound.parts_with("contribute"):
        yield _share(part.name, "up", "contribution", totals.summed.contribution, "Sum")
    for path, upload in totals.uploads.items():
        name = " ".join(path[1:]) or "upload"
        yield _share(path[0], "up", name, _value(upload), type(upload).__name__)


def _value(upload: Any) -> Tree:
    """What one client uploaded; a Stack without its axis of clients."""
    return tree.take(upload.value, 0) if isinstance(upload, Stack) else upload.value


def _weights(
    sim: Simulation, way: str, kind: str, params: dict[str, Tensor], buffers: dict[str, Tensor]
) -> Iterable[Share]:
    """The model's own leaves together, and the leaves that each part added."""
    names, update = sim.bound.model.names, " (update)" if way == "up" else ""
    own = {n: v for n, v in params.items() if n in names}
    yield _share(FEDAVG, way, f"parameters{update}", own, kind)
    yield _share(FEDAVG, way, f"buffers{update}", buffers, kind)
    for part in sim.bound.parts_with("extend"):
        leaves = tree.under(params, part.name)
        yield _share(part.name, way, f"own parameters{update}", leaves, kind)


def _share(part: str, way: str, name: str, value: Tree, kind: str = "", **when: Any) -> Share:
    leaves = list(tree.leaves(value))
    shape = f"{len(leaves)} arrays"
    if len(leaves) == 1:
        shape = " x ".join(map(str, leaves[0].shape)) or "1"
    sizes = tree.numel(value), tree.nbytes(value)
    return Share(part, way, name, kind, shape, *sizes, **when)


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


# -- in words ------------------------------------------------------------------------------------


def sentences(sim: Simulation, shared: Shared) -> list[str]:
    """What every method shares, then one sentence for each part that shares more."""
    lines = [_base(sim, shared)]
    for part in sim.bound.method.parts:
        own = [s for s in shared.shares if s.part == part.name]
        if own:
            text = part.describe_uploads(sim.bound.spec) or _plain(own)
            lines.append(f"{title(part.name)} {text}.")
    return [*lines, *_observers(sim, shared)]


def title(name: str) -> str:
    """A part by the name that its paper gives it."""
    return parts[name].__name__ if name in parts else name


def _base(sim: Simulation, shared: Shared) -> str:
    own = [s for s in shared.shares if s.part == FEDAVG and s.way == "up"]
    params = sum(s.numbers for s in own if s.name.startswith("parameters"))
    buffers = sum(s.numbers for s in own if s.name.startswith("buffers"))
    kept = len(sim.bound.private_params) + len(sim.bound.private_buffers)
    if not params:
        return "No parameter of the model leaves the clients."
    text = f"Every client receives the model and sends its update: {number(params)} parameters"
    text += f" and {number(buffers)} running statistics" if buffers else ""
    text += f"; {number(kept)} of the model's arrays stay on the client" if kept else ""
    return text + "."


def _plain(shares: Sequence[Share]) -> str:
    """A part without words of its own: its messages by name."""
    ways = {"up": "sends", "down": "receives"}
    texts = []
    for way, verb in ways.items():
        own = [f"{s.name} ({number(s.numbers)} numbers)" for s in shares if s.way == way]
        texts += [f"{verb} {', '.join(own)}"] if own else []
    return "also makes a client share: it " + "; it ".join(texts)


def _observers(sim: Simulation, shared: Shared) -> list[str]:
    """Who sees single clients, and who sees labels."""
    lines = []
    needing = [title(p.name) for p in sim.bound.parts if p.needs_clients]
    cohort = sim.session.cohort_size
    if needing:
        lines.append(
            f"On the server, {_join(needing)} needs what each single client sends, not only sums, "
            "so secure aggregation cannot be used."
        )
    elif cohort == 1:
        lines.append("With one client per round, the sum that the server sees is that client's.")
    else:
        lines.append(
            f"The server needs only sums over the {cohort} clients of a round, so secure "
            "aggregation could hide single clients; kedge itself does not encrypt what they send."
        )
    telling = {p.name: p.tells_labels for p in sim.bound.method.parts}
    counts = [
        f"{title(s.part)} ({'each client' if s.kind == 'Stack' else 'as a sum'})"
        for s in shared.shares
        if s.way == "up" and s.name in telling.get(s.part, ())
    ]
    if counts:
        lines.append(f"Labels are counted or averaged in what clients send: {_join(counts)}.")
    return lines


def number(count: int) -> str:
    """A whole number in groups of three.

    >>> number(44426)
    '44,426'
    """
    return f"{count:,}"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
