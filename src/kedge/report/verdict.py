"""What the numbers say, in plain sentences: who wins, by how much, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kedge.history.compare import LEVEL, Comparison, Row, gain_over
from kedge.report.text import (
    MAX_NAMED,
    count,
    difference,
    interval_text,
    listed,
    name,
    p_text,
    times,
    what,
)


@dataclass(frozen=True)
class Verdict:
    """The first sentence, those that follow, and warnings."""

    lead: str
    more: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def verdict(
    found: Comparison,
    clients: Sequence[dict[str, object]] | None = None,
    is_sweep: bool = False,
    classes: dict[str, Any] | None = None,
) -> Verdict:
    """The verdict on the runs of a group; ``clients`` has who gains and loses, by run, ``classes``
    the metric by class. The settings of a sweep are compared with the best one."""
    best = found.rows[0] if len(found.rows) == 1 else found.leader
    warnings = warnings_of(found, best, classes)
    if len(found.rows) == 1:
        return Verdict(_alone(found.rows[0]), tuple(_facts(found.rows[0])), warnings)
    if found.rows[0].run.measure.higher_is_better is None:
        return Verdict(_no_direction(found.rows[0]), (), warnings)
    if best is None:
        return Verdict(_so_far(found), (), warnings)
    if math.isnan(best.run.last.mean):
        why = "diverged" if best.run.status == "diverged" else "lack a value of the metric"
        return Verdict(f"All runs {why}, so nothing can be said.", (), warnings)
    if len(found.competing) == 1:
        return Verdict(_alone(best), tuple(_yardsticks(found, best)), warnings)
    if is_sweep:
        return Verdict(_best_setting(found, best), tuple(_like_best(found, best)), warnings)
    more = [
        *_others(found, best),
        *_runner_up(found, best),
        *_yardsticks(found, best),
        *_cost(found, best),
        *_clients(found, best, clients),
        *_facts(best),
    ]
    return Verdict(_winner(found, best), tuple(more), warnings)


def _winner(found: Comparison, best: Row) -> str:
    first, metric = found.rows[0], best.run.measure
    rounds = count(best.run.tested_round, "round")
    reach = f"{metric.text(best.run.last.mean)} {what(best.run)} after {rounds}"
    tested = [s for s in found.rows if s.gain is not None and not s.run.yardstick]
    if best is first:
        clear = [s for s in tested if s.is_clear]
        head = f"{name(first.run.name)}, the first method, is not beaten: {reach}"
        if tested and all(s.is_identical for s in tested):
            return f"{_names([first, *tested])} give the same numbers: {reach}."
        if first.run.last.n == 1:
            return f"{head}, with one seed. Another seed might say otherwise."
        if len(clear) == len(tested):
            return f"{head}, clearly better than the other{'s' if len(tested) > 1 else ''}."
        return f"{head} ({count(best.run.last.n, 'seed')}). Not every difference is clear."
    gain = best.gain
    if gain is None:
        why = "it is not finished" if not first.run.is_final else "they share no seed"
        return (
            f"{name(best.run.name)} has the best mean, {reach}. It cannot be compared with "
            f"{name(first.run.name)}, the first method: {why}."
        )
    by = difference(metric, gain.mean)
    over = f"better than {name(first.run.name)}"
    if gain.n == 1:
        return (
            f"{name(best.run.name)} is ahead: {reach}, {by} {over}. With one seed that may be "
            "chance: nothing can be said about it."
        )
    if best.is_identical:
        both = f"{name(best.run.name)} and {name(first.run.name)}"
        return f"{both} give the same numbers: {reach}."
    evidence = f"95 % interval {interval_text(metric, gain)}, {count(gain.n, 'seed')}"
    corrected = f", {p_text(best.p)}"
    if len(tested) > 1:
        corrected += f" after Holm's correction for {len(tested)} comparisons"
    if best.is_clear:
        return f"{name(best.run.name)} is best: {reach}, {by} {over} ({evidence}{corrected})."
    on_validation = found.chosen_on == "validation"
    has_best = "is best on the validation data" if on_validation else "has the best mean"
    if best.run.status == "diverged" or gain.p is None:
        return f"{name(best.run.name)} {has_best}, {reach}, but seeds have diverged."
    if gain.is_clear:
        return (
            f"{name(best.run.name)} {has_best}: {reach}, {by} {over} ({evidence}). The "
            f"interval leaves out 0, but the gain does not stand the correction for "
            f"{len(tested)} comparisons ({p_text(best.p)})."
        )
    return (
        f"{name(best.run.name)} {has_best}, {reach}, but it cannot be told apart from "
        f"{name(first.run.name)}: {difference(metric, gain.mean, signed=True)} "
        f"({evidence}{corrected})."
    )


def _best_setting(found: Comparison, best: Row) -> str:
    metric, total = best.run.measure, len([s for s in found.rows if s.run.is_final])
    where = "validation data" if found.chosen_on == "validation" else "test data"
    spread = "" if best.run.last.sd is None else f" ± {best.run.last.sd:.{metric.decimals}f}"
    lead = (
        f"{name(best.run.name)} is the best of {total} settings on the {where}: "
        f"{best.run.last.mean:.{metric.decimals}f}{spread} {metric.unit} {what(best.run)} after "
        f"{count(best.run.tested_round, 'round')} ({count(best.run.last.n, 'seed')})."
    ).replace("  ", " ")
    return lead if best.run.last.n > 1 else f"{lead} With one seed the next one may be as good."


def _like_best(found: Comparison, best: Row) -> list[str]:
    """Which settings cannot be told apart from the best one, and how many are clearly worse."""
    tested = [s for s in found.rows if s.gain is not None and s.p is not None]
    same = [s for s in tested if s.is_identical]
    close = [s for s in tested if s not in same and not s.is_clear]
    worse = [s for s in tested if s.is_clear and s.gain and s.gain.mean < 0]
    texts = []
    if same:
        texts.append(f"{_names(same)} give{'s' if len(same) == 1 else ''} exactly its numbers.")
    if close:
        texts.append(f"{_names(close)} cannot be told apart from it.")
    if worse:
        are = "is" if len(worse) == 1 else "are"
        texts.append(
            f"{_names(worse)} {are} clearly worse (p below {LEVEL:g} after Holm's correction)."
        )
    return texts


def _others(found: Comparison, best: Row) -> list[str]:
    """How many are clearly better, clearly worse, or neither, than the first."""
    first = found.rows[0]
    tested = [
        s for s in found.rows if s.gain is not None and s.p is not None and not s.run.yardstick
    ]
    rest = [s for s in tested if s is not best]
    if not rest:
        return []
    same = [s for s in rest if s.is_identical]
    if len(same) == len(tested):  # the first sentence says it
        return []
    better = [s for s in rest if s.is_clear and s.gain and s.gain.mean > 0]
    worse = [s for s in rest if s.is_clear and s.gain and s.gain.mean < 0]
    unclear = [s for s in rest if s not in same and not s.is_clear]
    base, found_sentences = name(first.run.name), []
    for some, one, many in (
        (better, f"is also clearly better than {base}", f"are also clearly better than {base}"),
        (worse, f"is clearly worse than {base}", f"are clearly worse than {base}"),
        (unclear, f"cannot be told apart from {base}", f"cannot be told apart from {base}"),
        (same, f"gives exactly the numbers of {base}", f"give exactly the numbers of {base}"),
    ):
        if some:
            found_sentences.append(f"{_names(some)} {one if len(some) == 1 else many}.")
    return found_sentences


def _runner_up(found: Comparison, best: Row) -> list[str]:
    second = found.ranked[1] if len(found.competing) > 2 else None
    if second is None or second is found.rows[0] or math.isnan(second.run.last.mean):
        return []
    gap = gain_over(best.run, second.run)
    if gap is None:
        return []
    metric = best.run.measure
    if gap.mean < 0:
        ahead = difference(metric, gap.mean)
        return [
            f"{name(second.run.name)} comes second on the validation data; on the test data it "
            f"is {ahead} ahead."
        ]
    if gap.mean == 0.0 and not gap.sd:
        return [f"{name(second.run.name)} gives exactly its numbers."]
    if gap.low is None:
        return [f"{name(second.run.name)} comes second, {difference(metric, gap.mean)} behind."]
    sure = "" if gap.is_clear else ", so the two cannot be told apart"
    return [
        f"{name(second.run.name)} comes second, {difference(metric, gap.mean)} behind "
        f"(95 % interval {interval_text(metric, gap)}{sure})."
    ]


def _yardsticks(found: Comparison, best: Row) -> list[str]:
    metric = best.run.measure
    sentences = []
    for s in found.rows:
        if not s.run.yardstick or math.isnan(s.run.last.mean):
            continue
        gap = s.run.last.mean - best.run.last.mean
        gap = gap if metric.higher_is_better else -gap
        where = "short of it" if gap > 0 else "beyond it"
        sentences.append(
            f"Training on the pooled data of all clients reaches {metric.text(s.run.last.mean)}; "
            f"{name(best.run.name)} is {difference(metric, gap)} {where}."
        )
    return sentences


def _cost(found: Comparison, best: Row) -> list[str]:
    first = found.rows[0]
    base, own = first.run.mb_up + first.run.mb_down, best.run.mb_up + best.run.mb_down
    if best is first or not base or 0.95 < own / base < 1.05:
        return []
    rounds = "" if best.run.tested_round == first.run.tested_round else " in all its rounds"
    return [
        f"{name(best.run.name)} moves {times(own / base)} the bytes of "
        f"{name(first.run.name)}{rounds}."
    ]


def _clients(
    found: Comparison, best: Row, clients: Sequence[dict[str, object]] | None
) -> list[str]:
    if clients is None or best is found.rows[0]:
        return []
    counts = clients[found.best or 0]
    n, gain, lose = counts["n"], counts["gain"], counts["lose"]
    if not n or not (gain or lose):
        return []
    return [
        f"With {name(best.run.name)}, {gain} of {n} clients gain{_s(gain)} and {lose} "
        f"lose{_s(lose)} against {name(found.rows[0].run.name)}."
    ]


def _s(number: object) -> str:
    """The ending of a verb: one gains, two gain."""
    return "s" if number == 1 else ""


def _facts(row: Row) -> list[str]:
    """What must be said beside the accuracy of imbalanced classes."""
    run, share = row.run, row.run.imbalanced
    if share is None or not run.beside():
        return []
    values = [
        f"{run.metrics[key].title} {run.metrics[key].text(stat.mean)}"
        for key, stat in run.beside().items()
    ]
    return [
        f"The largest class has {100 * share:.0f} % of the test samples, so accuracy alone says "
        f"little: {name(run.name)} has {' and '.join(values)}."
    ]


def _alone(standing: Row) -> str:
    metric, stat = standing.run.measure, standing.run.last
    if math.isnan(stat.mean):
        why = "diverged" if standing.run.status == "diverged" else "has no value of the metric"
        return f"{name(standing.run.name)} {why}, so nothing can be said."
    done = "reaches" if standing.run.is_final else "has reached"
    reach = (
        f"{name(standing.run.name)} {done} {metric.text(stat.mean)} {what(standing.run)} after "
        f"{count(standing.run.tested_round, 'round')}"
    )
    interval = stat.interval()
    if interval is None:
        return f"{reach}, with one seed: how much another seed would differ is not known."
    low, high = (f"{v:.{metric.decimals}f}" for v in interval)
    return f"{reach}: mean of {stat.n} seeds, 95 % interval {low} to {high}."


def _no_direction(standing: Row) -> str:
    return (
        f"Whether a high or a low {standing.run.measure.title} is better is not known, so "
        "nothing can be said about which run is better. Name the file that registers it: kedge "
        "report ... --load FILE.py"
    )


def _so_far(found: Comparison) -> str:
    best = found.ranked[0]
    return (
        f"No run is finished yet, so nothing can be said. So far {name(best.run.name)} is "
        f"ahead, with {best.run.measure.text(best.run.last.mean)} {what(best.run)} after "
        f"{count(best.run.tested_round, 'round')}."
    )


def _names(some: Sequence[Row]) -> str:
    if len(some) > MAX_NAMED:
        return f"{len(some)} others"
    return listed([name(s.run.name) for s in some])


# -- warnings --------------------------------------------------------------------------------------


def warnings_of(
    found: Comparison, best: Row | None, classes: dict[str, Any] | None
) -> tuple[str, ...]:
    """The warnings on the runs of a group; ``classes`` has the metric by class."""
    return _of_runs(found) + _of_classes(found, best, classes)


def _of_runs(found: Comparison) -> tuple[str, ...]:
    texts = []
    unfinished = [s for s in found.rows if not s.run.is_final]
    compared = ", and it is not compared" if len(found.rows) > 1 else ""
    for s in unfinished[:MAX_NAMED]:
        texts.append(
            f"{name(s.run.name)} is not finished: {s.run.tested_round} of {s.run.total} rounds "
            f"tested{_missing_seeds(s)}. Its values are those so far{compared}."
        )
    if len(unfinished) > MAX_NAMED:
        texts.append(f"{len(unfinished) - MAX_NAMED} more runs are not finished.")
    for s in found.rows:
        failed = [seed for seed in s.run.counting if seed.failed]
        if s.run.status == "diverged":
            why = f": {failed[0].failed}" if failed else ""
            texts.append(f"{name(s.run.name)} diverged{why}.".replace("..", "."))
    rounds = {s.run.total for s in found.rows if s.run.is_final and not s.run.yardstick}
    if len(rounds) > 1 and not any("rounds" in s.run.values for s in found.rows):
        texts.append(
            f"The runs have different numbers of rounds ({', '.join(map(str, sorted(rounds)))}); "
            "each is judged after its last one."
        )
    if len(found.competing) > 2 and found.chosen_on == "test":
        texts.append(
            "The best of several is picked by the test data here, which flatters it a little; "
            "--validation 0.1 picks it on other data."
        )
    return tuple(texts)


def _of_classes(
    found: Comparison, best: Row | None, classes: dict[str, Any] | None
) -> tuple[str, ...]:
    """Classes of which the best model gets no test sample right."""
    if best is None or classes is None or best.run.headline == "personal":
        return ()
    values = classes["values"][found.best or 0] or ()
    lost = [c for c, v in zip(classes["classes"], values, strict=False) if v == 0]
    if not lost or math.isnan(best.run.last.mean):
        return ()
    named = ", ".join(lost[:MAX_NAMED]) + (
        f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
    )
    noun = "class" if len(lost) == 1 else "classes"
    every = "" if best.run.last.n == 1 else ", in every seed"
    return (
        f"{name(best.run.name)} gets no test sample of the {noun} {named} right{every}. See the "
        "chart by class; --class-weights balanced gives rare classes more weight.",
    )


def _missing_seeds(standing: Row) -> str:
    wanted = list(standing.run.settings["seeds"])
    have = len(standing.run.counting)
    return f", {have} of {len(wanted)} seeds" if have < len(wanted) else ""
