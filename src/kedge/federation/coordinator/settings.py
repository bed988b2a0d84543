"""From settings and an agreement to the terms of a federation."""

from __future__ import annotations

import numpy as np

from kedge.core.task import tasks
from kedge.core.task_custom import balanced_weights, read_class_weights
from kedge.data.datasets.dataset import kind_of
from kedge.errors import FieldError, SeveralErrors
from kedge.federation.coordinator.agreement import Agreement
from kedge.federation.member.own_data import check_split
from kedge.federation.member.profile import Question
from kedge.runs.build import auto_model
from kedge.session.terms import Terms
from kedge.settings import Config


def check_config(config: Config) -> None:
    """Raise a FieldError for settings that only a simulation has.

    Where samples are, how they are distributed and how the server computes are no settings of a
    real federation: ``data``, ``partition``, ``engine`` and the like are not read.
    """
    wrong = []
    if len(config.seeds) != 1:
        wrong.append(
            FieldError(f"seeds = {list(config.seeds)}: a federation trains one; set seeds = [0]")
        )
    for name, neutral in (("validation", 0.0), ("unseen", 0.0), ("angles", (0.0,))):
        if getattr(config, name) != neutral:
            wrong.append(FieldError(f"{name} is not for real federations; leave it out", name))
    try:
        check_split(config.split)
    except FieldError as error:
        wrong.append(error)
    if wrong:
        raise wrong[0] if len(wrong) == 1 else SeveralErrors(wrong)


def question_of(config: Config) -> Question:
    """What members are asked when they join."""
    return Question(config.seeds[0], config.split, config.class_weights == "balanced")


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
    terms = Terms(
        data,
        count,
        sum(member.train for member in agreement.members),
        method=config.method,
        model=model,
        batchnorm=config.batchnorm,
        optimizer=str(config.optim()),
        batch=config.batch,
        steps=config.steps,
        epochs=config.epochs,
        replacement=config.replacement,
        weighting=config.weighting,
        per_round=config.per_round,
        rounds=config.rounds,
        seed=config.seeds[0],
        precision=config.precision,
        augment=config.augment,
        split=config.split,
        metric=config.metric,
        class_weights=_class_weights(config, agreement),
    )
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
