"""Polynomials in the groups' counts, ready to be evaluated: many rows at once, with their slopes, in a few operations.

A monomial is a product of moments: 1, a group's expected count, a nested count, a higher power's. Padded with ones, all
monomials of all rows have the same degree d, and then a row is what its slopes say (Euler's theorem):

    cost_l = 1/d sum_v m_v d cost_l / d m_v

The slopes are linear in the products of d - 1 moments; d = 2 is the usual case (a weight has two dimensions that
shrink), and there these products are the moments themselves: one matrix gives all slopes, and with them all costs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from prunus.axes import Graph
from prunus.moments import moment_slope, raw_moment
from prunus.terms import factors, groups_of

SMALL = 2_000_000  # entries of a 0/1 matrix that is still quicker to multiply with than to avoid
Monomial = tuple[str, ...]  # variables, sorted; a group's name, or "name/nested" for a finer group's effective count
Polynomial = dict[Monomial, float]


def nested(name: str) -> str:
    """The variable that counts the open positions of a finer group: those open in its base too."""
    return f"{name}/nested"


class Rows(torch.nn.Module):
    """Rows of one cost: `rows(p)` maps (…, units) openness to (…, rows) costs.

    No loop over layers, no synchronisation, float64 throughout: the tensors are tiny, and counts up to 2^52 stay exact.

    >>> from prunus.axes import Group
    >>> graph = Graph({}, (Group("a", 2, "neuron", (), (), ()), Group("b", 3, "neuron", (), (), ())))
    >>> rows = Rows(graph, [{("a", "b"): 10.0, ("b",): 1.0}])
    >>> rows(torch.tensor([1.0, 0.0, 0.5, 0.5, 1.0])).tolist()
    [22.0]
    """

    form: Tensor
    table: Tensor
    bounds: Tensor
    segment: Tensor
    membership: Tensor | None
    constant: Tensor
    least: Tensor

    def __init__(self, graph: Graph, polynomials: Sequence[Polynomial]) -> None:
        super().__init__()
        ends = [0]
        for group in graph.groups:
            ends.append(ends[-1] + group.size)
        offsets = dict(zip(graph.sizes, ends[:-1], strict=True))
        self.groups = len(graph.groups)
        self._lay_out_counts(ends)
        self.vanishing = [1 + k for k, group in enumerate(graph.groups) if group.vanishes]

        # Moments, in this order: 1; every group's count; every nested count; then the higher powers that occur.
        fine = {str(both.fine.group): both for _, both in graph.fine_axes() if groups_of(both.base)}
        self.nests: list[tuple[int, int]] = []
        names = [name for name in offsets if name in fine]
        for k, name in enumerate(names):
            self.register_buffer(f"base{k}", factors(fine[name].base, offsets, ends[-1]), persistent=False)
            self.nests.append((offsets[name], offsets[name] + fine[name].size))
        index = {name: k for k, name in enumerate(["", *offsets, *map(nested, names)])}
        self.powers: list[tuple[int, int, int]] = []  # (power, first unit, last unit) of each higher moment
        self._read(polynomials, index, {name: (offsets[name], offsets[name] + graph.sizes[name]) for name in offsets})

    def _lay_out_counts(self, ends: list[int]) -> None:
        """Sums over groups: a product with a 0/1 matrix where that is small, differences of a running sum elsewhere."""
        units = ends[-1]
        self.register_buffer("bounds", torch.tensor(ends), persistent=False)
        lengths = torch.tensor(ends).diff()
        segment = torch.repeat_interleave(torch.arange(self.groups), lengths)
        self.register_buffer("segment", segment, persistent=False)
        membership = None
        if units * (self.groups + 1) <= SMALL:
            membership = torch.zeros(self.groups + 1, units, dtype=torch.float64)
            membership[segment + 1, torch.arange(units)] = 1
        self.register_buffer("membership", membership, persistent=False)
        constant = torch.zeros(self.groups + 1, dtype=torch.float64)
        constant[0] = 1
        self.register_buffer("constant", constant, persistent=False)

    def _read(
        self, polynomials: Sequence[Polynomial], index: dict[str, int], where: Mapping[str, tuple[int, int]]
    ) -> None:
        """Turn polynomials into the matrix that gives their slopes."""
        powers: dict[tuple[str, int], int] = {}

        def columns(monomial: Monomial) -> list[int]:
            found = []
            for name, power in Counter(monomial).items():
                if power == 1:
                    found.append(index[name])
                    continue
                if name not in where:
                    raise AssertionError("a nested group cannot stand on both sides of a weight")
                if (name, power) not in powers:
                    powers[name, power] = len(index) + len(powers)
                    self.powers.append((power, *where[name]))
                found.append(powers[name, power])
            return found

        rows = [[(columns(monomial), c) for monomial, c in polynomial.items()] for polynomial in polynomials]
        self.degree = max([2, *(len(m) for row in rows for m, _ in row)])
        self.moment_count = len(index) + len(powers)
        least = torch.zeros(2, self.moment_count, dtype=torch.float64)
        least[1] = 1
        least[1, self.vanishing] = 0
        self.register_buffer("least", least, persistent=False)  # of an expected count, and of a deployed one
        products: dict[tuple[int, ...], int] = {}
        if self.degree == 2:
            products = {(v,): v for v in range(self.moment_count)}
        entries: dict[tuple[int, int, int], float] = {}
        for number, row in enumerate(rows):
            for monomial, c in row:
                padded = sorted(monomial + [0] * (self.degree - len(monomial)))
                for k, v in enumerate(padded):
                    rest = tuple(padded[:k] + padded[k + 1 :])
                    place = (products.setdefault(rest, len(products)), number, v)
                    entries[place] = entries.get(place, 0.0) + c
        form = torch.zeros(len(products), len(rows), self.moment_count, dtype=torch.float64)
        for place, c in entries.items():
            form[place] = c
        self.register_buffer("form", form.flatten(1), persistent=False)
        table = torch.tensor(list(products), dtype=torch.long).reshape(len(products), self.degree - 1)
        self.register_buffer("table", table.t().flatten(), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the gates, but stay in float64 whatever the model is converted to."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)

    def forward(self, p: Tensor) -> Tensor:
        """The costs at openness `p`: probabilities, or 0 and 1."""
        return _Evaluate.apply(p.to(torch.float64), self)

    def moments(self, p: Tensor) -> Tensor:
        """Every moment that a monomial may name: 1, counts, nested counts, higher powers."""
        if self.membership is not None:
            counts = F.linear(p, self.membership, self.constant)
        else:
            zero = p.new_zeros((*p.shape[:-1], 1))
            running = torch.cat([zero, p.cumsum(-1)], dim=-1).index_select(-1, self.bounds)
            counts = torch.cat([zero + 1, running.diff(dim=-1)], dim=-1)
        if not self.nests and not self.powers:
            return counts
        parts = [counts]
        for k, (start, stop) in enumerate(self.nests):
            parts.append((p[..., start:stop] * self._under(p, k)).sum(-1, keepdim=True))
        for power, start, stop in self.powers:
            parts.append(raw_moment(p[..., start:stop], power))
        return torch.cat(parts, dim=-1)

    def slopes(self, moments: Tensor) -> Tensor:
        """The derivative of every row in every moment: (…, rows, moments)."""
        products = moments
        if self.degree > 2:
            picked = moments.index_select(-1, self.table).unflatten(-1, (self.degree - 1, -1))
            products = picked.prod(-2)
        return (products @ self.form).view(*moments.shape[:-1], -1, self.moment_count)

    def costs(self, moments: Tensor, slopes: Tensor) -> Tensor:
        """From moments and slopes to costs, by Euler's theorem: (…, rows)."""
        return (slopes * moments.unsqueeze(-2)).sum(-1) / self.degree

    def _under(self, p: Tensor, k: int, leave_out: int = -1) -> Tensor:
        """How open the base of the k-th finer group is at every position, one of its factors left out if asked."""
        extended = torch.cat([p, p.new_ones((*p.shape[:-1], 1))], dim=-1)
        result: Tensor | None = None
        for number, row in enumerate(getattr(self, f"base{k}")):
            if number != leave_out:
                one = extended.index_select(-1, row)
                result = one if result is None else result * one
        return p.new_ones(()) if result is None else result

    def gradient(self, p: Tensor, slopes: Tensor, weights: Tensor) -> Tensor:
        """d/dp of sum_r weights_r cost_r(p), written out: far fewer operations than autograd would record."""
        if weights.dim() == 1:
            by_moment = weights @ slopes
        else:
            by_moment = (weights.unsqueeze(-2) @ slopes).squeeze(-2)
        counts = by_moment if by_moment.shape[-1] == 1 + self.groups else by_moment[..., : 1 + self.groups]
        if self.membership is not None:
            result = counts @ self.membership
        else:
            result = counts[..., 1:].index_select(-1, self.segment)
        at = 1 + self.groups
        for k, (start, stop) in enumerate(self.nests):
            weight = by_moment[..., at + k, None]
            result[..., start:stop] += weight * self._under(p, k)
            longer = torch.zeros((*p.shape[:-1], p.shape[-1] + 1), dtype=p.dtype, device=p.device)
            for number, row in enumerate(getattr(self, f"base{k}")):
                part = weight * p[..., start:stop] * self._under(p, k, leave_out=number)
                longer = longer.index_add(-1, row, part)
            result = result + longer[..., :-1]
        at += len(self.nests)
        for k, (power, start, stop) in enumerate(self.powers):
            inside = p[..., start:stop]
            result[..., start:stop] += by_moment[..., at + k, None] * moment_slope(inside, power)
        return result


class _Evaluate(torch.autograd.Function):
    """Rows as one operation of autograd: values forward, `Rows.gradient` backward."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, rows: Rows) -> Tensor:
        moments = rows.moments(p)
        slopes = rows.slopes(moments)
        ctx.save_for_backward(p, slopes)
        ctx.rows = rows
        return rows.costs(moments, slopes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.gradient(*ctx.saved_tensors, grad), None
