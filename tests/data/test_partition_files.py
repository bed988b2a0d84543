"""A partition as data: its string, its file, its splits and its pictures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kedge.data.partition import Partition, draw, holdout, partitions, resplit
from kedge.errors import (
    DataError,
    FieldError,
    GrammarError,
    IncompatibleError,
    UnknownName,
)
from kedge.grammar import parse_calls
from kedge.report.partition_picture import plot_partition
from tests.data.labels import LABELS

# --- reading the string --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("dirichlett(0.1)", UnknownName, "no partition 'dirichlett'. Did you mean 'dirichlet'"),
        ("dirichlet(alhpa=1)", UnknownName, "option of class_dirichlet_capped 'alhpa'.*'alpha'"),
        ("iid+rotaton", UnknownName, "no shift 'rotaton'. Did you mean 'rotation'"),
        ("dirichlet(0)", FieldError, "class_dirichlet_capped.alpha = 0 is not above 0"),
        ("dirichlet(-1)", FieldError, "alpha = -1 is not"),
        ("dirichlet(nan)", FieldError, "alpha = nan is not"),
        ("dirichlet(inf)", FieldError, "alpha = inf is not"),
        ("dirichlet(true)", FieldError, "alpha = True is not"),
        ("dirichlet(small)", FieldError, "alpha = 'small' is not a finite number above 0"),
        ("dirichlet(1, minimum=0)", FieldError, "minimum = 0 is not a whole number at least 1 or "),
        ("dirichlet(1, minimum=2.5)", FieldError, "minimum = 2.5 is not"),
        ("dirichlet(1, alpha=2)", FieldError, "alpha is given twice"),
        (
            "client_dirichlet_sequential(prior=two)",
            FieldError,
            "= 'two' is not one of: proportions, ones",
        ),
        ("quantity_lognormal(-1)", FieldError, "sigma = -1 is below 0"),
        ("iid+rotation(step=nan)", FieldError, "rotation.step = nan is not a finite number"),
        ("iid(3)", FieldError, "iid takes 0 options"),
        ("iid:preset", GrammarError, "no presets"),
        ("rotation(15)", GrammarError, "needs a partition before it, such as iid.rotation"),
        ("iid+dirichlet(1)", GrammarError, "two partitions.*noise, rotation, rotation_dirichlet"),
        ("iid+noise+noise", IncompatibleError, "two shifts of one kind"),
        ("iid+rotation+rotation_dirichlet", IncompatibleError, "leave out rotation_dirichlet"),
    ],
)
def test_strings_that_cannot_be_drawn(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(text, LABELS, 10, seed=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"clients": 0}, FieldError, "clients = 0 is below 1"),
        ({"clients": 2.0}, FieldError, "clients = 2.0 is not a whole number"),
        ({"seed": "a"}, FieldError, "seed = 'a' is not a whole number"),
        ({"labels": []}, DataError, "there are no samples"),
        ({"text": 3}, GrammarError, "expected a string"),
    ],
)
def test_wrong_arguments(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(**{"text": "iid", "labels": LABELS, "clients": 2, "seed": 0} | change)


def test_a_partition_of_ones_own() -> None:
    @partitions.register("stripes")
    def stripes(labels, clients, rng, *, width: int = 1):  # type: ignore[no-untyped-def]
        owner = np.arange(len(labels)) // width % clients
        return [np.flatnonzero(owner == k) for k in range(clients)]

    try:
        partition = draw("stripes(2)+noise", LABELS[:8], 2, seed=np.int64(0))
        assert [c.tolist() for c in partition.clients] == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert [call.name for call in parse_calls(partition.name)] == ["stripes", "noise"]
    finally:
        partitions.remove("stripes")


# --- the partition as data -----------------------------------------------------------------------


def test_hashes_are_stable() -> None:
    """Pinned: a change here breaks every stored result that names a partition by its hash."""
    labels = np.arange(1000) % 10
    pinned = {
        "label_shards(2)": "6b9b972a7ad4b4b5",
        "iid": "ddd728b744dea7c5",
        "dirichlet(0.5)": "5408a2625037ee49",
        "client_dirichlet_balanced(0.3)": "841cd90c2a58db90",
        "client_dirichlet_sequential(0.1)+rotation(15)": "fa3188cab339106b",
        "iid+rotation_dirichlet(0.1)": "b6d53e573288e593",
    }
    assert {text: draw(text, labels, 10, seed=0).hash for text in pinned} == pinned


def test_the_hash_is_of_the_content() -> None:
    a = Partition((np.array([2, 0]), np.array([1])), "a", 0, 3)
    b = Partition((np.array([0, 2], dtype=np.int32), np.array([1])), "b", 1, 3)
    assert a.hash == b.hash
    assert a != b
    assert a.clients[0].tolist() == [0, 2]
    moved = Partition((np.array([0]), np.array([2, 1])), "a", 0, 3)
    assert moved.hash != a.hash
    noisy = Partition(a.clients, "a", 0, 3, noise=np.array([0.0, 1.0]))
    rotated = Partition(a.clients, "a", 0, 3, rotation=np.array([0.0, 1.0]))
    assert len({a.hash, noisy.hash, rotated.hash}) == 3
    with pytest.raises(ValueError, match="read-only"):
        a.clients[0][0] = 5


def test_angles_follow_their_samples() -> None:
    angles = (np.array([30.0, 15.0]), np.array([0.0]))
    partition = Partition((np.array([2, 0]), np.array([1])), "a", 0, 3, angles=angles)
    assert partition.clients[0].tolist() == [0, 2]
    assert partition.angles[0].tolist() == [15.0, 30.0]


@pytest.mark.parametrize(
    ("clients", "shift", "message"),
    [
        (([0, 1], [1]), {}, "sample 1 is assigned twice"),
        (([0], [3]), {}, "no sample 3 among 3 samples"),
        (([0], [-1]), {}, "no sample -1"),
        (([0.5],), {}, "whole numbers"),
        (([[0], [1, 2]],), {}, "whole numbers"),
        ((), {}, "at least one client"),
        (([0], [1]), {"rotation": [1.0]}, "rotation must be 2 finite numbers"),
        (([0], [1]), {"noise": [1.0, np.nan]}, "noise must be 2 finite numbers"),
        (([0], [1]), {"angles": ([1.0], [])}, "angles of client 1 must be 1 finite numbers"),
        (([0], [1]), {"angles": ([1.0],)}, "angles for 1 clients, not 2"),
        (([0],), {"angles": ([1.0],), "rotation": [0.0]}, "both rotate"),
    ],
)
def test_contents_that_are_no_partition(clients: tuple, shift: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Partition(clients, "mine", 0, 3, **shift)


def test_label_counts() -> None:
    partition = Partition(([0, 1], [2]), "mine", 0, 4)
    assert partition.label_counts([1, 1, 0, 2]).tolist() == [[0, 2, 0], [1, 0, 0]]
    assert partition.label_counts([1, 1, 0, 2], num_classes=4).shape == (2, 4)
    several = [[1, 0], [1, 1], [0, 0], [1, 1]]
    assert partition.label_counts(several).tolist() == [[2, 1], [0, 0]]
    with pytest.raises(DataError, match=r"label 2 is not one of the 2 classes 0\.\.1"):
        partition.label_counts([1, 1, 0, 2], num_classes=2)
    with pytest.raises(DataError, match="label -1 is not"):
        partition.label_counts([1, 1, 0, -1])
    with pytest.raises(DataError, match="not classes"):
        partition.label_counts([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(DataError, match="a partition of 4 samples, but the data have 3"):
        partition.label_counts([1, 1, 0])


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["dirichlet(0.5)", "iid+rotation(15)+noise(0.1)", "label_shards+rotation_dirichlet(0.1)"],
)
def test_save_and_load(text: str, tmp_path) -> None:
    partition = draw(text, LABELS, 10, seed=7)
    path = partition.save(tmp_path / "new" / "partition.json")
    loaded = Partition.load(path)
    assert loaded == partition
    assert loaded.check(len(LABELS)) is loaded
    for field in ("rotation", "noise", "angles"):
        mine, theirs = getattr(partition, field), getattr(loaded, field)
        assert mine is theirs is None or all(map(np.array_equal, mine, theirs))
    assert list(path.parent.iterdir()) == [path]
    assert len(json.loads(path.read_text())["clients"]) == 10  # any JSON reader will do
    with pytest.raises(
        DataError, match="of 3000 samples, but the data have 2999; draw it on these"
    ):
        loaded.check(2999)


def test_files_that_cannot_be_loaded(tmp_path) -> None:
    path = tmp_path / "partition.json"
    draw("dirichlet(0.5)", LABELS, 10, seed=7).save(path)
    whole = path.read_text()
    record = json.loads(whole)
    swapped = {**record, "clients": record["clients"][::-1]}
    cases = {
        "cut short": whole[:2000],
        "not valid JSON": "",
        "write one with Partition.save": '{"weights": [1, 2]}',
        "has version 2": json.dumps({**record, "version": 2}),
        "seed is missing": json.dumps({k: v for k, v in record.items() if k != "seed"}),
        "clients is missing or of the wrong type": json.dumps({**record, "clients": "all"}),
        "whole numbers": json.dumps({**record, "clients": [["a"]]}),
        "assigned twice": json.dumps({**record, "clients": [[1, 1]]}),
        "rotation must be numbers": json.dumps({**record, "rotation": ["a"] * 10}),
        "its content has hash": json.dumps(swapped),
    }
    for message, content in cases.items():
        path.write_text(content)
        with pytest.raises(DataError, match=message) as error:
            Partition.load(path)
        assert str(path) in str(error.value)
    path.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(DataError, match="not a partition file"):
        Partition.load(path)
    for absent in (tmp_path / "no.json", tmp_path):
        with pytest.raises(DataError, match=f"cannot read {absent}"):
            Partition.load(absent)


# --- splitting clients ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["dirichlet(0.1)", "iid+rotation_dirichlet(0.5)"])
def test_holdout_is_stratified_and_uses_every_sample_once(text: str) -> None:
    partition = draw(text, LABELS, 10, seed=1)
    train, held = holdout(partition, LABELS, fraction=0.2, seed=5)
    for k, whole in enumerate(partition.clients):
        both = np.concatenate([train.clients[k], held.clients[k]])
        assert np.array_equal(np.sort(both), whole)
    assert np.abs(held.sizes - 0.2 * partition.sizes).max() <= 0.5
    wanted = 0.2 * partition.label_counts(LABELS)
    assert np.abs(held.label_counts(LABELS) - wanted).max() < 2
    assert holdout(partition, LABELS, 0.2, seed=5) == (train, held)
    assert holdout(partition, LABELS, 0.2, seed=6)[1].hash != held.hash
    assert held.name.endswith("+holdout(fraction=0.2, seed=5, part=held)")
    if partition.angles is not None:
        angle = dict(
            zip(np.concatenate(partition.clients), np.concatenate(partition.angles), strict=True)
        )
        for part in (train, held):
            samples = np.concatenate(part.clients)
            assert [angle[i] for i in samples] == np.concatenate(part.angles).tolist()


def test_holdout_leaves_every_client_a_training_sample() -> None:
    for fraction in (0.1, 0.5, 0.99):
        train, held = holdout(draw("iid", LABELS[:15], 10, seed=0), LABELS[:15], fraction, seed=0)
        assert train.sizes.min() == 1
        assert train.sizes.sum() + held.sizes.sum() == 15


def test_every_sample_is_equally_likely_to_be_held_out() -> None:
    labels = np.array([0] * 5 + [1] * 2 + [2])
    partition = Partition((np.arange(8),), "mine", 0, 8)
    held = [holdout(partition, labels, 0.25, seed)[1].clients[0] for seed in range(1500)]
    frequency = np.bincount(np.concatenate(held), minlength=8) / 1500
    assert frequency == pytest.approx(0.25, abs=0.05)


def test_resplit_is_stratified_and_uses_every_sample_once() -> None:
    partition = draw("paired_class_dirichlet(0.1)", LABELS, 20, seed=1)
    parts = resplit(partition, LABELS, seed=0)
    for k, whole in enumerate(partition.clients):
        assert np.array_equal(np.sort(np.concatenate([p.clients[k] for p in parts])), whole)
    counts = partition.label_counts(LABELS)
    for part, fraction in zip(parts, (0.4, 0.3, 0.3), strict=True):
        assert np.abs(part.sizes - fraction * partition.sizes).max() < 1
        assert np.abs(part.label_counts(LABELS) - fraction * counts).max() < 3
    assert [p.name.rsplit("=", 1)[1] for p in parts] == ["train)", "test)", "validation)"]


def test_splits_of_labels_that_are_not_classes() -> None:
    for labels in (np.linspace(0, 1, 60), np.zeros((60, 3))):
        partition = draw("iid", labels, 6, seed=0)
        assert holdout(partition, labels, 0.2, seed=0)[1].sizes.tolist() == [2] * 6
        assert resplit(partition, labels, seed=0)[0].sizes.tolist() == [4] * 6


def test_splits_that_cannot_be_made() -> None:
    partition = draw("iid", LABELS, 10, seed=0)
    for fraction in (0, 1, -0.2, float("nan"), "half"):
        with pytest.raises(FieldError, match="not a number between 0 and 1"):
            holdout(partition, LABELS, fraction, seed=0)  # type: ignore[arg-type]
    for fractions in ((0.5, 0.5), (0.5, 0.5, 0.5), (1.2, -0.1, -0.1)):
        with pytest.raises(FieldError, match="three positive numbers that add up to 1"):
            resplit(partition, LABELS, fractions, seed=0)
    with pytest.raises(DataError, match="a partition of 3000 samples"):
        holdout(partition, LABELS[:10], 0.2, seed=0)


# --- pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [4, 40])
def test_plot_png_and_svg(clients: int, tmp_path) -> None:
    partition = draw("client_dirichlet_balanced+rotation", LABELS, clients, seed=0)
    names = [f"class {c}" for c in range(10)]
    png = plot_partition(partition, LABELS, tmp_path / "new" / "a.png", class_names=names)
    assert png.read_bytes().startswith(b"\x89PNG")
    svg = plot_partition(partition, LABELS, tmp_path / "a.svg").read_bytes()
    assert b"<svg" in svg
    assert plot_partition(partition, LABELS, tmp_path / "b.svg").read_bytes() == svg


def test_plot_of_labels_that_are_not_classes(tmp_path) -> None:
    for labels in (np.linspace(0, 1, 60), np.ones((60, 3), dtype=int)):
        partition = draw("iid", labels, 6, seed=0)
        assert plot_partition(partition, labels, tmp_path / "a.png").exists()


def test_plots_that_cannot_be_drawn(tmp_path) -> None:
    partition = draw("iid", LABELS, 4, seed=0)
    with pytest.raises(FieldError, match=r"end its name in \.png, \.svg or \.pdf"):
        plot_partition(partition, LABELS, tmp_path / "a.bmp")
    with pytest.raises(FieldError, match="kind = 'pie' is not auto, bubbles or heatmap"):
        plot_partition(partition, LABELS, tmp_path / "a.png", kind="pie")
    with pytest.raises(FieldError, match="2 class names for 10 classes"):
        plot_partition(partition, LABELS, tmp_path / "a.png", class_names=["a", "b"])
    with pytest.raises(DataError, match="a partition of 3000 samples"):
        plot_partition(partition, LABELS[:5], tmp_path / "a.png")


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="p.json cannot be written: No space left on device"):
        draw("iid", LABELS, 3, 0).save(tmp_path / "p.json")
    assert not list(tmp_path.iterdir())
