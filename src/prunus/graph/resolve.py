"""From variables of the analysis to terms: what lies along an axis, in named groups and frozen positions."""

from collections.abc import Mapping, Sequence

from prunus.axes import Work
from prunus.graph.analysis import Analysis, Usage
from prunus.graph.branches import Branch
from prunus.graph.trace import Traced
from prunus.graph.unify import Var, find
from prunus.terms import Cat, Leaf, Prod, Term, simplified


def resolve(var: Var, names: Mapping[int, tuple[str, str]]) -> Term:
    """What lies along an axis, in named groups and frozen positions."""
    root = find(var)
    if root.factors is not None:
        return simplified(Prod(tuple(resolve(factor, names) for factor in root.factors)))
    if root.segments is not None:
        return simplified(Cat(tuple(resolve(segment, names) for segment in root.segments)))
    known = names.get(id(root))
    return Leaf(known[0] if known else None, root.size)


def works_of(
    traced: Traced, state: Analysis, names: Mapping[int, tuple[str, str]], cut: Sequence[Branch] = ()
) -> tuple[Work, ...]:
    """What is multiplied, with the branches in which it stands."""
    return tuple(
        Work(
            usage.module,
            usage.weight,
            (*(resolve(var, names) for var in usage.positions), *_under(usage, cut)),
            traced.batch,
        )
        for usage in state.usages
    )


def _under(usage: Usage, cut: Sequence[Branch]) -> list[Term]:
    """The branches in which a product stands, but that do not take its weight along already."""
    return [Leaf(b.name, 1) for b in cut if usage.node in b.nodes and usage.weight not in b.tensors]
