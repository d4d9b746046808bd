"""Where gates are multiplied in: every weight once a round; one with gates along two dimensions takes two rounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunus.axes import Axis, Graph
from prunus.terms import factors


@dataclass(frozen=True)
class Round:
    """Gated axes of different weights: the name of the buffer that numbers their gates, the weights, the layout."""

    index: str
    names: list[str]
    places: list[tuple[nn.Module, str]]
    lengths: list[int]
    shapes: list[tuple[int, ...]]

    def weights(self) -> list[Any]:
        """The weights as they are now."""
        return [module._parameters[leaf] for module, leaf in self.places]


def rounds_of(
    model: nn.Module, graph: Graph, offsets: Mapping[str, int], units: int
) -> tuple[list[Round], list[Tensor | None]]:
    """Lay a graph's sites out, with the numbers of the gates that multiply at every position, round by round.

    The numbers are None where gate k acts at position k alone.
    """
    rounds: list[list[Axis]] = []
    for axis in graph.sites():
        free = next((one for one in rounds if all(axis.tensor != other.tensor for other in one)), None)
        if free is None:
            rounds.append([axis])
        else:
            free.append(axis)
    results, indices = [], []
    for number, axes in enumerate(rounds):
        rows = [factors(axis.term, offsets, units) for axis in axes]
        depth = max(row.shape[0] for row in rows)
        full = [torch.cat([r, torch.full((depth - r.shape[0], r.shape[1]), units)]) for r in rows]
        index = torch.cat(full, dim=1)
        plain = depth == 1 and torch.equal(index[0], torch.arange(units))
        indices.append(None if plain else index)
        names = [axis.tensor for axis in axes]
        places = [(model.get_submodule(path), leaf) for path, _, leaf in (name.rpartition(".") for name in names)]
        lengths = [axis.term.size for axis in axes]
        results.append(Round(f"_index{number}", names, places, lengths, [_shape(graph, axis) for axis in axes]))
    return results, indices


def _shape(graph: Graph, axis: Axis) -> tuple[int, ...]:
    """What makes gates along an axis broadcast over its tensor; a branch's one gate has no axis, and takes the last."""
    shape = [1] * len(graph.tensors[axis.tensor].shape)
    shape[axis.dim] = -1
    return tuple(shape)
