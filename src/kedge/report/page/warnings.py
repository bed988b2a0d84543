"""Warnings of a report: unfinished or diverged runs, how the best was picked, lost classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kedge.report.page.standings import Standing, on_validation
from kedge.report.page.wording import MAX_NAMED, name


def warnings_of(
    found: Sequence[Standing], best: Standing | None, classes: dict[str, Any] | None
) -> tuple[str, ...]:
    """The warnings on the runs of a group; ``classes`` has the metric by class."""
    return _of_runs(found) + _of_classes(found, best, classes)


def _of_runs(found: Sequence[Standing]) -> tuple[str, ...]:
    texts = []
    unfinished = [s for s in found if not s.is_final]
    compared = ", and it is not compared" if len(found) > 1 else ""
    for s in unfinished[:MAX_NAMED]:
        texts.append(
            f"{name(s.source.name)} is not finished: {s.round} of {s.source.rounds} rounds "
            f"tested{_missing_seeds(s)}. Its values are those so far{compared}."
        )
    if len(unfinished) > MAX_NAMED:
        texts.append(f"{len(unfinished) - MAX_NAMED} more runs are not finished.")
    for s in found:
        failed = [seed for seed in s.seeds if seed.failed]
        if s.status == "diverged":
            why = f": {failed[0].failed}" if failed else ""
            texts.append(f"{name(s.source.name)} diverged{why}.".replace("..", "."))
    rounds = {s.source.rounds for s in found if s.is_final and not s.source.yardstick}
    if len(rounds) > 1 and not any("rounds" in s.source.values for s in found):
        texts.append(
            f"The runs have different numbers of rounds ({', '.join(map(str, sorted(rounds)))}); "
            "each is judged after its last one."
        )
    competing = [s for s in found if s.is_final and not s.source.yardstick]
    if len(competing) > 2 and not on_validation(found):
        texts.append(
            "The best of several is picked by the test data here, which flatters it a little; "
            "--validation 0.1 picks it on other data."
        )
    return tuple(texts)


def _of_classes(
    found: Sequence[Standing], best: Standing | None, classes: dict[str, Any] | None
) -> tuple[str, ...]:
    """Classes of which the best model gets no test sample right."""
    if best is None or classes is None or best.source.headline == "personal":
        return ()
    values = classes["values"][list(found).index(best)] or ()
    lost = [c for c, v in zip(classes["classes"], values, strict=False) if v == 0]
    if not lost or math.isnan(best.last.mean):
        return ()
    named = ", ".join(lost[:MAX_NAMED]) + (
        f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
    )
    noun = "class" if len(lost) == 1 else "classes"
    every = "" if best.last.n == 1 else ", in every seed"
    return (
        f"{name(best.source.name)} gets no test sample of the {noun} {named} right{every}. See the "
        "chart by class; --class-weights balanced gives rare classes more weight.",
    )


def _missing_seeds(standing: Standing) -> str:
    wanted = list(standing.source.settings["seeds"])
    have = len(standing.seeds)
    return f", {have} of {len(wanted)} seeds" if have < len(wanted) else ""
