"""A model or setting is never chosen on the test set."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import kedge
from kedge.data.datasets import load
from kedge.engines.device import resolve_device
from kedge.errors import KedgeError
from kedge.history.compare import lead
from kedge.report import tables
from kedge.runs import train
from kedge.runs.build import simulation
from kedge.runs.grid import combine
from kedge.runs.planning import PLANNING
from kedge.runs.validation import RoundChoice, leader
from kedge.settings import Config, ConfigError

FAST = {"clients": 5, "rounds": 6, "seeds": (0, 1), "steps": 3, "engine": "vector"}
VALID = FAST | {"validation": 0.2}


def plain(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def test_patience_without_validation_says_what_to_type() -> None:
    with pytest.raises(
        ConfigError, match=r"patience = 3 needs validation data .* --validation 0.1"
    ):
        Config(patience=3)


def test_choice_keeps_the_first_of_equal_rounds_and_ignores_nan() -> None:
    choice = RoundChoice("validation", "loss", higher_is_better=False, patience=3)
    values = [math.nan, 2.0, 1.0, 1.0, math.nan]
    seen = [
        choice.see({"round": i, "validation": {"loss": value}}) for i, value in enumerate(values, 1)
    ]
    assert seen == [False, True, True, False, False]
    assert (choice.round, choice.value, choice.tests_since) == (3, 1.0, 2)
    assert choice.would_end({"round": 6, "validation": {"loss": 1.5}})
    assert not choice.would_end({"round": 6, "validation": {"loss": 0.5}})
    assert not choice.would_end({"round": 6})


def test_the_metric_on_validation_rows_by_hand(tmp_path: Path) -> None:
    """The saved weights, applied to the held-out rows, give what the records say."""
    result = kedge.run("fedavg", out=tmp_path / "run", **VALID)

    for i, seed in enumerate((0, 1)):
        sim = simulation(result.config, load("digits"), seed, resolve_device("cpu"), PLANNING)
        rows = torch.cat(sim.federation.validation)
        assert len(rows) > 100
        batch = sim.federation.clean(rows)
        best = result.best_rounds[i]
        for name, number in (("model", 6), ("best", best)):
            module = result.models[i] if name == "model" else result.best_models[i]
            saved = load_file(tmp_path / "run" / f"seed-{seed}" / f"{name}.safetensors")
            assert all(torch.equal(saved[n], v) for n, v in module.state_dict().items())
            with torch.no_grad():
                right = (module(batch.x).argmax(1) == batch.y).double().mean()
            record = next(r for r in result.records[i] if r["round"] == number)
            assert record["validation"]["accuracy"] == pytest.approx(100 * float(right))
        values = [r["validation"]["accuracy"] for r in result.records[i]]
        assert best == 1 + int(np.argmax(values))


def test_the_summary_says_what_was_chosen_and_on_which_data(tmp_path: Path) -> None:
    result = kedge.run("fedavg", out=tmp_path / "run", **VALID)
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["chosen_on"] == "validation data"
    assert found["best_round"] == result.best_rounds
    at_best = [
        run[number - 1]["accuracy"]
        for run, number in zip(result.records, result.best_rounds, strict=True)
    ]
    assert found["chosen"]["values"] == at_best
    without = kedge.run("fedavg", out=tmp_path / "plain", **FAST)
    assert without.best_rounds is without.validation is without.chosen is None
    assert "chosen_on" not in without.to_dict()
    assert not list((tmp_path / "plain").rglob("best.safetensors"))


def test_early_stopping_ends_each_seed_by_itself() -> None:
    """A stopped seed has the first records of a run without patience, and the rest as well."""
    settings = VALID | {"rounds": 30, "lr": 0.5, "seeds": (0, 1, 2)}
    straight = kedge.run("fedavg", **settings)
    stopped = kedge.run("fedavg", patience=3, **settings)
    lengths = [len(run) for run in stopped.records]
    assert len(set(lengths)) > 1, "the seeds should stop at different rounds"
    assert max(lengths) < 30
    for whole, cut, best in zip(
        straight.records, stopped.records, stopped.best_rounds, strict=True
    ):
        assert len(cut) == best + 3
        assert cut[-1]["stopped"] is True
        assert plain(cut[:-1]) == plain(whole[: len(cut) - 1])
        last = plain(whole[: len(cut)])[-1]  # a last round has more metrics
        assert {k: v for k, v in plain(cut)[-1].items() if k in last} == last
    assert stopped.array().shape == (3, max(lengths))
    assert stopped.rounds.tolist() == list(range(1, max(lengths) + 1))
    assert stopped.last.values == tuple(run[-1]["accuracy"] for run in stopped.records)
    assert stopped.stopped_early
    assert not straight.stopped_early
    with Console(width=150, file=io.StringIO()) as screen:
        screen.print(tables.results_table([stopped]))
    text = screen.file.getvalue()
    assert f"stopped early, round {min(lengths)}–{max(lengths)}" in text
    assert "Stopped early: after 3 tests" in text
    short = int(np.argmin(lengths))
    assert (stopped.array()[short, lengths[short] :] == stopped.last.values[short]).all()
    assert stopped.top5_mean.values[short] == pytest.approx(
        np.mean(sorted(r["accuracy"] for r in stopped.records[short])[-5:])
    )


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_an_interrupted_run_keeps_the_best_weights_and_the_counter(
    engine: str, tmp_path: Path
) -> None:
    settings = VALID | {"rounds": 30, "lr": 0.5, "patience": 3, "engine": engine}
    straight = kedge.run("fedavg", out=tmp_path / "straight", **settings)
    out, count, resume = tmp_path / "cut", [0], False

    def fail(seed: int, record: dict) -> None:
        count[0] += 1
        if count[0] in (3, 8):
            raise KeyboardInterrupt

    for _ in range(5):
        try:
            resumed = kedge.run("fedavg", out=out, resume=resume, watch=fail, **settings)
            break
        except KeyboardInterrupt:
            resume = (out / "config.toml").exists()
    assert count[0] > 8
    for i, seed in enumerate((0, 1)):
        assert plain(straight.records[i]) == plain(resumed.records[i])
        for name in ("best", "model", "checkpoint"):
            one, other = (
                load_file(folder / f"seed-{seed}" / f"{name}.safetensors")
                for folder in (tmp_path / "straight", out)
            )
            assert set(one) == set(other)
            assert all(torch.equal(one[n], other[n]) for n in one)
    ends = sorted(straight.last_rounds)
    assert f"{ends[0]} to {ends[1]} of 30 rounds" in kedge.load(out).summary
    again = kedge.run("fedavg", out=out, resume=True, **settings)  # it knows that it stopped
    assert [plain(r) for r in again.records] == [plain(r) for r in straight.records]
    for one, other in zip(again.best_models, straight.best_models, strict=True):
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("method", ["scaffold", "ccvr(samples=20, steps=20)"])
@pytest.mark.parametrize("more", [{}, {"eval_every": 3}, {"validation": 0.2}])
def test_an_extended_run_equals_a_long_one(method: str, more: dict, tmp_path: Path) -> None:
    """CCVR changes the head after the last round: the longer run must not see that."""
    settings = {"clients": 4, "seeds": (0, 1), "steps": 2, "engine": "loop", **more}
    kedge.run(method, out=tmp_path / "grown", rounds=2, **settings)
    before = (tmp_path / "grown" / "seed-0" / "model.safetensors").read_bytes()
    grown = kedge.run(method, out=tmp_path / "grown", rounds=5, resume=True, **settings)
    whole = kedge.run(method, out=tmp_path / "whole", rounds=5, **settings)
    for name in ("model", "checkpoint", *(["best"] if more.get("validation") else [])):
        for seed in (0, 1):
            one, other = (
                load_file(tmp_path / folder / f"seed-{seed}" / f"{name}.safetensors")
                for folder in ("grown", "whole")
            )
            assert all(torch.equal(one[n], other[n]) for n in other)
    assert [plain(r) for r in grown.records] == [plain(r) for r in whole.records]
    assert before != (tmp_path / "grown" / "seed-0" / "model.safetensors").read_bytes()
    config = (tmp_path / "grown" / "config.toml").read_text()
    assert "rounds = 5\n" in config
    assert json.loads((tmp_path / "grown" / "result.json").read_text())["config"]["rounds"] == 5
    with pytest.raises(KedgeError, match="was started with 5 rounds, and 3 are fewer"):
        kedge.run(method, out=tmp_path / "grown", rounds=3, resume=True, **settings)


def test_sweeps_choose_by_validation() -> None:
    """The choice is by the best validation value, not by the test set."""
    settings = combine({"lr": [0.02, 0.5]}, flags=VALID)
    swept = train.experiment("sweep", train.setting_jobs(settings))
    for result in swept.results:  # turn the test set against it
        for seed in result.seeds:
            tests = seed.columns.named["accuracy"].values
            for i, value in enumerate(seed.columns.named["validation.accuracy"].values):
                tests[i] = -value
    scores = [result.validation.mean for result in swept.results]
    assert scores[0] != scores[1]
    assert swept.results.index(leader(swept.results)) == int(np.argmax(scores))
    assert lead(swept.results)[1] == "validation"
    assert leader(swept.results).values == {"lr": [0.02, 0.5][int(np.argmax(scores))]}
    assert leader(swept.results).name == f"lr={[0.02, 0.5][int(np.argmax(scores))]:g}"


def test_unseen_clients_test_the_global_model() -> None:
    result = kedge.run("fedavg", unseen=0.4, **FAST)
    assert result.unseen.n == 2

    sim = simulation(result.config, load("digits"), 0, resolve_device("cpu"), PLANNING)
    batch = sim.federation.clean(sim.federation.unseen)
    with torch.no_grad():
        right = (result.models[0](batch.x).argmax(1) == batch.y).double().mean()
    assert result.records[0][-1]["unseen"]["accuracy"] == pytest.approx(100 * float(right))


def test_pooled_data_are_a_yardstick_and_do_not_lead() -> None:
    """One client with all rows, as many steps as three clients of a round take together."""
    results = kedge.compare(["fedavg", "fedprox"], pooled=True, per_round=3, **FAST)
    assert [r.name for r in results] == ["fedavg", "fedprox", "pooled data"]
    pooled = results[-1]
    assert pooled.last.mean > results[0].last.mean
    assert leader(results) in results[:2]
    assert pooled.to_dict()["yardstick"] == "pooled data"
    # by hand: plain SGD in 9 steps a round on all rows

    config = pooled.config
    sim = simulation(config, load("digits"), 0, resolve_device("cpu"), PLANNING, pooled=True)
    assert sim.federation.sizes == [len(load("digits").y_train)]
    assert sim.session.workload.work.steps_for(sim.federation.sizes[0]) == 9
    federated = simulation(config, load("digits"), 0, resolve_device("cpu"), PLANNING)
    pairs = zip(sim.weights.params.values(), federated.weights.params.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_personal_models_of_the_best_round_are_kept(tmp_path: Path) -> None:
    """They give the accuracy that the records have for the best round, client by client."""
    settings = VALID | {"seeds": (0,), "lr": 1.0, "rounds": 8}
    result = kedge.run("fedper", out=tmp_path / "run", **settings)
    [best] = result.best_rounds
    assert best < 8, "the last round should not be the best"
    run = kedge.load(tmp_path / "run", which="best")
    sim = simulation(result.config, load("digits"), 0, resolve_device("cpu"), PLANNING)
    for k, name in enumerate(run.clients):
        module, batch = run.personal(name).module, sim.federation.clean(sim.federation.held_out[k])
        right = (module(batch.x).argmax(1) == batch.y).float().mean()
        assert 100 * float(right) == pytest.approx(result.records[0][best - 1]["per_personal"][k])
    again = kedge.run("fedper", out=tmp_path / "cut", **settings | {"rounds": best + 1})
    assert again.best_rounds == [best]
    kedge.run("fedper", out=tmp_path / "cut", resume=True, **settings)
    files = [tmp_path / name / "seed-0" / "best_personal.safetensors" for name in ("run", "cut")]
    one, other = (load_file(file) for file in files)
    assert all(torch.equal(one[name], other[name]) for name in one)
