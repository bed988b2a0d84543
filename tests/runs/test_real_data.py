"""Every real dataset that is at hand trains a round with a fitting model, by the public
interface."""

from __future__ import annotations

import os

import pytest

import kedge
from kedge.data.datasets import load
from kedge.data.partition import draw

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("KEDGE_DATA" not in os.environ, reason="$KEDGE_DATA is not set"),
]
LOCAL = {"rounds": 1, "seeds": (0,), "steps": 3, "batch": 16}


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("cifar10", {"model": "fedcog_cnn", "partition": "dirichlet(0.1)", "augment": "crop+flip"}),
        ("fashion_mnist", {"model": "fedcog_cnn", "partition": "label_shards(2)"}),
        (
            "mnist",
            {"model": "lenet5(norm=gn)", "partition": "client_dirichlet_sequential(0.1)+rotation"},
        ),
        (
            "organamnist",
            {
                "model": "lenet5",
                "batchnorm": "batch",
                "partition": "paired_class_dirichlet(0.1)",
                "split": "pooled(0.4, 0.3)",
                "clients": 20,
            },
        ),
        ("covid_darkcovidnet64", {"partition": "iid", "split": "holdout(0.2)"}),
    ],
)
def test_one_round(data: str, options: dict) -> None:
    result = kedge.run("fedavg", data=data, **({"clients": 10} | options | LOCAL))
    assert 0 < result.last.mean <= 100
    assert result.records[0][0]["train_loss"] < 10


def test_every_partition_for_a_hundred_clients() -> None:
    labels = load("cifar10").y_train
    for text in (
        "iid", "dirichlet(0.1)", "client_dirichlet_balanced(0.3)", "label_shards(2)",
        "client_dirichlet_sequential(0.1)", "paired_class_dirichlet(0.1)", "quantity_lognormal",
        "quantity_powerlaw",
    ):  # fmt: skip
        drawn = draw(text, labels, 100, 0)
        assert sum(drawn.sizes) == len(labels)
        assert min(drawn.sizes) >= 1
