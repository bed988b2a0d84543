"""Checks of settings whose valid values are defined by other modules.

Modules that need torch are imported when a value is checked, so that ``kedge run --help`` starts
without torch. The functions ``read_...`` raise a :class:`~kedge.errors.KedgeError` for text that
is not valid.
"""

from __future__ import annotations

import re

from kedge.errors import FieldError


def choices(key: str) -> tuple[str, ...]:
    """The valid words of a setting."""
    from kedge.core.model import BATCHNORM, PRECISIONS
    from kedge.core.work import WEIGHTINGS
    from kedge.engines import engines
    from kedge.sim.store import PLACES

    known = {"batchnorm": BATCHNORM, "precision": PRECISIONS, "weighting": WEIGHTINGS}
    known |= {"engine": ("auto", *engines), "state": ("auto", *PLACES)}
    return known[key]


def read_method(text: str) -> None:
    from kedge.core.method import parse

    parse(text)


def read_partition(text: str) -> None:
    from kedge.data.partition.grammar import check_partition

    if text != "auto" and not text.endswith(".json"):
        check_partition(text)


def read_split(text: str) -> None:
    from kedge.data.splits import read_split

    read_split(text)


def read_augmentation(text: str) -> None:
    from kedge.data.augment import augmentation

    augmentation(text)


def read_model(text: str) -> None:
    from kedge.models import read

    if text != "auto":
        read(text)


def read_schedule(text: str) -> None:
    from kedge.core.schedules import schedule

    schedule(text)


def read_sampler(text: str) -> None:
    from kedge.session.sampler import make_sampler

    make_sampler(text)


def read_device(text: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", text):
        raise FieldError(
            f"device = {text!r} is not one of: auto, cpu, cuda, cuda:0, mps", field="device"
        )
