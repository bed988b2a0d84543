"""The commands that one would type next, printed to standard error after a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.cli.screen import errors
from kedge.loading import load_options

if TYPE_CHECKING:
    from kedge.runs.result import Result
    from kedge.settings import Config


def after_run(result: Result) -> list[str]:
    """Use the model, compare the method, go on training."""
    folder, config = _folder(result), result.config
    return _written(
        [
            _predict(folder, config),
            _compare(folder, config),
            f"kedge run --out {_quoted(folder)} --resume --rounds {2 * config.rounds}"
            if not result.stopped_early
            else f"kedge evaluate {_quoted(folder)} --which best",
        ]
    )


def after_comparison(results: Sequence[Result], folder: Path) -> list[str]:
    """Use the best model, add a yardstick, go on training."""
    from kedge.runs.validation import leader

    best, root = leader(results), _quoted(folder)
    resume = f"kedge compare --out {root} --resume"
    has_pooled = any(result.yardstick for result in results)
    return _written(
        [
            _predict(_folder(best), best.config),
            *([] if has_pooled else [f"{resume} --pooled"]),
            f"{resume} --rounds {2 * best.config.rounds}",
        ]
    )


def after_sweep(results: Sequence[Result], folder: Path) -> list[str]:
    """Use the best model, compare its method, go on training."""
    from kedge.runs.validation import leader

    best = leader(results)
    rounds = max(result.config.rounds for result in results)
    same = all(result.config.rounds == rounds for result in results)
    resume = f"kedge sweep --out {_quoted(folder)} --resume"
    return _written(
        [
            _predict(_folder(best), best.config),
            _compare(_folder(best), best.config),
            *([f"{resume} --rounds {2 * rounds}"] if same else []),
        ]
    )


def show(commands: Sequence[str]) -> None:
    """Print the commands, one per line."""
    for i, command in enumerate(commands):
        start = "next: " if i == 0 else "      "
        errors.print(start + command, style="dim", highlight=False, soft_wrap=True, markup=False)


def _predict(folder: Path, config: Config) -> str:
    """``new.csv`` and ``new.png`` stand for new data; arrays have no usual name."""
    from kedge.runs.build import is_personal
    from kedge.saved.run import load

    run = load(folder)
    own = ""
    if is_personal(config) and run.has_personal:
        own = f" --client {shlex.quote(run.clients[0])}"
    new = {"table": "new.csv", "image": "new.png"}.get(run.bundle.encoding.kind)
    data = new or shlex.quote(config.data)
    return f"kedge predict {_quoted(folder)} {data}{own} -o predictions.csv"


def _compare(folder: Path, config: Config) -> str:
    methods = ("fedavg", "scaffold" if config.method == "fedavg" else config.method)
    words = " ".join(shlex.quote(method) for method in methods)
    return f"kedge compare {words} --config {_quoted(folder / 'config.toml')}"


def _written(commands: list[str]) -> list[str]:
    return [command + load_options() for command in commands]


def _folder(result: Result) -> Path:
    assert result.folder is not None
    return result.folder


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
