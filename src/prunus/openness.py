"""From the gates' locations to the units that stay: in plain tensor code, without synchronisation."""

from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunus.axes import Graph
from prunus.errors import ModelError
from prunus.gates import lay
from prunus.scatter import shared, within
from prunus.terms import factors, groups_of

WIDTHS = frozenset(
    {"map", "neuron", "input", "feature", "width"}
)  # units whose number is a width of a layer, which `round_to` rounds
TIE = 1e-9  # breaks ties between equal gates, by order; far below any difference that training makes


class Openness(nn.Module):
    """Which units stay, for a graph whose groups lie one behind the other.

    A unit stays if its location is above a threshold; finer units go with their base, and a base goes when none of its
    positions is read any more. Of a group that would be empty the most probable unit stays, and no more.

    With `round_to` = m, the number of units that stay of a group whose units are widths (`WIDTHS`) is a multiple
    of m: from n it is rounded up to min(size, m ceil(n / m)), so that a group smaller than m stays whole. The most
    probable closed units make up the number: their gates are zero still, so keeping them is exact, and rounding up
    means that nothing is taken which training left. Of finer units the positions under open bases count, and "all" are
    all of these.

    Where at most n of every m weights stay, these are the n most probable.
    """

    segment: Tensor
    tie: Tensor
    size: Tensor
    step: Tensor
    vanishing: Tensor | None

    def __init__(self, graph: Graph, round_to: int = 1) -> None:
        super().__init__()
        self.groups = len(graph.groups)
        self.round_to = round_to
        offsets: dict[str, int] = {}
        units = 0
        for name, size in graph.sizes.items():
            offsets[name], units = units, units + size
        lengths = torch.tensor(list(graph.sizes.values()), dtype=torch.long)
        segment = torch.repeat_interleave(torch.arange(self.groups), lengths)
        self.register_buffer("segment", segment, persistent=False)
        steps = [round_to if group.unit in WIDTHS else 1 for group in graph.groups]
        self.register_buffer("size", lengths, persistent=False)
        self.register_buffer("step", torch.tensor(steps, dtype=torch.long), persistent=False)
        vanishing = torch.tensor([group.vanishes for group in graph.groups], dtype=torch.bool)
        self.register_buffer("vanishing", vanishing if bool(vanishing.any()) else None, persistent=False)
        self.register_buffer("tie", TIE * torch.arange(units, dtype=torch.float64), persistent=False)
        self.most: list[tuple[int, int, int, int]] = []  # from this unit to that one at most n of every m
        for layout in graph.scattered.values():
            if layout.most is not None:
                start = offsets[str(layout.groups[0])]
                stop = start + graph.sizes[str(layout.groups[0])]
                if self.most and self.most[-1][1:] == (start, *layout.most):
                    start = self.most.pop()[0]
                self.most.append((start, stop, *layout.most))
        self.fine: list[tuple[int, int, str]] = []
        for k, (_, both) in enumerate(graph.fine_axes()):
            if groups_of(both.base):
                start = offsets[str(both.fine.group)]
                self.fine.append((start, start + both.size, f"base{k}"))
                self.register_buffer(f"base{k}", factors(both.base, offsets, units), persistent=False)
        self.drops: list[tuple[int, int, list[tuple[int, int, str]]]] = []
        for number, (name, places) in enumerate(graph.droppable().items()):
            size, entry = graph.sizes[name], []
            for k, (both, owner) in enumerate(places):
                at = offsets[str(both.fine.group)]
                nobody = owner.masked_fill(owner < 0, size)
                self.register_buffer(f"owner{number}_{k}", nobody, persistent=False)
                entry.append((at, at + both.size, f"owner{number}_{k}"))
            self.drops.append((offsets[name], offsets[name] + size, entry))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the gates, but stay in float64 whatever the model is converted to."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)

    def key(self, location: Tensor) -> Tensor:
        """Locations in float64, no two alike."""
        return location.detach().double() - self.tie

    def best(self, key: Tensor) -> Tensor:
        """At every unit, the greatest key of its group: who stays, if nobody else does."""
        best = torch.full((self.groups,), -torch.inf, dtype=key.dtype, device=key.device)
        best = best.scatter_reduce(0, self.segment, key, "amax")
        if self.vanishing is not None:  # of these none need stay
            best = best.masked_fill(self.vanishing, torch.inf)
        return best.index_select(0, self.segment)

    @torch.no_grad()
    def limited(self, values: Tensor) -> Tensor:
        """One where a unit may be open at all: where at most n of every m may, at those with the greatest values."""
        if [one[:2] for one in self.most] == [(0, values.shape[-1])]:
            return within(values, *self.most[0][2:])
        result = torch.ones_like(values)
        for start, stop, n, m in self.most:
            result[..., start:stop] = within(values[..., start:stop], n, m)
        return result

    def expected(self, p: Tensor) -> Tensor:
        """From every gate's own probability to be open to that of its unit, where at most n of every m may be."""
        if not self.most:
            return p
        ends = [0, *(end for start, stop, _, _ in self.most for end in (start, stop)), p.shape[-1]]
        parts = list(p.split([b - a for a, b in pairwise(ends)], dim=-1))
        for k, (_, _, n, m) in enumerate(self.most):
            parts[2 * k + 1] = shared(parts[2 * k + 1], n, m)
        return torch.cat(parts, dim=-1)

    def kept(self, key: Tensor, threshold: float) -> Tensor:
        """The units that surgery keeps, 0 or 1."""
        open_ = self.asked(key, threshold)
        return open_ if self.round_to == 1 else self._rounded(open_, key)

    @torch.no_grad()
    def asked(self, key: Tensor, threshold: float) -> Tensor:
        """Those of them that the gates ask for: without what makes up round numbers."""
        raw = (key > threshold).to(key.dtype)
        if self.most:
            raw = raw * self.limited(key)
        open_ = raw.maximum((key == self.best(key)).to(key.dtype))
        for start, stop, name in self.fine:
            base = getattr(self, name)
            still = raw[start:stop] * lay(F.pad(raw, (0, 1), value=1.0), base)
            under = key[start:stop].masked_fill(lay(F.pad(open_, (0, 1), value=1.0), base) == 0, -torch.inf)
            open_[start:stop] = torch.where(still.any(), still, (under == under.amax()).to(key.dtype))
        for start, stop, places in self.drops:
            before = open_[start:stop]
            still = before * self._is_read(open_, stop - start, places)
            first = (before > 0) & (before.cumsum(0) == 1)  # no layer can be empty: one unit stays, unread
            open_[start:stop] = torch.where(still.any(), still, first.to(still.dtype))
        return open_

    @torch.no_grad()
    def _rounded(self, open_: Tensor, key: Tensor) -> Tensor:
        """Every group filled up to a round number by its most probable closed units; finer ones under what is open."""
        count = torch.zeros(self.groups, dtype=key.dtype, device=key.device).index_add_(0, self.segment, open_)
        target = torch.minimum(self._up(count), self.size)
        order = self._first(open_, key).argsort(descending=True, stable=True)
        order = order[self.segment[order].argsort(stable=True)]  # group by group, each from the first on
        begin = (self.size.cumsum(0) - self.size)[self.segment]
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=key.device) - begin)
        result = (rank < target[self.segment]).to(open_.dtype)
        for start, stop, name in self.fine:
            under = lay(F.pad(result, (0, 1), value=1.0), getattr(self, name))
            inside, step = open_[start:stop], self.step[self.segment[start]]
            total = torch.minimum(self._up(inside.sum(), step), under.sum())
            order = self._first(inside, key[start:stop]).masked_fill(under == 0, -torch.inf).argsort(descending=True)
            result[start:stop] = torch.zeros_like(inside).scatter_(
                0, order, (torch.arange(len(order), device=key.device) < total).to(inside.dtype)
            )
        return result

    def _first(self, open_: Tensor, key: Tensor) -> Tensor:
        """An order in which what is open comes first, then what is most probable."""
        return key.masked_fill(open_ > 0, torch.inf)

    def _up(self, count: Tensor, step: Tensor | None = None) -> Tensor:
        """The next round number, by groups."""
        step = self.step if step is None else step
        return (count / step).ceil() * step

    @torch.no_grad()
    def nearly_kept(self, location: Tensor, threshold: float) -> Tensor:
        """What `kept` gives, but that empty groups may stay empty: for every step's dual update, in few operations.

        Whoever counts takes one unit of every group at least, and so counts the same.
        """
        if self.round_to > 1:
            return self.kept(self.key(location), threshold)
        open_ = location > threshold
        if self.most:
            return open_ * self.limited(location)
        if not self.fine:
            return open_
        open_ = open_.to(location.dtype)
        for start, stop, name in self.fine:
            open_[start:stop] *= lay(F.pad(open_, (0, 1), value=1.0), getattr(self, name))
        for start, stop, places in self.drops:
            open_[start:stop] *= self._is_read(open_, stop - start, places)
        return open_

    def _is_read(self, open_: Tensor, size: int, places: list[tuple[int, int, str]]) -> Tensor:
        """Which units of a base are read at one position at least, by finer units that are open."""
        read = torch.zeros(size + 1, dtype=open_.dtype, device=open_.device)
        for at, end, name in places:
            read.index_add_(0, getattr(self, name), open_[at:end])
        return read[:-1] > 0


def whole_step(round_to: Any, graph: Graph) -> int:
    """What widths are rounded to, if it can be."""
    if not isinstance(round_to, Integral) or isinstance(round_to, bool) or int(round_to) < 1:
        raise ModelError(
            f"round_to is {round_to!r}; write the whole number, 1 or more, of which the shrunk model's widths are to "
            "be multiples, such as 8."
        )
    step = int(round_to)
    if step > 1 and graph.scattered:
        raise ModelError("round_to rounds the widths of layers; where single weights are removed, no width changes.")
    return step
