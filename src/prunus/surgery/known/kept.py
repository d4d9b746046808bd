"""What a handler of a known class is told: how much of the tensors of its module stays."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from prunus.axes import Graph, Keep


@dataclass(frozen=True)
class Kept:
    """What stays of one module, which the model may hold at several `paths`."""

    module: nn.Module
    paths: tuple[str, ...]
    graph: Graph
    keep: Keep
    rescaled: set[int]  # weights that are rescaled already: two modules may share one

    def mask(self, tensor: str, dim: int) -> Tensor | None:
        """Which positions stay along one dimension of a parameter in the module; None where there is no such one."""
        for path in self.paths:
            name = f"{path}.{tensor}" if path else tensor
            name = self.graph.aliases.get(name, name)
            if name in self.graph.axes:
                return self.keep.positions(self.graph.axes[name][dim])
        path, _, leaf = tensor.rpartition(".")
        whole = self.module.get_submodule(path)._parameters.get(leaf)  # a plan names what loses something alone
        return None if whole is None else torch.ones(whole.shape[dim], dtype=torch.bool)

    def groups(self) -> int | None:
        """How many of the module's groups stay: of a grouped convolution's, of a group norm's."""
        for path in self.paths:
            if path in self.graph.split:
                return int(self.keep.positions(self.graph.split[path]).sum())
        return None


def along(mask: Tensor, *sizes: int) -> tuple[int, ...] | None:
    """How many positions stay along each factor of a product; None where what stays is no product.

    >>> along(torch.tensor([True, False, True, False, False, False]), 2, 3)
    (1, 2)
    >>> along(torch.tensor([True, False, True, False, False, True]), 2, 3) is None
    True
    """
    if mask.numel() != prod(sizes):
        return None
    cube, counts = mask.view(sizes), []
    for k in range(len(sizes)):
        stays = cube.transpose(0, k).flatten(1).any(1) if len(sizes) > 1 else cube
        counts.append(int(stays.sum()))
    return tuple(counts) if prod(counts) == int(mask.sum()) else None


Handler = Callable[[Any, Kept], None]
HANDLERS: list[tuple[tuple[type[nn.Module], ...], Handler]] = []


def known(*classes: type[nn.Module]) -> Callable[[Handler], Handler]:
    """Register what sets the numbers of a class, from the tensors that its module now holds and from what stays."""

    def register(handler: Handler) -> Handler:
        HANDLERS.append((classes, handler))
        return handler

    return register


def count_of_groups(module: nn.Module) -> int | None:
    """The number that a graph's `split` of this module must agree with; None where it has none of a known kind."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups
    if isinstance(module, nn.modules.conv._ConvNd | nn.ChannelShuffle):
        return module.groups
    return None


def own_weight(module: nn.Module) -> Tensor | None:
    """A module's weight where it is a tensor of its own, not a computed one."""
    return module._parameters.get("weight")


def rescaled_weight(module: nn.Module, kept: Kept, factor: float) -> None:
    """Multiply a module's weight, once, however many modules share it."""
    weight = own_weight(module)
    if weight is not None and id(weight) not in kept.rescaled:
        kept.rescaled.add(id(weight))
        with torch.no_grad():
            weight.mul_(factor)
