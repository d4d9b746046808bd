"""Numbers and names as people read them.

Every function takes whatever a log may hold and answers with a dash when that is not a number, so that a page about an
unfinished run needs no special cases.
"""

import itertools
import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

DASH = "–"
_HUGE = 10**60
_PERCENT_METRICS = ("accuracy", "error", "top", "precision", "recall", "f1", "auc")


def number(value: Any) -> float:
    """Read a number; anything else, and null, is NaN.

    >>> number(3), number(None), number("3")
    (3.0, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    # Beyond this nothing is a cost or a loss worth drawing, and sums and products of it overflow.
    return float(value) if -_HUGE < value < _HUGE else math.nan


def fraction(part: Any, whole: Any) -> float:
    """Divide, where nothing divided by nothing is NaN.

    >>> fraction(1, 4), fraction(1, 0)
    (0.25, nan)
    """
    below = number(whole)
    return number(part) / below if below else math.nan


def count(value: Any) -> str:
    """A count of things.

    >>> count(266610), count(4_089_284_608), count(3.42), count(None)
    ('266,610', '4.09 billion', '3.4', '–')
    """
    x = number(value)
    if not math.isfinite(x):
        return DASH
    for start, scale, word in ((1e12, 1e12, "trillion"), (1e9, 1e9, "billion"), (1e8, 1e6, "million")):
        if abs(x) >= start:
            return f"{_digits(x / scale, 3)} {word}"
    return f"{x:.1f}" if abs(x) < 10 and x != int(x) else f"{x:,.0f}"


def size(value: Any) -> str:
    """A number of bytes, in decimal units.

    >>> size(1_040_000), size(980), size(4096)
    ('1.04 MB', '980 B', '4.10 kB')
    """
    x = number(value)
    if not math.isfinite(x):
        return DASH
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(x) >= 0.9995 * scale:
            return f"{_digits(x / scale, 3)} {unit}"
    return f"{x:.0f} B"


def percent(value: Any, places: int = 1) -> str:
    """A fraction in percent; what is not all, or not nothing, never rounds to all or nothing.

    >>> percent(0.1), percent(0.0052), percent(0.99996), percent(1), percent(0.000001)
    ('10.0%', '0.52%', '>99.99%', '100%', '<0.01%')
    """
    x = 100 * number(value)
    if not math.isfinite(x):
        return DASH
    if x in (0, 100):
        return f"{x:.0f}%"
    if 0 < x < 1 or (x < 100 and round(x, places) >= 100):
        places = 2
    if x > 0 and round(x, places) == 0:
        return "<0.01%"
    if x < 100 and round(x, places) >= 100:
        return ">99.99%"
    return f"{x:,.{places}f}%"


def times(value: Any) -> str:
    """A ratio.

    >>> times(12.345), times(123.4), times(0.85)
    ('12.3x', '123x', '0.85x')
    """
    x = number(value)
    if not math.isfinite(x):
        return DASH
    return f"{x:.2f}x" if abs(x) < 1 else f"{x:.1f}x" if abs(x) < 99.95 else f"{x:,.0f}x"


def latency(timing: Any) -> str:
    """A median time with its spread, to the digit the spread makes meaningful.

    >>> latency({"median": 3.214, "spread": 0.12}), latency({"median": 0.0412, "spread": 0.002})
    ('3.2 ms ± 0.1', '41 µs ± 2')
    """
    median = number(timing.get("median")) if isinstance(timing, dict) else math.nan
    if not math.isfinite(median):
        return DASH
    scale, unit = (1e-3, "s") if median >= 999.5 else (1.0, "ms") if median >= 0.1 else (1e3, "µs")
    median, spread = median * scale, number(timing.get("spread")) * scale
    if not math.isfinite(spread) or spread <= 0:
        return f"{_digits(median, 3)} {unit}"
    places = min(max(-math.floor(math.log10(spread) + 1e-9), 0), 3)
    return f"{median:,.{places}f} {unit} ± {spread:,.{places}f}"


def duration(seconds: Any) -> str:
    """How long something took.

    >>> duration(12.34), duration(125), duration(4325)
    ('12.3 s', '2 min 05 s', '1 h 12 min')
    """
    x = number(seconds)
    if not math.isfinite(x):
        return DASH
    if x < 59.95:
        return f"{x:.1f} s"
    whole = round(x)
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )


def small(value: Any) -> str:
    """A loss, a multiplier or a difference, to three digits.

    >>> small(0.07132), small(3.1e-7), small(1e-5), small(0)
    ('0.0713', '3.1e-7', '1e-5', '0')
    """
    x = number(value)
    if not math.isfinite(x):
        return DASH
    if x != 0 and not 1e-4 <= abs(x) < 1e6:
        mantissa, exponent = f"{x:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"


def is_percent(name: Any, values: list[Any]) -> bool:
    """Whether a metric is a fraction best read in percent: its name says so and no value contradicts.

    >>> is_percent("accuracy", [0.98]), is_percent("accuracy", [98.0]), is_percent("perplexity", [0.9])
    (True, False, False)
    """
    known = [x for x in map(number, values) if math.isfinite(x)]
    return any(word in str(name).lower() for word in _PERCENT_METRICS) and all(0 <= x <= 1 for x in known)


def cost(what: Any, value: Any) -> str:
    """A cost in its own unit.

    >>> cost("params", 26661), cost("bytes", 4_000_000), cost("density", 0.1)
    ('26,661', '4.00 MB', '10.0%')
    """
    return percent(value) if what == "density" else size(value) if what == "bytes" else count(value)


def text(value: Any) -> str:
    """A name from a log, without the characters that break an XML file or turn a line around.

    >>> text("conv1\\x00\\u202e\\ud800")
    'conv1���'
    """
    name = value if isinstance(value, str) else str(value)
    return "".join(" " if c in "\n\t" else "�" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in name)


def shorten(name: Any, width: int) -> str:
    """A name cut in its middle, since module paths differ at both ends.

    >>> shorten("encoder.layers.11.attention.output", 20)
    'encoder.la…on.output'
    """
    whole = text(name)
    if len(whole) <= width:
        return whole
    head = width // 2
    return f"{whole[:head]}…{whole[len(whole) - (width - head - 1) :]}"


def shorten_all(names: Sequence[str], width: int) -> list[str]:
    """Names cut so that they stay different: what all of them share goes first.

    >>> shorten_all(["encoder.layers.0.attention", "encoder.layers.1.attention"], 12)
    ['…ers.0.atte…', '…ers.1.atte…']
    """
    whole = [text(name) for name in names]
    short = [shorten(name, width) for name in whole]
    if len(set(short)) < len(set(whole)):
        head = _shared(whole)
        tail = _shared([name[head:][::-1] for name in whole])
        room = max(width - 2 - max(len(name) - head - tail for name in whole), 0)  # for some of what is shared
        head -= min(head, room // 2)
        tail -= min(tail, room - room // 2)
        cores = [name[head : len(name) - tail] for name in whole]
        short = [f"{'…' * bool(head)}{shorten(core, width - 2)}{'…' * bool(tail)}" for core in cores]
    seen: Counter[str] = Counter()
    for i, name in enumerate(short):
        seen[name] += 1
        if seen[name] > 1:
            short[i] = f"{name} #{seen[name]}"
    return short


def _shared(names: Sequence[str]) -> int:
    """How many letters all the names begin with."""
    alike = (len(set(letters)) == 1 for letters in zip(*names, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, alike))


def _digits(x: float, digits: int) -> str:
    """Round to so many digits, keeping zeros behind the point (1.00, not 1)."""
    exponent = int(f"{x:.{digits - 1}e}".split("e")[1])  # of the rounded number: 0.9997 is 1.00
    return f"{x:,.{max(digits - 1 - exponent, 0)}f}"
