"""Numbers and names in sentences."""

from __future__ import annotations

from kedge.report.page.standings import Standing
from kedge.runs.header import MetricInfo
from kedge.runs.significance import Paired

OPEN, CLOSE = "\x01", "\x02"  # around names, which the page sets in bold
MAX_NAMED = 4  # methods or classes that a sentence lists by name


def name(text: str) -> str:
    """A name in a sentence, marked for the page."""
    return f"{OPEN}{plain(text)}{CLOSE}"


def plain(text: str) -> str:
    """A sentence without marks."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def value(metric: MetricInfo, number: float) -> str:
    """A value of the metric: ``"91.09 %"``."""
    return f"{number:.{metric.decimals}f} {metric.unit}".rstrip()


def difference(metric: MetricInfo, number: float, signed: bool = False) -> str:
    """A difference of two values: ``"6.31 points"``, or of another unit."""
    unit = {"%": "points"}.get(metric.unit, metric.unit)
    text = signed_text(number, metric.decimals) if signed else f"{abs(number):.{metric.decimals}f}"
    if number and not float(text.replace("−", "-")):
        text = f"less than {10.0**-metric.decimals:.{metric.decimals}f}"
    return f"{text} {unit}".rstrip()


def signed_text(number: float, decimals: int) -> str:
    """A number with its sign; zero has none.

    >>> signed_text(1.234, 2), signed_text(-0.001, 2)
    ('+1.23', '0.00')
    """
    text = f"{number:+.{decimals}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def p_text(p: float | None) -> str:
    """A p-value with its sign: ``"p = 0.018"``."""
    if p is None:
        return ""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.1 else f"p = {p:.2f}"


def what(standing: Standing) -> str:
    metric = standing.source.metric.title
    return metric if standing.source.headline == "global" else f"{metric} on its clients"


def rounds_text(standing: Standing) -> str:
    return f"{standing.round} round{'s' if standing.round != 1 else ''}"


def seeds_text(n: int) -> str:
    return f"{n} seed{'s' if n != 1 else ''}"


def interval_text(metric: MetricInfo, gain: Paired) -> str:
    assert gain.low is not None
    assert gain.high is not None
    low, high = (signed_text(v, metric.decimals) for v in (gain.low, gain.high))
    return f"{low} to {high}"


def times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio >= 1 else f"{100 * ratio:.0f} % of"
