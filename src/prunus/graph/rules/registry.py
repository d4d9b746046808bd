"""Where rules are kept: one an operation, by its name in PyTorch's own namespace.

An operation without a rule freezes every axis it touches and is reported by name. Rules are written for PyTorch's
own operations as `torch.export` prints them, so a user's custom operation never matches one by accident.
"""

from typing import Any

from prunus.graph.analysis import Analysis, Dims, Rule
from prunus.graph.trace import Node

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Any:
    """Register a rule for operations of the `aten` namespace, named without overload and in-place mark."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def unknown(a: Analysis, node: Node) -> list[Dims]:
    """No rule fits: freeze everything that the operation touches; what it multiplies is a fixed cost."""
    a.freeze_arguments(node)
    a.fixed_macs += node.macs
    return a.fresh(node, a.reason(node))
