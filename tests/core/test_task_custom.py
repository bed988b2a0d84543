"""Own losses, class weights and headline metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.task import Batch, Classification, MultiLabel, Regression
from kedge.core.task_base import Task
from kedge.core.task_custom import (
    balanced_weights,
    own_metrics,
    read_class_weights,
    register_metric,
    with_class_weights,
    with_loss,
    with_metric,
)
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.errors import FieldError, KedgeError, UnknownName
from kedge.sim.simulation import Simulation

DOUBLE = torch.float64
LOGITS = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]], dtype=DOUBLE)
BATCH = Batch(torch.zeros(3, 1), torch.tensor([0, 1, 1]))


def focal(logits: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(logits, -1).gather(-1, y[:, None]).squeeze(-1)
    return -((1 - p) ** 2) * p.log()


def simulation(task: Task, engine: str, method: str = "fedavg", seed: int = 0) -> Simulation:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 3, generator=draw, dtype=DOUBLE)
    y = (x[:, 0] + 0.3 * x[:, 1] > 0.8).to(torch.int64)
    torch.manual_seed(0)
    net = Model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    clients = [range(20), range(20, 40)]
    federation = Federation(
        x, y, clients, task, held_out=[range(40, 48), range(48, 60)], dtype=DOUBLE
    )
    work = LocalWork(batch=20, steps=1)
    return Simulation(federation, net, method, optim=SGD(0.5), work=work, engine=engine)


@pytest.mark.parametrize(
    "task",
    [
        with_loss(Classification(2), focal),
        with_class_weights(Classification(2), (1.0, 5.0)),
        with_class_weights(with_loss(Classification(2), focal), (1.0, 5.0)),
        with_metric(Classification(2), "auroc"),
        with_metric(Classification(2), roc_auc_score),
    ],
)
def test_both_engines_give_the_same(task: Task) -> None:
    loop, vector = (simulation(task, engine) for engine in ("loop", "vector"))
    for sim in (loop, vector):
        sim.run_round()
    assert loop.evaluate() == pytest.approx(vector.evaluate(), rel=1e-9)
    one, other = (sim.evaluate_clients(detailed=True) for sim in (loop, vector))
    assert one[0] == pytest.approx(other[0], rel=1e-9)
    assert one[1] == pytest.approx(other[1], rel=1e-9)
    plain = simulation(Classification(2), "loop")
    assert task.metric in one[1] or task.metric == "auroc"
    plain.run_round()
    changed = plain.evaluate()["loss"] != loop.evaluate()["loss"]
    assert changed == (type(task).loss is not Classification.loss)


def test_one_full_step_follows_the_weighted_gradient_of_all_samples() -> None:
    task = with_class_weights(Classification(2), (0.5, 4.0))
    sim = simulation(task, "loop")
    fed, start = sim.federation, sim.weights
    sim.run_round()
    params = {n: v.clone().requires_grad_() for n, v in start.params.items()}
    batch = fed.clean(fed.rows)
    logits = sim.bound.model.forward(start._replace(params=params), batch.x, "train").logits
    each = torch.tensor([0.5, 4.0], dtype=DOUBLE)[batch.y] * F.cross_entropy(
        logits, batch.y, reduction="none"
    )
    grads = torch.autograd.grad(each.sum() / len(each), list(params.values()))  # divides by n
    for (name, w), g in zip(start.params.items(), grads, strict=True):
        torch.testing.assert_close(sim.weights.params[name], w - 0.5 * g)


def test_class_weights_of_hard_and_soft_labels_agree_with_torch() -> None:
    task, w = with_class_weights(Classification(2), (1.0, 5.0)), torch.tensor([1.0, 5.0]).double()
    plain = F.cross_entropy(LOGITS, BATCH.y, w, reduction="none")
    torch.testing.assert_close(task.loss(LOGITS, BATCH), plain)
    target = torch.tensor([[0.3, 0.7], [1.0, 0.0], [0.5, 0.5]], dtype=DOUBLE)
    soft = F.cross_entropy(LOGITS, target, w, reduction="none")
    torch.testing.assert_close(task.loss(LOGITS, BATCH._replace(target=target)), soft)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    y = np.repeat([0, 1, 2], [30, 10, 5])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=y)
    assert balanced_weights([30, 10, 5]) == pytest.approx(expected.tolist())
    assert balanced_weights([30, 0, 10]) == pytest.approx([2 / 3, 0.0, 2.0])


def test_equal_arguments_give_equal_tasks_so_that_seeds_train_together() -> None:
    for change in (
        lambda: with_loss(Classification(2), focal),
        lambda: with_class_weights(Classification(2), (1, 5)),
        lambda: with_metric(with_class_weights(Classification(2), (1, 5)), "f1_macro"),
        lambda: with_metric(Classification(2), roc_auc_score),
    ):
        assert change() == change()
        assert change() != Classification(2)
    assert with_class_weights(Classification(2), (1, 5)) != with_class_weights(
        Classification(2), (1, 4)
    )
    assert with_metric(Classification(2), "accuracy") == Classification(2)


@pytest.mark.parametrize(
    ("setting", "classes", "expected"),
    [
        ("none", None, "none"),
        (None, None, "none"),
        ("balanced", None, "balanced"),
        ("1,5", None, (1.0, 5.0)),
        ([1, 5], None, (1.0, 5.0)),
        ("well=1, sick=5", ("well", "sick"), (1.0, 5.0)),
        ({"sick": 3}, ("well", "sick"), (1.0, 3.0)),
    ],
)
def test_class_weights_are_read(setting: object, classes: object, expected: object) -> None:
    assert read_class_weights(setting, classes) == expected


def test_wrong_class_weights_are_named() -> None:
    with pytest.raises(FieldError, match="neither none nor balanced nor numbers such as 1,5"):
        read_class_weights("many")
    with pytest.raises(UnknownName, match="no class 'sik'. Did you mean 'sick'"):
        read_class_weights({"sik": 2}, ["well", "sick"])
    with pytest.raises(FieldError, match="3 numbers for 2 classes"):
        with_class_weights(Classification(2), (1, 2, 3))
    with pytest.raises(FieldError, match="finite, not negative"):
        with_class_weights(Classification(2), (1, -2))
    for task in (Regression(1), MultiLabel(2)):
        with pytest.raises(FieldError, match=f"are for classes; the task is {task.name}"):
            with_class_weights(task, (1, 2))


def test_a_loss_of_the_wrong_shape_says_what_it_must_be() -> None:
    task = with_loss(Classification(2), lambda logits, y: F.cross_entropy(logits, y))
    with pytest.raises(FieldError, match=r"one number per sample, \[3\].*reduction='none'"):
        task.loss(LOGITS, BATCH)
    with pytest.raises(FieldError, match="is no function"):
        with_loss(Classification(2), 3)  # type: ignore[arg-type]


def test_unknown_metrics_list_those_of_the_task() -> None:
    with pytest.raises(UnknownName, match="no metric 'auc'. Did you mean 'auroc'.*classification"):
        with_metric(Classification(2), "auc")
    with pytest.raises(UnknownName, match="There are: rmse, loss, mae, r2"):
        with_metric(Regression(1), "zzz")


def test_a_function_is_a_metric_of_all_scores() -> None:
    task = with_metric(Classification(2), roc_auc_score)
    sim = simulation(task, "loop")
    sim.run_round()
    rows = torch.cat(sim.federation.held_out)
    logits = sim.module()(sim.federation.clean(rows).x).detach()
    expected = roc_auc_score(sim.federation.y[rows], logits.softmax(1)[:, 1])
    assert sim.evaluate()["roc_auc_score"] == pytest.approx(expected)
    assert sim.evaluate_rows(sim.output, rows)["roc_auc_score"] == pytest.approx(expected)
    assert task.headline.higher_is_better

    def broken(y_true: object, y_score: object) -> float:
        raise TypeError("no numbers")

    sim.federation.task = with_metric(Classification(2), broken)
    with pytest.raises(KedgeError, match=r"the metric broken failed: TypeError: no numbers"):
        sim.evaluate()


def test_a_registered_metric_has_a_name() -> None:
    @register_metric(higher_is_better=False)
    def brier(y_true: np.ndarray, y_score: np.ndarray) -> float:
        """Squared error of probabilities."""
        return float(((y_true - y_score) ** 2).mean())

    try:
        task = with_metric(Classification(2), "brier")
        assert (task.metric, task.higher_is_better) == ("brier", False)
        assert task.headline.__doc__ == "Squared error of probabilities."
    finally:
        own_metrics.remove("brier")
