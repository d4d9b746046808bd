"""What of all that can shrink the user wants gated, by name; and freezing what was found."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from prunus.axes import Axis, Frozen, Graph
from prunus.errors import ModelError, nearest
from prunus.terms import Both, Cat, Leaf, Prod, Term, simplified


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Does a dotted name match a pattern, or stand inside a module that does?

    >>> matches("layer1.0.conv1", ["layer1"]), matches("conv2", ["conv*"]), matches("conv10", ["conv1"])
    (True, True, False)
    """
    bare = name.split("#")[0].removesuffix(".inputs")
    return any(
        fnmatchcase(name, p) or fnmatchcase(bare, p) or fnmatchcase(name, p + ".*") or fnmatchcase(bare, p + ".*")
        for p in patterns
    )


def choose(graph: Graph, only: Iterable[str], freeze_names: Iterable[str]) -> Graph:
    """Keep the groups that the user wants gated; the others are frozen by the user's word."""
    only, freeze_names = list(only), list(freeze_names)
    names = [group.name for group in graph.groups]
    for pattern in [*only, *freeze_names]:
        if not any(matches(name, [pattern]) for name in names):
            raise ModelError(f"No group matches {pattern!r}; {nearest(pattern, names)}.")
    gone = {n for n in names if (only and not matches(n, only)) or matches(n, freeze_names)}
    return drop(graph, {name: Frozen("", "frozen by the user", "") for name in gone})


def drop(graph: Graph, gone: Mapping[str, Frozen]) -> Graph:
    """Freeze groups that were found, giving the reason for each; an empty axis or module is filled in."""
    if not gone:
        return graph

    def strip(term: Term) -> Term:
        if isinstance(term, Leaf):
            return Leaf(None, term.size) if term.group in gone else term
        if isinstance(term, Both):
            return strip(term.base) if term.fine.group in gone else Both(strip(term.base), term.fine)
        if isinstance(term, Prod):
            return simplified(Prod(tuple(map(strip, term.factors))))
        return simplified(Cat(tuple(map(strip, term.segments))))

    def strip_axes(found: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(Axis(axis.tensor, axis.dim, strip(axis.term)) for axis in found)

    frozen = list(graph.frozen)
    for group in graph.groups:
        if group.name in gone:
            reason = gone[group.name]
            first = (group.members or (Axis(group.name, 0, Leaf(None, 1)),))[0]
            frozen.append(
                Frozen(reason.axis or str(first), reason.operation, reason.module or first.tensor.rpartition(".")[0])
            )
    return replace(
        graph,
        axes={name: tuple(map(strip, terms)) for name, terms in graph.axes.items()},
        groups=tuple(
            replace(
                g,
                members=strip_axes(g.members),
                producers=strip_axes(g.producers),
                consumers=strip_axes(g.consumers),
                sites=strip_axes(g.sites),
            )
            for g in graph.groups
            if g.name not in gone
        ),
        frozen=tuple(frozen),
        works=tuple(replace(work, positions=tuple(map(strip, work.positions))) for work in graph.works),
        split={module: strip(term) for module, term in graph.split.items()},
        selections={module: name for module, name in graph.selections.items() if name not in gone},
        scattered={
            tensor: rest
            for tensor, rest in ((tensor, layout.without(gone)) for tensor, layout in graph.scattered.items())
            if any(rest.groups)
        },
        branches={
            tensor: left
            for tensor, names in graph.branches.items()
            if (left := tuple(name for name in names if name not in gone))
        },
    )
