"""Settings: the same keys everywhere, all mistakes at once, each with its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kedge
from kedge.core.optim import Adam
from kedge.errors import FieldError, KedgeError
from kedge.settings import Config, ConfigError, load_config


def test_toml_words_and_flags_in_that_order(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('method = "scaffold"\nlr = 0.5\nseeds = [3, 4]\nrounds = 7\n')
    config = load_config(file, ["lr=0.25", "momentum=0.9", "nesterov=true"], {"rounds": 9})
    assert config.method == "scaffold"
    assert (config.lr, config.rounds, config.seeds) == (0.25, 9, (3, 4))
    assert config.optim().nesterov is True


def test_toml_round_trip(tmp_path: Path) -> None:
    config = Config(method="moon(mu=0.5)+mixup", angles=(0.0, 15.0), seeds=(5,), clip=10.0)
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "c.toml") == config


def test_all_mistakes_at_once_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('method = "scafold"\n\nlr = -0.1\nruonds = 3\nepochs = "many"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["clip=-1"], {"engine": "vecor"})
    text = str(caught.value)
    assert text.startswith("6 settings are wrong:")
    for piece in (
        f"no part 'scafold'. Did you mean 'scaffold'? See: kedge list ({file}, line 1)",
        f"lr = -0.1 is below 0 ({file}, line 3)",
        f"no setting 'ruonds'. Did you mean 'rounds'? ({file}, line 4)",
        f"epochs = 'many' is not a finite number above 0 ({file}, line 5)",
        "clip = -1.0 is below 0 (clip=-1)",
        "engine = 'vecor' is not one of: auto, loop, reference, vector. Did you mean 'vector'? "
        "(--engine)",
    ):
        assert piece in text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("method=nope", "no part 'nope'"),
        ("method=scaffold+", "expected a name, found the end at position 10"),
        ("method=fedprox(mu=-1)", "fedprox.mu = -1 is below 0"),
        (
            "method=fedprox(nu=1)",
            "no field of fedprox 'nu'. There are: mu. See: kedge show fedprox",
        ),
        ("method=moon:nope", "no preset of moon 'nope'"),
        ("method=scaffold+scaffold", "scaffold is in the method twice"),
        ("model=resnet81", "no model 'resnet81'. Did you mean 'resnet18'"),
        ("partition=dirichlt(0.1)", "no partition 'dirichlt'. Did you mean 'dirichlet'"),
        ("partition=dirichlet(-1)", "alpha"),
        ("augment=crop+flop", "no augmentation 'flop'. Did you mean 'flip'"),
        ("schedule=exponental(0.9)", "no schedule 'exponental'. Did you mean 'exponential'"),
        ("schedule=exponential", "schedule: exponential.gamma has no default; write exponential("),
        ("engine=vectorised", "engine = 'vectorised' is not one of: auto, loop, reference, vector"),
        ("device=gpu", "device = 'gpu' is not one of: auto, cpu, cuda"),
        ("batchnorm=avg", "batchnorm = 'avg' is not one of: average, local, frozen, batch"),
        (
            "precision=fp16",
            "precision = 'fp16' is not one of: fp32, tf32, bf16. Did you mean 'bf16'",
        ),
        ("state=disk", "state = 'disk' is not one of: auto, device, host, file"),
        ("chunk=-1", "chunk = -1 is below 0"),
        ("weighting=sizes", "Did you mean 'size'"),
        ("optimizer=sdg", "Did you mean 'sgd'"),
        ("rounds=0", "rounds = 0 is below 1"),
        ("rounds=ten", "rounds = 'ten' is not a whole number"),
        ("rounds=1.5", "rounds = '1.5' is not a whole number"),
        ("lr=nan", "lr = nan is not a finite number"),
        ("lr=inf", "lr = inf is not a finite number"),
        ("batch=-3", "batch = -3 is below 1"),
        ("momentum=1", "momentum = 1.0 is not below 1"),
        ("nesterov=true", "nesterov needs momentum > 0"),
        ("nesterov=maybe", "nesterov = 'maybe' is not true or false"),
        ("epochs=0", "epochs = 0.0 is not above 0"),
        ("seeds=", "seeds is empty"),
        ("seeds=1,1", "must be different numbers"),
        ("seeds=0,x", "is not a list of whole numbers"),
        ("clients=-2", "clients = -2 is below 0"),
        ("angles=", "angles is empty"),
        ("seeds=-1", "seeds = (-1,) holds -1, which is below 0"),
        ("model=lenet5(nrom=gn)", "no option of lenet5 'nrom'. Did you mean 'norm'"),
        ("model=resnet18(groups=0)", "model: resnet18.groups = 0 is below 1"),
        ("split=holdout(2)", "split: holdout.fraction = 2 is not below 1"),
        ("optimizer=adam(beta1=2)", "optimizer: adam.beta1 = 2 is not below 1"),
        ("optimizer=adam(beta=0.5)", "no field of adam 'beta'. Did you mean 'beta2' or 'beta1'"),
        ("colour=red", "no setting 'colour'"),
        ("rounds", "expected key=value, found 'rounds'"),
    ],
)
def test_bad_values_by_message(word: str, message: str) -> None:
    with pytest.raises(KedgeError) as caught:
        load_config(None, [word])
    assert message in str(caught.value)


def test_an_optimiser_with_fields_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('optimizer = "adam(beta1=0.5)"\nlr = 0.01\nclip = 1\n')
    adam = Adam(lr=0.01, beta1=0.5, clip=1.0)
    assert load_config(tmp_path / "a.toml").optim() == adam
    assert load_config(None, ["optimizer=adam(beta1=0.5)", "lr=0.01", "clip=1"]).optim() == adam
    assert Config(optimizer="adam(lr=0.01, beta1=0.5)", clip=1).optim() == adam
    assert Config(optimizer="adam").optim() == Adam(lr=0.1)
    assert Config(optimizer="sgd(momentum=0.9)", nesterov=True).optim().momentum == 0.9
    (tmp_path / "b.toml").write_text(Config(optimizer="adam(lr=0.01, beta1=0.5)", clip=1).to_toml())
    assert load_config(tmp_path / "b.toml").optim() == adam


def test_an_optimiser_and_settings_that_contradict_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["lr=0.5", "optimizer=adam(lr=0.01)", "momentum=0.9", "rounds=0"])
    text = str(caught.value)
    for piece in (
        "lr is given twice: lr = 0.5 and optimizer = adam(lr=0.01); leave one out (lr=0.5)",
        "momentum belongs to sgd; leave it out with adam (momentum=0.9)",
        "rounds = 0 is below 1 (rounds=0)",
    ):
        assert piece in text


def test_everything_that_is_wrong_with_a_method_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["method=fedprox(mu=-1)+scafold", "lr=-1"])
    word = "method=fedprox(mu=-1)+scafold"
    for piece in (
        "3 settings are wrong",
        f"method: fedprox.mu = -1 is below 0 ({word})",
        f"Did you mean 'scaffold'? See: kedge list ({word})",
        "lr = -1.0 is below 0",
    ):
        assert piece in str(caught.value)


def test_values_are_coerced_and_a_single_value_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("seeds = 3\nlr = 1\n")
    config = load_config(tmp_path / "a.toml")
    assert config.seeds == (3,)
    assert type(config.lr) is float
    assert Config(seeds=[1, 2]).seeds == (1, 2)  # type: ignore[arg-type]


def test_the_settings_are_known_without_torch() -> None:
    """The module may not need torch before a configuration is made."""
    package = str(Path(kedge.__file__).parent)
    code = (
        "import sys, types; sys.modules['kedge'] = package = types.ModuleType('kedge'); "
        f"package.__path__ = [{package!r}]; "
        "import kedge.settings as c; assert c.HELP and c.FIELDS and c.DEFAULTS; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_per_round_above_clients() -> None:
    with pytest.raises(ConfigError, match="per_round = 9 is more than the 5 clients"):
        Config(clients=5, per_round=9)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="there is no file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("method = scaffold\n")
    with pytest.raises(FieldError, match=r"broken.toml is not valid TOML: .*line 1.*need quotes"):
        load_config(tmp_path / "broken.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FieldError, match="binary.toml cannot be read"):
        load_config(tmp_path / "binary.toml")
    (tmp_path / "empty.toml").write_text("")
    assert load_config(tmp_path / "empty.toml") == Config()
