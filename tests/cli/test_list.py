"""Pages of ``kedge list`` and ``kedge show``: every kind of thing alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from kedge import catalogue
from kedge.cli import list as listing
from kedge.core.part import Part, parts, register
from kedge.data.datasets.formats import bind_options
from kedge.data.datasets.load import EXAMPLES, FORMATS, schema
from kedge.grammar import Call, parse_call
from tests.cli.commands import kedge_command

KINDS = {
    "parts": "scaffold",
    "models": "resnet18",
    "partitions": "class_dirichlet_capped",
    "shifts": "rotation",
    "data": "csv",
    "splits": "holdout",
    "augmentations": "crop",
    "optimizers": "adam",
    "schedules": "cosine",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_listed_and_shown_alike(kind: str) -> None:
    listed = kedge_command("list", kind)
    assert listed.returncode == 0
    assert KINDS[kind] in listed.stdout
    page = kedge_command("show", KINDS[kind])
    assert page.returncode == 0
    for heading in ("type", "default", "meaning", "use", "source"):
        assert heading in page.stdout
    again = kedge_command("show", f"{kind}:{KINDS[kind]}")
    assert again.stdout == page.stdout


def test_every_option_of_everything_has_help() -> None:
    for kind in catalogue.KINDS:
        for name, thing in kind.entries().items():
            assert listing.title(thing), name
            for row in kind.schema(name).rows():
                assert row.doc, f"{kind.name} {name}.{row.name} has no Doc"
                assert row.type not in ("any", ""), f"{kind.name} {name}.{row.name} has no type"
            assert kedge_command("show", f"{kind.word}:{name}").returncode == 0


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("fedavg", ("FedAvg", "wᵗ⁺¹ = wᵗ + Σₖ pₖ", "arXiv:1602.05629", "without parts")),
        (
            "resnet18",
            ("bn | gn", "cifar | imagenet", "at least 1", "maximum groups of a GroupNorm"),
        ),
        ("dirichlet", ("short for  class_dirichlet_capped", "int | classes", "above 0")),
        ("adam", ("beta1", "at least 0 and below 1", "arXiv:1412.6980")),
        ("cosine", ("must be given", "rounds until the floor", "cosine(rounds=...)")),
        ("data:cifar10", ("3x32x32", "airplane", "put cifar10.npz")),
        ("csv", ("column with the label", "csv(path='...')")),
        ("moon:fedcog", ("moon:fedcog  =  moon(mu=0.01",)),
        ("crop(4)", ("pixels on every side", "crop(padding=4)")),
    ],
)
def test_pages_say_what_one_needs(name: str, pieces: tuple[str, ...]) -> None:
    page = kedge_command("show", name)
    assert page.returncode == 0
    for piece in pieces:
        assert piece in page.stdout


def test_presets_equal_to_the_defaults_are_marked() -> None:
    @register
    @dataclass(frozen=True)
    class TwoPresets(Part):
        beta: float = 1.0
        presets: ClassVar[dict[str, dict[str, float]]] = {"a": {"beta": 1.0}, "b": {"beta": 2.0}}

    try:
        page = kedge_command("show", "twopresets").stdout
    finally:
        parts.remove("twopresets")
    assert "twopresets:a  =  twopresets(beta=1.0)  (= the defaults)" in page
    assert "twopresets:b  =  twopresets(beta=2.0)\n" in page


def test_a_name_of_several_kinds_asks_which() -> None:
    done = kedge_command("show", "silos")
    assert done.returncode == 2
    assert "'silos' is the name of a partition and a dataset" in done.stderr
    assert "kedge show partition:silos or kedge show data:silos" in done.stderr
    assert "Each group of the data" in kedge_command("show", "partition:silos").stdout
    assert "per client" in kedge_command("show", "data:silos").stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "resnet81"], "no model 'resnet81'. Did you mean 'resnet18'"),
        (["show", "model:lenet"], "no model 'lenet'. Did you mean 'lenet5'"),
        (
            ["show", "cosin"],
            "no schedule 'cosin'. Did you mean 'cosine'? See: kedge list schedules",
        ),
        (["show", "zzzz"], "nothing is called 'zzzz'. See: kedge list KIND"),
        (["list", "modles"], "Did you mean 'models'"),
    ],
)
def test_wrong_names_of_any_kind(args: list[str], message: str) -> None:
    done = kedge_command(*args)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_a_pattern_finds_things_of_any_kind() -> None:
    done = kedge_command("list", "resnet*")
    assert "resnet18" in done.stdout
    assert "model" in done.stdout


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_every_option_of_a_format_has_an_example_that_is_right(name: str) -> None:
    page = kedge_command("show", f"data:{name}").stdout
    used = set()
    for text, _ in EXAMPLES[name]:
        assert f'--data "{text}"' in " ".join(page.split())
        head, bracket, rest = text.partition("(")
        call = parse_call(f"data({rest}") if bracket else Call(head, None, (), {})
        own = "csv" if name == "silos" else name
        bind_options(own, FORMATS[own], call.kwargs)
        used |= set(call.kwargs)
    assert set(schema(name).options) <= used


def test_help_points_to_the_options_of_data() -> None:
    text = " ".join(kedge_command("run", "--help").stdout.replace("│", " ").split())
    assert "tab.csv(drop=[chol,visit])" in text
    assert "kedge show data:csv" in text


def test_models_of_hugging_face_are_listed_and_shown() -> None:
    assert "kedge show model:hf" in kedge_command("list", "models").stdout
    for name in ("model:hf", "model:hf:some/model"):
        page = kedge_command("show", name).stdout
        assert "rank of the trained updates" in page
        assert 'kedge run --model "hf:NAME(lora=8)"' in page
    assert "kedge show model:hf or kedge show data:hf" in kedge_command("show", "hf").stderr
