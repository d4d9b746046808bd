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
from math import prod

import torch
from torch import Tensor

from prunus.axes import Graph, Keep, Stored
from prunus.measure import rounded
from prunus.rows import Polynomial, Rows, nested
from prunus.terms import Both, Leaf, Prod, Term, groups_of

MEASURES = ("params", "macs", "bytes")


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
            self._polynomials["macs", ""] = {(): graph.fixed_macs}

    def _tensor(self, name: str) -> Polynomial:
        if name in self.graph.scattered:
            layout, shape = self.graph.scattered[name], self.graph.tensors[name].shape
            found: Polynomial = {(group,): float(numbers) for group, numbers in layout.numbers(shape).items()}
            return _plus(found, {(): float(layout.rest(shape))}) if layout.rest(shape) else found
        polynomial: Polynomial = {self.graph.branches.get(name, ()): 1.0}
        for term in self.graph.axes[name]:
            polynomial = _times(polynomial, count(term))
        return polynomial

    def _bytes(self, name: str, stored: Stored, polynomial: Polynomial) -> Polynomial:
        """Values as they are stored; scattered weights as their values and one bit a unit, as `save` writes them."""
        result = {m: c * stored.itemsize for m, c in polynomial.items()}
        if name in self.graph.scattered:
            units = sum(self.graph.scattered[name].units(stored.shape).values())
            result = _plus(result, {(): float((units + 7) // 8)})
        return result

    @cached_property
    def one_sided(self) -> dict[str, dict[str, float]]:
        """By weight and group, how many numbers one unit stands for in the papers' counting."""
        result: dict[str, dict[str, float]] = defaultdict(dict)
        shapes = {name: stored.shape for name, stored in self.graph.tensors.items()}
        for name, layout in self.graph.scattered.items():
            result[name] = {group: float(numbers) for group, numbers in layout.numbers(shapes[name]).items()}
        for group_ in self.graph.groups:
            maps = [axis for axis in group_.producers if len(shapes[axis.tensor]) > 2]
            for axis in maps or group_.consumers or group_.producers:
                if not maps and isinstance(axis.term, Both) and axis.term.fine.group != group_.name:
                    continue  # this layer's inputs are gated finer: the finer gates own it
                numbers = 1
                for size in shapes[axis.tensor]:
                    numbers *= size
                result[axis.tensor][group_.name] = numbers / group_.size
        return dict(result)

    def polynomial(self, row: Row, chosen: Callable[[str], bool], *, nesting: bool = False) -> Polynomial:
        """The polynomial of one row over the tensors that `chosen` admits.

        The papers count a finer gate as open whatever its base does. With `nesting` it counts under open bases alone:
        the same on what surgery keeps, with slopes that say what closing a base takes along.
        """
        if row.what == "density":
            weights: Polynomial = defaultdict(float)
            for tensor, by_group in self.one_sided.items():
                if chosen(tensor):
                    for group, numbers in by_group.items():
                        weights[(group,)] += numbers
            sizes = self.graph.sizes
            total = sum(c * sizes[m[0]] for m, c in weights.items())
            under = {str(both.fine.group) for _, both in self.graph.fine_axes() if nesting and groups_of(both.base)}
            return {(nested(m[0]) if m[0] in under else m[0],): c / total for m, c in weights.items()} if total else {}
        result: Polynomial = {}
        for (what, tensor), polynomial in self._polynomials.items():
            if what == row.what and chosen(tensor):
                result = _plus(result, polynomial)
        return result

    def rows(self, rows: Iterable[tuple[Row, Callable[[str], bool]]], *, nesting: bool = False) -> "Rows":
        """Prepare rows for evaluation."""
        return Rows(self.graph, [self.polynomial(row, chosen, nesting=nesting) for row, chosen in rows])

    @cached_property
    def whole(self) -> "Rows":
        """The three measures of the whole model."""
        return self.rows((Row(measure), lambda tensor: True) for measure in MEASURES)

    def dense(self) -> dict[str, int]:
        """What the model costs before anything is removed."""
        return self.of(Keep(self.graph, {})) | {"bytes": self.dense_bytes(lambda tensor: True)}

    def dense_bytes(self, chosen: Callable[[str], bool]) -> int:
        """The bytes of tensors before anything is removed: there are no places to note then."""
        stored = (tensor for name, tensor in self.graph.tensors.items() if tensor.persistent and chosen(name))
        return sum(prod(tensor.shape) * tensor.itemsize for tensor in stored)

    def of(self, keep: Keep) -> dict[str, int]:
        """What the model costs with a Keep's units alone: the exact count after surgery."""
        open_ = self.flat(keep.closed().units)
        return dict(zip(MEASURES, (rounded(v) for v in self.whole(open_).tolist()), strict=True))

    def flat(self, units: Mapping[str, Tensor]) -> Tensor:
        """All units' openness in one float64 tensor, group by group."""
        parts = [units[group.name].to(torch.float64) for group in self.graph.groups]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
