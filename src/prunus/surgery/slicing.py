"""Slicing by a Keep: (model, graph, Keep) gives a smaller model of the user's own class. It knows nothing of gates."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunus.axes import Graph, Keep
from prunus.errors import ModelError
from prunus.measure import evaluating
from prunus.surgery.known import resize
from prunus.terms import Both


class SelectedLinear(nn.Linear):
    """A linear layer that reads only some of its input's features, by index.

    The indices are derived from the plan, so they are no part of the state dict.
    """

    selected: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Select, then multiply."""
        return F.linear(input.index_select(-1, self.selected), self.weight, self.bias)

    def extra_repr(self) -> str:
        """Say so when printed."""
        return super().extra_repr() + ", selected"


def kept_indices(graph: Graph, keep: Keep) -> dict[str, list[Tensor | None]]:
    """For every tensor and dimension the indices that stay; None where all do."""
    result: dict[str, list[Tensor | None]] = {}
    cache: dict[object, Tensor | None] = {}
    for name, terms in graph.axes.items():
        row: list[Tensor | None] = []
        for term in terms:
            if term not in cache:
                mask = keep.positions(term)
                cache[term] = None if bool(mask.all()) else mask.nonzero().flatten()
            row.append(cache[term])
        result[name] = row
    return result


def mask_sites(graph: Graph, keep: Keep, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zero the weights at the removed units' sites: as they must act for removal to be exact, at full size."""
    result = dict(tensors)
    for axis in graph.sites():
        mask = keep.positions(axis.term)
        tensor = result[axis.tensor]
        shape = [1] * tensor.dim()
        shape[axis.dim] = -1
        result[axis.tensor] = tensor * mask.to(device=tensor.device, dtype=tensor.dtype).view(shape)
    for name, layout in graph.scattered.items():
        tensor = result[name]
        result[name] = tensor * layout.over(keep.units, tensor.shape).to(device=tensor.device, dtype=tensor.dtype)
    return result


def _module(model: nn.Module, tensor: str) -> tuple[nn.Module, str]:
    path, _, leaf = tensor.rpartition(".")
    return model.get_submodule(path), leaf


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    module, leaf = _module(model, name)
    if leaf in module._parameters:
        module._parameters[leaf] = value  # type: ignore[assignment]
    else:
        module._buffers[leaf] = value


def copied(model: nn.Module) -> nn.Module:
    """Copy a model with everything in it."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"The model {type(model).__name__} cannot be copied ({type(error).__name__}: {error}); surgery works on a "
            "copy, so every attribute of it must be copyable."
        ) from error


def slice_model(
    model: nn.Module,
    graph: Graph,
    keep: Keep,
    weights: Mapping[str, Tensor] | None = None,
    form: str = "eager",
) -> nn.Module:
    """Copy a model with only the kept units in it.

    Args:
        model: the dense model; it is not touched.
        graph: its analysis.
        keep: a closed Keep.
        weights: tensors to take instead of the model's own, by canonical name (gates absorbed, say).
        form: "eager" for a model that is to run, its known layers knowing their new sizes; "graph" for one that only
            holds the tensors of a program.

    Tied weights stay tied; dtype, device, training mode and hooks stay as they are.
    """
    small = copied(model)
    indices = kept_indices(graph, keep)
    tensors = dict(small.named_parameters()) | dict(small.named_buffers())
    with torch.no_grad():
        for name, per_dim in indices.items():
            old = tensors[name]
            value = old.detach() if weights is None or name not in weights else weights[name].detach()
            for dim, index in enumerate(per_dim):
                if index is not None:
                    value = value.index_select(dim, index.to(value.device))
            if isinstance(old, nn.Parameter):
                new: Tensor = nn.Parameter(value.clone(), requires_grad=old.requires_grad)
            else:
                new = value.clone()
            for every in [name, *(alias for alias, target in graph.aliases.items() if target == name)]:
                _put(small, every, new)
        for module, group in graph.selections.items():
            _select(small, graph, keep, module, group)
        if form == "eager":
            with evaluating(small):  # a parametrised weight is computed to be measured, which in training may change it
                resize(small, graph, keep)
    return small


def _select(small: nn.Module, graph: Graph, keep: Keep, module: str, group: str) -> None:
    """Put an index selection before a linear layer, where finer units are gone under bases that stay."""
    layer = small.get_submodule(module)
    term = graph.axes[f"{module}.weight"][1]
    assert isinstance(term, Both)
    base = keep.positions(term.base)
    index = keep.units[group][base].nonzero().flatten()
    if index.numel() < int(base.sum()):
        if type(layer) is not nn.Linear:
            raise ModelError(f"The inputs of {module} can be selected only where it is a plain nn.Linear.")
        layer.__class__ = SelectedLinear
        layer.register_buffer("selected", index.to(layer.weight.device), persistent=False)
