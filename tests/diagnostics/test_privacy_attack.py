"""Errors of attacks and guesses by hand: where features are the input itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kedge.core import rng
from kedge.core.part import ClassMeans
from kedge.core.task import Classification
from kedge.core.tree import Weights
from kedge.data.federation import Federation
from kedge.diagnostics.privacy.inversion import (
    Attacker,
    Guesses,
    attack_upload,
    classes_of,
    fit_decoder,
    guesses,
    study,
)
from kedge.diagnostics.privacy.pictures import Pixels
from kedge.diagnostics.privacy.uploads import Behind, Statistics

KEY = rng.key(2)


def features(u: Tensor) -> Tensor:
    return u.flatten(1)


def exact() -> dict[str, Attacker]:
    """An attacker whose decoder is right."""
    x = rng.uniform(rng.key(9), (20, 1, 2, 2))
    return {"decoder": Attacker(fit_decoder(features(x), x, ridge=1e-9), 0)}


def federation() -> Federation:
    """Images of one brightness: client 0 has 0, 1/5 and 2/5 of class 0 and 1 of class 1."""
    levels = torch.tensor([0, 51, 102, 255, 204, 153, 51], dtype=torch.uint8)
    x = levels[:, None, None, None].expand(7, 1, 2, 2)
    return Federation(x, [0, 0, 0, 1, 0, 0, 1], [[0, 1, 2, 3], [4, 5, 6]], Classification(2))


def test_guesses_are_made_from_other_clients() -> None:
    data = federation()
    own = guesses(data, Pixels(data), torch.arange(4), KEY)
    assert float(own.mean[0].mean()) == pytest.approx(0.7)  # of 0.8 and 0.6
    assert float(own.mean[1].mean()) == pytest.approx(0.2)
    assert len(own.samples[0]) == 2
    # nobody else has class 1: a guess from the test samples, or from all other samples
    bright = torch.full((2, 1, 2, 2), 230, dtype=torch.uint8)
    tested = Federation(data.x, data.y, [[3, 6], [0]], Classification(2), test=(bright, [1, 0]))
    own = guesses(tested, Pixels(data), torch.tensor([3, 6]), KEY)
    assert float(own.mean[1].mean()) == pytest.approx(230 / 255)
    own = guesses(data, Pixels(data), torch.tensor([3, 6]), KEY)
    assert float(own.mean[1].mean()) == pytest.approx((0 + 0.2 + 0.4 + 0.8 + 0.6) / 5)


def test_the_attack_on_an_upload_by_hand() -> None:
    data = federation()
    behind = [
        Behind(torch.tensor([0, 2]), torch.tensor([0.75, 0.25])),
        Behind(torch.tensor([3]), torch.tensor([1.0])),
    ]
    means = torch.tensor([[0.1], [1.0]]).expand(2, 4)  # 3/4 of 0 and 1/4 of 0.4
    stats = Statistics("part", ClassMeans(means), means, behind, Weights({}, {}))
    guessed = guesses(data, Pixels(data), torch.arange(4), KEY)
    zero, one = attack_upload(stats, data, Pixels(data), guessed, features, exact(), KEY)
    assert (zero.samples, one.samples) == (2, 1)
    assert zero.effective == pytest.approx(1 / (0.75**2 + 0.25**2))
    assert zero.mse == pytest.approx(0.75 * 0.1**2 + 0.25 * 0.3**2, abs=1e-5)
    assert zero.closest == pytest.approx(0.1**2, abs=1e-5)
    assert zero.guess == pytest.approx(0.75 * 0.7**2 + 0.25 * 0.3**2, abs=1e-5)
    assert zero.guess_closest == pytest.approx(0.3**2, abs=1e-5)
    assert float(zero.nearest.mean()) == 0.0
    assert one.mse == pytest.approx(0.0, abs=1e-5)
    assert one.guess == pytest.approx(0.8**2, abs=1e-5)


def test_classes_without_samples_are_left_out() -> None:
    data = federation()
    empty = Behind(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    means = torch.zeros(2, 4)
    stats = Statistics("part", ClassMeans(means), means, [empty, empty], Weights({}, {}))
    guessed = Guesses({}, {})
    assert attack_upload(stats, data, Pixels(data), guessed, features, exact(), KEY) == []


def test_the_study_by_hand() -> None:
    """Of linear features, an inverted mean is the mean of the inputs."""
    levels = torch.tensor([0.0, 0.2, 0.4, 1.0])
    x = levels[:, None, None, None].expand(4, 1, 2, 2)
    guess = torch.full((1, 2, 2), 0.5)
    guessed = Guesses({0: guess}, {0: guess[None]})
    labels = torch.zeros(4, dtype=torch.int64)
    done = study(x, labels, guessed, features, exact(), targets=9, key=KEY)
    assert sorted(done.targets[:, 0, 0, 0].tolist()) == levels.tolist()  # each is a target
    assert [level.size for level in done.levels] == [1, 2, 4, 0]
    variance = float((levels - 0.4).square().mean())
    assert done.level(1).mse == pytest.approx(0.0, abs=1e-5)
    assert done.level(0).mse == pytest.approx(variance, abs=1e-5)
    assert done.level(4).mse == pytest.approx(variance, abs=1e-5)
    assert 0 < done.level(2).mse < 0.25  # half the distance of two samples
    assert done.level(0).closest == pytest.approx(0.0, abs=1e-5)  # 0.4 is one of the samples
    assert done.class_mean == done.random == pytest.approx(float((levels - 0.5).square().mean()))


def test_tasks_without_classes_are_one_class() -> None:
    data = federation()
    data.y = torch.rand(7, 2)
    assert classes_of(data, torch.tensor([1, 5])).tolist() == [0, 0]
