"""Is the small model the same function? Checked on every shrink, and on every group before training starts."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from prunus.axes import Frozen, Graph, Keep
from prunus.errors import InexactSurgery, ModelError, PrunusError
from prunus.graph import drop
from prunus.measure import evaluating
from prunus.surgery.slicing import copied, mask_consumers, slice_model

TOLERANCE = 1e-5  # relative to the largest output, in float32
TRIAL_TOLERANCE = 1e-7  # relative to the removal's own effect, in float64


@dataclass(frozen=True)
class Inputs:
    """One call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, example: Any) -> "Inputs":
        """Read what a user gives as example inputs: a tensor, a tuple of arguments, or a dict of named ones."""
        if isinstance(example, Inputs):
            return example
        if isinstance(example, Mapping):
            return cls((), dict(example))
        if isinstance(example, tuple | list):
            return cls(tuple(example), {})
        return cls((example,), {})

    def random(self, seed: int) -> "Inputs":
        """The same shapes with other values: normal numbers for floats; integers and booleans stay as they are."""
        generator = torch.Generator().manual_seed(seed)

        def change(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                return torch.randn(leaf.shape, generator=generator).to(leaf)
            return leaf

        return Inputs(tree_map(change, self.args), tree_map(change, dict(self.kwargs)))

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Floats in another precision."""

        def change(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return Inputs(tree_map(change, self.args), tree_map(change, dict(self.kwargs)))


def outputs(model: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """All tensors a model returns in evaluation mode."""
    with evaluating(model):
        if weights is None:
            result = model(*inputs.args, **inputs.kwargs)
        else:
            result = functional_call(model, dict(weights), inputs.args, dict(inputs.kwargs))
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _wide(tensor: Tensor) -> Tensor:
    """The values in float64, complex ones as pairs."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def max_rel_diff(reference: Sequence[Tensor], result: Sequence[Tensor]) -> float:
    """The largest |difference| over the largest |reference|; infinite where shapes differ or anything is not finite.

    >>> max_rel_diff([torch.tensor([2.0, 4.0])], [torch.tensor([2.0, 4.5])])
    0.125
    """
    if len(reference) != len(result):
        return float("inf")
    worst = 0.0
    for a, b in zip(reference, result, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel() == 0:
            continue
        a, b = _wide(a), _wide(b)
        scale = a.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        value = ((a - b).abs().max() / scale).item()
        if not value < float("inf"):  # NaN too
            return float("inf")
        worst = max(worst, value)
    return worst


def check(
    model: nn.Module, weights: Mapping[str, Tensor], small: nn.Module, example: Any, random: int = 3
) -> dict[str, Any]:
    """Compare the gated model (its `weights` put in) with the shrunk one, on the user's inputs and on random ones.

    Half precision is compared on float32 copies: the figure must speak of the surgery, not of rounding.

    Raises:
        InexactSurgery: they differ by more than 1e-5 of the largest output.
    """
    inputs = Inputs.of(example)
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in small.parameters())
    if half:
        model, small, inputs = copy.deepcopy(model).float(), copy.deepcopy(small).float(), inputs.to(torch.float32)
        weights = {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}
    worst = 0.0
    tried = [inputs, *(inputs.random(seed) for seed in range(random))]
    for one in tried:
        worst = max(worst, max_rel_diff(outputs(model, one, weights), outputs(small, one)))
    if not worst <= TOLERANCE:
        raise InexactSurgery(
            f"The shrunk model differs from the gated one by {worst:.1e} of its largest output (allowed: "
            f"{TOLERANCE:.0e}), so it is refused. Freeze the parts of the model whose sizes are written as numbers in "
            "its code: prunus.gate(..., freeze=[...])."
        )
    return {"max_rel_diff": worst, "inputs": len(tried), "tolerance": TOLERANCE, "ok": True}


def prove(model: nn.Module, graph: Graph, example: Any) -> Graph:
    """Try every group's removal before anybody trains: what does not run smaller, or comes out unequal, is frozen.

    Python code may hold sizes as numbers, which the exported graph cannot tell from shapes; such a model runs after
    removal, in the right shape, with wrong values. So units are removed for good and the result is compared with the
    same units gated, in float64, relative to the effect of the removal. All groups at once; one by one if that fails.
    """
    if not graph.groups or graph.scattered:
        return graph
    inputs = Inputs.of(example)
    try:
        work = copied(model).double()
        one = inputs.random(7).to(torch.float64)
        outputs(work, one)
        tolerance = TRIAL_TOLERANCE
    except ModelError:
        raise
    except Exception:  # the model insists on its own precision
        work, one, tolerance = copied(model), inputs.random(7), TOLERANCE
    work.requires_grad_(False)
    _calibrate(work)
    names = [group.name for group in graph.groups]
    if _fails(work, graph, one, names, tolerance) is None:
        return graph
    proven: list[str] = []
    gone: dict[str, Frozen] = {}
    for name in names:
        why = _fails(work, graph, one, [*proven, name], tolerance)
        if why is None:
            proven.append(name)
        else:
            gone[name] = Frozen("", why, "")
    return drop(graph, gone)


def _calibrate(model: nn.Module) -> None:
    """Give constant tensors (fresh batch norms, zero biases) values of their own: equal units would hide errors."""
    generator = torch.Generator().manual_seed(11)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        if tensor.dim() == 1 or bool((tensor == tensor.flatten()[0]).all()):  # a zero weight would hide everything
            noise = torch.rand(tensor.shape, generator=generator).to(tensor)
            tensor.data.add_(0.5 * noise if name.endswith("var") else noise - 0.5)


def _fails(model: nn.Module, graph: Graph, inputs: Inputs, names: list[str], tolerance: float) -> str | None:
    """Remove about half of the units of some groups; say what goes wrong, or None."""
    generator = torch.Generator().manual_seed(13)
    units = {}
    for name, size in graph.sizes.items():
        mask = torch.rand(size, generator=generator) < 0.5
        mask[int(torch.randint(size, (1,), generator=generator))] = True
        if size > 1 and bool(mask.all()):
            mask[0 if not mask[1:].any() else 1] = False
        units[name] = mask if name in names else torch.ones(size, dtype=torch.bool)
    keep = Keep(graph, units).closed()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    masked = mask_consumers(graph, keep, tensors)
    try:
        small = outputs(slice_model(model, graph, keep), inputs)
    except PrunusError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:120]
        return f"removal does not run ({type(error).__name__}: {first})"
    whole, gated = outputs(model, inputs), outputs(model, inputs, masked)
    whole, gated, small = ([_wide(a) for a in every] for every in (whole, gated, small))
    effect = max(((a - b).abs().max().item() if a.numel() else 0.0) for a, b in zip(whole, gated, strict=True))
    scale = max(a.abs().max().item() if a.numel() else 0.0 for a in gated)
    error_ = max_rel_diff(gated, small) * scale
    if not error_ <= tolerance * max(effect, 1e-6 * scale):
        return f"removal is not exact (off by {error_ / max(effect, 1e-300):.0e} of its effect)"
    return None
