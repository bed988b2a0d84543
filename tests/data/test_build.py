"""From datasets and partitions to federations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from kedge.data.augment import rotate
from kedge.data.build import federate
from kedge.data.datasets import load
from kedge.data.partition import draw
from kedge.data.splits import split_data
from kedge.errors import DataError, FieldError, KedgeError


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_images_stay_bytes_and_batches_are_normalised(digits) -> None:
    fed = federate(digits, "dirichlet(0.5)", clients=5)
    assert fed.x.dtype == torch.uint8
    every = fed.clean(torch.arange(len(fed.x))).x
    assert every.dtype == torch.float32
    assert float(every.mean()) == pytest.approx(0, abs=1e-4)
    assert float(every.std()) == pytest.approx(1, abs=1e-3)
    assert fed.num_clients == 5
    assert sum(fed.sizes) == len(digits.x_train)


def test_given_holdout_and_pooled_use_every_sample_once(digits) -> None:
    for split in ("given", "holdout(0.25)", "pooled(0.4, 0.3)"):
        data = split_data(digits, "dirichlet(0.5)", 6, split, 0)
        rows = np.concatenate([*data.train.clients, *data.held_out])
        assert len(np.unique(rows)) == len(rows)
        if split.startswith("pooled"):
            assert len(data.x) == 1797
            assert data.test is None
            share = sum(len(h) for h in data.held_out) / 1797
            assert share == pytest.approx(0.3, abs=0.02)
        else:
            assert len(rows) == 1438
    pooled = federate(digits, "iid", clients=4, split="pooled(0.4, 0.3)")
    count = sum(len(b.y) for b in pooled.test_batches())
    assert count == sum(len(h) for h in pooled.held_out)


def test_pooled_data_may_leave_nothing_to_validate_on(digits) -> None:
    data = split_data(digits, "dirichlet(0.5)", 6, "pooled(0.75, 0.25)", 0)
    rows = np.concatenate([*data.train.clients, *data.held_out])
    assert sorted(rows) == list(range(1797))
    assert sum(map(len, data.held_out)) / 1797 == pytest.approx(0.25, abs=0.01)
    assert not len(data.validation)
    chosen = split_data(digits, "dirichlet(0.5)", 6, "pooled(0.75, 0.25)", 0, validation=0.2)
    assert [list(h) for h in chosen.held_out] == [list(h) for h in data.held_out]
    for whole, train, own in zip(
        data.train.clients, chosen.train.clients, chosen.validation, strict=True
    ):
        assert sorted([*train, *own]) == sorted(whole)


def test_rotation_is_seen_by_the_client_and_by_the_test(digits) -> None:
    plain = federate(digits, "iid", clients=4)
    turned = federate(digits, "iid+rotation(step=30)", clients=4, angles=(0.0, 90.0))
    assert torch.equal(
        turned.x[turned.rows[: turned.sizes[0]]], plain.x[plain.rows[: plain.sizes[0]]]
    )
    last = turned.rows[turned.offsets[3] : turned.offsets[3] + 5]
    expected = rotate(plain.x[last].float(), torch.full((5,), 90.0)).round()
    assert torch.equal(turned.x[last].float(), expected)
    upright = next(iter(turned.test_batches(0.0))).x
    right_angle = next(iter(turned.test_batches(90.0))).x
    torch.testing.assert_close(right_angle, torch.rot90(upright, 1, (-2, -1)), atol=1e-4, rtol=0)


def test_noise_grows_with_the_client(digits) -> None:
    plain, noisy = (federate(digits, p, clients=4) for p in ("iid", "iid+noise(0.4)"))
    change = [
        float((noisy.x[rows].float() - plain.x[rows].float()).abs().mean())
        for rows in torch.split(plain.rows, plain.sizes)
    ]
    assert change == sorted(change)
    assert change[3] > 2 * change[0]
    again = federate(digits, "iid+noise(0.4)", clients=4)
    assert torch.equal(noisy.x, again.x)


def test_a_saved_partition_is_taken_as_it_is(digits, tmp_path: Path) -> None:
    drawn = draw("dirichlet(0.3)", digits.y_train, 7, 5)
    drawn.save(tmp_path / "p.json")
    fed = federate(digits, type(drawn).load(tmp_path / "p.json"), clients=99)
    assert fed.partition.hash == drawn.hash
    assert fed.num_clients == 7


def test_augmentation_changes_training_batches_only(digits) -> None:
    fed = federate(digits, "iid", clients=3, augment="crop(2)+flip")
    rows, key = torch.arange(8), torch.tensor([1, 2], dtype=torch.int32)
    assert fed.is_random
    assert not torch.equal(fed.batch(rows, key).x, fed.clean(rows).x)
    assert torch.equal(fed.batch(rows, key).x, fed.batch(rows, key).x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "holdut(0.2)"}, "no split 'holdut'. Did you mean 'holdout'"),
        ({"split": "holdout(2)"}, r"holdout.fraction = 2 is not below 1"),
        ({"split": "holdout(0.2, 0.3)"}, r"holdout takes 1 option \(fraction\), but 2 values"),
        ({"split": "holdout(share=0.2)"}, "no option of holdout 'share'"),
        (
            {"split": "pooled(0.8, 0.7)"},
            r"test = 1.5 is above 1; write for example pooled\(0.4, 0.3\)",
        ),
        ({"partition": "silos"}, "silos"),
        ({"clients": 5000}, "more clients than samples"),
        ({"augment": "crop("}, "expected a value"),
    ],
)
def test_bad_requests_by_message(digits, options: dict, message: str) -> None:
    partition = options.pop("partition", "iid")
    with pytest.raises(KedgeError, match=message):
        federate(digits, partition, **({"clients": 4} | options))


def hospitals(folder: Path, test: bool = False) -> Path:
    rng = np.random.default_rng(0)
    for k in range(10):
        where = folder / f"hospital-{k}"
        rows = 40 + 5 * k
        x = rng.normal(size=(rows, 4)) + 0.3 * k
        y = np.where(x[:, 0] - x[:, 1] > 0, "ill", "well")
        lines = ["age,dose,score,site,diagnosis"]
        lines += [",".join(f"{v:.4f}" for v in row) + f",{label}" for row, label in zip(x, y)]  # noqa: B905
        if test:
            where.mkdir(parents=True)
            (where / "train.csv").write_text("\n".join(lines[:-10]))
            (where / "test.csv").write_text("\n".join([lines[0], *lines[-10:]]))
        else:
            folder.mkdir(exist_ok=True)
            where.with_suffix(".csv").write_text("\n".join(lines))
    return folder


def test_ten_hospitals_as_files(tmp_path: Path) -> None:
    data = load(str(hospitals(tmp_path / "h")) + "(label=diagnosis)")
    fed = federate(data, "silos", clients=10)
    assert fed.num_clients == 10
    assert len(fed.held_out) == 10
    assert min(len(h) for h in fed.held_out) > 0


def test_silos_with_test_sets_of_their_own(tmp_path: Path) -> None:
    data = load(str(hospitals(tmp_path / "h", test=True)) + "(label=diagnosis)")
    fed = federate(data, "silos", clients=10)
    assert [len(h) for h in fed.held_out] == [10] * 10
    with pytest.raises(DataError, match="the partition must be silos"):
        federate(data, "iid", clients=10)
    with pytest.raises(DataError, match="silos are not pooled"):
        federate(data, "silos", clients=10, split="pooled(0.4, 0.3)")


def test_tables_cannot_be_turned(tmp_path: Path) -> None:
    data = load(str(hospitals(tmp_path / "h")) + "(label=diagnosis)")
    with pytest.raises(DataError, match="rotation is for images"):
        federate(data, "silos+rotation(step=15)", clients=10)
    with pytest.raises((DataError, FieldError), match="images"):
        federate(data, "silos", clients=10, augment="flip")


def test_clients_have_the_names_of_their_silos(tmp_path: Path, digits) -> None:
    data = load(str(hospitals(tmp_path / "h")) + "(label=diagnosis)")
    names = federate(data, "silos", clients=10).client_names
    assert names == tuple(f"hospital-{k}" for k in range(10))
    assert federate(data, "iid", clients=3).client_names == ("client 0", "client 1", "client 2")
    assert federate(digits, "iid", clients=2).client_names == ("client 0", "client 1")


def test_the_fingerprint_changes_with_every_value(digits) -> None:
    first = digits.fingerprint
    assert len(first) == 16
    assert dataclasses.replace(digits).fingerprint == load("digits").fingerprint == first
    swapped = digits.y_test.copy()
    swapped[[0, 1]] = swapped[[1, 0]] + 1
    x = digits.x_train.copy()
    x[7, 0, 3, 3] ^= 1
    changes: list[dict] = [
        {"x_train": x},
        {"x_train": digits.x_train.reshape(-1, 1, 4, 16)},  # the same bytes
        {"x_train": digits.x_train.view(np.int8)},
        {"y_test": swapped},
        {"x_test": None},
        {"x_test": None, "x_val": digits.x_test},
        {"groups": digits.y_train},
        {"classes": tuple("abcdefghij")},
        {"outputs": 11},
    ]
    prints = {dataclasses.replace(digits, **change).fingerprint for change in changes}
    assert len({first, *prints}) == 1 + len(changes)


def test_moments_are_sums_over_silos(tmp_path: Path) -> None:
    """Those of the pooled samples, from counts, sums and squared deviations of each silo."""
    data = load(str(hospitals(tmp_path / "h")) + "(label=diagnosis)")
    n = np.bincount(data.groups)[:, None]
    xs = [data.x_train[data.groups == k].astype(np.float64) for k in range(10)]
    mean = sum(x.sum(0) for x in xs) / n.sum()
    std = np.sqrt(sum(((x - mean) ** 2).sum(0) for x in xs) / n.sum())
    assert np.array_equal(data.mean, mean.astype(np.float32))
    assert np.array_equal(data.std, std.astype(np.float32))
    assert np.allclose(data.std, data.x_train.std(0), rtol=1e-5)
