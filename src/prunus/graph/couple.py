"""From a walked model to its `Graph`: name the groups, resolve every axis, say what is frozen and why."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from prunus.axes import Axis, Frozen, Graph, Group, Step
from prunus.errors import several
from prunus.graph.analysis import Analysis
from prunus.graph.branches import Branch, branches
from prunus.graph.chain import chains
from prunus.graph.choose import choose
from prunus.graph.kinds import EVERY, UNITS, kinds_of
from prunus.graph.resolve import resolve, works_of
from prunus.graph.trace import Traced, trace
from prunus.graph.unify import Reason, Var, atoms
from prunus.graph.walk import walk
from prunus.graph.weights import weights_graph
from prunus.scatter import read
from prunus.terms import Both, Leaf, Prod, Term, groups_of, leaves

PLAIN = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def analyse(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    units: str | Iterable[str] = "structured",
    only: Iterable[str] = (),
    freeze_names: Iterable[str] = (),
) -> Graph:
    """Find everything in a model that can shrink exactly.

    Args:
        model: any module that `torch.export` takes.
        args, kwargs: example inputs.
        units: kinds of units, see `prunus.graph.kinds`; or, by itself, "weights" (one gate a weight), "16x16" (one gate
            a block of so many rows and columns of a weight), "2:4" (one gate a weight, of which at most two of every
            four in a row stay).
        only: patterns of group or module names; everything else is frozen.
        freeze_names: patterns of group or module names to freeze.

    Raises:
        ModelError: the model cannot be exported, or a pattern names nothing.
    """
    kind = read(units)
    kinds = kinds_of(units) if kind is None else frozenset()
    traced = trace(model, args, kwargs)
    state = walk(traced)
    graph = weights_graph(traced, state, kind) if kind is not None else _build(traced, state, kinds)
    return choose(graph, only, freeze_names)


def _owner(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def named_groups(state: Analysis, kinds: frozenset[str] = EVERY) -> dict[int, tuple[str, str]]:
    """Name the atoms that can shrink: by the first weight that makes them, in the order the weights are used."""
    read = _read(state)
    names: dict[int, tuple[str, str]] = {}
    taken: dict[str, int] = {}
    for tensor, dim, unit in state.produced:
        for atom in atoms(state.tensors[tensor][dim]):
            if id(atom) in names or atom.size == 1 or atom.reasons:
                continue
            if id(atom) not in read and not atom.sums:
                continue
            base = _owner(tensor) or tensor
            taken[base] = taken.get(base, 0) + 1  # counted whatever was asked for: a name is a name
            names[id(atom)] = (base if taken[base] == 1 else f"{base}#{taken[base]}", _kind(atom, unit))
    return {key: value for key, value in names.items() if value[1] in kinds}


def _kind(atom: Var, unit: str) -> str:
    """What the units of an atom are: what an operation calls them, or what the layer makes that makes them."""
    return atom.kind or ("width" if atom.sums else unit)


def _read(state: Analysis) -> set[int]:
    return {id(atom) for c in state.contractions for atom in atoms(c.axis)}


def _contracted(whole: Var, part: Var, names: Mapping[int, tuple[str, str]]) -> Term:
    """The whole dimension as a term in which only the contracted part names groups."""
    inside = {id(atom) for atom in atoms(part)}
    return resolve(whole, {key: value for key, value in names.items() if key in inside})


def _frozen_axes(
    traced: Traced, state: Analysis, names: Mapping[int, tuple[str, str]], selected: set[str]
) -> tuple[Frozen, ...]:
    """The axes of weights that cannot shrink, and the first reason that has something to say."""
    read = _read(state)
    units: dict[int, str] = {}
    for tensor, dim, unit in state.produced:
        for atom in atoms(state.tensors[tensor][dim]):
            units.setdefault(id(atom), unit)
    found: dict[int, list[Frozen]] = {}
    for tensor, stored in traced.tensors.items():
        if not stored.is_parameter:
            continue
        for dim, var in enumerate(state.tensors[tensor]):
            for atom in atoms(var) if f"{tensor}[{dim}]" not in selected else ():
                loud, ask = [reason for reason in atom.reasons if not reason.silent], ""
                if id(atom) in units:  # somebody's units: whatever froze them is news
                    loud = loud or atom.reasons
                if not atom.reasons and id(atom) not in names:
                    reason, ask = _not_chosen(atom, units.get(id(atom)), id(atom) in read)
                    loud = [reason]
                if loud and atom.size > 1:
                    module = loud[0].module or _owner(tensor)
                    found.setdefault(id(atom), []).append(Frozen(f"{tensor}[{dim}]", loud[0].operation, module, ask))
    rows: dict[Frozen, None] = {}
    for first, *others in found.values():
        rows[replace(first, also=tuple(dict.fromkeys(other.axis for other in others)))] = None
    return tuple(rows)


def _not_chosen(atom: Var, unit: str | None, is_read: bool) -> tuple[Reason, str]:
    """Why an atom that nothing froze has no gates, and which kind of units to ask for."""
    if unit is not None and (is_read or atom.sums):
        kind = _kind(atom, unit)
        ask = next(word for word, kinds in UNITS.items() if kinds == {kind})
        return (atom.sums[0] if atom.sums else Reason(f"units do not name {several(kind)}", "")), ask
    return Reason("no layer's own weight makes it" if is_read else "no layer reads it", ""), ""


def _branch_group(branch: Branch, state: Analysis) -> Group:
    """A branch as a group of one unit, whose gate acts on the whole of its last layer's weight and bias."""
    whole = Leaf(branch.name, 1)
    members = tuple(Axis(tensor, -1, whole) for tensor in branch.tensors)
    sites = tuple(Axis(tensor, -1, whole) for tensor in branch.sites)
    nodes = {node.name: node for node in state.traced.nodes}
    steps = [Step("passes", nodes[name].op, nodes[name].module) for name in branch.nodes]
    added = nodes[branch.addition]
    chain = (*steps, Step("joins", added.op, added.module))
    return Group(branch.name, 1, "branch", members, (), (), sites, chain)


def _build(traced: Traced, state: Analysis, kinds: frozenset[str]) -> Graph:
    names = named_groups(state, kinds)
    axes = {name: tuple(resolve(var, names) for var in dims) for name, dims in state.tensors.items()}
    consumers: dict[tuple[str, int], Term] = {}
    for c in state.contractions:
        whole = c.around if c.around is not None else c.axis
        consumers[c.tensor, c.dim] = _contracted(whole, c.axis, names)
    sites = _sites(traced, state, names)
    extra = []
    selections = _selections(traced, state, axes, names) if "input" in kinds else {}
    for module, group in selections.items():
        weight = f"{module}.weight"
        base = axes[weight][1]
        term = Both(base, Leaf(group, base.size))
        axes[weight] = (axes[weight][0], term)
        consumers[weight, 1] = sites[weight, 1] = term
        axis = Axis(weight, 1, term)
        steps = (Step("reads", "aten.linear.default", module),)
        extra.append(Group(group, base.size, "input", (axis,), (), (axis,), (axis,), steps))
    selected = {f"{module}.weight[1]" for module in selections}
    units = dict(names.values())
    way = chains(traced, state, names)
    groups = [_group(name, units[name], axes, consumers, sites, way.get(name, ()), state) for name in units]
    cut = branches(state) if "branch" in kinds else []
    extra += [_branch_group(branch, state) for branch in cut]
    order = _reading_order(state, [*groups, *extra])
    return Graph(
        axes=axes,
        groups=tuple(sorted([*groups, *extra], key=lambda group: order[group.name])),
        frozen=_frozen_axes(traced, state, names, selected),
        works=works_of(traced, state, names, cut),
        tensors=traced.tensors,
        aliases=traced.aliases,
        fixed_macs=state.fixed_macs / traced.batch,
        selections=selections,
        branches={tensor: tuple(b.name for b in cut if tensor in b.tensors) for b in cut for tensor in b.tensors},
        split={module: resolve(var, names) for module, var in state.split.items()},
        entangled=(*_entangled(state, sites), *(tensor for branch in cut for tensor in branch.sites)),
    )


def _sites(traced: Traced, state: Analysis, names: Mapping[int, tuple[str, str]]) -> dict[tuple[str, int], Term]:
    """Where gates act, with terms that name what is gated there alone.

    At the readers, or at everything that makes units whose dead ones must be zero: weights, biases, tables, tensors
    that are added; not at scales, where a gate would act once more.
    """
    summed = {id(a) for dims in state.tensors.values() for var in dims for a in atoms(var) if a.sums}
    gated: dict[tuple[str, int], tuple[Var, set[int]]] = {}
    for c in state.contractions:
        inside = {id(atom) for atom in atoms(c.axis)} - summed
        whole = c.around if c.around is not None else c.axis
        gated.setdefault((c.tensor, c.dim), (whole, set()))[1].update(inside & set(names))
    read = {(c.tensor, c.dim) for c in state.contractions}
    made = {(tensor, dim) for tensor, dim, _ in state.produced}
    for tensor, stored in traced.tensors.items():
        only_scales = {role.split(".")[1] for role, _ in state.uses.get(tensor, []) if "." in role} <= {
            "mul",
            "rms_norm",
        }
        for dim, var in enumerate(state.tensors[tensor]):
            inside = {id(atom) for atom in atoms(var)} & summed & set(names)
            makes = (tensor, dim) in made or ((tensor, dim) not in read and not only_scales)
            if stored.is_parameter and inside and makes:
                gated.setdefault((tensor, dim), (var, set()))[1].update(inside)
    terms = {
        place: resolve(var, {key: value for key, value in names.items() if key in inside})
        for place, (var, inside) in gated.items()
    }
    return {place: term for place, term in terms.items() if groups_of(term)}


def _entangled(state: Analysis, sites: Mapping[tuple[str, int], Term]) -> tuple[str, ...]:
    """Gated tensors that are not read by one plain layer alone."""
    plain = {c.tensor for c in state.contractions if c.node.base in PLAIN and (c.tensor, c.dim) in sites}
    places = [tensor for tensor, _ in sites]
    result = set()
    for tensor in places:
        roles = {role for role, _ in state.uses.get(tensor, [])}
        if tensor not in plain or len(roles) > 1 or places.count(tensor) > 1:
            result.add(tensor)
    return tuple(sorted(result))


def _reading_order(state: Analysis, groups: list[Group]) -> dict[str, int]:
    """Groups in the order in which their first weight is used."""
    position: dict[str, int] = {}
    for k, usage in enumerate(state.usages):
        position.setdefault(usage.weight, k)
    big = len(state.usages)
    result = {}
    for group in groups:
        tensors = [axis.tensor for axis in (group.producers or group.consumers or group.sites)]
        first = min(position.get(tensor, big) for tensor in tensors)
        result[group.name] = 2 * first + (0 if group.unit == "input" else 1)
    return result


def _group(
    name: str,
    unit: str,
    axes: Mapping[str, tuple[Term, ...]],
    consumers: Mapping[tuple[str, int], Term],
    sites: Mapping[tuple[str, int], Term],
    chain: tuple[Step, ...],
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
    reading, acting = (
        tuple(Axis(t, d, term) for (t, d), term in places.items() if name in groups_of(term))
        for places in (consumers, sites)
    )
    size = next(leaf for axis in members for leaf in _leaves_named(axis.term, name)).size
    return Group(name, size, unit, members, producers, reading, acting, chain)


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
        if calls[c.tensor] != 1 or c.tensor in shared or c.node.in_region:
            continue
        base = axes[c.tensor][1]
        from_input = all(
            id(a) in names
            or a.size == 1
            or (a.reasons and all(r.operation == "network input" or r.silent for r in a.reasons))
            for a in atoms(c.axis)
        )
        grouped = groups_of(base)
        whole = isinstance(base, Leaf)
        pixels = any(leaf.group is None and leaf.size > 1 for leaf in leaves(base))
        if (whole and grouped) or not pixels or not from_input or base.size == 1:
            continue
        repeated = sorted(groups_of(base)) != sorted(leaf for leaf in _names(base))
        beside = [axes[c.tensor][0]]
        for usage in state.usages:
            if usage.weight == c.tensor:
                beside += [resolve(var, names) for var in usage.positions]
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
