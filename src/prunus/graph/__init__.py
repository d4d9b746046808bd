"""Graph analysis: from a model and example inputs to the groups that can shrink, exactly or not at all."""

from prunus.graph.analysis import Analysis
from prunus.graph.branches import Branch, branches
from prunus.graph.choose import drop, matches
from prunus.graph.couple import analyse, named_groups
from prunus.graph.kinds import UNITS
from prunus.graph.resolve import resolve
from prunus.graph.trace import InputKind, Node, OutputKind, Ref, Traced, stored_tensors, trace
from prunus.graph.unify import Var, find
from prunus.graph.walk import walk

__all__ = [
    "UNITS",
    "Analysis",
    "Branch",
    "InputKind",
    "Node",
    "OutputKind",
    "Ref",
    "Traced",
    "Var",
    "analyse",
    "branches",
    "drop",
    "find",
    "matches",
    "named_groups",
    "resolve",
    "stored_tensors",
    "trace",
    "walk",
]
