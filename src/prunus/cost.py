"""What a network costs, as one differentiable function of how open its units are.

A tensor holds as many numbers as the product of its axes' counts, and an axis' count is a sum of products of group
counts n_g. So parameters, MACs and bytes are polynomials in the n_g. Under independent gates with open probabilities p,

    E[prod_g n_g^k_g] = prod_g E[n_g^k_g],   E[n] = sum p,   E[n^2] = (sum p)^2 + sum p (1 - p),

the last one for a group on both sides of a weight; higher powers follow from factorial moments. The same function on a
0/1 Keep (closed, see `prunus.axes.Keep.closed`) is the exact count, because p (1 - p) is then zero.

A finer group nested in a base counts sum_i P(base_i open) p_i: openness multiplies.

The papers count one-sided: a weight belongs to its output map (convolution) or its input (linear layer) alone, so that
removing conv2's maps credits nothing at fc1 (seed 004, eq. 4-5). That is the measure `density`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prunus.axes import Both, Graph, Keep, Leaf, Prod, Stored, Term, factors, groups_of
from prunus.moments import moment_slope, raw_moment

MEASURES = ("params", "macs", "bytes")
SMALL = 2_000_000  # entries of a 0/1 matrix that is still quicker to multiply with than to avoid
Monomial = tuple[str, ...]  # variables, sorted; a group's name, or "name/nested" for a finer group's effective count
Polynomial = dict[Monomial, float]


def nested(name: str) -> str:
    """The variable that counts the open positions of a finer group: those open in its base too."""
    return f"{name}/nested"


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = defaultdict(float)
    for m, x in a.items():
        for n, y in b.items():
            result[tuple(sorted(m + n))] += x * y
    return dict(result)


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    result = defaultdict(float, a)
    for n, y in b.items():
        result[n] += y
    return dict(result)


def count(term: Term) -> Polynomial:
    """How many positions of a term are open, as a polynomial in the groups' counts.

    >>> count(Prod((Leaf("conv2", 50), Leaf(None, 16))))
    {('conv2',): 16.0}
    """
    if isinstance(term, Leaf):
        return {(): float(term.size)} if term.group is None else {(term.group,): 1.0}
    if isinstance(term, Both):
        name = str(term.fine.group)
        return {(nested(name) if groups_of(term.base) else name,): 1.0}
    if isinstance(term, Prod):
        result: Polynomial = {(): 1.0}
        for factor in term.factors:
            result = _times(result, count(factor))
        return result
    result = {}
    for segment in term.segments:
        result = _plus(result, count(segment))
    return result


@dataclass(frozen=True)
class Row:
    """One thing to count: `what` (a measure or density) of the whole model, or of the tensors in `where`."""

    what: str
    where: str | None = None


class Cost:
    """The cost of a graph: rows of coefficients over one list of monomials, evaluated together.

    >>> graph = Graph({"w": (Leaf("a", 4), Leaf("a", 4))}, (), tensors={"w": Stored((4, 4), 4, True)})
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.offsets: dict[str, int] = {}
        start = 0
        for group in graph.groups:
            self.offsets[group.name] = start
            start += group.size
        self.units = start
        self._polynomials: dict[tuple[str, str], Polynomial] = {}
        sizes: dict[str, Polynomial] = {}
        for name, stored in graph.tensors.items():
            polynomial = self._tensor(name)
            sizes[name] = polynomial
            if stored.is_parameter:
                self._polynomials["params", name] = polynomial
            if stored.persistent:
                self._polynomials["bytes", name] = self._bytes(name, stored, polynomial)
        for work in graph.works:
            used: Polynomial = sizes[work.weight] if work.weight else {(): 1.0}
            for position in work.positions:
                used = _times(used, count(position))
            used = {m: c / work.per for m, c in used.items()}
            key = ("macs", work.weight or f"{work.module}.")
            self._polynomials[key] = _plus(self._polynomials.get(key, {}), used)
        if graph.fixed_macs:
            self._polynomials["macs", ""] = {(): float(graph.fixed_macs)}

    def _tensor(self, name: str) -> Polynomial:
        if name in self.graph.scattered:
            return {(self.graph.scattered[name],): 1.0}
        polynomial: Polynomial = {(): 1.0}
        for term in self.graph.axes[name]:
            polynomial = _times(polynomial, count(term))
        return polynomial

    def _bytes(self, name: str, stored: Stored, polynomial: Polynomial) -> Polynomial:
        """Values as they are stored; scattered weights as their values and one bit a place, as `save` writes them."""
        result = {m: c * stored.itemsize for m, c in polynomial.items()}
        if name in self.graph.scattered:
            places = 1
            for size in stored.shape:
                places *= size
            result = _plus(result, {(): float((places + 7) // 8)})
        return result

    @cached_property
    def one_sided(self) -> dict[str, dict[str, float]]:
        """By weight and group, how many numbers one unit stands for in the papers' counting."""
        result: dict[str, dict[str, float]] = defaultdict(dict)
        shapes = {name: stored.shape for name, stored in self.graph.tensors.items()}
        for name, group in self.graph.scattered.items():
            result[name][group] = 1.0
        for group_ in self.graph.groups:
            maps = [axis for axis in group_.producers if len(shapes[axis.tensor]) > 2]
            for axis in maps or group_.consumers:
                if not maps and isinstance(axis.term, Both) and axis.term.fine.group != group_.name:
                    continue  # this layer's inputs are gated finer: the finer gates own it
                numbers = 1
                for size in shapes[axis.tensor]:
                    numbers *= size
                result[axis.tensor][group_.name] = numbers / group_.size
        return dict(result)

    def polynomial(self, row: Row, chosen: Callable[[str], bool]) -> Polynomial:
        """The polynomial of one row over the tensors that `chosen` admits."""
        if row.what == "density":
            weights: Polynomial = defaultdict(float)
            for tensor, by_group in self.one_sided.items():
                if chosen(tensor):
                    for group, numbers in by_group.items():
                        weights[(group,)] += numbers
            sizes = self.graph.sizes
            whole = sum(c * sizes[m[0]] for m, c in weights.items())
            return {m: c / whole for m, c in weights.items()} if whole else {}
        result: Polynomial = {}
        for (what, tensor), polynomial in self._polynomials.items():
            if what == row.what and chosen(tensor):
                result = _plus(result, polynomial)
        return result

    def rows(self, rows: Iterable[tuple[Row, Callable[[str], bool]]]) -> "Rows":
        """Prepare rows for evaluation."""
        return Rows(self, [self.polynomial(row, chosen) for row, chosen in rows])

    @cached_property
    def whole(self) -> "Rows":
        """The three measures of the whole model."""
        return self.rows((Row(measure), lambda tensor: True) for measure in MEASURES)

    def dense(self) -> dict[str, int]:
        """What the model costs before anything is removed."""
        return self.of(Keep(self.graph, {}))

    def of(self, keep: Keep) -> dict[str, int]:
        """What the model costs with a Keep's units alone: the exact count after surgery."""
        open_ = self.flat(keep.closed().units)
        return dict(zip(MEASURES, (round(v) for v in self.whole(open_).tolist()), strict=True))

    def flat(self, units: Mapping[str, Tensor]) -> Tensor:
        """All units' openness in one float64 tensor, group by group."""
        parts = [units[group.name].to(torch.float64) for group in self.graph.groups]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


class Rows(torch.nn.Module):
    """Rows of one cost, ready to be evaluated: `rows(p)` maps (…, units) openness to (…, rows) costs.

    All rows share the monomials; no loop over layers, no synchronisation, float64 throughout (the tensors are tiny, and
    counts up to 2^53 stay exact).
    """

    monomials: list[Monomial]
    coefficients: Tensor
    table: Tensor
    scatter: Tensor
    bounds: Tensor
    segment: Tensor
    membership: Tensor | None
    constant: Tensor

    def __init__(self, cost: Cost, polynomials: list[Polynomial]) -> None:
        super().__init__()
        graph = cost.graph
        self.monomials = sorted({m for polynomial in polynomials for m in polynomial}, key=lambda m: (len(m), m))
        column = {m: k for k, m in enumerate(self.monomials)}
        coefficients = torch.zeros(len(polynomials), len(self.monomials), dtype=torch.float64)
        for k, polynomial in enumerate(polynomials):
            for monomial, c in polynomial.items():
                coefficients[k, column[monomial]] = c
        self.register_buffer("coefficients", coefficients, persistent=False)

        # Moments, in this order: 1; every group's count; every nested count; then the higher powers that occur.
        fine = {str(both.fine.group): both for _, both in graph.fine_axes() if groups_of(both.base)}
        self.fine = [name for name in cost.offsets if name in fine]
        variables = ["", *cost.offsets, *(nested(name) for name in self.fine)]
        index = {name: k for k, name in enumerate(variables)}
        self.powers: list[tuple[int, int, int]] = []  # (power, first unit, last unit) of each higher moment
        names: list[list[int]] = []
        higher: dict[tuple[str, int], int] = {}
        for monomial in self.monomials:
            columns = []
            for name in dict.fromkeys(monomial):
                power = monomial.count(name)
                if power == 1:
                    columns.append(index[name])
                    continue
                if name not in cost.offsets:
                    raise AssertionError("a nested group cannot stand on both sides of a weight")
                if (name, power) not in higher:
                    higher[name, power] = len(variables) + len(self.powers)
                    first = cost.offsets[name]
                    self.powers.append((power, first, first + graph.sizes[name]))
                columns.append(higher[name, power])
            names.append(columns)
        self.depth = max((len(columns) for columns in names), default=1) or 1
        table = torch.tensor([columns + [0] * (self.depth - len(columns)) for columns in names], dtype=torch.long)
        self.register_buffer("table", table.reshape(len(names), self.depth).t().flatten(), persistent=False)

        scatter = torch.zeros(self.depth * len(names), len(variables) + len(self.powers), dtype=torch.float64)
        scatter[torch.arange(len(scatter)), self.table] = 1
        self.register_buffer("scatter", scatter, persistent=False)

        # Sums over groups: a product with a 0/1 matrix where that is small, differences of a running sum elsewhere.
        ends = [0]
        for group in graph.groups:
            ends.append(ends[-1] + group.size)
        self.groups = len(graph.groups)
        self.register_buffer("bounds", torch.tensor(ends), persistent=False)
        segment = [torch.full((group.size,), k) for k, group in enumerate(graph.groups)]
        self.register_buffer("segment", (torch.cat(segment) if segment else torch.zeros(0)).long(), persistent=False)
        membership = None
        if cost.units * (self.groups + 1) <= SMALL:
            membership = torch.zeros(cost.units, self.groups + 1, dtype=torch.float64)
            membership[torch.arange(cost.units), self.segment + 1] = 1
        self.register_buffer("membership", membership, persistent=False)
        first_moment = torch.zeros(self.groups + 1, dtype=torch.float64)
        first_moment[0] = 1
        self.register_buffer("constant", first_moment, persistent=False)

        self.nests: list[tuple[int, int]] = []
        for k, name in enumerate(self.fine):
            index_rows = factors(fine[name].base, cost.offsets, cost.units)
            self.register_buffer(f"base{k}", index_rows, persistent=False)
            start = cost.offsets[name]
            self.nests.append((start, start + fine[name].size))

    def forward(self, p: Tensor) -> Tensor:
        """The costs at openness `p`: probabilities, or 0 and 1."""
        return _Evaluate.apply(p.to(torch.float64), self)

    def moments(self, p: Tensor) -> Tensor:
        """Every moment that a monomial may name: 1, counts, nested counts, higher powers."""
        if self.membership is not None:
            counts = (
                torch.addmm(self.constant, p, self.membership) if p.dim() == 2 else self.constant + p @ self.membership
            )
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

    def costs(self, moments: Tensor) -> Tensor:
        """From moments to costs: products, then one matrix."""
        return self._product(self._chosen(moments)) @ self.coefficients.t()

    def _chosen(self, moments: Tensor) -> tuple[Tensor, ...]:
        picked = moments.index_select(-1, self.table)
        return picked.unflatten(-1, (self.depth, -1)).unbind(-2)

    @staticmethod
    def _product(values: tuple[Tensor, ...], leave_out: int = -1) -> Tensor:
        result: Tensor | None = None
        for number, value in enumerate(values):
            if number != leave_out:
                result = value if result is None else result * value
        return torch.ones_like(values[0]) if result is None else result

    def _under(self, p: Tensor, k: int, leave_out: int = -1) -> Tensor:
        """How open the base of the k-th finer group is at every position, one of its factors left out if asked."""
        extended = torch.cat([p, p.new_ones((*p.shape[:-1], 1))], dim=-1)
        rows = tuple(extended.index_select(-1, row) for row in getattr(self, f"base{k}"))
        return self._product(rows, leave_out)

    def gradient(self, p: Tensor, moments: Tensor, weights: Tensor) -> Tensor:
        """d/dp of sum_r weights_r cost_r(p), written out: far fewer operations than autograd would record."""
        chosen = self._chosen(moments)
        per_monomial = weights @ self.coefficients
        parts = torch.cat([per_monomial * self._product(chosen, k) for k in range(self.depth)], dim=-1)
        by_moment = parts @ self.scatter
        if self.membership is not None:
            result = by_moment[..., : 1 + self.groups] @ self.membership.t()
        else:
            result = by_moment[..., 1 : 1 + self.groups].index_select(-1, self.segment)
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
        ctx.save_for_backward(p, moments)
        ctx.rows = rows
        return rows.costs(moments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.gradient(*ctx.saved_tensors, grad), None
