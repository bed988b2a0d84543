"""Samples that methods generate, mix or average, as they are in the present round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import rng
from kedge.core.part import Part
from kedge.core.tree import Tree, Weights
from kedge.session.session import drive
from kedge.sim.simulation import Simulation

INPUTS, FEATURES = "inputs", "features"


class Generated(NamedTuple):
    """Samples of one part; ``where`` says who has them."""

    part: str
    x: Tensor  # [n, ...]
    labels: Tensor | None
    space: str  # what they are: inputs of the model, or features before its head
    what: str
    where: str


def makes_samples(part: Part) -> bool:
    """Whether a part generates, mixes or averages samples or features."""
    return part.name in READERS or part.makes_inputs()


def generated(
    sim: Simulation, client: int, count: int, key: Tensor
) -> tuple[list[Generated], list[str]]:
    """Samples of every part that makes some, and remarks on parts that have none to show.

    The simulation does not change.

    Args:
        sim: the simulation, in some round.
        client: the client whose samples are shown where clients have their own.
        count: samples of each part at most.
        key: randomness of the choice among them.
    """
    found, remarks = [], []
    for part in sim.bound.method.parts:
        if part.name in READERS:
            made = READERS[part.name](sim, part, client, count, key)
            if isinstance(made, str):
                remarks.append(made)
            else:
                found.append(_thinned(made, count, key))
        elif part.makes_inputs():
            remarks.append(
                f"{type(part).__name__} changes samples within a client's step; they are neither "
                "kept nor sent."
            )
    return found, remarks


def _thinned(made: Generated, count: int, key: Tensor) -> Generated:
    order = rng.permutation(key, len(made.x))[:count].sort().values.to(made.x.device)
    labels = None if made.labels is None else made.labels[order]
    return made._replace(x=made.x[order], labels=labels)


def _fedcog(sim: Simulation, part: Any, client: int, count: int, key: Tensor) -> Generated | str:
    if part.cut:
        return f"FedCOG generates activations at {part.cut}, which are not shown."
    if sim.bound.at(sim.round).phases[part.name] == "wait":
        return (
            f"FedCOG starts to generate in round {part.start + 1}; this is round {sim.round + 1}."
        )
    local = sim.prepared(client)[part.name]
    labels = local["y"] if local["y"].ndim == 1 else None
    where = (
        "they stay on the client, which made them from the global model and its own previous one"
    )
    what = f"images generated on {sim.federation.client_names[client]}"
    return Generated(part.name, local["x"].detach(), labels, INPUTS, what, where)


def _of_generator(
    sim: Simulation, part: Any, client: int, count: int, key: Tensor
) -> Generated | str:
    """FLBoost, FedDF and FedGen: draws from the generator on the server."""
    slot = sim.server.slots[part.name]
    weights = Weights(**(slot["generator"] if part.name == "fedgen" else slot))
    key_z, key_y = rng.split(key.to(sim.federation.device), 2)
    dtype, outputs = sim.bound.spec.dtype, sim.bound.task.outputs
    uniform = getattr(part, "prior", "normal") == "uniform"
    z = (rng.uniform if uniform else rng.normal)(key_z, (count, part.noise), dtype)
    y = rng.integers(key_y, (count,), outputs)
    with torch.no_grad():
        x, _ = part._generator(sim.bound.spec)(weights, z, y, train=False)
    space = INPUTS if part.level == "input" else FEATURES
    kind = "images" if part.level == "input" else "features"
    untrained = " (not trained yet)" if sim.round <= getattr(part, "start", 0) else ""
    where = "the generator is on the server"
    where += ", which sends it to every client" if part.has("send") else ""
    return Generated(part.name, x, y, space, f"{kind} of its generator{untrained}", where)


def _pool(sim: Simulation, part: Any, client: int, count: int, key: Tensor) -> Generated | str:
    """FedMix, NaiveMix and FedBR: means of clients' samples, which the server sends to all."""
    slot = _surveyed(sim, part)
    x = slot["pseudo"] if part.name == "fedbr" else slot["x"]
    what = f"means of {part.samples} samples of one client"
    where = "the server sees whose they are and sends them to every client"
    return Generated(part.name, x, None, INPUTS, what, where)


def _surveyed(sim: Simulation, part: Part) -> Tree:
    """The part's state on the server, after its survey if that is due in the present round."""
    session, server = sim.session, sim.server
    for name, clients in session.surveys(session.draw_clients(sim.round)):
        if name == part.name:
            server = drive(session.survey(name, clients), sim.clients.answer).server
    return server.slots[part.name]


def _vhl(sim: Simulation, part: Any, client: int, count: int, key: Tensor) -> Generated | str:
    spec = sim.bound.spec
    total = spec.task.outputs * part.per_class
    index = rng.permutation(key, total)[:count].to(spec.device)
    x = part._virtual(spec, sim.server.slots[part.name]["key"], index)
    what, where = "virtual samples", "they are drawn from a shared key and depend on no data"
    return Generated(part.name, x, index % spec.task.outputs, INPUTS, what, where)


READERS: dict[str, Callable[[Simulation, Any, int, int, Tensor], Generated | str]] = {
    "fedcog": _fedcog,
    "flboost": _of_generator,
    "feddf": _of_generator,
    "fedgen": _of_generator,
    "fedmix": _pool,
    "naivemix": _pool,
    "fedbr": _pool,
    "vhl": _vhl,
}
