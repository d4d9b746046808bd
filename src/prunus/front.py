"""The two doors: `gate` lets a model in, `shrink` lets it out smaller."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from prunus.axes import Graph
from prunus.cost import Cost
from prunus.errors import ModelError
from prunus.gated import Gated
from prunus.gates import Estimator, HardConcrete
from prunus.graph import analyse
from prunus.landing import land
from prunus.measure import count_macs
from prunus.receipt import Receipt, build
from prunus.surgery import Inputs, check, prove, slice_model
from prunus.surgery.artefact import plan_of


def analyse_and_prove(
    model: nn.Module,
    example_inputs: Any,
    *,
    units: str = "structured",
    only: Iterable[str] = (),
    freeze: Iterable[str] = (),
) -> Graph:
    """Find what can shrink, and try every removal before it is promised; see `prunus.gate` for the arguments."""
    inputs = Inputs.of(example_inputs)
    graph = analyse(model, inputs.args, inputs.kwargs, units=units, only=only, freeze_names=freeze)
    graph = prove(model, graph, inputs)
    modelled = Cost(graph).dense()["macs"]
    fixed = count_macs(model, inputs.args, inputs.kwargs) - modelled
    if fixed < 0:
        raise ModelError(
            f"PyTorch counts {modelled + fixed:,} MACs in this model and Prunus {modelled:,}: please report this model."
        )
    return replace(graph, fixed_macs=fixed)


def gate(
    model: nn.Module,
    example_inputs: Any,
    *,
    units: str = "structured",
    only: Iterable[str] = (),
    freeze: Iterable[str] = (),
    keep: float | Mapping[str, float] = 0.5,
    rescale: bool = True,
    gates: HardConcrete | None = None,
    estimate: Estimator = "median",
    per_example: bool = False,
) -> Gated:
    """Put gates on everything in a model that can shrink exactly.

    Args:
        model: any module that `torch.export` takes; it will be trained in place, its state-dict keys stay.
        example_inputs: a tensor, a tuple of arguments, or a dict of named ones; the first dimension is the batch.
        units: "structured" (coupled groups, and input features of linear layers where these can be gated finer: the
            papers' placement), "groups" (coupled groups alone), or "weights" (one gate a weight).
        only, freeze: patterns of group or module names to gate alone, or not to gate.
        keep: initial keep probability, of all gates or by pattern.
        rescale: divide gated weights by it, so that the layer starts at the dense layer's scale.
        gates: the gates' distribution; hard concrete with the papers' constants by default.
        estimate: the test-time gate: "median", or "noiseless" as 001 eq. 13 has it.
        per_example: one sample of the gates for every example instead of one a mini-batch.

    >>> import torch
    >>> gated = gate(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(4, 8))
    >>> [(group.name, group.size, group.unit) for group in gated.graph.groups]
    [('0.inputs', 8, 'input'), ('0', 16, 'neuron')]
    """
    if isinstance(model, Gated):
        raise ModelError("This model carries gates already; gate the model inside it.")
    graph = analyse_and_prove(model, example_inputs, units=units, only=only, freeze=freeze)
    return Gated(model, graph, keep=keep, rescale=rescale, gates=gates, estimate=estimate, per_example=per_example)


def shrink(
    gated: Gated,
    example_inputs: Any,
    *,
    evaluate: Callable[[nn.Module], float] | None = None,
    metric: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    batches: Sequence[int] = (1, 64),
    seconds: float = 0.08,
) -> tuple[nn.Module, Receipt]:
    """Remove every unit whose gate is closed and hand back a plain, smaller, equal model with its receipt.

    If the gates still cost more than their budget, the landing closes what is missing first. The result is compared
    with the gated model on the example inputs and on random ones, and refused if it differs.

    Args:
        gated: the gated model.
        example_inputs: as for `gate`.
        evaluate: gives a model's metric on the test set; the receipt then holds it for the gated and the shrunk model.
        metric: what is known of the metric already: its `name`, and the `dense` model's value.
        run: what the receipt says of the run (seed, epochs, …).
        batches: batch sizes at which latency is measured.
        seconds: time spent on each measurement of latency.

    Raises:
        InexactSurgery: the shrunk model does not equal the gated one.
        RunFailed: the budget cannot be met.
    """
    inputs = Inputs.of(example_inputs)
    land(gated)
    keep = gated.keep()
    weights = gated.fold()
    small = slice_model(gated.model, gated.graph, keep, weights)
    exactness = check(gated.model, weights, small, inputs)
    small.prunus_plan = plan_of(gated.graph, keep)  # type: ignore[assignment]
    values: dict[str, Any] | None = None
    if evaluate is not None:
        values = {"name": "metric", "dense": None, **(metric or {})}
        values |= {"gated": evaluate(gated), "shrunk": evaluate(small)}
    receipt = build(gated, small, keep, exactness, inputs, batches=batches, seconds=seconds, metric=values, run=run)
    return small, receipt
