"""Generated samples are the method's own, copies are found, and pictures show what is there."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from kedge.check.problems import images
from kedge.core import rng, tree
from kedge.core.part import Drawn
from kedge.core.task import Classification
from kedge.core.uploads import FEATURES
from kedge.data.federation import Federation
from kedge.diagnostics.privacy.copies import (
    INPUTS,
    Made,
    chart,
    closest_of_each,
    made_samples,
    match,
    sentence,
    spaces,
    table,
)
from kedge.diagnostics.privacy.pictures import Pixels, picture
from kedge.sim.simulation import Simulation

KEY = rng.key(5)
SMALL = "steps=1, batch=4, noise=2, width=2"


def made(method: str, rounds: int = 1, count: int = 8) -> tuple[Simulation, list, list[str]]:  # type: ignore[type-arg]
    run = images().simulate(method)
    for _ in range(rounds):
        run.run_round()
    before = {key: value.clone() for key, value in run.state().items()}
    found, remarks = made_samples(run, 1, count, KEY)
    assert tree.equal(run.state(), before)
    return run, [one.drawn for one in found], remarks


def test_fedcog_shows_what_the_client_trains_on() -> None:
    run, [own], _ = made("fedcog(samples=6, steps=3, batch=4)")
    assert torch.equal(own.x, run.prepared(1)["fedcog"]["x"])
    assert "stay on the client" in own.where
    _, nothing, [remark] = made("fedcog(samples=6, steps=3, batch=4, start=9)")
    assert not nothing
    assert remark == "FedCOG starts to generate in round 10; this is round 2."


@pytest.mark.parametrize(
    ("method", "space", "where"),
    [
        (f"flboost({SMALL})", INPUTS, "on the server"),
        (f"flboost({SMALL}, level=feature)", FEATURES, "on the server"),
        ("feddf(generator_steps=1, student_steps=1, batch=4, noise=2, width=2)", INPUTS, "server"),
        (f"fedgen({SMALL})", FEATURES, "sends it to every client"),
        (f"fedgen({SMALL}, level=input)", INPUTS, "sends it to every client"),
        ("vhl(rows=4, per_class=4)", INPUTS, "no data"),
        ("fedbr(rows=4)", INPUTS, "sees whose they are"),
        ("naivemix(rows=9)", INPUTS, "sees whose they are"),
    ],
)
def test_every_part_that_makes_samples(method: str, space: str, where: str) -> None:
    _, [own], _ = made(method)
    assert own.is_input == (space == INPUTS)
    assert where in own.where
    shape = (1, 8, 8) if space == INPUTS else (6,)
    assert tuple(own.x.shape[1:]) == shape
    assert bool(torch.isfinite(own.x).all())


def test_pools_are_those_of_the_server() -> None:
    run, [own], _ = made("fedmix(rows=4, refresh=once)")
    assert torch.equal(own.x, run.server.slots["fedmix"]["x"])
    run, [own], _ = made("fedbr(rows=4)")  # asked again in every round
    assert not torch.equal(own.x, run.server.slots["fedbr"]["pseudo"])
    run.run_round()
    assert torch.equal(own.x, run.server.slots["fedbr"]["pseudo"])


def test_samples_that_never_leave_a_step() -> None:
    _, nothing, [remark] = made("mixup")
    assert not nothing
    assert remark == (
        "Mixup changes samples within a client's step; they are neither kept nor sent."
    )


def test_means_of_one_sample_are_copies() -> None:
    """FedMix with M = 1 sends training samples; with more it does not."""
    run, [own], _ = made("fedmix(samples=1, rows=9)")
    pixels = Pixels(run.federation)
    known = spaces(run, pixels, 100, KEY)
    found = match(own, known)
    close = found[INPUTS].close
    assert (close.copies, close.samples, close.distance) == (8, 8, 0.0)
    assert found[FEATURES].close.copies == 8
    assert torch.equal(run.federation.clean(found[INPUTS].rows).x, own.x)
    assert "8 of the 8 are copies of training samples" in sentence("fedmix", own, found)
    run, [own], _ = made("fedmix(samples=9, rows=9)")
    found = match(own, spaces(run, pixels, 100, KEY))
    assert found[INPUTS].close.copies == 0
    assert "none of the 8 is a copy" in sentence("fedmix", own, found)


def test_the_usual_distance_by_hand() -> None:
    """Four points on a line: nearest others at 1, 1, 2 and 4; values are scaled to 0..1."""
    x = torch.tensor([[0.0], [0.9], [1.0], [3.0], [7.0]])
    clients = [[4, 0], [3, 2]]  # the sample in row 1 trains nobody
    test = (x[[0, 2, 3, 4]] + 0.5, [0] * 4)
    data = Federation(x, [0, 1, 0, 1, 0], clients, Classification(2), test=test)
    layer = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.ones_(layer.weight)
    run = Simulation(data, layer, "fedavg", engine="loop")
    known = spaces(run, Pixels(data), 10, KEY)
    space = known[INPUTS]
    assert torch.allclose(space.usual, torch.tensor([1.0, 1.0, 2.0, 4.0]) / 7)
    assert space.test is not None
    # 7.5 is beyond the range and cut off to 7
    assert torch.allclose(space.test.sort().values, torch.tensor([0.0, 0.5, 0.5, 0.5]) / 7)
    own = Drawn(torch.tensor([[6.0], [1.0]]), None, "", "")
    near = match(own, known)[INPUTS]
    assert near.rows.tolist() == [4, 2]
    assert torch.allclose(near.found.distance, torch.tensor([1.0, 0.0]) / 7)
    assert (near.close.copies, near.base) == (1, 4)


def test_the_closest_samples_are_shown_beside_their_neighbours() -> None:
    run, [own], _ = made("fedmix(samples=3, rows=9)")
    pixels = Pixels(run.federation)
    found = match(own, spaces(run, pixels, 100, KEY))
    drawn = chart(run, pixels, Made("fedmix", own), found, shown=2)
    assert drawn is not None
    assert [(r["row"], r["column"]) for r in drawn.rows] == [
        (row, column)
        for row in "12"
        for column in ("generated", "nearest in inputs", "nearest in features")
    ]
    first = int(found[INPUTS].found.distance.argmin())
    assert drawn.rows[0]["image"] == picture(pixels.to_unit(own.x)[first])
    assert drawn.rows[1]["caption"] == f"{float(found[INPUTS].found.distance.min()):.3f} away"
    assert [row[1] for row in table({"fedmix": found}).rows] == [INPUTS, FEATURES]


def test_one_sample_of_each_label_comes_first() -> None:
    distances = torch.tensor([0.5, 0.1, 0.2, 0.3, 0.4])
    assert closest_of_each(distances, None) == [1, 2, 3, 4, 0]
    assert closest_of_each(distances, torch.tensor([7, 2, 2, 2, 5])) == [1, 4, 0, 2, 3]


def test_pictures_show_the_pixels_of_the_data() -> None:
    raw = (rng.uniform(KEY, (2, 3, 8, 8)) * 256).to(torch.uint8)
    moments = ([0.2, 0.4, 0.6], [0.1, 0.2, 0.3])
    data = Federation(raw, [0, 1], [[0, 1]], Classification(2), moments=moments)
    pixels = Pixels(data)
    x = data.clean(torch.arange(2)).x
    assert torch.allclose(pixels.from_unit(pixels.to_unit(x)), x, atol=1e-5)
    content = base64.b64decode(picture(pixels.to_unit(x)[1]).removeprefix("data:image/png;base64,"))
    shown = np.asarray(Image.open(io.BytesIO(content)))
    assert shown.shape == (64, 64, 3)  # enlarged 8 times
    assert np.array_equal(shown[::8, ::8], raw[1].permute(1, 2, 0).numpy())
    assert np.array_equal(shown[7::8, 7::8], raw[1].permute(1, 2, 0).numpy())


def test_images_of_floats_take_the_range_of_the_data() -> None:
    x = torch.tensor([[[[-2.0, 0.0], [1.0, 2.0]]]])
    data = Federation(x, [0], [[0]], Classification(2), moments=([0.5], [2.0]))
    unit = Pixels(data).to_unit(data.clean(torch.tensor([0])).x)
    assert unit.flatten().tolist() == [0.0, 0.5, 0.75, 1.0]
