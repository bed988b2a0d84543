"""What the numbers say, in plain sentences: who wins, by how much, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kedge.report.page.standings import (
    Standing,
    gain_over,
    leader,
    on_validation,
    ranked,
)
from kedge.report.page.warnings import warnings_of
from kedge.report.page.wording import (
    MAX_NAMED,
    difference,
    interval_text,
    name,
    p_text,
    rounds_text,
    seeds_text,
    times,
    value,
    what,
)
from kedge.runs.significance import LEVEL, Paired


@dataclass(frozen=True)
class Verdict:
    """The first sentence, those that follow, and warnings."""

    lead: str
    more: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def verdict(
    found: Sequence[Standing],
    clients: Sequence[dict[str, object]] | None = None,
    is_sweep: bool = False,
    classes: dict[str, Any] | None = None,
) -> Verdict:
    """The verdict on the runs of a group; ``clients`` has who gains and loses, by run, ``classes``
    the metric by class. The settings of a sweep are compared with the best one."""
    final = [s for s in found if s.is_final and not s.source.yardstick]
    best = found[0] if len(found) == 1 else leader(found)
    warnings = warnings_of(found, best, classes)
    if len(found) == 1:
        return Verdict(_alone(found[0]), tuple(_facts(found[0])), warnings)
    if found[0].source.metric.higher_is_better is None:
        return Verdict(_no_direction(found[0]), (), warnings)
    if best is None:
        return Verdict(_so_far(found), (), warnings)
    if math.isnan(best.last.mean):
        why = "diverged" if best.status == "diverged" else "lack a value of the metric"
        return Verdict(f"All runs {why}, so nothing can be said.", (), warnings)
    if len(final) == 1:
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


def _winner(found: Sequence[Standing], best: Standing) -> str:
    first, metric = found[0], best.source.metric
    reach = f"{value(metric, best.last.mean)} {what(best)} after {rounds_text(best)}"
    tested = [s for s in found if s.gain is not None and not s.source.yardstick]
    if best is first:
        clear = [s for s in tested if _is_clear(s)]
        head = f"{name(first.source.name)}, the first method, is not beaten: {reach}"
        if tested and all(s.gain and _is_identical(s.gain) for s in tested):
            return f"{_names([first, *tested])} give the same numbers: {reach}."
        if first.last.n == 1:
            return f"{head}, with one seed. Another seed might say otherwise."
        if len(clear) == len(tested):
            return f"{head}, clearly better than the other{'s' if len(tested) > 1 else ''}."
        return f"{head} ({seeds_text(best.last.n)}). Not every difference is clear."
    gain = best.gain
    if gain is None:
        why = "it is not finished" if not first.is_final else "they share no seed"
        return (
            f"{name(best.source.name)} has the best mean, {reach}. It cannot be compared with "
            f"{name(first.source.name)}, the first method: {why}."
        )
    by = difference(metric, gain.mean)
    over = f"better than {name(first.source.name)}"
    if gain.n == 1:
        return (
            f"{name(best.source.name)} is ahead: {reach}, {by} {over}. With one seed that may be "
            "chance: nothing can be said about it."
        )
    if _is_identical(gain):
        both = f"{name(best.source.name)} and {name(first.source.name)}"
        return f"{both} give the same numbers: {reach}."
    evidence = f"95 % interval {interval_text(metric, gain)}, {seeds_text(gain.n)}"
    corrected = f", {p_text(best.p)}"
    if len(tested) > 1:
        corrected += f" after Holm's correction for {len(tested)} comparisons"
    if _is_clear(best):
        return f"{name(best.source.name)} is best: {reach}, {by} {over} ({evidence}{corrected})."
    has_best = "is best on the validation data" if on_validation(found) else "has the best mean"
    if best.status == "diverged" or gain.p is None:
        return f"{name(best.source.name)} {has_best}, {reach}, but seeds have diverged."
    if gain.is_clear:
        return (
            f"{name(best.source.name)} {has_best}: {reach}, {by} {over} ({evidence}). The "
            f"interval leaves out 0, but the gain does not stand the correction for "
            f"{len(tested)} comparisons ({p_text(best.p)})."
        )
    return (
        f"{name(best.source.name)} {has_best}, {reach}, but it cannot be told apart from "
        f"{name(first.source.name)}: {difference(metric, gain.mean, signed=True)} "
        f"({evidence}{corrected})."
    )


def _best_setting(found: Sequence[Standing], best: Standing) -> str:
    metric, count = best.source.metric, len([s for s in found if s.is_final])
    where = "validation data" if on_validation(found) else "test data"
    spread = "" if best.last.sd is None else f" ± {best.last.sd:.{metric.decimals}f}"
    lead = (
        f"{name(best.source.name)} is the best of {count} settings on the {where}: "
        f"{best.last.mean:.{metric.decimals}f}{spread} {metric.unit} {what(best)} after "
        f"{rounds_text(best)} ({seeds_text(best.last.n)})."
    ).replace("  ", " ")
    return lead if best.last.n > 1 else f"{lead} With one seed the next one may be as good."


def _like_best(found: Sequence[Standing], best: Standing) -> list[str]:
    """Which settings cannot be told apart from the best one, and how many are clearly worse."""
    tested = [s for s in found if s.gain is not None and s.p is not None]
    same = [s for s in tested if s.gain and _is_identical(s.gain)]
    close = [s for s in tested if s not in same and not _is_clear(s)]
    worse = [s for s in tested if _is_clear(s) and s.gain and s.gain.mean < 0]
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


def _is_clear(standing: Standing) -> bool:
    return standing.p is not None and standing.p < LEVEL


def _is_identical(gain: Paired) -> bool:
    return gain.n > 1 and gain.mean == 0.0 and gain.sd == 0.0


def _others(found: Sequence[Standing], best: Standing) -> list[str]:
    """How many are clearly better, clearly worse, or neither, than the first."""
    first = found[0]
    tested = [s for s in found if s.gain is not None and s.p is not None and not s.source.yardstick]
    rest = [s for s in tested if s is not best]
    if not rest:
        return []
    same = [s for s in rest if s.gain and _is_identical(s.gain)]
    if len(same) == len(tested):  # the first sentence says it
        return []
    better = [s for s in rest if _is_clear(s) and s.gain and s.gain.mean > 0]
    worse = [s for s in rest if _is_clear(s) and s.gain and s.gain.mean < 0]
    unclear = [s for s in rest if s not in same and not _is_clear(s)]
    base, found_sentences = name(first.source.name), []
    for some, one, many in (
        (better, f"is also clearly better than {base}", f"are also clearly better than {base}"),
        (worse, f"is clearly worse than {base}", f"are clearly worse than {base}"),
        (unclear, f"cannot be told apart from {base}", f"cannot be told apart from {base}"),
        (same, f"gives exactly the numbers of {base}", f"give exactly the numbers of {base}"),
    ):
        if some:
            found_sentences.append(f"{_names(some)} {one if len(some) == 1 else many}.")
    return found_sentences


def _runner_up(found: Sequence[Standing], best: Standing) -> list[str]:
    order = [s for s in ranked(found) if s.is_final and not s.source.yardstick]
    second = order[1] if len(order) > 2 else None
    if second is None or second is found[0] or math.isnan(second.last.mean):
        return []
    gap = gain_over(best, second)
    if gap is None:
        return []
    metric = best.source.metric
    if gap.mean < 0:
        ahead = difference(metric, gap.mean)
        return [
            f"{name(second.source.name)} comes second on the validation data; on the test data it "
            f"is {ahead} ahead."
        ]
    if gap.mean == 0.0 and not gap.sd:
        return [f"{name(second.source.name)} gives exactly its numbers."]
    if gap.low is None:
        return [f"{name(second.source.name)} comes second, {difference(metric, gap.mean)} behind."]
    sure = "" if gap.is_clear else ", so the two cannot be told apart"
    return [
        f"{name(second.source.name)} comes second, {difference(metric, gap.mean)} behind "
        f"(95 % interval {interval_text(metric, gap)}{sure})."
    ]


def _yardsticks(found: Sequence[Standing], best: Standing) -> list[str]:
    metric = best.source.metric
    sentences = []
    for s in found:
        if not s.source.yardstick or math.isnan(s.last.mean):
            continue
        gap = s.last.mean - best.last.mean
        gap = gap if metric.higher_is_better else -gap
        where = "short of it" if gap > 0 else "beyond it"
        sentences.append(
            f"Training on the pooled data of all clients reaches {value(metric, s.last.mean)}; "
            f"{name(best.source.name)} is {difference(metric, gap)} {where}."
        )
    return sentences


def _cost(found: Sequence[Standing], best: Standing) -> list[str]:
    first = found[0]
    base, own = first.mb_up + first.mb_down, best.mb_up + best.mb_down
    if best is first or not base or 0.95 < own / base < 1.05:
        return []
    rounds = "" if best.round == first.round else " in all its rounds"
    return [
        f"{name(best.source.name)} moves {times(own / base)} the bytes of "
        f"{name(first.source.name)}{rounds}."
    ]


def _clients(
    found: Sequence[Standing], best: Standing, clients: Sequence[dict[str, object]] | None
) -> list[str]:
    if clients is None or best is found[0]:
        return []
    counts = clients[list(found).index(best)]
    n, gain, lose = counts["n"], counts["gain"], counts["lose"]
    if not n or not (gain or lose):
        return []
    return [
        f"With {name(best.source.name)}, {gain} of {n} clients gain{_s(gain)} and {lose} "
        f"lose{_s(lose)} against {name(found[0].source.name)}."
    ]


def _s(number: object) -> str:
    """The ending of a verb: one gains, two gain."""
    return "s" if number == 1 else ""


def _facts(standing: Standing) -> list[str]:
    """What must be said beside the accuracy of imbalanced classes."""
    if not standing.beside:
        return []
    share = standing.seeds[0].last.get("imbalanced", 0.0)
    words = {"balanced_accuracy": ("balanced accuracy", 2, " %"), "auroc": ("AUROC", 3, "")}
    values = [
        f"{words[key][0]} {stat.mean:.{words[key][1]}f}{words[key][2]}"
        for key, stat in standing.beside.items()
    ]
    return [
        f"The largest class has {100 * share:.0f} % of the test samples, so accuracy alone says "
        f"little: {name(standing.source.name)} has {' and '.join(values)}."
    ]


def _alone(standing: Standing) -> str:
    metric, stat = standing.source.metric, standing.last
    if math.isnan(stat.mean):
        why = "diverged" if standing.status == "diverged" else "has no value of the metric"
        return f"{name(standing.source.name)} {why}, so nothing can be said."
    done = "reaches" if standing.is_final else "has reached"
    reach = (
        f"{name(standing.source.name)} {done} {value(metric, stat.mean)} {what(standing)} after "
        f"{rounds_text(standing)}"
    )
    interval = stat.interval()
    if interval is None:
        return f"{reach}, with one seed: how much another seed would differ is not known."
    low, high = (f"{v:.{metric.decimals}f}" for v in interval)
    return f"{reach}: mean of {stat.n} seeds, 95 % interval {low} to {high}."


def _no_direction(standing: Standing) -> str:
    return (
        f"Whether a high or a low {standing.source.metric.title} is better is not known, so "
        "nothing can be said about which run is better. Name the file that registers it: kedge "
        "report ... --load FILE.py"
    )


def _so_far(found: Sequence[Standing]) -> str:
    best = ranked(found)[0]
    return (
        f"No run is finished yet, so nothing can be said. So far {name(best.source.name)} is "
        f"ahead, with {value(best.source.metric, best.last.mean)} {what(best)} after "
        f"{rounds_text(best)}."
    )


def _names(some: Sequence[Standing]) -> str:
    if len(some) > MAX_NAMED:
        return f"{len(some)} others"
    texts = [name(s.source.name) for s in some]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
