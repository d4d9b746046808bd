"""One rule an operation: which axes of its inputs and outputs are the same, and which weights make or read them.

`layers` holds those with weights, `products` those that multiply what was computed (attention, matrix products),
`elementwise` those that treat every number or position by itself, `shapes` those that regroup, cut and join.
"""

from prunus.graph.analysis import Analysis, Dims
from prunus.graph.rules import elementwise, layers, products, shapes  # noqa: F401 (each fills the table)
from prunus.graph.rules.registry import RULES, unknown
from prunus.graph.trace import Node

__all__ = ["RULES", "apply"]


def apply(a: Analysis, node: Node) -> list[Dims]:
    """Apply the rule of an operation; without one, freeze what it touches."""
    if node.op == "getitem":
        source = node.args[0].name
        if source in a.views:  # a part of a weight
            a.views[node.name], a.parts[node.name] = a.views[source], a.parts[source]
        return [a.dims[source][node.args[1]]]
    if node.op == "region":  # what comes out of a `with torch.no_grad()`; what stands in it was walked over
        return [a.of(ref) for ref in node.args]
    if all(shape is None for shape in node.shapes):  # a size, a check: no tensor comes out of it
        return a.fresh(node)
    found = RULES.get(node.base) if node.op.startswith("aten.") else None
    if found is None and node.pointwise and node.op.startswith("aten."):
        found = elementwise.pointwise  # PyTorch itself declares these elementwise
    if found is None:
        return unknown(a, node)
    return found(a, node)
