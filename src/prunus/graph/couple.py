"""From a traced model to its `Graph`: walk the operations, couple axes, name the groups, say what is frozen and why."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from prunus.axes import Axis, Both, Cat, Frozen, Graph, Group, Leaf, Prod, Term, Work, groups_of, leaves
from prunus.errors import ModelError, nearest
from prunus.graph.analysis import Analysis, references
from prunus.graph.rules import apply
from prunus.graph.trace import Traced, trace
from prunus.graph.unify import Reason, Var, atoms, find, freeze
from prunus.scatter import Scattered, laid_out, read

UNITS = ("structured", "groups", "weights")


def analyse(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    units: str = "structured",
    only: Iterable[str] = (),
    freeze_names: Iterable[str] = (),
) -> Graph:
    """Find everything in a model that can shrink exactly.

    Args:
        model: any module that `torch.export` takes.
        args, kwargs: example inputs.
        units: "structured": coupled groups, and the input features of linear layers where these can be gated finer than
            any producer can shrink (network inputs, flattened maps), which is the papers' placement; "groups": coupled
            groups alone; "weights": one gate a weight; "16x16": one gate a block of so many rows and columns of a
            weight; "2:4": one gate a weight, of which at most two of every four in a row stay.
        only: patterns of group or module names; everything else is frozen.
        freeze_names: patterns of group or module names to freeze.

    Raises:
        ModelError: the model cannot be exported, or a pattern names nothing.
    """
    kind = read(units, UNITS)
    traced = trace(model, args, kwargs)
    state = walk(traced)
    graph = _weights_graph(traced, state, kind) if kind else _build(traced, state, fine=units == "structured")
    return choose(graph, only, freeze_names)


def walk(traced: Traced) -> Analysis:
    """Apply the rules to all operations in order, then freeze what no gate may touch."""
    state = Analysis(traced)
    for name, stored in traced.tensors.items():
        state.tensors[name] = [Var(size) for size in stored.shape]
    for node_name, owner in traced.parameters.items():
        state.dims[node_name] = [state.tensors[owner]]
    for node_name, shape in traced.constants.items():
        state.dims[node_name] = [[_frozen(size, Reason("literal tensor in the code", "")) for size in shape]]
    for node_name, shape in traced.inputs.items():
        state.dims[node_name] = [[_frozen(size, Reason("network input", "")) for size in shape]]
    for node in traced.nodes:
        before = len(state.contractions)
        state.dims[node.name] = apply(state, node)
        read = {c.tensor for c in state.contractions[before:]}
        for ref in references(node):
            tensor = state.tensor_of(ref)
            if tensor is not None and tensor not in read:
                state.uses.setdefault(tensor, []).append((node.op, node.name))
    for name in traced.outputs:
        for dims in state.dims.get(name, []):
            for var in dims:
                freeze(var, Reason("network output", ""))
    for contraction in state.contractions:
        roles = {role for role, _ in state.uses[contraction.tensor]}
        if len(roles) > 1:  # a gate on this weight would be seen by its other use too
            other = sorted(roles - {f"contracted along {contraction.dim}"})[0]
            freeze(contraction.axis, Reason(f"{contraction.tensor} also used by {other}", contraction.node.module))
    return state


def _frozen(size: int, reason: Reason) -> Var:
    var = Var(size)
    freeze(var, reason)
    return var


def _owner(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _name_groups(state: Analysis) -> dict[int, tuple[str, str]]:
    """Name the atoms that can shrink: by the first weight that makes them, in the order the weights are used."""
    read = {id(atom) for c in state.contractions for atom in atoms(c.axis)}
    order: dict[str, int] = {}
    for k, contraction in enumerate(state.contractions):
        order.setdefault(contraction.tensor, k)
    names: dict[int, tuple[str, str]] = {}
    taken: dict[str, int] = {}
    for tensor, dim, unit in state.produced:
        for atom in atoms(state.tensors[tensor][dim]):
            if id(atom) in names or atom.size == 1 or atom.reasons or id(atom) not in read:
                continue
            base = _owner(tensor) or tensor
            taken[base] = taken.get(base, 0) + 1
            names[id(atom)] = (base if taken[base] == 1 else f"{base}#{taken[base]}", unit)
    return names


def _resolve(var: Var, names: Mapping[int, tuple[str, str]]) -> Term:
    root = find(var)
    if root.factors is not None:
        return _simplify(Prod(tuple(_resolve(factor, names) for factor in root.factors)))
    if root.segments is not None:
        return _simplify(Cat(tuple(_resolve(segment, names) for segment in root.segments)))
    named = names.get(id(root))
    return Leaf(named[0] if named else None, root.size)


def _simplify(term: Prod | Cat) -> Term:
    return term if groups_of(term) else Leaf(None, term.size)


def _contracted(whole: Var, part: Var, names: Mapping[int, tuple[str, str]]) -> Term:
    """The whole dimension as a term in which only the contracted part names groups."""
    inside = {id(atom) for atom in atoms(part)}
    return _resolve(whole, {key: value for key, value in names.items() if key in inside})


def _frozen_axes(traced: Traced, state: Analysis, names: Mapping[int, tuple[str, str]]) -> tuple[Frozen, ...]:
    """The axes of weights that cannot shrink, and the first reason that has something to say."""
    read = {id(atom) for c in state.contractions for atom in atoms(c.axis)}
    found: dict[Frozen, None] = {}
    seen: set[int] = set()
    for tensor, stored in traced.tensors.items():
        if not stored.is_parameter:
            continue
        for dim, var in enumerate(state.tensors[tensor]):
            for atom in atoms(var):
                loud = [reason for reason in atom.reasons if not reason.silent]
                if not atom.reasons and id(atom) not in names:
                    loud = [Reason("no layer's own weight makes it" if id(atom) in read else "no layer reads it", "")]
                if id(atom) not in seen and loud and atom.size > 1:
                    module = loud[0].module or _owner(tensor)
                    found[Frozen(f"{tensor}[{dim}]", loud[0].operation, module)] = None
                seen.add(id(atom))
    return tuple(found)


def _works(traced: Traced, state: Analysis, names: Mapping[int, tuple[str, str]]) -> tuple[Work, ...]:
    return tuple(
        Work(usage.module, usage.weight, tuple(_resolve(var, names) for var in usage.positions), traced.batch)
        for usage in state.usages
    )


def _build(traced: Traced, state: Analysis, fine: bool) -> Graph:
    names = _name_groups(state)
    axes = {name: tuple(_resolve(var, names) for var in dims) for name, dims in state.tensors.items()}
    consumers: dict[tuple[str, int], Term] = {}
    for c in state.contractions:
        whole = c.around if c.around is not None else c.axis
        consumers[c.tensor, c.dim] = _contracted(whole, c.axis, names)
    selections = _selections(traced, state, axes, names) if fine else {}
    extra = []
    for module, group in selections.items():
        weight = f"{module}.weight"
        base = axes[weight][1]
        term = Both(base, Leaf(group, base.size))
        axes[weight] = (axes[weight][0], term)
        consumers[weight, 1] = term
        axis = Axis(weight, 1, term)
        extra.append(Group(group, base.size, "input", (axis,), (), (axis,)))
    selected = {f"{module}.weight[1]" for module in selections}
    units = dict(names.values())
    groups = [_group(name, units[name], axes, consumers, state) for name in units]
    order = _reading_order(state, [*groups, *extra])
    return Graph(
        axes=axes,
        groups=tuple(sorted([*groups, *extra], key=lambda group: order[group.name])),
        frozen=tuple(f for f in _frozen_axes(traced, state, names) if f.axis not in selected),
        works=_works(traced, state, names),
        tensors=traced.tensors,
        aliases=traced.aliases,
        fixed_macs=state.fixed_macs / traced.batch,
        selections=selections,
        split={module: _resolve(var, names) for module, var in state.split.items()},
    )


def _reading_order(state: Analysis, groups: list[Group]) -> dict[str, int]:
    """Groups in the order in which their first weight is used."""
    position: dict[str, int] = {}
    for k, usage in enumerate(state.usages):
        position.setdefault(usage.weight, k)
    big = len(state.usages)
    result = {}
    for group in groups:
        tensors = [axis.tensor for axis in (group.producers or group.consumers)]
        first = min(position.get(tensor, big) for tensor in tensors)
        result[group.name] = 2 * first + (0 if group.unit == "input" else 1)
    return result


def _group(
    name: str,
    unit: str,
    axes: Mapping[str, tuple[Term, ...]],
    consumers: Mapping[tuple[str, int], Term],
    state: Analysis,
) -> Group:
    members = tuple(
        Axis(tensor, dim, term)
        for tensor, terms in axes.items()
        for dim, term in enumerate(terms)
        if name in groups_of(term)
    )
    made = {(tensor, dim) for tensor, dim, _ in state.produced}
    producers = tuple(axis for axis in members if (axis.tensor, axis.dim) in made)
    reading = tuple(Axis(t, d, term) for (t, d), term in consumers.items() if name in groups_of(term))
    size = next(leaf for axis in members for leaf in _leaves_named(axis.term, name)).size
    return Group(name, size, unit, members, producers, reading)


def _leaves_named(term: Term, name: str) -> list[Leaf]:
    if isinstance(term, Leaf):
        return [term] if term.group == name else []
    if isinstance(term, Both):
        return _leaves_named(term.base, name) + _leaves_named(term.fine, name)
    parts = term.factors if isinstance(term, Prod) else term.segments
    return [leaf for part in parts for leaf in _leaves_named(part, name)]


def _selections(
    traced: Traced,
    state: Analysis,
    axes: Mapping[str, tuple[Term, ...]],
    names: Mapping[int, tuple[str, str]],
) -> dict[str, str]:
    """Linear layers whose input features can be gated finer than any producer can shrink, by module.

    That is so where features come straight from the network's input or from flattening (a product of maps and pixels).
    The layer must be a plain `nn.Linear` that is called once, so that surgery can select indices before it; and no cost
    may hold the finer group together with one it nests in, because the two are not independent.
    """
    calls: dict[str, int] = {}
    for c in state.contractions:
        calls[c.tensor] = calls.get(c.tensor, 0) + 1
    result: dict[str, str] = {}
    shared = set(traced.aliases.values())
    for c in state.contractions:
        module = _owner(c.tensor)
        if traced.modules.get(module) != "torch.nn.modules.linear.Linear" or c.tensor != f"{module}.weight":
            continue
        if calls[c.tensor] != 1 or c.tensor in shared:
            continue
        base = axes[c.tensor][1]
        from_input = all(r.operation == "network input" or r.silent for a in atoms(c.axis) for r in a.reasons)
        grouped = groups_of(base)
        whole = isinstance(base, Leaf)
        pixels = any(leaf.group is None and leaf.size > 1 for leaf in leaves(base))
        if (whole and grouped) or not pixels or not from_input or base.size == 1:
            continue
        repeated = sorted(groups_of(base)) != sorted(leaf for leaf in _names(base))
        beside = [axes[c.tensor][0]]
        for usage in state.usages:
            if usage.weight == c.tensor:
                beside += [_resolve(var, names) for var in usage.positions]
        if repeated or any(grouped & groups_of(term) for term in beside):
            continue
        result[module] = f"{module}.inputs"
    return result


def _names(term: Term) -> list[str]:
    if isinstance(term, Leaf):
        return [term.group] if term.group is not None else []
    parts = (
        (term.base, term.fine) if isinstance(term, Both) else term.factors if isinstance(term, Prod) else term.segments
    )
    return [name for part in parts for name in _names(part)]


def _weights_graph(traced: Traced, state: Analysis, kind: Scattered) -> Graph:
    """Gates on single weights or blocks of every weight that a linear layer or a convolution multiplies with."""
    scattered: dict[str, Scattered] = {}
    frozen: dict[str, Frozen] = {}
    groups = []
    for usage in state.usages:  # depthwise convolutions too, which contract nothing
        name = usage.weight
        if not name or name in scattered or len({role for role, _ in state.uses[name]}) > 1:
            continue
        shape = traced.tensors[name].shape
        layout = laid_out(kind, name, shape)
        if kind.most and any(c.dim != 1 or not _in_rows(c.node.base) for c in state.contractions if c.tensor == name):
            layout = "its inputs do not lie along its rows"
        if isinstance(layout, str):
            frozen[name] = Frozen(name, layout, _owner(name))
            continue
        scattered[name] = layout
        unit = "weight" if kind.block == (1, 1) else "block"
        groups += [Group(group, size, unit, (), (), ()) for group, size in layout.units(shape).items()]
    axes: dict[str, tuple[Term, ...]] = {
        name: tuple(Leaf(None, size) for size in stored.shape) for name, stored in traced.tensors.items()
    }
    return Graph(
        axes=axes,
        groups=tuple(groups),
        frozen=tuple(frozen.values()),
        works=_works(traced, state, {}),
        tensors=traced.tensors,
        aliases=traced.aliases,
        fixed_macs=state.fixed_macs / traced.batch,
        scattered=scattered,
    )


def _in_rows(operation: str) -> bool:
    """Does it read a weight's rows, each whole, in order: as a linear layer and a convolution do?"""
    return operation == "linear" or operation.startswith("conv")


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
            return _simplify(Prod(tuple(map(strip, term.factors))))
        return _simplify(Cat(tuple(map(strip, term.segments))))

    def strip_axes(found: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(Axis(axis.tensor, axis.dim, strip(axis.term)) for axis in found)

    frozen = list(graph.frozen)
    for group in graph.groups:
        if group.name in gone:
            reason = gone[group.name]
            first = (group.members or (Axis(group.name, 0, Leaf(None, 1)),))[0]
            frozen.append(Frozen(reason.axis or str(first), reason.operation, reason.module or _owner(first.tensor)))
    return replace(
        graph,
        axes={name: tuple(map(strip, terms)) for name, terms in graph.axes.items()},
        groups=tuple(
            replace(
                g, members=strip_axes(g.members), producers=strip_axes(g.producers), consumers=strip_axes(g.consumers)
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
    )
