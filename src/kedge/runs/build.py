"""From settings to a simulation: the clients, the task, the model, and what does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn

from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.task import Task, tasks
from kedge.core.task_custom import (
    balanced_weights,
    read_class_weights,
    with_class_weights,
    with_metric,
)
from kedge.data.build import federate
from kedge.data.datasets import Dataset
from kedge.data.federation import Federation
from kedge.data.partition import Partition
from kedge.engines import Execution
from kedge.errors import ModelError
from kedge.models import build
from kedge.session.sampler import make_sampler
from kedge.settings import Config
from kedge.sim.simulation import Simulation

HELD_OUT = "holdout(0.2)"


def is_personal(config: Config) -> bool:
    """Whether the clients' own models are what the method is for."""
    return parse(config.method).personal_model


def with_personal(configs: Sequence[Config]) -> list[Config]:
    """The configurations of runs that are compared, with ``personal`` set if one is personal."""
    if not any(is_personal(config) for config in configs):
        return list(configs)
    return [dataclasses.replace(config, personal=True) for config in configs]


def split_of(config: Config, dataset: Dataset) -> str:
    """The split of a run: with ``personal``, ``auto`` holds out a share of every client, unless the
    silos have test data of their own."""
    own_tests = dataset.x_test is not None and dataset.groups_test is not None
    return (
        HELD_OUT if config.split == "auto" and config.personal and not own_tests else config.split
    )


def partition_of(text: str, dataset: Dataset) -> str:
    """The partition that ``auto`` stands for, or the text itself."""
    if text != "auto":
        return text
    if dataset.groups is not None:
        return "silos"
    return "dirichlet(0.1)" if tasks[dataset.task].one_class else "iid"


def federation_of(
    config: Config, dataset: Dataset, seed: int, device: torch.device | str = "cpu"
) -> Federation:
    """Partition a dataset among clients as the settings say; neither model nor method is needed.

    Raises:
        KedgeError: the settings do not fit the data, e.g. more clients than samples.
    """
    partition: str | Partition = partition_of(config.partition, dataset)
    if config.partition.endswith(".json"):
        partition = Partition.load(config.partition)
    silos = dataset.groups is not None
    clients = config.clients or (len(dataset.group_names or ()) if silos else 20)
    if config.partition == "central":
        clients = config.clients or 1
    return federate(
        dataset,
        partition,
        clients=clients,
        split=split_of(config, dataset),
        validation=config.validation,
        unseen=config.unseen,
        augment=config.augment,
        angles=config.angles,
        seed=seed,
        device=device,
    )


def task_of(config: Config, federation: Federation) -> Task:
    """The task of a federation with the class weights and the metric of a configuration.

    Balanced weights are those of scikit-learn, n / (C n_c), from the sum over clients of their
    counts of training samples.

    Raises:
        FieldError: the class weights do not fit the task.
        UnknownName: the task has no such metric.
    """
    task = federation.task
    names = federation.classes or [str(c) for c in range(task.outputs)]
    weights = read_class_weights(config.class_weights, names)
    if weights == "balanced":
        counts = federation.label_counts().sum(0).tolist() if task.one_class else []
        weights = tuple(balanced_weights(counts))
    if not isinstance(weights, str):
        task = with_class_weights(task, weights, federation.device)
    return task if config.metric == "auto" else with_metric(task, config.metric)


def simulation(
    config: Config,
    dataset: Dataset,
    seed: int,
    device: torch.device,
    execution: Execution,
    own: Model | None = None,
    adjust: Callable[[Task], Task] | None = None,
    pooled: bool = False,
) -> Simulation:
    """Build the simulation of one seed; with ``pooled``, of one client with all training data.

    The partition, the cohorts and the initial weights depend on the settings and the seed alone,
    not on the device or on ``execution``. ``own`` is a model to train in place of a named one,
    and ``adjust`` gives the task an own loss or metric.

    Raises:
        KedgeError: the settings do not fit the data, e.g. more clients than samples.
    """
    federation = federation_of(config, dataset, seed, device)
    if adjust is not None:
        federation.task = adjust(federation.task)
    if own is not None:
        return assemble(config, federation, own, seed, execution)
    text = auto_model(dataset.kind, dataset.shape) if config.model == "auto" else config.model
    with torch.random.fork_rng(devices=()):  # of the CPU: listing GPUs would initialise CUDA
        torch.default_generator.manual_seed(seed)
        module = build(text, dataset.shape, dataset.outputs)
    if pooled:
        return assemble(
            pooled_config(config, federation), federation.pooled(), module, seed, execution
        )
    return assemble(config, federation, module, seed, execution)


def assemble(
    config: Config,
    federation: Federation,
    module: nn.Module | Model,
    seed: int,
    execution: Execution,
) -> Simulation:
    """Build a simulation from a federation and a model, with the other settings of ``config``."""
    federation.task = task_of(config, federation)
    if not isinstance(module, Model):
        module = Model(module, batchnorm=config.batchnorm, precision=config.precision)
    check_batchnorm(config.method, module)
    check_tokens(module, federation)
    return Simulation(
        federation,
        module,
        config.method,
        optim=config.optim(),
        work=config.work(),
        sampler=make_sampler(config.sampler, config.per_round, federation.sizes),
        weighting=config.weighting,
        engine=execution,
        seed=seed,
    )


def auto_model(kind: str, shape: tuple[int, ...]) -> str:
    """The default model: a small CNN for images of at least 28 pixels, otherwise an MLP."""
    if kind == "tokens":
        raise ModelError(
            "there is no default model for token ids; give one with an embedding, such as "
            "--model hf:NAME, or your own in kedge.fit"
        )
    if len(shape) != 3 or min(shape[1:]) < 28:
        return "mlp(hidden=[64])"
    return "fedcog_cnn" if shape[1:] in ((28, 28), (32, 32)) else "lenet5(norm=gn)"


def pooled_config(config: Config, federation: Federation) -> Config:
    """The settings of training on pooled data: FedAvg with one client.

    It takes as many samples a round as the clients of a round take together.
    """
    cohort = config.per_round or federation.num_clients
    return dataclasses.replace(
        config,
        method="fedavg",
        per_round=0,
        sampler="uniform",
        steps=config.steps * cohort,
        epochs=config.epochs * cohort / federation.num_clients,
    )


def check_batchnorm(method: str, model: Model) -> None:
    """Raise a ModelError for a part that is about BatchNorm if the model has none."""
    has_norm = any(name.split(".")[-1] == "running_mean" for name in model.own_weights().buffers)
    for part in parse(method).parts:
        if part.needs_batchnorm and not has_norm:
            raise ModelError(
                f"{part.name} keeps BatchNorm on the clients, but the model has none, so it would "
                "be FedAvg; choose a model with BatchNorm, e.g. --model "
                '"mlp(norm=bn)", or another method'
            )


def check_tokens(model: Model, federation: Federation) -> None:
    """Raise a ModelError for token ids that an embedding of the model does not have."""
    if not federation.tokens:
        return
    inputs = [federation.x.reshape(len(federation.x), -1)]
    if federation.has_test:
        inputs += [batch.x.reshape(len(batch.x), -1) for batch in federation.test_batches()]
    extremes = [x[i] for x in inputs for i in (x.amax(1).argmax(), x.amin(1).argmin())]
    net, x = model.template, torch.stack(extremes).reshape(-1, *federation.input_shape)
    place = next((p.device for p in net.parameters()), x.device)
    training = net.training
    net.eval()
    try:
        with torch.no_grad():
            net(x.to(place))
    except IndexError as error:
        rows = [m.num_embeddings for m in net.modules() if isinstance(m, torch.nn.Embedding)]
        has = f" (rows of its embeddings: {', '.join(map(str, rows))})" if rows else ""
        raise ModelError(
            f"the model cannot take these token ids, from {int(x.min())} to {int(x.max())}, or so "
            f"many of them: {error}{has}"
        ) from error
    except RuntimeError:
        pass  # it takes no tokens at all: the simulation says so
    finally:
        net.train(training)
