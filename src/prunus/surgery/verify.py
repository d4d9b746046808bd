"""Is the small model the same function? Checked on every shrink, and on every group before training starts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunus.axes import Frozen, Graph, Keep
from prunus.errors import InexactSurgery, ModelError, PrunusError, said
from prunus.graph import drop
from prunus.surgery.exported import Exported
from prunus.surgery.slicing import copied, mask_sites, slice_model
from prunus.surgery.trial import Inputs, first_run, outputs, telling
from prunus.terms import spread

TOLERANCE = 1e-5  # relative to the largest output, in float32
TRIAL_TOLERANCE = 1e-7  # relative to the removal's own effect, in float64


def _wide(tensor: Tensor) -> Tensor:
    """The values in float64, complex ones as pairs."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def max_rel_diff(reference: Sequence[Tensor], result: Sequence[Tensor]) -> float:
    """The largest |difference| over the largest |reference|; infinite where shapes differ or something is not finite.

    Infinities that stand in the same places are equal: models mask with them.

    >>> max_rel_diff([torch.tensor([2.0, 4.0])], [torch.tensor([2.0, 4.5])])
    0.125
    """
    if len(reference) != len(result):
        return float("inf")
    worst = 0.0
    for a, b in zip(reference, result, strict=True):
        if a.shape != b.shape:
            return float("inf")
        a, b = _wide(a), _wide(b)
        masked = a.isinf() & (a == b)
        a, b = a[~masked], b[~masked]
        if a.numel() == 0:
            continue
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

    Half precision is compared on float32 copies: the figure must speak of the surgery, not of rounding. Where normal
    numbers are nothing that the model can take, the random inputs lie between the user's own.

    Raises:
        InexactSurgery: they differ by more than 1e-5 of the largest output.
        ModelError: the gated model gives no numbers on the user's inputs, so that nothing can be compared.
    """
    inputs, original, precision = Inputs.of(example), model, None
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in small.parameters()):
        precision = torch.float32
        model, small, inputs = copied(model).float(), copied(small).float(), inputs.to(precision)
        weights = {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}

    def gated(one: Inputs) -> list[Tensor]:
        return outputs(model, one, weights, precision=precision)

    def compare(one: Inputs, reference: list[Tensor]) -> float:
        try:
            return max_rel_diff(reference, outputs(small, one, precision=precision, not_of=original))
        except PrunusError:
            raise
        except Exception as error:
            raise InexactSurgery(f"The shrunk model does not run, so it is refused ({said(error)}).") from error

    reference = first_run(gated, inputs, type(original).__name__)
    if not telling(reference):
        raise ModelError(
            "The gated model gives NaN, or no numbers at all, on the example inputs: there is nothing that the shrunk "
            "model could be compared with. Give inputs that it gives numbers for."
        )
    worst, tried = compare(inputs, reference), 1
    for seed in range(random):
        one, reference = _taken(gated, inputs, seed)
        if one is not None:
            worst, tried = max(worst, compare(one, reference)), tried + 1
    if not worst <= TOLERANCE:
        raise InexactSurgery(
            f"The shrunk model differs from the gated one by {worst:.1e} of its largest output (allowed: "
            f"{TOLERANCE:.0e}), so it is refused. Freeze the parts of the model whose sizes are written as numbers in "
            "its code: prunus.gate(..., freeze=[...])."
        )
    return {"max_rel_diff": worst, "inputs": tried, "tolerance": TOLERANCE, "ok": True}


def _taken(run: Callable[[Inputs], list[Tensor]], inputs: Inputs, seed: int) -> tuple[Inputs | None, list[Tensor]]:
    """Random inputs that a model takes and gives numbers for, if there are any."""
    for one in (inputs.random(seed), inputs.like(seed)):
        try:
            result = run(one)
        except PrunusError:
            raise
        except Exception:  # an index out of range, say
            continue
        if telling(result):
            return one, result
    return None, []


def prove(model: nn.Module, graph: Graph, example: Any, form: str = "auto") -> Graph:
    """Try every group's removal before anybody trains: what does not run smaller, or comes out unequal, is frozen.

    Python code may hold sizes as numbers, which the exported graph cannot tell from shapes; such a model runs after
    removal, in the right shape, with wrong values. So units are removed for good, half of them and then all but one,
    and the result is compared with the same units gated, in float64, relative to the effect of the removal. All groups
    at once, in the model's own code; then, where that fails, in its exported operations; and where that fails too,
    halves of the groups by themselves, until those are found that cannot be removed.
    """
    if not graph.groups or graph.scattered:
        return graph
    inputs = Inputs.of(example)
    trial = _trial(model, inputs)
    if form == "eager":
        cannot = Frozen("", "the model's own code cannot leave a branch out", "")
        graph = drop(graph, {group.name: cannot for group in graph.groups if group.vanishes})
    names = [group.name for group in graph.groups]
    if form != "graph" and not graph.branches and trial.fails(graph, names) is None:
        return replace(graph, form="eager")
    if form != "eager":
        trial = replace(trial, exported=Exported(model, inputs, training=False))
        if trial.fails(graph, names) is None:
            return replace(graph, form="graph")
    proven: list[str] = []
    gone: dict[str, Frozen] = {}

    def sift(some: list[str]) -> None:
        others = {n: Frozen("", "not tried yet", "") for n in names if n not in some and n not in proven}
        why = trial.fails(drop(graph, others), [*proven, *some])
        if why is None:
            proven.extend(some)
        elif len(some) == 1:
            gone[some[0]] = Frozen("", why, "")
        else:
            sift(some[: len(some) // 2])
            sift(some[len(some) // 2 :])

    sift(names)
    return replace(drop(graph, gone), form="graph" if trial.exported is not None else "eager")


def holds(model: nn.Module, graph: Graph, keep: Keep, example: Any) -> str | None:
    """Does a model's own code run, and equally, with a Keep's units alone? What goes wrong, or None."""
    return _trial(model, Inputs.of(example)).differs(graph, keep)


@dataclass(frozen=True)
class _Trial:
    """A copy of a model on which removals are tried, with inputs that it gives numbers for."""

    model: nn.Module
    inputs: Inputs
    whole: list[Tensor]  # what the model gives for them with all its units
    precision: torch.dtype | None
    tolerance: float
    exported: Exported | None = None  # try in the graph form

    def run(self, model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        return outputs(model, self.inputs, weights, precision=self.precision)

    def fails(self, graph: Graph, names: Sequence[str]) -> str | None:
        """Remove one half of the units of some groups, another half, and all but one; say what goes wrong, or None."""
        for turn, when in ((0, ""), (1, ""), (2, "with one unit left, ")):
            why = self._fails(graph, names, turn, torch.Generator().manual_seed(13 + turn))
            if why is not None:
                return when + why
        return None

    def _fails(self, graph: Graph, names: Sequence[str], turn: int, generator: torch.Generator) -> str | None:
        units, alike = {}, Counter[int]()
        for group in graph.groups:
            if group.name not in names:
                units[group.name] = torch.ones(group.size, dtype=torch.bool)
                continue
            left = _how_many(group.size, alike[group.size], turn, group.vanishes)
            alike[group.size] += 1
            units[group.name] = torch.randperm(group.size, generator=generator) < left
        for _, both in graph.fine_axes():  # a finer unit can stay only under a base that stays
            under = spread(both.base, units).bool()
            if not (units[str(both.fine.group)] & under).any():
                units[str(both.fine.group)][under.nonzero()[0]] = True
        return self.differs(graph, Keep(graph, units).closed())

    def differs(self, graph: Graph, keep: Keep) -> str | None:
        """Remove what a Keep does not keep; say what goes wrong, or None."""
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        masked = mask_sites(graph, keep, tensors)
        try:
            if self.exported is None:
                small = self.run(slice_model(self.model, graph, keep))
            else:
                small = self.run(self.exported.shrunk(graph, keep, slice_model(self.model, graph, keep, form="graph")))
        except ModelError:
            raise
        except Exception as error:
            return f"removal does not run ({said(error)})"
        gated = self.run(self.model, masked)
        effect = max((_distance(a, b) for a, b in zip(self.whole, gated, strict=True)), default=0.0)
        scale = max((_distance(a, torch.zeros_like(a)) for a in gated), default=0.0)
        error_ = max_rel_diff(gated, small) * scale
        if not error_ <= self.tolerance * max(effect, 1e-6 * scale):
            return f"removal is not exact (off by {error_ / max(effect, 1e-300):.0e} of its effect)"
        return None


def _how_many(size: int, number: int, turn: int, vanishes: bool) -> int:
    """How many units of the n-th group of a size stay in a trial.

    About half of them, but of groups of one size not the same number: code that cuts in the middle is right by chance
    where both halves keep as many. What is kept whole the first time is not the second time.
    """
    if turn == 2:
        return 0 if vanishes else 1
    if vanishes:
        return (number + turn) % 2
    step = max(1, size // 4)
    first = 1 + (size // 2 - 1 + number * step) % size if size > 1 else 1
    return first if turn == 0 else size + 1 - first


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference between finite numbers."""
    difference = (_wide(a) - _wide(b)).abs()
    difference = difference[difference.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0


def _trial(model: nn.Module, inputs: Inputs) -> _Trial:
    """Copy a model for trials: in float64 where it can be, its constants varied where it stands that.

    Raises:
        ModelError: a copy is no copy, or the model gives no numbers on any inputs like the example's.
    """
    first_run(partial(outputs, copied(model), not_of=model), inputs, type(model).__name__)
    for varied in (True, False):
        for precision, tolerance in ((torch.float64, TRIAL_TOLERANCE), (None, TOLERANCE)):
            work = copied(model)
            work = work if precision is None else work.to(precision)
            work.requires_grad_(False)
            if varied:
                _calibrate(work)
            some = inputs if precision is None else inputs.to(precision)
            one, whole = _taken(partial(outputs, work, precision=precision), some, 7)
            if one is not None:
                return _Trial(work, one, whole, precision, tolerance)
    raise ModelError(
        f"The model {type(model).__name__} gives NaN, or no numbers at all, on inputs like the example's: nothing that "
        "is removed could be checked. Give example inputs that it gives numbers for."
    )


def _calibrate(model: nn.Module) -> None:
    """Give constant tensors (fresh batch norms, zero biases) values of their own: equal units would hide errors.

    What is nowhere negative stays so and does not grow: a variance, a probability, a logarithm's argument remains one.
    """
    generator = torch.Generator().manual_seed(11)
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        if bool((tensor == 0).all()):  # a zero weight would hide everything behind it
            tensor.data.copy_(noise - 0.5)
        elif tensor.dim() > 1 and bool((tensor != tensor.flatten()[0]).any()):
            continue
        elif bool((tensor >= 0).all()):
            tensor.data.mul_(0.5 + 0.5 * noise)
        else:
            tensor.data.add_((noise - 0.5) * tensor.abs().max())
