"""Every registered part, and every sketch of a headline algorithm, against every law."""

import dataclasses
import warnings

import pytest
from sketches import SKETCHES

from kedge.check.laws import LAWS, skipped
from kedge.core.part import Part, parts

BUILT_IN = [cls(**cls.tiny) for cls in (parts[name] for name in parts)]
ALL = [*BUILT_IN, *SKETCHES]


@pytest.mark.filterwarnings("ignore:.* assumes plain SGD")
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("part", ALL, ids=lambda p: p.name)
def test_law(part: Part, law: str) -> None:
    if law in dict(skipped(part)):
        pytest.skip(f"{part.name} {dict(skipped(part))[law]}")
    LAWS[law](part)


@pytest.mark.parametrize("part", BUILT_IN, ids=lambda p: p.name)
def test_presets_and_neutral_settings_are_valid(part: Part) -> None:
    cls = type(part)
    for values in (*cls.presets.values(), cls.neutral or {}, cls.tiny):
        assert dataclasses.replace(cls(), **values) == cls(**values)


@pytest.mark.parametrize("part", BUILT_IN, ids=lambda p: p.name)
def test_docstring_has_title_reference_and_equation(part: Part) -> None:
    doc = type(part).__doc__ or ""
    title, _, rest = doc.partition("\n\n")
    assert title.strip().endswith(".")
    assert "arXiv:" in rest or "doi:" in rest
    assert ":math:" in rest
    assert len(doc.splitlines()) <= 24


def test_momentum_with_control_variates_warns() -> None:
    from kedge.check.problems import images
    from kedge.core.optim import SGD

    with pytest.warns(UserWarning, match="scaffold assumes plain SGD"):
        images(optim=SGD(lr=0.1, momentum=0.9)).simulate("scaffold")


def test_no_warnings_otherwise() -> None:
    from kedge.check.problems import images

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images().simulate("scaffold").run_round()
