"""`prunus inspect`: what can shrink in a model, what it would save, and what is frozen and why."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prunus import data as datasets
from prunus.axes import Axis, Frozen, Graph
from prunus.cli import speech
from prunus.cli.sources import model_and_inputs
from prunus.cli.tables import plain_table
from prunus.cost import MEASURES, Cost
from prunus.errors import ModelError, nearest, several
from prunus.front import analyse_and_prove
from prunus.openness import Openness

SHOWN = ("params", "macs")
SHOWN_MEMBERS = 6
FORMS = {
    "eager": "Every removal was tried: the model's own code runs smaller, and comes out equal.",
    "graph": "Every removal was tried: the model's exported operations run smaller, and come out equal; its own code "
    "does not take all of them.",
    "unproved": "The model has no numbers (meta device): removals were not tried.",
}


@dataclass(frozen=True)
class Shares:
    """Parts of the dense cost, by measure: what goes with each group, with all of them, and what can be reached."""

    groups: dict[str, dict[str, float]]
    shrinkable: dict[str, float]
    reachable: dict[str, float]


def shares(graph: Graph, lowest: torch.Tensor) -> Shares:
    """Evaluate the cost with each group closed, with all closed, and at the `lowest` openness that surgery can do."""
    cost = Cost(graph)
    rows = [torch.ones(cost.units, dtype=torch.float64)]
    for group in graph.groups:
        row = rows[0].clone()
        row[cost.offsets[group.name] : cost.offsets[group.name] + group.size] = 0
        rows.append(row)
    rows += [torch.zeros_like(rows[0]), lowest.to(torch.float64)]
    costs = cost.whole(torch.stack(rows))
    left = (costs / costs[0].clamp(min=1)).tolist()
    named = [{what: value for what, value in zip(MEASURES, row, strict=True) if what in SHOWN} for row in left]
    gone = [{what: 1 - value for what, value in row.items()} for row in named]
    return Shares({group.name: row for group, row in zip(graph.groups, gone[1:-2], strict=True)}, gone[-2], named[-1])


@dataclass(frozen=True)
class Asked:
    """What the command was asked for."""

    model: str
    group: str | None = None
    data: str | None = None
    inputs: str | None = None
    units: str = "structured"
    only: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    form: str = "auto"
    as_json: bool = False


def inspect(asked: Asked) -> None:
    """Run the command."""
    loaded = datasets.load(asked.data) if asked.data else None
    model, example = model_and_inputs(asked.model, 0, loaded, asked.inputs)
    graph = analyse_and_prove(model, example, units=asked.units, only=asked.only, freeze=asked.freeze, form=asked.form)
    openness = Openness(graph)
    closed = openness.kept(openness.key(torch.full((sum(graph.sizes.values()),), -1.0)), 0.0)
    found = shares(graph, closed)
    name = _meant(graph, asked.group) if asked.group is not None else None
    console = speech.out()
    if asked.as_json:
        listed = described(graph, found) if asked.group is None else one_described(graph, found, asked.group, name)
        print(json.dumps(listed, indent=1))  # noqa: T201 (what was asked for, and nothing else)
        return
    if asked.group is not None:
        explain(graph, found, asked.group, name, console)
        return
    dense = Cost(graph).dense()
    text = f"{asked.model}: {dense['params']:,} parameters, {dense['macs']:,} MACs an example"
    console.print(Text(text), soft_wrap=True)
    console.print()
    if graph.groups:
        console.print(_groups(graph, found))
        console.print()
        console.print(
            f"shrinkable: {_floor(found.shrinkable['params'])} of the parameters and "
            f"{_floor(found.shrinkable['macs'])} of the MACs; the smallest budgets that can be reached: "
            f"params={_percent(found.reachable['params'])}, macs={_percent(found.reachable['macs'])}"
        )
        console.print(FORMS[graph.form])
    else:
        console.print("Nothing in this model can shrink exactly.")
    if graph.frozen:
        console.print()
        console.print(_frozen(graph))


def _meant(graph: Graph, name: str) -> str | None:
    """The group that a name means: its own, or that of one of its axes, tensors or modules; None if it is frozen.

    Raises:
        ModelError: there is no such thing in the model.
    """
    if name in graph.sizes:
        return name
    for group in graph.groups:
        for axis in group.members:
            if name in (str(axis), axis.tensor, axis.tensor.rpartition(".")[0]):
                return group.name
    if _frozen_by(graph, name):
        return None
    known = [*graph.sizes, *(axis for f in graph.frozen for axis in (f.axis, *f.also))]
    raise ModelError(f"There is no group and no frozen axis {name!r}; {nearest(name, known)}.")


def _frozen_by(graph: Graph, name: str) -> list[Frozen]:
    """The frozen axes that a name means."""
    found = []
    for frozen in graph.frozen:
        for axis in (frozen.axis, *frozen.also):
            tensor = axis.rpartition("[")[0]
            if name in (axis, tensor, tensor.rpartition(".")[0]):
                found.append(frozen)
                break
    return found


def one_described(graph: Graph, found: Shares, asked: str, name: str | None) -> dict[str, Any]:
    """One group, with the operations that couple it, and the frozen axes of that name, as JSON."""
    groups = [group for group in described(graph, found)["groups"] if group["name"] == name]
    for group in groups:
        group["chain"] = [asdict(step) for step in graph.group(group["name"]).chain]
    frozen = [{**asdict(f), "also": list(f.also)} for f in _frozen_by(graph, asked)]
    return {"groups": groups, "frozen": frozen}


def explain(graph: Graph, found: Shares, asked: str, name: str | None, console: Console) -> None:
    """Print why a group exists, or why an axis is frozen."""
    frozen = _frozen_by(graph, asked)
    if name is not None:
        if name != asked:
            console.print(Text(f"{asked} shrinks together with {name}."))
            console.print()
        _explain_group(graph, found, name, console)
    for one in frozen:
        console.print(_frozen(replace(graph, frozen=(one,))))
        if one.also:
            console.print(Text("frozen with it: " + ", ".join(one.also)), soft_wrap=True)


def _explain_group(graph: Graph, found: Shares, name: str, console: Console) -> None:
    group, share = graph.group(name), found.groups[name]
    units = several(group.unit, group.size)
    parts = f"{share['params']:.1%} of the parameters, {share['macs']:.1%} of the MACs"
    console.print(Text(f"{name}: {group.size:,} {units}, {parts}"))
    console.print()
    table = plain_table("", "operation", "in")
    for column in table.columns:
        column.justify = "left"
    for step in group.chain:
        table.add_row(step.role, Text(_bare(step.operation)), Text(step.module or "the model"))
    if group.chain:
        console.print(table)
        console.print()
    console.print(Text("shrinks together: " + ", ".join(map(_axis, group.members))), soft_wrap=True)
    console.print(Text("gates act at: " + (", ".join(map(_axis, group.sites)) or "every weight")), soft_wrap=True)


def _bare(operation: str) -> str:
    """An operation's name without namespace and overload: aten.conv2d.default is conv2d."""
    parts = operation.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 2 else operation


def _axis(axis: Axis) -> str:
    return str(axis) if axis.dim >= 0 else axis.tensor


def described(graph: Graph, found: Shares) -> dict[str, Any]:
    """The same as JSON; the keys are documented and stable."""
    return {
        "groups": [
            {
                "name": group.name,
                "size": group.size,
                "unit": group.unit,
                "members": [_axis(axis) for axis in group.members],
                "share": found.groups[group.name],
            }
            for group in graph.groups
        ],
        "frozen": [{"axis": f.axis, "operation": f.operation, "module": f.module} for f in graph.frozen],
        "shrinkable": found.shrinkable,
    }


def _groups(graph: Graph, found: Shares) -> Table:
    table = plain_table("group", "units", "", "params", "MACs", "shrinks together")
    table.columns[2].justify = "left"
    table.columns[5].justify = "left"
    table.columns[5].no_wrap = False
    alone = {name: layout for layout in graph.scattered.values() for name in layout.groups}
    for group in graph.groups:
        share = found.groups[group.name]
        members = ", ".join(map(_axis, group.members[:SHOWN_MEMBERS])) or str(alone[group.name])
        if len(group.members) > SHOWN_MEMBERS:
            members += f" and {len(group.members) - SHOWN_MEMBERS} more"
        table.add_row(
            Text(group.name), f"{group.size:,}", several(group.unit, group.size),
            f"{share['params']:.1%}", f"{share['macs']:.1%}", Text(members),
        )  # fmt: skip
    return table


def _frozen(graph: Graph) -> Table:
    table = plain_table("frozen", "because of", "in")
    for column in table.columns:
        column.justify = "left"
        column.no_wrap = False
    for frozen in graph.frozen:
        why = frozen.operation + (f" (--units {frozen.units} gates it)" if frozen.units else "")
        axis = frozen.axis + (f" and {len(frozen.also)} more" if frozen.also else "")
        table.add_row(Text(axis), Text(why), Text(frozen.module or "the model"))
    return table


def _floor(value: float) -> str:
    """A share rounded down, so that 100% is all of it."""
    return f"{int(value * 1000) / 10:.1f}%"


def _percent(value: float) -> str:
    """A share rounded up, so that it can be written as a budget."""
    for digits in (1, 2, 3, 4):
        rounded = -(-value * 100 * 10**digits // 1) / 10**digits
        if rounded <= 100 * value * 1.1 or digits == 4:
            return f"{rounded:.{digits}f}%"
    return f"{value:%}"
