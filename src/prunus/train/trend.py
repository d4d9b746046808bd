"""Will the deployed cost arrive at its limit in time? Said early, in plain words.

A series holds deployed / limit, one value an epoch, with the limit that was asked for in the end.

While limits fall, the deployed cost runs behind them, and what tells is by how many epochs: with the limits falling
geometrically from `start` over the first `falling` epochs, the cost after epoch t is where the limit was at epoch
t' = falling (1 - log r / log start). If it stays t - t' epochs behind, it ends where the limit is as many before the
end. Extrapolating the cost itself would cry wolf: multipliers are still rising, and costs fall faster and faster.
"""

import math
from collections.abc import Sequence

MARGIN = 1.02


def forecast(history: Sequence[float], epochs: int, start: float = 1.0, falling: float = 0.0) -> float | None:
    """Where deployed / limit will stand after `epochs`; None while there is too little to tell.

    Without falling limits: a straight line through the logarithms of the last third (three points at least), because
    costs fall by factors.

    >>> round(forecast([8.0, 4.0, 2.0], 5), 2)
    0.5
    >>> round(forecast([8.0, 8.0, 4.0], 9, start=8.0, falling=6.0), 2)  # one epoch behind, and three to spare
    1.0
    >>> round(forecast([8.0, 8.0, 8.0], 7, start=8.0, falling=6.0), 2)  # three behind, and one to spare
    2.0
    """
    count = max(3, math.ceil(len(history) / 3))
    if len(history) < count:
        return None
    recent = [math.log(max(value, 1e-12)) for value in history[-count:]]
    if falling > 0 and start > 1:
        behind = len(history) - falling * (1 - min(1.0, recent[-1] / math.log(start)))
        return start ** max(0.0, 1 - (epochs - behind) / falling)
    middle = (count - 1) / 2
    spread = sum((k - middle) ** 2 for k in range(count))
    slope = sum((k - middle) * value for k, value in enumerate(recent)) / spread
    return math.exp(recent[-1] + slope * (epochs - len(history)))


def warning(
    name: str, limit: str, history: Sequence[float], epochs: int, start: float = 1.0, falling: float = 0.0
) -> str | None:
    """A sentence if the limit will be missed by more than 2% at this pace, once a third of the epochs has passed."""
    if len(history) < max(3, epochs / 3) or history[-1] <= 1 or len(history) >= epochs:
        return None
    ahead = forecast(history, epochs, start, falling)
    if ahead is None or ahead <= MARGIN:
        return None
    return (
        f"At this pace the budget {name}={limit} will not be met by training: the deployed cost is {history[-1]:.2f} "
        f"times the limit after epoch {len(history)} and heads for {ahead:.2f} times at epoch {epochs}. Raise the dual "
        "rate or train for more epochs, or the landing will have to close the rest."
    )
