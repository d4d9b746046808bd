"""Methods: what drives the weights to the budget."""

from prunus.methods.l0 import Penalty

__all__ = ["Penalty"]
