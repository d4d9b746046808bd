"""The forecast of the deployed cost, and when it is worth a warning."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunus.train.trend import MARGIN, forecast, warning


def by_polyfit(history: Sequence[float], epochs: int) -> float:
    """The same by numpy: the slope of the last third's logarithms, from where the series stands."""
    count = max(3, -(-len(history) // 3))
    slope, _ = np.polyfit(np.arange(count), np.log(history[-count:]), 1)
    return float(np.exp(np.log(history[-1]) + slope * (epochs - len(history))))


def by_normal_equations(history: Sequence[float], epochs: int) -> float:
    """The same by the textbook's sums: slope = (n Sxy - Sx Sy) / (n Sxx - Sx^2)."""
    count = max(3, math.ceil(len(history) / 3))
    points = [(k, math.log(value)) for k, value in enumerate(history)][-count:]
    sx, sy = (sum(point[i] for point in points) for i in range(2))
    sxx, sxy = sum(x * x for x, _ in points), sum(x * y for x, y in points)
    slope = (count * sxy - sx * sy) / (count * sxx - sx * sx)
    return history[-1] * math.exp(slope) ** (epochs - len(history))


histories = st.lists(st.floats(0.05, 20), min_size=3, max_size=40)


@given(histories, st.integers(0, 8))
def test_the_forecast_is_a_straight_line_through_the_logarithms(history: list[float], ahead: int) -> None:
    epochs = len(history) + ahead
    found = forecast(history, epochs)
    assert found == pytest.approx(by_polyfit(history, epochs), rel=1e-6)
    assert found == pytest.approx(by_normal_equations(history, epochs), rel=1e-6)


@given(st.integers(min_value=3, max_value=40), st.floats(0.5, 1.5), st.floats(1e-3, 1e3), st.integers(0, 60))
def test_a_geometric_series_is_forecast_exactly(length: int, factor: float, first: float, ahead: int) -> None:
    history = [first * factor**k for k in range(length)]
    assert forecast(history, length + ahead) == pytest.approx(first * factor ** (length - 1 + ahead), rel=1e-8)


def limit_at(epoch: float, start: float, falling: float) -> float:
    """The limit by its end value, as `Budget.tighten` lets it fall: the weighted geometric mean of start and 1."""
    share = min(1.0, max(0.0, epoch / falling))
    return start ** (1 - share)


def by_bisection(history: Sequence[float], epochs: int, start: float, falling: float) -> float:
    """How many epochs the cost runs behind the falling limit, found by looking; then where that leads."""
    low, high = 0.0, falling
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if limit_at(middle, start, falling) > history[-1] else (low, middle)
    behind = len(history) - low
    return limit_at(epochs - behind, start, falling)


@given(
    st.integers(3, 40), st.integers(0, 30), st.floats(1.05, 50), st.floats(0.05, 1.0), st.floats(0.1, 1.0),
)  # fmt: skip
def test_while_limits_fall_the_forecast_stays_as_far_behind(
    length: int, ahead: int, start: float, place: float, warm_up: float
) -> None:
    epochs = length + ahead
    falling = warm_up * epochs
    history = [start] * (length - 1) + [start**place]
    found = forecast(history, epochs, start, falling)
    assert found == pytest.approx(by_bisection(history, epochs, start, falling), rel=1e-6)


def test_a_cost_that_follows_the_limits_at_a_distance_keeps_it() -> None:
    """Limits fall from 16 over 8 epochs, one half every two; the cost is where they were `behind` epochs ago."""
    for behind, end in ((0, 1.0), (1, 1.0), (2, 1.0), (3, math.sqrt(2)), (4, 2.0), (6, 4.0)):
        whole = [2.0 ** (4 - max(0, t - behind) / 2) for t in range(1, 9)]
        for t in range(behind + 3, 9):
            assert forecast(whole[:t], 10, 16.0, 8.0) == pytest.approx(end)
            said = warning("params", "6%", whole[:t], 10, 16.0, 8.0)
            assert (said is not None) == (end > MARGIN and t >= 10 / 3)


def test_limits_that_do_not_fall_leave_the_straight_line() -> None:
    history = [8.0, 7.0, 5.0, 4.5]
    assert forecast(history, 9, 8.0, 0.0) == forecast(history, 9) == forecast(history, 9, 1.0, 5.0)
    assert forecast(history, 9, 8.0, 6.0) != forecast(history, 9)
    assert forecast(history[:2], 9, 8.0, 6.0) is None


def test_the_first_two_thirds_do_not_count() -> None:
    recent = [4.0, 3.5, 3.0]
    assert forecast([*[9.0] * 6, *recent], 12) == forecast([*[0.1] * 6, *recent], 12) == forecast(recent, 6)


def test_two_epochs_are_too_few_for_a_forecast() -> None:
    assert forecast([], 9) is None
    assert forecast([4.0, 2.0], 9) is None
    assert forecast([4.0, 2.0, 1.0], 3) == pytest.approx(1.0)


def test_a_cost_of_zero_does_not_stop_the_forecast() -> None:
    assert forecast([1.0, 0.0, 0.0], 10) == pytest.approx(0.0, abs=1e-9)


def geometric(factor: float, length: int, end: float, epochs: int) -> list[float]:
    """A series that will stand at `end` after all epochs."""
    return [end * factor ** (k - epochs) for k in range(1, length + 1)]


@pytest.mark.parametrize("epochs", [9, 12, 30, 31, 90])
def test_a_miss_is_said_once_a_third_of_the_epochs_has_passed(epochs: int) -> None:
    whole = geometric(0.97, epochs, 1.5, epochs)
    first = next(k for k in range(epochs + 1) if warning("params", "10%", whole[:k], epochs))
    assert first == max(3, math.ceil(epochs / 3))
    for k in range(first, epochs):
        sentence = warning("params", "10%", whole[:k], epochs)
        assert sentence is not None
        for words in ("params=10%", f"after epoch {k} ", f"{whole[k - 1]:.2f} times the limit", "1.50 times at epoch "):
            assert words in sentence
        assert sentence.endswith(".")


@given(histories, st.integers(0, 60))
def test_a_warning_means_above_the_limit_now_and_then(history: list[float], ahead: int) -> None:
    epochs = len(history) + ahead
    said = warning("macs", "30%", history, epochs)
    heads_for = by_polyfit(history, epochs)
    if abs(heads_for / MARGIN - 1) > 1e-6:
        expected = ahead > 0 and len(history) >= epochs / 3 and history[-1] > 1 and heads_for > MARGIN
        assert (said is not None) == expected


def test_a_series_that_arrives_is_not_warned_of() -> None:
    for end in (0.5, 1.0, 1.019):
        whole = geometric(0.9, 30, end, 30)
        assert not any(warning("params", "10%", whole[:k], 30) for k in range(31))
    assert warning("params", "10%", geometric(0.9, 15, 1.03, 30), 30)


def test_a_met_budget_is_not_warned_of_whatever_its_trend() -> None:
    rising = [0.4, 0.6, 0.8, 1.0]
    assert forecast(rising, 12) > 2  # type: ignore[operator]
    assert warning("params", "10%", rising, 12) is None
    assert warning("params", "10%", [*rising, 1.2], 12) is not None


def test_the_last_epoch_warns_of_nothing() -> None:
    assert warning("params", "10%", [3.0] * 12, 12) is None
    assert warning("params", "10%", [3.0] * 13, 12) is None
    assert warning("params", "10%", [3.0] * 11, 12) is not None


def test_a_run_of_three_epochs_is_too_short_to_be_warned() -> None:
    assert not any(warning("params", "10%", [5.0] * k, 3) for k in range(4))
