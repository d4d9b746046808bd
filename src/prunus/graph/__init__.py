"""Graph analysis: from a model and example inputs to the groups that can shrink, exactly or not at all."""

from prunus.graph.couple import UNITS, analyse, drop, matches
from prunus.graph.trace import stored_tensors

__all__ = ["UNITS", "analyse", "drop", "matches", "stored_tensors"]
