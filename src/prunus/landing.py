"""The landing: whatever training leaves above a budget is closed at the end, so that the deployed cost always meets it.

Gates close in the order of probability per cost: what is unlikely and expensive goes first. Cost counts only as far as
it is still too much, so that for the last few numbers no gate goes that saves many. The saving of one more closed unit
is the derivative of the cost at the present 0/1 openness, which for these polynomials is the exact difference.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunus.budget import Budget
from prunus.errors import RunFailed, warn
from prunus.gated import Gated

NOTABLE = 0.02  # a landing that closes more than this part of a limit is worth a warning


@dataclass(frozen=True)
class Landing:
    """What the landing did: how many gates it closed, and every line's deployed cost before and after."""

    closed: int
    cost: tuple[dict[str, Any], ...]

    @property
    def share(self) -> float:
        """The largest part of a limit that the landing had to close."""
        return max((max(0.0, c["before"] - c["limit"]) / c["limit"] for c in self.cost), default=0.0)

    @property
    def advice(self) -> str | None:
        """What to change, in plain words, if the landing had much to close."""
        if self.share <= NOTABLE:
            return None
        return (
            f"The landing had to close {self.closed:,} gate{'s' * (self.closed != 1)}, {self.share:.1%} of a limit, "
            "because training ended above the budget. Train for more epochs, or raise the dual rate, so that the "
            "multipliers get there."
        )

    def as_dict(self) -> dict[str, Any]:
        """For the record and the receipt."""
        return {"closed": self.closed, "share": self.share, "cost": list(self.cost)}


@torch.no_grad()
def land(gated: Gated, budget: Budget | None = None) -> Landing:
    """Close gates until the deployed cost meets every line; warn if that was much.

    Raises:
        RunFailed: even the smallest network is above the budget.
    """
    budget = budget or gated.budget
    if budget is None:
        return Landing(0, ())
    before = budget.readings()
    location = gated.log_alpha.detach().clone()
    open_ = gated.open_units(location)
    start = open_.clone()
    p = gated.p_active().double()
    limits = budget.limits.to(open_.device)
    while True:
        excess = budget.costs(open_) / limits - 1
        over = excess > 1e-12
        if not bool(over.any()):
            break
        saving = _savings(budget, open_, excess, limits)
        candidates = (open_ > 0) & (location > gated.gates.low) & (saving > 0) & ~_best(gated, location, open_)
        order = torch.where(candidates, p / saving.clamp(min=1e-300), torch.inf).argsort(stable=True)
        order = order[: int(candidates.sum())]
        if not len(order):
            line = budget.lines[int(excess.argmax())]
            raise RunFailed(
                f"The budget {line} cannot be met: with one unit left in every group the deployed cost is still "
                f"{float(excess.max()):.1%} above it."
            )
        planned = saving[order].cumsum(0)
        many = int((planned <= 0.5 * float(excess[over].sum())).sum())
        location[order[: max(1, many)]] = gated.gates.low
        open_ = gated.open_units(location)
    gone = (start > 0) & (open_ == 0)
    gated.close(location != gated.log_alpha)
    after = budget.readings()
    result = Landing(
        int(gone.sum()),
        tuple(
            {
                "what": b["what"],
                "where": b["where"],
                "limit": b["limit"],
                "before": b["deployed"],
                "after": a["deployed"],
            }
            for b, a in zip(before, after, strict=True)
        ),
    )
    if gated.landing is None or result.closed:
        gated.landing = result.as_dict()
    if result.advice:
        warn(result.advice)
    return result


def _savings(budget: Budget, open_: Tensor, excess: Tensor, limits: Tensor) -> Tensor:
    """What closing each unit takes off the lines that are over, relative to their limits: the excess at most."""
    useful = torch.zeros_like(open_)
    with torch.enable_grad():
        at = open_.clone().requires_grad_(True)
        costs = budget.costs(at) / limits
        for cost, much in zip(costs, excess, strict=True):
            if much > 1e-12:
                (saving,) = torch.autograd.grad(cost, at, retain_graph=True)
                useful += saving.minimum(much)
    return useful


def _best(gated: Gated, location: Tensor, open_: Tensor) -> Tensor:
    """The most probable open unit of every group: it stays."""
    key = (location.double() - gated.tie).masked_fill(open_ == 0, -torch.inf)
    best = torch.full((len(gated.graph.groups),), -torch.inf, dtype=key.dtype, device=key.device)
    best = best.scatter_reduce(0, gated.segment, key, "amax")
    return key == best.index_select(0, gated.segment)
