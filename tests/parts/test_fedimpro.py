"""FedImpro: every option, and faults that its identities must find."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kedge.check.identities.fedimpro import CUT, _features, _upper
from kedge.check.laws import LAWS
from kedge.check.problems import DOUBLE, images, step_view
from kedge.core import rng, tree
from kedge.core.method import parse
from kedge.core.part import Mean, Sum, parts
from kedge.errors import FieldError, IncompatibleError
from kedge.parts.fedimpro import FedImpro
from kedge.runs.train import advise
from kedge.settings import Config
from kedge.sim.simulation import Simulation
from tests.parts.faults import is_found

# Each of these has one fault; the comment names it, and an identity must find it.


@dataclass(frozen=True)
class BySize(FedImpro):
    def reply(self, v, weights):  # statistics weighted as the model is
        kept, uploads = super().reply(v, weights)
        return kept, {n: Mean(x.value) for n, x in uploads.items()}

    def server_step(self, r, weights):
        b = self.beta_g
        return weights, tree.map(lambda old, x: b * old + (1 - b) * x, r.server, r.uploads)


@dataclass(frozen=True)
class MomentumTurned(FedImpro):
    def server_step(self, r, weights):  # 1 - beta_g on the old value
        return FedImpro.server_step(replace(self, beta_g=1 - self.beta_g), r, weights)


@dataclass(frozen=True)
class ClientMomentumTurned(FedImpro):
    def observe(self, v, params, batch, out):  # 1 - beta_m on the old value
        return FedImpro.observe(replace(self, beta_m=1 - self.beta_m), v, params, batch, out)


@dataclass(frozen=True)
class NoMomentum(FedImpro):
    def _momentum(self, spec):  # the code's momentum is left out, as if D were large
        return 0.0 if isinstance(self.beta_m, str) else self.beta_m


@dataclass(frozen=True)
class MomentumByChannels(FedImpro):
    def _momentum(self, spec):  # the number of statistics in place of the activations
        return 1 - self._sizes(spec)[0] / 5000 if isinstance(self.beta_m, str) else self.beta_m


@dataclass(frozen=True)
class Biased(FedImpro):
    def observe(self, v, params, batch, out):  # divides by n, not by n - 1
        new = super().observe(v, params, batch, out)
        n = F.one_hot(batch.y, v.task.outputs).sum(0).to(new["scale"])[:, None]
        factor = torch.where(n > 1, ((n - 1).clamp_min(0) / n.clamp_min(1)).sqrt(), 1.0)
        return new | {"scale": factor * new["scale"]}


@dataclass(frozen=True)
class Forgets(FedImpro):
    def observe(self, v, params, batch, out):  # zeros for the classes that the batch lacks
        new = super().observe(v, params, batch, out)
        n = F.one_hot(batch.y, v.task.outputs).sum(0)[:, None]
        return tree.map(lambda x: torch.where(n > 0, x, 0.0), new)


@dataclass(frozen=True)
class Afterwards(FedImpro):
    def observe(self, v, params, batch, out):  # features of the new weights
        return super().observe(v, params, batch, v.forward(params, batch.x))


@dataclass(frozen=True)
class NoRoot(FedImpro):
    def inject(self, v, batch):  # draws with the variance as deviation
        if self.spread == "std":
            return super().inject(v, batch)
        labels = self._labels(v, batch)
        eps = rng.normal(v.key, (len(labels), *self._sizes(v.spec)), v.spec.dtype)
        mean, scale = v.sent["mean"][labels], v.sent["scale"][labels]
        return self.cut, mean[..., None] + scale[..., None] * eps


@dataclass(frozen=True)
class Summed(FedImpro):
    def term(self, v, params, batch, out):  # the sum over the drawn rows, not their mean
        return super().term(v, params, batch, out) * len(out.mine.logits)


@dataclass(frozen=True)
class Late(FedImpro):
    def _weight(self, v):  # the ramp starts at 1/ramp
        return super()._weight(v) + self.weight / max(self.ramp, 1)


@dataclass(frozen=True)
class Unshuffled(FedImpro):
    def _labels(self, v, batch):  # one class after the other: the labels of other rows' means
        return super()._labels(v, batch).sort().values


@dataclass(frozen=True)
class ThroughTheCut(FedImpro):
    def term(self, v, params, batch, out):  # real features scored as drawn ones: no constants
        live = F.cross_entropy(out.logits, batch.y) - F.cross_entropy(out.logits, batch.y).detach()
        return super().term(v, params, batch, out) + self._weight(v) * live


@dataclass(frozen=True)
class WithinOnly(FedImpro):
    def reply(self, v, weights):  # pooling forgets the spread between clients
        kept, up = super().reply(v, weights)
        if self.count_weighted:
            n = v.label_counts[:, None]
            up = up | {"second": Sum(n * v.local["scale"] ** 2)}
        return kept, up


FAULTY = [
    BySize, MomentumTurned, ClientMomentumTurned, NoMomentum, MomentumByChannels, Biased, Forgets,
    Afterwards, NoRoot, Summed,
    Late, Unshuffled, ThroughTheCut, WithinOnly,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cls", FAULTY, ids=lambda c: c.__name__)
def test_a_fault_is_found_by_an_identity(cls: type[FedImpro]) -> None:
    assert is_found(cls())


# -- options on both engines ----------------------------------------------------------------------

OPTIONS = [
    "fedimpro:official",
    "fedimpro:paper",
    "fedimpro(draws_from=shared, noise=0.05, beta_m=0.5, beta_g=0.5)",
    "fedimpro(count_weighted=true, spread=variance, s_max=0)",
    "fedimpro(stat_axes=channel, mix=share, weight=0.5)",
    "fedimpro(stat_axes=channel, labels=batch, count_weighted=true)",
]


@pytest.mark.long
@pytest.mark.parametrize("text", OPTIONS)
@pytest.mark.parametrize("law", ["engines", "resumable"])
def test_laws_hold_for_every_option(text: str, law: str) -> None:
    part = parse(text).parts[0]
    LAWS[law](replace(part, cut=CUT, ramp=min(part.ramp, 1)))  # type: ignore[attr-defined]


def test_weight_zero_is_neutral_for_shares_and_paper_settings_too() -> None:
    LAWS["neutral"](FedImpro(**FedImpro.presets["paper"] | {"cut": CUT, "mix": "share"}))


@pytest.mark.parametrize("text", OPTIONS)
def test_traffic_is_declared(text: str) -> None:
    """K_cut is the number of channels at a cut: 4 after the first stage, where D is 16."""
    part = replace(parse(text).parts[0], cut=CUT)
    run = images(norm="bn").simulate(part)
    size = 4 if part.stat_axes == "channel" else 16
    symbols = run.bound.spec.symbols(part) | {f"K_{CUT}": 4}
    assert part.count(part.sends, symbols) == 2 * 3 * size
    assert tree.numel(run.bound.sent(run.server)) == 2 * 3 * size
    assert part.count(part.uploads, symbols) == 2 * 3 * size + 3 * part.count_weighted


def test_presets_are_written_back_and_validated() -> None:
    for text in (*OPTIONS, "fedimpro"):
        method = parse(text)
        assert parse(repr(method)) == method
    assert set(parts["fedimpro"].presets) == {"official", "paper"}
    assert parse("fedimpro:official").parts[0] == FedImpro(cap=False, beta_m="by_dimension")
    with pytest.raises(
        FieldError, match="finite number at least 0 and at most 1 or 'by_dimension'"
    ):
        FedImpro(beta_m="by_size")  # type: ignore[arg-type]
    with pytest.raises(FieldError, match="labels"):
        FedImpro(labels="all")  # type: ignore[arg-type]
    with pytest.raises(FieldError, match="s_max"):
        FedImpro(s_max=-1.0)


def test_an_unknown_cut_is_named() -> None:
    with pytest.raises(IncompatibleError, match="stage9.* stage1, stage2"):
        images().simulate("fedimpro(cut=stage9)")


# -- single options by hand -----------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "momentum"), [((16,), 0.9968), ((512, 1, 1), 0.8976),
                                                 ((5000,), 0.0), ((128, 16, 16), 0.0)])  # fmt: skip
def test_momentum_of_the_released_code(shape: tuple[int, ...], momentum: float) -> None:
    spec = replace(images().simulate("fedavg").bound.spec, shapes={"stage2": shape})
    official = FedImpro(cut="stage2", **FedImpro.presets["official"])
    assert official._momentum(spec) == pytest.approx(momentum, abs=1e-15)
    assert FedImpro(beta_m=0.3)._momentum(spec) == 0.3


@pytest.mark.parametrize(("rounds", "expected"), [(0, 0.0), (1, 2 / 3), (2, 4 / 3), (4, 2.0)])
def test_the_ramp_has_the_precision_of_the_run(rounds: int, expected: float) -> None:
    part = FedImpro(cut=CUT, weight=2.0, ramp=3)
    run = images().simulate(part)
    v, _ = step_view(run, 0, part)
    v._context.job = v._context.job._replace(info=v.info._replace(round=torch.tensor(rounds)))
    found = part._weight(v)
    assert found.dtype == DOUBLE
    assert float(found) == pytest.approx(expected, rel=1e-15)


def test_a_run_that_is_too_short_for_the_ramp() -> None:
    """After 70 of 500 rounds the weight is 69/500 = 0.14."""
    text = FedImpro().advice(70)
    assert "500 rounds" in text
    assert "ends at 0.14 of 1;" in text
    assert text.endswith("ramp=35")
    assert FedImpro(ramp=35).advice(70) == ""
    assert FedImpro(ramp=70).advice(70) == ""
    assert FedImpro(weight=2.0, ramp=71).advice(70).count("ends at 1.9 of 2") == 1
    assert FedImpro(weight=0.0).advice(70) == ""
    assert FedImpro(**FedImpro.presets["paper"]).advice(1) == ""
    with pytest.warns(UserWarning, match="here ramp=2"):
        advise([Config(method="fedavg"), Config(method="scaffold+fedimpro", rounds=4)])


@pytest.mark.parametrize(("batch", "rows"), [(2, 3), (3, 6), (5, 6), (6, 9), (7, 9)])
def test_balanced_labels(batch: int, rows: int) -> None:
    """C (floor(B/C) + 1) rows, every class equally often; the batch's labels keep its size."""
    part = FedImpro(cut=CUT, draws_from="shared")
    run = images(sizes=(14, 14), batch=batch).simulate(part)
    v, data = step_view(run, 0, part, "inject")
    assert len(part.inject(v, data)[1]) == rows
    counts = torch.bincount(part._labels(v, data), minlength=3)
    assert counts.tolist() == [rows // 3] * 3
    own = replace(part, labels="batch")
    v, data = step_view(run, 0, own, "inject")
    assert torch.equal(own._labels(v, data), data.y)
    assert len(own.inject(v, data)[1]) == batch


def test_first_statistics() -> None:
    run = images().simulate(FedImpro(cut=CUT))
    first = run.server.slots["fedimpro"]
    assert float(first["mean"].min()) >= 0
    assert float(first["mean"].max()) < 1
    assert float(first["mean"].std()) == pytest.approx(12**-0.5, abs=0.05)
    assert torch.equal(first["scale"], torch.full((3, 16), 0.1, dtype=DOUBLE))
    variances = images().simulate(FedImpro(cut=CUT, spread="variance")).server.slots["fedimpro"]
    assert tree.gap(variances["scale"], torch.full((3, 16), 0.01, dtype=DOUBLE)) < 1e-15


@pytest.mark.parametrize("cut", ["stage1", "stage2"])
def test_evaluation_is_that_of_the_uncut_model(cut: str) -> None:
    run = images(norm="bn").simulate(FedImpro(cut=cut, ramp=0))
    run.run_round()
    x = run.federation.clean(torch.arange(10)).x
    split = run.bound.model.forward(run.weights, x, "eval", taps=(cut,)).logits
    with torch.no_grad():
        assert torch.equal(run.module()(x), split)


def test_statistics_per_channel() -> None:
    """One step on all samples: mean and deviation over the samples of a class and 2x2 positions."""
    part = FedImpro(cut=CUT, stat_axes="channel", s_max=0.0)
    run = images(sizes=(5, 9, 14), batch=14, steps=1).simulate(part)
    h, y = _features(run, 2)
    run.run_round([2])
    got = run.server.slots["fedimpro"]
    for c in y.unique():
        own = h[y == c].reshape(-1, 4, 4).transpose(0, 1).flatten(1)  # [channels, values]
        assert tree.gap(got["mean"][c], own.mean(1)) < 1e-12
        assert tree.gap(got["scale"][c], own.std(1)) < 1e-12


def test_rows_per_channel_are_drawn_element_by_element() -> None:
    part = FedImpro(cut=CUT, stat_axes="channel", draws_from="shared")
    run = images().simulate(part)
    v, batch = step_view(run, 0, part, "inject")
    rows = part.inject(v, batch)[1]
    assert rows.shape == (6, 4, 4)
    held = run.server.slots["fedimpro"]
    eps = (rows - held["mean"][part._labels(v, batch)][..., None]) / 0.1
    assert tree.gap(eps, rng.normal(v.key, (6, 4, 4), DOUBLE)) < 1e-13


def test_deviation_is_bounded() -> None:
    free = after_one_round(FedImpro(cut=CUT, s_max=0.0))["scale"]
    bound = after_one_round(FedImpro(cut=CUT, s_max=0.07))["scale"]
    assert float(free.max()) > 0.1
    assert float(bound.max()) <= 0.07
    squares = after_one_round(FedImpro(cut=CUT, s_max=0.07, spread="variance"))["scale"]
    assert float(squares.max()) <= 0.07**2 + 1e-15


def test_deviations_or_variances_are_averaged() -> None:
    """Two clients with the same classes: (s_1 + s_2)/2 against (s_1^2 + s_2^2)/2."""
    single = []
    for k in (1, 2):
        run = images(sizes=(2, 13, 13), batch=13, steps=1).simulate(FedImpro(cut=CUT, s_max=0.0))
        run.run_round([k])
        single.append(run.server.slots["fedimpro"]["scale"])
    for spread, wanted in (
        ("std", (single[0] + single[1]) / 2),
        ("variance", (single[0] ** 2 + single[1] ** 2) / 2),
    ):
        part = FedImpro(cut=CUT, s_max=0.0, spread=spread)  # type: ignore[arg-type]
        run = images(sizes=(2, 13, 13), batch=13, steps=1).simulate(part)
        run.run_round([1, 2])
        assert tree.gap(run.server.slots["fedimpro"]["scale"], wanted) < 1e-12


def test_noise_is_added_by_the_client_and_the_scale_stays_positive() -> None:
    plain = after_one_round(FedImpro(cut=CUT), [1])
    part = FedImpro(cut=CUT, noise=0.3)
    noisy, run = after_one_round(part, [1]), simulate(part)
    key = rng.fold(rng.fold(run.cohort([1]).jobs.key[0], "fedimpro"), "reply")
    first, second = (0.3 * rng.normal(k, (3, 16), DOUBLE) for k in rng.split(key, 2))
    assert tree.gap(noisy["mean"], plain["mean"] + first) < 1e-14
    assert tree.gap(noisy["scale"], (plain["scale"] + second).clamp_min(0)) < 1e-14
    assert float((noisy["scale"] == 0).sum()) > 0


def test_share_takes_the_weight_from_the_real_loss() -> None:
    shared = simulate(FedImpro(cut=CUT, ramp=0, weight=0.25, mix="share")).run_round().losses
    summed = simulate(FedImpro(cut=CUT, ramp=0, weight=0.25, mix="sum")).run_round().losses
    assert tree.gap(shared["task"], 0.75 * summed["task"]) < 1e-14
    assert tree.gap(shared["fedimpro"], summed["fedimpro"]) < 1e-14


def test_draws_follow_the_running_statistics_or_the_received_ones() -> None:
    """With a vanishing deviation and two steps at lr 0, the second step draws class means of the
    first batch (local), or the received means again (shared)."""
    from kedge.core.optim import SGD

    for source in ("local", "shared"):
        part = FedImpro(cut=CUT, ramp=0, s_max=1e-13, draws_from=source)  # type: ignore[arg-type]
        problem = images(sizes=(5, 9, 14), batch=9, steps=2, optim=SGD(lr=0.0))
        run = problem.simulate(part)
        mean, classes = run.server.slots["fedimpro"]["mean"], torch.arange(3)
        h, y = _features(run, 1)
        later = mean.clone()
        if source == "local":
            for c in y.unique():
                later[c] = h[y == c].mean(0)
        losses = [F.cross_entropy(_upper(run, m), classes) for m in (mean, later)]
        got = run.run_round([1]).losses["fedimpro"]
        assert float(got) == pytest.approx(float(sum(losses)) / 2, abs=1e-10)


def test_real_and_drawn_rows_share_one_batchnorm_pass() -> None:
    """After the cut, BatchNorm's running mean moves by a tenth of the mean over both kinds."""
    module = nn.Sequential()
    module.add_module("stage1", nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh()))
    module.add_module("stage2", nn.BatchNorm1d(4))
    module.add_module("head", nn.Linear(4, 3))
    part = FedImpro(cut="stage1", ramp=0, draws_from="shared")
    problem = replace(images(sizes=(5, 9), batch=5, steps=1), module=module.to(DOUBLE))
    run = problem.simulate(part)
    v, batch = step_view(run, 1, part, "inject")
    drawn = part.inject(v, batch)[1].flatten(1)
    with torch.no_grad():
        both = torch.cat([run.module().get_submodule("stage1")(batch.x), drawn])
    run.run_round([1])
    assert tree.gap(run.weights.buffers["stage2.running_mean"], 0.1 * both.mean(0)) < 1e-14
    assert tree.gap(run.weights.buffers["stage2.running_var"], 0.9 + 0.1 * both.var(0)) < 1e-14


def test_lower_layers_are_the_same_with_frozen_batchnorm() -> None:
    moved = []
    for weight in (0.0, 1.0):
        part = FedImpro(cut=CUT, ramp=0, weight=weight)
        run = images(norm="bn", batchnorm="frozen", steps=1).simulate(part)
        run.run_round()
        moved.append({n: p for n, p in run.weights.params.items() if n.startswith(CUT)})
    assert tree.gap(moved[0], moved[1]) < 1e-14


def simulate(part: FedImpro) -> Simulation:
    return images(sizes=(5, 9, 14), batch=9, steps=1).simulate(part)


def after_one_round(part: FedImpro, clients: list[int] | None = None) -> dict[str, torch.Tensor]:
    run = simulate(part)
    run.run_round(clients)
    return run.server.slots["fedimpro"]
