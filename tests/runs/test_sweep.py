"""Seeds and settings side by side: the same results as one by one, tables, folders, mistakes."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file

import kedge
from kedge.core import tree
from kedge.errors import FieldError, KedgeError
from kedge.report import tables
from kedge.runs import train
from kedge.runs.grid import Setting, combine, read_words
from kedge.sim.fleet import Fleet

FAST = {"clients": 5, "rounds": 3, "engine": "vector"}


def read(result: kedge.Result) -> np.ndarray:
    return np.stack([result.array(name) for name in ("accuracy", "loss")])


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Execution many simulations every stack has that is made."""
    made: list[int] = []
    init = Fleet.__init__

    def counted(self, sims, strict=True):
        made.append(len(sims))
        init(self, sims, strict)

    monkeypatch.setattr(Fleet, "__init__", counted)
    return made


def swept_of(settings: list[Setting], out: Path | None = None, resume: bool = False, watch=None):
    """The results of a sweep, and how they were computed."""
    options = train.Options(watch)
    return train.experiment("sweep", train.setting_jobs(settings), out, resume, options)


# -- seeds ------------------------------------------------------------------------------------


def test_seeds_of_a_run_train_together_and_equal_runs_of_one_seed(stacks, tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    result = kedge.run(
        "scaffold", seeds=(0, 1, 2), out=tmp_path / "run",
        watch=lambda seed, record: seen.append((seed, record["round"])), **FAST,
    )  # fmt: skip
    assert stacks == [3]
    assert seen == [(seed, t) for t in (1, 2, 3) for seed in (0, 1, 2)]
    for i, seed in enumerate((0, 1, 2)):
        one = kedge.run("scaffold", seeds=(seed,), **FAST)
        np.testing.assert_allclose(read(one)[:, 0], read(result)[:, i], rtol=1e-5)
        assert one.partition_hash[0] == result.partition_hash[i]
        alone, together = (r.state_dict() for r in (one.models[0], result.models[i]))
        assert tree.gap(alone, together) < 1e-5
        files = {p.name for p in (tmp_path / "run" / f"seed-{seed}").iterdir()}
        assert files == {
            "partition.json", "metrics.jsonl", "checkpoint.safetensors", "model.safetensors",
            "scores.json", "clients.json", "state.json",
        }  # fmt: skip
    assert stacks == [3, 1, 1, 1]


def test_a_round_takes_its_share_of_the_time() -> None:
    begin = time.perf_counter()
    result = kedge.run("fedavg", seeds=(0, 1, 2), **FAST)
    passed = time.perf_counter() - begin
    assert 0 < result.array("seconds").sum() < passed


def test_chunk_limits_how_many_seeds_train_together(stacks) -> None:
    kedge.run("fedavg", seeds=(0, 1, 2), chunk=10, **FAST)
    assert stacks == [2, 1]
    kedge.run("fedavg", seeds=(0, 1), chunk=3, **FAST)
    assert stacks == [2, 1, 1, 1]


def test_ctrl_c_saves_all_seeds_and_they_go_on_together(tmp_path: Path) -> None:
    settings, out, count = FAST | {"rounds": 5, "seeds": (0, 1, 2)}, tmp_path / "run", [0]

    def interrupt(seed, record):
        count[0] += 1
        if count[0] == 5:  # in the middle of the second round
            os.kill(os.getpid(), signal.SIGINT)

    message = rf"stopped after round 2 of seeds 0, 1, 2. Resume with: --out {out} --resume"
    with pytest.raises(KedgeError, match=message):
        kedge.run("scaffold", out=out, watch=interrupt, **settings)
    for seed in (0, 1, 2):
        state = load_file(out / f"seed-{seed}" / "checkpoint.safetensors")
        assert int(state["round"]) == 2
    # as if the machine had gone down while the checkpoints of a round were written
    (out / "seed-1" / "checkpoint.safetensors").unlink()
    resumed = kedge.run("scaffold", out=out, resume=True, **settings)
    assert np.array_equal(read(resumed), read(kedge.run("scaffold", **settings)))


# -- settings ---------------------------------------------------------------------------------

GRID = {"lr": [0.05, 0.2], "fedprox.mu": [0.01, 0.5, 2.0]}


def test_settings_side_by_side_equal_their_runs(stacks) -> None:
    results = kedge.sweep("fedprox", GRID, seeds=(0, 1), **FAST)
    assert stacks == [12]
    assert [r.config.lr for r in results] == [0.05] * 3 + [0.2] * 3
    assert [r.config.method for r in results[:3]] == [
        "fedprox", "fedprox(mu=0.5)", "fedprox(mu=2.0)",
    ]  # fmt: skip
    for result in results[::2]:
        one = kedge.run(result.config.method, lr=result.config.lr, seeds=(0, 1), **FAST)
        np.testing.assert_allclose(read(result), read(one), rtol=1e-5)
    assert len({r.last.mean for r in results}) > 2


def test_what_differs_in_structure_trains_in_groups(stacks) -> None:
    grid = {"method": ["fedavg", "scaffold"], "batch": [16, 32], "epochs": [1.0, 2.0]}
    settings = combine(grid, flags=FAST | {"seeds": (0,), "rounds": 1})
    swept = swept_of(settings)
    assert stacks == [2, 2, 2, 2]
    assert swept.computed == "8 settings x 1 seed in 4 stacks of 10 lanes"
    one = kedge.run("scaffold", batch=16, epochs=2.0, seeds=(0,), **FAST | {"rounds": 1})
    [same] = [
        r for r in swept.results
        if (r.config.method, r.config.batch, r.config.epochs) == ("scaffold", 16, 2.0)
    ]  # fmt: skip
    np.testing.assert_allclose(read(same), read(one), rtol=1e-5)


def test_momentum_of_zero_is_another_computation(stacks) -> None:
    swept = swept_of(combine({"momentum": [0.0, 0.5, 0.9]}, flags=FAST | {"seeds": (0,)}))
    assert stacks == [1, 2]
    assert swept.computed == "3 settings x 1 seed in 1 stack of 5 lanes and 1 of 10"


def test_partitions_and_cohorts_are_lanes(stacks) -> None:
    grid = {"partition": ["iid", "dirichlet(0.5)"], "per_round": [3, 5]}
    results = kedge.sweep("fedavg", grid, seeds=(0,), **FAST)
    assert stacks == [4]
    one = kedge.run("fedavg", partition="dirichlet(0.5)", per_round=3, seeds=(0,), **FAST)
    np.testing.assert_allclose(read(results[2]), read(one), rtol=1e-5)


def test_a_setting_that_diverges_ends_alone() -> None:
    settings = combine({"lr": [0.1, 1e30]}, flags=FAST | {"seeds": (0, 1)})
    swept = swept_of(settings)
    good, bad = swept.results
    assert good.last.mean > 20
    assert math.isnan(bad.last.mean)
    assert bad.array().shape == (2, 3)
    rows = shown(swept)
    assert "best" in next(row for row in rows if row.startswith("0.1"))
    assert next(row for row in rows if row.startswith("1e+30")).endswith("diverged in round 1")
    assert json.loads(bad.to_json())["last"]["mean"] is None
    assert bad.values == {"lr": 1e30}


def shown(swept: train.Trained) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(tables.results_table(swept.results))
    return [line.strip() for line in console.file.getvalue().splitlines()]


def test_table_and_words() -> None:
    swept = swept_of(combine(GRID, flags={"method": "fedprox", "seeds": (0, 1)} | FAST))
    assert swept.computed == "6 settings x 2 seeds in 1 stack of 60 lanes"
    lines = shown(swept)
    at = next(i for i, line in enumerate(lines) if line.startswith("lr"))
    assert lines[at].split()[:4] == ["lr", "fedprox.mu", "accuracy", "%"]
    rows = lines[at + 1 : at + 7]
    assert [row.split()[:2] for row in rows] == [
        ["0.05", "0.01"], ["0.05", "0.5"], ["0.05", "2"], ["0.2", "0.01"], ["0.2", "0.5"],
        ["0.2", "2"],
    ]  # fmt: skip
    [marked] = [i for i, row in enumerate(rows) if row.endswith("best (test)")]
    means = [r.last.mean for r in swept.results]
    assert marked == means.index(max(means))
    assert str(swept.results[marked].last) in rows[marked]


# -- folders ----------------------------------------------------------------------------------


def test_every_setting_has_a_folder_and_a_stopped_sweep_goes_on(tmp_path: Path) -> None:
    settings = combine({"lr": [0.05, 0.2]}, flags=FAST | {"seeds": (0, 1)})
    straight = swept_of(settings)
    out, count = tmp_path / "grid", [0]

    def interrupt(job, seed, record):
        count[0] += 1
        if count[0] == 6:  # in the middle of the second round
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KedgeError, match=rf"after round 2 of seeds 0, 1. Resume with: --out {out}"):
        swept_of(settings, out, watch=interrupt)
    names = sorted(p.name for p in out.iterdir())
    assert names == ["experiment.json", "lr_0.05", "lr_0.2"]
    for name in names[1:]:
        for seed in (0, 1):
            assert (
                int(load_file(out / name / f"seed-{seed}" / "checkpoint.safetensors")["round"]) == 2
            )
    with pytest.raises(KedgeError, match="holds a sweep already. Continue it with --resume"):
        swept_of(settings, out)
    again = train.experiment("sweep", train.saved_jobs("sweep", out), out, resume=True)
    assert again.computed == "2 settings x 2 seeds in 1 stack of 20 lanes"
    for one, other in zip(straight.results, again.results, strict=True):
        assert np.array_equal(read(one), read(other))
        stored = json.loads((other.folder / "result.json").read_text())
        assert stored["last"]["mean"] == one.last.mean
        assert kedge.load(other.folder, seed=1).model is not None
    # complete settings need no lanes; new ones may be added
    more = combine({"lr": [0.05, 0.2, 0.4]}, flags=FAST | {"seeds": (0, 1)})
    grown = swept_of(more, out, resume=True)
    assert grown.computed == "3 settings x 2 seeds in 1 stack of 10 lanes"
    assert np.array_equal(read(grown.results[0]), read(straight.results[0]))
    done = swept_of(more, out, resume=True)
    assert done.computed == "3 settings x 2 seeds, all of them complete before"
    # and each is a run like any other
    plain = kedge.run("fedavg", out=out / "lr_0.2", resume=True, lr=0.2, seeds=(0, 1), **FAST)
    assert np.array_equal(read(plain), read(straight.results[1]))


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(KedgeError, match="holds no sweep to resume"):
        kedge.sweep("fedavg", {"lr": [0.1, 0.2]}, out=tmp_path, resume=True)


# -- grids ------------------------------------------------------------------------------------


def test_words_are_read_by_type() -> None:
    words = [
        "lr=0.01,1e-1", "batch=16,32", "seeds=0,1,2", "partition=iid,dirichlet(0.1, 2)",
        "nesterov=true,false", "fedprox.mu=0.1,1", "per-round=3",
        "method=fedavg,moon:fedcog+fedprox",
    ]  # fmt: skip
    assert read_words(words) == {
        "lr": [0.01, 0.1],
        "batch": [16, 32],
        "seeds": [(0, 1, 2)],
        "partition": ["iid", "dirichlet(0.1, 2)"],
        "nesterov": [True, False],
        "fedprox.mu": [0.1, 1],
        "per_round": [3],
        "method": ["fedavg", "moon:fedcog+fedprox"],
    }


def test_a_grid_is_the_product_and_shows_what_differs() -> None:
    grid = read_words(["rounds=7", "fedprox.mu=0.1,1", "moon.tau=0.5", "lr=0.1,0.2"])
    settings = combine(grid, flags={"method": "moon:fedcog+fedprox"})
    assert [s.name for s in settings] == [
        "fedprox.mu=0.1 lr=0.1", "fedprox.mu=0.1 lr=0.2", "fedprox.mu=1 lr=0.1",
        "fedprox.mu=1 lr=0.2",
    ]  # fmt: skip
    assert {s.config.rounds for s in settings} == {7}
    method = kedge.parse(settings[2].config.method)
    assert method == kedge.parse("moon:fedcog(tau=0.5)+fedprox(mu=1.0)")
    both = combine({"seeds": [0, 1]})  # a list by itself
    assert [s.config.seeds for s in both] == [(0, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lrr=0.1"], "no setting 'lrr'. Did you mean 'lr'"),
        (["fedprx.mu=1"], "no part 'fedprx'. Did you mean 'fedprox'"),
        (["moon.tua=1"], "no field of moon 'tua'. Did you mean 'tau'"),
        (["lr="], "lr has no value; write for example lr=0.1"),
        (["fedprox.mu="], "fedprox.mu has no value; write for example fedprox.mu=0.01"),
        (["seeds="], "seeds has no value; write for example seeds=0,1,2"),
        (["lr=0.1,fast"], "lr = 'fast' is not a finite number"),
        (["fedprox.mu=0.1,big"], "fedprox.mu = 'big' is not a finite number"),
        (["fedprox.mu=-1,1"], "fedprox.mu = -1 is below 0"),
        (["fedprox.mu=(1"], "cannot be read; write values with commas between"),
        (["lr=0.1,0.2,0.1"], "lr has the value 0.1 twice"),
        (["lr=0.1", "lr=0.2"], "lr is given twice"),
        (["lr"], "expected key=value,value, found 'lr'"),
        (
            ["scaffold.eta_g=1"],
            r"scaffold is not in the method fedprox; write --method fedprox\+sca",
        ),
        ([], "there is nothing to sweep; name a setting and its values: lr=0.01,0.1"),
    ],
)
def test_mistakes_in_a_grid(words: list[str], message: str) -> None:
    with pytest.raises(KedgeError, match=message):
        combine(read_words(words), flags={"method": "fedprox"})


def test_mistakes_in_python() -> None:
    for values in (0.1, "0.1", {"a": 1}):
        with pytest.raises(FieldError, match="lr: give a list of values"):
            kedge.sweep("fedavg", {"lr": values})
    with pytest.raises(KedgeError, match="partition=central: central with 5 clients"):
        kedge.sweep("fedavg", {"partition": ["iid", "central"]}, seeds=(0,), **FAST)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from kedge.cli import main

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kedge", "sweep", *words])
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        return code, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text('rounds = 2\nclients = 4\nengine = "vector"\n')
    code, out, _ = call("a.toml", "lr=0.1,0.2", "--seeds", "0,1", "--out", "grid", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["computed"] == "2 settings x 2 seeds in 1 stack of 16 lanes"
    assert [row["setting"] for row in found["results"]] == [{"lr": 0.1}, {"lr": 0.2}]
    assert found["results"][1]["config"]["rounds"] == 2
    code, out, _ = call("--out", "grid", "--resume")
    assert code == 0
    assert any(line.split()[:3] == ["lr", "accuracy", "%"] for line in out.splitlines())
    code, _, err = call("lr=0.1,0.2", "--resume")
    assert code == 2
    assert "--resume needs the folder of the sweep" in err
    code, _, err = call("fedprox.mue=1,2", "--method", "fedprox")
    assert code == 2
    assert "no field of fedprox 'mue'. Did you mean 'mu'?" in err
