"""The two doors: `gate` lets a model in, `shrink` lets it out smaller."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from prunus.axes import Graph, Keep
from prunus.cost import Cost
from prunus.errors import InexactSurgery, ModelError, nearest, warn
from prunus.gated import Gated
from prunus.gates import Estimator, HardConcrete
from prunus.graph import analyse
from prunus.landing import land
from prunus.measure import batch_size, total_macs
from prunus.receipt import Receipt, build
from prunus.surgery import Exported, Inputs, check, first_run, holds, outputs, prove, slice_model
from prunus.surgery.artefact import plan_of

FORMS = ("auto", "eager", "graph")
_GATED: "WeakSet[nn.Module]" = WeakSet()  # models whose weights were rescaled when they were gated


def analyse_and_prove(
    model: nn.Module,
    example_inputs: Any,
    *,
    units: str | Iterable[str] = "structured",
    only: str | Iterable[str] = (),
    freeze: str | Iterable[str] = (),
    form: str = "auto",
) -> Graph:
    """Find what can shrink, and try every removal before it is promised; see `prunus.gate` for the arguments.

    A model on the meta device has no numbers to try with: its graph says so by its form.
    """
    inputs = Inputs.of(example_inputs)
    _one_of("form", form)
    only, freeze = _patterns("only", only), _patterns("freeze", freeze)
    if isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters()):
        graph = analyse(model, inputs.args, inputs.kwargs, units=units, only=only, freeze_names=freeze)
        return replace(graph, form="unproved")
    _check(model, inputs)
    graph = analyse(model, inputs.args, inputs.kwargs, units=units, only=only, freeze_names=freeze)
    graph = prove(model, graph, inputs, form)
    modelled = Cost(replace(graph, fixed_macs=0.0)).whole(torch.ones(sum(graph.sizes.values())))[1].item()
    fixed = total_macs(model, inputs.args, inputs.kwargs) / batch_size(inputs.args, inputs.kwargs) - modelled
    if fixed < -0.5:
        raise ModelError(
            f"PyTorch counts {modelled + fixed:,.0f} MACs in this model and Prunus {modelled:,.0f}: please report it."
        )
    fixed = max(0.0, fixed)
    return replace(graph, fixed_macs=fixed)


def _one_of(name: str, form: str) -> None:
    if form not in FORMS:
        raise ModelError(f"{name}={form!r} is no form of surgery; {nearest(str(form), FORMS)}.")


def _patterns(name: str, given: Any) -> tuple[str, ...]:
    patterns = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ModelError(f"{name} holds {pattern!r}; write names or patterns of groups or modules, such as 'fc*'.")
    return patterns


def _check(model: nn.Module, inputs: Inputs) -> None:
    """Refuse early, and by its name, what nothing can be done with."""
    if not isinstance(model, nn.Module):
        return  # the analysis says so
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(f"The model is wrapped in {type(model).__name__}: gate the module in it, and wrap the result.")
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        raise ModelError("The model has lazy layers that were never run: run it once on the example inputs first.")
    for leaf in tree_leaves((inputs.args, dict(inputs.kwargs))):
        if isinstance(leaf, Tensor) and leaf.numel() == 0:
            raise ModelError(f"An example input is empty, of shape {tuple(leaf.shape)}: give one example at least.")
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise ModelError(f"The weight {name} holds NaN or infinity: start from weights that are numbers.")
    first_run(partial(outputs, model), inputs, type(model).__name__)


def gate(
    model: nn.Module,
    example_inputs: Any,
    *,
    units: str | Iterable[str] = "structured",
    only: str | Iterable[str] = (),
    freeze: str | Iterable[str] = (),
    form: str = "auto",
    keep: float | Mapping[str, float] = 0.5,
    rescale: bool = True,
    gates: HardConcrete | None = None,
    estimate: Estimator = "median",
    per_example: bool = False,
    round_to: int = 1,
) -> Gated:
    """Put gates on everything in a model that can shrink exactly.

    What counts is the model in evaluation mode: layers that run in training alone keep their size, and training the
    shrunk model on needs a forward pass without them.

    Args:
        model: any module that `torch.export` takes; it will be trained in place, its state-dict keys stay.
        example_inputs: a tensor, a tuple of arguments, or a dict of named ones; the first dimension is the batch.
        units: kinds of units, one word or several: "structured" (maps, neurons, features, whole attention heads, and
            input features of linear layers where these can be gated finer: the papers' placement), "groups" (the same
            without input features), any of "maps", "neurons", "features", "heads", "inputs", "head_dims", "width" and
            "branches"; or, by itself, "weights" (one gate a weight), blocks such as "16x16" (one gate for so many rows
            and columns of a weight seen as outputs x (inputs x kernel); smaller ones at its edges are groups of their
            own), or "2:4" (one gate a weight; of every four in a row at most two are open, in training as in what is
            deployed). These three leave exact zeros, not smaller tensors.
        only, freeze: patterns of group or module names to gate alone, or not to gate.
        form: "eager" gates what the model's own code can run without, "graph" what its exported operations can, "auto"
            (the default) takes the model's own code where that runs smaller and comes out equal, else its operations.
        keep: initial keep probability in the papers' sense, of all gates or by pattern: a gate's location is its logit.
            Stretching opens more gates than that; P(z != 0) starts at 0.83 for 0.5.
        rescale: divide gated weights by it, so that the layer starts at the dense layer's scale.
        gates: the gates' distribution; hard concrete with the papers' constants by default.
        estimate: the test-time gate: "median", or "noiseless" as 001 eq. 13 has it.
        per_example: one sample of the gates for every example instead of one a mini-batch.
        round_to: the shrunk model's widths (numbers of maps, neurons and inputs of every group) are multiples of it, as
            hardware likes them: 8, say. A group whose units all stay, or that is smaller than it, stays whole. Rounding
            is up, so that units with closed gates stay to make up the number; budgets and landing count them.

    >>> import torch
    >>> gated = gate(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(4, 8))
    >>> [(group.name, group.size, group.unit) for group in gated.graph.groups]
    [('0.inputs', 8, 'input'), ('0', 16, 'neuron')]
    """
    if isinstance(model, Gated):
        raise ModelError("This model carries gates already; gate the model inside it.")
    graph = analyse_and_prove(model, example_inputs, units=units, only=only, freeze=freeze, form=form)
    if graph.form == "unproved":
        raise ModelError("The model lies on the meta device, where it has no numbers to train: give it weights first.")
    if not graph.groups:
        why = "; ".join(f"{f.axis}: {f.operation}" for f in graph.frozen[:3])
        warn(f"Nothing in this model carries gates, so that nothing will shrink ({why or 'no layer is understood'}).")
    if rescale:
        if model in _GATED:
            warn("This model was gated before; its weights, divided by the keep probability then, are divided again.")
        _GATED.add(model)
    gated = Gated(
        model,
        graph,
        keep=keep,
        rescale=rescale,
        gates=gates,
        estimate=estimate,
        per_example=per_example,
        round_to=round_to,
    )
    gated.form = form
    return gated


def shrink(
    gated: Gated,
    example_inputs: Any,
    *,
    form: str | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    metric: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    batches: int | Sequence[int] = (1, 64),
    seconds: float = 0.08,
) -> tuple[nn.Module, Receipt]:
    """Remove every unit whose gate is closed and hand back a plain, smaller, equal model with its receipt.

    If the gates still cost more than their budget, the landing closes what is missing first. The result is compared
    with the gated model on the example inputs and on random ones, and refused if it differs.

    Args:
        gated: the gated model.
        example_inputs: as for `gate`.
        form: "eager": the user's own class with smaller parameters; "graph": its exported operations with their sizes
            set anew, for what eager code cannot run smaller; "auto": eager where that runs and is equal, else graph.
            By default what `gate` was asked for.
        evaluate: gives a model's metric on the test set; the receipt then holds it for the gated and the shrunk model.
        metric: what is known of the metric already: its `name`, and the `dense` model's value.
        run: what the receipt says of the run (seed, epochs, …).
        batches: batch sizes at which latency is measured.
        seconds: time spent on each measurement of latency.

    Raises:
        InexactSurgery: the shrunk model does not equal the gated one.
        RunFailed: the budget cannot be met.
    """
    if not isinstance(gated, Gated):
        raise ModelError(f"prunus.shrink takes what prunus.gate returned; this is a {type(gated).__name__}.")
    inputs = Inputs.of(example_inputs)
    batches = (batches,) if isinstance(batches, int) else tuple(batches)
    land(gated)
    form = gated.form if form is None else form
    _one_of("form", form)
    keep = gated.keep()
    weights = gated.fold()
    small, exactness, form = _smaller(gated, keep, weights, inputs, form)
    small.prunus_plan = plan_of(gated.graph, keep, form, inputs)  # type: ignore[assignment]
    values: dict[str, Any] | None = None
    if evaluate is not None:
        values = {"name": "metric", "dense": None, **(metric or {})}
        values |= {"gated": evaluate(gated), "shrunk": evaluate(small)}
    receipt = build(
        gated, small, keep, exactness, inputs, batches=batches, seconds=seconds, metric=values, run=run, form=form
    )
    return small, receipt


def _smaller(
    gated: Gated, keep: Keep, weights: Mapping[str, Tensor], inputs: Inputs, form: str
) -> tuple[nn.Module, dict[str, Any], str]:
    """The smaller model, how equal it is, and the form that it has."""
    model, graph = gated.model, gated.graph
    why = None
    if form != "graph":
        proven = graph.form == "eager" or not graph.groups or graph.scattered
        cut = "it cannot leave a branch out" if graph.closed_branches(keep) else None
        why = cut or (None if proven else holds(model, graph, keep, inputs))
        if why is None:
            small = slice_model(model, graph, keep, weights)
            try:
                return small, check(model, weights, small, inputs), "eager"
            except InexactSurgery:
                if form == "eager" or graph.scattered:
                    raise
        elif form == "eager":
            raise InexactSurgery(
                f"The model's own code cannot run with these units alone ({why}): shrink it with form='graph', or gate "
                "it with form='eager', which leaves such units alone."
            )
    tensors = slice_model(model, graph, keep, weights, form="graph")
    program = Exported(model, inputs).shrunk(graph, keep, tensors)
    return program, check(model, weights, program, inputs), "graph"
