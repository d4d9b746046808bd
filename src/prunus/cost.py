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

import torch
from torch import Tensor

from prunus.axes import Both, Cat, Graph, Keep, Leaf, Prod, Stored, Term, factors

MEASURES = ("params", "macs", "bytes")
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
        return {(nested(str(term.fine.group)),): 1.0}
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
            used = sizes[work.weight] if work.weight else {(): 1.0}
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
    bounds: Tensor
    bases: Tensor

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
        fine = {str(both.fine.group): both for _, both in graph.fine_axes()}
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
        depth = max((len(columns) for columns in names), default=1) or 1
        table = torch.tensor([columns + [0] * (depth - len(columns)) for columns in names], dtype=torch.long)
        self.register_buffer("table", table.reshape(len(names), depth).t().contiguous(), persistent=False)
        ends = [0]
        for group in graph.groups:
            ends.append(ends[-1] + group.size)
        self.register_buffer("bounds", torch.tensor(ends), persistent=False)

        self.nests: list[tuple[int, int]] = []
        for k, name in enumerate(self.fine):
            index_rows = factors(fine[name].base, cost.offsets, cost.units)
            self.register_buffer(f"base{k}", index_rows, persistent=False)
            start = cost.offsets[name]
            self.nests.append((start, start + fine[name].size))

    def forward(self, p: Tensor) -> Tensor:
        """The costs at openness `p`: probabilities, or 0 and 1."""
        p = p.to(torch.float64)
        one = p.new_ones((*p.shape[:-1], 1))
        running = torch.cat([one * 0, p.cumsum(-1)], dim=-1).index_select(-1, self.bounds)
        moments = [one, running.diff(dim=-1)]
        for k, (start, stop) in enumerate(self.nests):
            effective = p[..., start:stop]
            base = getattr(self, f"base{k}")
            if base.numel():
                extended = torch.cat([p, one], dim=-1)
                for row in base:
                    effective = effective * extended.index_select(-1, row)
            moments.append(effective.sum(-1, keepdim=True))
        for power, start, stop in self.powers:
            moments.append(raw_moment(p[..., start:stop], power))
        every = torch.cat(moments, dim=-1)
        value = every.index_select(-1, self.table[0])
        for columns in self.table[1:]:
            value = value * every.index_select(-1, columns)
        return value @ self.coefficients.t()


def raw_moment(p: Tensor, power: int) -> Tensor:
    """E[n^power] for n a sum of independent 0/1 variables with probabilities p, along the last dimension.

    E[n (n-1) … (n-j+1)] = j! e_j(p), with e_j the elementary symmetric polynomials (Newton's identities give them from
    power sums), and n^k is the sum of Stirling numbers times falling factorials. For k = 2 that is
    (sum p)^2 + sum p (1 - p).

    >>> p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    >>> raw_moment(p, 2).item(), raw_moment(p, 3).item()  # n is 0, 1, 1, 2
    (1.5, 2.5)
    """
    if power == 2:
        s = p.sum(-1, keepdim=True)
        return s * s + (p * (1 - p)).sum(-1, keepdim=True)
    sums = [(p**j).sum(-1, keepdim=True) for j in range(1, power + 1)]
    elementary = [torch.ones_like(sums[0])]
    for j in range(1, power + 1):
        total = sum(((-1) ** (i - 1)) * elementary[j - i] * sums[i - 1] for i in range(1, j + 1))
        elementary.append(torch.as_tensor(total) / j)
    stirling = [[1 if i == j == 0 else 0 for i in range(power + 1)] for j in range(power + 1)]
    for n in range(1, power + 1):
        for k in range(1, n + 1):
            stirling[n][k] = k * stirling[n - 1][k] + stirling[n - 1][k - 1]
    result = torch.zeros_like(sums[0])
    factorial = 1
    for j in range(1, power + 1):
        factorial *= j
        result = result + stirling[power][j] * factorial * elementary[j]
    return result
