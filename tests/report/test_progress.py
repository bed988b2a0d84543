"""Progress: units that fit, and a remaining time that holds."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from kedge.cli.progress import MAX_SILENCE_S, Pace, Remaining, Watcher
from kedge.settings import Config


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def estimates(
    total: int, rounds: int, seeds: int, seconds: list[float], plan: float = 0.0, first: int = 0
) -> Iterator[tuple[float, float | None]]:
    """Real and estimated remaining seconds after each round of seeds that train in lockstep."""
    pace, now = Pace(total, 0.0), plan
    for number, each in enumerate(seconds, first + 1):
        now += each
        for seed in range(seeds):
            pace.ended(now, "a", seed, number, rounds, seeds, each / seeds)
        yield sum(seconds[number - first :]), pace.left
    assert pace.done == rounds * seeds


@pytest.mark.parametrize("seeds", [1, 3])
def test_equal_rounds_are_foretold_exactly(seeds: int) -> None:
    for real, guess in estimates(20 * seeds, 20, seeds, [2.0] * 20, plan=30.0):
        assert guess == pytest.approx(real)


def test_a_first_round_that_compiles_counts_only_until_there_is_another() -> None:
    found = list(estimates(20, 20, 1, [40.0] + [2.0] * 19))
    assert found[0][1] == pytest.approx(19 * 40.0)
    for real, guess in found[1:]:
        assert guess == pytest.approx(real)


def test_the_estimate_changes_slowly_where_rounds_vary() -> None:
    """A test every fifth round takes nine times as long as training."""
    seconds = [9.0 if number % 5 == 0 else 1.0 for number in range(1, 101)]
    found = list(estimates(100, 100, 1, seconds))[10:-10]
    for real, guess in found:
        assert guess == pytest.approx(real, rel=0.35)
    for (_, before), (_, after) in pairwise(found):
        assert abs(after - before) < 0.2 * before


def test_rounds_that_were_done_before_are_not_waited_for() -> None:
    for real, guess in estimates(20, 20, 1, [2.0] * 5, first=15):
        assert guess == pytest.approx(real)


def test_each_method_of_a_comparison_has_its_own_pace() -> None:
    """Two quick methods, one of which ends early, then a slow one; a fourth is to come."""
    pace, now = Pace(40, 0.0), 0.0
    for name, each, rounds in (("a", 1.0, 10), ("b", 1.0, 4), ("c", 5.0, 6)):
        for number in range(1, rounds + 1):
            now += each
            pace.ended(now, name, 0, number, 10, 1, each)
        if name == "a":
            assert pace.left == pytest.approx(30.0)
    assert pace.done == 26
    assert pace.seconds == pytest.approx(5.0)
    assert pace.left == pytest.approx(4 * 5.0 + 10 * 44.0 / 20)


def test_nothing_is_known_before_the_first_round() -> None:
    pace = Pace(10, 0.0)
    assert (pace.left, pace.seconds, pace.done) == (None, 0.0, 0)


def lines(watcher: Watcher) -> list[str]:
    return watcher.console.export_text().splitlines()


def plain(total: int, clock: Clock, **more: Any) -> Watcher:
    console = Console(width=200, record=True, file=io.StringIO())
    return Watcher(total, console=console, clock=clock, **more)


def record(number: int, **more: Any) -> dict[str, Any]:
    return {"round": number, "accuracy": 50.0, "loss": 1.0, "train_loss": 1.0, **more}


def test_plain_lines_have_a_pace_in_fitting_units_and_an_eta() -> None:
    clock = Clock()
    watcher = plain(10, clock)
    for number in range(1, 11):
        clock.now += 12.34
        watcher.show(Config(rounds=10, seeds=(0,)), 0, record(number, seconds=12.34))
    found = lines(watcher)
    assert len(found) == 6  # the first after ten seconds
    assert found[1].endswith("round 2/10  accuracy 50.00 %  loss 1.000  12.3 s/round  ETA 1:39")
    assert found[-1].endswith("12.3 s/round  ETA 0:00")


def test_a_line_is_printed_after_a_minute_of_silence() -> None:
    clock = Clock()
    watcher = plain(1000, clock)
    for number in range(1, 5):
        clock.now += MAX_SILENCE_S / 2
        watcher.show(Config(rounds=1000, seeds=(0,)), 0, record(number, seconds=30.0))
    first, line = lines(watcher)
    assert "round 1/1000" in first
    assert "round 3/1000" in line
    assert line.endswith("30 s/round  ETA 8:18:30")


def test_quick_rounds_are_counted_per_second() -> None:
    clock = Clock()
    watcher = plain(4, clock)
    for number in (1, 2):
        for seed in (0, 1):
            clock.now += 0.01
            watcher.show(Config(rounds=2, seeds=(0, 1)), seed, record(number, seconds=0.01))
    assert [line.split("  ")[-2] for line in lines(watcher)] == ["100 rounds/s"] * 4


def test_a_comparison_says_which_of_how_many() -> None:
    watcher = plain(4, Clock(), names=["fedavg", "scaffold"])
    for method in ("fedavg", "scaffold"):
        watcher.show(Config(rounds=1, seeds=(0,), method=method), 0, record(1))
    assert [line.split("  ")[0] for line in lines(watcher)] == [
        "fedavg (1 of 2)", "scaffold (2 of 2)",
    ]  # fmt: skip


def test_methods_that_were_done_before_are_not_waited_for() -> None:
    """A comparison is resumed, and only its last method has rounds to come."""
    clock = Clock()
    watcher = plain(30, clock, names=["fedavg", "scaffold", "pooled data"])
    for number in range(1, 11):
        clock.now += 2
        watcher.show(
            Config(rounds=10, seeds=(0,)), 0, record(number, seconds=2.0), name="pooled data"
        )
    assert lines(watcher)[-1].endswith("ETA 0:00")


def test_settings_of_a_sweep_are_one_run() -> None:
    """Two settings in lockstep, of four rounds and two seeds."""
    clock = Clock()
    watcher = plain(16, clock)
    for number in range(1, 5):
        clock.now += 8.0
        for setting in ("lr=0.1", "lr=0.2"):
            for seed in (0, 1):
                config = Config(rounds=4, seeds=(0, 1))
                watcher.show(config, seed, record(number, seconds=2.0), setting)
        assert watcher.pace.left == pytest.approx(8.0 * (4 - number))
    assert watcher.pace.done == 16


def test_the_live_bar_counts_down_between_rounds() -> None:
    clock = Clock()
    console = Console(width=120, force_terminal=True, file=io.StringIO())
    watcher = Watcher(10, console=console, clock=clock)
    remaining = Remaining(clock)
    assert str(remaining.render(watcher.bar.tasks[0])) == ""
    clock.now += 10.0
    watcher.show(Config(rounds=10, seeds=(0,)), 0, record(1, seconds=10.0))
    assert str(remaining.render(watcher.bar.tasks[0])) == "ETA 1:30"
    clock.now += 4.0
    assert str(remaining.render(watcher.bar.tasks[0])) == "ETA 1:26"
    assert watcher.bar.tasks[0].completed == 1


def test_the_bar_has_speed_and_time_in_eighty_columns() -> None:
    clock = Clock()
    console = Console(width=80, force_terminal=True, file=io.StringIO(), record=True)
    watcher = Watcher(300, console=console, clock=clock, names=["fedprox(mu=0.1)", "scaffold"])
    clock.now += 10.0
    config = Config(rounds=150, seeds=(0,), method="fedprox(mu=0.1)")
    watcher.show(config, 0, record(1, seconds=12.34))
    console.print(watcher.bar.get_renderable())
    [line] = console.export_text().splitlines()
    assert "ETA 55:39 12.3 s/round fedprox(mu=0.1) (1 of 2)  1/150" in line


def test_the_bar_is_gone_while_a_table_is_printed() -> None:
    file = io.StringIO()
    console = Console(width=80, file=file, force_terminal=True)
    with Watcher(3, console=console) as watcher:
        with watcher.paused():
            assert not watcher.bar.live.is_started
            file.truncate(0)
            watcher.bar.refresh()
            assert file.getvalue().strip("\0") == ""
        assert watcher.bar.live.is_started
    assert not watcher.bar.live.is_started
