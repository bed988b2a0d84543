"""Samples that methods generate, mix or average, beside their nearest training samples: does a
method copy?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import rng
from kedge.core.part import Drawn, Part, Present
from kedge.core.tree import Tree
from kedge.core.uploads import FEATURES
from kedge.diagnostics.privacy.pictures import CHUNK, Pixels, image_row, unit_rows
from kedge.diagnostics.privacy.shares import number, title
from kedge.history.sheet import Cell, Chart, SheetTable
from kedge.session.session import drive
from kedge.sim.simulation import Simulation

INPUTS = "inputs"
COPY = 0.25  # a copy is nearer than this share of the usual distance between training samples
QUERIES = 256  # training and test samples whose own nearest neighbours are looked up
COLUMNS = (
    "part", "space", "samples", "to the nearest training sample", "training samples to theirs",
    "ratio", "ratio of test samples", "copies", "training samples",
)  # fmt: skip
NOTE = (
    "Medians of root mean square differences: of values from 0 to 1 for inputs, of the features "
    "before the head of the global model. The ratio is to the distance of training samples to "
    "their own nearest neighbours; test samples show that of fresh samples. A copy is nearer than "
    f"{COPY:g} times that distance."
)


# -- the samples ---------------------------------------------------------------------------------


class Made(NamedTuple):
    """Samples of one part."""

    part: str
    drawn: Drawn


def makes_samples(part: Part) -> bool:
    """Whether a part generates, mixes or averages samples or features."""
    return part.has("draw_samples") or part.makes_inputs()


def made_samples(
    sim: Simulation, client: int, count: int, key: Tensor
) -> tuple[list[Made], list[str]]:
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
        if part.has("draw_samples"):
            drawn = part.draw_samples(_present(sim, part, client, count, key))
            if isinstance(drawn, str):
                remarks.append(drawn)
            else:
                found.append(Made(part.name, _thinned(drawn, count, key)))
        elif part.makes_inputs():
            remarks.append(
                f"{type(part).__name__} changes samples within a client's step; they are neither "
                "kept nor sent."
            )
    return found, remarks


def _present(sim: Simulation, part: Part, client: int, count: int, key: Tensor) -> Present:
    name, server = sim.federation.client_names[client], _surveyed(sim, part)

    def prepare() -> Tree:
        return sim.prepared(client)[part.name]

    return Present(sim.bound.spec, sim.round, name, server, prepare, key, count)


def _thinned(drawn: Drawn, count: int, key: Tensor) -> Drawn:
    order = rng.permutation(key, len(drawn.x))[:count].sort().values.to(drawn.x.device)
    labels = None if drawn.labels is None else drawn.labels[order]
    return drawn._replace(x=drawn.x[order], labels=labels)


def _surveyed(sim: Simulation, part: Part) -> Tree:
    """The part's state on the server, after its survey if that is due in the present round."""
    session, server = sim.session, sim.server
    for name, clients in session.surveys(session.draw_clients(sim.round)):
        if name == part.name:
            server = drive(session.survey(name, clients), sim.clients.answer).server
    return server.slots.get(part.name, {})


# -- their neighbours ----------------------------------------------------------------------------


class Nearest(NamedTuple):
    """For each query: the root mean square difference to its nearest neighbour, and its number."""

    distance: Tensor  # [Q]
    places: Tensor  # [Q]


def nearest(queries: Tensor, base: Iterable[Tensor], own: Tensor | None = None) -> Nearest:
    """The nearest neighbours of queries ``[Q, D]`` among the rows of chunks ``[n, D]``.

    Args:
        queries: flat samples.
        base: chunks of flat samples; rows are numbered over all chunks.
        own: the number of each query in the base, which is left out ``[Q]``; None: it has none.

    >>> points = torch.tensor([[0.0, 0.0], [3.0, 3.0], [7.0, 7.0]])
    >>> found = nearest(points, [points], own=torch.arange(3))
    >>> found.distance.tolist(), found.places.tolist()
    ([3.0, 3.0, 4.0], [1, 0, 1])
    """
    square = queries.square().sum(1)[:, None]
    best = torch.full((len(queries),), torch.inf, dtype=queries.dtype, device=queries.device)
    index = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    found, start = queries.clone(), 0
    for chunk in base:
        distance = square - 2 * queries @ chunk.T + chunk.square().sum(1)  # [Q, n]
        if own is not None:
            inside = ((own >= start) & (own < start + len(chunk))).nonzero()[:, 0]
            distance[inside, own[inside] - start] = torch.inf
        value, place = distance.min(1)
        closer = value < best
        best = torch.where(closer, value, best)
        index = torch.where(closer, place + start, index)
        found[closer] = chunk[place[closer]]
        start += len(chunk)
    # differences are taken again: the expanded square loses small distances to rounding
    exact = (queries - found).square().mean(1).sqrt()
    return Nearest(torch.where(torch.isfinite(best), exact, torch.inf), index)


class Closeness(NamedTuple):
    """Distances of samples to the nearest training sample, beside the usual ones."""

    distance: float  # median over the samples
    usual: float  # median distance of a training sample to its nearest other one
    ratio: float  # their quotient; infinite if training samples repeat each other
    copies: int  # samples nearer than COPY times the usual distance
    samples: int


def closeness(distances: Tensor, usual: Tensor) -> Closeness:
    """Compare distances ``[Q]`` with those between training samples ``[n]``.

    >>> closeness(torch.tensor([0.1, 4.0, 6.0]), torch.tensor([1.0, 2.0, 3.0]))
    Closeness(distance=4.0, usual=2.0, ratio=2.0, copies=1, samples=3)
    """
    median, typical = float(distances.median()), float(usual.median())
    ratio = median / typical if typical > 0 else torch.inf
    # equal samples are copies, also where the usual distance is 0
    copies = int((distances <= COPY * typical).sum())
    return Closeness(median, typical, ratio, copies, len(distances))


class Space(NamedTuple):
    """One way to compare samples, with the distances between training samples in it."""

    name: str
    rows: Tensor  # of the training samples that are compared
    chunks: Callable[[], Iterator[Tensor]]  # of these, flat
    map: Callable[[Tensor], Tensor]  # inputs of the model to flat samples
    usual: Tensor  # distances of training samples to their nearest other one
    test: Tensor | None  # distances of test samples to the nearest training sample


class Match(NamedTuple):
    """Generated samples in one space: their nearest training rows, and how close they are."""

    found: Nearest
    rows: Tensor  # the nearest training rows, [n]
    close: Closeness
    test: Closeness | None
    base: int  # training samples


def spaces(sim: Simulation, pixels: Pixels, max_rows: int, key: Tensor) -> dict[str, Space]:
    """The space of inputs, with all training samples, and that of features, with some."""
    federation, model = sim.federation, sim.bound.model
    rows = torch.unique(federation.rows)
    key_rows, key_train, key_test = rng.split(key, 3)

    def to_inputs(x: Tensor) -> Tensor:
        return pixels.to_unit(x).flatten(1)

    def to_features(x: Tensor) -> Tensor:
        with torch.no_grad():
            features = model.forward(sim.weights, x, "eval").features
        assert features is not None
        return features.flatten(1)

    test = None
    if federation.has_test:
        test = torch.cat([batch.x for batch in federation.test_batches()])
        test = test[_some(key_test, len(test), QUERIES).to(test.device)]

    def space(name: str, own: Tensor, chunks: Any, to: Callable[[Tensor], Tensor]) -> Space:
        chosen = _some(key_train, len(own), QUERIES).to(own.device)
        queries = to(federation.clean(own[chosen]).x)
        usual = nearest(queries, chunks(), own=chosen).distance
        fresh = None if test is None else nearest(to(test), chunks()).distance
        return Space(name, own, chunks, to, usual, fresh)

    found = {
        INPUTS: space(INPUTS, rows, lambda: unit_rows(federation, pixels, rows), to_inputs),
    }
    if model.has_head:
        some = rows[_some(key_rows, len(rows), max_rows).to(rows.device)]
        pieces = [to_features(federation.clean(r).x) for r in torch.split(some, CHUNK)]
        found[FEATURES] = space(FEATURES, some, lambda: iter(pieces), to_features)
    return found


def _some(key: Tensor, total: int, count: int) -> Tensor:
    return rng.permutation(key.cpu(), total)[:count].sort().values


def match(made: Drawn, known: dict[str, Space]) -> dict[str, Match]:
    """The nearest training samples of generated ones, by space."""
    found = {}
    for name, space in known.items():
        if name == INPUTS and not made.is_input:
            continue
        queries = space.map(made.x) if made.is_input else made.x.flatten(1)
        near = nearest(queries, space.chunks())
        test = None if space.test is None else closeness(space.test, space.usual)
        close = closeness(near.distance, space.usual)
        found[name] = Match(near, space.rows[near.places], close, test, len(space.rows))
    return found


def table(found: dict[str, dict[str, Match]]) -> SheetTable:
    """The distances of all parts in all spaces."""
    rows: list[list[Cell]] = []
    for part, matches in found.items():
        for name, m in matches.items():
            test = None if m.test is None else m.test.ratio
            cells = [m.close.samples, m.close.distance, m.close.usual, m.close.ratio, test]
            rows.append([title(part), name, *cells, m.close.copies, m.base])
    return SheetTable("Generated samples and training samples", COLUMNS, rows, NOTE)


def sentence(part: str, made: Drawn, matches: dict[str, Match]) -> str:
    """What was found of one part, in words."""
    count, copied = len(made.x), copies(matches)
    texts = " and ".join(f"{m.close.ratio:.1f} times in {name}" for name, m in matches.items())
    end = f"none of the {count} is a copy"
    if copied:
        end = f"{copied} of the {count} are copies of training samples or nearly so"
    return (
        f"{title(part)}, {made.what}: they are {texts} as far from their nearest training "
        f"sample as training samples are from theirs; {end} ({made.where})."
    )


def copies(matches: dict[str, Match]) -> int:
    """The number of copies in the space that has the most."""
    return max(m.close.copies for m in matches.values())


def values(matches: dict[str, Match]) -> dict[str, Any]:
    """The bare numbers."""
    return {
        name: m.close._asdict() | {"test_ratio": None if m.test is None else m.test.ratio}
        for name, m in matches.items()
    }


def chart(
    sim: Simulation, pixels: Pixels, made: Made, matches: dict[str, Match], shown: int
) -> Chart | None:
    """Generated images, each beside its nearest training images; None if there are no images."""
    drawn, federation, rows = made.drawn, sim.federation, []
    if not drawn.is_input or not pixels.is_image:
        return None
    classes = federation.classes
    first = closest_of_each(matches[INPUTS].found.distance, drawn.labels)[:shown]
    for place, i in enumerate(first):
        caption = ""
        if drawn.labels is not None:
            label = int(drawn.labels[i])
            caption = f"for {classes[label] if classes else f'class {label}'}"
        row = str(place + 1)
        own = pixels.to_unit(drawn.x[i : i + 1])[0]
        rows.append(image_row(own, row, "generated", caption))
        for name, m in matches.items():
            near = pixels.to_unit(federation.clean(m.rows[i : i + 1]).x)[0]
            distance = f"{float(m.found.distance[i]):.3f} away"
            rows.append(image_row(near, row, f"nearest in {name}", distance))
    heading = f"{title(made.part)}: {drawn.what}, beside their nearest training images"
    counts = " and ".join(f"{number(m.base)} in {name}" for name, m in matches.items())
    note = (
        f"{len(first)} of {len(drawn.x)}: those closest to a training image, first one for each "
        f"label. Nearest of {counts}. Values beyond black and white are cut off."
    )
    return Chart(heading, "images", rows, note=note)


def closest_of_each(distances: Tensor, labels: Tensor | None) -> list[int]:
    """Samples by their distance: first the closest of each label, then the others.

    >>> closest_of_each(torch.tensor([3.0, 1.0, 2.0, 4.0]), torch.tensor([0, 1, 1, 0]))
    [1, 0, 2, 3]
    """
    order: list[int] = distances.argsort(stable=True).tolist()
    if labels is None:
        return order
    own = labels.tolist()
    first = {own[i]: i for i in reversed(order)}  # the closest is written last
    return sorted(order, key=lambda i: first[own[i]] != i)
