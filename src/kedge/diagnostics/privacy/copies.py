"""Generated samples beside their nearest training samples: does a method copy?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import rng
from kedge.diagnostics.privacy.generated import FEATURES, INPUTS, Generated
from kedge.diagnostics.privacy.nearest import COPY, Closeness, Nearest, closeness, nearest
from kedge.diagnostics.privacy.pictures import CHUNK, Pixels, picture, unit_rows
from kedge.diagnostics.privacy.words import number, title
from kedge.history.sheet import Cell, Chart, Table
from kedge.sim.simulation import Simulation

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


def match(made: Generated, known: dict[str, Space]) -> dict[str, Match]:
    """The nearest training samples of generated ones, by space."""
    found = {}
    for name, space in known.items():
        if made.space == FEATURES and name == INPUTS:
            continue
        queries = made.x.flatten(1) if made.space == name == FEATURES else space.map(made.x)
        near = nearest(queries, space.chunks())
        test = None if space.test is None else closeness(space.test, space.usual)
        close = closeness(near.distance, space.usual)
        found[name] = Match(near, space.rows[near.places], close, test, len(space.rows))
    return found


def table(found: dict[str, tuple[Generated, dict[str, Match]]]) -> Table:
    """The distances of all parts in all spaces."""
    rows: list[list[Cell]] = []
    for part, (_, matches) in found.items():
        for name, m in matches.items():
            test = None if m.test is None else m.test.ratio
            cells = [m.close.samples, m.close.distance, m.close.usual, m.close.ratio, test]
            rows.append([title(part), name, *cells, m.close.copies, m.base])
    return Table("Generated samples and training samples", COLUMNS, rows, NOTE)


def sentence(made: Generated, matches: dict[str, Match]) -> str:
    """What was found of one part, in words."""
    count, copied = len(made.x), copies(matches)
    texts = " and ".join(f"{m.close.ratio:.1f} times in {name}" for name, m in matches.items())
    end = f"none of the {count} is a copy"
    if copied:
        end = f"{copied} of the {count} are copies of training samples or nearly so"
    return (
        f"{title(made.part)}, {made.what}: they are {texts} as far from their nearest training "
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
    sim: Simulation, pixels: Pixels, made: Generated, matches: dict[str, Match], shown: int
) -> Chart | None:
    """Generated images, each beside its nearest training images; None if there are no images."""
    if made.space != INPUTS or not pixels.is_image:
        return None
    federation, rows = sim.federation, []
    classes = federation.classes
    first = closest_of_each(matches[INPUTS].found.distance, made.labels)[:shown]
    for place, i in enumerate(first):
        caption = ""
        if made.labels is not None:
            label = int(made.labels[i])
            caption = f"for {classes[label] if classes else f'class {label}'}"
        row = str(place + 1)
        own = pixels.to_unit(made.x[i : i + 1])[0]
        rows.append({"image": picture(own), "caption": caption, "row": row, "column": "generated"})
        for name, m in matches.items():
            near = pixels.to_unit(federation.clean(m.rows[i : i + 1]).x)[0]
            distance = f"{float(m.found.distance[i]):.3f} away"
            column = f"nearest in {name}"
            rows.append({"image": picture(near), "caption": distance, "row": row, "column": column})
    title_ = f"{title(made.part)}: {made.what}, beside their nearest training images"
    counts = " and ".join(f"{number(m.base)} in {name}" for name, m in matches.items())
    note = (
        f"{len(first)} of {len(made.x)}: those closest to a training image, first one for each "
        f"label. Nearest of {counts}. Values beyond black and white are cut off."
    )
    return Chart(title_, "images", rows, note=note)


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
