"""Will the deployed cost arrive at its limit in time? Said early, in plain words."""

import math
from collections.abc import Sequence

MARGIN = 1.02


def forecast(history: Sequence[float], epochs: int) -> float | None:
    """Where a series of deployed / limit, one value an epoch, will stand after `epochs`; None while it is too short.

    A straight line through the logarithms of the last third (at least three points): costs fall by factors.

    >>> round(forecast([8.0, 4.0, 2.0], 5), 2)
    0.5
    """
    count = max(3, math.ceil(len(history) / 3))
    if len(history) < count:
        return None
    recent = [math.log(max(value, 1e-12)) for value in history[-count:]]
    middle = (count - 1) / 2
    spread = sum((k - middle) ** 2 for k in range(count))
    slope = sum((k - middle) * value for k, value in enumerate(recent)) / spread
    return math.exp(recent[-1] + slope * (epochs - len(history)))


def warning(name: str, limit: str, history: Sequence[float], epochs: int) -> str | None:
    """A sentence if the trend will miss the limit by more than 2%, once a third of the epochs has passed."""
    if len(history) < max(3, epochs / 3) or history[-1] <= 1 or len(history) >= epochs:
        return None
    ahead = forecast(history, epochs)
    if ahead is None or ahead <= MARGIN:
        return None
    return (
        f"At this pace the budget {name}={limit} will not be met by training: the deployed cost is {history[-1]:.2f} "
        f"times the limit after epoch {len(history)} and heads for {ahead:.2f} times at epoch {epochs}. Raise the dual "
        "rate or train for more epochs, or the landing will have to close the rest."
    )
