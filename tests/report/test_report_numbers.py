import math
from typing import Any

import pytest

from prunus.report import numbers

NOT_NUMBERS: list[Any] = [None, "12", True, math.nan, math.inf, [], {}, 10**400]


@pytest.mark.parametrize(
    "value, shown",
    [
        (266_610, "266,610"), (0, "0"), (26_661.4, "26,661"), (3.42, "3.4"), (7.0, "7"), (99_999_999, "99,999,999"),
        (312_000_000, "312 million"), (4_089_284_608, "4.09 billion"), (1.5e13, "15.0 trillion"), (-1200, "-1,200"),
    ],
)  # fmt: skip
def test_count(value: float, shown: str) -> None:
    assert numbers.count(value) == shown


@pytest.mark.parametrize(
    "value, shown",
    [(0, "0 B"), (980, "980 B"), (999.9, "1.00 kB"), (4096, "4.10 kB"), (1_040_000, "1.04 MB"), (98_700_000, "98.7 MB"),
     (999_700, "1.00 MB"), (2.5e9, "2.50 GB")],
)  # fmt: skip
def test_size(value: float, shown: str) -> None:
    assert numbers.size(value) == shown


@pytest.mark.parametrize(
    "value, shown",
    [
        (0.1, "10.0%"), (0.9784, "97.8%"), (1, "100%"), (0, "0%"), (0.0052, "0.52%"), (0.9996, "99.96%"),
        (0.999999, ">99.99%"), (1e-9, "<0.01%"), (1.224, "122.4%"), (1e-30, "<0.01%"),
    ],
)  # fmt: skip
def test_percent(value: float, shown: str) -> None:
    assert numbers.percent(value) == shown


def test_percent_never_rounds_to_all_or_nothing() -> None:
    for part in range(1, 100_000, 7):
        assert numbers.percent(part / 100_000) not in ("0%", "100%", "0.0%", "100.0%", "0.00%", "100.00%")


@pytest.mark.parametrize("value, shown", [(12.345, "12.3x"), (123.4, "123x"), (99.97, "100x"), (0.85, "0.85x")])
def test_times(value: float, shown: str) -> None:
    assert numbers.times(value) == shown


@pytest.mark.parametrize(
    "median, spread, shown",
    [
        (3.214, 0.12, "3.2 ms ± 0.1"), (3.214, 0.012, "3.21 ms ± 0.01"), (31.4, 1.2, "31 ms ± 1"),
        (0.0412, 0.002, "41 µs ± 2"), (1234.0, 100.0, "1.2 s ± 0.1"), (3.214, 0, "3.21 ms"), (3.214, None, "3.21 ms"),
        (None, 1.0, "–"), (3.0, 0.1, "3.0 ms ± 0.1"),
    ],
)  # fmt: skip
def test_latency(median: float | None, spread: float | None, shown: str) -> None:
    assert numbers.latency({"median": median, "spread": spread}) == shown


@pytest.mark.parametrize(
    "seconds, shown",
    [(0.4, "0.4 s"), (59.97, "1 min 00 s"), (125, "2 min 05 s"), (3599.8, "1 h 00 min"), (4325, "1 h 12 min")],
)
def test_duration(seconds: float, shown: str) -> None:
    assert numbers.duration(seconds) == shown


@pytest.mark.parametrize(
    "value, shown",
    [(0.07132, "0.0713"), (3.1e-7, "3.1e-7"), (1e-5, "1e-5"), (0, "0"), (2301.2, "2,301"), (4.2e9, "4.2e9")],
)
def test_small(value: float, shown: str) -> None:
    assert numbers.small(value) == shown


@pytest.mark.parametrize("junk", NOT_NUMBERS)
def test_what_is_not_a_number_is_a_dash(junk: Any) -> None:
    functions = (numbers.count, numbers.size, numbers.percent, numbers.times, numbers.duration, numbers.small)
    assert {show(junk) for show in functions} == {"–"}
    assert numbers.latency(junk) == "–"
    assert numbers.latency({"median": junk}) == "–"


def test_names_stay_different_when_shortened() -> None:
    names = [f"encoder.layers.{i}.attention.self.output" for i in range(40)]
    short = numbers.shorten_all(names, 14)
    assert len(set(short)) == 40
    assert max(map(len, short)) <= 14
    assert numbers.shorten_all(["conv1", "fc1"], 14) == ["conv1", "fc1"]
    assert len(set(numbers.shorten_all(["a" * 9 + "b" + "c" * 9, "a" * 9 + "d" + "c" * 9, "xyz"], 6))) == 3


def test_metrics_are_percent_only_when_they_are_shares() -> None:
    assert numbers.is_percent("top-1 accuracy", [0.9, None])
    assert not numbers.is_percent("accuracy", [97.8])
    assert not numbers.is_percent("perplexity", [0.5])
