"""Image operations: against plain definitions, keyed, and the same under vmap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kedge.core import rng
from kedge.data.augment import augmentation, crop, flip, rotate
from kedge.errors import FieldError, UnknownName

KEY = rng.key(3)
X = torch.rand(6, 2, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_rotation_is_counter_clockwise_and_exact_at_right_angles() -> None:
    turned = rotate(X, torch.tensor([0.0, 90.0, 180.0, 270.0, -90.0, 360.0]))
    for i, quarter in enumerate((0, 1, 2, 3, -1, 0)):
        torch.testing.assert_close(turned[i], torch.rot90(X[i], quarter, (-2, -1)))


def test_rotation_fills_with_black_and_keeps_the_middle() -> None:
    white = torch.ones(1, 1, 21, 21, dtype=torch.float64)
    turned = rotate(white, torch.tensor([45.0]))[0, 0]
    assert turned[0, 0] == 0
    assert turned[10, 10] == pytest.approx(1.0)


def test_rotation_of_an_oblong_image_keeps_its_shape_in_pixels() -> None:
    """A point 4 pixels right of the middle goes 4 pixels up, whatever the aspect."""
    image = torch.zeros(1, 1, 11, 21, dtype=torch.float64)
    image[0, 0, 5, 14] = 1.0
    turned = rotate(image, torch.tensor([90.0]))[0, 0]
    assert turned[1, 10] == pytest.approx(1.0)


def test_crop_is_a_window_of_the_padded_image() -> None:
    shift = rng.integers(KEY, (2, 6), 5)
    done = crop(padding=2)(X, KEY)
    for i in range(6):
        padded = F.pad(X[i], (2, 2, 2, 2))
        top, left = int(shift[0, i]), int(shift[1, i])
        assert torch.equal(done[i], padded[:, top : top + 9, left : left + 9])
    assert len({(int(a), int(b)) for a, b in shift.T}) > 1


def test_flip_mirrors_about_half_of_the_images() -> None:
    x = torch.arange(4000.0).reshape(1000, 1, 2, 2)
    done = flip()(x, KEY)
    same = (done == x).flatten(1).all(1)
    assert torch.equal(done[~same], x[~same].flip(-1))
    assert 430 < int(same.sum()) < 570


def test_a_sum_acts_from_left_to_right_and_equally_under_vmap() -> None:
    apply = augmentation("crop(2)+flip+turn(10)")
    assert apply is not None
    keys = rng.fold(KEY, torch.arange(4))
    stacked = torch.stack([X, X + 1, X * 2, X - 1])
    mapped = torch.vmap(apply)(stacked, keys)
    for i in range(4):
        torch.testing.assert_close(mapped[i], apply(stacked[i], keys[i]))
    assert not torch.allclose(mapped[0], X)
    assert augmentation("none") is None


def test_bad_augmentations_by_message() -> None:
    with pytest.raises(UnknownName, match="no augmentation 'corp'. Did you mean 'crop'"):
        augmentation("corp(4)")
    with pytest.raises(FieldError, match=r"crop.padding = -1 is below 0"):
        augmentation("crop(-1)")
    with pytest.raises(FieldError, match=r"flip takes 0 options \(none\), but 1 value is given"):
        augmentation("flip(1)")
