"""``run``, ``compare`` and ``sweep``: methods on named datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.api.results import Results
from kedge.core.method import Method, parse
from kedge.core.part import Part
from kedge.errors import FieldError
from kedge.loggers import observer
from kedge.loggers.host import Given
from kedge.runs import train
from kedge.runs.grid import combine
from kedge.runs.result import Result
from kedge.settings import Config, load_config

Log = str | Iterable[Given] | None  # loggers of a run
#: (seed, record of a round); if it returns True, the training stops after this round, saved.
RunWatch = Callable[[int, dict[str, Any]], bool | None]
SweepWatch = Callable[[Config, int, dict[str, Any], str], bool | None]


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
    settings |= method_setting(method)
    loggers = observer(log, saved=out is not None)
    options = train.Options(told(watch), observe=loggers)
    return train.run(load_config(config, flags=settings), out, resume, options)


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
    loggers = observer(log, saved=out is not None)
    jobs = train.method_jobs(configs, pooled)
    options = train.Options(observe=loggers)
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
    settings |= method_setting(method)
    loggers = observer(log, saved=out is not None, several=True)
    jobs = train.setting_jobs(combine(grid or {}, config, settings))
    tell = None if watch is None else lambda job, s, r: watch(job.config, s, r, job.words)
    options = train.Options(tell, observe=loggers)
    return Results(train.experiment("sweep", jobs, out, resume, options).results)


def told(watch: RunWatch | None) -> train.Watch | None:
    """The callback of a run in the form of those of several runs."""
    return None if watch is None else lambda job, seed, record: watch(seed, record)


def method_setting(method: str | Method | Part | None) -> dict[str, str]:
    """The setting ``method`` as text; empty if no method is given."""
    if method is None:
        return {}
    return {"method": method if isinstance(method, str) else repr(parse(method))}
