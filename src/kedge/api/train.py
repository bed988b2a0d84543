"""``run``, ``compare`` and ``sweep``: methods on named datasets; ``fit``: a model of your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge.api.clients import check_test_labels, read_clients, with_outputs
from kedge.core.layers.adapting import adapt, check_logits, check_module, one_logit
from kedge.core.method import Method, parse
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.task import Task, tasks
from kedge.core.task_custom import Loss, ScoreFunction, with_loss, with_metric
from kedge.data.datasets import Dataset
from kedge.engines import Execution
from kedge.engines.device import resolve_device
from kedge.errors import DataError, FieldError, ModelError
from kedge.loggers import observer
from kedge.loggers.host import Given
from kedge.models import HF
from kedge.report.tables import results_table
from kedge.runs import train
from kedge.runs.build import simulation, with_personal
from kedge.runs.grid import combine
from kedge.runs.result import Result
from kedge.runs.validation import data_of_choice, leader
from kedge.settings import Config, load_config
from kedge.sim.simulation import Simulation

Log = str | Iterable[Given] | None  # loggers of a run
#: (seed, record of a round); if it returns True, the training stops after this round, saved.
RunWatch = Callable[[int, dict[str, Any]], bool | None]
SweepWatch = Callable[[Config, int, dict[str, Any], str], bool | None]


class Results(list[Result]):
    """One result per method or setting; ``print(results)`` shows the table of the command line.

    >>> import kedge
    >>> results = kedge.compare(["fedavg", "scaffold"], rounds=2, seeds=[0])
    >>> isinstance(results, list), results.best in results
    (True, True)
    """

    @property
    def best(self) -> Result:
        """The best one: by validation data where there are some, otherwise by the last test.

        Yardsticks, such as training on pooled data, do not compete.
        """
        return leader(self)

    def __str__(self) -> str:
        if not self:
            return "no results"
        is_sweep = bool(self[0].values)
        table = str(results_table(self))
        if is_sweep or sum(not result.yardstick for result in self) < 2:
            return table
        return f"{table}\n{self.best.name}: {data_of_choice(self)}"


def run(
    method: str | Method | Part | None = None,
    *,
    config: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    watch: RunWatch | None = None,
    log: Log = None,
    **settings: Any,
) -> Result:
    """Train with a method on a named dataset, once per seed.

    Args:
        method: a sum of parts, as text or as objects; None takes the one of ``config``, or FedAvg.
        config: a TOML file with settings; ``method`` and ``settings`` override it.
        out: folder for the run; None saves nothing.
        resume: continue the run in ``out``.
        watch: called as ``watch(seed, record)`` after every round.
        log: loggers: ``"csv"``, ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, or your own (an
            object with the methods of :class:`kedge.loggers.Logger`, or its class).
        **settings: any setting of ``kedge run --help``, e.g. ``rounds=100``.

    Returns:
        The records, summary and trained models of all seeds.

    Raises:
        KedgeError: a setting is unknown or wrong, or does not fit the data, the device or ``out``.

    >>> import kedge
    >>> result = kedge.run("scaffold+fedprox(mu=0.01)", data="digits", rounds=2, seeds=[0, 1])
    >>> result.metric, result.array().shape  # [seeds, tested rounds]
    ('accuracy', (2, 2))
    """
    options = _options(log, out, _told(watch))
    loaded = load_config(config, flags=settings | method_setting(method))
    return train.run(loaded, out, resume, options)


def compare(
    methods: Sequence[str | Method | Part],
    *,
    config: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    pooled: bool = False,
    log: Log = None,
    **settings: Any,
) -> Results:
    """Run several methods on the same partitions, cohorts and initial weights.

    Args:
        methods: the methods, each as in :func:`run`.
        config: a TOML file with settings; ``settings`` override it.
        out: folder with one subfolder per method; None saves nothing.
        resume: continue the runs in ``out``.
        pooled: also train on the pooled data of all clients, as a yardstick.
        log: loggers, as in :func:`run`; each run has its own.
        **settings: any setting of ``kedge run --help`` but ``method``.

    Returns:
        One result per method, in the order of ``methods``; then that of the yardstick. A list that
        prints as a table, and whose ``best`` is the best method, by validation data if there are
        some.

    Raises:
        FieldError: there is no method.
        KedgeError: as :func:`run`.

    >>> import kedge
    >>> results = kedge.compare(["fedavg", "scaffold"], rounds=2, seeds=[0])
    >>> [result.config.method for result in results]
    ['fedavg', 'scaffold']
    """
    texts = [m if isinstance(m, str) else repr(m) for m in methods]
    if not texts:
        raise FieldError("there is nothing to compare; name at least one method")
    configs = [load_config(config, flags=settings | {"method": text}) for text in texts]
    options, jobs = _options(log, out), train.method_jobs(configs, pooled)
    return Results(train.experiment("compare", jobs, out, resume, options).results)


def sweep(
    method: str | Method | Part | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    config: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    watch: SweepWatch | None = None,
    log: Log = None,
    **settings: Any,
) -> Results:
    """Run all combinations of some settings.

    Combinations that differ only in numbers train together. If a loss is not finite, only that
    combination ends, with NaN as its metric from there on.

    Args:
        method: as in :func:`run`.
        grid: the values of each key: a setting, or a field of a part such as ``"fedprox.mu"``.
        config: a TOML file with the other settings.
        out: folder with one subfolder per combination; None saves nothing.
        resume: continue the sweep in ``out``.
        watch: called as ``watch(config, seed, record, name)`` after every round.
        log: loggers, as in :func:`run`; own ones as classes, since several runs train at once.
        **settings: any other setting of ``kedge run --help``.

    Returns:
        One result per combination; the last key of ``grid`` changes fastest. ``result.config``
        holds its settings. A list that prints as a table, with ``best``, as of :func:`compare`.

    Raises:
        FieldError: the grid is empty, or a key has no value or the same value twice.
        KedgeError: as :func:`run`.

    >>> import kedge
    >>> results = kedge.sweep("fedprox", {"fedprox.mu": [0.1, 1.0]}, rounds=2, seeds=[0])
    >>> [result.config.method for result in results]
    ['fedprox(mu=0.1)', 'fedprox(mu=1.0)']
    """
    tell = None if watch is None else lambda job, s, r: watch(job.config, s, r, job.words)
    options = _options(log, out, tell, several=True)
    jobs = train.setting_jobs(combine(grid or {}, config, settings | method_setting(method)))
    return Results(train.experiment("sweep", jobs, out, resume, options).results)


def _options(
    log: Log, out: str | Path | None, watch: train.Watch | None = None, several: bool = False
) -> train.Options:
    """How runs are trained; ``several``: whether several may train at the same time."""
    return train.Options(watch, observe=observer(log, saved=out is not None, several=several))


def _told(watch: RunWatch | None) -> train.Watch | None:
    """The callback of a run in the form of those of several runs."""
    return None if watch is None else lambda job, seed, record: watch(seed, record)


def method_setting(method: str | Method | Part | None) -> dict[str, str]:
    """The setting ``method`` as text; empty if no method is given."""
    if method is None:
        return {}
    return {"method": method if isinstance(method, str) else repr(parse(method))}


# -- your own model and clients ---------------------------------------------------------------


def fit(
    model: nn.Module | Model | str | None = None,
    clients: Any = None,
    method: str | Method | Part = "fedavg",
    test: Any = None,
    *,
    label: Any = None,
    task: str = "auto",
    held_out: float = 0.2,
    missing: str | None = None,
    drop: Any = None,
    id: str | None = None,
    loss: Loss | None = None,
    metric: str | ScoreFunction | None = None,
    class_weights: str | Sequence[float] | Mapping[str, float] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    watch: RunWatch | None = None,
    log: Log = None,
    **settings: Any,
) -> Result:
    """Train your own model on your own clients.

    Args:
        model: a module that maps inputs ``[batch, ...]`` to outputs ``[batch, outputs]``, or a
            model by name, such as ``"mlp(hidden=[32])"``; None takes one that suits the data. One
            output is enough for two classes: it is the logit of the second one, and the trained
            model returns the logits ``[0, z]`` of both. Of a dictionary of outputs, ``"logits"`` is
            taken. Parameters with ``requires_grad=False`` are neither trained nor sent.
        clients: the data of each client, in a list or by name (``{"north": ..., "south": ...}``):
            a pair ``(inputs, labels)`` of arrays or tensors, ``[n_k, ...]`` and ``[n_k]`` or
            ``[n_k, labels]``; a ``torch.utils.data.Dataset`` of such pairs; or a pandas DataFrame.
            Labels may be texts. Whole numbers stay whole if the model takes them, as
            ``nn.Embedding`` does.
        method: as in :func:`run`.
        test: a test set of the same kind; None tests on held-out samples of each client.
        label: the label column of DataFrames.
        task: ``classification``, ``multilabel``, ``regression`` or a registered task. ``auto``
            infers it from the labels: integers and texts are classes, rows of 0 and 1 are
            multi-label, other numbers are targets of a regression.
        held_out: share of each client's samples to test on if there is no ``test``.
        missing: what to do about missing values in DataFrames, as for CSV files.
        drop: columns of DataFrames to leave out.
        id: the column of DataFrames that names the rows.
        loss: ``loss(logits, labels)`` returns the loss of each sample ``[n]``, in place of the
            task's.
        metric: the metric that runs are compared by: a name, or a function
            ``metric(y_true, y_score)`` such as those of scikit-learn.
        class_weights: factors of the classes in the loss: ``"balanced"``, one number per class, or
            ``{"sick": 5}`` by name.
        out: folder for the run, as in :func:`run`.
        resume: continue the run in ``out``.
        watch: called after every round, as in :func:`run`.
        log: loggers, as in :func:`run`.
        **settings: as in :func:`run`; ``seeds`` is ``(0,)`` by default.

    Returns:
        The result; ``result.models[0]`` is the trained global model of the first seed.

    Raises:
        DataError: the samples of a client are missing, malformed or not finite.
        ModelError: the model cannot take the inputs, or its outputs do not fit the labels.
        KedgeError: as :func:`run`.

    >>> import kedge
    >>> x, y = torch.randn(40, 8), torch.randint(0, 2, (40,))
    >>> result = kedge.fit(nn.Linear(8, 2), [(x[:20], y[:20]), (x[20:], y[20:])], rounds=2)
    >>> result.models[0]
    Linear(in_features=8, out_features=2, bias=True)
    """
    options = _options(log, out, _told(watch))
    if clients is None:
        raise DataError("there are no clients; give them: kedge.fit(model, clients)")
    columns = {"missing": missing, "drop": drop, "id": id}
    columns = {name: value for name, value in columns.items() if value is not None}
    dataset = read_clients(clients, label, test, task, **columns)
    assert dataset.group_names is not None
    if not 0 < held_out < 1:
        raise FieldError(f"held_out = {held_out} is not between 0 and 1")
    settings = {
        "seeds": (0,),
        "split": f"holdout({held_out})" if test is None else "given",
        **({"model": model} if isinstance(model, str) else {}),
        **settings,
        **method_setting(method),
    }
    if class_weights is not None:
        settings["class_weights"] = _written(class_weights)
    if isinstance(metric, str):
        settings["metric"] = metric
    config = load_config(flags=settings | {"data": "own", "clients": len(dataset.group_names)})
    [config] = with_personal([config])
    module = None
    if model is not None and not isinstance(model, str):
        module, dataset = own_model(model, dataset, config, is_auto=task == "auto")
    else:
        check_test_labels(dataset)
    if module is None and dataset.encoding is None:  # arrays
        dataset = with_outputs(dataset, dataset.outputs, tokens=config.model.startswith(HF))
    device = resolve_device(config.device)

    def adjust(task: Task) -> Task:
        task = task if loss is None else with_loss(task, loss)
        return task if metric is None or isinstance(metric, str) else with_metric(task, metric)

    def make(seed: int, execution: Execution) -> Simulation:
        return simulation(config, dataset, seed, device, execution, module, adjust)

    return train.run(config, out, resume, options, make=make)


def _written(weights: str | Sequence[float] | Mapping[str, float]) -> str:
    """Class weights as a setting: ``1,5`` or ``sick=5``."""
    if isinstance(weights, str):
        return weights
    if isinstance(weights, Mapping):
        return ",".join(f"{name}={value}" for name, value in weights.items())
    return ",".join(str(float(value)) for value in weights)


def own_model(
    model: Any, dataset: Dataset, config: Config, is_auto: bool = False
) -> tuple[Model, Dataset]:
    """A user's model in the form that kedge trains, and the dataset in the form that it takes.

    Raises:
        ModelError: the model cannot take the inputs, or its outputs do not fit the labels.
    """
    head, batchnorm, precision = None, config.batchnorm, config.precision
    if isinstance(model, Model):
        head, batchnorm, precision = model.head_name, model.batchnorm, model.precision
        model = model.template
    x = torch.as_tensor(dataset.x_train[:2])
    if len(x) == 1:
        x = torch.cat([x, x])
    x = x / 255 if x.dtype == torch.uint8 else x
    module, shape, tokens = adapt(check_module(model), x, config.seeds[0])
    width = int(torch.Size(shape).numel())
    if is_auto and width == 1 and _is_binary(dataset):
        y = {n: getattr(dataset, n) for n in ("y_train", "y_test")}
        y = {n: v if v is None else v.reshape(-1).astype("int64") for n, v in y.items()}
        dataset = dataclasses.replace(dataset, task="classification", outputs=2, **y)
    given = x if tokens else x.float()
    if tasks[dataset.task].has_classes:
        check_logits(module, given)
    if tasks[dataset.task].one_class:
        if len(shape) != 1 and width != 1:
            raise ModelError(
                f"the model returns the shape {list(shape)} for one input; classes need one number "
                "each, so let it return [batch, classes]"
            )
        if width < dataset.outputs:
            check_test_labels(dataset)
        _check_width(dataset, width)
        if width == 1:
            module, width = one_logit(module, given), 2
    dataset = with_outputs(dataset, width, tokens)
    return Model(module, head, batchnorm, precision), dataset


def _is_binary(dataset: Dataset) -> bool:
    """Whether real targets are all 0 or 1, as a binary cross-entropy takes them."""
    if dataset.task != "regression" or dataset.outputs != 1:
        return False
    ys = [y for y in (dataset.y_train, dataset.y_test) if y is not None]
    return all(bool(((y == 0) | (y == 1)).all()) for y in ys)


def _check_width(dataset: Dataset, width: int) -> None:
    """Raise a ModelError if a model has too few outputs for the classes, or too many for names."""
    names, count = dataset.classes, dataset.outputs
    if width == count or (width == 1 and count == 2) or (names is None and width > count):
        return
    classes = f"{count} classes ({', '.join(names[:10])})" if names else f"{count} classes"
    reason = "" if names else f", since labels go up to {count - 1}"
    outputs = "one output" if width == 1 else f"{width} outputs"
    raise ModelError(
        f"the model has {outputs}, but the data have {classes}{reason}; give its last layer "
        f"{count} outputs"
    )
