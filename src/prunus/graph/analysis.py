"""The state of an analysis while the rules walk over a traced model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prunus.graph.trace import Node, Ref, Traced
from prunus.graph.unify import Reason, Var, add_up, atoms, find, freeze, product, split_product, unify

Dims = list[Var]


@dataclass
class Contraction:
    """A weight that reads an axis: `axis` is what it contracts, along dimension `dim` of `tensor`.

    `around` wraps what is contracted into the whole dimension where that holds more: a transposed convolution's first
    dimension is (groups x inputs per group), and only the second factor is contracted.
    """

    tensor: str
    dim: int
    axis: Var
    around: Var | None
    node: Node


@dataclass
class Usage:
    """Multiply-accumulates of one operation, before the terms are resolved."""

    module: str
    weight: str
    positions: Dims
    node: str


@dataclass
class Analysis:
    """What is known so far: the axes of every node, and which weights produce and read them."""

    traced: Traced
    dims: dict[str, list[Dims]] = field(default_factory=dict)
    tensors: dict[str, Dims] = field(default_factory=dict)
    produced: list[tuple[str, int, str]] = field(default_factory=list)  # tensor, dim, kind of unit
    contractions: list[Contraction] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    parts: dict[str, frozenset[int]] = field(default_factory=dict)  # node -> dims of which its view holds a part alone
    split: dict[str, Var] = field(default_factory=dict)  # module of a grouped convolution -> the axis of its groups
    uses: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # tensor -> (role, node name)
    views: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # node -> tensor, and its order of dims
    fixed_macs: int = 0  # multiply-accumulates of operations that no group touches

    def of(self, ref: Any) -> Dims:
        """The axes of a node's (first) result."""
        return self.dims[ref.name][0]

    def view_of(self, ref: Any) -> tuple[str, tuple[int, ...]] | None:
        """The parameter or buffer that a reference stands for, and the order in which its dimensions are seen."""
        return self.views.get(ref.name) if isinstance(ref, Ref) else None

    def tensor_of(self, ref: Any) -> str | None:
        """The name of the parameter or buffer a reference stands for, if it is one."""
        view = self.view_of(ref)
        return view[0] if view is not None else None

    def fresh(self, node: Node, reason: Reason | None = None) -> list[Dims]:
        """New axes for all results of a node, frozen where a reason is given."""
        results = []
        for shape in node.shapes:
            dims = [Var(size) for size in shape or ()]
            if reason is not None:
                for var in dims:
                    freeze(var, reason)
            results.append(dims)
        return results

    def frozen(self, size: int, node: Node, silent: bool = True) -> Var:
        """A new axis that cannot shrink."""
        var = Var(size)
        freeze(var, self.reason(node, silent))
        return var

    def reason(self, node: Node, silent: bool = False) -> Reason:
        """Freezing on account of this operation."""
        return Reason(node.op, node.module, silent)

    def freeze_arguments(self, node: Node) -> None:
        """Freeze every axis that an operation touches."""
        for ref in references(node):
            for dims in self.dims.get(ref.name, []):
                for var in dims:
                    freeze(var, self.reason(node))

    def freeze_pixels(self, node: Node, data: Dims, kernel: Dims = ()) -> None:  # type: ignore[assignment]
        """Freeze what a window slides over: news only where it is no image's or sequence's extent, but units."""
        for var in data:
            freeze(var, self.reason(node, silent=all(atom.reasons for atom in atoms(var))))
        for var in kernel:
            freeze(var, self.reason(node, silent=True))

    def broadcast(self, node: Node, refs: list[Ref]) -> Dims:
        """Bring operands together as broadcasting does: aligned at the right, where one position goes with all."""
        shape = node.shapes[0] or ()
        result: Dims = [Var(1) for _ in shape]
        for ref in refs:
            dims = self.of(ref)
            for back, var in enumerate(reversed(dims), 1):
                if find(var).size == 1:
                    continue
                if find(result[-back]).size == 1:
                    result[-back] = var
                else:
                    unify(result[-back], var, self.reason(node))
        for k, size in enumerate(shape):
            if find(result[k]).size != size:
                result[k] = self.frozen(size, node)
        return result

    def reshape(self, node: Node, dims: Dims, shape: tuple[int, ...]) -> Dims:
        """Regroup axes row-major into another shape, splitting and merging factors; freeze where that is not exact."""
        rest = [find(var) for var in dims if find(var).size != 1]
        out: Dims = []
        for size in shape:
            taken: Dims = []
            need = size
            while need > 1:
                head = find(rest.pop(0))
                if need % head.size == 0:
                    taken.append(head)
                    need //= head.size
                    continue
                parts = split_product(head, need) if head.size % need == 0 else None
                if parts is None:
                    for var in dims:
                        freeze(var, self.reason(node))
                    return [self.frozen(s, node) for s in shape]
                taken.append(parts[0])
                rest.insert(0, parts[1])
                need = 1
            out.append(product(taken))
        return out

    def produce(self, ref: Any, dim: int, unit: str) -> None:
        """Note that a weight makes units along one of its dimensions."""
        view = self.view_of(ref)
        if view is not None and (view[0], view[1][dim], unit) not in self.produced:
            self.produced.append((view[0], view[1][dim], unit))

    def contract(self, node: Node, ref: Any, dim: int, axis: Var, around: Var | None = None) -> None:
        """Note that a weight reads an axis. A computed weight has no place for a gate: dead units must be zero."""
        view = self.view_of(ref)
        if view is None:
            add_up(axis, Reason(f"{node.op} with a computed weight", node.module))
            return
        name, dim = view[0], view[1][dim]
        if dim in self.parts.get(ref.name, ()):
            around = self.tensors[name][dim]
        self.uses.setdefault(name, []).append((f"contracted along {dim}", node.name))
        self.contractions.append(Contraction(name, dim, axis, around, node))

    def split_by(self, ref: Any, groups: Var) -> None:
        """Note the axis that a grouped convolution's number of groups counts."""
        name = self.tensor_of(ref)
        if name is not None and groups.size > 1:
            self.split[name.rpartition(".")[0]] = groups

    def split_by_module(self, node: Node, groups: Var) -> None:
        """Note the same for a group norm, whose groups stand in its module."""
        if groups.size > 1 and node.module:
            self.split[node.module] = groups

    def work(self, node: Node, ref: Any, positions: Dims) -> None:
        """Note multiply-accumulates: every number of the weight is used once a position."""
        name = self.tensor_of(ref)
        owner = name.rpartition(".")[0] if name else node.module
        if name is None or ref.name in self.parts:  # a part of a weight, or none: what it holds is counted here
            positions = [*positions, *(self.of(ref) if ref is not None else [])]
            name = None
        self.usages.append(Usage(owner, name or "", positions, node.name))

    def part_of_weight(self, node: Node, ref: Any, dim: int) -> None:
        """Note that an operation takes a part of a weight along one dimension: it is that weight still."""
        view = self.view_of(ref)
        if view is not None:
            self.views[node.name] = view
            self.parts[node.name] = self.parts.get(ref.name, frozenset()) | {view[1][dim]}


Rule = Callable[[Analysis, Node], list[Dims]]


def references(node: Node) -> list[Ref]:
    """All results of other nodes that an operation takes."""
    found: list[Ref] = []

    def walk(value: Any) -> None:
        if isinstance(value, Ref):
            found.append(value)
        elif isinstance(value, tuple):
            for v in value:
                walk(v)

    walk(node.args)
    walk(tuple(node.kwargs.values()))
    return found
