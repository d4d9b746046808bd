"""Removing units at random and comparing with the same units masked: what the tests of surgery share."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunus.axes import Graph, Keep
from prunus.front import analyse_and_prove
from prunus.surgery import Inputs, mask_sites, outputs, slice_model
from prunus.surgery.artefact import load, plan_of, save
from prunus.surgery.verify import max_rel_diff

TOLERANCE = 1e-5


def drawn(graph: Graph, seed: int, share: float = 0.6) -> Keep:
    """A Keep at random: about a share of every group's units, one at least, not all where there are two."""
    generator = torch.Generator().manual_seed(seed)
    units = {}
    for name, size in graph.sizes.items():
        mask = torch.rand(size, generator=generator) < share
        mask[int(torch.randint(size, (1,), generator=generator))] = True
        if size > 1 and bool(mask.all()):
            mask[int(torch.randint(size, (1,), generator=generator))] = False
        units[name] = mask
    for _, both in graph.fine_axes():
        units[str(both.fine.group)][:] = True
    return Keep(graph, units).closed()


def proven(model: nn.Module, example: Any, units: Any = "structured", failed: int = 0) -> Graph:
    graph = analyse_and_prove(model, example, units=units, form="eager")
    assert graph.form == "eager"
    assert sum("removal" in f.operation for f in graph.frozen) == failed
    return graph


def kinds(graph: Graph) -> dict[str, int]:
    return dict(Counter(group.unit for group in graph.groups))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_removal_is_exact(model: nn.Module, graph: Graph, keep: Keep, example: Any, small: nn.Module) -> None:
    inputs = Inputs.of(example)
    whole = outputs(model, inputs)
    masked = outputs(model, inputs, mask_sites(graph, keep, tensors(model)))
    assert max_rel_diff(masked, outputs(small, inputs)) <= TOLERANCE
    assert max_rel_diff(whole, masked) > 100 * TOLERANCE  # something was removed that matters


def removed(model: nn.Module, graph: Graph, example: Any, seed: int = 0) -> nn.Module:
    """The model with some units less, which was compared with the masked one."""
    keep = drawn(graph, seed)
    small = slice_model(model, graph, keep)
    assert_removal_is_exact(model, graph, keep, example, small)
    small.prunus_plan = plan_of(graph, keep, "eager", Inputs.of(example))  # type: ignore[assignment]
    return small


def assert_comes_back(small: nn.Module, fresh: nn.Module, example: Any, path: Path) -> nn.Module:
    """Saved and loaded into a fresh dense model it is the same, with the same numbers everywhere."""
    save(small, path)
    back = load(fresh, path)
    inputs = Inputs.of(example)
    assert max_rel_diff(outputs(small, inputs), outputs(back, inputs)) == 0.0
    for one, two in zip(small.modules(), back.modules(), strict=True):
        assert type(one) is type(two)
        assert numbers(one) == numbers(two)
    return back


def numbers(module: nn.Module) -> dict[str, Any]:
    """What a module remembers beside its tensors."""
    return {k: v for k, v in vars(module).items() if isinstance(v, int | float) or (k == "normalized_shape")}
