"""`prunus inspect`: what can shrink in a model, what it would save, and what is frozen and why."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from prunus import data as datasets
from prunus.axes import Graph
from prunus.cli import speech
from prunus.cli.sources import model_and_inputs
from prunus.cli.tables import plain_table
from prunus.cost import MEASURES, Cost
from prunus.front import analyse_and_prove
from prunus.gated import Gated

SHOWN = ("params", "macs")


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


def inspect(name: str, data: str | None, inputs: str | None, units: str, as_json: bool) -> None:
    """Run the command."""
    loaded = datasets.load(data) if data else None
    model, example = model_and_inputs(name, 0, loaded, inputs)
    graph = analyse_and_prove(model, example, units=units)
    gated = Gated(model, graph, rescale=False)
    found = shares(graph, gated.open_units(torch.full((gated.units,), gated.gates.low)))
    if as_json:
        print(json.dumps(described(graph, found), indent=1))  # noqa: T201 (what was asked for, and nothing else)
        return
    console = speech.out()
    dense = Cost(graph).dense()
    console.print(Text(f"{name}: {dense['params']:,} parameters, {dense['macs']:,} MACs an example"), soft_wrap=True)
    console.print()
    if graph.groups:
        console.print(_groups(graph, found))
        console.print()
        console.print(
            f"shrinkable: {_floor(found.shrinkable['params'])} of the parameters and "
            f"{_floor(found.shrinkable['macs'])} of the MACs; the smallest budgets that can be reached: "
            f"params={_percent(found.reachable['params'])}, macs={_percent(found.reachable['macs'])}"
        )
    else:
        console.print("Nothing in this model can shrink exactly.")
    if graph.frozen:
        console.print()
        console.print(_frozen(graph))


def described(graph: Graph, found: Shares) -> dict[str, Any]:
    """The same as JSON; the keys are documented and stable."""
    return {
        "groups": [
            {
                "name": group.name,
                "size": group.size,
                "unit": group.unit,
                "members": [str(axis) for axis in group.members],
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
        members = ", ".join(str(axis) for axis in group.members) or str(alone[group.name])
        table.add_row(
            Text(group.name), f"{group.size:,}", f"{group.unit}s" if group.size != 1 else group.unit,
            f"{share['params']:.1%}", f"{share['macs']:.1%}", Text(members),
        )  # fmt: skip
    return table


def _frozen(graph: Graph) -> Table:
    table = plain_table("frozen", "because of", "in")
    for column in table.columns:
        column.justify = "left"
        column.no_wrap = False
    for frozen in graph.frozen:
        table.add_row(Text(frozen.axis), Text(frozen.operation), Text(frozen.module or "the model"))
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
