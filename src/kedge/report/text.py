"""Numbers with units, and numbers and names in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kedge.history.compare import Paired
from kedge.history.metric import MetricInfo
from kedge.history.run import Run

OPEN, CLOSE = "\x01", "\x02"  # around names, which the page sets in bold
MAX_NAMED = 4  # methods or classes that a sentence lists by name


def digits(value: float, count: int = 3) -> str:
    """A number with so many significant digits, without an exponent.

    >>> digits(0.01234), digits(2.5), digits(99.96), digits(1234.5)
    ('0.0123', '2.5', '100', '1234')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, count - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, places)
    places = max(0, count - 1 - math.floor(math.log10(abs(rounded)))) if rounded else places
    text = f"{rounded:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(count: float) -> str:
    """Bytes in B, kB, MB, GB or TB.

    >>> size(0), size(812), size(4_560), size(2_345_678), size(999_999), size(1.2e12)
    ('0 B', '812 B', '4.56 kB', '2.35 MB', '1 MB', '1.2 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if round(count) < 999.5:
            return f"{digits(count)} {unit}" if unit != "B" else f"{round(count)} B"
        count /= 1000
    return f"{digits(count)} TB"


def duration(seconds: float) -> str:
    """A duration in ms, s, min or h.

    >>> duration(0.0312), duration(0.3), duration(12.34), duration(200), duration(9000)
    ('31.2 ms', '300 ms', '12.3 s', '3.33 min', '2.5 h')
    """
    if seconds < 0.9995:
        return f"{digits(seconds * 1e3)} ms"
    if seconds < 119.5:
        return f"{digits(seconds)} s"
    return f"{digits(seconds / 60)} min" if seconds < 7200 else f"{digits(seconds / 3600)} h"


def pace(seconds: float, noun: str = "round") -> str:
    """The speed of something that takes so many seconds: per second if it is quick.

    >>> pace(0.004), pace(0.8), pace(12.34), pace(500)
    ('250 rounds/s', '1.25 rounds/s', '12.3 s/round', '8.33 min/round')
    """
    if 0 < seconds <= 1:
        return f"{digits(1 / seconds)} {noun}s/s"
    return f"{duration(seconds)}/{noun}" if seconds else ""


def clock(seconds: float) -> str:
    """A duration as minutes and seconds, or with hours and days.

    >>> clock(0.4), clock(57), clock(546), clock(3723), clock(200_000)
    ('0:00', '0:57', '9:06', '1:02:03', '2 d 7 h')
    """
    whole = max(0, round(seconds))
    minutes, hours = whole // 60, whole // 3600
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def name(text: str) -> str:
    """A name in a sentence, marked for the page."""
    return f"{OPEN}{unmarked(text)}{CLOSE}"


def unmarked(text: str) -> str:
    """A sentence without marks."""
    return text.replace(OPEN, "").replace(CLOSE, "")


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


def what(run: Run) -> str:
    """The metric in a sentence, and whose it is."""
    title = run.measure.title
    return title if run.headline == "global" else f"{title} on its clients"


def count(n: int, noun: str) -> str:
    """``"1 seed"``, ``"3 seeds"``."""
    return f"{n} {noun}{'s' if n != 1 else ''}"


def listed(words: Sequence[str]) -> str:
    """``"a, b and c"``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def interval_text(metric: MetricInfo, gain: Paired) -> str:
    assert gain.low is not None
    assert gain.high is not None
    low, high = (signed_text(v, metric.decimals) for v in (gain.low, gain.high))
    return f"{low} to {high}"


def times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio >= 1 else f"{100 * ratio:.0f} % of"
