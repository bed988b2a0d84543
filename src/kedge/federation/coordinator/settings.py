"""From settings and an agreement to the terms of a federation."""

from __future__ import annotations

import dataclasses

import numpy as np

from kedge.core.task import tasks
from kedge.core.task_custom import balanced_weights, read_class_weights
from kedge.data.datasets.dataset import kind_of
from kedge.errors import FieldError
from kedge.federation.coordinator.agreement import Agreement
from kedge.federation.member.own_data import check_split
from kedge.runs.build import auto_model
from kedge.schema import ErrorCollector
from kedge.session.terms import Terms
from kedge.settings import FIELDS, Config


def check_config(config: Config) -> None:
    """Raise a FieldError for settings that only a simulation has.

    Where samples are, how they are distributed and how the server computes are no settings of a
    real federation: ``data``, ``partition``, ``engine`` and the like are not read.
    """
    wrong = ErrorCollector()
    if len(config.seeds) != 1:
        text = f"seeds = {list(config.seeds)}: a federation trains one; set seeds = [0]"
        wrong.add(FieldError(text))
    for name, neutral in (("validation", 0.0), ("unseen", 0.0), ("angles", (0.0,))):
        if getattr(config, name) != neutral:
            wrong.add(FieldError(f"{name} is not for real federations; leave it out", name))
    with wrong.collect():
        check_split(config.split)
    wrong.raise_all()


def terms_of(config: Config, agreement: Agreement, own: bool = False) -> Terms:
    """The terms of a federation.

    Args:
        config: the settings.
        agreement: what the members share.
        own: whether the model is a module of one's own.

    Raises:
        KedgeError: the settings do not fit the data or the number of members.
    """
    data, count = agreement.schema, len(agreement.members)
    if config.per_round > count:
        raise FieldError(f"per_round = {config.per_round} is more than the {count} members")
    model = config.model
    if own:
        model = "own"
    elif model == "auto":
        model = auto_model(kind_of(data.shape, np.dtype(data.dtype)), data.shape)
    known = [field.name for field in dataclasses.fields(Terms) if field.name in FIELDS]
    values = {name: getattr(config, name) for name in known} | {
        "data": data,
        "num_clients": count,
        "examples": sum(member.train for member in agreement.members),
        "model": model,
        "optimizer": str(config.optim()),
        "seed": config.seeds[0],
        "class_weights": _class_weights(config, agreement),
    }
    terms = Terms(**values)
    terms.check()
    return terms


def _class_weights(config: Config, agreement: Agreement) -> tuple[float, ...]:
    data = agreement.schema
    names = data.classes or tuple(map(str, range(data.outputs)))
    found = read_class_weights(config.class_weights, names)
    if isinstance(found, tuple):
        return found
    if found == "none":
        return ()
    counts = agreement.counts if tasks[data.task].one_class else ()
    return tuple(balanced_weights(counts))
