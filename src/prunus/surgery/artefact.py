"""A shrunk model as a file: its weights, and in the same file's metadata the plan that made it. No pickle anywhere.

The plan says for every axis what lies along it and for every group which units stay. Loading takes a fresh dense model,
replays the plan and puts the weights in; a plan that does not fit is refused, never executed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunus import scatter, sealed
from prunus.axes import Graph, Group, Keep
from prunus.errors import ArtefactError, ModelError, PrunusError
from prunus.surgery.example import described, fabricated
from prunus.surgery.exported import Exported
from prunus.surgery.known import count_of_groups
from prunus.surgery.slicing import slice_model
from prunus.surgery.trial import Inputs
from prunus.terms import Both, Cat, Leaf, Prod, Term, from_json, groups_of, leaves, to_json

SCHEMA = 1
KEY = "prunus"
DEPTH = 16  # groups over each other; a stranger's plan must not make us allocate more


def plan_of(graph: Graph, keep: Keep, form: str = "eager", inputs: Inputs | None = None) -> dict[str, Any]:
    """Write down what surgery did, so that it can be done again on a fresh dense model.

    For the graph form, what the example inputs are like goes with it: the model is exported again when it is loaded.
    """
    kept = keep.kept()
    return {
        "schema": SCHEMA,
        "groups": {name: {"size": size, "kept": kept[name]} for name, size in graph.sizes.items()},
        "axes": {
            name: [to_json(term) for term in terms]
            for name, terms in graph.axes.items()
            if any(groups_of(term) for term in terms)
        },
        "dense": {name: list(stored.shape) for name, stored in graph.tensors.items()},
        "selections": graph.selections,
        "split": {module: to_json(term) for module, term in graph.split.items() if groups_of(term)},
        "aliases": graph.aliases,
        "scattered": {name: layout.to_json() for name, layout in graph.scattered.items()},
        "branches": {tensor: list(names) for tensor, names in graph.branches.items()},
        "form": form,
        "inputs": described(inputs) if form == "graph" and inputs is not None else None,
    }


def save(small: nn.Module, path: str | Path) -> None:
    """Save a shrunk model: weights and buffers, the plan in the metadata; written whole or not at all.

    Weights that were removed where they stood are stored as what remains of them and one bit a unit: a place, a block.
    """
    plan = getattr(small, "prunus_plan", None)
    if not isinstance(plan, dict):
        raise ModelError("prunus.save saves what prunus.shrink returned; this model has no plan.")
    tensors: dict[str, Tensor] = {}
    for name, value in small.state_dict().items():
        if name in plan["aliases"]:
            continue
        if not isinstance(value, Tensor):
            raise ModelError(
                f"The model keeps {name!r} in its state dict, which is no tensor and cannot be saved safely."
            )
        value = value.detach().cpu().contiguous()
        if name in plan["scattered"]:
            shape = tuple(value.shape)
            layout = scatter.from_json(plan["scattered"][name], shape)
            kept = {group: torch.zeros(count, dtype=torch.bool) for group, count in layout.units(shape).items()}
            for group, units in kept.items():
                units[plan["groups"][group]["kept"]] = True
            tensors[f"{name}:places"] = _pack(torch.cat(list(kept.values())))
            grown = int((value[~layout.over(kept, shape).bool()] != 0).sum())
            if grown:
                raise ModelError(
                    f"{grown:,} weights of {name!r} that were removed are not zero any more: training grew them again, "
                    "and a file would lose them. Put them back to zero after every step of training, or before saving."
                )
            value = value[layout.over(kept, shape)]
        tensors[name] = value.clone()
    if plan["form"] == "graph" and plan["inputs"] is None:
        raise ModelError(
            "This shrunk program cannot be saved: its example inputs hold objects that are no tensors, numbers or "
            "words, and loading it needs inputs like them. torch.export.save(torch.export.export(...)) can keep it."
        )
    slim = dict(plan)
    if plan["scattered"]:  # the places say it already
        slim["groups"] = {name: {"size": group["size"], "kept": []} for name, group in plan["groups"].items()}
    sealed.write(Path(path), KEY, tensors, slim)


def load(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a shrunk model into a copy of a fresh dense one of the same architecture.

    Raises:
        ArtefactError: the file is damaged, hostile, or another model's; the sentence says which.
    """
    path = Path(path)
    tensors, plan = sealed.read(path, KEY, "plan", SCHEMA)
    try:
        return _replay(model, plan, tensors, path)
    except PrunusError:
        raise
    except Exception as error:
        raise ArtefactError(f"{path} holds a plan that Prunus did not write ({type(error).__name__}).") from error


def _replay(model: nn.Module, plan: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> nn.Module:
    dense = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, shape in plan["dense"].items():
        if name not in dense:
            raise ArtefactError(f"{path} belongs to another model: this one has no tensor {name!r}.")
        if list(dense[name].shape) != shape:
            raise ArtefactError(
                f"{path} belongs to another model: {name!r} has shape {tuple(dense[name].shape)} here and "
                f"{tuple(shape)} there."
            )
    strange = [name for name in dense if name not in plan["dense"]]
    if strange:
        raise ArtefactError(f"{path} belongs to another model: it knows nothing of the tensor {strange[0]!r}.")
    graph, keep = _graph(plan, model, dense, tensors)
    scattered = {
        name: _unpack(tensors, name, layout.over(keep.units, tuple(dense[name].shape)))
        for name, layout in graph.scattered.items()
    }
    if plan["form"] not in ("eager", "graph"):
        raise ArtefactError(f"{path} holds a model in a form that is none: {plan['form']!r}.")
    small = slice_model(model, graph, keep, form=plan["form"])
    if plan["form"] == "graph":
        try:
            small = Exported(model, fabricated(plan["inputs"], model)).shrunk(graph, keep, small)
        except ArtefactError:
            raise
        except PrunusError as error:
            raise ArtefactError(f"{path} says of its inputs what this model does not take: {error}") from error
    own = {name: value for name, value in small.state_dict(keep_vars=True).items() if name not in graph.aliases}
    given = {name: scattered.get(name, value) for name, value in tensors.items() if not name.endswith(":places")}
    missing = [name for name in own if name not in given] + [name for name in given if name not in own]
    if missing:
        raise ArtefactError(f"{path} is damaged: {missing[0]!r} is in the model or in the file, not in both.")
    with torch.no_grad():
        for name, value in own.items():
            new = given[name]
            if new.is_floating_point() != value.is_floating_point() or (
                new.dtype != value.dtype and not new.is_floating_point()
            ):
                raise ArtefactError(f"{path} is damaged: {name!r} holds {new.dtype}, where {value.dtype} belongs.")
            if new.shape != value.shape:
                raise ArtefactError(
                    f"{path} is damaged: {name!r} has shape {tuple(new.shape)}, its plan says {tuple(value.shape)}."
                )
            value.data = new.to(value.device)  # the file's dtype is what was deployed
    if graph.scattered:
        kept = keep.kept()
        plan = plan | {"groups": {name: {"size": size, "kept": kept[name]} for name, size in graph.sizes.items()}}
    small.prunus_plan = plan  # type: ignore[assignment]
    return small


def _graph(
    plan: dict[str, Any], model: nn.Module, dense: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> tuple[Graph, Keep]:
    """Rebuild what surgery needs, believing nothing: every size must be the size of what it speaks of."""
    axes = {}
    for name, terms in plan["axes"].items():
        read = tuple(from_json(term) for term in terms)
        if tuple(term.size for term in read) != tuple(dense[name].shape):
            raise ArtefactError(f"The plan's axes of {name!r} do not have the sizes of that tensor.")
        axes[name] = read
    split = {module: from_json(term) for module, term in plan["split"].items()}
    sizes = {leaf.group: leaf.size for terms in axes.values() for term in terms for leaf in leaves(term) if leaf.group}
    counts = {module: count_of_groups(model.get_submodule(module)) for module in split}
    split = {module: term for module, term in split.items() if counts[module] is not None}  # others: a function's own
    scattered = {name: scatter.from_json(value, tuple(dense[name].shape)) for name, value in plan["scattered"].items()}
    for name, layout in scattered.items():
        units = layout.units(tuple(dense[name].shape))
        if any(group in sizes for group in units):
            raise ArtefactError(f"The plan removes weights of {name!r} by a group that another tensor has.")
        sizes |= units
    branches = {tensor: tuple(names) for tensor, names in plan["branches"].items()}
    whole = {name for names in branches.values() for name in names}
    if whole & sizes.keys() or not branches.keys() <= dense.keys():
        raise ArtefactError("The plan leaves out branches that the model does not have.")
    sizes |= dict.fromkeys(whole, 1)
    for module, term in split.items():
        if term.size != counts[module]:
            raise ArtefactError(f"The plan splits {module!r} into other groups than it has.")
    groups, kept = [], {}
    for name, group in plan["groups"].items():
        if sizes.get(name) != group["size"]:
            raise ArtefactError(f"The plan's group {name!r} does not have the size of its axes.")
        groups.append(Group(name, sizes[name], "branch" if name in whole else "", (), (), ()))
        kept[name] = group["kept"]
        if not isinstance(kept[name], list) or len(set(kept[name])) < len(kept[name]):
            raise ArtefactError(f"The plan must list the units of {name!r} that stay, each once.")
    every = [*(t for terms in axes.values() for t in terms), *split.values()]
    if any(leaf.group and sizes.get(leaf.group) != leaf.size for term in every for leaf in leaves(term)):
        raise ArtefactError("The plan's axes disagree about the size of a group.")
    if any(_depth(term) > DEPTH for term in every):
        raise ArtefactError(f"The plan lays more than {DEPTH} groups over each other, which Prunus never does.")
    shared = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for alias, target in plan["aliases"].items():
        if target not in dense or shared.get(alias) is not dense[target]:
            raise ArtefactError(f"The plan shares the tensor {target!r} under a name under which the model does not.")
    for module, name in plan["selections"].items():
        layer, (_, term) = model.get_submodule(module), axes[f"{module}.weight"]
        if type(layer) is not nn.Linear or not isinstance(term, Both) or term.fine.group != name:
            raise ArtefactError(f"The plan selects inputs of {module!r}, whose inputs are not selected.")
    selected = {f"{module}.weight" for module in plan["selections"]}
    for name, terms in axes.items():
        for k, term in enumerate(terms):
            under = term.base if isinstance(term, Both) and k == 1 and name in selected else term
            if _finer(under):
                raise ArtefactError(f"The plan gates {name!r} finer than its producers, but selects nothing before it.")
    graph = Graph(
        axes=axes,
        groups=tuple(groups),
        aliases=plan["aliases"],
        selections=plan["selections"],
        split=split,
        scattered=scattered,
        branches=branches,
    )
    if graph.scattered:
        kept = {}
        for name, layout in scattered.items():
            units = layout.units(tuple(dense[name].shape))
            places = _places(tensors, name, sum(units.values()))
            if layout.most is not None and bool((places.view(-1, layout.most[1]).sum(1) > layout.most[0]).any()):
                raise ArtefactError(f"{name!r} keeps more of its weights than the {layout} that its plan says.")
            for group, part in zip(units, places.split(list(units.values())), strict=True):
                kept[group] = part.nonzero().flatten().tolist()
    return graph, Keep.of_indices(graph, kept)


def _finer(term: Term) -> bool:
    """Does a finer group lie over a base anywhere in it?"""
    if isinstance(term, Prod | Cat):
        return any(map(_finer, term.factors if isinstance(term, Prod) else term.segments))
    return isinstance(term, Both)


def _depth(term: Term) -> int:
    """How many gates can act at one position: what a plan makes `factors` allocate."""
    if isinstance(term, Leaf):
        return int(term.group is not None)
    if isinstance(term, Both):
        return _depth(term.base) + 1
    if isinstance(term, Prod):
        return sum(_depth(factor) for factor in term.factors)
    return max(_depth(segment) for segment in term.segments)


def _pack(mask: Tensor) -> Tensor:
    """Booleans as bits, the first in the lowest."""
    padded = torch.zeros((mask.numel() + 7) // 8 * 8, dtype=torch.uint8)
    padded[: mask.numel()] = mask.to(torch.uint8)
    return (padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def _places(tensors: Mapping[str, Tensor], name: str, count: int) -> Tensor:
    bits = tensors[f"{name}:places"]
    if bits.dtype != torch.uint8 or bits.numel() != (count + 7) // 8:
        raise ArtefactError(f"The places of {name!r} do not have the size of that tensor.")
    return ((bits.view(-1, 1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[:count].bool()


def _unpack(tensors: Mapping[str, Tensor], name: str, places: Tensor) -> Tensor:
    values = tensors[name]
    if values.shape != (int(places.sum()),):
        raise ArtefactError(f"The values of {name!r} are not as many as their places.")
    full = torch.zeros(places.shape, dtype=values.dtype)
    full[places] = values
    return full
