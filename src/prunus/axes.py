"""What every layer of Prunus speaks: axes, groups, the graph of a model, and the Keep that surgery sees.

One dimension of one tensor is an `Axis`, and its term (`terms.py`) says which units lie where along it. What a Keep
leaves of an axis follows from that (`Keep.positions`). There is no model code here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prunus.errors import ArtefactError, ModelError
from prunus.scatter import Scattered
from prunus.terms import Both, Term, owners, spread


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of one tensor of the model, with what lies along it."""

    tensor: str
    dim: int
    term: Term

    def __str__(self) -> str:
        return f"{self.tensor}[{self.dim}]"


@dataclass(frozen=True, slots=True)
class Group:
    """Axes that can only shrink together.

    `members` are all its axes; `producers` those of weights that make the units; `consumers` the input axes of the
    weights that read them. `sites` are where its gate acts, their terms naming what is gated there alone: the
    consumers, because a unit gated there is ignored exactly, whatever stands between; the producers, where something
    adds up over the units without a weight, so that dead ones must be zero. `unit` says what a unit is: map, neuron,
    head, weight, …. `chain` lists the operations that couple its axes.
    """

    name: str
    size: int
    unit: str
    members: tuple[Axis, ...]
    producers: tuple[Axis, ...]
    consumers: tuple[Axis, ...]
    sites: tuple[Axis, ...] = ()
    chain: tuple["Step", ...] = ()

    @property
    def vanishes(self) -> bool:
        """Can all of it go? A branch beside a shortcut can; of layers one unit stays."""
        return self.unit == "branch"


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on the way of a group's units: it makes, reads, joins or passes them on."""

    role: str
    operation: str
    module: str


@dataclass(frozen=True, slots=True)
class Frozen:
    """An axis that cannot shrink, the operation that froze it, and the module where that operation stands.

    Where it could shrink had one asked for it, `units` says what to ask for. `also` names what is frozen with it.
    """

    axis: str
    operation: str
    module: str
    units: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """Multiply-accumulates: `weight` is used once for every one of the `positions`; `per` examples were traced."""

    module: str
    weight: str
    positions: tuple[Term, ...]
    per: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the model as it is stored: its shape and the bytes of one number; buffers are not parameters."""

    shape: tuple[int, ...]
    itemsize: int
    is_parameter: bool
    persistent: bool = True


@dataclass(frozen=True)
class Graph:
    """What the analysis says of a model: where its units lie, what couples them, and what they cost.

    `axes` holds the terms of every tensor, one a dimension. `selections` names, by module, the groups of input features
    that surgery removes by an index selection before the layer. `scattered` says, by tensor, how weights that become
    exact zeros are grouped. `split` names, by module, what the number of groups of a grouped convolution counts.
    `fixed_macs` are those of operations that no group touches. `aliases` maps every further name of a shared tensor to
    the name it goes by here. `entangled` are gated tensors that not only one plain layer uses, so that a gate on the
    weight is not the same as one on that layer's input. `branches` names, by tensor, the groups of the branches that it
    stands in: it goes with any of them. `form` is what surgery was proved in: "eager", the model's own code, "graph",
    its exported operations, or "unproved", where there were no numbers to try with.
    """

    axes: dict[str, tuple[Term, ...]]
    groups: tuple[Group, ...]
    frozen: tuple[Frozen, ...] = ()
    works: tuple[Work, ...] = ()
    tensors: dict[str, Stored] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    selections: dict[str, str] = field(default_factory=dict)
    scattered: dict[str, Scattered] = field(default_factory=dict)
    split: dict[str, Term] = field(default_factory=dict)
    fixed_macs: float = 0.0
    entangled: tuple[str, ...] = ()
    branches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    form: str = "eager"

    @property
    def sizes(self) -> dict[str, int]:
        """The number of units of every group."""
        return {group.name: group.size for group in self.groups}

    def group(self, name: str) -> Group:
        """Find a group by its name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    def sites(self) -> list[Axis]:
        """Where gates act, each place once."""
        return list({(a.tensor, a.dim): a for group in self.groups for a in group.sites}.values())

    def closed_branches(self, keep: "Keep") -> set[str]:
        """The tensors that go with branches of which nothing stays."""
        return {tensor for tensor, names in self.branches.items() if not all(keep.units[n].any() for n in names)}

    def inside(self) -> dict[str, list[str]]:
        """By branch, the groups of which everything stands in it."""
        where = {group.name: {axis.tensor for axis in group.members} for group in self.groups if not group.vanishes}
        found: dict[str, list[str]] = {}
        for branch in (group.name for group in self.groups if group.vanishes):
            own = {tensor for tensor, names in self.branches.items() if branch in names}
            found[branch] = [name for name, tensors in where.items() if tensors and tensors <= own]
        return found

    def fine_axes(self) -> list[tuple[Axis, Both]]:
        """The axes on which a finer group lies over a base."""
        found = []
        for tensor, terms in self.axes.items():
            for dim, term in enumerate(terms):
                if isinstance(term, Both):
                    found.append((Axis(tensor, dim, term), term))
        return found

    def droppable(self) -> dict[str, list[tuple[Both, Tensor]]]:
        """Groups whose every consumer is gated finer, with the unit that owns each position (-1: none).

        Such a unit goes when none of its positions is read any more.
        """
        fine = {(axis.tensor, axis.dim): term for axis, term in self.fine_axes()}
        result: dict[str, list[tuple[Both, Tensor]]] = {}
        for group in self.groups:
            where = [(axis.tensor, axis.dim) for axis in group.consumers]
            if where and group.unit not in ("input", "weight", "block") and all(key in fine for key in where):
                result[group.name] = [(fine[key], owners(fine[key].base, group.name)) for key in where]
        return result


class Keep:
    """Which units stay: a boolean tensor for every group, at least one unit in each.

    A Keep is the only thing that surgery sees, whatever method made it. `closed` removes what became useless: finer
    units under a removed base, and units that nobody reads any more; of a `rounded` one nothing, as its numbers are
    round and what makes them up is read by nobody.

    >>> graph = Graph({}, (Group("conv1", 3, "map", (), (), ()),))
    >>> Keep(graph, {"conv1": torch.tensor([True, False, True])}).kept()
    {'conv1': [0, 2]}
    """

    def __init__(self, graph: Graph, units: Mapping[str, Tensor], rounded: bool = False) -> None:
        self.graph, self.rounded = graph, rounded
        self.units: dict[str, Tensor] = {}
        sizes = graph.sizes
        unknown = [name for name in units if name not in sizes]
        if unknown:
            raise ModelError(f"A Keep names the group {unknown[0]!r}, which this model does not have.")
        for name, size in sizes.items():
            mask = units.get(name)
            if mask is None:
                self.units[name] = torch.ones(size, dtype=torch.bool)
                continue
            mask = mask.detach().to(device="cpu", dtype=torch.bool)
            if mask.shape != (size,):
                raise ModelError(f"A Keep for the group {name!r} has shape {tuple(mask.shape)}; it has {size} units.")
            if not mask.any() and not graph.group(name).vanishes:
                raise ModelError(f"A Keep for the group {name!r} keeps no unit; at least one must stay.")
            self.units[name] = mask

    @classmethod
    def of_indices(cls, graph: Graph, kept: Mapping[str, list[int]]) -> "Keep":
        """Build a Keep from the indices of the units that stay."""
        units = {}
        sizes = graph.sizes
        for name, indices in kept.items():
            if name not in sizes:
                raise ArtefactError(f"The plan names the group {name!r}, which it does not describe.")
            mask = torch.zeros(sizes[name], dtype=torch.bool)
            if not isinstance(indices, list | tuple) or not (indices or graph.group(name).vanishes):
                raise ArtefactError(f"The plan must list the units of {name!r} that stay, one at least.")
            if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < sizes[name] for i in indices):
                raise ArtefactError(f"The plan keeps units of {name!r} outside 0..{sizes[name] - 1}.")
            mask[indices] = True
            units[name] = mask
        return cls(graph, units)

    def kept(self) -> dict[str, list[int]]:
        """The indices of the units that stay, group by group."""
        return {name: mask.nonzero().flatten().tolist() for name, mask in self.units.items()}

    def positions(self, term: Term) -> Tensor:
        """A boolean for every position of a term: does it stay?"""
        return spread(term, self.units).bool()

    def closed(self) -> "Keep":
        """Remove what became useless; the result is what surgery removes and what the cost counts."""
        if self.rounded:
            return self
        units = dict(self.units)
        for _, both in self.graph.fine_axes():
            name = both.fine.group
            assert name is not None
            units[name] = units[name] & spread(both.base, units).bool()
        for name, places in self.graph.droppable().items():
            read = torch.zeros_like(units[name])
            for both, owner in places:
                open_ = spread(both, units).bool()
                read[owner[open_ & (owner >= 0)]] = True
            read &= units[name]
            if not read.any():  # its readers live on other features; no layer can be empty, so one unit stays, unread
                read[units[name].nonzero()[0]] = True
            units[name] = read
        return Keep(self.graph, units)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keep) and self.kept() == other.kept()

    __hash__ = None  # type: ignore[assignment]
