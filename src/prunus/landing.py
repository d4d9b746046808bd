"""The landing: whatever training leaves above a budget is closed at the end, so that the deployed cost always meets it.

Gates close in the order of probability per cost: what is unlikely and expensive goes first. A unit is worth more, the
fewer of its group are left (its probability is divided by the share that is still open with it): where training left
much to close and no gate is unlikely, cost alone would take a layer down to a single unit, and the network with it.
Single weights are many, and compared across layers as they are.

The saving of one more closed unit is the derivative of the cost at the present 0/1 openness, which for these
polynomials is the exact difference. The last gate of all may save far more than is still too much; then another goes in
its place, worth about as little, that saves just enough.

Where widths are round numbers (`round_to`), a single closed gate may save nothing: the units of a group go in bunches,
from one multiple down to the next. A bunch is worth what its gates are; it saves what they do, and what the closed
units do that made up the number. A gate by itself is a bunch of one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunus.budget import Budget
from prunus.errors import ModelError, RunFailed, warn
from prunus.gated import Gated

NOTABLE = 0.02  # a landing that closes more than this part of a limit is worth a warning
ABOUT = 0.1  # units worth no more than this apart are worth about the same


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
        much = f"{self.share:.1%} above" if self.share < 1 else f"at {self.share + 1:,.1f} times"
        return (
            f"The landing had to close {self.closed:,} gate{'s' * (self.closed != 1)}, because training ended {much} "
            "the budget. Train for more epochs, or raise the dual rate, so that the multipliers get there."
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
    if not isinstance(gated, Gated):
        raise ModelError(f"The landing takes what prunus.gate returned; this is a {type(gated).__name__}.")
    budget = budget or gated.budget
    if budget is None:
        return Landing(0, ())
    before = budget.readings()
    location = gated.log_alpha.detach().clone()
    open_ = gated.open_units(location)
    start = open_.clone()
    p = gated.p_active(alone=True).double()
    about = ABOUT * gated.round_to
    limits = budget.limits.to(open_.device)
    while True:
        excess = budget.costs(open_) / limits - 1
        over = excess > 1e-12
        if not bool(over.any()):
            break
        savings = _savings(budget, open_, over, limits)
        saving = savings.sum(0)
        asked = gated.asked_units(location)
        candidates = (asked > 0) & (location > gated.gates.low) & (saving > 0) & ~_best(gated, location, asked)
        worth = p / _share_left(gated, p, asked, candidates) * _within(gated, p * asked)
        bunches = _bunched(gated, candidates, worth, savings, asked, open_)
        if not len(bunches.worth):
            line = budget.lines[int(excess.argmax())]
            left = "one unit" if gated.round_to == 1 else f"round_to={gated.round_to} units"
            raise RunFailed(
                f"The budget {line} cannot be met: with {left} left in every group the deployed cost is still "
                f"{float(excess.max()):.1%} above it."
            )
        saving = bunches.savings.sum(0)
        order = (bunches.worth / saving.clamp(min=1e-300)).argsort(stable=True)
        many = int((saving[order].cumsum(0) <= 0.5 * float(excess[over].sum())).sum())
        if many <= 1:
            order = _just_enough(order, bunches, excess[over], about)
        turn = torch.empty_like(order)
        turn[order] = torch.arange(len(order), device=order.device)
        location = _closed(gated, budget, location, bunches.turns(turn), max(1, many), limits)
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


@dataclass(frozen=True)
class _Bunches:
    """Gates that close together: `units`, and which bunch each belongs to; what the bunches are worth, and save.

    `first` marks those that can go next; the others of a group go after them.
    """

    units: Tensor
    bunch: Tensor
    worth: Tensor
    savings: Tensor
    first: Tensor

    def turns(self, turn: Tensor) -> tuple[Tensor, Tensor]:
        """When the bunches' turns are known: the units, and the turn of each."""
        return self.units, turn[self.bunch]


def _bunched(
    gated: Gated, candidates: Tensor, worth: Tensor, savings: Tensor, asked: Tensor, open_: Tensor
) -> _Bunches:
    """Put what may close into bunches: the first of a group takes it to the next multiple, the others one further.

    Of n units that ask to stay, n - m (ceil(n / m) - 1) take a group from one multiple of m to the next, and the closed
    ones that made up the number go with them; of the last m none can go.
    """
    groups, segment, step = len(gated.graph.groups), gated.openness.segment, gated.openness.step
    units = candidates.nonzero().flatten()
    units = units[(worth[units] / savings.sum(0)[units].clamp(min=1e-300)).argsort(stable=True)]
    units = units[segment[units].argsort(stable=True)]
    where = segment[units]
    tried, n = (
        torch.zeros(groups, dtype=torch.long, device=step.device).index_add(0, segment, one.long())
        for one in (candidates, asked)
    )
    rank = torch.arange(len(units), device=step.device) - (tried.cumsum(0) - tried)[where]
    head = n - (n - 1).div(step, rounding_mode="floor") * step  # from n to the next multiple below
    most = torch.minimum(tried, n - step + (step == 1).long())
    most = torch.where(most >= head, head + (most - head).div(step, rounding_mode="floor") * step, 0)
    some = rank < most[where]
    units, where, rank = units[some], where[some], rank[some]
    number = ((rank - head[where]).div(step[where], rounding_mode="floor") + 1).clamp(min=0)
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[1:] = (where[1:] != where[:-1]) | (number[1:] != number[:-1])
    bunch = begins.cumsum(0) - 1
    count = int(begins.sum())
    total = torch.zeros(count, dtype=worth.dtype, device=worth.device).index_add(0, bunch, worth[units])
    saved = torch.zeros(len(savings), count, dtype=savings.dtype, device=savings.device)
    saved = saved.index_add(1, bunch, savings[:, units])
    first = number[begins] == 0
    made_up = torch.zeros(len(savings), groups, dtype=savings.dtype, device=savings.device)
    made_up = made_up.index_add(1, segment, savings * ((open_ > 0) & (asked == 0)))
    saved += made_up[:, where[begins]] * first
    return _Bunches(units, bunch, total, saved, first | (step[where[begins]] == 1))


def _closed(
    gated: Gated, budget: Budget, location: Tensor, turns: tuple[Tensor, Tensor], many: int, limits: Tensor
) -> Tensor:
    """Close the first gates by their turns: `many` bunches, or as few as it takes to meet every line.

    Closing takes finer units along, and bases that nobody reads any more, so it may save more than was planned. What a
    longer part of the order keeps a shorter one keeps too, so bisection finds the shortest.
    """
    units, turn = turns

    def after(count: int) -> Tensor:
        result = location.clone()
        result[units[turn < count]] = gated.gates.low
        return result

    def meets(count: int) -> bool:
        return bool((budget.costs(gated.open_units(after(count))) / limits - 1 <= 1e-12).all())

    if many > 1 and meets(many):
        low = 0
        while many - low > 1:
            middle = (low + many) // 2
            low, many = (low, middle) if meets(middle) else (middle, many)
    return after(many)


def _within(gated: Gated, p: Tensor) -> Tensor:
    """What stands in a branch goes with it: its gate is worth as much as theirs together, any other is worth itself."""
    worth = torch.ones_like(p)
    offsets, sizes = gated.cost.offsets, gated.graph.sizes
    for branch, groups in gated.inside.items():
        total = sum(p[offsets[name] : offsets[name] + sizes[name]].sum() for name in groups)
        worth[offsets[branch]] = torch.as_tensor(total).clamp(min=1)
    return worth


def _share_left(gated: Gated, p: Tensor, open_: Tensor, candidates: Tensor) -> Tensor:
    """At every candidate, the share of its group that is open when its turn comes: the less probable go before it."""
    if gated.graph.scattered:
        return torch.ones_like(p)
    segment, groups = gated.openness.segment, len(gated.graph.groups)
    order = candidates.nonzero().flatten()
    order = order[p[order].argsort(stable=True)]
    order = order[segment[order].argsort(stable=True)]  # group by group, each from the least probable on
    size, left, tried = (
        torch.zeros(groups, dtype=p.dtype, device=p.device).index_add(0, segment, one.to(p.dtype))
        for one in (torch.ones_like(p), open_, candidates)
    )
    begin = (tried.cumsum(0) - tried)[segment[order]]
    rank = torch.arange(len(order), device=p.device) - begin
    share = torch.ones_like(p)
    share[order] = (left[segment[order]] - rank) / size[segment[order]]
    return share


def _just_enough(order: Tensor, bunches: _Bunches, excess: Tensor, about: float) -> Tensor:
    """If the first would be the last, put before it who saves just enough, of those worth about as little."""
    worth, savings = bunches.worth, bunches.savings
    enough = (savings[:, order] >= excess[:, None] * (1 - 1e-9)).all(0)
    if not bool(enough[0]):
        return order
    among = order[enough & bunches.first[order] & (worth[order] <= worth[order[0]] + about)]
    best = among[savings[:, among].sum(0).argmin()]
    return torch.cat([best[None], order[order != best]])


def _savings(budget: Budget, open_: Tensor, over: Tensor, limits: Tensor) -> Tensor:
    """What closing each unit takes off each line that is over, relative to its limit: (lines, units)."""
    with torch.enable_grad():
        at = open_.clone().requires_grad_(True)
        costs = (budget.costs(at) / limits)[over]
        return torch.stack([torch.autograd.grad(cost, at, retain_graph=True)[0] for cost in costs])


def _best(gated: Gated, location: Tensor, open_: Tensor) -> Tensor:
    """The most probable open unit of every group: it stays."""
    key = gated.openness.key(location).masked_fill(open_ == 0, -torch.inf)
    return key == gated.openness.best(key)
