"""Every registered part, and every sketch of a headline algorithm, against every law."""

import dataclasses
import warnings

import pytest

from kedge.check.laws import LAWS, TOLERANCE, skipped
from kedge.check.problems import images
from kedge.core import tree
from kedge.core.part import Part, parse, parts
from tests.parts.sketches import SKETCHES

BUILT_IN = [cls(**cls.tiny) for cls in (parts[name] for name in parts)]
ALL = [*BUILT_IN, *SKETCHES]
SLOW = ("objective",)  # laws that train to the optimum


@pytest.mark.filterwarnings("ignore:.* assumes plain SGD")
@pytest.mark.parametrize(
    "law", [pytest.param(law, marks=[pytest.mark.long] * (law in SLOW)) for law in LAWS]
)
@pytest.mark.parametrize("part", ALL, ids=lambda p: p.name)
def test_law(part: Part, law: str) -> None:
    if law in dict(skipped(part)):
        pytest.skip(f"{part.name} {dict(skipped(part))[law]}")
    LAWS[law](part)


@pytest.mark.parametrize("part", BUILT_IN, ids=lambda p: p.name)
def test_settings_hold_their_values_and_the_defaults(part: Part) -> None:
    """What a preset names has exactly this value and type, and what it does not, the default."""
    cls = type(part)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    for values in (*cls.presets.values(), cls.neutral or {}, cls.tiny):
        made = cls(**values)
        for name, expected in (defaults | values).items():
            assert getattr(made, name) == expected
            kind = type(defaults[name])  # of a field with a union type, the value's own
            kind = type(expected) if isinstance(expected, str) or kind is type(None) else kind
            assert type(getattr(made, name)) is kind
    for preset, values in cls.presets.items():
        assert parse(f"{cls.name}:{preset}").parts == (cls(**values),)


PRESETS = [(cls, name) for cls in map(type, BUILT_IN) for name in cls.presets]


@pytest.mark.filterwarnings("ignore:.* assumes plain SGD")
@pytest.mark.parametrize(("cls", "preset"), PRESETS, ids=lambda x: getattr(x, "name", x))
def test_engines_agree_on_every_preset(cls: type[Part], preset: str) -> None:
    """At tiny sizes and from the first round on; what the preset chooses stays."""
    values = {**cls.presets[preset], **cls.tiny}
    part = cls(**values | ({"start": 0} if "start" in values else {}))
    problem = images(norm="gn", task=cls.tasks[0])
    runs = [problem.simulate(part, engine) for engine in ("reference", "vector")]
    for run in runs:
        for _ in range(2):
            run.run_round()
    assert tree.gap(runs[1].state(), runs[0].state()) <= TOLERANCE


@pytest.mark.parametrize("part", BUILT_IN, ids=lambda p: p.name)
def test_docstring_has_title_reference_and_equation(part: Part) -> None:
    doc = type(part).__doc__ or ""
    title, _, rest = doc.partition("\n\n")
    assert title.strip().endswith(".")
    assert "arXiv:" in rest or "doi:" in rest
    assert ":math:" in rest
    assert len(doc.splitlines()) <= 24


def test_momentum_with_control_variates_warns() -> None:
    from kedge.core.optim import SGD

    with pytest.warns(UserWarning, match="scaffold assumes plain SGD"):
        images(optim=SGD(lr=0.1, momentum=0.9)).simulate("scaffold")


def test_no_warnings_otherwise() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images().simulate("scaffold").run_round()
